// Key ranges in the backward. Before the other kernels, two small ones find what rows and keys see of one another: for
// each row the keys that it sees, for each tile of rows an interval that bounds these and one that lies in all of them;
// then for each block of keys which tiles of rows see it, and which of its keys nobody sees.
//
// A block of keys works on the tiles whose bound touches it. So the blocks of keys that add to dQ of a tile lie side by
// side. But the tiles of a block of keys need not: it walks from the first to the last and leaves out those between
// that do not touch it, 32 at a time.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_schedule.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/features.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// Whether a call has key ranges, known when an instance is compiled where that is possible.
template <Features kFeatures>
__device__ bool has_ranges(const Problem& p) {
  return kFeatures == Features::kRanged || (kFeatures == Features::kAll && p.ranges.data != nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Intervals of keys

__device__ inline Interval no_keys() { return {kMaxSeqlen, -1}; }

__device__ inline bool touches(const Interval& a, const Interval& b) { return a.first <= b.last && b.first <= a.last; }

__device__ inline Interval hull(const Interval& a, const Interval& b) {
  return {min(a.first, b.first), max(a.last, b.last)};
}

// What the rows of a tile see.
struct TileSeen {
  Interval any;  // some row sees them; and some keys between that no row sees
  Interval all;  // all rows do, and the tile has all its rows

  __device__ explicit TileSeen(const int4& bounds) : any{bounds.x, bounds.y - 1}, all{bounds.z, bounds.w - 1} {}
};

// The intervals of two adjacent rows of BwdScratch::seen, the first of which has an even number.
__device__ inline int4 seen_by_two(const Interval* rows) { return *reinterpret_cast<const int4*>(rows); }

// The keys that a row of an entry sees; no_keys() if there are none, or no such row. `given` are its bounds.
__device__ inline Interval seen_by(const Mask& mask, int row, const int* given) {
  if (row >= mask.seqlen_q) return no_keys();
  const Interval seen = intersection(mask.keys_seen_by(row), {__ldg(given), max(__ldg(given + 1), 0) - 1});
  return seen.empty() ? no_keys() : seen;
}

// The combination of all lanes' values.
template <typename Fn>
__device__ Interval combine_lanes(Interval x, Fn&& fn) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    x = fn(x, Interval{__shfl_xor_sync(~0u, x.first, lanes), __shfl_xor_sync(~0u, x.last, lanes)});
  }
  return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows

constexpr int kSeenThreads = 128;

// A warp takes a tile.
template <int kBlockM, typename Params>
__global__ __launch_bounds__(kSeenThreads) void find_seen_kernel(const __grid_constant__ Params p) {
  const Problem& problem = p.problem;
  const BwdScratch& scratch = p.plan.scratch;
  const int heads = ranged_heads(problem);
  const int64_t tile = int64_t{blockIdx.x} * (kSeenThreads / 32) + warp_id();
  const int64_t tiles_per_head = scratch.rows_per_head / kBlockM, outer = tile / tiles_per_head;
  if (outer >= num_entries(problem) * heads) return;
  const int64_t position = tile % tiles_per_head * kBlockM;
  const auto start_of = [&](int entry) { return padded_start(problem, __ldg(problem.cu_seqlens_q + entry), entry); };
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int entry = packed ? last_entry_from(problem.batch, position, start_of) : static_cast<int>(outer / heads);
  const Sequence seq(problem, entry);
  const Mask mask(problem, seq);
  const KeyRanges& ranges = problem.ranges;
  const int* first = ranges.data + seq.q.batch * ranges.batch + outer % heads * ranges.heads;
  const int row0 = static_cast<int>(position - padded_start(problem, seq.q.first, entry));

  Interval any = no_keys(), all = {0, kMaxSeqlen};
  for (int row = row0 + lane_id(); row < row0 + kBlockM; row += 32) {
    const Interval seen = seen_by(mask, row, first + (seq.q.first + row) * ranges.seqlen);
    scratch.seen[tile * kBlockM + row - row0] = seen;
    any = hull(any, seen);
    all = intersection(all, seen);
  }
  any = combine_lanes(any, [](const Interval& a, const Interval& b) { return hull(a, b); });
  all = combine_lanes(all, [](const Interval& a, const Interval& b) { return intersection(a, b); });
  if (lane_id() == 0) ranges.of_tiles[tile] = {any.first, any.last + 1, all.first, all.last + 1};
}

// ---------------------------------------------------------------------------------------------------------------------
// Keys

// The index of a block of keys among BwdScratch::key_uses.
template <int kKeys>
__device__ int64_t key_use_index(const Problem& p, const KeyWork& work) {
  const int per_head = blocks_per_head<kKeys>(p), heads = ranged_key_heads(p), head = heads == 1 ? 0 : work.head_k;
  if (p.cu_seqlens_k == nullptr) return (int64_t{work.entry} * heads + head) * per_head + work.block;
  return int64_t{head} * per_head + __ldg(p.cu_seqlens_k + work.entry) / kKeys + work.entry + work.block;
}

// The bits of keys `first` .. first + 31 that lie in an interval.
__device__ inline uint32_t bits_of(const Interval& interval, int first) {
  return low_bits(interval.last + 1 - first) & ~low_bits(interval.first - first);
}

// A warp takes a block of keys.
template <int kBlockM, int kKeys, typename Params>
__global__ __launch_bounds__(kSeenThreads) void find_key_uses_kernel(const __grid_constant__ Params p) {
  constexpr int kWords = (kKeys + 31) / 32;
  const Problem& problem = p.problem;
  const BwdScratch& scratch = p.plan.scratch;
  const int per_head = blocks_per_head<kKeys>(problem), heads = ranged_key_heads(problem);
  const bool packed = problem.cu_seqlens_k != nullptr;
  const int64_t index = int64_t{blockIdx.x} * (kSeenThreads / 32) + warp_id(), outer = index / per_head;
  if (outer >= num_entries(problem) * heads) return;
  const int place = static_cast<int>(index % per_head);
  const auto start_of = [&](int entry) { return __ldg(problem.cu_seqlens_k + entry) / kKeys + entry; };
  const int entry = packed ? last_entry_from(problem.batch, place, start_of) : static_cast<int>(outer / heads);
  const int first_key = (packed ? place - start_of(entry) : place) * kKeys;
  const Sequence seq(problem, entry);
  const Mask mask(problem, seq);
  const Interval keys{first_key, min(first_key + kKeys, seq.k.length) - 1};
  const Interval blocks = keys.empty() ? Interval{0, -1} : blocks_of<kBlockM>(mask.rows_that_see(keys));
  const int query_heads = ranged_heads(problem) / heads, first_head = static_cast<int>(outer % heads) * query_heads;
  const auto rows_of = [&](int head) { return seen_index(problem, scratch, seq.q, entry, head); };

  Interval used = no_keys();  // blocks of rows, in fact
  bool all_live = false;
  for (int head = first_head; head < first_head + query_heads; ++head) {
    const int4* tiles = problem.ranges.of_tiles + rows_of(head) / kBlockM;
    for (int block = blocks.first + lane_id(); block <= blocks.last; block += 32) {
      const TileSeen seen(tiles[block]);
      if (touches(seen.any, keys)) used = hull(used, {block, block});
      all_live |= seen.all.covers(keys);
    }
  }
  used = combine_lanes(used, [](const Interval& a, const Interval& b) { return hull(a, b); });

  uint32_t live[kWords] = {};
  const auto add = [&](const Interval& seen) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) live[i] |= bits_of(intersection(seen, keys), first_key + 32 * i);
  };
  if (__any_sync(~0u, all_live)) {
    add(keys);
  } else if (!used.empty()) {
    for (int head = first_head; head < first_head + query_heads; ++head) {
      const Interval* rows = scratch.seen + rows_of(head);
      for (int row = used.first * kBlockM + lane_id(); row < (used.last + 1) * kBlockM; row += 32) {
        add(rows[row]);
      }
    }
  }
  KeyUse& use = scratch.key_uses[index];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) live[i] |= __shfl_xor_sync(~0u, live[i], lanes);
    if (lane_id() == i) use.live[i] = live[i];
  }
  if (lane_id() == 0) use.first_rows = used.first, use.last_rows = used.last;
}

template <int kBlockM, int kKeys, typename Params>
void run_bwd_ranges(const Params& p, cudaStream_t stream) {
  static_assert(kKeys <= 32 * static_cast<int>(sizeof(KeyUse::live) / sizeof(uint32_t)));
  constexpr int kWarps = kSeenThreads / 32;
  const Problem& problem = p.problem;
  const int64_t entries = num_entries(problem);
  const int64_t tiles = entries * ranged_heads(problem) * (p.plan.scratch.rows_per_head / kBlockM);
  const int64_t key_blocks = entries * ranged_key_heads(problem) * blocks_per_head<kKeys>(problem);
  const auto shape = [](int64_t warps) {
    return LaunchShape{.grid = dim3(blocks_for<kWarps>(warps)), .block = dim3(kSeenThreads)};
  };
  launch<find_seen_kernel<kBlockM, Params>>(shape(tiles), p, stream);
  launch<find_key_uses_kernel<kBlockM, kKeys, Params>>(shape(key_blocks), p, stream);
}

}  // namespace flash::flash_attn
