// Linear layers of few rows, as decoding has them: out = act(x weight^T + bias), which takes as long as the weight
// takes to arrive. A block has kOut output features. Its warps divide the contraction, each taking every num_warps-th
// chunk of it, and meet in shared memory.
//
// The weight is the right operand of an mma, x the left one, whose 16 rows need not all exist. Which index of the
// contraction stands where in a fragment is of no matter as long as it is the same in both: a lane takes eight adjacent
// ones, 16 bytes, of its row as they lie in global memory, and serves two mma with them.
//
// H200, bf16, one row, in a chain of such layers, in us, with cuBLASLt's kernels (of another run) in brackets: 1024 ->
// 1024 features 2.5 (7.5), 1024 -> 4096 3.7 (5.1), 4096 -> 1024 4.7 (7.2), 4096 -> 4096 11.3 (12.8), 11008 -> 4096 26.0
// (27.9), 4096 -> 12288 27.9 (29.1), 4096 -> 22016 46.3 (49.7). With 4 warps a block, the last three take 27.8, 29.9
// and 50.5; with the weights of the next step on their way during a step, 26.0, 29.1 and 47.1; with four stages of
// asynchronous copies in place of registers, 28.1, 30.8 and 47.3.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
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

struct FewRowsConfig {
  static constexpr int kOut = 8;
  static constexpr int kSpan = 32;  // of the contraction, that the four lanes of a row take in one access
  static constexpr int kLoads = 4;  // accesses to a tensor on their way
  static constexpr int kChunk = kSpan * kLoads;
  static constexpr int kMinWarps = 4, kMaxWarps = 16;  // of a block
};

// Eight adjacent elements: two operands of two registers.
using Eight = uint4;

template <typename T>
__device__ Eight load_eight(const T* address, bool exists) {
  return exists ? *reinterpret_cast<const Eight*>(address) : Eight{};
}

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

template <typename T>
__global__ __launch_bounds__(32 * FewRowsConfig::kMaxWarps,
                             2) void few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  using Config = FewRowsConfig;
  constexpr int kLoads = Config::kLoads, kOut = Config::kOut;
  __shared__ float found[Config::kMaxWarps][kFewRows][kOut];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4 * 8;
  const int warps = blockDim.x / 32, first = warp * Config::kChunk, step = warps * Config::kChunk;
  const int in_features = static_cast<int>(p.in_features);
  const int64_t first_out = int64_t{blockIdx.x} * kOut;
  const bool has_x = row < p.rows, has_weight = first_out + row < p.out_features;
  const T* x = static_cast<const T*>(p.x.data) + row * p.x.stride + column;
  const T* weight = static_cast<const T*>(p.weight.data) + (first_out + row) * p.weight.stride + column;
  const auto is_inside = [&](int k) { return k + column < in_features; };

  // While the kernel before this one ends, the weight comes as near as L2: it may be the work of that one, too.
  ptx::launch_dependents();
  if (has_weight && lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kLoads; i += 2) {
      const int k = first + i * Config::kSpan;
      if (is_inside(k)) ptx::prefetch(weight + k);
    }
  }
  ptx::wait_for_dependency();

  float sums[4] = {};
  for (int begin = first; begin < in_features; begin += step) {  // alike in all lanes, as an mma wants it
    Eight left[kLoads], right[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int k = begin + i * Config::kSpan;
      right[i] = load_eight(weight + k, has_weight && is_inside(k));
      left[i] = load_eight(x + k, has_x && is_inside(k));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) multiply<T>(sums, left[i], right[i]);
  }

  found[warp][row][lane % 4 * 2] = sums[0];
  found[warp][row][lane % 4 * 2 + 1] = sums[1];
  __syncthreads();
  if (threadIdx.x >= kFewRows * kOut) return;
  const int to_row = threadIdx.x / kOut, to_column = threadIdx.x % kOut;
  const int64_t to = first_out + to_column;
  if (to_row >= p.rows || to >= p.out_features) return;
  float sum = p.bias != nullptr ? static_cast<float>(static_cast<const T*>(p.bias)[to]) : 0.f;
  for (int i = 0; i < warps; ++i) sum += found[i][to_row][to_column];
  if (p.activates) sum = activated<T>(sum, p.activation);
  static_cast<T*>(p.out.data)[to_row * p.out.stride + to] = static_cast<T>(sum);
}

// As many warps as there are chunks for: blocks that are soon done leave multiprocessors idle for a short time at the
// end.
template <typename T>
void run_few_rows(const FewRowsParams& p, cudaStream_t stream) {
  using Config = FewRowsConfig;
  static_assert(32 * Config::kMinWarps >= kFewRows * Config::kOut);
  const int blocks = static_cast<int>(ceil_div(p.out_features, Config::kOut));
  const int chunks = static_cast<int>(ceil_div(p.in_features, Config::kChunk));
  const int warps = std::clamp(chunks, Config::kMinWarps, Config::kMaxWarps);
  launch<few_rows_kernel<T>>({.grid = dim3(blocks), .block = dim3(32 * warps), .early = true}, p, stream);
}

}  // namespace flash::fused_dense
