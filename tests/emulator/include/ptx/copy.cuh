#pragma once

#include <cstdint>
#include <cstring>

namespace flash::ptx {

using emulator::shared_address;

inline void copy_later(uint32_t shared, const void* global, bool valid, int bytes) {
  char* to = emulator::shared_pointer(shared);
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || (valid && reinterpret_cast<uintptr_t>(global) % bytes != 0)) {
    emulator::fail("cp.async between addresses that are not aligned");
  }
  const auto copy = [=] {
    if (valid) {
      std::memcpy(to, global, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  };
  if (emulator::current->block->lazy()) {
    emulator::current->copies.push_back(copy);
  } else {
    copy();
  }
}

inline void copy_async(uint32_t shared, const void* global, bool valid) { copy_later(shared, global, valid, 16); }
inline void copy_word_async(uint32_t shared, const void* global, bool valid) { copy_later(shared, global, valid, 4); }
inline void copy_half_async(uint32_t shared, const void* global, bool valid) { copy_later(shared, global, valid, 8); }
inline uint64_t cache_policy(bool) { return 0; }
inline void copy_async(uint32_t shared, const void* global, bool valid, uint64_t) {
  copy_later(shared, global, valid, 16);
}
inline int load_early(const int* global, bool valid, int other) { return valid ? *global : other; }
inline void prefetch(const void*) {}
inline void prefetch_bulk(const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) emulator::fail("prefetch that is not aligned");
}

inline void commit_copies() {
  emulator::Thread& thread = *emulator::current;
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

// All copies that the thread has started.
inline void finish_copies() {
  commit_copies();
  auto& groups = emulator::current->groups;
  for (; !groups.empty(); groups.pop_front()) {
    for (auto& copy : groups.front()) copy();
  }
}

inline void wait_all_copies() { finish_copies(); }

template <int kPending>
void wait_copies() {
  auto& groups = emulator::current->groups;
  for (; groups.size() > kPending; groups.pop_front()) {
    for (auto& copy : groups.front()) copy();
  }
}

inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  std::memcpy(&word, emulator::shared_pointer(shared), 4);
  return word;
}
inline void store_word(uint32_t shared, uint32_t word) { std::memcpy(emulator::shared_pointer(shared), &word, 4); }

// Moves the four matrices of ldmatrix or stmatrix between shared memory and the registers of a warp.
inline void move_matrices(uint32_t (&r)[4], uint32_t address, bool transposed, bool store) {
  struct Mine {
    uint32_t* r;
    uint32_t address;
  } mine{r, address};
  emulator::meet_warp(
      ~0u, &mine,
      [&](void** given, uint32_t mask) {
        if (mask != ~0u) emulator::fail("ldmatrix or stmatrix in a part of a warp");
        for (int i = 0; i < 4; ++i) {
          for (int row = 0; row < 8; ++row) {
            char* line = emulator::shared_pointer(static_cast<Mine*>(given[8 * i + row])->address);
            if (reinterpret_cast<uintptr_t>(line) % 16 != 0)
              emulator::fail("ldmatrix at an address that is not aligned");
            for (int col = 0; col < 8; ++col) {
              const int lane_row = transposed ? col : row, lane_col = transposed ? row : col;
              const int lane = lane_row * 4 + lane_col / 2;
              char* element = reinterpret_cast<char*>(static_cast<Mine*>(given[lane])->r + i) + lane_col % 2 * 2;
              std::memcpy(store ? line + 2 * col : element, store ? element : line + 2 * col, 2);
            }
          }
        }
      },
      "ldmatrix or stmatrix");
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address) { move_matrices(r, address, false, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) { move_matrices(r, address, true, false); }
inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  uint32_t copy[4] = {r[0], r[1], r[2], r[3]};
  move_matrices(copy, address, false, true);
}
inline void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  uint32_t copy[4] = {r[0], r[1], r[2], r[3]};
  move_matrices(copy, address, true, true);
}

inline uint32_t transpose_matrix(uint32_t r) {
  struct Mine {
    uint32_t value, got;
  } mine{r, 0};
  emulator::meet_warp(
      ~0u, &mine,
      [](void** given, uint32_t) {
        for (int row = 0; row < 8; ++row) {
          for (int col = 0; col < 8; ++col) {
            std::memcpy(reinterpret_cast<char*>(&static_cast<Mine*>(given[col * 4 + row / 2])->got) + row % 2 * 2,
                        reinterpret_cast<char*>(&static_cast<Mine*>(given[row * 4 + col / 2])->value) + col % 2 * 2, 2);
          }
        }
      },
      "movmatrix");
  return mine.got;
}

inline void add_global(float* address, float a, float b, float c, float d) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    emulator::fail("red.global.add.v4 at an address that is not aligned");
  const float values[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) atomicAdd(address + i, values[i]);
}

}  // namespace flash::ptx
