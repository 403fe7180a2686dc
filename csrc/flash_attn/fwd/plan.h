// How a forward is carried out: for each kernel a plan with all that it must know besides the problem. fwd/planner.h
// chooses the plan.
#pragma once

#include <variant>

#include "common/divmod.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

struct FwdSm80Kernel;  // fwd/kernels.h says what they can do
struct DecodeKernel;
struct CodedDecodeKernel;
struct FwdSm90Kernel;
struct ServingKernel;
struct InvariantKernel;
struct CodedServingKernel;

// How the query rows of all entries and heads are cut into tiles. A row is a pair of a token and one of `packed_heads`
// query heads that share a key head. Each group of packed heads has `slots` slots, each for at most one tile: in each
// entry of a dense batch, or in all packed entries together.
struct Tiling {
  Divisor group;         // query heads that share a key head: heads / heads_k
  Divisor packed_heads;  // 1 or `group`
  Divisor head_groups;   // heads / packed_heads
  Divisor slots;
  Divisor tiles;  // slots of all head groups and dense entries
};

// How the keys of a tile are divided among thread blocks. Each leaves its partial result in the scratch, and the last
// one to arrive merges them all. A tile that sees few keys has fewer splits than `count`; with one split, it needs no
// scratch.
struct KeySplits {
  int count = 1;             // the most splits of a tile
  int least_n_blocks = 1;    // the fewest n_blocks in a split
  int rows = 0;              // rows of a tile that have scratch
  float* out = nullptr;      // (tiles, count * rows, channels), O before normalization, in the kernel's own order
  float* softmax = nullptr;  // maxima and sums of these rows
  int* arrivals = nullptr;   // (tiles), how many splits are done; the kernel finds zeros and leaves zeros
};

// Keys in pieces of a fixed length: each begins at a multiple of n_blocks, counted from an entry's first key. A thread
// block that computes several pieces of a tile takes the last first, and folds each into the total of those before
// (Consumer::fold_total). What the pieces of a tile are, and so the bits of its results, then depends on no other tile.
struct FixedPieces {
  int n_blocks = 0;         // of a piece; 0: keys are not divided
  float* totals = nullptr;  // (blocks, rows of a tile, channels), in use where shared memory has no room for the total
};

struct FwdSm80Plan {
  using Kernel = FwdSm80Kernel;
  Tiling tiling;
  KeySplits splits;
};

struct DecodePlan {
  using Kernel = DecodeKernel;
  Tiling tiling;
  KeySplits splits;
  int warps;                             // of a thread block
  bool evict_keys;                       // whether keys and values are the first to be evicted from the L2 cache
  const AppendParams* append = nullptr;  // host pointer: what the kernel also appends to the cache; null if nothing
};

// The same over a cache of codes, which the kernel reads itself.
struct CodedDecodePlan : DecodePlan {
  using Kernel = CodedDecodeKernel;
};

// The order of the tiles of fwd_sm90 (swizzled_tile in fwd_sm90/scheduler.cuh).
struct TileSwizzle {
  Divisor heads;  // whose tiles are processed together: first the longest tile of each, then the next, and so on
  Divisor tiles;  // that these heads have
  Divisor entries_of_bias = Divisor(1);  // entries that share a bias: their tiles of a head follow one another
};

struct FwdSm90Plan {
  using Kernel = FwdSm90Kernel;
  Tiling tiling;
  bool wide = false;    // whether to use the larger tile for long sequences (has_wide_tile)
  bool paired = false;  // whether pairs of thread blocks share the keys of such tiles (has_paired_tile)
  TileSwizzle swizzle;
  FixedPieces pieces;    // only in an InvariantPlan
  int blocks = 0;        // of the grid: persistent thread blocks, or a cluster of them for each tile
  int* taken = nullptr;  // (1), how many tiles were taken besides the first of each block; found and left as 0
};

// The same for instances that compute what those for serving do, with the same bits (batch invariance in planner.h).
struct InvariantPlan : FwdSm90Plan {
  using Kernel = InvariantKernel;
};

// One thread block's results for a piece of a tile's keys, as merge_pieces finds them. A tile's pieces are counted from
// its first keys on.
struct PieceRecord {
  int entry, head, key_head, row0;  // the tile's, as in WorkTile
  int index, count;                 // of the piece, and of the pieces of the tile
  int first_slot;                   // of piece 0
  int second_slot, stride;          // of piece i > 0: second_slot + (i - 1) * stride
};

// The pieces of tiles leave their partial results in slots of the scratch; merge_pieces adds them up.
struct PieceSlots {
  int count = 0;
  int rows = 0;                    // of each, as many as tiles can have
  float* out = nullptr;            // (count, rows, channels of the instance), sums of exp(s) v
  float* softmax = nullptr;        // (count, rows, 2), maxima and sums of exponentials
  PieceRecord* records = nullptr;  // (count)
  int* used = nullptr;             // (count), 1 where there is a piece; found and left as zeros
};

// A plan of fwd_sm90 for inference: keys in pages, packed heads, and pieces of keys. Which piece of which tile comes
// next is read from the lengths, on the device (fwd_serving/work_list.cuh).
struct ServingPlan {
  using Kernel = ServingKernel;
  Tiling tiling;
  int warpgroups = 2;  // consumers, of 64 rows each
  bool even = false;   // each thread block takes an equal share of all n_blocks; else it takes pieces from a counter
  int num_splits = 0;  // pieces of a tile, if not `even`; 0: as many as occupy the GPU
  int blocks = 0;      // of the grid
  int box_rows = 0;    // of the boxes in which TMA copies K and V, a multiple of 8; 0: none, they are gathered
  FixedPieces pieces;  // if there are any, not `even`, and tiles are cut into these or not at all
  PieceSlots slots;
  int* taken = nullptr;  // (1), as in FwdSm90Plan
};

// The same over a cache of codes, which the kernel reads itself.
struct CodedServingPlan : ServingPlan {
  using Kernel = CodedServingKernel;
};

using FwdPlan =
    std::variant<FwdSm80Plan, DecodePlan, FwdSm90Plan, ServingPlan, InvariantPlan, CodedDecodePlan, CodedServingPlan>;

// The parameters of a kernel: the problem and the plan of this kernel.
template <typename Plan>
struct Planned : FwdParams {
  Plan plan;
};
using FwdSm80Params = Planned<FwdSm80Plan>;
using DecodeParams = Planned<DecodePlan>;
using FwdSm90Params = Planned<FwdSm90Plan>;
using ServingParams = Planned<ServingPlan>;

}  // namespace flash::flash_attn
