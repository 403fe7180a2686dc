// Which forward kernel takes a problem, and its plan. Pure host code, which can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/divmod.h"
#include "flash_attn/features.h"
#include "flash_attn/fwd_plan.h"
#include "flash_attn/fwd_tiles.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// The facts besides the problem that a plan depends on. Results depend on it only in their rounding.
struct FwdHints {
  int64_t longest_q;  // no entry has more rows
  int64_t longest_k;  // no entry has more keys
  int num_splits;     // 0: as many as is best
  int multiprocessors;
  int shared_bytes;  // that a block can have
  bool has_sm90;     // whether fwd_sm90.cuh runs
};

// The sizes of a plan's scratch, in elements.
struct FwdScratch {
  int64_t out = 0;       // of KeySplits::out
  int64_t softmax = 0;   // of KeySplits::softmax
  int64_t counters = 0;  // zeros
};

struct FwdChoice {
  FwdPlan plan;
  FwdScratch scratch;
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles of rows

// How many query heads become rows of one tile: those that share a key head, if that takes fewer tiles. Kernels count
// the rows of an entry in 32 bits, so that heads stay apart where tokens times heads do not fit. With dropout, random
// bits come for 16 rows of one head. Heads with key ranges of their own stay apart, too.
inline int heads_to_pack(const Problem& p, int64_t longest_q, int tile_rows) {
  const int group = p.heads / p.heads_k;
  const bool fits = int64_t{p.seqlen_q} * group <= std::numeric_limits<int>::max() - tile_rows;
  const int64_t apart = group * ceil_div(longest_q, tile_rows), together = ceil_div(longest_q * group, tile_rows);
  return fits && p.rng_state == nullptr && p.ranges.heads == 0 && together < apart ? group : 1;
}

// How many slots for tiles a group of packed heads has, in a dense entry or in all packed ones together.
inline int64_t slots_for(const Problem& p, int packed_heads, int tile_rows) {
  const int64_t rows = int64_t{p.seqlen_q} * packed_heads;
  return p.cu_seqlens_q ? rows / tile_rows + p.batch + 1 : ceil_div(rows, tile_rows);
}

inline Tiling tiling_for(const Problem& p, int packed_heads, int tile_rows) {
  const int64_t slots = slots_for(p, packed_heads, tile_rows);
  const int64_t tiles = slots * (p.heads / packed_heads) * (p.cu_seqlens_q ? 1 : p.batch);
  if (tiles > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("q has too many rows and heads for one launch: " + std::to_string(tiles) + " tiles");
  }
  return {.group = Divisor(p.heads / p.heads_k),
          .packed_heads = Divisor(packed_heads),
          .head_groups = Divisor(p.heads / packed_heads),
          .slots = Divisor(static_cast<int>(slots)),
          .tiles = Divisor(static_cast<int>(tiles))};
}

inline int num_tiles(const Tiling& tiling) { return static_cast<int>(tiling.tiles.value); }

// ---------------------------------------------------------------------------------------------------------------------
// Splits of the keys

constexpr int kMaxSplits = 128;

// `wanted` splits, or as many as one launch has blocks for, of at least `least_blocks` blocks of keys each.
inline KeySplits splits_of(const Tiling& tiling, int64_t wanted, int64_t least_blocks, int rows) {
  const int64_t most = std::max(1, std::numeric_limits<int>::max() / std::max(num_tiles(tiling), 1));
  return {.count = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, kMaxSplits))),
          .least_blocks = static_cast<int>(least_blocks),
          .rows = rows};
}

// The scratch of splits, in which a row has head_dim sums, those of the instance, and a maximum and a sum for each of
// `lanes`.
inline FwdScratch scratch_of(const Tiling& tiling, const KeySplits& splits, int head_dim, int lanes) {
  if (splits.count == 1) return {};
  const int64_t rows = int64_t{num_tiles(tiling)} * splits.count * splits.rows;
  return {.out = rows * head_dim, .softmax = 2 * lanes * rows, .counters = num_tiles(tiling)};
}

// Gives a plan its scratch: `partials` has scratch.out + scratch.softmax elements.
inline void use_scratch(FwdPlan& plan, const FwdScratch& scratch, float* partials, int* counters) {
  if (auto* on_sm90 = std::get_if<FwdSm90Plan>(&plan)) {
    on_sm90->taken = counters;
    return;
  }
  auto* decoding = std::get_if<DecodePlan>(&plan);
  KeySplits& splits = decoding ? decoding->splits : std::get<FwdSm80Plan>(plan).splits;
  splits.out = partials, splits.softmax = partials + scratch.out, splits.arrivals = counters;
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

// Whether decode_sm80.cuh takes a problem: all rows that share a key head are one tile, and nothing is dropped.
inline bool suits_decoding(const Problem& p, const FwdHints& hints) {
  return p.rng_state == nullptr && hints.longest_q * (p.heads / p.heads_k) <= kDecodeRows;
}

// Whether keys and values, which are read once, should leave the L2 cache first. Then they do not push out data that
// must be written back. Small key caches gain most by this, and large ones lose a little.
inline bool should_evict_keys(const Problem& p, int64_t longest_k) {
  constexpr int64_t kPassingBytes = 256 << 20;
  return int64_t{2} * p.batch * p.heads_k * (p.head_dim + p.head_dim_v) * longest_k <= kPassingBytes;
}

// A block works alone on a multiprocessor. Where there are fewer tiles than multiprocessors, the keys are cut into as
// few splits as fill them. Where entries may differ in length, a split has kPiece keys or more, so that no block takes
// long: this may halve the time of ragged entries, and costs equal ones little. Entries that are much shorter than
// there is room for are cut into fewer splits than the longest.
//
// Each split has scratch, whether it has keys or not, because only the device knows the lengths. Therefore there are at
// most kMostSplitsEach splits for each multiprocessor. The longest entry then keeps no multiprocessor busy for longer
// than the whole batch does, unless it is more than kMostSplitsEach times as long as an average one.
inline KeySplits split_decode(const Problem& p, const FwdHints& hints, const Tiling& tiling, int warps, int rows) {
  constexpr int kPiece = 4096, kShortPiece = 1024, kMostPieces = 16, kMostSplitsEach = 32;
  if (hints.num_splits > 0) return splits_of(tiling, hints.num_splits, 1, rows);
  const int tiles = std::max(num_tiles(tiling), 1);
  const bool ragged = p.batch > 1 && (p.seqused_k || p.cu_seqlens_k);
  const int to_fill = std::max(1, hints.multiprocessors / tiles);
  const int64_t room = int64_t{kMostSplitsEach} * hints.multiprocessors / tiles;
  const int64_t pieces = std::min<int64_t>({ceil_div(hints.longest_k, kPiece), kMostPieces, room});
  const int64_t of_longest = ceil_div(ceil_div(hints.longest_k, to_fill), kDecodeKeys);
  const int enough = to_fill == 1 ? kPiece / kDecodeKeys : ragged ? kShortPiece / kDecodeKeys : warps;
  return splits_of(tiling, ragged ? std::max<int64_t>(to_fill, pieces) : to_fill,
                   std::clamp<int64_t>(of_longest, 1, std::max(enough, 1)), rows);
}

inline FwdChoice plan_decode(const FwdParams& p, const FwdHints& hints) {
  const Problem& problem = p.problem;
  const int head_dim = sm80_head_dims(problem.head_dim, problem.head_dim_v).of_keys;
  const int warps = decode_warps(head_dim, hints.shared_bytes);
  const int packed_heads = heads_to_pack(problem, hints.longest_q, kDecodeRows);
  const Tiling tiling = tiling_for(problem, packed_heads, kDecodeRows);
  // A hint may be wrong about packed entries: their tiles may have up to kDecodeRows rows.
  const int rows = problem.cu_seqlens_q ? kDecodeRows : std::min(kDecodeRows, problem.seqlen_q * packed_heads);
  const KeySplits splits = split_decode(problem, hints, tiling, warps, rows);
  return {DecodePlan{tiling, splits, warps, should_evict_keys(problem, hints.longest_k)},
          scratch_of(tiling, splits, head_dim, /*lanes=*/1)};
}

// Whether the decode kernel itself can append: it looks up no pages then, no entry may read what another one appends,
// and every new key must be seen by some row, because only blocks that see a key write it.
inline bool appends_in_decoding(const FwdParams& p, const FwdPlan& plan, const AppendParams& append,
                                const FwdHints& hints) {
  const auto* decoding = std::get_if<DecodePlan>(&plan);
  if (decoding == nullptr || features_of<FwdSm80Plan>(p) != Features::kPlain) return false;
  const Problem& problem = p.problem;
  const int head_dim = instance_head_dim(problem.head_dim);
  const bool own_rows = problem.batch_index == nullptr && (append.k_cache.batch != 0 || problem.batch == 1);
  const bool all_seen = problem.leftpad_k == nullptr && problem.seqlen_q + problem.window_left >= append.seqlen_new;
  return own_rows && all_seen && append.seqlen_new <= kMostAppended &&
         decoding->warps * decode_bytes_per_warp(head_dim) + decode_fresh_bytes(head_dim) <= hints.shared_bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Hopper

// Whether rows differ in how many keys they see.
inline bool rows_differ(const Problem& p) {
  return p.window_left < p.seqlen_k || p.window_right < p.seqlen_k || p.ranges.data != nullptr;
}

// Whether fwd_sm90.cuh takes a problem. It copies aligned rows of one head at a time, and does not split the keys of a
// tile. So it needs enough rows, and many tiles or few keys. At these limits it is as fast as the others on an H200.
inline bool suits_sm90(const FwdParams& p, const FwdHints& hints) {
  constexpr int kTileRows = 128, kFewKeysPerChannel = 16;
  const Problem& problem = p.problem;
  const int64_t entries = problem.cu_seqlens_q ? 1 : problem.batch;
  const int64_t tiles = entries * problem.heads * ceil_div(int64_t{problem.seqlen_q}, kTileRows);
  const int64_t blocks = tiles * channel_parts(std::max(problem.head_dim, problem.head_dim_v));
  const bool any_keys = std::min(problem.seqlen_k, problem.capacity_k) > 0;
  const bool rows_enough = hints.longest_q >= (problem.heads == problem.heads_k ? 32 : 64);
  const bool few_keys = hints.longest_k <= int64_t{kFewKeysPerChannel} * problem.head_dim;
  return hints.has_sm90 && p.aligned && p.pages.block_table == nullptr && hints.num_splits <= 1 && any_keys &&
         rows_enough && (few_keys || 5 * blocks >= 2 * hints.multiprocessors);
}

// Whether the kernel of a problem would read its bias in tiles if that, or a mask in its place, lay as TMA needs it.
inline bool wants_tiled_bias(const FwdParams& p, const FwdHints& hints) {
  return !suits_decoding(p.problem, hints) && suits_sm90(p, hints) && p.row_max == nullptr &&
         could_tile_bias<FwdSm90Plan>(p.problem);
}

// Whether sequences are long enough for the wide tile. Where rows differ in how many keys they see, large tiles compute
// more scores that the mask hides.
inline bool wants_wide_tile(const Problem& p, const FwdHints& hints) {
  const int head_dim = sm90_head_dims(p.head_dim, p.head_dim_v).of_keys;
  if (head_dim == 64) return hints.longest_q >= (rows_differ(p) ? 2048 : 512);
  if (head_dim == 96) return hints.longest_q >= (rows_differ(p) ? 8192 : 2048);
  if (head_dim == 128) return hints.longest_k >= (rows_differ(p) ? 16384 : 8192);
  return hints.longest_k >= (rows_differ(p) ? 2048 : 1024);
}

// How many heads of all entries follow one another tile by tile. Where rows differ in how many keys they see, the
// longest tiles come before all others, of as many heads as have keys and values that stay in the L2 cache together.
// But the longest tiles also wait for memory. So at most half of the multiprocessors start with one.
inline int heads_per_section(const Problem& p, int multiprocessors) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int heads = p.cu_seqlens_q ? p.heads : p.heads * p.batch, group = p.heads / p.heads_k;
  if (!rows_differ(p)) return 1;
  const int64_t key_head_bytes = int64_t{2} * p.seqlen_k * (p.head_dim + p.head_dim_v);
  const int64_t cached = kCacheBytes / key_head_bytes * group, most = std::min(heads, std::max(1, multiprocessors / 2));
  int section = static_cast<int>(std::clamp<int64_t>(cached, 1, most));
  while (heads % section != 0) --section;
  return section;
}

inline FwdChoice plan_fwd_sm90(const FwdParams& p, const FwdHints& hints) {
  const auto [head_dim, head_dim_v] = sm90_head_dims(p.problem.head_dim, p.problem.head_dim_v);
  const Features features = features_of<FwdSm90Plan>(p);
  const bool wide = has_wide_tile(head_dim, features) && wants_wide_tile(p.problem, hints);
  const int tile_rows = 64 * fwd_sm90_tile(head_dim, features, wide, head_dim_v).warpgroups;
  const Tiling tiling = tiling_for(p.problem, /*packed_heads=*/1, tile_rows);
  const int parts = channel_parts(head_dim);
  const int section = heads_per_section(p.problem, hints.multiprocessors);
  const bool shares = features == Features::kBiased && !p.problem.cu_seqlens_q && bias_tensor(p.problem).batch == 0;
  return {
      FwdSm90Plan{.tiling = tiling,
                  .wide = wide,
                  .section_heads = Divisor(section),
                  .section_tiles = Divisor(section * static_cast<int>(tiling.slots.value)),
                  .sharing = Divisor(shares ? p.problem.batch : 1),
                  .blocks = parts > 1 ? parts * num_tiles(tiling) : std::min(num_tiles(tiling), hints.multiprocessors)},
      {.counters = parts > 1 ? 0 : 1}};
}

// ---------------------------------------------------------------------------------------------------------------------
// Every GPU

// The fewest splits that keep the GPU nearly as busy as any number would; 1 where the tiles alone nearly fill it. It
// runs `places` blocks at a time.
inline int splits_for(int64_t tiles, int64_t key_blocks, int places) {
  if (tiles * 10 >= places * 8) return 1;
  const int64_t most = std::min<int64_t>({key_blocks, kMaxSplits, places});
  const auto efficiency = [&](int64_t splits) {
    const double waves = static_cast<double>(tiles * splits) / places;
    return waves / std::ceil(waves);
  };
  double best = 0;
  for (int64_t splits = 1; splits <= most; ++splits) best = std::max(best, efficiency(splits));
  int splits = 1;
  while (splits < most && efficiency(splits) < 0.85 * best) ++splits;
  return splits;
}

inline FwdChoice plan_fwd_sm80(const FwdParams& p, const FwdHints& hints) {
  const int head_dim = sm80_head_dims(p.problem.head_dim, p.problem.head_dim_v).of_keys;
  const int lanes_of_row = 4 * channel_parts(head_dim);
  const int blocks_at_once = hints.multiprocessors * (head_dim <= 256 ? 2 : 1);  // by their shared memory
  const FwdTile tile = fwd_tile(head_dim, features_of<FwdSm80Plan>(p));
  const Tiling tiling = tiling_for(p.problem, heads_to_pack(p.problem, hints.longest_q, tile.rows), tile.rows);
  const int64_t key_blocks = ceil_div(hints.longest_k, tile.keys);
  const int wanted =
      hints.num_splits > 0 ? hints.num_splits : splits_for(num_tiles(tiling), key_blocks, blocks_at_once);
  const KeySplits splits = splits_of(tiling, std::min<int64_t>(key_blocks, wanted), /*least_blocks=*/1, tile.rows);
  return {FwdSm80Plan{tiling, splits}, scratch_of(tiling, splits, head_dim, lanes_of_row)};
}

// Chooses the kernel. fwd_sm80.cuh packs heads, looks pages up and splits keys: it takes all other problems.
inline FwdChoice plan_fwd(const FwdParams& p, const FwdHints& hints) {
  if (suits_decoding(p.problem, hints)) return plan_decode(p, hints);
  if (suits_sm90(p, hints)) return plan_fwd_sm90(p, hints);
  return plan_fwd_sm80(p, hints);
}

}  // namespace flash::flash_attn
