#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace flash {

// kSize adjacent elements that move between global memory and registers in one aligned access.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vec {
  static_assert(sizeof(T) * kSize <= 16, "one access moves at most 16 bytes");
  static_assert((kSize & (kSize - 1)) == 0, "the size of an access is a power of two");
  T values[kSize];

  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

// What an access of kBytes looks like to the compiler: it would move an array of small elements one by one.
template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;

template <int kSize, typename T>
__device__ Vec<T, kSize> load(const T* address) {
  using Bits = Word<sizeof(T) * kSize>;
  Vec<T, kSize> vec;
  reinterpret_cast<Bits&>(vec) = *reinterpret_cast<const Bits*>(address);
  return vec;
}

template <int kSize, typename T>
__device__ void store(T* address, const Vec<T, kSize>& vec) {
  using Bits = Word<sizeof(T) * kSize>;
  *reinterpret_cast<Bits*>(address) = reinterpret_cast<const Bits&>(vec);
}

// Widens to fp32, exactly.
template <int kSize, typename T>
__device__ void widen(float (&wide)[kSize], const Vec<T, kSize>& vec) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) wide[i] = static_cast<float>(vec[i]);
}

// Rounds to the nearest T, ties to even.
template <typename T, int kSize>
__device__ Vec<T, kSize> narrow(const float (&wide)[kSize]) {
  Vec<T, kSize> vec;
#pragma unroll
  for (int i = 0; i < kSize; ++i) vec[i] = static_cast<T>(wide[i]);
  return vec;
}

}  // namespace flash
