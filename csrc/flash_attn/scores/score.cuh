// From products to scores, and the derivative:
//
//   s = softmax_scale <q, k>;   s <- softcap tanh(s / softcap);   s <- s - slope |i + D - j|;   s <- s + bias(i, j)
//
// (D: mask.cuh.) What a kernel keeps in place of s depends on the instance: plain ones <q, k>, and leave the scale to
// the exponential, all others s itself. exp(s) is exp2(score_scale_log2 * what is kept). All but plain ones subtract
// before they multiply: differences of scores are exact even where a bias of -1e9, or the lowest finite number, has
// absorbed all digits of a row's products. All its keys then weigh the same, as they should, in the forward and the
// backward.
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

// The factor c for which exp(s) = exp2(c * what a kernel keeps as score).
template <Features kFeatures>
__host__ __device__ float score_scale_log2(float softmax_scale) {
  return kHasPlainScores<kFeatures> ? softmax_scale * kLog2e : kLog2e;
}
template <Features kFeatures>
__host__ __device__ float score_scale_log2(const Problem& p) {
  return score_scale_log2<kFeatures>(p.softmax_scale);
}

// The largest softcap for which cap(), whose absolute error grows with it, is accurate enough. Models use 15 to 50.
constexpr float kMostSoftcapOfCap = 64;

// most * tanh(factor * x), with an absolute error of a few 1e-7 * most. The instruction tanh.approx has a relative
// error of 5e-4, which is too much.
__device__ inline float cap(float x, float factor, float most) {
  return most - 2 * most * ptx::reciprocal(1 + ptx::exp2(2 * kLog2e * factor * x));
}

// The same with a relative error of about 1e-6. Near 0, where the formula above cancels, this sums the first terms of
// the Taylor series.
__device__ inline float precise_cap(float x, float factor, float most) {
  const float t = factor * x, square = t * t;
  const float rest = square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835))));
  return fabsf(t) < 0.3f ? most * (t + t * rest) : cap(x, factor, most);
}

// Replaces each of the lane's elements by fn(element), two at a time, in a loop that indexes a copy in local memory.
// That is slow but takes little code and few registers: for what is rarely needed.
template <int kRows, int kCols, typename Fn>
__device__ void replace_in_loop(Fragment<kRows, kCols>& s, Fn&& fn) {
  alignas(16) Fragment<kRows, kCols> copy = s;
#pragma unroll 1
  for (int i = 0; i < s.kSlabs * s.kTiles; ++i) {
#pragma unroll 2
    for (float& x : copy.values[i / s.kTiles][i % s.kTiles]) x = fn(x);
  }
  s = copy;
}

// Turns products into scores, except for ALiBi and the bias.
template <int kRows, int kCols>
__device__ void scale_and_cap(Fragment<kRows, kCols>& s, const Problem& p, float scale) {
  const float factor = scale / p.softcap, most = p.softcap;
  if (p.softcap == 0) return s.for_each([&](float& x, int, int) { x *= scale; });
  if (p.softcap > kMostSoftcapOfCap) return replace_in_loop(s, [&](float x) { return precise_cap(x, factor, most); });
  s.for_each([&](float& x, int, int) { x = cap(x, factor, most); });
}
template <int kRows, int kCols>
__device__ void scale_and_cap(Fragment<kRows, kCols>& s, const Problem& p) {
  scale_and_cap(s, p, p.softmax_scale);
}

// The derivative of the cap, 1 - tanh^2, from the capped score. The compiler hoists the division, which is the same for
// all scores.
__device__ inline float cap_slope(float capped, float softcap) {
  const float t = capped * (1 / softcap);
  return 1 - t * t;
}

// The slope of a query head; 0 without ALiBi.
__device__ inline float alibi_slope(const Problem& p, int entry, int head) {
  return p.alibi_slopes ? __ldg(p.alibi_slopes + entry * p.alibi_batch_stride + head) : 0.f;
}

// Subtracts ALiBi's slope * distance from the scores. own_keys[r] is i + D, the key that the lane's r-th row is aligned
// with; col0 is the key of column 0.
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
