// What is chosen for a backward: sizes of tiles, and how the keys are divided. Pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/divmod.h"
#include "flash_attn/features.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

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
