#pragma once

#include <cuda_runtime_api.h>

#include "rotary/params.h"

namespace flash::rotary {

// Rotates p.x into p.out on the current device.
void apply(const Params& p, cudaStream_t stream);

}  // namespace flash::rotary
