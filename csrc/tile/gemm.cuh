// Products of a warp by mma: fragment += A B. An operand is a PackedFragment (left only) or a part of a SharedTile;
// along_cols and along_rows say whether the contraction runs along the tile's columns or along its rows:
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

// A tile as an operand. AlongCols: the contraction runs along the tile's columns, and rows are used from `first` on.
// AlongRows: it runs along the rows, and columns are used from `first` on, a multiple of 64, or of the number of
// columns used if that is a smaller power of two (since chunks are addressed by XOR). With kShares > 1, the columns of
// each panel are cut into kShares equal parts; of every panel, only the part that starts at `first` is used.
template <typename Tile>
struct AlongCols {
  using T = typename Tile::T;
  const Tile& tile;
  int first;
};
template <typename Tile, int kShares>
struct AlongRows {
  using T = typename Tile::T;
  const Tile& tile;
  int first;
};

template <typename Tile>
__device__ AlongCols<Tile> along_cols(const Tile& tile, int first = 0) {
  return {tile, first};
}
template <int kShares = 1, typename Tile>
__device__ AlongRows<Tile, kShares> along_rows(const Tile& tile, int first = 0) {
  return {tile, first};
}

// Loads 16 x 16 blocks of a tile with one ldmatrix of four 8 x 8 matrices. Their order in the registers is the one that
// the operand needs: quarters (0, 0), (8, 0), (0, 8), (8, 8) if kDown, or else (0, 0), (0, 8), (8, 0), (8, 8).
template <typename Tile, bool kAlongCols, bool kDown, int kShares = 1>
struct BlockLoader {
  static constexpr int kShareChunks = Tile::kPanelChunks / kShares;
  static_assert(kShareChunks % 2 == 0);
  uint32_t origin;  // this lane's row of the first block

  __device__ BlockLoader(const Tile& tile, int row, int col) {
    const int low = lane_id() / 8 % 2, high = lane_id() / 16, chunk = col / Tile::kChunk;
    origin = tile.address(row + lane_id() % 8 + 8 * (kDown ? low : high), kDown ? high : low);
    origin = (origin ^ Tile::flip(chunk)) + Tile::distance(0, chunk / Tile::kPanelChunks);
  }

  // Loads block `step` along the contraction, and block i along the other dimension.
  __device__ void load(uint32_t (&r)[4], int i, int step) const {
    const int row = 16 * (kAlongCols ? i : step), chunk = 16 / Tile::kChunk * (kAlongCols ? step : i);
    const uint32_t address = (origin ^ Tile::flip(chunk % kShareChunks)) + Tile::distance(row, chunk / kShareChunks);
    kAlongCols ? ptx::load_matrices(r, address) : ptx::load_matrices_transposed(r, address);
  }
};

template <typename Tile>
__device__ auto left_loader(const AlongCols<Tile>& x) {
  return BlockLoader<Tile, true, true>(x.tile, x.first, 0);
}
template <typename Tile, int kShares>
__device__ auto left_loader(const AlongRows<Tile, kShares>& x) {
  return BlockLoader<Tile, false, false, kShares>(x.tile, 0, x.first);
}
template <typename T, int kRows, int kCols>
__device__ const auto& left_loader(const PackedFragment<T, kRows, kCols>& x) {
  return x;
}
template <typename Tile>
__device__ auto right_loader(const AlongCols<Tile>& x) {
  return BlockLoader<Tile, true, false>(x.tile, x.first, 0);
}
template <typename Tile, int kShares>
__device__ auto right_loader(const AlongRows<Tile, kShares>& x) {
  return BlockLoader<Tile, false, true, kShares>(x.tile, 0, x.first);
}

// c += left right. kDepth: the length of the contraction.
template <int kDepth, int kRows, int kCols, typename Left, typename Right>
__device__ void gemm(Fragment<kRows, kCols>& c, const Left& left, const Right& right) {
  using T = typename Left::T;
  const auto& left_blocks = left_loader(left);
  const auto right_blocks = right_loader(right);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    uint32_t a[kRows / 16][4];
#pragma unroll
    for (int slab = 0; slab < kRows / 16; ++slab) left_blocks.load(a[slab], slab, step);
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair) {
      uint32_t b[4];
      right_blocks.load(b, pair, step);
#pragma unroll
      for (int slab = 0; slab < kRows / 16; ++slab) {
        ptx::mma<T>(c.values[slab][2 * pair], a[slab], b[0], b[1]);
        ptx::mma<T>(c.values[slab][2 * pair + 1], a[slab], b[2], b[3]);
      }
    }
  }
}

}  // namespace flash
