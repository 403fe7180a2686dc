// The configuration of bwd_sm90.cuh, and the shared memory of its blocks.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_dq_accum.cuh"
#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/bwd_tiles.h"
#include "flash_attn/features.h"
#include "ptx/barrier.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_, RowOrder kRowOrder_ = RowOrder::kLastFirst>
struct BwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr RowOrder kRowOrder = kRowOrder_;
  static constexpr bool kMayWait = kRowOrder == RowOrder::kLastFirst;  // whether blocks may wait for one another
  static constexpr bool kTakesRanges = takes_ranges(kFeatures), kCopiesSeen = kTakesRanges;
  static constexpr BwdSm90Tile kTile = bwd_sm90_tile(kHeadDim, kFeatures);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys;
  static constexpr int kStages = 2, kCluster = 1, kClusterKeys = kBlockN;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr bool kHalvesAreRows = kBlockM == 128;  // whether a half of dQ has half of its rows, or channels
  static constexpr bool kStaggered = kTile.staggered;
  static constexpr int kValueRounds = kStaggered ? 2 : 1;  // only staggered steps have no barrier for all warps
  // Whether a box of dQ is handed over a step later. Where blocks wait for one another, that costs 3 to 5 % of time
  // with 128 channels; plain staggered steps lose nothing.
  static constexpr bool kHandsOverLate = !kMayWait || (kStaggered && kFeatures == Features::kPlain);
  static constexpr bool kAwaitsTurns = kMayWait && !kStaggered;  // by a warp of its own; with 128 rows that is slower
  static constexpr bool kManyRegisters = kStaggered || (kHeadDim > 96 && kFeatures == Features::kAll);
  static constexpr int kConsumerRegisters = kManyRegisters ? 240 : 232, kProducerRegisters = kManyRegisters ? 24 : 40;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);
  static_assert(kBlockN == 64 * kConsumers && (kBlockM == 64 || kHeadDim == 64));
};

// Boxes in which a half of dQ leaves the kernel, and the channels of a group in dq_accum.
constexpr int kDqGroup = DqAccum<128>::kGroup, kDqBoxRows = 64, kDqBoxCols = 64;

// A box of dQ in shared memory: fp32 in the order of copies with 64-byte swizzle, one group of channels after the
// other, which neither warps that store fragments nor lanes that read 16 channels of eight rows access with bank
// conflicts; or rounded.
template <typename T>
union alignas(1024) DqBox {
  float values[kDqBoxRows * kDqBoxCols];
  SharedTile<T, kDqBoxRows, kDqBoxCols> rounded;

  // Four floats of a row and group.
  __device__ float* quad(int group, int row, int index) {
    return values + (group * kDqBoxRows + row) * kDqGroup + 4 * (index ^ row / 2 % 4);
  }
};

// The way in which a half of dQ leaves its box.
enum class DqFate : int {
  kAdd,           // is added to dq_accum
  kStore,         // is stored there: no block has added before
  kRound,         // is rounded to dQ: no other block adds
  kRoundWithSum,  // is added to the box, which holds dq_accum, and rounded to dQ: all other blocks have added
};

template <typename Config>
struct BwdSm90Shared {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  using Keys = SharedTile<T, kBlockN, kHeadDim>;

  Keys k, v;  // the product for a half of dQ with fewer than 64 channels reads v, too; copies leave out these columns
  SharedTile<T, kBlockM, kBlockN> ds[2];
  RowRing<Config, kHeadDim> q, dout;  // with lse and softmax_d
  [[no_unique_address]] SeenRingOf<Config> seen;
  [[no_unique_address]] BiasTilesOf<Config> bias;
  DqBox<T> dq[Config::kConsumers];
  DqFate dq_fate[Config::kConsumers];
  ptx::SharedBarrier accum_here[Config::kConsumers];
  ptx::SharedBarrier keys_here, keys_free;
  Ring<2> ds_ring, turn_ring, index_ring;  // turn_ring has no contents: it only says that turns have come
  int index[2];                            // the indices of blocks of keys, or -1 after the last

  __device__ void init() {
    constexpr int kConsumerWarps = Config::kConsumers * kWarpgroup / 32;
    q.barriers.init(Config::kConsumers);
    dout.barriers.init(Config::kConsumers);
    ds_ring.init(Config::kConsumers, kConsumerWarps);
    turn_ring.init(Config::kConsumers);
    for (ptx::SharedBarrier& here : accum_here) here.init(1);
    keys_here.init(2);
    keys_free.init(Config::kConsumers);
    index_ring.init(kConsumerWarps + Config::kConsumers + Config::kAwaitsTurns);  // all warps but the loader's
    ptx::fence_barrier_init();
  }
};

// fn(block) for each of the blocks of keys that the loader has taken.
template <typename Config, typename Fn>
__device__ void for_each_key_block(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, Fn&& fn) {
  RingCursor<2> at;
  while (true) {
    shared.index_ring.wait_full(at);
    const int index = warp_uniform(shared.index[at.stage]);
    if (lane_id() == 0) shared.index_ring.release(at);
    at.advance();
    if (index < 0) return;
    fn(KeyBlock<Config>(p, index));
  }
}

}  // namespace flash::flash_attn
