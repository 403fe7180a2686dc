// The compile-time configuration of bwd_sm90_wide, and its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd_sm90/block.cuh"
#include "flash_attn/features.h"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/scores/partial_box.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_, int kHeadDimV_>
struct BwdWideConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kTakesRanges = takes_ranges(kFeatures), kCopiesSeen = kTakesRanges && kHeadDim < 256;
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kValueRounds = 1, kCluster = 2;
  static constexpr RowOrder kRowOrder = RowOrder::kLastFirst;
  static constexpr bool kTakesEntries = false, kShares = true;
  // The two thread blocks of a cluster have different keys and all channels or, where kParts is 2, the same keys and
  // half of the channels each.
  static constexpr int kParts = channel_slices(kHeadDim);
  static constexpr int kChannels = kHeadDim / kParts, kChannelsV = kHeadDimV / kParts;  // of a thread block
  static constexpr int kClusterKeys = kBlockN * kCluster / kParts;
  static constexpr int kThreads = kWarpgroup * 4;
  // Of a thread in the value and key teams, in the query team, and in the fourth warpgroup: 2 * 200 + 88 + 24 = 4 *
  // 128, the registers that 512 threads have.
  static constexpr int kSumRegisters = 200, kQueryRegisters = 88, kProducerRegisters = 24;
  static_assert(kParts == 1 || (kParts == kCluster && kChannelsV == kChannels));

  // The thread block's first channel.
  __device__ static int channel() { return kParts == 1 ? 0 : ptx::cluster_rank() * kChannels; }
};

// Where the thread blocks divide the channels: the other one's partial sums. dP^T comes in two halves, since there is
// no room for all of it.
template <typename Config>
struct BwdOtherParts {
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
  static constexpr bool kDividesKeys = Config::kParts == 1;
  using OtherKeys = SharedTile<T, Config::kBlockN, 128>;
  using OtherDs = uint4[Config::kBlockN / 16][kWarpgroup];

  SharedTile<T, Config::kBlockN, Config::kChannels> k;
  SharedTile<T, Config::kBlockN, Config::kChannelsV> v;
  // K of the cluster's other thread block, in the channels of dQ that this one sums.
  [[no_unique_address]] Where<OtherKeys, 0, kDividesKeys> other_k;
  SharedTile<T, Config::kBlockM, Config::kBlockN> scores;          // P^T, then dS
  [[no_unique_address]] Where<OtherDs, 1, kDividesKeys> other_ds;  // what QueryTeam::send has sent, by thread
  RowRing<Config, Config::kChannels> q;                            // with lse_log2 of BwdCommonPlan
  RowRing<Config, Config::kChannelsV> dout;                        // with softmax_d
  [[no_unique_address]] SeenRingOf<Config> seen;
  [[no_unique_address]] Where<BwdOtherParts<Config>, 2, !kDividesKeys> other_parts;
  ptx::SharedBarrier keys_here, other_keys_here;
  ptx::SharedBarrier other_ds_here, sent_ds_taken;
  int taken;                                         // in thread block 0 of the cluster: the index of its share
  alignas(16) char block[sizeof(KeyBlock<Config>)];  // the KeyBlock, for which there are no registers
  [[no_unique_address]] LseRingOf<Config> lse;
};

}  // namespace flash::flash_attn
