// The running sum of exponentials that softmax and log-sum-exp need, in one pass over numbers of any size.
#pragma once

#include "ptx/math.cuh"
#include "tile/reduce.cuh"

namespace flash {

// sum of exp2(c (x - max)) over the x seen so far, for a positive c. Numbers of -inf add nothing.
struct ExpSum {
  float max = Max::kOfNone;
  float sum = 0.f;

  // Replaces each x[i], of those for which counts(i), by exp2(c (x[i] - max)). The maximum moves at most once, for one
  // exponential more. (Chains of several partial sums hide latency, but take registers from other warps, which is
  // worse.)
  template <int kCount, int kSize, typename Counts>
  __device__ void add(float (&x)[kCount][kSize], float c, Counts&& counts) {
    float largest = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!counts(i)) continue;
#pragma unroll
      for (float value : x[i]) largest = fmaxf(largest, value);
    }
    float added = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!counts(i)) continue;
#pragma unroll
      for (float& value : x[i]) added += value = ptx::exp2((value - largest) * c);
    }
    sum = sum * ptx::exp2((max - largest) * c) + added;
    max = largest;
  }

  // The same for one row of them.
  template <int kSize>
  __device__ void add(float (&x)[kSize], float c) {
    add(reinterpret_cast<float (&)[1][kSize]>(x), c, [](int) { return true; });
  }

  // Over several threads: reduce(Op(), value) gives each of them the same result.
  template <typename Reduce>
  __device__ ExpSum over(float c, Reduce&& reduce) const {
    const float largest = reduce(Max(), max);
    return {largest, reduce(Sum(), sum * ptx::exp2((max - largest) * c))};
  }
};

}  // namespace flash
