#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace flash::ptx {

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float exp2(float x) { return flushed(std::exp2(flushed(x))); }
inline float log2(float x) { return std::log2(flushed(x)); }
inline float reciprocal(float x) { return flushed(1 / flushed(x)); }
inline uint64_t product(uint32_t a, uint32_t b) { return uint64_t{a} * b; }

template <typename T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}
template <typename T>
float widened(uint16_t x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(std::bit_cast<__half>(x));
  } else {
    return std::bit_cast<float>(uint32_t{x} << 16);
  }
}

template <typename T>
uint32_t pack(float low, float high) {
  return uint32_t{std::bit_cast<uint16_t>(rounded<T>(high))} << 16 | std::bit_cast<uint16_t>(rounded<T>(low));
}
template <typename T>
float2 unpack(uint32_t packed) {
  return {widened<T>(packed & 0xFFFF), widened<T>(packed >> 16)};
}
inline uint2 widen_e4m3(uint32_t codes) {
  const auto pair = [](uint32_t two) {
    const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(two), __NV_E4M3);
    return uint32_t{wide.y} << 16 | wide.x;
  };
  return {pair(codes & 0xFFFF), pair(codes >> 16)};
}
inline uint32_t swap_middle_bytes(uint32_t x) { return (x & 0xFF0000FF) | (x & 0xFF00) << 8 | (x >> 8 & 0xFF00); }
inline uint8_t narrow_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
inline float at_most_zero(float x) { return x > 0 ? 0 : x; }

template <typename T>
uint32_t clamp_below(uint32_t packed) {
  const float2 x = unpack<T>(packed);
  return pack<T>(x.x < 0 ? 0 : x.x, x.y < 0 ? 0 : x.y);
}

template <int kBytes>
uint32_t spread_signs(uint32_t bytes, int first) {
  uint32_t spread = 0;
  for (int i = 0; i < 4; ++i) {
    if (bytes >> 8 * (first + i / kBytes) & 0x80) spread |= 0xFFu << 8 * i;
  }
  return spread;
}

template <int kBytes>
uint32_t spread_nonzero(uint32_t bytes, int first) {
  uint32_t spread = 0;
  for (int i = 0; i < 4; ++i) {
    if (bytes >> 8 * (first + i / kBytes) & 0xFF) spread |= 0xFFu << 8 * i;
  }
  return spread;
}

}  // namespace flash::ptx
