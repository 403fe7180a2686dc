// The policies of the backward kernels for sm_90: in what their instances differ besides type, head dims and features.
// BwdSm90Config and BwdWideConfig choose them; the code asks for them by name. (MBlockOrder stands in bwd/plan.h, since
// a plan chooses it; WarpgroupSchedule in bwd/tiles.h, since a tile has it; Swizzle in bwd/tile_scheduler.cuh.)
#pragma once

namespace flash::flash_attn {

// How thread blocks meet: at rows of dQ, to which several add, and at n_blocks, of which several may take a split.
enum class Meeting {
  kFree,       // they do not: each adds to dQ when it has something to add, and has its n_blocks for itself
  kWaiting,    // a plan may have them wait for one another, at dQ semaphores
  kSplitting,  // a plan may have them wait, and may split n_blocks among them
};

// The type of dk and dv: that of the problem, fp32, or whichever the call says.
enum class KeyGradients { kRounded, kFloat, kEither };

// Who waits at the dQ semaphores of bwd_sm90.
enum class SemaphoreWaiter {
  kNobody,   // thread blocks do not wait for one another
  kDqWarps,  // each dQ warp for itself; faster with 128 rows
  kOwnWarp,  // a warp of its own for both dQ warps, ahead of them
};

// Which half of dQ of an m_block a warpgroup of bwd_sm90 computes.
enum class DqHalf { kRows, kChannels };

// Where warps read which keys each row of an m_block sees, if there are key ranges.
enum class RangeSource {
  kNone,          // the instance takes no key ranges
  kSharedMemory,  // copied with Q; only for m_blocks that need a mask
  kGlobalMemory,  // where shared memory has no room
};

// What the two thread blocks of a cluster of bwd_sm90_wide divide.
enum class ClusterSplit {
  kKeys,      // each has half of the keys, with all of their channels
  kChannels,  // both have the same keys, and half of the channels each
};

// Registers of a thread of the consumers and of the other warps, which setmaxnreg moves from these to those.
struct RegisterCounts {
  int consumer, producer;
};

}  // namespace flash::flash_attn
