// What the kernels of the backward for sm_90 share: which keys a block works on, how tiles of rows reach it, and the
// steps of the warpgroups that compute.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/bwd_schedule.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/dropout.cuh"
#include "flash_attn/features.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

struct BwdSm90Params {
  CUtensorMap q, dout, k, v;  // boxes of one page of a tile
  CUtensorMap dq_sums, dq;    // of bwd_sm90.cuh: boxes of a half of dQ
  int key_blocks;
  BwdParams bwd;
};

// Tiles of rows and a value for each row.
template <typename Config>
struct RowRing {
  using Tile = SharedTile<typename Config::T, Config::kBlockM, Config::kHeadDim>;
  Tile tiles[Config::kStages];
  alignas(128) float values[Config::kStages][Config::kBlockM];
  Ring<Config::kStages> barriers;
};

// What there is to do for a block. The blocks of a cluster take neighbouring keys and walk over the same rows.
template <typename Config>
struct KeyBlock {
  static constexpr int kClusterKeys = Config::kBlockN * Config::kCluster;
  KeyWork work;  // of the cluster
  Sequence seq;
  Mask mask;
  Interval keys;
  Interval cluster_keys;
  Interval row_blocks;  // that see some of the cluster's keys
  int first_head, num_heads;

  __device__ explicit KeyBlock(const BwdParams& p, int index = blockIdx.x / Config::kCluster, int rank = 0)
      : work(key_work<kClusterKeys>(p, index)),
        seq(p.problem, work.entry),
        mask(p.problem, seq),
        keys(interval_of<Config::kBlockN>(work.block * Config::kCluster + rank)),
        cluster_keys(interval_of<kClusterKeys>(work.block)),
        row_blocks(blocks_of<Config::kBlockM>(
            mask.rows_that_see({cluster_keys.first, min(cluster_keys.last, seq.k.length - 1)}))),
        num_heads(p.problem.heads / p.problem.heads_k) {
    first_head = work.head_k * num_heads;
  }

  __device__ bool exists() const { return cluster_keys.first < seq.k.length; }
  __device__ bool has_rows() const { return !row_blocks.empty(); }

  // fn(head, block of rows), in the order in which the block walks over them.
  template <typename Fn>
  __device__ void for_each_row_block(Fn&& fn) const {
#pragma unroll 1
    for (int head = first_head; head < first_head + num_heads; ++head) {
#pragma unroll 1
      for (int block = row_blocks.last; block >= row_blocks.first; --block) fn(head, block);
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Copies

// K or V, by one lane.
template <typename Config, typename Tile>
__device__ void load_keys(Tile& tile, const CUtensorMap& map, const KeyBlock<Config>& block, ptx::SharedBarrier& here) {
  const Span& k = block.seq.k;
  here.arrive_expecting(sizeof(tile));
  load_async(tile, map, static_cast<int>(k.first) + block.keys.first, block.work.head_k, static_cast<int>(k.batch),
             here);
}

// Rings of Q and lse and of dO and delta, by one lane.
template <typename Config, typename Shared>
__device__ void load_rows(const BwdSm90Params& p, Shared& shared, const KeyBlock<Config>& block,
                          RingCursor<Config::kStages>& at) {
  const Span& q = block.seq.q;
  const int first = static_cast<int>(q.first), batch = static_cast<int>(q.batch);
  block.for_each_row_block([&](int head, int row_block) {
    const int row0 = row_block * Config::kBlockM;
    const int64_t index = row_value_index(p.bwd, q, block.work.entry, head) + row0;
    const auto load = [&](RowRing<Config>& ring, const CUtensorMap& map, const float* values) {
      ring.barriers.wait_empty(at);
      ptx::SharedBarrier& here = ring.barriers.announce(at, sizeof(ring.tiles[0]) + sizeof(ring.values[0]));
      load_async(ring.tiles[at.stage], map, first + row0, head, batch, here);
      ptx::copy_bytes_async(ptx::shared_address(ring.values[at.stage]), values + index, sizeof(ring.values[0]), here);
    };
    load(shared.q, p.q, p.bwd.lse_log2);
    load(shared.dout, p.dout, p.bwd.delta);
    at.advance();
  });
}

// All that a block reads, by one lane.
template <typename Config, typename Shared>
__device__ void load_block(const BwdSm90Params& p, Shared& shared, const KeyBlock<Config>& block,
                           RingCursor<Config::kStages>& at) {
  load_keys(shared.k, p.k, block, shared.keys_here);
  load_keys(shared.v, p.v, block, shared.keys_here);
  load_rows(p, shared, block, at);
}

// ---------------------------------------------------------------------------------------------------------------------
// Steps of a warpgroup that computes

// Zeros for the rows of a tile outside of first .. last, by a warpgroup, before it multiplies them: 0 * NaN is NaN.
template <typename Tile>
__device__ void clear_outside(Tile& tile, const Interval& rows) {
  constexpr int kChunks = Tile::kCols / Tile::kChunk;
  for (int i = threadIdx.x % kWarpgroup; i < Tile::kRows * kChunks; i += kWarpgroup) {
    const int row = i / kChunks;
    if (row < rows.first || row > rows.last) *reinterpret_cast<uint4*>(tile.chunk(row, i % kChunks)) = {};
  }
}

// Which elements of a fragment of 16 rows a lane drops.
struct Dropped {
  uint32_t bits[2] = {};
  __device__ bool has(int r, int c) const { return bits[r] >> c & 1; }
};

// A value that the compiler has to take as new in each step: no register keeps what follows from it through a loop.
__device__ inline unsigned not_kept(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ inline int own_barrier(int rank) { return 6 + rank; }

// Each warp releases the stages that it has read, by its first lane: products of a warpgroup that have ended say
// nothing about what other warps still read with ordinary loads, as they do lse and delta.
template <typename Config_, typename Shared>
struct BwdConsumer {
  using Config = Config_;
  using T = typename Config::T;
  using Scores = Fragment<16, Config::kBlockM>;  // S^T, then P^T; or dP^T, then dS^T
  using Packed = PackedFragment<T, 16, Config::kBlockM>;
  using KeySum = Fragment<16, Config::kHeadDim>;  // dV or dK
  static constexpr bool kPlain = Config::kFeatures == Features::kPlain;
  const BwdParams& p;
  Shared& shared;
  const KeyBlock<Config>& block;
  const int rank;  // of the warpgroup
  const int key0;  // of the warp, in the block
  typename Ring<Config::kStages>::Cursor at = {};

  // Rows and keys that see nothing, and those of other entries, may hold anything.
  template <typename Tile>
  __device__ void clear_dead(Tile& first, Tile& second, const Interval& live, const Interval& present) {
    if (live.covers(present)) return;
    const Interval kept{live.first - present.first, live.last - present.first};
    clear_outside(first, kept);
    clear_outside(second, kept);
    ptx::fence_async_reads();
    ptx::sync_barrier<kWarpgroup>(own_barrier(rank));
  }

  __device__ void wait_keys(uint32_t parity = 0) {
    shared.keys_here.wait(parity);
    clear_dead(shared.k, shared.v, block.mask.keys_seen_by_any({0, block.mask.seqlen_q - 1}), block.keys);
  }

  __device__ void wait_rows(const Interval& rows) {
    shared.q.barriers.wait_full(at);
    const Interval live = block.mask.rows_that_see(Interval{0, block.mask.seqlen_k - 1});
    if (live.covers(rows)) return;
    shared.dout.barriers.wait_full(at);
    clear_dead(shared.q.tiles[at.stage], shared.dout.tiles[at.stage], live, rows);
  }

  // S^T, capped if it is, to P^T.
  __device__ void probabilities(Scores& s, int head, const Interval& rows) const {
    const Mask& mask = block.mask;
    const int first_key = block.keys.first + key0;
    if constexpr (!kPlain) {
      if (p.problem.alibi_slopes != nullptr) {
        const float slope = alibi_slope(p.problem, block.work.entry, head);
        const int own_row = first_key - mask.diagonal();
        subtract_distance(s, {slope, slope}, {own_row + s.row(0), own_row + s.row(1)}, rows.first);
      }
    }
    const Interval existing{rows.first, min(rows.last, mask.seqlen_q - 1)};
    if (!mask.keys_seen_by_all(existing).covers(block.keys)) {
      hide_outside(s, [&](int r) { return mask.rows_that_see(first_key + s.row(r)); }, rows.first, -INFINITY);
    }
    const float scale_log2 = score_scale_log2<Config::kFeatures>(p.problem);
#pragma unroll
    for (int c = 0; c < s.kLaneCols; c += 2) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.q.values[at.stage][s.col(c)]);
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) {
        s(r, c) = ptx::exp2(s(r, c) * scale_log2 - lse.x);
        s(r, c + 1) = ptx::exp2(s(r, c + 1) * scale_log2 - lse.y);
      }
    }
  }

  // Rounds dV or dK, times `factor`, to global memory.
  __device__ void store_sum(KeySum& sum, float factor, const TensorRef<>& x) const {
    const Span& span = block.seq.k;
    const float factors[] = {factor, factor};
    sum.scale_rows(factors);
    T* first = first_token<T>(x, span, block.work.head_k) + block.keys.first * x.seqlen;
    const StridedRows<T> rows{first, x.seqlen, 0, max(0, span.length - block.keys.first)};
    store_rows<T>(sum, rows, key0, p.problem.head_dim);
  }
};

// ---------------------------------------------------------------------------------------------------------------------

template <typename Config>
BwdSm90Params params_of(const BwdParams& p) {
  using Rows = typename RowRing<Config>::Tile;
  using Keys = SharedTile<typename Config::T, Config::kBlockN, Config::kHeadDim>;
  const Problem& problem = p.problem;
  const auto map_rows = [&](const TensorRef<const void>& x) {
    return map_of<Rows>(x, problem.head_dim, problem.heads, problem.seqlen_q, problem.cu_seqlens_q ? 1 : problem.batch);
  };
  const auto map_keys = [&](const TensorRef<const void>& x) {
    return map_of<Keys>(x, problem.head_dim, problem.heads_k, problem.capacity_k,
                        problem.cu_seqlens_k ? 1 : problem.batch);
  };
  return {.q = map_rows(p.q),
          .dout = map_rows(p.dout),
          .k = map_keys(p.k),
          .v = map_keys(p.v),
          .key_blocks = static_cast<int>(key_blocks<Config::kBlockN * Config::kCluster>(p)),
          .bwd = p};
}

// With at most `most` clusters, or one for each cluster's keys.
template <auto kKernel, typename Config, typename Shared>
void launch_bwd_sm90(const BwdSm90Params& params, cudaStream_t stream, int most = std::numeric_limits<int>::max()) {
  static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a block can have");
  const LaunchShape shape{.grid = dim3(Config::kCluster * std::min(params.key_blocks, most)),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(Shared),
                          .cluster = Config::kCluster};
  launch<kKernel>(shape, params, stream);
}

}  // namespace flash::flash_attn
