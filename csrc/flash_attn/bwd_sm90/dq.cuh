// How dQ leaves bwd_sm90: for each half of it, a dQ warp has TMA copy boxes from shared to global memory. Where
// thread blocks wait for one another, the warp first waits at the dQ semaphore of the rows.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd_sm90/barriers.cuh"
#include "flash_attn/bwd_sm90/policies.h"
#include "flash_attn/bwd_sm90/shared.cuh"
#include "flash_attn/bwd_sm90/work.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// When an n_block may touch dQ of an m_block. Each half of dQ has a semaphore of its own, which counts the n_blocks
// that have added or stored.
template <typename Config>
struct DqSemaphore {
  typename NBlockWork<Config>::Order order;
  int* semaphores;
  int awaited;  // how many n_blocks must have done so before

  __device__ DqSemaphore(const BwdSm90Params& p, const NBlockWork<Config>& work, int head, int m_block)
      : order(work.order(p, head, m_block)),
        semaphores(semaphore_at(p.plan.scratch, work.padded_index(p, head) + m_block * Config::kBlockM)) {
    // With rounds_dq, the first n_block stores, and so comes before all others, and the last one rounds, and so comes
    // after them. Those between add in any order, unless the plan is in order.
    awaited = order.before > 0 && !order.last && !p.plan.in_order ? 1 : order.before;
  }

  __device__ void wait(int half) const {
    if (awaited == 0) return;
    ptx::wait_semaphore(semaphores + half, awaited);
    ptx::fence_async_global();
  }
};

// Run by warp 3 of the third warpgroup, with SemaphoreWaiter::kOwnWarp: waits at the semaphores for both dQ warps,
// ahead of them, and tells them through semaphore_ring. The dQ warps themselves wait until the boxes that they added
// have been written; waiting at a semaphore after that would take longer than the products of 64 rows.
template <typename Config>
__device__ void wait_at_semaphores(const BwdSm90Params& p, BwdSm90Shared<Config>& shared) {
  RingCursor<2> at;
  for_each_work_tile(p, shared, [&](const NBlockWork<Config>& work) {
    if (!p.plan.waits) return;
    work.for_each_m_block(p, [&](int head, int m_block, bool) {
      const DqSemaphore<Config> semaphore(p, work, head, m_block);
      shared.semaphore_ring.wait_empty(at);
      if (lane_id() < Config::kConsumers) semaphore.wait(lane_id());
      __syncwarp();
      if (lane_id() == 0) shared.semaphore_ring.full[at.stage].arrive();
      at.advance();
    });
  });
}

// The dQ warp of a warpgroup, for one n_block: takes its half of dQ to global memory.
template <typename Config>
struct DqWarp {
  const BwdSm90Launch& p;
  BwdSm90Shared<Config>& shared;
  const NBlockWork<Config>& work;
  const int half;
  RingCursor<2>& ring_at;  // of semaphore_ring
  uint32_t& accum_parity;
  int* added = nullptr;  // the semaphore of the last box, to be released when TMA has written that box

  __device__ int group() const { return Config::kDqHalf == DqHalf::kChannels ? half * kDqBoxCols / kDqGroup : 0; }
  __device__ int row(int m_block) const {
    const int first = m_block * Config::kBlockM + (Config::kDqHalf == DqHalf::kRows ? half * kDqBoxRows : 0);
    return static_cast<int>(work.seq.q.first) + first;
  }
  __device__ int entry() const { return static_cast<int>(work.seq.q.batch); }
  __device__ int accum_head(int head) const { return entry() * p.problem.heads + head; }

  // Lets the warpgroup fill the box, and tells it in which form.
  __device__ void release_box(DqFate fate) const {
    if (Config::kMeeting != Meeting::kFree && lane_id() == 0) shared.dq_fate[half] = fate;
    __syncwarp();
    ptx::arrive_at_barrier<kDqThreads>(kDqEmptyBarrier + half);
  }

  // Waits until the last box has been written, and releases its semaphore. The fence orders the writes of TMA (async
  // proxy) before the release. One lane calls it.
  __device__ void release_added() const {
    if (added == nullptr) return;
    ptx::wait_stores();
    ptx::fence_async_global();
    ptx::release_semaphore(added);
  }

  // Copies dq_accum to the box. One lane calls it.
  __device__ void load_accum(int head, int m_block) const {
    ptx::SharedBarrier& here = shared.accum_here[half];
    here.arrive_expect_tx(sizeof(shared.dq[half]));
    ptx::copy_box_async(ptx::shared_address(&shared.dq[half]), p.dq_accum_map, 0, row(m_block), group(),
                        accum_head(head), here);
  }

  // Copies the box to dq_accum or to dQ, and waits until the box has been read and may be filled again. One lane calls
  // it. The fence makes visible to TMA what the warpgroup has stored. Beside products that read shared memory it takes
  // some 300 cycles: here the warpgroup goes on meanwhile, and waits only if it would fill the box before it is free.
  __device__ void store_half(DqFate fate, int head, int m_block) const {
    const uint32_t box = ptx::shared_address(&shared.dq[half]);
    ptx::fence_async_shared();
    if (fate == DqFate::kAdd) {
      ptx::add_box_async(p.dq_accum_map, box, 0, row(m_block), group(), accum_head(head));
    } else if (fate == DqFate::kStore) {
      ptx::store_box_async(p.dq_accum_map, box, 0, row(m_block), group(), accum_head(head));
    } else {
      ptx::store_box_async(p.dq_map, box, group() * kDqGroup, head, row(m_block), entry());
    }
    ptx::commit_stores();
    ptx::wait_stores_read();
  }

  // Decides the fate of the box, waits at the semaphore, and lets the warpgroup fill the box: as early as the fate
  // allows, which is before the wait unless dq_accum must be loaded into the box.
  __device__ DqFate acquire_dq(int head, int m_block) {
    const DqSemaphore<Config> semaphore(p, work, head, m_block);
    DqFate fate = DqFate::kAdd;
    if (p.plan.rounds_dq && semaphore.order.before == 0) fate = semaphore.order.last ? DqFate::kRound : DqFate::kStore;
    if (p.plan.rounds_dq && semaphore.order.before > 0 && semaphore.order.last) fate = DqFate::kRoundWithSum;
    if (fate != DqFate::kRoundWithSum) release_box(fate);
    if (lane_id() == 0) release_added();
    added = semaphore.order.last ? nullptr : semaphore.semaphores + half;
    if (lane_id() == 0) {  // alone: a late lane would misread the ring's parity (visits_rows in bwd_sm90/load.cuh)
      if constexpr (Config::kSemaphoreWaiter == SemaphoreWaiter::kOwnWarp) {
        shared.semaphore_ring.wait_full(ring_at);
        shared.semaphore_ring.release(ring_at);
        ptx::fence_async_global();
      } else {
        semaphore.wait(half);
      }
      if (fate == DqFate::kRoundWithSum) load_accum(head, m_block);
    }
    ring_at.advance();
    __syncwarp();
    if (fate == DqFate::kRoundWithSum) {
      shared.accum_here[half].wait(accum_parity);
      accum_parity ^= 1;
      release_box(fate);
    }
    return fate;
  }

  __device__ void take_half(int head, int m_block) {
    DqFate fate = DqFate::kAdd;
    if (Config::kMeeting != Meeting::kFree && p.plan.waits) {
      fate = acquire_dq(head, m_block);
    } else {
      release_box(fate);
    }
    ptx::sync_barrier<kDqThreads>(kDqFullBarrier + half);
    if (lane_id() == 0) store_half(fate, head, m_block);
    __syncwarp();
  }

  __device__ void run() {
    work.for_each_m_block(p, [&](int head, int m_block, bool) { take_half(head, m_block); });
    if (lane_id() == 0) release_added();
  }
};

// A dQ warp's loop over all n_blocks.
template <typename Config>
__device__ void take_halves(const BwdSm90Launch& p, BwdSm90Shared<Config>& shared, int half) {
  RingCursor<2> ring_at;
  uint32_t accum_parity = 0;
  for_each_work_tile(p, shared, [&](const NBlockWork<Config>& work) {
    DqWarp<Config>{p, shared, work, half, ring_at, accum_parity}.run();
  });
}

}  // namespace flash::flash_attn
