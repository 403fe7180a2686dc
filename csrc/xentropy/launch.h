#pragma once

#include <cuda_runtime_api.h>

#include "xentropy/params.h"

namespace flash::xentropy {

// Compute, on the current device, the loss and log-sum-exp of each row, the gradient of the logits, and both. If the
// expected dlosses are given, bwd leaves alone the rows whose dlosses are just these.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);
void fwd_bwd(const FwdBwdParams& p, cudaStream_t stream);

// Multiplies each row that counts by its dloss over the expected one, unless these are the same.
void scale(const ScaleParams& p, cudaStream_t stream);

}  // namespace flash::xentropy
