// The family's entry points, which bindings call.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_attn/bwd/planner.h"  // with these, callers make the plans
#include "flash_attn/dbias_sm80/planner.h"
#include "flash_attn/fwd/planner.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Whether a device runs the kernels for sm_90. The environment variable FLASH_ATTN_PORTABLE switches them off.
bool has_sm90(int device);

// Computes attention on the current device. `plan` comes from plan_fwd and has its scratch.
void fwd(const FwdParams& p, const FwdPlan& plan, cudaStream_t stream);

// Writes S_dmask of a forward with dropout.
void dmask(const DmaskParams& p, cudaStream_t stream);

// Puts new keys and values into a cache, and rotates them and the queries.
void append(const AppendParams& p, cudaStream_t stream);

// Converts keys and values that are codes.
void widen(const WidenParams& p, cudaStream_t stream);

// Writes key ranges that combine all restrictions of which keys a row sees.
void ranges(const RangesParams& p, cudaStream_t stream);

// Computes the gradients of attention on the current device. `plan` comes from plan_bwd and has its scratch.
void bwd(const BwdParams& p, const BwdPlan& plan, cudaStream_t stream);

// Computes the gradient of the sink from what the backward has written.
void sink_gradient(const SinkParams& p, cudaStream_t stream);

// Computes the gradient of the bias from what the backward has written. `plan` comes from plan_dbias and has its
// scratch.
void bias_gradient(const DbiasParams& p, const DbiasPlan& plan, cudaStream_t stream);

}  // namespace flash::flash_attn
