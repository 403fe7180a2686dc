// Softmax of scaled scores over what a mask leaves, and its gradient:
//
//   y = exp(scale x - max) / sum, 0 where left out        dx = scale y (dy - sum_j y_j dy_j)
//
// A group of lanes takes a row and goes over it twice, once for the sums and once to write. A row that the group holds
// in registers is read once; of longer ones, what the second pass reads is still in the cache. Maths in fp32.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "fused_softmax/params.h"
#include "ptx/math.cuh"
#include "tile/exp_sum.cuh"
#include "tile/row.cuh"
#include "tile/vec.cuh"

namespace flash::fused_softmax {

constexpr float kLog2E = 1.4426950408889634f;

template <typename T_, int kLoads_, int kThreads_, int kBlocks_>
struct Config {
  using T = T_;
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kLoads = kLoads_;  // accesses of each tensor that a thread has on their way, and holds
  static constexpr int kChunk = kLoads * kWidth;
  static constexpr int kThreads = kThreads_;  // of a block, at most
  static constexpr int kBlocks = kBlocks_;    // that a multiprocessor has registers for, at least
};

// H200, bf16, share of the rate of a copy, rows of 1024, 4096, 16384. Forward with a mask: 75, 59, 62 %; with 2 loads
// 65, 47, 56 %. Backward: 103, 103, 86 %; with 4 loads as much, but 54 % for rows of 128, where this has 100 %.
template <typename T>
using FwdConfig = Config<T, 4, 512, 2>;
template <typename T>
using BwdConfig = Config<T, 2, 1024, 1>;

// One of the rows, as its group sees it. Groups without a row have one of no columns.
struct Row {
  int64_t at;  // of all rows
  int head;    // of the heads of all entries
  int index;   // of the row within its head
  int cols;    // of the row
  int seen;    // of these, the first ones, which are not past the diagonal

  __device__ Row(const Rows& rows, const RowGroup& group) : at(group.row < rows.count ? group.row : 0) {
    head = rows.seqlen_q.divide(static_cast<int>(at));
    index = rows.seqlen_q.remainder(static_cast<int>(at), head);
    cols = group.row < rows.count ? rows.cols : 0;
    seen = rows.causal && index + 1 < cols ? index + 1 : cols;
  }
};

// What a mask leaves out of one row.
struct MaskRow {
  const uint8_t* data;  // null if nothing
  bool one_for_all;

  __device__ MaskRow(const Mask& mask, const Row& row) : data(mask.data), one_for_all(mask.one_for_all) {
    if (data == nullptr) return;
    const int batch = mask.heads.divide(row.head), head = mask.heads.remainder(row.head, batch);
    data += batch * mask.batch_stride + head * mask.head_stride + row.index * mask.row_stride;
  }

  // The mask of kWidth columns, of which some are among 0 .. cols.
  template <int kWidth>
  __device__ Vec<uint8_t, kWidth> load(int column, int cols) const {
    if (!one_for_all && first_aligned<kWidth>(data + column) == 0) return flash::load<kWidth>(data + column);
    Vec<uint8_t, kWidth> vec;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) vec[j] = data[one_for_all ? 0 : min(max(column + j, 0), cols - 1)];
    return vec;
  }
};

// A thread's share of a pass over a row: kLoads accesses, of which columns outside 0 .. cols are anything.
template <typename Config, typename T = typename Config::T>
__device__ void load_share(Vec<T, Config::kWidth> (&vecs)[Config::kLoads], const T* row, int column, int apart,
                           int cols) {
#pragma unroll
  for (int i = 0; i < Config::kLoads; ++i) vecs[i] = load_over<Config::kWidth>(row, column + i * apart, cols);
}

// The same of scores, -inf where left out and outside.
template <typename Config, typename T = typename Config::T>
__device__ void load_scores(float (&scores)[Config::kChunk], const T* x, const MaskRow& mask, int column, int apart,
                            int seen, float scale) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  Vec<T, kWidth> vecs[kLoads];
  load_share<Config>(vecs, x, column, apart, seen);
#pragma unroll
  for (int i = 0; i < Config::kChunk; ++i) scores[i] = scale * static_cast<float>(vecs[i / kWidth][i % kWidth]);
  if (mask.data != nullptr) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (column + i * apart >= seen) continue;
      const auto left_out = mask.load<kWidth>(column + i * apart, seen);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) scores[i * kWidth + j] = left_out[j] ? -INFINITY : scores[i * kWidth + j];
    }
  }
  if (are_inside<kLoads, kWidth>(column, apart, seen)) return;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const Inside<kWidth> inside(column + i * apart, seen);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) scores[i * kWidth + j] = inside[j] ? scores[i * kWidth + j] : -INFINITY;
  }
}

// Stores a thread's share of the row: value(k), k counting the elements, and 0 from column `seen` on.
template <typename Config, typename T = typename Config::T, typename Value>
__device__ void store_share(T* row, int column, int apart, const Row& bounds, Value&& value) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const auto store_all = [&](auto kWhole) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = column + i * apart;
      Vec<T, kWidth> vec;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) vec[j] = static_cast<T>(value(i * kWidth + j));
      if constexpr (kWhole) {
        store(row + at, vec);
      } else {
        replace_outside(vec, at, bounds.seen, T());
        store_within<kWidth>(row, at, bounds.cols, vec);
      }
    }
  };
  are_inside<kLoads, kWidth>(column, apart, bounds.seen) ? store_all(Constant<true>{}) : store_all(Constant<false>{});
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams p) {
  using T = typename Config::T;
  __shared__ float shared[32];
  const RowGroup group(p.lanes);
  const Row row(p.rows, group);
  const MaskRow mask(p.mask, row);
  const T* x = static_cast<const T*>(p.x) + row.at * p.rows.cols;
  T* y = static_cast<T*>(p.y) + row.at * p.rows.cols;
  const int apart = group.lanes * Config::kWidth, step = Config::kLoads * apart;
  const int first = first_aligned<Config::kWidth>(y) + group.lane * Config::kWidth;

  float scores[Config::kChunk];  // and their exponentials
  ExpSum own;
  for (int column = first; column < row.cols; column += step) {
    load_scores<Config>(scores, x, mask, column, apart, row.seen, p.scale);
    own.add(scores, kLog2E);
  }
  const auto all = own.over(kLog2E, [&](auto op, float v) { return group_reduce<decltype(op)>(v, group, shared); });
  const float inverse = all.sum == 0.f ? 0.f : 1.f / all.sum;  // nothing was left, or nothing but -inf
  const float factor = p.held ? inverse * ptx::exp2((own.max - all.max) * kLog2E) : inverse;
  for (int column = first; column < row.cols; column += step) {
    if (!p.held) {
      load_scores<Config>(scores, x, mask, column, apart, row.seen, p.scale);
#pragma unroll
      for (float& score : scores) score = ptx::exp2((score - all.max) * kLog2E);
    }
    store_share<Config>(y, column, apart, row, [&](int k) { return scores[k] * factor; });
  }
}

// A thread's share of weights and incoming gradients.
template <typename Config>
struct Pairs {
  Vec<typename Config::T, Config::kWidth> y[Config::kLoads], dy[Config::kLoads];

  template <typename T>
  __device__ void load(const T* y_row, const T* dy_row, int column, int apart, int seen) {
    load_share<Config>(y, y_row, column, apart, seen);
    load_share<Config>(dy, dy_row, column, apart, seen);
  }
  __device__ float weight(int k) const { return static_cast<float>(y[k / Config::kWidth][k % Config::kWidth]); }
  __device__ float incoming(int k) const { return static_cast<float>(dy[k / Config::kWidth][k % Config::kWidth]); }

  // Over columns among 0 .. seen.
  __device__ float dot(int column, int apart, int seen) const {
    constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
    const auto dot_of = [&](auto kWhole) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const Inside<kWidth> inside(column + i * apart, seen);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float product = weight(i * kWidth + j) * incoming(i * kWidth + j);
          sum += kWhole || inside[j] ? product : 0.f;
        }
      }
      return sum;
    };
    const bool whole = are_inside<kLoads, kWidth>(column, apart, seen);
    return whole ? dot_of(Constant<true>{}) : dot_of(Constant<false>{});
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void bwd_kernel(const __grid_constant__ BwdParams p) {
  using T = typename Config::T;
  __shared__ float shared[32];
  const RowGroup group(p.lanes);
  const Row row(p.rows, group);
  const T* y = static_cast<const T*>(p.y) + row.at * p.rows.cols;
  const T* dy = static_cast<const T*>(p.dy) + row.at * p.rows.cols;
  T* dx = static_cast<T*>(p.dx) + row.at * p.rows.cols;
  const int apart = group.lanes * Config::kWidth, step = Config::kLoads * apart;
  const int first = first_aligned<Config::kWidth>(dx) + group.lane * Config::kWidth;

  Pairs<Config> pairs;
  float sum = 0.f;
  for (int column = first; column < row.cols; column += step) {
    pairs.load(y, dy, column, apart, row.seen);
    sum += pairs.dot(column, apart, row.seen);
  }
  sum = group_reduce<Sum>(sum, group, shared);
  for (int column = first; column < row.cols; column += step) {
    if (!p.held) pairs.load(y, dy, column, apart, row.seen);
    store_share<Config>(dx, column, apart, row,
                        [&](int k) { return p.scale * pairs.weight(k) * (pairs.incoming(k) - sum); });
  }
}

template <typename Config, auto kKernel, typename Params>
void run(Params p, const void* out, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && p.rows.cols % Config::kWidth == 0;
  const int columns = p.rows.cols + (aligned ? 0 : Config::kWidth - 1);  // with those before an aligned access
  p.lanes = lanes_for<Config::kThreads>(columns, Config::kChunk);
  p.held = columns <= p.lanes * Config::kChunk;
  launch<kKernel>(row_groups(p.rows.count, p.lanes), p, stream);
}

template <typename T>
void run_fwd(const FwdParams& p, cudaStream_t stream) {
  run<FwdConfig<T>, fwd_kernel<FwdConfig<T>>>(p, p.y, stream);
}

template <typename T>
void run_bwd(const BwdParams& p, cudaStream_t stream) {
  run<BwdConfig<T>, bwd_kernel<BwdConfig<T>>>(p, p.dx, stream);
}

}  // namespace flash::fused_softmax
