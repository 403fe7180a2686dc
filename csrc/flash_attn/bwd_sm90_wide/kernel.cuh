// Attention, backward, for sm_90 and head dims above 128, where the registers of a warpgroup can hold dV or dK but not
// both. That is so for 192 channels of K and 128 of V, too: dK and dV of 64 keys take 160 registers a thread, and a
// step of 64 rows 80 more. (The value and the key team then do equal work: products over 192 + 128 channels each.)
//
// A cluster of two thread blocks takes an n_block, 128 keys of a key head, 64 each, and visits the m_blocks that see
// it, or a split of these, as bwd_sm90 does. Of the four warpgroups of a thread block, three are teams that work on the
// same keys (bwd_sm90_wide/mainloop.cuh, bwd_sm90_wide/dq.cuh):
//
//   value team    S^T = K Q^T     P^T              dV += P^T dO
//   key team      dP^T = V dO^T   dS^T from P^T    dK += dS^T Q
//   query team    dQ = dS K, for the keys of both thread blocks, half of the channels
//
// The value team leaves P^T, negative where dropout drops, in the tile `scores`; the key team replaces it by dS there;
// the query team reads that, and sends a copy to the other thread block by st.async. Named barriers pass the tile from
// team to team (BwdWideBarrier). The bottleneck is the rate at which the L2 cache adds to dq_accum. So each thread
// block sums its half of the channels over all 128 keys before it adds, and a team that does nothing but dQ keeps L2
// busy while the others compute. Of the fourth warpgroup, warp 0 starts the TMA copies: each thread block copies every
// other panel of Q and dO, to both by multicast. Where n_blocks add to dQ in order, its warps 1 and 2
// acquire and release the dQ semaphores (DqSemaphores).
//
// Beyond 256 channels, both thread blocks have the same 64 keys, and each has half of the channels of everything. Only
// S^T and dP^T need all channels: each team exchanges its partial sums with the same team of the other thread block
// (partial_box.cuh). Both then have the same P^T and dS^T, and each computes its own half of dQ. The exchange writes
// and reads 64 KB of shared memory a step, besides the 224 KB that products read.
#pragma once

#include <new>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/rows.h"
#include "flash_attn/bwd_sm90/launch.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/bwd_sm90_wide/dq.cuh"
#include "flash_attn/bwd_sm90_wide/load.cuh"
#include "flash_attn/bwd_sm90_wide/mainloop.cuh"
#include "flash_attn/bwd_sm90_wide/shared.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// The index of the cluster's work tile. Where clusters wait for those with earlier keys, they take it from a counter:
// CUDA does not promise to start clusters in the order of blockIdx, and a cluster that waited for one that has not
// started could keep it from ever starting. All threads of the cluster call it.
template <typename Config>
__device__ int take_work(const BwdSm90Params& p, BwdWideShared<Config>& shared, int cta_rank) {
  if (!p.plan.waits) return blockIdx.x / Config::kCluster;
  if (cta_rank == 0 && threadIdx.x == 0) shared.taken = atomicAdd(p.plan.scratch.next_work, 1);
  ptx::sync_cluster();
  return ptx::load_from(0, shared.taken);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_wide_kernel(const __grid_constant__ BwdSm90Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdWideShared<Config>>();
  const int cta_rank = ptx::cluster_rank(), index = take_work(p, shared, cta_rank);
  constexpr bool kSplitsKeys = Config::kClusterSplit == ClusterSplit::kKeys;
  if (index >= NBlockWork<Config>::num_work_tiles(p)) {  // in both thread blocks of the cluster
    if (p.plan.waits) ptx::sync_cluster();               // the first must not exit while the other one reads `taken`
    return;
  }
  if (threadIdx.x == 0) {
    new (shared.work) NBlockWork<Config>(p, index, kSplitsKeys ? cta_rank : 0);
    shared.keys_here.init(2);
    shared.other_keys_here.init(1);
    shared.other_ds_here.init(1);
    shared.sent_ds_taken.init(kWarpgroup / 32);
    if constexpr (!kSplitsKeys) shared.partial.init();
    // Warps of value and key teams, in all thread blocks that get a copy.
    constexpr int kReaders = 2 * (kSplitsKeys ? Config::kCluster : 1) * kWarpgroup / 32;
    shared.q.barriers.init(kReaders);
    shared.dout.barriers.init(kReaders);
    ptx::fence_barrier_init();
  }
  ptx::sync_cluster();
  const auto& work = *reinterpret_cast<const NBlockWork<Config>*>(shared.work);
  if (!work.exists()) return;
  const int team = warpgroup_id(), key0 = threadIdx.x % kWarpgroup / 32 * 16;
  if (team == 0) {
    ptx::setmaxnreg_inc<Config::kSumRegisters>();
    ValueTeam<Config>{{{p, shared, work, team, key0}}}.run();
  } else if (team == 1) {
    ptx::setmaxnreg_inc<Config::kSumRegisters>();
    KeyTeam<Config>{{{p, shared, work, team, key0}}}.run();
  } else if (team == 2) {
    ptx::setmaxnreg_dec<Config::kQueryRegisters>();
    QueryTeam<Config>{p, shared, work, cta_rank}.run();
  } else {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role == 0 && visits_rows<Config>() && work.has_rows()) load_work(p, shared, work, cta_rank);
    if (role == 1 && p.plan.waits) DqSemaphores<Config>{p, work, cta_rank}.acquire_all();
    if (role == 2 && p.plan.waits) DqSemaphores<Config>{p, work, cta_rank}.release_all();
  }
  __syncwarp();
  ptx::sync_cluster();  // a thread block must not exit while the other one may still access its shared memory
#endif
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
void run_bwd_sm90(const BwdSm90Params& p, cudaStream_t stream) {
  const auto run = [&](auto kKeyGradients) {
    using Config = BwdWideConfig<T, kHeadDim, kFeatures, kHeadDimV, kKeyGradients>;
    run_before_bwd({p, p.plan}, Config::kBlockM, Config::kClusterKeys, stream);
    launch_bwd_sm90<bwd_wide_kernel<Config>, Config, BwdWideShared<Config>>(launch_params<Config>(p), stream);
    run_bwd_finish({p, p.plan}, stream);
  };
  if constexpr (kFeatures == Features::kPlain) {
    p.float_dkv ? run(Constant<KeyGradients::kFloat>{}) : run(Constant<KeyGradients::kRounded>{});
  } else {
    run(Constant<KeyGradients::kEither>{});
  }
}

}  // namespace flash::flash_attn
