// The work list of the backward on Hopper, with key ranges: which n_blocks are split, and which work tiles there are.
//
// Without key ranges the host knows about how many m_blocks see an n_block, and splits all n_blocks alike
// (split_n_blocks in bwd/planner.h). Key ranges lie on the GPU, and n_blocks may differ a hundredfold: the first keys
// beside a window are seen by all rows, other keys by those of the window. So one thread block of bwd_prepare, beside
// the others, reads how many steps each n_block takes (KeyUse), and splits those that take too many (StepLimits). All
// splits of an n_block come before those of the next, so that thread blocks which wait for one another still find the
// order that DqOrder needs.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/cost_model.h"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/ranges.cuh"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/params.h"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// Of each n_block whose place in the order a thread looks at.
template <int kBlockN>
struct ListedBlock {
  int64_t index;  // among those of all key heads
  KeyUse use;

  __device__ ListedBlock(const BwdCommonParams& p, int place) {
    const NBlock n_block = n_block_at<kBlockN, Swizzle::kHeadsAndEntries>(p.problem, p.plan, place);
    index = n_block_index(p.problem, n_block, kBlockN);
    use = p.plan.scratch.key_uses[key_use_index(p.problem, n_block, kBlockN)];
  }
};

// Combines what all threads of a thread block have, in their order: returns fn of what comes before a thread (`none`
// for the first one), and sets `x` to fn of all.
template <int kThreads, typename T, typename Fn>
__device__ T scan_threads(T& x, T none, Fn&& fn) {
  constexpr int kWarps = kThreads / 32;
  __shared__ T warps[kWarps];
  T upto = x;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const T other = __shfl_up_sync(~0u, upto, lanes);
    if (lane_id() >= lanes) upto = fn(other, upto);
  }
  const T left = __shfl_up_sync(~0u, upto, 1);
  if (lane_id() == 31) warps[threadIdx.x / 32] = upto;
  __syncthreads();
  T before = none, all = none;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == static_cast<int>(threadIdx.x) / 32) before = all;
    all = fn(all, warps[warp]);
  }
  __syncthreads();
  x = all;
  return lane_id() == 0 ? before : fn(before, left);
}

// Fills the work list. A thread block of kThreads runs it, of which each thread takes adjacent places.
template <int kBlockN, int kThreads>
__device__ void list_work(const BwdCommonParams& p) {
  using Block = ListedBlock<kBlockN>;
  const BwdScratch& scratch = p.plan.scratch;
  const int n_blocks = n_blocks_per_head(p.problem, kBlockN) * static_cast<int>(num_key_heads(p.problem));
  const int own = (n_blocks + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * own, n_blocks), end = min(first + own, n_blocks);
  const auto sum = [](auto a, auto b) { return a + b; };

  long long total = 0;
  int longest = 0;
  for (int place = first; place < end; ++place) {
    const int steps = Block(p, place).use.steps;
    total += steps, longest = max(longest, steps);
  }
  scan_threads<kThreads>(total, 0LL, sum);
  scan_threads<kThreads>(longest, 0, [](int a, int b) { return max(a, b); });
  const StepLimits limits(total, longest, p.plan.places);
  const auto splits_of = [&](const KeyUse& use) { return limits.splits(use.steps, use.last_m + 1 - use.first_m); };

  int tiles = 0, sums = 0;
  for (int place = first; place < end; ++place) {
    const int splits = splits_of(Block(p, place).use);
    tiles += splits, sums += splits > 1 ? splits : 0;
  }
  int tile = scan_threads<kThreads>(tiles, 0, sum), key_sums = scan_threads<kThreads>(sums, 0, sum);
  if (threadIdx.x == 0) scratch.next_work[1] = tiles;
  for (int place = first; place < end; ++place) {
    const Block block(p, place);
    const int splits = splits_of(block.use);
    scratch.split_sums[block.index] = {key_sums, splits};
    for (int split = 0; split < splits; ++split) {
      scratch.work_tiles[tile++] = {place, split, splits};
    }
    if (splits > 1) key_sums += splits;
  }
}

}  // namespace flash::flash_attn
