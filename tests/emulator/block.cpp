#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace flash {
alignas(1024) thread_local char bytes[232448];
}

namespace emulator {

thread_local Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = 512 << 10;

std::mutex failure_mutex;
std::string failure;           // the first of a launch
std::atomic<bool> failed{false};

thread_local const std::function<void()>* kernel_of_block;

// Stacks stay for the next block of this thread of the operating system.
char* stack(size_t number) {
  thread_local std::vector<char*> stacks;
  while (stacks.size() <= number) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stacks.push_back(static_cast<char*>(memory));
  }
  return stacks[number];
}

void start_thread() {
  (*kernel_of_block)();
  Thread& thread = *current;
  for (auto& group : thread.groups) {
    for (auto& copy : group) copy();
  }
  for (auto& copy : thread.copies) copy();
  for (auto& store : thread.stores) store();
  thread.done = true;
  --thread.block->alive;
  ++thread.block->progress;
  _longjmp(thread.block->scheduler, 1);
}

}  // namespace

void yield() {
  Thread& thread = *current;
  if (_setjmp(thread.at) == 0) _longjmp(thread.block->scheduler, 1);
}

void fail(const std::string& message) {
  {
    const std::lock_guard lock(failure_mutex);
    if (!failed.exchange(true)) failure = message;
  }
  while (true) yield();  // the scheduler gives the block up
}

uint64_t Block::random() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}

bool Block::finish_a_copy() {
  if (copies.empty()) return false;
  const size_t which = random() % copies.size();
  const Work work = std::move(copies[which]);
  copies.erase(copies.begin() + which);
  work();
  ++progress;
  return true;
}

void Block::run(const std::function<void()>& kernel) {
  const int count = size.x * size.y * size.z;
  kernel_of_block = &kernel;
  for (int i = 0; i < count; ++i) {
    auto thread = std::make_unique<Thread>();
    thread->index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    thread->number = i;
    thread->block = this;
    getcontext(&thread->start);
    thread->start.uc_stack = {.ss_sp = stack(i), .ss_flags = 0, .ss_size = kStackBytes};
    thread->start.uc_link = nullptr;
    makecontext(&thread->start, start_thread, 0);
    threads.push_back(std::move(thread));
  }
  alive = count;
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = i;
  std::vector<bool> started(count, false);
  auto since = std::chrono::steady_clock::now();
  while (alive > 0 && !failed) {
    const int64_t before = progress;
    const int first_warp = random() % ((count + 31) / 32);  // lanes of a warp follow one another, which is faster
    for (int i = 0; i < count && !failed; ++i) {
      Thread& thread = *threads[(i + 32 * first_warp) % count];
      if (thread.done) continue;
      current = &thread;
      if (_setjmp(scheduler) == 0) {
        if (started[thread.number]) _longjmp(thread.at, 1);
        started[thread.number] = true;
        setcontext(&thread.start);
      }
    }
    if (random() % 4 == 0) finish_a_copy();
    if (progress != before || finish_a_copy()) {
      since = std::chrono::steady_clock::now();
      continue;
    }
    std::this_thread::yield();  // other blocks have to go on
    if (std::chrono::steady_clock::now() - since > std::chrono::seconds(20)) {
      std::string text = "deadlock in block " + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
                         std::to_string(index.z) + ":";
      for (const auto& thread : threads) {
        if (!thread->done && thread->lane() == 0) {
          text += " thread " + std::to_string(thread->number) + " waits for " +
                  (thread->waits_for ? thread->waits_for : "nothing") + ";";
        }
      }
      const std::lock_guard lock(failure_mutex);
      if (!failed.exchange(true)) failure = text;
    }
  }
  while (!failed && finish_a_copy()) {
  }
  current = nullptr;
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - current->block->shared) + kSharedBase;
}

Block& block_of(uint32_t address) {
  const uint32_t rank = address >> 24;
  return rank == 0 ? *current->block : *current->block->cluster->blocks[rank - 1];
}

char* shared_pointer(uint32_t address) {
  return block_of(address).shared + (static_cast<int64_t>(address & 0xFFFFFF) - kSharedBase);
}

void run(const Launch& launch, const std::function<void()>& kernel) {
  static const uint64_t seed = std::getenv("EMULATOR_SEED") ? std::atoll(std::getenv("EMULATOR_SEED")) : 1;
  static std::atomic<uint64_t> launches{0};
  const uint64_t launch_seed = (seed + 1000 * ++launches) * 0x9E3779B97F4A7C15u | 1;
  const int64_t blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z, clusters = blocks / launch.cluster;
  const int count = launch.block.x * launch.block.y * launch.block.z;
  failed = false;
  std::atomic<int64_t> next{0};
  // One thread of the operating system for each block that runs at a time.
  const int teams = std::max<int64_t>(1, std::min<int64_t>(clusters, std::thread::hardware_concurrency()));
  struct Team {
    Cluster cluster;
    std::vector<std::thread> threads;
  };
  std::vector<Team> all(teams);
  for (Team& team : all) {
    team.threads.emplace_back([&] {
      while (!failed) {
        const int64_t taken = next++;
        if (taken >= clusters) return;
        Cluster& cluster = team.cluster;
        cluster.barrier = {};
        cluster.threads = launch.cluster * count;
        std::vector<Block> blocks_of_cluster(launch.cluster);
        cluster.blocks.clear();
        for (int rank = 0; rank < launch.cluster; ++rank) {
          Block& block = blocks_of_cluster[rank];
          const int64_t number = taken * launch.cluster + rank;
          block.index = {static_cast<unsigned>(number % launch.grid.x),
                         static_cast<unsigned>(number / launch.grid.x % launch.grid.y),
                         static_cast<unsigned>(number / (int64_t{launch.grid.x} * launch.grid.y))};
          block.size = launch.block, block.grid = launch.grid;
          block.rank = rank, block.cluster = &cluster;
          block.shared = nullptr, block.shared_bytes = launch.shared_bytes;
          block.random_state = (launch_seed + number * 2654435761u) * 0x9E3779B97F4A7C15u | 1;
          block.meetings.assign((count + 31) / 32, std::vector<Meeting>(32));
          block.warpgroups.resize((count + 127) / 128);
          cluster.blocks.push_back(&block);
        }
        std::atomic<int> ready{0}, ended{0};
        const auto run_block = [&](Block& block) {
          block.shared = flash::bytes;
          std::memset(flash::bytes, 0xFF, sizeof(flash::bytes));
          ++ready;
          while (ready < launch.cluster) std::this_thread::yield();
          block.run(kernel);
          ++ended;
          while (ended < launch.cluster) std::this_thread::yield();  // others may reach into its shared memory
        };
        std::vector<std::thread> others;
        for (int rank = 1; rank < launch.cluster; ++rank) {
          others.emplace_back([&, rank] { run_block(blocks_of_cluster[rank]); });
        }
        run_block(blocks_of_cluster[0]);
        for (std::thread& other : others) other.join();
      }
    });
  }
  for (Team& team : all) {
    for (std::thread& thread : team.threads) thread.join();
  }
  if (failed) throw std::runtime_error("emulator: " + failure);
}

}  // namespace emulator
