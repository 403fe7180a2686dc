// Counters in which kernels find zeros and leave zeros.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "binding/tensor.h"
#include "common/counter_slots.h"

namespace flash::binding {

struct Counters {
  int* data;
  std::optional<Tensor> memory;  // has a value if the memory belongs to the call: keep it until the launch
};

// Returns `size` zeros, which the kernel must leave as zeros.
//
// Most calls, such as steps of decoding, get a slot, which costs no launch. Calls that need more counters than a slot
// has, or on a stream without a slot, get new memory that a memset on the stream clears.
inline Counters zero_counters(int64_t size, const Tensor& like, cudaStream_t stream) {
  int* slot = nullptr;
  if (size <= CounterSlots::kSlotSize) slot = CounterSlots::find(like.get_device_index(), stream, capture_of(stream));
  if (slot != nullptr) return {slot, std::nullopt};
  const Tensor zeros = torch::stable::new_zeros(like, {size}, ScalarType::Int);
  return {static_cast<int*>(zeros.mutable_data_ptr()), zeros};
}

}  // namespace flash::binding
