// Reductions over the lanes of a quad, and the operations max and sum.
#pragma once

#include <cfloat>

namespace flash {

// The four lanes of a quad share the rows of a Fragment.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

struct Max {
  static constexpr float kOfNone = -FLT_MAX;  // finite, so that differences of maxima are numbers
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
  static constexpr float kOfNone = 0.f;
  __device__ float operator()(float a, float b) const { return a + b; }
};

}  // namespace flash
