// The compile-time configuration of bwd_sm90, and its shared memory.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/features.h"
#include "ptx/barrier.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_, Meeting kMeeting_ = Meeting::kSplitting,
          MBlockOrder kMBlockOrder_ = MBlockOrder::kLastFirst, KeyGradients kKeyGradients_ = KeyGradients::kEither>
struct BwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr BwdSm90Tile kTile = bwd_sm90_tile(kHeadDim, kFeatures);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys;
  static constexpr int kStages = 2, kCluster = 1, kClusterKeys = kBlockN;
  static constexpr bool kDropped = kFeatures == Features::kDropped;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1 + kDropped);

  static constexpr Meeting kMeeting = kMeeting_;
  static constexpr MBlockOrder kMBlockOrder = kMBlockOrder_;
  static constexpr KeyGradients kKeyGradients = kKeyGradients_;
  static constexpr WarpgroupSchedule kSchedule = kTile.schedule;
  static constexpr bool kIsPingpong = kSchedule == WarpgroupSchedule::kPingpong;
  static constexpr Swizzle kSwizzle = kMeeting == Meeting::kFree ? Swizzle::kHeads : Swizzle::kHeadsAndEntries;
  static constexpr SemaphoreWaiter kSemaphoreWaiter = kMeeting == Meeting::kFree ? SemaphoreWaiter::kNobody
                                                      : kIsPingpong              ? SemaphoreWaiter::kDqWarps
                                                                                 : SemaphoreWaiter::kOwnWarp;
  static constexpr DqHalf kDqHalf = kBlockM == 128 ? DqHalf::kRows : DqHalf::kChannels;
  static constexpr RangeSource kRanges = takes_ranges(kFeatures) ? RangeSource::kSharedMemory : RangeSource::kNone;
  static constexpr int kValueRounds = kIsPingpong ? 2 : 1;  // see RowRing: ping-pong steps have no barrier in time
  // The kernel starts with 168 registers a thread, with drawers 128.
  static constexpr bool kNeedsMost = kIsPingpong || (kHeadDim > 96 && kFeatures == Features::kAll);
  static constexpr int kDrawerRegisters = kDropped ? 24 : 0;
  static constexpr RegisterCounts kRegisters =
      kNeedsMost ? RegisterCounts{kDropped ? 232 : 240, 24} : RegisterCounts{kDropped ? 224 : 232, 40};

  static_assert(kMeeting == Meeting::kFree || kMBlockOrder == MBlockOrder::kLastFirst,
                "thread blocks that wait for one another visit the rows that they have in common in the same order");
  static_assert(kConsumers * kRegisters.consumer + kRegisters.producer + kDrawerRegisters <= (kDropped ? 512 : 504));
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
  kStore,         // stores it to dq_accum: this is the first n_block
  kRound,         // copies it, rounded, to dQ: this is the only n_block
  kRoundWithSum,  // the same, but the warpgroup first adds the dq_accum in the box: all other n_blocks have added
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
  [[no_unique_address]] DroppedRingOf<Config> dropped;
  [[no_unique_address]] BiasTilesOf<Config> bias;
  DqBox<T> dq[Config::kConsumers];
  DqFate dq_fate[Config::kConsumers];
  ptx::SharedBarrier accum_here[Config::kConsumers];
  ptx::SharedBarrier keys_here, keys_free;
  Ring<2> ds_ring, semaphore_ring, work_ring;  // semaphore_ring carries no data: it only says that a wait is over
  int work_index[2];                           // data of work_ring: indices of work tiles, or -1 after the last
  [[no_unique_address]] LseRingOf<Config> lse;

  __device__ void init() {
    constexpr int kConsumerWarps = Config::kConsumers * kWarpgroup / 32;
    q.barriers.init(Config::kConsumers, 1 + (Config::kDropped ? kDrawers : 0));
    dout.barriers.init(Config::kConsumers);
    ds_ring.init(Config::kConsumers, kConsumerWarps);
    semaphore_ring.init(Config::kConsumers);
    for (ptx::SharedBarrier& here : accum_here) here.init(1);
    keys_here.init(2);
    keys_free.init(Config::kConsumers);
    // All warps that call for_each_work_tile: consumers, dQ warps, one that waits at semaphores for these, and drawers.
    constexpr bool kHasWaiter = Config::kSemaphoreWaiter == SemaphoreWaiter::kOwnWarp;
    work_ring.init(kConsumerWarps + Config::kConsumers + kHasWaiter + (Config::kDropped ? kDrawers : 0));
    ptx::fence_barrier_init();
  }
};

// Calls fn(work) for each work tile that the loader has taken.
template <typename Config, typename Fn>
__device__ void for_each_work_tile(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, Fn&& fn) {
  RingCursor<2> at;
  while (true) {
    shared.work_ring.wait_full(at);
    const int index = warp_uniform(shared.work_index[at.stage]);
    if (lane_id() == 0) shared.work_ring.release(at);
    at.advance();
    if (index < 0) return;
    fn(NBlockWork<Config>(p, index));
  }
}

}  // namespace flash::flash_attn
