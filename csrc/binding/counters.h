// Counters of blocks that have arrived, in which kernels find zeros and leave zeros behind.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "binding/tensor.h"
#include "common/graph_counters.h"

namespace flash::binding {

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
