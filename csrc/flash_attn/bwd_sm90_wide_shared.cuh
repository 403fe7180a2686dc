// What the teams of a block of bwd_sm90_wide.cuh share.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/features.h"
#include "ptx/barrier.cuh"
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
  static constexpr int kThreads = kWarpgroup * 4;
  static constexpr int kSumRegisters = 200, kQueryRegisters = 88, kProducerRegisters = 24;
};

template <typename Config>
struct BwdWideShared {
  using T = typename Config::T;
  SharedTile<T, Config::kBlockN, Config::kHeadDim> k;
  SharedTile<T, Config::kBlockN, Config::kHeadDimV> v;
  SharedTile<T, Config::kBlockN, 128> other_k;             // of the other block, with the channels of the half of dQ
  SharedTile<T, Config::kBlockM, Config::kBlockN> scores;  // P^T, then dS
  uint4 other_ds[Config::kBlockN / 16][kWarpgroup];        // of each lane
  RowRing<Config, Config::kHeadDim> q;                     // with lse
  RowRing<Config, Config::kHeadDimV> dout;                 // with softmax_d
  [[no_unique_address]] SeenRingOf<Config> seen;
  ptx::SharedBarrier keys_here, other_keys_here;
  ptx::SharedBarrier other_ds_here, sent_ds_taken;
  int taken;                                         // in block 0 of the cluster: the index of its keys
  alignas(16) char block[sizeof(KeyBlock<Config>)];  // which does not fit the registers
};

}  // namespace flash::flash_attn
