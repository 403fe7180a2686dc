// Asynchronous products of a warpgroup: fragment += A B. A Fragment is the part of one of its four warps, 16 rows
// of 64. Operands are as in gemm.cuh: the left one is a PackedFragment or part of a SharedTile, the right one part of a
// SharedTile.
//
//   fence(s);
//   start_gemm<kHeadDim>(s, along_cols(q, row0), along_cols(k), /*accumulate=*/false);   // S = Q K^T
//   wait_gemms<0>(s);
#pragma once

#include <cstdint>

#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/gemm.cuh"
#include "tile/shared.cuh"

namespace flash {

constexpr int kWarpgroup = 128;  // threads

// Returns `value`, which is the same in all threads of a warp, and tells the compiler so: what it derives from the
// result, such as descriptors, can be in uniform registers.
__device__ inline int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ inline float warp_uniform(float value) { return __shfl_sync(~0u, value, 0); }

__device__ inline int warpgroup_id() { return warp_uniform(static_cast<int>(threadIdx.x / kWarpgroup)); }

// Returns the value, but hides from the compiler where it comes from. So what is computed from it is computed anew at
// each use (rematerialized), and not hoisted out of loops, where it would occupy registers.
__device__ inline unsigned rematerialized(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Keeps the compiler from moving accesses to a fragment's registers across this point. It emits no instructions.
template <int kRows, int kCols>
__device__ void pin(Fragment<kRows, kCols>& fragment) {
#pragma unroll
  for (int tile = 0; tile < fragment.kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(fragment.values[0][tile][i])::"memory");
  }
}

template <typename T, int kRows, int kCols>
__device__ void pin(PackedFragment<T, kRows, kCols>& fragment) {
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(fragment.values[0][step][i])::"memory");
  }
}

// Orders what ordinary instructions have done to the fragments before the products that are started next.
template <typename... Fragments>
__device__ void fence(Fragments&... fragments) {
  (pin(fragments), ...);
  ptx::wgmma_fence();
}

// Waits until all groups of products but the newest kPending have finished. `fragments`: those of finished groups,
// which may be used from here on.
template <int kPending, typename... Fragments>
__device__ void wait_gemms(Fragments&... fragments) {
  ptx::wgmma_wait<kPending>();
  (pin(fragments), ...);
}

// Descriptors of an operand, one for each step of 16 elements along the contraction.
template <typename Operand>
struct Descriptors;

template <typename Tile>
struct Descriptors<AlongCols<Tile>> {
  static constexpr bool kAlongRows = false;
  ptx::MatrixDescriptor origin;

  __device__ explicit Descriptors(const AlongCols<Tile>& x)
      : origin(x.tile.address(0, 0) + Tile::distance(x.first, 0), Tile::kRowBytes, 16) {}
  __device__ uint64_t at(int step) const {
    constexpr int kPanelSteps = Tile::kPanelCols / 16;
    return origin.after(Tile::distance(0, step / kPanelSteps) + step % kPanelSteps * 32);
  }
};

template <typename Tile>
struct Descriptors<AlongRows<Tile, 1>> {
  static constexpr bool kAlongRows = true;
  ptx::MatrixDescriptor origin;

  __device__ explicit Descriptors(const AlongRows<Tile, 1>& x)
      : origin(x.tile.address(0, 0) + Tile::distance(0, x.first / Tile::kPanelCols) +
                   x.first % Tile::kPanelCols * sizeof(typename Tile::T),
               Tile::kRowBytes, Tile::distance(0, 1)) {}
  __device__ uint64_t at(int step) const { return origin.after(Tile::distance(16 * step, 0)); }
};

// Starts c = left right, or c += left right if `accumulate`, as one group. kDepth: the length of the contraction.
template <int kDepth, int kCols, typename Left, typename Right>
__device__ void start_gemm(Fragment<16, kCols>& c, const Left& left, const Right& right, bool accumulate) {
  const Descriptors<Left> a(left);
  const Descriptors<Right> b(right);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    ptx::wgmma<typename Left::T, a.kAlongRows, b.kAlongRows>(c.values[0], a.at(step), b.at(step),
                                                             accumulate || step > 0);
  }
  ptx::wgmma_commit();
}

template <int kDepth, int kCols, typename T, typename Right>
__device__ void start_gemm(Fragment<16, kCols>& c, const PackedFragment<T, 16, kDepth>& left, const Right& right,
                           bool accumulate) {
  const Descriptors<Right> b(right);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    ptx::wgmma<T, b.kAlongRows>(c.values[0], left.values[0][step], b.at(step), accumulate || step > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace flash
