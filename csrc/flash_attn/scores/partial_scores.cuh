// Where two groups of threads have half of the channels each (channel_slices in fwd/tiles.h), each computes partial
// sums of Q K^T, and both need the whole sums. They exchange fragments through shared memory. Both then have identical
// scores, since a + b = b + a in floating point, too.
#pragma once

#include "tile/fragment.cuh"

namespace flash::flash_attn {

// The fragments of kThreads threads of one group, in transit to the other. A thread reads what the thread of the same
// rank has stored, so the layout need not be that of a matrix: vector i of all threads is contiguous, which is free of
// bank conflicts.
template <int kRows, int kCols, int kThreads = 32>
struct PartialScores {
  static constexpr int kTiles = kCols / 8, kVectors = kRows / 16 * kTiles;
  float4 values[kVectors][kThreads];

  __device__ void store(const Fragment<kRows, kCols>& s, int thread) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) values[i][thread] = vector(s, i);
  }

  __device__ void add_to(Fragment<kRows, kCols>& s, int thread) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = values[i][thread];
      auto& own = s.values[i / kTiles][i % kTiles];
      own[0] += x.x, own[1] += x.y, own[2] += x.z, own[3] += x.w;
    }
  }

  __device__ static float4 vector(const Fragment<kRows, kCols>& s, int i) {
    const auto& own = s.values[i / kTiles][i % kTiles];
    return {own[0], own[1], own[2], own[3]};
  }
};

}  // namespace flash::flash_attn
