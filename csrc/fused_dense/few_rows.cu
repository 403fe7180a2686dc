// The choice of instance.
#include <cstdint>

#include "common/device.h"
#include "common/dispatch.h"
#include "fused_dense/few_rows.cuh"
#include "fused_dense/launch.h"

namespace flash::fused_dense {
namespace {

constexpr int64_t kMaxFeatures = 1 << 30;

bool is_aligned(const Rows& rows) { return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0; }

// The fewer blocks there are, the more warps must each have to keep all multiprocessors busy.
int warps_of_block(int64_t out_features) {
  const int64_t warps = 8 * 32 * num_multiprocessors(current_device());  // wanted in all, times features of a block
  return 4 * out_features >= warps ? 4 : 8 * out_features >= warps ? 8 : 16;
}

}  // namespace

bool few_rows(const FewRowsParams& p, cudaStream_t stream) {
  if (p.rows > kFewRows || p.in_features > kMaxFeatures || p.out_features > kMaxFeatures) return false;
  if (p.in_features % 8 != 0 || !is_aligned(p.x) || !is_aligned(p.weight)) return false;
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    dispatch_value<4, 8, 16>(warps_of_block(p.out_features),
                             [&](auto kWarps) { run_few_rows<FewRowsConfig<element_t<kDType>, kWarps>>(p, stream); });
  });
  return true;
}

}  // namespace flash::fused_dense
