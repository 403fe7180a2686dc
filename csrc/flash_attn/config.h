// What is chosen for a problem: sizes of tiles, how heads are grouped, how often keys are split. Pure host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/divmod.h"
#include "flash_attn/features.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

constexpr int kMaxSplits = 128;

// Head dims that instances exist for; others take the next larger one, and zeros fill it up.
constexpr int kHeadDims[] = {64, 96, 128, 192, 256};

constexpr int instance_head_dim(int head_dim) {
  for (const int built : kHeadDims) {
    if (head_dim <= built) return built;
  }
  return 0;
}

struct TileSize {
  int rows;
  int keys;
  int warps;
};

// 32 rows per warp halve the shared memory that a product reads; from 192 channels on they do not fit the registers.
// Random bits and transformed scores take registers, too.
constexpr TileSize fwd_tile(int head_dim, Features features) {
  const bool plain = features == Features::kPlain;
  if (head_dim <= 64) return {128, plain ? 128 : 64, 4};
  if (head_dim <= 96) return {128, plain ? 64 : 32, 4};
  if (head_dim <= 128) return {128, plain ? 64 : 32, 4};
  return {64, 64, 4};
}

// Of fwd_sm90.cuh: warpgroups of 64 rows, keys of a block, and tiles of keys and of rows that are in shared memory at a
// time, besides one of O if it leaves through there.
struct Sm90Tile {
  int warpgroups;
  int keys;
  int stages;
  int query_stages;
  bool staged_output;
};

// `wide` tiles are for long sequences, of which they waste little; only some head dims have them. They are 3 to 20 %
// faster there. (Tiles that were slower on an H200: 112 keys for 192 rows of head dim 64; 160 for 128 and 96 for 192
// rows of head dim 96; 80 or 96 keys for head dim 192; a third stage of V for 64 keys of head dim 256.)
constexpr bool has_wide_tile(int head_dim, Features features) {
  return features == Features::kPlain && head_dim != 192;
}
constexpr Sm90Tile fwd_sm90_tile(int head_dim, Features features, bool wide) {
  const bool plain = features == Features::kPlain;
  if (head_dim <= 64) return {wide ? 3 : 2, 128, 3, 2, true};
  if (head_dim <= 96) return wide ? Sm90Tile{3, 112, 2, 2, true} : Sm90Tile{2, plain ? 128 : 96, 2, 2, true};
  if (head_dim <= 128) return wide ? Sm90Tile{2, 176, 2, 1, false} : Sm90Tile{2, plain ? 128 : 96, 2, 2, true};
  if (head_dim <= 192) return {2, plain ? 112 : 96, 2, 1, false};
  return {2, wide ? 80 : 64, 2, 1, false};
}

// How many query heads become rows of one tile: those that share a key head, if that takes fewer tiles. Kernels count
// the rows of an entry in 32 bits, so that heads stay apart where tokens times heads do not fit.
inline int heads_to_pack(const Problem& p, int64_t longest_q, int tile_rows) {
  const int group = p.heads / p.heads_k;
  if (int64_t{p.seqlen_q} * group > std::numeric_limits<int>::max() - tile_rows) return 1;
  const int64_t apart = group * ceil_div(longest_q, tile_rows), together = ceil_div(longest_q * group, tile_rows);
  return p.rng_state == nullptr && together < apart ? group : 1;  // random bits come in tiles of 16 rows of a head
}

// The fewest parts, up to `most`, that keep the multiprocessors nearly as busy as any number of parts would.
inline int parts_for(int64_t tiles, int64_t most, int places) {
  most = std::min<int64_t>({most, kMaxSplits, places});
  const auto efficiency = [&](int64_t parts) {
    const double waves = static_cast<double>(tiles * parts) / places;
    return waves / std::ceil(waves);
  };
  double best = 0;
  for (int64_t parts = 1; parts <= most; ++parts) best = std::max(best, efficiency(parts));
  int parts = 1;
  while (parts < most && efficiency(parts) < 0.85 * best) ++parts;
  return parts;
}

inline int splits_for(int64_t tiles, int64_t key_blocks, int places) {
  return tiles * 10 >= places * 8 ? 1 : parts_for(tiles, key_blocks, places);
}

// How many slots of tile_rows rows there are for a head (group): in a dense entry, or in all packed ones together.
inline int64_t slots_for(const Problem& p, int group, int tile_rows) {
  const int64_t rows = int64_t{p.seqlen_q} * group;
  return p.cu_seqlens_q ? rows / tile_rows + p.batch + 1 : ceil_div(rows, tile_rows);
}

// Width of the key blocks at which the running maximum of S_dmask advances; callers know it from _get_block_size_n.
constexpr int dmask_width(int head_dim) { return head_dim <= 32 ? 128 : head_dim > 96 && head_dim <= 128 ? 32 : 64; }

// Decoding: rows that share a key head fit one tile of an mma, and warps divide the keys.
constexpr int kDecodeRows = 16;
constexpr int kDecodeKeys = 16;  // of a chunk
constexpr int kMaxDecodeWarps = 8;

// Chunks that a warp has on the way: 24 KB, so that eight warps cover the latency of memory.
constexpr int decode_stages(int head_dim) { return std::max(2, 384 / head_dim); }
constexpr int decode_bytes_per_warp(int head_dim) { return decode_stages(head_dim) * 2 * kDecodeKeys * head_dim * 2; }

constexpr int decode_warps(int head_dim, int shared_bytes) {
  int warps = kMaxDecodeWarps;
  while (warps > 1 && warps * decode_bytes_per_warp(head_dim) + 4096 > shared_bytes) warps /= 2;
  return warps;
}

// What the caller knows and the tensors do not say. Results do not depend on it, but for rounding.
struct FwdHints {
  int64_t longest_q;  // no entry has more rows
  int64_t longest_k;
  int num_splits;  // 0: as many as is best
  int multiprocessors;
  int shared_bytes;  // that a block can have
  bool has_sm90;     // whether fwd_sm90.cuh runs
};

struct FwdScratch {
  int64_t out;  // elements of FwdParams::partial_out
  int64_t softmax;
  int64_t arrivals;
};

// `packed`: query heads that are rows of one tile.
inline void plan_tiles(FwdParams& p, int packed, int tile_rows) {
  const Problem& problem = p.problem;
  const int64_t slots = slots_for(problem, packed, tile_rows);
  const int64_t tiles = slots * (problem.heads / packed) * (problem.cu_seqlens_q ? 1 : problem.batch);
  if (tiles > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("q has too many rows and heads for one launch: " + std::to_string(tiles) + " tiles");
  }
  p.group = Divisor(problem.heads / problem.heads_k);
  p.packed_heads = Divisor(packed);
  p.head_groups = Divisor(problem.heads / packed);
  p.slots = Divisor(static_cast<int>(slots));
  p.tiles = Divisor(static_cast<int>(tiles));
}

inline int num_tiles(const FwdParams& p) { return static_cast<int>(p.tiles.value); }

// Of all entries, if all are the longest.
inline int64_t key_value_bytes(const Problem& p, int64_t longest_k) {
  return int64_t{4} * p.batch * p.heads_k * p.head_dim * longest_k;
}

// Keys and values are read once. If they leave the L2 cache first, what others have left there need not be written back
// for them: 64 MB come 4 to 10 % faster on an H200, 128 MB 3 to 5 %, 256 MB as fast, but 512 MB 0 to 4 % slower.
constexpr int64_t kPassingBytes = 256 << 20;

// A block works alone on a multiprocessor. Where there are fewer tiles than multiprocessors, the keys are cut into as
// few parts as fill them. Where entries may differ in length, a part has 4096 keys or more, so that none takes long:
// ragged entries gain up to a factor of two by it, and equal ones lose 1 to 3 %. Entries that are much shorter than
// there is room for are cut into fewer parts than the longest. Parts have scratch whether they have keys or not, for
// only the device knows the lengths: there are no more than kMostParts for a multiprocessor. So the longest entry keeps
// none busy for longer than all entries do, unless it is more than kMostParts times as long as they are on average.
inline void split_decode(FwdParams& p, const FwdHints& hints) {
  constexpr int kPiece = 4096, kShortPiece = 1024, kMostParts = 32;
  const bool ragged = p.problem.batch > 1 && (p.problem.seqused_k || p.problem.cu_seqlens_k);
  const int64_t to_fill = std::max(1, hints.multiprocessors / std::max(num_tiles(p), 1));
  const int64_t room = int64_t{kMostParts} * hints.multiprocessors / std::max(num_tiles(p), 1);
  const int64_t pieces = std::min<int64_t>({ceil_div(hints.longest_k, kPiece), 16, room});
  const int64_t wanted = hints.num_splits > 0 ? hints.num_splits : ragged ? std::max(to_fill, pieces) : to_fill;
  p.num_splits = static_cast<int>(std::clamp<int64_t>(wanted, 1, kMaxSplits));
  const int64_t of_longest = ceil_div(ceil_div(hints.longest_k, static_cast<int>(to_fill)), kDecodeKeys);
  const int64_t least = to_fill == 1 ? kPiece / kDecodeKeys
                        : ragged     ? kShortPiece / kDecodeKeys
                                     : int64_t{p.decode_warps};
  p.least_blocks_per_split =
      hints.num_splits > 0 ? 1 : static_cast<int>(std::clamp<int64_t>(of_longest, 1, std::max<int64_t>(least, 1)));
  p.evict_keys = key_value_bytes(p.problem, hints.longest_k) <= kPassingBytes;
}

inline void split_fwd(FwdParams& p, const FwdHints& hints, int tile_keys) {
  constexpr int kBlocksPerMultiprocessor = 2;
  const int64_t key_blocks = ceil_div(hints.longest_k, tile_keys);
  const int64_t wanted = hints.num_splits > 0
                             ? hints.num_splits
                             : splits_for(num_tiles(p), key_blocks, kBlocksPerMultiprocessor * hints.multiprocessors);
  p.num_splits = static_cast<int>(std::clamp<int64_t>(key_blocks, 1, wanted));
  p.least_blocks_per_split = 1;
}

// Whether rows differ in how many keys they see.
inline bool rows_differ(const Problem& p) { return p.window_left < p.seqlen_k || p.window_right < p.seqlen_k; }

// How many heads of all entries follow one another tile by tile. Where rows differ in how many keys they see, it is as
// many as have keys and values that stay in the L2 cache together: their longest tiles come before all others. Those
// also are the ones that wait for memory, so that no more than half of the multiprocessors start with one.
inline int heads_per_section(const Problem& p, int multiprocessors) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int heads = p.cu_seqlens_q ? p.heads : p.heads * p.batch, group = p.heads / p.heads_k;
  if (!rows_differ(p)) return 1;
  const int64_t bytes = int64_t{4} * p.seqlen_k * p.head_dim;  // of a key head
  const int64_t cached = kCacheBytes / bytes * group, most = std::min(heads, std::max(1, multiprocessors / 2));
  int section = static_cast<int>(std::clamp<int64_t>(cached, 1, most));
  while (heads % section != 0) --section;
  return section;
}

// Whether fwd_sm90.cuh takes a problem. It copies aligned rows of tensors, of one head at a time, and each tile sees
// all its keys: that takes rows enough, and many tiles or few keys. fwd_sm80.cuh, which looks up pages, packs heads and
// splits keys, takes the rest. The limits are where both are equally fast on an H200.
inline bool suits_sm90(const FwdParams& p, const FwdHints& hints) {
  constexpr int kTileRows = 128, kFewKeysPerChannel = 16;
  const Problem& problem = p.problem;
  const int64_t entries = problem.cu_seqlens_q ? 1 : problem.batch;
  const int64_t tiles = entries * problem.heads * ceil_div(int64_t{problem.seqlen_q}, kTileRows);
  const bool any_keys = std::min(problem.seqlen_k, problem.capacity_k) > 0;
  const bool rows_enough = hints.longest_q >= (problem.heads == problem.heads_k ? 32 : 64);
  const bool few_keys = hints.longest_k <= int64_t{kFewKeysPerChannel} * problem.head_dim;
  return hints.has_sm90 && p.aligned && p.pages.block_table == nullptr && hints.num_splits <= 1 && any_keys &&
         rows_enough && (few_keys || 5 * tiles >= 2 * hints.multiprocessors);
}

// Whether sequences are long enough for the wide tile. Where rows differ in how many keys they see, large tiles compute
// more that nobody sees.
inline bool wants_wide_tile(const Problem& p, const FwdHints& hints) {
  const int head_dim = instance_head_dim(p.head_dim);
  if (head_dim == 64) return hints.longest_q >= (rows_differ(p) ? 2048 : 512);
  if (head_dim == 96) return hints.longest_q >= (rows_differ(p) ? 8192 : 2048);
  if (head_dim == 128) return hints.longest_k >= (rows_differ(p) ? 16384 : 8192);
  return hints.longest_k >= (rows_differ(p) ? 2048 : 1024);
}

inline FwdScratch plan_fwd_sm90(FwdParams& p, const FwdHints& hints) {
  const int head_dim = instance_head_dim(p.problem.head_dim);
  const Features features = features_of(p);
  p.wide_tile = has_wide_tile(head_dim, features) && wants_wide_tile(p.problem, hints);
  plan_tiles(p, /*packed=*/1, 64 * fwd_sm90_tile(head_dim, features, p.wide_tile).warpgroups);
  const int section = heads_per_section(p.problem, hints.multiprocessors);
  p.section_heads = Divisor(section);
  p.section_tiles = Divisor(section * static_cast<int>(p.slots.value));
  p.persistent_blocks = std::min(num_tiles(p), hints.multiprocessors);
  p.num_splits = 1;
  return {.out = 0, .softmax = 0, .arrivals = 1};
}

// Chooses p's plan and says what scratch it needs.
inline FwdScratch plan_fwd(FwdParams& p, const FwdHints& hints) {
  const Problem& problem = p.problem;
  const int head_dim = instance_head_dim(problem.head_dim);
  const bool decodes =
      problem.rng_state == nullptr && hints.longest_q * (problem.heads / problem.heads_k) <= kDecodeRows;
  if (!decodes && suits_sm90(p, hints)) return plan_fwd_sm90(p, hints);
  p.decode_warps = decodes ? decode_warps(head_dim, hints.shared_bytes) : 0;
  const TileSize tile = fwd_tile(head_dim, features_of(p));
  const int tile_rows = decodes ? kDecodeRows : tile.rows;
  plan_tiles(p, heads_to_pack(problem, hints.longest_q, tile_rows), tile_rows);
  decodes ? split_decode(p, hints) : split_fwd(p, hints, tile.keys);
  p.num_splits = std::min(p.num_splits, std::max(1, std::numeric_limits<int>::max() / std::max(num_tiles(p), 1)));
  if (p.num_splits == 1) return {};
  p.partial_rows = decodes && !problem.cu_seqlens_q
                       ? std::min(tile_rows, problem.seqlen_q * static_cast<int>(p.packed_heads.value))
                       : tile_rows;
  const int64_t rows = int64_t{num_tiles(p)} * p.num_splits * p.partial_rows;
  const int states = decodes ? 1 : 4;  // four lanes store a row's state where fragments are stored as they are
  return {.out = rows * head_dim, .softmax = 2 * states * rows, .arrivals = num_tiles(p)};
}

// Backward: query rows and keys of a tile, keys that a warp takes of them, and how many tiles of rows are in shared
// memory at a time. dK and dV of the keys, S^T and dP^T of both fill the registers of eight warps. (With 64 rows, head
// dim 64 is 15 % slower on an H200.) The compact tiles are for GPUs with 99 KB of shared memory for a block.
struct BwdTile {
  int rows;
  int keys;
  int warp_keys;
  int stages;
};

constexpr BwdTile bwd_tile(int head_dim, bool compact) {
  if (head_dim <= 64) return {compact ? 64 : 128, 128, 32, 2};
  if (head_dim <= 96) return {64, compact ? 64 : 128, 32, 2};
  if (head_dim <= 128) return compact ? BwdTile{32, 64, 32, 2} : BwdTile{64, 128, 32, 2};
  return compact ? BwdTile{32, 32, 16, head_dim <= 192 ? 2 : 1} : BwdTile{64, 64, 32, 2};
}

// Of bwd_sm90.cuh, whose two warpgroups have 64 keys each. If they are staggered, one works half a step behind the
// other: on an H200 that gains 6 % with 128 rows, which take longer to exponentiate than the 64 rows of larger head
// dims, with which it gains nothing and loses 3 % of short sequences.
struct BwdSm90Tile {
  int rows;
  int keys;
  bool staggered;
};

// Random bits and transformed scores leave no registers for 128 rows.
constexpr BwdSm90Tile bwd_sm90_tile(int head_dim, Features features) {
  const bool tall = head_dim <= 64 && features == Features::kPlain;
  return tall ? BwdSm90Tile{128, 128, true} : BwdSm90Tile{64, 128, false};
}

// Whether bwd_sm90.cuh or, for head dims above 128, bwd_sm90_wide.cuh takes a problem: rows that copies can move, of
// tensors that are not empty.
inline bool suits_sm90(const BwdParams& p) {
  const Problem& problem = p.problem;
  const bool empty = problem.batch == 0 || problem.heads == 0 || problem.seqlen_q == 0 || problem.seqlen_k == 0;
  return p.aligned && !empty;
}

struct BwdScratch {
  int64_t dq_sums;   // elements
  int64_t rows = 0;  // of lse_log2, and of delta
  int64_t counters = 0;
};

// Whether bwd_sm90.cuh rounds dq. That saves the time to fill its sums with zeros and to read them, but blocks wait for
// one another: on an H200 512 keys gain 14 to 23 %, 1024 keys 5 to 10 %, 2048 keys nothing unless deterministic; longer
// ones gain 1 to 2 % with head dim 64, and with 128 lose up to 13 %. A box of sums that is stored, not added, has no
// place for rows of other entries.
inline bool rounds_dq(const BwdParams& p) {
  const Problem& problem = p.problem;
  const int head_dim = instance_head_dim(problem.head_dim);
  const int most_keys = head_dim <= 64 ? kMaxSeqlen : head_dim <= 128 ? 2048 : 0;
  return p.on_sm90 && problem.cu_seqlens_q == nullptr && problem.seqlen_k <= most_keys;
}

// How many key heads' blocks start together, those of the first keys first. Under a causal mask these take longest. The
// blocks of one head read the same rows, which the L2 cache holds if they run together; but of blocks that take turns
// in adding to the same sums few should start together. Where sums are rounded blocks wait for one another, too: then
// it is as many as have rows, with dout and sums of dq, of 8 MB, within 8 and 32, or twice as many if causal. (On an
// H200 the best or within 2 % of it among 8, 16, .. 128 heads, for 512 to 2048 rows of head dims 64 and 128.)
inline int bwd_section(const BwdParams& p, bool deterministic) {
  const Problem& problem = p.problem;
  const bool causal = problem.window_left == kUnbounded && problem.window_right != kUnbounded;
  if (!p.on_sm90 && !deterministic) return causal ? 16 : 1;
  if (!p.rounds_dq) return deterministic && causal ? 16 : 8;
  const int64_t row_bytes = int64_t{8} * problem.head_dim * (problem.heads / problem.heads_k);
  return static_cast<int>(std::clamp<int64_t>((8 << 20) / (row_bytes * problem.seqlen_q), 8, 32)) * (causal ? 2 : 1);
}

// Chooses p's plan and says what scratch it needs. Deterministic kernels add to the same dq_accum as the others, in
// turn.
inline BwdScratch plan_bwd(BwdParams& p, bool deterministic, bool has_sm90, int multiprocessors) {
  const Problem& problem = p.problem;
  const int head_dim = instance_head_dim(problem.head_dim);
  p.on_sm90 = has_sm90 && suits_sm90(p);
  p.in_turns = deterministic && problem.seqlen_q > 0;  // without rows, nothing is added, and no kernel clears counters
  p.rounds_dq = rounds_dq(p);
  p.section_heads = bwd_section(p, deterministic);
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int64_t heads = int64_t{problem.heads} * (packed ? 1 : problem.batch);
  // Rows of sums lie together in eights (bwd_scratch.cuh).
  BwdScratch scratch{.dq_sums = ceil_div(heads * problem.seqlen_q, int64_t{8}) * 8 * head_dim};
  constexpr int64_t kPad = kRowSumsPad;
  p.rows_per_head = packed ? problem.seqlen_q / kPad * kPad + kPad * problem.batch
                           : ceil_div(int64_t{problem.seqlen_q}, kRowSumsPad) * kPad;
  const int64_t rows = heads * p.rows_per_head;
  scratch.counters = 1 + (p.in_turns || p.rounds_dq ? rows / kRowsPerTurn : 0);
  if (!p.on_sm90) return scratch;
  scratch.rows = rows;
  p.persistent_blocks = multiprocessors;
  return scratch;
}

}  // namespace flash::flash_attn
