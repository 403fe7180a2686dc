// The producer of fwd_sm90: asks the scheduler for tiles and has their Q, K and V copied. All lanes find the work of a
// tile; those that the key source wants (TmaKeys: lane 0) then wait for empty stages and start the copies.
#pragma once

#include <cmath>
#include <type_traits>

#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd_sm90/keys.cuh"
#include "flash_attn/fwd_sm90/scheduler.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

template <typename Config>
using TileScheduler =
    std::conditional_t<Config::kClusterSize == 1, PersistentScheduler<Config>, SingleTileScheduler<Config>>;
template <typename Config>
using KeySource = TmaKeys<Config>;

template <typename Config>
struct Producer {
  using T = typename Config::T;
  using Work = FwdWork<Config>;
  using Shared = FwdSm90Shared<Config>;
  const FwdSm90Launch& launch;
  const FwdSm90Params& p;
  Shared& shared;
  TileScheduler<Config> scheduler;
  KeySource<Config> source;
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<2> work_at;
  struct {
    typename KeySource<Config>::Keys keys;
    int n_block;
  } last_v{.n_block = -1};  // the V whose copy is still to be started, if n_block >= 0

  __device__ Producer(const FwdSm90Launch& launch, Shared& shared)
      : launch(launch), p(launch.params), shared(shared), scheduler(launch.params), source(launch, shared) {}

  __device__ void load_q(const Work& work) {
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
  __device__ void load_last_v() {
    if (last_v.n_block >= 0) source.load_v(last_v.keys, last_v.n_block);
    last_v.n_block = -1;
  }

  // Hands the work to the consumers and starts its copies in the order in which they are needed. A tile's last V is
  // needed after the first K of the next tile, so its copy is left to the next call. The next tile is taken just before
  // the last K, which then has to wait for an empty stage anyway.
  __device__ void load(const Work& work) {
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage] = work;
    shared.work_ring.full[work_at.stage].arrive();
    work_at.advance();

    const auto [first, last] = work.n_blocks;
    const auto keys = source.keys_of(work);
#pragma unroll 1
    for (int n_block = last; n_block >= first; --n_block) {
      if (n_block == first) scheduler.take_next();
      source.load_k(keys, n_block);
      if (n_block == last) {
        load_last_v();
        load_q(work);
      } else {
        source.load_v(keys, n_block + 1);
      }
    }
    last_v = {keys, first};
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
    if (Config::cluster_rank() != 0) return;
    const float lse_of_none = lse_of_sink(sink_of(p.problem, work.tile.entry, work.tile.head));
    for (int row = lane_id(); row < work.rows.count; row += 32) {
      store_row<Config>(p, work, row, {lse_of_none, 0}, /*largest=*/-INFINITY);
    }
  }

  __device__ void run() {
    while (scheduler.has_tile()) {
      const Work work(p, p.plan.tiling, scheduler.tile());
      const bool has_keys = work.exists() && !work.n_blocks.empty();
      if (work.exists() && !has_keys) store_nothing(work);
      if (source.copies()) has_keys ? load(work) : scheduler.take_next();
      scheduler.advance();
    }
    if (!source.copies()) return;
    load_last_v();
    scheduler.finish();
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage].tile.entry = -1;  // tells the consumers that there is no more work
    shared.work_ring.full[work_at.stage].arrive();
  }
};

}  // namespace flash::flash_attn
