#pragma once

#include <cfloat>

namespace flash {

// Over the four lanes of a quad, which share the rows of a Fragment.
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

// Over the lanes of a warp, or over each `lanes` of them, a power of two. All get the same result.
template <typename Op>
__device__ float warp_reduce(float x, int lanes = 32) {
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) x = Op()(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ inline float warp_max(float x) { return warp_reduce<Max>(x); }
__device__ inline float warp_sum(float x) { return warp_reduce<Sum>(x); }

// Over the threads of a block of whole warps, all of which call it and get the same result.
template <typename Op>
__device__ float block_reduce(float x, float (&shared)[32]) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = warp_reduce<Op>(x);
  __syncthreads();  // an earlier result may still be read
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_reduce<Op>(lane < blockDim.x / 32 ? shared[lane] : Op::kOfNone);
}

}  // namespace flash
