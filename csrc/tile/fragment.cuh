// Matrices that a warp holds in registers, in the layouts of mma.m16n8k16 (ptx/mma.cuh).
#pragma once

#include <cstdint>

#include "ptx/math.cuh"

namespace flash {

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int warp_id() { return threadIdx.x / 32; }

// kRows x kCols fp32 values, accumulators of products. A lane holds kLaneRows rows x kLaneCols columns of it: element
// (r, c) of the lane is element (row(r), col(c)) of the matrix. The four lanes of a quad share rows.
template <int kRows_, int kCols_>
struct Fragment {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kSlabs = kRows / 16, kTiles = kCols / 8;
  static constexpr int kLaneRows = kRows / 8, kLaneCols = kCols / 4;
  static_assert(kRows % 16 == 0 && kCols % 16 == 0);

  float values[kSlabs][kTiles][4];

  __device__ float& operator()(int r, int c) { return values[r / 2][c / 2][r % 2 * 2 + c % 2]; }
  __device__ const float& operator()(int r, int c) const { return values[r / 2][c / 2][r % 2 * 2 + c % 2]; }

  __device__ static int row(int r) { return 8 * r + lane_id() / 4; }
  __device__ static int col(int c) { return c / 2 * 8 + c % 2 + lane_id() % 4 * 2; }

  // fn(element, r, c) for each of the lane's elements.
  template <typename Fn>
  __device__ void for_each(Fn&& fn) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneCols; ++c) fn((*this)(r, c), r, c);
    }
  }

  __device__ void fill(float value) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneCols; ++c) (*this)(r, c) = value;
    }
  }

  __device__ void scale_rows(const float (&factors)[kLaneRows]) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneCols; ++c) (*this)(r, c) *= factors[r];
    }
  }
};

// kRows x kCols 16-bit elements as the left operand of a product that contracts the columns.
template <typename T_, int kRows_, int kCols_>
struct PackedFragment {
  using T = T_;
  static constexpr int kRows = kRows_, kCols = kCols_;
  uint32_t values[kRows / 16][kCols / 16][4];

  // Elements (r, 2 i) and (r, 2 i + 1) of the lane, counted as in a Fragment.
  __device__ uint32_t& pair(int r, int i) { return values[r / 2][i / 2][i % 2 * 2 + r % 2]; }
  __device__ uint32_t pair(int r, int i) const { return values[r / 2][i / 2][i % 2 * 2 + r % 2]; }

  __device__ void load(uint32_t (&a)[4], int slab, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = values[slab][step][i];
  }
};

// The same in shared memory, for all warps of a thread block: of each step, 16 bytes for each lane.
template <typename T_, int kRows_, int kCols_>
struct SharedFragment {
  using T = T_;
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kSteps = kCols / 16, kBytes = kRows / 16 * kSteps * 32 * sizeof(uint4);
  uint4* words;

  // A warp stores it.
  __device__ void store(const PackedFragment<T, kRows, kCols>& from) const {
#pragma unroll
    for (int slab = 0; slab < kRows / 16; ++slab) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const auto& a = from.values[slab][step];
        word(slab, step) = {a[0], a[1], a[2], a[3]};
      }
    }
  }
  __device__ void load(uint32_t (&a)[4], int slab, int step) const {
    const uint4 x = word(slab, step);
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }

 private:
  __device__ uint4& word(int slab, int step) const { return words[(slab * kSteps + step) * 32 + lane_id()]; }
};

// Two ways to pack two elements into a register: rounded to T; or the error of that rounding, itself rounded to T.
template <typename T>
struct Rounded {
  __device__ uint32_t operator()(float low, float high) const { return ptx::pack<T>(low, high); }
};
template <typename T>
struct Residue {
  __device__ uint32_t operator()(float low, float high) const {
    const float2 rounded = ptx::unpack<T>(ptx::pack<T>(low, high));
    return ptx::pack<T>(low - rounded.x, high - rounded.y);
  }
};

// Transposes the 4 x 4 words of each quad: lane j gets word j of each of its four lanes.
__device__ inline void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane_id() & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + step];
      const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, step);
      (upper ? low : high) = other;
    }
  }
}

// Rounds accumulators to T, as the left operand of the next product. Both layouts assign an element to the same lane.
// pack: how two of them are packed.
template <typename T, int kRows, int kCols, typename Pack = Rounded<T>>
__device__ PackedFragment<T, kRows, kCols> pack(const Fragment<kRows, kCols>& fragment, Pack pack = {}) {
  PackedFragment<T, kRows, kCols> packed;
#pragma unroll
  for (int slab = 0; slab < kRows / 16; ++slab) {
#pragma unroll
    for (int tile = 0; tile < kCols / 8; ++tile) {
      const auto& c = fragment.values[slab][tile];
      packed.values[slab][tile / 2][tile % 2 * 2] = pack(c[0], c[1]);
      packed.values[slab][tile / 2][tile % 2 * 2 + 1] = pack(c[2], c[3]);
    }
  }
  return packed;
}

}  // namespace flash
