// Rows of contiguous elements, of any length and at any address, which a group of lanes accesses 16 bytes at a time.
// For the kernels that work row by row: softmax, cross entropy.
#pragma once

#include <cstdint>

#include "common/dispatch.h"
#include "common/divmod.h"
#include "common/launch.h"
#include "ptx/copy.cuh"
#include "tile/exp_sum.cuh"
#include "tile/reduce.cuh"
#include "tile/vec.cuh"

namespace flash {

constexpr int kMinLanes = 4, kMaxGroupWarps = 16;

// The lanes that take a row together: a part of a warp (a power of two), or a whole block.
struct RowGroup {
  int lanes = blockDim.x;
  int lane = threadIdx.x;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
};

// Returns the launch in which each row has its group. The last groups may have rows past the end.
inline LaunchShape row_groups(int rows, int lanes) {
  const int groups = lanes <= 32 ? 128 / lanes : 1;
  return {.grid = dim3(ceil_div(rows, groups)), .block = dim3(lanes, groups)};
}

// Returns how many lanes a row needs if each takes `per_lane` elements: at least `lanes`, a power of two, and at most
// kMaxLanes.
template <int kMaxLanes>
int lanes_for(int64_t elements, int per_lane, int lanes = kMinLanes) {
  while (lanes < 32 && int64_t{lanes} * per_lane < elements) lanes *= 2;
  while (lanes < kMaxLanes && int64_t{lanes} * per_lane < elements) lanes += 32;
  return lanes;
}

// Reduces over `lanes` lanes of a warp, a power of two. The loop always runs all five steps and ignores the results of
// steps past `lanes`: a loop of variable length would cost more.
template <typename Op>
__device__ float reduce_lanes(float x, int lanes) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, x, step);
    if (step < lanes) x = Op()(x, other);
  }
  return x;
}

// Reduces over the lanes of a group with one barrier. All lanes must call it, and all get the same result.
// over_lanes(x, lanes) reduces over lanes of a warp; of_none is the value that changes nothing. A kernel may execute
// each call only once, because no barrier protects the shared memory from being written again.
template <typename T, typename OverLanes>
__device__ T reduce_group(T x, const RowGroup& group, T of_none, OverLanes&& over_lanes) {
  __shared__ T of_warps[kMaxGroupWarps];
  x = over_lanes(x, min(group.lanes, 32));
  if (group.lanes <= 32) return x;
  if (group.lane % 32 == 0) of_warps[group.lane / 32] = x;
  __syncthreads();
  const int warp = group.lane % kMaxGroupWarps;
  return over_lanes(warp < group.lanes / 32 ? of_warps[warp] : of_none, kMaxGroupWarps);
}

// Returns the sum over a group.
__device__ inline float sum_group(float x, const RowGroup& group) {
  return reduce_group(x, group, 0.f, [](float x, int lanes) { return reduce_lanes<Sum>(x, lanes); });
}

// Returns the sum of exponentials over a group; c has the meaning it has in ExpSum.
__device__ inline ExpSum sum_group(const ExpSum& exps, float c, const RowGroup& group) {
  const auto over_lanes = [c](float2 part, int lanes) {
    const float max = reduce_lanes<Max>(part.x, lanes);
    return make_float2(max, reduce_lanes<Sum>(part.y * ptx::exp2((part.x - max) * c), lanes));
  };
  const float2 all = reduce_group(make_float2(exps.max, exps.sum), group, make_float2(Max::kOfNone, 0.f), over_lanes);
  return {all.x, all.y};
}

// Prefetches the first `cols` columns of a row into the L2 cache.
template <typename T>
__device__ void prefetch(const T* row, int cols) {
  const auto start = reinterpret_cast<uintptr_t>(row) / 16 * 16, end = reinterpret_cast<uintptr_t>(row + cols);
  ptx::prefetch_bulk(reinterpret_cast<const void*>(start), static_cast<uint32_t>((end - start + 15) / 16 * 16));
}

// Returns a column, at most 0, where accesses of kWidth elements are aligned. They are also aligned at all multiples of
// kWidth from there.
template <int kWidth, typename T>
__device__ int first_aligned(const T* row) {
  return -static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth);
}

// Tells which of the kWidth columns that begin at `column` are in the row, that is, in 0 .. cols - 1.
template <int kWidth>
struct Inside {
  int first, last;

  __device__ Inside(int column, int cols) : first(max(-column, 0)), last(min(cols - column, kWidth)) {}
  __device__ bool operator[](int j) const { return j >= first && j < last; }
  __device__ bool all() const { return first == 0 && last == kWidth; }
  __device__ int count() const { return max(last - first, 0); }
};

template <int kWidth, typename T>
__device__ void replace_outside(Vec<T, kWidth>& vec, int column, int cols, T outside) {
  const Inside<kWidth> inside(column, cols);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) vec[j] = inside[j] ? vec[j] : outside;
}

// Loads kWidth columns in one aligned access, if any of them is in the row. Elements outside the row have arbitrary
// values: the access may go past the ends of the row, but only within a 16-byte word of memory that holds a part of it.
template <int kWidth, typename T>
__device__ Vec<T, kWidth> load_over(const T* row, int column, int cols) {
  Vec<T, kWidth> vec{};
  if (column > -kWidth && column < cols) vec = load<kWidth>(row + column);
  return vec;
}

// Loads kWidth columns as load_over does, and replaces elements outside the row by `outside`.
template <int kWidth, typename T>
__device__ Vec<T, kWidth> load_within(const T* row, int column, int cols, T outside) {
  auto vec = load_over<kWidth>(row, column, cols);
  replace_outside(vec, column, cols, outside);
  return vec;
}

// Stores the columns, of the kWidth given ones, that are in the row.
template <int kWidth, typename T>
__device__ void store_within(T* row, int column, int cols, const Vec<T, kWidth>& vec) {
  const Inside<kWidth> inside(column, cols);
  if (inside.all()) return store(row + column, vec);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (inside[j]) row[column + j] = vec[j];
  }
}

// Loads a thread's share of a row that starts at an aligned access: kCount accesses of kWidth columns, `apart` columns
// from each other, all in flight before one is used. An access without a column among the first `cols` gives words
// `outside`. An access across the end of the row has arbitrary values in columns outside.
template <int kCount, int kWidth, typename T>
__device__ void load_share(Packed<T, kWidth> (&vecs)[kCount], const T* row, int column, int apart, int cols,
                           uint32_t outside) {
  const T* const own = row + column;
#pragma unroll
  for (int i = 0; i < kCount; ++i, column += apart) {
#pragma unroll
    for (uint32_t& word : vecs[i].words) word = outside;
    if (column < cols) vecs[i] = load_packed<kWidth>(own + i * apart);
  }
}

// Replaces the columns outside the row in an access across its end. Few threads have such an access.
template <int kCount, int kWidth, typename T>
__device__ void replace_behind(Packed<T, kWidth> (&vecs)[kCount], int column, int apart, int cols, uint32_t outside) {
  constexpr int kPerWord = 4 / sizeof(T), kBits = 8 * sizeof(T);
#pragma unroll
  for (int i = 0; i < kCount; ++i, column += apart) {
    if (column >= cols || column + kWidth <= cols) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const uint32_t mask = (~0u >> (32 - kBits)) << (j % kPerWord * kBits);
      uint32_t& word = vecs[i].words[j / kPerWord];
      word = column + j < cols ? word : (word & ~mask) | (outside & mask);
    }
  }
}

// Goes from `column` to `cols`, and calls step(Constant<n>, column) for n accesses that are `apart` columns from each
// other: first with n = kCount, then with half of that, and so on. Only an access with n = 1 may cross an end of the
// row.
template <int kCount, int kWidth, typename Step>
__device__ void walk(int column, int apart, int cols, Step&& step) {
  if constexpr (kCount > 1) {
    for (; column + (kCount - 1) * apart + kWidth <= cols; column += kCount * apart) step(Constant<kCount>{}, column);
    walk<kCount / 2, kWidth>(column, apart, cols, step);
  } else {
    for (; column < cols; column += apart) step(Constant<1>{}, column);
  }
}

// Goes as walk does, but the first columns may be negative: their accesses are taken one at a time.
template <int kCount, int kWidth, typename Step>
__device__ void walk_row(int column, int apart, int cols, Step&& step) {
  if (cols == 0) return;
  for (; column < 0; column += apart) step(Constant<1>{}, column);
  walk<kCount, kWidth>(column, apart, cols, step);
}

// Loads the columns of one step of walk_row.
template <int kCount, int kWidth, typename T>
__device__ void load_step(Vec<T, kWidth> (&vecs)[kCount], const T* row, int column, int apart, int cols, T outside) {
  if constexpr (kCount == 1) {
    vecs[0] = load_within<kWidth>(row, column, cols, outside);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) vecs[i] = load<kWidth>(row + column + i * apart);
  }
}

}  // namespace flash
