#pragma once

#include <cuda.h>

#include "../../tensor_map.h"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"

namespace flash::ptx {

inline const emulator::TensorMap& content(const CUtensorMap& map) {
  return reinterpret_cast<const emulator::TensorMap&>(map);
}
inline int bytes_of(const emulator::TensorMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.element_bytes;
}

// Carries out an asynchronous copy at once or, half of the time, later: at the latest when no thread of the block can
// continue.
inline void in_background(emulator::Work work) {
  emulator::Block& block = *emulator::current->block;
  if (block.lazy()) {
    block.copies.push_back(std::move(work));
  } else {
    work();
  }
}

inline bool elect() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}
inline void prefetch(const CUtensorMap&) {}

// The box goes to each block of the cluster whose bit in `blocks` is set.
inline void copy_box(uint32_t shared, const CUtensorMap& map, int x0, int x1, int x2, int x3, SharedBarrier& barrier,
                     uint16_t blocks) {
  const emulator::TensorMap from = content(map);
  if (shared % 128 != 0) emulator::fail("a bulk copy to an address that is not aligned");
  emulator::Block* self = emulator::current->block;
  const int64_t barrier_at = reinterpret_cast<char*>(&barrier) - self->shared;
  for (int rank = 0; rank < static_cast<int>(self->cluster->blocks.size()); ++rank) {
    if (!(blocks >> rank & 1)) continue;
    emulator::Block* block = self->cluster->blocks[rank];
    in_background([=] {
      emulator::for_each_element(from, {x0, x1, x2, x3}, shared, [&](uint32_t at, const char* element) {
        char* to = block->shared + (int64_t{at & 0xFFFFFF} - emulator::kSharedBase);
        if (element) {
          std::memcpy(to, element, from.element_bytes);
        } else {
          std::memset(to, 0, from.element_bytes);
        }
      });
      reinterpret_cast<SharedBarrier*>(block->shared + barrier_at)->complete(bytes_of(from));
    });
  }
}

inline void copy_box_async(uint32_t shared, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                           SharedBarrier& barrier) {
  copy_box(shared, map, x0, x1, x2, x3, barrier, uint16_t(1u << emulator::current->block->rank));
}

inline void copy_bytes_async(uint32_t shared, const void* global, int bytes, SharedBarrier& barrier) {
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulator::fail("a bulk copy that is not aligned");
  }
  char* to = emulator::shared_pointer(shared);
  in_background([=, &barrier] {
    std::memcpy(to, global, bytes);
    barrier.complete(bytes);
  });
}

// Carries out a store, and thus reads shared memory, at once or as late as possible: when the thread waits for it.
inline void store_later(emulator::Work work) {
  if (emulator::current->block->lazy()) {
    emulator::current->stores.push_back(std::move(work));
  } else {
    work();
  }
}

inline void store_box_async(const CUtensorMap& map, uint32_t shared, int x0, int x1, int x2, int x3) {
  const emulator::TensorMap to = content(map);
  if (shared % 128 != 0) emulator::fail("a bulk store from an address that is not aligned");
  store_later([=] {
    emulator::for_each_element(to, {x0, x1, x2, x3}, shared, [&](uint32_t at, char* element) {
      if (element) std::memcpy(element, emulator::shared_pointer(at), to.element_bytes);
    });
  });
}

inline void add_box_async(const CUtensorMap& map, uint32_t shared, int x0, int x1, int x2, int x3) {
  const emulator::TensorMap to = content(map);
  if (shared % 128 != 0) emulator::fail("a bulk sum from an address that is not aligned");
  store_later([=] {
    emulator::for_each_element(to, {x0, x1, x2, x3}, shared, [&](uint32_t at, char* element) {
      float value;
      std::memcpy(&value, emulator::shared_pointer(at), 4);
      if (element) atomicAdd(reinterpret_cast<float*>(element), value);
    });
  });
}

inline void commit_stores() {}
inline void wait_stores() {
  for (auto& store : emulator::current->stores) store();
  emulator::current->stores.clear();
}
inline void wait_stores_read() { wait_stores(); }
inline void fence_async_shared() {}

template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}

}  // namespace flash::ptx
