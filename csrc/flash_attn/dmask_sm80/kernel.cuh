// S_dmask (DmaskParams), which return_attn_probs asks for. A kernel of its own computes the scores again, so that the
// forward kernels need not store them. A thread block takes 64 query rows and walks over blocks of 128 keys from the
// last to the first; the running maximum is updated after every kWidth keys.
#pragma once

#include "common/device.h"
#include "common/launch.h"
#include "flash_attn/fwd/planner.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/instances.h"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/dropout.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// The kernel's parameters: the problem, and how its rows are cut into tiles.
struct TiledDmask {
  DmaskParams dmask;
  Tiling tiling;
};

template <typename T_, int kHeadDim_, int kWidth_>
struct DmaskConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kWidth = kWidth_;
  static constexpr bool kPlain = false, kRanged = false, kPaged = true;
  static constexpr int kRows = 64, kKeys = 128, kThreads = 128, kWarpRows = 16;
  static constexpr int kChannelsV = 0;  // there is no output
};

template <typename Config>
struct DmaskShared {
  SharedTile<typename Config::T, Config::kRows, Config::kHeadDim> q;
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> k;
};

// Turns scores into exponentials relative to the running maximum, which advances by kWidth columns at a time from the
// right. A lane has kWidth / 4 of these columns.
template <int kWidth, int kRows, int kCols>
__device__ void relate_to_running_max(Fragment<kRows, kCols>& s, float (&max)[kRows / 8]) {
#pragma unroll
  for (int end = kCols / 4; end > 0; end -= kWidth / 4) {
#pragma unroll
    for (int r = 0; r < kRows / 8; ++r) {
      float block_max = -INFINITY;
#pragma unroll
      for (int c = end - kWidth / 4; c < end; ++c) block_max = fmaxf(block_max, s(r, c));
      max[r] = fmaxf(max[r], quad_max(block_max));
      const float shift = finite_or_zero(max[r]);
#pragma unroll
      for (int c = end - kWidth / 4; c < end; ++c) s(r, c) = ptx::exp2((s(r, c) - shift) * kLog2e);
    }
  }
}

// Stores a warp's part of the result.
template <typename Config>
__device__ void store_dmask(const DmaskParams& p, const Scores<Config>& u, const FwdWork<Config>& work, int warp_row,
                            int col0) {
  using T = typename Config::T;
  const WorkTile& tile = work.tile;
  T* corner = static_cast<T*>(p.s_dmask) + (int64_t{tile.entry} * p.fwd.problem.heads + tile.head) * p.rows * p.cols;
#pragma unroll
  for (int r = 0; r < u.kLaneRows; ++r) {
    const int row = tile.row0 + warp_row + u.row(r);
    if (row >= min(work.seq.q.length, p.rows)) continue;
#pragma unroll
    for (int c = 0; c < u.kLaneCols; c += 2) {
      const int col = col0 + u.col(c);
      if (col >= min(work.seq.k.length, p.cols)) continue;
      *reinterpret_cast<uint32_t*>(corner + int64_t{row} * p.cols + col) = ptx::pack<T>(u(r, c), u(r, c + 1));
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void dmask_kernel(const __grid_constant__ TiledDmask tiled) {
  const DmaskParams& p = tiled.dmask;
  auto& shared = shared_memory<DmaskShared<Config>>();
  const FwdWork<Config> work(p.fwd, tiled.tiling, tile_of_block<Config::kRows>(p.fwd.problem, tiled.tiling));
  if (!work.exists()) return;
  const int warp_row = warp_id() * Config::kWarpRows;
  auto keys = key_rows<Config, decltype(shared.k)>(p.fwd, p.fwd.k, work, work.n_blocks.last);
  const Dropout dropout(p.fwd.problem, work.tile.entry, work.tile.head);
  load_queries<Config>(shared.q, p.fwd, tiled.tiling, work);
  float max[Config::kWarpRows / 8];
  for (float& m : max) m = -INFINITY;
  for (int n = work.n_blocks.last; n >= work.n_blocks.first; --n) {
    __syncthreads();  // no warp reads K(n + 1) any more
    load_own_rows<Config>(shared.k, keys, p.fwd, p.fwd.problem.head_dim, p.fwd.k.head_dim);
    ptx::commit_copies();
    keys.move(-Config::kKeys);
    ptx::wait_copies<0>();
    __syncthreads();
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kHeadDim>(s, along_cols(shared.q, warp_row), along_cols(shared.k));
    make_scores<Config>(s, p.fwd, work, warp_row, n, /*cut=*/true);
    relate_to_running_max<Config::kWidth>(s, max);
    dropout.for_each_dropped(s, work.tile.row0 + warp_row, n * Config::kKeys,
                             [&](int r, int c) { s(r, c) = -s(r, c); });
    store_dmask<Config>(p, s, work, warp_row, n * Config::kKeys);
  }
}

template <typename T, int kHeadDim, int kWidth>
void run_dmask(const DmaskParams& p, cudaStream_t stream) {
  using Config = DmaskConfig<T, kHeadDim, kWidth>;
  static_assert(sizeof(DmaskShared<Config>) <= kLeastSharedBytes);
  const TiledDmask tiled{p, tiling_for(p.fwd.problem, /*packed_heads=*/1, Config::kRows)};
  const LaunchShape shape{.grid = dim3(tiled.tiling.tiles.value),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(DmaskShared<Config>)};
  launch<dmask_kernel<Config>>(shape, tiled, stream);
}

}  // namespace flash::flash_attn
