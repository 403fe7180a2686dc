// Barriers: named barriers among some warps of a thread block, and mbarriers in shared memory, which also count the
// bytes of asynchronous copies (sm_90).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions
#pragma once

#include <cstdint>

#include "ptx/copy.cuh"

namespace flash::ptx {

// Waits until kThreads threads, in whole warps, have arrived at named barrier `id` (1 .. 15; 0 is __syncthreads). What
// they wrote before is then visible.
template <int kThreads>
__device__ void sync_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// sync_barrier for a number of threads that is known only at run time.
__device__ inline void sync_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting; kThreads counts those that wait and those that only arrive.
template <int kThreads>
__device__ void arrive_at_barrier(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// An mbarrier. A phase ends when `count` threads have arrived and all expected bytes have been copied; then the next
// phase begins. Phases are numbered from 0, and waits name the parity of that number.
struct SharedBarrier {
  uint64_t state;

  __device__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count) : "memory");
  }

  __device__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }

  // The phase does not end before this thread's copies by cp.async that have been started so far have finished: they
  // count as one more arrival. Some thread must arrive after this.
  __device__ void expect_copies() {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(&state)) : "memory");
  }

  // Arrives, and makes the phase expect so many more bytes.
  __device__ void arrive_expect_tx(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }

  // Whether the latest phase with this parity has ended, that is, whether the current one has the other parity. On a
  // new barrier, a phase with parity 1 counts as ended. The instruction itself waits for a limited time.
  __device__ bool has_ended(uint32_t parity) const {
    uint32_t ended;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(&state)), "r"(parity)
        : "memory");
    return ended != 0;
  }

  __device__ void wait(uint32_t parity) const {
    while (!has_ended(parity)) {
    }
  }
};

// Makes mbarriers that this thread has initialised visible to asynchronous copies and to the other blocks of the
// cluster. Other threads also need a barrier after it.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace flash::ptx
