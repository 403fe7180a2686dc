// Kernels that are compiled one by one, from files that instances.py writes.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_attn/features.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

template <typename T, int kHeadDim, Features kFeatures>
void run_fwd(const FwdParams& p, cudaStream_t stream);

}  // namespace flash::flash_attn
