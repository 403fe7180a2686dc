// Holds multiprocessors as a collective of another stream does: `blocks` blocks that spin for `nanoseconds`, each with
// so much shared memory that nothing else fits beside it.
#include <cuda_runtime.h>

__global__ __launch_bounds__(640) void hog_kernel(long long nanoseconds) {
  extern __shared__ int held[];
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    __nanosleep(500);
  } while (now - start < nanoseconds);
  if (now < 0) held[threadIdx.x] = 1;
}

extern "C" int hog(int blocks, int shared_bytes, long long nanoseconds, void* stream) {
  cudaFuncSetAttribute(hog_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  hog_kernel<<<blocks, 640, shared_bytes, static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  return cudaGetLastError();
}
