// What the computing warpgroups of both backward kernels for sm_90 have in common: waiting for tiles and zeroing their
// unseen rows, turning scores into probabilities, and the epilogue, which stores dK and dV.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_attn/bwd/elementwise.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd_sm90/barriers.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// A warpgroup zeroes the rows of a tile outside of an interval, before it multiplies them: they may hold NaN, and 0 *
// NaN is NaN.
template <typename Tile>
__device__ void clear_outside(Tile& tile, const Interval& rows) {
  constexpr int kChunks = Tile::kCols / Tile::kChunk;
  for (int i = threadIdx.x % kWarpgroup; i < Tile::kRows * kChunks; i += kWarpgroup) {
    const int row = i / kChunks;
    if (row < rows.first || row > rows.last) *reinterpret_cast<uint4*>(tile.chunk(row, i % kChunks)) = {};
  }
}

// The same for the rows for which is_dead(row) holds.
template <typename Tile, typename IsDead>
__device__ void clear_rows(Tile& tile, IsDead&& is_dead) {
  constexpr int kChunks = Tile::kCols / Tile::kChunk;
  for (int i = threadIdx.x % kWarpgroup; i < Tile::kRows * kChunks; i += kWarpgroup) {
    const int row = i / kChunks;
    if (is_dead(row)) *reinterpret_cast<uint4*>(tile.chunk(row, i % kChunks)) = {};
  }
}

// With key ranges: which keys no row sees. Keys count from the one that the first bit of `bits` stands for.
struct DeadKeys {
  const uint32_t* bits;  // see KeyUse

  __device__ bool operator()(int key) const { return !(__ldg(bits + key / 32) >> key % 32 & 1); }
  __device__ bool any(int count) const {
    bool all_live = true;
    for (int word = 0; word < count / 32; ++word) all_live &= __ldg(bits + word) == ~0u;
    return !all_live;
  }
};

template <typename Config>
__device__ DeadKeys dead_keys(const BwdSm90Params& p, const NBlockWork<Config>& work, int first) {
  return {work.key_use(p).live + (first - work.cluster_keys.first) / 32};
}

// The blocks of kSize that lie in an interval.
template <int kSize>
__device__ Interval blocks_in(const Interval& interval) {
  return {(interval.first + kSize - 1) / kSize, (interval.last + 1) / kSize - 1};
}

// One warp of a warpgroup that computes.
template <typename Config_, typename Shared>
struct BwdConsumer {
  using Config = Config_;
  using T = typename Config::T;
  using Scores = Fragment<16, Config::kBlockM>;  // S^T, then P^T; or dP^T, then dS^T
  using Packed = PackedFragment<T, 16, Config::kBlockM>;
  static constexpr bool kPlain = Config::kFeatures != Features::kAll;  // at most one feature, that of the instance
  static constexpr bool kBiased = Config::kFeatures == Features::kBiased;
  const BwdSm90Params& p;
  Shared& shared;
  const NBlockWork<Config>& work;
  const int rank;  // of the warpgroup
  const int key0;  // the warp's first key in the n_block
  typename Ring<Config::kStages>::Cursor at = {};
  // Computed once, so that no step waits for the arithmetic: whether all rows that are visited see some key, and the
  // m_blocks that need no mask. With key ranges, both follow from each tile's TileSeen instead.
  const unsigned all_live = rematerialized(live_rows().covers(rows_of_block()));
  const Interval whole_blocks = blocks_in<Config::kBlockM>(whole_rows());

  // The rows of the entry that see some key, of any n_block.
  __device__ Interval live_rows() const { return work.mask.rows_that_see(Interval{0, work.mask.seqlen_k - 1}); }

  __device__ Interval rows_of_block() const {
    return {work.m_blocks.first * Config::kBlockM, work.m_blocks.last * Config::kBlockM + Config::kBlockM - 1};
  }

  // The rows that see all keys of the n_block. Rows past the last of the entry count, too: their lse of +inf makes
  // their probabilities 0 without a mask. Not so with a tiled bias, which for them is that of other rows and may be NaN
  // or inf.
  __device__ Interval whole_rows() const {
    const Mask& mask = work.mask;
    if (work.keys.last >= mask.seqlen_k) return {0, -1};
    // With its ends swapped, the interval asks for the rows that see both the last and the first key.
    const Interval rows = mask.rows_that_see({work.keys.last, work.keys.first});
    return {rows.first, !kBiased && rows.last == mask.seqlen_q - 1 ? rows.last + Config::kBlockM - 1 : rows.last};
  }

  // Whether this is the thread that releases ring stages for its warpgroup.
  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  // Runs clear(tile) on two tiles, and makes the zeros visible to wgmma of the whole warpgroup. Rows or keys that see
  // nothing or belong to other entries are zeroed because they may hold NaN.
  template <typename First, typename Second, typename Clear>
  __device__ void clear_both(First& first, Second& second, Clear&& clear) {
    clear(first);
    clear(second);
    ptx::fence_async_shared();
    ptx::sync_barrier<kWarpgroup>(kOwnBarrier + rank);
  }

  // Zeroes the rows or keys of two tiles, which hold `present`, that are outside of `live`.
  template <typename First, typename Second>
  __device__ void clear_dead(First& first, Second& second, const Interval& live, const Interval& present) {
    if (live.covers(present)) return;
    const Interval kept{live.first - present.first, live.last - present.first};
    clear_both(first, second, [&](auto& tile) { clear_outside(tile, kept); });
  }

  __device__ void wait_keys(uint32_t parity = 0) {
    shared.keys_here.wait(parity);
    if (has_ranges<Config::kFeatures>(p.problem)) return clear_dead_keys();
    clear_dead(shared.k, shared.v, work.mask.keys_seen_by_any({0, work.mask.seqlen_q - 1}), work.keys);
  }

  __device__ void wait_rows(int head, const Interval& rows, bool cut) {
    shared.q.barriers.wait_full(at);
    if (has_ranges<Config::kFeatures>(p.problem)) {
      if (cut) clear_blind_rows(seen_by(head, rows));
      return;
    }
    if (all_live) return;
    const Interval live = live_rows();
    if (live.covers(rows)) return;
    shared.dout.barriers.wait_full(at);
    clear_dead(shared.q.tiles[at.stage], shared.dout.tiles[at.stage], live, rows);
  }

  // With key ranges: zeroes keys that no row sees.
  __device__ void clear_dead_keys() {
    const DeadKeys dead = dead_keys(p, work, work.keys.first);
    if (dead.any(Config::kBlockN)) clear_both(shared.k, shared.v, [&](auto& tile) { clear_rows(tile, dead); });
  }

  // With key ranges: the intervals of keys that the rows of a tile see; valid for tiles that are cut.
  __device__ const Interval* seen_by(int head, const Interval& rows) const {
    if constexpr (Config::kRanges == RangeSource::kSharedMemory) {
      return shared.seen.rows_of(at);
    } else {
      return work.seen(p, head, rows.first);
    }
  }

  // With key ranges: zeroes rows that see no key at all. Only tiles that are cut have such rows.
  __device__ void clear_blind_rows(const Interval* seen) {
    bool blind = false;
    for (int row = lane_id(); row < Config::kBlockM; row += 32) blind |= seen[row].empty();
    if (!__any_sync(~0u, blind)) return;
    shared.dout.barriers.wait_full(at);
    clear_both(shared.q.tiles[at.stage], shared.dout.tiles[at.stage],
               [&](auto& tile) { clear_rows(tile, [&](int row) { return seen[row].empty(); }); });
  }

  __device__ ScorePlace place_of(int head, const Interval& rows) const {
    return {.entry = work.n_block.entry,
            .head = head,
            .first_token = work.seq.q.first,
            .key0 = work.keys.first + key0,
            .row0 = rows.first};
  }

  // Turns S^T (in instances of kAll already scaled and capped) into P^T.
  __device__ void probabilities(Scores& s, int head, const Interval& rows, bool cut) const {
    const ScorePlace place = place_of(head, rows);
    const auto lse_log2 = [&](int c) { return *reinterpret_cast<const float2*>(&shared.q.values_of(at)[s.col(c)]); };
    const auto lse = [&](int c) {
      if constexpr (kHasPlainScores<Config::kFeatures>) {
        return float2{};
      } else {
        return *reinterpret_cast<const float2*>(&shared.lse.values_of(at)[s.col(c)]);
      }
    };
    if constexpr (kBiased) {
      const auto bias =
          load_transposed<T, Config::kBlockM>(shared.bias.tiles[at.stage], key0, has_one_row(p.problem.bias.rows));
      scale_and_add(s, p.problem.softmax_scale, bias, lse);
    }
    const auto hide = [&] {
      if (has_ranges<Config::kFeatures>(p.problem)) {
        if (!cut) return;
        const Interval* seen = seen_by(head, rows);
        return hide_unseen(s, place.key0, [&](int c) { return seen_by_two(seen + s.col(c)); });
      }
      if (!whole_blocks.covers(rows.first / Config::kBlockM)) hide_rows(s, work.mask, place);
    };
    make_probabilities<typename Config::T, Config::kFeatures>(s, p.problem, work.mask, place, hide, lse_log2, lse);
  }

  // Stores dV or dK, scaled and, unless they are fp32, rounded, to the channels from `channel` on in global memory; or,
  // if the n_block is split, the sum as it is to key_sums.
  template <typename Sum>
  __device__ void store_sum(Sum& sum, bool of_values, int channel = 0) const {
    if (NBlockWork<Config>::kMayBeSplit && work.key_sums >= 0) return store_split(sum, of_values, channel);
    const Problem& problem = p.problem;
    const TensorRef<>& x = of_values ? p.dv : p.dk;
    const float factor = of_values ? problem.dropout_rescale : problem.softmax_scale, factors[] = {factor, factor};
    const int cols = of_values ? problem.head_dim_v : problem.head_dim;
    const Span& span = work.seq.k;
    sum.scale_rows(factors);
    const auto rows = [&]<typename Element>(Element) {
      Element* first = first_token<Element>(x, span, work.n_block.head_k) + work.keys.first * x.seqlen + channel;
      return StridedRows<Element>{first, x.seqlen, 0, max(0, span.length - work.keys.first)};
    };
    constexpr KeyGradients kType = Config::kKeyGradients;
    if (kType == KeyGradients::kFloat || (kType == KeyGradients::kEither && p.float_dkv)) {
      return store_float_rows(sum, rows(float{}), key0, cols - channel, p.adds_dkv);
    }
    if constexpr (kType != KeyGradients::kFloat) store_rows<T>(sum, rows(T{}), key0, cols - channel);
  }

  // Stores a sum, in fp32 and not scaled, to the split's place in key_sums.
  template <typename Sum>
  __device__ void store_split(const Sum& sum, bool of_values, int channel) const {
    const int first = work.keys.first + key0 + sum.row(0), in_block = first - work.cluster_keys.first;
    float* row = KeySums<Config::kHeadDim>::address(p.plan, work.key_sums, of_values, in_block);
#pragma unroll
    for (int r = 0; r < sum.kLaneRows; ++r) {
      if (first + 8 * r >= work.seq.k.length) return;
#pragma unroll
      for (int c = 0; c < sum.kLaneCols; c += 2) {
        *reinterpret_cast<float2*>(row + 8 * r * Config::kHeadDim + channel + sum.col(c)) = {sum(r, c), sum(r, c + 1)};
      }
    }
  }
};

}  // namespace flash::flash_attn
