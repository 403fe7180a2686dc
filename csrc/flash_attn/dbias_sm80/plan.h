// How the gradient of a bias is computed: dbias_sm80/planner.h chooses it, dbias_sm80 carries it out.
#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// The tile of scores that a thread block computes at a time.
constexpr int kDbiasRows = 128, kDbiasKeys = 128;

// Numbers along the dimensions of the scores, at least 1. A slot is kDbiasRows query rows or, if entries are packed,
// fewer: see entry_of_slot in schedule.cuh; packed entries count as one.
struct DbiasCounts {
  Divisor entries, heads, slots;
};

// Scores are cut into tiles. Along each dimension, dbias either has as many elements as there are scores, or one for
// all: then the tiles of all entries, heads or slots are added. So each tile of dbias is the sum of some tiles of
// scores, its items. If there are too few tiles for the GPU, the items of one are divided into splits, which different
// thread blocks add.
struct DbiasPlan {
  DbiasCounts tiles;  // of dbias; there are n_blocks of them in each slot
  DbiasCounts items;  // of a tile; each of these times that of the tiles is how many there are in all
  Divisor n_blocks;
  int num_tiles, num_items;  // in all, and of a tile; 0 if there are no scores
  int entries_of_tiles;      // how many entries one tile's first entry lies behind that of the tile before
  int entries_of_items;      // and an item of a tile behind the one before
  int splits = 1;            // of a tile
  int items_of_split;
  bool copies_bias;          // whether tiles of the bias are copied to shared memory, in chunks of 16 bytes
  Divisor heads_of_key;      // query heads that share a key head
  Divisor blocks;            // persistent thread blocks
  int64_t size;              // elements of dbias
  float* partial = nullptr;  // (splits, size), the sums of the splits; unused if a tile is one split
};

// The kernel's parameters.
struct PlannedDbias : DbiasParams {
  DbiasPlan plan;
};

}  // namespace flash::flash_attn
