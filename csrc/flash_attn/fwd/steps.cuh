// What the forward kernels share, however they load and multiply their tiles: turning products into scores, and sums of
// exponentials into results. Config says what a warp has: kWarpRows rows, kKeys keys of a key block, kChannels channels
// of Q and K, and kChannelsV of V and O.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias.cuh"
#include "flash_attn/scores/descale.cuh"
#include "flash_attn/scores/dropout.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

template <typename Config>
using Scores = Fragment<Config::kWarpRows, Config::kKeys>;
template <typename Config>
using Output = Fragment<Config::kWarpRows, Config::kChannelsV>;
template <typename Config>
using Softmax = OnlineSoftmax<Config::kWarpRows, !kHasPlainScores<Config::kFeatures>>;

// The bias of a block of scores, loaded by the warps themselves (not by TMA). Empty in plain instances.
template <typename Config>
struct BlockBias {
  struct None {};
  // At 192 channels, fp32 elements that are loaded early have others spilled, and the kernel is 20 % slower.
  static constexpr bool kEarlyFp32 = Config::kChannelsV <= 128;
  using Elements = BiasBlock<typename Config::T, Config::kWarpRows, Config::kKeys, kEarlyFp32>;
  std::conditional_t<Config::kPlain, None, Elements> elements;

  // Issues the loads, before the products whose time hides them. `warp_row` is the warp's first row in the tile.
  template <typename Work>
  __device__ BlockBias(const Problem& p, const Work& work, int warp_row, int block) {
    if constexpr (!Config::kPlain) {
      if (p.bias.data == nullptr) return;
      elements.load(p.bias, Starts(p, work, warp_row).of_rows, block * Config::kKeys);
    }
  }

  template <typename Work>
  __device__ void add_to(Scores<Config>& s, const Problem& p, const Work& work, int warp_row, int block) {
    if (p.bias.data == nullptr) return;
    elements.add_to(s, p.bias, Starts(p, work, warp_row).of_rows, block * Config::kKeys);
  }

 private:
  // Where the lane's rows start in the bias; for rows past the tile's last, that of the last.
  struct Starts {
    int64_t of_rows[Scores<Config>::kLaneRows];

    template <typename Work>
    __device__ Starts(const Problem& p, const Work& work, int warp_row) {
#pragma unroll
      for (int r = 0; r < Scores<Config>::kLaneRows; ++r) {
        const int row = min(warp_row + Scores<Config>::row(r), work.rows.count - 1);
        of_rows[r] = row_start(p.bias.rows, work.tile.entry, work.tile.head + work.rows.head(row),
                               work.seq.q.first + work.rows.token(row));
      }
    }
  };
};

// Turns products into scores and, if the mask cuts the block, sets what it hides to -inf.
template <typename Config, typename Work>
__device__ void make_scores(Scores<Config>& s, BlockBias<Config>& bias, const FwdParams& p, const Work& work,
                            int warp_row, int block, bool cut) {
  if (Config::kPlain && !cut) return;
  int tokens[s.kLaneRows];
#pragma unroll
  for (int r = 0; r < s.kLaneRows; ++r) tokens[r] = work.rows.token(warp_row + s.row(r));
  if constexpr (!Config::kPlain) {
    scale_and_cap(s, p.problem, softmax_scale_of<typename Config::T>(p.problem, work.tile));
    if (p.problem.alibi_slopes != nullptr) {
      float slopes[s.kLaneRows];
      int own_keys[s.kLaneRows];
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) {
        const int head = work.tile.head + work.rows.head(warp_row + s.row(r));
        slopes[r] = alibi_slope(p.problem, work.tile.entry, min(head, p.problem.heads - 1));
        own_keys[r] = tokens[r] + work.mask.diagonal();
      }
      subtract_distance(s, slopes, own_keys, block * Config::kKeys);
    }
    bias.add_to(s, p.problem, work, warp_row, block);
  }
  if (cut) hide(s, work.mask, tokens, block * Config::kKeys, -INFINITY);
}

// The same, loading the bias only now.
template <typename Config, typename Work>
__device__ void make_scores(Scores<Config>& s, const FwdParams& p, const Work& work, int warp_row, int block,
                            bool cut) {
  BlockBias<Config> bias(p.problem, work, warp_row, block);
  make_scores<Config>(s, bias, p, work, warp_row, block, cut);
}

// Sets dropped probabilities to 0 for P V; the row sums have already counted them, as they must. With dropout heads are
// never packed, so rows of the tile are rows of the entry.
template <typename Config>
__device__ void drop(Scores<Config>& s, const FwdParams& p, const WorkTile& tile, int warp_row, int block) {
  if constexpr (!Config::kPlain) {
    if (p.problem.rng_state == nullptr) return;
    const Dropout dropout(p.problem, tile.entry, tile.head);
    dropout.for_each_dropped(s, tile.row0 + warp_row, block * Config::kKeys, [&](int r, int c) { s(r, c) = 0; });
  }
}

// The softmax of a tile whose rows have seen no keys yet.
template <typename Config>
__device__ Softmax<Config> softmax_of(const Problem& p, const WorkTile& tile) {
  const float scale = softmax_scale_of<typename Config::T>(p, tile);
  return Softmax<Config>(score_scale_log2<Config::kFeatures>(scale));
}

// The score of the sink of a row, or -inf.
template <typename Work>
__device__ float sink_of(const FwdParams& p, const Work& work, int row) {
  return sink_of(p.problem, work.tile.entry, work.tile.head + work.rows.head(row));
}

// Adds each row's sink to its sum of exponentials, once all keys are in it.
template <typename Config, typename Work>
__device__ void add_sinks(Softmax<Config>& softmax, const FwdParams& p, const Work& work, int warp_row) {
#pragma unroll
  for (int r = 0; r < softmax.kLaneRows; ++r) {
    const float sink = sink_of(p, work, warp_row + Output<Config>::row(r));
    softmax.sum[r] += exp_of_sink(sink, softmax.max[r], softmax.scale_log2);
  }
}

// Divides O by the row sums, and rescales it for dropout or codes. A row that sees no key gets 0.
template <typename Config>
__device__ void normalize(Output<Config>& o, const FwdParams& p, const WorkTile& tile, const Softmax<Config>& softmax) {
  const float scale = p.problem.dropout_rescale * output_scale_of<typename Config::T>(p.problem, tile);
  float factors[o.kLaneRows];
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    factors[r] = softmax.sum[r] == 0 ? 0.f : scale * ptx::reciprocal(softmax.sum[r]);
  }
  o.scale_rows(factors);
}

// Stores a row's lse, what rounding has taken off it, and its largest score, each if it is an output.
template <typename Config, typename Work>
__device__ void store_row(const FwdParams& p, const Work& work, int row, const LogSumExp& x, float largest) {
  const int64_t index = row_index(p.problem, work.seq.q, work.tile.head) +
                        int64_t{work.rows.head(row)} * p.problem.seqlen_q + work.rows.token(row);
  if (p.softmax_lse != nullptr) p.softmax_lse[index] = x.lse;
  if (!kHasPlainScores<Config::kFeatures> && p.lse_lo != nullptr) p.lse_lo[index] = x.lse_lo;
  if (!Config::kPlain && p.row_max != nullptr) p.row_max[index] = largest;
}

// The same for all of the warp's rows: lane i of a quad stores the i-th of the rows that the quad shares.
template <typename Config, typename Work>
__device__ void store_lse(const FwdParams& p, const Work& work, int warp_row, const Softmax<Config>& softmax) {
  const int mine = lane_id() % 4, row = warp_row + Output<Config>::row(mine);
  if (mine >= softmax.kLaneRows || row >= work.rows.count) return;
  float max = softmax.max[0], sum = softmax.sum[0];
#pragma unroll
  for (int r = 1; r < softmax.kLaneRows; ++r) {
    if (r == mine) max = softmax.max[r], sum = softmax.sum[r];
  }
  const LogSumExp lse = log_sum_exp(sink_of(p, work, row), max, sum, softmax.scale_log2);
  store_row<Config>(p, work, row, lse, largest_score(max, softmax.scale_log2));
}

}  // namespace flash::flash_attn
