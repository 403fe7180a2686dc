// The source of serving instances of fwd_sm90: the producer's warpgroup gathers rows by cp.async. So keys may lie in
// pages of any size, and rows of queries be those of several heads. (A source by TMA: fwd_sm90/tma_source.cuh.)
//
// Each warp copies a quarter of a tile's rows. A lane finds out where one of them lies, and the lanes that copy it get the
// address from there. Rows that do not exist, or that no query sees, become zeros, and nothing is
// read for them: pages past the end of an entry are not looked up, and what their unused slots hold does not matter.
//
// A tile is full when the copies of all threads have arrived. wgmma reads shared memory through the async proxy, so
// consumers also need a fence then (Consumer::wait_full).
#pragma once

#include <cstdint>

#include "flash_attn/fwd_serving/work_list.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/tma.cuh"
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

  template <int kStages>
  __device__ static void wait_empty(const Ring<kStages>& ring, const RingCursor<kStages>& at) {
    ring.wait_empty(at);
  }

  // Starts the copies of the warp's rows of a tile. own: the address of the row of the warp's that has the lane's number;
  // null for a row of zeros. All addresses are exchanged before the first copy, so that copies do not wait for one
  // another.
  template <typename Tile>
  __device__ static void gather(const Tile& tile, const char* own, int cols) {
    constexpr int kRows = Tile::kRows / kWarps, kLanes = Tile::kPageChunks, kStep = 32 / kLanes, kSteps = kRows / kStep;
    static_assert(kRows % kStep == 0 && kRows <= 32);
    const int row = lane_id() / kLanes, chunk = lane_id() % kLanes;
    const uint32_t origin = tile.address(warp() * kRows + row, chunk);
    const uint32_t exist = __ballot_sync(~0u, own != nullptr);
    const char* sources[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const auto address = reinterpret_cast<uint64_t>(own);
      sources[i] = reinterpret_cast<const char*>(__shfl_sync(~0u, address, i * kStep + row)) + 16 * chunk;
    }
    const auto copy = [&](auto&& is_valid) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t target = (origin ^ Tile::turn(i * kStep)) + Tile::distance(i * kStep, 0);
#pragma unroll
        for (int page = 0; page < Tile::kPages; ++page) {
#ifdef HALFCOPY
          if (page == 0)
#endif
#ifdef NOCOPY
          if (sources[i] == nullptr)
#endif
          ptx::copy_async(target + Tile::distance(0, page), sources[i] + page * Tile::kRowBytes, is_valid(i, page));
        }
      }
    };
    constexpr uint32_t kAll = ~0u >> (32 - kRows);
    if ((exist & kAll) == kAll && cols == Tile::kCols) return copy([](int, int) { return true; });
    copy([&](int i, int page) {
      return (exist >> (i * kStep + row) & 1) && (page * kLanes + chunk) * Tile::kChunk < cols;
    });
  }

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
    const char* own = address_of(p.k, block);
    wait_empty(shared.k_ring, k_at);
    gather(shared.k[k_at.stage], own, p.problem.head_dim);
    shared.k_ring.full[k_at.stage].arrive_when_copied();
    k_at.advance();
  }

  __device__ void load_v(const Block& block) {
    const char* own = address_of(p.v, block);
    wait_empty(shared.v_ring, v_at);
    gather(shared.v[v_at.stage], own, p.problem.head_dim_v);
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
        own = reinterpret_cast<const char*>(start + work.rows.token(row) * p.q.seqlen + work.rows.head(row) * p.q.heads);
      }
      auto& ring = shared.q_rings[rank];
      wait_empty(ring, q_at);
      gather(shared.q[q_at.stage][rank], own, p.problem.head_dim);
      ring.full[q_at.stage].arrive_when_copied();
    }
    q_at.advance();
  }
};

}  // namespace flash::flash_attn
