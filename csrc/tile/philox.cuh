// The random number generator of dropout.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"

namespace flash {

// Philox-4x32 with kRounds rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 16 random
// bytes that are a function of key and counter alone.
template <int kRounds>
__device__ uint4 philox(uint64_t key, uint64_t counter_low, uint32_t counter2, uint32_t counter3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint4 c{static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32), counter2, counter3};
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t x = ptx::product(0xD2511F53, c.x), z = ptx::product(0xCD9E8D57, c.z);
    c = {static_cast<uint32_t>(z >> 32) ^ c.y ^ k0, static_cast<uint32_t>(z), static_cast<uint32_t>(x >> 32) ^ c.w ^ k1,
         static_cast<uint32_t>(x)};
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  return c;
}

}  // namespace flash
