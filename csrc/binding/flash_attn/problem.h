// Options as the fields of a kernel's Problem and Pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "binding/flash_attn/inputs.h"
#include "binding/flash_attn/options.h"
#include "binding/tensor.h"
#include "common/divmod.h"
#include "flash_attn/params.h"

namespace flash::binding::attention {

inline int window_side(int64_t window) {
  return window < 0 ? flash_attn::kUnbounded : static_cast<int>(std::min<int64_t>(window, flash_attn::kUnbounded));
}

inline void set_alibi_slopes(flash_attn::Problem& p, OptionalTensor& slopes, const Tensor& q) {
  if (!slopes) return;
  check_device(*slopes, q, "alibi_slopes");
  check_dtype(*slopes, ScalarType::Float, "alibi_slopes");
  slopes = as_contiguous(*slopes);
  const bool per_entry = slopes->dim() == 2;
  if (per_entry) check_shape(*slopes, {p.batch, p.heads}, "alibi_slopes");
  if (!per_entry) check_shape(*slopes, {p.heads}, "alibi_slopes");
  p.alibi_slopes = pointer<float>(slopes);
  p.alibi_batch_stride = per_entry ? p.heads : 0;
}

// Sets shapes, masks and scores. Lengths of keys are those of dense tensors until the caller changes them. AnyOptions:
// Options or CacheOptions. coded: whether keys and values are codes, with which kernels compute in fp16.
template <typename AnyOptions>
flash_attn::Problem problem_of(const Tensor& q, const Inputs& x, int64_t batch, AnyOptions& options, bool coded) {
  flash_attn::Problem p{};
  p.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(p.dtype != DType::kFloat32,
                  "q must have dtype float16 or bfloat16 for the CUDA kernels, found float32");
  if (coded) p.dtype = DType::kFloat16;
  p.batch = narrow_size(batch, "the batch");
  p.heads = narrow_size(x.q.heads, "the number of heads");
  p.heads_k = narrow_size(x.k.heads, "the number of key heads");
  p.head_dim = static_cast<int>(x.q.head_dim);
  p.head_dim_v = static_cast<int>(x.v.head_dim);
  p.seqlen_q = seqlen(x.q.seqlen, "q");
  p.seqlen_k = p.capacity_k = seqlen(x.k.seqlen, "k");
  p.window_left = window_side(options.window_left);
  p.window_right = window_side(options.window_right);
  p.softmax_scale = std::max(static_cast<float>(options.softmax_scale), flash_attn::kLeastSoftmaxScale);
  p.softcap = std::max(static_cast<float>(options.softcap), 0.f);
  p.dropout_rescale = 1;
  set_alibi_slopes(p, options.alibi_slopes, q);
  return p;
}

// The most rows or keys of an entry: what the caller says, as long as that is not 0, which stands for unknown (a graph
// may be captured before there are lengths), and at most `all`.
inline int64_t longest(const std::optional<int64_t>& bound, int64_t all) {
  return bound && *bound > 0 ? std::min(*bound, all) : all;
}

inline int64_t batch_of(const Inputs& x, const Options& options) {
  const bool tokens = options.cu_seqlens_q.has_value();
  const int64_t batch = tokens ? options.cu_seqlens_q->numel() - 1 : x.q.batch;
  STD_TORCH_CHECK(batch >= 0 && (tokens || options.block_table || x.k.batch == batch), "k must have q's batch size ",
                  batch);
  return batch;
}

inline void set_dropout(flash_attn::Problem& p, const Options& options, const Tensor& q) {
  if (options.dropout_p <= 0) return;
  STD_TORCH_CHECK(options.dropout_p < 1 && options.rng_state,
                  "dropout_p must be less than 1 and come with rng_state, found ", options.dropout_p);
  check_device(*options.rng_state, q, "rng_state");
  check_dtype(*options.rng_state, ScalarType::Long, "rng_state");
  check_shape(*options.rng_state, {2}, "rng_state");
  p.rng_state = pointer<int64_t>(options.rng_state);
  p.dropout_largest_kept = static_cast<int>(std::floor(255 * (1 - options.dropout_p)));
  p.dropout_rescale = static_cast<float>(1 / (1 - options.dropout_p));
}

// Sets the lengths and the dropout of packed and padded batches. Where keys are in pages and seqused_k has their
// lengths, cu_seqlens_k may hold anything.
inline void set_entries(flash_attn::Problem& p, Options& options, const Tensor& q) {
  if (options.block_table && options.seqused_k) options.cu_seqlens_k.reset();
  p.cu_seqlens_q = index_pointer(options.cu_seqlens_q, q, p.batch + 1, "cu_seqlens_q");
  p.cu_seqlens_k = index_pointer(options.cu_seqlens_k, q, p.batch + 1, "cu_seqlens_k");
  p.seqused_k = index_pointer(options.seqused_k, q, p.batch, "seqused_k");
  p.leftpad_k = index_pointer(options.leftpad_k, q, p.batch, "leftpad_k");
  set_dropout(p, options, q);
}

// The keys of a problem in pages, if there is a block table, and how many an entry has room for. The table may be a
// part of a larger one: only the pages of an entry must be adjacent. If they are not, `block_table` is made contiguous.
inline flash_attn::Pages set_pages(flash_attn::Problem& p, OptionalTensor& block_table, const Tensor& q,
                                   const View<const void>& k) {
  if (!block_table) return {};
  check_device(*block_table, q, "block_table");
  check_dtype(*block_table, ScalarType::Int, "block_table");
  const auto sizes = block_table->sizes();
  STD_TORCH_CHECK(sizes.size() == 2 && sizes[0] == p.batch && k.seqlen >= 1,
                  "block_table must have shape (batch, pages per entry), found ", shape_string(sizes));
  const int64_t num_pages = sizes[1];
  if (num_pages > 1 && block_table->stride(1) != 1) block_table = torch::stable::contiguous(*block_table);
  p.capacity_k = seqlen(num_pages * k.seqlen, "block_table");
  return {.block_table = pointer<int>(block_table),
          .batch_stride = block_table->stride(0),
          .page_size = Divisor(narrow_size(k.seqlen, "a page")),
          .count = narrow_size(k.batch, "the number of pages")};
}

}  // namespace flash::binding::attention
