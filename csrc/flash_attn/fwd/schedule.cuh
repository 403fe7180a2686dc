// Which m_block (tile of query rows), and which of its n_blocks (tiles of keys), a thread block of a forward kernel
// works on.
#pragma once

#include <type_traits>

#include "flash_attn/fwd/plan.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// Returns the entry of packed sequences that a slot belongs to: a 32-way search in which all lanes of a warp take part.
// The slots of entry b start at floor(start_b / tile_rows) + b, where start_b is its first row in the packed tensor. So
// each entry has the slots that its rows need or one more, and no prefix sum over tiles is needed.
__device__ inline int entry_of_slot(const Problem& p, int slot, int rows_per_token, int tile_rows) {
  int first = 0, count = p.batch + 1;  // the entry is among first .. first + count - 1
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

// A tile of query rows of an entry, and which split of its keys.
struct WorkTile {
  int entry;
  int head;      // the first query head that has rows in the tile
  int key_head;  // the key head that these query heads read
  int row0;
  int split;
  int index;  // of the tile among all tiles; the splits of a tile share it
};

// The tile that comes `nth` of those of the `outer`-th group of heads, counted over all entries of a dense batch. An
// entry's last rows come first: under a causal mask they see most keys, and what is short fills the gaps at the end.
template <int kRows>
__device__ WorkTile tile_of_slot(const Problem& p, const Tiling& tiling, int outer, int nth, int split, int index) {
  const int dense_entry = tiling.head_groups.divide(outer), packed_heads = tiling.packed_heads.value;
  const int head = tiling.head_groups.remainder(outer, dense_entry) * packed_heads;
  const int key_head = tiling.group.divide(head), slot = static_cast<int>(tiling.slots.value) - 1 - nth;
  if (p.cu_seqlens_q == nullptr) return {dense_entry, head, key_head, slot * kRows, split, index};
  const int entry = entry_of_slot(p, slot, packed_heads, kRows);
  const int64_t start = __ldg(p.cu_seqlens_q + entry) * int64_t{packed_heads};
  return {entry, head, key_head, static_cast<int>(slot - start / kRows - entry) * kRows, split, index};
}

// The tile and split of this thread block, in kernels with one thread block for each split.
template <int kRows>
__device__ WorkTile tile_of_block(const Problem& p, const Tiling& tiling) {
  const int block = blockIdx.x;
  const int split = tiling.tiles.divide(block), index = tiling.tiles.remainder(block, split);
  const int outer = tiling.slots.divide(index);
  return tile_of_slot<kRows>(p, tiling, outer, tiling.slots.remainder(index, outer), split, index);
}

// Maps rows of a tile to tokens and heads: packed heads are the fastest dimension.
struct TileRows {
  Divisor packed_heads;
  int row0;
  int count;  // how many of the tile's rows exist

  __device__ TileRows(const Tiling& tiling, const Span& q, const WorkTile& tile, int tile_rows)
      : packed_heads(tiling.packed_heads),
        row0(tile.row0),
        count(min(tile_rows, q.length * static_cast<int>(packed_heads.value) - tile.row0)) {}

  __device__ int token(int row) const { return packed_heads.divide(row0 + row); }
  __device__ int head(int row) const { return packed_heads.remainder(row0 + row, token(row)); }
  __device__ Interval tokens() const { return {token(0), token(count - 1)}; }
};

// The mask of a tile. With kRanged, all lanes of a warp must call it together.
template <bool kRanged>
__device__ auto mask_of(const Problem& p, const Sequence& seq, const WorkTile& tile, const TileRows& rows) {
  if constexpr (kRanged) {
    return RangedMask(p, seq, tile.head, rows.count > 0 ? rows.tokens() : Interval{0, -1});
  } else {
    return Mask(p, seq);
  }
}

// A tile with all that follows from it: where its rows and keys lie, the mask, and the n_blocks to visit.
template <int kRows, int kKeys, bool kRanged>
struct Work {
  WorkTile tile;
  Sequence seq;
  TileRows rows;
  std::conditional_t<kRanged, RangedMask, Mask> mask;
  Interval seen;      // from the first to the last key that some row sees
  Interval n_blocks;  // of the tile's split
  int n_blocks_of_tile, n_blocks_per_split;

  // A tile with all its keys.
  __device__ Work(const FwdParams& p, const Tiling& tiling, const WorkTile& own_tile)
      : tile(own_tile),
        seq(p.problem, tile.entry, p.pages.block_table != nullptr),
        rows(tiling, seq.q, tile, kRows),
        mask(mask_of<kRanged>(p.problem, seq, tile, rows)),
        seen(mask.keys_seen_by_any(rows.tokens())),
        n_blocks(blocks_of(seen, kKeys)),
        n_blocks_of_tile(n_blocks.last - n_blocks.first + 1),
        n_blocks_per_split(n_blocks_of_tile) {}

  // The split of a tile that this thread block computes.
  __device__ Work(const FwdParams& p, const Tiling& tiling, const KeySplits& splits)
      : Work(p, tiling, tile_of_block<kRows>(p.problem, tiling)) {
    if (splits.count > 1) take_split(splits);
  }

  // Whether there is something to do. A slot may have no rows, and a split no keys; split 0 always exists, to store the
  // results of rows that see no key.
  __device__ bool exists() const { return rows.count > 0 && (tile.split == 0 || !n_blocks.empty()); }

  // How many splits of the tile have keys; at least 1.
  __device__ int num_splits() const {
    if (n_blocks_of_tile <= n_blocks_per_split) return 1;
    return (n_blocks_of_tile + n_blocks_per_split - 1) / n_blocks_per_split;
  }

  // The n_blocks that need no mask: all rows see all their keys.
  __device__ Interval unmasked_n_blocks() const {
    const Interval keys = mask.keys_seen_by_all(rows.tokens());
    return {(keys.first + kKeys - 1) / kKeys, (keys.last + 1) / kKeys - 1};
  }

 private:
  __device__ void take_split(const KeySplits& splits) {
    n_blocks_per_split = max(splits.least_n_blocks, (n_blocks_of_tile + splits.count - 1) / splits.count);
    n_blocks.first += tile.split * n_blocks_per_split;
    n_blocks.last = min(n_blocks.first + n_blocks_per_split - 1, n_blocks.last);
  }
};

// The work of a kernel with the tile sizes of its Config.
template <typename Config>
using FwdWork = Work<Config::kRows, Config::kKeys, Config::kRanged>;

}  // namespace flash::flash_attn
