// A ring of stages in shared memory between warps that fill them and warps that read them (sm_90). Both sides walk the
// ring with a cursor of their own:
//
//   producer: ring.wait_empty(at); load_async(tiles[at.stage], .., ring.expect_tx(at, bytes)); at.advance();
//   consumer: ring.wait_full(at); .. read tiles[at.stage] ..; ring.release(at); at.advance();
#pragma once

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"

namespace flash {

template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t round = 0;  // of the ring, modulo 2

  __device__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    round ^= stage == 0;
  }
};

template <int kStages>
struct Ring {
  using Cursor = RingCursor<kStages>;
  ptx::SharedBarrier full[kStages], empty[kStages];

  // By one thread, before a barrier of the block: how many times a stage is released, and filled before it is full.
  __device__ void init(int readers, int writers = 1) {
    for (int i = 0; i < kStages; ++i) full[i].init(writers), empty[i].init(readers);
  }

  __device__ void wait_empty(const Cursor& at) const { empty[at.stage].wait(at.round ^ 1); }
  __device__ void wait_full(const Cursor& at) const { full[at.stage].wait(at.round); }
  __device__ void release(const Cursor& at) { empty[at.stage].arrive(); }

  // Returns the barrier at which `bytes` copied to a stage count.
  __device__ ptx::SharedBarrier& expect_tx(const Cursor& at, int bytes) {
    full[at.stage].arrive_expect_tx(bytes);
    return full[at.stage];
  }
};

// Starts the copy of kRows rows, from `row` on, of a tensor (batch, rows, heads, cols) whose map has boxes of one page
// of the tile, and of its columns from `col` on. Rows and columns that the tensor does not have become 0. One thread
// calls it.
template <typename Tile>
__device__ void load_async(Tile& tile, const CUtensorMap& map, int64_t row, int head, int64_t entry,
                           ptx::SharedBarrier& arrived, int col = 0) {
#pragma unroll
  for (int page = 0; page < Tile::kPages; ++page) {
    ptx::copy_box_async(tile.address(0, 0) + Tile::distance(0, page), map, col + page * Tile::kPageCols, head,
                        static_cast<int>(row), static_cast<int>(entry), arrived);
  }
}

// Starts the share of block `rank` in the same copy for all kBlocks blocks of a cluster, to the same place in each. The
// map has boxes of one page of a share.
template <int kBlocks, typename Tile>
__device__ void load_share_async(Tile& tile, int rank, const CUtensorMap& map, int64_t row, int head, int64_t entry,
                                 ptx::SharedBarrier& arrived) {
  static_assert(Tile::kRows % (8 * kBlocks) == 0);  // whole repetitions of the order of chunks
  const int from = rank * (Tile::kRows / kBlocks);
#pragma unroll 2
  for (int page = 0; page < Tile::kPages; ++page) {
    ptx::copy_box_to_blocks(tile.address(0, 0) + Tile::distance(from, page), map, page * Tile::kPageCols, head,
                            static_cast<int>(row) + from, static_cast<int>(entry), arrived, (1 << kBlocks) - 1);
  }
}

// Starts the copy of kRows rows of a tile, from `from` on, to rows of the tensor, from `row` on. One thread calls it.
template <int kRows, typename Tile>
__device__ void store_async(const Tile& tile, int from, const CUtensorMap& map, int64_t row, int head, int64_t entry) {
#pragma unroll
  for (int page = 0; page < Tile::kPages; ++page) {
    ptx::store_box_async(map, tile.address(0, 0) + Tile::distance(from, page), page * Tile::kPageCols, head,
                         static_cast<int>(row), static_cast<int>(entry));
  }
  ptx::commit_stores();
}

// A warp writes a fragment to rows row0 .. of a tile.
template <typename T, int kRows, int kCols, typename Tile>
__device__ void store_matrices(Tile& tile, const PackedFragment<T, kRows, kCols>& fragment, int row0) {
#pragma unroll
  for (int slab = 0; slab < kRows / 16; ++slab) {
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step) {
      ptx::store_matrices(tile.address(row0 + 16 * slab + lane_id() % 16, 2 * step + lane_id() / 16),
                          fragment.values[slab][step]);
    }
  }
}

}  // namespace flash
