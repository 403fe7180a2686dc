// How a forward is carried out: for each kernel a plan with all that it must know besides the problem. fwd/planner.h
// chooses the plan.
#pragma once

#include <variant>

#include "common/divmod.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

struct FwdSm80Kernel;  // fwd/kernels.h says what they can do
struct DecodeKernel;
struct FwdSm90Kernel;

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

// The order of the tiles of fwd_sm90 (swizzled_tile in fwd_sm90/scheduler.cuh).
struct TileSwizzle {
  Divisor heads;  // whose tiles are processed together: first the longest tile of each, then the next, and so on
  Divisor tiles;  // that these heads have
  Divisor entries_of_bias = Divisor(1);  // entries that share a bias: their tiles of a head follow one another
};

struct FwdSm90Plan {
  using Kernel = FwdSm90Kernel;
  Tiling tiling;
  bool wide = false;  // whether to use the larger tile for long sequences (has_wide_tile)
  TileSwizzle swizzle;
  int blocks = 0;        // of the grid: persistent thread blocks, or a cluster of them for each tile
  int* taken = nullptr;  // (1), how many tiles were taken besides the first of each block; found and left as 0
};

using FwdPlan = std::variant<FwdSm80Plan, DecodePlan, FwdSm90Plan>;

// The parameters of a kernel: the problem and the plan of this kernel.
template <typename Plan>
struct Planned : FwdParams {
  Plan plan;
};
using FwdSm80Params = Planned<FwdSm80Plan>;
using DecodeParams = Planned<DecodePlan>;
using FwdSm90Params = Planned<FwdSm90Plan>;

}  // namespace flash::flash_attn
