// Softmax of scaled scores over what a mask leaves, and its gradient:
//
//   y = exp(scale x - max) / sum, 0 where left out        dx = scale y (dy - sum_j y_j dy_j)
//
// A group of lanes takes a row and goes over it twice, once for the sums and once to write. A row that the group holds
// in registers is read once; of longer ones, what the second pass reads is still in the cache. Maths in fp32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

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

template <typename T>
using FwdConfig = Config<T, 4, 512, 2>;
template <typename T>
using BwdConfig = Config<T, 2, 512, 3>;

// One of the rows, as its group sees it. Groups without a row have one of no columns.
struct Row {
  int64_t at;  // of all rows
  int batch;
  int head;
  int index;  // of the row within its head
  int cols;   // of the row
  int seen;   // of these, the first ones, which are not past the diagonal

  __device__ Row(const Rows& rows, const RowGroup& group) {
    const bool exists = group.row < rows.count;
    const int number = exists ? static_cast<int>(group.row) : 0;
    int count = rows.inner.divide(number);
    const int inner = rows.inner.remainder(number, count);
    batch = rows.outer.divide(count);
    const int outer = rows.outer.remainder(count, batch);
    head = rows.heads_inside ? inner : outer, index = rows.heads_inside ? outer : inner;
    at = rows.heads_inside ? (int64_t{batch} * rows.inner.value + inner) * rows.outer.value + outer : number;
    cols = exists ? rows.cols : 0;
    seen = rows.causal && index + 1 < cols ? index + 1 : cols;
  }
};

// What a mask leaves out of one row, a byte for each column.
struct MaskRow {
  const uint8_t* data;  // null if nothing

  __device__ MaskRow(const Mask& mask, Row& row) : data(mask.data) {
    if (data == nullptr) return;
    data += row.batch * mask.batch_stride + row.head * mask.head_stride + row.index * mask.row_stride;
    if (!mask.one_for_all) return;
    if (*data != 0) row.seen = 0;
    data = nullptr;
  }

  // The bytes of a thread's share of the row, of which columns outside 0 .. cols are anything.
  template <int kLoads, int kWidth>
  __device__ void load(Packed<uint8_t, kWidth> (&bytes)[kLoads], int column, int apart, int cols) const {
    if (first_aligned<kWidth>(data + column) == 0) {
      load_share(bytes, data, column, apart, cols, 0);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) bytes[i] = load_anywhere<kWidth>(data, column + i * apart, cols);
    }
  }

 private:
  // Bytes at any address, from the aligned words that hold them.
  template <int kWidth>
  __device__ static Packed<uint8_t, kWidth> load_anywhere(const uint8_t* row, int column, int cols) {
    constexpr int kWords = kWidth / 4;
    const int before = -first_aligned<4>(row + column);
    Packed<uint8_t, 4> words[kWords + 1];
    load_share(words, row, column - before, 4, cols, 0);
    Packed<uint8_t, kWidth> bytes;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bytes.words[i] = __funnelshift_r(words[i].words[0], words[i + 1].words[0], 8 * before);
    }
    return bytes;
  }
};

// Changes the bits that are set in `signs` in each word, and replaces the scores whose byte is not 0 by -inf.
template <typename T, int kWidth, int kLoads>
__device__ void flip(Packed<T, kWidth> (&scores)[kLoads], uint32_t signs) {
#pragma unroll
  for (auto& vec : scores) {
#pragma unroll
    for (uint32_t& word : vec.words) word ^= signs;
  }
}

template <typename T, int kWidth>
__device__ void leave_out(Packed<T, kWidth>& scores, const Packed<uint8_t, kWidth>& bytes) {
  constexpr int kPerWord = 4 / sizeof(T);
  const uint32_t least = repeated<T>(-INFINITY);
#pragma unroll
  for (int i = 0; i < kWidth; i += kPerWord) {
    const uint32_t mask = ptx::spread_nonzero<sizeof(T)>(bytes.words[i / 4], i % 4);
    uint32_t& word = scores.words[i / kPerWord];
    word = (word & ~mask) | (least & mask);
  }
}

// A thread's share of the scores, -inf where left out and outside, to be multiplied by the positive p.exponent_scale.
template <typename Config, typename T = typename Config::T>
__device__ void load_scores(float (&scores)[Config::kLoads][Config::kWidth], const T* x, const MaskRow& mask,
                            int column, int apart, int seen, uint32_t signs) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const uint32_t least = repeated<T>(-INFINITY);
  Packed<T, kWidth> vecs[kLoads];
  load_share(vecs, x, column, apart, seen, least ^ signs);
  if (mask.data != nullptr) {
    Packed<uint8_t, kWidth> bytes[kLoads];
    mask.load(bytes, column, apart, seen);
    flip(vecs, signs);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) leave_out(vecs[i], bytes[i]);
  } else {
    flip(vecs, signs);
  }
  replace_around(vecs, column, apart, seen, least);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) widen(scores[i], vecs[i]);
}

// Where a thread's share of a row lies in a pass over it.
template <typename Config>
struct Share {
  int column, apart;

  // Whether access i has columns among 0 .. cols, or begins before them.
  __device__ bool reaches(int i, int cols) const { return column + i * apart < cols; }

  // Stores the share: what values_of(i, values) gives for access i, if that reaches the columns that are seen, else 0.
  template <typename T, typename ValuesOf>
  __device__ void store(T* row, const Row& bounds, ValuesOf&& values_of) const {
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      float values[Config::kWidth] = {};
      if (reaches(i, bounds.seen)) values_of(i, values);
      store_within<Config::kWidth>(row, column + i * apart, bounds.cols, narrow<T>(values));
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams p) {
  using T = typename Config::T;
  __shared__ float shared[32];
  const RowGroup group;
  Row row(p.rows, group);
  const MaskRow mask(p.mask, row);
  const T* x = static_cast<const T*>(p.x) + row.at * p.rows.cols;
  T* y = static_cast<T*>(p.y) + row.at * p.rows.cols;
  const int apart = group.lanes * Config::kWidth, step = Config::kLoads * apart;
  const int first = first_aligned<Config::kWidth>(y) + group.lane * Config::kWidth;

  float scores[Config::kLoads][Config::kWidth];  // and their exponentials
  ExpSum own;
  for (int column = first; column < row.seen; column += step) {
    const Share<Config> share{column, apart};
    load_scores<Config>(scores, x, mask, column, apart, row.seen, p.signs);
    own.add(scores, p.exponent_scale, [&](int i) { return share.reaches(i, row.seen); });
  }
  const auto all =
      own.over(p.exponent_scale, [&](auto op, float v) { return group_reduce<decltype(op)>(v, group, shared); });
  const float inverse = all.sum == 0.f ? 0.f : 1.f / all.sum;  // nothing was left, or nothing but -inf
  const float factor = p.held ? inverse * ptx::exp2((own.max - all.max) * p.exponent_scale) : inverse;
  for (int column = first; column < row.cols; column += step) {
    const Share<Config> share{column, apart};
    if (!p.held && column < row.seen) {
      load_scores<Config>(scores, x, mask, column, apart, row.seen, p.signs);
#pragma unroll
      for (auto& vec : scores) {
#pragma unroll
        for (float& score : vec) score = ptx::exp2((score - all.max) * p.exponent_scale);
      }
    }
    share.store(y, row, [&](int i, float (&values)[Config::kWidth]) {
#pragma unroll
      for (int j = 0; j < Config::kWidth; ++j) values[j] = scores[i][j] * factor;
    });
  }
}

// A thread's share of weights and incoming gradients, 0 outside.
template <typename Config>
struct Pairs {
  using T = typename Config::T;
  static constexpr int kWidth = Config::kWidth;
  Packed<T, kWidth> y[Config::kLoads], dy[Config::kLoads];

  __device__ void load(const T* y_row, const T* dy_row, int column, int apart, int seen) {
    load_share(y, y_row, column, apart, seen, 0);
    load_share(dy, dy_row, column, apart, seen, 0);
    replace_around(y, column, apart, seen, 0);
    replace_around(dy, column, apart, seen, 0);
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void bwd_kernel(const __grid_constant__ BwdParams p) {
  using T = typename Config::T;
  __shared__ float shared[32];
  const RowGroup group;
  const Row row(p.rows, group);
  const T* y = static_cast<const T*>(p.y) + row.at * p.rows.cols;
  const T* dy = static_cast<const T*>(p.dy) + row.at * p.rows.cols;
  T* dx = static_cast<T*>(p.dx) + row.at * p.rows.cols;
  const int apart = group.lanes * Config::kWidth, step = Config::kLoads * apart;
  const int first = first_aligned<Config::kWidth>(dx) + group.lane * Config::kWidth;

  Pairs<Config> pairs;
  float weights[Config::kWidth], incoming[Config::kWidth];
  float sum = 0.f;
  for (int column = first; column < row.seen; column += step) {
    const Share<Config> share{column, apart};
    pairs.load(y, dy, column, apart, row.seen);
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      if (!share.reaches(i, row.seen)) continue;
      widen(weights, pairs.y[i]);
      widen(incoming, pairs.dy[i]);
#pragma unroll
      for (int j = 0; j < Config::kWidth; ++j) sum += weights[j] * incoming[j];
    }
  }
  sum = group_reduce<Sum>(sum, group, shared);
  for (int column = first; column < row.cols; column += step) {
    const Share<Config> share{column, apart};
    if (!p.held && column < row.seen) pairs.load(y, dy, column, apart, row.seen);
    share.store(dx, row, [&](int i, float (&values)[Config::kWidth]) {
      widen(weights, pairs.y[i]);
      widen(incoming, pairs.dy[i]);
#pragma unroll
      for (int j = 0; j < Config::kWidth; ++j) values[j] = p.scale * weights[j] * (incoming[j] - sum);
    });
  }
}

template <typename Config, auto kKernel, typename Params>
void run(Params p, const void* out, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && p.rows.cols % Config::kWidth == 0;
  const int columns = p.rows.cols + (aligned ? 0 : Config::kWidth - 1);  // with those before an aligned access
  const int lanes = lanes_for<Config::kThreads>(columns, Config::kChunk);
  p.held = columns <= lanes * Config::kChunk;
  launch<kKernel>(row_groups(p.rows.count, lanes), p, stream);
}

template <typename T>
void run_fwd(FwdParams p, cudaStream_t stream) {
  constexpr uint32_t kSign = sizeof(T) == 2 ? 0x80008000 : 0x80000000;
  p.signs = std::signbit(p.scale) ? kSign : 0;
  // Positive and finite, so that what is left out is so at any scale, also 0.
  using Limits = std::numeric_limits<float>;
  p.exponent_scale = std::clamp(std::abs(p.scale) * kLog2E, Limits::denorm_min(), Limits::max());
  run<FwdConfig<T>, fwd_kernel<FwdConfig<T>>>(p, p.y, stream);
}

template <typename T>
void run_bwd(const BwdParams& p, cudaStream_t stream) {
  run<BwdConfig<T>, bwd_kernel<BwdConfig<T>>>(p, p.dx, stream);
}

}  // namespace flash::fused_softmax
