// The query team of bwd_sm90_wide, which computes dQ, and the two warps that acquire and release its dQ semaphores.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd_sm90/barriers.cuh"
#include "flash_attn/bwd_sm90/consumer.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/work.cuh"
#include "flash_attn/bwd_sm90_wide/shared.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

// Each warp has 16 of the 64 rows. dQ is computed in slices of 32 channels, each added to dq_accum right away, because
// the team has few registers.
template <typename Config>
struct QueryTeam {
  using Gradients = PackedFragment<typename Config::T, 16, Config::kBlockN>;
  static constexpr int kCols = 32, kSlices = Config::kHeadDim / 2 / kCols;
  using Slice = Fragment<16, kCols>;
  using Accum = DqAccum<Config::kHeadDim>;
  const BwdSm90Params& p;
  BwdWideShared<Config>& shared;
  const NBlockWork<Config>& work;
  const int cta_rank;   // of the thread block in the cluster
  uint32_t parity = 0;  // of the step

  __device__ int other() const { return cta_rank ^ 1; }
  __device__ static int thread() { return threadIdx.x % kWarpgroup; }
  __device__ static int row() { return thread() / 32 * 16 + lane_id() / 4; }

  // The first channel of the thread block's half of dQ, and the first that is loaded of the other thread block's K: 128
  // channels in whole panels that contain that half.
  __device__ static int first_col(int cta_rank) { return cta_rank * Config::kHeadDim / 2; }
  __device__ static int other_col0(int cta_rank) { return cta_rank * (Config::kHeadDim - 128); }

  // dS of this thread block's keys, as the left operand of dQ.
  __device__ Gradients take() const {
    Gradients ds;
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
      ptx::load_matrices(ds.values[0][step],
                         shared.scores.address(thread() / 32 * 16 + lane_id() % 16, 2 * step + lane_id() / 16));
    }
    return ds;
  }

  // Sends it to the same threads of the other thread block, once these have read what was sent last.
  __device__ void send(const Gradients& ds) const {
    shared.sent_ds_taken.wait(parity ^ 1);
    const uint32_t target = ptx::address_in(other(), &shared.other_ds[0][thread()]);
    const uint32_t here = ptx::address_in(other(), &shared.other_ds_here.state);
#pragma unroll
    for (int step = 0; step < Config::kBlockN / 16; ++step) {
      ptx::store_async_in(target + step * sizeof(shared.other_ds[0]), ds.values[0][step], here);
    }
  }

  // dS of the other thread block's keys.
  __device__ Gradients receive() const {
    if (thread() == 0) shared.other_ds_here.arrive_expect_tx(sizeof(shared.other_ds));
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

  // Adds a slice to dq_accum. `accum` is the address for the lane's first element; `rows` rows exist from there on.
  __device__ static void add(const Slice& dq, float* accum, int rows) {
#pragma unroll
    for (int r = 0; r < dq.kLaneRows; ++r) {
      if (8 * r >= rows) continue;
#pragma unroll
      for (int c = 0; c < dq.kLaneCols; c += 4) {
        ptx::add_global(accum + 8 * r * Config::kHeadDim + c / 4 * Accum::kGroupStep, dq(r, c), dq(r, c + 1),
                        dq(r, c + 2), dq(r, c + 3));
      }
    }
  }

  // Computes the slice of dQ from channel `col` on.
  __device__ void multiply(Slice& dq, Gradients& own_ds, Gradients& other_ds, int col) const {
    ptx::wgmma_fence();
    if constexpr (Config::kClusterSplit == ClusterSplit::kKeys) {
      start_gemm<Config::kBlockN>(dq, own_ds, along_rows(shared.k, col), false);
      start_gemm<Config::kBlockN>(dq, other_ds, along_rows(shared.other_k, col - other_col0(cta_rank)), true);
      wait_gemms<0>(dq, own_ds, other_ds);
    } else {
      start_gemm<Config::kBlockN>(dq, own_ds, along_rows(shared.k, col - first_col(cta_rank)), false);
      wait_gemms<0>(dq, own_ds);
    }
  }

  __device__ void step(int head, int m_block) {
    await(kGradientsBarrier);
    Gradients own_ds = take(), other_ds;
    release(kEmptyBarrier);
    if constexpr (Config::kClusterSplit == ClusterSplit::kKeys) {
      send(own_ds);
      other_ds = receive();
      parity ^= 1;
      fence(own_ds, other_ds);
    } else {
      fence(own_ds);
    }
    const Span& q = work.seq.q;
    const int first_row = m_block * Config::kBlockM + row();
    float* groups =
        Accum::address(p.plan.scratch.dq_accum, p.problem, q, head, first_row, first_col(cta_rank) / Accum::kGroup);
    float* accum = groups + 4 * (lane_id() % 4);
    if (p.plan.waits) ptx::sync_barrier<kSemaphoreThreads>(kDqAcquiredBarrier);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      Slice dq;
      multiply(dq, own_ds, other_ds, first_col(cta_rank) + slice * kCols);
      add(dq, accum + slice * (kCols / Accum::kGroup) * Accum::kGroupStep, q.length - first_row);
    }
    if (p.plan.waits) ptx::sync_barrier<kSemaphoreThreads>(kDqAddedBarrier);
  }

  __device__ void wait_keys() const {
    shared.keys_here.wait(0);
    if constexpr (Config::kClusterSplit == ClusterSplit::kKeys) wait_other_keys();
  }

  __device__ void wait_other_keys() const {
    shared.other_keys_here.wait(0);
    const int first = work.cluster_keys.first + other() * Config::kBlockN;
    if (has_ranges<Config::kFeatures>(p.problem)) {
      const DeadKeys dead = dead_keys(p, work, first);
      if (!dead.any(Config::kBlockN)) return;
      clear_rows(shared.other_k, dead);
    } else {
      const Interval live = work.mask.keys_seen_by_any({0, work.mask.seqlen_q - 1});
      if (live.covers({first, first + Config::kBlockN - 1})) return;
      clear_outside(shared.other_k, {live.first - first, live.last - first});
    }
    ptx::fence_async_shared();
    ptx::sync_barrier<kWarpgroup>(kQueryBarrier);
  }

  __device__ void prologue() const {
    release(kEmptyBarrier);
    if (work.has_rows()) wait_keys();
  }

  __device__ void mainloop() {
    work.for_each_m_block(p, [&](int head, int m_block, bool) { step(head, m_block); });
  }

  // In the picture above ValueTeam::run(). There is no epilogue: each step adds its dQ to dq_accum.
  __device__ void run() {
    prologue();
    mainloop();
  }
};

// Deterministic: clusters add to the same rows in the order of their keys. On behalf of the query team, one warp waits
// at the semaphores and another one releases them, so that the team itself does not wait for global memory.
template <typename Config>
struct DqSemaphores {
  const BwdSm90Params& p;
  const NBlockWork<Config>& work;
  const int cta_rank;  // of the thread block in the cluster

  // Counts the clusters that have added to the rows. Each thread block of a cluster has its own, as it adds its own
  // half of the channels.
  __device__ int* semaphore(int head, int m_block) const {
    return semaphore_at(p.plan.scratch, work.padded_index(p, head) + m_block * Config::kBlockM) + cta_rank;
  }

  __device__ void acquire_all() const {
    work.for_each_m_block(p, [&](int head, int m_block, bool) {
      const auto order = work.order(p, head, m_block);
      if (lane_id() == 0) ptx::wait_semaphore(semaphore(head, m_block), order.before);
      __syncwarp();
      ptx::sync_barrier<kSemaphoreThreads>(kDqAcquiredBarrier);
    });
  }

  __device__ void release_all() const {
    work.for_each_m_block(p, [&](int head, int m_block, bool) {
      ptx::sync_barrier<kSemaphoreThreads>(kDqAddedBarrier);
      if (lane_id() == 0) ptx::release_semaphore(semaphore(head, m_block));
      __syncwarp();
    });
  }
};

}  // namespace flash::flash_attn
