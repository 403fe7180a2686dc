// Chooses the instance and the size of the chunks.
#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/dispatch.h"
#include "fused_dense/launch.h"
#include "fused_dense/sum_rows.cuh"

namespace flash::fused_dense {
namespace {

// Returns whether every row starts at an aligned address.
bool are_aligned(const Rows& rows, int elements) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % elements == 0;
}

bool is_wide(const SumRowsParams& p) { return are_aligned(p.x, 8) && are_aligned(p.kept, 8) && p.cols % 8 == 0; }

}  // namespace

// Chooses as many chunks as fill the device with blocks at one time, but leaves enough rows for every warp of a block.
SumRowsScratch plan_sum_rows(SumRowsParams& p) {
  constexpr int kLeastRows = 4 * kSumWarps;
  const int64_t strips = ceil_div(p.cols, is_wide(p) ? 256 : 32);
  const int64_t blocks = kSumBlocks * num_multiprocessors(current_device());
  const int64_t wanted = std::clamp<int64_t>(blocks / strips, 1, ceil_div(p.rows, kLeastRows));
  p.chunk_rows = ceil_div(p.rows, static_cast<int>(wanted));
  const int64_t chunks = ceil_div(p.rows, static_cast<int>(p.chunk_rows));
  if (chunks == 1) return {};
  return {.partial = chunks * p.cols, .arrivals = strips};
}

void sum_rows(const SumRowsParams& p, cudaStream_t stream) {
  using enum DType;
  using enum Activation;
  const auto run = [&](auto kDType, auto kIsWide) {
    constexpr int kVec = kIsWide ? 8 : 1;
    if (p.kept.data == nullptr) return run_sum_rows<SumConfig<kDType, kVec>>(p, stream);
    dispatch_value<kGelu, kRelu, kSquaredRelu, kSilu>(
        p.activation, [&](auto kActivation) { run_sum_rows<GradientSumConfig<kDType, kVec, kActivation>>(p, stream); });
  };
  dispatch_value<kFloat16, kBFloat16>(
      p.dtype, [&](auto kDType) { dispatch_flags([&](auto kIsWide) { run(kDType, kIsWide); }, is_wide(p)); });
}

}  // namespace flash::fused_dense
