#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

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
using OptionalTensor = std::optional<Tensor>;

// A tensor (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), or a part of a packed one.
struct View {
  TensorRef<const void> ref;
  int64_t batch, seqlen, heads, head_dim;  // tokens are one batch entry
};

// Part `index` of x along its dimension -3 if there are several, or x itself.
View view_of(const Tensor& x, bool tokens, int64_t parts, int64_t index, const char* name) {
  const auto sizes = x.sizes(), strides = x.strides();
  const size_t dims = (tokens ? 3 : 4) + (parts > 1);
  STD_TORCH_CHECK(sizes.size() == dims, name, " must have ", dims, " dimensions, found shape ", shape_string(sizes));
  STD_TORCH_CHECK(parts == 1 || sizes[dims - 3] == parts, name, " must have size ", parts,
                  " in dimension -3, found shape ", shape_string(sizes));
  const size_t seqlen_dim = dims - 3 - (parts > 1);
  const auto stride = [&](size_t dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
  const auto* data = static_cast<const char*>(x.const_data_ptr());
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

struct Inputs {
  View q, k, v;
};

// q, k and v, given separately or packed: without v, k holds keys and values; without k, too, q holds all three.
Inputs unpack(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, bool packed_tokens, bool paged) {
  if (!k) {
    return {view_of(q, packed_tokens, 3, 0, "qkv"), view_of(q, packed_tokens, 3, 1, "qkv"),
            view_of(q, packed_tokens, 3, 2, "qkv")};
  }
  const bool key_tokens = packed_tokens && !paged;
  const View queries = view_of(q, packed_tokens, 1, 0, "q");
  if (!v) return {queries, view_of(*k, key_tokens, 2, 0, "kv"), view_of(*k, key_tokens, 2, 1, "kv")};
  return {queries, view_of(*k, key_tokens, 1, 0, "k"), view_of(*v, key_tokens, 1, 0, "v")};
}

void check_like(const Tensor& x, const Tensor& q, const char* name) {
  check_device(x, q, name);
  check_dtype(x, q.scalar_type(), name);
}

void check_inputs(const Inputs& x) {
  const auto& [q, k, v] = x;
  STD_TORCH_CHECK(q.head_dim >= 1 && q.head_dim <= 256, "head_dim must be between 1 and 256, found ", q.head_dim);
  STD_TORCH_CHECK(k.head_dim == q.head_dim && v.head_dim == q.head_dim && v.heads == k.heads && v.seqlen == k.seqlen &&
                      v.batch == k.batch,
                  "k and v must have the same shape, and q's head_dim ", q.head_dim);
  STD_TORCH_CHECK(q.heads == k.heads || (k.heads > 0 && q.heads % k.heads == 0),
                  "k must have a number of heads that divides q's ", q.heads, ", found ", k.heads);
}

// An int32 tensor (size,) that is read on the device, with its elements adjacent; null if there is none.
const int* index_pointer(OptionalTensor& x, const Tensor& q, int64_t size, const char* name) {
  if (!x) return nullptr;
  check_device(*x, q, name);
  check_dtype(*x, ScalarType::Int, name);
  check_shape(*x, {size}, name);
  x = torch::stable::contiguous(*x);
  return pointer<int>(x);
}

int window_side(int64_t window) {
  return window < 0 ? flash_attn::kUnbounded : static_cast<int>(std::min<int64_t>(window, flash_attn::kUnbounded));
}

int seqlen(int64_t length, const char* name) {
  STD_TORCH_CHECK(length < flash_attn::kMaxSeqlen, name, " is too long: ", length, " positions");
  return static_cast<int>(length);
}

struct ScoreOptions {
  double softmax_scale;
  int64_t window_left, window_right;
  double softcap;
};

// Shapes, masks and scores; lengths of keys are those of dense tensors until the caller says otherwise.
Problem problem_of(const Tensor& q, const Inputs& x, int64_t batch, const ScoreOptions& options,
                   OptionalTensor& alibi_slopes) {
  Problem p{};
  p.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(p.dtype != DType::kFloat32,
                  "q must have dtype float16 or bfloat16 for the CUDA kernels, found float32");
  p.batch = narrow_size(batch, "the batch");
  p.heads = narrow_size(x.q.heads, "the number of heads");
  p.heads_k = narrow_size(x.k.heads, "the number of key heads");
  p.head_dim = static_cast<int>(x.q.head_dim);
  p.seqlen_q = seqlen(x.q.seqlen, "q");
  p.seqlen_k = p.capacity_k = seqlen(x.k.seqlen, "k");
  p.window_left = window_side(options.window_left);
  p.window_right = window_side(options.window_right);
  // A scale of 0 makes all scores 0, but hidden ones are -inf, and -inf * 0 is NaN.
  p.softmax_scale = std::max(static_cast<float>(options.softmax_scale), 1e-30f);
  p.softcap = std::max(static_cast<float>(options.softcap), 0.f);
  p.dropout_rescale = 1;
  if (alibi_slopes) {
    check_device(*alibi_slopes, q, "alibi_slopes");
    check_dtype(*alibi_slopes, ScalarType::Float, "alibi_slopes");
    alibi_slopes = torch::stable::contiguous(*alibi_slopes);
    if (alibi_slopes->dim() == 2) check_shape(*alibi_slopes, {batch, x.q.heads}, "alibi_slopes");
    if (alibi_slopes->dim() != 2) check_shape(*alibi_slopes, {x.q.heads}, "alibi_slopes");
    p.alibi_slopes = pointer<float>(alibi_slopes);
    p.alibi_batch_stride = alibi_slopes->dim() == 2 ? x.q.heads : 0;
  }
  return p;
}

void set_dropout(Problem& p, double dropout_p, const OptionalTensor& rng_state, const Tensor& q) {
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
  block_table = torch::stable::contiguous(*block_table);
  return {.block_table = pointer<int>(block_table),
          .batch_stride = block_table->size(1),
          .page_size = Divisor(narrow_size(page_size, "a page"))};
}

// (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim) in q's place: like q, or contiguous if q is packed.
Tensor new_out(const Tensor& q, const View& view, bool tokens, bool packed) {
  if (!packed && !q.is_contiguous()) return torch::stable::empty_like(q);
  if (tokens) return new_tensor({view.seqlen, view.heads, view.head_dim}, q);
  return new_tensor({view.batch, view.seqlen, view.heads, view.head_dim}, q);
}

Tensor new_lse(const Tensor& q, const View& view, bool tokens) {
  if (tokens) return new_tensor({view.heads, view.seqlen}, aoti_torch_dtype_float32(), q);
  return new_tensor({view.batch, view.heads, view.seqlen}, aoti_torch_dtype_float32(), q);
}

void launch_fwd(FwdParams& p, const Tensor& q, int64_t longest_q, int64_t longest_k, int64_t num_splits) {
  if (q.numel() == 0) return;
  p.aligned = all_aligned(p);
  const int device = q.get_device_index();
  auto [plan, scratch] =
      plan_fwd(p, {.longest_q = longest_q,
                   .longest_k = longest_k,
                   .num_splits = static_cast<int>(std::clamp<int64_t>(num_splits, 0, flash_attn::kMaxSplits)),
                   .multiprocessors = num_multiprocessors(device),
                   .shared_bytes = max_shared_bytes(device),
                   .has_sm90 = flash_attn::has_sm90(device)});
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

// What a forward is given, but for its results.
struct FwdCall {
  FwdParams p;
  View q;
  bool tokens, packed;
  int64_t longest_q, longest_k;
};

FwdCall fwd_call(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, const ScoreOptions& scores,
                 OptionalTensor& cu_seqlens_q, OptionalTensor& cu_seqlens_k, std::optional<int64_t> max_seqlen_q,
                 std::optional<int64_t> max_seqlen_k, OptionalTensor& alibi_slopes, OptionalTensor& seqused_k,
                 OptionalTensor& leftpad_k, const OptionalTensor& rng_state, double dropout_p,
                 OptionalTensor& block_table) {
  const bool tokens = cu_seqlens_q.has_value();
  if (k) check_like(*k, q, "k");
  if (v) check_like(*v, q, "v");
  const Inputs x = unpack(q, k, v, tokens, block_table.has_value());
  check_inputs(x);
  const int64_t batch = tokens ? cu_seqlens_q->numel() - 1 : x.q.batch;
  STD_TORCH_CHECK(batch >= 0 && (tokens || block_table || x.k.batch == batch), "k must have q's batch size ", batch);

  FwdParams p{};
  p.problem = problem_of(q, x, batch, scores, alibi_slopes);
  p.problem.cu_seqlens_q = index_pointer(cu_seqlens_q, q, batch + 1, "cu_seqlens_q");
  p.problem.cu_seqlens_k = index_pointer(cu_seqlens_k, q, batch + 1, "cu_seqlens_k");
  p.problem.seqused_k = index_pointer(seqused_k, q, batch, "seqused_k");
  p.problem.leftpad_k = index_pointer(leftpad_k, q, batch, "leftpad_k");
  set_dropout(p.problem, dropout_p, rng_state, q);
  p.pages = pages_of(block_table, q, batch, x.k.seqlen);
  if (block_table) p.problem.seqlen_k = p.problem.capacity_k = seqlen(block_table->size(1) * x.k.seqlen, "block_table");
  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref;
  return {.p = p,
          .q = x.q,
          .tokens = tokens,
          .packed = !k,
          .longest_q = tokens ? max_seqlen_q.value_or(x.q.seqlen) : x.q.seqlen,
          .longest_k = tokens ? max_seqlen_k.value_or(p.problem.seqlen_k) : p.problem.seqlen_k};
}

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, double softmax_scale,
                               int64_t window_left, int64_t window_right, double softcap,
                               bool /*deterministic: always*/, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k,
                               std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k,
                               OptionalTensor alibi_slopes, OptionalTensor seqused_k, OptionalTensor leftpad_k,
                               const OptionalTensor& rng_state, double dropout_p, OptionalTensor block_table) {
  const DeviceGuard guard(q.get_device_index());
  auto [p, q_view, tokens, packed, longest_q, longest_k] =
      fwd_call(q, k, v, {softmax_scale, window_left, window_right, softcap}, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
               max_seqlen_k, alibi_slopes, seqused_k, leftpad_k, rng_state, dropout_p, block_table);
  const Tensor out = new_out(q, q_view, tokens, packed);
  const Tensor softmax_lse = new_lse(q, q_view, tokens);
  p.out = mutable_ref(out);
  p.softmax_lse = static_cast<float*>(softmax_lse.mutable_data_ptr());
  launch_fwd(p, q, longest_q, longest_k, /*num_splits=*/0);
  return {out, softmax_lse};
}

// S_dmask of a forward with these arguments.
Tensor probabilities(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, double softmax_scale,
                     int64_t window_left, int64_t window_right, double softcap, bool /*deterministic: always*/,
                     OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k, std::optional<int64_t> max_seqlen_q,
                     std::optional<int64_t> max_seqlen_k, OptionalTensor alibi_slopes, OptionalTensor seqused_k,
                     OptionalTensor leftpad_k, const OptionalTensor& rng_state, double dropout_p,
                     OptionalTensor block_table) {
  STD_TORCH_CHECK(dropout_p > 0, "dropout_p must be more than 0 for S_dmask, found ", dropout_p);
  const DeviceGuard guard(q.get_device_index());
  FwdCall call =
      fwd_call(q, k, v, {softmax_scale, window_left, window_right, softcap}, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
               max_seqlen_k, alibi_slopes, seqused_k, leftpad_k, rng_state, dropout_p, block_table);
  FwdParams& p = call.p;
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

// The tensor as a kernel reads it fastest: a copy if its rows cannot be moved in chunks and those of a copy can.
Tensor in_chunks(const Tensor& x) {
  const int head_dim = static_cast<int>(x.size(-1));
  return head_dim % 8 == 0 && !flash_attn::is_aligned(ref(x), head_dim) ? torch::stable::contiguous(x) : x;
}
OptionalTensor in_chunks(const OptionalTensor& x) { return x ? OptionalTensor(in_chunks(*x)) : std::nullopt; }

void check_same_shape(const View& x, const View& like, const char* name, const char* like_name) {
  STD_TORCH_CHECK(
      x.batch == like.batch && x.seqlen == like.seqlen && x.heads == like.heads && x.head_dim == like.head_dim, name,
      " must have the shape of ", like_name);
}

// A view of a tensor that is written to.
TensorRef<> writable(const View& x) {
  const auto& [data, batch, seqlen, heads, head_dim] = x.ref;
  return {const_cast<void*>(data), batch, seqlen, heads, head_dim};
}

// softmax_d, in the layout that BwdParams says.
Tensor new_row_sums(const Tensor& q, const Problem& p) {
  constexpr int64_t kPad = flash_attn::kRowPad;
  if (p.cu_seqlens_q) return torch::stable::new_empty(q, {p.heads, p.seqlen_q + kPad * p.batch}, ScalarType::Float);
  return torch::stable::new_empty(q, {p.batch, p.heads, round_up(p.seqlen_q, kPad)}, ScalarType::Float);
}

void check_row_values(const Tensor& x, const Tensor& q, const Problem& p, const char* name) {
  check_device(x, q, name);
  check_dtype(x, ScalarType::Float, name);
  if (p.cu_seqlens_q) return check_shape(x, {p.heads, p.seqlen_q}, name);
  check_shape(x, {p.batch, p.heads, p.seqlen_q}, name);
}

Tensor bwd(const Tensor& dout, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, const Tensor& out,
           const Tensor& softmax_lse, const OptionalTensor& dlse, const Tensor& dq, const OptionalTensor& dk,
           const OptionalTensor& dv, double softmax_scale, int64_t window_left, int64_t window_right, double softcap,
           bool deterministic, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k,
           std::optional<int64_t> /*max_seqlen_q*/, std::optional<int64_t> /*max_seqlen_k*/,
           OptionalTensor alibi_slopes, OptionalTensor seqused_k, OptionalTensor leftpad_k,
           const OptionalTensor& rng_state, double dropout_p) {
  const bool tokens = cu_seqlens_q.has_value();
  for (const auto& [name, x] :
       {std::pair("q", OptionalTensor(q)), std::pair("k", k), std::pair("v", v), std::pair("dq", OptionalTensor(dq)),
        std::pair("dk", dk), std::pair("dv", dv), std::pair("out", OptionalTensor(out))}) {
    if (x) check_like(*x, dout, name);
  }
  const DeviceGuard guard(q.get_device_index());
  const Tensor q_rows = in_chunks(q), out_rows = in_chunks(out), dout_rows = in_chunks(dout);
  const OptionalTensor k_rows = in_chunks(k), v_rows = in_chunks(v);
  const Inputs x = unpack(q_rows, k_rows, v_rows, tokens, /*paged=*/false);
  const Inputs gradients = unpack(dq, dk, dv, tokens, /*paged=*/false);
  const View out_view = view_of(out_rows, tokens, 1, 0, "out"), dout_view = view_of(dout_rows, tokens, 1, 0, "dout");
  check_inputs(x);
  check_same_shape(out_view, x.q, "out", "q");
  check_same_shape(dout_view, x.q, "dout", "q");
  check_same_shape(gradients.q, x.q, "dq", "q");
  check_same_shape(gradients.k, x.k, "dk", "k");
  check_same_shape(gradients.v, x.k, "dv", "k");
  const int64_t batch = tokens ? cu_seqlens_q->numel() - 1 : x.q.batch;
  STD_TORCH_CHECK(batch >= 0 && (tokens || x.k.batch == batch), "k must have q's batch size ", batch);

  BwdParams p{};
  p.problem = problem_of(q, x, batch, {softmax_scale, window_left, window_right, softcap}, alibi_slopes);
  p.problem.cu_seqlens_q = index_pointer(cu_seqlens_q, q, batch + 1, "cu_seqlens_q");
  p.problem.cu_seqlens_k = index_pointer(cu_seqlens_k, q, batch + 1, "cu_seqlens_k");
  p.problem.seqused_k = index_pointer(seqused_k, q, batch, "seqused_k");
  p.problem.leftpad_k = index_pointer(leftpad_k, q, batch, "leftpad_k");
  set_dropout(p.problem, dropout_p, rng_state, q);
  check_row_values(softmax_lse, q, p.problem, "softmax_lse");
  if (dlse) check_row_values(*dlse, q, p.problem, "dlse");
  const Tensor lse_rows = torch::stable::contiguous(softmax_lse);
  const OptionalTensor dlse_rows = contiguous(dlse);

  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref, p.out = out_view.ref, p.dout = dout_view.ref;
  p.softmax_lse = static_cast<const float*>(lse_rows.const_data_ptr());
  p.dlse = pointer<float>(dlse_rows);
  p.dq = writable(gradients.q), p.dk = writable(gradients.k), p.dv = writable(gradients.v);
  p.aligned = all_aligned(p);
  const Tensor softmax_d = new_row_sums(q, p.problem);
  p.softmax_d = static_cast<float*>(softmax_d.mutable_data_ptr());
  const int device = q.get_device_index();
  auto [plan, sizes] = plan_bwd(p, {.deterministic = deterministic,
                                    .has_sm90 = flash_attn::has_sm90(device),
                                    .multiprocessors = num_multiprocessors(device)});
  const Tensor scratch = torch::stable::new_empty(q, {sizes.total()}, ScalarType::Float);
  use_scratch(plan, sizes, static_cast<float*>(scratch.mutable_data_ptr()));
  flash_attn::bwd(p, plan, current_stream(q));
  return softmax_d;
}

// New keys and values into the cache. Returns the queries as attention reads them: turned, or as they are.
TensorRef<const void> append(const FwdParams& fwd, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const OptionalTensor& k, const OptionalTensor& v, OptionalTensor rotary_cos,
                             OptionalTensor rotary_sin, bool interleaved, bool has_window, OptionalTensor& q_rotated) {
  if (!k) return fwd.q;
  STD_TORCH_CHECK(v.has_value() && rotary_cos.has_value() == rotary_sin.has_value(),
                  "k comes with v, and rotary_cos with rotary_sin");
  AppendParams p{.problem = fwd.problem, .q = fwd.q, .pages = fwd.pages};
  for (const auto& [name, x] : {std::pair("k", &*k), std::pair("v", &*v)}) {
    check_like(*x, q, name);
    check_shape(*x, {q.size(0), k->size(1), k_cache.size(2), q.size(3)}, name);
  }
  p.seqlen_new = fwd.problem.appended_k;
  p.k = ref(*k), p.v = ref(*v);
  p.k_cache = mutable_ref(k_cache), p.v_cache = mutable_ref(v_cache);
  if (rotary_cos) {
    check_device(*rotary_cos, q, "rotary_cos");
    check_device(*rotary_sin, q, "rotary_sin");
    STD_TORCH_CHECK(rotary_cos->dim() == 2 && 2 * rotary_cos->size(1) <= q.size(3),
                    "rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim at most ", q.size(3));
    check_shape(*rotary_sin, {rotary_cos->size(0), rotary_cos->size(1)}, "rotary_sin");
    check_dtype(*rotary_sin, rotary_cos->scalar_type(), "rotary_sin");
    rotary_cos = torch::stable::contiguous(*rotary_cos), rotary_sin = torch::stable::contiguous(*rotary_sin);
    q_rotated = new_tensor({q.size(0), q.size(1), q.size(2), q.size(3)}, q);
    p.q_rotated = mutable_ref(*q_rotated);
    p.cos = pointer<void>(rotary_cos), p.sin = pointer<void>(rotary_sin);
    p.table_dtype = dtype_of(*rotary_cos, "rotary_cos");
    p.positions = seqlen(rotary_cos->size(0), "rotary_cos");
    p.rotary_dim = static_cast<int>(2 * rotary_cos->size(1));
    p.interleaved = interleaved;
    p.queries_advance = has_window;
    if (!fwd.problem.seqused_k) {  // lengths that only the device knows it looks after itself
      const int64_t tokens = std::max<int64_t>(p.seqlen_new, p.queries_advance ? q.size(1) : 1);
      const int64_t needed = fwd.problem.seqlen_k - p.seqlen_new + tokens;
      STD_TORCH_CHECK(needed <= p.positions, "rotary_cos and rotary_sin must have at least ", needed, " rows, found ",
                      p.positions);
    }
  }
  flash_attn::append(p, current_stream(q));
  return q_rotated ? ref(*q_rotated) : fwd.q;
}

std::tuple<Tensor, Tensor> fwd_kvcache(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                       double softmax_scale, int64_t window_left, int64_t window_right, double softcap,
                                       int64_t num_splits, OptionalTensor cache_seqlens, OptionalTensor block_table,
                                       std::optional<int64_t> cache_seqlen, const OptionalTensor& k,
                                       const OptionalTensor& v, const OptionalTensor& rotary_cos,
                                       const OptionalTensor& rotary_sin, bool rotary_interleaved,
                                       OptionalTensor cache_batch_idx, OptionalTensor cache_leftpad,
                                       OptionalTensor alibi_slopes) {
  check_like(k_cache, q, "k_cache");
  check_like(v_cache, q, "v_cache");
  const Inputs x = unpack(q, k_cache, v_cache, /*packed_tokens=*/false, block_table.has_value());
  check_inputs(x);
  const int64_t batch = x.q.batch;
  STD_TORCH_CHECK(block_table || cache_batch_idx || x.k.batch == batch, "k_cache must have q's batch size ", batch);

  STD_TORCH_CHECK(cache_seqlen.value_or(0) >= 0, "cache_seqlens must be at least 0, found ", *cache_seqlen);

  const DeviceGuard guard(q.get_device_index());
  FwdParams p{};
  p.problem = problem_of(q, x, batch, {softmax_scale, window_left, window_right, softcap}, alibi_slopes);
  p.pages = pages_of(block_table, q, batch, x.k.seqlen);
  if (block_table) p.problem.capacity_k = seqlen(block_table->size(1) * x.k.seqlen, "block_table");
  p.problem.appended_k = k ? seqlen(k->size(1), "k") : 0;
  p.problem.seqlen_k = seqlen(cache_seqlen.value_or(p.problem.capacity_k) + p.problem.appended_k, "cache_seqlen");
  p.problem.seqused_k = index_pointer(cache_seqlens, q, batch, "cache_seqlens");
  p.problem.leftpad_k = index_pointer(cache_leftpad, q, batch, "cache_leftpad");
  p.problem.batch_index = index_pointer(cache_batch_idx, q, batch, "cache_batch_idx");

  const Tensor out = new_out(q, x.q, /*tokens=*/false, /*packed=*/false);
  const Tensor softmax_lse = new_lse(q, x.q, /*tokens=*/false);
  OptionalTensor q_rotated;
  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref;
  const bool has_window = window_left >= 0 || window_right >= 0;
  p.q = append(p, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, has_window, q_rotated);
  p.out = mutable_ref(out);
  p.softmax_lse = static_cast<float*>(softmax_lse.mutable_data_ptr());
  const int64_t longest_k = cache_seqlens ? p.problem.capacity_k : p.problem.seqlen_k;
  launch_fwd(p, q, x.q.seqlen, std::min<int64_t>(longest_k, p.problem.capacity_k), num_splits);
  return {out, softmax_lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&fwd));
  m.impl("probabilities", TORCH_BOX(&probabilities));
  m.impl("bwd", TORCH_BOX(&bwd));
  m.impl("fwd_kvcache", TORCH_BOX(&fwd_kvcache));
}

}  // namespace flash::binding
