// Online softmax over blocks of keys (Milakov and Gimelshein, 2018): each row keeps a maximum of its scores so far (or
// one that lags a little behind: update_max_if_grown), and the sum of exponentials relative to it. A row without scores
// has max -inf and sum 0.
#pragma once

#include <cmath>

#include "flash_attn/params.h"
#include "flash_attn/scores/score.cuh"
#include "ptx/math.cuh"
#include "tile/any_vec.cuh"
#include "tile/fragment.cuh"
#include "tile/reduce.cuh"

namespace flash::flash_attn {

// What is subtracted from a row's scores: its maximum, or 0 for a row without scores, since -inf - -inf is NaN.
__device__ inline float finite_or_zero(float max) { return max == -INFINITY ? 0.f : max; }

// The factor that turns sums of exponentials relative to `max` into sums relative to max_of_all. Subtracting before
// scaling makes it exactly 1 if both are equal: sums are multiplied by it once a block or split, so that an error would
// compound.
__device__ inline float weight_of(float max, float max_of_all, float scale_log2) {
  return ptx::exp2((max - finite_or_zero(max_of_all)) * scale_log2);
}

// Adds up the partial results of two sets of keys, for one row: sums of exponentials, and of exponentials times values,
// relative to the maximum of each set. Results must not depend on which thread adds them up, so the rounding is spelled
// out; and adding a set in which the row sees no key changes no bit, not even the sign of a zero.
struct Fold {
  struct Partial {
    float max, sum;

    __device__ bool is_empty() const { return max == -INFINITY && sum == 0; }
  };
  const bool is_first, is_empty;
  float max;  // of both
  float total_weight, weight;

  __device__ Fold(const Partial& total, const Partial& own, float scale_log2)
      : is_first(total.is_empty()),
        is_empty(own.is_empty()),
        max(fmaxf(total.max, own.max)),
        total_weight(weight_of(total.max, max, scale_log2)),
        weight(weight_of(own.max, max, scale_log2)) {}

  __device__ float operator()(float total, float x) const {
    return is_empty ? total : is_first ? x : fmaf(total, total_weight, x * weight);
  }
};

// A row's largest score, from its maximum in units of scale_log2. The factors are multiplied first: where the maximum
// is a score, scale_log2 is kLog2e, and kLog2e * kLn2 is exactly 1.
__device__ inline float largest_score(float max, float scale_log2) { return max * (scale_log2 * kLn2); }

// The natural logarithm of a row's sum of exp(s) as a sum of two numbers: the first is the logarithm, rounded, and the
// second what rounding has taken off. Of keys that all have a bias of -1e9, the first is -1e9, and the second says how
// many they are.
struct LogSumExp {
  float lse, lse_lo;
};

// The sum of exp(s) is sum * exp2(scale_log2 * max); +inf for a row without scores.
__device__ inline LogSumExp log_sum_exp(float max, float sum, float scale_log2) {
  if (!(sum > 0)) return {INFINITY, 0};
  const float largest = largest_score(max, scale_log2), log_sum = ptx::log2(sum) * kLn2, lse = largest + log_sum;
  return {lse, (largest - lse) + log_sum};
}

// The score of a query head's sink, or -inf if there is none. Packed rows after the last entry have none.
__device__ inline float sink_of(const Problem& p, int entry, int head) {
  if (p.sink == nullptr || entry >= p.batch) return -INFINITY;
  float sink[1];
  widen(sink, load_any<1>(p.sink, head, p.sink_dtype), p.sink_dtype);
  return sink[0];
}

// What the sink adds to a row's sum. That may be +inf: then the keys have no weight.
__device__ inline float exp_of_sink(float sink, float max, float scale_log2) {
  return ptx::exp2((sink - largest_score(finite_or_zero(max), scale_log2)) * kLog2e);
}

// lse of a row that has nothing but a sink, or nothing that counts beside it.
__device__ inline float lse_of_sink(float sink) { return sink == -INFINITY ? INFINITY : sink; }

// The same for a row whose sum includes the sink.
__device__ inline LogSumExp log_sum_exp(float sink, float max, float sum, float scale_log2) {
  if (max > -INFINITY && sum < INFINITY) return log_sum_exp(max, sum, scale_log2);
  return {lse_of_sink(sink), 0};
}

// kSubtractsFirst: exponents are computed as (s - max) * scale instead of s * scale - max * scale, which is a single
// FMA. That is for scores with a bias of -1e9, where rounding max * scale would lose the digits that differ.
template <int kRows, bool kSubtractsFirst = false>
struct OnlineSoftmax {
  static constexpr int kLaneRows = kRows / 8;
  float scale_log2;  // exp(s) is exp2(scale_log2 * s)
  float max[kLaneRows];
  float sum[kLaneRows];  // over this lane's columns; over the whole row after finish()

  __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) max[r] = -INFINITY, sum[r] = 0;
  }

  // Updates the maximum of the lane's r-th row with a block of scores, and rescales its sum. Returns the factor, by
  // which the caller rescales O.
  template <int kCols>
  __device__ float update_max(const Fragment<kRows, kCols>& s, int r) {
    return raise_max(fmaxf(max[r], row_max(s, r)), r);
  }

  // The same for all rows, but a maximum stays as it is until an exponential relative to it would exceed 2^tolerance.
  // After the first blocks, that hardly ever happens. Returns whether it has for some row of the warp: only then does O
  // need to be rescaled.
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

  // Folds row r into a total, and becomes the new total. Returns how, for O of the same row.
  __device__ Fold fold(int r, const Fold::Partial& total) {
    const Fold fold(total, {max[r], sum[r]}, scale_log2);
    max[r] = fold.max, sum[r] = fold(total.sum, sum[r]);
    return fold;
  }

  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) sum[r] = quad_sum(sum[r]);
  }

 private:
  template <int kCols>
  __device__ static float row_max(const Fragment<kRows, kCols>& s, int r) {
    constexpr int kChains = 4;  // independent chains of maxima, to hide the latency of the instruction
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
