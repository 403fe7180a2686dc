// The work tile of a thread block of the backward kernels for sm_90, an n_block and the m_blocks that it visits; the
// rings that hold these; and the parameters of the kernels.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/ranges.cuh"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/scores/dropped_bits.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// The parameters of the kernels: the problem with its plan, and TMA descriptors of its tensors.
struct BwdSm90Launch : BwdSm90Params {
  CUtensorMap q_map, dout_map, k_map, v_map;  // boxes of one panel of a tile (tile/shared.cuh)
  CUtensorMap dq_accum_map, dq_map;           // only bwd_sm90: boxes of a half of dQ
  CUtensorMap bias_map;                       // only instances of kBiased
  int num_work_tiles;                         // splits of all n_blocks; with a work list, no more than so many
};

// A ring of tiles of rows of kHeadDim channels, with a value for each row: Q with log2(e) lse, or dO with softmax_d.
//
// When the products that read a tile have ended, the whole warpgroup is done with the tile. But the values are read
// with ordinary loads, about which the end of a product says nothing. So one thread may release a stage for its
// warpgroup only if all warps have met at a barrier since they read the values; otherwise each warp has to release.
// With kValueRounds = 2 the values of a stage alternate between two places from round to round, and a barrier in the
// next step is early enough.
template <typename Config, int kHeadDim>
struct RowRing {
  using Tile = SharedTile<typename Config::T, Config::kBlockM, kHeadDim>;
  using Cursor = typename Ring<Config::kStages>::Cursor;
  Tile tiles[Config::kStages];
  alignas(128) float values[Config::kValueRounds][Config::kStages][Config::kBlockM];
  Ring<Config::kStages> barriers;

  static constexpr int kValueBytes = Config::kBlockM * sizeof(float);
  __device__ float* values_of(const Cursor& at) { return values[at.round % Config::kValueRounds][at.stage]; }
};

// With a bias: lse of each row of a tile, beside its rounding error, which comes with Q. It lies apart since RowRing,
// whose tiles are aligned to 1024 bytes, would grow by as much.
template <typename Config>
struct LseRing {
  alignas(16) float values[Config::kValueRounds][Config::kStages][Config::kBlockM];

  static constexpr int kBytes = Config::kBlockM * sizeof(float);
  __device__ float* values_of(const typename Ring<Config::kStages>::Cursor& at) {
    return values[at.round % Config::kValueRounds][at.stage];
  }
};

struct NoLseRing {};
template <typename Config>
using LseRingOf = std::conditional_t<kHasPlainScores<Config::kFeatures>, NoLseRing, LseRing<Config>>;

// With key ranges: the interval of keys that each row of a tile sees. Like the values of rows, they are read with
// ordinary loads.
template <typename Config>
struct SeenRing {
  alignas(128) Interval rows[Config::kValueRounds][Config::kStages][Config::kBlockM];

  static constexpr int kBytes = Config::kBlockM * sizeof(Interval);
  __device__ Interval* rows_of(const typename Ring<Config::kStages>::Cursor& at) {
    return rows[at.round % Config::kValueRounds][at.stage];
  }
};

struct NoSeenRing {
  static constexpr int kBytes = 0;
};
template <typename Config>
using SeenRingOf = std::conditional_t<Config::kRanges == RangeSource::kSharedMemory, SeenRing<Config>, NoSeenRing>;

// In instances of kDropped: which elements of a tile of scores the lanes of the consumers drop. Like the values of
// rows, they are read with ordinary loads.
template <typename Config>
struct DroppedRing {
  static constexpr int kWarps = Config::kBlockN / 16;
  DroppedBits<Config::kBlockM> bits[Config::kValueRounds][Config::kStages][kWarps][32];

  __device__ auto& bits_of(const typename Ring<Config::kStages>::Cursor& at) {
    return bits[at.round % Config::kValueRounds][at.stage];
  }
};

struct NoDroppedRing {};
template <typename Config>
using DroppedRingOf = std::conditional_t<Config::kFeatures == Features::kDropped, DroppedRing<Config>, NoDroppedRing>;

// In instances of kBiased: tiles of the bias, which come with those of Q. Like the values of rows, they are read with
// ordinary loads, before a barrier of the step.
template <typename Config>
struct BiasTiles {
  using Tile = SharedTile<typename Config::T, Config::kBlockM, Config::kBlockN>;
  Tile tiles[Config::kStages];

  __device__ static int bytes(const BiasRows& strides) { return bytes_of_bias<Tile>(strides); }
};

struct NoBiasTiles {
  __device__ static int bytes(const BiasRows&) { return 0; }
};
template <typename Config>
using BiasTilesOf = std::conditional_t<Config::kFeatures == Features::kBiased, BiasTiles<Config>, NoBiasTiles>;

// An n_block, or a split of it, and the m_blocks that see its keys. The thread blocks of a cluster (bwd_sm90_wide) take
// adjacent keys, or the same, and visit the same m_blocks. `m_block` is the index of one.
template <typename Config>
struct NBlockWork {
  static constexpr int kClusterKeys = Config::kClusterKeys;
  using Order = DqOrder<Config::kBlockM, kClusterKeys>;
  NBlock n_block;  // of the cluster
  Sequence seq;
  Mask mask;
  Interval keys;  // of the thread block
  Interval cluster_keys;
  // From the first to the last that see some of cluster_keys; with key ranges, some between may not.
  Interval m_blocks;
  int first_head, num_heads;
  int key_sums;  // with Meeting::kSplitting: which of BwdScratch::key_sums; negative if the n_block is not split

  static constexpr bool kMayBeSplit = Config::kMeeting == Meeting::kSplitting;
  static constexpr bool kMayBeListed = kMayBeSplit && Config::kRanges != RangeSource::kNone;

  // index: counts the splits of all n_blocks, those of one n_block in a row. cta_rank: which kBlockN of the cluster's
  // keys are those of the thread block.
  __device__ NBlockWork(const BwdSm90Params& p, int index, int cta_rank = 0)
      : NBlockWork(p, work_tile(p, index), cta_rank) {}

  __device__ NBlockWork(const BwdSm90Params& p, const BwdWorkTile& tile, int cta_rank)
      : n_block(n_block_at<kClusterKeys, Config::kSwizzle>(p.problem, p.plan, tile.place)),
        seq(p.problem, n_block.entry),
        mask(p.problem, seq),
        keys(interval_of<Config::kBlockN>(n_block.index * (kClusterKeys / Config::kBlockN) + cta_rank)),
        cluster_keys(interval_of<kClusterKeys>(n_block.index)),
        m_blocks(blocks_of(mask.rows_that_see({cluster_keys.first, min(cluster_keys.last, seq.k.length - 1)}),
                           Config::kBlockM)),
        num_heads(p.problem.heads / p.problem.heads_k),
        key_sums(-1) {
    first_head = n_block.head_k * num_heads;
    if (has_ranges<Config::kFeatures>(p.problem)) {
      const KeyUse& use = key_use(p);
      m_blocks = {use.first_m, use.last_m};
    }
    if constexpr (kMayBeSplit) {
      const int of_heads = p.plan.head_splits;
      num_heads /= of_heads;
      first_head += tile.split % of_heads * num_heads;
      m_blocks = split_of(m_blocks, tile.split / of_heads, tile.splits / of_heads);
      if (tile.splits > 1) key_sums = sums_of(p.problem, p.plan, n_block).first + tile.split;
    }
  }

  // Whether the work tiles come from a work list.
  __device__ static bool is_listed(const BwdSm90Params& p) {
    return kMayBeListed && p.plan.scratch.work_tiles != nullptr;
  }
  __device__ static BwdWorkTile work_tile(const BwdSm90Params& p, int index) {
    if (is_listed(p)) {
      const int4 tile = __ldg(reinterpret_cast<const int4*>(p.plan.scratch.work_tiles) + index);
      return {tile.x, tile.y, tile.z};
    }
    if constexpr (!kMayBeSplit) return {index, 0, 1};
    return {index / p.plan.splits, index % p.plan.splits, p.plan.splits};
  }
  __device__ static int num_work_tiles(const BwdSm90Launch& p) {
    return is_listed(p) ? __ldg(p.plan.scratch.next_work + 1) : p.num_work_tiles;
  }

  __device__ bool exists() const { return cluster_keys.first < seq.k.length; }
  // Index of row 0 of a head in the padded layout of BwdScratch.
  __device__ int64_t padded_index(const BwdSm90Params& p, int head) const {
    return padded_row_index(p.problem, p.plan.scratch, seq.q, n_block.entry, head);
  }

  __device__ bool has_rows() const { return !m_blocks.empty(); }

  // The index-th of `splits` pieces of an interval, as equal as can be.
  __device__ static Interval split_of(const Interval& whole, int index, int splits) {
    const int length = max(0, whole.last + 1 - whole.first);
    const auto start = [&](int i) { return whole.first + static_cast<int>(int64_t{length} * i / splits); };
    return {start(index), start(index + 1) - 1};
  }

  // With key ranges: what bwd/ranges.cu has found for the cluster's keys, for rows, and for tiles of rows.
  __device__ const KeyUse& key_use(const BwdSm90Params& p) const {
    return p.plan.scratch.key_uses[key_use_index(p.problem, n_block, kClusterKeys)];
  }
  __device__ int64_t seen_index(const BwdSm90Params& p, int head) const {
    return flash_attn::seen_index(p.problem, p.plan.scratch, seq.q, n_block.entry, head);
  }
  __device__ const Interval* seen(const BwdSm90Params& p, int head, int row0) const {
    return p.plan.scratch.seen + seen_index(p, head) + row0;
  }
  __device__ const int4* tiles(const BwdSm90Params& p, int head) const {
    return p.problem.ranges.of_tiles + seen_index(p, head) / Config::kBlockM;
  }

  // The place of the cluster among those that add to dQ of an m_block.
  __device__ Order order(const BwdSm90Params& p, int head, int m_block) const {
    if (!has_ranges<Config::kFeatures>(p.problem)) return Order(mask, m_block, n_block.index);
    return Order(TileSeen(__ldg(tiles(p, head) + m_block)).any, n_block.index);
  }

  // Calls fn(head, m_block, cut) for the m_blocks to visit, in order; all warp roles use it, and so agree. Where there
  // may be key ranges, all lanes of a warp must call it together. cut, with key ranges only: whether some rows do not
  // see all of the keys or do not exist. The order is a constant because a choice at run time takes 5 % more
  // instructions.
  template <typename Fn>
  __device__ void for_each_m_block(const BwdSm90Params& p, Fn&& fn) const {
    constexpr bool kTakesRanges = Config::kRanges != RangeSource::kNone;
    static_assert(!kTakesRanges || Config::kMBlockOrder == MBlockOrder::kLastFirst);
    const int first = m_blocks.first, last = m_blocks.last;
#pragma unroll 1
    for (int head = first_head; head < first_head + num_heads; ++head) {
      if constexpr (kTakesRanges) {
#pragma unroll 1
        for (int m = last; m >= first; m -= 32) visit_ranged(p, head, m, fn);
      } else if constexpr (Config::kMBlockOrder == MBlockOrder::kLastFirst) {
#pragma unroll 1
        for (int m = last; m >= first; --m) fn(head, m, false);
      } else if constexpr (Config::kMBlockOrder == MBlockOrder::kFirstFirst) {
#pragma unroll 1
        for (int m = first; m <= last; ++m) fn(head, m, false);
      } else {
        if (last < first) return;
        const int start = first + n_block.index % (last - first + 1);
        int m = start;
#pragma unroll 1
        do {
          fn(head, m, false);
          m = m == last ? first : m + 1;
        } while (m != start);
      }
    }
  }

 private:
  // The same for the 32 m_blocks up to `last`, each of which one lane checks.
  template <typename Fn>
  __device__ void visit_ranged(const BwdSm90Params& p, int head, int last, Fn&& fn) const {
    const int own = last - lane_id();
    bool visited = own >= m_blocks.first, cut = false;
    if (visited && has_ranges<Config::kFeatures>(p.problem)) {
      const TileSeen seen(__ldg(tiles(p, head) + own));
      visited = touches(seen.any, cluster_keys), cut = !seen.all.covers(keys);
    }
    uint32_t todo = __ballot_sync(~0u, visited);
    const uint32_t all_cut = __ballot_sync(~0u, cut);
#pragma unroll 1
    for (; todo != 0; todo &= todo - 1) {
      const int i = __ffs(todo) - 1;
      fn(head, last - i, (all_cut >> i & 1) != 0);
    }
  }
};

}  // namespace flash::flash_attn
