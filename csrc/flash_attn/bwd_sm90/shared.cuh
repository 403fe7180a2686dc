// The compile-time configuration of bwd_sm90, and its shared memory.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/bwd_sm90/block.cuh"
#include "flash_attn/features.h"
#include "ptx/barrier.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_, RowOrder kRowOrder_ = RowOrder::kLastFirst,
          bool kShares_ = kFeatures_ != Features::kPlain>
struct BwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr RowOrder kRowOrder = kRowOrder_;
  static constexpr bool kShares = kShares_;                            // whether thread blocks may share a key block
  static constexpr bool kMayWait = kRowOrder == RowOrder::kLastFirst;  // whether thread blocks may wait for one another
  static constexpr bool kTakesEntries = kMayWait;                      // as key_work has it
  static constexpr bool kTakesRanges = takes_ranges(kFeatures), kCopiesSeen = kTakesRanges;
  static constexpr BwdSm90Tile kTile = bwd_sm90_tile(kHeadDim, kFeatures);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys;
  static constexpr int kStages = 2, kCluster = 1, kClusterKeys = kBlockN;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr bool kHalvesAreRows = kBlockM == 128;  // whether a half of dQ has half of its rows, or channels
  static constexpr bool kStaggered = kTile.staggered;
  static constexpr int kValueRounds = kStaggered ? 2 : 1;        // see RowRing: staggered steps have no barrier in time
  static constexpr bool kAwaitsTurns = kMayWait && !kStaggered;  // in a warp of its own; with 128 rows that is slower
  // The kernel starts with 168 registers a thread, and setmaxnreg moves what the producer does not need to the
  // consumers.
  static constexpr bool kManyRegisters = kStaggered || (kHeadDim > 96 && kFeatures == Features::kAll);
  static constexpr int kConsumerRegisters = kManyRegisters ? 240 : 232, kProducerRegisters = kManyRegisters ? 24 : 40;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);
  static_assert(kBlockN == 64 * kConsumers && (kBlockM == 64 || kHeadDim == 64));
};

// A half of dQ leaves the kernel in boxes of 64 rows x 64 channels; kDqGroup is the size of a group of channels
// (DqAccum).
constexpr int kDqGroup = DqAccum<128>::kGroup, kDqBoxRows = 64, kDqBoxCols = 64;

// A box of dQ in shared memory, either rounded or fp32. fp32 is in the order of a TMA copy with 64-byte swizzle: one
// group of 16 channels, for all rows, after another. Neither warps that store fragments nor lanes that read a group of
// eight rows then have bank conflicts.
template <typename T>
union alignas(1024) DqBox {
  float values[kDqBoxRows * kDqBoxCols];
  SharedTile<T, kDqBoxRows, kDqBoxCols> rounded;

  // Four floats of a row and group. The XOR is the 64-byte swizzle of TMA.
  __device__ float* quad(int group, int row, int index) {
    return values + (group * kDqBoxRows + row) * kDqGroup + 4 * (index ^ row / 2 % 4);
  }
};

// What the dQ warp does with a box.
enum class DqFate : int {
  kAdd,           // adds it to dq_accum
  kStore,         // stores it to dq_accum: this is the first key block
  kRound,         // copies it, rounded, to dQ: this is the only key block
  kRoundWithSum,  // the same, but the warpgroup first adds the dq_accum in the box: all other key blocks have added
};

template <typename Config>
struct BwdSm90Shared {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  using Keys = SharedTile<T, kBlockN, kHeadDim>;

  // Where the second half of dQ has fewer than 64 channels (head dims 64 and 96), its product of 64 columns reads past
  // k into v. TMA leaves these columns out, since they lie outside of dQ.
  Keys k, v;
  SharedTile<T, kBlockM, kBlockN> ds[2];
  RowRing<Config, kHeadDim> q, dout;  // with lse_log2 and softmax_d of BwdCommonPlan
  [[no_unique_address]] SeenRingOf<Config> seen;
  [[no_unique_address]] BiasTilesOf<Config> bias;
  DqBox<T> dq[Config::kConsumers];
  DqFate dq_fate[Config::kConsumers];
  ptx::SharedBarrier accum_here[Config::kConsumers];
  ptx::SharedBarrier keys_here, keys_free;
  Ring<2> ds_ring, turn_ring, index_ring;  // turn_ring carries no data: it only says that a turn has come
  int index[2];                            // data of index_ring: indices of shares of key blocks, or -1 after the last
  [[no_unique_address]] LseRingOf<Config> lse;

  __device__ void init() {
    constexpr int kConsumerWarps = Config::kConsumers * kWarpgroup / 32;
    q.barriers.init(Config::kConsumers);
    dout.barriers.init(Config::kConsumers);
    ds_ring.init(Config::kConsumers, kConsumerWarps);
    turn_ring.init(Config::kConsumers);
    for (ptx::SharedBarrier& here : accum_here) here.init(1);
    keys_here.init(2);
    keys_free.init(Config::kConsumers);
    // All warps that call for_each_key_block: consumers, dQ warps, and the one that awaits turns.
    index_ring.init(kConsumerWarps + Config::kConsumers + Config::kAwaitsTurns);
    ptx::fence_barrier_init();
  }
};

// Calls fn(block) for each of the key blocks, or shares of them, that the loader has taken.
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
