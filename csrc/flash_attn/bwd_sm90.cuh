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
// and a warpgroup computes half of dQ: of its channels, or of its rows. With tiles of 128 rows the second warpgroup
// works half a step behind the first, so that one multiplies while the other exponentiates; and dQ is that of the rows
// before, so that neither waits for the other's dS. The half goes to a box in shared memory, from where a copy adds it
// to sums in global memory. These start as zeros, and bwd_finish.cuh rounds them; or, where that is faster (config.h),
// of the blocks with keys that the rows see, that with the first keys stores its half, others add theirs, and when they
// have, that with the last keys has the sums copied to its box, adds its half and rounds.
//
// A third warpgroup starts the copies, with few registers: one warp those of K, V, Q and dO, and one for each half
// those of dQ; with tiles of 64 rows the fourth waits for other blocks in their place. When its rows are done, a block
// takes other keys, which are on their way while it stores dV and dK. Deterministic: blocks add to the same rows in
// turn, those with the first keys first. Keys are taken in this order, the first of a block, too: however few blocks
// run at a time, none waits for keys that nobody has taken.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/bwd_finish.cuh"
#include "flash_attn/bwd_prepare.cuh"
#include "flash_attn/bwd_sm90_steps.cuh"
#include "flash_attn/config.h"
#include "flash_attn/dropout.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"
#include "tile/vec.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct BwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr BwdSm90Tile kTile = bwd_sm90_tile(kHeadDim, kFeatures);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys;
  static constexpr int kStages = 2, kCluster = 1;
  static constexpr int kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr bool kHalvesAreRows = kBlockM == 128;  // of dQ, 64 x 64 each; or else they are channels
  static constexpr bool kStaggered = kTile.staggered;
  static constexpr bool kAwaitsTurns = !kStaggered;  // by a warp of its own; with 128 rows that was slower
  static constexpr bool kManyRegisters = kStaggered || (kHeadDim > 96 && kFeatures != Features::kPlain);
  static constexpr int kConsumerRegisters = kManyRegisters ? 240 : 232, kProducerRegisters = kManyRegisters ? 24 : 40;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 168);
  static_assert(kBlockN == 64 * kConsumers && (kBlockM == 64 || kHeadDim == 64));
};

// Channels of dQ that lie together in global memory (bwd_scratch.cuh), and the boxes in which they are added.
constexpr int kDqGroup = 16, kDqBoxRows = 64, kDqBoxCols = 64;

// A box in shared memory as copies with 64-byte swizzle see it, groups of channels one after the other: neither warps
// that store fragments nor lanes that read 16 channels of eight rows meet in a bank. Or the box when it is rounded.
template <typename T>
union alignas(1024) DqBox {
  float values[kDqBoxRows * kDqBoxCols];
  SharedTile<T, kDqBoxRows, kDqBoxCols> rounded;

  // Four floats of a row and group.
  __device__ float* quad(int group, int row, int index) {
    return values + (group * kDqBoxRows + row) * kDqGroup + 4 * (index ^ row / 2 % 4);
  }
};

// What becomes of a half of dQ: it is added to the sums, or stored, or rounded, alone or with the sums, which its box
// has.
enum class DqFate : int { kAdd, kStore, kRound, kRoundWithSums };

template <typename Config>
struct BwdSm90Shared {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  using Keys = SharedTile<T, kBlockN, kHeadDim>;

  Keys k, v;  // halves of dQ that have fewer than 64 channels read on in v; nobody adds what comes of it to anything
  SharedTile<T, kBlockM, kBlockN> ds[2];
  RowRing<Config> q, dout;  // with lse and delta
  DqBox<T> dq[Config::kConsumers];
  DqFate dq_fate[Config::kConsumers];
  ptx::SharedBarrier sums_here[Config::kConsumers];
  ptx::SharedBarrier keys_here, keys_free;
  Ring<2> ds_ring, turn_ring, index_ring;  // turns that have come have no contents
  int index[2];                            // of blocks of keys, or -1 after the last

  __device__ void init() {
    constexpr int kConsumerWarps = Config::kConsumers * kWarpgroup / 32;
    q.barriers.init(kConsumerWarps);
    dout.barriers.init(kConsumerWarps);
    ds_ring.init(kConsumerWarps, kConsumerWarps);
    turn_ring.init(Config::kConsumers);
    for (ptx::SharedBarrier& here : sums_here) here.init(1);
    keys_here.init(2);
    keys_free.init(kConsumerWarps);
    index_ring.init(kConsumerWarps + Config::kConsumers + Config::kAwaitsTurns);  // all warps but the loader's
    ptx::fence_barrier_init();
  }
};

// fn(block) for each of the blocks of keys that the loader has taken.
template <typename Config, typename Fn>
__device__ void for_each_key_block(const BwdParams& p, BwdSm90Shared<Config>& shared, Fn&& fn) {
  RingCursor<2> at;
  while (true) {
    shared.index_ring.wait_full(at);
    const int index = warp_uniform(shared.index[at.stage]);
    if (lane_id() == 0) shared.index_ring.release(at);
    at.advance();
    if (index < 0) return;
    fn(KeyBlock<Config>(p, index));
  }
}

// Barriers of both warpgroups in a step, and of each and the warp that takes its half of dQ on.
constexpr int kStepBarrier = 1;
__device__ inline int dq_full_barrier(int rank) { return 2 + rank; }
__device__ inline int dq_empty_barrier(int rank) { return 4 + rank; }
constexpr int kDqThreads = kWarpgroup + 32;

// ---------------------------------------------------------------------------------------------------------------------
// Copies

// The lane that takes blocks of keys and starts the copies of what is read.
template <typename Config>
struct Loader {
  const BwdSm90Params& p;
  BwdSm90Shared<Config>& shared;
  RingCursor<2> index_at;
  RingCursor<Config::kStages> at;
  uint32_t keys_parity = 1;  // of what the next keys wait for

  __device__ void tell(int index) {
    shared.index_ring.wait_empty(index_at);
    shared.index[index_at.stage] = index;
    shared.index_ring.full[index_at.stage].arrive();
    index_at.advance();
  }

  __device__ void run() {
    const auto take = [&] { return atomicAdd(p.bwd.taken, 1); };
    for (int index = take(); index < p.key_blocks; index = take()) {
      const KeyBlock<Config> block(p.bwd, index);
      if (!block.exists()) continue;
      tell(index);
      if (!block.has_rows()) continue;
      shared.keys_free.wait(keys_parity);
      keys_parity ^= 1;
      load_block(p, shared, block, at);
    }
    tell(-1);
  }
};

// When a block may add to the sums of rows.
template <typename Config>
struct Turn {
  int* counters;  // of the halves: how many blocks have added
  int before;     // so many blocks have keys that come before and that the rows see
  bool last;      // of the blocks with such keys
  int awaited;    // number of blocks that have to have added

  __device__ Turn(const BwdParams& p, const KeyBlock<Config>& block, int head, int row_block) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    const Interval keys = block.mask.keys_seen_by_any({rows.first, min(rows.last, block.mask.seqlen_q - 1)});
    before = block.work.block - keys.first / Config::kBlockN;
    last = block.work.block == keys.last / Config::kBlockN;
    awaited = before > 0 && !last && !p.in_turns ? 1 : before;
    counters = turns_of(p, row_value_index(p, block.seq.q, block.work.entry, head) + rows.first);
  }

  __device__ void wait(int half) const {
    if (awaited > 0) ptx::wait_semaphore(counters + half, awaited);
    ptx::fence_async_global();
  }
};

// The warp that waits for turns. Those that take dQ on have to wait for what they add first, and to look for their turn
// only then would take them longer than the products of 64 rows: deterministic, head dim 128 would be 18 % slower.
template <typename Config>
__device__ void await_turns(const BwdParams& p, BwdSm90Shared<Config>& shared) {
  RingCursor<2> at;
  for_each_key_block(p, shared, [&](const KeyBlock<Config>& block) {
    if (p.turns == nullptr) return;
    block.for_each_row_block([&](int head, int row_block) {
      const Turn<Config> turn(p, block, head, row_block);
      shared.turn_ring.wait_empty(at);
      if (lane_id() < Config::kConsumers) turn.wait(lane_id());
      __syncwarp();
      if (lane_id() == 0) shared.turn_ring.full[at.stage].arrive();
      at.advance();
    });
  });
}

// The warp that takes one half of dQ to global memory.
template <typename Config>
struct DqWarp {
  const BwdSm90Params& p;
  BwdSm90Shared<Config>& shared;
  const KeyBlock<Config>& block;
  const int half;
  RingCursor<2>& turn_at;
  uint32_t& sums_parity;
  int* added = nullptr;  // the counter that does not know yet of the last box

  __device__ int group() const { return Config::kHalvesAreRows ? 0 : half * kDqBoxCols / kDqGroup; }
  __device__ int row(int row_block) const {
    const int first = row_block * Config::kBlockM + (Config::kHalvesAreRows ? half * kDqBoxRows : 0);
    return static_cast<int>(block.seq.q.first) + first;
  }
  __device__ int entry() const { return static_cast<int>(block.seq.q.batch); }
  __device__ int sums_of(int head) const { return entry() * p.bwd.problem.heads + head; }

  // Lets the warpgroup have the box.
  __device__ void free_box(DqFate fate) const {
    if (lane_id() == 0) shared.dq_fate[half] = fate;
    __syncwarp();
    ptx::arrive_at_barrier<kDqThreads>(dq_empty_barrier(half));
  }

  // One lane: tells that the last box has been added.
  __device__ void tell() const {
    if (added == nullptr) return;
    ptx::wait_stores();
    ptx::fence_async_global();
    ptx::release_semaphore(added);
  }

  // One lane: the sums to the box.
  __device__ void load_sums(int head, int row_block) const {
    ptx::SharedBarrier& here = shared.sums_here[half];
    here.arrive_expecting(sizeof(shared.dq[half]));
    ptx::copy_box_async(ptx::shared_address(&shared.dq[half]), p.dq_sums, 0, row(row_block), group(), sums_of(head),
                        here);
  }

  // One lane: from the box to the sums, or to dQ.
  __device__ void store_half(DqFate fate, int head, int row_block) const {
    const uint32_t box = ptx::shared_address(&shared.dq[half]);
    if (fate == DqFate::kAdd) {
      ptx::add_box_async(p.dq_sums, box, 0, row(row_block), group(), sums_of(head));
    } else if (fate == DqFate::kStore) {
      ptx::store_box_async(p.dq_sums, box, 0, row(row_block), group(), sums_of(head));
    } else {
      ptx::store_box_async(p.dq, box, group() * kDqGroup, head, row(row_block), entry());
    }
    ptx::commit_stores();
    ptx::wait_stores_read();
  }

  // The fate of the box, which is free, or has the sums, when those that come before have added.
  __device__ DqFate prepare_counted(int head, int row_block) {
    const Turn<Config> turn(p.bwd, block, head, row_block);
    DqFate fate = DqFate::kAdd;
    if (p.bwd.rounds_dq && turn.before == 0) fate = turn.last ? DqFate::kRound : DqFate::kStore;
    if (p.bwd.rounds_dq && turn.before > 0 && turn.last) fate = DqFate::kRoundWithSums;
    if (fate != DqFate::kRoundWithSums) free_box(fate);
    if (lane_id() == 0) tell();
    added = turn.last ? nullptr : turn.counters + half;
    if constexpr (Config::kAwaitsTurns) shared.turn_ring.wait_full(turn_at);
    if (lane_id() == 0) {
      if constexpr (Config::kAwaitsTurns) {
        shared.turn_ring.release(turn_at);
        ptx::fence_async_global();
      } else {
        turn.wait(half);
      }
      if (fate == DqFate::kRoundWithSums) load_sums(head, row_block);
    }
    turn_at.advance();
    __syncwarp();
    if (fate == DqFate::kRoundWithSums) {
      shared.sums_here[half].wait(sums_parity);
      sums_parity ^= 1;
      free_box(fate);
    }
    return fate;
  }

  __device__ void take_half(int head, int row_block) {
    DqFate fate = DqFate::kAdd;
    if (p.bwd.turns == nullptr) {
      free_box(fate);
    } else {
      fate = prepare_counted(head, row_block);
    }
    ptx::sync_barrier<kDqThreads>(dq_full_barrier(half));
    if (lane_id() == 0) store_half(fate, head, row_block);
    __syncwarp();
  }

  __device__ void run() {
    block.for_each_row_block([&](int head, int row_block) { take_half(head, row_block); });
    if (lane_id() == 0) tell();
  }
};

// One half of dQ, of all blocks of keys, by a warp.
template <typename Config>
__device__ void take_halves(const BwdSm90Params& p, BwdSm90Shared<Config>& shared, int half) {
  RingCursor<2> turn_at;
  uint32_t sums_parity = 0;
  for_each_key_block(p.bwd, shared, [&](const KeyBlock<Config>& block) {
    DqWarp<Config>{p, shared, block, half, turn_at, sums_parity}.run();
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

template <typename Config>
struct Gradients : BwdConsumer<Config, BwdSm90Shared<Config>> {
  using Base = BwdConsumer<Config, BwdSm90Shared<Config>>;
  using Base::p, Base::shared, Base::block, Base::rank, Base::key0, Base::at, Base::kPlain;
  using typename Base::Scores, typename Base::Packed, typename Base::KeySum, typename Base::T;
  using HalfOfDq = Fragment<16, kDqBoxCols>;
  using Ds = SharedTile<T, Config::kBlockM, Config::kBlockN>;
  uint32_t& keys_parity;
  static constexpr int kNone = 1 << 30;
  typename Ring<Config::kStages>::Cursor dq_at = at;  // staggered: where dS is of which dQ comes next
  int last_dq_rows = kNone;                           // and how many of its rows belong to the entry
  KeySum dv, dk;

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

  // Gives the warpgroup's half of dQ to the warp that takes it on. Of the box's rows `count` belong to the entry; to
  // those of the next one nothing may be added, not even NaN that is among the keys.
  __device__ void hand_over(HalfOfDq& dq, int count) const {
    ptx::sync_barrier<kDqThreads>(dq_empty_barrier(rank));
    const DqFate fate = p.rounds_dq ? shared.dq_fate[rank] : DqFate::kAdd;
    // If addresses are kept, too few registers are left to compute all of dS before dV starts, whose products then
    // wait.
    const unsigned thread = not_kept(threadIdx.x) % kWarpgroup;
    const int first_row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
    if (count < kDqBoxRows) {
      dq.for_each([&](float& x, int r, int) { x = first_row + 8 * r < count ? x : 0; });
    }
    float* first = shared.dq[rank].quad(0, first_row, t);
    const auto for_each_quad = [&](auto&& fn) {
#pragma unroll
      for (int group = 0; group < kDqBoxCols / kDqGroup; ++group) {
#pragma unroll
        for (int r = 0; r < dq.kLaneRows; ++r) fn(first + (group * kDqBoxRows + 8 * r) * kDqGroup, r, 4 * group);
      }
    };
    if (fate == DqFate::kRoundWithSums) {
      for_each_quad([&](float* quad, int r, int c) {
        const Vec<float, 4> sums = load<4>(quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) dq(r, c + i) += sums[i];
      });
      ptx::sync_barrier<kWarpgroup>(own_barrier(rank));  // the sums have been read where rounded ones come
    }
    if (fate == DqFate::kAdd || fate == DqFate::kStore) {
      for_each_quad([&](float* quad, int r, int c) {
        store(quad, Vec<float, 4>{dq(r, c), dq(r, c + 1), dq(r, c + 2), dq(r, c + 3)});
      });
    } else {
      dq.for_each([&](float& x, int, int) { x *= p.problem.softmax_scale; });
      auto& rounded = shared.dq[rank].rounded;
      T* first_pair = rounded.chunk(not_kept(first_row), 0) + 2 * t;
#pragma unroll
      for (int r = 0; r < dq.kLaneRows; ++r) {
#pragma unroll
        for (int c = 0; c < dq.kLaneCols; c += 2) {
          const uintptr_t pair = reinterpret_cast<uintptr_t>(first_pair) ^ rounded.flip(c / 2);
          *reinterpret_cast<uint32_t*>(pair + rounded.distance(8 * r, 0)) = ptx::pack<T>(dq(r, c), dq(r, c + 1));
        }
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
      this->probabilities(s, head, rows);
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
      this->probabilities(s, head, rows);
      dp.for_each([&](float& x, int r, int c) { x *= s(r, c); });
      s.for_each([&](float& x, int r, int c) { x = dropped.has(r, c) ? 0 : x; });
      weights = pack<T>(s);
    }
    gradients = pack<T>(dp);
  }

  __device__ void start_dv(Packed& weights) {
    fence(dv, weights);
    start_gemm<Config::kBlockM>(dv, weights, along_rows(shared.dout.tiles[at.stage]), true);
  }

  __device__ void start_dk(Packed& gradients) {
    fence(dk, gradients);
    start_gemm<Config::kBlockM>(dk, gradients, along_rows(shared.q.tiles[at.stage]), true);
  }

  __device__ void start_dq(HalfOfDq& dq, const Ds& ds) {
    ptx::fence_products();
    start_gemm<Config::kBlockN>(dq, along_cols(ds, Config::kHalvesAreRows ? 64 * rank : 0),
                                along_rows(shared.k, Config::kHalvesAreRows ? 0 : kDqBoxCols * rank), false);
  }

  // From dS of the last rows whose dQ has not been computed. If there are none, what is computed is not used; a step of
  // its own that left it out would be a second copy of all the rest.
  __device__ void start_last_dq(HalfOfDq& dq) {
    if (last_dq_rows != kNone) shared.ds_ring.wait_full(dq_at);
    start_dq(dq, shared.ds[dq_at.stage]);
  }

  __device__ void end_last_dq(HalfOfDq& dq) {
    if (lane_id() == 0) shared.ds_ring.release(dq_at);
    dq_at.advance();
    hand_over(dq, last_dq_rows);
  }

  // dV, dK and dQ of the rows of a step, when both warpgroups have stored their dS.
  __device__ void sum_together(Packed& weights, Packed& gradients, int dq_rows) {
    auto& ds = shared.ds[at.stage];
    start_dv(weights);
    store_transposed(ds, gradients, not_kept(key0));
    ptx::fence_async_reads();
    ptx::sync_barrier<2 * kWarpgroup>(kStepBarrier);
    HalfOfDq dq;
    start_dq(dq, ds);
    wait_gemms<1>(dv);
    if (lane_id() == 0) shared.dout.barriers.release(at);
    start_dk(gradients);
    wait_gemms<1>(dq);
    hand_over(dq, dq_rows);
  }

  // dV and dK of the rows of a step and dQ of the rows before, whose dS the other warpgroup has stored meanwhile. The
  // second warpgroup starts a step when the first has come to its last products: each then exponentiates while the
  // other multiplies.
  __device__ void sum_apart(Packed& weights, Packed& gradients, int dq_rows) {
    shared.ds_ring.wait_empty(at);
    store_transposed(shared.ds[at.stage], gradients, not_kept(key0));
    ptx::fence_async_reads();
    __syncwarp();
    if (lane_id() == 0) shared.ds_ring.full[at.stage].arrive();
    start_dv(weights);
    HalfOfDq dq;
    start_last_dq(dq);
    start_dk(gradients);
    if (rank == 0) ptx::arrive_at_barrier<2 * kWarpgroup>(kStepBarrier);
    wait_gemms<1>(dv, dq);
    if (lane_id() == 0) shared.dout.barriers.release(at);
    if (last_dq_rows != kNone) end_last_dq(dq);
    last_dq_rows = dq_rows;
  }

  __device__ void step(int head, int row_block) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    auto &q = shared.q.tiles[at.stage], &dout = shared.dout.tiles[at.stage];
    this->wait_rows(rows);
    if (Config::kStaggered && rank == 1) ptx::sync_barrier<2 * kWarpgroup>(kStepBarrier);
    Scores s, dp;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k, 64 * rank), along_cols(q), false);
    shared.dout.barriers.wait_full(at);
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(dp, along_cols(shared.v, 64 * rank), along_cols(dout), false);
    Packed weights, gradients;
    differentiate(s, dp, weights, gradients, head, rows);
    const int dq_rows = block.mask.seqlen_q - rows.first - (Config::kHalvesAreRows ? kDqBoxRows * rank : 0);
    if constexpr (Config::kStaggered) {
      sum_apart(weights, gradients, dq_rows);
    } else {
      sum_together(weights, gradients, dq_rows);
    }
    wait_gemms<0>(dk);
    if (lane_id() == 0) shared.q.barriers.release(at);
    at.advance();
  }

  __device__ void run() {
    dv.fill(0), dk.fill(0);
    if (block.has_rows()) {
      this->wait_keys(keys_parity);
      keys_parity ^= 1;
      block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
      HalfOfDq dq;
      if constexpr (Config::kStaggered) {
        start_last_dq(dq);
        wait_gemms<0>(dq);
      }
      if (lane_id() == 0) shared.keys_free.arrive();
      if constexpr (Config::kStaggered) end_last_dq(dq);
    }
    this->store_sum(dv, p.problem.dropout_rescale, p.dv);
    this->store_sum(dk, p.problem.softmax_scale, p.dk);
  }
};

// dV and dK of all blocks of keys, by a warpgroup.
template <typename Config>
__device__ void sum_keys(const BwdParams& p, BwdSm90Shared<Config>& shared, int rank) {
  RingCursor<Config::kStages> at;
  uint32_t keys_parity = 0;
  for_each_key_block(p, shared, [&](const KeyBlock<Config>& block) {
    Gradients<Config> gradients{{p, shared, block, rank, warp_id() * 16, at}, keys_parity};
    gradients.run();
    at = gradients.at;
  });
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_sm90_kernel(const __grid_constant__ BwdSm90Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdSm90Shared<Config>>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int rank = warpgroup_id();
  if (rank == Config::kConsumers) {
    ptx::keep_registers<Config::kProducerRegisters>();
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role < Config::kConsumers) take_halves(p, shared, role);
    if (role == Config::kConsumers && lane_id() == 0) Loader<Config>{p, shared}.run();
    if (Config::kAwaitsTurns && role == Config::kConsumers + 1) await_turns(p.bwd, shared);
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    sum_keys(p.bwd, shared, rank);
  }
#endif
}

// The sums of dQ as (heads of all entries, channels in groups, rows, channels of a group).
template <typename Config>
CUtensorMap map_of_sums(const BwdParams& p) {
  const Problem& problem = p.problem;
  const int64_t heads = int64_t{problem.heads} * (problem.cu_seqlens_q ? 1 : problem.batch), rows = problem.seqlen_q;
  constexpr int64_t kRowBytes = Config::kHeadDim * sizeof(float), kGroupBytes = kDqGroup * sizeof(float);
  return tensor_map(p.dq_sums, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {kDqGroup, rows, Config::kHeadDim / kDqGroup, heads},
                    {kRowBytes, kGroupBytes, rows * kRowBytes}, {kDqGroup, kDqBoxRows, kDqBoxCols / kDqGroup, 1},
                    CU_TENSOR_MAP_SWIZZLE_64B);
}

template <typename Config>
CUtensorMap map_of_dq(const BwdParams& p) {
  using Box = SharedTile<typename Config::T, kDqBoxRows, kDqBoxCols>;
  const Problem& problem = p.problem;
  if (!p.rounds_dq) return {};
  return map_of<Box>(p.dq, problem.head_dim, problem.heads, problem.seqlen_q, problem.batch);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Config = BwdSm90Config<T, kHeadDim, kFeatures>;
  run_bwd_prepare<BwdPrepareConfig<T, kHeadDim>>(p, stream);
  BwdSm90Params params = params_of<Config>(p);
  params.dq_sums = map_of_sums<Config>(p);
  params.dq = map_of_dq<Config>(p);
  launch_bwd_sm90<bwd_sm90_kernel<Config>, Config, BwdSm90Shared<Config>>(params, stream, p.persistent_blocks);
  run_bwd_finish<BwdFinishConfig<T, kHeadDim>>(p, stream);
}

}  // namespace flash::flash_attn
