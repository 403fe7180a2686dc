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

}  // namespace flash::ptx
