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

#include <algorithm>
#include <cstdint>

#include "flash_attn/fwd_sm90/shared.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

// The chunks of 16 bytes that a lane has of some rows of a tile, eight rows at a time: four lanes share a row, those of
// odd rows begin with its other half. So eight lanes access different banks, and as well where a chunk of codes has
// become two chunks, of which each lane stores one at a time.
template <typename Tile>
struct LaneChunks {
  static constexpr int kHalves = Tile::kPanelChunks / 4;
  static constexpr int count(int rows) { return rows / 8 * kHalves * Tile::kPanels; }
  const int row = lane_id() / 4, chunk = lane_id() % 4 + (kHalves == 2 ? row % 2 * 4 : 0);

  // Where the lane's i-th chunk is: how many bytes after the start of the tile. row0, a multiple of 8, is the first of
  // the rows.
  __device__ int offset(int row0, int i) const {
    const int half = i % kHalves, panel = i / kHalves % Tile::kPanels, rows = i / kHalves / Tile::kPanels * 8;
    return (Tile::offset(row0 + row, chunk) ^ Tile::flip(4 * half)) + Tile::distance(rows, panel);
  }
};

template <typename Tile>
__device__ uint4& words_at(Tile& tile, int offset) {
  return *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile.data) + offset);
}

// Loads take long beside products, which read shared memory, too: so a warp starts several before it uses the first.
template <typename Config>
struct Converter {
  static constexpr int kWarps = 4, kHalf = Config::kKeys / 2;
  static constexpr int kMostTogether = std::min(16, Config::kConverterRegisters / 9);  // chunks
  FwdSm90Shared<Config>& shared;
  const bool queries_are_bf16;
  const int warp = warp_id() % kWarps;  // 0 and 1 convert K, 2 and 3 V
  const bool is_k = warp < 2;
  Ring<Config::kSourceStages>& codes_ring = is_k ? shared.codes.k_ring : shared.codes.v_ring;
  Ring<Config::kStages>& tile_ring = is_k ? shared.k_ring : shared.v_ring;
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
      if (!is_k) hand_over_queries();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        convert(is_k ? shared.codes.k[from.stage] : shared.codes.v[from.stage],
                is_k ? shared.k[to.stage] : shared.v[to.stage]);
        from.advance(), to.advance();
      }
    }
  }

 private:
  // A stage is full when all lanes have written: the fence makes that visible to wgmma.
  __device__ static void arrive_when_written(ptx::SharedBarrier& full) {
    ptx::fence_async_shared();
    __syncwarp();
    if (lane_id() == 0) full.arrive();
  }

  // Hands a tile of Q to the consumers, of which the warp has half of each one's rows.
  __device__ void hand_over_queries() {
    using Rows = typename FwdSm90Shared<Config>::OwnRows;
    const LaneChunks<Rows> own;
    constexpr int kRows = kWarpgroupRows / 2, kTogether = std::min(own.count(kRows), kMostTogether);
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      shared.codes.q_rings[rank].wait_full(q_at);
      auto& tile = shared.q[q_at.stage][rank];
#pragma unroll
      for (int first = 0; first < (queries_are_bf16 ? own.count(kRows) : 0); first += kTogether) {
        Vec<__nv_bfloat16, 8> chunks[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          reinterpret_cast<uint4&>(chunks[i]) = words_at(tile, own.offset(warp % 2 * kRows, first + i));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          float wide[8];
          widen(wide, chunks[i]);
          const auto narrowed = narrow<typename Config::T>(wide);
          words_at(tile, own.offset(warp % 2 * kRows, first + i)) = reinterpret_cast<const uint4&>(narrowed);
        }
      }
      arrive_when_written(shared.q_rings[rank].full[q_at.stage]);
    }
    q_at.advance();
  }

  template <typename Codes, typename Tile>
  __device__ void convert(Codes& codes, Tile& tile) const {
    const LaneChunks<Codes> own;
    constexpr int kCount = own.count(kHalf), kTogether = std::min(kCount, kMostTogether);
    static_assert(Codes::kPanels == 1 && kCount % kTogether == 0);
    const int row0 = warp % 2 * kHalf;
    codes_ring.wait_full(from);
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
      uint4 words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) words[i] = words_at(codes, own.offset(row0, first + i));
      if (first == 0) tile_ring.wait_empty(to);
      if (first + kTogether == kCount) {
        __syncwarp();
        if (lane_id() == 0) codes_ring.release(from);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        // A chunk of codes becomes two chunks of the tile.
        const int half = (first + i) % own.kHalves, rows = (first + i) / own.kHalves * 8;
        const int target = Tile::offset(row0 + own.row, 2 * (own.chunk ^ 4 * half));
        const uint2 a = ptx::widen_e4m3(words[i].x), b = ptx::widen_e4m3(words[i].y);
        const uint2 c = ptx::widen_e4m3(words[i].z), d = ptx::widen_e4m3(words[i].w);
        words_at(tile, target + Tile::distance(rows, 0)) = {a.x, a.y, b.x, b.y};
        words_at(tile, (target ^ Tile::flip(1)) + Tile::distance(rows, 0)) = {c.x, c.y, d.x, d.y};
      }
    }
    arrive_when_written(tile_ring.full[to.stage]);
  }
};

}  // namespace flash::flash_attn
