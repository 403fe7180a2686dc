// Products of a warp: fragment += A B. An operand is a PackedFragment (left only) or a part of a SharedTile, which says
// whether the contraction runs along the tile's columns or along its rows:
//
//   gemm<kHeadDim>(s, along_cols(q, row0), along_cols(k));   // S = Q K^T, rows row0 .. of Q
//   gemm<kBlockN>(o, pack<T>(s), along_rows(v));             // O += P V
//   gemm<kBlockM>(dv, along_rows(p, col0), along_rows(dout));  // dV += P^T dO, columns col0 .. of P
#pragma once

#include <cstdint>

#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"

namespace flash {

// A lane's share of the 16 x 16 block at (row0, col0), both multiples of 16: its quarters (0, 0), (8, 0), (0, 8), (8,
// 8).
template <typename Tile>
__device__ uint32_t block_address(const Tile& tile, int row0, int col0) {
  return tile.address(row0 + lane_id() % 16, col0 / Tile::kChunk + lane_id() / 16);
}

// Rows row0 .. of a tile; the contraction runs along its columns.
template <typename Tile>
struct AlongCols {
  using T = typename Tile::T;
  const Tile& tile;
  int row0;

  __device__ void load_left(uint32_t (&a)[4], int slab, int step) const {
    ptx::load_matrices(a, block_address(tile, row0 + 16 * slab, 16 * step));
  }
  __device__ void load_right(uint32_t (&b)[2][2], int pair, int step) const {
    uint32_t r[4];
    ptx::load_matrices(r, block_address(tile, row0 + 16 * pair, 16 * step));
    b[0][0] = r[0], b[1][0] = r[1], b[0][1] = r[2], b[1][1] = r[3];
  }
};

// Columns col0 .. of a tile; the contraction runs along its rows.
template <typename Tile>
struct AlongRows {
  using T = typename Tile::T;
  const Tile& tile;
  int col0;

  __device__ void load_left(uint32_t (&a)[4], int slab, int step) const {
    uint32_t r[4];
    ptx::load_matrices_transposed(r, block_address(tile, 16 * step, col0 + 16 * slab));
    a[0] = r[0], a[1] = r[2], a[2] = r[1], a[3] = r[3];
  }
  __device__ void load_right(uint32_t (&b)[2][2], int pair, int step) const {
    uint32_t r[4];
    ptx::load_matrices_transposed(r, block_address(tile, 16 * step, col0 + 16 * pair));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  }
};

template <typename Tile>
__device__ AlongCols<Tile> along_cols(const Tile& tile, int row0 = 0) {
  return {tile, row0};
}
template <typename Tile>
__device__ AlongRows<Tile> along_rows(const Tile& tile, int col0 = 0) {
  return {tile, col0};
}

// c += left right, contracting kDepth elements.
template <int kDepth, int kRows, int kCols, typename Left, typename Right>
__device__ void gemm(Fragment<kRows, kCols>& c, const Left& left, const Right& right) {
  using T = typename Left::T;
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    uint32_t a[kRows / 16][4];
#pragma unroll
    for (int slab = 0; slab < kRows / 16; ++slab) left.load_left(a[slab], slab, step);
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair) {
      uint32_t b[2][2];
      right.load_right(b, pair, step);
#pragma unroll
      for (int slab = 0; slab < kRows / 16; ++slab) {
        ptx::mma<T>(c.values[slab][2 * pair], a[slab], b[0]);
        ptx::mma<T>(c.values[slab][2 * pair + 1], a[slab], b[1]);
      }
    }
  }
}

}  // namespace flash
