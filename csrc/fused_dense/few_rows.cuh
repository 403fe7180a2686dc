// Linear layers of few rows, as decoding has them: out = act(x weight^T + bias), which takes as long as the weight
// takes to arrive. A block has kOut output features. Its warps divide the contraction, each taking every kWarps-th
// chunk of it, and meet in shared memory.
//
// The weight is the right operand of an mma, x the left one, whose 16 rows need not all exist. Which index of the
// contraction stands where in a fragment is of no matter as long as it is the same in both: a lane takes eight adjacent
// ones, 16 bytes, of its row as they lie in global memory, and serves two mma with them. So what a lane has copied to
// its own part of a ring in shared memory, it reads itself, and warps wait for nobody until the end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/divmod.h"
#include "common/launch.h"
#include "fused_dense/activation.cuh"
#include "fused_dense/params.h"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "tile/vec.cuh"

namespace flash::fused_dense {

template <typename T_, int kWarps_>
struct FewRowsConfig {
  using T = T_;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kOut = 8;
  static constexpr int kSpan = 32;  // of the contraction, that the four lanes of a row take in one access
  static constexpr int kLoads = 2;
  static constexpr int kChunk = kSpan * kLoads;
  static constexpr int kStages = 4;  // chunks of a warp on their way
};

// Eight adjacent elements: two operands of two registers.
using Eight = uint4;

template <typename Config>
struct FewRowsShared {
  Eight ring[Config::kStages][Config::kLoads][Config::kThreads];
  float sums[Config::kWarps][kFewRows][Config::kOut];
};

template <typename T>
__device__ void multiply(float (&sums)[4], const Eight& x, const Eight& weight) {
  ptx::mma<T>(sums, {x.x, 0, x.y, 0}, weight.x, weight.y);  // there are no rows from 8 on
  ptx::mma<T>(sums, {x.z, 0, x.w, 0}, weight.z, weight.w);
}

template <typename T>
__device__ float activated(float x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return activate<T, Activation::kGelu>(x).value;
    case Activation::kRelu:
      return activate<T, Activation::kRelu>(x).value;
    case Activation::kSquaredRelu:
      return activate<T, Activation::kSquaredRelu>(x).value;
    case Activation::kSilu:
      return activate<T, Activation::kSilu>(x).value;
  }
  return x;
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             1024 / Config::kThreads) void few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  using T = typename Config::T;
  constexpr int kLoads = Config::kLoads, kStages = Config::kStages, kWarps = Config::kWarps, kOut = Config::kOut;
  extern __shared__ Eight dynamic_shared[];
  auto& shared = *reinterpret_cast<FewRowsShared<Config>*>(dynamic_shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4 * 8;
  const int first = warp * Config::kChunk, step = kWarps * Config::kChunk;  // alike in all lanes, as an mma wants it
  const int in_features = static_cast<int>(p.in_features);
  const int64_t first_out = int64_t{blockIdx.x} * kOut;
  const bool has_x = row < p.rows, has_weight = first_out + row < p.out_features;
  const T* x = static_cast<const T*>(p.x.data) + row * p.x.stride + column;
  const T* weight = static_cast<const T*>(p.weight.data) + (first_out + row) * p.weight.stride + column;
  const auto is_inside = [&](int k) { return k + column < in_features; };

  // While the kernel before this one ends, the weight comes as near as L2: it may be the work of that one, too.
  ptx::launch_dependents();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    const int k = first + stage * step;
    if (has_weight && lane % 4 == 0 && is_inside(k)) ptx::prefetch(weight + k);
  }
  ptx::wait_for_dependency();

  const auto copy = [&](int begin, int stage) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int k = begin + i * Config::kSpan;
      ptx::copy_async(ptx::shared_address(&shared.ring[stage][i][threadIdx.x]), weight + k, has_weight && is_inside(k));
    }
    ptx::commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) copy(first + stage * step, stage);

  float sums[4] = {};
  for (int begin = first; begin < in_features; begin += kStages * step) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int at = begin + stage * step;
      Eight left[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int k = at + i * Config::kSpan;
        left[i] = has_x && is_inside(k) ? *reinterpret_cast<const Eight*>(x + k) : Eight{};
      }
      ptx::wait_copies<kStages - 1>();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) multiply<T>(sums, left[i], shared.ring[stage][i][threadIdx.x]);
      copy(at + kStages * step, stage);
    }
  }

  shared.sums[warp][row][lane % 4 * 2] = sums[0];
  shared.sums[warp][row][lane % 4 * 2 + 1] = sums[1];
  __syncthreads();
  if (threadIdx.x >= kFewRows * kOut) return;
  const int to_row = threadIdx.x / kOut, to_column = threadIdx.x % kOut;
  const int64_t to = first_out + to_column;
  if (to_row >= p.rows || to >= p.out_features) return;
  float sum = p.bias != nullptr ? static_cast<float>(static_cast<const T*>(p.bias)[to]) : 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared.sums[i][to_row][to_column];
  if (p.activates) sum = activated<T>(sum, p.activation);
  static_cast<T*>(p.out.data)[to_row * p.out.stride + to] = static_cast<T>(sum);
}

template <typename Config>
void run_few_rows(const FewRowsParams& p, cudaStream_t stream) {
  static_assert(Config::kThreads >= kFewRows * Config::kOut);
  launch<few_rows_kernel<Config>>({.grid = dim3(static_cast<unsigned>(ceil_div(p.out_features, Config::kOut))),
                                   .block = dim3(Config::kThreads),
                                   .shared_bytes = sizeof(FewRowsShared<Config>),
                                   .early = true},
                                  p, stream);
}

}  // namespace flash::fused_dense
