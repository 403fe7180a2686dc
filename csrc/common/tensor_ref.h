#pragma once

#include <cstdint>

namespace flash {

// A tensor of shape (batch, seqlen, heads, head_dim) as params structs hold it: the address of its first element and,
// by dimension, the strides in elements. Packed tokens (tokens, heads, head_dim) have one batch entry.
// Data is void where the element type is chosen later, const void where the tensor is only read.
template <typename Data = void>
struct TensorRef {
  Data* data;
  int64_t batch;
  int64_t seqlen;
  int64_t heads;
  int64_t head_dim;
};

}  // namespace flash
