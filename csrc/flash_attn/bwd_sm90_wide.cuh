// Attention, backward, for sm_90 and head dims above 128, of which one warpgroup cannot sum both dV and dK.
//
// A block takes 64 keys of a key head and walks over the rows that see them as bwd_sm90.cuh does. Its warpgroups are
// teams with the same keys:
//
//   value team    S^T = K Q^T     P^T              dV += P^T dO
//   key team      dP^T = V dO^T   dS^T from P^T    dK += dS^T Q
//   query team    dQ = dS K, 64 channels at a time, which it adds to the sums in global memory
//
// Tiles in shared memory go round: the value team leaves P^T in one, of which the key team makes dS for the query team.
// A negative weight says that dropout dropped it. How fast the L2 cache adds is the bottleneck: a team that only adds
// keeps it busy while the others compute. A fourth warpgroup starts the copies.
#pragma once

#include <cmath>
#include <cstdint>
#include <new>

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
#include "ptx/sync.cuh"
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
  static constexpr int kConsumers = 2;  // of Q and dO
  static constexpr int kThreads = kWarpgroup * 4;
  static constexpr int kSumRegisters = 208, kQueryRegisters = 72, kProducerRegisters = 24;
};

template <typename Config>
struct BwdWideShared {
  using T = typename Config::T;
  SharedTile<T, Config::kBlockN, Config::kHeadDim> k, v;
  SharedTile<T, Config::kBlockM, Config::kBlockN> scores[2];  // P^T, then dS
  RowRing<Config> q, dout;                                    // with lse and delta
  ptx::SharedBarrier keys_here;
  alignas(16) char block[sizeof(KeyBlock<Config>)];  // which does not fit the registers
};

// Barriers of two teams, of which one tells and the other waits, for both tiles of scores: that the tile is empty, or
// has weights, or gradients.
enum ScoresBarrier { kEmpty = 8, kWeights = 10, kGradients = 12 };
__device__ inline void tell(ScoresBarrier barrier, int tile) { ptx::arrive_at_barrier<2 * kWarpgroup>(barrier + tile); }
__device__ inline void await(ScoresBarrier barrier, int tile) { ptx::sync_barrier<2 * kWarpgroup>(barrier + tile); }

// Barriers of the query team and the warp that waits for its turns, and the one that passes them on.
enum TurnBarrier { kTurnHere = 1, kTurnDone };
constexpr int kTurnThreads = kWarpgroup + 32;

// A team that sums dV or dK.
template <typename Config>
struct SumTeam : BwdConsumer<Config, BwdWideShared<Config>> {
  using Base = BwdConsumer<Config, BwdWideShared<Config>>;
  using Base::at, Base::leads;
  using typename Base::Packed, typename Base::KeySum;
  KeySum sum;
  int tile = 0;  // of scores

  // Sums the product and goes on to the next rows. One of 256 columns would take more registers than a thread has when
  // the kernel starts.
  __device__ void add_product(Packed& factors, RowRing<Config>& ring) {
    constexpr int kCols = Config::kHeadDim == 256 ? 128 : Config::kHeadDim;
    fence(sum, factors);
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += kCols) {
      auto& part = *reinterpret_cast<Fragment<16, kCols>*>(&sum.values[0][col / 8]);
      start_gemm<Config::kBlockM>(part, factors, along_rows(ring.tiles[at.stage], col), true);
    }
    wait_gemms<0>(sum, factors);
    if (leads()) ring.barriers.release(at);
    at.advance();
    tile ^= 1;
  }
};

template <typename Config>
struct ValueTeam : SumTeam<Config> {
  using Base = SumTeam<Config>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::sum, Base::tile, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

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
    Packed left = weights;
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < Config::kBlockM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t& weight = weights.values[0][i][j];
          if (cap > 0) {
            const float2 x = ptx::unpack<T>(weight), slope = ptx::unpack<T>(slopes.values[0][i][j]);
            left.values[0][i][j] = ptx::pack<T>(x.x * slope.x, x.y * slope.y);
          }
          weight = ptx::clamp_below<T>(weight);
        }
      }
    }
    await(kEmpty, tile);
    store_transposed(shared.scores[tile], left, key0);
    tell(kWeights, tile);
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
    shared.dout.barriers.wait_full(at);
    this->add_product(weights, shared.dout);
  }

  __device__ void run() {
    sum.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    for (int i = 0; i < 2; ++i) await(kEmpty, i);
    this->store_sum(sum, p.problem.dropout_rescale, p.dv);
  }
};

template <typename Config>
struct KeyTeam : SumTeam<Config> {
  using Base = SumTeam<Config>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::sum, Base::tile, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // dP^T to dS^T, with the weights that the value team has left.
  __device__ Packed differentiate(Scores& dp) const {
    const Packed weights = load_transposed<T, Config::kBlockM>(shared.scores[tile], key0);
#pragma unroll
    for (int i = 0; i < Config::kBlockM / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = 4 * i + 2 * half;
        const float2 delta = *reinterpret_cast<const float2*>(&shared.dout.values[at.stage][dp.col(c)]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 weight = ptx::unpack<T>(weights.values[0][i][2 * half + r]);
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
    await(kWeights, tile);
    Packed gradients = differentiate(dp);
    if (this->leads()) shared.dout.barriers.release(at);
    store_transposed(shared.scores[tile], gradients, key0);
    ptx::fence_async_reads();
    tell(kGradients, tile);
    this->add_product(gradients, shared.q);
  }

  __device__ void run() {
    sum.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    this->store_sum(sum, p.problem.softmax_scale, p.dk);
  }
};

template <typename Config>
struct QueryTeam {
  using Part = Fragment<16, 64>;
  const BwdParams& p;
  BwdWideShared<Config>& shared;
  const KeyBlock<Config>& block;
  int tile = 0;  // of scores

  // Adds channels `col` .. col + 63 of the rows of a block.
  __device__ void add(const Part& dq, int col, int head, int row_block) const {
    const Span& q = block.seq.q;
    const int row0 = row_block * Config::kBlockM + threadIdx.x % kWarpgroup / 32 * 16;
#pragma unroll
    for (int r = 0; r < dq.kLaneRows; ++r) {
      const int row = row0 + dq.row(r);
      if (row >= q.length) continue;
      float* sums = dq_sums<Config::kHeadDim>(p, q, head, 0, row, col / 16) + 4 * (lane_id() % 4);
#pragma unroll
      for (int c = 0; c < dq.kLaneCols; c += 4) {
        ptx::add_global(sums + c / 4 * kDqGroupStep<Config::kHeadDim>, dq(r, c), dq(r, c + 1), dq(r, c + 2),
                        dq(r, c + 3));
      }
    }
  }

  __device__ void step(int head, int row_block) {
    await(kGradients, tile);
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += 64) {
      Part dq;
      ptx::fence_products();
      start_gemm<Config::kBlockN>(dq, along_cols(shared.scores[tile]), along_rows(shared.k, col), false);
      wait_gemms<0>(dq);
      if (col + 64 == Config::kHeadDim) tell(kEmpty, tile);
      if (col == 0 && p.turns != nullptr) ptx::sync_barrier<kTurnThreads>(kTurnHere);
      add(dq, col, head, row_block);
    }
    if (p.turns != nullptr) ptx::sync_barrier<kTurnThreads>(kTurnDone);
    tile ^= 1;
  }

  __device__ void run() {
    for (int i = 0; i < 2; ++i) tell(kEmpty, i);
    if (block.has_rows()) shared.keys_here.wait(0);
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
  }
};

// ---------------------------------------------------------------------------------------------------------------------

// Deterministic: blocks add to the same rows in turn, those with the first keys first. A warp waits for the turns of
// the query team, and another one passes them on, so that the team waits for neither.
template <typename Config>
struct Turns {
  const BwdParams& p;
  const KeyBlock<Config>& block;

  // How many blocks have added to the rows.
  __device__ int* counter(int head, int row_block) const {
    return turns_of(p, row_value_index(p, block.seq.q, block.work.entry, head) + row_block * Config::kBlockM);
  }

  __device__ void await_all() const {
    const Mask& mask = block.mask;
    block.for_each_row_block([&](int head, int row_block) {
      const Interval rows = interval_of<Config::kBlockM>(row_block);
      const int first_key = mask.keys_seen_by_any({rows.first, min(rows.last, mask.seqlen_q - 1)}).first;
      if (lane_id() == 0) ptx::wait_for(counter(head, row_block), block.work.first - first_key / Config::kBlockN);
      __syncwarp();
      ptx::sync_barrier<kTurnThreads>(kTurnHere);
    });
  }

  __device__ void pass_all() const {
    block.for_each_row_block([&](int head, int row_block) {
      ptx::sync_barrier<kTurnThreads>(kTurnDone);
      if (lane_id() == 0) ptx::announce(counter(head, row_block));
      __syncwarp();
    });
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_wide_kernel(const __grid_constant__ BwdSm90Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdWideShared<Config>>();
  if (threadIdx.x == 0) {
    new (shared.block) KeyBlock<Config>(p.bwd);
    shared.keys_here.init(2);
    shared.q.barriers.init(Config::kConsumers);
    shared.dout.barriers.init(Config::kConsumers);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const auto& block = *reinterpret_cast<const KeyBlock<Config>*>(shared.block);
  if (!block.exists()) return;
  const int rank = warpgroup_id(), key0 = threadIdx.x % kWarpgroup / 32 * 16;
  if (rank == 0) {
    ptx::take_registers<Config::kSumRegisters>();
    ValueTeam<Config>{{{p.bwd, shared, block, rank, key0}}}.run();
  } else if (rank == 1) {
    ptx::take_registers<Config::kSumRegisters>();
    KeyTeam<Config>{{{p.bwd, shared, block, rank, key0}}}.run();
  } else if (rank == 2) {
    ptx::keep_registers<Config::kQueryRegisters>();
    QueryTeam<Config>{p.bwd, shared, block}.run();
  } else {
    ptx::keep_registers<Config::kProducerRegisters>();
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role == 0 && lane_id() == 0 && block.has_rows()) load_block(p, shared, block);
    if (p.bwd.turns == nullptr) return;
    if (role == 1) Turns<Config>{p.bwd, block}.await_all();
    if (role == 2) Turns<Config>{p.bwd, block}.pass_all();
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
