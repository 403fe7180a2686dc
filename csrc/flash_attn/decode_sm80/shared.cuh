// The configuration of the decode kernel, which warp has what, and its shared memory.
#pragma once

#include <type_traits>

#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/partial_scores.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

struct AppendingDecodeParams : DecodeParams {
  AppendParams append;
};

// What a call does besides: append to the cache, or read it as codes in 8 bits.
enum class DecodeKind { kOrdinary, kAppending, kCoded };

template <typename T_, int kHeadDim_, Features kFeatures_, bool kPaged_, DecodeKind kKind = DecodeKind::kOrdinary>
struct DecodeConfig {
  using T = T_;
  using Params = std::conditional_t<kKind == DecodeKind::kAppending, AppendingDecodeParams, DecodeParams>;
  static constexpr bool kAppends = kKind == DecodeKind::kAppending, kCoded = kKind == DecodeKind::kCoded;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = has_plain_scores(kFeatures), kRanged = takes_ranges(kFeatures);
  static constexpr bool kPaged = kPaged_;
  static constexpr int kRows = kDecodeRows, kKeys = kDecodeKeys, kWarpRows = kRows;
  static constexpr int kThreads = 32;  // that load a tile together: a warp
  static constexpr int kTeamWarps = channel_slices(kHeadDim);
  static constexpr int kChannels = kHeadDim / kTeamWarps, kChannelsV = kChannels;  // of a warp
  // How many thread blocks a multiprocessor shall have room for. Over codes, half as many bytes of a thread block are
  // in flight. So up to 128 channels there are two: one copies while the other begins or merges. Their registers
  // suffice if Q is in shared memory.
  static constexpr int kBlocks = kCoded && kHeadDim <= 128 ? 2 : 1;
  static constexpr bool kSharesQueries = kBlocks == 2;
  // Keys and values are moved in units of 16 bits: an element, or two codes. As many bytes are in flight in both cases.
  static constexpr int kUnit = kCoded ? 2 : 1, kStages = decode_stages(kChannels) * kUnit / kBlocks;
};

// A warp in its team. The warps of a team have the same keys, and each has channels of its own. Up to 256 channels, a
// team is one warp.
template <typename Config>
struct TeamMember {
  int team = warp_id() / Config::kTeamWarps, num_teams = blockDim.x / (32 * Config::kTeamWarps);
  int channel = warp_id() % Config::kTeamWarps * Config::kChannels;  // the warp's first
};

// An n_block in shared memory.
template <typename Config>
struct DecodeStage {
  SharedTile<typename Config::T, Config::kKeys, Config::kChannels / Config::kUnit> k, v;
};

// The same with partial scores for the team's other warp. That warp reads them before it comes to the team's next
// barrier, and so before this warp uses the stage again.
template <typename Config>
struct TeamDecodeStage : DecodeStage<Config> {
  PartialScores<Config::kRows, Config::kKeys> partial;
};

template <typename Config>
using RingStage = std::conditional_t<Config::kTeamWarps == 1, DecodeStage<Config>, TeamDecodeStage<Config>>;

struct RowState {
  float max, sum;
};

// What each warp has in dynamic shared memory: its stages and, in the end, its O. The padding puts rows of O an odd
// multiple of 8 banks apart, so that the four rows that a half-warp stores with 8-byte accesses do not conflict; with
// codes 16 banks, for the two rows that a quarter stores with 16-byte accesses.
template <typename Config>
union DecodeRing {
  static constexpr int kRowStride = Config::kChannels + 8 * Config::kUnit;
  RingStage<Config> stages[Config::kStages];
  struct {
    float out[Config::kRows][kRowStride];  // relative to the maxima in states
    RowState states[Config::kRows];
  } result;

  __device__ DecodeRing() {}
};

}  // namespace flash::flash_attn
