// Synchronisation between blocks.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

namespace flash::ptx {

// Adds 1 and returns what was there before. What this thread saw or wrote before is visible to whoever reads the result
// of a later arrival.
__device__ inline int arrive(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Orders what this thread has seen or written in global memory before the asynchronous copies that it starts, and what
// copies have written, once it has waited for their end, before its later accesses. From sm_90 on.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A semaphore is a counter in global memory. This waits until it has reached `value`; what was written before each of
// the releases is then seen.
__device__ inline void wait_semaphore(const int* semaphore, int value) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(semaphore) : "memory");
  } while (now < value);
}

// Adds 1, after everything that this thread has seen or written.
__device__ inline void release_semaphore(int* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// Lets a kernel that was launched to start early come in as blocks of this one leave room. From sm_90 on.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel that was launched to start early: waits until the one before it in the stream is done, and all that it
// wrote can be seen.
__device__ inline void wait_for_dependency() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash::ptx
