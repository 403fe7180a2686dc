// Attention, forward, for every GPU from sm_80 on:
//
//   O = softmax(S) V,   S = scores of Q K^T (score.cuh) under the mask (mask.cuh),   lse = log sum exp S
//
// A block works on a tile of query rows of one head, or of the heads that share a key head, and walks the blocks of
// keys that these rows see from the last to the first with an online softmax (Dao, "FlashAttention-2", 2023). If the
// keys are split, the last block to arrive merges (split.cuh).
//
// A warp owns 16 or 32 rows and all keys of a block, so that it shares nothing but the tiles of K and V. Q stays in
// shared memory; S, P and O are in registers, where S as a result of one mma has the layout of P as an operand of the
// next. There is one tile of K and one of V: V(n) is copied during Q K(n)^T and softmax, K(n - 1) during P V(n), and a
// second block on the multiprocessor fills the gaps.
#pragma once

#include "common/launch.h"
#include "flash_attn/fwd_plan.h"
#include "flash_attn/fwd_steps.cuh"
#include "flash_attn/fwd_tiles.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/rows.cuh"
#include "flash_attn/schedule.cuh"
#include "flash_attn/softmax.cuh"
#include "flash_attn/split.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct FwdConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = has_plain_scores(kFeatures), kRanged = takes_ranges(kFeatures);
  static constexpr bool kPaged = !kPlain;
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kFeatures);
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys;
  static constexpr int kThreads = 32 * kTile.warps, kWarpRows = kRows / kTile.warps;
};

template <typename Config>
struct FwdShared {
  SharedTile<typename Config::T, Config::kRows, Config::kHeadDim> q;  // in the end O
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> k;
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> v;
  FwdWork<Config> work;  // not in registers, which the loop needs
};

// A warp's walk over the blocks of keys, and what it carries along.
template <typename Config>
struct FwdWalk {
  using T = typename Config::T;
  const FwdSm80Params& p;
  FwdShared<Config>& shared;
  const int warp_row;
  Output<Config>& o;
  Softmax<Config>& softmax;
  KeyRows<Config> keys, values;  // of the blocks to load next

  __device__ FwdWalk(const FwdSm80Params& p, FwdShared<Config>& shared, int warp_row, Output<Config>& o,
                     Softmax<Config>& softmax)
      : p(p),
        shared(shared),
        warp_row(warp_row),
        o(o),
        softmax(softmax),
        keys(key_rows<Config, decltype(shared.k)>(p, p.k, shared.work, shared.work.blocks.last)),
        values(key_rows<Config, decltype(shared.v)>(p, p.v, shared.work, shared.work.blocks.last)) {}

  template <bool kAllExist>
  __device__ void load_k() {
    load_own_rows<Config, kAllExist>(shared.k, keys, p, p.problem.head_dim, p.k.head_dim);
    ptx::commit_copies();
    keys.move(-Config::kKeys);
  }
  template <bool kAllExist>
  __device__ void load_v() {
    load_own_rows<Config, kAllExist>(shared.v, values, p, head_dim_v<Config::kPlain>(p.problem), p.v.head_dim);
    ptx::commit_copies();
    values.move(-Config::kKeys);
  }

  // kCut: whether the mask hides some of the block's keys from some row. Two loop bodies are faster than one with a
  // branch. Values that no row sees are replaced by zeros: P is 0 there, but 0 times NaN is NaN. Keys need no zeros,
  // and only the last block may have keys that do not exist.
  template <bool kCut>
  __device__ void step(int n) {
    ptx::wait_copies<0>();
    __syncthreads();  // K(n) is here, and nobody reads V(n + 1) any more
    load_v<!kCut>();
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kHeadDim>(s, along_cols(shared.q, warp_row), along_cols(shared.k));
    make_scores<Config>(s, p, shared.work, warp_row, n, kCut);
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    o.scale_rows(shrink);
    drop<Config>(s, p, shared.work.tile, warp_row, n);
    const auto probabilities = pack<T>(s);

    ptx::wait_copies<0>();
    __syncthreads();  // V(n) is here, and nobody reads K(n) any more
    if (n > shared.work.blocks.first) load_k<true>();
    gemm<Config::kKeys>(o, probabilities, along_rows(shared.v));
  }

  __device__ void run() {
    const auto [first, last] = shared.work.blocks;
    if (last < first) return;
    load_queries<Config>(shared.q, p, p.plan.tiling, shared.work);
    load_k<false>();
    const Interval whole = shared.work.whole_blocks();
    for (int n = last; n >= first;) {
      for (; n >= first && !whole.covers(n); --n) step<true>(n);
      for (; n >= first && whole.covers(n); --n) step<false>(n);
    }
    softmax.finish();
  }
};

template <typename Config>
__device__ void store_out(FwdShared<Config>& shared, const FwdSm80Params& p, const FwdWork<Config>& work, int warp_row,
                          Output<Config>& o, const Softmax<Config>& softmax) {
  const int cols = head_dim_v<Config::kPlain>(p.problem);
  normalize<Config>(o, p, softmax);
  store_fragment(shared.q, o, warp_row);
  __syncwarp();
  if (Config::kPlain || p.aligned) {
    with_query_rows<typename Config::T>(p.plan.tiling, p.out, work, [&](const auto& rows) {
      store_rows<Config::kWarpRows>(shared.q, rows, warp_row, cols);
    });
  } else {
    store_scattered<Config::kWarpRows>(shared.q, packed_rows<typename Config::T>(p.out, work), warp_row, cols,
                                       p.out.head_dim);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void fwd_kernel(const __grid_constant__ FwdSm80Params p) {
  auto& shared = shared_memory<FwdShared<Config>>();
  if (warp_id() == 0) {
    const FwdWork<Config> work(p, p.plan.tiling, p.plan.splits);
    if (lane_id() == 0) shared.work = work;
  }
  __syncthreads();
  const FwdWork<Config>& work = shared.work;
  if (!work.exists()) return;

  const int warp_row = warp_id() * Config::kWarpRows;
  Output<Config> o;
  o.fill(0);
  Softmax<Config> softmax(score_scale_log2<Config::kFeatures>(p.problem));
  FwdWalk<Config>(p, shared, warp_row, o, softmax).run();
  if (work.num_splits() > 1 && !merge_splits<Config::kThreads>(p.plan.splits, work, warp_row, o, softmax)) return;
  add_sinks<Config>(softmax, p, work, warp_row);
  store_lse<Config>(p, work, warp_row, softmax);
  store_out<Config>(shared, p, work, warp_row, o, softmax);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_fwd(const FwdSm80Params& p, cudaStream_t stream) {
  using Config = FwdConfig<T, kHeadDim, kFeatures>;
  const LaunchShape shape{.grid = dim3(p.plan.tiling.tiles.value * p.plan.splits.count),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(FwdShared<Config>)};
  launch<fwd_kernel<Config>>(shape, p, stream);
}

}  // namespace flash::flash_attn
