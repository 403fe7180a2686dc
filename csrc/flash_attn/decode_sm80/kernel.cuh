// Attention of few query rows over many keys (decoding), for every GPU from sm_80 on, by the formulas of fwd_sm80.
// It is bound by the bandwidth at which K and V arrive. So all warps of a thread block work on one tile of 16 query
// rows, those of the heads that have the same key head, and divide the keys among themselves.
//
// Each warp is a pipeline of its own: it takes every num_warps-th n_block of 16 keys, keeps kStages of them in flight
// to its own ring of stages in shared memory (cp.async), and synchronizes with no other warp. Q and O are in registers,
// but Q of a call over codes in shared memory.
// In the end the warps merge their results through shared memory, and thread blocks with other splits of the keys
// through global memory: the last to arrive merges in the order of the splits, so that the result does not depend on
// which is last (merge.cuh). The kernel can also append new keys and values to the cache (append.cuh).
//
// Beyond 256 channels, a team of two warps has the same n_blocks: each warp has half of the channels and is a
// pipeline as above, except that the two exchange partial sums of S and so wait for each other.
//
// A cache of codes in 8 bits (DecodeKind::kCoded) is half as many bytes to copy. Codes are converted to fp16 on the way
// from shared memory to the registers of a product: for 16 keys of 128 channels, 80 instructions more, where there are
// as many less to find pages and addresses. Up to 128 channels, a multiprocessor has room for two thread blocks. Sums,
// splits and n_blocks are those of the same call in fp16, and so are the bits.
//
// Where the cache is small, most of the time passes before the first copy, after the last product, and in fetching
// instructions. So the code is kept short.
#pragma once

#include "common/launch.h"
#include "flash_attn/decode_sm80/append.cuh"
#include "flash_attn/decode_sm80/load.cuh"
#include "flash_attn/decode_sm80/merge.cuh"
#include "flash_attn/decode_sm80/shared.cuh"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/split.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/instances.h"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/sync.cuh"
#include "tile/codes.cuh"
#include "tile/gemm.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// Starts the first copies to the warp's ring, and returns its queries. Meanwhile, new tokens are made ready.
template <typename Config>
__device__ auto prologue(const typename Config::Params& p, const FwdWork<Config>& work, DecodeRing<Config>& ring,
                         const AppendStep<Config>& append, KeyLoader<Config>& loader) {
#pragma unroll 1
  for (RingStage<Config>& stage : ring.stages) loader.load(stage);
  append.prepare();
  const auto q = append.queries();
  prefetch_targets<Config>(p, work);
  return q;
}

// Barriers 1 .. 4 are those of the teams of two warps.
template <typename Config>
__device__ void sync_team(const TeamMember<Config>& own) {
  if constexpr (Config::kTeamWarps == 2) ptx::sync_barrier<64>(1 + own.team);
}

// Adds the partial scores of the team's other warp, which are sums over its channels.
template <typename Config>
__device__ void add_scores_of_team(Scores<Config>& s, DecodeRing<Config>* rings, int stage,
                                   const TeamMember<Config>& own) {
  if constexpr (Config::kTeamWarps == 2) {
    rings[warp_id()].stages[stage].partial.store(s, lane_id());
    sync_team(own);
    rings[warp_id() ^ 1].stages[stage].partial.add_to(s, lane_id());
  }
}

// K and V of a stage as right operands.
template <typename Config, typename Tile>
__device__ auto key_operand(const Tile& tile) {
  if constexpr (Config::kCoded)
    return codes_along_cols(tile);
  else
    return along_cols(tile);
}
template <typename Config, typename Tile>
__device__ auto value_operand(const Tile& tile) {
  if constexpr (Config::kCoded)
    return codes_along_rows(tile);
  else
    return along_rows(tile);
}

// A warp's loop over its n_blocks. Afterwards o and softmax are its result.
template <typename Config>
__device__ void mainloop(const typename Config::Params& p, const FwdWork<Config>& work, DecodeRing<Config>* rings,
                         Output<Config>& o, Softmax<Config>& softmax) {
  using T = typename Config::T;
  DecodeRing<Config>& ring = rings[warp_id()];
  const TeamMember<Config> own;
  const int first = work.n_blocks.first + own.team, last = work.n_blocks.last;
  const AppendStep<Config> append(p, work, rings + blockDim.x / 32);
  KeyLoader<Config> loader(p, work, first, own);
  const auto q = prologue<Config>(p, work, ring, append, loader);
  const Interval unmasked = work.unmasked_n_blocks();

  int stage = 0;
  for (int n_block = first; n_block <= last; n_block += own.num_teams) {
    BlockBias<Config> bias(p.problem, work, /*warp_row=*/0, n_block);
    ptx::wait_copies<Config::kStages - 1>();
    __syncwarp();
    append.write(ring.stages[stage], n_block);
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kChannels>(s, q, key_operand<Config>(ring.stages[stage].k));
    add_scores_of_team(s, rings, stage, own);
    make_scores<Config>(s, bias, p, work, /*warp_row=*/0, n_block, !unmasked.covers(n_block));
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) o.scale_rows(shrink);
    gemm<Config::kKeys>(o, pack<T>(s), value_operand<Config>(ring.stages[stage].v));
    __syncwarp();
    loader.load(ring.stages[stage]);
    stage = stage == Config::kStages - 1 ? 0 : stage + 1;
  }
  ptx::wait_copies<0>();
  softmax.finish();
  sync_team(own);  // before store_in_ring overwrites the partial scores that the team's other warp may still read
}

// With 8 warps, and 3 n_blocks of each in flight (mma: S = Q K^T, the softmax and O += P V of an n_block):
//
//         | prologue              | mainloop                                      | epilogue
// warp 0: | copy 0, 8, 16; load Q | mma 0, copy 24 | mma 8, copy 32 | mma 16 | .. | wait for all warps; merge; store
// warp 1: | copy 1, 9, 17; load Q | mma 1, copy 25 | mma 9, copy 33 | mma 17 | .. | wait for all warps; merge; store
// append: | load new K, V; rotate | store the new rows of an n_block that is here |
template <typename Config>
__global__ __launch_bounds__(32 * kMaxDecodeWarps,
                             Config::kBlocks) void decode_kernel(const __grid_constant__ typename Config::Params p) {
  ptx::wait_for_dependency();
  const FwdWork<Config> work(p, p.plan.tiling, p.plan.splits);
  if (!work.exists()) return;
  auto* rings = &shared_memory<DecodeRing<Config>>();
  Output<Config> o;
  o.fill(0);
  Softmax<Config> softmax = softmax_of<Config>(p.problem, work.tile);
  if (!work.n_blocks.empty()) mainloop<Config>(p, work, rings, o, softmax);

  // Epilogue: the results of the warps are merged and, if there are several splits, those of the splits.
  store_in_ring(rings[warp_id()], o, softmax, work.rows.count);
  __syncthreads();
  const auto merged_warps = [&](int row, int col) {
    const int member = col / Config::kChannels;  // which warp of each team has these channels
    return merge<kMaxDecodeWarps>(TeamMember<Config>().num_teams, softmax.scale_log2, [&](int team) {
      return load_from_ring(rings[team * Config::kTeamWarps + member], row, col - member * Config::kChannels);
    });
  };
  const auto store = [&](int row, int col, const Quad& x) {
    store_result<Config>(p, work, row, col, softmax.scale_log2, x);
  };
  const int num_splits = work.num_splits();
  if (num_splits == 1) {
    return for_each_quad<Config>(work.rows, [&](int row, int col) { store(row, col, merged_warps(row, col)); });
  }
  const DecodeSplits<Config> splits(p.plan.splits, work.tile.index);
  for_each_quad<Config>(work.rows,
                        [&](int row, int col) { splits.store(work.tile.split, row, col, merged_warps(row, col)); });
  if (!is_last_arrival(p.plan.splits.arrivals + work.tile.index, num_splits)) return;
  for_each_quad<Config>(work.rows, [&](int row, int col) {
    store(row, col, merge<16>(num_splits, softmax.scale_log2, [&](int i) { return splits.load(i, row, col); }));
  });
}

template <typename Config>
void launch_decode(const typename Config::Params& p, cudaStream_t stream) {
  static_assert(sizeof(FreshRows<Config>) == decode_fresh_bytes(Config::kHeadDim));
  static_assert(Config::kAppends || AppendStep<Config>::kSharedBytes <= 4096, "which decode_warps leaves");
  const int ring_bytes = static_cast<int>(p.plan.warps * sizeof(DecodeRing<Config>));
  const LaunchShape shape{.grid = dim3(p.plan.tiling.tiles.value * p.plan.splits.count),
                          .block = dim3(32 * p.plan.warps),
                          .shared_bytes = ring_bytes + AppendStep<Config>::kSharedBytes,
                          .early = true};
  launch<decode_kernel<Config>>(shape, p, stream);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_decode(const DecodeParams& p, cudaStream_t stream) {
  if constexpr (kFeatures == Features::kPlain) {
    if (p.plan.append != nullptr) {
      using Config = DecodeConfig<T, kHeadDim, kFeatures, false, DecodeKind::kAppending>;
      return launch_decode<Config>({p, *p.plan.append}, stream);
    }
    if (p.pages.block_table == nullptr) return launch_decode<DecodeConfig<T, kHeadDim, kFeatures, false>>(p, stream);
  }
  launch_decode<DecodeConfig<T, kHeadDim, kFeatures, true>>(p, stream);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_decode_coded(const DecodeParams& p, cudaStream_t stream) {
  if constexpr (kFeatures == Features::kPlain) {
    if (p.pages.block_table == nullptr) {
      return launch_decode<DecodeConfig<T, kHeadDim, kFeatures, false, DecodeKind::kCoded>>(p, stream);
    }
  }
  launch_decode<DecodeConfig<T, kHeadDim, kFeatures, true, DecodeKind::kCoded>>(p, stream);
}

}  // namespace flash::flash_attn
