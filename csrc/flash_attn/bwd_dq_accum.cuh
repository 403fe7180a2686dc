// The fp32 dQ that blocks add to in global memory, and the order of its elements.
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"

namespace flash::flash_attn {

// Rows of all heads and entries in the order of softmax_lse, channels in groups of 16. The groups of kRowsTogether rows
// lie together: first the first group of all these rows, then the second. A warp of the wide kernels adds to a group of
// 8 rows at a time, which is faster in whole cache lines; bwd_sm90.cuh adds boxes of rows, of one tensor dimension.
//
// The channels of a group are in the order in which the four lanes of a quad hold them in a fragment, so that a lane
// adds four adjacent floats: channel 8 x + 2 t + z of a group, of lane t, is at 4 t + 2 x + z.
template <int kHeadDim>
struct DqAccum {
  static constexpr int kRowsTogether = kHeadDim > 128 ? 8 : 1;
  static constexpr int kGroup = 16, kGroups = kHeadDim / kGroup;
  static constexpr int kGroupStep = kGroup * kRowsTogether;  // from one group of a row to the next

  // Address of a group of channels of a row of an entry.
  __device__ static float* address(float* dq_accum, const Problem& p, const Span& q, int head, int row, int group) {
    const int64_t index = row_index(p, q, head) + row;
    return dq_accum + index / kRowsTogether * kRowsTogether * kHeadDim + group * kGroupStep +
           index % kRowsTogether * kGroup;
  }

  // Which channel of a group the i-th of the four floats of lane t is.
  __device__ static constexpr int channel(int t, int i) { return i / 2 * 8 + 2 * t + i % 2; }
};

}  // namespace flash::flash_attn
