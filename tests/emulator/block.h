// A block of threads on the CPU: each CUDA thread is a fiber, and all fibers of a block take turns on one thread of the
// operating system. A fiber runs until it waits for others, so that the order in which a block's threads reach a point
// between two waits is the scheduler's choice: it is drawn at random, from EMULATOR_SEED.
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
  bool done = false;
  const char* waits_for = nullptr;

  std::vector<Work> copies;              // cp.async, not yet in a group
  std::deque<std::vector<Work>> groups;  // of cp.async
  std::vector<Work> stores;              // bulk stores, whether in a group or not
  int64_t cluster_phase = 0;             // of the cluster's barrier, in which it has arrived last
  std::deque<int64_t> products;          // the end of each group of wgmma, as a count of the warpgroup's products

  jmp_buf at;
  ucontext_t start;
  int lane() const { return number % 32; }
  int warp() const { return number / 32; }
};

// Where several threads meet, each with something to give and a place for what it gets; the last one to come does the
// work of all.
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
  int threads = 0;  // of all blocks
};

struct Block {
  uint3 index;
  dim3 size, grid;
  int rank;  // in its cluster
  Cluster* cluster;
  char* shared;
  int shared_bytes;

  std::vector<std::unique_ptr<Thread>> threads;
  int alive;
  std::vector<std::vector<Meeting>> meetings;  // of each warp, by the first lane that takes part
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  int any[2] = {0, 0};  // of __syncthreads_or
  std::deque<Work> copies;  // bulk copies under way

  uint64_t random_state;
  int64_t progress = 0;
  jmp_buf scheduler;

  uint64_t random();
  bool lazy() { return random() % 2 != 0; }
  void run(const std::function<void()>& kernel);
  bool finish_a_copy();
};

extern thread_local Thread* current;

void yield();

// Lets the other threads go on until condition() holds.
template <typename Condition>
void wait_until(Condition&& condition, const char* what) {
  while (!condition()) {
    current->waits_for = what;
    yield();
  }
  current->waits_for = nullptr;
  ++current->block->progress;
}

// The last of `count` threads that bring their `mine` calls all(given).
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

// Threads of a warp meet; only those that have not ended count.
template <typename All>
void meet_warp(uint32_t mask, void* mine, All&& all, const char* what) {
  Thread& thread = *current;
  uint32_t alive = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const size_t number = thread.warp() * 32 + lane;
    if (number < thread.block->threads.size() && !thread.block->threads[number]->done) alive |= 1u << lane;
  }
  mask &= alive;
  Meeting& meeting = thread.block->meetings[thread.warp()][__builtin_ctz(mask)];
  meet(meeting, thread.lane(), __builtin_popcount(mask), mine, [&](void** given) { all(given, mask); }, what);
}

[[noreturn]] void fail(const std::string& message);

// Addresses of shared memory in 32 bits: the offset from the start of a block's dynamic shared memory, and 1 + the rank
// of the block if it is another one.
constexpr uint32_t kSharedBase = 1u << 22;  // static shared memory may lie before the dynamic one
uint32_t shared_address(const void* pointer);
char* shared_pointer(uint32_t address);
Block& block_of(uint32_t address);

// A kernel's launch.
struct Launch {
  dim3 grid, block;
  int shared_bytes, cluster;
};
void run(const Launch& launch, const std::function<void()>& kernel);

}  // namespace emulator

namespace flash {
extern thread_local char bytes[];  // dynamic shared memory, as tile/shared.cuh names it
}
