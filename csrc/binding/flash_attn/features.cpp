#include "binding/flash_attn/features.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "binding/flash_attn/bias.h"
#include "binding/flash_attn/inputs.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "flash_attn/launch.h"

namespace flash::binding::attention {
namespace {

using flash_attn::FwdParams;
using flash_attn::Problem;

void set_sink(Problem& p, OptionalTensor& sink, const Tensor& q) {
  if (!sink) return;
  check_device(*sink, q, "learnable_sink");
  check_shape(*sink, {p.heads}, "learnable_sink");
  sink = as_contiguous(*sink);
  p.sink = sink->const_data_ptr();
  p.sink_dtype = dtype_of(*sink, "learnable_sink");
}

// Sets key ranges (batch or 1, heads or 1, rows, 2), where all packed tokens are one entry. They are copied unless each
// range is an aligned pair, which kernels load in one access.
void set_key_ranges(Problem& p, OptionalTensor& ranges, const Tensor& q) {
  if (!ranges) return;
  check_device(*ranges, q, "key_ranges");
  check_dtype(*ranges, ScalarType::Int, "key_ranges");
  STD_TORCH_CHECK(ranges->dim() == 4, "key_ranges must have 4 dimensions, found ", ranges->dim());
  const int64_t entries = p.cu_seqlens_q ? 1 : p.batch;
  const auto size = [&](int dim, int64_t all) { return ranges->size(dim) == 1 ? 1 : all; };
  check_shape(*ranges, {size(0, entries), size(1, p.heads), p.seqlen_q, 2}, "key_ranges");
  const auto strides = ranges->strides();
  const bool in_pairs = strides[3] == 1 && strides[0] % 2 == 0 && strides[1] % 2 == 0 && strides[2] % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(ranges->const_data_ptr()) % 8 == 0;
  if (!in_pairs) ranges = torch::stable::clone(as_contiguous(*ranges));
  const auto stride = [&](int dim) { return ranges->size(dim) == 1 ? 0 : ranges->stride(dim); };
  p.ranges = {.data = pointer<int>(ranges), .batch = stride(0), .heads = stride(1), .seqlen = stride(2)};
}

// Replaces all restrictions of the keys that rows see by key ranges, which a kernel computes.
void combine_ranges(Problem& p, Features& features, bool paged, const Tensor& q) {
  flash_attn::RangesParams all{.problem = p, .paged = paged, .heads = p.ranges.heads == 0 ? 1 : p.heads};
  all.chunk = static_cast<int>(std::clamp<int64_t>(features.attention_chunk, 0, flash_attn::kMaxSeqlen));
  all.seqused_q = index_pointer(features.seqused_q, q, p.batch, "seqused_q");
  if (OptionalTensor& causal = features.causal) {
    check_device(*causal, q, "causal");
    check_shape(*causal, {p.batch}, "causal");
    const bool is_bool = causal->scalar_type() == ScalarType::Bool;
    if (!is_bool) check_dtype(*causal, ScalarType::Int, "causal");
    causal = as_contiguous(*causal);
    all.causal = causal->const_data_ptr(), all.causal_bytes = is_bool ? 1 : 4;
  }
  const int64_t entries = p.cu_seqlens_q ? 1 : p.batch;
  const Tensor ranges = new_tensor({entries, all.heads, p.seqlen_q, 2}, aoti_torch_dtype_int32(), q);
  all.ranges = static_cast<int*>(ranges.mutable_data_ptr());
  flash_attn::ranges(all, current_stream(q));
  features.key_ranges = ranges;
  p.window_left = p.window_right = flash_attn::kUnbounded;
  set_key_ranges(p, features.key_ranges, q);
}

flash_attn::Descale descale_of(const OptionalTensor& x, const FwdParams& p, const Tensor& q, const char* name) {
  if (!x) return {};
  STD_TORCH_CHECK(p.coded, name, " must be None unless k and v have dtype float8_e4m3fn");
  check_device(*x, q, name);
  check_dtype(*x, ScalarType::Float, name);
  const auto sizes = x->sizes(), strides = x->strides();
  const int64_t wanted[] = {p.problem.batch, p.problem.heads_k};
  int64_t steps[] = {0, 0};
  bool fits = sizes.size() <= 2;
  for (size_t dim = 0; fits && dim < sizes.size(); ++dim) {
    const size_t place = 2 - sizes.size() + dim;
    fits = sizes[dim] == 1 || sizes[dim] == wanted[place];
    if (sizes[dim] != 1) steps[place] = strides[dim];
  }
  STD_TORCH_CHECK(fits, name, " must broadcast to (batch, heads_k), found shape ", shape_string(sizes));
  return {.data = pointer<float>(x), .batch = steps[0], .heads = steps[1]};
}

}  // namespace

void set_descales(FwdParams& p, const Descales& descales, const Tensor& q) {
  p.problem.k_descale = descale_of(descales.k_descale, p, q, "k_descale");
  p.problem.v_descale = descale_of(descales.v_descale, p, q, "v_descale");
}

void set_features(Problem& p, OptionalTensor& sink, OptionalTensor& bias, Features& features, bool paged,
                  const Tensor& q) {
  set_sink(p, sink, q);
  set_bias(p, bias, q);
  set_key_ranges(p, features.key_ranges, q);
  if (features.attention_chunk <= 0 && !features.causal && !features.seqused_q) return;
  STD_TORCH_CHECK(!features.seqused_q || (!sink && p.alibi_slopes == nullptr),
                  "seqused_q has no kernel with learnable_sink or alibi_slopes: call the op ..._reference");
  combine_ranges(p, features, paged, q);
}

}  // namespace flash::binding::attention
