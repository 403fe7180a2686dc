#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <type_traits>
#include <variant>

#include "binding/boxed.h"
#include "binding/counters.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "common/device.h"
#include "flash_attn/launch.h"
#include "flash_attn/params.h"

namespace flash::binding {
namespace {

using flash_attn::AppendParams;
using flash_attn::BwdParams;
using flash_attn::DmaskParams;
using flash_attn::FwdParams;
using flash_attn::Problem;
using flash_attn::RangesParams;
using OptionalTensor = std::optional<Tensor>;

// The arguments of fwd, probabilities and bwd besides queries, keys and values, in the order of the schema: the fields
// of Options in flash_attn/_reference/attention/options.py, which says what they are.
struct Options {
  Arguments& from;
  double softmax_scale = from.take<double>();
  int64_t window_left = from.take<int64_t>();
  int64_t window_right = from.take<int64_t>();
  OptionalTensor cu_seqlens_q = from.take<OptionalTensor>();
  OptionalTensor cu_seqlens_k = from.take<OptionalTensor>();
  std::optional<int64_t> max_seqlen_q = from.take<std::optional<int64_t>>();
  std::optional<int64_t> max_seqlen_k = from.take<std::optional<int64_t>>();
  bool deterministic = from.take<bool>();
  bool exact_gradients = from.take<bool>();
  double dropout_p = from.take<double>();
  OptionalTensor rng_state = from.take<OptionalTensor>();
  double softcap = from.take<double>();
  OptionalTensor alibi_slopes = from.take<OptionalTensor>();
  OptionalTensor block_table = from.take<OptionalTensor>();
  OptionalTensor seqused_k = from.take<OptionalTensor>();
  OptionalTensor leftpad_k = from.take<OptionalTensor>();
};

// Likewise the arguments of fwd_kvcache besides queries and caches: the fields of CacheOptions there.
struct CacheOptions {
  Arguments& from;
  double softmax_scale = from.take<double>();
  int64_t window_left = from.take<int64_t>();
  int64_t window_right = from.take<int64_t>();
  OptionalTensor cache_seqlens = from.take<OptionalTensor>();
  OptionalTensor block_table = from.take<OptionalTensor>();
  OptionalTensor k = from.take<OptionalTensor>();
  OptionalTensor v = from.take<OptionalTensor>();
  OptionalTensor rotary_cos = from.take<OptionalTensor>();
  OptionalTensor rotary_sin = from.take<OptionalTensor>();
  bool rotary_interleaved = from.take<bool>();
  std::optional<int64_t> cache_seqlen = from.take<std::optional<int64_t>>();
  int64_t num_splits = from.take<int64_t>();
  double softcap = from.take<double>();
  OptionalTensor alibi_slopes = from.take<OptionalTensor>();
  OptionalTensor cache_batch_idx = from.take<OptionalTensor>();
  OptionalTensor cache_leftpad = from.take<OptionalTensor>();
};

// Likewise the further arguments of fwd_features and fwd_kvcache_features, except the sink and the bias, which come
// before the options.
struct Features {
  Arguments& from;
  OptionalTensor key_ranges = from.take<OptionalTensor>();
  int64_t attention_chunk = from.take<int64_t>();
  OptionalTensor causal = from.take<OptionalTensor>();
  OptionalTensor seqused_q = from.take<OptionalTensor>();
  bool row_max = from.take<bool>();
};

// A tensor (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), or one part of a tensor that packs q, k and
// v. Data is const void or, if it is written to, void: taking the address then gives a lazy clone memory of its own.
template <typename Data>
struct View {
  TensorRef<Data> ref;
  int64_t batch, seqlen, heads, head_dim;  // without a batch dimension, all tokens are one batch entry
};

// Part `index` of x along its dimension -3 if x packs several parts, or x itself.
template <typename Data>
View<Data> view_of(const Tensor& x, bool tokens, int64_t parts, int64_t index, const char* name) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  const auto sizes = x.sizes(), strides = x.strides();
  const size_t dims = (tokens ? 3 : 4) + (parts > 1);
  STD_TORCH_CHECK(sizes.size() == dims, name, " must have ", dims, " dimensions, found shape ", shape_string(sizes));
  STD_TORCH_CHECK(parts == 1 || sizes[dims - 3] == parts, name, " must have size ", parts,
                  " in dimension -3, found shape ", shape_string(sizes));
  const size_t seqlen_dim = dims - 3 - (parts > 1);
  const auto stride = [&](size_t dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
  Byte* data;
  if constexpr (std::is_const_v<Data>) {
    data = static_cast<Byte*>(x.const_data_ptr());
  } else {
    data = static_cast<Byte*>(x.mutable_data_ptr());
  }
  if (parts > 1) data += index * strides[dims - 3] * size_of(dtype_of(x, name));
  return {.ref = {.data = data,
                  .batch = tokens ? 0 : stride(0),
                  .seqlen = stride(seqlen_dim),
                  .heads = stride(dims - 2),
                  .head_dim = sizes[dims - 1] == 1 ? 1 : strides[dims - 1]},
          .batch = tokens ? 1 : sizes[0],
          .seqlen = sizes[seqlen_dim],
          .heads = sizes[dims - 2],
          .head_dim = sizes[dims - 1]};
}

template <typename Data>
struct Views {
  View<Data> q, k, v;
};
using Inputs = Views<const void>;

// q, k and v, given separately or packed: without v, k holds keys and values; without k, too, q holds all three.
template <typename Data>
Views<Data> unpack(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, bool packed_tokens, bool paged) {
  if (!k) {
    return {view_of<Data>(q, packed_tokens, 3, 0, "qkv"), view_of<Data>(q, packed_tokens, 3, 1, "qkv"),
            view_of<Data>(q, packed_tokens, 3, 2, "qkv")};
  }
  const bool key_tokens = packed_tokens && !paged;
  const View<Data> queries = view_of<Data>(q, packed_tokens, 1, 0, "q");
  if (!v) return {queries, view_of<Data>(*k, key_tokens, 2, 0, "kv"), view_of<Data>(*k, key_tokens, 2, 1, "kv")};
  return {queries, view_of<Data>(*k, key_tokens, 1, 0, "k"), view_of<Data>(*v, key_tokens, 1, 0, "v")};
}

void check_like(const Tensor& x, const Tensor& q, const char* name) {
  check_device(x, q, name);
  check_dtype(x, q.scalar_type(), name);
}

void check_inputs(const Inputs& x) {
  const auto& [q, k, v] = x;
  for (const auto& [name, x] : {std::pair("q", &q), std::pair("v", &v)}) {
    STD_TORCH_CHECK(x->head_dim >= 1 && x->head_dim <= flash_attn::kMostHeadDim, name,
                    "'s head_dim must be between 1 and ", flash_attn::kMostHeadDim, ", found ", x->head_dim);
  }
  STD_TORCH_CHECK(k.head_dim == q.head_dim && v.heads == k.heads && v.seqlen == k.seqlen && v.batch == k.batch,
                  "k must have q's head_dim ", q.head_dim, ", and v the shape of k, but for its head_dim");
  STD_TORCH_CHECK(q.heads == k.heads || (k.heads > 0 && q.heads % k.heads == 0),
                  "k must have a number of heads that divides q's ", q.heads, ", found ", k.heads);
}

// An int32 tensor (size,) that is read on the device; null if there is none. `x` is made contiguous.
const int* index_pointer(OptionalTensor& x, const Tensor& q, int64_t size, const char* name) {
  if (!x) return nullptr;
  check_device(*x, q, name);
  check_dtype(*x, ScalarType::Int, name);
  check_shape(*x, {size}, name);
  x = as_contiguous(*x);
  return pointer<int>(x);
}

int window_side(int64_t window) {
  return window < 0 ? flash_attn::kUnbounded : static_cast<int>(std::min<int64_t>(window, flash_attn::kUnbounded));
}

int seqlen(int64_t length, const char* name) {
  STD_TORCH_CHECK(length < flash_attn::kMaxSeqlen, name, " is too long: ", length, " positions");
  return static_cast<int>(length);
}

void set_alibi_slopes(Problem& p, OptionalTensor& slopes, const Tensor& q) {
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
// Options or CacheOptions.
template <typename AnyOptions>
Problem problem_of(const Tensor& q, const Inputs& x, int64_t batch, AnyOptions& options) {
  Problem p{};
  p.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(p.dtype != DType::kFloat32,
                  "q must have dtype float16 or bfloat16 for the CUDA kernels, found float32");
  p.batch = narrow_size(batch, "the batch");
  p.heads = narrow_size(x.q.heads, "the number of heads");
  p.heads_k = narrow_size(x.k.heads, "the number of key heads");
  p.head_dim = static_cast<int>(x.q.head_dim);
  p.head_dim_v = static_cast<int>(x.v.head_dim);
  p.seqlen_q = seqlen(x.q.seqlen, "q");
  p.seqlen_k = p.capacity_k = seqlen(x.k.seqlen, "k");
  p.window_left = window_side(options.window_left);
  p.window_right = window_side(options.window_right);
  // A scale of 0 should make all scores 0. But hidden ones are -inf, and -inf * 0 is NaN: so a tiny scale replaces it.
  p.softmax_scale = std::max(static_cast<float>(options.softmax_scale), 1e-30f);
  p.softcap = std::max(static_cast<float>(options.softcap), 0.f);
  p.dropout_rescale = 1;
  set_alibi_slopes(p, options.alibi_slopes, q);
  return p;
}

void set_dropout(Problem& p, const Options& options, const Tensor& q) {
  const auto& [dropout_p, rng_state] = std::tie(options.dropout_p, options.rng_state);
  if (dropout_p <= 0) return;
  STD_TORCH_CHECK(dropout_p < 1 && rng_state, "dropout_p must be less than 1 and come with rng_state, found ",
                  dropout_p);
  check_device(*rng_state, q, "rng_state");
  check_dtype(*rng_state, ScalarType::Long, "rng_state");
  check_shape(*rng_state, {2}, "rng_state");
  p.rng_state = pointer<int64_t>(rng_state);
  p.dropout_largest_kept = static_cast<int>(std::floor(255 * (1 - dropout_p)));
  p.dropout_rescale = static_cast<float>(1 / (1 - dropout_p));
}

flash_attn::Pages pages_of(OptionalTensor& block_table, const Tensor& q, int64_t batch, int64_t page_size) {
  if (!block_table) return {};
  check_device(*block_table, q, "block_table");
  check_dtype(*block_table, ScalarType::Int, "block_table");
  STD_TORCH_CHECK(block_table->dim() == 2 && block_table->size(0) == batch && page_size >= 1,
                  "block_table must have shape (batch, pages per entry), found ", shape_string(block_table->sizes()));
  block_table = as_contiguous(*block_table);
  return {.block_table = pointer<int>(block_table),
          .batch_stride = block_table->size(1),
          .page_size = Divisor(narrow_size(page_size, "a page"))};
}

// A new output (batch, seqlen, heads, head_dim_v) or (tokens, heads, head_dim_v): with the strides of q, or contiguous
// if q is packed with k and v or has another head_dim.
Tensor new_out(const Tensor& q, const View<const void>& view, int64_t head_dim_v, bool tokens, bool packed) {
  if (!packed && !q.is_contiguous() && view.head_dim == head_dim_v) return torch::stable::empty_like(q);
  if (tokens) return new_tensor({view.seqlen, view.heads, head_dim_v}, q);
  return new_tensor({view.batch, view.seqlen, view.heads, head_dim_v}, q);
}

Tensor new_lse(const Tensor& q, const View<const void>& view, bool tokens) {
  if (tokens) return new_tensor({view.heads, view.seqlen}, aoti_torch_dtype_float32(), q);
  return new_tensor({view.batch, view.heads, view.seqlen}, aoti_torch_dtype_float32(), q);
}

// A new tensor for a value of each row, in the shape of softmax_lse, to which `data` then points; empty if it is not
// wanted.
Tensor new_row_values(float*& data, const Tensor& q, const View<const void>& view, bool tokens, bool wanted) {
  if (!wanted) return new_tensor({0}, aoti_torch_dtype_float32(), q);
  const Tensor values = new_lse(q, view, tokens);
  data = static_cast<float*>(values.mutable_data_ptr());
  return values;
}

// A new tensor for what rounding takes off softmax_lse, if there is a bias. A bias of no keys leaves nothing to round.
Tensor new_lse_lo(float*& data, const Tensor& q, const View<const void>& view, bool tokens,
                  const OptionalTensor& bias) {
  Tensor lse_lo = new_row_values(data, q, view, tokens, bias.has_value());
  return bias && bias->numel() == 0 ? torch::stable::zero_(lse_lo) : lse_lo;
}

// ---------------------------------------------------------------------------------------------------------------------
// Features

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

// BiasRows::batch2_size for a bias (batch1, batch2, heads, rows, keys): how many entries its second dimension stands
// for. Each size but that of keys may be 1, and packed tokens are one entry.
int batch2_size(const Tensor& bias, const Problem& p) {
  const int64_t batch1 = bias.size(0), batch2 = bias.size(1);
  return static_cast<int>(std::max<int64_t>(batch2 > 1 ? batch2 : p.batch / std::max<int64_t>(batch1, 1), 1));
}

flash_attn::BiasRows bias_rows(const Tensor& x, int batch2_size) {
  const auto stride = [&](int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  return {stride(0), stride(1), stride(2), stride(3), Divisor(batch2_size)};
}

void check_bias_shape(const Tensor& bias, const Problem& p) {
  STD_TORCH_CHECK(bias.dim() == 5, "attn_bias must have 5 dimensions, found ", bias.dim());
  const int64_t batch1 = bias.size(0), batch2 = bias.size(1), entries = p.cu_seqlens_q ? 1 : p.batch;
  const auto divides = [&](int64_t size) { return size == entries || (size > 0 && entries % size == 0); };
  const auto is = [&](int dim, int64_t all) { return bias.size(dim) == 1 || bias.size(dim) == all; };
  STD_TORCH_CHECK(divides(batch1) && divides(batch2) && (batch1 == 1 || batch2 == 1 || batch1 * batch2 == entries) &&
                      is(2, p.heads) && is(3, p.seqlen_q),
                  "attn_bias must have shape (batch1, batch2, heads, rows, keys) with batch1 * batch2 = ", entries,
                  ", heads = ", p.heads, " and rows = ", p.seqlen_q, ", each possibly 1, found ",
                  shape_string(bias.sizes()));
}

void set_bias(Problem& p, const OptionalTensor& bias, const Tensor& q) {
  if (!bias) return;
  check_device(*bias, q, "attn_bias");
  check_bias_shape(*bias, p);
  p.bias.is_bool = bias->scalar_type() == ScalarType::Bool;
  if (!p.bias.is_bool) p.bias.dtype = dtype_of(*bias, "attn_bias");
  STD_TORCH_CHECK(p.bias.is_bool || p.bias.dtype == DType::kFloat32 || p.bias.dtype == p.dtype,
                  "attn_bias has no kernel unless it has the dtype of q, float32 or bool: call the op ..._reference");
  p.bias.data = bias->const_data_ptr();
  p.bias.keys = seqlen(bias->size(4), "attn_bias");
  p.bias.rows = bias_rows(*bias, batch2_size(*bias, p));
}

// Whether kernels can read a bias as it is: in pairs of keys, and in rows that start at multiples of `group` keys.
bool is_in_groups(const Tensor& bias, int group, int element_bytes) {
  bool in_groups = bias.size(4) % 2 == 0 && bias.stride(4) == 1 &&
                   reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % (group * element_bytes) == 0;
  for (int dim = 0; dim < 4; ++dim) in_groups &= bias.size(dim) == 1 || bias.stride(dim) % group == 0;
  return in_groups;
}

// target = log(mask): 0 for a key that is seen, -inf for the others.
void log_out(Tensor& target, const Tensor& mask) {
  std::array stack{torch::stable::detail::from(mask), torch::stable::detail::from(target)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::log", "out", stack.data(), TORCH_ABI_VERSION));
  target = torch::stable::detail::to<Tensor>(stack[0]);
}

// Returns a copy of a bias that kernels can read. A mask may get another dtype, and is then replaced by its logarithm.
// Expanded dimensions are not copied out; elements beyond the last key are NaN, or true.
Tensor copied_in_groups(Tensor bias, int group, ScalarType dtype) {
  for (int dim = 0; dim < 4; ++dim) {
    if (bias.size(dim) > 1 && bias.stride(dim) == 0) bias = torch::stable::narrow(bias, dim, 0, 1);
  }
  const int64_t keys = bias.size(4), rest = (group - keys % group) % group;
  Tensor copy = new_tensor({bias.size(0), bias.size(1), bias.size(2), bias.size(3), keys + rest},
                           static_cast<int32_t>(dtype), bias);
  Tensor target = torch::stable::narrow(copy, 4, 0, keys);
  if (dtype == bias.scalar_type()) {
    torch::stable::copy_(target, bias);
  } else {
    log_out(target, bias);
  }
  if (rest > 0) {
    Tensor beyond = torch::stable::narrow(copy, 4, keys, rest);
    torch::stable::fill_(beyond, NAN);
  }
  return copy;
}

// Copies a bias if the kernels cannot read it as it is: in pairs of keys or, if `tiled`, in tiles that TMA copies,
// which must have the dtype of the queries. In tiles, a bool mask for all heads took a half to two thirds less time at
// 512 to 4096 tokens, the copy included.
void place_bias(Problem& p, OptionalTensor& bias, const Tensor& q, bool tiled) {
  if (!bias) return;
  const bool was_bool = p.bias.is_bool;
  if (tiled) p.bias.is_bool = false, p.bias.dtype = p.dtype;
  const ScalarType dtype = tiled ? q.scalar_type() : bias->scalar_type();
  const int group = tiled ? 8 : 2, per_batch1 = batch2_size(*bias, p);
  if (was_bool != p.bias.is_bool || !is_in_groups(*bias, group, was_bool ? 1 : size_of(p.bias.dtype))) {
    bias = copied_in_groups(*bias, group, dtype);
  }
  p.bias.data = bias->const_data_ptr();
  p.bias.keys = static_cast<int>(bias->size(4));
  p.bias.rows = bias_rows(*bias, per_batch1);
}

// Sets the sink, the bias and the key ranges of a problem that is complete otherwise. Kernels know only windows and
// ranges: other restrictions of the keys that rows see are turned into ranges, whose memory `features` then holds.
void set_features(Problem& p, OptionalTensor& sink, OptionalTensor& bias, Features& features, bool paged,
                  const Tensor& q) {
  set_sink(p, sink, q);
  set_bias(p, bias, q);
  set_key_ranges(p, features.key_ranges, q);
  auto& [_, key_ranges, chunk, causal, seqused_q, row_max] = features;
  if (chunk <= 0 && !causal && !seqused_q) return;
  STD_TORCH_CHECK(!seqused_q || (!sink && p.alibi_slopes == nullptr),
                  "seqused_q has no kernel with learnable_sink or alibi_slopes: call the op ..._reference");
  RangesParams all{.problem = p, .paged = paged, .heads = p.ranges.heads == 0 ? 1 : p.heads};
  all.chunk = static_cast<int>(std::clamp<int64_t>(chunk, 0, flash_attn::kMaxSeqlen));
  all.seqused_q = index_pointer(seqused_q, q, p.batch, "seqused_q");
  if (causal) {
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
  key_ranges = ranges;
  p.window_left = p.window_right = flash_attn::kUnbounded;
  set_key_ranges(p, key_ranges, q);
}

// ---------------------------------------------------------------------------------------------------------------------

// What is appended to the cache before attention reads it, and the tensors that must live until the launch.
struct Append {
  flash_attn::AppendParams p;
  OptionalTensor cos, sin, q_rotated;
};

// queries_advance: whether something besides the window makes query rows see different keys, so that each has its own
// rotary position.
Append append_of(const FwdParams& fwd, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                 const CacheOptions& options, bool queries_advance) {
  const auto& [k, v] = std::tie(options.k, options.v);
  STD_TORCH_CHECK(v.has_value() && options.rotary_cos.has_value() == options.rotary_sin.has_value(),
                  "k comes with v, and rotary_cos with rotary_sin");
  Append append{.p = {.problem = fwd.problem, .q = fwd.q, .pages = fwd.pages}};
  AppendParams& p = append.p;
  for (const auto& [name, x] : {std::pair("k", &*k), std::pair("v", &*v)}) {
    check_like(*x, q, name);
    check_shape(*x, {q.size(0), k->size(1), k_cache.size(2), x == &*k ? q.size(3) : v_cache.size(3)}, name);
  }
  p.seqlen_new = fwd.problem.appended_k;
  p.k = ref(*k), p.v = ref(*v);
  p.k_cache = mutable_ref(k_cache), p.v_cache = mutable_ref(v_cache);
  if (!options.rotary_cos) return append;
  const Tensor &cos = *options.rotary_cos, &sin = *options.rotary_sin;
  check_device(cos, q, "rotary_cos");
  check_device(sin, q, "rotary_sin");
  STD_TORCH_CHECK(cos.dim() == 2 && 2 * cos.size(1) <= q.size(3),
                  "rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim at most ", q.size(3));
  check_shape(sin, {cos.size(0), cos.size(1)}, "rotary_sin");
  check_dtype(sin, cos.scalar_type(), "rotary_sin");
  append.cos = as_contiguous(cos), append.sin = as_contiguous(sin);
  p.cos = pointer<void>(append.cos), p.sin = pointer<void>(append.sin);
  p.table_dtype = dtype_of(cos, "rotary_cos");
  p.positions = seqlen(cos.size(0), "rotary_cos");
  p.rotary_dim = static_cast<int>(2 * cos.size(1));
  p.interleaved = options.rotary_interleaved;
  p.queries_advance = options.window_left >= 0 || options.window_right >= 0 || queries_advance;
  if (!fwd.problem.seqused_k) {  // of lengths that only the device knows, the kernel takes care (has_table_row)
    const int64_t tokens = std::max<int64_t>(p.seqlen_new, p.queries_advance ? q.size(1) : 1);
    const int64_t needed = fwd.problem.seqlen_k - p.seqlen_new + tokens;
    STD_TORCH_CHECK(needed <= p.positions, "rotary_cos and rotary_sin must have at least ", needed, " rows, found ",
                    p.positions);
  }
  return append;
}

// Appends in a kernel of its own. Returns the queries that attention reads: rotated, or as they are.
TensorRef<const void> append_apart(Append& append, const Tensor& q) {
  if (append.p.cos != nullptr) {
    append.q_rotated = new_tensor({q.size(0), q.size(1), q.size(2), q.size(3)}, q);
    append.p.q_rotated = mutable_ref(*append.q_rotated);
  }
  flash_attn::append(append.p, current_stream(q));
  return append.q_rotated ? ref(*append.q_rotated) : append.p.q;
}

void launch_fwd(FwdParams& p, const Tensor& q, OptionalTensor& bias, int64_t longest_q, int64_t longest_k,
                int64_t num_splits, Append* append = nullptr) {
  if (q.numel() == 0) {
    if (append != nullptr) append_apart(*append, q);
    return;
  }
  p.aligned = all_aligned(p);
  const int device = q.get_device_index();
  const flash_attn::FwdHints hints{
      .longest_q = longest_q,
      .longest_k = longest_k,
      .num_splits = static_cast<int>(std::clamp<int64_t>(num_splits, 0, flash_attn::kMaxSplits)),
      .multiprocessors = num_multiprocessors(device),
      .shared_bytes = max_shared_bytes(device),
      .has_sm90 = flash_attn::has_sm90(device)};
  place_bias(p.problem, bias, q, wants_tiled_bias(p, hints));
  flash_attn::FwdChoice choice = plan_fwd(p, hints);
  if (append != nullptr && appends_in_decoding(p, choice.plan, append->p, hints)) {
    std::get<flash_attn::DecodePlan>(choice.plan).append = &append->p;
  } else if (append != nullptr) {
    p.q = append_apart(*append, q);
    p.aligned = all_aligned(p);
    choice = plan_fwd(p, hints);
  }
  auto& [plan, scratch] = choice;
  const cudaStream_t stream = current_stream(q);
  OptionalTensor partials;
  const int64_t partial_size = scratch.out + scratch.softmax;
  if (partial_size > 0) partials = new_tensor({partial_size}, aoti_torch_dtype_float32(), q);
  std::optional<Counters> counters;
  if (scratch.counters > 0) counters = zero_counters(scratch.counters, q, stream);
  use_scratch(plan, scratch, partials ? static_cast<float*>(partials->mutable_data_ptr()) : nullptr,
              counters ? counters->data : nullptr);
  flash_attn::fwd(p, plan, stream);
}

int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// The lengths and the dropout of packed and padded batches.
void set_entries(Problem& p, Options& options, const Tensor& q) {
  p.cu_seqlens_q = index_pointer(options.cu_seqlens_q, q, p.batch + 1, "cu_seqlens_q");
  p.cu_seqlens_k = index_pointer(options.cu_seqlens_k, q, p.batch + 1, "cu_seqlens_k");
  p.seqused_k = index_pointer(options.seqused_k, q, p.batch, "seqused_k");
  p.leftpad_k = index_pointer(options.leftpad_k, q, p.batch, "leftpad_k");
  set_dropout(p, options, q);
}

int64_t batch_of(const Inputs& x, const Options& options) {
  const bool tokens = options.cu_seqlens_q.has_value();
  const int64_t batch = tokens ? options.cu_seqlens_q->numel() - 1 : x.q.batch;
  STD_TORCH_CHECK(batch >= 0 && (tokens || options.block_table || x.k.batch == batch), "k must have q's batch size ",
                  batch);
  return batch;
}

// The inputs of a forward, without its results.
struct FwdCall {
  FwdParams p;
  View<const void> q;
  bool tokens, packed;
  int64_t longest_q, longest_k;
};

FwdCall fwd_call(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options) {
  const bool tokens = options.cu_seqlens_q.has_value();
  OptionalTensor& block_table = options.block_table;
  if (k) check_like(*k, q, "k");
  if (v) check_like(*v, q, "v");
  const Inputs x = unpack<const void>(q, k, v, tokens, block_table.has_value());
  check_inputs(x);
  const int64_t batch = batch_of(x, options);

  FwdParams p{};
  p.problem = problem_of(q, x, batch, options);
  set_entries(p.problem, options, q);
  p.pages = pages_of(block_table, q, batch, x.k.seqlen);
  if (block_table) p.problem.seqlen_k = p.problem.capacity_k = seqlen(block_table->size(1) * x.k.seqlen, "block_table");
  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref;
  return {.p = p,
          .q = x.q,
          .tokens = tokens,
          .packed = !k,
          .longest_q = tokens ? options.max_seqlen_q.value_or(x.q.seqlen) : x.q.seqlen,
          .longest_k = tokens ? options.max_seqlen_k.value_or(p.problem.seqlen_k) : p.problem.seqlen_k};
}

// Runs a forward and returns out. Other results go where the call already points.
Tensor run_for_out(FwdCall& call, const Tensor& q, OptionalTensor bias = std::nullopt) {
  const Tensor out = new_out(q, call.q, call.p.problem.head_dim_v, call.tokens, call.packed);
  call.p.out = mutable_ref(out);
  launch_fwd(call.p, q, bias, call.longest_q, call.longest_k, /*num_splits=*/0);
  return out;
}

// A new softmax_lse of the queries, which the call then writes.
Tensor add_lse(FwdParams& p, const Tensor& q, const View<const void>& queries, bool tokens) {
  const Tensor softmax_lse = new_lse(q, queries, tokens);
  p.softmax_lse = static_cast<float*>(softmax_lse.mutable_data_ptr());
  return softmax_lse;
}

std::tuple<Tensor, Tensor> run_fwd_call(FwdCall& call, const Tensor& q, OptionalTensor bias = std::nullopt) {
  const Tensor softmax_lse = add_lse(call.p, q, call.q, call.tokens);
  return {run_for_out(call, q, bias), softmax_lse};
}

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  return run_fwd_call(call, q);
}

// The plain ops: k and v are tensors, and the schema ends after the window or, of a cache, after block_table.

std::tuple<Tensor, Tensor> fwd_plain(const Tensor& q, const Tensor& k, const Tensor& v, Options& options) {
  return fwd(q, k, v, options);
}

Tensor fwd_plain_out(const Tensor& q, const Tensor& k, const Tensor& v, Options& options) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  return run_for_out(call, q);
}

// out, softmax_lse, row_max and lse_lo
using FeatureResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

FeatureResults run_with_features(FwdCall& call, const Tensor& q, OptionalTensor& sink, OptionalTensor& bias,
                                 const Options& options, Features& features) {
  set_features(call.p.problem, sink, bias, features, options.block_table.has_value(), q);
  const Tensor row_max = new_row_values(call.p.row_max, q, call.q, call.tokens, features.row_max);
  const Tensor lse_lo = new_lse_lo(call.p.lse_lo, q, call.q, call.tokens, bias);
  const auto [out, softmax_lse] = run_fwd_call(call, q, bias);
  return {out, softmax_lse, row_max, lse_lo};
}

FeatureResults fwd_features(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor& sink,
                            OptionalTensor& bias, Options& options, Features& features) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  return run_with_features(call, q, sink, bias, options, features);
}

// Also returns the rounding error of out (FwdParams::out_lo).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fwd_with_residue(const Tensor& q, const OptionalTensor& k,
                                                                    const OptionalTensor& v, OptionalTensor& sink,
                                                                    OptionalTensor& bias, Options& options,
                                                                    Features& features) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  const Tensor out_lo = new_out(q, call.q, call.p.problem.head_dim_v, call.tokens, call.packed);
  call.p.out_lo = mutable_ref(out_lo);
  return std::tuple_cat(run_with_features(call, q, sink, bias, options, features), std::tuple(out_lo));
}

// S_dmask of a forward with these arguments.
Tensor probabilities(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options) {
  STD_TORCH_CHECK(options.dropout_p > 0, "dropout_p must be more than 0 for S_dmask, found ", options.dropout_p);
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  FwdParams& p = call.p;
  STD_TORCH_CHECK(p.problem.head_dim <= flash_attn::kMostDmaskHeadDim, "head_dim must be at most ",
                  flash_attn::kMostDmaskHeadDim, " for S_dmask, found ", p.problem.head_dim);
  p.aligned = flash_attn::is_aligned(p.q, p.problem.head_dim) && flash_attn::is_aligned(p.k, p.problem.head_dim);
  const int64_t rows = round_up(call.longest_q, 128), cols = round_up(call.longest_k, 128);
  Tensor s_dmask = torch::stable::new_zeros(q, {p.problem.batch, p.problem.heads, rows, cols});
  if (q.numel() == 0) return s_dmask;
  flash_attn::dmask({.fwd = p,
                     .s_dmask = s_dmask.mutable_data_ptr(),
                     .rows = seqlen(rows, "max_seqlen_q"),
                     .cols = seqlen(cols, "max_seqlen_k")},
                    current_stream(q));
  return s_dmask;
}

// Returns the tensor as kernels read it fastest: a copy if its rows cannot be moved in aligned chunks but those of a
// copy can.
Tensor in_chunks(const Tensor& x) {
  const int head_dim = static_cast<int>(x.size(-1));
  return head_dim % 8 == 0 && !flash_attn::is_aligned(ref(x), head_dim) ? as_contiguous(x) : x;
}
OptionalTensor in_chunks(const OptionalTensor& x) { return x ? OptionalTensor(in_chunks(*x)) : std::nullopt; }

void check_same_shape(const auto& x, const View<const void>& like, int64_t head_dim, const char* name,
                      const char* like_name) {
  STD_TORCH_CHECK(x.batch == like.batch && x.seqlen == like.seqlen && x.heads == like.heads && x.head_dim == head_dim,
                  name, " must have the shape of ", like_name, " with head_dim ", head_dim);
}

// softmax_d, in the layout that BwdParams says.
Tensor new_row_sums(const Tensor& q, const Problem& p) {
  constexpr int64_t kPad = flash_attn::kRowPad;
  if (p.cu_seqlens_q) return new_tensor({p.heads, p.seqlen_q + kPad * p.batch}, aoti_torch_dtype_float32(), q);
  return new_tensor({p.batch, p.heads, round_up(p.seqlen_q, kPad)}, aoti_torch_dtype_float32(), q);
}

void check_row_values(const Tensor& x, const Tensor& q, const Problem& p, const char* name) {
  check_device(x, q, name);
  check_dtype(x, ScalarType::Float, name);
  if (p.cu_seqlens_q) return check_shape(x, {p.heads, p.seqlen_q}, name);
  check_shape(x, {p.batch, p.heads, p.seqlen_q}, name);
}

// The backward. set_more(params, hints) adds features before it is planned; use(params) runs after its launch.
template <typename SetMore, typename Use>
Tensor run_bwd(const Tensor& dout, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, const Tensor& out,
               const Tensor& softmax_lse, const OptionalTensor& dlse, const OptionalTensor& out_lo, const Tensor& dq,
               const OptionalTensor& dk, const OptionalTensor& dv, Options& options, SetMore&& set_more, Use&& use) {
  STD_TORCH_CHECK(!options.block_table,
                  "block_table must be None in the backward, found a tensor: keys in pages have no gradient");
  const bool tokens = options.cu_seqlens_q.has_value();
  for (const auto& [name, x] :
       {std::pair("q", OptionalTensor(q)), std::pair("k", k), std::pair("v", v), std::pair("dq", OptionalTensor(dq)),
        std::pair("dk", dk), std::pair("dv", dv), std::pair("out", OptionalTensor(out)), std::pair("out_lo", out_lo)}) {
    if (x) check_like(*x, dout, name);
  }
  const DeviceGuard guard(q.get_device_index());
  // Before anything takes an address: writing to a lazy clone gives it memory of its own, and all its views move with
  // it.
  const Views<void> gradients = unpack<void>(dq, dk, dv, tokens, /*paged=*/false);
  const Tensor q_rows = in_chunks(q), out_rows = in_chunks(out), dout_rows = in_chunks(dout);
  const OptionalTensor k_rows = in_chunks(k), v_rows = in_chunks(v), lo_rows = in_chunks(out_lo);
  const Inputs x = unpack<const void>(q_rows, k_rows, v_rows, tokens, /*paged=*/false);
  const auto out_view = view_of<const void>(out_rows, tokens, 1, 0, "out");
  const auto dout_view = view_of<const void>(dout_rows, tokens, 1, 0, "dout");
  check_inputs(x);
  check_same_shape(out_view, x.q, x.v.head_dim, "out", "q");
  check_same_shape(dout_view, x.q, x.v.head_dim, "dout", "q");
  check_same_shape(gradients.q, x.q, x.q.head_dim, "dq", "q");
  check_same_shape(gradients.k, x.k, x.k.head_dim, "dk", "k");
  check_same_shape(gradients.v, x.v, x.v.head_dim, "dv", "v");

  BwdParams p{};
  p.problem = problem_of(q, x, batch_of(x, options), options);
  set_entries(p.problem, options, q);
  check_row_values(softmax_lse, q, p.problem, "softmax_lse");
  if (dlse) check_row_values(*dlse, q, p.problem, "dlse");
  const Tensor lse_rows = as_contiguous(softmax_lse);
  const OptionalTensor dlse_rows = as_contiguous(dlse);

  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref, p.out = out_view.ref, p.dout = dout_view.ref;
  if (lo_rows) {
    const auto lo_view = view_of<const void>(*lo_rows, tokens, 1, 0, "out_lo");
    check_same_shape(lo_view, x.q, x.v.head_dim, "out_lo", "q");
    p.out_lo = lo_view.ref;
  }
  p.softmax_lse = static_cast<const float*>(lse_rows.const_data_ptr());
  p.dlse = pointer<float>(dlse_rows);
  p.dq = gradients.q.ref, p.dk = gradients.k.ref, p.dv = gradients.v.ref;
  p.aligned = all_aligned(p);
  const int device = q.get_device_index();
  const auto longest = [&](const std::optional<int64_t>& bound, int64_t size) {
    return std::clamp<int64_t>(tokens ? bound.value_or(size) : size, 1, std::max<int64_t>(size, 1));
  };
  const flash_attn::BwdHints hints{.longest_q = longest(options.max_seqlen_q, x.q.seqlen),
                                   .longest_k = longest(options.max_seqlen_k, x.k.seqlen),
                                   .deterministic = options.deterministic,
                                   .has_sm90 = flash_attn::has_sm90(device),
                                   .multiprocessors = num_multiprocessors(device)};
  set_more(p, hints);
  const Tensor softmax_d = new_row_sums(q, p.problem);
  p.softmax_d = static_cast<float*>(softmax_d.mutable_data_ptr());
  auto [plan, sizes] = plan_bwd(p, hints);
  const Tensor scratch = new_tensor({sizes.total()}, aoti_torch_dtype_float32(), q);
  use_scratch(p.problem, plan, sizes, static_cast<float*>(scratch.mutable_data_ptr()));
  flash_attn::bwd(p, plan, current_stream(q));
  use(p);
  return softmax_d;
}

Tensor bwd(const Tensor& dout, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, const Tensor& out,
           const Tensor& softmax_lse, const OptionalTensor& dlse, const OptionalTensor& out_lo, const Tensor& dq,
           const OptionalTensor& dk, const OptionalTensor& dv, Options& options) {
  return run_bwd(
      dout, q, k, v, out, softmax_lse, dlse, out_lo, dq, dk, dv, options, [](auto&&...) {}, [](const BwdParams&) {});
}

// An uninitialised tensor with the shape, and if possible the strides, of x.
Tensor new_like(const Tensor& x) {
  return x.is_contiguous() ? new_tensor_of(x.sizes(), static_cast<int32_t>(x.scalar_type()), x)
                           : torch::stable::empty_like(x);
}

std::tuple<Tensor, Tensor, Tensor> bwd_plain(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& out, const Tensor& softmax_lse, Options& options) {
  const DeviceGuard guard(q.get_device_index());
  const Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
  bwd(dout, q, k, v, out, softmax_lse, /*dlse=*/std::nullopt, /*out_lo=*/std::nullopt, dq, dk, dv, options);
  return {dq, dk, dv};
}

// Writes the gradient of the sink, from what the backward has written.
void sink_gradient(const BwdParams& bwd, const Tensor& dsink, const Tensor& q) {
  const int64_t rows = (bwd.problem.cu_seqlens_q ? 1 : bwd.problem.batch) * int64_t{bwd.problem.seqlen_q};
  const int64_t chunks = std::max<int64_t>(1, round_up(rows, flash_attn::kSinkChunk) / flash_attn::kSinkChunk);
  flash_attn::SinkParams p{.bwd = bwd, .dsink = dsink.mutable_data_ptr(), .rows = rows, .partial = nullptr};
  p.chunks = static_cast<int>(chunks);
  OptionalTensor partial;
  if (chunks > 1) {
    partial = new_tensor({bwd.problem.heads, chunks}, aoti_torch_dtype_float32(), q);
    p.partial = static_cast<float*>(partial->mutable_data_ptr());
  }
  flash_attn::sink_gradient(p, current_stream(q));
}

// Returns the gradient of a bias, as the caller gave it, from what the backward has written.
Tensor bias_gradient(const BwdParams& bwd, const Tensor& bias) {
  STD_TORCH_CHECK(bias.size(4) != 1,
                  "the gradient of an attn_bias of one key has no kernel: call the op bwd_features_reference");
  Tensor dbias = torch::stable::new_empty(bias, bias.sizes());
  const flash_attn::DbiasParams p{.bwd = bwd,
                                  .dbias = dbias.mutable_data_ptr(),
                                  .dtype = dtype_of(bias, "attn_bias"),
                                  .keys = static_cast<int>(bias.size(4)),
                                  .rows = bias_rows(dbias, batch2_size(bias, bwd.problem))};
  flash_attn::DbiasPlan plan = plan_dbias(p, num_multiprocessors(bias.get_device_index()));
  if (plan.num_items == 0) return torch::stable::zero_(dbias);
  OptionalTensor partial;
  if (const int64_t size = scratch_of(plan); size > 0) {
    partial = new_tensor({size}, aoti_torch_dtype_float32(), bias);
    plan.partial = static_cast<float*>(partial->mutable_data_ptr());
  }
  flash_attn::bias_gradient(p, plan, current_stream(bias));
  return dbias;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd_features(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
    const OptionalTensor& dlse, const OptionalTensor& out_lo, const OptionalTensor& lse_lo, bool wants_dbias,
    OptionalTensor& sink, OptionalTensor& bias, Options& options, Features& features) {
  STD_TORCH_CHECK(bias || !wants_dbias, "wants_dbias must be false without an attn_bias, found true");
  const DeviceGuard guard(q.get_device_index());
  const Tensor dq = torch::stable::empty_like(q), dk = torch::stable::empty_like(k), dv = torch::stable::empty_like(v);
  const Tensor dsink = sink ? torch::stable::empty_like(*sink) : new_tensor({0}, q);
  Tensor dbias = new_tensor({0}, q);
  const OptionalTensor given_bias = bias, lo_rows = as_contiguous(lse_lo);
  const auto set_more = [&](BwdParams& p, const flash_attn::BwdHints& hints) {
    if (lo_rows) check_row_values(*lo_rows, q, p.problem, "lse_lo");
    p.lse_lo = pointer<float>(lo_rows);
    set_features(p.problem, sink, bias, features, /*paged=*/false, q);
    place_bias(p.problem, bias, q, wants_tiled_bias(p, hints));
  };
  const auto find_more = [&](const BwdParams& p) {
    if (sink) sink_gradient(p, dsink, q);
    if (wants_dbias) dbias = bias_gradient(p, *given_bias);
  };
  run_bwd(dout, q, k, v, out, softmax_lse, dlse, out_lo, dq, dk, dv, options, set_more, find_more);
  return {dq, dk, dv, dsink, dbias};
}

// Attention over a cache. set_more(params, queries) adds features and results besides out, which is returned;
// queries_advance as in append_of.
template <typename SetMore>
Tensor run_kvcache(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, OptionalTensor bias,
                   CacheOptions& options, bool queries_advance, SetMore&& set_more) {
  OptionalTensor& block_table = options.block_table;
  check_like(k_cache, q, "k_cache");
  check_like(v_cache, q, "v_cache");
  if (options.k) {  // appending writes to the caches: gives lazy clones memory of their own before any address is taken
    k_cache.mutable_data_ptr();
    v_cache.mutable_data_ptr();
  }
  const Inputs x = unpack<const void>(q, k_cache, v_cache, /*packed_tokens=*/false, block_table.has_value());
  check_inputs(x);
  const int64_t batch = x.q.batch;
  STD_TORCH_CHECK(block_table || options.cache_batch_idx || x.k.batch == batch, "k_cache must have q's batch size ",
                  batch);

  const DeviceGuard guard(q.get_device_index());
  FwdParams p{};
  p.problem = problem_of(q, x, batch, options);
  p.pages = pages_of(block_table, q, batch, x.k.seqlen);
  if (block_table) p.problem.capacity_k = seqlen(block_table->size(1) * x.k.seqlen, "block_table");
  p.problem.appended_k = options.k ? seqlen(options.k->size(1), "k") : 0;
  const int64_t filled = options.cache_seqlen.value_or(p.problem.capacity_k);
  STD_TORCH_CHECK(filled >= 0, "cache_seqlens must be at least 0, found ", filled);
  p.problem.seqlen_k = seqlen(filled + p.problem.appended_k, "cache_seqlen");
  p.problem.seqused_k = index_pointer(options.cache_seqlens, q, batch, "cache_seqlens");
  p.problem.leftpad_k = index_pointer(options.cache_leftpad, q, batch, "cache_leftpad");
  p.problem.batch_index = index_pointer(options.cache_batch_idx, q, batch, "cache_batch_idx");

  set_more(p, x.q);

  const Tensor out = new_out(q, x.q, x.v.head_dim, /*tokens=*/false, /*packed=*/false);
  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref;
  std::optional<Append> append;
  if (options.k) append = append_of(p, q, k_cache, v_cache, options, queries_advance);
  p.out = mutable_ref(out);
  const int64_t longest_k = options.cache_seqlens ? p.problem.capacity_k : p.problem.seqlen_k;
  launch_fwd(p, q, bias, x.q.seqlen, std::min<int64_t>(longest_k, p.problem.capacity_k), options.num_splits,
             append ? &*append : nullptr);
  return out;
}

std::tuple<Tensor, Tensor> fwd_kvcache(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                       CacheOptions& options) {
  Tensor softmax_lse;
  const auto set_more = [&](FwdParams& p, const View<const void>& queries) {
    softmax_lse = add_lse(p, q, queries, /*tokens=*/false);
  };
  const Tensor out =
      run_kvcache(q, k_cache, v_cache, /*bias=*/std::nullopt, options, /*queries_advance=*/false, set_more);
  return {out, softmax_lse};
}

Tensor fwd_kvcache_plain_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, CacheOptions& options) {
  return run_kvcache(q, k_cache, v_cache, /*bias=*/std::nullopt, options, /*queries_advance=*/false, [](auto&&...) {});
}

FeatureResults fwd_kvcache_features(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, OptionalTensor& sink,
                                    OptionalTensor& bias, CacheOptions& options, Features& features) {
  STD_TORCH_CHECK(!features.causal || !options.rotary_cos,
                  "causal of each entry has no kernel with rotary_cos: call the op fwd_kvcache_features_reference");
  const bool queries_advance = features.key_ranges || features.attention_chunk > 0;
  const bool paged = options.block_table.has_value();
  Tensor softmax_lse, row_max, lse_lo;
  const auto set_more = [&](FwdParams& p, const View<const void>& queries) {
    softmax_lse = add_lse(p, q, queries, /*tokens=*/false);
    set_features(p.problem, sink, bias, features, paged, q);
    row_max = new_row_values(p.row_max, q, queries, /*tokens=*/false, features.row_max);
    lse_lo = new_lse_lo(p.lse_lo, q, queries, /*tokens=*/false, bias);
  };
  const Tensor out = run_kvcache(q, k_cache, v_cache, bias, options, queries_advance, set_more);
  return {out, softmax_lse, row_max, lse_lo};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("fwd", Boxed<&fwd>::call);
  m.impl("fwd_plain", Boxed<&fwd_plain, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_plain_out", Boxed<&fwd_plain_out, /*kMayEndEarly=*/true>::call);
  m.impl("probabilities", Boxed<&probabilities>::call);
  m.impl("bwd", Boxed<&bwd>::call);
  m.impl("bwd_plain", Boxed<&bwd_plain, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_features", Boxed<&fwd_features>::call);
  m.impl("fwd_with_residue", Boxed<&fwd_with_residue>::call);
  m.impl("bwd_features", Boxed<&bwd_features>::call);
  m.impl("fwd_kvcache", Boxed<&fwd_kvcache>::call);
  m.impl("fwd_kvcache_plain_out", Boxed<&fwd_kvcache_plain_out, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_kvcache_features", Boxed<&fwd_kvcache_features>::call);
}

}  // namespace flash::binding
