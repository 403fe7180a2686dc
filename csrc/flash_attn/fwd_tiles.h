// The tiles of the forward kernels, by head dim and features, as compile-time constants.
#pragma once

#include <algorithm>

#include "flash_attn/features.h"

namespace flash::flash_attn {

// The registers of a warp, or of the warpgroups of a block, hold O of 256 channels. More of them are divided among
// parts: warps that share rows and keys, or on sm_90 the two blocks of a cluster. A part has its channels of Q, K, V
// and O, and the parts add up their products Q K^T (partial_scores.cuh). So it is in bwd_sm90_wide.cuh, too.
constexpr int channel_parts(int head_dim) { return head_dim > 256 ? 2 : 1; }

// A tile of fwd_sm80.cuh.
struct FwdTile {
  int rows;
  int keys;
  int warps;
};

// With 32 rows, a warp reads half as much shared memory for each product as with 16; from 192 channels on, 32 rows do
// not fit the registers. Random bits and transformed scores take registers, too, so that fewer keys are left. Tiles of
// 512 channels take 96 KB; random bits come for 32 keys.
constexpr FwdTile fwd_tile(int head_dim, Features features) {
  const bool plain = has_plain_scores(features);
  if (head_dim <= 64) return {128, plain ? 128 : 64, 4};
  if (head_dim <= 128) return {128, plain ? 64 : 32, 4};
  if (head_dim <= 256) return {64, 64, 4};
  return plain ? FwdTile{64, 16, 8} : FwdTile{32, 32, 4};
}

// A tile of fwd_sm90.cuh.
struct FwdSm90Tile {
  int warpgroups;      // of 64 rows each
  int keys;            // of a block
  int stages;          // blocks of K, and of V, that are in shared memory at a time
  int query_stages;    // tiles of Q that are
  bool staged_output;  // whether O leaves through shared memory, where it has a place of its own
};

// Whether there is a second, larger tile for long sequences, of which it wastes little. Other tiles were slower on an
// H200: 112 keys for 192 rows of head dim 64; 160 keys for 128 rows and 96 for 192 rows of head dim 96; 80 or 96 keys
// of head dim 192; a third stage of V for 64 keys of head dim 256. With ranges, which may be those of short documents,
// the wide tile of head dim 128 won 2 % where they said causal and lost 22 % in documents of 1024 tokens; that of 64
// won 10 % and lost 10 %.
constexpr bool has_wide_tile(int head_dim, Features features) {
  if (features == Features::kRanged) return head_dim == 64;
  return features == Features::kPlain && head_dim != 192 && head_dim <= 256;
}

// With kBiased, each block of keys has a tile of the bias beside it, of 32 KB for 128 rows and 128 keys.
constexpr FwdSm90Tile fwd_sm90_tile(int head_dim, Features features, bool wide, int head_dim_v) {
  if (features == Features::kBiased) {
    return {2, head_dim <= 128 ? 128 : 64, head_dim <= 64 ? 3 : 2, head_dim <= 96 ? 2 : 1, false};
  }
  const bool plain = has_plain_scores(features);
  if (head_dim <= 64) return {wide ? 3 : 2, 128, 3, 2, true};
  if (head_dim <= 96) return wide ? FwdSm90Tile{3, 112, 2, 2, true} : FwdSm90Tile{2, plain ? 128 : 96, 2, 2, true};
  if (head_dim <= 128) return wide ? FwdSm90Tile{2, 176, 2, 1, false} : FwdSm90Tile{2, plain ? 128 : 96, 2, 2, true};
  if (head_dim <= 192 && head_dim_v < head_dim) return {2, plain ? 128 : 96, 2, 1, !plain};  // of 208 and 200 KB
  if (head_dim <= 192) return {2, plain ? 112 : 96, 2, 1, false};
  return {2, wide ? 80 : 64, 2, 1, false};  // also of 512 channels, half of which a block has
}

// decode_sm80.cuh: the rows that share a key head fit one tile of an mma, and the warps of a block divide the keys.
constexpr int kDecodeRows = 16;
constexpr int kDecodeKeys = 16;  // of a chunk
constexpr int kMaxDecodeWarps = 8;

// How many chunks of keys a warp has on the way: 24 KB, so that eight warps cover the latency of memory.
constexpr int decode_stages(int head_dim) { return std::max(2, 384 / head_dim); }
constexpr int decode_bytes_per_warp(int head_dim) {
  const int parts = channel_parts(head_dim), stages = decode_stages(head_dim / parts);
  const int stage_bytes = 2 * kDecodeKeys * head_dim / parts * 2;
  const int exchanged_bytes = parts > 1 ? kDecodeRows * kDecodeKeys * 4 : 0;
  return stages * (stage_bytes + exchanged_bytes);
}

// How many warps a block has, of which each needs its share of the block's shared memory.
constexpr int decode_warps(int head_dim, int shared_bytes) {
  int warps = kMaxDecodeWarps;
  while (warps > channel_parts(head_dim) && warps * decode_bytes_per_warp(head_dim) + 4096 > shared_bytes) warps /= 2;
  return warps;
}

// Where the kernel also appends: the most new keys of an entry, and the shared memory for those and for the queries.
constexpr int kMostAppended = 8;
constexpr int decode_fresh_stride(int head_dim) { return head_dim + 8; }  // of rows, in elements
constexpr int decode_fresh_bytes(int head_dim) {
  return (kDecodeRows + 2 * kMostAppended) * decode_fresh_stride(head_dim) * 2;
}

// dmask_sm80.cuh: the width of the key blocks at which the running maximum of S_dmask advances. Callers know it from
// _get_block_size_n.
constexpr int dmask_width(int head_dim) { return head_dim <= 32 ? 128 : head_dim > 96 && head_dim <= 128 ? 32 : 64; }

}  // namespace flash::flash_attn
