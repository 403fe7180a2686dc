// The compile-time configuration of bwd_sm90_wide, and its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/features.h"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/scores/partial_box.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_, int kHeadDimV_, KeyGradients kKeyGradients_>
struct BwdWideConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kValueRounds = 1, kCluster = 2;
  static constexpr int kThreads = kWarpgroup * 4;

  static constexpr Meeting kMeeting = Meeting::kSplitting;
  static constexpr MBlockOrder kMBlockOrder = MBlockOrder::kLastFirst;
  static constexpr KeyGradients kKeyGradients = kKeyGradients_;
  static constexpr Swizzle kSwizzle = Swizzle::kHeads;
  static constexpr RangeSource kRanges = !takes_ranges(kFeatures) ? RangeSource::kNone
                                         : kHeadDim < 256         ? RangeSource::kSharedMemory
                                                                  : RangeSource::kGlobalMemory;
  static constexpr ClusterSplit kClusterSplit =
      channel_slices(kHeadDim) == 1 ? ClusterSplit::kKeys : ClusterSplit::kChannels;
  static constexpr int kDivisor = kClusterSplit == ClusterSplit::kChannels ? kCluster : 1;  // of the channels
  static constexpr int kChannels = kHeadDim / kDivisor, kChannelsV = kHeadDimV / kDivisor;  // of a thread block
  static constexpr int kClusterKeys = kBlockN * kCluster / kDivisor;
  // Of a thread in the value and key teams, in the query team, and in the fourth warpgroup: 2 * 200 + 88 + 24 = 4 *
  // 128, the registers that 512 threads have.
  static constexpr int kSumRegisters = 200, kQueryRegisters = 88, kProducerRegisters = 24;
  static_assert(kClusterSplit == ClusterSplit::kKeys || kChannelsV == kChannels);

  // The thread block's first channel.
  __device__ static int channel() { return kClusterSplit == ClusterSplit::kKeys ? 0 : ptx::cluster_rank() * kChannels; }
};

// With ClusterSplit::kChannels: the other thread block's partial sums. dP^T comes in two halves, since there is no room
// for all of it.
template <typename Config>
struct BwdPartialBoxes {
  PartialBox<16, Config::kBlockM> s;
  PartialBox<16, Config::kBlockM / 2> dp;

  __device__ void init() {
    s.init();
    dp.init();
  }
};

template <typename Config>
struct BwdWideShared {
  using T = typename Config::T;
  // An empty type. Its number makes each use a different type, as [[no_unique_address]] needs to give them no room.
  template <int>
  struct Nothing {};
  template <typename X, int kRank, bool kIsThere>
  using Where = std::conditional_t<kIsThere, X, Nothing<kRank>>;
  static constexpr bool kSplitsKeys = Config::kClusterSplit == ClusterSplit::kKeys;
  using OtherKeys = SharedTile<T, Config::kBlockN, 128>;
  using OtherDs = uint4[Config::kBlockN / 16][kWarpgroup];

  SharedTile<T, Config::kBlockN, Config::kChannels> k;
  SharedTile<T, Config::kBlockN, Config::kChannelsV> v;
  // K of the cluster's other thread block, in the channels of dQ that this one sums.
  [[no_unique_address]] Where<OtherKeys, 0, kSplitsKeys> other_k;
  SharedTile<T, Config::kBlockM, Config::kBlockN> scores;         // P^T, then dS
  [[no_unique_address]] Where<OtherDs, 1, kSplitsKeys> other_ds;  // what QueryTeam::send has sent, by thread
  RowRing<Config, Config::kChannels> q;                           // with lse_log2 of BwdCommonPlan
  RowRing<Config, Config::kChannelsV> dout;                       // with softmax_d
  [[no_unique_address]] SeenRingOf<Config> seen;
  [[no_unique_address]] Where<BwdPartialBoxes<Config>, 2, !kSplitsKeys> partial;
  ptx::SharedBarrier keys_here, other_keys_here;
  ptx::SharedBarrier other_ds_here, sent_ds_taken;
  int taken;                                          // in thread block 0 of the cluster: the index of its work tile
  alignas(16) char work[sizeof(NBlockWork<Config>)];  // the NBlockWork, for which there are no registers
  [[no_unique_address]] LseRingOf<Config> lse;
};

}  // namespace flash::flash_attn
