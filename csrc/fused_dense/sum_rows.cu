// The choice of instance, and of chunks.
#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/dispatch.h"
#include "fused_dense/launch.h"
#include "fused_dense/sum_rows.cuh"

namespace flash::fused_dense {
namespace {

void sum_chunks(const SumRowsParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    using T = element_t<kDType>;
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 && p.x.stride % kWide == 0 && p.cols % kWide == 0;
    dispatch_flags([&](auto kIsWide) { run_sum_rows<SumConfig<T, kIsWide ? kWide : 1>>(p, stream); }, wide);
  });
}

}  // namespace

// Enough blocks for every multiprocessor, and enough rows for every warp of a block.
int64_t sum_rows_chunks(int64_t rows, int64_t cols) {
  const int64_t blocks = 4 * num_multiprocessors(current_device());
  return std::clamp<int64_t>(ceil_div(blocks, static_cast<int>(ceil_div(cols, 256))), 1, ceil_div(rows, 64));
}

void sum_rows(SumRowsParams p, float* partial, int64_t chunks, cudaStream_t stream) {
  p.chunk_rows = ceil_div(p.rows, static_cast<int>(chunks));
  if (chunks == 1) return sum_chunks(p, stream);
  auto first = p;
  first.out = partial;
  first.out_dtype = DType::kFloat32;
  sum_chunks(first, stream);
  const int64_t parts = ceil_div(p.rows, static_cast<int>(p.chunk_rows));
  p.x = {partial, p.cols};
  p.dtype = DType::kFloat32;
  p.rows = p.chunk_rows = parts;
  sum_chunks(p, stream);
}

}  // namespace flash::fused_dense
