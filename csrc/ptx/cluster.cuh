// Thread blocks of a cluster, which can access each other's shared memory (sm_90).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#cluster-of-cooperative-thread-arrays
//
// What is called in loops does not order ordinary memory accesses at cluster scope: such a release would make a warp
// wait for everything that it has started to store or add anywhere, global memory included.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"

namespace flash::ptx {

// The rank of the block in its cluster.
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Waits until all threads of the cluster have arrived. What they wrote before is then visible.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A cluster barrier in two halves that does not order ordinary memory accesses (relaxed). That is enough before using
// mbarriers that fence_barrier_init has made visible.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address of the same place in the shared memory of block `rank` of the cluster.
__device__ inline uint32_t address_in(int rank, const void* pointer) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// Reads an int in the shared memory of block `rank`. That block must be running: the callers need a barrier of the
// cluster before the read, and another one before block `rank` ends.
__device__ inline int load_from(int rank, const int& place) {
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address_in(rank, &place)) : "memory");
  return value;
}

// Starts to store 16 bytes in another block's shared memory; they count at an mbarrier there. `address` and `barrier`
// come from address_in.
__device__ inline void store_async_in(uint32_t address, const uint32_t (&x)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
      : "memory");
}

__device__ inline void store_async_in(uint32_t address, float4 x, uint32_t barrier) {
  const uint32_t words[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
  store_async_in(address, words, barrier);
}

// The same for 8 bytes.
__device__ inline void store_async_in(uint32_t address, float2 x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}

// Arrives at the mbarrier of block `rank` that is at the same place as `barrier` in this block. It says that what this
// thread has read before may be overwritten.
__device__ inline void arrive_in(int rank, const SharedBarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, &barrier.state)) : "memory");
}

// Like SharedBarrier::wait, but what other blocks have stored is then visible (acquire at cluster scope).
__device__ inline void wait_for_stores(const SharedBarrier& barrier, uint32_t parity) {
  uint32_t ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(&barrier.state)), "r"(parity)
        : "memory");
  } while (ended == 0);
}

// Like copy_box_async, but multicast to the same place in every block of the cluster whose bit in `blocks` is set; the
// bytes count at the mbarrier of each, which is at the same place, too.
__device__ inline void copy_box_to_blocks(uint32_t shared, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                          SharedBarrier& barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(shared_address(&barrier)),
      "h"(blocks)
      : "memory");
}

}  // namespace flash::ptx
