#pragma once

#include <cuda_runtime_api.h>

#include "xentropy/params.h"

namespace flash::xentropy {

// On the current device: fwd computes the loss and log-sum-exp of each row, bwd the gradient of the logits, and fwd_bwd
// both. If the expected dlosses are given, bwd skips the rows whose dlosses equal them.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);
void fwd_bwd(const FwdBwdParams& p, cudaStream_t stream);

// Multiplies the gradient of each row that counts by its dloss divided by the expected one, unless these are equal.
void scale(const ScaleParams& p, cudaStream_t stream);

}  // namespace flash::xentropy
