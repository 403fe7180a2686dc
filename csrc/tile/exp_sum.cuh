// The running sum of exponentials that softmax and log-sum-exp need, in one pass over numbers of any size.
#pragma once

#include "ptx/math.cuh"
#include "tile/reduce.cuh"

namespace flash {

// sum of exp2(c (x - max)) over the x seen so far, for a positive c. Numbers of -inf add nothing.
struct ExpSum {
  float max = Max::kOfNone;
  float sum = 0.f;

  // Replaces each x by exp2(c (x - max)). The maximum moves at most once, for one exponential more. (Chains of several
  // partial sums hide latency, but take registers from other warps, which is worse.)
  template <int kSize>
  __device__ void add(float (&x)[kSize], float c) {
    float largest = max;
#pragma unroll
    for (int i = 0; i < kSize; ++i) largest = fmaxf(largest, x[i]);
    float added = 0.f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) added += x[i] = ptx::exp2((x[i] - largest) * c);
    sum = sum * ptx::exp2((max - largest) * c) + added;
    max = largest;
  }

  // Over several threads: reduce(Op(), value) gives each of them the same result.
  template <typename Reduce>
  __device__ ExpSum over(float c, Reduce&& reduce) const {
    const float largest = reduce(Max(), max);
    return {largest, reduce(Sum(), sum * ptx::exp2((max - largest) * c))};
  }
};

}  // namespace flash
