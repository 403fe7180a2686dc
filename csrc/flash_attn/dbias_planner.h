// Plans how the gradient of a bias is computed. Pure host code, which can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/divmod.h"
#include "flash_attn/dbias_plan.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// How many thread blocks divide the items of a tile. The GPU runs one on each multiprocessor at a time, and each takes
// about as long for its start and its end as for an item. Partial sums are kept small: four of them for each
// multiprocessor at most.
inline int splits_of_items(int64_t tiles, int64_t items, int multiprocessors) {
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

inline DbiasPlan plan_dbias(const DbiasParams& p, int multiprocessors) {
  const Problem& problem = p.bwd.problem;
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int own_batch2 = static_cast<int>(p.rows.batch2_size.value), entries = packed ? 1 : problem.batch;
  const int64_t rows = problem.seqlen_q;
  const int64_t slots = packed ? rows / kDbiasRows + problem.batch + 1 : ceil_div(rows, kDbiasRows);

  DbiasPlan plan{};
  plan.tiles = plan.items = {1, 1, 1};
  plan.entries_of_tiles = plan.entries_of_items = 1;
  // Entry b is at [b / own_batch2, b % own_batch2] of dbias.
  const bool has_batch1 = p.rows.batch1 != 0, has_batch2 = p.rows.batch2 != 0;
  if (has_batch1 && has_batch2) {
    plan.tiles.entries = entries;
  } else if (has_batch1) {
    plan.tiles.entries = entries / own_batch2, plan.items.entries = own_batch2;
    plan.entries_of_tiles = own_batch2;
  } else if (has_batch2) {
    plan.tiles.entries = own_batch2, plan.items.entries = entries / own_batch2;
    plan.entries_of_items = own_batch2;
  } else {
    plan.items.entries = entries;
  }
  (p.rows.heads != 0 ? plan.tiles : plan.items).heads = problem.heads;
  (p.rows.seqlen != 0 ? plan.tiles : plan.items).slots = static_cast<int>(slots);
  plan.key_blocks = ceil_div(p.keys, kDbiasKeys);

  const int64_t tiles = int64_t{plan.tiles.entries} * plan.tiles.heads * plan.tiles.slots * plan.key_blocks;
  const int64_t items = int64_t{plan.items.entries} * plan.items.heads * plan.items.slots;
  if (std::max(tiles, items) > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("attn_bias has too many rows and heads for one launch: " + std::to_string(tiles) +
                                " tiles of " + std::to_string(items) + " parts");
  }
  plan.num_tiles = static_cast<int>(tiles), plan.num_items = static_cast<int>(items);
  plan.splits = splits_of_items(tiles, items, multiprocessors);
  plan.items_of_split = ceil_div(plan.num_items, plan.splits);
  plan.size = int64_t{plan.tiles.entries} * plan.tiles.heads * (p.rows.seqlen != 0 ? rows : 1) * p.keys;
  return plan;
}

// The size of a plan's scratch, in floats.
inline int64_t scratch_of(const DbiasPlan& plan) { return plan.splits > 1 ? plan.splits * plan.size : 0; }

}  // namespace flash::flash_attn
