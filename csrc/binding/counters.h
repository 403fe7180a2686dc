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
  std::optional<Tensor> memory;  // if it belongs to the call: keep it until the launch
};

// (size) zeros, which the kernel must leave as zeros.
//
// Most calls, each step of decoding among them, get a slot, which costs no launch. A memset, ordered on the stream,
// serves the others: more counters than a slot has, or a stream without a slot.
inline Counters zero_counters(int64_t size, const Tensor& like, cudaStream_t stream) {
  int* slot = nullptr;
  if (size <= CounterSlots::kSlotSize) slot = CounterSlots::find(like.get_device_index(), stream, capture_of(stream));
  if (slot != nullptr) return {slot, std::nullopt};
  const Tensor zeros = torch::stable::new_zeros(like, {size}, ScalarType::Int);
  return {static_cast<int*>(zeros.mutable_data_ptr()), zeros};
}

}  // namespace flash::binding
