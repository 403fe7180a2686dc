// The tile sizes of the backward kernels by head dim and features, as compile-time constants.
#pragma once

#include "flash_attn/features.h"

namespace flash::flash_attn {

// A tile of bwd_sm80.
struct BwdTile {
  int rows;
  int keys;
  int warp_keys;  // keys of a warp's S^T
  int stages;     // tiles of Q, and of dO, in shared memory at a time
  int team_warps = 4;
};

// S^T, dP^T, dK and dV fill the registers of eight warps. With fewer rows, products would be too small for the shared
// memory that they read. The compact tiles are for GPUs where a thread block can have 99 KB of shared memory. For 512
// channels, the tiles take 135 KB, or compact 99 KB.
constexpr BwdTile bwd_tile(int head_dim, bool compact) {
  if (head_dim <= 64) return {compact ? 64 : 128, 128, 32, 2};
  if (head_dim <= 96) return {64, compact ? 64 : 128, 32, 2};
  if (head_dim <= 128) return compact ? BwdTile{32, 64, 32, 2} : BwdTile{64, 128, 32, 2};
  if (head_dim <= 256) return compact ? BwdTile{32, 32, 16, head_dim <= 192 ? 2 : 1} : BwdTile{64, 64, 32, 2};
  return compact ? BwdTile{32, 16, 16, 1, 2} : BwdTile{32, 32, 16, 1};
}

// How the two consumer warpgroups of bwd_sm90 go through their steps.
enum class WarpgroupSchedule {
  kCooperative,  // side by side: they meet in each step, before dQ, which reads dS of both
  kPingpong,     // the second half a step behind the first, so that one multiplies while the other exponentiates
};

// A tile of bwd_sm90. Each of its two consumer warpgroups has 64 of the keys. Ping-pong is faster with 128 rows, where
// exponentials take long, and slower with 64. Tiles of bwd_sm90_wide have 64 rows, too.
struct BwdSm90Tile {
  int rows;
  int keys;
  WarpgroupSchedule schedule;
};

// 128 rows leave no registers for score transforms and for dropout that a warp draws itself.
constexpr BwdSm90Tile bwd_sm90_tile(int head_dim, Features features) {
  const bool tall = head_dim <= 64 && has_plain_scores(features);
  return tall ? BwdSm90Tile{128, 128, WarpgroupSchedule::kPingpong}
              : BwdSm90Tile{64, 128, WarpgroupSchedule::kCooperative};
}

// The keys of an n_block of the kernels for sm_90, of a cluster in bwd_sm90_wide.
constexpr int bwd_sm90_keys(int head_dim) { return head_dim > 256 ? 64 : 128; }

}  // namespace flash::flash_attn
