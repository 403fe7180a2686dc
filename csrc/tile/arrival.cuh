#pragma once

#include "ptx/sync.cuh"

namespace flash {

// Whether this block is the last of `count` to arrive at a counter; what the others wrote before is then visible. The
// last one sets the counter back to 0.
__device__ inline bool is_last_arrival(int* arrivals, int count) {
  __syncthreads();
  const bool last = __syncthreads_or(threadIdx.x == 0 && ptx::arrive(arrivals) == count - 1);
  if (last && threadIdx.x == 0) *arrivals = 0;
  return last;
}

}  // namespace flash
