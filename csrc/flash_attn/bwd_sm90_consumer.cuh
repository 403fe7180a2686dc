// The part that all warpgroups that compute share in the backward kernels for sm_90.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_attn/bwd_elementwise.cuh"
#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_sm90_barriers.cuh"
#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/features.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Clears the rows of a tile outside of an interval, by a warpgroup, before it multiplies them: 0 * NaN is NaN.
template <typename Tile>
__device__ void clear_outside(Tile& tile, const Interval& rows) {
  constexpr int kChunks = Tile::kCols / Tile::kChunk;
  for (int i = threadIdx.x % kWarpgroup; i < Tile::kRows * kChunks; i += kWarpgroup) {
    const int row = i / kChunks;
    if (row < rows.first || row > rows.last) *reinterpret_cast<uint4*>(tile.chunk(row, i % kChunks)) = {};
  }
}

// Returns a value that the compiler takes for new each time. So it does not keep what it derives from the value in
// registers throughout a loop.
__device__ inline unsigned not_kept(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A warp of a warpgroup that computes.
template <typename Config_, typename Shared>
struct BwdConsumer {
  using Config = Config_;
  using T = typename Config::T;
  using Scores = Fragment<16, Config::kBlockM>;  // S^T, then P^T; or dP^T, then dS^T
  using Packed = PackedFragment<T, 16, Config::kBlockM>;
  static constexpr bool kPlain = Config::kFeatures == Features::kPlain;
  const BwdSm90Params& p;
  Shared& shared;
  const KeyBlock<Config>& block;
  const int rank;  // of the warpgroup
  const int key0;  // of the warp, in the block
  typename Ring<Config::kStages>::Cursor at = {};

  // Whether this is the thread that releases what the warpgroup has read.
  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  // Clears rows or keys outside of `live`, which see nothing or belong to other entries: they may hold NaN.
  template <typename First, typename Second>
  __device__ void clear_dead(First& first, Second& second, const Interval& live, const Interval& present) {
    if (live.covers(present)) return;
    const Interval kept{live.first - present.first, live.last - present.first};
    clear_outside(first, kept);
    clear_outside(second, kept);
    ptx::fence_async_shared();
    ptx::sync_barrier<kWarpgroup>(kOwnBarrier + rank);
  }

  __device__ void wait_keys(uint32_t parity = 0) {
    shared.keys_here.wait(parity);
    clear_dead(shared.k, shared.v, block.mask.keys_seen_by_any({0, block.mask.seqlen_q - 1}), block.keys);
  }

  __device__ void wait_rows(const Interval& rows) {
    shared.q.barriers.wait_full(at);
    const Interval live = block.mask.rows_that_see(Interval{0, block.mask.seqlen_k - 1});
    if (live.covers(rows)) return;
    shared.dout.barriers.wait_full(at);
    clear_dead(shared.q.tiles[at.stage], shared.dout.tiles[at.stage], live, rows);
  }

  __device__ ScorePlace place_of(int head, const Interval& rows) const {
    return {block.work.entry, head, block.keys.first + key0, rows.first};
  }

  // Turns S^T, capped if there is a cap, into P^T.
  __device__ void probabilities(Scores& s, int head, const Interval& rows) const {
    const Mask& mask = block.mask;
    const Interval existing{rows.first, min(rows.last, mask.seqlen_q - 1)};
    const bool cut = !mask.keys_seen_by_all(existing).covers(block.keys);
    make_probabilities<Config::kFeatures>(s, p.problem, mask, place_of(head, rows), cut, [&](int c) {
      return *reinterpret_cast<const float2*>(&shared.q.values_of(at)[s.col(c)]);
    });
  }

  // Rounds dV or dK, times `factor`, to `cols` columns in global memory.
  template <typename Sum>
  __device__ void store_sum(Sum& sum, float factor, const TensorRef<>& x, int cols) const {
    const Span& span = block.seq.k;
    const float factors[] = {factor, factor};
    sum.scale_rows(factors);
    T* first = first_token<T>(x, span, block.work.head_k) + block.keys.first * x.seqlen;
    const StridedRows<T> rows{first, x.seqlen, 0, max(0, span.length - block.keys.first)};
    store_rows<T>(sum, rows, key0, cols);
  }
};

}  // namespace flash::flash_attn
