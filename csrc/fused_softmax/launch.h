#pragma once

#include <cuda_runtime_api.h>

#include "fused_softmax/params.h"

namespace flash::fused_softmax {

// Softmax of each row, and the gradient of its scores, on the current device.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace flash::fused_softmax
