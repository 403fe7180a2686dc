// How tiles of keys and rows reach a block of the backward kernels for sm_90.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// Starts the copy of K or V, by one lane.
template <typename Config, typename Tile>
__device__ void load_keys(Tile& tile, const CUtensorMap& map, const KeyBlock<Config>& block, ptx::SharedBarrier& here) {
  const Span& k = block.seq.k;
  here.arrive_expect_tx(sizeof(tile));
  load_async(tile, map, static_cast<int>(k.first) + block.keys.first, block.work.head_k, static_cast<int>(k.batch),
             here);
}

// Fills the rings of Q and lse and of dO and softmax_d, by one lane.
template <typename Config, typename Shared>
__device__ void load_rows(const BwdSm90Launch& p, Shared& shared, const KeyBlock<Config>& block,
                          RingCursor<Config::kStages>& at) {
  const Span& q = block.seq.q;
  const int first = static_cast<int>(q.first), batch = static_cast<int>(q.batch);
  block.for_each_row_block([&](int head, int row_block) {
    const int row0 = row_block * Config::kBlockM;
    const int64_t index = block.padded_index(p, head) + row0;
    const auto load = [&](auto& ring, const CUtensorMap& map, const float* values) {
      ring.barriers.wait_empty(at);
      ptx::SharedBarrier& here = ring.barriers.expect_tx(at, sizeof(ring.tiles[0]) + ring.kValueBytes);
      load_async(ring.tiles[at.stage], map, first + row0, head, batch, here);
      ptx::copy_bytes_async(ptx::shared_address(ring.values_of(at)), values + index, ring.kValueBytes, here);
    };
    load(shared.q, p.q_map, p.plan.lse_log2);
    load(shared.dout, p.dout_map, p.plan.softmax_d);
    at.advance();
  });
}

// Starts the copies of all that a block reads, by one lane.
template <typename Config, typename Shared>
__device__ void load_block(const BwdSm90Launch& p, Shared& shared, const KeyBlock<Config>& block,
                           RingCursor<Config::kStages>& at) {
  load_keys(shared.k, p.k_map, block, shared.keys_here);
  load_keys(shared.v, p.v_map, block, shared.keys_here);
  load_rows(p, shared, block, at);
}

}  // namespace flash::flash_attn
