// The source of serving instances of fwd_sm90 (a source: fwd_sm90/tma_source.cuh). Keys may lie in pages of any size,
// and rows of queries be those of several heads.
//
// The four warps of the producer share the work: two copy K, the other two V and Q, each a half of the rows of each
// tile. The first asks the scheduler for pieces; the others read from the work ring, as consumers do. How many
// instructions a warp needs matters, as each waits for those of the consumer warps of the same scheduler, and takes
// time from them: a warp for each tile, and four warps for every tile, were slower. A half is copied in one of two
// ways:
//
// - boxes: TMA copies several rows of a page at once. For rows that are all seen, from pages whose rows can be cut into
//   such boxes (plan.box_rows).
// - gather: each row on its own, by cp.async. For everything else: pages of odd sizes, the ends of what the rows of a
//   tile see. Rows that do not exist, or that no query sees, become zeros, and nothing is read for them: pages past the
//   end of an entry are not looked up, and what their unused slots hold does not matter.
//
// wgmma reads shared memory through the async proxy, so consumers need a fence for what cp.async has written
// (Consumer::wait_full), but not where converters stand between.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"
#include "flash_attn/fwd_serving/work_list.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/copy.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

// kRows rows of a tile that a warp copies, eight at a time: four lanes share a row.
template <typename Tile, int kRows>
struct GatheredRows {
  static constexpr int kLanes = 4, kStep = 32 / kLanes, kSteps = kRows / kStep;
  static_assert(kRows % kStep == 0 && kRows <= 32 && Tile::kRows % kRows == 0);
  const char* sources[kSteps];  // of the lane's first chunk in each step
  uint32_t exist;               // bit i: whether the i-th row exists

  __device__ static int row() { return lane_id() / kLanes; }
  __device__ static int chunk() { return lane_id() % kLanes; }

  // own: the address of the row that has the lane's number; null for a row of zeros.
  __device__ explicit GatheredRows(const char* own) : exist(__ballot_sync(~0u, own != nullptr)) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const auto address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(own), i * kStep + row());
      sources[i] = reinterpret_cast<const char*>(address) + 16 * chunk();
    }
  }

  // Starts the copies of the first `cols` channels to the rows of the tile from row0 on, a multiple of 8.
  __device__ void copy_to(const Tile& tile, int row0, int cols) const {
    constexpr uint32_t kAll = ~0u >> (32 - kRows);
    if ((exist & kAll) == kAll && cols == Tile::kCols) return copy_where(tile, row0, [](int, int) { return true; });
    copy_where(tile, row0, [&](int i, int chunks) {
      return (exist >> (i * kStep + row()) & 1) && (chunks + chunk()) * Tile::kChunk < cols;
    });
  }

 private:
  template <typename IsValid>
  __device__ void copy_where(const Tile& tile, int row0, IsValid&& is_valid) const {
    const uint32_t origin = tile.address(row(), chunk()) + Tile::distance(row0, 0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
#pragma unroll
        for (int chunks = 0; chunks < Tile::kPanelChunks; chunks += kLanes) {
          ptx::copy_async((origin ^ Tile::flip(chunks)) + Tile::distance(i * kStep, panel),
                          sources[i] + panel * Tile::kRowBytes + 16 * chunks,
                          is_valid(i, panel * Tile::kPanelChunks + chunks));
        }
      }
    }
  }
};

// A tile is full when the copies by cp.async of all lanes have finished, and the warp has arrived.
__device__ inline void arrive_when_copied(ptx::SharedBarrier& full) {
  full.expect_copies();
  __syncwarp();
  if (lane_id() == 0) full.arrive();
}

template <typename Config>
struct PagedSource {
  using T = typename Config::T;
  using Shared = FwdSm90Shared<Config>;
  static constexpr int kWarps = 4, kHalf = Config::kKeys / 2;
  static constexpr int kGroup = kHalf % 32 == 0 ? 32 : 16;  // rows that are gathered at a time
  const ServingLaunch& launch;
  const ServingParams& p;
  Shared& shared;
  const int warp;  // of the producer: 0 and 1 copy K, 2 and 3 V and Q
  const int half;  // which half of each tile
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kSourceStages> at;  // in the ring of K or V

  __device__ PagedSource(const ServingLaunch& launch, Shared& shared)
      : launch(launch), p(launch.params), shared(shared), warp(warp_id() % kWarps), half(warp % 2) {}

  __device__ static bool copies() { return true; }
  __device__ bool publishes() const { return warp == 0 && lane_id() == 0; }

  // Starts the copies of the warp's part of a piece.
  __device__ void load(const ServingWork<Config>& work) {
    auto& to = shared.source();
    if (warp < 2) {
      load_keys(Keys(p, work, in_units<Config>(p.k)), launch.k, launch.k_strides, p.problem.head_dim / Config::kUnit,
                work.n_blocks, to.k, to.k_ring);
    } else {
      load_q(work);
      load_keys(Keys(p, work, in_units<Config>(p.v)), launch.v, launch.v_strides, p.problem.head_dim_v / Config::kUnit,
                work.n_blocks, to.v, to.v_ring);
    }
  }
  template <typename TakeNext>
  __device__ void load(const ServingWork<Config>& work, TakeNext&& take_next) {
    load(work);
    take_next();
  }
  // Copies what the first warp hands out.
  __device__ void follow() {
    for (RingCursor<2> work_at;; work_at.advance()) {
      shared.work_ring.wait_full(work_at);
      const auto& work = shared.work[work_at.stage];
      if (work.tile.entry < 0) return finish();
      load(work);
      __syncwarp();
      if (lane_id() == 0) shared.work_ring.release(work_at);
    }
  }
  __device__ void finish() const { ptx::wait_all_copies(); }

 private:
  // The keys of a piece, in k or v.
  struct Keys {
    const int* pages;   // null: all are in one page, the row of the batch dimension
    const char* start;  // of page 0, in the piece's head
    int only_page, first_position, head;
    Interval seen;

    __device__ Keys(const ServingParams& p, const ServingWork<Config>& work, const TensorRef<const void>& x)
        : pages(p.pages.block_table ? p.pages.block_table + work.tile.entry * p.pages.batch_stride : nullptr),
          start(reinterpret_cast<const char*>(static_cast<const T*>(x.data) + work.tile.key_head * x.heads)),
          only_page(static_cast<int>(work.seq.k.batch)),
          first_position(static_cast<int>(work.seq.k.first)),
          head(work.tile.key_head),
          seen(work.seen) {}
  };

  // Where a key is; in no page if no query sees it.
  __device__ Place place_of(const Keys& keys, int key) const {
    const bool seen = keys.seen.covers(key);
    const int position = keys.first_position + key, index = p.pages.page_size.divide(position);
    const int page = ptx::load_early(keys.pages + index, seen && keys.pages != nullptr, seen ? keys.only_page : -1);
    return {page, p.pages.page_size.remainder(position, index)};
  }
  // Its address; null if there is no such page.
  __device__ const char* address_of(const Keys& keys, const ChunkStrides& strides, const Place& place) const {
    const uint64_t chunks = uint64_t{static_cast<uint32_t>(place.page)} * strides.page +
                            uint64_t{static_cast<uint32_t>(place.row)} * strides.row;
    return static_cast<uint32_t>(place.page) < static_cast<uint32_t>(p.pages.count) ? keys.start + 16 * chunks
                                                                                    : nullptr;
  }

  // The warp's half of an n_block. In boxes, lane i knows the place of the i-th box; else that of the i-th row.
  struct Block {
    int first;  // key
    bool boxes;
    Place place;
  };
  __device__ Block block_of(const Keys& keys, int n_block) const {
    const int first = n_block * Config::kKeys + half * kHalf;
    const bool boxes = p.plan.box_rows > 0 && keys.seen.covers(first) && keys.seen.covers(first + kHalf - 1);
    const int row = boxes ? lane_id() * p.plan.box_rows : lane_id();
    return {first, boxes, row < kHalf ? place_of(keys, first + row) : Place{-1, 0}};
  }

  template <typename Tile, int kStages>
  __device__ void load_keys(const Keys& keys, const CUtensorMap& map, const ChunkStrides& strides, int cols,
                            const Interval& n_blocks, Tile (&tiles)[kStages], Ring<kStages>& ring) {
    Block next = block_of(keys, n_blocks.last);
#pragma unroll 1
    for (int n_block = n_blocks.last; n_block >= n_blocks.first; --n_block) {
      const Block block = next;
      if (n_block > n_blocks.first) next = block_of(keys, n_block - 1);
      if (block.boxes) {
        load_boxes(keys, map, block, tiles[at.stage], ring);
      } else {
        gather(keys, strides, cols, block, tiles[at.stage], ring);
      }
      at.advance();
    }
  }

  template <typename Tile, int kStages>
  __device__ void load_boxes(const Keys& keys, const CUtensorMap& map, const Block& block, Tile& tile,
                             Ring<kStages>& ring) {
    ring.wait_empty(at);
    if (ptx::elect()) ring.expect_tx(at, sizeof(Tile) / 2);
#pragma unroll 4
    for (int row = 0, box = 0; row < kHalf; row += p.plan.box_rows, ++box) {
      const int page = __shfl_sync(~0u, block.place.page, box), page_row = __shfl_sync(~0u, block.place.row, box);
      if (ptx::elect()) {
        load_rows_async(tile, half * kHalf + row, map, page_row, keys.head, page, ring.full[at.stage]);
      }
    }
  }

  template <typename Tile, int kStages>
  __device__ void gather(const Keys& keys, const ChunkStrides& strides, int cols, const Block& block, Tile& tile,
                         Ring<kStages>& ring) {
    Place next = block.place;
#pragma unroll 1
    for (int row = 0; row < kHalf; row += kGroup) {
      const Place place = next;
      next = row + kGroup < kHalf ? place_of(keys, block.first + row + kGroup + lane_id()) : Place{-1, 0};
      const GatheredRows<Tile, kGroup> rows(address_of(keys, strides, place));
      if (row == 0) ring.wait_empty(at);
      rows.copy_to(tile, half * kHalf + row, cols);
    }
    arrive_when_copied(ring.full[at.stage]);
  }

  // A half of each consumer's rows of Q.
  __device__ void load_q(const ServingWork<Config>& work) {
    constexpr int kRows = kWarpgroupRows / 2;
    const int row0 = kRows * half;
    const auto* start = first_token<T>(p.q, work.seq.q, work.tile.head);
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      const int row = kWarpgroupRows * rank + row0 + lane_id();
      const char* own = nullptr;
      if (row < work.rows.count) {
        own =
            reinterpret_cast<const char*>(start + work.rows.token(row) * p.q.seqlen + work.rows.head(row) * p.q.heads);
      }
      const GatheredRows<typename Shared::OwnRows, kRows> rows(own);
      shared.q_rings[rank].wait_empty(q_at);
      rows.copy_to(shared.q[q_at.stage][rank], row0, p.problem.head_dim);
      arrive_when_copied(shared.source().q_rings[rank].full[q_at.stage]);
    }
    q_at.advance();
  }
};

}  // namespace flash::flash_attn
