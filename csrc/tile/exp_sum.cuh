// The running sum of exponentials that softmax and log-sum-exp need, in one pass over numbers of any size.
#pragma once

#include "ptx/math.cuh"
#include "tile/reduce.cuh"

namespace flash {

// The sum of exp2(c (x - max)) over all x seen so far, for a positive c. An x of -inf adds nothing.
struct ExpSum {
  float max = Max::kOfNone;
  float sum = 0.f;

  // Raises the maximum to `largest` if that is larger, and rescales the sum. This costs one exponential.
  __device__ void raise(float largest, float c) {
    largest = fmaxf(max, largest);
    sum *= ptx::exp2((max - largest) * c);
    max = largest;
  }

  // Adds values that are at most the maximum, and replaces each x by exp2(c (x - max)). There is one chain of
  // additions: several partial sums would hide latency, but take registers from other warps, which is slower.
  template <int kSize>
  __device__ void add_below(float (&x)[kSize], float c) {
    float added = 0.f;
#pragma unroll
    for (float& value : x) added += value = ptx::exp2((value - max) * c);
    sum += added;
  }

  // Raises the maximum to the largest of these values, if that is larger.
  template <int kSize>
  __device__ void raise_over(const float (&x)[kSize], float c) {
    float largest = x[0];
#pragma unroll
    for (float value : x) largest = fmaxf(largest, value);
    raise(largest, c);
  }

  // Adds values of any size, and replaces each x by exp2(c (x - max)).
  template <int kSize>
  __device__ void add(float (&x)[kSize], float c) {
    raise_over(x, c);
    add_below(x, c);
  }
};

}  // namespace flash
