#pragma once

#include <cuda_runtime_api.h>

#include "fused_softmax/params.h"

namespace flash::fused_softmax {

// Compute, on the current device, the softmax of each row and the gradient of its scores.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace flash::fused_softmax
