// A ring of stages in shared memory between warps that fill them (producers) and warps that read them (consumers), with
// two mbarriers for each stage (sm_90). Each side walks the ring with a cursor of its own:
//
//   producer: ring.wait_empty(at); load_async(tiles[at.stage], .., ring.expect_tx(at, bytes)); at.advance();
//   consumer: ring.wait_full(at); .. read tiles[at.stage] ..; ring.release(at); at.advance();
#pragma once

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"

namespace flash {

template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t round = 0;  // how often the cursor has gone around the ring, modulo 2: the parity of the stage's barriers

  __device__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    round ^= stage == 0;
  }
};

template <int kStages>
struct Ring {
  using Cursor = RingCursor<kStages>;
  ptx::SharedBarrier full[kStages], empty[kStages];

  // One thread calls it, before a barrier of the thread block. `readers`: how many times a stage is released before it
  // is empty; `writers`: how many threads arrive before it is full.
  __device__ void init(int readers, int writers = 1) {
    for (int i = 0; i < kStages; ++i) full[i].init(writers), empty[i].init(readers);
  }

  __device__ void wait_empty(const Cursor& at) const { empty[at.stage].wait(at.round ^ 1); }
  __device__ void wait_full(const Cursor& at) const { full[at.stage].wait(at.round); }
  __device__ void release(const Cursor& at) { empty[at.stage].arrive(); }

  // Announces `bytes` that are copied to a stage, and returns the barrier at which they count.
  __device__ ptx::SharedBarrier& expect_tx(const Cursor& at, int bytes) {
    full[at.stage].arrive_expect_tx(bytes);
    return full[at.stage];
  }
};

// One thread starts the copy of a tile: the tensor's rows from `row` on and columns from `col` on, panel by panel (the
// map, made by map_of, has boxes of one panel). Rows and columns that the tensor does not have become 0.
template <typename Tile>
__device__ void load_async(Tile& tile, const CUtensorMap& map, int64_t row, int head, int64_t entry,
                           ptx::SharedBarrier& arrived, int col = 0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::copy_box_async(tile.address(0, 0) + Tile::distance(0, panel), map, col + panel * Tile::kPanelCols, head,
                        static_cast<int>(row), static_cast<int>(entry), arrived);
  }
}

// One thread starts the copy of some rows of a tile, from `to` on, a multiple of 8: as many as the map's boxes have.
template <typename Tile>
__device__ void load_rows_async(Tile& tile, int to, const CUtensorMap& map, int row, int head, int entry,
                                ptx::SharedBarrier& arrived) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::copy_box_async(tile.address(0, 0) + Tile::distance(to, panel), map, panel * Tile::kPanelCols, head, row, entry,
                        arrived);
  }
}

// One thread starts the copy of kRows rows of a tile, from `from` on, to rows of the tensor, from `row` on.
template <int kRows, typename Tile>
__device__ void store_async(const Tile& tile, int from, const CUtensorMap& map, int64_t row, int head, int64_t entry) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::store_box_async(map, tile.address(0, 0) + Tile::distance(from, panel), panel * Tile::kPanelCols, head,
                         static_cast<int>(row), static_cast<int>(entry));
  }
  ptx::commit_stores();
}

// A warp stores a fragment to the rows of a tile from row0 on.
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
