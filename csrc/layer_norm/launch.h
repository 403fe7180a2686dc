#pragma once

#include <cuda_runtime_api.h>

#include "layer_norm/params.h"

namespace flash::layer_norm {

// Returns the most parts of the gradients of parameters that the backward makes on the current device.
int max_parts(int64_t rows, int cols);

// Run forward and backward on the current device. The forward writes every output that has an address.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace flash::layer_norm
