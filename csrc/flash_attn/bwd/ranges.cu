// Key ranges in the backward. Two small kernels run before the others. find_seen_kernel finds the interval of keys that
// each row sees and, for each tile of rows, the smallest interval that holds these and the largest that lies in all of
// them. find_key_uses_kernel then finds for each n_block which tiles of rows see it, how many, and which of its keys no
// row sees.
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/ranges.cuh"
#include "flash_attn/bwd/rows.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {
namespace {

constexpr int kSeenThreads = 128, kSeenWarps = kSeenThreads / 32;
constexpr int kLiveWords = sizeof(KeyUse::live) / sizeof(uint32_t);

// The kernels' parameters. Tile sizes are those of the main kernel.
struct BwdRangesParams : BwdCommonParams {
  int tile_rows, tile_keys;
};

// ---------------------------------------------------------------------------------------------------------------------
// Intervals of keys

// The neutral element of hull; intersected with anything, it stays empty.
__device__ Interval no_keys() { return {kMaxSeqlen, -1}; }

__device__ Interval hull(const Interval& a, const Interval& b) { return {min(a.first, b.first), max(a.last, b.last)}; }

// The keys that a row of an entry sees; no_keys() if there are none, or no such row. `given`: its range.
__device__ Interval seen_by(const Mask& mask, int row, const int* given) {
  if (row >= mask.seqlen_q) return no_keys();
  const Interval seen = intersection(mask.keys_seen_by(row), {__ldg(given), max(__ldg(given + 1), 0) - 1});
  return seen.empty() ? no_keys() : seen;
}

// Reduces the values of all lanes with fn.
template <typename T, typename Fn>
__device__ T combine_lanes(T x, Fn&& fn) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) x = fn(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
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

// Fills BwdScratch::seen and KeyRanges::of_tiles; one warp for each tile of rows.
__global__ __launch_bounds__(kSeenThreads) void find_seen_kernel(const __grid_constant__ BwdRangesParams p) {
  const Problem& problem = p.problem;
  const BwdScratch& scratch = p.plan.scratch;
  const int tile_rows = p.tile_rows, heads = ranged_heads(problem);
  const int64_t tile = int64_t{blockIdx.x} * kSeenWarps + warp_id();
  const int64_t tiles_per_head = scratch.rows_per_head / tile_rows, outer = tile / tiles_per_head;
  if (outer >= num_entries(problem) * heads) return;
  const int64_t position = tile % tiles_per_head * tile_rows;
  const auto start_of = [&](int entry) { return padded_start(problem, __ldg(problem.cu_seqlens_q + entry), entry); };
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int entry = packed ? last_entry_from(problem.batch, position, start_of) : static_cast<int>(outer / heads);
  const Sequence seq(problem, entry);
  const Mask mask(problem, seq);
  const KeyRanges& ranges = problem.ranges;
  const int* first = ranges.data + seq.q.batch * ranges.batch + outer % heads * ranges.heads;
  const int row0 = static_cast<int>(position - padded_start(problem, seq.q.first, entry));

  Interval any = no_keys(), all = {0, kMaxSeqlen};
  for (int row = row0 + lane_id(); row < row0 + tile_rows; row += 32) {
    const Interval seen = seen_by(mask, row, first + (seq.q.first + row) * ranges.seqlen);
    scratch.seen[tile * tile_rows + row - row0] = seen;
    any = hull(any, seen);
    all = intersection(all, seen);
  }
  any = combine_lanes(any, [](const Interval& a, const Interval& b) { return hull(a, b); });
  all = combine_lanes(all, [](const Interval& a, const Interval& b) { return intersection(a, b); });
  if (lane_id() == 0) ranges.of_tiles[tile] = {any.first, any.last + 1, all.first, all.last + 1};
}

// ---------------------------------------------------------------------------------------------------------------------
// Keys

// The bits of keys `first` .. first + 31 that lie in an interval.
__device__ uint32_t bits_of(const Interval& interval, int first) {
  return low_bits(interval.last + 1 - first) & ~low_bits(interval.first - first);
}

// Fills BwdScratch::key_uses; one warp for each n_block.
__global__ __launch_bounds__(kSeenThreads) void find_key_uses_kernel(const __grid_constant__ BwdRangesParams p) {
  const Problem& problem = p.problem;
  const BwdScratch& scratch = p.plan.scratch;
  const int tile_rows = p.tile_rows, tile_keys = p.tile_keys;
  const int per_head = n_blocks_per_head(problem, tile_keys), heads = ranged_key_heads(problem);
  const bool packed = problem.cu_seqlens_k != nullptr;
  const int64_t index = int64_t{blockIdx.x} * kSeenWarps + warp_id(), outer = index / per_head;
  if (outer >= num_entries(problem) * heads) return;
  const int place = static_cast<int>(index % per_head);
  const auto start_of = [&](int entry) { return __ldg(problem.cu_seqlens_k + entry) / tile_keys + entry; };
  const int entry = packed ? last_entry_from(problem.batch, place, start_of) : static_cast<int>(outer / heads);
  const int first_key = (packed ? place - start_of(entry) : place) * tile_keys;
  const Sequence seq(problem, entry);
  const Mask mask(problem, seq);
  const Interval keys{first_key, min(first_key + tile_keys, seq.k.length) - 1};
  const Interval blocks = keys.empty() ? Interval{0, -1} : blocks_of(mask.rows_that_see(keys), tile_rows);
  const int query_heads = ranged_heads(problem) / heads, first_head = static_cast<int>(outer % heads) * query_heads;
  const auto rows_of = [&](int head) { return seen_index(problem, scratch, seq.q, entry, head); };

  // Calls fn(head, m_block) for the m_blocks that may see the keys, those of 32 lanes together; past the last, m_block
  // is -1.
  const auto for_each_tile = [&](auto&& fn) {
    for (int head = first_head; head < first_head + query_heads; ++head) {
      for (int block = blocks.first; block <= blocks.last; block += 32) {
        fn(head, block + lane_id() <= blocks.last ? block + lane_id() : -1);
      }
    }
  };
  const auto seen_by_tile = [&](int head, int block) {
    return TileSeen(problem.ranges.of_tiles[rows_of(head) / tile_rows + block]);
  };

  Interval used = no_keys();  // an interval of m_blocks: those that see the keys
  int visited = 0;            // how many do
  uint32_t live[kLiveWords] = {};
  const auto add = [&](const Interval& seen) {
#pragma unroll
    for (int i = 0; i < kLiveWords; ++i) live[i] |= bits_of(intersection(seen, keys), first_key + 32 * i);
  };
  for_each_tile([&](int head, int block) {
    if (block < 0) return;
    const TileSeen seen = seen_by_tile(head, block);
    if (!touches(seen.any, keys)) return;
    used = hull(used, {block, block});
    ++visited;
    add(seen.all);
  });
  used = combine_lanes(used, [](const Interval& a, const Interval& b) { return hull(a, b); });
  visited = combine_lanes(visited, [](int a, int b) { return a + b; });

  // Which keys are live mostly follows from tiles whose rows all see the same of them. The rows of others are looked at
  // only if it does not: one warp would take long for all rows that see the first keys.
  const auto share_live = [&] {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLiveWords; ++i) {
      live[i] = combine_lanes(live[i], [](uint32_t a, uint32_t b) { return a | b; });
      all &= live[i] == bits_of(keys, first_key + 32 * i);
    }
    return all;
  };
  if (!share_live()) {
    for_each_tile([&](int head, int block) {
      bool differ = false;
      if (block >= 0) {
        const TileSeen seen = seen_by_tile(head, block);
        differ = touches(seen.any, keys) && !seen.all.covers(intersection(seen.any, keys));
      }
      const int first = __shfl_sync(~0u, block, 0);
      for (uint32_t todo = __ballot_sync(~0u, differ); todo != 0; todo &= todo - 1) {
        const Interval* rows = scratch.seen + rows_of(head) + int64_t{first + __ffs(todo) - 1} * tile_rows;
        for (int row = lane_id(); row < tile_rows; row += 32) add(rows[row]);
      }
    });
    share_live();
  }

  KeyUse& use = scratch.key_uses[index];
#pragma unroll
  for (int i = 0; i < kLiveWords; ++i) {
    if (lane_id() == i) use.live[i] = live[i];
  }
  // Query heads that share ranges were visited as one: each of them has as many steps.
  const int steps = visited * (problem.heads / problem.heads_k / query_heads);
  if (lane_id() == 0) use.first_m = used.first, use.last_m = used.last, use.steps = steps;
}

}  // namespace

void run_bwd_ranges(const BwdCommonParams& p, int tile_rows, int tile_keys, cudaStream_t stream) {
  const Problem& problem = p.problem;
  const int64_t entries = num_entries(problem);
  const int64_t tiles = entries * ranged_heads(problem) * (p.plan.scratch.rows_per_head / tile_rows);
  const int64_t n_blocks = entries * ranged_key_heads(problem) * n_blocks_per_head(problem, tile_keys);
  const auto shape = [](int64_t warps) {
    return LaunchShape{.grid = dim3(blocks_for(warps, kSeenWarps)), .block = dim3(kSeenThreads)};
  };
  const BwdRangesParams params{p, tile_rows, tile_keys};
  launch<find_seen_kernel>(shape(tiles), params, stream);
  launch<find_key_uses_kernel>(shape(n_blocks), params, stream);
}

}  // namespace flash::flash_attn
