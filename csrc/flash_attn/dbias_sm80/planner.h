// Plans how the gradient of a bias is computed. Pure host code, which can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/divmod.h"
#include "flash_attn/dbias_sm80/plan.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Into how many splits the items of a tile are divided. The GPU runs one thread block on each multiprocessor, and each
// split takes about as long for its start and its end as for an item. Partial sums are kept small: four of them for
// each multiprocessor at most.
inline int splits_of_tile(int64_t tiles, int64_t items, int multiprocessors) {
  constexpr int kStartAndEnd = 1;
  const auto time = [&](int64_t splits) {
    return ceil_div(tiles * splits, multiprocessors) * ((items + splits - 1) / splits + kStartAndEnd);
  };
  const int64_t most = std::min<int64_t>(items, 4 * multiprocessors / std::max<int64_t>(tiles, 1));
  int64_t best = 1;
  for (int64_t splits = 2; splits <= most; ++splits) {
    if (time(splits) < time(best)) best = splits;
  }
  return static_cast<int>(best);
}

inline Divisor divisor(int64_t count) { return Divisor(static_cast<int>(std::max<int64_t>(count, 1))); }

// Divides entries into those of tiles and those of the items of a tile. Entry b is at [b / batch2, b % batch2] of
// dbias, and each of these two dimensions may have size 1.
inline void divide_entries(DbiasPlan& plan, const BiasRows& rows, int entries) {
  const int batch2 = static_cast<int>(rows.batch2_size.value);
  plan.entries_of_tiles = plan.entries_of_items = 1;
  if (rows.batch1 != 0 && rows.batch2 != 0) {
    plan.tiles.entries = divisor(entries);
  } else if (rows.batch1 != 0) {
    plan.tiles.entries = divisor(entries / batch2), plan.items.entries = divisor(batch2);
    plan.entries_of_tiles = batch2;
  } else if (rows.batch2 != 0) {
    plan.tiles.entries = divisor(batch2), plan.items.entries = divisor(entries / batch2);
    plan.entries_of_items = batch2;
  } else {
    plan.items.entries = divisor(entries);
  }
}

// Whether tiles of the bias are copied: those of the queries' type whose rows start with chunks of 16 bytes. Softcap
// and ALiBi come before the bias, so that it cannot be added to products, as it is then.
inline bool copies_bias(const Problem& p) {
  const Bias& bias = p.bias;
  bool in_chunks = reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 && bias.keys % 8 == 0;
  for (const int64_t stride : {bias.rows.batch1, bias.rows.batch2, bias.rows.heads, bias.rows.seqlen}) {
    in_chunks &= stride % 8 == 0;
  }
  return in_chunks && bias.dtype == p.dtype && p.softcap == 0 && p.alibi_slopes == nullptr;
}

// Counts tiles, items and splits, once their numbers along each dimension are set.
inline void count_splits(DbiasPlan& plan, const DbiasParams& p, int multiprocessors) {
  const auto total = [](const DbiasCounts& counts) {
    return int64_t{counts.entries.value} * counts.heads.value * counts.slots.value;
  };
  const int64_t tiles = total(plan.tiles) * plan.n_blocks.value, items = total(plan.items);
  const int64_t splits = splits_of_tile(tiles, items, multiprocessors);
  if (std::max(tiles * splits, items) > 1 << 30) {
    throw std::invalid_argument("attn_bias has too many rows and heads for one launch: " + std::to_string(tiles) +
                                " tiles of " + std::to_string(items) + " items");
  }
  const int64_t rows = p.rows.seqlen != 0 ? p.bwd.problem.seqlen_q : 1;
  plan.num_tiles = static_cast<int>(tiles), plan.num_items = static_cast<int>(items);
  plan.splits = static_cast<int>(splits);
  plan.items_of_split = ceil_div(plan.num_items, plan.splits);
  plan.blocks = divisor(std::min<int64_t>(tiles * splits, multiprocessors));
  plan.size = int64_t{plan.tiles.entries.value} * plan.tiles.heads.value * rows * p.keys;
}

inline DbiasPlan plan_dbias(const DbiasParams& p, int multiprocessors) {
  const Problem& problem = p.bwd.problem;
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int64_t entries = packed ? 1 : problem.batch, rows = problem.seqlen_q;
  const int64_t slots = packed ? rows / kDbiasRows + problem.batch + 1 : ceil_div(rows, kDbiasRows);

  DbiasPlan plan{};
  divide_entries(plan, p.rows, static_cast<int>(entries));
  (p.rows.heads != 0 ? plan.tiles : plan.items).heads = divisor(problem.heads);
  (p.rows.seqlen != 0 ? plan.tiles : plan.items).slots = divisor(slots);
  plan.n_blocks = divisor(ceil_div(p.keys, kDbiasKeys));
  plan.copies_bias = copies_bias(problem);
  plan.heads_of_key = divisor(problem.heads_k > 0 ? problem.heads / problem.heads_k : 1);
  if (entries * problem.heads * slots * p.keys > 0) count_splits(plan, p, multiprocessors);
  return plan;
}

// The size of a plan's scratch, in floats.
inline int64_t scratch_of(const DbiasPlan& plan) { return plan.splits > 1 ? plan.splits * plan.size : 0; }

}  // namespace flash::flash_attn
