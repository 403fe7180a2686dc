// Attention, forward, for every GPU from sm_80 on:
//
//   O = softmax(S) V,   S = scores of Q K^T (score.cuh) under the mask (mask.cuh),   lse = log sum exp S
//
// A block works on a tile of query rows of one head, or of the heads that share a key head, and walks the blocks of
// keys that these rows see from the last to the first with an online softmax (Dao, "FlashAttention-2", 2023). If the
// keys are split, the last block to arrive merges (split.cuh).
//
// A warp owns 16 or 32 rows and all keys of a block, so that it shares nothing but the tiles of K and V. Q stays in
// shared memory; S, P and O are registers, where the layout of S as a result is that of P as an operand. There is one
// tile of K and one of V: V(n) travels during Q K(n)^T and softmax, K(n - 1) during P V(n), and a second block on the
// multiprocessor fills the gaps.
#pragma once

#include "common/launch.h"
#include "flash_attn/config.h"
#include "flash_attn/dropout.cuh"
#include "flash_attn/instances.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/rows.cuh"
#include "flash_attn/schedule.cuh"
#include "flash_attn/score.cuh"
#include "flash_attn/sequence.cuh"
#include "flash_attn/softmax.cuh"
#include "flash_attn/split.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct FwdConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = kFeatures == Features::kPlain;
  static constexpr TileSize kTile = fwd_tile(kHeadDim, kFeatures);
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys;
  static constexpr int kThreads = 32 * kTile.warps, kWarpRows = kRows / kTile.warps;
};

template <typename Config>
struct FwdShared {
  SharedTile<typename Config::T, Config::kRows, Config::kHeadDim> q;  // in the end O
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> k;
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> v;
};

template <typename Config>
using Scores = Fragment<Config::kWarpRows, Config::kKeys>;
template <typename Config>
using Output = Fragment<Config::kWarpRows, Config::kHeadDim>;
template <typename Config>
using Softmax = OnlineSoftmax<Config::kWarpRows>;

// Products to scores, hidden where the mask says so. `warp_row` is the warp's first row.
template <typename Config>
__device__ void make_scores(Scores<Config>& s, const FwdParams& p, const Mask& mask, const WorkTile& tile,
                            const TileRows& rows, int warp_row, int block, bool cut) {
  if (Config::kPlain && !cut) return;
  int tokens[s.kLaneRows];
#pragma unroll
  for (int r = 0; r < s.kLaneRows; ++r) tokens[r] = rows.token(warp_row + s.row(r));
  if constexpr (!Config::kPlain) {
    scale_and_cap(s, p.problem);
    if (p.problem.alibi_slopes != nullptr) {
      float slopes[s.kLaneRows];
      int own_keys[s.kLaneRows];
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) {
        const int head = tile.head + rows.head(warp_row + s.row(r));
        slopes[r] = alibi_slope(p.problem, tile.entry, min(head, p.problem.heads - 1));
        own_keys[r] = tokens[r] + mask.diagonal();
      }
      subtract_distance(s, slopes, own_keys, block * Config::kKeys);
    }
  }
  if (cut) hide(s, mask, tokens, block * Config::kKeys, -INFINITY);
}

// Dropped elements count in the row sums, but not in O. Rows of a tile are rows of the entry then: heads are not
// packed.
template <typename Config>
__device__ void drop(Scores<Config>& s, const FwdParams& p, const WorkTile& tile, int warp_row, int block) {
  if constexpr (!Config::kPlain) {
    if (p.problem.rng_state == nullptr) return;
    const Dropout dropout(p.problem, tile.entry, tile.head);
    dropout.for_each_dropped(s, tile.row0 + warp_row, block * Config::kKeys, [&](int r, int c) { s(r, c) = 0; });
  }
}

template <typename Config>
__device__ void store_out(FwdShared<Config>& shared, const FwdParams& p, const Sequence& seq, const WorkTile& tile,
                          const TileRows& rows, int warp_row, Output<Config>& o, const Softmax<Config>& softmax) {
  float factors[o.kLaneRows];
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    factors[r] = softmax.sum[r] == 0 ? 0.f : p.problem.dropout_rescale / softmax.sum[r];
  }
  o.scale_rows(factors);
  store_fragment(shared.q, o, warp_row);
  __syncwarp();
  const auto out = query_rows<typename Config::T>(p.out, seq, tile, rows);
  if (Config::kPlain || p.aligned) {
    store_rows<Config::kWarpRows>(shared.q, out, warp_row, p.problem.head_dim);
  } else {
    store_scattered<Config::kWarpRows>(shared.q, out, warp_row, p.problem.head_dim, p.out.head_dim);
  }
}

template <int kRows>
__device__ void store_lse(const FwdParams& p, const Sequence& seq, const WorkTile& tile, const TileRows& rows,
                          int warp_row, const OnlineSoftmax<kRows>& softmax) {
  if (lane_id() % 4 != 0) return;
  float* lse = row_values(p.softmax_lse, p.problem, seq.q, tile.head);
  for_each_row<kRows>(warp_row, rows.count, [&](int r) {
    const int row = warp_row + Fragment<kRows, 16>::row(r);
    lse[int64_t{rows.head(row)} * p.problem.seqlen_q + rows.token(row)] =
        log_sum_exp(softmax.max[r], softmax.sum[r], softmax.scale_log2);
  });
}

// A warp's walk over the blocks of keys, and what it carries along.
template <typename Config>
struct FwdWalk {
  using T = typename Config::T;
  const FwdParams& p;
  FwdShared<Config>& shared;
  const WorkTile& tile;
  const TileRows& rows;
  const Mask& mask;
  const KeyRows<Config> keys, values;
  const int first_key;  // of keys and values
  const int first_block, warp_row;
  Output<Config> o;
  Softmax<Config> softmax;

  __device__ void load_k(int n) {
    load_keys<Config>(shared.k, keys, p, p.k.head_dim, n * Config::kKeys - first_key);
    ptx::commit_copies();
  }
  __device__ void load_v(int n) {
    load_keys<Config>(shared.v, values, p, p.v.head_dim, n * Config::kKeys - first_key);
    ptx::commit_copies();
  }

  // kCut: whether the mask hides something of the block from some row. Two instances of the body, without a branch in
  // it, are 9 % faster at head dims 128 and 256 than one; so the second barrier can come as late as it does.
  template <bool kCut>
  __device__ void step(int n) {
    ptx::wait_copies<0>();
    __syncthreads();  // K(n) is here, and nobody reads V(n + 1) any more
    load_v(n);
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kHeadDim>(s, along_cols(shared.q, warp_row), along_cols(shared.k));
    make_scores<Config>(s, p, mask, tile, rows, warp_row, n, kCut);
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    o.scale_rows(shrink);
    drop<Config>(s, p, tile, warp_row, n);
    const auto probabilities = pack<T>(s);

    ptx::wait_copies<0>();
    __syncthreads();  // V(n) is here, and nobody reads K(n) any more
    if (n > first_block) load_k(n - 1);
    gemm<Config::kKeys>(o, probabilities, along_rows(shared.v));
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void fwd_kernel(const __grid_constant__ FwdParams p) {
  using T = typename Config::T;
  auto& shared = shared_memory<FwdShared<Config>>();
  const WorkTile tile = work_tile<Config::kRows>(p);
  const Sequence seq(p.problem, tile.entry, p.pages.block_table != nullptr);
  const TileRows rows(p, seq, tile, Config::kRows);
  if (rows.count <= 0) return;

  const Mask mask(p.problem, seq);
  const Interval seen = mask.keys_seen_by_any(rows.tokens()), seen_by_all = mask.keys_seen_by_all(rows.tokens());
  const auto [blocks, num_splits] =
      KeyBlocks(blocks_of<Config::kKeys>(seen), p.num_splits, p.least_blocks_per_split, tile.split);
  if (tile.split >= num_splits) return;

  const int warp_row = warp_id() * Config::kWarpRows;
  FwdWalk<Config> walk{.p = p,
                       .shared = shared,
                       .tile = tile,
                       .rows = rows,
                       .mask = mask,
                       .keys = key_rows<Config>(p, p.k, seq, tile, seen),
                       .values = key_rows<Config>(p, p.v, seq, tile, seen),
                       .first_key = seen.first,
                       .first_block = blocks.first,
                       .warp_row = warp_row,
                       .softmax = Softmax<Config>(score_scale_log2<Config::kFeatures>(p.problem))};
  walk.o.fill(0);
  if (!blocks.empty()) {
    load_tile<Config>(shared.q, query_rows<T>(p.q, seq, tile, rows), p, p.q.head_dim);
    walk.load_k(blocks.last);
  }
  const auto is_whole = [&](int n) { return seen_by_all.covers(interval_of<Config::kKeys>(n)); };
  for (int n = blocks.last; n >= blocks.first;) {
    for (; n >= blocks.first && !is_whole(n); --n) walk.template step<true>(n);
    for (; n >= blocks.first && is_whole(n); --n) walk.template step<false>(n);
  }

  walk.softmax.finish();
  if (num_splits > 1 && !merge_splits<Config::kThreads>(p, tile.index, tile.split, num_splits, warp_row, rows.count,
                                                        walk.o, walk.softmax)) {
    return;
  }
  store_lse(p, seq, tile, rows, warp_row, walk.softmax);
  store_out<Config>(shared, p, seq, tile, rows, warp_row, walk.o, walk.softmax);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_fwd(const FwdParams& p, cudaStream_t stream) {
  using Config = FwdConfig<T, kHeadDim, kFeatures>;
  const LaunchShape shape{.grid = dim3(p.tiles.value * p.num_splits),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(FwdShared<Config>)};
  launch<fwd_kernel<Config>>(shape, p, stream);
}

}  // namespace flash::flash_attn
