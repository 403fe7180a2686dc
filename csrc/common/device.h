#pragma once

#include <cuda_runtime_api.h>

#include "common/check.h"

namespace flash {

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

inline int num_multiprocessors(int device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); }

// Of shared memory, that a block can have.
inline int max_shared_bytes(int device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

}  // namespace flash
