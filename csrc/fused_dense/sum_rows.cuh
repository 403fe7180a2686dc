// The gradient of a bias: out[j] = sum_i x[i][j], in fp32. If an activation follows the bias, x is at first the
// gradient of the output of the activation. It is then replaced by the gradient of the input of the activation, rounded
// to its type, and that is summed:
//
//   x = x act'(kept)
//
// A block takes kCols columns of a chunk of rows. Each of its warps takes every kWarps-th row, with kRows rows in
// flight; the sums of the warps meet in shared memory. The sums of several chunks are rows themselves, and a second
// launch adds them in a fixed order.
//
// Warps that read a long piece of one row side by side, instead of different rows, would be slower.
#pragma once

#include <cstdint>

#include "common/dispatch.h"
#include "common/divmod.h"
#include "common/launch.h"
#include "fused_dense/activation.cuh"
#include "fused_dense/params.h"
#include "ptx/sync.cuh"
#include "tile/any_vec.cuh"
#include "tile/vec.cuh"

namespace flash::fused_dense {

constexpr int kSumBlocks = 4;  // thread blocks per SM at a time: 64 registers per thread allow that

template <DType kDType_, int kVec_>
struct SumConfig {
  static constexpr DType kDType = kDType_;
  static constexpr int kVec = kVec_;  // elements per access
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRows = 8;  // rows of a warp in flight
  static constexpr int kCols = 32 * kVec;
  static constexpr bool kDifferentiates = false;
};

template <DType kDType, int kVec, Activation kActivation_>
struct GradientSumConfig : SumConfig<kDType, kVec> {
  static constexpr int kRows = 4;  // fewer rows, because there are two tensors
  static constexpr bool kDifferentiates = true;
  static constexpr Activation kActivation = kActivation_;
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             kSumBlocks) void sum_rows_kernel(const __grid_constant__ SumRowsParams p) {
  constexpr int kVec = Config::kVec, kRows = Config::kRows, kWarps = Config::kWarps;
  constexpr DType kDType = Config::kDType;
  using T = element_t<kDType>;
  __shared__ float sums[kWarps][Config::kCols + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_col = int64_t{blockIdx.x} * Config::kCols, col = first_col + lane * kVec;
  const int64_t first_row = blockIdx.y * p.chunk_rows + warp;
  int left = static_cast<int>(min(p.chunk_rows - warp, p.rows - first_row));
  ptx::launch_dependents();
  ptx::wait_for_dependency();
  float sum[kVec] = {};
  if (col < p.cols) {
    T* x = static_cast<T*>(p.x.data) + first_row * p.x.stride + col;
    const T* kept = static_cast<const T*>(p.kept.data) + first_row * p.kept.stride + col;
    for (; left > 0; left -= kRows * kWarps) {
      // Words: the compiler would move 16-bit elements under a condition one by one.
      AnyVec<kVec> xs[kRows], kepts[kRows];
#pragma unroll
      for (int i = 0; i < kRows && i * kWarps < left; ++i) {
        xs[i] = load_any<kVec>(x, i * kWarps * p.x.stride, kDType);
        if constexpr (Config::kDifferentiates) kepts[i] = load_any<kVec>(kept, i * kWarps * p.kept.stride, kDType);
      }
#pragma unroll
      for (int i = 0; i < kRows && i * kWarps < left; ++i) {
        float wide[kVec];
        widen(wide, xs[i], kDType);
        if constexpr (Config::kDifferentiates) {
          float before[kVec];
          widen(before, kepts[i], kDType);
#pragma unroll
          for (int j = 0; j < kVec; ++j) wide[j] *= activate<T, Config::kActivation>(before[j]).slope;
          const Vec<T, kVec> dx = narrow<T>(wide);
          store(x + i * kWarps * p.x.stride, dx);
          widen(wide, dx);
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[j] += wide[j];
      }
      x += kRows * kWarps * p.x.stride;
      kept += kRows * kWarps * p.kept.stride;
    }
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) sums[warp][lane * kVec + j] = sum[j];
  __syncthreads();
  for (int j = threadIdx.x; j < Config::kCols && first_col + j < p.cols; j += Config::kThreads) {
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
  launch<sum_rows_kernel<Config>>({.grid = grid, .block = dim3(Config::kThreads), .early = true}, p, stream);
}

}  // namespace flash::fused_dense
