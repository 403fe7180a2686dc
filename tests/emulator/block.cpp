#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

namespace flash {
alignas(1024) thread_local char bytes[232448];
}

namespace emulator {

thread_local Thread* current = nullptr;

namespace {

using Clock = std::chrono::steady_clock;

thread_local const std::function<void()>* kernel_of_block;
std::atomic<int> running{0};  // blocks

std::atomic<bool> failed{false};
std::string failure;  // the first of a launch
std::mutex failure_mutex;

void note_failure(const std::string& message) {
  const std::lock_guard lock(failure_mutex);
  if (!failed) failure = message;
  failed = true;
}

// Stacks of fibers, which are kept for the next block on this OS thread.
class Stacks {
 public:
  static constexpr size_t kBytes = 512 << 10;

  ~Stacks() {
    for (char* each : all_) munmap(each, kBytes);
  }
  char* at(size_t number) {
    while (all_.size() <= number) {
      void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) std::abort();
      all_.push_back(static_cast<char*>(memory));
    }
    return all_[number];
  }

 private:
  std::vector<char*> all_;
};

void do_all(std::vector<Work>& work) {
  for (Work& each : work) each();
}

// The body of a fiber. Asynchronous copies of a thread that ends complete all the same.
void be_thread() {
  (*kernel_of_block)();
  Thread& thread = *current;
  for (auto& group : thread.groups) do_all(group);
  do_all(thread.copies);
  do_all(thread.stores);
  thread.done = true;
  thread.block->cluster->forget(thread);
  --thread.block->alive;
  ++thread.block->progress;
  _longjmp(thread.block->scheduler, 1);
}

}  // namespace

void Cluster::end_phase_if_all_arrived() {
  if (barrier.arrived == 0 || barrier.arrived != threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

// Removes a thread that has ended: the cluster barrier no longer waits for it.
void Cluster::forget(const Thread& thread) {
  const std::lock_guard lock(mutex);
  --threads;
  if (thread.cluster_phase == barrier.generation) --barrier.arrived;
  end_phase_if_all_arrived();
}

void yield() {
  Thread& thread = *current;
  if (_setjmp(thread.at) == 0) _longjmp(thread.block->scheduler, 1);
}

void fail(const std::string& message) {
  note_failure(message + ", in thread " + std::to_string(current->number) + " of " + current->block->name());
  while (true) yield();  // Block::run sees `failed`, and does not resume it
}

uint64_t Block::random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

bool Block::finish_a_copy() {
  if (copies.empty()) return false;
  const size_t which = random() % copies.size();
  const Work copy = std::exchange(copies[which], nullptr);
  copies.erase(copies.begin() + which);
  copy();
  ++progress;
  return true;
}

std::string Block::name() const {
  return "block " + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z);
}

std::string Block::who_waits() const {
  std::string text = "deadlock in " + name() + ":";
  for (const auto& thread : threads) {
    if (thread->done || (thread->number > 0 && threads[thread->number - 1]->waits_for == thread->waits_for)) continue;
    text += " thread " + std::to_string(thread->number) + " waits for " +
            (thread->waits_for ? thread->waits_for : "?") + ";";
  }
  return text;
}

// A round: resumes each thread once. Warps come in random order; the lanes of a warp follow one another, from a random
// one on, so that warp-wide instructions complete soon. Now and then a warp is not resumed for some rounds, while the
// others run as far ahead as they can; but not where no thread of the block can run: a warp that stands still counts as
// progress, and a deadlock would last for ever.
void Block::let_all_threads_run() {
  constexpr int kRarely = 16, kLongest = 64;
  const int count = threads.size(), warps = (count + 31) / 32;
  if (!stuck && random() % kRarely == 0) stands_still[random() % warps] = random() % kLongest;
  std::vector<int> order(warps);
  for (int warp = 0; warp < warps; ++warp) {
    order[warp] = warp;
    std::swap(order[warp], order[random() % (warp + 1)]);
  }
  for (int& rounds : stands_still) {
    if (rounds > 0) --rounds, ++progress;
  }
  const int first_lane = random() % 32;
  for (int i = 0; i < 32 * warps && !failed; ++i) {
    const int number = order[i / 32] * 32 + (first_lane + i) % 32;
    if (number >= count || threads[number]->done || stands_still[order[i / 32]] > 0) continue;
    Thread& thread = *threads[number];
    current = &thread;
    if (_setjmp(scheduler) != 0) continue;  // the thread has yielded or ended
    if (thread.started) _longjmp(thread.at, 1);
    thread.started = true;
    setcontext(&thread.start);
  }
}

void Block::run(const std::function<void()>& kernel) {
  thread_local Stacks stacks;
  const unsigned count = size.x * size.y * size.z;
  kernel_of_block = &kernel;
  shared = flash::bytes;
  std::memset(shared, 0xFF, sizeof(flash::bytes));  // NaN
  stands_still.assign((count + 31) / 32, 0);
  meetings.assign((count + 31) / 32, std::vector<Meeting>(32));
  warpgroups.resize((count + 127) / 128);
  for (unsigned i = 0; i < count; ++i) {
    auto thread = std::make_unique<Thread>();
    thread->index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    thread->number = i;
    thread->block = this;
    getcontext(&thread->start);
    thread->start.uc_stack = {.ss_sp = stacks.at(i), .ss_flags = 0, .ss_size = Stacks::kBytes};
    thread->start.uc_link = nullptr;
    makecontext(&thread->start, be_thread, 0);
    threads.push_back(std::move(thread));
  }
  alive = count;

  auto last_progress = Clock::now();
  while (alive > 0 && !failed) {
    const int64_t before = progress;
    const bool alone = running == 1;  // read before the round: another block might unblock this one and end meanwhile
    let_all_threads_run();
    if (random() % 4 == 0) finish_a_copy();
    stuck = progress == before && !finish_a_copy();
    if (!stuck) {
      last_progress = Clock::now();
      continue;
    }
    std::this_thread::yield();  // only another block can unblock this one
    const auto patience = std::chrono::milliseconds(alone ? 100 : 20000);
    if (Clock::now() - last_progress > patience) note_failure(who_waits());
  }
  while (!failed && finish_a_copy()) {
  }
  current = nullptr;
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - current->block->shared) + kSharedBase;
}

char* shared_pointer(uint32_t address) {
  const uint32_t rank = address >> 24;
  const Block& block = rank == 0 ? *current->block : *current->block->cluster->blocks[rank - 1];
  return block.shared + (int64_t{address & 0xFFFFFF} - kSharedBase);
}

namespace {

std::atomic<uint64_t> seed_of_test{0}, launches{0};  // launches since the test began

uint64_t seed_of_launch() {
  static const char* given = std::getenv("EMULATOR_SEED");
  return ((given ? std::atoll(given) : 1) * 1000003 + seed_of_test) * 1000003 + ++launches;
}

// Runs the blocks of a cluster, each on an OS thread of its own.
void run_cluster(const Launch& launch, int64_t number, uint64_t seed, const std::function<void()>& kernel) {
  Cluster cluster;
  cluster.threads = launch.cluster * launch.block.x * launch.block.y * launch.block.z;
  std::vector<Block> blocks(launch.cluster);
  for (int rank = 0; rank < launch.cluster; ++rank) {
    Block& block = blocks[rank];
    const int64_t place = number * launch.cluster + rank, rows = place / launch.grid.x;
    block.index = {static_cast<unsigned>(place % launch.grid.x), static_cast<unsigned>(rows % launch.grid.y),
                   static_cast<unsigned>(rows / launch.grid.y)};
    block.size = launch.block, block.grid = launch.grid;
    block.rank = rank, block.cluster = &cluster;
    block.random_state = (seed * 0x9E3779B97F4A7C15u + place) * 0xD1342543DE82EF95u | 1;
    cluster.blocks.push_back(&block);
  }
  std::atomic<int> started{0}, ended{0};
  const auto all_come = [&](std::atomic<int>& count) {
    ++count;
    while (count < launch.cluster) std::this_thread::yield();
  };
  const auto run_block = [&](Block& block) {
    ++running;
    all_come(started);
    block.run(kernel);
    --running;
    all_come(ended);  // other blocks may access its shared memory until then
  };
  std::vector<std::jthread> others;
  for (int rank = 1; rank < launch.cluster; ++rank) others.emplace_back([&, rank] { run_block(blocks[rank]); });
  run_block(blocks[0]);
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& kernel) {
  static std::mutex one_launch_at_a_time;
  const std::lock_guard lock(one_launch_at_a_time);
  const int64_t clusters = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z / launch.cluster;
  const uint64_t seed = seed_of_launch();
  failed = false;
  std::atomic<int64_t> next{0};
  {
    std::vector<std::jthread> teams;
    for (int64_t i = 0; i < std::min<int64_t>(clusters, std::thread::hardware_concurrency()); ++i) {
      teams.emplace_back([&] {
        for (int64_t number; !failed && (number = next++) < clusters;) run_cluster(launch, number, seed, kernel);
      });
    }
  }
  if (failed) throw std::runtime_error("emulator: " + failure);
}

}  // namespace emulator

// Makes the schedules of all launches from now on depend on nothing but this seed and EMULATOR_SEED.
extern "C" void begin_schedules(uint64_t seed) {
  emulator::seed_of_test = seed;
  emulator::launches = 0;
}
