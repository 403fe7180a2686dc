// The gradient of a bias: out[j] = sum_i x[i][j], in fp32.
//
// Blocks take kCols columns of a chunk of rows, each warp every kWarps-th row, with kLoads rows on their way; then the
// warps' sums meet in shared memory. The sums of several chunks are rows themselves, which a second launch sums in a
// fixed order.
#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/launch.h"
#include "fused_dense/params.h"
#include "tile/any_vec.cuh"
#include "tile/vec.cuh"

namespace flash::fused_dense {

template <typename T_, int kVec_>
struct SumConfig {
  using T = T_;
  static constexpr int kVec = kVec_;  // elements of an access
  static constexpr int kWarps = 8;
  static constexpr int kLoads = 8;
  static constexpr int kCols = 32 * kVec;
};

template <typename Config>
__global__ __launch_bounds__(32 * Config::kWarps) void sum_rows_kernel(const __grid_constant__ SumRowsParams p) {
  constexpr int kVec = Config::kVec, kLoads = Config::kLoads, kWarps = Config::kWarps;
  using T = typename Config::T;
  __shared__ float sums[kWarps][Config::kCols + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_col = int64_t{blockIdx.x} * Config::kCols, col = first_col + lane * kVec;
  const int64_t first = blockIdx.y * p.chunk_rows, last = min(first + p.chunk_rows, p.rows);
  float sum[kVec] = {};
  if (col < p.cols) {
    const T* x = static_cast<const T*>(p.x.data) + col;
    for (int64_t row = first + warp; row < last; row += kLoads * kWarps) {
      Vec<T, kVec> vecs[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (row + i * kWarps < last) vecs[i] = load<kVec>(x + (row + i * kWarps) * p.x.stride);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float wide[kVec];
        widen(wide, vecs[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[j] += row + i * kWarps < last ? wide[j] : 0.f;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) sums[warp][lane * kVec + j] = sum[j];
  __syncthreads();
  for (int j = threadIdx.x; j < Config::kCols && first_col + j < p.cols; j += 32 * kWarps) {
    float total[1] = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total[0] += sums[i][j];
    store_any<1>(p.out, blockIdx.y * p.cols + first_col + j, p.out_dtype, total);
  }
}

template <typename Config>
void run_sum_rows(const SumRowsParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.cols, Config::kCols)),
                  static_cast<unsigned>(ceil_div(p.rows, static_cast<int>(p.chunk_rows))));
  launch<sum_rows_kernel<Config>>({grid, dim3(32 * Config::kWarps)}, p, stream);
}

}  // namespace flash::fused_dense
