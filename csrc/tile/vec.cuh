// Vectors of elements of a type that is known at compile time, moved in one access. any_vec.cuh: at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/math.cuh"

namespace flash {

// A vector of kSize adjacent elements that moves between global memory and registers in one aligned access.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vec {
  static_assert(sizeof(T) * kSize <= 16, "one access moves at most 16 bytes");
  static_assert((kSize & (kSize - 1)) == 0, "the size of an access is a power of two");
  T values[kSize];

  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};

// The type in which an access of kBytes is made: the compiler would move an array of small elements one by one.
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

// Widens to fp32. The conversion is exact.
template <int kSize, typename T>
__device__ void widen(float (&wide)[kSize], const Vec<T, kSize>& vec) {
  if constexpr (sizeof(T) == 2 && kSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 pair = ptx::unpack<T>(reinterpret_cast<const uint32_t&>(vec.values[i]));
      wide[i] = pair.x, wide[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) wide[i] = static_cast<float>(vec[i]);
  }
}

// Rounds to the nearest value of T, ties to even.
template <typename T, int kSize>
__device__ Vec<T, kSize> narrow(const float (&wide)[kSize]) {
  Vec<T, kSize> vec;
  if constexpr (sizeof(T) == 2 && kSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      reinterpret_cast<uint32_t&>(vec.values[i]) = ptx::pack<T>(wide[i], wide[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) vec[i] = static_cast<T>(wide[i]);
  }
  return vec;
}

// A Vec of at least 4 bytes, stored as words: 16-bit elements that are selected by a condition would be moved one by
// one by the compiler.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Packed {
  static constexpr int kPerWord = 4 / sizeof(T), kWords = kSize / kPerWord;
  uint32_t words[kWords];
};

template <int kSize, typename T>
__device__ Packed<T, kSize> load_packed(const T* address) {
  using Bits = Word<sizeof(T) * kSize>;
  Packed<T, kSize> packed;
  reinterpret_cast<Bits&>(packed) = *reinterpret_cast<const Bits*>(address);
  return packed;
}

// Returns a word in which all elements have this value.
template <typename T>
__device__ uint32_t repeated(float value) {
  if constexpr (sizeof(T) == 2) {
    return ptx::pack<T>(value, value);
  } else {
    return __float_as_uint(value);
  }
}

// Widens to fp32. The conversion is exact.
template <int kSize, typename T>
__device__ void widen(float (&wide)[kSize], const Packed<T, kSize>& packed) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float2 pair = ptx::unpack<T>(packed.words[i]);
      wide[2 * i] = pair.x, wide[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) wide[i] = __uint_as_float(packed.words[i]);
  }
}

}  // namespace flash
