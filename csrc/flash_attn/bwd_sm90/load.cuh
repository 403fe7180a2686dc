// The copies of K, V, Q and dO (and of what comes with them) to shared memory in the backward kernels for sm_90.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// Of the warp that loads: which lanes visit the rows, and which one starts the copies. Where there may be key ranges,
// all lanes visit rows together (NBlockWork::visit_ranged), but lane 0 alone starts copies and waits for empty stages.
// A lane that came late to such a wait might find the stage filled and emptied once more: the parity would be the wrong
// one again, and it would wait forever.
template <typename Config>
__device__ bool visits_rows() {
  return Config::kRanges != RangeSource::kNone || lane_id() == 0;
}
template <typename Config>
__device__ bool starts_copies() {
  return Config::kRanges == RangeSource::kNone || lane_id() == 0;
}

// One lane starts the copy of K or V, from `channel` on.
template <typename Config, typename Tile>
__device__ void load_keys(Tile& tile, const CUtensorMap& map, const NBlockWork<Config>& work, ptx::SharedBarrier& here,
                          int channel = 0) {
  const Span& k = work.seq.k;
  here.arrive_expect_tx(sizeof(tile));
  load_async(tile, map, static_cast<int>(k.first) + work.keys.first, work.n_block.head_k, static_cast<int>(k.batch),
             here, channel);
}

// One lane starts the copy of the intervals of keys that the rows of a tile see. It counts at the barrier of Q.
template <typename Config, typename Shared>
__device__ void load_seen(const BwdSm90Launch& p, Shared& shared, const NBlockWork<Config>& work, int head, int row0,
                          const RingCursor<Config::kStages>& at) {
  if constexpr (Config::kRanges == RangeSource::kSharedMemory) {
    ptx::copy_bytes_async(ptx::shared_address(shared.seen.rows_of(at)), work.seen(p, head, row0), shared.seen.kBytes,
                          shared.q.barriers.full[at.stage]);
  }
}

// With a bias: the bytes of lse of the rows of a tile. One lane starts the copy, which counts at the barrier of Q.
template <typename Config>
__device__ int bytes_of_lse(const BwdSm90Launch& p) {
  if constexpr (kHasPlainScores<Config::kFeatures>) return 0;
  return p.problem.bias.data == nullptr ? 0 : LseRing<Config>::kBytes;
}
template <typename Config, typename Shared>
__device__ void load_lse(const BwdSm90Launch& p, Shared& shared, int64_t index, const RingCursor<Config::kStages>& at) {
  if constexpr (!kHasPlainScores<Config::kFeatures>) {
    if (p.problem.bias.data == nullptr) return;
    ptx::copy_bytes_async(ptx::shared_address(shared.lse.values_of(at)), p.plan.lse + index, shared.lse.kBytes,
                          shared.q.barriers.full[at.stage]);
  }
}

// One lane starts the copy of a tile of the bias. It counts at the barrier of Q, too.
template <typename Config, typename Shared>
__device__ void load_bias_of_rows(const BwdSm90Launch& p, Shared& shared, const NBlockWork<Config>& work, int head,
                                  int row0, const RingCursor<Config::kStages>& at) {
  if constexpr (Config::kFeatures == Features::kBiased) {
    load_bias(shared.bias.tiles[at.stage], p.bias_map, p.problem.bias.rows, work.n_block.entry, head,
              work.seq.q.first + row0, work.keys.first, shared.q.barriers.full[at.stage]);
  }
}

// Fills the rings of Q with lse and of dO with softmax_d, for all rows that a work tile visits. Lanes as
// visits_rows says.
template <typename Config, typename Shared>
__device__ void load_rows(const BwdSm90Launch& p, Shared& shared, const NBlockWork<Config>& work,
                          RingCursor<Config::kStages>& at) {
  const Span& q = work.seq.q;
  const int first = static_cast<int>(q.first), batch = static_cast<int>(q.batch);
  work.for_each_m_block(p, [&](int head, int m_block, bool cut) {
    const int row0 = m_block * Config::kBlockM;
    const int64_t index = work.padded_index(p, head) + row0;
    const auto load = [&](auto& ring, const CUtensorMap& map, const float* values, int more_bytes) {
      if (!starts_copies<Config>()) return;
      ring.barriers.wait_empty(at);
      ptx::SharedBarrier& here = ring.barriers.expect_tx(at, sizeof(ring.tiles[0]) + ring.kValueBytes + more_bytes);
      load_async(ring.tiles[at.stage], map, first + row0, head, batch, here);
      ptx::copy_bytes_async(ptx::shared_address(ring.values_of(at)), values + index, ring.kValueBytes, here);
    };
    const int bytes_of_bias = BiasTilesOf<Config>::bytes(p.problem.bias.rows);
    load(shared.q, p.q_map, p.plan.lse_log2,
         bytes_of_lse<Config>(p) + bytes_of_bias + (cut ? SeenRingOf<Config>::kBytes : 0));
    load_bias_of_rows(p, shared, work, head, row0, at);
    if (starts_copies<Config>()) load_lse<Config>(p, shared, index, at);
    if (cut && starts_copies<Config>()) load_seen(p, shared, work, head, row0, at);
    load(shared.dout, p.dout_map, p.plan.softmax_d, 0);
    at.advance();
  });
}

// Starts the copies of all that a work tile reads. Lanes as visits_rows says.
template <typename Config, typename Shared>
__device__ void load_work(const BwdSm90Launch& p, Shared& shared, const NBlockWork<Config>& work,
                          RingCursor<Config::kStages>& at) {
  if (starts_copies<Config>()) {
    load_keys(shared.k, p.k_map, work, shared.keys_here);
    load_keys(shared.v, p.v_map, work, shared.keys_here);
  }
  load_rows(p, shared, work, at);
}

}  // namespace flash::flash_attn
