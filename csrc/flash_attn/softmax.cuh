// Softmax over blocks of keys (Milakov and Gimelshein, 2018): the largest score so far, or one that is not much
// smaller, and the sum of exponentials relative to it. A row without scores has max -inf and sum 0.
#pragma once

#include <cmath>

#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "ptx/math.cuh"
#include "tile/any_vec.cuh"
#include "tile/fragment.cuh"
#include "tile/reduce.cuh"

namespace flash::flash_attn {

// The shift of a row's scores: its maximum, or 0 for a row without scores, since -inf - -inf is NaN.
__device__ inline float finite_or_zero(float max) { return max == -INFINITY ? 0.f : max; }

// The factor that turns sums of exponentials relative to `max` into sums relative to max_of_all. It is exactly 1 if
// both are equal: an error here would be raised to the number of blocks or splits.
__device__ inline float weight_of(float max, float max_of_all, float scale_log2) {
  return ptx::exp2((max - finite_or_zero(max_of_all)) * scale_log2);
}

// Natural logarithm of a row's sum of exp(s), which is sum * exp2(scale_log2 * max); +inf for a row without scores. The
// maximum, which may be large, is rounded as little as possible: kLog2e * kLn2 is 1.
__device__ inline float log_sum_exp(float max, float sum, float scale_log2) {
  return sum > 0 ? max * (scale_log2 * kLn2) + ptx::log2(sum) * kLn2 : INFINITY;
}

// The score of the sink of a query head, or -inf, which counts as no sink. Rows after the last entry have none.
__device__ inline float sink_of(const Problem& p, int entry, int head) {
  if (p.sink == nullptr || entry >= p.batch) return -INFINITY;
  float sink[1];
  widen(sink, load_any<1>(p.sink, head, p.sink_dtype), p.sink_dtype);
  return sink[0];
}

// What the sink adds to a row's sum. It may be +inf, beside which the keys have no weight.
__device__ inline float exp_of_sink(float sink, float max, float scale_log2) {
  return ptx::exp2(sink * kLog2e - finite_or_zero(max) * scale_log2);
}

// log_sum_exp of a row that has nothing but a sink, or nothing that counts beside it.
__device__ inline float lse_of_sink(float sink) { return sink == -INFINITY ? INFINITY : sink; }

// log_sum_exp of a row whose sum has the sink.
__device__ inline float log_sum_exp(float sink, float max, float sum, float scale_log2) {
  return max > -INFINITY && sum < INFINITY ? log_sum_exp(max, sum, scale_log2) : lse_of_sink(sink);
}

// kSubtractsFirst: whether differences of scores are scaled, and not scores, which takes one more instruction for each:
// where scores have a scale, and may be so large that rounding their multiples matters.
template <int kRows, bool kSubtractsFirst = false>
struct OnlineSoftmax {
  static constexpr int kLaneRows = kRows / 8;
  float scale_log2;  // exp(s) is exp2(scale_log2 * s)
  float max[kLaneRows];
  float sum[kLaneRows];  // of this lane's columns, until finish()

  __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) max[r] = -INFINITY, sum[r] = 0;
  }

  // Updates the maximum of the lane's r-th row with a block of scores. Returns the factor for sums of earlier
  // exponentials.
  template <int kCols>
  __device__ float update_max(const Fragment<kRows, kCols>& s, int r) {
    return raise_max(fmaxf(max[r], row_max(s, r)), r);
  }

  // The same for all rows, but a maximum stays as it is until an exponential relative to it exceeds 2^tolerance. After
  // the first blocks, hardly any grows. Returns whether one in the warp has.
  template <int kCols>
  __device__ bool update_max_if_grown(const Fragment<kRows, kCols>& s, float (&shrink)[kLaneRows], float tolerance) {
    bool any_grown = false;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float new_max = fmaxf(max[r], row_max(s, r));
      const bool grown = (new_max - max[r]) * scale_log2 > tolerance;
      shrink[r] = raise_max(grown ? new_max : max[r], r);
      any_grown |= grown;
    }
    return __any_sync(~0u, any_grown);
  }

  // Turns the scores of a row into exponentials relative to its maximum, and adds them to its sum.
  template <int kCols>
  __device__ void exponentiate(Fragment<kRows, kCols>& s, int r) {
    const float base = finite_or_zero(max[r]), shift = base * scale_log2;
#pragma unroll
    for (int c = 0; c < kCols / 4; ++c) {
      s(r, c) = ptx::exp2(kSubtractsFirst ? (s(r, c) - base) * scale_log2 : s(r, c) * scale_log2 - shift);
      sum[r] += s(r, c);
    }
  }

  // Updates maxima and sums of all rows with a block of scores, which become exponentials.
  template <int kCols>
  __device__ void update(Fragment<kRows, kCols>& s, float (&shrink)[kLaneRows]) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      shrink[r] = update_max(s, r);
      exponentiate(s, r);
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) sum[r] = quad_sum(sum[r]);
  }

 private:
  template <int kCols>
  __device__ static float row_max(const Fragment<kRows, kCols>& s, int r) {
    constexpr int kChains = 4;  // short ones, since a maximum takes longer than starting the next
    float part[kChains];
#pragma unroll
    for (int c = 0; c < kCols / 4; ++c) part[c % kChains] = c < kChains ? s(r, c) : fmaxf(part[c % kChains], s(r, c));
    return quad_max(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])));
  }

  __device__ float raise_max(float new_max, int r) {
    const float shrink = weight_of(max[r], new_max, scale_log2);
    max[r] = new_max;
    sum[r] *= shrink;
    return shrink;
  }
};

}  // namespace flash::flash_attn
