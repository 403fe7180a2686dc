// Memory for counters of kernels, by stream and by CUDA graph.
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

namespace flash {

struct Capture {
  unsigned long long id = 0;  // of its own; 0 if there is none
  cudaGraph_t graph = nullptr;
};

inline Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  Capture capture;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

// Zeros that kernels leave as they find them. A stream has a slot, since its launches follow one another. A graph may
// run beside it: it has one for each stream that it was captured from, which is zeroed when the graph starts. A graph,
// or the last of its copies that can be launched, gives its slots back when it is destroyed.
//
// PyTorch's memory would not do: its pool for a graph must be empty when the capture ends, and after the calls before
// it, which torch.compile makes in that pool, too.
class CounterSlots {
 public:
  static constexpr int64_t kSlotSize = 4096;

  static int* find(int device, cudaStream_t stream, const Capture& capture) {
    const Key key(capture.id, device, stream);
    if (int* data = used(key)) return data;
    auto slot = std::make_unique<Slot>(key, take(device));
    int* data = slot->data;
    if (capture.id != 0) give_to(capture.graph, std::move(slot));
    check_cuda(cudaMemsetAsync(data, 0, kSlotSize * sizeof(int), stream), "cudaMemsetAsync");
    const std::lock_guard lock(state().mutex);
    state().used.emplace(key, data);
    slot.release();  // a stream's is for good
    return data;
  }

 private:
  using Key = std::tuple<unsigned long long, int, cudaStream_t>;  // of a capture, or 0; a device; a stream
  struct State {
    std::mutex mutex;  // not held while CUDA is called, which may wait for a slot to be given back
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
    static auto& state = *new State;  // graphs may be destroyed when the process ends
    return state;
  }

  static int* used(const Key& key) {
    const std::lock_guard lock(state().mutex);
    const auto found = state().used.find(key);
    return found == state().used.end() ? nullptr : found->second;
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

  // On the current device.
  static int* allocate(int64_t size) {
    auto mode = cudaStreamCaptureModeRelaxed;  // or memory could not be had during a capture
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, size * sizeof(int));
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check_cuda(status, "cudaMalloc");
    return static_cast<int*>(memory);
  }

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
