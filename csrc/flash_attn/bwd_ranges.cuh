// Key ranges in the backward: what the main kernels read of what bwd_ranges.cu has found.
//
// A block of keys works on the tiles whose bound touches it. So the blocks of keys that add to dQ of a tile lie side by
// side. But the tiles of a block of keys need not: it walks from the first to the last and leaves out those between
// that do not touch it, 32 at a time.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_schedule.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/features.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Whether a call has key ranges, known when an instance is compiled where that is possible.
template <Features kFeatures>
__device__ bool has_ranges(const Problem& p) {
  return kFeatures == Features::kRanged || (kFeatures == Features::kAll && p.ranges.data != nullptr);
}

__device__ inline bool touches(const Interval& a, const Interval& b) { return a.first <= b.last && b.first <= a.last; }

// The keys that the rows of a tile see.
struct TileSeen {
  Interval any;  // some row sees them; and some keys between that no row sees
  Interval all;  // all rows do, and the tile has all its rows

  __device__ explicit TileSeen(const int4& bounds) : any{bounds.x, bounds.y - 1}, all{bounds.z, bounds.w - 1} {}
};

// The intervals of two adjacent rows of BwdScratch::seen, the first of which has an even number.
__device__ inline int4 seen_by_two(const Interval* rows) { return *reinterpret_cast<const int4*>(rows); }

// The index of a block of keys among BwdScratch::key_uses.
__device__ inline int64_t key_use_index(const Problem& p, const KeyWork& work, int block_keys) {
  const int per_head = blocks_per_head(p, block_keys), heads = ranged_key_heads(p), head = heads == 1 ? 0 : work.head_k;
  if (p.cu_seqlens_k == nullptr) return (int64_t{work.entry} * heads + head) * per_head + work.block;
  return int64_t{head} * per_head + __ldg(p.cu_seqlens_k + work.entry) / block_keys + work.entry + work.block;
}

}  // namespace flash::flash_attn
