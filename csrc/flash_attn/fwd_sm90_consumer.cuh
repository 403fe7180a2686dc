// The consumers of fwd_sm90.cuh: warpgroups that multiply what the producer has copied, and write the results.
#pragma once

#include <type_traits>

#include "flash_attn/bias_tile.cuh"
#include "flash_attn/fwd_sm90_shared.cuh"
#include "flash_attn/fwd_steps.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

using flash::warp_uniform;
__device__ inline Interval warp_uniform(const Interval& x) { return {warp_uniform(x.first), warp_uniform(x.last)}; }

// A warpgroup writes zeros to rows first .. end - 1 of V: P is 0 there, but V may be NaN. Others may do the same at the
// same time.
template <typename Tile>
__device__ void clear_rows(Tile& tile, int first, int end, int barrier) {
  constexpr int kChunks = Tile::kCols / Tile::kChunk;
  for (int i = threadIdx.x % kWarpgroup; i < (end - first) * kChunks; i += kWarpgroup) {
    store(tile.chunk(first + i / kChunks, i % kChunks), Vec<typename Tile::T, Tile::kChunk>{});
  }
  ptx::fence_async_shared();
  ptx::sync_barrier<kWarpgroup>(barrier);
}

// The blocks of keys that a tile sees, if there is a tile, and the blocks among them that no mask cuts.
struct Walk {
  bool exists;
  Interval blocks, whole;
};

// A warpgroup, as one of its warps sees it.
template <typename Config>
struct Consumer {
  using T = typename Config::T;
  using Work = FwdWork<Config>;
  struct None {};
  using TiledBias = std::conditional_t<Config::kBiased, PackedFragment<T, Config::kWarpRows, Config::kKeys>, None>;
  const FwdSm90Launch& maps;
  const FwdSm90Params& p;
  FwdSm90Shared<Config>& shared;
  const int rank;      // of the warpgroup
  const int warp_row;  // the warp's first row in the tile
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;
  RingCursor<2> work_at;
  RingCursor<1> box_at;

  Output<Config> o;
  Softmax<Config> softmax;
  PackedFragment<T, Config::kWarpRows, Config::kKeys> probabilities;
  bool has_output;  // whether o holds something

  __device__ Consumer(const FwdSm90Launch& maps, FwdSm90Shared<Config>& shared, int rank)
      : maps(maps),
        p(maps.params),
        shared(shared),
        rank(rank),
        warp_row(warp_id() * Config::kWarpRows),
        softmax(score_scale_log2<Config::kFeatures>(maps.params.problem)) {}

  __device__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }
  template <int kStages>
  __device__ void release(Ring<kStages>& ring, RingCursor<kStages>& at) {
    if (leads()) ring.release(at);
    at.advance();
  }

  // Called when the products with keys are there, and their bias has been read, by each warp its rows.
  __device__ void release_keys() {
    if constexpr (!Config::kBiased) return release(shared.k_ring, k_at);
    __syncwarp();
    if (lane_id() == 0) shared.k_ring.release(k_at);
    k_at.advance();
  }

  // Called after a tile's last scores. With one stage of Q it is called at once, so that the next rows arrive before
  // the tile ends.
  __device__ void release_queries() {
    if (leads()) shared.q_rings[rank].release(q_at);
  }

  // Named barriers: 1 .. kConsumers for the turns, the next ones for each warpgroup alone. Without turns, short
  // sequences are slower; passing the turn when only half of the second product is queued changes nothing.
  __device__ int own_barrier() const { return 1 + Config::kConsumers + rank; }
  __device__ void await_turn() const { ptx::sync_barrier<2 * kWarpgroup>(1 + rank); }
  __device__ void pass_turn() const {
    ptx::arrive_at_barrier<2 * kWarpgroup>(1 + (rank + 1 == Config::kConsumers ? 0 : rank + 1));
  }

  // The work that comes next; it does not exist if there is no more.
  __device__ const Work& next_work() {
    shared.work_ring.wait_full(work_at);
    return shared.work[work_at.stage];
  }
  // The walk of the work that comes next, in registers.
  __device__ static Walk walk_of(const Work& work) {
    return {warp_uniform(work.tile.entry) >= 0, warp_uniform(work.blocks), warp_uniform(work.whole_blocks())};
  }

  __device__ void start_scores(Scores<Config>& s) {
    start_gemm<Config::kChannels>(s, along_cols(shared.q[q_at.stage][rank]), along_cols(shared.k[k_at.stage]),
                                  /*accumulate=*/false);
  }
  __device__ void start_output() {
    start_gemm<Config::kKeys>(o, probabilities, along_rows(shared.v[v_at.stage]), /*accumulate=*/has_output);
    has_output = true;
  }

  // Starts the first scores of a tile. If there is no tile, they are computed all the same, of whatever is there, so
  // that no branch lies around the product.
  __device__ void start_first_scores(Scores<Config>& s, const Work& work) {
    if (warp_uniform(work.tile.entry) >= 0) {
      shared.q_rings[rank].wait_full(q_at);
      shared.k_ring.wait_full(k_at);
    }
    ptx::wgmma_fence();
    start_scores(s);
  }

  // Sends the products of these channels to the cluster's other block, and adds those that it sends. What follows from
  // the thread's rank is computed anew each time: there are no registers to keep it.
  __device__ void add_other_part(Scores<Config>& s) {
    if constexpr (Config::kParts == 2) {
      const int thread = unkept(threadIdx.x);
      shared.boxes[thread / kWarpgroup].add_other_part(s, 1 - Config::part(), thread, box_at);
    }
  }

  // In instances of kBiased, the bias of the keys whose turn it is.
  __device__ TiledBias load_bias() const {
    if constexpr (Config::kBiased) {
      return load_rows<T, Config::kKeys>(shared.k[k_at.stage].bias, warp_row, has_one_row(p.problem.bias.rows));
    } else {
      return {};
    }
  }
  __device__ void add_bias(Scores<Config>& s, const TiledBias& bias) const {
    if constexpr (Config::kBiased) scale_and_add(s, p.problem.softmax_scale, bias);
  }

  __device__ void begin(Scores<Config>& s, const TiledBias& bias, const Work& work, bool cut) {
    // With ranges, keys after the last that some row sees may belong to another document, and count as not there.
    const int n = work.blocks.last;
    const int end = (Config::kRanged ? work.seen.last + 1 : work.seq.k.length) - n * Config::kKeys;
    float shrink[s.kLaneRows];
    softmax = Softmax<Config>(Config::kBiased ? kLog2e : softmax.scale_log2);
    has_output = false;
    add_other_part(s);
    add_bias(s, bias);
    make_scores<Config>(s, p, work, warp_row, n, cut);
    softmax.update(s, shrink);
    drop<Config>(s, p, work.tile, warp_row, n);
    probabilities = pack<T>(s);
    if (end < Config::kKeys) {
      shared.v_ring.wait_full(v_at);
      clear_rows(shared.v[v_at.stage], end, Config::kKeys, own_barrier());
    }
  }

  // Turns maxima into what the other instances keep and the backward expects of lse: log2(e) s, as biased() makes it.
  __device__ void leave_units_of_bias() {
    if constexpr (Config::kBiased) {
      for (float& max : softmax.max) max = biased<T>(0, max);
      softmax.scale_log2 = 1;
    }
  }

  // Adds P(n + 1) V(n + 1) to O and computes P(n). The wait for K(n - 1) has a branch. It stands between the
  // exponentials because the compiler moves the wait for a product up to the last branch before it. O is rescaled at
  // the end: between the two products, that would delay the second. Q in registers would gain hardly anything.
  template <bool kCut>
  __device__ void step(const Work& work, int n, bool is_last) {
    Scores<Config> s;
    float shrink[s.kLaneRows];
    await_turn();
    fence(o, probabilities);
    start_scores(s);
    shared.v_ring.wait_full(v_at);
    fence(o, probabilities);
    start_output();
    pass_turn();
    BlockBias<Config> bias(p.problem, work, warp_row, n);  // on its way during the products
    const TiledBias tiled_bias = load_bias();
    wait_gemms<1>(s);
    release_keys();
    if (Config::kQueryStages == 1 && is_last) release_queries();
    add_other_part(s);
    add_bias(s, tiled_bias);
    make_scores<Config>(s, bias, p, work, warp_row, n, kCut);
    bool grown = true;
    if constexpr (Config::kRarelyRescales) {
      // 2^8 is far from overflow, in 16 bits, too. Where the maximum itself is wanted, it may not lag behind.
      grown = softmax.update_max_if_grown(s, shrink, Config::kPlain || p.row_max == nullptr ? 8 : 0);
    } else {
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) shrink[r] = softmax.update_max(s, r);
    }
#pragma unroll
    for (int r = 0; r < Config::kRowsUnderProduct; ++r) softmax.exponentiate(s, r);
    pin(s);
    if (!is_last) shared.k_ring.wait_full(k_at);
    wait_gemms<0>(o);
    release(shared.v_ring, v_at);
#pragma unroll
    for (int r = Config::kRowsUnderProduct; r < s.kLaneRows; ++r) softmax.exponentiate(s, r);
    drop<Config>(s, p, work.tile, warp_row, n);
    probabilities = pack<T>(s);
    if (grown) o.scale_rows(shrink);
  }

  // Writes what `Pack` makes of O to a tensor like out, row by row.
  template <typename Pack>
  __device__ void store_rows_to(const TensorRef<>& x, const Work& work) {
    auto rows = strided_rows<T>(x, work);
    rows.data += Config::channel();
    store_rows<T>(o, rows, warp_row, p.problem.head_dim_v - Config::channel(), Pack());
  }

  // Writes O through shared memory, as one copy; row by row where other rows follow those of the tile.
  __device__ void store_out(const Work& work) {
    if constexpr (!Config::kTile.staged_output) {
      store_rows_to<Rounded<T>>(p.out, work);
    } else {
      const int row0 = kWarpgroupRows * rank;
      if (leads()) ptx::wait_stores_read();
      ptx::sync_barrier<kWarpgroup>(own_barrier());
      store_matrices(shared.out, pack<T>(o), warp_row);
      if (p.problem.cu_seqlens_q != nullptr && work.rows.count < row0 + kWarpgroupRows) {
        __syncwarp();
        const auto rows = strided_rows<T>(p.out, work);
        return store_rows<Config::kWarpRows>(shared.out, rows, warp_row, p.problem.head_dim_v);
      }
      ptx::fence_async_shared();
      ptx::sync_barrier<kWarpgroup>(own_barrier());
      if (!leads()) return;
      store_async<kWarpgroupRows>(shared.out, row0, maps.out, work.seq.q.first + work.tile.row0 + row0, work.tile.head,
                                  work.seq.q.batch);
    }
  }

  // From the first scores of a tile to the probabilities of its last block.
  __device__ void walk_blocks(Scores<Config>& s, const Work& work, const Walk& walk) {
    const auto [_, blocks, whole] = walk;
    int n = blocks.last;
    const TiledBias bias = load_bias();
    release_keys();
    if (Config::kQueryStages == 1 && n == blocks.first) release_queries();
    begin(s, bias, work, !whole.covers(n));
    if (n > blocks.first) shared.k_ring.wait_full(k_at);
    for (--n; n >= blocks.first;) {
#pragma unroll 1
      for (; n >= blocks.first && !whole.covers(n); --n) step<true>(work, n, n == blocks.first);
#pragma unroll 1
      for (; n >= blocks.first && whole.covers(n); --n) step<false>(work, n, n == blocks.first);
    }
    if (Config::kQueryStages > 1) release_queries();
    q_at.advance();
  }

  // Waits for the values of the last block, and clears those before the first key that a window lets the rows see.
  __device__ void await_last_values(const Work& work, const Walk& walk) {
    shared.v_ring.wait_full(v_at);
    const int unseen = work.seen.first - walk.blocks.first * Config::kKeys;
    if (unseen > 0) clear_rows(shared.v[v_at.stage], 0, unseen, own_barrier());
  }

  __device__ void run() {
    Scores<Config> s;
    if (rank == Config::kConsumers - 1) pass_turn();
    await_turn();
    const Work* work = &next_work();
    start_first_scores(s, *work);
    pass_turn();
    Walk walk = walk_of(*work);
    wait_gemms<0>(s);

    while (walk.exists) {
      walk_blocks(s, *work, walk);
      await_last_values(*work, walk);
      await_turn();
      fence(o, probabilities);
      start_output();
      const Work& done = *work;
      const auto done_at = work_at;
      if constexpr (Config::kManyTiles) {
        work_at.advance();
        work = &next_work();
        start_first_scores(s, *work);
      }
      pass_turn();
      if constexpr (Config::kManyTiles) walk = walk_of(*work);
      softmax.finish();
      leave_units_of_bias();
      add_sinks<Config>(softmax, p, done, warp_row);
      wait_gemms<Config::kManyTiles ? 1 : 0>(o);
      release(shared.v_ring, v_at);
      normalize<Config>(o, p, softmax);
      // First, so that the registers of O become free as store_out rounds it.
      if (p.out_lo.data != nullptr) store_rows_to<Residue<T>>(p.out_lo, done);
      store_out(done);
      // Last, or else the fence of store_out waits for it.
      if (Config::part() == 0) store_lse<Config>(p, done, warp_row, softmax);
      __syncwarp();
      if (lane_id() == 0) shared.work_ring.release(done_at);
      if constexpr (!Config::kManyTiles) break;
      wait_gemms<0>(s);
    }
    if (leads()) ptx::wait_stores_read();
    // Or else the other block might arrive at a barrier that is gone.
    if constexpr (Config::kParts == 2) shared.boxes[rank].other_empty.wait(box_at.round ^ 1);
  }
};

}  // namespace flash::flash_attn
