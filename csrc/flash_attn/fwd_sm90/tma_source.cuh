// Where the producer of fwd_sm90 takes Q, K and V from is a source. This one is for dense and packed tensors: one
// thread has TMA copy whole tiles. The mainloop reads stages of the rings and does not know where they come from. A
// source has
//
//   kWarps                  how many warps of the producer's warpgroup take part
//   copies(), publishes()   whether the calling thread copies; whether it is the one that hands out work
//   load(work, take_next)   starts the copies of a tile's Q, K and V, as stages become empty. take_next is called once,
//                           late: after that, the scheduler can tell the next tile
//   finish()                starts what is left, after the last tile
#pragma once

#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// In instances of kBiased, a tile of the bias comes with each tile of keys.
template <typename Config>
struct TmaSource {
  using Shared = FwdSm90Shared<Config>;
  struct Keys {
    Span span;
    int head;
    int bias_entry, bias_head, bias_row;  // only in instances of kBiased
  };
  static constexpr int kWarps = 1;
  const FwdSm90Launch& launch;
  Shared& shared;
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;
  Keys last_keys;  // of the V whose copy is still to be started, if there is one
  int last_n_block;
  bool has_last_v = false;

  __device__ TmaSource(const FwdSm90Launch& launch, Shared& shared) : launch(launch), shared(shared) {}

  __device__ static bool copies() { return lane_id() == 0; }
  __device__ static bool publishes() { return true; }
  __device__ static Keys keys_of(const FwdWork<Config>& work) {
    return {.span = work.seq.k,
            .head = work.tile.key_head,
            .bias_entry = work.tile.entry,
            .bias_head = work.tile.head,
            .bias_row = static_cast<int>(work.seq.q.first) + work.tile.row0};
  }

  // Starts the copies in the order in which they are needed. A tile's last V is needed after the first K of the next
  // tile, so its copy is left to the next call. The next tile is taken just before the last K, which then has to wait
  // for an empty stage anyway.
  template <typename TakeNext>
  __device__ void load(const FwdWork<Config>& work, TakeNext&& take_next) {
    const auto [first, last] = work.n_blocks;
    const Keys keys = keys_of(work);
#pragma unroll 1
    for (int n_block = last; n_block >= first; --n_block) {
      if (n_block == first) take_next();
      load_k(keys, n_block);
      finish();
      if (n_block == last) load_q(work);
      last_keys = keys, last_n_block = n_block, has_last_v = true;
    }
  }
  __device__ void finish() {
    if (has_last_v) load_v(last_keys, last_n_block);
  }

 private:
  // Where the first key of an n_block is; a row of the batch dimension is one page.
  __device__ static Place place_of(const Keys& keys, int n_block) {
    return {static_cast<int>(keys.span.batch), static_cast<int>(keys.span.first) + n_block * Config::kKeys};
  }

  // Starts the copy of a tile of K or V. Where blocks share it, each copies some of the panels to all.
  template <typename Tile>
  __device__ static void load_shared(Tile& tile, const CUtensorMap& map, const Place& place, int head,
                                     ptx::SharedBarrier& arrived) {
    if constexpr (Config::kSharers == 1) {
      load_async(tile, map, place.row, head, place.page, arrived, Config::channel());
    } else {
      constexpr int kOwn = Tile::kPanels / Config::kSharers;
      static_assert(kOwn * Config::kSharers == Tile::kPanels);
      constexpr uint16_t kAll = (1 << Config::kSharers) - 1;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int panel = ptx::cluster_rank() * kOwn + i;
        ptx::copy_box_to_blocks(tile.address(0, 0) + Tile::distance(0, panel), map, panel * Tile::kPanelCols, head,
                                place.row, place.page, arrived, kAll);
      }
    }
  }

  __device__ void load_q(const FwdWork<Config>& work) {
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      auto& ring = shared.q_rings[rank];
      ring.wait_empty(q_at);
      auto& arrived = ring.expect_tx(q_at, sizeof(typename Shared::OwnRows));
      load_async(shared.q[q_at.stage][rank], launch.q, work.seq.q.first + work.tile.row0 + kWarpgroupRows * rank,
                 work.tile.head, work.seq.q.batch, arrived, Config::channel());
    }
    q_at.advance();
  }

  __device__ void load_k(const Keys& keys, int n_block) {
    auto& stage = shared.k[k_at.stage];
    const BiasRows& bias_rows = launch.params.problem.bias.rows;
    shared.k_ring.wait_empty(k_at);
    int bytes = sizeof(typename Shared::Keys);
    if constexpr (Config::kBiased) bytes += bytes_of_bias<typename Shared::Bias>(bias_rows);
    auto& arrived = shared.k_ring.expect_tx(k_at, bytes);
    const Place place = place_of(keys, n_block);
    load_shared(stage, launch.k, place, keys.head, arrived);
    if constexpr (Config::kBiased) {
      load_bias(stage.bias, launch.bias, bias_rows, keys.bias_entry, keys.bias_head, keys.bias_row,
                n_block * Config::kKeys, arrived);
    }
    k_at.advance();
  }

  __device__ void load_v(const Keys& keys, int n_block) {
    shared.v_ring.wait_empty(v_at);
    auto& arrived = shared.v_ring.expect_tx(v_at, sizeof(typename Shared::Values));
    const Place place = place_of(keys, n_block);
    load_shared(shared.v[v_at.stage], launch.v, place, keys.head, arrived);
    v_at.advance();
  }
};

}  // namespace flash::flash_attn
