// The drawers of fwd_sm90, in instances of kDropped: the producer's warps that have nothing to copy. They draw which
// elements dropout drops, and put that beside each K. Each fills a stage of K of its own, for all rows of the tile: so it
// takes part in every round of the stage, which waiting for a parity demands.
#pragma once

#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/scores/dropped_bits.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename Config>
struct Drawer {
  const FwdSm90Params& p;
  FwdSm90Shared<Config>& shared;
  const int rank;  // of the warp, among the drawers
  RingCursor<Config::kStages> k_at;

  // Fills the stage for an n_block. All lanes wait for it to be empty: it cannot be filled without them.
  __device__ void draw(const DropoutDrawer& drawer, int row0, int n_block) {
    shared.k_ring.wait_empty(k_at);
    auto& bits = shared.dropped[k_at.stage];
#pragma unroll 1
    for (int warp = 0; warp < Config::kConsumerWarps; ++warp) {
#pragma unroll
      for (int part = 0; part < Config::kKeys / 64; ++part) {
        bits[warp][lane_id()].words[part] =
            drawer.draw(row0 + Config::kWarpRows * warp, n_block * Config::kKeys + 64 * part);
      }
    }
    __syncwarp();
    if (lane_id() == 0) shared.k_ring.full[k_at.stage].arrive();
  }

  __device__ void run() {
    for (RingCursor<2> work_at;; work_at.advance()) {
      shared.work_ring.wait_full(work_at);
      const auto& work = shared.work[work_at.stage];
      const WorkTile tile = work.tile;
      const auto [first, last] = work.n_blocks;
      __syncwarp();
      if (lane_id() == 0) shared.work_ring.release(work_at);
      if (tile.entry < 0) return;
      const DropoutDrawer drawer(p.problem, tile.entry, tile.head);
#pragma unroll 1
      for (int n_block = last; n_block >= first; --n_block, k_at.advance()) {
        if (k_at.stage == rank) draw(drawer, tile.row0, n_block);
      }
    }
  }
};

}  // namespace flash::flash_attn
