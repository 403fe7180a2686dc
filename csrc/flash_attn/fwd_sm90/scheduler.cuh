// The tile scheduler of fwd_sm90: which m_block, a tile of query rows of some head and entry, a thread block processes
// next. The producer asks it; all lanes of a warp call its functions together unless it says otherwise:
//
//   scheduler.begin();
//   while (scheduler.has_tile()) { .. scheduler.work() .. lane 0: scheduler.take_next(); .. scheduler.advance(); }
//   lane 0: scheduler.finish();
//
// fwd_serving/work_list.cuh has another scheduler, which reads what there is to do from the lengths.
#pragma once

#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/params.h"
#include "ptx/cluster.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// The index-th tile. Tiles are swizzled, so that those that are processed together share what lies in the L2 cache:
// they come in groups of heads whose keys and values fit it together, within a group the longest tiles first. Entries
// that share a bias follow one another, so that it is read from DRAM once.
template <typename Config>
__device__ WorkTile swizzled_tile(const Problem& p, const FwdSm90Plan& plan, int index) {
  const TileSwizzle& swizzle = plan.swizzle;
  const int group = swizzle.tiles.divide(index), rest = swizzle.tiles.remainder(index, group);
  const int slot = swizzle.heads.divide(rest), head = swizzle.heads.remainder(rest, slot);
  int outer = group * static_cast<int>(swizzle.heads.value) + head;
  if constexpr (Config::kBiased) {
    const int shared = swizzle.entries_of_bias.divide(outer), entry = swizzle.entries_of_bias.remainder(outer, shared);
    outer = entry * static_cast<int>(plan.tiling.head_groups.value) + shared;
  }
  return tile_of_slot<Config::kSharedRows>(p, plan.tiling, outer, slot, /*split=*/0, index);
}

// Persistent thread blocks: the i-th begins with tile i, and takes the others from a counter in global memory. Taking
// them as late as possible balances long tiles against short ones.
template <typename Config>
struct PersistentScheduler {
  const FwdSm90Params& p;
  int index;
  int taken;  // valid in lane 0, which calls take_next

  __device__ explicit PersistentScheduler(const FwdSm90Params& p) : p(p) {}

  __device__ int num_tiles() const { return p.plan.tiling.tiles.value; }
  __device__ void begin() { index = blockIdx.x; }
  __device__ bool has_tile() const { return index < num_tiles(); }
  __device__ FwdWork<Config> work() const {
    return {p, p.plan.tiling, swizzled_tile<Config>(p.problem, p.plan, index)};
  }
  __device__ void take_next() { taken = atomicAdd(p.plan.taken, 1); }
  __device__ void advance() { index = gridDim.x + __shfl_sync(~0u, taken, 0); }
  // Each block takes one index past the end; the largest of these means that no block will touch the counter again.
  __device__ void finish() const {
    if (index == num_tiles() + static_cast<int>(gridDim.x) - 1) *p.plan.taken = 0;
  }
};

// The same for pairs of thread blocks that share keys. The first block takes a pair's next tile from the counter, and
// writes it to the second. Each has half of the tile's rows, but visits the n_blocks that any of them sees.
template <typename Config>
struct PairScheduler {
  const FwdSm90Params& p;
  typename FwdSm90Shared<Config>::Mail& mail;
  int index;
  int taken;  // valid in lane 0
  RingCursor<2> at;

  __device__ PairScheduler(const FwdSm90Params& p, typename FwdSm90Shared<Config>::Mail& mail) : p(p), mail(mail) {}

  __device__ int num_tiles() const { return p.plan.tiling.tiles.value; }
  __device__ int num_pairs() const { return gridDim.x / 2; }
  __device__ void begin() { index = blockIdx.x / 2; }
  __device__ bool has_tile() const { return index < num_tiles(); }

  __device__ FwdWork<Config> work() const {
    WorkTile tile = swizzled_tile<Config>(p.problem, p.plan, index);
    const int first = tile.row0;
    tile.row0 += ptx::cluster_rank() * Config::kRows;
    FwdWork<Config> work(p, p.plan.tiling, tile);
    work.rows.count = max(0, work.rows.count);  // the second half may lie behind the last row
    const Interval rows = {first, min(first + Config::kSharedRows, work.seq.q.length) - 1};
    work.seen = rows.empty() ? rows : work.mask.keys_seen_by_any(rows);
    work.n_blocks = blocks_of(work.seen, Config::kKeys);
    return work;
  }

  __device__ void take_next() {
    if (ptx::cluster_rank() != 0) return;
    taken = atomicAdd(p.plan.taken, 1);
    mail.ring.wait_empty(at);
    const uint32_t words[4] = {static_cast<uint32_t>(taken)};
    ptx::store_async_in(ptx::address_in(1, mail.index[at.stage]), words, ptx::address_in(1, &mail.ring.full[at.stage]));
  }
  __device__ void advance() {
    if (ptx::cluster_rank() != 0 && lane_id() == 0) {
      ptx::wait_for_stores(mail.ring.expect_tx(at, sizeof(mail.index[at.stage])), at.round);
      taken = static_cast<volatile uint32_t&>(mail.index[at.stage][0]);
      ptx::arrive_in(0, mail.ring.empty[at.stage]);
    }
    at.advance();
    index = num_pairs() + __shfl_sync(~0u, taken, 0);
  }
  __device__ void finish() const {
    if (ptx::cluster_rank() == 0 && index == num_tiles() + num_pairs() - 1) *p.plan.taken = 0;
  }
};

// One tile for each cluster of thread blocks, which would have to agree on a next one.
template <typename Config>
struct SingleTileScheduler {
  const FwdSm90Params& p;
  bool done = false;

  __device__ explicit SingleTileScheduler(const FwdSm90Params& p) : p(p) {}

  __device__ void begin() const {}
  __device__ bool has_tile() const { return !done; }
  __device__ FwdWork<Config> work() const {
    const int index = static_cast<int>(blockIdx.x) / Config::kClusterSize;
    return {p, p.plan.tiling, swizzled_tile<Config>(p.problem, p.plan, index)};
  }
  __device__ void take_next() const {}
  __device__ void advance() { done = true; }
  __device__ void finish() const {}
};

}  // namespace flash::flash_attn
