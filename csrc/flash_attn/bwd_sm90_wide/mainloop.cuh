// The two teams of bwd_sm90_wide that sum dV and dK: the value team and the key team. Each has a mainloop, a step for
// each m_block, with a prologue and an epilogue.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/elementwise.cuh"
#include "flash_attn/bwd_sm90/barriers.cuh"
#include "flash_attn/bwd_sm90/consumer.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90_wide/shared.cuh"
#include "flash_attn/features.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// A team that sums dV or dK, of kChannels channels.
template <typename Config, int kChannels>
struct SumTeam : BwdConsumer<Config, BwdWideShared<Config>> {
  using Base = BwdConsumer<Config, BwdWideShared<Config>>;
  using Base::at;
  using typename Base::Packed, typename Base::Scores;
  RingCursor<1> box_at;
  Fragment<16, kChannels> sum;

  // With ClusterSplit::kChannels: adds the partial sums of the other thread block's half of the channels, and sends it
  // these.
  template <typename Box>
  __device__ void add_other_half(Scores& s, Box& box) {
#pragma unroll
    for (int col = 0; col < s.kCols; col += box.kCols) {
      auto& columns = *reinterpret_cast<Fragment<16, box.kCols>*>(&s.values[0][col / 8]);
      box.add_other_half(columns, ptx::cluster_rank() ^ 1, rematerialized(threadIdx.x), box_at);
    }
  }

  // Adds a product to the sum, releases the stage and goes on to the next. 256 columns are multiplied in two halves:
  // the 128 accumulators of a single product are all the registers that a thread has when the kernel starts.
  __device__ void add_product(Packed& factors, RowRing<Config, kChannels>& ring) {
    constexpr int kCols = kChannels == 256 ? 128 : kChannels;
    fence(sum, factors);
#pragma unroll
    for (int col = 0; col < kChannels; col += kCols) {
      auto& columns = *reinterpret_cast<Fragment<16, kCols>*>(&sum.values[0][col / 8]);
      start_gemm<Config::kBlockM>(columns, factors, along_rows(ring.tiles[at.stage], col), true);
    }
    wait_gemms<0>(sum, factors);
    release(ring);
    at.advance();
  }

  // A warp releases its stage, in all thread blocks that fill it (both, if they copy by multicast).
  template <int kTileChannels>
  __device__ void release(RowRing<Config, kTileChannels>& ring) const {
    __syncwarp();
    if (lane_id() != 0) return;
    if constexpr (Config::kClusterSplit == ClusterSplit::kChannels) return ring.barriers.release(at);
#pragma unroll
    for (int cta_rank = 0; cta_rank < Config::kCluster; ++cta_rank)
      ptx::arrive_in(cta_rank, ring.barriers.empty[at.stage]);
  }
};

template <typename Config>
struct ValueTeam : SumTeam<Config, Config::kChannelsV> {
  using Base = SumTeam<Config, Config::kChannelsV>;
  using Base::p, Base::shared, Base::work, Base::key0, Base::at, Base::sum, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // Turns S^T into P^T, 0 where dropped, the left operand of dV, which it returns. Leaves to the key team the weights
  // of dP^T: P^T times the derivative of the softcap, negative where dropped.
  __device__ Packed weigh(Scores& s, int head, const Interval& rows, bool cut) const {
    const float cap = kPlain ? 0 : p.problem.softcap;
    Packed weights, slopes;
    if constexpr (!kPlain) {
      scale_and_cap(s, p.problem);
      if (cap > 0) {
        Scores slope;
        slope.for_each([&](float& x, int r, int c) { x = cap_slope(s(r, c), cap); });
        slopes = pack<T>(slope);
      }
    }
    this->probabilities(s, head, rows, cut);
    if constexpr (!kPlain) negate_dropped(s, p.problem, this->place_of(head, rows));
    weights = pack<T>(s);
    Packed left = weights;
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < Config::kBlockM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t& weight = weights.values[0][i][j];
          if (cap > 0) left.values[0][i][j] = multiply_pairs<T>(weight, slopes.values[0][i][j]);
          weight = ptx::clamp_below<T>(weight);
        }
      }
    }
    await(kEmptyBarrier);
    store_transposed(shared.scores, left, key0);
    release(kWeightsBarrier);
    return weights;
  }

  __device__ void step(int head, int m_block, bool cut) {
    const Interval rows = interval_of<Config::kBlockM>(m_block);
    this->wait_rows(head, rows, cut);
    Scores s;
    ptx::wgmma_fence();
    start_gemm<Config::kChannels>(s, along_cols(shared.k), along_cols(shared.q.tiles[at.stage]), false);
    wait_gemms<0>(s);
    if constexpr (Config::kClusterSplit == ClusterSplit::kChannels) this->add_other_half(s, shared.partial.s);
    Packed weights = weigh(s, head, rows, cut);
    this->release(shared.q);
    shared.dout.barriers.wait_full(at);
    this->add_product(weights, shared.dout);
  }

  __device__ void prologue() {
    if (work.has_rows()) this->wait_keys();
  }

  __device__ void mainloop() {
    work.for_each_m_block(p, [&](int head, int m_block, bool cut) { step(head, m_block, cut); });
  }

  // Stores dV, once the query team has read the last dS.
  __device__ void epilogue() {
    await(kEmptyBarrier);
    this->store_sum(sum, /*of_values=*/true, Config::channel());
  }

  // The three teams at m_blocks 1 and 0. A step hands the tile `scores` on from team to team:
  //
  //   producer    copy Q1, dO1 | copy Q0, dO0      |              |               |              |
  //   value team               | S1 = K Q1, exp P1 | store P1     | dV += P1 dO1  | S0 = K Q0, exp P0, wait
  //   key team                 | dP1 = V dO1       | wait         | dS1 for P1    | dK += dS1 Q1 | dP0 = V dO0
  //   query team               | wait              |              |               | take dS1     | dQ1 = dS1 K, add
  __device__ void run() {
    sum.fill(0);
    prologue();
    mainloop();
    epilogue();
  }
};

template <typename Config>
struct KeyTeam : SumTeam<Config, Config::kChannels> {
  using Base = SumTeam<Config, Config::kChannels>;
  using Base::p, Base::shared, Base::work, Base::key0, Base::at, Base::sum, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // Turns dP^T into dS^T, with the weights that the value team has left.
  __device__ Packed differentiate(Scores& dp, int head, const Interval& rows) const {
    const Packed weights = load_transposed<T, Config::kBlockM>(shared.scores, key0);
#pragma unroll
    for (int i = 0; i < Config::kBlockM / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = 4 * i + 2 * half;
        const float2 softmax_d = *reinterpret_cast<const float2*>(&shared.dout.values_of(at)[dp.col(c)]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 weight = ptx::unpack<T>(weights.values[0][i][2 * half + r]);
          apply_weight<Config::kFeatures>(dp(r, c), weight.x, softmax_d.x, p.problem);
          apply_weight<Config::kFeatures>(dp(r, c + 1), weight.y, softmax_d.y, p.problem);
        }
      }
    }
    return pack<T>(dp);
  }

  __device__ void step(int head, int m_block, bool cut) {
    const Interval rows = interval_of<Config::kBlockM>(m_block);
    this->wait_rows(head, rows, cut);
    shared.dout.barriers.wait_full(at);
    Scores dp;
    ptx::wgmma_fence();
    start_gemm<Config::kChannelsV>(dp, along_cols(shared.v), along_cols(shared.dout.tiles[at.stage]), false);
    wait_gemms<0>(dp);
    if constexpr (Config::kClusterSplit == ClusterSplit::kChannels) this->add_other_half(dp, shared.partial.dp);
    await(kWeightsBarrier);
    Packed gradients = differentiate(dp, head, rows);
    this->release(shared.dout);
    store_transposed(shared.scores, gradients, key0);
    ptx::fence_async_shared();
    release(kGradientsBarrier);
    this->add_product(gradients, shared.q);
  }

  __device__ void prologue() {
    if (work.has_rows()) this->wait_keys();
  }

  __device__ void mainloop() {
    work.for_each_m_block(p, [&](int head, int m_block, bool cut) { step(head, m_block, cut); });
  }

  // Stores dK.
  __device__ void epilogue() { this->store_sum(sum, /*of_values=*/false, Config::channel()); }

  // In the picture above ValueTeam::run().
  __device__ void run() {
    sum.fill(0);
    prologue();
    mainloop();
    epilogue();
  }
};

}  // namespace flash::flash_attn
