// Rotation of pairs of channels, for rotary embedding.
#pragma once

namespace flash {

// Rotates the point (x, y) by the angle with the given cosine and sine. Which product is rounded and which is fused
// into the sum (FMA) is written out: the compiler would choose differently in different kernels, whose results would
// then differ in the last bit.
__device__ inline void rotate(float& x, float& y, float cos, float sin) {
  const float turned = fmaf(x, cos, -__fmul_rn(y, sin));
  y = fmaf(x, sin, __fmul_rn(y, cos));
  x = turned;
}

// The pairs are (x[i], y[i]).
template <int kSize>
__device__ void rotate_halves(float (&x)[kSize], float (&y)[kSize], const float (&cos)[kSize],
                              const float (&sin)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) rotate(x[i], y[i], cos[i], sin[i]);
}

// The pairs are (x[2i], x[2i + 1]); their angles begin at cos[first], sin[first].
template <int kSize>
__device__ void rotate_interleaved(float (&x)[kSize], const float (&cos)[kSize], const float (&sin)[kSize], int first) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) rotate(x[2 * i], x[2 * i + 1], cos[first + i], sin[first + i]);
}

}  // namespace flash
