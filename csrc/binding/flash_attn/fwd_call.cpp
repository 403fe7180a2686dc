#include "binding/flash_attn/fwd_call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <variant>

#include "binding/boxed.h"
#include "binding/counters.h"
#include "binding/flash_attn/bias.h"
#include "binding/flash_attn/problem.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "common/device.h"
#include "flash_attn/launch.h"

namespace flash::binding::attention {
namespace {

using flash_attn::FwdParams;

// The level of batch invariance of the process (planner.h).
std::atomic<int> batch_invariance{0};

void set_batch_invariant(int64_t level) {
  STD_TORCH_CHECK(0 <= level && level <= 2, "level must be 0, 1 or 2, found ", level);
  batch_invariance = static_cast<int>(level);
}

// A new tensor (batch, seqlen, heads, head_dim_v) or (tokens, heads, head_dim_v): with the strides of q, or contiguous
// if q is packed with k and v or has another head_dim.
Tensor new_like_out(const FwdCall& call, const Tensor& q) {
  const auto& [_, batch, seqlen, heads, head_dim] = call.q;
  const int64_t head_dim_v = call.p.problem.head_dim_v;
  if (!call.packed && !q.is_contiguous() && head_dim == head_dim_v) return torch::stable::empty_like(q);
  if (call.tokens) return new_tensor({seqlen, heads, head_dim_v}, q);
  return new_tensor({batch, seqlen, heads, head_dim_v}, q);
}

// A new tensor for a value of each row, to which `data` then points.
Tensor new_row_values(float*& data, const FwdCall& call, const Tensor& q) {
  const auto& [_, batch, seqlen, heads, head_dim] = call.q;
  const Tensor values = call.tokens ? new_tensor({heads, seqlen}, aoti_torch_dtype_float32(), q)
                                    : new_tensor({batch, heads, seqlen}, aoti_torch_dtype_float32(), q);
  data = static_cast<float*>(values.mutable_data_ptr());
  return values;
}

// Checks the shape of a result: `sizes`, without the first of them where queries are packed.
void check_rows(const Tensor& x, const FwdCall& call, std::initializer_list<int64_t> sizes, const char* name) {
  const auto found = x.sizes();
  STD_TORCH_CHECK(std::equal(found.begin(), found.end(), sizes.begin() + call.tokens, sizes.end()), name,
                  " must have the shape of the result, found ", shape_string(found));
}

// The data of a tensor that the caller gives for a value of each row; null if there is none.
float* given_row_values(const OptionalTensor& x, const FwdCall& call, const Tensor& q, const char* name) {
  if (!x) return nullptr;
  check_device(*x, q, name);
  check_dtype(*x, ScalarType::Float, name);
  check_rows(*x, call, {call.q.batch, call.q.heads, call.q.seqlen}, name);
  STD_TORCH_CHECK(x->is_contiguous(), name, " must be contiguous");
  return static_cast<float*>(x->mutable_data_ptr());
}

// The memory from the first to the last element of a tensor.
std::pair<const char*, const char*> memory_of(const Tensor& x) {
  const auto* data = static_cast<const char*>(x.const_data_ptr());
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t elements = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return {data, data};
    elements += (sizes[dim] - 1) * strides[dim];
  }
  return {data, data + elements * (is_coded(x) ? 1 : size_of(dtype_of(x, "an input")))};
}

// Places for keys and values in fp16: as many as the cache has or, if that is less, as all positions that the entries
// have room for (WidenParams::by_entry), however many they use: a captured graph may be replayed with other lengths,
// and a caller's bound need not hold.
flash_attn::KeyExtent extent_of_wide_keys(const FwdParams& p, bool& by_entry) {
  const flash_attn::Problem& problem = p.problem;
  const flash_attn::KeyExtent all = extent_of_keys(p);
  const bool paged = has_pages(p), packed = !paged && problem.cu_seqlens_k != nullptr;
  const int64_t room = std::max<int64_t>(128, round_up(problem.capacity_k, 128));  // TMA copies whole tiles of one page
  by_entry = !packed && (!paged || problem.batch * room < all.entries * all.rows);
  return by_entry ? flash_attn::KeyExtent{problem.batch, room} : all;
}

TensorRef<const void> as_input(const TensorRef<>& x) { return {x.data, x.batch, x.seqlen, x.heads, x.head_dim}; }

// Has a call with codes read fp16 in place of codes and of queries in bf16, if its kernel does not convert them itself.
// Returns the memory for it, which must live until the launch. It is allocated at once, since that takes time.
OptionalTensor widen(FwdCall& call, const flash_attn::FwdHints& hints, const Tensor& q) {
  FwdParams& p = call.p;
  flash_attn::Problem& problem = p.problem;
  if (reads_codes(p, hints)) return std::nullopt;
  const bool widens_q = p.out_dtype != problem.dtype;
  bool by_entry = false;
  const auto [entries, rows] = extent_of_wide_keys(p, by_entry);
  flash_attn::WidenParams all{.fwd = p,
                              .by_entry = by_entry,
                              .longest_q = static_cast<int>(call.longest_q),
                              .longest_k = static_cast<int>(call.longest_k)};
  const int64_t vectors = entries * rows * problem.heads_k;
  const auto aligned = [](int64_t elements) { return round_up(elements, 8); };  // so that each tensor begins aligned
  const int64_t k_at = aligned(widens_q ? q.numel() : 0), v_at = k_at + aligned(vectors * problem.head_dim);
  const int64_t table_at = v_at + aligned(vectors * problem.head_dim_v), ints = by_entry ? problem.batch : 0;

  OptionalTensor memory = new_tensor({table_at + 2 * ints}, aoti_torch_dtype_float16(), q);
  auto* data = static_cast<uint16_t*>(memory->mutable_data_ptr());
  if (widens_q) {
    all.q = contiguous_ref<void>(data, call.q.batch, call.q.seqlen, problem.heads, problem.head_dim);
    p.q = as_input(all.q);
  }
  const auto keys_at = [&](int64_t place, int64_t channels) {
    return contiguous_ref<void>(vectors > 0 ? data + place : nullptr, entries, rows, problem.heads_k, channels);
  };
  all.k = keys_at(k_at, problem.head_dim), all.v = keys_at(v_at, problem.head_dim_v);
  p.k = as_input(all.k), p.v = as_input(all.v), p.coded = false;
  if (by_entry) problem.batch_index = nullptr;
  if (by_entry && has_pages(p)) {
    all.table = reinterpret_cast<int*>(data + table_at);
    p.pages = {.block_table = all.table,
               .batch_stride = 1,
               .page_size = Divisor(static_cast<int>(rows)),
               .count = problem.batch};
  }
  flash_attn::widen(all, current_stream(q));
  return memory;
}

Tensor no_values(const Tensor& q) { return new_tensor({0}, aoti_torch_dtype_float32(), q); }

flash_attn::FwdHints hints_of(const FwdCall& call, int device) {
  return {.longest_q = call.longest_q,
          .longest_k = call.longest_k,
          .num_splits = static_cast<int>(std::clamp<int64_t>(call.num_splits, 0, flash_attn::kMaxSplits)),
          .invariance = batch_invariance.load(std::memory_order_relaxed),
          .multiprocessors = num_multiprocessors(device),
          .shared_bytes = max_shared_bytes(device),
          .has_sm90 = flash_attn::has_sm90(device)};
}

// Launches the kernel of a plan, with new scratch.
void launch(const FwdParams& p, flash_attn::FwdChoice& choice, const Tensor& q) {
  auto& [plan, scratch] = choice;
  const cudaStream_t stream = current_stream(q);
  OptionalTensor partials;
  const int64_t partial_size = num_partials(scratch);
  if (partial_size > 0) partials = new_tensor({partial_size}, aoti_torch_dtype_float32(), q);
  std::optional<Counters> counters;
  if (scratch.counters > 0) counters = zero_counters(scratch.counters, q, stream);
  use_scratch(plan, scratch, partials ? static_cast<float*>(partials->mutable_data_ptr()) : nullptr,
              counters ? counters->data : nullptr);
  flash_attn::fwd(p, plan, stream);
}

}  // namespace

FwdCall fwd_call(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options,
                 bool takes_codes) {
  const bool tokens = options.cu_seqlens_q.has_value();
  takes_codes &= v.has_value();
  if (k) check_keys(*k, q, "k", takes_codes);
  if (v) check_keys(*v, q, "v", takes_codes);
  const bool coded = takes_codes && check_coded(*k, *v);
  const Inputs x = unpack<const void>(q, k, v, tokens, /*paged=*/options.block_table.has_value());
  check_inputs(x);

  FwdParams p{.problem = problem_of(q, x, batch_of(x, options), options, coded),
              .q = x.q.ref,
              .k = x.k.ref,
              .v = x.v.ref,
              .out_dtype = dtype_of(q, "q"),
              .coded = coded};
  set_entries(p.problem, options, q);
  p.pages = set_pages(p.problem, options.block_table, q, x.k);
  if (options.block_table) p.problem.seqlen_k = p.problem.capacity_k;
  return {.p = p,
          .q = x.q,
          .tokens = tokens,
          .packed = !k,
          .longest_q = longest(options.max_seqlen_q, x.q.seqlen),
          .longest_k = longest(options.max_seqlen_k, p.problem.seqlen_k),
          .num_splits = options.num_splits};
}

void write_to(FwdCall& call, const Tensor& q, const Tensor& out, const OptionalTensor& softmax_lse,
              const OptionalTensor& row_max) {
  const int64_t head_dim_v = call.p.problem.head_dim_v;
  check_like(out, q, "out");
  check_rows(out, call, {call.q.batch, call.q.seqlen, call.q.heads, head_dim_v}, "out");
  const auto sizes = out.sizes(), strides = out.strides();
  STD_TORCH_CHECK(head_dim_v == 1 || strides[strides.size() - 1] == 1, "out must have a contiguous last dimension");
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    STD_TORCH_CHECK(sizes[dim] <= 1 || strides[dim] != 0, "out must not be expanded, since it is written");
  }
  call.p.out = mutable_ref(out);
  call.p.softmax_lse = given_row_values(softmax_lse, call, q, "softmax_lse");
  call.p.row_max = given_row_values(row_max, call, q, "row_max");
}

void check_apart(const Tensor& written, std::initializer_list<const Tensor*> read) {
  const auto [first, last] = memory_of(written);
  for (const Tensor* x : read) {
    const auto [begin, end] = memory_of(*x);
    STD_TORCH_CHECK(last <= begin || end <= first, "out may share memory with an input");
  }
}

Tensor new_out(FwdCall& call, const Tensor& q) {
  const Tensor out = new_like_out(call, q);
  call.p.out = mutable_ref(out);
  return out;
}

Tensor new_out_lo(FwdCall& call, const Tensor& q) {
  const Tensor out_lo = new_like_out(call, q);
  call.p.out_lo = mutable_ref(out_lo);
  return out_lo;
}

Tensor new_lse(FwdCall& call, const Tensor& q) { return new_row_values(call.p.softmax_lse, call, q); }

Tensor new_row_max(FwdCall& call, const Tensor& q, bool wanted) {
  return wanted ? new_row_values(call.p.row_max, call, q) : no_values(q);
}

Tensor new_lse_lo(FwdCall& call, const Tensor& q, const OptionalTensor& bias) {
  if (!bias) return no_values(q);
  Tensor lse_lo = new_row_values(call.p.lse_lo, call, q);
  return bias->numel() == 0 ? torch::stable::zero_(lse_lo) : lse_lo;  // a bias of no keys leaves nothing to round
}

void plan_and_launch(FwdCall& call, const Tensor& q, OptionalTensor bias, Append* append) {
  FwdParams& p = call.p;
  if (q.numel() == 0) {
    if (append != nullptr) append_apart(*append, q);
    return;
  }
  p.aligned = all_aligned(p);
  const flash_attn::FwdHints hints = hints_of(call, q.get_device_index());
  p.one_instance = hints.invariance == 2;
  OptionalTensor widened;
  if (p.coded) {
    if (append != nullptr) p.q = append_apart(*std::exchange(append, nullptr), q);
    p.aligned = all_aligned(p);
    widened = widen(call, hints, q);
    p.aligned = all_aligned(p);
  }
  place_bias(p.problem, bias, q, wants_tiled_bias(p, hints));
  flash_attn::FwdChoice choice = plan_fwd(p, hints);
  if (append != nullptr && appends_in_decoding(p, choice.plan, append->p, hints)) {
    std::get<flash_attn::DecodePlan>(choice.plan).append = &append->p;
  } else if (append != nullptr) {
    p.q = append_apart(*append, q);
    p.aligned = all_aligned(p);
    choice = plan_fwd(p, hints);
  }
  launch(p, choice, q);
}

// The op has no tensor that would say which device it is for.
STABLE_TORCH_LIBRARY_FRAGMENT(flash_attn, m) { m.def("set_batch_invariant(int level) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(flash_attn, CompositeExplicitAutograd, m) {
  m.impl("set_batch_invariant", Boxed<&set_batch_invariant>::call);
}

}  // namespace flash::binding::attention
