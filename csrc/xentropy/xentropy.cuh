// Cross entropy. With s = scale x, e = label_smoothing, the label y, and V classes in total,
//
//   lse = log sum_j exp(s_j)   loss = (1 - e) (lse - s_y) + e / V sum_j (lse - s_j) + z,   z = lse_square_scale lse^2
//   dx_j = dloss scale (exp(s_j - lse) (1 + 2 lse_square_scale lse) - (1 - e) [j = y] - e / V)
//
// where x are the logits of a row, and [j = y] is 1 if j is y and 0 otherwise. Logits may be large and close to each
// other, so that an lse in fp32 would have lost what tells them apart: everything is a difference of logits before it
// is scaled or summed, lse - s_j = scale (max - x_j) + log sum_i exp(scale (x_i - max)), and lse itself is in fp64.
//
// In the forward, a group of lanes takes a
// row and reads it once; each lane keeps a running sum of exponentials. The backward is elementwise: a thread block
// takes a piece of a row, or pieces of several rows if they are short, and reads and writes it once, in place if
// wanted. If the dlosses are known in the forward, one kernel does both: a group of lanes, or the thread blocks of a
// cluster, copy a row to shared memory and read it twice from there, which saves reading the logits again. The
// arithmetic of each column is in fp32. Rows that do not count (ignore_index) are not read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/device.h"
#include "common/launch.h"
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "tile/exp_sum.cuh"
#include "tile/row.cuh"
#include "tile/shared.cuh"
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
  static constexpr int kThreads = kThreads_;  // per thread block, at most
  static constexpr int kBlocks = kBlocks_;    // thread blocks per SM, at least, that the registers must allow
};

// <type, loads in flight, threads, thread blocks per SM>. Thread blocks are small: while one begins or ends a row, the
// others keep reading. Four loads in flight per thread are faster than two. Rows may start at any address; pieces of
// them are cut at cache lines (kLine), because warps that share a line are slower, in place above all.
template <typename T>
using FwdConfig = Config<T, 4, 128, 8>;
template <typename T>
using BwdConfig = Config<T, 4, 64, 16>;
template <typename T>
using FwdBwdConfig = Config<T, 4, 256, 4>;

// Chunks that a lane takes before its row gets more lanes. With more chunks per lane, short rows are faster; but with
// both directions at once they fill the shared memory before there are enough threads.
constexpr int kFwdChunks = 4, kFwdBwdChunks = 2;

// Both directions at once: the most thread blocks that share a row, which is the largest cluster that CUDA guarantees;
// and the most bytes of a row that one takes while more can share it. With that, the 228 KB of an SM have room for
// three thread blocks, with the 1 KB that CUDA reserves in each and up to 512 bytes of static shared memory. These are
// in different phases, so that the SM reads, computes and writes at the same time.
constexpr int kMaxParts = 8, kShareBytes = 228 * 1024 / 3 - 1024 - 512;

// Thread blocks of a backward that may have nothing to do but compare the dlosses with the expected ones: enough to
// fill a GPU, and few enough to be done within microseconds.
constexpr int kComparingBlocks = 4096;

__device__ inline int64_t label_of(const Problem& p, int64_t row) {
  const int64_t at = row * p.label_stride;
  return p.wide_labels ? __ldg(static_cast<const long long*>(p.labels) + at)
                       : __ldg(static_cast<const int*>(p.labels) + at);
}

__device__ inline bool is_kept(const Problem& p, int64_t label) {
  return !p.ignores || (label != p.ignore_index && label >= 0 && label < p.total_classes);
}

// Returns the column of a label, or -1 if it is not among these columns.
__device__ inline int column_of(const Problem& p, int64_t label) {
  const int64_t column = label - p.class_start;
  return column >= 0 && column < p.vocab ? static_cast<int>(column) : -1;
}

// Returns the weight that label smoothing gives to every class except the label.
__device__ inline float smooth_weight(const Problem& p) {
  return p.label_smoothing == 0.f ? 0.f : p.label_smoothing / static_cast<float>(p.total_classes);
}

template <typename T>
__device__ const T* row_of(const Problem& p, int64_t row) {
  return static_cast<const T*>(p.logits) + row * p.row_stride;
}

// What the loss of a row is made of.
struct RowSums {
  ExpSum exps;
  float below = 0.f;  // the sum of max - x over the columns, for label smoothing
  float own = 0.f;    // the logit of the label
};

// Returns how much larger the sum of max - x over `count` columns is with the maximum `to` than it is with `from`,
// which is no logit where there are no columns.
__device__ inline float raised(float count, float from, float to) { return count > 0.f ? count * (to - from) : 0.f; }

// Returns the sum of exponentials over columns `begin` to `end` of a row, where accesses are aligned at `begin`. If
// `smooth`, also puts the sum of max - x over them into `below`.
template <typename Config, typename T = typename Config::T>
__device__ ExpSum sum_row(const T* row, int begin, int end, float c, bool smooth, const RowGroup& group, float& below) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const int apart = group.lanes * kWidth;
  ExpSum exps;
  float count = 0.f;  // columns of this lane so far
  below = 0.f;
  const auto add = [&](auto kCount, int column) {
    Vec<T, kWidth> vecs[kCount];
    load_step(vecs, row, column, apart, end, static_cast<T>(-INFINITY));
    float x[kCount * kWidth];
#pragma unroll
    for (int i = 0; i < kCount * kWidth; ++i) x[i] = static_cast<float>(vecs[i / kWidth][i % kWidth]);
    const float before = exps.max;
    exps.raise_over(x, c);
    if (smooth) {
      const Inside<kWidth> inside(column, end);
      float added = raised(count, before, exps.max);  // summed before it meets a sum that may be large
      count += kCount > 1 ? kCount * kWidth : inside.count();
#pragma unroll
      for (int i = 0; i < kCount * kWidth; ++i) added += kCount > 1 || inside[i] ? exps.max - x[i] : 0.f;
      below += added;
    }
    exps.add_below(x, c);
  };
  walk_row<kLoads, kWidth>(begin + group.lane * kWidth, apart, end, add);
  const ExpSum all = sum_group(exps, c, group);
  if (smooth) below = sum_group(below + raised(count, exps.max, all.max), group);
  return all;
}

// Writes the results of a row, whose log-sum-exp is sums.exps.max logit_scale + log_sum. The loss is the share of these
// columns, if they are not all: (1 - e) (lse - s_y) if the label is among them, and their terms of the sum over j.
__device__ inline void put_row(const FwdParams& params, int64_t row, bool kept, bool is_own, const RowSums& sums,
                               float log_sum) {
  const Problem& p = params.problem;
  const float max = sums.exps.max;
  const double lse = static_cast<double>(max) * p.logit_scale + log_sum;
  const float z_loss = p.lse_square_scale == 0.f ? 0.f : p.lse_square_scale * static_cast<float>(lse * lse);
  float loss = is_own ? (1.f - p.label_smoothing) * ((max - sums.own) * p.logit_scale + log_sum) : 0.f;
  if (p.label_smoothing > 0.f && p.vocab > 0) {
    loss += smooth_weight(p) * (sums.below * p.logit_scale + static_cast<float>(p.vocab) * log_sum);
  }
  params.losses[row] = kept ? loss + z_loss : 0.f;
  params.z_losses[row] = kept ? z_loss : 0.f;
  params.lse[row] = kept ? lse : 0.;
  params.kept[row] = kept;
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams params) {
  using T = typename Config::T;
  const Problem& p = params.problem;
  const RowGroup group;
  const int64_t r = group.row < p.rows ? group.row : 0, label = label_of(p, r);
  const int column = column_of(p, label);
  const bool kept = is_kept(p, label), is_own = kept && column >= 0;
  const bool reads = kept && group.row < p.rows && params.known_lse == nullptr;
  const T* row = row_of<T>(p, r);
  RowSums sums{.own = is_own ? static_cast<float>(row[column]) : 0.f};
  sums.exps = sum_row<Config>(row, first_aligned<Config::kWidth>(row), reads ? p.vocab : 0, p.logit_scale * kLog2E,
                              p.label_smoothing > 0.f, group, sums.below);
  if (group.lane != 0 || group.row >= p.rows) return;
  float log_sum = logf(sums.exps.sum);
  if (params.known_lse != nullptr) {  // the label takes the place of the largest logit, which is not known
    sums.exps.max = sums.own == -INFINITY ? 0.f : sums.own;
    log_sum = static_cast<float>(params.known_lse[r * params.known_lse_stride] -
                                 static_cast<double>(sums.exps.max) * p.logit_scale);
  }
  put_row(params, r, kept, is_own, sums, log_sum);
}

// Computes the gradient of logits: scale times the exponential, minus one of two numbers. The log-sum-exp of the row is
// logit_scale centre + rest. Both are in fp32, and lose nothing as the centre is near the logits that matter.
struct Gradient {
  float centre, c, rest;  // the last two times log2(e)
  float scale, at_others, at_label;

  __device__ Gradient(const Problem& p, float dloss, float centre, float rest)
      : centre(centre), c(p.logit_scale * kLog2E), rest(rest * kLog2E) {
    const float lse = centre * p.logit_scale + rest;
    const float z_factor = p.lse_square_scale == 0.f ? 1.f : 1.f + 2.f * p.lse_square_scale * lse;
    const float smooth = smooth_weight(p), factor = dloss * p.logit_scale;
    scale = factor * z_factor;
    at_others = factor * smooth;
    at_label = factor * (1.f - p.label_smoothing + smooth);
  }

  __device__ float operator()(float x, float subtracted) const {
    return scale * ptx::exp2((x - centre) * c - rest) - subtracted;
  }
};

// Returns the gradient of a row with this log-sum-exp.
__device__ inline Gradient gradient_of(const Problem& p, float dloss, double lse) {
  const float centre = static_cast<float>(lse) / p.logit_scale;
  return {p, dloss, centre, static_cast<float>(lse - static_cast<double>(centre) * p.logit_scale)};
}

// Stores a thread's part of the gradient of a row, from `first` to `end`; zeros, without reading the row, if it does
// not count. The label is in column `own`, or nowhere if that is -1. Its gradient is stored last, by the thread that
// has its column: comparing each column with it would take a sixth of the time.
template <typename Config, typename T = typename Config::T>
__device__ void put_gradient(T* out, const T* row, int first, int apart, int end, int own, bool kept,
                             const Gradient& gradient) {
  constexpr int kWidth = Config::kWidth;
  const bool is_own = kept && own >= max(first, 0) && own < end && (own - first) % apart < kWidth;
  const float logit = is_own ? static_cast<float>(row[own]) : 0.f;  // before it is overwritten
  walk_row<Config::kLoads, kWidth>(first, apart, end, [&](auto kCount, int column) {
    Vec<T, kWidth> x[kCount] = {};
    if (kept) load_step(x, row, column, apart, end, T());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kept) {
        float d[kWidth];
        widen(d, x[i]);
#pragma unroll
        for (float& each : d) each = gradient(each, gradient.at_others);
        x[i] = narrow<T>(d);
      }
      const int at = column + i * apart;
      if constexpr (kCount > 1) {
        store(out + at, x[i]);
      } else {
        store_within<kWidth>(out, at, end, x[i]);
      }
    }
  });
  if (is_own) out[own] = static_cast<T>(gradient(logit, gradient.at_label));
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void bwd_kernel(const __grid_constant__ BwdParams params) {
  using T = typename Config::T;
  constexpr int kWidth = Config::kWidth;
  const Problem& p = params.problem;
  const int piece = blockIdx.x * blockDim.y + threadIdx.y;
  const int r = params.pieces.divide(piece), part = params.pieces.remainder(piece, r);
  if (r >= p.rows) return;
  const float dloss = params.dlosses[r * params.dlosses_stride];
  if (params.expected != nullptr && dloss == params.expected[r * params.expected_stride]) return;
  const int64_t label = label_of(p, r);
  const Gradient gradient = gradient_of(p, dloss, params.lse[r * params.lse_stride]);
  T* out = static_cast<T*>(params.dlogits) + r * params.dlogits_stride;
  const int begin = first_aligned<Config::kLine>(out) + part * params.piece_columns;
  put_gradient<Config>(out, row_of<T>(p, r), begin + threadIdx.x * kWidth, blockDim.x * kWidth,
                       min(p.vocab, begin + params.piece_columns), column_of(p, label), is_kept(p, label), gradient);
}

// The sums over a row whose columns are divided among the blocks of a cluster. Each block sends its sums to all.
class Parts {
 public:
  struct Shared {
    float4 sums[kMaxParts];
    ptx::SharedBarrier arrived;
  };

  // Called by all threads of the cluster, before anything that takes time.
  __device__ Parts(Shared& shared, int parts) : shared_(shared), parts_(parts) {
#if __CUDA_ARCH__ >= 900
    if (parts == 1) return;
    if (threadIdx.x == 0) {
      shared.arrived.init(1);
      ptx::fence_barrier_init();
    }
    ptx::arrive_at_cluster();
#endif
  }

  // Returns the sums over the row, given those of this block, of which `own` is 0 where another has the label, and how
  // many columns each block has. Called once. A block may end afterwards: it has got what the others send.
  template <typename Columns>
  __device__ RowSums add_up(const RowSums& mine, float c, Columns&& columns_of) const {
#if __CUDA_ARCH__ >= 900
    if (parts_ == 1) return mine;
    ptx::wait_for_cluster();  // all blocks run, and their barriers are initialised
    if (threadIdx.x == 0) shared_.arrived.arrive_expect_tx(parts_ * static_cast<int>(sizeof(float4)));
    if (threadIdx.x < parts_) {
      ptx::store_async_in(ptx::address_in(threadIdx.x, &shared_.sums[ptx::cluster_rank()]),
                          make_float4(mine.exps.max, mine.exps.sum, mine.below, mine.own),
                          ptx::address_in(threadIdx.x, &shared_.arrived));
    }
    ptx::wait_for_stores(shared_.arrived, 0);
    RowSums all;
#pragma unroll 1
    for (int i = 0; i < parts_; ++i) all.exps.max = fmaxf(all.exps.max, shared_.sums[i].x);
#pragma unroll 1
    for (int i = 0; i < parts_; ++i) {
      const float4 part = shared_.sums[i];
      all.exps.sum += part.y * ptx::exp2((part.x - all.exps.max) * c);
      all.below += part.z + raised(static_cast<float>(columns_of(i)), part.x, all.exps.max);
      all.own += part.w;
    }
    return all;
#else
    return mine;
#endif
  }

 private:
  Shared& shared_;
  int parts_;
};

// Both directions at once. Each lane copies its columns to shared memory and is the only one to read them there and to
// write their gradient: this may be in place, and the copies need no barriers.
template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void fwd_bwd_kernel(const __grid_constant__ FwdBwdParams params) {
  using T = typename Config::T;
  constexpr int kWidth = Config::kWidth;
  __shared__ Parts::Shared shared;
  const Problem& p = params.fwd.problem;
  const Parts parts(shared, params.parts.value);
  const int block = params.parts.divide(blockIdx.x), part = params.parts.remainder(blockIdx.x, block);
  const RowGroup group{.row = int64_t{block} * blockDim.y + threadIdx.y};
  const bool exists = group.row < p.rows;
  const int r = exists ? static_cast<int>(group.row) : 0;
  const int64_t label = label_of(p, r);
  const int column = column_of(p, label);
  const bool kept = is_kept(p, label), reads = kept && exists;
  const float dloss = params.dlosses[r * params.dlosses_stride];
  const T* row = row_of<T>(p, r);
  const int line = first_aligned<Config::kLine>(row);  // where the columns of the first part begin
  const int begin = line + part * params.share, end = min(p.vocab, begin + params.share);
  const int first = begin + group.lane * kWidth, apart = group.lanes * kWidth;

  // Aligned no further than for the copies: padding of the static shared memory would leave no room for a third block.
  const T* copy = &shared_memory<T, 16>() + threadIdx.y * params.share - begin;
  if (reads) {
#pragma unroll 4
    for (int at = first; at < end; at += apart) {
      ptx::copy_async(ptx::shared_address(copy + at), row + at, at > -kWidth);
    }
  }
  const bool is_own = reads && column >= max(begin, 0) && column < end;
  RowSums mine{.own = is_own ? static_cast<float>(row[column]) : 0.f};
  ptx::commit_copies();
  ptx::wait_copies<0>();

  const float c = p.logit_scale * kLog2E;
  mine.exps = sum_row<Config>(copy, begin, reads ? end : 0, c, p.label_smoothing > 0.f, group, mine.below);
  const RowSums sums = parts.add_up(
      mine, c, [&](int i) { return min(p.vocab, line + (i + 1) * params.share) - max(line + i * params.share, 0); });
  const float log_sum = logf(sums.exps.sum);
  if (exists && group.lane == 0 && part == 0) put_row(params.fwd, r, kept, kept && column >= 0, sums, log_sum);
  __syncwarp();  // the lanes of a short row: one of them has read the logit of the label before another overwrites it
  if (!exists) return;
  T* out = static_cast<T*>(params.dlogits) + r * params.dlogits_stride;
  put_gradient<Config>(out, copy, first, apart, end, column, kept, Gradient(p, dloss, sums.exps.max, log_sum));
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void scale_kernel(const __grid_constant__ ScaleParams p) {
  using T = typename Config::T;
  constexpr int kWidth = Config::kWidth;
  const int64_t r = blockIdx.x;
  const float dloss = p.dlosses[r * p.dlosses_stride], expected = p.expected[r * p.expected_stride];
  if (dloss == expected || !p.kept[r * p.kept_stride]) return;
  const float factor = dloss / expected;
  T* row = static_cast<T*>(p.dlogits) + r * p.dlogits_stride;
  const int first = first_aligned<Config::kLine>(row) + threadIdx.x * kWidth, apart = blockDim.x * kWidth;
  walk_row<Config::kLoads, kWidth>(first, apart, p.vocab, [&](auto kCount, int column) {
    Vec<T, kWidth> x[kCount];
    load_step(x, row, column, apart, p.vocab, T());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float d[kWidth];
      widen(d, x[i]);
#pragma unroll
      for (float& each : d) each *= factor;
      store_within<kWidth>(row, column + i * apart, p.vocab, narrow<T>(d));
    }
  });
}

template <typename Config>
void run_fwd(const FwdParams& p, cudaStream_t stream) {
  const int lanes = lanes_for<Config::kThreads>(p.problem.vocab, kFwdChunks * Config::kChunk);
  launch<fwd_kernel<Config>>(row_groups(p.problem.rows, lanes), p, stream);
}

// Returns how many columns the longest row has, including those of its first line of the cache that are before it.
template <typename Config>
int spanned_columns(const void* rows, int64_t stride, int vocab) {
  const bool aligned = reinterpret_cast<uintptr_t>(rows) % 128 == 0 && stride % Config::kLine == 0;
  return vocab + (aligned ? 0 : Config::kLine - 1);
}

template <typename Config>
void run_bwd(BwdParams p, cudaStream_t stream) {
  const int rows = p.problem.rows;
  if (p.problem.vocab == 0 || rows == 0) return;
  const int columns = spanned_columns<Config>(p.dlogits, p.dlogits_stride, p.problem.vocab);
  const int threads = lanes_for<Config::kThreads>(columns, Config::kChunk);
  p.piece_columns = threads * Config::kChunk;
  if (p.expected != nullptr) {
    p.piece_columns *= ceil_div(ceil_div(columns, p.piece_columns), std::max(kComparingBlocks / rows, 1));
  }
  const int pieces = ceil_div(columns, p.piece_columns);
  p.pieces = Divisor(pieces);
  const int pieces_per_block = Config::kThreads / threads;
  const LaunchShape shape{.grid = dim3(ceil_div(int64_t{rows} * pieces, pieces_per_block)),
                          .block = dim3(threads, pieces_per_block)};
  launch<bwd_kernel<Config>>(shape, p, stream);
}

// Runs one kernel if the shared memory of a cluster, or of a block before sm_90, holds a row; otherwise two.
template <typename T>
void run_fwd_bwd(FwdBwdParams p, cudaStream_t stream) {
  using Config = FwdBwdConfig<T>;
  constexpr auto kKernel = fwd_bwd_kernel<Config>;
  const Problem& problem = p.fwd.problem;
  const int columns = spanned_columns<Config>(problem.logits, problem.row_stride, problem.vocab);
  const int most_bytes = max_shared_bytes(current_device()) - 1024;  // some is static
  const auto share_of = [&](int parts) { return ceil_div(ceil_div(columns, parts), Config::kLine) * Config::kLine; };
  const auto bytes_of = [&](int parts) { return int64_t{share_of(parts)} * static_cast<int>(sizeof(T)); };
  const int most_parts = can_start_early<kKernel>() ? kMaxParts : 1;
  int parts = 1;
  while (parts < most_parts && bytes_of(parts) > kShareBytes) parts *= 2;
  if (problem.vocab == 0 || bytes_of(parts) > most_bytes) {
    run_fwd<FwdConfig<T>>(p.fwd, stream);
    return run_bwd<BwdConfig<T>>({.problem = problem,
                                  .dlosses = p.dlosses,
                                  .dlosses_stride = p.dlosses_stride,
                                  .lse = p.fwd.lse,
                                  .lse_stride = 1,
                                  .dlogits = p.dlogits,
                                  .dlogits_stride = p.dlogits_stride},
                                 stream);
  }
  p.parts = Divisor(parts);
  p.share = share_of(parts);
  LaunchShape shape = row_groups(problem.rows, lanes_for<Config::kThreads>(p.share, kFwdBwdChunks * Config::kChunk));
  shape.grid.x *= parts;
  shape.shared_bytes = static_cast<int>(bytes_of(parts)) * shape.block.y;
  shape.cluster = parts;
  launch<kKernel>(shape, p, stream);
}

template <typename Config>
void run_scale(const ScaleParams& p, cudaStream_t stream) {
  if (p.vocab == 0) return;
  launch<scale_kernel<Config>>({.grid = dim3(p.rows), .block = dim3(Config::kThreads)}, p, stream);
}

}  // namespace flash::xentropy
