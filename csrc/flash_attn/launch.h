#pragma once

#include <cuda_runtime_api.h>

#include "flash_attn/bwd_planner.h"  // what a caller plans a backward with
#include "flash_attn/fwd_planner.h"  // and a forward
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Whether a device runs the kernels for sm_90. The environment variable FLASH_ATTN_PORTABLE switches them off.
bool has_sm90(int device);

// Attention, on the current device. `plan` is plan_fwd's, and has its scratch.
void fwd(const FwdParams& p, const FwdPlan& plan, cudaStream_t stream);

// Writes S_dmask of a forward with dropout.
void dmask(const DmaskParams& p, cudaStream_t stream);

// Puts new keys and values into a cache, and rotates them and the queries.
void append(const AppendParams& p, cudaStream_t stream);

// The gradients of attention, on the current device. `plan` is plan_bwd's, and has its scratch.
void bwd(const BwdParams& p, const BwdPlan& plan, cudaStream_t stream);

}  // namespace flash::flash_attn
