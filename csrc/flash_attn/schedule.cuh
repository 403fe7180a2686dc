// Which part of the problem a block works on.
#pragma once

#include "flash_attn/config.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// The entry of packed sequences that holds a slot; all lanes search together, 32 entries at a time. The slots of entry
// b start at floor(start_b / tile_rows) + b, so that it has as many as its rows need, or one more, and no sum over
// entries is needed.
__device__ inline int entry_of_slot(const Problem& p, int slot, int rows_per_token, int tile_rows) {
  int first = 0, count = p.batch + 1;  // it is one of these
  while (count > 1) {
    const int step = (count + 31) / 32, offset = lane_id() * step;
    const int64_t start = offset < count ? __ldg(p.cu_seqlens_q + first + offset) * int64_t{rows_per_token} : 0;
    const bool reached = offset < count && start / tile_rows + first + offset <= slot;
    const int before = (__popc(__ballot_sync(~0u, reached)) - 1) * step;
    first += before;
    count = min(step, count - before);
  }
  return first;
}

// A tile of rows. A row is a token and one of `packed_heads` query heads that share a key head, heads fastest.
struct WorkTile {
  int entry;
  int head;  // the first
  int row0;
  int split;
  int index;  // of the tile among all, whatever the split
};

// That of a slot of the `outer`-th head (group), of all entries or of packed ones.
template <int kRows>
__device__ WorkTile tile_of_slot(const FwdParams& p, int outer, int slot, int split, int index) {
  const int dense_entry = p.head_groups.divide(outer);
  const int head = p.head_groups.remainder(outer, dense_entry) * p.packed_heads.value;
  if (p.problem.cu_seqlens_q == nullptr) {
    // The longest first: under a causal mask that is the last rows.
    return {dense_entry, head, (static_cast<int>(p.slots.value) - 1 - slot) * kRows, split, index};
  }
  const int entry = entry_of_slot(p.problem, slot, p.packed_heads.value, kRows);
  const int64_t start = __ldg(p.problem.cu_seqlens_q + entry) * int64_t{p.packed_heads.value};
  return {entry, head, static_cast<int>(slot - start / kRows - entry) * kRows, split, index};
}

template <int kRows>
__device__ WorkTile work_tile(const FwdParams& p) {
  const int block = blockIdx.x;
  const int split = p.tiles.divide(block), index = p.tiles.remainder(block, split);
  const int outer = p.slots.divide(index);
  return tile_of_slot<kRows>(p, outer, p.slots.remainder(index, outer), split, index);
}

// The rows of a tile as tokens and heads.
struct TileRows {
  Divisor packed_heads;
  int row0;
  int count;  // of the tile's rows

  __device__ TileRows(const FwdParams& p, const Sequence& seq, const WorkTile& tile, int tile_rows)
      : packed_heads(p.packed_heads),
        row0(tile.row0),
        count(min(tile_rows, seq.q.length * static_cast<int>(p.packed_heads.value) - tile.row0)) {}

  __device__ int token(int row) const { return packed_heads.divide(row0 + row); }
  __device__ int head(int row) const { return packed_heads.remainder(row0 + row, token(row)); }
  __device__ Interval tokens() const { return {token(0), token(count - 1)}; }
};

// Tiles in the order of fwd_sm90.cuh: sections of heads whose keys and values fit the L2 cache together, in a section
// the longest first.
template <int kRows>
__device__ WorkTile ordered_tile(const FwdParams& p, int index) {
  const int section = p.section_tiles.divide(index), rest = p.section_tiles.remainder(index, section);
  const int slot = p.section_heads.divide(rest), head = p.section_heads.remainder(rest, slot);
  return tile_of_slot<kRows>(p, section * static_cast<int>(p.section_heads.value) + head, slot, 0, index);
}

// What a block works on: all that follows from its tile.
template <int kRows, int kKeys>
struct Work {
  WorkTile tile;
  Sequence seq;
  TileRows rows;
  Mask mask;
  Interval seen;  // the keys that some row sees
  Interval blocks;
  int all_blocks, blocks_per_split;

  __device__ explicit Work(const FwdParams& p) : Work(p, work_tile<kRows>(p)) {}
  __device__ Work(const FwdParams& p, const WorkTile& own_tile)
      : tile(own_tile),
        seq(p.problem, tile.entry, p.pages.block_table != nullptr),
        rows(p, seq, tile, kRows),
        mask(p.problem, seq),
        seen(mask.keys_seen_by_any(rows.tokens())),
        blocks(blocks_of<kKeys>(seen)),
        all_blocks(blocks.last - blocks.first + 1),
        blocks_per_split(all_blocks) {
    if (p.num_splits > 1) take_split(p);
  }

  // Not so for slots without rows and for splits without keys.
  __device__ bool exists() const { return rows.count > 0 && (tile.split == 0 || !blocks.empty()); }

  __device__ int num_splits() const {
    return all_blocks <= blocks_per_split ? 1 : (all_blocks + blocks_per_split - 1) / blocks_per_split;
  }

  // Those of which all rows see all keys.
  __device__ Interval whole_blocks() const {
    const Interval keys = mask.keys_seen_by_all(rows.tokens());
    return {(keys.first + kKeys - 1) / kKeys, (keys.last + 1) / kKeys - 1};
  }

 private:
  __device__ void take_split(const FwdParams& p) {
    blocks_per_split = max(p.least_blocks_per_split, (all_blocks + p.num_splits - 1) / p.num_splits);
    blocks.first += tile.split * blocks_per_split;
    blocks.last = min(blocks.first + blocks_per_split - 1, blocks.last);
  }
};

}  // namespace flash::flash_attn
