// Cross entropy. With s = scale x, e = label_smoothing, the label y, and V classes in total,
//
//   lse = log sum_j exp(s_j)        loss = lse - (1 - e) s_y - e / V sum_j s_j + z,   z = lse_square_scale lse^2
//   dx_j = dloss scale (exp(s_j - lse) (1 + 2 lse_square_scale lse) - (1 - e) [j = y] - e / V)
//
// In the forward, a group of lanes takes a row and reads it once; each lane keeps a running sum of exponentials. The
// backward is elementwise: a block takes a piece of a row, or of several rows if they are short, and reads and writes
// it once, in place if wanted. All arithmetic is in fp32. Rows that do not count are not read.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "ptx/math.cuh"
#include "tile/exp_sum.cuh"
#include "tile/row.cuh"
#include "tile/vec.cuh"
#include "xentropy/params.h"

namespace flash::xentropy {

constexpr float kLog2E = 1.4426950408889634f;

template <typename T_, int kLoads_, int kThreads_, int kBlocks_>
struct Config {
  using T = T_;
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kLine = 128 / sizeof(T);  // elements in a line of the cache
  static constexpr int kLoads = kLoads_;         // loads of a thread in flight
  static constexpr int kChunk = kLoads * kWidth;
  static constexpr int kThreads = kThreads_;  // per block, at most
  static constexpr int kBlocks = kBlocks_;    // blocks per multiprocessor, at least, that the registers must allow
};

// Blocks are small: while one block begins or ends a row, the others keep reading. Four loads in flight per thread are
// faster than two. In place, when rows start at any address, each warp gets whole lines of the cache, because sharing
// lines between warps is slower.
template <typename T>
using FwdConfig = Config<T, 4, 128, 8>;
template <typename T>
using BwdConfig = Config<T, 4, 64, 16>;

// Chunks that a lane takes before its row gets more lanes. With more chunks per lane, short rows are faster.
constexpr int kFwdChunks = 4;

__device__ inline int64_t label_of(const Problem& p, int64_t row) {
  const int64_t at = row * p.label_stride;
  return p.wide_labels ? __ldg(static_cast<const long long*>(p.labels) + at)
                       : __ldg(static_cast<const int*>(p.labels) + at);
}

__device__ inline bool is_kept(const Problem& p, int64_t label) {
  return !p.ignores || (label != p.ignore_index && label >= 0 && label < p.total_classes);
}

// Returns the weight that label smoothing gives to every class except the label.
__device__ inline float smooth_weight(const Problem& p) {
  return p.label_smoothing == 0.f ? 0.f : p.label_smoothing / static_cast<float>(p.total_classes);
}

template <typename T>
__device__ const T* row_of(const Problem& p, int64_t row) {
  return static_cast<const T*>(p.logits) + row * p.row_stride;
}

// Returns the sum of exponentials over a row. If `smooth`, also puts the sum of the row into `total`.
template <typename Config, typename T = typename Config::T>
__device__ ExpSum sum_row(const T* row, int vocab, float c, bool smooth, const RowGroup& group, float& total) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const int apart = group.lanes * kWidth;
  ExpSum exps;
  total = 0.f;
  const auto add = [&](auto kCount, int column) {
    Vec<T, kWidth> vecs[kCount];
    load_step(vecs, row, column, apart, vocab, static_cast<T>(-INFINITY));
    float x[kCount * kWidth];
#pragma unroll
    for (int i = 0; i < kCount * kWidth; ++i) x[i] = static_cast<float>(vecs[i / kWidth][i % kWidth]);
    if (smooth) {
      const Inside<kWidth> inside(column, vocab);
#pragma unroll
      for (int i = 0; i < kCount * kWidth; ++i) total += kCount > 1 || inside[i] ? x[i] : 0.f;
    }
    exps.add(x, c);
  };
  walk_row<kLoads, kWidth>(first_aligned<kWidth>(row) + group.lane * kWidth, apart, vocab, add);
  if (smooth) total = sum_group(total, group);
  return sum_group(exps, c, group);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams params) {
  using T = typename Config::T;
  const Problem& p = params.problem;
  const RowGroup group;
  const int64_t r = group.row < p.rows ? group.row : 0, label = label_of(p, r), column = label - p.class_start;
  const bool kept = is_kept(p, label), is_own = kept && column >= 0 && column < p.vocab;
  const bool reads = kept && group.row < p.rows && params.known_lse == nullptr;
  const T* row = row_of<T>(p, r);
  const float own = is_own ? static_cast<float>(row[column]) : 0.f;

  float total;  // sum of the logits of the row, for label smoothing
  const bool smooth = p.label_smoothing > 0.f;
  const ExpSum exps = sum_row<Config>(row, reads ? p.vocab : 0, p.logit_scale * kLog2E, smooth, group, total);
  const float max = reads ? exps.max : 0.f;
  if (group.lane != 0 || group.row >= p.rows) return;
  const bool knows = kept && params.known_lse != nullptr;
  const float log_sum = knows ? params.known_lse[r * params.known_lse_stride] : logf(exps.sum);

  const float lse = max * p.logit_scale + log_sum;
  const float z_loss = p.lse_square_scale == 0.f || params.partial ? 0.f : p.lse_square_scale * lse * lse;
  // Subtract before anything is scaled: the differences are exact where the label has the largest logit.
  const float base = params.partial ? 0.f : max;
  float below = (1.f - p.label_smoothing) * (base - own);
  if (smooth) below += p.label_smoothing * (base - total / static_cast<float>(p.total_classes));
  const float loss = below * p.logit_scale + (params.partial ? 0.f : log_sum + z_loss);
  params.losses[r] = kept ? loss : 0.f;
  params.z_losses[r] = kept ? z_loss : 0.f;
  params.lse[r] = kept ? lse : 0.f;
  params.kept[r] = kept;
}

// Computes the gradient of kWidth logits. The label is at index `own`, which may lie outside them.
template <int kWidth, typename T>
struct Gradient {
  float logit_scale, lse;
  float scale, at_others, at_label;  // the gradient is scale times the exponential, minus one of the other two

  __device__ Vec<T, kWidth> operator()(const Vec<T, kWidth>& x, int64_t own) const {
    const int label = own >= 0 && own < kWidth ? static_cast<int>(own) : -1;
    float d[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      // Round the product as in the forward, so that a row with a single finite logit gets a difference of exactly 0.
      const float exponential = ptx::exp2((__fmul_rn(static_cast<float>(x[j]), logit_scale) - lse) * kLog2E);
      d[j] = scale * exponential - (j == label ? at_label : at_others);
    }
    return narrow<T>(d);
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void bwd_kernel(const __grid_constant__ BwdParams params) {
  using T = typename Config::T;
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const Problem& p = params.problem;
  const int piece = blockIdx.x * blockDim.y + threadIdx.y;
  const int r = params.pieces.divide(piece), part = params.pieces.remainder(piece, r);
  if (r >= p.rows) return;
  const int64_t label = label_of(p, r), own = label - p.class_start;
  const float lse = params.lse[r * params.lse_stride];
  const float dloss = params.dlosses[r * params.dlosses_stride] * p.logit_scale;
  const T* row = row_of<T>(p, r);
  T* out = static_cast<T*>(params.dlogits) + r * params.dlogits_stride;
  const bool kept = is_kept(p, label);
  const float z_factor = p.lse_square_scale == 0.f ? 1.f : 1.f + 2.f * p.lse_square_scale * lse;
  const float smooth = smooth_weight(p);
  const Gradient<kWidth, T> gradient{p.logit_scale, lse, dloss * z_factor, dloss * smooth,
                                     dloss * (1.f - p.label_smoothing + smooth)};
  const int apart = blockDim.x * kWidth;
  const int first = first_aligned<Config::kLine>(out) + part * kLoads * apart + threadIdx.x * kWidth;
  const int end = min(p.vocab, first + kLoads * apart);
  walk_row<kLoads, kWidth>(first, apart, end, [&](auto kCount, int column) {
    Vec<T, kWidth> x[kCount] = {};
    if (kept) load_step(x, row, column, apart, p.vocab, T());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = column + i * apart;
      x[i] = kept ? gradient(x[i], own - at) : Vec<T, kWidth>{};
      if constexpr (kCount > 1) {
        store(out + at, x[i]);
      } else {
        store_within<kWidth>(out, at, p.vocab, x[i]);
      }
    }
  });
}

template <typename Config>
void run_fwd(const FwdParams& p, cudaStream_t stream) {
  const int lanes = lanes_for<Config::kThreads>(p.problem.vocab, kFwdChunks * Config::kChunk);
  launch<fwd_kernel<Config>>(row_groups(p.problem.rows, lanes), p, stream);
}

// Returns whether all rows start at the beginning of a line of the cache.
template <typename Config>
bool starts_aligned(const void* rows, int64_t stride) {
  return reinterpret_cast<uintptr_t>(rows) % 128 == 0 && stride % Config::kLine == 0;
}

template <typename Config>
void run_bwd(BwdParams p, cudaStream_t stream) {
  if (p.problem.vocab == 0) return;
  const bool aligned = starts_aligned<Config>(p.dlogits, p.dlogits_stride);
  const int columns = p.problem.vocab + (aligned ? 0 : Config::kLine - 1);  // including the columns of its first line
  const int threads = lanes_for<Config::kThreads>(columns, Config::kChunk);
  const int pieces = ceil_div(columns, threads * Config::kChunk);
  p.pieces = Divisor(pieces);
  const int pieces_per_block = Config::kThreads / threads;
  const LaunchShape shape{.grid = dim3(ceil_div(int64_t{p.problem.rows} * pieces, pieces_per_block)),
                          .block = dim3(threads, pieces_per_block)};
  launch<bwd_kernel<Config>>(shape, p, stream);
}

}  // namespace flash::xentropy
