// The producer warp of fwd_sm90: takes tiles and loads their Q, K and V. All lanes find the work of a tile, and
// lane 0 alone waits for empty stages and starts the copies.
#pragma once

#include <cmath>

#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

// The index-th tile. Tiles come in sections of heads whose keys and values fit the L2 cache together; within a section
// the longest tiles come first. Entries that share a bias follow one another, so that it is read from DRAM once.
template <int kRows, bool kBiased>
__device__ WorkTile ordered_tile(const Problem& p, const FwdSm90Plan& plan, int index) {
  const int section = plan.section_tiles.divide(index), rest = plan.section_tiles.remainder(index, section);
  const int slot = plan.section_heads.divide(rest), head = plan.section_heads.remainder(rest, slot);
  int outer = section * static_cast<int>(plan.section_heads.value) + head;
  if constexpr (kBiased) {
    const int shared = plan.sharing.divide(outer), entry = plan.sharing.remainder(outer, shared);
    outer = entry * static_cast<int>(plan.tiling.head_groups.value) + shared;
  }
  return tile_of_slot<kRows>(p, plan.tiling, outer, slot, /*split=*/0, index);
}

template <typename Config>
struct Producer {
  using T = typename Config::T;
  using Work = FwdWork<Config>;
  using Shared = FwdSm90Shared<Config>;
  const FwdSm90Launch& maps;
  const FwdSm90Params& p;
  Shared& shared;
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;
  RingCursor<2> work_at;
  struct {
    Span keys;
    int head, block;
  } last_v{.block = -1};  // the block of V whose copy is still to be started, if block >= 0
  int taken;              // what take_tile returned; valid in lane 0

  __device__ void load_q(const Work& work) {
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      auto& ring = shared.q_rings[rank];
      ring.wait_empty(q_at);
      auto& arrived = ring.expect_tx(q_at, sizeof(typename Shared::OwnRows));
      load_async(shared.q[q_at.stage][rank], maps.q, work.seq.q.first + work.tile.row0 + kWarpgroupRows * rank,
                 work.tile.head, work.seq.q.batch, arrived, Config::channel());
    }
    q_at.advance();
  }
  __device__ void load_k(const Work& work, int n) {
    const Span& keys = work.seq.k;
    auto& stage = shared.k[k_at.stage];
    shared.k_ring.wait_empty(k_at);
    int bytes = sizeof(typename Shared::Keys);
    if constexpr (Config::kBiased) bytes += bytes_of_bias<typename Shared::Bias>(p.problem.bias.rows);
    auto& arrived = shared.k_ring.expect_tx(k_at, bytes);
    load_async(stage, maps.k, keys.first + n * Config::kKeys, work.tile.key_head, keys.batch, arrived,
               Config::channel());
    if constexpr (Config::kBiased) {
      load_bias(stage.bias, maps.bias, p.problem.bias.rows, work.tile.entry, work.tile.head,
                work.seq.q.first + work.tile.row0, n * Config::kKeys, arrived);
    }
    k_at.advance();
  }
  __device__ void load_v(const Span& keys, int head, int n) {
    shared.v_ring.wait_empty(v_at);
    auto& arrived = shared.v_ring.expect_tx(v_at, sizeof(typename Shared::Values));
    load_async(shared.v[v_at.stage], maps.v, keys.first + n * Config::kKeys, head, keys.batch, arrived,
               Config::channel());
    v_at.advance();
  }
  __device__ void load_last_v() {
    if (last_v.block >= 0) load_v(last_v.keys, last_v.head, last_v.block);
    last_v.block = -1;
  }

  // Hands the work to the consumers and starts its copies in the order in which they are needed. A tile's last V is
  // needed after the first K of the next tile, so its copy is left to the next call. The next tile is taken just before
  // the last K, which then has to wait for an empty stage anyway.
  __device__ void load(const Work& work) {
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage] = work;
    shared.work_ring.full[work_at.stage].arrive();
    work_at.advance();

    const auto [first, last] = work.blocks;
    const int head = work.tile.key_head;
#pragma unroll 1
    for (int n = last; n >= first; --n) {
      if (n == first) taken = take_tile();
      load_k(work, n);
      if (n == last) {
        load_last_v();
        load_q(work);
      } else {
        load_v(work.seq.k, head, n + 1);
      }
    }
    last_v = {work.seq.k, head, first};
  }

  // Writes zeros to the tile's rows of a tensor shaped like out.
  __device__ void store_zeros(const TensorRef<>& x, const Work& work) const {
    static_assert(Config::kChannels <= 8 * 32);
    const int col = Config::channel() + 8 * lane_id();
    auto rows = strided_rows<T>(x, work);
    for (int row = 0; row < work.rows.count; ++row, rows.move(1)) {
      if (col < p.problem.head_dim_v) store(rows.address() + col, Vec<T, 8>{});
    }
  }

  // Writes the results of rows that see no keys.
  __device__ void store_nothing(const Work& work) const {
    store_zeros(p.out, work);
    if (p.out_lo.data != nullptr) store_zeros(p.out_lo, work);
    if (Config::part() != 0) return;
    const float lse_of_none = lse_of_sink(sink_of(p.problem, work.tile.entry, work.tile.head));
    for (int row = lane_id(); row < work.rows.count; row += 32) {
      store_row<Config>(p, work, row, {lse_of_none, 0}, /*largest=*/-INFINITY);
    }
  }

  // Takes a tile: returns its index less gridDim.x, since tiles 0 .. gridDim.x - 1 are the blocks' first ones. If a
  // block has only its first tile, the result is past the end.
  __device__ int take_tile() const {
    return Config::kManyTiles ? atomicAdd(p.plan.taken, 1) : static_cast<int>(p.plan.tiling.tiles.value);
  }

  __device__ void run() {
    const int num_tiles = p.plan.tiling.tiles.value;
    int index = blockIdx.x / Config::kParts;
    while (index < num_tiles) {
      const Work work(p, p.plan.tiling, ordered_tile<Config::kRows, Config::kBiased>(p.problem, p.plan, index));
      const bool has_keys = work.exists() && !work.blocks.empty();
      if (work.exists() && !has_keys) store_nothing(work);
      if (lane_id() == 0) has_keys ? load(work) : void(taken = take_tile());
      index = gridDim.x + __shfl_sync(~0u, taken, 0);
    }
    if (lane_id() != 0) return;
    load_last_v();
    const bool is_last = index == num_tiles + static_cast<int>(gridDim.x) - 1;
    // Each block takes one index past the end; the largest of these means that no block will touch the counter again.
    if (is_last) *p.plan.taken = 0;
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage].tile.entry = -1;  // tells the consumers that there is no more work
    shared.work_ring.full[work_at.stage].arrive();
  }
};

}  // namespace flash::flash_attn
