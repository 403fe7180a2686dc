#pragma once

#include <cuda_runtime_api.h>

#include "xentropy/params.h"

namespace flash::xentropy {

// Compute, on the current device, the loss and log-sum-exp of each row, and the gradient of the logits.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace flash::xentropy
