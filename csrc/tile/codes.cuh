// Products of a warp by mma (gemm.cuh) whose right operand is a tile of codes in 8 bits (e4m3), which are converted to
// fp16 in registers. A tile of codes is a SharedTile of units of 16 bits, each of two codes that are adjacent in a row.
//
//   gemm<kHeadDim>(s, q, codes_along_cols(k));     // S = Q K^T; q: columns in the order of own_column
//   gemm<kBlockN>(o, pack<T>(s), codes_along_rows(v));  // O += P V; the columns of o are permuted: own_column
//
// ldmatrix moves units. So that no lane needs codes of another, columns are permuted: those of the contraction in K and
// Q alike, 16 at a time; those of V in O, until it is stored. Which products are summed in a step of the contraction is
// the same as without codes.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment.cuh"
#include "tile/gemm.cuh"

namespace flash {

template <typename Tile>
struct CodesAlongCols {
  const Tile& tile;
};
template <typename Tile>
struct CodesAlongRows {
  const Tile& tile;
};
template <typename Tile>
__device__ CodesAlongCols<Tile> codes_along_cols(const Tile& tile) {
  return {tile};
}
template <typename Tile>
__device__ CodesAlongRows<Tile> codes_along_rows(const Tile& tile) {
  return {tile};
}

// Of each 16 columns, a lane has the four that start at this one: of K, of Q, and of O.
__device__ inline int own_column() { return 4 * (lane_id() % 4); }

// c += left right, where left is a PackedFragment or a SharedFragment. A block of 16 rows and 16 units has the columns
// of two steps.
template <int kDepth, typename Left, int kRows, int kCols, typename Tile>
__device__ void gemm(Fragment<kRows, kCols>& c, const Left& left, const CodesAlongCols<Tile>& right) {
  static_assert(kRows == 16 && kDepth % 32 == 0 && Left::kCols == kDepth);
  const BlockLoader<Tile, true, false> blocks(right.tile, 0, 0);
#pragma unroll
  for (int block = 0; block < kDepth / 32; ++block) {
    uint32_t a[2][4];
    left.load(a[0], 0, 2 * block);
    left.load(a[1], 0, 2 * block + 1);
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair) {
      uint32_t codes[4];  // of rows 0 .. 7 in both steps, of rows 8 .. 15 in both
      blocks.load(codes, pair, block);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 b = ptx::widen_e4m3(codes[i]);
        ptx::mma<typename Left::T>(c.values[0][2 * pair + i / 2], a[i % 2], b.x, b.y);
      }
    }
  }
}

// A transposed block has the same unit of two rows in a register. Of 16 columns, those with an even number are one tile
// of O, the others the next.
template <int kDepth, typename T, int kRows, int kCols, typename Tile>
__device__ void gemm(Fragment<kRows, kCols>& c, const PackedFragment<T, kRows, kDepth>& left,
                     const CodesAlongRows<Tile>& right) {
  static_assert(kRows == 16 && kCols % 32 == 0);
  const BlockLoader<Tile, false, true> blocks(right.tile, 0, 0);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
    for (int block = 0; block < kCols / 32; ++block) {
      uint32_t codes[4];  // of rows 0 .. 7 and 8 .. 15 in 16 columns, and in the next 16
      blocks.load(codes, block, step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 upper = ptx::widen_e4m3(ptx::swap_middle_bytes(codes[2 * half]));
        const uint2 lower = ptx::widen_e4m3(ptx::swap_middle_bytes(codes[2 * half + 1]));
        const int tile = 4 * block + 2 * half;
        ptx::mma<T>(c.values[0][tile], left.values[0][step], upper.x, lower.x);
        ptx::mma<T>(c.values[0][tile + 1], left.values[0][step], upper.y, lower.y);
      }
    }
  }
}

}  // namespace flash
