// Counters of blocks that have arrived, in which kernels find zeros and leave zeros behind.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "binding/tensor.h"
#include "common/counter_slots.h"

namespace flash::binding {

struct Counters {
  int* data;
  std::optional<Tensor> memory;  // to keep until the launch
};

// (size) zeros, which the kernel leaves behind.
inline Counters zero_counters(int64_t size, const Tensor& like, cudaStream_t stream) {
  if (size <= CounterSlots::kSlotSize) {
    return {CounterSlots::find(like.get_device_index(), stream, capture_of(stream)), std::nullopt};
  }
  const Tensor zeros = torch::stable::new_zeros(like, {size}, ScalarType::Int);
  return {static_cast<int*>(zeros.mutable_data_ptr()), zeros};
}

}  // namespace flash::binding
