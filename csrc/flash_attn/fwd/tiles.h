// The tile sizes of the forward kernels by head dim and features, as compile-time constants.
#pragma once

#include <algorithm>

#include "flash_attn/features.h"

namespace flash::flash_attn {

// Registers hold O of at most 256 channels. Beyond that, the channels are cut into two slices, for two warps with the
// same rows and keys or, on sm_90, for the two thread blocks of a cluster. Each has its slice of Q, K, V and O, and
// they exchange their partial sums of Q K^T (partial_scores.cuh). bwd_sm90_wide does the same.
constexpr int channel_slices(int head_dim) { return head_dim > 256 ? 2 : 1; }

// A tile of fwd_sm80.
struct FwdTile {
  int rows;
  int keys;
  int warps;
};

// With 32 rows, a warp reads half as much shared memory for each product as with 16, but above 128 channels they do not
// fit the registers. Dropout and score transforms also take registers, which leaves room for fewer keys. Tiles of 512
// channels take 96 KB of shared memory; dropout draws bits for 32 keys at a time, so a tile must have as many.
constexpr FwdTile fwd_tile(int head_dim, Features features) {
  const bool plain = has_plain_scores(features);
  if (head_dim <= 64) return {128, plain ? 128 : 64, 4};
  if (head_dim <= 128) return {128, plain ? 64 : 32, 4};
  if (head_dim <= 256) return {64, 64, 4};
  return plain ? FwdTile{64, 16, 8} : FwdTile{32, 32, 4};
}

// A tile of fwd_sm90.
struct FwdSm90Tile {
  int warpgroups;      // consumers, of 64 rows each
  int keys;            // of a key block
  int stages;          // blocks of K, and of V, in shared memory at a time
  int query_stages;    // tiles of Q in shared memory at a time
  bool staged_output;  // whether O has a tile of its own in shared memory, from which TMA stores it
  int sharers = 1;     // thread blocks that share keys: each has rows of its own, and copies a part of K and V to all
};

// Whether there is a second, larger tile for long sequences: short ones would leave much of it empty. Tried and slower
// on an H200: 192 rows x 112 keys of head dim 64; 128 x 160 and 192 x 96 of head dim 96; 80 or 96 keys of head dim 192;
// 64 keys with a third stage of V of head dim 256. Key ranges may be those of short documents: there the wide tile of
// head dim 128 gained 2 % where the ranges were causal and lost 22 % in documents of 1024 tokens, so it is not built;
// that of head dim 64 gained 10 % and lost 10 %.
constexpr bool has_wide_tile(int head_dim, Features features) {
  if (features == Features::kRanged) return head_dim == 64;
  return features == Features::kPlain && head_dim != 192 && head_dim <= 256;
}

// Bounded by the 227 KB of shared memory and the registers of a thread block. With kBiased, each block of K has a tile
// of the bias beside it: 32 KB for 128 rows and 128 keys.
constexpr FwdSm90Tile fwd_sm90_tile(int head_dim, Features features, bool wide, int head_dim_v) {
  if (features == Features::kBiased) {
    return {2, head_dim <= 128 ? 128 : 64, head_dim <= 64 ? 3 : 2, head_dim <= 96 ? 2 : 1, false};
  }
  const bool plain = has_plain_scores(features);
  if (head_dim <= 64) return {wide ? 3 : 2, 128, 3, 2, true};
  if (head_dim <= 96) return wide ? FwdSm90Tile{3, 112, 2, 2, true} : FwdSm90Tile{2, plain ? 128 : 96, 2, 2, true};
  if (head_dim <= 128 && features == Features::kDropped) return {2, 128, 2, 1, true};  // bits take 4 KB
  if (head_dim <= 128) return wide ? FwdSm90Tile{2, 176, 2, 1, false} : FwdSm90Tile{2, plain ? 128 : 96, 2, 2, true};
  if (head_dim <= 192 && head_dim_v < head_dim) return {2, plain ? 128 : 96, 2, 1, !plain};  // 208 or 200 KB
  if (head_dim <= 192) return {2, plain ? 112 : 96, 2, 1, false};
  return {2, wide ? 80 : 64, 2, 1, false};  // also for 512 channels, of which a thread block has half
}

// Whether there are instances in which pairs of thread blocks share the keys of wide tiles.
constexpr bool has_paired_tile(int head_dim, Features features) {
  return features == Features::kPlain && (head_dim == 128 || head_dim == 256);
}
constexpr FwdSm90Tile paired(FwdSm90Tile tile) {
  tile.sharers = 2;
  return tile;
}

// The tiles of serving instances of fwd_sm90, with one or two warpgroups. The keys of a tile do not depend on how many.
constexpr FwdSm90Tile serving_tile(int head_dim, Features features, int warpgroups, int head_dim_v) {
  const bool plain = has_plain_scores(features);
  if (head_dim <= 64) return {warpgroups, 128, 4, 2, false};
  if (head_dim <= 96) return {warpgroups, plain ? 128 : 96, 3, 1, false};
  if (head_dim <= 128) return {warpgroups, plain ? 128 : 96, warpgroups == 1 ? 3 : 2, 1, false};
  if (head_dim <= 192 && head_dim_v < head_dim) return {warpgroups, plain ? 128 : 96, 2, 1, false};
  if (head_dim <= 192) return {warpgroups, 96, 2, 1, false};
  return {warpgroups, 64, 2, 1, false};
}

// The same over codes in 8 bits, which a second ring holds, in the rest of shared memory.
constexpr FwdSm90Tile coded_serving_tile(int head_dim, Features features, int warpgroups) {
  FwdSm90Tile tile = serving_tile(head_dim, features, warpgroups, head_dim);
  tile.stages = head_dim <= 64 ? 3 : 2;
  return tile;
}
constexpr int coded_serving_stages(int head_dim, const FwdSm90Tile& tile) {
  const int bytes = 2 * head_dim * (64 * tile.warpgroups * tile.query_stages + 2 * tile.keys * tile.stages);
  return std::min(4, (224 * 1024 - bytes) / (2 * head_dim * tile.keys));
}

// The same for dense tensors, with the bits of serving_tile: as many keys. Shared memory also has the total of pieces
// of fixed length, up to 128 channels.
constexpr FwdSm90Tile invariant_tile(int head_dim, Features features, int head_dim_v) {
  const FwdSm90Tile tile = serving_tile(head_dim, features, 2, head_dim_v);
  if (head_dim <= 64) return {has_plain_scores(features) ? 3 : 2, tile.keys, 3, 2, true};
  return head_dim <= 96 ? FwdSm90Tile{2, tile.keys, 2, 2, true} : tile;
}

// decode_sm80: the rows that share a key head fit the 16 rows of an mma, and the warps of a thread block divide the
// keys among themselves, in chunks.
constexpr int kDecodeRows = 16;
constexpr int kDecodeKeys = 16;  // of a chunk
constexpr int kMaxDecodeWarps = 8;

// How many chunks of K and V a warp has in flight: 24 KB, so that eight warps hide the latency of DRAM. Over codes, 16
// warps of two thread blocks have half as many bytes each.
constexpr int decode_stages(int head_dim) { return std::max(2, 384 / head_dim); }
constexpr int decode_bytes_per_warp(int head_dim) {
  const int slices = channel_slices(head_dim), stages = decode_stages(head_dim / slices);
  const int stage_bytes = 2 * kDecodeKeys * head_dim / slices * 2;
  const int exchanged_bytes = slices > 1 ? kDecodeRows * kDecodeKeys * 4 : 0;
  return stages * (stage_bytes + exchanged_bytes);
}

// How many warps a thread block has room for in shared memory. 4096 bytes are left for what else it needs.
constexpr int decode_warps(int head_dim, int shared_bytes) {
  int warps = kMaxDecodeWarps;
  while (warps > channel_slices(head_dim) && warps * decode_bytes_per_warp(head_dim) + 4096 > shared_bytes) warps /= 2;
  return warps;
}

// Where the decode kernel also appends: the most new keys of an entry, and the shared memory for these and the queries.
// Padding of 8 elements keeps rows from starting at the same bank.
constexpr int kMostAppended = 8;
constexpr int decode_fresh_stride(int head_dim) { return head_dim + 8; }  // of rows, in elements
constexpr int decode_fresh_bytes(int head_dim) {
  return (kDecodeRows + 2 * kMostAppended) * decode_fresh_stride(head_dim) * 2;
}

// dmask_sm80: the number of keys after which the running maximum of S_dmask is updated. Callers know it from
// _get_block_size_n.
constexpr int dmask_width(int head_dim) { return head_dim <= 32 ? 128 : head_dim > 96 && head_dim <= 128 ? 32 : 64; }

}  // namespace flash::flash_attn
