// The key block that a thread block of the backward kernels for sm_90 works on, the rows that it visits, the rings that
// hold these, and the parameters of the kernels.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/ranges.cuh"
#include "flash_attn/bwd/schedule.cuh"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// The parameters of the kernels: the problem with its plan, and TMA descriptors of its tensors.
struct BwdSm90Launch : BwdSm90Params {
  CUtensorMap q_map, dout_map, k_map, v_map;  // boxes of one page of a tile (tile/shared.cuh)
  CUtensorMap dq_accum_map, dq_map;           // only bwd_sm90: boxes of a half of dQ
  CUtensorMap bias_map;                       // only instances of kBiased
  int num_shares;                             // of all key blocks
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

// With key ranges: the interval of keys that each row of a tile sees, copied for tiles that need a mask only. Like the
// values of rows, they are read with ordinary loads. Where shared memory has no room, they are read from global memory.
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
using SeenRingOf = std::conditional_t<Config::kCopiesSeen, SeenRing<Config>, NoSeenRing>;

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

// The keys of a thread block, and the rows that see them. The thread blocks of a cluster (bwd_sm90_wide) take
// adjacent keys, or the same, and visit the same rows. `block` and `row_block` are indices of blocks of keys and of
// rows.
template <typename Config>
struct KeyBlock {
  static constexpr int kClusterKeys = Config::kClusterKeys;
  using Order = AddOrder<Config::kBlockM, kClusterKeys>;
  int share;     // with kShares: which share of the key block's rows and heads this is
  KeyWork work;  // of the cluster
  Sequence seq;
  Mask mask;
  Interval keys;  // of the thread block
  Interval cluster_keys;
  Interval
      row_blocks;  // from the first to the last that see some of cluster_keys; with key ranges, some between may not
  int first_head, num_heads;

  // index: counts the shares of all key blocks, those of one key block in a row. part: which kBlockN of the cluster's
  // keys are those of the thread block.
  __device__ KeyBlock(const BwdSm90Params& p, int index, int part = 0)
      : share(Config::kShares ? index % p.plan.shares : 0),
        work(key_work<kClusterKeys, Config::kTakesEntries>(p.problem, p.plan,
                                                           Config::kShares ? index / p.plan.shares : index)),
        seq(p.problem, work.entry),
        mask(p.problem, seq),
        keys(interval_of<Config::kBlockN>(work.block * (kClusterKeys / Config::kBlockN) + part)),
        cluster_keys(interval_of<kClusterKeys>(work.block)),
        row_blocks(blocks_of(mask.rows_that_see({cluster_keys.first, min(cluster_keys.last, seq.k.length - 1)}),
                             Config::kBlockM)),
        num_heads(p.problem.heads / p.problem.heads_k) {
    first_head = work.head_k * num_heads;
    if (has_ranges<Config::kFeatures>(p.problem)) {
      const KeyUse& use = key_use(p);
      row_blocks = {use.first_rows, use.last_rows};
    }
    if constexpr (Config::kShares) {
      num_heads /= p.plan.head_shares;
      first_head += share % p.plan.head_shares * num_heads;
      row_blocks = share_of(row_blocks, share / p.plan.head_shares, p.plan.row_shares);
    }
  }

  __device__ bool exists() const { return cluster_keys.first < seq.k.length; }
  // Index of row 0 of a head in the padded layout of BwdScratch.
  __device__ int64_t padded_index(const BwdSm90Params& p, int head) const {
    return padded_row_index(p.problem, p.plan.scratch, seq.q, work.entry, head);
  }

  __device__ bool has_rows() const { return !row_blocks.empty(); }

  // The index-th of `shares` parts of an interval, as equal as can be.
  __device__ static Interval share_of(const Interval& whole, int index, int shares) {
    const int length = max(0, whole.last + 1 - whole.first);
    const auto start = [&](int i) { return whole.first + static_cast<int>(int64_t{length} * i / shares); };
    return {start(index), start(index + 1) - 1};
  }

  // With key ranges: what bwd/ranges.cu has found for the cluster's keys, for rows, and for tiles of rows.
  __device__ const KeyUse& key_use(const BwdSm90Params& p) const {
    return p.plan.scratch.key_uses[key_use_index(p.problem, work, kClusterKeys)];
  }
  __device__ int64_t seen_index(const BwdSm90Params& p, int head) const {
    return flash_attn::seen_index(p.problem, p.plan.scratch, seq.q, work.entry, head);
  }
  __device__ const Interval* seen(const BwdSm90Params& p, int head, int row0) const {
    return p.plan.scratch.seen + seen_index(p, head) + row0;
  }
  __device__ const int4* tiles(const BwdSm90Params& p, int head) const {
    return p.problem.ranges.of_tiles + seen_index(p, head) / Config::kBlockM;
  }

  // The place of the cluster among those that add to dQ of a row block.
  __device__ Order order(const BwdSm90Params& p, int head, int row_block) const {
    if (!has_ranges<Config::kFeatures>(p.problem)) return Order(mask, row_block, work.block);
    return Order(TileSeen(__ldg(tiles(p, head) + row_block)).any, work.block);
  }

  // Calls fn(head, row block, cut) for the row blocks to visit, in order; all warp roles use it, and so agree. Where
  // there may be key ranges, all lanes of a warp must call it together. cut, with key ranges only: whether some rows do
  // not see all of the keys or do not exist. kRowOrder is a constant because a choice at run time takes 5 % more
  // instructions.
  template <typename Fn>
  __device__ void for_each_row_block(const BwdSm90Params& p, Fn&& fn) const {
    static_assert(!Config::kTakesRanges || Config::kRowOrder == RowOrder::kLastFirst);
    const int first = row_blocks.first, last = row_blocks.last;
#pragma unroll 1
    for (int head = first_head; head < first_head + num_heads; ++head) {
      if constexpr (Config::kTakesRanges) {
#pragma unroll 1
        for (int block = last; block >= first; block -= 32) visit_rows(p, head, block, fn);
      } else if constexpr (Config::kRowOrder == RowOrder::kLastFirst) {
#pragma unroll 1
        for (int block = last; block >= first; --block) fn(head, block, false);
      } else if constexpr (Config::kRowOrder == RowOrder::kFirstFirst) {
#pragma unroll 1
        for (int block = first; block <= last; ++block) fn(head, block, false);
      } else {
        if (last < first) return;
        const int start = first + work.block % (last - first + 1);
        int block = start;
#pragma unroll 1
        do {
          fn(head, block, false);
          block = block == last ? first : block + 1;
        } while (block != start);
      }
    }
  }

 private:
  // The same for the 32 row blocks up to `last`, each of which one lane checks.
  template <typename Fn>
  __device__ void visit_rows(const BwdSm90Params& p, int head, int last, Fn&& fn) const {
    const int own = last - lane_id();
    bool visited = own >= row_blocks.first, cut = false;
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
