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

// What this thread has seen or written in global memory comes before the asynchronous copies that it starts.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Waits until a counter has a value, or a greater one. What was written before that was announced is then seen, also by
// the asynchronous copies that this thread starts.
__device__ inline void wait_for(const int* counter, int value) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < value);
  fence_async_global();
}

// Adds 1. Whoever has waited for the result sees what this thread, and copies whose end it has waited for, have
// written.
__device__ inline void announce(int* counter) {
  asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
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
