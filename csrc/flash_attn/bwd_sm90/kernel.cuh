// Attention, backward, for sm_90 and head dims up to 128: the computation of bwd_sm80, with TMA copies and wgmma
// products.
//
// Warp-specialized and persistent: a thread block takes one n_block, 128 keys of a key head, after another. For each,
// it visits the m_blocks that see these keys, kBlockM rows each, of every query head that shares the key head; or,
// where there are too few n_blocks to occupy the GPU, a split of these (split_n_blocks in bwd/planner.h). Each of the
// two consumer warpgroups (0 and 1, bwd_sm90/mainloop.cuh) has 64 of the keys, and sums their dV and dK in registers.
// Products are transposed, so that the scores of one product are, in registers, the left operand of the next:
//
//   S^T = K Q^T    P^T     dV += P^T dO          from registers
//   dP^T = V dO^T  dS^T    dK += dS^T Q          likewise
//                          dQ = dS K             from shared memory, where each warpgroup stores dS of its keys
//
// Each warpgroup computes half of dQ: half of the rows if kBlockM is 128, else half of the channels. With 128 rows the
// warpgroups play ping-pong: the second works half a step behind the first, so that one multiplies while the other
// computes exponentials; and dQ is computed one step late, so that neither waits for the other's dS.
//
// A warpgroup stores its half of dQ in a box in shared memory, from which its dQ warp has TMA add it to dq_accum. That
// starts as zeros, and bwd/finish.cu rounds it. With rounds_dq (bwd/planner.h), thread blocks wait for one another
// instead, which saves zeroing and rounding dq_accum: of the n_blocks that the rows see, the first stores its half to
// dq_accum, others add theirs, and the last loads the sum into its box, adds its half and rounds to dQ.
//
// The third warpgroup keeps few registers. Its warps 0 and 1 are the dQ warps (bwd_sm90/dq.cuh), one for each half;
// warp 2 takes work tiles and loads K, V, Q and dO (Loader); warp 3, with m_blocks of 64 rows, waits for other thread
// blocks on behalf of the dQ warps. In instances of kDropped, a fourth warpgroup draws the bits of dropout. The next K
// and V are loaded while dV and dK are stored.
//
// Hand-overs through mbarriers (bwd_sm90/shared.cuh): work_ring, which work tile comes next, from the loader to all
// warps; keys_here and keys_free, K and V; the rings q and dout, rows with their lse and softmax_d; ds_ring, dS between
// warpgroups in ping-pong; semaphore_ring, from warp 3 to the dQ warps; accum_here, dq_accum in a box. Through named
// barriers (bwd_sm90/barriers.cuh): the two warpgroups within a step, and each box with its dQ warp.
//
// Deterministic: n_blocks add to the same rows in the order of their keys (DqOrder).
#pragma once

#include <cstdint>

#include "common/dispatch.h"
#include "common/tensor_map.h"
#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/rows.h"
#include "flash_attn/bwd_sm90/dq.cuh"
#include "flash_attn/bwd_sm90/launch.cuh"
#include "flash_attn/bwd_sm90/load.cuh"
#include "flash_attn/bwd_sm90/mainloop.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/shared.cuh"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias_tile.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Warp 2 of the third warpgroup: takes work tiles, tells the other warps which, and starts the copies of what they
// read. Lane 0 runs it alone; where there may be key ranges, all lanes do (visits_rows).
template <typename Config>
struct Loader {
  const BwdSm90Launch& p;
  BwdSm90Shared<Config>& shared;
  RingCursor<2> work_at;
  RingCursor<Config::kStages> at;
  uint32_t keys_parity = 1;  // the parity of keys_free to wait for; 1 first, which passes at once: K and V are free

  // Tells the other warps the index of the next work tile; -1 is the end.
  __device__ void tell(int index) {
    if (starts_copies<Config>()) {
      shared.work_ring.wait_empty(work_at);
      shared.work_index[work_at.stage] = index;
      shared.work_ring.full[work_at.stage].arrive();
    }
    work_at.advance();
  }

  __device__ int take() const {
    int index = 0;
    if (starts_copies<Config>()) index = atomicAdd(p.plan.scratch.next_work, 1);
    return Config::kRanges != RangeSource::kNone ? warp_uniform(index) : index;
  }

  __device__ void run() {
    const int end = NBlockWork<Config>::num_work_tiles(p);
    for (int index = take(); index < end; index = take()) {
      const NBlockWork<Config> work(p, index);
      if (!work.exists()) continue;
      tell(index);
      if (!work.has_rows()) continue;
      shared.keys_free.wait(keys_parity);
      keys_parity ^= 1;
      load_work(p, shared, work, at);
    }
    tell(-1);
  }
};

// ---------------------------------------------------------------------------------------------------------------------

// A warp of the drawers, in instances of kDropped: draws which elements of a tile of scores dropout drops, for 32 keys.
// That belongs to the stage of Q. All lanes wait for it to be empty: it cannot be filled without them.
template <typename Config>
__device__ void draw_dropped(const BwdSm90Launch& p, BwdSm90Shared<Config>& shared) {
  static_assert(DroppedRing<Config>::kWarps == 2 * kDrawers);
  const int warp = warp_id() % kDrawers * 2;  // the first of the two of a consumer whose keys these are
  DropoutDrawer drawer(p.problem);
  RingCursor<Config::kStages> at;
  for_each_work_tile(p, shared, [&](const NBlockWork<Config>& work) {
    work.for_each_m_block(p, [&](int head, int m_block, bool) {
      drawer.move_to(p.problem, work.n_block.entry, head);
      shared.q.barriers.wait_empty(at);
      auto& bits = shared.dropped.bits_of(at);
#pragma unroll
      for (int part = 0; part < Config::kBlockM / 64; ++part) {
        uint32_t words[2];
        drawer.draw_transposed(words, work.keys.first + 16 * warp, m_block * Config::kBlockM + 64 * part);
        for (int i = 0; i < 2; ++i) bits[warp + i][lane_id()].words[part] = words[i];
      }
      __syncwarp();
      if (lane_id() == 0) shared.q.barriers.full[at.stage].arrive();
      at.advance();
    });
  });
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_sm90_kernel(const __grid_constant__ BwdSm90Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdSm90Shared<Config>>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int rank = warpgroup_id();
  if (rank == Config::kConsumers) {
    ptx::setmaxnreg_dec<Config::kRegisters.producer>();
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role < Config::kConsumers) take_halves(p, shared, role);
    if (role == Config::kConsumers && visits_rows<Config>()) Loader<Config>{p, shared}.run();
    constexpr bool kHasWaiter = Config::kSemaphoreWaiter == SemaphoreWaiter::kOwnWarp;
    if (kHasWaiter && role == Config::kConsumers + 1) wait_at_semaphores(p, shared);
  } else if (Config::kDropped && rank > Config::kConsumers) {
    if constexpr (Config::kDropped) {
      ptx::setmaxnreg_dec<Config::kDrawerRegisters>();
      draw_dropped(p, shared);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kRegisters.consumer>();
    sum_keys(p, shared, rank);
  }
#endif
}

// The TMA descriptor of dq_accum: (heads of all entries, groups of channels, rows, channels of a group).
template <typename Config>
CUtensorMap map_of_dq_accum(const BwdSm90Params& p) {
  using Accum = DqAccum<Config::kHeadDim>;
  static_assert(Accum::kRowsTogether == 1, "a box has adjacent rows");
  const Problem& problem = p.problem;
  const int64_t heads = int64_t{problem.heads} * (problem.cu_seqlens_q ? 1 : problem.batch), rows = problem.seqlen_q;
  constexpr int64_t kRowBytes = Config::kHeadDim * sizeof(float), kGroupBytes = Accum::kGroup * sizeof(float);
  return tensor_map(p.plan.scratch.dq_accum, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                    {Accum::kGroup, rows, Accum::kGroups, heads}, {kRowBytes, kGroupBytes, rows * kRowBytes},
                    {Accum::kGroup, kDqBoxRows, kDqBoxCols / Accum::kGroup, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
}

template <typename Config>
CUtensorMap map_of_dq(const BwdSm90Params& p) {
  using Box = SharedTile<typename Config::T, kDqBoxRows, kDqBoxCols>;
  const Problem& problem = p.problem;
  return map_of<Box>(p.dq, problem.head_dim, problem.heads, problem.seqlen_q, problem.batch);
}

template <typename Config>
void run_bwd_main(const BwdSm90Params& p, cudaStream_t stream) {
  BwdSm90Launch params = launch_params<Config>(p);
  params.dq_accum_map = map_of_dq_accum<Config>(p);
  if constexpr (Config::kFeatures == Features::kBiased) {
    params.bias_map = map_of_bias<typename BiasTiles<Config>::Tile>(p.problem);
  }
  if (p.plan.rounds_dq) params.dq_map = map_of_dq<Config>(p);
  launch_bwd_sm90<bwd_sm90_kernel<Config>, Config, BwdSm90Shared<Config>>(params, stream, p.plan.blocks);
}

// Calls fn(how thread blocks meet, in which order they visit m_blocks, the type of dk and dv) with the policies that a
// plan needs, as constants. Only plain instances have a choice: there, the code for splits alone costs 2 % of the time,
// and that for a second type 3 %.
template <int kHeadDim, Features kFeatures, typename Fn>
void dispatch_policies(const BwdSm90Params& p, Fn&& fn) {
  const BwdSm90Plan& plan = p.plan;
  constexpr Constant<MBlockOrder::kLastFirst> kLastFirst;
  constexpr Constant<KeyGradients::kRounded> kRounded;
  if (kFeatures != Features::kPlain || plan.splits > 1 || (plan.waits && p.float_dkv)) {
    return fn(Constant<Meeting::kSplitting>{}, kLastFirst, Constant<KeyGradients::kEither>{});
  }
  if constexpr (kFeatures == Features::kPlain) {
    if (plan.waits) return fn(Constant<Meeting::kWaiting>{}, kLastFirst, kRounded);
    const auto freely = [&](auto kMBlockOrder) {
      constexpr Constant<Meeting::kFree> kFree;
      p.float_dkv ? fn(kFree, kMBlockOrder, Constant<KeyGradients::kFloat>{}) : fn(kFree, kMBlockOrder, kRounded);
    };
    if constexpr (kHeadDim > 64) {
      dispatch_value<MBlockOrder::kFirstFirst>(plan.m_block_order, freely);
    } else {
      dispatch_value<MBlockOrder::kFirstFirst, MBlockOrder::kRotated>(plan.m_block_order, freely);
    }
  }
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
void run_bwd_sm90(const BwdSm90Params& p, cudaStream_t stream) {
  static_assert(kHeadDimV == kHeadDim);
  using Config = BwdSm90Config<T, kHeadDim, kFeatures>;
  run_before_bwd({p, p.plan}, Config::kBlockM, Config::kClusterKeys, stream);
  dispatch_policies<kHeadDim, kFeatures>(p, [&](auto kMeeting, auto kMBlockOrder, auto kKeyGradients) {
    run_bwd_main<BwdSm90Config<T, kHeadDim, kFeatures, kMeeting, kMBlockOrder, kKeyGradients>>(p, stream);
  });
  run_bwd_finish({p, p.plan}, stream);
}

}  // namespace flash::flash_attn
