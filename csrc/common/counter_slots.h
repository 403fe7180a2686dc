// Memory for counters that kernels share between thread blocks, by stream and by CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/stream_capture.h"

namespace flash {

// Slots of zeros. A kernel that counts in a slot leaves zeros there, so that the next launch needs no memset.
//
// Only launches that follow one another may share a slot. Those of a stream do: a stream keeps the slot that its first
// call has taken. Streams are known by their id, because CUDA gives the handle of a destroyed stream to a new one,
// which may run beside the work that the old one has left. A graph may run beside the streams that it was captured
// from, so it has slots of its own, one for each such stream, which are zeroed when the graph starts. CUDA does not
// tell the id of a captured stream, so there the stream is known by its handle: until the capture ends, no other stream
// has it. The slots are given back when CUDA destroys the graph and everything that was instantiated from it.
//
// CUDA does not say when a stream is destroyed. So that memory stays bounded, only the first kMostStreams streams of a
// device have slots; find() returns null for the others, and for cudaStreamPerThread, one handle for several streams.
//
// Slots are not memory of PyTorch, which must be free again when a capture ends and, in the memory pools of
// torch.compile, after each call.
class CounterSlots {
 public:
  static constexpr int64_t kSlotSize = 4096;
  static constexpr int kMostStreams = 128;  // PyTorch's own pools have fewer

  // kSlotSize zeros on the current device, for launches on `stream`; null if the caller has to bring zeros of its own.
  static int* find(int device, cudaStream_t stream, const Capture& capture) {
    if (stream == cudaStreamPerThread) return nullptr;
    const Key key(capture.id, device, capture.id != 0 ? handle_of(stream) : id_of(stream));
    if (int* data = used(key)) return data;
    const std::lock_guard one_by_one(state().creation);
    if (int* data = used(key)) return data;  // another thread has come first
    if (capture.id != 0) return create(key, stream, capture);
    int& streams = state().streams[device];
    if (streams == kMostStreams) return nullptr;
    int* data = create(key, stream, capture);
    ++streams;
    return data;
  }

 private:
  using Key = std::tuple<unsigned long long, int, unsigned long long>;  // id of a capture or 0; a device; a stream
  struct State {
    std::mutex creation;
    std::map<int, int> streams;  // by device, how many have a slot; guarded by `creation`
    std::mutex mutex;            // guards the rest; not held while CUDA is called, which may wait for give_back
    std::map<Key, int*> used;
    std::map<int, std::vector<int*>> free;  // by device
  };
  struct Slot {
    Key key;
    int* data;

    Slot(const Key& key, int* data) : key(key), data(data) {}
    ~Slot() {
      const std::lock_guard lock(state().mutex);
      state().used.erase(key);
      state().free[std::get<int>(key)].push_back(data);
    }
  };

  static State& state() {
    static auto& state = *new State;  // never destroyed: graphs may outlive static objects
    return state;
  }

  static unsigned long long handle_of(cudaStream_t stream) { return reinterpret_cast<uintptr_t>(stream); }

  static unsigned long long id_of(cudaStream_t stream) {
    if (stream == nullptr) return ~0ull;  // the default stream is never destroyed: it needs no id of CUDA's
    const WhileOthersCapture allowed;
    unsigned long long id = 0;
    check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
    return id;
  }

  static int* used(const Key& key) {
    const std::lock_guard lock(state().mutex);
    const auto found = state().used.find(key);
    return found == state().used.end() ? nullptr : found->second;
  }

  static int* create(const Key& key, cudaStream_t stream, const Capture& capture) {
    auto slot = std::make_unique<Slot>(key, take(std::get<int>(key)));
    int* data = slot->data;
    if (capture.id != 0) give_to(capture.graph, std::move(slot));
    check_cuda(cudaMemsetAsync(data, 0, kSlotSize * sizeof(int), stream), "cudaMemsetAsync");
    const std::lock_guard lock(state().mutex);
    state().used.emplace(key, data);
    slot.release();  // a stream keeps its slot
    return data;
  }

  static int* take(int device) {
    std::unique_lock lock(state().mutex);
    auto& free = state().free[device];
    if (free.empty()) {
      lock.unlock();
      constexpr int kSlots = 64;
      int* memory = allocate(kSlots * kSlotSize);
      lock.lock();
      for (int i = 0; i < kSlots; ++i) free.push_back(memory + i * kSlotSize);
    }
    int* data = free.back();
    free.pop_back();
    return data;
  }

  static int* allocate(int64_t size) {
    const WhileOthersCapture allowed;
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, size * sizeof(int)), "cudaMalloc");
    return static_cast<int*>(memory);
  }

  // Lets CUDA destroy the slot together with the graph.
  static void give_to(cudaGraph_t graph, std::unique_ptr<Slot> slot) {
    cudaUserObject_t owner;
    check_cuda(
        cudaUserObjectCreate(&owner, slot.get(), give_back, /*initialRefcount=*/1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
    slot.release();
    check_cuda(cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove), "cudaGraphRetainUserObject");
  }

  static void give_back(void* slot) { delete static_cast<Slot*>(slot); }
};

}  // namespace flash
