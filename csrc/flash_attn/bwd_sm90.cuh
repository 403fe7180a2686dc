// Attention, backward, for sm_90: what bwd_sm80.cuh computes, of the same pieces, around the instructions of Hopper.
//
// A block takes 128 keys of a key head and walks over the rows that see them, the last first, kBlockM at a time, of
// every query head that shares the key head. Each of two warpgroups has 64 of the keys, and sums their dV and dK in
// registers. Products are transposed, so that what is exponentiated is the left operand of the next product:
//
//   S^T = K Q^T    P^T     dV += P^T dO          from registers
//   dP^T = V dO^T  dS^T    dK += dS^T Q          likewise
//                          dQ = dS K             from shared memory, where both warpgroups have stored their part of dS
//
// and a warpgroup computes half of dQ: of its channels, or of its rows. The half goes to shared memory, from where a
// copy adds it to the sums in global memory that bwd_finish.cuh rounds.
//
// A third warpgroup starts the copies, with few registers: one warp those of K, V, Q and dO, and one for each
// half those of dQ.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/bwd_finish.cuh"
#include "flash_attn/bwd_prepare.cuh"
#include "flash_attn/bwd_schedule.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/config.h"
#include "flash_attn/dropout.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct BwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr BwdSm90Tile kTile = bwd_sm90_tile(kHeadDim, kFeatures);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys;
  static constexpr int kStages = 2;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr bool kHalvesAreRows = kBlockM == 128;  // of dQ, 64 x 64 each; or else they are channels
  static_assert(kBlockN == 64 * kConsumers && (kBlockM == 64 || kHeadDim == 64));
};

// Channels of dQ that lie together in global memory (bwd_scratch.cuh), and the boxes in which they are added.
constexpr int kDqGroup = 16, kDqBoxRows = 64, kDqBoxCols = 64;

struct BwdSm90Params {
  CUtensorMap q, dout, k, v;  // boxes of one page of a tile
  CUtensorMap dq_sums;
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

template <typename Config>
struct BwdSm90Shared {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  using Keys = SharedTile<T, kBlockN, kHeadDim>;

  Keys k, v;  // halves of dQ that have fewer than 64 channels read on in v; nobody adds what comes of it to anything
  SharedTile<T, kBlockM, kBlockN> ds[2];
  RowRing<Config> q, dout;                                             // with lse and delta
  alignas(128) float dq[Config::kConsumers][kDqBoxRows * kDqBoxCols];  // 16 channels after 16 channels
  ptx::SharedBarrier keys_here;
};

// What there is to do for a block.
template <typename Config>
struct KeyBlock {
  KeyWork work;
  Sequence seq;
  Mask mask;
  Interval keys;
  Interval row_blocks;  // that see some of them
  int first_head, num_heads;

  __device__ explicit KeyBlock(const BwdParams& p)
      : work(key_work<Config::kBlockN>(p)),
        seq(p.problem, work.entry),
        mask(p.problem, seq),
        keys(interval_of<Config::kBlockN>(work.first)),
        row_blocks(blocks_of<Config::kBlockM>(mask.rows_that_see({keys.first, min(keys.last, seq.k.length - 1)}))),
        num_heads(p.problem.heads / p.problem.heads_k) {
    first_head = work.head_k * num_heads;
  }

  __device__ bool exists() const { return keys.first < seq.k.length; }
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

// Barriers beside block-wide ones, by warpgroup.
constexpr int kDsBarrier = 1;  // both
__device__ inline int dq_full_barrier(int rank) { return 2 + rank; }
__device__ inline int dq_empty_barrier(int rank) { return 4 + rank; }
__device__ inline int own_barrier(int rank) { return 6 + rank; }
constexpr int kDqThreads = kWarpgroup + 32;

// ---------------------------------------------------------------------------------------------------------------------
// Copies

// K or V, by one lane.
template <typename Config>
__device__ void load_keys(typename BwdSm90Shared<Config>::Keys& tile, const CUtensorMap& map,
                          const KeyBlock<Config>& block, ptx::SharedBarrier& here) {
  const Span& k = block.seq.k;
  here.arrive_expecting(sizeof(tile));
  load_async(tile, map, static_cast<int>(k.first) + block.keys.first, block.work.head_k, static_cast<int>(k.batch),
             here);
}

// Q and lse, dO and delta, by one lane.
template <typename Config>
__device__ void load_rows(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, const KeyBlock<Config>& block) {
  const Span& q = block.seq.q;
  const int first = static_cast<int>(q.first), batch = static_cast<int>(q.batch);
  typename Ring<Config::kStages>::Cursor at;
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

// The counter of a half, once it is this block's turn to add: after those with the keys before.
template <typename Config>
__device__ int* await_turn(const BwdParams& p, const KeyBlock<Config>& block, int head, int row_block, int half) {
  const Mask& mask = block.mask;
  const Interval rows = interval_of<Config::kBlockM>(row_block);
  const int first_key = mask.keys_seen_by_any({rows.first, min(rows.last, mask.seqlen_q - 1)}).first;
  int* turn = turns_of(p, row_value_index(p, block.seq.q, block.work.entry, head) + rows.first) + half;
  ptx::wait_for(turn, block.work.first - first_key / Config::kBlockN);
  return turn;
}

__device__ inline void pass_turn(int* turn) {
  if (turn == nullptr) return;
  ptx::wait_stores();
  ptx::announce(turn);
}

// Adds halves of dQ to the sums, by a warp for each.
template <typename Config>
__device__ void add_halves(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, const KeyBlock<Config>& block,
                           int half) {
  const Span& q = block.seq.q;
  const int row0 = static_cast<int>(q.first) + (Config::kHalvesAreRows ? half * kDqBoxRows : 0);
  const int group = Config::kHalvesAreRows ? 0 : half * kDqBoxCols / kDqGroup;
  int* turn = nullptr;  // that is to be passed on
  block.for_each_row_block([&](int head, int row_block) {
    ptx::arrive_at_barrier<kDqThreads>(dq_empty_barrier(half));
    pass_turn(turn);
    ptx::sync_barrier<kDqThreads>(dq_full_barrier(half));
    if (lane_id() == 0) {
      if (p.bwd.turns != nullptr) turn = await_turn(p.bwd, block, head, row_block, half);
      ptx::add_box_async(p.dq_sums, ptx::shared_address(shared.dq[half]), 0, row0 + row_block * Config::kBlockM, group,
                         static_cast<int>(q.batch) * p.bwd.problem.heads + head);
      ptx::commit_stores();
      ptx::wait_stores_read();
    }
    __syncwarp();
  });
  pass_turn(turn);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

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

template <typename Config>
struct Gradients {
  using T = typename Config::T;
  using Scores = Fragment<16, Config::kBlockM>;  // S^T, then P^T; or dP^T, then dS^T
  using Packed = PackedFragment<T, 16, Config::kBlockM>;
  using KeySum = Fragment<16, Config::kHeadDim>;  // dV or dK
  static constexpr bool kPlain = Config::kFeatures == Features::kPlain;
  const BwdParams& p;
  BwdSm90Shared<Config>& shared;
  const KeyBlock<Config>& block;
  const int rank;  // of the warpgroup
  const int key0;  // of the warp, in the block
  KeySum dv, dk;
  typename Ring<Config::kStages>::Cursor at;
  int parity = 0;  // of the step

  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

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

  __device__ void wait_keys() {
    shared.keys_here.wait(0);
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

  // dP^T, of which nothing has been dropped yet, less delta.
  __device__ void subtract_delta(Scores& dp, const Dropped& dropped) const {
#pragma unroll
    for (int c = 0; c < dp.kLaneCols; c += 2) {
      const float2 delta = *reinterpret_cast<const float2*>(&shared.dout.values[at.stage][dp.col(c)]);
#pragma unroll
      for (int r = 0; r < dp.kLaneRows; ++r) {
        if constexpr (!kPlain) {
          dp(r, c) = dropped.has(r, c) ? 0 : dp(r, c) * p.problem.dropout_rescale;
          dp(r, c + 1) = dropped.has(r, c + 1) ? 0 : dp(r, c + 1) * p.problem.dropout_rescale;
        }
        dp(r, c) -= delta.x;
        dp(r, c + 1) -= delta.y;
      }
    }
  }

  // Which elements are dropped.
  __device__ Dropped dropped_of(const Scores& s, int head, const Interval& rows) const {
    Dropped dropped;
    if (kPlain || p.problem.rng_state == nullptr) return dropped;
    const Dropout dropout(p.problem, block.work.entry, head);
    dropout.for_each_dropped_transposed(s, block.keys.first + key0, rows.first,
                                        [&](int r, int c) { dropped.bits[r] |= 1u << c; });
    return dropped;
  }

  // Gives the warpgroup's half of dQ to the warp that adds it.
  __device__ void hand_over(const Fragment<16, kDqBoxCols>& dq) const {
    ptx::sync_barrier<kDqThreads>(dq_empty_barrier(rank));
    const int row0 = threadIdx.x % kWarpgroup / 32 * 16;
    float* half = shared.dq[rank] + 4 * (lane_id() % 4);
#pragma unroll
    for (int group = 0; group < kDqBoxCols / kDqGroup; ++group) {
#pragma unroll
      for (int r = 0; r < dq.kLaneRows; ++r) {
        float* row = half + (group * kDqBoxRows + row0 + dq.row(r)) * kDqGroup;
        const int c = 4 * group;
        store(row, Vec<float, 4>{dq(r, c), dq(r, c + 1), dq(r, c + 2), dq(r, c + 3)});
      }
    }
    ptx::fence_async_reads();
    ptx::arrive_at_barrier<kDqThreads>(dq_full_barrier(rank));
  }

  // S^T and dP^T, which are on their way, to the weights of dV and of dK.
  __device__ void differentiate(Scores& s, Scores& dp, Packed& weights, Packed& gradients, int head,
                                const Interval& rows) const {
    if constexpr (kPlain) {
      wait_gemms<1>(s);
      probabilities(s, head, rows);
      weights = pack<T>(s);
      wait_gemms<0>(dp);
      subtract_delta(dp, {});
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
    } else {
      wait_gemms<0>(s, dp);
      const Dropped dropped = dropped_of(s, head, rows);
      subtract_delta(dp, dropped);
      scale_and_cap(s, p.problem);
      if (const float cap = p.problem.softcap; cap > 0) {
        dp.for_each([&](float& x, int r, int c) { x *= cap_slope(s(r, c), cap); });
      }
      probabilities(s, head, rows);
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
      s.for_each([&](float& x, int r, int c) { x = dropped.has(r, c) ? 0 : x; });
      weights = pack<T>(s);
    }
    gradients = pack<T>(dp);
  }

  __device__ void step(int head, int row_block) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    auto &q = shared.q.tiles[at.stage], &dout = shared.dout.tiles[at.stage];
    auto& ds = shared.ds[parity];
    wait_rows(rows);
    Scores s, dp;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k, 64 * rank), along_cols(q), false);
    shared.dout.barriers.wait_full(at);
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(dp, along_cols(shared.v, 64 * rank), along_cols(dout), false);
    Packed weights, gradients;
    differentiate(s, dp, weights, gradients, head, rows);

    if constexpr (!Config::kTile.dv_first) store_transposed(ds, gradients, key0);
    fence(dv, weights);
    start_gemm<Config::kBlockM>(dv, weights, along_rows(dout), true);
    if constexpr (Config::kTile.dv_first) store_transposed(ds, gradients, key0);
    ptx::fence_async_reads();
    ptx::sync_barrier<2 * kWarpgroup>(kDsBarrier);
    Fragment<16, kDqBoxCols> dq;
    ptx::fence_products();
    start_gemm<Config::kBlockN>(dq, along_cols(ds, Config::kHalvesAreRows ? 64 * rank : 0),
                                along_rows(shared.k, Config::kHalvesAreRows ? 0 : kDqBoxCols * rank), false);
    wait_gemms<1>(dv);
    if (leads()) shared.dout.barriers.release(at);
    fence(dk, gradients);
    start_gemm<Config::kBlockM>(dk, gradients, along_rows(q), true);
    wait_gemms<1>(dq);
    hand_over(dq);
    wait_gemms<0>(dk);
    if (leads()) shared.q.barriers.release(at);
    at.advance();
    parity ^= 1;
  }

  __device__ void store_sum(KeySum& sum, float factor, const TensorRef<>& x) const {
    const Span& span = block.seq.k;
    const float factors[] = {factor, factor};
    sum.scale_rows(factors);
    T* first = first_token<T>(x, span, block.work.head_k) + block.keys.first * x.seqlen;
    const StridedRows<T> rows{first, x.seqlen, 0, span.length - block.keys.first};
    store_rows<T>(sum, rows, key0, p.problem.head_dim);
  }

  __device__ void run() {
    dv.fill(0), dk.fill(0);
    if (block.has_rows()) wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    store_sum(dv, p.problem.dropout_rescale, p.dv);
    store_sum(dk, p.problem.softmax_scale, p.dk);
  }
};

// ---------------------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_sm90_kernel(const __grid_constant__ BwdSm90Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdSm90Shared<Config>>();
  const KeyBlock<Config> block(p.bwd);
  if (!block.exists()) return;
  if (threadIdx.x == 0) {
    shared.keys_here.init(2);
    shared.q.barriers.init(Config::kConsumers);
    shared.dout.barriers.init(Config::kConsumers);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int rank = warpgroup_id();
  if (rank == Config::kConsumers) {
    ptx::keep_registers<Config::kProducerRegisters>();
    if (!block.has_rows()) return;
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role < Config::kConsumers) return add_halves(p, shared, block, role);
    if (lane_id() != 0) return;
    if (role != Config::kConsumers) return;
    load_keys(shared.k, p.k, block, shared.keys_here);
    load_keys(shared.v, p.v, block, shared.keys_here);
    load_rows(p, shared, block);
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    Gradients<Config>{p.bwd, shared, block, rank, warp_id() * 16}.run();
  }
#endif
}

// The sums of dQ as (heads of all entries, channels in groups, rows, channels of a group), in boxes of a half.
template <typename Config>
CUtensorMap map_of_sums(const BwdParams& p) {
  const Problem& problem = p.problem;
  const int64_t heads = int64_t{problem.heads} * (problem.cu_seqlens_q ? 1 : problem.batch), rows = problem.seqlen_q;
  constexpr int64_t kRowBytes = Config::kHeadDim * sizeof(float), kGroupBytes = kDqGroup * sizeof(float);
  return tensor_map(p.dq_sums, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {kDqGroup, rows, Config::kHeadDim / kDqGroup, heads},
                    {kRowBytes, kGroupBytes, rows * kRowBytes}, {kDqGroup, kDqBoxRows, kDqBoxCols / kDqGroup, 1},
                    CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <typename Config>
void launch_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Shared = BwdSm90Shared<Config>;
  using Keys = typename Shared::Keys;
  using Rows = typename RowRing<Config>::Tile;
  const Problem& problem = p.problem;
  const auto map_rows = [&](const TensorRef<const void>& x) {
    return map_of<Rows>(x, problem.head_dim, problem.heads, problem.seqlen_q, problem.cu_seqlens_q ? 1 : problem.batch);
  };
  const auto map_keys = [&](const TensorRef<const void>& x) {
    return map_of<Keys>(x, problem.head_dim, problem.heads_k, problem.capacity_k,
                        problem.cu_seqlens_k ? 1 : problem.batch);
  };
  const BwdSm90Params params{.q = map_rows(p.q),
                             .dout = map_rows(p.dout),
                             .k = map_keys(p.k),
                             .v = map_keys(p.v),
                             .dq_sums = map_of_sums<Config>(p),
                             .bwd = p};
  const LaunchShape shape{
      .grid = dim3(key_blocks<Config::kBlockN>(p)), .block = dim3(Config::kThreads), .shared_bytes = sizeof(Shared)};
  launch<bwd_sm90_kernel<Config>>(shape, params, stream);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  run_bwd_prepare<BwdPrepareConfig<T, kHeadDim>>(p, stream);
  launch_bwd_sm90<BwdSm90Config<T, kHeadDim, kFeatures>>(p, stream);
  run_bwd_finish<BwdFinishConfig<T, kHeadDim>>(p, stream);
}

}  // namespace flash::flash_attn
