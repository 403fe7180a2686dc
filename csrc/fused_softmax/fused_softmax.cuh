// Softmax of the scaled scores that a mask does not leave out, and its gradient:
//
//   y = exp(scale x - max) / sum, 0 where left out        dx = scale y (dy - sum_j y_j dy_j)
//
// A group of lanes takes a row and goes over it twice: once for the sums, and once to write. A row that fits the
// registers of the group is read once. A longer row is read twice, but the second pass finds it in the cache. All
// arithmetic is in fp32.
//
// Rows that do not all start and end at an aligned access are split: the aligned accesses that lie fully in the row,
// and the few columns at its edges. Each lane handles at most one column at the edges.
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

template <typename T_, bool kAligned_, int kLoads_>
struct Config {
  using T = T_;
  static constexpr bool kAligned = kAligned_;  // whether all rows start and end at an aligned access
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kLoads = kLoads_;  // accesses per tensor that a thread has in flight and holds
  static constexpr int kChunk = kLoads * kWidth;
  static constexpr int kThreads = 512;                 // per block, at most
  static constexpr int kBlocks = kLoads_ > 2 ? 2 : 3;  // thread blocks per SM, at least, that the registers must allow
};

// With fewer loads on more lanes, the forward is slower, and so is the backward of long rows, which the lanes then
// cannot hold. The backward of short rows is faster with fewer loads.
constexpr int kLoads = 4, kShortBwdLoads = 2, kShortBwdBytes = 2048;

// Bytes that the forward prefetches into the L2 cache for each SM. Without this, memory would be idle while a thread
// block sums and writes its row. With more bytes, the prefetch would evict data that is still needed. The backward does
// not prefetch: it has twice the loads in flight, and prefetching makes it slower. Only rows that gain from the
// prefetch use it: causal rows of at least one warp, and other rows of at least four warps.
constexpr int kBytesAhead = 32 << 10;

// The position of one row.
struct Row {
  int batch;
  int head;
  int index;      // index of the row within its head
  int64_t start;  // index of its first element in the whole tensor
  int cols;       // columns of the row; 0 if there is no such row
  int seen;       // the first columns of the row, up to the diagonal

  __device__ Row(const Rows& rows, int64_t turn) {
    const bool exists = turn < rows.count;
    const int number = exists ? static_cast<int>(turn) : 0;
    const int count = rows.inner.divide(number), inner = rows.inner.remainder(number, count);
    batch = rows.outer.divide(count);
    const int outer = rows.outer.remainder(count, batch);
    head = rows.heads_inside ? inner : outer, index = rows.heads_inside ? outer : inner;
    const int heads = rows.heads_inside ? rows.inner.value : rows.outer.value;
    const int last = (rows.heads_inside ? rows.outer.value : rows.inner.value) - 1;
    if (rows.causal) index = index % 2 == 0 ? index / 2 : last - index / 2;
    start = ((int64_t{batch} * heads + head) * (last + 1) + index) * rows.cols;
    cols = exists ? rows.cols : 0;
    seen = rows.causal && index + 1 < cols ? index + 1 : cols;
  }
};

// The part of a mask that belongs to one row: one byte for each column.
struct MaskRow {
  bool exists;  // whether there are bytes for each column; the same for all rows
  const uint8_t* data = nullptr;

  __device__ MaskRow(const Mask& mask, Row& row) : exists(mask.data != nullptr && !mask.one_for_all) {
    if (mask.data == nullptr) return;
    data = mask.data + row.batch * mask.batch_stride + row.head * mask.head_stride + row.index * mask.row_stride;
    if (mask.one_for_all && *data != 0) row.seen = 0;
  }

  // Loads the bytes of a thread's share of the row. All accesses must lie in the row.
  template <int kLoads, int kWidth>
  __device__ void load(Packed<uint8_t, kWidth> (&bytes)[kLoads], int column, int apart, int cols) const {
    const uint8_t* const own = data + column;
    if (first_aligned<kWidth>(own) == 0) {
      load_share(bytes, data, column, apart, cols, 0);
    } else {
      load_anywhere(bytes, own, apart, cols - column);
    }
  }

 private:
  // Loads the bytes from the aligned words that hold them, for a mask at any address.
  template <int kLoads, int kWidth>
  __device__ static void load_anywhere(Packed<uint8_t, kWidth> (&bytes)[kLoads], const uint8_t* own, int apart,
                                       int cols) {
    constexpr int kWords = kWidth / 4;
    const int before = -first_aligned<4>(own), cols_across = before == 0 ? 0 : cols;
    uint32_t words[kLoads][kWords + 1];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const auto* const from = reinterpret_cast<const uint32_t*>(own - before + i * apart);
#pragma unroll
      for (int k = 0; k <= kWords; ++k) words[i][k] = i * apart < (k < kWords ? cols : cols_across) ? from[k] : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) bytes[i].words[k] = __funnelshift_r(words[i][k], words[i][k + 1], 8 * before);
    }
  }
};

// A row as its body, which is the aligned accesses that lie fully in the row, and its edges, which are the columns
// before and after the body. The edges have fewer columns than two accesses, so each lane of a group has at most one of
// them. Columns are counted from the first one of the body.
template <typename Config>
struct Body {
  int first;  // column of the row at which the body begins
  int cols, seen;
  int edge;  // column of this lane at the edges, if it has one
  bool has_edge, sees_edge;

  __device__ Body(const Row& row, int lane) : first(0), cols(row.cols), seen(row.seen), edge(0) {
    has_edge = sees_edge = false;
    if constexpr (!Config::kAligned) {
      constexpr int kWidth = Config::kWidth;
      first = min(static_cast<int>(-row.start & (kWidth - 1)), row.cols);
      cols = (row.cols - first) / kWidth * kWidth;
      seen = max(0, min(row.seen - first, cols));
      edge = lane < first ? lane - first : lane - first + cols;
      has_edge = edge < row.cols - first, sees_edge = edge < row.seen - first;
    }
  }
};

// XORs each word with `signs`: negates the scores if the scale is negative, since exponent_scale must be positive.
template <typename T, int kWidth, int kLoads>
__device__ void flip(Packed<T, kWidth> (&scores)[kLoads], uint32_t signs) {
  if (signs == 0) return;
#pragma unroll
  for (auto& vec : scores) {
#pragma unroll
    for (uint32_t& word : vec.words) word ^= signs;
  }
}

// Replaces each score that has a nonzero byte in the mask, and so is left out, by -inf.
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

// Returns the largest of all elements. Pairs are compared as they are stored, which halves the work.
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

// Loads a thread's share of the scores, with -inf where left out or outside the row. They still have to be multiplied
// by p.exponent_scale, which is positive.
template <typename Config, typename T = typename Config::T>
__device__ void load_scores(Packed<T, Config::kWidth> (&vecs)[Config::kLoads], const T* x, const MaskRow& mask,
                            const Body<Config>& body, int column, int apart, uint32_t signs) {
  constexpr int kWidth = Config::kWidth, kLoads = Config::kLoads;
  const uint32_t least = repeated<T>(-INFINITY);
  load_share(vecs, x, column, apart, body.seen, least ^ signs);
  if (mask.exists) {
    Packed<uint8_t, kWidth> bytes[kLoads];
    mask.load(bytes, column, apart, body.seen);
    flip(vecs, signs);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) leave_out(vecs[i], bytes[i]);
  } else {
    flip(vecs, signs);
  }
  replace_behind(vecs, column, apart, body.seen, least);
}

// The score of the lane's column at the edges. Its load is in flight until the score is used.
template <typename T>
struct EdgeScore {
  T loaded{};
  uint8_t left_out = 1;

  template <typename Config>
  __device__ EdgeScore(const T* x, const MaskRow& mask, const Body<Config>& body) {
    if (!body.sees_edge) return;
    loaded = x[body.edge];
    left_out = mask.exists ? mask.data[body.edge] : 0;
  }

  __device__ float score(uint32_t signs) const {
    const float value = static_cast<float>(loaded);
    return left_out != 0 ? -INFINITY : signs != 0 ? -value : value;
  }
};

// The position of a thread's share of the body of a row, in one pass over it.
template <typename Config>
struct Share {
  int column, apart;

  __device__ Share(int column, int apart) : column(column), apart(apart) { __builtin_assume(column >= 0 && apart > 0); }

  // Returns whether access i has a column among the first `cols`.
  __device__ bool reaches(int i, int cols) const { return column + i * apart < cols; }

  // Stores the share: the values that values_of(i, values) computes for access i if it has columns that are seen, and 0
  // otherwise.
  template <typename T, typename ValuesOf>
  __device__ void store(T* row, const Body<Config>& body, ValuesOf&& values_of) const {
    T* const own = row + column;
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      Vec<T, Config::kWidth> vec{};
      if (reaches(i, body.seen)) {
        float values[Config::kWidth];
        values_of(i, values);
        vec = narrow<T>(values);
      }
      if (reaches(i, body.cols)) flash::store(own + i * apart, vec);
    }
  }
};

// Prefetches the row that comes p.ahead rows later into the L2 cache, if there is one.
template <typename T>
__device__ void prefetch_later_row(const FwdParams& p, const RowGroup& group) {
  if (p.ahead == 0 || group.lane != 0 || group.row + p.ahead >= p.rows.count) return;
  const Row later(p.rows, group.row + p.ahead);
  prefetch(static_cast<const T*>(p.x) + later.start, later.seen);
}

// Turns loaded scores into exponentials relative to `max`.
template <typename Config>
__device__ void exponentiate(float (&scores)[Config::kLoads][Config::kWidth],
                             const Packed<typename Config::T, Config::kWidth> (&vecs)[Config::kLoads], float max,
                             float exponent_scale) {
#pragma unroll
  for (int i = 0; i < Config::kLoads; ++i) {
    widen(scores[i], vecs[i]);
#pragma unroll
    for (float& score : scores[i]) score = ptx::exp2((score - max) * exponent_scale);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams p) {
  using T = typename Config::T;
  const RowGroup group;
  prefetch_later_row<T>(p, group);
  Row row(p.rows, group.row);
  MaskRow mask(p.mask, row);
  const Body<Config> body(row, group.lane);
  mask.data += body.first;
  const T* x = static_cast<const T*>(p.x) + row.start + body.first;
  T* y = static_cast<T*>(p.y) + row.start + body.first;
  const int apart = group.lanes * Config::kWidth, step = Config::kLoads * apart;
  const int first = group.lane * Config::kWidth;
  const EdgeScore<T> loaded_edge(x, mask, body);

  Packed<T, Config::kWidth> vecs[Config::kLoads];
  float scores[Config::kLoads][Config::kWidth];  // later replaced by their exponentials
  ExpSum own;
  for (int column = first; column < body.seen; column += step) {
    const Share<Config> share{column, apart};
    load_scores<Config>(vecs, x, mask, body, column, apart, p.signs);
    own.raise(largest_of(vecs), p.exponent_scale);
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      widen(scores[i], vecs[i]);
      if (share.reaches(i, body.seen)) own.add_below(scores[i], p.exponent_scale);
    }
  }
  const float edge = loaded_edge.score(p.signs);
  ExpSum with_edge = own;
  if constexpr (!Config::kAligned) {
    float score[1] = {edge};
    with_edge.add(score, p.exponent_scale);
  }
  const ExpSum all = sum_group(with_edge, p.exponent_scale, group);
  // The sum is 0 if everything was left out, or if only -inf is left.
  const float inverse = all.sum == 0.f ? 0.f : ptx::reciprocal(all.sum);
  const float factor = p.held ? inverse * ptx::exp2((own.max - all.max) * p.exponent_scale) : inverse;
  for (int column = first; column < body.cols; column += step) {
    const Share<Config> share{column, apart};
    if (!p.held && column < body.seen) {
      load_scores<Config>(vecs, x, mask, body, column, apart, p.signs);
      exponentiate<Config>(scores, vecs, all.max, p.exponent_scale);
    }
    share.store(y, body, [&](int i, float (&values)[Config::kWidth]) {
#pragma unroll
      for (int j = 0; j < Config::kWidth; ++j) values[j] = scores[i][j] * factor;
    });
  }
  if (body.has_edge) y[body.edge] = static_cast<T>(ptx::exp2((edge - all.max) * p.exponent_scale) * inverse);
}

// A thread's share of the weights and the incoming gradients; 0 outside the row.
template <typename Config>
struct Pairs {
  using T = typename Config::T;
  static constexpr int kWidth = Config::kWidth;
  Packed<T, kWidth> y[Config::kLoads], dy[Config::kLoads];

  __device__ void load(const T* y_row, const T* dy_row, int column, int apart, int seen) {
    load_share(y, y_row, column, apart, seen, 0);
    load_share(dy, dy_row, column, apart, seen, 0);
    replace_behind(y, column, apart, seen, 0);
    replace_behind(dy, column, apart, seen, 0);
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void bwd_kernel(const __grid_constant__ BwdParams p) {
  using T = typename Config::T;
  const RowGroup group;
  const Row row(p.rows, group.row);
  const Body<Config> body(row, group.lane);
  const int64_t start = row.start + body.first;
  const T* y = static_cast<const T*>(p.y) + start;
  const T* dy = static_cast<const T*>(p.dy) + start;
  T* dx = static_cast<T*>(p.dx) + start;
  const int apart = group.lanes * Config::kWidth, step = Config::kLoads * apart;
  const int first = group.lane * Config::kWidth;
  T loaded_weight{}, loaded_incoming{};  // of the lane's column at the edges; in flight until they are used
  if (body.sees_edge) loaded_weight = y[body.edge], loaded_incoming = dy[body.edge];

  Pairs<Config> pairs;
  float weights[Config::kWidth], incoming[Config::kWidth];
  float sum = 0.f;
  for (int column = first; column < body.seen; column += step) {
    const Share<Config> share{column, apart};
    pairs.load(y, dy, column, apart, body.seen);
#pragma unroll
    for (int i = 0; i < Config::kLoads; ++i) {
      if (!share.reaches(i, body.seen)) continue;
      widen(weights, pairs.y[i]);
      widen(incoming, pairs.dy[i]);
#pragma unroll
      for (int j = 0; j < Config::kWidth; ++j) sum += weights[j] * incoming[j];
    }
  }
  const float edge_weight = static_cast<float>(loaded_weight), edge_incoming = static_cast<float>(loaded_incoming);
  sum = sum_group(sum + edge_weight * edge_incoming, group);
  for (int column = first; column < body.cols; column += step) {
    const Share<Config> share{column, apart};
    if (!p.held && column < body.seen) pairs.load(y, dy, column, apart, body.seen);
    share.store(dx, body, [&](int i, float (&values)[Config::kWidth]) {
      widen(weights, pairs.y[i]);
      widen(incoming, pairs.dy[i]);
#pragma unroll
      for (int j = 0; j < Config::kWidth; ++j) values[j] = p.scale * weights[j] * (incoming[j] - sum);
    });
  }
  if (body.has_edge) dx[body.edge] = static_cast<T>(p.scale * edge_weight * (edge_incoming - sum));
}

// Chooses p.held, and calls run_with(Constant<whether rows are aligned>, lanes of a row).
template <typename T, int kLoads, typename Params, typename RunWith>
void choose(Params& p, RunWith&& run_with) {
  using Any = Config<T, false, kLoads>;
  constexpr int kWidth = Any::kWidth, kEdges = 2 * kWidth;
  const bool aligned = p.rows.cols % kWidth == 0;
  const int columns = p.rows.cols / kWidth * kWidth;  // columns that are not at the edges, at most
  const int lanes = lanes_for<Any::kThreads>(columns, Any::kChunk, aligned ? kMinLanes : kEdges);
  p.held = columns <= lanes * Any::kChunk;
  dispatch_flags([&](auto kAligned) { run_with(kAligned, lanes); }, aligned);
}

template <typename T>
void run_fwd(FwdParams p, cudaStream_t stream) {
  constexpr uint32_t kSign = sizeof(T) == 2 ? 0x80008000 : 0x80000000;
  p.signs = std::signbit(p.scale) ? kSign : 0;
  // Keep the scale positive and finite, so that scores of -inf stay left out at any scale, even 0.
  using Limits = std::numeric_limits<float>;
  p.exponent_scale = std::clamp(std::abs(p.scale) * kLog2E, Limits::denorm_min(), Limits::max());
  choose<T, kLoads>(p, [&](auto kAligned, int lanes) {
    const int64_t bytes_ahead = int64_t{kBytesAhead} * num_multiprocessors(current_device());
    if (lanes >= (p.rows.causal ? 32 : 128))
      p.ahead = static_cast<int>(bytes_ahead / (p.rows.cols * int64_t{sizeof(T)}));
    launch<fwd_kernel<Config<T, kAligned, kLoads>>>(row_groups(p.rows.count, lanes), p, stream);
  });
}

template <typename T>
void run_bwd(BwdParams p, cudaStream_t stream) {
  const auto run = [&](auto kLoads) {
    choose<T, kLoads>(p, [&](auto kAligned, int lanes) {
      launch<bwd_kernel<Config<T, kAligned, kLoads>>>(row_groups(p.rows.count, lanes), p, stream);
    });
  };
  if (p.rows.cols * sizeof(T) <= kShortBwdBytes) {
    run(Constant<kShortBwdLoads>());
  } else {
    run(Constant<kLoads>());
  }
}

}  // namespace flash::fused_softmax
