// Softmax of scaled scores over what a mask leaves, and its gradient:
//
//   y = exp(scale x - max) / sum, 0 where left out        dx = scale y (dy - sum_j y_j dy_j)
//
// A group of lanes takes a row and goes over it twice, once for the sums and once to write. A row that the group holds
// in registers is read once; of longer ones, what the second pass reads is still in the cache. Maths in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/launch.h"
#include "fused_softmax/params.h"
#include "ptx/math.cuh"
#include "tile/exp_sum.cuh"
#include "tile/row.cuh"
#include "tile/vec.cuh"

namespace flash::fused_softmax {

constexpr float kLog2E = 1.4426950408889634f;

template <typename T_, bool kAligned_, int kLoads_, int kThreads_, int kBlocks_>
struct Config {
  using T = T_;
  static constexpr bool kAligned = kAligned_;  // whether all rows start and end at an aligned access
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kLoads = kLoads_;  // accesses of each tensor that a thread has on their way, and holds
  static constexpr int kChunk = kLoads * kWidth;
  static constexpr int kThreads = kThreads_;  // of a block, at most
  static constexpr int kBlocks = kBlocks_;    // that a multiprocessor has registers for, at least
};

// The forward waits for the issue of its instructions as much as for memory: hence the instances for aligned rows.
// H200, bf16, share of the rate of a copy, of rows of 1024, 2048 and 4096: causal 93, 94 and 91 %, with a mask 98, 97
// and 92 %. A causal copy without any maths reaches 92, 95 and 94 %. (Half the loads, on twice the lanes, cost a fifth;
// zeros that are stored before the scores are loaded cost a twentieth.)
template <typename T, bool kAligned>
using FwdConfig = Config<T, kAligned, 4, 512, 2>;
template <typename T, bool kAligned>
using BwdConfig = Config<T, kAligned, 2, 512, 3>;

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

// Changes the bits that are set in `signs` in each word; replaces the scores whose byte is not 0 by -inf.
template <typename T, int kWidth, int kLoads>
__device__ void flip(Packed<T, kWidth> (&scores)[kLoads], uint32_t signs) {
  if (signs == 0) return;
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

// The largest of all elements. Pairs are compared as they are, which spares half of the work.
template <typename T, int kWidth, int kLoads>
__device__ float largest_of(const Packed<T, kWidth> (&vecs)[kLoads]) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t largest = repeated<T>(-INFINITY);
#pragma unroll
  for (const auto& vec : vecs) {
#pragma unroll
    for (const uint32_t word : vec.words) {
      if constexpr (sizeof(T) == 2) {
        const Pair pair = __hmax2(reinterpret_cast<const Pair&>(largest), reinterpret_cast<const Pair&>(word));
        largest = reinterpret_cast<const uint32_t&>(pair);
      } else {
        largest = __float_as_uint(fmaxf(__uint_as_float(largest), __uint_as_float(word)));
      }
    }
  }
  if constexpr (sizeof(T) == 2) {
    const float2 pair = ptx::unpack<T>(largest);
    return fmaxf(pair.x, pair.y);
  } else {
    return __uint_as_float(largest);
  }
}

// A thread's share of the scores, -inf where left out and outside, to be multiplied by the positive p.exponent_scale.
template <typename Config, typename T = typename Config::T>
__device__ void load_scores(Packed<T, Config::kWidth> (&vecs)[Config::kLoads], const T* x, const MaskRow& mask,
                            int column, int apart, int seen, uint32_t signs) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const uint32_t least = repeated<T>(-INFINITY);
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
}

// Where a thread's share of a row lies in a pass over it.
template <typename Config>
struct Share {
  int column, apart;

  // For all rows: of those that start at an aligned access, the compiler is told that no column is negative.
  __device__ Share(int column, int apart) : column(column), apart(apart) {
    if constexpr (Config::kAligned) __builtin_assume(column >= 0 && apart > 0);
  }

  // Whether access i has columns among 0 .. cols, or begins before them.
  __device__ bool reaches(int i, int cols) const { return column + i * apart < cols; }

  // Stores the share: what values_of(i, values) gives for access i, if that reaches the columns that are seen, else 0.
  template <typename T, typename ValuesOf>
  __device__ void store(T* row, const Row& bounds, ValuesOf&& values_of) const {
    T* const own = row + column;
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      Vec<T, Config::kWidth> vec{};
      if (reaches(i, bounds.seen)) {
        float values[Config::kWidth];
        values_of(i, values);
        vec = narrow<T>(values);
      }
      if constexpr (Config::kAligned) {
        if (reaches(i, bounds.cols)) flash::store(own + i * apart, vec);
      } else {
        store_within<Config::kWidth>(row, column + i * apart, bounds.cols, vec);
      }
    }
  }
};

// The first column of a lane's first access to a row.
template <typename Config, typename T>
__device__ int first_column(const T* row, const RowGroup& group) {
  return (Config::kAligned ? 0 : first_aligned<Config::kWidth>(row)) + group.lane * Config::kWidth;
}

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
  const int first = first_column<Config>(y, group);

  Packed<T, Config::kWidth> vecs[Config::kLoads];
  float scores[Config::kLoads][Config::kWidth];  // and their exponentials
  ExpSum own;
  for (int column = first; column < row.seen; column += step) {
    const Share<Config> share{column, apart};
    load_scores<Config>(vecs, x, mask, column, apart, row.seen, p.signs);
    own.raise(largest_of(vecs), p.exponent_scale);
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      widen(scores[i], vecs[i]);
      if (share.reaches(i, row.seen)) own.add_below(scores[i], p.exponent_scale);
    }
  }
  const auto all =
      own.over(p.exponent_scale, [&](auto op, float v) { return group_reduce<decltype(op)>(v, group, shared); });
  const float inverse = all.sum == 0.f ? 0.f : ptx::reciprocal(all.sum);  // nothing was left, or nothing but -inf
  const float factor = p.held ? inverse * ptx::exp2((own.max - all.max) * p.exponent_scale) : inverse;
  for (int column = first; column < row.cols; column += step) {
    const Share<Config> share{column, apart};
    if (!p.held && column < row.seen) {
      load_scores<Config>(vecs, x, mask, column, apart, row.seen, p.signs);
#pragma unroll
      for (int i = 0; i < Config::kLoads; ++i) {
        widen(scores[i], vecs[i]);
#pragma unroll
        for (float& score : scores[i]) score = ptx::exp2((score - all.max) * p.exponent_scale);
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
  const int first = first_column<Config>(dx, group);

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

// Calls run_aligned(Constant<whether all rows start and end at an aligned access>).
template <typename T, typename RunAligned>
void if_aligned(const Rows& rows, const void* out, RunAligned&& run_aligned) {
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && rows.cols % (16 / sizeof(T)) == 0;
  dispatch_flags(run_aligned, aligned);
}

template <typename Config, auto kKernel, typename Params>
void run(Params p, cudaStream_t stream) {
  const int before = Config::kAligned ? 0 : Config::kWidth - 1;  // columns of an aligned access that precede a row
  const int columns = p.rows.cols + before;
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
  if_aligned<T>(p.rows, p.y, [&](auto kAligned) {
    using Config = FwdConfig<T, kAligned>;
    run<Config, fwd_kernel<Config>>(p, stream);
  });
}

template <typename T>
void run_bwd(const BwdParams& p, cudaStream_t stream) {
  if_aligned<T>(p.rows, p.dx, [&](auto kAligned) {
    using Config = BwdConfig<T, kAligned>;
    run<Config, bwd_kernel<Config>>(p, stream);
  });
}

}  // namespace flash::fused_softmax
