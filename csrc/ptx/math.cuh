// Approximate arithmetic of the special function unit, packing of 16-bit pairs, and wide products.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash::ptx {

// 2^x to 2 ulp; results below 2^-126 are 0, and exp2(-inf) is 0.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x); -inf for 0.
__device__ inline float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// min(x, 0); NaN stays NaN.
__device__ inline float at_most_zero(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// The 64-bit product in one instruction. For `uint64_t{a} * b`, the compiler also adds 0 to the upper half.
__device__ inline uint64_t product(uint32_t a, uint32_t b) {
  uint64_t c;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(c) : "r"(a), "r"(b));
  return c;
}

// Two fp32 values, rounded to T, as the low and the high half of a register.
template <typename T>
__device__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The two halves of a register, widened to fp32.
template <typename T>
__device__ float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(packed));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
  }
}

// Four codes in 8 bits (e4m3), from the low byte on, as four fp16 values, two in each register. The conversion is
// exact, and NaN stays NaN.
__device__ inline uint2 widen_e4m3(uint32_t codes) {
  uint2 wide;
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(wide.x), "=r"(wide.y)
      : "r"(codes));
#else
  // Shifted by 7 bits, a code is 2^-8 times its value; only a NaN is 480 then, as no other code is.
  const auto widen_pair = [](uint32_t spread) {
    const uint32_t small = (spread & 0x80008000u) | (spread >> 1 & 0x3F803F80u);
    const __half2 pair = __hmul2(reinterpret_cast<const __half2&>(small), __float2half2_rn(256));
    return reinterpret_cast<const uint32_t&>(pair) | __vcmpeq2(small & 0x7FFF7FFFu, 0x3F803F80u);
  };
  wide = {widen_pair(__byte_perm(codes, 0, 0x1404)), widen_pair(__byte_perm(codes, 0, 0x3424))};
#endif
  return wide;
}

__device__ inline uint32_t swap_middle_bytes(uint32_t x) { return __byte_perm(x, 0, 0x3120); }

// Rounds to the nearest code (e4m3), ties to even; what is larger than 448 becomes 448, and NaN stays NaN.
__device__ inline uint8_t narrow_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
  return static_cast<uint8_t>(pair);
#else
  const float size = fminf(fabsf(x), 448);
  const uint32_t bits = __float_as_uint(size), rounded = bits + 0x7FFFF + (bits >> 20 & 1);
  const uint32_t normal = (rounded >> 20) - ((127 - 7) << 3), small = __float2uint_rn(size * 512);
  const uint32_t code = x != x ? 0x7F : size < 0x1p-6f ? small : normal;
  return static_cast<uint8_t>(code | (__float_as_uint(x) >> 24 & 0x80));
#endif
}

// max(x, 0) of both halves; NaN stays NaN.
template <typename T>
__device__ uint32_t clamp_below(uint32_t packed) {
  uint32_t clamped;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(clamped) : "r"(packed), "r"(0));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(clamped) : "r"(packed), "r"(0));
  }
  return clamped;
}

// Expands 4 / kBytes bytes, from byte `first` on, to masks of kBytes each: all bits are those of the byte's high bit.
template <int kBytes>
__device__ uint32_t spread_signs(uint32_t bytes, int first) {
  static_assert(kBytes == 2 || kBytes == 4);
  const uint32_t selector = (kBytes == 2 ? 0x9988 : 0x8888) + 0x1111 * first;  // 8 + i: the sign of byte i, replicated
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(bytes), "r"(selector));
  return spread;
}

// The same where a byte is not 0.
template <int kBytes>
__device__ uint32_t spread_nonzero(uint32_t bytes, int first) {
  return spread_signs<kBytes>(bytes | ((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu), first);
}

}  // namespace flash::ptx
