// The layout of dq_accum, the fp32 dQ in global memory that n_blocks add to.
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"

namespace flash::flash_attn {

// Rows of all heads and entries are in the order of softmax_lse, and channels in groups of 16. kRowsTogether rows are
// interleaved: first the first group of each of these rows, then their second groups, and so on. Above 128 channels, a
// warp adds one group of 8 rows at a time with vector atomics, and so fills whole cache lines; bwd_sm90 adds boxes
// by TMA, in which rows are one tensor dimension and cannot be interleaved.
//
// Within a group, channels are permuted so that the four that a lane of a quad holds in a fragment are adjacent, one
// 16-byte access: channel 8 x + 2 t + z, held by lane t of the quad, is at 4 t + 2 x + z.
template <int kHeadDim>
struct DqAccum {
  static constexpr int kRowsTogether = kHeadDim > 128 ? 8 : 1;
  static constexpr int kGroup = 16, kGroups = kHeadDim / kGroup;
  static constexpr int kGroupStep = kGroup * kRowsTogether;  // from one group of a row to the next

  // Address of a group of channels of row `row` of an entry, whose rows are `q`.
  __device__ static float* address(float* dq_accum, const Problem& p, const Span& q, int head, int row, int group) {
    const int64_t index = row_index(p, q, head) + row;
    return dq_accum + index / kRowsTogether * kRowsTogether * kHeadDim + group * kGroupStep +
           index % kRowsTogether * kGroup;
  }

  // Which channel of a group is the i-th of the four floats of lane t.
  __device__ static constexpr int channel(int t, int i) { return i / 2 * 8 + 2 * t + i % 2; }
};

}  // namespace flash::flash_attn
