// Barriers: named ones among some of a block's warps, and those in shared memory that also count bytes (sm_90).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions
#pragma once

#include <cstdint>

#include "ptx/copy.cuh"

namespace flash::ptx {

// Waits until kThreads threads, whole warps, have come to barrier `id` (1 .. 15). What they wrote before is then seen.
template <int kThreads>
__device__ void sync_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Arrives at the barrier without waiting.
template <int kThreads>
__device__ void arrive_at_barrier(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// A barrier in shared memory. A phase ends when `count` threads have arrived and all expected bytes have been copied;
// phases are numbered from 0.
struct SharedBarrier {
  uint64_t state;

  __device__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count) : "memory");
  }

  __device__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }

  // Arrives, and lets the phase wait for so many more bytes.
  __device__ void arrive_expect_tx(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }

  // Whether the newest phase with this parity has ended; a new barrier counts as having ended one with parity 1. The
  // instruction waits a while itself.
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

// Lets the asynchronous copies see barriers that this thread has initialised.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The same for a number of threads that is known at run time.
__device__ inline void sync_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash::ptx
