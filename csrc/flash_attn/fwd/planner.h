// Chooses the forward kernel for a problem, and makes its plan. Pure host code, which can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "common/divmod.h"
#include "flash_attn/features.h"
#include "flash_attn/fwd/kernels.h"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// What else a plan depends on. Results depend on the plan only in their rounding.
struct FwdHints {
  int64_t longest_q;  // no entry has more rows
  int64_t longest_k;  // no entry has more keys
  int num_splits;     // 0: as many as is best
  int invariance;     // the level of batch invariance: 0, 1 or 2
  int multiprocessors;
  int shared_bytes;  // that a thread block can have
  bool has_sm90;     // whether fwd_sm90 can run on the device
};

// The sizes of a plan's scratch, in elements.
struct FwdScratch {
  int64_t out = 0;       // of KeySplits::out
  int64_t softmax = 0;   // of KeySplits::softmax
  int64_t totals = 0;    // of FixedPieces
  int64_t records = 0;   // of PieceSlots::records, in elements of 4 bytes
  int64_t counters = 0;  // zeros
};

struct FwdChoice {
  FwdPlan plan;
  FwdScratch scratch;
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles of rows

// How many query heads are packed into the rows of a tile: all that share a key head if that takes fewer tiles, else 1.
// or_as_many: also if it takes as many, which pays where some entries have fewer rows than the longest.
// Never where tokens times heads exceed the 32 bits in which kernels count the rows of an entry; with dropout, whose
// random bits are drawn for 16 rows of one head; or if heads have key ranges of their own.
inline int heads_to_pack(const Problem& p, int64_t longest_q, int tile_rows, bool or_as_many = false) {
  const int group = p.heads / p.heads_k;
  const bool fits = int64_t{p.seqlen_q} * group <= std::numeric_limits<int>::max() - tile_rows;
  const int64_t apart = group * ceil_div(longest_q, tile_rows), together = ceil_div(longest_q * group, tile_rows);
  return fits && !has_dropout(p) && p.ranges.heads == 0 && together < apart + or_as_many ? group : 1;
}

// How many slots for tiles (Tiling) a group of packed heads has in a dense entry, or in all packed entries together:
// entry_of_slot (schedule.cuh) says why one more for each entry.
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

// `wanted` splits, or as many as the grid of one launch can have, of at least `least_n_blocks` n_blocks each.
inline KeySplits splits_of(const Tiling& tiling, int64_t wanted, int64_t least_n_blocks, int rows) {
  const int64_t most = std::max(1, std::numeric_limits<int>::max() / std::max(num_tiles(tiling), 1));
  return {.count = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, kMaxSplits))),
          .least_n_blocks = static_cast<int>(least_n_blocks),
          .rows = rows};
}

// The scratch of splits. For each row of a split: head_dim (of the instance) channels of O, and a maximum and a sum for
// each of the `lanes` that store them.
inline FwdScratch scratch_of(const Tiling& tiling, const KeySplits& splits, int head_dim, int lanes) {
  if (splits.count == 1) return {};
  const int64_t rows = int64_t{num_tiles(tiling)} * splits.count * splits.rows;
  return {.out = rows * head_dim, .softmax = 2 * lanes * rows, .counters = num_tiles(tiling)};
}

// The elements of KeySplits, PieceSlots and FixedPieces in a plan's scratch, apart from counters.
inline int64_t num_partials(const FwdScratch& scratch) {
  return scratch.out + scratch.softmax + scratch.totals + scratch.records;
}

// Points a plan to its scratch: `partials` has num_partials(scratch) elements; `counters` are zeros.
inline void use_scratch(FwdPlan& plan, const FwdScratch& scratch, float* partials, int* counters) {
  if (auto* on_sm90 = std::get_if<FwdSm90Plan>(&plan)) {
    on_sm90->taken = counters;
    return;
  }
  if (auto* invariant = std::get_if<InvariantPlan>(&plan)) {
    invariant->pieces.totals = partials, invariant->taken = counters;
    return;
  }
  auto* coded_serving = std::get_if<CodedServingPlan>(&plan);
  if (auto* serving = coded_serving ? coded_serving : std::get_if<ServingPlan>(&plan)) {
    PieceSlots& slots = serving->slots;
    serving->pieces.totals = partials;
    slots.out = partials + scratch.totals, slots.softmax = slots.out + scratch.out;
    slots.records = reinterpret_cast<PieceRecord*>(slots.softmax + scratch.softmax);
    serving->taken = counters, slots.used = counters + 1;
    return;
  }
  auto* coded = std::get_if<CodedDecodePlan>(&plan);
  auto* decoding = coded ? coded : std::get_if<DecodePlan>(&plan);
  KeySplits& splits = decoding ? decoding->splits : std::get<FwdSm80Plan>(plan).splits;
  splits.out = partials, splits.softmax = partials + scratch.out, splits.arrivals = counters;
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

// Whether decode_sm80 takes a problem: all rows that share a key head fit one tile, and there is no dropout.
inline bool suits_decoding(const Problem& p, const FwdHints& hints) {
  return !has_dropout(p) && hints.longest_q * (p.heads / p.heads_k) <= kDecodeRows;
}

// Whether keys and values, which are read once, should be the first to be evicted from the L2 cache. Then they do not
// evict data that would have to be written back. Small key caches gain most by this, and large ones lose a little.
inline bool should_evict_keys(const FwdParams& p, int64_t longest_k) {
  constexpr int64_t kPassingBytes = 256 << 20;
  const Problem& problem = p.problem;
  const int64_t channels = int64_t{problem.heads_k} * (problem.head_dim + problem.head_dim_v);
  return (p.coded ? 1 : 2) * problem.batch * channels * longest_k <= kPassingBytes;
}

// A thread block has an SM to itself (over codes, two share one, but splits are those of the call in fp16, and so are
// the bits). Where there are fewer tiles than SMs, the keys are cut into just enough splits to fill the SMs; but not
// keys that the warps of one thread block take in one round, since merging would only come on top. Where entries may
// differ in length (ragged), the longest is also cut into pieces of about kPiece keys, so that no thread block takes
// long: this may halve the time of ragged batches, and costs equal lengths little. Short entries get fewer splits,
// since a split has at least least_n_blocks n_blocks.
//
// Every split has scratch, with keys or without, because only the device knows the lengths. So there are at most
// kMostSplitsEach splits for each SM. The longest entry then keeps no SM busy for longer than the whole batch does,
// unless it is more than kMostSplitsEach times as long as the average.
inline KeySplits split_decode(const Problem& p, const FwdHints& hints, const Tiling& tiling, int warps, int rows) {
  constexpr int kPiece = 4096, kShortPiece = 1024, kMostPieces = 16, kMostSplitsEach = 32;
  if (hints.num_splits > 0) return splits_of(tiling, hints.num_splits, 1, rows);
  const int teams = warps / channel_slices(std::max(p.head_dim, p.head_dim_v));
  if (hints.longest_k <= teams * kDecodeKeys) return splits_of(tiling, 1, 1, rows);
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
  const HeadDims built =
      p.coded && p.aligned ? CodedDecodeKernel::head_dims(problem) : DecodeKernel::head_dims(problem);
  const int head_dim = built.of_keys;
  const int warps = decode_warps(head_dim, hints.shared_bytes);
  const int packed_heads = heads_to_pack(problem, hints.longest_q, kDecodeRows);
  const Tiling tiling = tiling_for(problem, packed_heads, kDecodeRows);
  // longest_q is the caller's word where entries are packed: a tile may have up to kDecodeRows rows all the same.
  const int rows = problem.cu_seqlens_q ? kDecodeRows : std::min(kDecodeRows, problem.seqlen_q * packed_heads);
  const KeySplits splits = split_decode(problem, hints, tiling, warps, rows);
  const DecodePlan plan{tiling, splits, warps, should_evict_keys(p, hints.longest_k)};
  const FwdScratch scratch = scratch_of(tiling, splits, head_dim, /*lanes=*/1);
  if (p.coded && p.aligned) return {CodedDecodePlan{plan}, scratch};
  return {plan, scratch};
}

// Whether the decode kernel can also append, which saves a launch. It does not find pages or packed queries then; no
// entry may read what another entry appends; and some row must see every new key, because only thread blocks that see a
// key write it.
inline bool appends_in_decoding(const FwdParams& p, const FwdPlan& plan, const AppendParams& append,
                                const FwdHints& hints) {
  const auto* decoding = std::get_if<DecodePlan>(&plan);
  const Problem& problem = p.problem;
  if (decoding == nullptr || has_pages(p) || problem.cu_seqlens_q != nullptr) return false;
  if (instance_for<DecodeKernel>(p) != Features::kPlain) return false;
  const int head_dim = instance_head_dim(problem.head_dim);
  const bool own_rows = problem.batch_index == nullptr && (append.k_cache.batch != 0 || problem.batch == 1);
  const bool all_seen = problem.leftpad_k == nullptr && problem.seqlen_q + problem.window_left >= append.seqlen_new;
  return own_rows && all_seen && append.seqlen_new <= kMostAppended &&
         decoding->warps * decode_bytes_per_warp(head_dim) + decode_fresh_bytes(head_dim) <= hints.shared_bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Hopper

// Whether rows may differ in how many keys they see.
inline bool rows_differ(const Problem& p) {
  return p.window_left < p.seqlen_k || p.window_right < p.seqlen_k || p.ranges.data != nullptr;
}

// Whether fwd_sm90 takes a problem. It copies aligned rows without pages, packs no heads, and splits no keys. So it
// needs enough rows to fill tiles, and enough tiles to fill the GPU or so few keys that splits would gain nothing. At
// these limits it is as fast as the other kernels on an H200.
inline bool suits_sm90(const FwdParams& p, const FwdHints& hints) {
  constexpr int kTileRows = 128, kFewKeysPerChannel = 16;
  const Problem& problem = p.problem;
  const int64_t entries = problem.cu_seqlens_q ? 1 : problem.batch;
  const int64_t tiles = entries * problem.heads * ceil_div(int64_t{problem.seqlen_q}, kTileRows);
  const int64_t blocks = tiles * channel_slices(std::max(problem.head_dim, problem.head_dim_v));
  const bool any_keys = std::min(problem.seqlen_k, problem.capacity_k) > 0 && problem.batch > 0;
  const bool rows_enough = hints.longest_q >= (problem.heads == problem.heads_k ? 32 : 64);
  const bool few_keys = hints.longest_k <= int64_t{kFewKeysPerChannel} * problem.head_dim;
  return hints.has_sm90 && p.aligned && p.pages.block_table == nullptr && hints.num_splits <= 1 && any_keys &&
         rows_enough && (few_keys || 5 * blocks >= 2 * hints.multiprocessors);
}

// Whether it pays to copy the bias, or a bool mask as a bias, to a layout that TMA can copy tiles from: fwd_sm90
// would then read it in tiles.
inline bool wants_tiled_bias(const FwdParams& p, const FwdHints& hints) {
  return hints.invariance == 0 && !suits_decoding(p.problem, hints) && suits_sm90(p, hints) && p.row_max == nullptr &&
         could_tile_bias<FwdSm90Kernel>(p.problem);
}

// No row sees more keys.
inline int64_t most_seen_keys(const Problem& p, const FwdHints& hints) {
  return std::min(hints.longest_k, int64_t{p.window_left} + p.window_right + 1);
}

// Whether tiles of 192 rows, all alike, need fewer waves of thread blocks than those of 128. Where there are few waves,
// they may need as many, and each wave takes longer.
inline bool saves_waves(const Problem& p, const FwdHints& hints) {
  const int64_t heads = int64_t{p.heads} * (p.cu_seqlens_q ? 1 : p.batch), blocks = std::max(1, hints.multiprocessors);
  const auto waves = [&](int rows) { return ceil_div(heads * slots_for(p, /*packed_heads=*/1, rows), blocks); };
  return waves(192) < waves(128);
}

// Whether sequences are long enough for the wide tile. Where rows differ in how many keys they see, large tiles compute
// more scores that the mask hides: a window of 1024 keys in 16384 rows of 128 channels takes 12 % longer in wide tiles.
inline bool wants_wide_tile(const Problem& p, const FwdHints& hints) {
  const int head_dim = sm90_head_dims(p.head_dim, p.head_dim_v).of_keys;
  if (head_dim <= 96 && !rows_differ(p) && !saves_waves(p, hints)) return false;
  if (head_dim == 64) return hints.longest_q >= (rows_differ(p) ? 2048 : 512);
  if (head_dim == 96) return hints.longest_q >= (rows_differ(p) ? 8192 : 2048);
  if (head_dim == 128) return most_seen_keys(p, hints) >= 8192;
  return hints.longest_k >= (rows_differ(p) ? 2048 : 1024);
}

// Whether pairs of thread blocks share keys. That takes 1 to 2 % more cycles, and so much less energy that long rows,
// whose clock the limit of power sets, take 2 to 4 % less time. Shorter and packed ones have not been tried.
inline bool wants_pairs(const Problem& p, const FwdHints& hints) {
  constexpr int64_t kLong = 16384;
  return !p.cu_seqlens_q && std::min(hints.longest_q, most_seen_keys(p, hints)) >= kLong && hints.multiprocessors > 1;
}

// For how many heads (of all entries) tiles are processed together, the longest first (TileSwizzle). Where all rows see
// equally many keys, there is nothing to balance, and tiles go head by head: 1. Otherwise as many heads as have keys
// and values that fit the L2 cache together. But the longest tiles also wait for memory, so at most half of the SMs
// start with one.
inline int swizzled_heads(const Problem& p, int multiprocessors) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int heads = p.cu_seqlens_q ? p.heads : p.heads * p.batch, group = p.heads / p.heads_k;
  if (!rows_differ(p)) return 1;
  const int64_t key_head_bytes = int64_t{2} * p.seqlen_k * (p.head_dim + p.head_dim_v);
  const int64_t cached = kCacheBytes / key_head_bytes * group, most = std::min(heads, std::max(1, multiprocessors / 2));
  int together = static_cast<int>(std::clamp<int64_t>(cached, 1, most));
  while (heads % together != 0) --together;
  return together;
}

// A plan for persistent thread blocks, pairs of them that share tiles of twice as many rows, or clusters of them.
inline FwdSm90Plan plan_in_tiles(const FwdParams& p, const FwdHints& hints, const FwdSm90Tile& tile) {
  const Tiling tiling = tiling_for(p.problem, /*packed_heads=*/1, 64 * tile.warpgroups * tile.sharers);
  const int heads = swizzled_heads(p.problem, hints.multiprocessors), tiles = num_tiles(tiling);
  const int cluster_size = channel_slices(FwdSm90Kernel::head_dims(p.problem).of_keys);
  return {.tiling = tiling,
          .swizzle = {.heads = Divisor(heads), .tiles = Divisor(heads * static_cast<int>(tiling.slots.value))},
          .pieces = {},
          .blocks = cluster_size > 1 ? cluster_size * tiles
                                     : tile.sharers * std::min(tiles, hints.multiprocessors / tile.sharers)};
}

inline FwdChoice plan_fwd_sm90(const FwdParams& p, const FwdHints& hints) {
  const auto [head_dim, head_dim_v] = FwdSm90Kernel::head_dims(p.problem);
  const Features features = instance_for<FwdSm90Kernel>(p);
  const bool wide = has_wide_tile(head_dim, features) && wants_wide_tile(p.problem, hints);
  const bool one_bias = features == Features::kBiased && !p.problem.cu_seqlens_q && bias_tensor(p.problem).batch == 0;
  const bool pairs = wide && has_paired_tile(head_dim, features) && wants_pairs(p.problem, hints);
  const FwdSm90Tile tile = fwd_sm90_tile(head_dim, features, wide, head_dim_v);
  FwdSm90Plan plan = plan_in_tiles(p, hints, pairs ? paired(tile) : tile);
  plan.wide = wide, plan.paired = pairs;
  plan.swizzle.entries_of_bias = Divisor(one_bias ? p.problem.batch : 1);
  return {plan, {.counters = channel_slices(head_dim) > 1 ? 0 : 1}};
}

// ---------------------------------------------------------------------------------------------------------------------
// Serving: pages, few rows over many keys, mixed batches

// Whether a serving instance takes a problem. Those find pages, pack heads and cut keys into pieces, which fwd_sm90 for
// dense tensors does not.
inline bool suits_serving(const FwdParams& p, const FwdHints& hints) {
  constexpr int kManyKeys = 512;
  const Problem& problem = p.problem;
  if (!hints.has_sm90 || !ServingKernel::takes(p) || problem.capacity_k == 0) return false;
  if (has_pages(p)) return true;
  const bool packs = heads_to_pack(problem, hints.longest_q, 128) > 1;
  return hints.longest_k >= kManyKeys && (!suits_sm90(p, hints) || (packs && hints.longest_k >= 4 * hints.longest_q));
}

// How many rows of K or V a box has (ServingPlan), so that each is in one page: as many as divide a page and half a
// tile, which a warp copies. 0 where there are no such boxes, as a tile begins anywhere in a page where keys are padded
// on the left, and the pattern of swizzled rows repeats every 8.
inline int rows_of_box(const FwdParams& p, int tile_keys) {
  const auto [entries, rows] = extent_of_keys(p);
  if (entries == 0 || rows == 0) return 0;  // a tensor map cannot be empty
  if (!has_pages(p)) return tile_keys / 2;
  const int page_size = static_cast<int>(p.pages.page_size.value);
  return p.problem.leftpad_k || page_size % 8 != 0 ? 0 : std::gcd(page_size, tile_keys / 2);
}

// Whether tiles occupy nearly all thread blocks to the end, if all take equally long. Then equal shares of n_blocks
// would gain less than merging their pieces takes.
inline bool fills_waves(int64_t tiles, int blocks) { return 20 * tiles >= 19 * ceil_div(tiles, blocks) * blocks; }

// The elements of the totals of fixed pieces.
inline int64_t size_of_totals(const FixedPieces& pieces, int blocks, int rows, int head_dim_v) {
  return pieces.n_blocks > 0 ? int64_t{blocks} * rows * head_dim_v : 0;
}

// Whether instances for codes take a problem of serving. Each tile of rows converts its keys anew: with more rows an
// entry, on average, it is faster to convert all keys once.
inline bool suits_coded_serving(const Problem& p) {
  constexpr int kMostRows = 3072;
  const HeadDims built = ServingKernel::head_dims(p);
  const int64_t rows = int64_t{p.seqlen_q} * (p.heads / p.heads_k) / (p.cu_seqlens_q ? std::max(p.batch, 1) : 1);
  return rows <= kMostRows && (built == HeadDims{64, 64} || built == HeadDims{128, 128});
}

// Unless the call says how many splits it wants, the number of thread blocks bounds the scratch, whatever the lengths.
// With equal shares, a thread block has two pieces that are not whole tiles. Else a piece has at least 1/4 of a thread
// block's n_blocks (choose_piece in work_list.cuh), and only tiles of more than 1.5 pieces are cut, into less than 1.5
// times as many pieces as they are long: so there are less than 6 pieces for each thread block. With pieces of fixed
// length, fewer tiles are cut if they needed more than kMostFixedSlots, or kMostRowsEach rows for each thread block.
inline FwdChoice plan_serving(const FwdParams& p, const FwdHints& hints, const FixedPieces& pieces = {}) {
  constexpr int64_t kMostSlots = 1 << 13, kMostFixedSlots = 1 << 12, kMostRowsEach = 1024;
  const Problem& problem = p.problem;
  const auto [head_dim, head_dim_v] = ServingKernel::head_dims(problem);
  const int group = problem.heads / problem.heads_k;
  const bool few_rows = heads_to_pack(problem, hints.longest_q, 64, true) * hints.longest_q <= 64;
  const int tile_rows = few_rows ? 64 : 128;
  const int packed_heads = heads_to_pack(problem, hints.longest_q, tile_rows, /*or_as_many=*/true);
  const Tiling tiling = tiling_for(problem, packed_heads, tile_rows);
  const bool one_m_block = hints.longest_q * packed_heads <= tile_rows && packed_heads == group;
  const int blocks = std::max(1, hints.multiprocessors);
  const int64_t whole_tiles = int64_t{problem.batch} * problem.heads_k;  // if there is one m_block
  const FwdSm90Tile tile = serving_tile(head_dim, instance_for<ServingKernel>(p), tile_rows / 64, head_dim_v);
  ServingPlan plan{.tiling = tiling,
                   .warpgroups = tile_rows / 64,
                   .even = hints.num_splits == 0 && one_m_block && !fills_waves(whole_tiles, blocks),
                   .num_splits = hints.num_splits,
                   .blocks = blocks,
                   .box_rows = rows_of_box(p, tile.keys),
                   .pieces = pieces,
                   .slots = {}};
  int64_t slots = plan.even ? 2 * blocks : 6 * blocks;
  const int slot_rows = problem.cu_seqlens_q ? tile_rows : std::min(tile_rows, problem.seqlen_q * packed_heads);
  if (hints.invariance > 0) {
    const int64_t most = 1 + ceil_div(hints.longest_k, int64_t{tile.keys} * std::max(1, pieces.n_blocks));
    plan.even = false, plan.num_splits = 0;
    slots = pieces.n_blocks > 0 ? std::min({num_tiles(tiling) * most, kMostFixedSlots,
                                            int64_t{kMostRowsEach} * blocks / std::max(1, slot_rows)})
                                : 0;
  } else if (hints.num_splits > 0) {
    const int64_t tiles = std::max(1, num_tiles(tiling));
    plan.num_splits = static_cast<int>(std::clamp<int64_t>(kMostSlots / tiles, 1, hints.num_splits));
    slots = plan.num_splits == 1 ? 0 : tiles * plan.num_splits;
  }
  plan.slots.count = static_cast<int>(slots), plan.slots.rows = slot_rows;
  const int64_t rows = slots * slot_rows, record_words = sizeof(PieceRecord) / sizeof(int);
  const FwdScratch scratch{.out = rows * head_dim_v,
                           .softmax = 2 * rows,
                           .totals = size_of_totals(pieces, blocks, tile_rows, head_dim_v),
                           .records = slots * record_words,
                           .counters = 1 + slots};
  if (p.coded && suits_coded_serving(problem)) return {CodedServingPlan{plan}, scratch};
  return {plan, scratch};
}

// ---------------------------------------------------------------------------------------------------------------------
// Every GPU

// The smallest number of splits that fills the last wave of thread blocks nearly as well (85 %) as the best number
// does; 1 where the tiles alone nearly fill the GPU (80 %), which runs `places` thread blocks at a time.
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
  const int lanes_of_row = 4 * channel_slices(head_dim);
  const int blocks_at_once = hints.multiprocessors * (head_dim <= 256 ? 2 : 1);  // their shared memory allows this
  const FwdTile tile = fwd_tile(head_dim, instance_for<FwdSm80Kernel>(p));
  const Tiling tiling = tiling_for(p.problem, heads_to_pack(p.problem, hints.longest_q, tile.rows), tile.rows);
  const int64_t key_blocks = ceil_div(hints.longest_k, tile.keys);
  const int wanted =
      hints.num_splits > 0 ? hints.num_splits : splits_for(num_tiles(tiling), key_blocks, blocks_at_once);
  const KeySplits splits = splits_of(tiling, std::min<int64_t>(key_blocks, wanted), /*least_n_blocks=*/1, tile.rows);
  return {FwdSm80Plan{tiling, splits}, scratch_of(tiling, splits, head_dim, lanes_of_row)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Batch invariance

// From level 1 on, the bits of an entry depend on no other; from level 2 on, those of a row depend neither on which
// rows and how many keys a call has beside it, nor on which function was called (docs/guides/batch_invariance.md). What
// can change a bit:
//
// - the kernel and its features, which decide how scores are scaled and multiplied;
// - how many keys an n_block has, and that n_blocks begin at multiples of it from an entry's first key on;
// - the order of n_blocks, the last first, and where they are divided: at multiples of FixedPieces, or nowhere;
// - how pieces are put together: Fold (scores/softmax.cuh), the last keys first;
// - the maximum that exponentials are relative to, of each row by itself; the division, and the sink, at the end.
//
// No bit depends on how many rows a tile has, on packed heads, on n_blocks that a row does not see, on pages and where
// they lie, or on which thread block computes a piece. So kernels that agree in all of the list may be chosen by the
// batch. On Hopper these are the instances for serving and the invariant ones for dense tensors; the portable kernel,
// without splits, is for all that those do not take.

// How long pieces are, if there is more than one. Folding them costs prompts, and merging them costs few long entries,
// less the longer they are; but these then occupy fewer multiprocessors.
inline FixedPieces fixed_pieces(const FwdParams& p, const FwdHints& hints) {
  constexpr int kPieceKeys = 4096;
  const auto [head_dim, head_dim_v] = ServingKernel::head_dims(p.problem);
  const int keys = serving_tile(head_dim, instance_for<ServingKernel>(p), /*warpgroups=*/2, head_dim_v).keys;
  const int n_blocks = kPieceKeys / keys;
  const bool whole = hints.invariance == 1 && hints.num_splits == 1;
  return {.n_blocks = whole || hints.longest_k <= n_blocks * keys ? 0 : n_blocks};
}

// For dense tensors. Where all keys are in one piece, the ordinary instance does it, if it has the same features and as
// many keys in an n_block.
inline FwdChoice plan_invariant_dense(const FwdParams& p, const FwdHints& hints, const FixedPieces& pieces) {
  const auto [head_dim, head_dim_v] = InvariantKernel::head_dims(p.problem);
  const Features features = instance_for<InvariantKernel>(p);
  const FwdSm90Tile tile = invariant_tile(head_dim, features, head_dim_v);
  if (pieces.n_blocks == 0 && instance_for<FwdSm90Kernel>(p) == features) {
    const FwdChoice ordinary = plan_fwd_sm90(p, hints);
    const bool wide = std::get<FwdSm90Plan>(ordinary.plan).wide;
    if (fwd_sm90_tile(head_dim, features, wide, head_dim_v).keys == tile.keys) return ordinary;
  }
  InvariantPlan plan{plan_in_tiles(p, hints, tile)};
  plan.pieces = pieces;
  return {plan, {.totals = size_of_totals(pieces, plan.blocks, 64 * tile.warpgroups, head_dim_v), .counters = 1}};
}

// Whether it is left to the portable kernel whichever function computes it.
inline bool is_left_to_sm80(const Problem& p) {
  return p.rng_state != nullptr || has_bias(p) || p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0 ||
         ServingKernel::head_dims(p).of_keys > 256;
}

inline FwdChoice plan_invariant_sm80(const FwdParams& p, FwdHints hints) {
  hints.num_splits = 1;
  return plan_fwd_sm80(p, hints);
}

inline FwdChoice plan_invariant(const FwdParams& p, const FwdHints& hints) {
  const Problem& problem = p.problem;
  if (!hints.has_sm90 || is_left_to_sm80(problem)) return plan_invariant_sm80(p, hints);
  const auto refuse = [&](const std::string& what, const std::string& found) {
    if (hints.invariance < 2) return;
    throw std::invalid_argument(what + " where the level of batch invariance is 2, found " + found +
                                ": serving could not equal it");
  };
  if (!p.aligned) {
    refuse("q, k, v and out must have rows that begin at multiples of 16 bytes",
           "strides of q (entries, tokens, heads) (" + std::to_string(p.q.batch) + ", " + std::to_string(p.q.seqlen) +
               ", " + std::to_string(p.q.heads) + ") and of k (" + std::to_string(p.k.batch) + ", " +
               std::to_string(p.k.seqlen) + ", " + std::to_string(p.k.heads) + ")");
  }
  if (p.row_max != nullptr) refuse("return_max_logit must be False", "True");
  if (problem.capacity_k == 0 || !p.aligned || p.row_max != nullptr) return plan_invariant_sm80(p, hints);
  FwdHints any_splits = hints;
  any_splits.num_splits = 0;
  const FixedPieces pieces = fixed_pieces(p, hints);
  const bool dense = !has_pages(p) && problem.seqlen_k > 0 && problem.batch > 0;
  const bool many_rows = suits_sm90(p, any_splits) && !suits_serving(p, any_splits);
  return dense && (many_rows || p.out_lo.data != nullptr) ? plan_invariant_dense(p, hints, pieces)
                                                          : plan_serving(p, hints, pieces);
}

// Chooses the kernel. fwd_sm80 takes all that the others do not.
inline FwdChoice plan_fwd(const FwdParams& p, const FwdHints& hints) {
  if (hints.invariance > 0) return plan_invariant(p, hints);
  if (suits_decoding(p.problem, hints)) return plan_decode(p, hints);
  if (suits_serving(p, hints)) return plan_serving(p, hints);
  if (suits_sm90(p, hints)) return plan_fwd_sm90(p, hints);
  return plan_fwd_sm80(p, hints);
}

// Whether the kernel that a call would get reads codes, and also queries of another type, that of out, than it computes
// with. For all other kernels these are converted before, as they are where rows are not in aligned chunks of 16 bytes.
inline bool reads_codes(const FwdParams& p, const FwdHints& hints) {
  if (!p.coded || !p.aligned) return false;
  const FwdPlan plan = plan_fwd(p, hints).plan;
  return std::holds_alternative<CodedDecodePlan>(plan) || std::holds_alternative<CodedServingPlan>(plan);
}

}  // namespace flash::flash_attn
