#pragma once

#include <cuda_runtime_api.h>

#include "layer_norm/params.h"

namespace flash::layer_norm {

// How many blocks, at most, sum parts of the gradients of parameters on the current device.
int max_parts(int64_t rows);

// On the current device. The forward writes all it has addresses for.
void fwd(const FwdParams& p, cudaStream_t stream);
void bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace flash::layer_norm
