// The key sources of fwd_sm90: how the producer brings keys and values to shared memory. The mainloop reads stages of
// k_ring and v_ring and does not know where they come from. A source has
//
//   kWarps          how many warps of the producer's warpgroup take part
//   copies()        whether the calling thread does; the functions below are for those threads
//   Keys            where the keys of a tile lie; keys_of(work) finds out
//   load_k, load_v  wait for an empty stage and start the copy of an n_block to it
#pragma once

#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// Keys and values of dense and packed tensors: one thread has TMA copy whole tiles. In instances of kBiased, a tile of
// the bias comes with each tile of keys.
template <typename Config>
struct TmaKeys {
  using Shared = FwdSm90Shared<Config>;
  struct Keys {
    Span span;
    int head;
    int bias_entry, bias_head, bias_row;  // only in instances of kBiased
  };
  static constexpr int kWarps = 1;
  const FwdSm90Launch& launch;
  Shared& shared;
  RingCursor<Config::kStages> k_at, v_at;

  __device__ TmaKeys(const FwdSm90Launch& launch, Shared& shared) : launch(launch), shared(shared) {}

  __device__ static bool copies() { return lane_id() == 0; }
  __device__ static Keys keys_of(const FwdWork<Config>& work) {
    return {.span = work.seq.k,
            .head = work.tile.key_head,
            .bias_entry = work.tile.entry,
            .bias_head = work.tile.head,
            .bias_row = static_cast<int>(work.seq.q.first) + work.tile.row0};
  }

  __device__ void load_k(const Keys& keys, int n_block) {
    auto& stage = shared.k[k_at.stage];
    const BiasRows& bias_rows = launch.params.problem.bias.rows;
    shared.k_ring.wait_empty(k_at);
    int bytes = sizeof(typename Shared::Keys);
    if constexpr (Config::kBiased) bytes += bytes_of_bias<typename Shared::Bias>(bias_rows);
    auto& arrived = shared.k_ring.expect_tx(k_at, bytes);
    load_async(stage, launch.k, keys.span.first + n_block * Config::kKeys, keys.head, keys.span.batch, arrived,
               Config::channel());
    if constexpr (Config::kBiased) {
      load_bias(stage.bias, launch.bias, bias_rows, keys.bias_entry, keys.bias_head, keys.bias_row,
                n_block * Config::kKeys, arrived);
    }
    k_at.advance();
  }

  __device__ void load_v(const Keys& keys, int n_block) {
    shared.v_ring.wait_empty(v_at);
    auto& arrived = shared.v_ring.expect_tx(v_at, sizeof(typename Shared::Values));
    load_async(shared.v[v_at.stage], launch.v, keys.span.first + n_block * Config::kKeys, keys.head, keys.span.batch,
               arrived, Config::channel());
    v_at.advance();
  }
};

}  // namespace flash::flash_attn
