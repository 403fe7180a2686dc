// Attention, backward, for sm_90 and head dims above 128, of which one warpgroup cannot sum both dV and dK.
//
// A block takes 64 keys of a key head and walks over the rows that see them as bwd_sm90.cuh does. Its two warpgroups
// are teams with the same keys:
//
//   value team    S^T = K Q^T     P^T              dV += P^T dO      dQ = dS K, every other 64 channels
//   key team      dP^T = V dO^T   dS^T from P^T    dK += dS^T Q      dQ = dS K, the others
//
// The value team hands over P^T lane by lane, the key team dS, both through shared memory. A negative weight says that
// dropout dropped it. dQ is added to the sums in global memory from registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "flash_attn/bwd_finish.cuh"
#include "flash_attn/bwd_prepare.cuh"
#include "flash_attn/bwd_sm90_steps.cuh"
#include "flash_attn/config.h"
#include "flash_attn/dropout.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct BwdWideConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kParts = kHeadDim / 64;  // of dQ
};

template <typename Config>
struct BwdWideShared {
  using T = typename Config::T;
  SharedTile<T, Config::kBlockN, Config::kHeadDim> k, v;
  SharedTile<T, Config::kBlockM, Config::kBlockN> ds;
  RowRing<Config> q, dout;                          // with lse and delta
  uint4 weights[Config::kBlockM / 16][kWarpgroup];  // P^T dscore/dS, of each lane
  ptx::SharedBarrier keys_here;
};

constexpr int kTeamThreads = 2 * kWarpgroup;
constexpr int kWeightsBarrier = 1, kGradientsBarrier = 2;

template <typename Config>
struct Team : BwdConsumer<Config, BwdWideShared<Config>> {
  using Base = BwdConsumer<Config, BwdWideShared<Config>>;
  using Base::p, Base::shared, Base::block, Base::rank, Base::key0, Base::at;
  using typename Base::Packed;
  using Part = Fragment<16, 64>;

  // The team's parts of dQ, of which there are kCount.
  template <int kCount>
  __device__ void start_dq(Part (&dq)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::fence_products();
      start_gemm<Config::kBlockN>(dq[i], along_cols(shared.ds), along_rows(shared.k, 64 * (2 * i + rank)), false);
    }
  }

  __device__ void add_dq(const Part& dq, int i, int head, int row_block) const {
    const Span& q = block.seq.q;
    const int row0 = row_block * Config::kBlockM + key0;
    float* sums = dq_rows<Config::kHeadDim>(p, q, head, 0) + 64 * (2 * i + rank) + 4 * (lane_id() % 4);
#pragma unroll
    for (int r = 0; r < dq.kLaneRows; ++r) {
      const int row = row0 + dq.row(r);
      if (row >= q.length) continue;
#pragma unroll
      for (int c = 0; c < dq.kLaneCols; c += 4) {
        ptx::add_global(sums + int64_t{row} * Config::kHeadDim + 4 * c, dq(r, c), dq(r, c + 1), dq(r, c + 2),
                        dq(r, c + 3));
      }
    }
  }

  // Adds the parts on their way, behind which there is nothing.
  template <int kCount>
  __device__ void finish_dq(Part (&dq)[kCount], int head, int row_block) const {
    if constexpr (kCount == 2) {
      wait_gemms<1>(dq[0]);
      add_dq(dq[0], 0, head, row_block);
    }
    wait_gemms<0>(dq[kCount - 1]);
    add_dq(dq[kCount - 1], kCount - 1, head, row_block);
  }
};

template <typename Config>
struct ValueTeam : Team<Config> {
  using Base = Team<Config>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::kPlain;
  using typename Base::Packed, typename Base::Part, typename Base::Scores, typename Base::KeySum, typename Base::T;
  KeySum dv;

  // S^T to what dV is summed with. Leaves the weights of dP^T to the key team.
  __device__ Packed weigh(Scores& s, int head, const Interval& rows) const {
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
    this->probabilities(s, head, rows);
    if (!kPlain && p.problem.rng_state != nullptr) {
      const Dropout dropout(p.problem, block.work.entry, head);
      dropout.for_each_dropped_transposed(s, block.keys.first + key0, rows.first,
                                          [&](int r, int c) { s(r, c) = -s(r, c); });
    }
    weights = pack<T>(s);
#pragma unroll
    for (int i = 0; i < Config::kBlockM / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t& weight = weights.values[0][i][j];
        words[j] = weight;
        if (kPlain) continue;
        if (cap > 0) {
          const float2 x = ptx::unpack<T>(weight), slope = ptx::unpack<T>(slopes.values[0][i][j]);
          words[j] = ptx::pack<T>(x.x * slope.x, x.y * slope.y);
        }
        weight = ptx::clamp_below<T>(weight);
      }
      shared.weights[i][threadIdx.x % kWarpgroup] = {words[0], words[1], words[2], words[3]};
    }
    return weights;
  }

  __device__ void step(int head, int row_block) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    this->wait_rows(rows);
    Scores s;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k), along_cols(shared.q.tiles[at.stage]), false);
    wait_gemms<0>(s);
    Packed weights = weigh(s, head, rows);
    if (this->leads()) shared.q.barriers.release(at);
    ptx::arrive_at_barrier<kTeamThreads>(kWeightsBarrier);
    shared.dout.barriers.wait_full(at);
    fence(dv, weights);
    start_gemm<Config::kBlockM>(dv, weights, along_rows(shared.dout.tiles[at.stage]), true);
    ptx::sync_barrier<kTeamThreads>(kGradientsBarrier);
    Part dq[(Config::kParts + 1) / 2];
    this->start_dq(dq);
    wait_gemms<(Config::kParts + 1) / 2>(dv);
    if (this->leads()) shared.dout.barriers.release(at);
    this->finish_dq(dq, head, row_block);
    at.advance();
  }

  __device__ void run() {
    dv.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    this->store_sum(dv, p.problem.dropout_rescale, p.dv);
  }
};

template <typename Config>
struct KeyTeam : Team<Config> {
  using Base = Team<Config>;
  using Base::p, Base::shared, Base::block, Base::rank, Base::key0, Base::at, Base::kPlain;
  using typename Base::Packed, typename Base::Part, typename Base::Scores, typename Base::KeySum, typename Base::T;
  KeySum dk;

  // dP^T to dS^T, with the weights that the value team has left.
  __device__ Packed differentiate(Scores& dp) const {
#pragma unroll
    for (int i = 0; i < Config::kBlockM / 16; ++i) {
      const uint4 words = shared.weights[i][threadIdx.x % kWarpgroup];
      const uint32_t pairs[2][2] = {{words.x, words.z}, {words.y, words.w}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = 4 * i + 2 * half;
        const float2 delta = *reinterpret_cast<const float2*>(&shared.dout.values[at.stage][dp.col(c)]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 weight = ptx::unpack<T>(pairs[r][half]);
          float &first = dp(r, c), &second = dp(r, c + 1);
          if constexpr (kPlain) {
            first = weight.x * (first - delta.x);
            second = weight.y * (second - delta.y);
          } else {
            const float rescale = p.problem.dropout_rescale;
            first = weight.x * (signbit(weight.x) ? delta.x : first * rescale - delta.x);
            second = weight.y * (signbit(weight.y) ? delta.y : second * rescale - delta.y);
          }
        }
      }
    }
    return pack<T>(dp);
  }

  __device__ void step(int head, int row_block) {
    this->wait_rows(interval_of<Config::kBlockM>(row_block));
    shared.dout.barriers.wait_full(at);
    Scores dp;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(dp, along_cols(shared.v), along_cols(shared.dout.tiles[at.stage]), false);
    wait_gemms<0>(dp);
    ptx::sync_barrier<kTeamThreads>(kWeightsBarrier);
    Packed gradients = differentiate(dp);
    if (this->leads()) shared.dout.barriers.release(at);
    store_transposed(shared.ds, gradients, key0);
    ptx::fence_async_reads();
    ptx::arrive_at_barrier<kTeamThreads>(kGradientsBarrier);
    shared.q.barriers.wait_full(at);
    fence(dk, gradients);
    start_gemm<Config::kBlockM>(dk, gradients, along_rows(shared.q.tiles[at.stage]), true);
    ptx::sync_barrier<kWarpgroup>(own_barrier(rank));
    Part dq[Config::kParts / 2];
    this->start_dq(dq);
    wait_gemms<Config::kParts / 2>(dk);
    if (this->leads()) shared.q.barriers.release(at);
    this->finish_dq(dq, head, row_block);
    at.advance();
  }

  __device__ void run() {
    dk.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    this->store_sum(dk, p.problem.softmax_scale, p.dk);
  }
};

// ---------------------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_wide_kernel(const __grid_constant__ BwdSm90Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdWideShared<Config>>();
  const KeyBlock<Config> block(p.bwd);
  if (!block.exists()) return;
  if (threadIdx.x == 0) {
    shared.keys_here.init(2);
    shared.q.barriers.init(Config::kConsumers);
    shared.dout.barriers.init(Config::kConsumers);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int rank = warpgroup_id();
  if (rank == Config::kConsumers) {
    ptx::keep_registers<Config::kProducerRegisters>();
    if (block.has_rows() && threadIdx.x == Config::kConsumers * kWarpgroup) load_block(p, shared, block);
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    const int key0 = threadIdx.x % kWarpgroup / 32 * 16;
    if (rank == 0) ValueTeam<Config>{{{p.bwd, shared, block, 0, key0}}}.run();
    if (rank == 1) KeyTeam<Config>{{{p.bwd, shared, block, 1, key0}}}.run();
  }
#endif
}

template <typename T, int kHeadDim, Features kFeatures>
void run_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Config = BwdWideConfig<T, kHeadDim, kFeatures>;
  run_bwd_prepare<BwdPrepareConfig<T, kHeadDim>>(p, stream);
  launch_bwd_sm90<bwd_wide_kernel<Config>, Config, BwdWideShared<Config>>(params_of<Config>(p), stream);
  run_bwd_finish<BwdFinishConfig<T, kHeadDim>>(p, stream);
}

}  // namespace flash::flash_attn
