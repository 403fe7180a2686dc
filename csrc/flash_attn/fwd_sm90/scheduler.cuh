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
#include "flash_attn/params.h"
#include "tile/fragment.cuh"

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
  return tile_of_slot<Config::kRows>(p, plan.tiling, outer, slot, /*split=*/0, index);
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
