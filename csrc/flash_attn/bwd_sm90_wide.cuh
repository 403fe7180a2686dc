// Attention, backward, for sm_90 and head dims above 128: the registers of a warpgroup hold dV or dK, not both.
//
// A cluster of two blocks takes 128 keys of a key head, each block 64, and walks over the rows that see them as
// bwd_sm90.cuh does. The warpgroups of a block are teams with the same keys:
//
//   value team    S^T = K Q^T     P^T              dV += P^T dO
//   key team      dP^T = V dO^T   dS^T from P^T    dK += dS^T Q
//   query team    dQ = dS K, for the keys of both blocks, half of the channels
//
// The value team leaves P^T in shared memory, negative where dropout drops. The key team makes dS of it, in the same
// place. The query team reads dS and also sends it to the other block. The bottleneck is how fast the L2 cache adds to
// dq_accum. So the two blocks sum dQ of both before they add it, and a team that only adds keeps the cache busy while
// the others compute. A fourth warpgroup starts the copies, each block half of those of Q and dO, for both blocks.
#pragma once

#include <cmath>
#include <cstdint>
#include <new>

#include "flash_attn/bwd_dq_accum.cuh"
#include "flash_attn/bwd_elementwise.cuh"
#include "flash_attn/bwd_finish.cuh"
#include "flash_attn/bwd_plan.h"
#include "flash_attn/bwd_prepare.cuh"
#include "flash_attn/bwd_schedule.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/bwd_sm90_barriers.cuh"
#include "flash_attn/bwd_sm90_block.cuh"
#include "flash_attn/bwd_sm90_consumer.cuh"
#include "flash_attn/bwd_sm90_launch.cuh"
#include "flash_attn/bwd_sm90_load.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct BwdWideConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kCluster = 2;
  static constexpr int kThreads = kWarpgroup * 4;
  static constexpr int kSumRegisters = 200, kQueryRegisters = 88, kProducerRegisters = 24;
};

template <typename Config>
struct BwdWideShared {
  using T = typename Config::T;
  SharedTile<T, Config::kBlockN, Config::kHeadDim> k, v;
  SharedTile<T, Config::kBlockN, 128> other_k;             // of the other block, with the channels of the half of dQ
  SharedTile<T, Config::kBlockM, Config::kBlockN> scores;  // P^T, then dS
  uint4 other_ds[Config::kBlockN / 16][kWarpgroup];        // of each lane
  RowRing<Config> q, dout;                                 // with lse and softmax_d
  ptx::SharedBarrier keys_here, other_keys_here;
  ptx::SharedBarrier other_ds_here, sent_ds_taken;
  int taken;                                         // in block 0 of the cluster: the index of its keys
  alignas(16) char block[sizeof(KeyBlock<Config>)];  // which does not fit the registers
};

// A team that sums dV or dK.
template <typename Config>
struct SumTeam : BwdConsumer<Config, BwdWideShared<Config>> {
  using Base = BwdConsumer<Config, BwdWideShared<Config>>;
  using Base::at;
  using typename Base::Packed, typename Base::KeySum;
  KeySum sum;

  // Adds the product to the sum and goes on to the next rows. A single product of 256 columns would take more registers
  // than a thread has when the kernel starts.
  __device__ void add_product(Packed& factors, RowRing<Config>& ring) {
    constexpr int kCols = Config::kHeadDim == 256 ? 128 : Config::kHeadDim;
    fence(sum, factors);
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += kCols) {
      auto& part = *reinterpret_cast<Fragment<16, kCols>*>(&sum.values[0][col / 8]);
      start_gemm<Config::kBlockM>(part, factors, along_rows(ring.tiles[at.stage], col), true);
    }
    wait_gemms<0>(sum, factors);
    release(ring);
    at.advance();
  }

  // Releases a stage of this warp, in both blocks.
  __device__ void release(const RowRing<Config>& ring) const {
    __syncwarp();
    if (lane_id() != 0) return;
#pragma unroll
    for (int rank = 0; rank < Config::kCluster; ++rank) ptx::arrive_in(rank, ring.barriers.empty[at.stage]);
  }
};

template <typename Config>
struct ValueTeam : SumTeam<Config> {
  using Base = SumTeam<Config>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::sum, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // Returns the left operand of dV for S^T, and leaves the weights of dP^T to the key team.
  __device__ Packed weigh(Scores& s, int head, const Interval& rows) const {
    const float cap = kPlain ? 0 : p.problem.softcap;
    Packed weights, slopes;
    if constexpr (!kPlain) {
      scale_and_cap(s, p.problem);
      if (cap > 0) {
        Scores slope;
        slope.for_each([&](float& x, int r, int c) { x = cap_slope(s(r, c), cap); });
        slopes = pack<T>(slope);
      }
    }
    this->probabilities(s, head, rows);
    if constexpr (!kPlain) negate_dropped(s, p.problem, this->place_of(head, rows));
    weights = pack<T>(s);
    Packed left = weights;
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < Config::kBlockM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t& weight = weights.values[0][i][j];
          if (cap > 0) left.values[0][i][j] = multiply_pairs<T>(weight, slopes.values[0][i][j]);
          weight = ptx::clamp_below<T>(weight);
        }
      }
    }
    await(kEmptyBarrier);
    store_transposed(shared.scores, left, key0);
    release(kWeightsBarrier);
    return weights;
  }

  __device__ void step(int head, int row_block) {
    const Interval rows = interval_of<Config::kBlockM>(row_block);
    this->wait_rows(rows);
    Scores s;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(s, along_cols(shared.k), along_cols(shared.q.tiles[at.stage]), false);
    wait_gemms<0>(s);
    Packed weights = weigh(s, head, rows);
    this->release(shared.q);
    shared.dout.barriers.wait_full(at);
    this->add_product(weights, shared.dout);
  }

  __device__ void run() {
    sum.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    await(kEmptyBarrier);
    this->store_sum(sum, p.problem.dropout_rescale, p.dv);
  }
};

template <typename Config>
struct KeyTeam : SumTeam<Config> {
  using Base = SumTeam<Config>;
  using Base::p, Base::shared, Base::block, Base::key0, Base::at, Base::sum, Base::kPlain;
  using typename Base::Packed, typename Base::Scores, typename Base::T;

  // Returns dS^T for dP^T, with the weights that the value team has left.
  __device__ Packed differentiate(Scores& dp) const {
    const Packed weights = load_transposed<T, Config::kBlockM>(shared.scores, key0);
#pragma unroll
    for (int i = 0; i < Config::kBlockM / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = 4 * i + 2 * half;
        const float2 softmax_d = *reinterpret_cast<const float2*>(&shared.dout.values[at.stage][dp.col(c)]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 weight = ptx::unpack<T>(weights.values[0][i][2 * half + r]);
          apply_weight<Config::kFeatures>(dp(r, c), weight.x, softmax_d.x, p.problem);
          apply_weight<Config::kFeatures>(dp(r, c + 1), weight.y, softmax_d.y, p.problem);
        }
      }
    }
    return pack<T>(dp);
  }

  __device__ void step(int head, int row_block) {
    this->wait_rows(interval_of<Config::kBlockM>(row_block));
    shared.dout.barriers.wait_full(at);
    Scores dp;
    ptx::fence_products();
    start_gemm<Config::kHeadDim>(dp, along_cols(shared.v), along_cols(shared.dout.tiles[at.stage]), false);
    wait_gemms<0>(dp);
    await(kWeightsBarrier);
    Packed gradients = differentiate(dp);
    this->release(shared.dout);
    store_transposed(shared.scores, gradients, key0);
    ptx::fence_async_reads();
    release(kGradientsBarrier);
    this->add_product(gradients, shared.q);
  }

  __device__ void run() {
    sum.fill(0);
    if (block.has_rows()) this->wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
    this->store_sum(sum, p.problem.softmax_scale, p.dk);
  }
};

template <typename Config>
struct QueryTeam {
  using Gradients = PackedFragment<typename Config::T, 16, Config::kBlockN>;
  static constexpr int kCols = 32, kParts = Config::kHeadDim / 2 / kCols;
  using Part = Fragment<16, kCols>;
  using Accum = DqAccum<Config::kHeadDim>;
  const BwdSm90Params& p;
  BwdWideShared<Config>& shared;
  const KeyBlock<Config>& block;
  const int rank;       // of the block in the cluster
  uint32_t parity = 0;  // of the step

  __device__ int other() const { return rank ^ 1; }
  __device__ static int thread() { return threadIdx.x % kWarpgroup; }
  __device__ static int row() { return thread() / 32 * 16 + lane_id() / 4; }

  // The first channel of the block's half of dQ, and of other_k, which starts with a whole page.
  __device__ static int first_col(int rank) { return rank * Config::kHeadDim / 2; }
  __device__ static int other_col0(int rank) { return rank * (Config::kHeadDim - 128); }

  __device__ Gradients take() const {
    Gradients ds;
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
      ptx::load_matrices(ds.values[0][step],
                         shared.scores.address(thread() / 32 * 16 + lane_id() % 16, 2 * step + lane_id() / 16));
    }
    return ds;
  }

  __device__ void send(const Gradients& ds) const {
    shared.sent_ds_taken.wait(parity ^ 1);
    const uint32_t target = ptx::address_in(other(), &shared.other_ds[0][thread()]);
    const uint32_t here = ptx::address_in(other(), &shared.other_ds_here.state);
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
      ptx::store_async_in(target + step * sizeof(shared.other_ds[0]), ds.values[0][step], here);
    }
  }

  __device__ Gradients receive() const {
    if (thread() == 0) shared.other_ds_here.arrive_expecting(sizeof(shared.other_ds));
    ptx::wait_for_stores(shared.other_ds_here, parity);
    Gradients ds;
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
      const uint4 words = shared.other_ds[step][thread()];
      auto& target = ds.values[0][step];
      target[0] = words.x, target[1] = words.y, target[2] = words.z, target[3] = words.w;
    }
    __syncwarp();
    if (lane_id() == 0) ptx::arrive_in(other(), shared.sent_ds_taken);
    return ds;
  }

  // Adds to the lane's sums, of `rows` rows from its first on.
  __device__ static void add(const Part& dq, float* sums, int rows) {
#pragma unroll
    for (int r = 0; r < dq.kLaneRows; ++r) {
      if (8 * r >= rows) continue;
#pragma unroll
      for (int c = 0; c < dq.kLaneCols; c += 4) {
        ptx::add_global(sums + 8 * r * Config::kHeadDim + c / 4 * Accum::kGroupStep, dq(r, c), dq(r, c + 1),
                        dq(r, c + 2), dq(r, c + 3));
      }
    }
  }

  __device__ void step(int head, int row_block) {
    await(kGradientsBarrier);
    Gradients own_ds = take();
    release(kEmptyBarrier);
    send(own_ds);
    Gradients other_ds = receive();
    parity ^= 1;
    fence(own_ds, other_ds);
    const Span& q = block.seq.q;
    const int first_row = row_block * Config::kBlockM + row();
    float* groups =
        Accum::address(p.plan.scratch.dq_accum, p.problem, q, head, first_row, first_col(rank) / Accum::kGroup);
    float* sums = groups + 4 * (lane_id() % 4);
    if (p.plan.waits) ptx::sync_barrier<kTurnThreads>(kTurnHereBarrier);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int col = first_col(rank) + part * kCols;
      Part dq;
      ptx::fence_products();
      start_gemm<Config::kBlockN>(dq, own_ds, along_rows(shared.k, col), false);
      start_gemm<Config::kBlockN>(dq, other_ds, along_rows(shared.other_k, col - other_col0(rank)), true);
      wait_gemms<0>(dq, own_ds, other_ds);
      add(dq, sums + part * (kCols / Accum::kGroup) * Accum::kGroupStep, q.length - first_row);
    }
    if (p.plan.waits) ptx::sync_barrier<kTurnThreads>(kTurnDoneBarrier);
  }

  __device__ void wait_keys() const {
    shared.keys_here.wait(0);
    shared.other_keys_here.wait(0);
    const int first = block.cluster_keys.first + other() * Config::kBlockN;
    const Interval live = block.mask.keys_seen_by_any({0, block.mask.seqlen_q - 1});
    if (live.covers({first, first + Config::kBlockN - 1})) return;
    clear_outside(shared.other_k, {live.first - first, live.last - first});
    ptx::fence_async_reads();
    ptx::sync_barrier<kWarpgroup>(kQueryBarrier);
  }

  __device__ void run() {
    release(kEmptyBarrier);
    if (block.has_rows()) wait_keys();
    block.for_each_row_block([&](int head, int row_block) { step(head, row_block); });
  }
};

// ---------------------------------------------------------------------------------------------------------------------

// Deterministic: clusters add to the same rows in the order of their keys. One warp waits at the semaphores for the
// query team, and another one releases them, so that the team waits for neither.
template <typename Config>
struct Turns {
  const BwdSm90Params& p;
  const KeyBlock<Config>& block;
  const int rank;  // of the block in the cluster

  // How many clusters have added to the rows; each block of a cluster adds half of the channels.
  __device__ int* semaphore(int head, int row_block) const {
    return semaphore_at(p.plan.scratch, block.padded_index(p, head) + row_block * Config::kBlockM) + rank;
  }

  __device__ void await_all() const {
    block.for_each_row_block([&](int head, int row_block) {
      const AddOrder<Config::kBlockM, KeyBlock<Config>::kClusterKeys> order(block.mask, row_block, block.work.block);
      if (lane_id() == 0) ptx::wait_semaphore(semaphore(head, row_block), order.before);
      __syncwarp();
      ptx::sync_barrier<kTurnThreads>(kTurnHereBarrier);
    });
  }

  __device__ void release_all() const {
    block.for_each_row_block([&](int head, int row_block) {
      ptx::sync_barrier<kTurnThreads>(kTurnDoneBarrier);
      if (lane_id() == 0) ptx::release_semaphore(semaphore(head, row_block));
      __syncwarp();
    });
  }
};

// Starts the copies of all that a block reads, by one lane; of Q and dO every other page, for both blocks.
template <typename Config>
__device__ void load_block(const BwdSm90Launch& p, BwdWideShared<Config>& shared, const KeyBlock<Config>& block,
                           int rank) {
  const Span &k = block.seq.k, &q = block.seq.q;
  load_keys(shared.k, p.k_map, block, shared.keys_here);
  load_keys(shared.v, p.v_map, block, shared.keys_here);
  shared.other_keys_here.arrive_expecting(sizeof(shared.other_k));
#pragma unroll 1
  for (int page = 0; page < shared.other_k.kPages; ++page) {
    const int row = static_cast<int>(k.first) + block.cluster_keys.first + (rank ^ 1) * Config::kBlockN;
    ptx::copy_box_async(shared.other_k.address(0, 0) + shared.other_k.distance(0, page), p.k_map,
                        QueryTeam<Config>::other_col0(rank) + page * shared.other_k.kPageCols, block.work.head_k, row,
                        static_cast<int>(k.batch), shared.other_keys_here);
  }

  typename Ring<Config::kStages>::Cursor at;
  block.for_each_row_block([&](int head, int row_block) {
    const int row0 = row_block * Config::kBlockM;
    const int64_t index = block.padded_index(p, head) + row0;
    const auto load = [&](RowRing<Config>& ring, const CUtensorMap& map, const float* values) {
      auto& tile = ring.tiles[at.stage];
      ring.barriers.wait_empty(at);
      ptx::SharedBarrier& here = ring.barriers.announce(at, sizeof(tile) + sizeof(ring.values[0]));
#pragma unroll 1
      for (int page = rank; page < tile.kPages; page += Config::kCluster) {
        ptx::copy_box_to_blocks(tile.address(0, 0) + tile.distance(0, page), map, page * tile.kPageCols, head,
                                static_cast<int>(q.first) + row0, static_cast<int>(q.batch), here, 0b11);
      }
      ptx::copy_bytes_async(ptx::shared_address(ring.values[at.stage]), values + index, sizeof(ring.values[0]), here);
    };
    load(shared.q, p.q_map, p.plan.lse_log2);
    load(shared.dout, p.dout_map, p.plan.softmax_d);
    at.advance();
  });
}

// Which keys the cluster works on. Where clusters wait for those with earlier keys, they take the keys from a counter:
// CUDA does not promise to start clusters in the order of their numbers, and a cluster that waits for one that has not
// started may keep it from starting. All threads of the cluster call it.
template <typename Config>
__device__ int find_index(const BwdSm90Params& p, BwdWideShared<Config>& shared, int rank) {
  if (!p.plan.waits) return blockIdx.x / Config::kCluster;
  if (rank == 0 && threadIdx.x == 0) shared.taken = atomicAdd(p.plan.scratch.next_block, 1);
  ptx::sync_cluster();
  return ptx::load_from(0, shared.taken);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_wide_kernel(const __grid_constant__ BwdSm90Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<BwdWideShared<Config>>();
  const int rank = ptx::cluster_rank(), index = find_index(p, shared, rank);
  if (threadIdx.x == 0) {
    new (shared.block) KeyBlock<Config>(p, index, rank);
    shared.keys_here.init(2);
    shared.other_keys_here.init(1);
    shared.other_ds_here.init(1);
    shared.sent_ds_taken.init(kWarpgroup / 32);
    constexpr int kReaders = 2 * Config::kCluster * kWarpgroup / 32;  // warps of value and key teams
    shared.q.barriers.init(kReaders);
    shared.dout.barriers.init(kReaders);
    ptx::fence_barrier_init();
  }
  ptx::sync_cluster();
  const auto& block = *reinterpret_cast<const KeyBlock<Config>*>(shared.block);
  if (!block.exists()) return;
  const int team = warpgroup_id(), key0 = threadIdx.x % kWarpgroup / 32 * 16;
  if (team == 0) {
    ptx::take_registers<Config::kSumRegisters>();
    ValueTeam<Config>{{{p, shared, block, team, key0}}}.run();
  } else if (team == 1) {
    ptx::take_registers<Config::kSumRegisters>();
    KeyTeam<Config>{{{p, shared, block, team, key0}}}.run();
  } else if (team == 2) {
    ptx::keep_registers<Config::kQueryRegisters>();
    QueryTeam<Config>{p, shared, block, rank}.run();
  } else {
    ptx::keep_registers<Config::kProducerRegisters>();
    const int role = __shfl_sync(~0u, warp_id() % 4, 0);
    if (role == 0 && lane_id() == 0 && block.has_rows()) load_block(p, shared, block, rank);
    if (role == 1 && p.plan.waits) Turns<Config>{p, block, rank}.await_all();
    if (role == 2 && p.plan.waits) Turns<Config>{p, block, rank}.release_all();
  }
  __syncwarp();
  ptx::sync_cluster();  // before a block's shared memory goes to another one
#endif
}

template <typename T, int kHeadDim, Features kFeatures>
void run_bwd_sm90(const BwdSm90Params& p, cudaStream_t stream) {
  using Config = BwdWideConfig<T, kHeadDim, kFeatures>;
  run_bwd_prepare<BwdPrepareConfig<T, kHeadDim>>(p, stream);
  launch_bwd_sm90<bwd_wide_kernel<Config>, Config, BwdWideShared<Config>>(launch_params<Config>(p), stream);
  run_bwd_finish<BwdFinishConfig<T, kHeadDim>>(p, stream);
}

}  // namespace flash::flash_attn
