// A thread block on the CPU. Each CUDA thread is a fiber, and all fibers of a block take turns on one thread of the
// operating system (OS thread). A fiber runs until it waits for others; which one runs next is drawn at random.
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

// An asynchronous copy or product that has not been carried out yet.
using Work = std::function<void()>;

struct Thread {
  uint3 index;
  int number;  // within the block
  Block* block;
  bool started = false, done = false;
  const char* waits_for = nullptr;

  std::vector<Work> copies;              // cp.async that have not been committed to a group
  std::deque<std::vector<Work>> groups;  // committed groups of cp.async
  std::vector<Work> stores;              // bulk stores
  std::deque<int64_t> products;          // for each group of wgmma, how many products of the warpgroup end it
  int64_t cluster_phase = -1;            // the phase of the cluster barrier at which it arrived last

  jmp_buf at;        // where it resumes
  ucontext_t start;  // where it starts

  int lane() const { return number % 32; }
  int warp() const { return number / 32; }
};

// Where several threads meet for an instruction that they execute together: each brings its operands, and the last to
// come carries out the instruction for all.
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
  std::deque<Work> products;  // wgmma that have been started but not computed, oldest first
  int64_t started = 0, finished = 0;
};

// The blocks of one cluster, which run at the same time.
struct Cluster {
  std::vector<Block*> blocks;
  std::mutex mutex;  // guards the barrier
  NamedBarrier barrier;
  int threads = 0;  // threads of all its blocks that have not ended

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
  std::vector<std::vector<Meeting>> meetings;  // of each warp, by the lowest lane that takes part
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  int64_t voted = -1;       // the generation of barrier 0 in which a thread last voted yes in __syncthreads_or
  std::deque<Work> copies;  // bulk copies that have not been carried out

  uint64_t random_state;
  std::vector<int> stands_still;  // for how many more rounds each warp is not scheduled
  int64_t progress = 0;           // counts events that may let a waiting thread continue; none for long: a deadlock
  bool stuck = false;             // the last round has brought none
  jmp_buf scheduler;

  uint64_t random();
  // Draws whether an asynchronous operation is carried out as late as possible, or else at once.
  bool lazy() { return random() % 2 != 0; }
  void run(const std::function<void()>& kernel);
  std::string name() const;

 private:
  void let_all_threads_run();
  bool finish_a_copy();
  std::string who_waits() const;
};

extern thread_local Thread* current;

// Suspends this thread, so that the others of its block run.
void yield();

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& message);

// Waits until condition() holds. `what` names it in the report of a deadlock.
template <typename Condition>
void wait_until(Condition&& condition, const char* what) {
  while (!condition()) {
    current->waits_for = what;
    yield();
  }
  current->waits_for = nullptr;
  ++current->block->progress;
}

// Waits until `count` threads have come, each with `mine`; the last one calls all(what each has brought) for all of
// them.
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

// The same for those threads of a warp in `mask` that have not ended: all(what each has brought, the mask of these).
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

// 32-bit addresses of shared memory: kSharedBase + the offset from the block's dynamic shared memory in the lower 24
// bits. Static shared memory lies anywhere around that, so the offset may be negative. The upper 8 bits are 0 for the
// own block, or 1 + the rank of a block of the cluster.
constexpr uint32_t kSharedBase = 1u << 22;
uint32_t shared_address(const void* pointer);
char* shared_pointer(uint32_t address);

struct Launch {
  dim3 grid, block;
  int cluster;  // blocks, along grid.x
};
// Runs a kernel to its end. Throws std::runtime_error if it fails or deadlocks.
void run(const Launch& launch, const std::function<void()>& kernel);

}  // namespace emulator

namespace flash {
extern thread_local char bytes[];  // dynamic shared memory, as tile/shared.cuh names it
}
