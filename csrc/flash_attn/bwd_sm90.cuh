// Attention, backward, for sm_90: what bwd_sm80.cuh computes, of the same pieces, around the instructions of Hopper.
//
// A block takes 128 keys of a key head and walks over the rows that see them, the last first, kBlockM at a time, of
// every query head that shares the key head. Each of two warpgroups has 64 of the keys, and sums their dV and dK in
// registers. Products are transposed, so that what is exponentiated is the left operand of the next product:
//
//   S^T = K Q^T    P^T     dV += P^T dO          from registers
//   dP^T = V dO^T  dS^T    dK += dS^T Q          likewise
//                          dQ = dS K             from shared memory, where both warpgroups have stored their part of dS
//
// and a warpgroup computes half of dQ: of its channels, or of its rows. The half goes to shared memory, from where a
// copy adds it to the sums in global memory that bwd_finish.cuh rounds.
//
// A third warpgroup starts the copies, with few registers: one warp those of K, V, Q and dO, and one for each half
// those of dQ. Deterministic: blocks take turns in adding to the same rows, those with the first keys first. They start
// in this order, so that none waits for one that has not started.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor_map.h"
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
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"
#include "tile/vec.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct BwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr BwdSm90Tile kTile = bwd_sm90_tile(kHeadDim, kFeatures);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys;
  static constexpr int kStages = 2, kCluster = 1;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr bool kHalvesAreRows = kBlockM == 128;  // of dQ, 64 x 64 each; or else they are channels
  static_assert(kBlockN == 64 * kConsumers && (kBlockM == 64 || kHeadDim == 64));
};

// Channels of dQ that lie together in global memory (bwd_scratch.cuh), and the boxes in which they are added.
constexpr int kDqGroup = 16, kDqBoxRows = 64, kDqBoxCols = 64;

template <typename Config>
struct BwdSm90Shared {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  using Keys = SharedTile<T, kBlockN, kHeadDim>;

  Keys k, v;  // halves of dQ that have fewer than 64 channels read on in v; nobody adds what comes of it to anything
  SharedTile<T, kBlockM, kBlockN> ds[2];
  RowRing<Config> q, dout;                                             // with lse and delta
  alignas(128) float dq[Config::kConsumers][kDqBoxRows * kDqBoxCols];  // 16 channels after 16 channels
  ptx::SharedBarrier keys_here;
};

// Barriers of both warpgroups, and of each and the warp that adds its half of dQ.
constexpr int kDsBarrier = 1;
__device__ inline int dq_full_barrier(int rank) { return 2 + rank; }
__device__ inline int dq_empty_barrier(int rank) { return 4 + rank; }
constexpr int kDqThreads = kWarpgroup + 32;

// ---------------------------------------------------------------------------------------------------------------------
// Copies

// The counter of a half, once it is this block's turn to add: after those with the keys before.
template <typename Config>
__device__ int* await_turn(const BwdParams& p, const KeyBlock<Config>& block, int head, int row_block, int half) {
  const Mask& mask = block.mask;
  const Interval rows = interval_of<Config::kBlockM>(row_block);
  const int first_key = mask.keys_seen_by_any({rows.first, min(rows.last, mask.seqlen_q - 1)}).first;
  int* turn = turns_of(p, row_value_index(p, block.seq.q, block.work.entry, head) + rows.first) + half;
  ptx::wait_for(turn, block.work.first - first_key / Config::kBlockN);
  return turn;
}

__device__ inline void pass_turn(int* turn) {
  if (turn == nullptr) return;
  ptx::wait_stores();
  ptx::announce(turn);
}

// Adds halves of dQ to the sums, by a warp for each.
template <typename Config>
__device__ void add_halves(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, const KeyBlock<Config>& block,
                           int half) {
  const Span& q = block.seq.q;
  const int row0 = static_cast<int>(q.first) + (Config::kHalvesAreRows ? half * kDqBoxRows : 0);
  const int group = Config::kHalvesAreRows ? 0 : half * kDqBoxCols / kDqGroup;
  int* turn = nullptr;  // that is to be passed on
  block.for_each_row_block([&](int head, int row_block) {
    ptx::arrive_at_barrier<kDqThreads>(dq_empty_barrier(half));
    pass_turn(turn);
    ptx::sync_barrier<kDqThreads>(dq_full_barrier(half));
    if (lane_id() == 0) {
      if (p.bwd.turns != nullptr) turn = await_turn(p.bwd, block, head, row_block, half);
      ptx::add_box_async(p.dq_sums, ptx::shared_address(shared.dq[half]), 0, row0 + row_block * Config::kBlockM, group,
                         static_cast<int>(q.batch) * p.bwd.problem.heads + head);
      ptx::commit_stores();
      ptx::wait_stores_read();
    }
    __syncwarp();
  });
  pass_turn(turn);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

template <typename Config>
struct Gradients : BwdConsumer<Config, BwdSm90Shared<Config>> {
  using Base = BwdConsumer<Config, BwdSm90Shared<Config>>;
  using Base::p, Base::shared, Base::block, Base::rank, Base::key0, Base::at, Base::kPlain;
  using typename Base::Scores, typename Base::Packed, typename Base::KeySum, typename Base::T;
  KeySum dv, dk;
  int parity = 0;  // of the step

  // dP^T, of which nothing has been dropped yet, less delta.
  __device__ void subtract_delta(Scores& dp, const Dropped& dropped) const {
#pragma unroll
    for (int c = 0; c < dp.kLaneCols; c += 2) {
      const float2 delta = *reinterpret_cast<const float2*>(&shared.dout.values[at.stage][dp.col(c)]);
#pragma unroll
      for (int r = 0; r < dp.kLaneRows; ++r) {
        if constexpr (!kPlain) {
          dp(r, c) = dropped.has(r, c) ? 0 : dp(r, c) * p.problem.dropout_rescale;
          dp(r, c + 1) = dropped.has(r, c + 1) ? 0 : dp(r, c + 1) * p.problem.dropout_rescale;
        }
        dp(r, c) -= delta.x;
        dp(r, c + 1) -= delta.y;
      }
    }
  }

  // Which elements are dropped.
  __device__ Dropped dropped_of(const Scores& s, int head, const Interval& rows) const {
    Dropped dropped;
    if (kPlain || p.problem.rng_state == nullptr) return dropped;
    const Dropout dropout(p.problem, block.work.entry, head);
    dropout.for_each_dropped_transposed(s, block.keys.first + key0, rows.first,
                                        [&](int r, int c) { dropped.bits[r] |= 1u << c; });
    return dropped;
  }

  // Gives the warpgroup's half of dQ to the warp that adds it. Of the box's rows `count` belong to the entry; to those
  // of the next one nothing may be added, not even NaN that is among the keys.
  __device__ void hand_over(Fragment<16, kDqBoxCols>& dq, int count) const {
    ptx::sync_barrier<kDqThreads>(dq_empty_barrier(rank));
    const int row0 = threadIdx.x % kWarpgroup / 32 * 16;
    if (count < kDqBoxRows) {
      dq.for_each([&](float& x, int r, int) { x = row0 + dq.row(r) < count ? x : 0; });
    }
    float* half = shared.dq[rank] + 4 * (lane_id() % 4);
#pragma unroll
    for (int group = 0; group < kDqBoxCols / kDqGroup; ++group) {
#pragma unroll
      for (int r = 0; r < dq.kLaneRows; ++r) {
        float* row = half + (group * kDqBoxRows + row0 + dq.row(r)) * kDqGroup;
        const int c = 4 * group;
        store(row, Vec<float, 4>{dq(r, c), dq(r, c + 1), dq(r, c + 2), dq(r, c + 3)});
      }
    }
    ptx::fence_async_reads();
    ptx::arrive_at_barrier<kDqThreads>(dq_full_barrier(rank));
  }

  // S^T and dP^T, which are on their way, to the weights of dV and of dK.
  __device__ void differentiate(Scores& s, Scores& dp, Packed& weights, Packed& gradients, int head,
                                const Interval& rows) const {
    if constexpr (kPlain) {
      wait_gemms<1>(s);
      this->probabilities(s, head, rows);
      weights = pack<T>(s);
      wait_gemms<0>(dp);
      subtract_delta(dp, {});
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
    } else {
      wait_gemms<0>(s, dp);
      const Dropped dropped = dropped_of(s, head, rows);
      subtract_delta(dp, dropped);
      scale_and_cap(s, p.problem);
      if (const float cap = p.problem.softcap; cap > 0) {
        dp.for_each([&](float& x, int r, int c) { x *= cap_slope(s(r, c), cap); });
      }
      this->probabilities(s, head, rows);
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
      s.for_each([&](float& x, int r, int c) { x = dropped.has(r, c) ? 0 : x; });
      weights = pack<T>(s);
    }
    gradients = pack<T>(dp);
  }

  __device__ void step(int head, int row_block) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    auto &q = shared.q.tiles[at.stage], &dout = shared.dout.tiles[at.stage];
    auto& ds = shared.ds[parity];
    this->wait_rows(rows);
    Scores s, dp;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k, 64 * rank), along_cols(q), false);
    shared.dout.barriers.wait_full(at);
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(dp, along_cols(shared.v, 64 * rank), along_cols(dout), false);
    Packed weights, gradients;
    differentiate(s, dp, weights, gradients, head, rows);

    if constexpr (!Config::kTile.dv_first) store_transposed(ds, gradients, key0);
    fence(dv, weights);
    start_gemm<Config::kBlockM>(dv, weights, along_rows(dout), true);
    if constexpr (Config::kTile.dv_first) store_transposed(ds, gradients, key0);
    ptx::fence_async_reads();
    ptx::sync_barrier<2 * kWarpgroup>(kDsBarrier);
    Fragment<16, kDqBoxCols> dq;
    ptx::fence_products();
    start_gemm<Config::kBlockN>(dq, along_cols(ds, Config::kHalvesAreRows ? 64 * rank : 0),
                                along_rows(shared.k, Config::kHalvesAreRows ? 0 : kDqBoxCols * rank), false);
    wait_gemms<1>(dv);
    if (this->leads()) shared.dout.barriers.release(at);
    fence(dk, gradients);
    start_gemm<Config::kBlockM>(dk, gradients, along_rows(q), true);
    wait_gemms<1>(dq);
    hand_over(dq, block.mask.seqlen_q - rows.first - (Config::kHalvesAreRows ? kDqBoxRows * rank : 0));
    wait_gemms<0>(dk);
    if (this->leads()) shared.q.barriers.release(at);
    at.advance();
    parity ^= 1;
  }

  __device__ void run() {
    dv.fill(0), dk.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    this->store_sum(dv, p.problem.dropout_rescale, p.dv);
    this->store_sum(dk, p.problem.softmax_scale, p.dk);
  }
};

// ---------------------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_sm90_kernel(const __grid_constant__ BwdSm90Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdSm90Shared<Config>>();
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
    if (!block.has_rows()) return;
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role < Config::kConsumers) add_halves(p, shared, block, role);
    if (role == Config::kConsumers && lane_id() == 0) load_block(p, shared, block);
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    Gradients<Config>{{p.bwd, shared, block, rank, warp_id() * 16}}.run();
  }
#endif
}

// The sums of dQ as (heads of all entries, channels in groups, rows, channels of a group), in boxes of a half.
template <typename Config>
CUtensorMap map_of_sums(const BwdParams& p) {
  const Problem& problem = p.problem;
  const int64_t heads = int64_t{problem.heads} * (problem.cu_seqlens_q ? 1 : problem.batch), rows = problem.seqlen_q;
  constexpr int64_t kRowBytes = Config::kHeadDim * sizeof(float), kGroupBytes = kDqGroup * sizeof(float);
  return tensor_map(p.dq_sums, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {kDqGroup, rows, Config::kHeadDim / kDqGroup, heads},
                    {kRowBytes, kGroupBytes, rows * kRowBytes}, {kDqGroup, kDqBoxRows, kDqBoxCols / kDqGroup, 1},
                    CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Config = BwdSm90Config<T, kHeadDim, kFeatures>;
  run_bwd_prepare<BwdPrepareConfig<T, kHeadDim>>(p, stream);
  launch_bwd_sm90<bwd_sm90_kernel<Config>, Config, BwdSm90Shared<Config>>(params_of<Config>(p, map_of_sums<Config>(p)),
                                                                          stream);
  run_bwd_finish<BwdFinishConfig<T, kHeadDim>>(p, stream);
}

}  // namespace flash::flash_attn
