#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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
struct Word;
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <int kSize, typename T>
__device__ Vec<T, kSize> load(const T* address) {
  using Bits = typename Word<sizeof(T) * kSize>::type;
  Vec<T, kSize> vec;
  reinterpret_cast<Bits&>(vec) = *reinterpret_cast<const Bits*>(address);
  return vec;
}

template <int kSize, typename T>
__device__ void store(T* address, const Vec<T, kSize>& vec) {
  using Bits = typename Word<sizeof(T) * kSize>::type;
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
