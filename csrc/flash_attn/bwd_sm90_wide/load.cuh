// The copies of K, V, Q and dO to the shared memory of a cluster of bwd_sm90_wide.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_sm90/load.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/bwd_sm90_wide/dq.cuh"
#include "flash_attn/bwd_sm90_wide/shared.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// One lane starts the copies of K and V, and of the other thread block's K as far as dQ needs it.
template <typename Config>
__device__ void load_all_keys(const BwdSm90Launch& p, BwdWideShared<Config>& shared, const NBlockWork<Config>& work,
                              int cta_rank) {
  load_keys(shared.k, p.k_map, work, shared.keys_here, Config::channel());
  load_keys(shared.v, p.v_map, work, shared.keys_here, Config::channel());
  if constexpr (Config::kClusterSplit == ClusterSplit::kKeys) {
    const Span& k = work.seq.k;
    auto& other_k = shared.other_k;
    shared.other_keys_here.arrive_expect_tx(sizeof(other_k));
#pragma unroll 1
    for (int panel = 0; panel < other_k.kPanels; ++panel) {
      const int row = static_cast<int>(k.first) + work.cluster_keys.first + (cta_rank ^ 1) * Config::kBlockN;
      ptx::copy_box_async(other_k.address(0, 0) + other_k.distance(0, panel), p.k_map,
                          QueryTeam<Config>::other_col0(cta_rank) + panel * other_k.kPanelCols, work.n_block.head_k,
                          row, static_cast<int>(k.batch), shared.other_keys_here);
    }
  }
}

// Starts the copies of all that a thread block reads. Lanes as visits_rows says. Where both thread blocks have all
// channels, each copies every other panel of Q and dO, to both of them; every barrier expects the bytes of all panels.
template <typename Config>
__device__ void load_work(const BwdSm90Launch& p, BwdWideShared<Config>& shared, const NBlockWork<Config>& work,
                          int cta_rank) {
  const Span& q = work.seq.q;
  if (starts_copies<Config>()) load_all_keys(p, shared, work, cta_rank);
  typename Ring<Config::kStages>::Cursor at;
  work.for_each_m_block(p, [&](int head, int m_block, bool cut) {
    const int row0 = m_block * Config::kBlockM;
    const int64_t index = work.padded_index(p, head) + row0;
    const auto load = [&](auto& ring, const CUtensorMap& map, const float* values, int more_bytes) {
      auto& tile = ring.tiles[at.stage];
      if (!starts_copies<Config>()) return;
      ring.barriers.wait_empty(at);
      ptx::SharedBarrier& here = ring.barriers.expect_tx(at, sizeof(tile) + ring.kValueBytes + more_bytes);
      if constexpr (Config::kClusterSplit == ClusterSplit::kKeys) {
#pragma unroll 1
        for (int panel = cta_rank; panel < tile.kPanels; panel += Config::kCluster) {
          ptx::copy_box_to_blocks(tile.address(0, 0) + tile.distance(0, panel), map, panel * tile.kPanelCols, head,
                                  static_cast<int>(q.first) + row0, static_cast<int>(q.batch), here, 0b11);
        }
      } else {
        load_async(tile, map, static_cast<int>(q.first) + row0, head, static_cast<int>(q.batch), here,
                   Config::channel());
      }
      ptx::copy_bytes_async(ptx::shared_address(ring.values_of(at)), values + index, ring.kValueBytes, here);
    };
    load(shared.q, p.q_map, p.plan.lse_log2, bytes_of_lse<Config>(p) + (cut ? SeenRingOf<Config>::kBytes : 0));
    if (starts_copies<Config>()) load_lse<Config>(p, shared, index, at);
    if (cut && starts_copies<Config>()) load_seen(p, shared, work, head, row0, at);
    load(shared.dout, p.dout_map, p.plan.softmax_d, 0);
    at.advance();
  });
}

}  // namespace flash::flash_attn
