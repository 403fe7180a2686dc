// What a consumer warpgroup of bwd_sm90 computes for a work tile: the mainloop, a step for each m_block, with a
// prologue and an epilogue.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/elementwise.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd_sm90/barriers.cuh"
#include "flash_attn/bwd_sm90/consumer.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/shared.cuh"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/vec.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// A consumer warpgroup, with 64 keys of an n_block.
template <typename Config>
struct Gradients : BwdConsumer<Config, BwdSm90Shared<Config>> {
  using Base = BwdConsumer<Config, BwdSm90Shared<Config>>;
  using Base::p, Base::shared, Base::work, Base::rank, Base::key0, Base::at, Base::kPlain;
  using typename Base::Scores, typename Base::Packed, typename Base::T;
  using KeySum = Fragment<16, Config::kHeadDim>;  // dV or dK
  using HalfOfDq = Fragment<16, kDqBoxCols>;
  using Ds = SharedTile<T, Config::kBlockM, Config::kBlockN>;
  uint32_t& keys_parity;
  static constexpr int kNone = 1 << 30;
  // Ping-pong: the stage of dS from which the next dQ is computed, and how many rows of that box belong to the entry.
  typename Ring<Config::kStages>::Cursor dq_at = at;
  int last_dq_rows = kNone;
  KeySum dv, dk;

  // Calls fn(address in the box, r, c) for the lane's elements (r, c) .. (r, c + 3) of dQ, four floats that are
  // adjacent there.
  template <typename Fn>
  __device__ static void for_each_quad(float* first, Fn&& fn) {
#pragma unroll
    for (int group = 0; group < kDqBoxCols / kDqGroup; ++group) {
#pragma unroll
      for (int r = 0; r < HalfOfDq::kLaneRows; ++r) fn(first + (group * kDqBoxRows + 8 * r) * kDqGroup, r, 4 * group);
    }
  }

  __device__ void store_rounded(HalfOfDq& dq, int first_row, int t) const {
    dq.for_each([&](float& x, int, int) { x *= p.problem.softmax_scale; });
    auto& rounded = shared.dq[rank].rounded;
    T* first_pair = rounded.chunk(rematerialized(first_row), 0) + 2 * t;
#pragma unroll
    for (int r = 0; r < dq.kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < dq.kLaneCols; c += 2) {
        const uintptr_t pair = reinterpret_cast<uintptr_t>(first_pair) ^ rounded.flip(c / 2);
        *reinterpret_cast<uint32_t*>(pair + rounded.distance(8 * r, 0)) = ptx::pack<T>(dq(r, c), dq(r, c + 1));
      }
    }
  }

  // Writes the warpgroup's half of dQ to the box, once that is empty. Only `count` rows of the box belong to the entry.
  // The others may be rows of the next packed entry, to which nothing may be added: they get zeros, even if K holds
  // NaN.
  __device__ void fill_box(HalfOfDq& dq, int count) {
    ptx::sync_barrier<kDqThreads>(kDqEmptyBarrier + rank);
    const bool may_round = Config::kMeeting != Meeting::kFree && p.plan.rounds_dq;
    const DqFate fate = may_round ? shared.dq_fate[rank] : DqFate::kAdd;
    // rematerialized: with addresses kept in registers, too few would be left to compute all of dS before dV is
    // started.
    const unsigned thread = rematerialized(threadIdx.x) % kWarpgroup;
    const int first_row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
    if (count < kDqBoxRows) {
      dq.for_each([&](float& x, int r, int) { x = first_row + 8 * r < count ? x : 0; });
    }
    float* first = shared.dq[rank].quad(0, first_row, t);
    if (fate == DqFate::kRoundWithSum) {
      for_each_quad(first, [&](float* quad, int r, int c) {
        const Vec<float, 4> accum = load<4>(quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) dq(r, c + i) += accum[i];
      });
      ptx::sync_barrier<kWarpgroup>(kOwnBarrier + rank);  // rounded values overwrite the dq_accum that others read
    }
    if (fate == DqFate::kAdd || fate == DqFate::kStore) {
      for_each_quad(first, [&](float* quad, int r, int c) {
        store(quad, Vec<float, 4>{dq(r, c), dq(r, c + 1), dq(r, c + 2), dq(r, c + 3)});
      });
    } else {
      store_rounded(dq, first_row, t);
    }
    ptx::arrive_at_barrier<kDqThreads>(kDqFullBarrier + rank);
  }

  // Waits for S^T and dP^T, and turns them into the left operands of dV (weights: P^T, 0 where dropped) and of dK
  // (gradients: dS^T).
  __device__ void differentiate(Scores& s, Scores& dp, Packed& weights, Packed& gradients, int head,
                                const Interval& rows, bool cut) const {
    const auto softmax_d = [&](int c) {
      return *reinterpret_cast<const float2*>(&shared.dout.values_of(at)[dp.col(c)]);
    };
    if constexpr (kPlain) {
      wait_gemms<1>(s);
      this->probabilities(s, head, rows, cut);
      weights = pack<T>(s);
      if constexpr (Config::kDropped) {
        const auto dropped = shared.dropped.bits_of(at)[warp_id()][lane_id()];
        dropped.clear(weights);
        wait_gemms<0>(dp);
        dropped.clear(dp);
        dp.for_each([&](float& x, int, int) { x *= p.problem.dropout_rescale; });
      } else {
        wait_gemms<0>(dp);
      }
      subtract_softmax_d<Config::kFeatures>(dp, {}, p.problem, softmax_d);
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
    } else {
      wait_gemms<0>(s, dp);
      const Dropped dropped = dropped_of<Config::kFeatures>(s, p.problem, this->place_of(head, rows));
      subtract_softmax_d<Config::kFeatures>(dp, dropped, p.problem, softmax_d);
      scale_and_cap(s, p.problem);
      if (const float cap = p.problem.softcap; cap > 0) {
        dp.for_each([&](float& x, int r, int c) { x *= cap_slope(s(r, c), cap); });
      }
      this->probabilities(s, head, rows, cut);
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
      s.for_each([&](float& x, int r, int c) { x = dropped.has(r, c) ? 0 : x; });
      weights = pack<T>(s);
    }
    gradients = pack<T>(dp);
  }

  __device__ void start_dv(Packed& weights) {
    fence(dv, weights);
    start_gemm<Config::kBlockM>(dv, weights, along_rows(shared.dout.tiles[at.stage]), true);
  }

  __device__ void start_dk(Packed& gradients) {
    fence(dk, gradients);
    start_gemm<Config::kBlockM>(dk, gradients, along_rows(shared.q.tiles[at.stage]), true);
  }

  __device__ void start_dq(HalfOfDq& dq, const Ds& ds) {
    ptx::wgmma_fence();
    constexpr bool kHalvesRows = Config::kDqHalf == DqHalf::kRows;
    start_gemm<Config::kBlockN>(dq, along_cols(ds, kHalvesRows ? 64 * rank : 0),
                                along_rows(shared.k, kHalvesRows ? 0 : kDqBoxCols * rank), false);
  }

  // Ping-pong: starts dQ of the m_block before. In the first step there is none, and the result is not used: with a
  // branch around the products, the compiler would duplicate the rest of the step.
  __device__ void start_last_dq(HalfOfDq& dq) {
    if (last_dq_rows != kNone) shared.ds_ring.wait_full(dq_at);
    start_dq(dq, shared.ds[dq_at.stage]);
  }

  __device__ void end_last_dq(HalfOfDq& dq) {
    if (this->leads()) shared.ds_ring.release(dq_at);
    dq_at.advance();
    fill_box(dq, last_dq_rows);
  }

  // Cooperative: adds to dV and dK, and computes dQ, of this step's rows once both warpgroups have stored their dS. dS
  // is stored before dV is started, since the stores would compete with that product's reads of shared memory.
  __device__ void sum_cooperatively(Packed& weights, Packed& gradients, int dq_rows) {
    auto& ds = shared.ds[at.stage];
    store_transposed(ds, gradients, rematerialized(key0));
    start_dv(weights);
    ptx::fence_async_shared();
    ptx::sync_barrier<2 * kWarpgroup>(kStepBarrier);
    HalfOfDq dq;
    start_dq(dq, ds);
    wait_gemms<1>(dv);
    if (this->leads()) shared.dout.barriers.release(at);
    start_dk(gradients);
    wait_gemms<1>(dq);
    fill_box(dq, dq_rows);
  }

  // Ping-pong: adds to dV and dK of this step's rows, and computes dQ of the rows before, whose dS the other warpgroup
  // has stored meanwhile. The second warpgroup starts a step when the first has started its last products
  // (kStepBarrier), so that each computes exponentials while the other multiplies.
  __device__ void sum_in_pingpong(Packed& weights, Packed& gradients, int dq_rows) {
    shared.ds_ring.wait_empty(at);
    store_transposed(shared.ds[at.stage], gradients, rematerialized(key0));
    start_dv(weights);
    ptx::fence_async_shared();  // waits for the stores of dS, while dV is computed
    __syncwarp();
    if (lane_id() == 0) shared.ds_ring.full[at.stage].arrive();
    HalfOfDq dq;
    start_last_dq(dq);
    start_dk(gradients);
    if (rank == 0) ptx::arrive_at_barrier<2 * kWarpgroup>(kStepBarrier);
    wait_gemms<1>(dv, dq);
    if (this->leads()) shared.dout.barriers.release(at);
    if (last_dq_rows != kNone) end_last_dq(dq);
    last_dq_rows = dq_rows;
  }

  __device__ void step(int head, int m_block, bool cut) {
    const Interval rows = interval_of<Config::kBlockM>(m_block);
    auto &q = shared.q.tiles[at.stage], &dout = shared.dout.tiles[at.stage];
    this->wait_rows(head, rows, cut);
    if (Config::kIsPingpong && rank == 1) ptx::sync_barrier<2 * kWarpgroup>(kStepBarrier);
    Scores s, dp;
    ptx::wgmma_fence();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k, 64 * rank), along_cols(q), false);
    shared.dout.barriers.wait_full(at);
    ptx::wgmma_fence();
    start_gemm<Config::kHeadDim>(dp, along_cols(shared.v, 64 * rank), along_cols(dout), false);
    Packed weights, gradients;
    differentiate(s, dp, weights, gradients, head, rows, cut);
    const int dq_rows = work.mask.seqlen_q - rows.first - (Config::kDqHalf == DqHalf::kRows ? kDqBoxRows * rank : 0);
    if constexpr (Config::kIsPingpong) {
      sum_in_pingpong(weights, gradients, dq_rows);
    } else {
      sum_cooperatively(weights, gradients, dq_rows);
    }
    wait_gemms<0>(dk);
    if (this->leads()) shared.q.barriers.release(at);
    at.advance();
  }

  // Waits for K and V.
  __device__ void prologue() {
    this->wait_keys(keys_parity);
    keys_parity ^= 1;
  }

  __device__ void mainloop() {
    work.for_each_m_block(p, [&](int head, int m_block, bool cut) { step(head, m_block, cut); });
  }

  // Ping-pong: computes dQ of the last step. K and V are free after that.
  __device__ void end_steps() {
    HalfOfDq dq;
    if constexpr (Config::kIsPingpong) start_last_dq(dq);
    if constexpr (Config::kIsPingpong) wait_gemms<0>(dq);
    if (this->leads()) shared.keys_free.arrive();
    // With key ranges, a split may have only rows, or only heads, that see none of the keys, though others before and
    // after them do: then there was no step.
    constexpr bool kMayVisitNone = NBlockWork<Config>::kMayBeSplit && Config::kRanges != RangeSource::kNone;
    if constexpr (Config::kIsPingpong) {
      if (!kMayVisitNone || last_dq_rows != kNone) end_last_dq(dq);
    }
  }

  // Stores dV and dK.
  __device__ void epilogue() {
    this->store_sum(dv, /*of_values=*/true);
    this->store_sum(dk, /*of_values=*/false);
  }

  // Cooperative, 64 rows a step; the m_blocks are 2, 1, 0:
  //
  //   loader warp  copy K, V, Q2, dO2 | copy Q1, dO1         |             |                        |
  //   warpgroup 0                     | S2 = K Q2, dP2 = ... | exp P2, dS2 | dV += P2 dO2, dQ2 = .. | dK += dS2 Q2, box
  //   warpgroup 1                     | S2 = K Q2, dP2 = ... | exp P2, dS2 | dV += P2 dO2, dQ2 = .. | dK += dS2 Q2, box
  //   dQ warps                        |                      |             |                        |         add boxes
  //
  // Ping-pong, 128 rows a step:
  //
  //   warpgroup 0  S2, dP2 | exp P2, dS2 | dV += .., dK += .. | S1, dP1     | exp P1, dS1        | dV, dQ2, dK, box
  //   warpgroup 1          | wait        | S2, dP2            | exp P2, dS2 | dV += .., dK += .. | S1, dP1
  //   dQ warps             |             |                    |             |                    |          add boxes
  __device__ void run() {
    dv.fill(0), dk.fill(0);
    if (work.has_rows()) {
      prologue();
      mainloop();
      end_steps();
    }
    epilogue();
  }
};

// A consumer warpgroup's loop over its work tiles.
template <typename Config>
__device__ void sum_keys(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, int rank) {
  RingCursor<Config::kStages> at;
  uint32_t keys_parity = 0;
  for_each_work_tile(p, shared, [&](const NBlockWork<Config>& work) {
    Gradients<Config> gradients{{p, shared, work, rank, warp_id() * 16, at}, keys_parity};
    gradients.run();
    at = gradients.at;
  });
}

}  // namespace flash::flash_attn
