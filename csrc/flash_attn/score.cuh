// From products to scores, and the derivative:
//
//   s = softmax_scale <q, k>;   s <- softcap tanh(s / softcap);   s <- s - slope |i + D - j|
//
// Plain instances leave the scale to the exponential: they keep <q, k>, and exp(s) is exp2(score_scale_log2 <q, k>).
#pragma once

#include <cmath>
#include <numbers>

#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

constexpr float kLog2e = std::numbers::log2e_v<float>;
constexpr float kLn2 = std::numbers::ln2_v<float>;

// The factor by which exp2 multiplies the values that a kernel keeps as scores.
template <Features kFeatures>
__device__ float score_scale_log2(const Problem& p) {
  return kFeatures == Features::kPlain ? p.softmax_scale * kLog2e : kLog2e;
}

// tanh with an absolute error of about 1e-7. The relative error of tanh.approx, 5e-4, would be multiplied by softcap.
__device__ inline float tanh(float x) { return 1 - 2 * ptx::reciprocal(1 + ptx::exp2(2 * kLog2e * x)); }

// tanh with a relative error of about 3e-7. Near 0, where the formula above loses digits, it sums the first terms of
// the power series.
__device__ inline float precise_tanh(float x) {
  const float square = x * x;
  const float rest = square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835))));
  return fabsf(x) < 0.25f ? x + x * rest : copysignf(tanh(fabsf(x)), x);
}

// The largest softcap for which tanh is precise enough: it multiplies the absolute error. Usual ones are 15 to 50.
constexpr float kMostSoftcapOfTanh = 64;

// fn(element) for each of the lane's elements, in place.
template <int kRows, int kCols, typename Fn>
__device__ void replace_each(Fragment<kRows, kCols>& s, Fn&& fn) {
  s.for_each([&](float& x, int, int) { x = fn(x); });
}

// Turns products into scores, except for ALiBi.
template <int kRows, int kCols>
__device__ void scale_and_cap(Fragment<kRows, kCols>& s, const Problem& p) {
  const float inner = p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale;
  if (p.softcap > kMostSoftcapOfTanh) {  // nothing is shared with the path below, which would take registers for both
    replace_each(s, [&](float x) { return p.softcap * precise_tanh(x * inner); });
    return;
  }
  replace_each(s, [&](float x) { return x * inner; });
  if (p.softcap > 0) replace_each(s, [&](float x) { return p.softcap * tanh(x); });
}

// The derivative of the cap at a score, from the capped score.
__device__ inline float cap_slope(float capped, float softcap) {
  const float t = capped / softcap;
  return 1 - t * t;
}

// The slope of a query head; 0 without ALiBi.
__device__ inline float alibi_slope(const Problem& p, int entry, int head) {
  return p.alibi_slopes ? __ldg(p.alibi_slopes + entry * p.alibi_batch_stride + head) : 0.f;
}

// Subtracts ALiBi's distance from the scores. own_keys[r] is i + D, the key that the lane's r-th row is aligned with.
template <int kRows, int kCols>
__device__ void subtract_distance(Fragment<kRows, kCols>& s, const float (&slopes)[kRows / 8],
                                  const int (&own_keys)[kRows / 8], int col0) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
    const float distance = own_keys[r] - col0 - s.col(0);
#pragma unroll
    for (int c = 0; c < kCols / 4; ++c) s(r, c) -= slopes[r] * fabsf(distance - (c / 2 * 8 + c % 2));
  }
}

}  // namespace flash::flash_attn
