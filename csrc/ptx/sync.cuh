// Synchronisation between thread blocks through global memory, and between kernels.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

namespace flash::ptx {

// Adds 1 to a counter and returns its value before. What this thread saw or wrote before is visible to every thread
// that arrives later.
__device__ inline int arrive(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Orders accesses to global memory between this thread and asynchronous copies (the generic and the async proxy), both
// ways: what it has seen or written comes before copies that it starts later, and what copies have written, once it has
// waited for them, before its later accesses. From sm_90 on.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A semaphore is a counter in global memory. This waits until it has reached `value`; what was written before these
// releases is then visible.
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

// Programmatic dependent launch: once all blocks of this kernel have called it or exited, the next kernel in the stream
// may start its blocks where there is room, if it was launched with LaunchShape::early. Does nothing before sm_90.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel that was launched to start early: waits until the kernel before it in the stream has ended, and all that
// it wrote is visible. Does nothing before sm_90.
__device__ inline void wait_for_dependency() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash::ptx
