// The teams of bwd_sm90_wide.cuh that compute dV and dK: the value team and the key team.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_elementwise.cuh"
#include "flash_attn/bwd_sm90_barriers.cuh"
#include "flash_attn/bwd_sm90_consumer.cuh"
#include "flash_attn/bwd_sm90_wide_shared.cuh"
#include "flash_attn/features.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/score.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// A team that sums dV or dK, of kHeadDim channels.
template <typename Config, int kHeadDim>
struct SumTeam : BwdConsumer<Config, BwdWideShared<Config>> {
  using Base = BwdConsumer<Config, BwdWideShared<Config>>;
  using Base::at;
  using typename Base::Packed;
  Fragment<16, kHeadDim> sum;

  // Adds the product to the sum and goes on to the next rows. A single product of 256 columns would take more registers
  // than a thread has when the kernel starts.
  __device__ void add_product(Packed& factors, RowRing<Config, kHeadDim>& ring) {
    constexpr int kCols = kHeadDim == 256 ? 128 : kHeadDim;
    fence(sum, factors);
#pragma unroll
    for (int col = 0; col < kHeadDim; col += kCols) {
      auto& part = *reinterpret_cast<Fragment<16, kCols>*>(&sum.values[0][col / 8]);
      start_gemm<Config::kBlockM>(part, factors, along_rows(ring.tiles[at.stage], col), true);
    }
    wait_gemms<0>(sum, factors);
    release(ring);
    at.advance();
  }

  // Releases a stage of this warp, in both blocks.
  template <int kChannels>
  __device__ void release(const RowRing<Config, kChannels>& ring) const {
    __syncwarp();
    if (lane_id() != 0) return;
#pragma unroll
    for (int rank = 0; rank < Config::kCluster; ++rank) ptx::arrive_in(rank, ring.barriers.empty[at.stage]);
  }
};

template <typename Config>
struct ValueTeam : SumTeam<Config, Config::kHeadDimV> {
  using Base = SumTeam<Config, Config::kHeadDimV>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::sum, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // Returns the left operand of dV for S^T, and leaves the weights of dP^T to the key team.
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

  __device__ void step(int head, int row_block, bool cut) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    this->wait_rows(head, rows, cut);
    Scores s;
    ptx::wgmma_fence();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k), along_cols(shared.q.tiles[at.stage]), false);
    wait_gemms<0>(s);
    Packed weights = weigh(s, head, rows, cut);
    this->release(shared.q);
    shared.dout.barriers.wait_full(at);
    this->add_product(weights, shared.dout);
  }

  __device__ void run() {
    sum.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block(p, [&](int head, int row_block, bool cut) { step(head, row_block, cut); });
    await(kEmptyBarrier);
    this->store_sum(sum, p.problem.dropout_rescale, p.dv, p.problem.head_dim_v);
  }
};

template <typename Config>
struct KeyTeam : SumTeam<Config, Config::kHeadDim> {
  using Base = SumTeam<Config, Config::kHeadDim>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::sum, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // Returns dS^T for dP^T, with the weights that the value team has left.
  __device__ Packed differentiate(Scores& dp) const {
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

  __device__ void step(int head, int row_block, bool cut) {
    this->wait_rows(head, interval_of<Config::kBlockM>(row_block), cut);
    shared.dout.barriers.wait_full(at);
    Scores dp;
    ptx::wgmma_fence();
    start_gemm<Config::kHeadDimV>(dp, along_cols(shared.v), along_cols(shared.dout.tiles[at.stage]), false);
    wait_gemms<0>(dp);
    await(kWeightsBarrier);
    Packed gradients = differentiate(dp);
    this->release(shared.dout);
    store_transposed(shared.scores, gradients, key0);
    ptx::fence_async_shared();
    release(kGradientsBarrier);
    this->add_product(gradients, shared.q);
  }

  __device__ void run() {
    sum.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block(p, [&](int head, int row_block, bool cut) { step(head, row_block, cut); });
    this->store_sum(sum, p.problem.softmax_scale, p.dk, p.problem.head_dim);
  }
};

}  // namespace flash::flash_attn
