// The converters of serving instances over codes in 8 bits (e4m3): a warpgroup between the producer, which copies
// codes, and the consumers, which multiply tiles of fp16 and know nothing of codes. Two of its warps convert K, two V
// and, in place, queries in bf16: each the half of the rows of each tile that one warp of the producer has copied. Rows
// of zeros stay zeros.
//
//   producer:   copy codes K2, V2, Q | copy K1, V1       | copy K0, V0        | ..
//   converters:                      | convert K2, Q, V2 | convert K1, V1     | convert K0, V0     | ..
//   consumers:                                           | S2, exp P2         | S1, O += P2 V2     | ..
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "flash_attn/fwd_sm90/shared.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

template <typename Config>
struct Converter {
  static constexpr int kWarps = 4, kHalf = Config::kKeys / 2;
  FwdSm90Shared<Config>& shared;
  const bool queries_are_bf16;
  const int warp = warp_id() % kWarps;  // 0 and 1 convert K, 2 and 3 V
  RingCursor<Config::kSourceStages> from = {};
  RingCursor<Config::kStages> to = {};
  RingCursor<Config::kQueryStages> q_at = {};

  __device__ void run() {
    for (RingCursor<2> work_at;; work_at.advance()) {
      shared.work_ring.wait_full(work_at);
      const auto& work = shared.work[work_at.stage];
      const int entry = work.tile.entry, count = work.n_blocks.last - work.n_blocks.first + 1;
      __syncwarp();
      if (lane_id() == 0) shared.work_ring.release(work_at);
      if (entry < 0) return;
      auto& codes = shared.codes;
      if (warp >= 2) hand_over_queries();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (warp < 2) {
          convert(codes.k[from.stage], codes.k_ring, shared.k[to.stage], shared.k_ring);
        } else {
          convert(codes.v[from.stage], codes.v_ring, shared.v[to.stage], shared.v_ring);
        }
        from.advance(), to.advance();
      }
    }
  }

 private:
  // Hands a tile of Q to the consumers, of which the warp has half of each one's rows.
  __device__ void hand_over_queries() {
    constexpr int kRows = kWarpgroupRows / 2, kChunks = Config::kChannels / 8;
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      shared.codes.q_rings[rank].wait_full(q_at);
      auto& tile = shared.q[q_at.stage][rank];
      if (queries_are_bf16) {
#pragma unroll 4
        for (int i = lane_id(); i < kRows * kChunks; i += 32) {
          auto* chunk = tile.chunk(warp % 2 * kRows + i / kChunks, i % kChunks);
          float wide[8];
          widen(wide, load<8>(reinterpret_cast<const __nv_bfloat16*>(chunk)));
          store(chunk, narrow<typename Config::T>(wide));
        }
        ptx::fence_async_shared();
      }
      __syncwarp();
      if (lane_id() == 0) shared.q_rings[rank].full[q_at.stage].arrive();
    }
    q_at.advance();
  }

  // The fence makes what is written visible to wgmma.
  template <typename Codes, typename CodesRing, typename Tile, typename TileRing>
  __device__ void convert(Codes& codes, CodesRing& codes_ring, Tile& tile, TileRing& tile_ring) const {
    codes_ring.wait_full(from);
    tile_ring.wait_empty(to);
    convert_rows(codes, tile, warp % 2 * kHalf);
    ptx::fence_async_shared();
    __syncwarp();
    if (lane_id() != 0) return;
    tile_ring.full[to.stage].arrive();
    codes_ring.release(from);
  }

  // A chunk of codes becomes two chunks of the tile. Lanes whose chunks go to another panel store the second one first:
  // else two of them would access the same banks.
  template <typename Codes, typename Tile>
  __device__ void convert_rows(Codes& codes, Tile& tile, int row0) const {
    constexpr int kLanes = Codes::kPanelChunks, kStep = 32 / kLanes;
    static_assert(kHalf % kStep == 0);
    const int row = row0 + lane_id() / kLanes, chunk = lane_id() % kLanes;
#pragma unroll 4
    for (int step = 0; step < kHalf; step += kStep) {
#pragma unroll
      for (int panel = 0; panel < Codes::kPanels; ++panel) {
        const int from_chunk = panel * kLanes + chunk, to_chunk = 2 * from_chunk;
        const uint4 words = *reinterpret_cast<const uint4*>(codes.chunk(row + step, from_chunk));
        const uint2 a = ptx::widen_e4m3(words.x), b = ptx::widen_e4m3(words.y);
        const uint2 c = ptx::widen_e4m3(words.z), d = ptx::widen_e4m3(words.w);
        const uint4 first = {a.x, a.y, b.x, b.y}, second = {c.x, c.y, d.x, d.y};
        const int turn = to_chunk / Tile::kPanelChunks % 2;
        *reinterpret_cast<uint4*>(tile.chunk(row + step, to_chunk + turn)) = turn ? second : first;
        *reinterpret_cast<uint4*>(tile.chunk(row + step, to_chunk + 1 - turn)) = turn ? first : second;
      }
    }
  }
};

}  // namespace flash::flash_attn
