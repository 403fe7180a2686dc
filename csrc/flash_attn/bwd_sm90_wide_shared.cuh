// What the teams of a block of bwd_sm90_wide.cuh share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/features.h"
#include "flash_attn/fwd_tiles.h"
#include "flash_attn/partial_box.cuh"
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
  // The two blocks of a cluster have different keys and all channels, or, where kParts is 2, the same keys and half of
  // the channels each.
  static constexpr int kParts = channel_parts(kHeadDim);
  static constexpr int kChannels = kHeadDim / kParts, kChannelsV = kHeadDimV / kParts;  // of a block
  static constexpr int kClusterKeys = kBlockN * kCluster / kParts;
  static constexpr int kThreads = kWarpgroup * 4;
  static constexpr int kSumRegisters = 200, kQueryRegisters = 88, kProducerRegisters = 24;
  static_assert(kParts == 1 || (kParts == kCluster && kChannelsV == kChannels));

  __device__ static int channel() { return kParts == 1 ? 0 : ptx::cluster_rank() * kChannels; }  // the block's first
};

// The other block's products, where the blocks divide the channels. There is room for half of dP^T at a time.
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
  template <int>
  struct Nothing {};
  template <typename X, int kRank, bool kIsThere>
  using Where = std::conditional_t<kIsThere, X, Nothing<kRank>>;
  static constexpr bool kDividesKeys = Config::kParts == 1;
  using OtherKeys = SharedTile<T, Config::kBlockN, 128>;
  using OtherDs = uint4[Config::kBlockN / 16][kWarpgroup];

  SharedTile<T, Config::kBlockN, Config::kChannels> k;
  SharedTile<T, Config::kBlockN, Config::kChannelsV> v;
  // The keys of the cluster's other block, in those channels of dQ that this block sums.
  [[no_unique_address]] Where<OtherKeys, 0, kDividesKeys> other_k;
  SharedTile<T, Config::kBlockM, Config::kBlockN> scores;          // P^T, then dS
  [[no_unique_address]] Where<OtherDs, 1, kDividesKeys> other_ds;  // of each lane
  RowRing<Config, Config::kChannels> q;                            // with lse
  RowRing<Config, Config::kChannelsV> dout;                        // with softmax_d
  [[no_unique_address]] SeenRingOf<Config> seen;
  [[no_unique_address]] Where<BwdOtherParts<Config>, 2, !kDividesKeys> other_parts;
  ptx::SharedBarrier keys_here, other_keys_here;
  ptx::SharedBarrier other_ds_here, sent_ds_taken;
  int taken;                                         // in block 0 of the cluster: the index of its keys
  alignas(16) char block[sizeof(KeyBlock<Config>)];  // which does not fit the registers
};

}  // namespace flash::flash_attn
