// The consumer warpgroups of fwd_sm90: they compute a tile from what the producer has copied, and store the results. A
// tile is a prologue (the first S and P), a mainloop over its n_blocks, and an epilogue (the last P V, and the
// results).
#pragma once

#include <type_traits>

#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd_serving/pieces.cuh"
#include "flash_attn/fwd_sm90/shared.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/bias_tile.cuh"
#include "flash_attn/scores/descale.cuh"
#include "flash_attn/scores/dropped_bits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

using flash::warp_uniform;
__device__ inline Interval warp_uniform(const Interval& x) { return {warp_uniform(x.first), warp_uniform(x.last)}; }

// A warpgroup zeroes rows first .. end - 1 of V: P is 0 there, but V may hold NaN, and 0 * NaN is NaN. The other
// consumers may do so at the same time, which is harmless. The fence makes the zeros visible to wgmma.
template <typename Tile>
__device__ void clear_rows(Tile& tile, int first, int end, int barrier) {
  constexpr int kChunks = Tile::kCols / Tile::kChunk;
  for (int i = threadIdx.x % kWarpgroup; i < (end - first) * kChunks; i += kWarpgroup) {
    store(tile.chunk(first + i / kChunks, i % kChunks), Vec<typename Tile::T, Tile::kChunk>{});
  }
  ptx::fence_async_shared();
  ptx::sync_barrier<kWarpgroup>(barrier);
}

// The n_blocks of a tile, if there is a tile, and those among them that need no mask.
struct NBlocks {
  bool exist;
  Interval all, unmasked;
};

// The order in which the consumer warpgroups start their products, one after the other (ping-pong): then one computes
// its exponentials while the tensor cores run the products of another. A named barrier for each says that it is next;
// its predecessor arrives there. Without this order, short sequences are slower; letting the next one start when only
// half of the second product is queued changes nothing.
template <int kConsumers>
struct WarpgroupOrder {
  static constexpr int kFirstBarrier = 1;  // 0 is that of __syncthreads
  const int rank;                          // of the warpgroup

  __device__ void wait() const {
    if constexpr (kConsumers > 1) ptx::sync_barrier<2 * kWarpgroup>(kFirstBarrier + rank);
  }
  __device__ void pass_on() const {
    if constexpr (kConsumers == 1) return;
    ptx::arrive_at_barrier<2 * kWarpgroup>(kFirstBarrier + (rank + 1 == kConsumers ? 0 : rank + 1));
  }
  // The last warpgroup calls it once, so that the first may start.
  __device__ void begin() const {
    if (rank == kConsumers - 1) pass_on();
  }
};

// What comes with each block of K, of which a warp reads its own part: the bias of its rows (kBiased), or the bits that
// say which of its elements dropout drops (kDropped).
template <typename Config>
struct BesideKeysOf {
  struct type {};
};
template <typename Config>
  requires Config::kBiased
struct BesideKeysOf<Config> {
  using type = PackedFragment<typename Config::T, Config::kWarpRows, Config::kKeys>;
};
template <typename Config>
  requires Config::kDropped
struct BesideKeysOf<Config> {
  using type = DroppedBits<Config::kKeys>;
};

// A consumer warpgroup, from the view of one of its warps.
template <typename Config>
struct Consumer {
  using T = typename Config::T;
  using Work = TileWork<Config>;
  using BesideKeys = typename BesideKeysOf<Config>::type;
  const typename Config::Launch& launch;
  const decltype(Config::Launch::params)& p;
  FwdSm90Shared<Config>& shared;
  const int rank;      // of the warpgroup
  const int warp_row;  // the warp's first row in the tile
  const WarpgroupOrder<Config::kConsumers> order;
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;
  RingCursor<2> work_at;
  RingCursor<1> box_at;

  Output<Config> o;
  Softmax<Config> softmax;
  PackedFragment<T, Config::kWarpRows, Config::kKeys> probabilities;
  bool has_output;    // whether o has been written; if not, the next product overwrites it instead of adding
  bool has_total;     // whether pieces of the tile have been folded into a total
  float total_state;  // of the total: see keep_total

  __device__ Consumer(const typename Config::Launch& launch, FwdSm90Shared<Config>& shared, int rank)
      : launch(launch),
        p(launch.params),
        shared(shared),
        rank(rank),
        warp_row(warp_id() * Config::kWarpRows),
        order{rank},
        softmax(score_scale_log2<Config::kFeatures>(launch.params.problem)) {}

  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }
  // Waits for a tile. What cp.async has written must be fenced before wgmma reads it; converters have done so.
  template <int kStages>
  __device__ static void wait_full(const Ring<kStages>& ring, const RingCursor<kStages>& at) {
    ring.wait_full(at);
    if constexpr (Config::kServing && !Config::kCoded) ptx::fence_async_shared();
  }
  // A stage of K or V. Where blocks share it, one thread for each of them arrives there.
  template <int kStages>
  __device__ void release(Ring<kStages>& ring, RingCursor<kStages>& at) {
    if constexpr (Config::kSharers > 1) {
      const int block = rematerialized(threadIdx.x) % kWarpgroup;
      if (block < Config::kSharers) ptx::arrive_in(block, ring.empty[at.stage]);
    } else {
      if (leads()) ring.release(at);
    }
    at.advance();
  }

  // Called when Q K^T has ended and each warp has read what is beside K. These ordinary loads are why every warp then
  // releases for itself.
  __device__ void release_keys() {
    if constexpr (!Config::kHasBesideKeys) return release(shared.k_ring, k_at);
    __syncwarp();
    if (lane_id() == 0) shared.k_ring.release(k_at);
    k_at.advance();
  }

  // Called after a tile's last Q K^T. With a single stage of Q that is done as early as possible, so that the next
  // tile's Q arrives before this tile ends.
  __device__ void release_queries() {
    if (leads()) shared.q_rings[rank].release(q_at);
  }

  // The named barrier at which the warpgroup synchronizes with itself. Those of WarpgroupOrder come before.
  __device__ int own_barrier() const { return order.kFirstBarrier + Config::kConsumers + rank; }

  // Waits for the next work. If there is no more, its tile.entry is -1.
  __device__ const Work& next_work() {
    shared.work_ring.wait_full(work_at);
    return shared.work[work_at.stage];
  }
  // The n_blocks of a work, as warp-uniform registers.
  __device__ static NBlocks n_blocks_of(const Work& work) {
    return {warp_uniform(work.tile.entry) >= 0, warp_uniform(work.n_blocks), warp_uniform(work.unmasked_n_blocks())};
  }

  __device__ void start_scores(Scores<Config>& s) {
    start_gemm<Config::kChannels>(s, along_cols(shared.q[q_at.stage][rank]), along_cols(shared.k[k_at.stage]),
                                  /*accumulate=*/false);
  }
  __device__ void start_output() {
    start_gemm<Config::kKeys>(o, probabilities, along_rows(shared.v[v_at.stage]), /*accumulate=*/has_output);
    has_output = true;
  }

  // Starts the first scores of a tile. If there is no tile, they are computed all the same from whatever the stage
  // holds, so that no branch surrounds the asynchronous product.
  __device__ void start_first_scores(Scores<Config>& s, const Work& work) {
    if (warp_uniform(work.tile.entry) >= 0) {
      wait_full(shared.q_rings[rank], q_at);
      wait_full(shared.k_ring, k_at);
    }
    ptx::wgmma_fence();
    start_scores(s);
  }

  // In a cluster: adds the partial scores of the other block's channels, and sends it those of this block's.
  // rematerialized: addresses are computed anew each time, since there are no registers to keep them.
  __device__ void add_other_half(Scores<Config>& s) {
    if constexpr (Config::kClusterSize == 2) {
      const int thread = rematerialized(threadIdx.x);
      shared.boxes[thread / kWarpgroup].add_other_half(s, 1 - Config::cluster_rank(), thread, box_at);
    }
  }

  // The warp's rows of the bias, or its bits of dropout, of the current n_block.
  __device__ BesideKeys load_beside_keys() const {
    if constexpr (Config::kBiased) {
      return load_rows<T, Config::kKeys>(shared.k[k_at.stage].bias, warp_row, has_one_row(p.problem.bias.rows));
    } else if constexpr (Config::kDropped) {
      return shared.dropped[k_at.stage][warp_id()][lane_id()];
    } else {
      return {};
    }
  }
  __device__ void add_bias(Scores<Config>& s, const BesideKeys& bias, const Work& work) const {
    if constexpr (Config::kBiased) scale_and_add(s, softmax_scale_of<T>(p.problem, work.tile), bias);
  }

  // Rounds probabilities for P V, with those that dropout drops set to 0.
  __device__ void round_probabilities(Scores<Config>& s, const BesideKeys& dropped, const Work& work, int n_block) {
    drop<Config>(s, p, work.tile, warp_row, n_block);
    probabilities = pack<T>(s);
    if constexpr (Config::kDropped) dropped.clear(probabilities);
  }

  // A tile's pieces of fixed length (FixedPieces), the last keys first, are folded into a total: when a piece ends, (o,
  // softmax) becomes the total of all so far, and is kept.
  __device__ auto total() const {
    using Total = StoredOutput<kWarpgroup * Config::kConsumers, Config::kWarpRows, Config::kChannelsV>;
    if constexpr (Config::kSharesTotal) return Total(shared.total, 0);
    return Total(p.plan.pieces.totals, blockIdx.x);
  }
  __device__ void fold_total() {
#pragma unroll
    for (int r = 0; r < o.kLaneRows; ++r) {
      const int lane = lane_id() / 4 * 4 + 2 * r;
      const Fold::Partial before = {__shfl_sync(~0u, total_state, lane), __shfl_sync(~0u, total_state, lane + 1)};
      total().fold(r, o, softmax.fold(r, before), [](const float4* x) { return *x; });
    }
  }
  // The four lanes of a quad have two rows, whose maxima and sums are four numbers: each lane keeps one.
  __device__ void keep_total() {
    static_assert(Softmax<Config>::kLaneRows == 2);
    const int lane = lane_id() % 4;
    total_state = lane == 0 ? softmax.max[0] : lane == 1 ? softmax.sum[0] : lane == 2 ? softmax.max[1] : softmax.sum[1];
#pragma unroll
    for (int r = 0; r < o.kLaneRows; ++r) total().store(r, o);
    has_total = true;
  }

  // Turns the scores of the first n_block that a tile or a piece of it visits, its last keys, into P.
  __device__ void make_first_probabilities(Scores<Config>& s, const BesideKeys& beside, const Work& work, int n_block,
                                           bool masked) {
    // V from row `end` of the block on is zeroed: keys that do not exist or, with ranges, that no row sees.
    const int end = (Config::kRanged ? work.seen.last + 1 : work.seq.k.length) - n_block * Config::kKeys;
    float shrink[s.kLaneRows];
    softmax = Softmax<Config>(softmax.scale_log2);
    has_output = false;
    add_other_half(s);
    add_bias(s, beside, work);
    make_scores<Config>(s, p, work, warp_row, n_block, masked);
    softmax.update(s, shrink);
    round_probabilities(s, beside, work, n_block);
    if (!Config::kServing && end < Config::kKeys) {
      wait_full(shared.v_ring, v_at);
      clear_rows(shared.v[v_at.stage], end, Config::kKeys, own_barrier());
    }
  }

  // A step of the mainloop: adds P(n + 1) V(n + 1) to O and computes P(n). kMasked: whether the mask hides something in
  // block n.
  //
  // The wait for K(n - 1) is a branch, and the compiler hoists the wait for a product up to the branch before it. So
  // this one stands just before the wait for P V, behind all that is to overlap with that. O is rescaled at the end:
  // between the two products, that would delay the second. Keeping Q in registers gains hardly anything.
  template <bool kMasked>
  __device__ void step(const Work& work, int n_block, bool is_last) {
    Scores<Config> s;
    float shrink[s.kLaneRows];
    order.wait();
    fence(o, probabilities);
    start_scores(s);
    wait_full(shared.v_ring, v_at);
    fence(o, probabilities);
    start_output();
    order.pass_on();
    BlockBias<Config> bias(p.problem, work, warp_row, n_block);  // loaded from global memory while the products run
    const BesideKeys beside = load_beside_keys();
    wait_gemms<1>(s);
    release_keys();
    if (Config::kQueryStages == 1 && is_last) release_queries();
    add_other_half(s);
    add_bias(s, beside, work);
    make_scores<Config>(s, bias, p, work, warp_row, n_block, kMasked);
    bool grown = true;
    if constexpr (Config::kRarelyRescales) {
      // Probabilities may then reach 2^8, which is far from overflow, even in fp16. Where row_max is an output, the
      // maximum must be exact.
      grown = softmax.update_max_if_grown(s, shrink, Config::kPlain || p.row_max == nullptr ? 8 : 0);
    } else {
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) shrink[r] = softmax.update_max(s, r);
    }
#pragma unroll
    for (int r = 0; r < Config::kRowsUnderProduct; ++r) softmax.exponentiate(s, r);
    pin(s);
    if (!is_last) wait_full(shared.k_ring, k_at);
    wait_gemms<0>(o);
    release(shared.v_ring, v_at);
#pragma unroll
    for (int r = Config::kRowsUnderProduct; r < s.kLaneRows; ++r) softmax.exponentiate(s, r);
    round_probabilities(s, beside, work, n_block);
    if (grown) o.scale_rows(shrink);
  }

  // The step between two pieces of fixed length: ends that of block n + 1, and begins with the scores of block n.
  __device__ void step_to_next_piece(Scores<Config>& s, const Work& work, int n_block, bool is_last, bool masked) {
    order.wait();
    wait_full(shared.v_ring, v_at);
    fence(o, probabilities);
    start_output();
    order.pass_on();
    wait_gemms<0>(o);
    release(shared.v_ring, v_at);
    softmax.finish();
    if (has_total) fold_total();
    keep_total();
    order.wait();
    fence(s);
    start_scores(s);
    order.pass_on();
    wait_gemms<0>(s);
    begin_piece(s, work, n_block, is_last, masked);
  }

  // Stores O row by row, packed by `pack`, to a tensor shaped like out.
  template <typename Pack>
  __device__ void store_rows_to(const TensorRef<>& x, const Work& work, const Pack& pack) {
    with_output_rows<Config>(p, x, work, [&](auto rows) {
      rows.data += Config::channel();
      store_rows<T>(o, rows, warp_row, p.problem.head_dim_v - Config::channel(), pack);
    });
  }

  // Stores O: by one TMA copy from shared memory or, if the tile ends within packed sequences, row by row, since a copy
  // of the whole tile would overwrite rows of the next entry.
  __device__ void store_out(const Work& work) {
    if constexpr (!Config::kTile.staged_output) {
      store_rows_to(p.out, work, RoundedToOut<T>(p));
    } else {
      const int row0 = kWarpgroupRows * rank;
      if (leads()) ptx::wait_stores_read();
      ptx::sync_barrier<kWarpgroup>(own_barrier());
      store_matrices(shared.out, pack<T>(o, RoundedToOut<T>(p)), warp_row);
      if (p.problem.cu_seqlens_q != nullptr && work.rows.count < row0 + kWarpgroupRows) {
        __syncwarp();
        const auto rows = strided_rows<T>(p.out, work);
        return store_rows<Config::kWarpRows>(shared.out, rows, warp_row, p.problem.head_dim_v);
      }
      ptx::fence_async_shared();
      ptx::sync_barrier<kWarpgroup>(own_barrier());
      if (!leads()) return;
      store_async<kWarpgroupRows>(shared.out, row0, launch.out, work.seq.q.first + work.tile.row0 + row0,
                                  work.tile.head, work.seq.q.batch);
    }
  }

  // Turns the first scores of a tile, or of a piece of it, into probabilities.
  __device__ void begin_piece(Scores<Config>& s, const Work& work, int n_block, bool is_last, bool masked) {
    const BesideKeys beside = load_beside_keys();
    release_keys();
    if (Config::kQueryStages == 1 && is_last) release_queries();
    make_first_probabilities(s, beside, work, n_block, masked);
    if (!is_last) wait_full(shared.k_ring, k_at);
  }

  // The scale of a tile's scores, where tiles differ in it.
  __device__ void set_scale(const Work& work) {
    if constexpr (std::is_same_v<T, __half> && Config::kPlain && !Config::kBiased) {
      softmax.scale_log2 = warp_uniform(softmax_of<Config>(p.problem, work.tile).scale_log2);
    }
  }

  // The same for a tile. Its last P V, and the first scores of the next tile, are started in the epilogue.
  __device__ void prologue(Scores<Config>& s, const Work& work, const NBlocks& n_blocks) {
    const auto [first, last] = n_blocks.all;
    has_total = false;
    set_scale(work);
    begin_piece(s, work, last, last == first, !n_blocks.unmasked.covers(last));
  }

  // The first n_block of the piece of fixed length that an n_block is in.
  __device__ int first_of_piece(int n_block) const {
    if constexpr (Config::kFolds) {
      if (const int n_blocks = p.plan.pieces.n_blocks; n_blocks > 0) return n_block / n_blocks * n_blocks;
    }
    return 0;
  }

  // Computes the other n_blocks of a tile, but for the product of the last probabilities with V.
  __device__ void mainloop(Scores<Config>& s, const Work& work, const NBlocks& n_blocks) {
    const auto [first, last] = n_blocks.all;
    const auto& unmasked = n_blocks.unmasked;
    int piece = first_of_piece(last);
    if (Config::kSkips && rank > 0 && work.rows.count <= kWarpgroupRows * rank) return skip(n_blocks);
    for (int n = last - 1; n >= first;) {
      if (Config::kFolds && n < piece) {
        step_to_next_piece(s, work, n, n == first, !unmasked.covers(n));
        piece = first_of_piece(n--);
      }
      const int end = Config::kFolds ? max(first, piece) : first;
      const int end_of_masked = n > unmasked.last ? max(end, unmasked.last + 1) : end;
      const int end_of_unmasked = max(end, unmasked.first);
      if (!unmasked.covers(n)) {
#pragma unroll 1
        for (; n >= end_of_masked; --n) step<true>(work, n, n == first);
      }
#pragma unroll 1
      for (; n >= end_of_unmasked && n <= unmasked.last; --n) step<false>(work, n, n == first);
    }
    if (Config::kQueryStages > 1) release_queries();
    q_at.advance();
  }

  // The same for a warpgroup that has no rows, in tiles of few: it takes its turns, and releases what it does not read,
  // when all of its warps have come by.
  __device__ void skip(const NBlocks& n_blocks) {
    const auto [first, last] = n_blocks.all;
    if (Config::kQueryStages > 1 || first < last) release_queries();
    q_at.advance();
    int piece = first_of_piece(last);
#pragma unroll 1
    for (int n = last - 1; n >= first; --n) {
      if (n < piece) order.wait(), order.pass_on(), piece = first_of_piece(n);
      shared.v_ring.wait_full(v_at);
      shared.k_ring.wait_full(k_at);
      order.wait();
      release(shared.v_ring, v_at);
      release_keys();
      order.pass_on();
    }
  }

  // Waits for the last block of V that the tile visits, and zeroes its values before the first key that some row sees.
  __device__ void await_last_values(const Work& work, const NBlocks& n_blocks) {
    wait_full(shared.v_ring, v_at);
    if constexpr (Config::kServing) return;  // its source has them as zeros
    const int unseen = work.seen.first - n_blocks.all.first * Config::kKeys;
    if (unseen > 0) clear_rows(shared.v[v_at.stage], 0, unseen, own_barrier());
  }

  __device__ static bool is_piece(const Work& work) {
    if constexpr (Config::kServing) return warp_uniform(work.piece.count) > 1;
    return false;
  }
  __device__ void store_piece_of(const Work& work) const {
    if constexpr (Config::kServing) {
      store_piece(p.plan.slots, work.piece.slot, warp_row, work.rows.count, o, softmax);
    }
  }

  __device__ void store_results(const Work& work) {
    normalize<Config>(o, p, work.tile, softmax);
    // Before store_out: while that rounds O, its registers become free.
    if (!Config::kServing && p.out_lo.data != nullptr) store_rows_to(p.out_lo, work, Residue<T>());
    store_out(work);
    // After store_out, or else the fence there would wait for these stores.
    if (Config::cluster_rank() == 0) store_lse<Config>(p, work, warp_row, softmax);
  }

  // Starts the last P V of a tile and the first scores of the next, if there may be one; stores the results of the one,
  // and goes on to the other.
  __device__ void epilogue(Scores<Config>& s, const Work*& work, NBlocks& n_blocks) {
    await_last_values(*work, n_blocks);
    order.wait();
    fence(o, probabilities);
    start_output();
    const Work& done = *work;
    const auto done_at = work_at;
    if constexpr (Config::kPersistent) {
      work_at.advance();
      work = &next_work();
      start_first_scores(s, *work);
    }
    order.pass_on();
    n_blocks = Config::kPersistent ? n_blocks_of(*work) : NBlocks{.exist = false};
    softmax.finish();
    const bool is_whole = !is_piece(done) && !(Config::kFolds && has_total);
    if (is_whole) add_sinks<Config>(softmax, p, done, warp_row);
    wait_gemms<Config::kPersistent ? 1 : 0>(o);
    release(shared.v_ring, v_at);
    if (is_piece(done)) {
      store_piece_of(done);
    } else if (is_whole) {
      store_results(done);
    } else {  // by itself: if this way joined the other, nvcc would have the products wait
      fold_total();
      add_sinks<Config>(softmax, p, done, warp_row);
      store_results(done);
    }
    __syncwarp();
    if (lane_id() == 0) shared.work_ring.release(done_at);
    if constexpr (Config::kPersistent) wait_gemms<0>(s);
  }

  // Time goes from left to right; each warpgroup starts its products when WarpgroupOrder lets it, here with three
  // n_blocks in a tile:
  //
  //   producer:    Q K2 | K1 | V2  | K0 | V1  | next K2 | V0, next Q |
  //   warpgroup 0:   | S2 | exp P2 | S1, O += P2 V2 | exp P1 | S0, O += P1 V1 | exp P0 | O += P0 V0, next S2 | store O
  //   warpgroup 1:        | S2 | exp P2 | S1, O += P2 V2 | exp P1 | S0, O += P1 V1 | exp P0 | O += P0 V0, next S2 | ..
  //                  prologue           | mainloop                                          | epilogue
  __device__ void run() {
    Scores<Config> s;
    order.begin();
    order.wait();
    const Work* work = &next_work();
    start_first_scores(s, *work);
    order.pass_on();
    NBlocks n_blocks = n_blocks_of(*work);
    wait_gemms<0>(s);
    while (n_blocks.exist) {
      prologue(s, *work, n_blocks);
      mainloop(s, *work, n_blocks);
      epilogue(s, work, n_blocks);
    }
    if (leads()) ptx::wait_stores_read();  // shared memory must outlive the copies that read it
    // Waits for the other block's last arrival here: it must not reach a block that has exited.
    if constexpr (Config::kClusterSize == 2) shared.boxes[rank].other_empty.wait(box_at.round ^ 1);
  }
};

}  // namespace flash::flash_attn
