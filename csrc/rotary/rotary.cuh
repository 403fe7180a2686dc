// Rotary embedding. Each pair of channels (x, y) of a token at position m is rotated by its angle in row m of a table,
//
//   x' = x cos - y sin,   y' = x sin + y cos,
//
// or in the opposite direction, if conjugate. All arithmetic is in fp32. Channels past rotary_dim, and tokens at
// positions that the table does not have, are not changed.
//
// A head is cut into vectors of kVec channels. A thread owns a unit: two vectors, at channels `low` and `high`, of one
// head of one token. If pairs combine the two halves of the rotary channels, element i of one vector forms a pair with
// element i of the other. If pairs are interleaved, both channels of a pair are in the same vector. A thread block is
// (units of a head) x (heads, of one token or several): threads that are neighbours in x access neighbouring vectors.
// Threads that take several heads of a token would read its angles less often, but were slower: with more registers,
// fewer of them run at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "rotary/params.h"
#include "tile/rotate.cuh"
#include "tile/vec.cuh"

namespace flash::rotary {

template <typename T_, int kVec_, bool kInterleaved_>
struct Config {
  using T = T_;
  static constexpr int kVec = kVec_;  // channels per access
  static constexpr bool kInterleaved = kInterleaved_;
  static constexpr bool kPairsWithin = kInterleaved && kVec > 1;  // whether a vector holds whole pairs

  // Streaming hints (evict first) on the loads and stores of x made the kernel slower.
  static constexpr int kThreads = 128;
};

template <typename Config>
Units units_of(const Params& p) {
  const uint32_t turning = p.rotary_dim / 2 / Config::kVec;
  const uint32_t copied_vectors = (p.head_dim - p.rotary_dim) / Config::kVec;
  return {turning, turning + (p.in_place ? 0 : (copied_vectors + 1) / 2)};
}

// The first channels of the two vectors of a unit. The last unit may have only one vector: then `high` is head_dim.
struct Channels {
  uint32_t low, high;
};

template <typename Config>
__device__ Channels channels_of(const Params& p, uint32_t unit) {
  constexpr uint32_t kVec = Config::kVec;
  const Units& units = p.units;
  if (unit >= units.turning) {
    const uint32_t low = p.rotary_dim + (unit - units.turning) * kVec;
    return {low, low + (units.all - units.turning) * kVec};
  }
  if (Config::kInterleaved && !Config::kPairsWithin) return {2 * unit, 2 * unit + 1};
  return {unit * kVec, unit * kVec + p.rotary_dim / 2};
}

// Returns the index of the packed sequence that holds a token: the last one that starts at or before it. Returns -1 if
// there is none.
__device__ inline int sequence_of(const Params& p, int token) {
  int first = 0, last = p.num_sequences + 1;
  while (first < last) {  // searches for cu_seqlens[first - 1] <= token < cu_seqlens[last]
    const int middle = (first + last) / 2;
    if (__ldg(p.cu_seqlens + middle) <= token) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first > p.num_sequences ? -1 : first - 1;
}

__device__ inline int64_t offset_of(const Params& p, int sequence) {
  if (p.seqlen_offsets == nullptr) return p.seqlen_offset;
  return p.seqlen_offset + (p.wide_offsets ? __ldg(static_cast<const long long*>(p.seqlen_offsets) + sequence)
                                           : __ldg(static_cast<const int*>(p.seqlen_offsets) + sequence));
}

// Returns the row of the table for token `index` of batch entry `entry`; negative if there is no such row.
__device__ inline int position_of(const Params& p, int entry, int index) {
  if (p.cu_seqlens != nullptr) {
    entry = sequence_of(p, index);
    if (entry < 0) return -1;
    index -= __ldg(p.cu_seqlens + entry);
  }
  const int64_t position = offset_of(p, entry) + index;
  return 0 <= position && position < p.positions ? static_cast<int>(position) : -1;
}

// The cosine and sine of each of the kVec pairs of a unit, in fp32.
template <int kVec>
struct Angles {
  float cos[kVec], sin[kVec];
};

// Loads kSize adjacent entries of a table.
template <int kSize, typename Table>
__device__ void load_entries(float* entries, const Table* table) {
  constexpr int kStep = sizeof(Table) * kSize <= 16 ? kSize : 16 / sizeof(Table);
#pragma unroll
  for (int i = 0; i < kSize; i += kStep) {
    const auto vec = load<kStep>(table + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) entries[i + j] = static_cast<float>(vec[j]);
  }
}

// Loads the entries of a unit from a row of a table. They are adjacent, or in two places if vectors hold whole pairs.
template <typename Config, typename Table>
__device__ void load_row(float (&entries)[Config::kVec], const Table* row, uint32_t unit, const Channels& channels) {
  constexpr int kVec = Config::kVec;
  if constexpr (Config::kPairsWithin) {
    load_entries<kVec / 2>(entries, row + channels.low / 2);
    load_entries<kVec / 2>(entries + kVec / 2, row + channels.high / 2);
  } else {
    load_entries<kVec>(entries, row + unit * kVec);
  }
}

template <typename Config, typename Table>
__device__ void load_angles(Angles<Config::kVec>& angles, const Params& p, uint32_t position, uint32_t unit,
                            const Channels& channels) {
  load_row<Config>(angles.cos, static_cast<const Table*>(p.cos) + position * p.cos_stride, unit, channels);
  load_row<Config>(angles.sin, static_cast<const Table*>(p.sin) + position * p.sin_stride, unit, channels);
}

// Loads the angles of a unit. The type of the tables is a branch at run time, since tables are a small part of the
// traffic: heads of a token find them in the L1 cache.
template <typename Config>
__device__ Angles<Config::kVec> load_angles(const Params& p, uint32_t position, uint32_t unit,
                                            const Channels& channels) {
  Angles<Config::kVec> angles;
  switch (p.table_dtype) {
    case DType::kFloat32:
      load_angles<Config, float>(angles, p, position, unit, channels);
      break;
    case DType::kFloat16:
      load_angles<Config, __half>(angles, p, position, unit, channels);
      break;
    case DType::kBFloat16:
      load_angles<Config, __nv_bfloat16>(angles, p, position, unit, channels);
      break;
  }
#pragma unroll
  for (float& sin : angles.sin) sin = p.conjugate ? -sin : sin;
  return angles;
}

template <typename Config, typename T = typename Config::T, int kVec = Config::kVec>
__device__ void turn(Vec<T, kVec>& low, Vec<T, kVec>& high, const Angles<kVec>& angles) {
  float x[kVec], y[kVec];
  widen(x, low);
  widen(y, high);
  if constexpr (Config::kPairsWithin) {
    rotate_interleaved(x, angles.cos, angles.sin, 0);
    rotate_interleaved(y, angles.cos, angles.sin, kVec / 2);
  } else {
    rotate_halves(x, y, angles.cos, angles.sin);
  }
  low = narrow<T>(x);
  high = narrow<T>(y);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void apply_kernel(const __grid_constant__ Params p) {
  using T = typename Config::T;
  constexpr int kVec = Config::kVec;
  const uint32_t unit = blockIdx.y * blockDim.x + threadIdx.x;
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (unit >= p.units.all || row >= p.rows) return;

  // Unsigned, because products with 64-bit strides then take fewer instructions.
  const uint32_t token = p.heads_of_a_token.divide(row), head = p.heads_of_a_token.remainder(row, token);
  const uint32_t entry = p.tokens_of_an_entry.divide(token), index = p.tokens_of_an_entry.remainder(token, entry);
  const auto [low, high] = channels_of<Config>(p, unit);
  const bool has_high = high < static_cast<uint32_t>(p.head_dim);
  // Only channels that are loaded one by one may lie apart.
  const int64_t x_step = kVec == 1 ? p.x.head_dim : 1;
  const int64_t out_step = kVec == 1 ? p.out.head_dim : 1;
  const T* x = static_cast<const T*>(p.x.data) + entry * p.x.batch + index * p.x.seqlen + head * p.x.heads;
  Vec<T, kVec> first = load<kVec>(x + low * x_step), second;
  if (has_high) second = load<kVec>(x + high * x_step);

  // The position and the angles are loaded while the channels are in flight.
  const int position = unit < p.units.turning ? position_of(p, entry, index) : -1;
  if (position >= 0) {
    turn<Config>(first, second, load_angles<Config>(p, position, unit, {low, high}));
  } else if (p.in_place) {
    return;
  }
  T* out = static_cast<T*>(p.out.data) + entry * p.out.batch + index * p.out.seqlen + head * p.out.heads;
  store(out + low * out_step, first);
  if (has_high) store(out + high * out_step, second);
}

template <typename Config>
void run_apply(Params p, cudaStream_t stream) {
  constexpr int kThreads = Config::kThreads;
  p.units = units_of<Config>(p);
  const int units = static_cast<int>(p.units.all);
  if (units == 0 || p.rows == 0) return;
  p.heads_of_a_token = Divisor(p.heads);
  p.tokens_of_an_entry = Divisor(p.seqlen);
  const int unit_slots = std::min(units, kThreads);
  const int row_slots = kThreads / unit_slots;
  const LaunchShape shape{.grid = dim3(ceil_div(p.rows, row_slots), ceil_div(units, unit_slots)),
                          .block = dim3(unit_slots, row_slots)};
  launch<apply_kernel<Config>>(shape, p, stream);
}

}  // namespace flash::rotary
