// Activations of fused dense layers and their gradients, elementwise:
//
//   out = act(x), or act(x) y        dx = dout act'(x), or dout act'(x) y        dy = dout act(x)
//
// All arithmetic is in fp32. Rows may have gaps between them, as the halves of a matrix do. A block takes a part of a
// row; a thread has kLoads accesses of each tensor in flight, one block width apart. An output may use the memory of an
// input, because every element is read before the element at its index is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "common/divmod.h"
#include "common/launch.h"
#include "fused_dense/params.h"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/vec.cuh"

namespace flash::fused_dense {

template <typename T_, int kVec_, Activation kActivation_, bool kGated_>
struct ActivationConfig {
  using T = T_;
  static constexpr int kVec = kVec_;  // elements per access
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kGated = kGated_;
  static constexpr int kLoads = 2;
  static constexpr int kThreads = 256;  // per block, at most
};

// The values act(x) and act'(x).
struct Activated {
  float value, slope;
};

// The values sigmoid(x) and 1 - sigmoid(x).
struct Sigmoid {
  float value, rest;
};

// Computes the sigmoid. For 16-bit types an approximation is enough: its error is far below the rounding of T. For fp32
// both values must be exact to a few ulp, so a small one is not computed as the difference from 1.
template <typename T>
__device__ Sigmoid sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    const float power = expf(-fabsf(x)), large = 1 / (1 + power), small = power * large;
    return x < 0 ? Sigmoid{small, large} : Sigmoid{large, small};
  }
  const float value = ptx::reciprocal(1 + ptx::exp2(-1.4426950408889634f * x));
  return {value, 1 - value};
}

// Computes an activation. gelu(x) = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), which equals x (1 + tanh
// u) / 2.
template <typename T, Activation kActivation>
__device__ Activated activate(float x) {
  if constexpr (kActivation == Activation::kGelu) {
    constexpr float kSlope = 1.5957691216057308f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
    const auto [part, rest] = sigmoid<T>(kSlope * x * (1 + kCubic * x * x));
    return {x * part, part + x * part * rest * kSlope * (1 + 3 * kCubic * x * x)};
  } else if constexpr (kActivation == Activation::kSilu) {
    const auto [part, rest] = sigmoid<T>(x);
    return {x * part, part + x * part * rest};
  } else if constexpr (kActivation == Activation::kRelu) {
    return {x < 0 ? 0.f : x, x > 0 ? 1.f : 0.f};
  } else {
    const float positive = x < 0 ? 0.f : x;
    return {positive * positive, 2 * positive};
  }
}

// The elements that a thread takes in the block's part of a row: the first access is at `first`, and each next one is
// `apart` elements later.
template <typename Config>
struct Part {
  int64_t row, first, apart;

  __device__ explicit Part(int blocks_per_row) {
    apart = int64_t{blockDim.x} * Config::kVec;
    row = blockIdx.x / blocks_per_row;
    first = (blockIdx.x % blocks_per_row) * Config::kLoads * apart + threadIdx.x * Config::kVec;
  }
};

template <typename Config>
using Loads = Vec<typename Config::T, Config::kVec>[Config::kLoads];

template <typename Config>
__device__ void load_part(Loads<Config>& vecs, const Rows& rows, const Part<Config>& part, int64_t cols) {
  const auto* data = static_cast<const typename Config::T*>(rows.data) + part.row * rows.stride;
#pragma unroll
  for (int i = 0; i < Config::kLoads; ++i) {
    const int64_t col = part.first + i * part.apart;
    if (col < cols) vecs[i] = load<Config::kVec>(data + col);
  }
}

template <typename Config>
__device__ void store_part(const Rows& rows, const Part<Config>& part, int i, int64_t cols,
                           const float (&wide)[Config::kVec]) {
  using T = typename Config::T;
  const int64_t col = part.first + i * part.apart;
  if (col < cols) store(static_cast<T*>(rows.data) + part.row * rows.stride + col, narrow<T>(wide));
}

template <typename Params>
struct Launched {
  Params p;
  int blocks_per_row;
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void activation_fwd_kernel(
    const __grid_constant__ Launched<ActivationFwdParams> launched) {
  const auto& p = launched.p;
  const Part<Config> part(launched.blocks_per_row);
  ptx::launch_dependents();
  ptx::wait_for_dependency();
  Loads<Config> xs, ys;
  load_part<Config>(xs, p.x, part, p.cols);
  if constexpr (Config::kGated) load_part<Config>(ys, p.y, part, p.cols);
#pragma unroll
  for (int i = 0; i < Config::kLoads; ++i) {
    float x[Config::kVec], y[Config::kVec];
    widen(x, xs[i]);
    if constexpr (Config::kGated) widen(y, ys[i]);
#pragma unroll
    for (int j = 0; j < Config::kVec; ++j) {
      x[j] = activate<typename Config::T, Config::kActivation>(x[j]).value;
      if constexpr (Config::kGated) x[j] *= y[j];
    }
    store_part<Config>(p.out, part, i, p.cols, x);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void activation_bwd_kernel(
    const __grid_constant__ Launched<ActivationBwdParams> launched) {
  const auto& p = launched.p;
  const Part<Config> part(launched.blocks_per_row);
  ptx::launch_dependents();
  ptx::wait_for_dependency();
  Loads<Config> douts, xs, ys;
  load_part<Config>(douts, p.dout, part, p.cols);
  load_part<Config>(xs, p.x, part, p.cols);
  if constexpr (Config::kGated) load_part<Config>(ys, p.y, part, p.cols);
#pragma unroll
  for (int i = 0; i < Config::kLoads; ++i) {
    float dout[Config::kVec], x[Config::kVec], y[Config::kVec];
    widen(dout, douts[i]);
    widen(x, xs[i]);
    if constexpr (Config::kGated) widen(y, ys[i]);
#pragma unroll
    for (int j = 0; j < Config::kVec; ++j) {
      const Activated act = activate<typename Config::T, Config::kActivation>(x[j]);
      x[j] = dout[j] * act.slope;
      if constexpr (Config::kGated) x[j] *= y[j], y[j] = dout[j] * act.value;
    }
    store_part<Config>(p.dx, part, i, p.cols, x);
    if constexpr (Config::kGated) store_part<Config>(p.dy, part, i, p.cols, y);
  }
}

// Runs the kernel. Rows with few columns get small blocks, and a single row may be as long as memory allows.
template <typename Config, auto kKernel, typename Params>
void run_activation(const Params& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return;
  constexpr int64_t kChunk = Config::kLoads * Config::kVec;
  const int threads =
      static_cast<int>(std::min<int64_t>(Config::kThreads, ceil_div(ceil_div(p.cols, kChunk), 32) * 32));
  const int64_t blocks_per_row = ceil_div(p.cols, threads * static_cast<int>(kChunk));
  if (p.rows * blocks_per_row > std::numeric_limits<int>::max()) throw std::invalid_argument("there are too many rows");
  const Launched<Params> launched{p, static_cast<int>(blocks_per_row)};
  const dim3 grid(static_cast<unsigned>(p.rows * blocks_per_row));
  launch<kKernel>({.grid = grid, .block = dim3(threads), .early = true}, launched, stream);
}

}  // namespace flash::fused_dense
