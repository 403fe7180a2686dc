// The named barriers (ids 1 .. 15) of the backward kernels for sm_90: who waits at each (bar.sync), and who only
// arrives (bar.arrive, "releases").
#pragma once

#include "ptx/barrier.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Barriers of bwd_sm90. `+ rank`: there is one for each consumer warpgroup, 0 or 1.
enum BwdBarrier {
  kStepBarrier = 1,     // cooperative: both consumers wait until both have stored dS; ping-pong: the second consumer
                        // waits until the first has started the last products of its step
  kDqFullBarrier = 2,   // + rank: the dQ warp waits for a full box, which the warpgroup releases
  kDqEmptyBarrier = 4,  // + rank: the warpgroup waits for an empty box, which the dQ warp releases
  kOwnBarrier = 6,      // + rank: a consumer warpgroup synchronizes with itself; also in bwd_sm90_wide
};
constexpr int kDqThreads = kWarpgroup + 32;  // threads that meet at kDqFullBarrier and kDqEmptyBarrier

// Barriers of bwd_sm90_wide, which also uses kOwnBarrier.
enum BwdWideBarrier {
  kDqAcquiredBarrier = 1,  // the query team meets the warp that waits at dQ semaphores: it may add its dQ
  kDqAddedBarrier = 2,     // the query team meets the warp that releases dQ semaphores: it has added its dQ
  kQueryBarrier = 3,       // the query team synchronizes with itself
  kEmptyBarrier = 8,       // the value team waits for `scores` to be empty: the query team releases it after reading dS
  kWeightsBarrier = 9,     // the key team waits for P^T in `scores`, which the value team releases
  kGradientsBarrier = 10,  // the query team waits for dS in `scores`, which the key team releases
};
constexpr int kSemaphoreThreads = kWarpgroup + 32;  // threads that meet at kDqAcquiredBarrier and kDqAddedBarrier

// Hand-overs between two teams, of 128 threads each, of the wide kernel.
__device__ inline void release(BwdWideBarrier barrier) { ptx::arrive_at_barrier<2 * kWarpgroup>(barrier); }
__device__ inline void await(BwdWideBarrier barrier) { ptx::sync_barrier<2 * kWarpgroup>(barrier); }

}  // namespace flash::flash_attn
