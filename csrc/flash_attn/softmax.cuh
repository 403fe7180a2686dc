// Softmax over blocks of keys (Milakov and Gimelshein, 2018): the largest score so far and the sum of exponentials
// relative to it. A row without scores has max -inf and sum 0.
#pragma once

#include <cmath>

#include "flash_attn/score.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/reduce.cuh"

namespace flash::flash_attn {

// What a row's scores are shifted by; -inf - -inf would be NaN.
__device__ inline float finite_or_zero(float max) { return max == -INFINITY ? 0.f : max; }

// Natural logarithm of a row's sum of exp(s), which is sum * exp2(scale_log2 * max); +inf for a row without scores. The
// maximum, which may be large, is rounded as little as possible: kLog2e * kLn2 is 1.
__device__ inline float log_sum_exp(float max, float sum, float scale_log2) {
  return sum > 0 ? max * (scale_log2 * kLn2) + ptx::log2(sum) * kLn2 : INFINITY;
}

template <int kRows>
struct OnlineSoftmax {
  static constexpr int kLaneRows = kRows / 8;
  float scale_log2;  // exp(s) is exp2(scale_log2 * s)
  float max[kLaneRows];
  float sum[kLaneRows];  // of this lane's columns, until finish()

  __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) max[r] = -INFINITY, sum[r] = 0;
  }

  // Takes a block of scores and turns it into exponentials relative to the new maxima. Sums of earlier exponentials
  // are to be multiplied by `shrink`.
  template <int kCols>
  __device__ void update(Fragment<kRows, kCols>& s, float (&shrink)[kLaneRows]) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float block_max = s(r, 0);
#pragma unroll
      for (int c = 1; c < kCols / 4; ++c) block_max = fmaxf(block_max, s(r, c));
      const float new_max = fmaxf(max[r], quad_max(block_max));
      const float finite = finite_or_zero(new_max), shift = finite * scale_log2;
      // Exactly 1 where the maximum stays, or else the rounding of a product would be raised to the number of blocks.
      shrink[r] = ptx::exp2((max[r] - finite) * scale_log2);
      max[r] = new_max;
      sum[r] *= shrink[r];
#pragma unroll
      for (int c = 0; c < kCols / 4; ++c) {
        s(r, c) = ptx::exp2(s(r, c) * scale_log2 - shift);
        sum[r] += s(r, c);
      }
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) sum[r] = quad_sum(sum[r]);
  }
};

}  // namespace flash::flash_attn
