// The producer of fwd_sm90: asks the scheduler for tiles and has their Q, K and V copied. All lanes find the work of a
// tile; those that the source wants (TmaSource: lane 0) then wait for empty stages and start the copies.
#pragma once

#include <cmath>
#include <type_traits>

#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd_serving/paged_source.cuh"
#include "flash_attn/fwd_serving/pieces.cuh"
#include "flash_attn/fwd_serving/work_list.cuh"
#include "flash_attn/fwd_sm90/scheduler.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/fwd_sm90/tma_source.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

template <typename Config>
using TileScheduler =
    std::conditional_t<Config::kServing, ListScheduler<Config>,
                       std::conditional_t<(Config::kSharers > 1), PairScheduler<Config>,
                                          std::conditional_t<Config::kPersistent, PersistentScheduler<Config>,
                                                             SingleTileScheduler<Config>>>>;
template <typename Config>
using Source = std::conditional_t<Config::kServing, PagedSource<Config>, TmaSource<Config>>;

template <typename Config>
TileScheduler<Config> __device__ scheduler_of(const typename Config::Launch& launch, FwdSm90Shared<Config>& shared) {
  if constexpr (Config::kServing) {
    return {launch.params, shared.list};
  } else if constexpr (Config::kSharers > 1) {
    return {launch.params, shared.mail};
  } else {
    return TileScheduler<Config>(launch.params);
  }
}

template <typename Config>
struct Producer {
  using T = typename Config::T;
  using Work = TileWork<Config>;
  using Shared = FwdSm90Shared<Config>;
  const decltype(Config::Launch::params)& p;
  Shared& shared;
  TileScheduler<Config> scheduler;
  Source<Config> source;
  RingCursor<2> work_at;

  __device__ Producer(const typename Config::Launch& launch, Shared& shared)
      : p(launch.params), shared(shared), scheduler(scheduler_of<Config>(launch, shared)), source(launch, shared) {}

  // Hands work to the consumers, or tells them that there is no more.
  template <typename Write>
  __device__ void publish(Write&& write) {
    shared.work_ring.wait_empty(work_at);
    if (source.publishes()) {
      write(shared.work[work_at.stage]);
      shared.work_ring.full[work_at.stage].arrive();
    }
    work_at.advance();
  }

  // Writes zeros to the tile's rows of a tensor shaped like out.
  __device__ void store_zeros(const TensorRef<>& x, const Work& work) const {
    static_assert(Config::kChannels <= 8 * 32);
    const int col = Config::channel() + 8 * lane_id();
    with_output_rows<Config>(p, x, work, [&](auto rows) {
      for (int row = 0; row < work.rows.count; ++row, rows.move(1)) {
        if (col < p.problem.head_dim_v) store(rows.address() + col, Vec<T, 8>{});
      }
    });
  }

  // Writes the results of rows that see no keys.
  __device__ void store_nothing(const Work& work) const {
    if (warp_id() != Config::kConsumerWarps) return;
    if constexpr (Config::kServing) {
      if (!work.piece.is_whole()) return store_empty_piece(p.plan.slots, work.piece.slot);
    }
    store_zeros(p.out, work);
    if (p.out_lo.data != nullptr) store_zeros(p.out_lo, work);
    if (Config::cluster_rank() != 0) return;
    for (int row = lane_id(); row < work.rows.count; row += 32) {
      const float lse_of_none = lse_of_sink(sink_of(p, work, row));
      store_row<Config>(p, work, row, {lse_of_none, 0}, /*largest=*/-INFINITY);
    }
  }

  __device__ void run() {
    scheduler.begin();
    if constexpr (Config::kServing) {
      if (source.warp > 0) return source.follow();
    }
    while (scheduler.has_tile()) {
      const Work work = scheduler.work();
      const bool has_keys = (Config::kSharers > 1 || work.exists()) && !work.n_blocks.empty();
      if constexpr (Config::kServing) {
        if (source.publishes()) record_piece(p.plan.slots, work.tile, work.piece);
      }
      if (work.exists() && !has_keys) store_nothing(work);
      if (source.copies()) {
        if (has_keys) {
          publish([&](Work& next) { next = work; });
          source.load(work, [&] { scheduler.take_next(); });
        } else {
          scheduler.take_next();
        }
      }
      scheduler.advance();
    }
    if (!source.copies()) return;
    source.finish();
    if (source.publishes()) scheduler.finish();
    publish([](Work& none) { none.tile.entry = -1; });
  }
};

}  // namespace flash::flash_attn
