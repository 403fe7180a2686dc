// How two thread blocks of a cluster that have half of the channels each exchange partial scores (sm_90).
#pragma once

#include "flash_attn/scores/partial_scores.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Each thread block has the sums of its half of the channels, of every score. It has a box for each of its warpgroups,
// which the warpgroup of the same rank in the other thread block fills by st.async, a fragment at a time. A thread
// block must not exit before the other one has read the last fragment sent to it, since it then arrives at other_empty
// here.
template <int kRows, int kCols_>
struct PartialBox {
  static constexpr int kCols = kCols_;
  PartialScores<kRows, kCols, kWarpgroup> scores;
  ptx::SharedBarrier full;         // counts the bytes that arrive in this box
  ptx::SharedBarrier other_empty;  // each warp of the other thread block arrives here when it has read its box

  __device__ void init() {
    full.init(1);
    other_empty.init(kWarpgroup / 32);
  }

  // Sends s to the thread block of CTA rank `other`, and adds what that sends. All threads of the warpgroup call it,
  // with their index in the thread block.
  __device__ void add_other_half(Fragment<kRows, kCols>& s, int other, int thread, RingCursor<1>& at) {
    other_empty.wait(at.round ^ 1);
    if (thread % kWarpgroup == 0) full.arrive_expect_tx(sizeof(scores));
    const uint32_t other_full = ptx::address_in(other, &full.state);
    const uint32_t place = ptx::address_in(other, &scores.values[0][thread % kWarpgroup]);
#pragma unroll
    for (int i = 0; i < scores.kVectors; ++i) {
      ptx::store_async_in(place + i * sizeof(scores.values[0]), scores.vector(s, i), other_full);
    }
    ptx::wait_for_stores(full, at.round);
    scores.add_to(s, thread % kWarpgroup);
    __syncwarp();
    if (thread % 32 == 0) ptx::arrive_in(other, other_empty);
    at.advance();
  }
};

}  // namespace flash::flash_attn
