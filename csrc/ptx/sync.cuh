// Synchronisation between thread blocks through global memory, and between kernels.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

namespace flash::ptx {

// Adds 1 to a counter and returns its value before. A thread that arrives later sees what this thread has written, and
// what this thread has seen.
__device__ inline int arrive(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Orders accesses to global memory by this thread (the generic proxy) and by asynchronous copies (the async proxy),
// both ways. Copies that the thread starts later read what it has written or seen. After it has waited for copies, its
// own accesses see what they have written. From sm_90 on.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A semaphore is a counter in global memory. This waits until it has reached `value`. Then the thread sees what others
// had written before they released the semaphore.
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
