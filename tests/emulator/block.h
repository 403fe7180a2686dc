// A block of threads on the CPU. Each CUDA thread is a fiber, and all fibers of a block take turns on one thread of the
// operating system. A fiber runs until it waits for others; who goes on then is drawn at random.
#pragma once

#include <ucontext.h>
#include <vector_types.h>

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {

struct Block;

// Something that runs in the background until somebody waits for it: a copy or a product.
using Work = std::function<void()>;

struct Thread {
  uint3 index;
  int number;  // within the block
  Block* block;
  bool started = false, done = false;
  const char* waits_for = nullptr;

  std::vector<Work> copies;              // cp.async that has no group yet
  std::deque<std::vector<Work>> groups;  // of cp.async
  std::vector<Work> stores;              // bulk stores
  std::deque<int64_t> products;          // where each group of wgmma ends, as a count of the warpgroup's products
  int64_t cluster_phase = -1;            // the phase of the cluster's barrier in which it has arrived last

  jmp_buf at;        // where it goes on
  ucontext_t start;  // where it starts

  int lane() const { return number % 32; }
  int warp() const { return number / 32; }
};

// Where several threads meet, each with something to give and a place for what it gets. The last to come does the work
// of all.
struct Meeting {
  int present = 0;
  int64_t generation = 0;
  void* given[128];
};

struct NamedBarrier {
  int arrived = 0;
  int64_t generation = 0;
};

struct Warpgroup {
  Meeting meeting;
  std::deque<Work> products;  // those that have not been computed
  int64_t started = 0, finished = 0;
};

// The blocks of one cluster, which run at the same time.
struct Cluster {
  std::vector<Block*> blocks;
  std::mutex mutex;  // guards the barrier
  NamedBarrier barrier;
  int threads = 0;  // of all blocks, that have not ended

  void end_phase_if_all_arrived();
  void forget(const Thread& thread);
};

struct Block {
  uint3 index;
  dim3 size, grid;
  int rank;  // in its cluster
  Cluster* cluster;
  char* shared = nullptr;  // dynamic shared memory

  std::vector<std::unique_ptr<Thread>> threads;
  int alive;
  std::vector<std::vector<Meeting>> meetings;  // of each warp, by the first lane that takes part
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  int64_t voted = -1;       // the generation of barrier 0 in which a thread voted in __syncthreads_or
  std::deque<Work> copies;  // bulk copies under way

  uint64_t random_state;
  std::vector<int> stands_still;  // for how many rounds each warp does
  int64_t progress = 0;           // counts what may let another thread go on
  jmp_buf scheduler;

  uint64_t random();
  // Whether something that runs in the background does so as late as it may.
  bool lazy() { return random() % 2 != 0; }
  void run(const std::function<void()>& kernel);
  std::string name() const;

 private:
  void let_all_threads_run();
  bool finish_a_copy();
  std::string who_waits() const;
};

extern thread_local Thread* current;

// Lets the other threads of the block run.
void yield();

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& message);

// Returns when condition() holds. `what` names it if that never happens.
template <typename Condition>
void wait_until(Condition&& condition, const char* what) {
  while (!condition()) {
    current->waits_for = what;
    yield();
  }
  current->waits_for = nullptr;
  ++current->block->progress;
}

// Returns when `count` threads have come; the last one has called all(what each has brought).
template <typename All>
void meet(Meeting& meeting, int place, int count, void* mine, All&& all, const char* what) {
  const int64_t generation = meeting.generation;
  meeting.given[place] = mine;
  ++current->block->progress;
  if (++meeting.present == count) {
    all(meeting.given);
    meeting.present = 0;
    ++meeting.generation;
    return;
  }
  wait_until([&] { return meeting.generation != generation; }, what);
}

// The same for the threads of a warp in `mask` that have not ended: all(what each has brought, who has come).
template <typename All>
void meet_warp(uint32_t mask, void* mine, All&& all, const char* what) {
  Thread& thread = *current;
  for (int lane = 0; lane < 32; ++lane) {
    const size_t number = thread.warp() * 32 + lane;
    if (number >= thread.block->threads.size() || thread.block->threads[number]->done) mask &= ~(1u << lane);
  }
  Meeting& meeting = thread.block->meetings[thread.warp()][__builtin_ctz(mask)];
  meet(meeting, thread.lane(), __builtin_popcount(mask), mine, [&](void** given) { all(given, mask); }, what);
}

// Addresses of shared memory in 32 bits: kSharedBase + the offset in a block's dynamic shared memory, around which the
// static one lies; and 1 + the block's rank in the upper eight, if it is another block's.
constexpr uint32_t kSharedBase = 1u << 22;
uint32_t shared_address(const void* pointer);
char* shared_pointer(uint32_t address);

struct Launch {
  dim3 grid, block;
  int cluster;  // blocks, along grid.x
};
// Runs a kernel to its end. std::runtime_error if it fails, or if nobody can go on.
void run(const Launch& launch, const std::function<void()>& kernel);

}  // namespace emulator

namespace flash {
extern thread_local char bytes[];  // dynamic shared memory, as tile/shared.cuh names it
}
