// Vectors of elements of a type that is known only at run time. They are moved as bits, and widened to fp32 in
// registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.h"
#include "ptx/math.cuh"

namespace flash {

// A vector of kSize adjacent elements, aligned to its size: 8 elements of a 16-bit type, or 4 or 1 elements of any
// type. The branches on the type are uniform, and no branch stands between two loads.
template <int kSize>
struct alignas(kSize == 1 ? 4 : 16) AnyVec {
  static_assert(kSize == 8 || kSize == 4 || kSize == 1);
  static constexpr int kWords = kSize == 1 ? 1 : 4;
  uint32_t words[kWords];
};

__device__ inline int64_t byte_offset(int64_t index, DType dtype) {
  return index << (dtype == DType::kFloat32 ? 2 : 1);
}

__device__ inline const char* element_address(const void* data, int64_t index, DType dtype) {
  return static_cast<const char*>(data) + byte_offset(index, dtype);
}

// Loads elements index .. index + kSize - 1 of data.
template <int kSize>
__device__ AnyVec<kSize> load_any(const void* data, int64_t index, DType dtype) {
  AnyVec<kSize> vec;
  const char* address = element_address(data, index, dtype);
  if constexpr (kSize == 8) {
    reinterpret_cast<uint4&>(vec) = *reinterpret_cast<const uint4*>(address);
  } else if constexpr (kSize == 4) {
    if (dtype == DType::kFloat32) {
      reinterpret_cast<uint4&>(vec) = *reinterpret_cast<const uint4*>(address);
    } else {
      reinterpret_cast<uint2&>(vec) = *reinterpret_cast<const uint2*>(address);
    }
  } else if (dtype == DType::kFloat32) {
    vec.words[0] = *reinterpret_cast<const uint32_t*>(address);
  } else {
    vec.words[0] = *reinterpret_cast<const uint16_t*>(address);
  }
  return vec;
}

// Rounds each value to the nearest one that T can hold, ties to even. Pairs are converted together: a conversion of one
// value to a 16-bit type has an eighth of a pair's throughput.
template <typename T, int kSize>
__device__ void round_to(float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    const float2 pair = ptx::unpack<T>(ptx::pack<T>(values[i], i + 1 < kSize ? values[i + 1] : 0.f));
    values[i] = pair.x;
    if (i + 1 < kSize) values[i + 1] = pair.y;
  }
}

template <int kSize>
__device__ void round_to(DType dtype, float (&values)[kSize]) {
  if (dtype == DType::kFloat16) {
    round_to<__half>(values);
  } else if (dtype == DType::kBFloat16) {
    round_to<__nv_bfloat16>(values);
  }
}

template <typename T, int kSize>
__device__ void widen_halves(float (&wide)[kSize], const AnyVec<kSize>& vec) {
  if constexpr (kSize == 1) {
    wide[0] = ptx::unpack<T>(vec.words[0]).x;
  } else {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float2 pair = ptx::unpack<T>(vec.words[i]);
      wide[2 * i] = pair.x, wide[2 * i + 1] = pair.y;
    }
  }
}

// Widens to fp32. The conversion is exact.
template <int kSize>
__device__ void widen(float (&wide)[kSize], const AnyVec<kSize>& vec, DType dtype) {
  if (dtype == DType::kBFloat16) {
    widen_halves<__nv_bfloat16>(wide, vec);
  } else if (kSize == 8 || dtype == DType::kFloat16) {
    widen_halves<__half>(wide, vec);
  } else {
#pragma unroll
    for (int i = 0; i < kSize && i < AnyVec<kSize>::kWords; ++i) wide[i] = __uint_as_float(vec.words[i]);
  }
}

template <typename T, int kSize>
__device__ void store_halves(char* address, const float (&wide)[kSize]) {
  if constexpr (kSize == 8) {
    *reinterpret_cast<uint4*>(address) = {ptx::pack<T>(wide[0], wide[1]), ptx::pack<T>(wide[2], wide[3]),
                                          ptx::pack<T>(wide[4], wide[5]), ptx::pack<T>(wide[6], wide[7])};
  } else if constexpr (kSize == 4) {
    *reinterpret_cast<uint2*>(address) = {ptx::pack<T>(wide[0], wide[1]), ptx::pack<T>(wide[2], wide[3])};
  } else {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(ptx::pack<T>(wide[0], 0.f));
  }
}

// Stores the values, rounded to the type, ties to even.
template <int kSize>
__device__ void store_any(void* data, int64_t index, DType dtype, const float (&wide)[kSize]) {
  char* address = static_cast<char*>(data) + byte_offset(index, dtype);
  if (dtype == DType::kBFloat16) {
    store_halves<__nv_bfloat16>(address, wide);
  } else if (kSize == 8 || dtype == DType::kFloat16) {
    store_halves<__half>(address, wide);
  } else if constexpr (kSize == 4) {
    *reinterpret_cast<float4*>(address) = {wide[0], wide[1], wide[2], wide[3]};
  } else if constexpr (kSize == 1) {
    *reinterpret_cast<float*>(address) = wide[0];
  }
}

}  // namespace flash
