// Vectors of elements that begin at any element, in accesses that are aligned all the same: a vector lies in two of
// them, and neighbouring lanes have neighbouring vectors.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "tile/any_vec.cuh"

namespace flash {

// Bytes between the last address that is aligned for an access of kSize elements and this one.
template <int kSize>
__device__ int misalignment(const char* address, DType dtype) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & (kSize * size_of(dtype) - 1));
}

// The two accesses that hold a vector, the bytes of the first that come before it, and how many of its elements, and of
// those behind, there are.
template <int kSize>
struct RaggedVec {
  AnyVec<kSize> low, high;
  int skip;
  int elements;
};

// Reads nothing but accesses that hold an element that there is.
template <int kSize>
__device__ RaggedVec<kSize> load_ragged(const char* address, int elements, DType dtype) {
  RaggedVec<kSize> vec{.skip = misalignment<kSize>(address, dtype), .elements = elements};
  const int bytes = kSize * size_of(dtype);
  const char* low = address - vec.skip;
  if (elements > 0) vec.low = load_any<kSize>(low, 0, dtype);
  if (vec.skip > 0 && elements * size_of(dtype) + vec.skip > bytes) vec.high = load_any<kSize>(low + bytes, 0, dtype);
  return vec;
}

// The bytes from `skip` on of the two accesses.
template <int kSize>
__device__ AnyVec<kSize> shifted(const AnyVec<kSize>& low, const AnyVec<kSize>& high, int skip, DType dtype) {
  static_assert(kSize > 1);
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = low.words[i], words[i + 4] = high.words[i];
  if (kSize == 4 && dtype != DType::kFloat32) words[2] = high.words[0], words[3] = high.words[1];
  if (skip & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if (skip & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  if (skip & 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 16);
  }
  AnyVec<kSize> vec;
#pragma unroll
  for (int i = 0; i < 4; ++i) vec.words[i] = words[i];
  return vec;
}

// Widens to fp32, exactly; zeros for elements that there are not.
template <int kSize>
__device__ void widen(float (&wide)[kSize], const RaggedVec<kSize>& vec, DType dtype) {
  widen(wide, shifted(vec.low, vec.high, vec.skip, dtype), dtype);
#pragma unroll
  for (int i = 0; i < kSize; ++i) wide[i] = i < vec.elements ? wide[i] : 0.f;
}

// Rounds to the type, ties to even.
template <int kSize>
__device__ AnyVec<kSize> narrow_any(const float (&wide)[kSize], DType dtype) {
  AnyVec<kSize> vec;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (dtype == DType::kFloat32) {
      vec.words[i] = i < kSize ? __float_as_uint(wide[i]) : 0;
    } else if (2 * i < kSize) {
      vec.words[i] = dtype == DType::kBFloat16 ? ptx::pack<__nv_bfloat16>(wide[2 * i], wide[2 * i + 1])
                                               : ptx::pack<__half>(wide[2 * i], wide[2 * i + 1]);
    }
  }
  return vec;
}

template <int kSize>
__device__ void store_whole(char* address, const AnyVec<kSize>& vec, DType dtype) {
  if (kSize == 8 || dtype == DType::kFloat32) {
    *reinterpret_cast<uint4*>(address) = {vec.words[0], vec.words[1], vec.words[2], vec.words[3]};
  } else {
    *reinterpret_cast<uint2*>(address) = {vec.words[0], vec.words[1]};
  }
}

// Stores the vector of each lane of a warp at its address; all lanes call it, those without elements too. A lane has
// the access in which its vector begins, with what the lane before has in that; at the ends, where an access is not the
// warp's alone, elements are stored one by one.
template <int kSize>
__device__ void store_ragged(char* address, int elements, DType dtype, const float (&wide)[kSize]) {
  const int bytes = kSize * size_of(dtype), skip = misalignment<kSize>(address, dtype), lane = threadIdx.x % 32;
  const AnyVec<kSize> own = narrow_any(wide, dtype);
  AnyVec<kSize> access = own;
  if (skip > 0) {
    AnyVec<kSize> before;
#pragma unroll
    for (int i = 0; i < 4; ++i) before.words[i] = __shfl_up_sync(~0u, own.words[i], 1);
    access = shifted(before, own, bytes - skip, dtype);
  }
  const int room = kSize - skip / size_of(dtype);  // for elements of the vector in the lane's access
  const bool has_access = (lane > 0 || skip == 0) && elements >= room;
  const bool next_has = lane < 31 && elements - kSize >= room;
  if (has_access) store_whole(address - skip, access, dtype);
  if (has_access && (next_has || skip == 0)) return;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i >= elements || (i < room ? has_access : next_has)) continue;
    if (dtype == DType::kFloat32) {
      reinterpret_cast<uint32_t*>(address)[i] = own.words[i % 4];
    } else {
      reinterpret_cast<uint16_t*>(address)[i] = static_cast<uint16_t>(own.words[i / 2] >> 16 * (i % 2));
    }
  }
}

}  // namespace flash
