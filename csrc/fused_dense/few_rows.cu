// Chooses the instance, and decides which calls have one.
#include <algorithm>
#include <cstdint>

#include "common/dispatch.h"
#include "fused_dense/few_rows.cuh"
#include "fused_dense/launch.h"

namespace flash::fused_dense {
namespace {

constexpr int64_t kMaxFeatures = 1 << 30;

bool is_aligned(const Rows& rows) { return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0; }

}  // namespace

bool few_rows(const FewRowsParams& p, cudaStream_t stream) {
  if (p.rows > kFewRows || std::max(p.in_features, p.out_features) > kMaxFeatures) return false;
  if (p.in_features % 8 != 0 || !is_aligned(p.x) || !is_aligned(p.weight)) return false;
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    dispatch_flags([&](auto kGated) { run_few_rows<element_t<kDType>, kGated>(p, stream); }, p.gated);
  });
  return true;
}

}  // namespace flash::fused_dense
