// Data movement: one function per instruction.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions
#pragma once

#include <cstdint>

namespace flash::ptx {

// The address within the shared memory window, which instructions on shared memory take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts to copy 16 bytes from global to shared memory, both aligned, bypassing registers and L1. If not `valid`,
// nothing is read and zeros are written.
__device__ inline void copy_async(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ inline void copy_word_async(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// The same for 8 bytes.
__device__ inline void copy_half_async(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid ? 8 : 0)
               : "memory");
}

// A policy of the L2 cache for lines that are read: if `first`, they are the first to be evicted; if not, their
// priority is left unchanged. (evict_normal is not the same as unchanged: with it, decoding is slower on an H200.)
__device__ inline uint64_t cache_policy(bool first) {
  uint64_t evict_first, unchanged;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(evict_first));
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0;" : "=l"(unchanged));
  return first ? evict_first : unchanged;
}

// copy_async with a policy of the L2 cache.
__device__ inline void copy_async(uint32_t shared, const void* global, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// Loads a word that no kernel writes meanwhile; if not `valid`, nothing is read, and the word is `other`. Unlike with
// __ldg, the compiler leaves the load where it stands, long before the word is needed.
__device__ inline int load_early(const int* global, bool valid, int other) {
  int word = other;
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p ld.global.nc.b32 %0, [%1];\n}"
      : "+r"(word)
      : "l"(global), "r"(static_cast<int>(valid)));
  return word;
}

// Prefetches the line of an address into the L2 cache.
__device__ inline void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// The same for `bytes` from an address on, both multiples of 16. Before sm_90 it does nothing.
__device__ inline void prefetch_bulk(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

// Ends a group: the copies that this thread has started since the group before.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the newest kPending have finished.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all copies of this thread have finished.
__device__ inline void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

__device__ inline void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lanes 8i .. 8i + 7 give the addresses of the rows of matrix i; in each
// lane, register i then holds its elements (lane / 4, 2 (lane % 4) + {0, 1}).
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four such matrices (sm_90).
__device__ inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Like load_matrices, each matrix transposed.
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four matrices, each transposed: register i holds elements (lane / 4, 2 (lane % 4) + {0, 1}) of matrix i, and
// lanes 8i .. 8i + 7 give the addresses of the rows of its transpose. For sm_90.
__device__ inline void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Transposes the 8x8 matrix of 16-bit elements of which each lane holds elements (lane / 4, 2 (lane % 4) + {0, 1}).
__device__ inline uint32_t transpose_matrix(uint32_t r) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
}

// Adds four floats to adjacent ones in global memory, aligned to 16 bytes, each atomically. From sm_90 on, that is one
// instruction.
__device__ inline void add_global(float* address, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  const float values[4] = {a, b, c, d};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address + i), "f"(values[i]) : "memory");
  }
#endif
}

}  // namespace flash::ptx
