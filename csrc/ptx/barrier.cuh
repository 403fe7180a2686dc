// Barriers among some of a block's warps.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
#pragma once

namespace flash::ptx {

// Waits until kThreads threads, whole warps, have come to barrier `id` (1 .. 15). What they wrote before is then seen.
template <int kThreads>
__device__ void sync_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace flash::ptx
