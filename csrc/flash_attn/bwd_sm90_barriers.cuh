// The named barriers of the backward kernels for sm_90: who waits at each, and who releases it without waiting.
#pragma once

#include "ptx/barrier.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Barriers of bwd_sm90.cuh. `+ rank`: there is one for each consumer warpgroup, 0 or 1.
enum BwdBarrier {
  kStepBarrier = 1,  // both warpgroups wait until both have stored dS; staggered: the second waits, the first releases
  kDqFullBarrier = 2,   // + rank: the dQ warp waits for its half of dQ, which the warpgroup releases
  kDqEmptyBarrier = 4,  // + rank: the warpgroup waits for its box, which the dQ warp releases
  kOwnBarrier = 6,      // + rank: a consumer warpgroup waits for its own threads; also in bwd_sm90_wide.cuh
};
constexpr int kDqThreads = kWarpgroup + 32;  // threads that meet at kDqFullBarrier and kDqEmptyBarrier

// Barriers of bwd_sm90_wide.cuh, which also uses kOwnBarrier.
enum BwdWideBarrier {
  kTurnHereBarrier = 1,    // the query team waits for the warp that waits at semaphores: its turn has come
  kTurnDoneBarrier = 2,    // the query team and the warp that releases semaphores wait for one another
  kQueryBarrier = 3,       // the query team waits for its own threads
  kEmptyBarrier = 8,       // the value team waits to write `scores`, which the query team has read and releases
  kWeightsBarrier = 9,     // the key team waits for P^T there, which the value team releases
  kGradientsBarrier = 10,  // the query team waits for dS there, which the key team releases
};
constexpr int kTurnThreads = kWarpgroup + 32;  // threads that meet at kTurnHereBarrier and kTurnDoneBarrier

// Between two teams of the wide kernel.
__device__ inline void release(BwdWideBarrier barrier) { ptx::arrive_at_barrier<2 * kWarpgroup>(barrier); }
__device__ inline void await(BwdWideBarrier barrier) { ptx::sync_barrier<2 * kWarpgroup>(barrier); }

}  // namespace flash::flash_attn
