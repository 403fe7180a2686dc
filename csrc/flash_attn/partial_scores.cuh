// Where parts divide the channels (channel_parts in fwd_tiles.h), each has products Q K^T of its own channels, and all
// need the sums. They exchange them through shared memory. With two parts, both get the same bits, since a + b is b +
// a.
#pragma once

#include "tile/fragment.cuh"

namespace flash::flash_attn {

// A fragment of each of a part's warps, on its way to the other part. Lanes store it as they hold it, since the lane
// that adds it is the lane of the same rank.
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
