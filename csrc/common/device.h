#pragma once

#include <cuda_runtime_api.h>

#include "common/check.h"

namespace flash {

inline int num_multiprocessors(int device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

}  // namespace flash
