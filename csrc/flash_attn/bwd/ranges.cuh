// Key ranges in the backward: how the main kernels read what bwd/ranges.cu has found.
//
// An n_block visits the tiles of rows whose bound (TileSeen::any) touches it. The n_blocks that add to dQ of a tile
// are thus contiguous, which DqOrder needs. The tiles that an n_block visits need not be: it walks from the first to
// the last and skips those between that do not touch it; a warp checks 32 at a time.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"

namespace flash::flash_attn {

// Whether a call has key ranges: a constant in all instances but those of kAll.
template <Features kFeatures>
__device__ bool has_ranges(const Problem& p) {
  return kFeatures == Features::kRanged || (kFeatures == Features::kAll && p.ranges.data != nullptr);
}

__device__ inline bool touches(const Interval& a, const Interval& b) { return a.first <= b.last && b.first <= a.last; }

// The keys that the rows of a tile see.
struct TileSeen {
  Interval any;  // from the first to the last key that some row sees; not every key between need be seen
  Interval all;  // keys that all rows see; empty if some rows of the tile do not exist

  __device__ explicit TileSeen(const int4& bounds) : any{bounds.x, bounds.y - 1}, all{bounds.z, bounds.w - 1} {}
};

// The intervals of two adjacent rows of BwdScratch::seen in one 16-byte load: the index of the first must be even.
__device__ inline int4 seen_by_two(const Interval* rows) { return *reinterpret_cast<const int4*>(rows); }

// The index of an n_block among BwdScratch::key_uses.
__device__ inline int64_t key_use_index(const Problem& p, const NBlock& n_block, int block_keys) {
  const bool shared = p.ranges.heads == 0;
  return n_block_index(p, {n_block.entry, shared ? 0 : n_block.head_k, n_block.index}, block_keys, ranged_key_heads(p));
}

// The sums of the splits of an n_block. Without a work list, all n_blocks have as many.
__device__ inline SplitSums sums_of(const Problem& p, const BwdCommonPlan& plan, const NBlock& n_block) {
  const int64_t index = n_block_index(p, n_block, plan.block_keys);
  if (plan.scratch.work_tiles != nullptr) return plan.scratch.split_sums[index];
  return {static_cast<int>(index) * plan.splits, plan.splits};
}

}  // namespace flash::flash_attn
