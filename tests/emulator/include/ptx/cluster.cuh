#pragma once

#include <cuda.h>

#include <mutex>

#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/tma.cuh"

namespace flash::ptx {

inline int cluster_rank() { return emulator::current->block->rank; }

// The cluster barrier expects all threads of its blocks that have not ended. A thread arrives, then waits for the end
// of the phase in which it has arrived.
inline void arrive_at_cluster() {
  emulator::Cluster& cluster = *emulator::current->block->cluster;
  const std::lock_guard lock(cluster.mutex);
  emulator::current->cluster_phase = cluster.barrier.generation;
  ++emulator::current->block->progress;
  ++cluster.barrier.arrived;
  cluster.end_phase_if_all_arrived();
}
inline void wait_for_cluster() {
  emulator::Cluster& cluster = *emulator::current->block->cluster;
  emulator::wait_until(
      [&] {
        const std::lock_guard lock(cluster.mutex);
        return cluster.barrier.generation != emulator::current->cluster_phase;
      },
      "the cluster");
}
inline void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

inline uint32_t address_in(int rank, const void* pointer) {
  return shared_address(pointer) | static_cast<uint32_t>(rank + 1) << 24;
}

inline int load_from(int rank, const int& place) {
  return std::atomic_ref<int>(*reinterpret_cast<int*>(emulator::shared_pointer(address_in(rank, &place)))).load();
}

template <typename T>
void store_later_in(uint32_t address, const T& x, uint32_t barrier) {
  char* to = emulator::shared_pointer(address);
  auto* counted = reinterpret_cast<SharedBarrier*>(emulator::shared_pointer(barrier));
  in_background([=] {
    std::memcpy(to, &x, sizeof(x));
    counted->complete(sizeof(x));
  });
}

inline void store_async_in(uint32_t address, float4 x, uint32_t barrier) { store_later_in(address, x, barrier); }
inline void store_async_in(uint32_t address, float2 x, uint32_t barrier) { store_later_in(address, x, barrier); }
inline void store_async_in(uint32_t address, const uint32_t (&x)[4], uint32_t barrier) {
  store_later_in(address, uint4{x[0], x[1], x[2], x[3]}, barrier);
}

inline void arrive_in(int rank, const SharedBarrier& barrier) {
  reinterpret_cast<SharedBarrier*>(emulator::shared_pointer(address_in(rank, &barrier.state)))->arrive();
}

inline void wait_for_stores(const SharedBarrier& barrier, uint32_t parity) { barrier.wait(parity); }

inline void copy_box_to_blocks(uint32_t shared, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                               SharedBarrier& barrier, uint16_t blocks) {
  copy_box(shared, map, x0, x1, x2, x3, barrier, blocks);
}

}  // namespace flash::ptx
