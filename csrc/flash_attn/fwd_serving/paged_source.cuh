// The source of serving instances of fwd_sm90 (a source: fwd_sm90/tma_source.cuh). Keys may lie in pages of any size,
// and rows of queries be those of several heads. All four warps of the producer copy, each a quarter of a tile's rows,
// in one of two ways:
//
// - boxes: TMA copies several rows of a page at once. For rows of K and V that all exist, of pages whose rows can be
// cut
//   into such boxes (plan.box_rows).
// - gather: each row on its own, by cp.async. For everything else: queries of packed heads, pages of odd sizes, the
// ends
//   of what a tile's rows see. Rows that do not exist, or that no query sees, become zeros, and nothing is read for
//   them: pages past the end of an entry are not looked up, and what their unused slots hold does not matter.
//
// Either way, lane i finds out where the i-th row of the warp's lies. A tile is full when each warp has arrived and all
// copies have; wgmma reads shared memory through the async proxy, so consumers also need a fence for those by cp.async
// (Consumer::wait_full).
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

template <typename Config>
struct PagedSource {
  using T = typename Config::T;
  using Shared = FwdSm90Shared<Config>;
  struct Keys {
    const int* pages;  // null: all keys are in one page, the row of the batch dimension
    int only_page;
    int first;  // the position of the entry's first key
    Interval seen;
    int head;
  };
  struct Block {
    int head;
    Place place;  // of the lane's key; in no page where there is no such key, or none that is seen
    bool boxes;   // whether the warp's rows are copied in boxes
  };
  static constexpr int kWarps = 4, kKeys = Config::kKeys / kWarps;  // a warp's rows of K and V
  const ServingLaunch& launch;
  const ServingParams& p;
  Shared& shared;
  const bool starts_box;  // whether the lane's row is the first of a box
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;

  __device__ PagedSource(const ServingLaunch& launch, Shared& shared)
      : launch(launch),
        p(launch.params),
        shared(shared),
        starts_box(lane_id() < kKeys && lane_id() % max(p.plan.box_rows, 1) == 0) {}

  __device__ static bool copies() { return true; }
  __device__ static bool publishes() { return threadIdx.x % kWarpgroup == 0; }
  __device__ static int warp() { return warp_id() % kWarps; }

  __device__ Keys keys_of(const ServingWork<Config>& work) const {
    const int* table = p.pages.block_table;
    return {.pages = table ? table + work.tile.entry * p.pages.batch_stride : nullptr,
            .only_page = static_cast<int>(work.seq.k.batch),
            .first = static_cast<int>(work.seq.k.first),
            .seen = work.seen,
            .head = work.tile.key_head};
  }

  // The rows of a tile that a lane copies its part of.
  template <typename Tile>
  struct Rows {
    static constexpr int kRows = Tile::kRows / kWarps, kLanes = Tile::kPageChunks, kStep = 32 / kLanes;
    static constexpr int kSteps = kRows / kStep;
    static_assert(kRows % kStep == 0 && kRows <= 32);
    const char* sources[kSteps];  // of the lane's chunk in the first page of the tile
    uint32_t exist;               // bit i: whether the i-th row of the warp's exists

    __device__ static int row() { return lane_id() / kLanes; }
    __device__ static int chunk() { return lane_id() % kLanes; }

    // own: the address of the row of the warp's that has the lane's number; null for a row of zeros. The addresses are
    // exchanged before the first copy, and before the wait for an empty stage, so that copies wait for nothing else.
    __device__ explicit Rows(const char* own) : exist(__ballot_sync(~0u, own != nullptr)) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const auto address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(own), i * kStep + row());
        sources[i] = reinterpret_cast<const char*>(address) + 16 * chunk();
      }
    }

    __device__ void copy_to(const Tile& tile, int cols) const {
      constexpr uint32_t kAll = ~0u >> (32 - kRows);
      if ((exist & kAll) == kAll && cols == Tile::kCols) return copy_where(tile, [](int, int) { return true; });
      copy_where(tile, [&](int i, int page) {
        return (exist >> (i * kStep + row()) & 1) && (page * kLanes + chunk()) * Tile::kChunk < cols;
      });
    }

   private:
    template <typename IsValid>
    __device__ void copy_where(const Tile& tile, IsValid&& is_valid) const {
      const uint32_t origin = tile.address(warp() * kRows + row(), chunk());
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t target = (origin ^ Tile::turn(i * kStep)) + Tile::distance(i * kStep, 0);
#pragma unroll
        for (int page = 0; page < Tile::kPages; ++page) {
          ptx::copy_async(target + Tile::distance(0, page), sources[i] + page * Tile::kRowBytes, is_valid(i, page));
        }
      }
    }
  };

  __device__ Block block_of(const Keys& keys, int n_block) const {
    const int first = n_block * Config::kKeys + warp() * kKeys, key = first + lane_id();
    const bool boxes = p.plan.box_rows > 0 && keys.seen.covers(first) && keys.seen.covers(first + kKeys - 1);
    if (lane_id() >= kKeys || !keys.seen.covers(key)) return {keys.head, {-1, 0}, boxes};
    const int position = keys.first + key, index = p.pages.page_size.divide(position);
    const int page = keys.pages ? ptx::load_early(keys.pages + index) : keys.only_page;
    return {keys.head, {page, p.pages.page_size.remainder(position, index)}, boxes};
  }
  // Its address in k or v.
  __device__ const char* address_of(const TensorRef<const void>& x, const Block& block) const {
    const auto& [head, place, boxes] = block;
    if (static_cast<unsigned>(place.page) >= static_cast<unsigned>(p.pages.count)) return nullptr;
    const auto* start = static_cast<const T*>(x.data) + int64_t{head} * x.heads;
    return reinterpret_cast<const char*>(start + place.page * x.batch + place.row * x.seqlen);
  }

  // The warp's part of the next tile of K or V.
  template <typename Tile, int kStages>
  __device__ void load_keys(const TensorRef<const void>& x, const CUtensorMap& map, int cols, const Block& block,
                            Tile (&tiles)[kStages], Ring<kStages>& ring, RingCursor<kStages>& at) {
    Tile& tile = tiles[at.stage];
    auto& arrived = ring.full[at.stage];
    if (block.boxes) {
      ring.wait_empty(at);
      if (lane_id() == 0) arrived.arrive_expect_tx(kKeys * Tile::kCols * sizeof(T));
      __syncwarp();
      if (starts_box) {
        load_rows_async(tile, warp() * kKeys + lane_id(), map, block.place.row, block.head, block.place.page, arrived);
      }
    } else {
      const Rows<Tile> rows(address_of(x, block));
      ring.wait_empty(at);
      rows.copy_to(tile, cols);
      arrive_when_copied(arrived);
    }
    at.advance();
  }

  // The warp arrives once, and the tile is not full before the copies of all its lanes have finished.
  __device__ static void arrive_when_copied(ptx::SharedBarrier& arrived) {
    arrived.wait_for_copies();
    __syncwarp();
    if (lane_id() == 0) arrived.arrive();
  }

  __device__ void load_k(const Block& block) {
    load_keys(p.k, launch.k, p.problem.head_dim, block, shared.k, shared.k_ring, k_at);
  }

  __device__ void load_v(const Block& block) {
    load_keys(p.v, launch.v, p.problem.head_dim_v, block, shared.v, shared.v_ring, v_at);
  }

  __device__ void load_q(const ServingWork<Config>& work) {
    constexpr int kRows = kWarpgroupRows / kWarps;
    const auto* start = first_token<T>(p.q, work.seq.q, work.tile.head);
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      const int row = kWarpgroupRows * rank + warp() * kRows + lane_id();
      const char* own = nullptr;
      if (lane_id() < kRows && row < work.rows.count) {
        own =
            reinterpret_cast<const char*>(start + work.rows.token(row) * p.q.seqlen + work.rows.head(row) * p.q.heads);
      }
      const Rows<typename Shared::OwnRows> rows(own);
      auto& ring = shared.q_rings[rank];
      ring.wait_empty(q_at);
      rows.copy_to(shared.q[q_at.stage][rank], p.problem.head_dim);
      arrive_when_copied(ring.full[q_at.stage]);
    }
    q_at.advance();
  }
};

}  // namespace flash::flash_attn
