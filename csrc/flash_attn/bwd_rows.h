// The small kernels of the backward before and after the main one.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_attn/bwd_plan.h"

namespace flash::flash_attn {

// Finds what rows and keys see of one another, for tiles of these sizes; needed with key ranges.
void run_bwd_ranges(const BwdCommonParams& p, int tile_rows, int tile_keys, cudaStream_t stream);

// Computes softmax_d, and starts what the main kernel adds to.
void run_bwd_prepare(const BwdCommonParams& p, cudaStream_t stream);

// Rounds dQ, unless the main kernel has, and clears dK and dV of keys that no entry uses.
void run_bwd_finish(const BwdCommonParams& p, cudaStream_t stream);

// All that comes before a main kernel with tiles of these sizes.
inline void run_before_bwd(const BwdCommonParams& p, int tile_rows, int tile_keys, cudaStream_t stream) {
  if (p.problem.ranges.data != nullptr) run_bwd_ranges(p, tile_rows, tile_keys, stream);
  run_bwd_prepare(p, stream);
}

}  // namespace flash::flash_attn
