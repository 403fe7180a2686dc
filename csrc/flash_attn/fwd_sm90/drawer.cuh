// The drawers of fwd_sm90, in instances of kDropped: a warpgroup that draws which elements dropout drops, and puts that
// beside each K. Each of its warps draws for some rows of the tile.
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
  DropoutDrawer drawer{p.problem};
  RingCursor<Config::kStages> k_at = {};

  // All lanes wait for the stage to be empty: it cannot be filled without them.
  __device__ void draw(int row0, int n_block) {
    shared.k_ring.wait_empty(k_at);
    auto& bits = shared.dropped[k_at.stage];
    for (int warp = warp_id() % kDrawers; warp < Config::kConsumerWarps; warp += kDrawers) {
      const int row = row0 + Config::kWarpRows * warp, key = n_block * Config::kKeys;
      bits[warp][lane_id()] = drawer.draw<Config::kKeys>(row, key);
    }
    __syncwarp();
    if (lane_id() == 0) shared.k_ring.full[k_at.stage].arrive();
    k_at.advance();
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
      drawer.move_to(p.problem, tile.entry, tile.head);
      for (int n_block = last; n_block >= first; --n_block) draw(tile.row0, n_block);
    }
  }
};

}  // namespace flash::flash_attn
