// How the backward kernels for sm_90 are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "common/dispatch.h"
#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/bwd/cost_model.h"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/params.h"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// The kernel parameters: the problem with the TMA descriptors that both kernels need.
template <typename Config>
BwdSm90Launch launch_params(const BwdSm90Params& p) {
  using T = typename Config::T;
  const Problem& problem = p.problem;
  const auto map_rows = [&](const TensorRef<const void>& x, auto kHeadDim, int head_dim) {
    return map_of<SharedTile<T, Config::kBlockM, kHeadDim>>(x, head_dim, problem.heads, problem.seqlen_q,
                                                            problem.cu_seqlens_q ? 1 : problem.batch);
  };
  const auto map_keys = [&](const TensorRef<const void>& x, auto kHeadDim, int head_dim) {
    return map_of<SharedTile<T, Config::kBlockN, kHeadDim>>(x, head_dim, problem.heads_k, problem.capacity_k,
                                                            problem.cu_seqlens_k ? 1 : problem.batch);
  };
  constexpr Constant<Config::kHeadDim> kHeadDim;
  constexpr Constant<Config::kHeadDimV> kHeadDimV;
  BwdSm90Launch launch{p};
  launch.q_map = map_rows(p.q, kHeadDim, problem.head_dim);
  launch.dout_map = map_rows(p.dout, kHeadDimV, problem.head_dim_v);
  launch.k_map = map_keys(p.k, kHeadDim, problem.head_dim);
  launch.v_map = map_keys(p.v, kHeadDimV, problem.head_dim_v);
  static_assert(Config::kClusterKeys == bwd_sm90_keys(Config::kHeadDim));
  const int more = p.plan.scratch.work_tiles != nullptr ? kMostSplitsOfPlace * p.plan.places : 0;
  launch.num_work_tiles =
      num_n_blocks<Config::kClusterKeys>(problem) * p.plan.splits + more;  // few where there are splits
  return launch;
}

// Launches one cluster (of kCluster thread blocks) for each work tile, but at most `most` of them.
template <auto kKernel, typename Config, typename Shared>
void launch_bwd_sm90(const BwdSm90Launch& params, cudaStream_t stream, int most = std::numeric_limits<int>::max()) {
  static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a thread block can have");
  const LaunchShape shape{.grid = dim3(Config::kCluster * std::min(params.num_work_tiles, most)),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(Shared),
                          .cluster = Config::kCluster};
  launch<kKernel>(shape, params, stream);
}

}  // namespace flash::flash_attn
