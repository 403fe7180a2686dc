// Attention, forward, for sm_90: the formulas and the steps of fwd_sm80.cuh around TMA and wgmma.
//
// A block stays on its multiprocessor and takes one tile of query rows after the other. One warp, the producer, starts
// all copies: Q of a tile, and K and V of the blocks of keys that its rows see, the last first. Two or three warpgroups
// of 64 rows each, the consumers, multiply in the background what has arrived:
//
//   S(n) = Q K(n)^T starts;  O += P(n + 1) V(n + 1) starts;  S(n) becomes P(n) while the second product runs
//
// They take turns in starting products, so that while one is at its exponentials those of another run. A tile's first S
// is computed with the last product of the tile before it. S, P and O are registers.
//
// The producer takes the next tile from a counter in global memory when the last keys of a tile are on their way: as
// late as it can, so that long and short tiles even out.
#pragma once

#include <limits>
#include <type_traits>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/fwd_plan.h"
#include "flash_attn/fwd_steps.cuh"
#include "flash_attn/fwd_tiles.h"
#include "flash_attn/instances.h"
#include "flash_attn/rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/load.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

constexpr int kWarpgroupRows = 64;

// What the kernel is given: the problem, its plan, and descriptions of the tensors for TMA.
struct FwdSm90Launch {
  CUtensorMap q, k, v, out;
  FwdSm90Params params;
};

template <typename T_, int kHeadDim_, Features kFeatures_, bool kWide_>
struct FwdSm90Config {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = kFeatures == Features::kPlain;
  static constexpr FwdSm90Tile kTile = fwd_sm90_tile(kHeadDim, kFeatures, kWide_);
  static constexpr int kConsumers = kTile.warpgroups, kStages = kTile.stages, kQueryStages = kTile.query_stages;
  static constexpr int kRows = kWarpgroupRows * kConsumers, kKeys = kTile.keys, kWarpRows = 16;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1), kConsumerWarps = 4 * kConsumers;
  // The registers of the multiprocessor, shared out between a producer that needs few and the others.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  // How many of a lane's two rows are exponentiated before the wait for the second product. The rest, with nothing to
  // wait for any more, runs beside the rescaling of O and the packing of P: faster where the product is short.
  static constexpr int kRowsUnderProduct = kHeadDim <= 128 ? 1 : 2;
  // Whether O is rescaled only where a maximum has grown much. That is faster where O is long; otherwise rescaling
  // hides beside the exponentials, and a branch around it makes the compiler place them worse.
  static constexpr bool kRarelyRescales = kHeadDim > 192;
};

// Tiles in sections of heads whose keys and values fit the L2 cache together; in a section, the longest come first.
template <int kRows>
__device__ WorkTile ordered_tile(const Problem& p, const FwdSm90Plan& plan, int index) {
  const int section = plan.section_tiles.divide(index), rest = plan.section_tiles.remainder(index, section);
  const int slot = plan.section_heads.divide(rest), head = plan.section_heads.remainder(rest, slot);
  const int outer = section * static_cast<int>(plan.section_heads.value) + head;
  return tile_of_slot<kRows>(p, plan.tiling, outer, slot, /*split=*/0, index);
}

template <typename Config>
using FwdSm90Work = Work<Config::kRows, Config::kKeys>;

template <typename Config>
struct FwdSm90Shared {
  using T = typename Config::T;
  using Rows = SharedTile<T, Config::kRows, Config::kHeadDim>;
  using OwnRows = SharedTile<T, kWarpgroupRows, Config::kHeadDim>;  // of a warpgroup
  using Keys = SharedTile<T, Config::kKeys, Config::kHeadDim>;
  struct None {};

  OwnRows q[Config::kQueryStages][Config::kConsumers];
  Keys k[Config::kStages], v[Config::kStages];
  std::conditional_t<Config::kTile.staged_output, Rows, None> out;
  FwdSm90Work<Config> work[2];  // the one in progress and the next
  Ring<Config::kQueryStages> q_rings[Config::kConsumers];
  Ring<Config::kStages> k_ring, v_ring;
  Ring<2> work_ring;

  __device__ void init() {
    for (auto& ring : q_rings) ring.init(1);
    k_ring.init(Config::kConsumers);
    v_ring.init(Config::kConsumers);
    work_ring.init(Config::kConsumerWarps);
    ptx::fence_barrier_init();
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The producer, a warp. Its lane 0 starts the copies.

template <typename Config>
struct Producer {
  using T = typename Config::T;
  using Work = FwdSm90Work<Config>;
  using Shared = FwdSm90Shared<Config>;
  const FwdSm90Launch& maps;
  const FwdSm90Params& p;
  Shared& shared;
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;
  RingCursor<2> work_at;
  struct {
    Span keys;
    int head, block;
  } last_v{.block = -1};  // not started yet, if block >= 0
  int taken;

  __device__ void load_q(const Work& work) {
#pragma unroll 1
    for (int rank = 0; rank < Config::kConsumers; ++rank) {
      auto& ring = shared.q_rings[rank];
      ring.wait_empty(q_at);
      auto& arrived = ring.announce(q_at, sizeof(typename Shared::OwnRows));
      load_async(shared.q[q_at.stage][rank], maps.q, work.seq.q.first + work.tile.row0 + kWarpgroupRows * rank,
                 work.tile.head, work.seq.q.batch, arrived);
    }
    q_at.advance();
  }
  __device__ void load_k(const Span& keys, int head, int n) {
    shared.k_ring.wait_empty(k_at);
    auto& arrived = shared.k_ring.announce(k_at, sizeof(typename Shared::Keys));
    load_async(shared.k[k_at.stage], maps.k, keys.first + n * Config::kKeys, head, keys.batch, arrived);
    k_at.advance();
  }
  __device__ void load_v(const Span& keys, int head, int n) {
    shared.v_ring.wait_empty(v_at);
    auto& arrived = shared.v_ring.announce(v_at, sizeof(typename Shared::Keys));
    load_async(shared.v[v_at.stage], maps.v, keys.first + n * Config::kKeys, head, keys.batch, arrived);
    v_at.advance();
  }
  __device__ void load_last_v() {
    if (last_v.block >= 0) load_v(last_v.keys, last_v.head, last_v.block);
    last_v.block = -1;
  }

  // Hands the work to the consumers and starts its copies in the order in which they are needed: the last block of V
  // comes after the first keys of the next tile. That tile is taken while the last keys wait for their place.
  __device__ void load(const Work& work) {
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage] = work;
    shared.work_ring.full[work_at.stage].arrive();
    work_at.advance();

    const auto [first, last] = work.blocks;
    const int head = work.tile.key_head;
#pragma unroll 1
    for (int n = last; n >= first; --n) {
      if (n == first) taken = take_tile();
      load_k(work.seq.k, head, n);
      if (n == last) {
        load_last_v();
        load_q(work);
      } else {
        load_v(work.seq.k, head, n + 1);
      }
    }
    last_v = {work.seq.k, head, first};
  }

  // Writes the results of rows that see no keys.
  __device__ void store_nothing(const Work& work) const {
    const int col = 8 * lane_id();
    auto rows = strided_rows<T>(p.out, work);
    float* lse = row_values(p.softmax_lse, p.problem, work.seq.q, work.tile.head) + work.tile.row0;
    for (int row = 0; row < work.rows.count; ++row, rows.move(1)) {
      if (col < p.problem.head_dim) store(rows.address() + col, Vec<T, 8>{});
      if (col == 0) lse[row] = INFINITY;
    }
  }

  // How many tiles were taken before this one, beside the first of each block.
  __device__ int take_tile() const { return atomicAdd(p.plan.taken, 1); }

  __device__ void run() {
    const int num_tiles = p.plan.tiling.tiles.value;
    int index = blockIdx.x;
    while (index < num_tiles) {
      const Work work(p, p.plan.tiling, ordered_tile<Config::kRows>(p.problem, p.plan, index));
      const bool has_keys = work.exists() && !work.blocks.empty();
      if (work.exists() && !has_keys) store_nothing(work);
      if (lane_id() == 0) has_keys ? load(work) : void(taken = take_tile());
      index = gridDim.x + __shfl_sync(~0u, taken, 0);
    }
    if (lane_id() != 0) return;
    load_last_v();
    const bool is_last = index == num_tiles + static_cast<int>(gridDim.x) - 1;
    if (is_last) *p.plan.taken = 0;  // all blocks have found that there are no more tiles
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage].tile.entry = -1;
    shared.work_ring.full[work_at.stage].arrive();
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The consumers

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
  ptx::fence_async_reads();
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
  using Work = FwdSm90Work<Config>;
  const FwdSm90Launch& maps;
  const FwdSm90Params& p;
  FwdSm90Shared<Config>& shared;
  const int rank;      // of the warpgroup
  const int warp_row;  // the warp's first row in the tile
  RingCursor<Config::kQueryStages> q_at;
  RingCursor<Config::kStages> k_at, v_at;
  RingCursor<2> work_at;

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

  // After a tile's last scores: at once where there is one stage of Q, so that the next rows arrive while the tile
  // comes to its end.
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
    start_gemm<Config::kHeadDim>(s, along_cols(shared.q[q_at.stage][rank]), along_cols(shared.k[k_at.stage]),
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
    ptx::fence_products();
    start_scores(s);
  }

  __device__ void begin(Scores<Config>& s, const Work& work, bool cut) {
    const int n = work.blocks.last, end = work.seq.k.length - n * Config::kKeys;
    float shrink[s.kLaneRows];
    softmax = Softmax<Config>(softmax.scale_log2);
    has_output = false;
    make_scores<Config>(s, p, work, warp_row, n, cut);
    softmax.update(s, shrink);
    drop<Config>(s, p, work.tile, warp_row, n);
    probabilities = pack<T>(s);
    if (end < Config::kKeys) {
      shared.v_ring.wait_full(v_at);
      clear_rows(shared.v[v_at.stage], end, Config::kKeys, own_barrier());
    }
  }

  // From P(n + 1) to P(n). The wait for K(n - 1) stands where it does because the compiler moves the wait for a product
  // up to the last branch before it, and with it all exponentials behind it. O is rescaled at the end: between the two
  // products it would delay the second. Q in registers gains hardly anything.
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
    wait_gemms<1>(s);
    release(shared.k_ring, k_at);
    if (Config::kQueryStages == 1 && is_last) release_queries();
    make_scores<Config>(s, p, work, warp_row, n, kCut);
    bool grown = true;
    if constexpr (Config::kRarelyRescales) {
      grown = softmax.update_max_if_grown(s, shrink);
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

  // Writes O through shared memory, as one copy; row by row where other rows follow those of the tile.
  __device__ void store_out(const Work& work) {
    const auto rows = strided_rows<T>(p.out, work);
    if constexpr (!Config::kTile.staged_output) {
      store_rows<T>(o, rows, warp_row, p.problem.head_dim);
    } else {
      const int row0 = kWarpgroupRows * rank;
      if (leads()) ptx::wait_stores_read();
      ptx::sync_barrier<kWarpgroup>(own_barrier());
      store_matrices(shared.out, pack<T>(o), warp_row);
      if (p.problem.cu_seqlens_q != nullptr && work.rows.count < row0 + kWarpgroupRows) {
        __syncwarp();
        return store_rows<Config::kWarpRows>(shared.out, rows, warp_row, p.problem.head_dim);
      }
      ptx::fence_async_reads();
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
    release(shared.k_ring, k_at);
    if (Config::kQueryStages == 1 && n == blocks.first) release_queries();
    begin(s, work, !whole.covers(n));
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
      work_at.advance();
      work = &next_work();
      start_first_scores(s, *work);
      pass_turn();
      walk = walk_of(*work);
      softmax.finish();
      wait_gemms<1>(o);
      release(shared.v_ring, v_at);
      normalize<Config>(o, p, softmax);
      store_out(done);
      store_lse<Config>(p, done, warp_row, softmax);  // last, or else the fence of store_out waits for it
      __syncwarp();
      if (lane_id() == 0) shared.work_ring.release(done_at);
      wait_gemms<0>(s);
    }
    if (leads()) ptx::wait_stores_read();
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void fwd_sm90_kernel(const __grid_constant__ FwdSm90Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<FwdSm90Shared<Config>>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int rank = warpgroup_id();
  if (rank < Config::kConsumers) {
    ptx::take_registers<Config::kConsumerRegisters>();
    Consumer<Config>(launch, shared, rank).run();
  } else {
    ptx::keep_registers<Config::kProducerRegisters>();
    if (warp_id() == Config::kConsumerWarps) Producer<Config>{launch, launch.params, shared}.run();
  }
#endif
}

template <typename T, int kHeadDim, Features kFeatures, bool kWide>
void run_fwd_sm90(const FwdSm90Params& p, cudaStream_t stream) {
  using Config = FwdSm90Config<T, kHeadDim, kFeatures, kWide>;
  using Shared = FwdSm90Shared<Config>;
  const Problem& problem = p.problem;
  const int64_t head_dim = problem.head_dim, entries_q = problem.cu_seqlens_q ? 1 : problem.batch;
  const int64_t keys = problem.cu_seqlens_k ? problem.seqlen_k : problem.capacity_k;
  // With an index into the batch, how many entries k and v have is not known here.
  const int64_t entries_k = problem.cu_seqlens_k ? 1 : problem.batch_index ? kMaxSeqlen : problem.batch;
  const FwdSm90Launch maps{
      .q = map_of<typename Shared::OwnRows>(p.q, head_dim, problem.heads, problem.seqlen_q, entries_q),
      .k = map_of<typename Shared::Keys>(p.k, head_dim, problem.heads_k, keys, entries_k),
      .v = map_of<typename Shared::Keys>(p.v, head_dim, problem.heads_k, keys, entries_k),
      .out = map_of<typename Shared::Rows>(p.out, head_dim, problem.heads, problem.seqlen_q, entries_q, kWarpgroupRows),
      .params = p};
  const LaunchShape shape{.grid = dim3(p.plan.blocks), .block = dim3(Config::kThreads), .shared_bytes = sizeof(Shared)};
  launch<fwd_sm90_kernel<Config>>(shape, maps, stream);
}

}  // namespace flash::flash_attn
