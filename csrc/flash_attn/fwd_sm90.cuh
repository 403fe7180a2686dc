// Attention, forward, for sm_90: the formulas and the steps of fwd_sm80.cuh around TMA and wgmma.
//
// A block stays on its multiprocessor and takes one tile of query rows after the other. One warp, the producer, starts
// all copies: Q of a tile, and K and V of the blocks of keys that its rows see, the last first. Two or three warpgroups
// of 64 rows each, the consumers, multiply in the background what has arrived:
//
//   S(n) = Q K(n)^T starts;  O += P(n + 1) V(n + 1) starts;  S(n) becomes P(n) while the second product runs
//
// They take turns in starting products, so that while one is at its exponentials those of another run. A tile's first S
// is computed with the last product of the tile before it. S, P and O are registers.
//
// The producer takes the next tile from a counter in global memory when the last keys of a tile are on their way: as
// late as it can, so that long and short tiles even out.
//
// In instances of kBiased, K(n) comes with a tile of the bias. A warp reads its rows of it while S is computed.
//
// Beyond 256 channels, two blocks, a cluster, have a tile together: each has half of the channels of Q, K, V and O. A
// block works as above, but for S: its warpgroups send their products to those of the other block, and add what these
// send. That takes 1/4 of the time for which 128 rows and 64 keys keep the tensor cores busy to write and read shared
// memory, beside the product P V that runs meanwhile. In one block, O of 512 channels leaves room for 64 rows only,
// which reads K and V twice as often from the L2 cache and exchanges as much.
#pragma once

#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/bias_tile.cuh"
#include "flash_attn/fwd_sm90_consumer.cuh"
#include "flash_attn/fwd_sm90_producer.cuh"
#include "flash_attn/fwd_sm90_shared.cuh"
#include "flash_attn/instances.h"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void fwd_sm90_kernel(const __grid_constant__ FwdSm90Launch args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<FwdSm90Shared<Config>>();
  if (threadIdx.x == 0) shared.init();
  Config::kParts == 1 ? __syncthreads() : ptx::sync_cluster();
  const int rank = warpgroup_id();
  if (rank < Config::kConsumers) {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer<Config>(args, shared, rank).run();
  } else {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp_id() == Config::kConsumerWarps) Producer<Config>{args, args.params, shared}.run();
  }
#endif
}

template <typename T, int kHeadDim, Features kFeatures, bool kWide, int kHeadDimV>
void run_fwd_sm90(const FwdSm90Params& p, cudaStream_t stream) {
  using Config = FwdSm90Config<T, kHeadDim, kFeatures, kWide, kHeadDimV>;
  using Shared = FwdSm90Shared<Config>;
  const Problem& problem = p.problem;
  const int64_t head_dim = problem.head_dim, head_dim_v = problem.head_dim_v;
  const int64_t entries_q = problem.cu_seqlens_q ? 1 : problem.batch;
  const int64_t keys = problem.cu_seqlens_k ? problem.seqlen_k : problem.capacity_k;
  // With an index into the batch, how many entries k and v have is not known here.
  const int64_t entries_k = problem.cu_seqlens_k ? 1 : problem.batch_index ? kMaxSeqlen : problem.batch;
  FwdSm90Launch args{.q = map_of<typename Shared::OwnRows>(p.q, head_dim, problem.heads, problem.seqlen_q, entries_q),
                     .k = map_of<typename Shared::Keys>(p.k, head_dim, problem.heads_k, keys, entries_k),
                     .v = map_of<typename Shared::Values>(p.v, head_dim_v, problem.heads_k, keys, entries_k),
                     .out = map_of<typename Shared::Rows>(p.out, head_dim_v, problem.heads, problem.seqlen_q, entries_q,
                                                          kWarpgroupRows),
                     .params = p};
  if constexpr (Config::kBiased) {
    args.bias = map_of_bias<typename Shared::Bias>(problem);
  }
  const LaunchShape shape{.grid = dim3(p.plan.blocks),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(Shared),
                          .cluster = Config::kParts};
  launch<fwd_sm90_kernel<Config>>(shape, args, stream);
}

}  // namespace flash::flash_attn
