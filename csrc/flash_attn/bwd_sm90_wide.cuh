// Attention, backward, for sm_90 and head dims above 128: the registers of a warpgroup hold dV or dK, not both. That
// goes for 192 channels of K and 128 of V, too: 64 keys of dK and dV are 160 registers of a thread, and a step of 64
// rows needs 80 more. The value team and the key team then have equal products, of 192 + 128 channels each.
//
// A cluster of two blocks takes 128 keys of a key head, each block 64, and walks over the rows that see them as
// bwd_sm90.cuh does. The warpgroups of a block are teams with the same keys:
//
//   value team    S^T = K Q^T     P^T              dV += P^T dO
//   key team      dP^T = V dO^T   dS^T from P^T    dK += dS^T Q
//   query team    dQ = dS K, for the keys of both blocks, half of the channels
//
// The value team leaves P^T in shared memory, negative where dropout drops. The key team turns it into dS, in the same
// place. The query team reads dS and also sends it to the other block. The bottleneck is how fast the L2 cache adds to
// dq_accum. So the two blocks sum their dQ before they add it, and a team that only adds keeps the cache busy while the
// others compute. A fourth warpgroup starts the copies: each block copies one half of Q and dO, to both blocks.
//
// Beyond 256 channels, both blocks have the same 64 keys, and each has half of the channels of everything. Only S^T and
// dP^T are sums over all channels: the teams send their products to the same team of the other block, and add what that
// sends. Both blocks then have the same P^T and dS^T, and each computes its own half of dQ. In a step, this moves 64 KB
// through the shared memory of a block, of which its products read 224 KB.
#pragma once

#include <new>

#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_rows.h"
#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/bwd_sm90_launch.cuh"
#include "flash_attn/bwd_sm90_wide_dq.cuh"
#include "flash_attn/bwd_sm90_wide_load.cuh"
#include "flash_attn/bwd_sm90_wide_shared.cuh"
#include "flash_attn/bwd_sm90_wide_sums.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Which keys the cluster works on. Where clusters wait for those with earlier keys, they take the keys from a counter:
// CUDA does not promise to start clusters in the order of their numbers, and a cluster that waits for one that has not
// started may keep it from starting. All threads of the cluster call it.
template <typename Config>
__device__ int find_index(const BwdSm90Params& p, BwdWideShared<Config>& shared, int rank) {
  if (!p.plan.waits) return blockIdx.x / Config::kCluster;
  if (rank == 0 && threadIdx.x == 0) shared.taken = atomicAdd(p.plan.scratch.next_block, 1);
  ptx::sync_cluster();
  return ptx::load_from(0, shared.taken);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_wide_kernel(const __grid_constant__ BwdSm90Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdWideShared<Config>>();
  const int rank = ptx::cluster_rank(), index = find_index(p, shared, rank);
  if (threadIdx.x == 0) {
    new (shared.block) KeyBlock<Config>(p, index, Config::kParts == 1 ? rank : 0);
    shared.keys_here.init(2);
    shared.other_keys_here.init(1);
    shared.other_ds_here.init(1);
    shared.sent_ds_taken.init(kWarpgroup / 32);
    if constexpr (Config::kParts == 2) shared.other_parts.init();
    constexpr int kReaders = 2 * Config::kCluster / Config::kParts * kWarpgroup / 32;  // warps of value and key teams
    shared.q.barriers.init(kReaders);
    shared.dout.barriers.init(kReaders);
    ptx::fence_barrier_init();
  }
  ptx::sync_cluster();
  const auto& block = *reinterpret_cast<const KeyBlock<Config>*>(shared.block);
  if (!block.exists()) return;
  const int team = warpgroup_id(), key0 = threadIdx.x % kWarpgroup / 32 * 16;
  if (team == 0) {
    ptx::setmaxnreg_inc<Config::kSumRegisters>();
    ValueTeam<Config>{{{p, shared, block, team, key0}}}.run();
  } else if (team == 1) {
    ptx::setmaxnreg_inc<Config::kSumRegisters>();
    KeyTeam<Config>{{{p, shared, block, team, key0}}}.run();
  } else if (team == 2) {
    ptx::setmaxnreg_dec<Config::kQueryRegisters>();
    QueryTeam<Config>{p, shared, block, rank}.run();
  } else {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role == 0 && walks_rows<Config>() && block.has_rows()) load_block(p, shared, block, rank);
    if (role == 1 && p.plan.waits) Turns<Config>{p, block, rank}.await_all();
    if (role == 2 && p.plan.waits) Turns<Config>{p, block, rank}.release_all();
  }
  __syncwarp();
  ptx::sync_cluster();  // before a block's shared memory goes to another one
#endif
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
void run_bwd_sm90(const BwdSm90Params& p, cudaStream_t stream) {
  using Config = BwdWideConfig<T, kHeadDim, kFeatures, kHeadDimV>;
  run_before_bwd({p, p.plan}, Config::kBlockM, Config::kClusterKeys, stream);
  launch_bwd_sm90<bwd_wide_kernel<Config>, Config, BwdWideShared<Config>>(launch_params<Config>(p), stream);
  run_bwd_finish({p, p.plan}, stream);
}

}  // namespace flash::flash_attn
