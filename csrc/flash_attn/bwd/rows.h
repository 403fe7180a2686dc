// The small kernels that run before and after the main kernel of the backward.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_attn/bwd/plan.h"

namespace flash::flash_attn {

// With key ranges: finds which keys each row and tile of rows sees, and which rows see each n_block, for a main
// kernel with tiles of these sizes (bwd/ranges.cu).
void run_bwd_ranges(const BwdCommonParams& p, int tile_rows, int tile_keys, cudaStream_t stream);

// Computes softmax_d, and initializes what the main kernel reads, adds to and counts in (bwd/prepare.cu).
void run_bwd_prepare(const BwdCommonParams& p, cudaStream_t stream);

// Rounds dQ, unless the main kernel has, and zeroes dK and dV of keys that no entry uses (bwd/finish.cu).
void run_bwd_finish(const BwdCommonParams& p, cudaStream_t stream);

// All that runs before a main kernel with tiles of these sizes.
inline void run_before_bwd(const BwdCommonParams& p, int tile_rows, int tile_keys, cudaStream_t stream) {
  if (p.problem.ranges.data != nullptr) run_bwd_ranges(p, tile_rows, tile_keys, stream);
  run_bwd_prepare(p, stream);
}

}  // namespace flash::flash_attn
