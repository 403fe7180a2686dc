#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

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

// How many bytes of shared memory a block can have on every GPU from compute capability 8.0 on. 8.6, 8.9 and 12.x have
// no more than these.
constexpr int kLeastSharedBytes = 99 * 1024;

// How many bytes of shared memory a block can have. The environment variable FLASH_ATTN_SHARED_BYTES lowers it, so that
// tests can run what GPUs with less memory run.
inline int max_shared_bytes(int device) {
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const char* most = std::getenv("FLASH_ATTN_SHARED_BYTES");
  return most == nullptr ? bytes : std::min(bytes, std::atoi(most));
}

}  // namespace flash
