#pragma once

#include <cuda_runtime_api.h>

#include "xentropy/params.h"

namespace flash::xentropy {

// Losses and log-sum-exp of each row, and the gradient of the logits, on the current device.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace flash::xentropy
