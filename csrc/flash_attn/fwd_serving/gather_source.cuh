// The source of serving instances of fwd_sm90: the producer's warpgroup gathers rows by cp.async. So keys may lie in
// pages of any size, and rows of queries be those of several heads. (A source by TMA: fwd_sm90/tma_source.cuh.)
//
// Each warp copies a quarter of a tile's rows. A lane finds out where one of them lies, and the lanes that copy it get
// the address from there. Rows that do not exist, or that no query sees, become zeros, and nothing is read for them:
// pages past the end of an entry are not looked up, and what their unused slots hold does not matter.
//
// A tile is full when the copies of all threads have arrived. wgmma reads shared memory through the async proxy, so
// consumers also need a fence then (Consumer::wait_full).
#pragma once

#include <cstdint>

#include "flash_attn/fwd_serving/work_list.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

template <typename Config>
struct GatherSource {
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
    Place place;  // of the lane's key; a page of -1 means that there is no such key, or none that is seen
  };
  static constexpr int kWarps = 4;
  const ServingParams& p;
  Shared& shared;
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;

  __device__ GatherSource(const ServingLaunch& launch, Shared& shared) : p(launch.params), shared(shared) {}

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
    constexpr int kRows = Config::kKeys / kWarps;
    const int key = n_block * Config::kKeys + warp() * kRows + lane_id();
    if (lane_id() >= kRows || !keys.seen.covers(key)) return {keys.head, {-1, 0}};
    const int position = keys.first + key, index = p.pages.page_size.divide(position);
    const int page = keys.pages ? ptx::load_early(keys.pages + index) : keys.only_page;
    return {keys.head, {page, p.pages.page_size.remainder(position, index)}};
  }
  // Its address in k or v.
  __device__ static const char* address_of(const TensorRef<const void>& x, const Block& block) {
    const auto& [head, place] = block;
    if (place.page < 0) return nullptr;
    const auto* start = static_cast<const T*>(x.data) + int64_t{head} * x.heads;
    return reinterpret_cast<const char*>(start + place.page * x.batch + place.row * x.seqlen);
  }

  __device__ void load_k(const Block& block) {
    const Rows<typename Shared::Keys> rows(address_of(p.k, block));
    shared.k_ring.wait_empty(k_at);
    rows.copy_to(shared.k[k_at.stage], p.problem.head_dim);
    shared.k_ring.full[k_at.stage].arrive_when_copied();
    k_at.advance();
  }

  __device__ void load_v(const Block& block) {
    const Rows<typename Shared::Values> rows(address_of(p.v, block));
    shared.v_ring.wait_empty(v_at);
    rows.copy_to(shared.v[v_at.stage], p.problem.head_dim_v);
    shared.v_ring.full[v_at.stage].arrive_when_copied();
    v_at.advance();
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
      ring.full[q_at.stage].arrive_when_copied();
    }
    q_at.advance();
  }
};

}  // namespace flash::flash_attn
