// New keys and values, which are appended to a cache before attention reads it.
#pragma once

#include "binding/flash_attn/options.h"
#include "binding/tensor.h"
#include "common/tensor_ref.h"
#include "flash_attn/params.h"

namespace flash::binding::attention {

// The parameters, and the tensors that must live until the launch.
struct Append {
  flash_attn::AppendParams p;
  OptionalTensor cos, sin, q_rotated;
};

// The new keys and values that a call appends to its cache; its options must have k. queries_advance: whether something
// besides the window makes query rows see different keys, so that each has its own rotary position.
Append append_of(const flash_attn::FwdParams& fwd, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                 const CacheOptions& options, bool queries_advance);

// Appends in a kernel of its own. Returns the queries that attention reads: rotated, or as they are.
TensorRef<const void> append_apart(Append& append, const Tensor& q);

}  // namespace flash::binding::attention
