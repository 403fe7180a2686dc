// The gradient of a bias: out[j] = sum_i x[i][j], in fp32. If an activation follows the bias, x is at first the
// gradient of the output of the activation. It is then replaced by the gradient of the input of the activation, rounded
// to its type, and that is summed:
//
//   x = x act'(kept)
//
// A block takes kCols columns of a chunk of rows. Each of its warps takes every kWarps-th row and has kRows rows in
// flight: as soon as a row is added, the next one is requested in its place. The sums of the warps meet in shared
// memory, and those of the chunks in global memory, where the last block of a strip of columns adds them, always in the
// same order.
//
// Warps that lie side by side and read a long piece of one row together would be slower.
#pragma once

#include <cstdint>

#include "common/dispatch.h"
#include "common/divmod.h"
#include "common/launch.h"
#include "fused_dense/activation.cuh"
#include "fused_dense/params.h"
#include "ptx/sync.cuh"
#include "tile/any_vec.cuh"
#include "tile/arrival.cuh"
#include "tile/vec.cuh"

namespace flash::fused_dense {

constexpr int kSumBlocks = 2;  // blocks per multiprocessor at one time: 64 registers per thread allow that
constexpr int kSumWarps = 16;

template <DType kDType_, int kVec_>
struct SumConfig {
  static constexpr DType kDType = kDType_;
  static constexpr int kVec = kVec_;  // elements per access
  static constexpr int kWarps = kSumWarps, kThreads = 32 * kWarps;
  static constexpr int kRows = 4;  // rows of a warp in flight
  static constexpr int kCols = 32 * kVec;
  static constexpr bool kDifferentiates = false;
};

template <DType kDType, int kVec, Activation kActivation_>
struct GradientSumConfig : SumConfig<kDType, kVec> {
  static constexpr int kRows = 3;  // fewer rows, because there are two tensors
  static constexpr bool kDifferentiates = true;
  static constexpr Activation kActivation = kActivation_;
};

// The rows of a matrix that a warp takes, one after the other. Past the last one there are zeros.
template <typename Config>
struct WarpRows {
  using T = element_t<Config::kDType>;
  T* next;
  int64_t step;
  int left;

  __device__ WarpRows(const Rows& rows, int64_t first, int count, int64_t col)
      : next(static_cast<T*>(rows.data) + first * rows.stride + col), step(Config::kWarps * rows.stride), left(count) {}

  // Words: the compiler would move 16-bit elements under a condition one by one.
  __device__ AnyVec<Config::kVec> load() {
    AnyVec<Config::kVec> row{};
    if (left > 0) row = load_any<Config::kVec>(next, 0, Config::kDType);
    move();
    return row;
  }

  __device__ void store(const Vec<T, Config::kVec>& row) {
    if (left > 0) flash::store(next, row);
    move();
  }

 private:
  __device__ void move() {
    next += step;
    left -= Config::kWarps;
  }
};

// Adds every kWarps-th of `count` rows, from row `first` on. With an activation, the rows are replaced.
template <typename Config>
__device__ void add_rows(float (&sum)[Config::kVec], const SumRowsParams& p, int64_t first, int count, int64_t col) {
  constexpr int kVec = Config::kVec, kRows = Config::kRows;
  constexpr DType kDType = Config::kDType;
  using T = element_t<kDType>;
  WarpRows<Config> from(p.x, first, count, col), to = from, from_kept(p.kept, first, count, col);
  AnyVec<kVec> xs[kRows], kepts[kRows];
  const auto request = [&](int i) {
    xs[i] = from.load();
    if constexpr (Config::kDifferentiates) kepts[i] = from_kept.load();
  };
#pragma unroll
  for (int i = 0; i < kRows; ++i) request(i);
#pragma unroll 1
  for (int left = count; left > 0; left -= kRows * Config::kWarps) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float wide[kVec];
      [[maybe_unused]] float before[kVec];
      widen(wide, xs[i], kDType);
      if constexpr (Config::kDifferentiates) widen(before, kepts[i], kDType);
      request(i);
      if constexpr (Config::kDifferentiates) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) wide[j] *= activate<T, Config::kActivation>(before[j]).slope;
        const Vec<T, kVec> dx = narrow<T>(wide);
        to.store(dx);
        widen(wide, dx);
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += wide[j];
    }
  }
}

template <typename Config>
using WarpSums = float[Config::kWarps][Config::kCols + 1];

// Adds up what the warps of a block have of each column. Thread j < kCols gets column j.
template <typename Config>
__device__ float add_up_warps(WarpSums<Config>& sums, const float (&sum)[Config::kVec]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < Config::kVec; ++j) sums[warp][lane * Config::kVec + j] = sum[j];
  __syncthreads();
  float total = 0;
  if (threadIdx.x < Config::kCols) {
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) total += sums[i][threadIdx.x];
  }
  return total;
}

// Adds the sums of every kWarps-th chunk; other blocks have written them.
template <typename Config>
__device__ void add_chunks(float (&sum)[Config::kVec], const SumRowsParams& p, int64_t col) {
#pragma unroll 4
  for (int chunk = threadIdx.x / 32; chunk < gridDim.y; chunk += Config::kWarps) {
    const float* partial = p.partial + chunk * p.cols + col;
    if constexpr (Config::kVec % 4 == 0) {
#pragma unroll
      for (int j = 0; j < Config::kVec; j += 4) {
        const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + j));
        sum[j] += part.x, sum[j + 1] += part.y, sum[j + 2] += part.z, sum[j + 3] += part.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < Config::kVec; ++j) sum[j] += __ldcg(partial + j);
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             kSumBlocks) void sum_rows_kernel(const __grid_constant__ SumRowsParams p) {
  constexpr int kVec = Config::kVec;
  using T = element_t<Config::kDType>;
  __shared__ WarpSums<Config> sums;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_col = int64_t{blockIdx.x} * Config::kCols, col = first_col + lane * kVec;
  const int64_t first_row = blockIdx.y * p.chunk_rows + warp, to = first_col + threadIdx.x;
  const bool has_col = col < p.cols, stores = threadIdx.x < Config::kCols && to < p.cols;
  ptx::launch_dependents();
  ptx::wait_for_dependency();

  float sum[kVec] = {};
  const int count = static_cast<int>(min(p.chunk_rows - warp, p.rows - first_row));
  if (has_col) add_rows<Config>(sum, p, first_row, count, col);
  float total = add_up_warps<Config>(sums, sum);
  if (gridDim.y > 1) {
    if (stores) p.partial[blockIdx.y * p.cols + to] = total;
    if (!is_last_arrival(p.arrivals + blockIdx.x, gridDim.y)) return;
    float all[kVec] = {};
    if (has_col) add_chunks<Config>(all, p, col);
    total = add_up_warps<Config>(sums, all);
  }
  if (stores) static_cast<T*>(p.out)[to] = static_cast<T>(total);
}

template <typename Config>
void run_sum_rows(const SumRowsParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.cols, Config::kCols)),
                  static_cast<unsigned>(ceil_div(p.rows, static_cast<int>(p.chunk_rows))));
  launch<sum_rows_kernel<Config>>({.grid = grid, .block = dim3(Config::kThreads), .early = true}, p, stream);
}

}  // namespace flash::fused_dense
