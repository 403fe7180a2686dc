// How a forward is carried out: a type for each kernel, with all that this kernel must know besides the problem.
// fwd_planner.h chooses.
#pragma once

#include <variant>

#include "common/divmod.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// How the query rows of all entries and heads are cut into tiles. A row is a token and one of `packed_heads` query
// heads that share a key head. Each group of packed heads has `slots` places for tiles: in each entry of a dense batch,
// or in all packed entries together.
struct Tiling {
  Divisor group;         // query heads that share a key head: heads / heads_k
  Divisor packed_heads;  // 1 or `group`
  Divisor head_groups;   // heads / packed_heads
  Divisor slots;
  Divisor tiles;  // slots of all head groups and dense entries
};

// How the keys of a tile are divided among blocks. Each block leaves its partial result in the scratch, and the last
// one merges all of them. A tile that sees few keys has fewer splits than `count`; with one split, it needs no scratch.
struct KeySplits {
  int count = 1;             // splits of a tile at most
  int least_blocks = 1;      // blocks of keys in a split
  int rows = 0;              // rows of a tile that have scratch
  float* out = nullptr;      // (tiles, count * rows, channels), unfinished sums in an order of the kernel's own
  float* softmax = nullptr;  // maxima and sums of these rows
  int* arrivals = nullptr;   // (tiles), how many splits are done; zeros before the launch and after it
};

struct FwdSm80Plan {
  static constexpr bool kPlainFindsPages = false;   // whether the instance without other features looks pages up
  static constexpr bool kPlainHasHeadDimV = false;  // and whether values there may have another head dim than keys
  static constexpr bool kHasRanged = false;         // whether there are instances of Features::kRanged
  static constexpr int kMostBiasedHeadDim = 0;      // the largest with instances of Features::kBiased, if there are any
  Tiling tiling;
  KeySplits splits;
};

struct DecodePlan {
  static constexpr bool kPlainFindsPages = true, kPlainHasHeadDimV = false, kHasRanged = false;
  static constexpr int kMostBiasedHeadDim = 0;
  Tiling tiling;
  KeySplits splits;
  int warps;                             // of a block
  bool evict_keys;                       // whether keys and values leave the L2 cache first
  const AppendParams* append = nullptr;  // on the host: what the kernel appends by itself; null if nothing
};

struct FwdSm90Plan {
  static constexpr bool kPlainFindsPages = false, kPlainHasHeadDimV = true, kHasRanged = true;
  static constexpr int kMostBiasedHeadDim = 256;
  Tiling tiling;
  bool wide = false;             // whether tiles are those for long sequences
  Divisor section_heads;         // heads that follow one another tile by tile
  Divisor section_tiles;         // tiles that they have
  Divisor sharing = Divisor(1);  // how many entries follow one another head by head, to share the tiles of a bias
  int blocks = 0;                // that share all tiles, or a cluster for each tile
  int* taken = nullptr;  // (1), how many tiles blocks have taken after their first; 0 before the launch and after it
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
