// Counters of blocks that have arrived, in which kernels find zeros and leave zeros behind.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "binding/tensor.h"
#include "common/check.h"

namespace flash::binding {

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

// Counters of graphs. A graph has a slot for each stream that it was captured from, since what it captured there runs
// in that order; they are zeroed when it starts. PyTorch's memory would not do: its pool for a graph must be empty when
// the capture ends. A graph, or the last of its copies that can be launched, gives its slots back when it is destroyed.
class GraphCounters {
 public:
  static constexpr int64_t kSlotSize = 4096;

  static int* find(int device, cudaStream_t stream, const Capture& capture) {
    const std::lock_guard lock(state().mutex);
    const auto [place, is_new] = state().used.try_emplace({capture.id, stream}, nullptr);
    if (is_new) {
      place->second = take(device);
      check_cuda(cudaMemsetAsync(place->second, 0, kSlotSize * sizeof(int), stream), "cudaMemsetAsync");
      cudaUserObject_t owner;
      check_cuda(cudaUserObjectCreate(&owner, new Slot{device, place->first}, give_back, /*initialRefcount=*/1,
                                      cudaUserObjectNoDestructorSync),
                 "cudaUserObjectCreate");
      check_cuda(cudaGraphRetainUserObject(capture.graph, owner, 1, cudaGraphUserObjectMove),
                 "cudaGraphRetainUserObject");
    }
    return place->second;
  }

 private:
  using Key = std::pair<unsigned long long, cudaStream_t>;
  struct Slot {
    int device;
    Key key;
  };
  struct State {
    std::mutex mutex;
    std::map<Key, int*> used;
    std::map<int, std::vector<int*>> free;  // by device
  };

  static State& state() {
    static auto& state = *new State;  // graphs may be destroyed when the process ends
    return state;
  }

  static int* take(int device) {
    auto& free = state().free[device];
    if (free.empty()) {
      constexpr int kSlots = 64;
      auto mode = cudaStreamCaptureModeRelaxed;  // or memory could not be had during a capture
      check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
      void* memory = nullptr;
      const cudaError_t status = cudaMalloc(&memory, kSlots * kSlotSize * sizeof(int));
      check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
      check_cuda(status, "cudaMalloc");
      for (int i = 0; i < kSlots; ++i) free.push_back(static_cast<int*>(memory) + i * kSlotSize);
    }
    int* slot = free.back();
    free.pop_back();
    return slot;
  }

  static void give_back(void* data) {
    const auto* slot = static_cast<Slot*>(data);
    const std::lock_guard lock(state().mutex);
    const auto place = state().used.find(slot->key);
    state().free[slot->device].push_back(place->second);
    state().used.erase(place);
    delete slot;
  }
};

struct Counters {
  int* data;
  std::optional<Tensor> memory;  // to keep until the launch
};

// (size) zeros. Launches on a stream follow one another, so that they need no new ones for each.
inline Counters zero_counters(int64_t size, const Tensor& like, cudaStream_t stream) {
  const int device = like.get_device_index();
  const Capture capture = capture_of(stream);
  if (capture.id != 0 && size <= GraphCounters::kSlotSize) {
    return {GraphCounters::find(device, stream, capture), std::nullopt};
  }
  if (capture.id != 0) {
    const Tensor zeros = torch::stable::new_zeros(like, {size}, ScalarType::Int);
    return {static_cast<int*>(zeros.mutable_data_ptr()), zeros};
  }
  static std::mutex mutex;
  static auto& kept =
      *new std::map<std::pair<int, cudaStream_t>, Tensor>;  // outlives the CUDA context, like torch's own
  const std::lock_guard lock(mutex);
  const std::pair key(device, stream);
  auto found = kept.find(key);
  if (found == kept.end() || found->second.numel() < size) {
    const int64_t room = std::max<int64_t>(size, 4096);
    found = kept.insert_or_assign(key, torch::stable::new_zeros(like, {room}, ScalarType::Int)).first;
  }
  return {static_cast<int*>(found->second.mutable_data_ptr()), found->second};
}

}  // namespace flash::binding
