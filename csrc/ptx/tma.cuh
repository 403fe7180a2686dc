// TMA: copies of boxes of tensors between global and shared memory, which one thread starts (sm_90); fences for them;
// and setmaxnreg, which moves registers between warpgroups of different roles.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-tensor-copy
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"

namespace flash::ptx {

// True in one of the warp's lanes, which all call it. The compiler knows that it is one: it does not surround a copy
// that this lane starts by a loop over all lanes that might.
__device__ inline bool elect() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// Prefetches a tensor map into the descriptor cache.
__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Starts the copy of the box at the given coordinates, fastest dimension first. Elements outside of the tensor become
// 0. All bytes of the box count at the mbarrier as they arrive, also those outside. The map must be a kernel parameter.
__device__ inline void copy_box_async(uint32_t shared, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                      SharedBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(shared_address(&barrier))
      : "memory");
}

// Starts the copy of a box to the tensor; elements outside of it are not written.
__device__ inline void store_box_async(const CUtensorMap& map, uint32_t shared, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(shared)
               : "memory");
}

// Starts the copy of contiguous bytes, a multiple of 16 and aligned to 16, which count at the mbarrier.
__device__ inline void copy_bytes_async(uint32_t shared, const void* global, int bytes, SharedBarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Starts to add a box of floats in shared memory to the tensor, each atomically; those outside of it are left out.
// commit_stores and the waits below count it as a store.
__device__ inline void add_box_async(const CUtensorMap& map, uint32_t shared, int x0, int x1, int x2, int x3) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(shared)
               : "memory");
}

// Ends a group: the stores that this thread has started since the group before.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the shared memory that this thread's groups copy from has been read, and may be overwritten.
__device__ inline void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until everything that this thread's groups store has been written to global memory.
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Lets wgmma and TMA, which read shared memory through the async proxy, see what ordinary instructions have written
// there. It goes between the writes and the products or copies that read them. If one thread writes and another starts
// the copy, there is also a barrier between the two, before or after the fence.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Lower or raise how many registers each thread of this warpgroup has, to a multiple of 8. All of its warps must call
// it.
template <int kRegisters>
__device__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash::ptx
