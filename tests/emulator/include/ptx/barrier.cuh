#pragma once

#include <atomic>

#include "ptx/copy.cuh"

namespace flash::ptx {

inline void come_to(int id, int threads, bool wait) {
  emulator::Block& block = *emulator::current->block;
  emulator::NamedBarrier& barrier = block.barriers[id];
  if (id < 1 || id > 15 || threads % 32 != 0) emulator::fail("bar.sync of barrier " + std::to_string(id));
  const int64_t generation = barrier.generation;
  ++block.progress;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else if (wait) {
    emulator::wait_until([&] { return barrier.generation != generation; }, "a named barrier");
  }
}

template <int kThreads>
void sync_barrier(int id) {
  come_to(id, kThreads, true);
}
inline void sync_barrier(int id, int threads) { come_to(id, threads, true); }

template <int kThreads>
void arrive_at_barrier(int id) {
  come_to(id, kThreads, false);
}

// The state of an mbarrier: how many threads arrive in each phase, how many have yet to arrive in this one, the parity
// of the phase, and how many bytes have yet to arrive (negative if they came before they were announced).
struct BarrierState {
  uint64_t count : 12, pending : 12, parity : 1;
  int64_t bytes : 39;
};

struct SharedBarrier {
  uint64_t state;

  template <typename Change>
  void change(Change&& change) {
    std::atomic_ref<uint64_t> shared(state);
    uint64_t before = shared.load(), after;
    do {
      auto now = std::bit_cast<BarrierState>(before);
      change(now);
      if (now.pending == 0 && now.bytes == 0) now.pending = now.count, now.parity = now.parity ^ 1;
      after = std::bit_cast<uint64_t>(now);
    } while (!shared.compare_exchange_weak(before, after));
    ++emulator::current->block->progress;
  }

  void init(int count) {
    const uint64_t counted = count;
    std::atomic_ref<uint64_t>(state).store(
        std::bit_cast<uint64_t>(BarrierState{.count = counted, .pending = counted, .parity = 0, .bytes = 0}));
  }
  void arrive() {
    change([](BarrierState& now) { now.pending = now.pending - 1; });
  }
  void expect_copies() { finish_copies(); }
  void arrive_expect_tx(int bytes) {
    change([&](BarrierState& now) { now.pending = now.pending - 1, now.bytes = now.bytes + bytes; });
  }
  void complete(int bytes) {
    change([&](BarrierState& now) { now.bytes = now.bytes - bytes; });
  }
  bool parity_is(uint32_t parity) const {
    return std::bit_cast<BarrierState>(std::atomic_ref<uint64_t>(const_cast<uint64_t&>(state)).load()).parity == parity;
  }
  // The phase with this parity has ended if the current one has the other parity. The yields make all lanes of a warp
  // that come together look before any of them continues, as the instruction does. Otherwise the first lane could end
  // another phase, and the others would find the wrong parity.
  bool has_ended(uint32_t parity) const {
    emulator::current->waits_for = "a barrier in shared memory";
    emulator::yield();
    if (parity_is(parity)) return false;
    ++emulator::current->block->progress;
    emulator::yield();
    return true;
  }
  void wait(uint32_t parity) const {
    while (!has_ended(parity)) {
    }
    emulator::current->waits_for = nullptr;
  }
};

inline void fence_barrier_init() {}

}  // namespace flash::ptx
