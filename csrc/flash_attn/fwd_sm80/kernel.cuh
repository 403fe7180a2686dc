// Attention, forward, for every GPU from sm_80 on:
//
//   O = softmax(S) V,   S = scores of Q K^T (score.cuh) under the mask (mask.cuh),   lse = log sum exp S
//
// A thread block computes a tile of query rows, of one head or of the heads that share a key head. It walks over the
// n_blocks that these rows see, from the last to the first, with an online softmax (Dao, "FlashAttention-2", 2023).
// If the keys are split among thread blocks, the last one to arrive merges (split.cuh).
//
// A warp has 16 or 32 rows and all keys of an n_block, so that warps share nothing but the tiles of K and V. Q stays
// in shared memory. S, P and O are in registers: the result S of one mma already has the layout of the operand P of the
// next. There is one tile of K and one of V. V(n) is copied (cp.async) during Q K(n)^T and softmax, K(n - 1) during
// P V(n), and a second thread block on the SM fills the gaps.
//
// Beyond 256 channels, two warps share 16 rows. Each has half of the channels, and half of O. They exchange their
// partial sums of S in the memory of K, which takes two more barriers a step. Computing all of S in both warps instead
// would take half as many products again, and read half as much shared memory again.
#pragma once

#include "common/device.h"
#include "common/launch.h"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/split.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/descale.cuh"
#include "flash_attn/scores/partial_scores.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/barrier.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct FwdConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = has_plain_scores(kFeatures), kRanged = takes_ranges(kFeatures);
  static constexpr bool kPaged = !kPlain;
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kFeatures);
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys;
  // Warps that share rows, each with a slice of the channels: 1, or 2 with half of them each.
  static constexpr int kSlices = channel_slices(kHeadDim), kChannels = kHeadDim / kSlices, kChannelsV = kChannels;
  static constexpr int kBlockThreads = 32 * kTile.warps;
  static constexpr int kThreads = kBlockThreads / kSlices;  // that load a slice of a tile together
  static constexpr int kSliceWarps = kTile.warps / kSlices, kWarpRows = kRows / kSliceWarps;
};

// What a warp has of the thread block's tile.
template <typename Config>
struct WarpTile {
  int slice = Config::kSlices == 1 ? 0 : warp_id() / Config::kSliceWarps;
  int row = (warp_id() - slice * Config::kSliceWarps) * Config::kWarpRows;  // the warp's first
  int channel = slice * Config::kChannels;                                  // the warp's first
};

template <typename Config>
struct FwdShared {
  SharedTile<typename Config::T, Config::kRows, Config::kHeadDim> q;  // in the end, O on its way out
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> k;
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> v;
  FwdWork<Config> work;  // in shared memory to save registers for the loop
};

// A warp's loop over the n_blocks, and the state that it carries.
template <typename Config>
struct Mainloop {
  using T = typename Config::T;
  const FwdSm80Params& p;
  FwdShared<Config>& shared;
  const WarpTile<Config> warp;
  Output<Config>& o;
  Softmax<Config>& softmax;
  KeyRows<Config> keys, values;  // of the n_blocks to load next

  __device__ Mainloop(const FwdSm80Params& p, FwdShared<Config>& shared, const WarpTile<Config>& warp,
                      Output<Config>& o, Softmax<Config>& softmax)
      : p(p),
        shared(shared),
        warp(warp),
        o(o),
        softmax(softmax),
        keys(key_rows<Config, decltype(shared.k)>(p, p.k, shared.work, shared.work.n_blocks.last)),
        values(key_rows<Config, decltype(shared.v)>(p, p.v, shared.work, shared.work.n_blocks.last)) {}

  // The channels of the warp's slice.
  template <typename Tile>
  __device__ auto& own(Tile& tile) const {
    return columns_of<Config::kChannels>(tile, warp.slice);
  }

  template <bool kAllExist>
  __device__ void load_k() {
    load_own_rows<Config, kAllExist>(own(shared.k), keys, p, p.problem.head_dim, p.k.head_dim, warp.channel);
    ptx::commit_copies();
    keys.move(-Config::kKeys);
  }
  template <bool kAllExist>
  __device__ void load_v() {
    load_own_rows<Config, kAllExist>(own(shared.v), values, p, head_dim_v<Config::kPlain>(p.problem), p.v.head_dim,
                                     warp.channel);
    ptx::commit_copies();
    values.move(-Config::kKeys);
  }

  // Beyond 256 channels: adds the partial scores of the other slice.
  __device__ void add_other_slice(Scores<Config>& s) {
    if constexpr (Config::kSlices == 2) {
      using Partial = PartialScores<s.kRows, s.kCols>;
      static_assert(Config::kTile.warps * sizeof(Partial) <= sizeof(shared.k));
      auto* partials = reinterpret_cast<Partial*>(shared.k.data);
      __syncthreads();  // all warps have read K, whose memory the partial scores take
      partials[warp_id()].store(s, lane_id());
      ptx::sync_barrier<64>(1 + warp_id() % Config::kSliceWarps);
      partials[(warp_id() + Config::kSliceWarps) % Config::kTile.warps].add_to(s, lane_id());
    }
  }

  // kMasked: whether the mask hides some of the block's keys from some row. Two loop bodies are faster than one with a
  // branch. Values that no row sees are loaded as zeros: P is 0 there, but 0 * NaN is NaN. Keys need no zeros, since
  // their scores are overwritten; and only the last block, which run() loads, may have keys that do not exist.
  template <bool kMasked>
  __device__ void step(int n_block) {
    ptx::wait_copies<0>();
    __syncthreads();  // K(n) has arrived, and no warp reads V(n + 1) any more
    load_v<!kMasked>();
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kChannels>(s, along_cols(own(shared.q), warp.row), along_cols(own(shared.k)));
    add_other_slice(s);
    make_scores<Config>(s, p, shared.work, warp.row, n_block, kMasked);
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    o.scale_rows(shrink);
    drop<Config>(s, p, shared.work.tile, warp.row, n_block);
    const auto probabilities = pack<T>(s);

    ptx::wait_copies<0>();
    __syncthreads();  // V(n) has arrived, and no warp reads K(n), or the partial scores in its place, any more
    if (n_block > shared.work.n_blocks.first) load_k<true>();
    gemm<Config::kKeys>(o, probabilities, along_rows(own(shared.v)));
  }

  __device__ void run() {
    const auto [first, last] = shared.work.n_blocks;
    if (last < first) return;
    load_queries<Config>(own(shared.q), p, p.plan.tiling, shared.work, warp.channel);
    load_k<false>();
    const Interval unmasked = shared.work.unmasked_n_blocks();
    for (int n = last; n >= first;) {
      for (; n >= first && !unmasked.covers(n); --n) step<true>(n);
      for (; n >= first && unmasked.covers(n); --n) step<false>(n);
    }
    softmax.finish();
  }
};

// Stores O, packed by `pack`, by way of the memory of Q, to a tensor shaped like out.
template <typename Config, typename Pack>
__device__ void store_to(const TensorRef<>& x, FwdShared<Config>& shared, const FwdSm80Params& p,
                         const FwdWork<Config>& work, const WarpTile<Config>& warp, const Output<Config>& o,
                         const Pack& pack) {
  auto& tile = columns_of<Config::kChannels>(shared.q, warp.slice);
  const int cols = head_dim_v<Config::kPlain>(p.problem) - warp.channel;
  store_fragment(tile, o, warp.row, 0, pack);
  __syncwarp();
  if (Config::kPlain || p.aligned) {
    with_query_rows<typename Config::T>(p.plan.tiling, x, work, [&](auto rows) {
      rows.data += warp.channel;
      store_rows<Config::kWarpRows>(tile, rows, warp.row, cols);
    });
  } else {
    auto rows = packed_rows<typename Config::T>(x, work);
    rows.data += warp.channel * x.head_dim;
    store_scattered<Config::kWarpRows>(tile, rows, warp.row, cols, x.head_dim);
  }
}

template <typename Config>
__device__ void store_out(FwdShared<Config>& shared, const FwdSm80Params& p, const FwdWork<Config>& work,
                          const WarpTile<Config>& warp, Output<Config>& o, const Softmax<Config>& softmax) {
  using T = typename Config::T;
  normalize<Config>(o, p, work.tile, softmax);
  if (p.out_lo.data != nullptr) {
    store_to<Config>(p.out_lo, shared, p, work, warp, o, Residue<T>());
    __syncwarp();  // all lanes have read the rows that store_to overwrites next
  }
  store_to<Config>(p.out, shared, p, work, warp, o, RoundedToOut<T>(p));
}

template <typename Config>
__global__ __launch_bounds__(Config::kBlockThreads) void fwd_kernel(const __grid_constant__ FwdSm80Params p) {
  auto& shared = shared_memory<FwdShared<Config>>();
  if (warp_id() == 0) {
    const FwdWork<Config> work(p, p.plan.tiling, p.plan.splits);
    if (lane_id() == 0) shared.work = work;
  }
  __syncthreads();
  const FwdWork<Config>& work = shared.work;
  if (!work.exists()) return;

  const WarpTile<Config> warp;
  Output<Config> o;
  o.fill(0);
  Softmax<Config> softmax = softmax_of<Config>(p.problem, work.tile);
  Mainloop<Config>(p, shared, warp, o, softmax).run();
  if (work.num_splits() > 1 && !merge_splits<Config::kBlockThreads>(p.plan.splits, work, warp.row, o, softmax)) return;
  add_sinks<Config>(softmax, p, work, warp.row);
  if (warp.slice == 0) store_lse<Config>(p, work, warp.row, softmax);
  store_out<Config>(shared, p, work, warp, o, softmax);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_fwd(const FwdSm80Params& p, cudaStream_t stream) {
  using Config = FwdConfig<T, kHeadDim, kFeatures>;
  static_assert(sizeof(FwdShared<Config>) <= kLeastSharedBytes);
  const LaunchShape shape{.grid = dim3(p.plan.tiling.tiles.value * p.plan.splits.count),
                          .block = dim3(Config::kBlockThreads),
                          .shared_bytes = sizeof(FwdShared<Config>)};
  launch<fwd_kernel<Config>>(shape, p, stream);
}

}  // namespace flash::flash_attn
