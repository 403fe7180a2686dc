// Which backward kernel takes a problem, and its plan. Pure host code, which can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "common/divmod.h"
#include "flash_attn/bwd_plan.h"
#include "flash_attn/features.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// The facts besides the problem that a plan depends on.
struct BwdHints {
  bool deterministic;
  bool has_sm90;  // whether the kernels for sm_90 run
  int multiprocessors;
};

// The sizes of a plan's scratch, in elements of 4 bytes.
struct BwdScratchSizes {
  int64_t dq_accum = 0;
  int64_t row_values = 0;  // of lse_log2, and as many of softmax_d
  int64_t semaphores = 0;
  int64_t tiles = 0, seen = 0, key_uses = 0;  // of key ranges

  int64_t ranges() const { return tiles + seen + key_uses; }
  int64_t total() const { return dq_accum + 2 * row_values + ranges() + semaphores + 1; }
};

struct BwdChoice {
  BwdPlan plan;
  BwdScratchSizes scratch;
};

// ---------------------------------------------------------------------------------------------------------------------
// Scratch

inline int64_t heads_of_all_entries(const Problem& p) { return int64_t{p.heads} * (p.cu_seqlens_q ? 1 : p.batch); }

inline int64_t padded_rows_per_head(const Problem& p) {
  if (p.cu_seqlens_q) return int64_t{p.seqlen_q} / kRowPad * kRowPad + int64_t{kRowPad} * p.batch;
  return ceil_div(int64_t{p.seqlen_q}, kRowPad) * kRowPad;
}

// Rows of dq_accum lie together in eights.
inline int64_t dq_accum_size(const Problem& p) {
  return ceil_div(heads_of_all_entries(p) * p.seqlen_q, int64_t{8}) * 8 *
         sm80_head_dims(p.head_dim, p.head_dim_v).of_keys;
}

inline int64_t num_semaphores(const Problem& p) {
  return heads_of_all_entries(p) * padded_rows_per_head(p) / kSemaphoreRows;
}

// Adds what key ranges take, for tiles of 32 rows and of 16 keys or more.
inline void add_ranges(BwdScratchSizes& sizes, const Problem& p, int64_t rows_per_head) {
  if (p.ranges.data == nullptr) return;
  constexpr int kLeastRows = 32, kLeastKeys = 16;
  const int64_t entries = p.cu_seqlens_q ? 1 : p.batch, packed_entries = p.cu_seqlens_k ? p.batch : 0;
  const int64_t rows = entries * (p.ranges.heads == 0 ? 1 : p.heads) * rows_per_head;
  const int64_t key_blocks = ceil_div(int64_t{p.seqlen_k}, kLeastKeys) + packed_entries;
  sizes.tiles = rows / kLeastRows * 4;
  sizes.seen = rows * 2;
  sizes.key_uses = entries * (p.ranges.heads == 0 ? 1 : p.heads_k) * key_blocks *
                   static_cast<int64_t>(sizeof(KeyUse) / sizeof(float));
}

// ---------------------------------------------------------------------------------------------------------------------
// Order of blocks

// Under a causal mask the blocks of the first keys take longest.
inline bool is_causal(const Problem& p) { return p.window_left == kUnbounded && p.window_right != kUnbounded; }

// How many key heads are in a section: their blocks start together, beginning with the first keys. The blocks of one
// head read the same rows, which stay in the L2 cache if these blocks run together. But blocks of one head wait for one
// another, and should not start together.
inline int section_of_waiting_blocks(const Problem& p) { return is_causal(p) ? 16 : 8; }

// The head dim of the keys in the instance for sm_90.
inline int instance_on_sm90(const Problem& p) { return sm90_head_dims(p.head_dim, p.head_dim_v).of_keys; }

// Whether the instance is that without other features.
inline bool is_plain(const Problem& p) {
  return features_of<BwdSm90Plan>(p, has_plain_products(p)) == Features::kPlain;
}

// The bytes of q, dout and dq_accum that the blocks of a key head read and add to.
inline int64_t row_bytes_of_head(const Problem& p) {
  return int64_t{2} * (3 * p.head_dim + p.head_dim_v) * (p.heads / p.heads_k) * p.seqlen_q;
}

// The same if the main kernel rounds dQ: so many heads that their rows take about 8 MB, within bounds. Blocks that add
// in the order of their keys wait longest, under a causal mask above all. With ranges, which may say causal, long rows
// of head dim 64 took 1.7 times as long in sections of one head that handed boxes over late.
inline int section_of_rounding_blocks(const Problem& p, bool in_order) {
  const bool causal = is_causal(p);
  const bool waits_little = instance_on_sm90(p) <= 64 && is_plain(p);
  const int64_t least = !waits_little ? 8 : causal ? (in_order ? 8 : 2) : (in_order ? 2 : 1);
  const int64_t heads = std::clamp<int64_t>((8 << 20) / row_bytes_of_head(p), least, 32);
  return static_cast<int>(heads) * (causal ? 2 : 1);
}

// The same if no block waits: so many heads that their rows take about 32 MB, within bounds. Under a causal mask the
// longest blocks take twice the mean, and with less than two blocks for each multiprocessor those of the last section
// would end late.
inline int section_of_free_blocks(const Problem& p, int multiprocessors) {
  if (instance_on_sm90(p) > 128) return 8;
  int64_t heads = (32 << 20) / row_bytes_of_head(p);
  if (is_causal(p)) heads = std::max(heads, 2 * multiprocessors / ceil_div(int64_t{p.seqlen_k}, 128));
  return static_cast<int>(std::clamp<int64_t>(heads, 1, 8));
}

// ---------------------------------------------------------------------------------------------------------------------
// Plans

// Whether the kernels for sm_90 take a problem: bwd_sm90.cuh, or bwd_sm90_wide.cuh for head dims above 128. They copy
// aligned rows, and no empty tensors.
inline bool suits_sm90(const BwdParams& p) {
  const Problem& problem = p.problem;
  const bool empty = problem.batch == 0 || problem.heads == 0 || problem.seqlen_q == 0 || problem.seqlen_k == 0;
  return p.aligned && !empty;
}

// As in fwd_planner.h.
inline bool wants_tiled_bias(const BwdParams& p, const BwdHints& hints) {
  return hints.has_sm90 && suits_sm90(p) && p.dbias.data == nullptr && could_tile_bias<BwdSm90Plan>(p.problem);
}

// Whether bwd_sm90.cuh may choose the order of rows: plain instances have kernels for that, if no block waits. With key
// ranges all lanes of a warp look for the next rows together, and begin with the last.
inline bool may_reorder_rows(const Problem& p, bool in_order) {
  return instance_on_sm90(p) <= 128 && is_plain(p) && !in_order;
}

// Up to how many keys bwd_sm90.cuh rounds dQ, of head dims up to 64, and up to 128.
constexpr int kMostRoundedKeys64 = 4096, kMostRoundedKeys128 = 2048;

// Whether bwd_sm90.cuh rounds dQ. That saves the time to fill dq_accum with zeros and to read it, but blocks wait for
// one another, and all begin with the same rows: few keys gain, and many lose. Head dim 64 gains with any number of
// keys where blocks wait anyway. Packed entries cannot: the first block stores whole boxes of rows, which would reach
// into the next entry.
inline bool rounds_dq(const Problem& p, bool in_order) {
  const int head_dim = instance_on_sm90(p);
  const int most_keys = head_dim > 128  ? 0
                        : head_dim > 64 ? kMostRoundedKeys128
                        : in_order      ? kMaxSeqlen
                                        : kMostRoundedKeys64;
  return p.cu_seqlens_q == nullptr && p.seqlen_k <= most_keys;
}

// Blocks that add to the same rows of dQ at a time are in each other's way, so that they should not walk in step. Under
// a mask the first rows that see its keys differ from block to block. Without one, only head dim 64 gains from other
// rows for each block. Blocks that wait must come to the rows that all keys share in the same order.
inline RowOrder row_order(const Problem& p, const BwdSm90Plan& plan) {
  if (plan.waits || !may_reorder_rows(p, plan.in_order)) return RowOrder::kLastFirst;
  const bool masked = p.window_left != kUnbounded || p.window_right != kUnbounded;
  return masked || instance_on_sm90(p) > 64 ? RowOrder::kFirstFirst : RowOrder::kRotated;
}

inline BwdChoice plan_bwd_sm80(const Problem& p, const BwdHints& hints) {
  BwdSm80Plan plan{};
  plan.waits = hints.deterministic && p.seqlen_q > 0;  // without rows nothing is added, and nobody clears next_block
  plan.section_heads = plan.waits ? section_of_waiting_blocks(p) : is_causal(p) ? 16 : 1;
  plan.scratch.rows_per_head = padded_rows_per_head(p);
  return {plan, {.dq_accum = dq_accum_size(p), .semaphores = plan.waits ? num_semaphores(p) : 0}};
}

inline BwdChoice plan_bwd_sm90(const Problem& p, const BwdHints& hints) {
  BwdSm90Plan plan{};
  plan.in_order = hints.deterministic;
  plan.rounds_dq = rounds_dq(p, plan.in_order);
  plan.waits = plan.in_order || plan.rounds_dq;
  plan.row_order = row_order(p, plan);
  plan.section_heads = plan.rounds_dq  ? section_of_rounding_blocks(p, plan.in_order)
                       : plan.in_order ? section_of_waiting_blocks(p)
                                       : section_of_free_blocks(p, hints.multiprocessors);
  plan.blocks = hints.multiprocessors;
  plan.scratch.rows_per_head = padded_rows_per_head(p);
  return {plan,
          {.dq_accum = dq_accum_size(p),
           .row_values = heads_of_all_entries(p) * plan.scratch.rows_per_head,
           .semaphores = plan.waits ? num_semaphores(p) : 0}};
}

// Chooses how a problem is computed, and says what scratch that takes.
inline BwdChoice plan_bwd(const BwdParams& p, const BwdHints& hints) {
  BwdChoice choice =
      hints.has_sm90 && suits_sm90(p) ? plan_bwd_sm90(p.problem, hints) : plan_bwd_sm80(p.problem, hints);
  add_ranges(choice.scratch, p.problem, padded_rows_per_head(p.problem));
  return choice;
}

// Gives a problem and its plan their scratch: memory of sizes.total() elements with any contents, aligned to 16 bytes.
inline void use_scratch(Problem& problem, BwdPlan& plan, const BwdScratchSizes& sizes, float* memory) {
  float *row_values = memory + sizes.dq_accum, *ranges = row_values + 2 * sizes.row_values;
  int* counters = reinterpret_cast<int*>(ranges + sizes.ranges());
  problem.ranges.of_tiles = reinterpret_cast<int4*>(ranges);
  const auto use = [&](BwdScratch& scratch) {
    scratch.seen = reinterpret_cast<Interval*>(ranges + sizes.tiles);
    scratch.key_uses = reinterpret_cast<KeyUse*>(ranges + sizes.tiles + sizes.seen);
    scratch.dq_accum = memory;
    scratch.next_block = counters;
    scratch.semaphores = counters + 1;
  };
  std::visit([&](auto& chosen) { use(chosen.scratch); }, plan);
  if (auto* on_sm90 = std::get_if<BwdSm90Plan>(&plan)) {
    on_sm90->lse_log2 = row_values;
    on_sm90->softmax_d = row_values + sizes.row_values;
  }
}

}  // namespace flash::flash_attn
