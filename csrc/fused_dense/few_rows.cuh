// Linear layers with few rows, as in decoding: out = act(x weight^T + bias). Loading the weight takes nearly all the
// time. A thread block computes kColumns columns of the product. Its warps divide the contraction: each takes every
// num_warps-th chunk, and their sums are added in shared memory.
//
// With gates, half of the columns of a thread block are values and the other half their gates: out = act(gate) value.
// Both are rounded before, as if a separate kernel had stored them.
//
// The weight is the right operand of an mma. x is the left operand, of whose 16 rows at most kFewRows exist. The order
// of the contraction within a fragment does not matter as long as it is the same in both operands. So a lane loads
// eight contiguous elements (16 bytes) of its row as they lie in global memory, and uses them as operands of two mma.
//
// For few rows this is faster than cuBLASLt, most of all for small weights. Fewer warps in a block are slower. Loading
// the weights of the next step during a step, or asynchronous copies in place of registers, brought no gain.
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
  static constexpr int kColumns = 8;
  static constexpr int kSpan = 32;  // length of the contraction that the four lanes of a row load in one access
  static constexpr int kLoads = 4;  // accesses per tensor in flight
  static constexpr int kChunk = kSpan * kLoads;
  static constexpr int kMinWarps = 4, kMaxWarps = 16;  // per block
};

// Eight contiguous elements: for each of two mma, two registers of an operand.
using Eight = uint4;

template <typename T>
__device__ Eight load_eight(const T* address, bool exists) {
  return exists ? *reinterpret_cast<const Eight*>(address) : Eight{};
}

template <typename T>
__device__ void multiply(float (&sums)[4], const Eight& x, const Eight& weight) {
  ptx::mma<T>(sums, {x.x, 0, x.y, 0}, weight.x, weight.y);  // rows from 8 on do not exist
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

// A column of a block: the output feature that it is for, and the row of the weight that it is the product with.
template <bool kGated>
struct Column {
  static constexpr int kOut = FewRowsConfig::kColumns / (kGated ? 2 : 1);  // features of a block
  int64_t out, weight_row;

  __device__ Column(const FewRowsParams& p, int index)
      : out(int64_t{blockIdx.x} * kOut + index % kOut),
        weight_row(kGated && index >= kOut ? p.out_features + out : out) {}
};

template <typename T, bool kGated>
__global__ __launch_bounds__(32 * FewRowsConfig::kMaxWarps,
                             2) void few_rows_kernel(const __grid_constant__ FewRowsParams p) {
  using Config = FewRowsConfig;
  constexpr int kLoads = Config::kLoads, kColumns = Config::kColumns;
  __shared__ float found[Config::kMaxWarps][kFewRows][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4 * 8;
  const int warps = blockDim.x / 32, first = warp * Config::kChunk, step = warps * Config::kChunk;
  const int in_features = static_cast<int>(p.in_features);
  const Column<kGated> own(p, row);
  const bool has_x = row < p.rows, has_weight = own.out < p.out_features;
  const T* x = static_cast<const T*>(p.x.data) + row * p.x.stride + column;
  const T* weight = static_cast<const T*>(p.weight.data) + own.weight_row * p.weight.stride + column;
  const auto is_inside = [&](int k) { return k + column < in_features; };

  // Prefetch the weight into L2 only, while the preceding kernel ends: that kernel may still be writing the weight.
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
  for (int begin = first; begin < in_features; begin += step) {  // the same count in all lanes, as mma requires
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
  if (threadIdx.x >= kFewRows * kColumns) return;
  const int to_row = threadIdx.x / kColumns, to_column = threadIdx.x % kColumns;
  const Column<kGated> to(p, to_column);
  const bool has_out = to_row < p.rows && to.out < p.out_features;
  float sum = p.bias != nullptr && has_out ? static_cast<float>(static_cast<const T*>(p.bias)[to.weight_row]) : 0.f;
  for (int i = 0; i < warps; ++i) sum += found[i][to_row][to_column];
  if constexpr (kGated) {
    const float rounded = static_cast<float>(static_cast<T>(sum));
    const float gate = __shfl_down_sync(~0u, rounded, to.kOut);
    sum = activated<T>(gate, p.activation) * rounded;
  } else if (p.activates) {
    sum = activated<T>(sum, p.activation);
  }
  if (has_out && to_column < to.kOut) {
    static_cast<T*>(p.out.data)[to_row * p.out.stride + to.out] = static_cast<T>(sum);
  }
}

// A thread block has a warp for each chunk, within bounds.
template <typename T, bool kGated>
void run_few_rows(const FewRowsParams& p, cudaStream_t stream) {
  using Config = FewRowsConfig;
  static_assert(32 * Config::kMinWarps >= kFewRows * Config::kColumns);
  const int blocks = static_cast<int>(ceil_div(p.out_features, Column<kGated>::kOut));
  const int chunks = static_cast<int>(ceil_div(p.in_features, Config::kChunk));
  const int warps = std::clamp(chunks, Config::kMinWarps, Config::kMaxWarps);
  launch<few_rows_kernel<T, kGated>>({.grid = dim3(blocks), .block = dim3(32 * warps), .early = true}, p, stream);
}

}  // namespace flash::fused_dense
