// Bringing rows into the L2 cache before they are asked for.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
#pragma once

#include <cstdint>

namespace flash::ptx {

// `bytes` from an address on, both multiples of 16. Nothing before sm_90.
__device__ inline void prefetch_bulk(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

}  // namespace flash::ptx
