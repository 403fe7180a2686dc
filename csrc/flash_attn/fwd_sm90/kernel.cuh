// Attention, forward, for sm_90: the computation of fwd_sm80, with TMA copies and wgmma products.
//
// Warp-specialized and persistent: a thread block stays on its SM and processes one tile of query rows after another.
// Its first one to three warpgroups are consumers with 64 rows of the tile each; the next one is the producer, of which
// only warp 0 works where TMA copies. It starts all copies: Q of a tile, then K and V of the n_blocks that its
// rows see, the last one first. A consumer keeps S, P and O in registers. Its wgmma products run asynchronously; for
// n_block n it
//
//   starts S(n) = Q K(n)^T, then O += P(n + 1) V(n + 1), and turns S(n) into P(n) while the second product still runs.
//
// The first S of a tile is started together with the last P V of the tile before it.
//
// Hand-overs (fwd_sm90/shared.cuh), each through a ring of full and empty mbarriers: work_ring, which tile comes next;
// q_rings, one for each consumer; k_ring; v_ring. Named barriers make the consumers take turns in starting products:
// then one consumer computes its exponentials while the tensor cores run the products of another.
//
// The producer takes the next tile from a counter in global memory only when the last K of the current tile is about to
// be copied. Taking tiles as late as possible balances long tiles against short ones.
//
// In instances of kBiased, K(n) comes with a tile of the bias, and in those of kDropped with bits that a warpgroup of
// drawers draws. A warp reads its part of either while S is computed. Where K and V are codes in 8 bits, a warpgroup of
// converters stands between producer and consumers (fwd_serving/converter.cuh).
//
// Beyond 256 channels a cluster of two thread blocks shares a tile: each has half of the channels of Q, K, V and O.
// They work as above, but S needs all channels: their consumers exchange partial sums of S (partial_box.cuh). For 128
// rows and 64 keys, writing and reading these 32 KB takes 512 cycles of shared-memory bandwidth, 1/4 of the tensor-core
// time of both products, and P V runs meanwhile. A single block has registers for O of 64 rows x 512 channels only: it
// would read K and V twice as often from the L2 cache and exchange as much.
//
// On long sequences with 128 or 256 channels, a cluster of two thread blocks shares keys: together they have a tile of
// twice as many rows, and each copies half of the channels of K and V to both. So the L2 cache is read half as often,
// for which a GPU at its limit of power has a higher clock. A stage is empty when the consumers of both have released
// it.
#pragma once

#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/fwd_serving/converter.cuh"
#include "flash_attn/fwd_serving/merge.cuh"
#include "flash_attn/fwd_sm90/consumer.cuh"
#include "flash_attn/fwd_sm90/drawer.cuh"
#include "flash_attn/fwd_sm90/producer.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/instances.h"
#include "flash_attn/scores/bias_tile.cuh"
#include "ptx/sync.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             1) void fwd_sm90_kernel(const __grid_constant__ typename Config::Launch args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(sizeof(FwdSm90Shared<Config>) <= 227 * 1024);
  auto& shared = shared_memory<FwdSm90Shared<Config>>();
  if constexpr (Config::kServing) ptx::launch_dependents();  // merge_pieces, whose blocks come as those of this leave
  if (threadIdx.x == 0) shared.init();
  constexpr int kClusterBlocks = Config::kClusterSize * Config::kSharers;
  kClusterBlocks == 1 ? __syncthreads() : ptx::sync_cluster();
  const int rank = warpgroup_id();
  if (rank < Config::kConsumers) {
    if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer<Config>(args, shared, rank).run();
  } else if (rank == Config::kConsumers) {
    if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp_id() < Config::kConsumerWarps + Source<Config>::kWarps) Producer<Config>(args, shared).run();
  } else if constexpr (Config::kDropped) {
    ptx::setmaxnreg_dec<Config::kDrawerRegisters>();
    Drawer<Config>{args.params, shared}.run();
  } else if constexpr (Config::kCoded) {
    ptx::setmaxnreg_dec<Config::kConverterRegisters>();
    Converter<Config>{shared, args.params.out_dtype == DType::kBFloat16}.run();
  }
  if constexpr (Config::kSharers > 1) {  // a block must not exit while the other may still copy to it or arrive there
    __syncwarp();
    ptx::sync_cluster();
  }
#endif
}

template <typename Config>
void run_fwd_dense(const FwdSm90Params& p, cudaStream_t stream) {
  using Shared = FwdSm90Shared<Config>;
  const Problem& problem = p.problem;
  const int64_t head_dim = problem.head_dim, head_dim_v = problem.head_dim_v;
  const int64_t entries_q = problem.cu_seqlens_q ? 1 : problem.batch;
  const auto [entries_k, keys] = extent_of_keys(p);
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
                          .cluster = Config::kClusterSize * Config::kSharers};
  launch<fwd_sm90_kernel<Config>>(shape, args, stream);
}

template <typename T, int kHeadDim, Features kFeatures, bool kWide, int kHeadDimV>
void run_fwd_sm90(const FwdSm90Params& p, cudaStream_t stream) {
  constexpr auto kKind = kWide ? FwdSm90Kind::kDenseWide : FwdSm90Kind::kDense;
  run_fwd_dense<FwdSm90Config<T, kHeadDim, kFeatures, kKind, kHeadDimV>>(p, stream);
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
void run_fwd_paired(const FwdSm90Params& p, cudaStream_t stream) {
  run_fwd_dense<FwdSm90Config<T, kHeadDim, kFeatures, FwdSm90Kind::kDensePaired, kHeadDimV>>(p, stream);
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
void run_fwd_invariant(const FwdSm90Params& p, cudaStream_t stream) {
  run_fwd_dense<FwdSm90Config<T, kHeadDim, kFeatures, FwdSm90Kind::kInvariant, kHeadDimV>>(p, stream);
}

template <typename Config>
void run_fwd_serving_as(const ServingParams& p, cudaStream_t stream) {
  using Shared = FwdSm90Shared<Config>;
  const Problem& problem = p.problem;
  const TensorRef<const void> k = in_units<Config>(p.k), v = in_units<Config>(p.v);
  ServingLaunch args{.k = {}, .v = {}, .k_strides = ChunkStrides(k), .v_strides = ChunkStrides(v), .params = p};
  if (const int rows = p.plan.box_rows; rows > 0) {
    const auto [entries, keys] = extent_of_keys(p);
    const int64_t cols = problem.head_dim / Config::kUnit, cols_v = problem.head_dim_v / Config::kUnit;
    args.k = map_of<typename Shared::SourceKeys>(k, cols, problem.heads_k, keys, entries, rows);
    args.v = map_of<typename Shared::SourceValues>(v, cols_v, problem.heads_k, keys, entries, rows);
  }
  const LaunchShape shape{.grid = dim3(p.plan.blocks), .block = dim3(Config::kThreads), .shared_bytes = sizeof(Shared)};
  launch<fwd_sm90_kernel<Config>>(shape, args, stream);
  if (p.plan.slots.count > 0) {
    merge_pieces<typename Config::T, Config::kFeatures, Config::kHeadDimV>(p, stream);
  }
}

template <typename T, int kHeadDim, Features kFeatures, bool kFewRows, int kHeadDimV>
void run_fwd_serving(const ServingParams& p, cudaStream_t stream) {
  constexpr auto kKind = kFewRows ? FwdSm90Kind::kFewRows : FwdSm90Kind::kServing;
  run_fwd_serving_as<FwdSm90Config<T, kHeadDim, kFeatures, kKind, kHeadDimV>>(p, stream);
}

template <typename T, int kHeadDim, Features kFeatures, bool kFewRows>
void run_fwd_serving_coded(const ServingParams& p, cudaStream_t stream) {
  constexpr auto kKind = kFewRows ? FwdSm90Kind::kCodedFewRows : FwdSm90Kind::kCoded;
  run_fwd_serving_as<FwdSm90Config<T, kHeadDim, kFeatures, kKind>>(p, stream);
}

}  // namespace flash::flash_attn
