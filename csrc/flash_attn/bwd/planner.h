// Chooses the backward kernel for a problem, and makes its plan. Pure host code, which can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "common/divmod.h"
#include "flash_attn/bwd/cost_model.h"
#include "flash_attn/bwd/kernels.h"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/features.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// What else a plan depends on.
struct BwdHints {
  int64_t longest_q;  // no entry has more rows, as the caller says; at least 1, at most all rows
  int64_t longest_k;  // likewise keys
  bool deterministic;
  bool has_sm90;  // whether the kernels for sm_90 can run on the device
  int multiprocessors;
};

// The sizes of a plan's scratch, in elements of 4 bytes.
struct BwdScratchSizes {
  int64_t dq_accum = 0;
  int64_t row_values = 0;  // of each array of values of rows
  int num_row_values = 0;  // how many such arrays there are: lse_log2, softmax_d and perhaps lse
  int64_t semaphores = 0;
  int64_t key_sums = 0;
  int64_t tiles = 0, seen = 0, key_uses = 0;  // for key ranges
  int64_t work_tiles = 0, split_sums = 0;     // for the work list

  int64_t ranges() const { return tiles + seen + key_uses; }
  int64_t work_list() const { return work_tiles + split_sums; }
  int64_t total() const {
    return dq_accum + num_row_values * row_values + key_sums + ranges() + work_list() + semaphores + kCounters;
  }
  static constexpr int kCounters = 2;  // BwdScratch::next_work
};

struct BwdChoice {
  BwdPlan plan;
  BwdScratchSizes scratch;
};

// ---------------------------------------------------------------------------------------------------------------------
// Scratch

// How many elements of 4 bytes a T takes.
template <typename T>
constexpr int kElements = sizeof(T) / sizeof(float);

inline int64_t heads_of_all_entries(const Problem& p) { return int64_t{p.heads} * (p.cu_seqlens_q ? 1 : p.batch); }

inline int64_t padded_rows_per_head(const Problem& p) {
  if (p.cu_seqlens_q) return int64_t{p.seqlen_q} / kRowPad * kRowPad + int64_t{kRowPad} * p.batch;
  return ceil_div(int64_t{p.seqlen_q}, kRowPad) * kRowPad;
}

// DqAccum may group rows by eight: their number is rounded up.
inline int64_t dq_accum_size(const Problem& p) {
  return ceil_div(heads_of_all_entries(p) * p.seqlen_q, int64_t{8}) * 8 *
         sm80_head_dims(p.head_dim, p.head_dim_v).of_keys;
}

inline int64_t num_semaphores(const Problem& p) {
  return heads_of_all_entries(p) * padded_rows_per_head(p) / kSemaphoreRows;
}

// Adds the scratch for key ranges, enough for the smallest tiles of any kernel: 32 rows and 16 keys.
inline void add_ranges(BwdScratchSizes& sizes, const Problem& p, int64_t rows_per_head) {
  if (p.ranges.data == nullptr) return;
  constexpr int kLeastRows = 32, kLeastKeys = 16;
  const int64_t entries = p.cu_seqlens_q ? 1 : p.batch, packed_entries = p.cu_seqlens_k ? p.batch : 0;
  const int64_t rows = entries * (p.ranges.heads == 0 ? 1 : p.heads) * rows_per_head;
  const int64_t n_blocks = ceil_div(int64_t{p.seqlen_k}, kLeastKeys) + packed_entries;
  sizes.tiles = rows / kLeastRows * 4;
  sizes.seen = rows * 2;
  sizes.key_uses = entries * (p.ranges.heads == 0 ? 1 : p.heads_k) * n_blocks * kElements<KeyUse>;
}

// ---------------------------------------------------------------------------------------------------------------------
// The swizzle
//
// The n_blocks of several key heads are taken together, beginning with the first keys (bwd/tile_scheduler.cuh). Those
// of one head read the same rows, which stay in the L2 cache if they run at the same time. But where n_blocks wait for
// one another, those of one head should not start together: hence many heads.

// Whether the mask is causal on the right and open on the left: the first keys are seen by most rows and take longest.
inline bool is_causal(const Problem& p) { return p.window_left == kUnbounded && p.window_right != kUnbounded; }

// The head dim of the keys in the instance for sm_90.
inline int instance_on_sm90(const Problem& p) { return BwdSm90Kernel::head_dims(p).of_keys; }

inline bool is_plain(const Problem& p) { return instance_for<BwdSm90Kernel>(p) == Features::kPlain; }

// The bytes of q, dout and dq_accum (16, 16 and 32 bits) in so many rows of the query heads that share a key head.
inline int64_t bytes_of_rows(const Problem& p, int64_t rows) {
  return int64_t{2} * (3 * p.head_dim + p.head_dim_v) * (p.heads / p.heads_k) * rows;
}

// How many key heads are taken together if n_blocks add in the order of their keys. Those of a head that start together
// begin one after the other. Under a causal mask they still end no later than one another, since each has one or two
// m_blocks less than the one before it; then the next ones start together again. There, few n_blocks of a head at a
// time are worth more than what stays in the L2 cache: as many heads as have 65536 keys. Without a mask, as many as
// have rows of about 16 MB. Both within bounds. Only n_blocks of one entry wait for each other, so the longest one
// counts; and if there are fewer than kFewestInOrder key heads, those of several packed entries take their place under
// a causal mask.
constexpr int kFewestInOrder = 16;

inline int swizzle_in_order(const Problem& p, const BwdHints& hints, bool rounds_dq) {
  const int head_dim = instance_on_sm90(p);
  if (head_dim > 128) return is_causal(p) ? 16 : 8;
  if (is_causal(p)) {
    return static_cast<int>(std::clamp<int64_t>((64 << 10) / hints.longest_k, 16, head_dim <= 64 ? 64 : 32));
  }
  const int64_t least = rounds_dq && head_dim <= 64 && is_plain(p) ? 2 : 8;
  return static_cast<int>(std::clamp<int64_t>((16 << 20) / bytes_of_rows(p, hints.longest_q), least, 32));
}

// The same if the main kernel rounds dQ, and n_blocks other than the first and the last add in any order: as many
// heads as have rows of about 8 MB, within bounds. Under a causal mask more heads pay, and so they do in instances with
// ranges, which may be causal.
inline int swizzle_while_rounding(const Problem& p) {
  const bool causal = is_causal(p);
  const bool waits_little = instance_on_sm90(p) <= 64 && is_plain(p);
  const int64_t least = !waits_little ? 8 : causal ? 2 : 1;
  const int64_t heads = std::clamp<int64_t>((8 << 20) / bytes_of_rows(p, p.seqlen_q), least, 32);
  return static_cast<int>(heads) * (causal ? 2 : 1);
}

// The same if no n_block waits: as many heads as have rows of about 32 MB, within bounds. Under a causal mask, the
// longest n_blocks take twice the mean time. There must then be two n_blocks for each SM in these heads, or else the
// long ones of the last heads would end late. Of packed entries the rows of the longest count then, since n_blocks that
// are taken together are in few entries at a time; but without a mask it is faster to count all rows.
inline int swizzle_without_waits(const Problem& p, const BwdHints& hints) {
  int64_t heads = (32 << 20) / bytes_of_rows(p, is_causal(p) ? hints.longest_q : p.seqlen_q);
  if (is_causal(p)) heads = std::max(heads, 2 * hints.multiprocessors / ceil_div(int64_t{p.seqlen_k}, 128));
  return static_cast<int>(std::clamp<int64_t>(heads, 1, 8));
}

// ---------------------------------------------------------------------------------------------------------------------
// Splits of n_blocks

// dK and dV of so many splits of n_blocks, as KeySums has them.
inline int64_t key_sums_size(const SplitProblem& p, int64_t splits) {
  return 2 * splits * bwd_sm90_keys(p.head_dim) * p.head_dim;
}

// The problem as the cost model sees it: key ranges count as a causal mask does.
inline SplitProblem split_problem(const Problem& p, const BwdHints& hints) {
  const int head_dim = instance_on_sm90(p), keys = bwd_sm90_keys(head_dim);
  const int tile_rows = bwd_sm90_tile(head_dim, instance_for<BwdSm90Kernel>(p)).rows;
  const int64_t per_head = p.cu_seqlens_k ? p.seqlen_k / keys + p.batch : ceil_div(int64_t{p.seqlen_k}, keys);
  const bool left = p.window_left != kUnbounded, right = p.window_right != kUnbounded;
  const int64_t band = int64_t{p.window_left} + p.window_right + keys;  // rows that see some of the keys
  const int64_t rows = left && right ? std::clamp<int64_t>(band, 1, hints.longest_q) : hints.longest_q;
  return {.n_blocks = per_head * p.heads_k * (p.cu_seqlens_k ? 1 : p.batch),
          .m_blocks = ceil_div(rows, tile_rows),
          .group = p.heads / p.heads_k,
          .uneven = left != right || p.ranges.data != nullptr,
          .head_dim = head_dim,
          .multiprocessors = hints.multiprocessors};
}

// With key ranges, makes room for a work list, and for the sums of the splits that it may have: less than 64 MB. There
// is none if no n_block can have many steps, or where there are so many n_blocks that a long one makes little
// difference: one thread block makes the list.
inline void list_splits(BwdScratchSizes& sizes, const SplitProblem& p) {
  const int64_t m_blocks = p.m_blocks + 1;  // those of a window may begin within one
  if (m_blocks * p.group <= kFewestListedSteps || p.n_blocks > kMostListedOfPlace * p.places()) return;
  const int64_t more = kMostSplitsOfPlace * p.places();
  sizes.work_tiles = (p.n_blocks + more) * kElements<BwdWorkTile>;
  sizes.split_sums = p.n_blocks * kElements<SplitSums>;
  sizes.key_sums = key_sums_size(p, std::min(more, p.n_blocks * m_blocks));
}

// Splits n_blocks where there are too few to occupy the GPU: cross-attention to few keys, one key head for many query
// heads, or one sequence with few heads. What the splits sum may take as much memory as dq_accum, or 64 MB. If the host
// splits none, the GPU may split some of those with key ranges; but not where there are so few keys that dQ is rounded
// at once, where calls are short and the list and the sum would take longer than what they gain.
inline void split_n_blocks(BwdSm90Plan& plan, BwdScratchSizes& sizes, const Problem& p, const BwdHints& hints) {
  const SplitProblem problem = split_problem(p, hints);
  plan.block_keys = bwd_sm90_keys(problem.head_dim), plan.places = static_cast<int>(problem.places());
  const int64_t most_memory = std::max(dq_accum_size(p), int64_t{16 << 20});
  const int64_t most = std::min<int64_t>(kMostSplits, most_memory / key_sums_size(problem, problem.n_blocks));
  const Splits splits = best_splits(problem, static_cast<int>(most));
  plan.head_splits = splits.of_heads, plan.m_splits = splits.of_m_blocks, plan.splits = splits.count();
  if (plan.splits == 1) {
    if (p.ranges.data != nullptr && !(plan.rounds_dq && !plan.in_order)) list_splits(sizes, problem);
    return;
  }
  plan.m_block_order = MBlockOrder::kLastFirst;  // which the instances for splits are compiled for
  sizes.key_sums = key_sums_size(problem, problem.n_blocks * plan.splits);
}

// ---------------------------------------------------------------------------------------------------------------------
// Plans

inline bool suits_sm90(const BwdParams& p, const BwdHints& hints) {
  return hints.has_sm90 && BwdSm90Kernel::takes_any(p);
}

// As in fwd/planner.h.
inline bool wants_tiled_bias(const BwdParams& p, const BwdHints& hints) {
  return suits_sm90(p, hints) && could_tile_bias<BwdSm90Kernel>(p.problem);
}

// Whether bwd_sm90 may choose the order of m_blocks, which only plain instances are compiled for. With key ranges, the
// lanes of a warp find the next m_blocks together, last first. In order, all n_blocks must visit them alike.
inline bool may_reorder_m_blocks(const Problem& p, bool in_order) {
  return instance_on_sm90(p) <= 128 && is_plain(p) && !in_order;
}

// The most keys for which bwd_sm90 rounds dQ: for head dims up to 64, and up to 128.
constexpr int kMostRoundedKeys64 = 4096, kMostRoundedKeys128 = 2048;

// Whether bwd_sm90 rounds dQ itself. That saves filling dq_accum with zeros and a pass that reads it, but then
// n_blocks wait for one another and all start with the same rows: it gains where there are few keys and loses where
// there are many. Head dim 64 gains with any number of keys where n_blocks wait anyway. Not for packed entries: the
// first n_block stores whole boxes of rows, which would overwrite rows of the next entry.
inline bool rounds_dq(const Problem& p, bool in_order) {
  const int head_dim = instance_on_sm90(p);
  const int most_keys = head_dim > 128  ? 0
                        : head_dim > 64 ? kMostRoundedKeys128
                        : in_order      ? kMaxSeqlen
                                        : kMostRoundedKeys64;
  return p.cu_seqlens_q == nullptr && p.seqlen_k <= most_keys;
}

// Where n_blocks add to the same rows of dQ at the same time, they contend for them, so they should start at different
// rows. Under a mask, the first rows that see an n_block differ anyway (kFirstFirst). Without one, only head dim 64
// gains from rotated rows. If n_blocks wait for one another, they must visit the rows that they have in common in the
// same order.
inline MBlockOrder m_block_order(const Problem& p, const BwdSm90Plan& plan) {
  if (plan.waits || !may_reorder_m_blocks(p, plan.in_order)) return MBlockOrder::kLastFirst;
  const bool masked = p.window_left != kUnbounded || p.window_right != kUnbounded;
  return masked || instance_on_sm90(p) > 64 ? MBlockOrder::kFirstFirst : MBlockOrder::kRotated;
}

inline BwdChoice plan_bwd_sm80(const Problem& p, const BwdHints& hints) {
  BwdSm80Plan plan{};
  plan.waits = hints.deterministic && p.seqlen_q > 0;  // without rows, bwd_prepare does not run to clear next_work
  plan.swizzle_heads = is_causal(p) ? 16 : plan.waits ? 8 : 1;
  plan.scratch.rows_per_head = padded_rows_per_head(p);
  return {plan, {.dq_accum = dq_accum_size(p), .semaphores = plan.waits ? num_semaphores(p) : 0}};
}

inline BwdChoice plan_bwd_sm90(const Problem& p, const BwdHints& hints) {
  BwdSm90Plan plan{};
  BwdScratchSizes sizes;
  plan.in_order = hints.deterministic;
  plan.rounds_dq = rounds_dq(p, plan.in_order);
  plan.waits = plan.in_order || plan.rounds_dq;
  plan.m_block_order = m_block_order(p, plan);
  plan.swizzle_heads = plan.in_order    ? swizzle_in_order(p, hints, plan.rounds_dq)
                       : plan.rounds_dq ? swizzle_while_rounding(p)
                                        : swizzle_without_waits(p, hints);
  if (plan.in_order && is_causal(p) && p.cu_seqlens_k != nullptr && instance_on_sm90(p) <= 128) {
    plan.swizzle_entries = ceil_div(kFewestInOrder, p.heads_k);
  }
  plan.blocks = hints.multiprocessors;
  split_n_blocks(plan, sizes, p, hints);
  plan.scratch.rows_per_head = padded_rows_per_head(p);
  sizes.dq_accum = dq_accum_size(p);
  sizes.row_values = heads_of_all_entries(p) * plan.scratch.rows_per_head;
  sizes.num_row_values = p.bias.data == nullptr ? 2 : 3;
  sizes.semaphores = plan.waits ? num_semaphores(p) : 0;
  return {plan, sizes};
}

// Chooses the kernel and the plan of a problem, and says how much scratch it takes.
inline BwdChoice plan_bwd(const BwdParams& p, const BwdHints& hints) {
  BwdChoice choice = suits_sm90(p, hints) ? plan_bwd_sm90(p.problem, hints) : plan_bwd_sm80(p.problem, hints);
  add_ranges(choice.scratch, p.problem, padded_rows_per_head(p.problem));
  return choice;
}

// Points a problem and its plan to their scratch: sizes.total() uninitialized elements, aligned to 16 bytes.
inline void use_scratch(Problem& problem, BwdPlan& plan, const BwdScratchSizes& sizes, float* memory) {
  float *row_values = memory + sizes.dq_accum, *key_sums = row_values + sizes.num_row_values * sizes.row_values;
  float *ranges = key_sums + sizes.key_sums, *work_list = ranges + sizes.ranges();
  int* counters = reinterpret_cast<int*>(work_list + sizes.work_list());
  problem.ranges.of_tiles = reinterpret_cast<int4*>(ranges);
  const auto use = [&](BwdScratch& scratch) {
    scratch.seen = reinterpret_cast<Interval*>(ranges + sizes.tiles);
    scratch.key_uses = reinterpret_cast<KeyUse*>(ranges + sizes.tiles + sizes.seen);
    scratch.dq_accum = memory;
    scratch.key_sums = key_sums;
    if (sizes.work_tiles > 0) scratch.work_tiles = reinterpret_cast<BwdWorkTile*>(work_list);
    scratch.split_sums = reinterpret_cast<SplitSums*>(work_list + sizes.work_tiles);
    scratch.next_work = counters;
    scratch.semaphores = counters + BwdScratchSizes::kCounters;
  };
  std::visit([&](auto& chosen) { use(chosen.scratch); }, plan);
  if (auto* on_sm90 = std::get_if<BwdSm90Plan>(&plan)) {
    on_sm90->lse_log2 = row_values;
    on_sm90->softmax_d = row_values + sizes.row_values;
    if (sizes.num_row_values == 3) on_sm90->lse = row_values + 2 * sizes.row_values;
  }
}

}  // namespace flash::flash_attn
