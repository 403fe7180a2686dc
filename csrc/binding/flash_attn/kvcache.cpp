// Attention over a cache of keys and values, to which new ones may be appended.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "binding/boxed.h"
#include "binding/flash_attn/append.h"
#include "binding/flash_attn/features.h"
#include "binding/flash_attn/fwd_call.h"
#include "binding/flash_attn/inputs.h"
#include "binding/flash_attn/options.h"
#include "binding/flash_attn/problem.h"
#include "binding/stream.h"
#include "binding/tensor.h"

namespace flash::binding::attention {
namespace {

using flash_attn::FwdParams;
using flash_attn::Problem;

// Sets how many keys an entry has, and which entry of the cache it reads.
void set_lengths(Problem& p, CacheOptions& options, const Tensor& q) {
  const int64_t filled = options.cache_seqlen.value_or(p.capacity_k);
  STD_TORCH_CHECK(filled >= 0, "cache_seqlens must be at least 0, found ", filled);
  p.appended_k = options.k ? seqlen(options.k->size(1), "k") : 0;
  p.seqlen_k = seqlen(filled + p.appended_k, "cache_seqlen");
  p.seqused_k = index_pointer(options.cache_seqlens, q, p.batch, "cache_seqlens");
  p.leftpad_k = index_pointer(options.cache_leftpad, q, p.batch, "cache_leftpad");
  p.batch_index = index_pointer(options.cache_batch_idx, q, p.batch, "cache_batch_idx");
}

// The call with these arguments, without results and without what is appended.
FwdCall kvcache_call(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, CacheOptions& options,
                     bool takes_codes = false) {
  check_keys(k_cache, q, "k_cache", takes_codes);
  check_keys(v_cache, q, "v_cache", takes_codes);
  const bool coded = takes_codes && check_coded(k_cache, v_cache);
  if (options.k) {  // appending writes to the caches: gives lazy clones memory of their own before any address is taken
    k_cache.mutable_data_ptr();
    v_cache.mutable_data_ptr();
  }
  const bool paged = options.block_table.has_value(), tokens = options.cu_seqlens_q.has_value();
  // Rows of a cache are like pages in that they have a dimension of their own also where queries are packed.
  const Inputs x = unpack<const void>(q, k_cache, v_cache, tokens, /*paged=*/true);
  check_inputs(x);
  const int64_t batch = tokens ? options.cu_seqlens_q->numel() - 1 : x.q.batch;
  STD_TORCH_CHECK(batch >= 0, "cu_seqlens_q must have batch + 1 elements, found none");
  STD_TORCH_CHECK(paged || options.cache_batch_idx || x.k.batch == batch, "k_cache must have q's batch size ", batch);

  FwdParams p{.problem = problem_of(q, x, batch, options, coded),
              .q = x.q.ref,
              .k = x.k.ref,
              .v = x.v.ref,
              .out_dtype = dtype_of(q, "q"),
              .coded = coded};
  p.pages = set_pages(p.problem, options.block_table, q, x.k);
  p.problem.cu_seqlens_q = index_pointer(options.cu_seqlens_q, q, p.problem.batch + 1, "cu_seqlens_q");
  set_lengths(p.problem, options, q);
  const int64_t longest_k = options.cache_seqlens ? p.problem.capacity_k : p.problem.seqlen_k;
  return {.p = p,
          .q = x.q,
          .tokens = tokens,
          .packed = false,
          .longest_q = tokens ? longest(options.max_seqlen_q, x.q.seqlen) : x.q.seqlen,
          .longest_k = std::min<int64_t>(longest_k, p.problem.capacity_k),
          .num_splits = options.num_splits};
}

FwdCall kvcache_call(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, CacheOptions& options,
                     const Features& features) {
  STD_TORCH_CHECK(!features.causal || !options.rotary_cos,
                  "causal of each entry has no kernel with rotary_cos: call the op ..._reference");
  return kvcache_call(q, k_cache, v_cache, options, /*takes_codes=*/true);
}

// Completes a call, plans and launches it. queries_advance: as in append_of.
void append_and_launch(FwdCall& call, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const CacheOptions& options, const OptionalTensor& bias = std::nullopt,
                       bool queries_advance = false) {
  if (!options.k) return plan_and_launch(call, q, bias);
  Append append = append_of(call.p, q, k_cache, v_cache, options, queries_advance);
  plan_and_launch(call, q, bias, &append);
}

std::tuple<Tensor, Tensor> fwd_kvcache(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                       CacheOptions& options) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = kvcache_call(q, k_cache, v_cache, options);
  const Tensor softmax_lse = new_lse(call, q), out = new_out(call, q);
  append_and_launch(call, q, k_cache, v_cache, options);
  return {out, softmax_lse};
}

// The plain op: the schema ends after block_table, so that nothing is appended.
Tensor fwd_kvcache_plain_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Descales& descales,
                             CacheOptions& options) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = kvcache_call(q, k_cache, v_cache, options, /*takes_codes=*/true);
  set_descales(call.p, descales, q);
  const Tensor out = new_out(call, q);
  plan_and_launch(call, q);
  return out;
}

// The plain op that writes to tensors of its caller, and may append: the schema ends after cache_seqlen.
void fwd_kvcache_plain_into(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& out,
                            OptionalTensor& softmax_lse, Descales& descales, CacheOptions& options) {
  check_apart(out, {&q, &k_cache, &v_cache});
  if (options.k && options.v) check_apart(out, {&*options.k, &*options.v});
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = kvcache_call(q, k_cache, v_cache, options, /*takes_codes=*/true);
  set_descales(call.p, descales, q);
  write_to(call, q, out, softmax_lse);
  append_and_launch(call, q, k_cache, v_cache, options);
}

// Returns out, softmax_lse, row_max and lse_lo.
std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_kvcache_features(const Tensor& q, const Tensor& k_cache,
                                                                const Tensor& v_cache, OptionalTensor& sink,
                                                                OptionalTensor& bias, CacheOptions& options,
                                                                Features& features) {
  const DeviceGuard guard(q.get_device_index());
  const bool queries_advance = features.key_ranges || features.attention_chunk > 0;
  FwdCall call = kvcache_call(q, k_cache, v_cache, options, features);
  set_features(call.p.problem, sink, bias, features, /*paged=*/options.block_table.has_value(), q);
  set_descales(call.p, features.descales, q);
  const Tensor softmax_lse = new_lse(call, q), row_max = new_row_max(call, q, features.row_max);
  const Tensor lse_lo = new_lse_lo(call, q, bias), out = new_out(call, q);
  append_and_launch(call, q, k_cache, v_cache, options, bias, queries_advance);
  return {out, softmax_lse, row_max, lse_lo};
}

void fwd_kvcache_features_into(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& out,
                               OptionalTensor& softmax_lse, OptionalTensor& row_max, OptionalTensor& sink,
                               OptionalTensor& bias, CacheOptions& options, Features& features) {
  const DeviceGuard guard(q.get_device_index());
  const bool queries_advance = features.key_ranges || features.attention_chunk > 0;
  FwdCall call = kvcache_call(q, k_cache, v_cache, options, features);
  set_features(call.p.problem, sink, bias, features, /*paged=*/options.block_table.has_value(), q);
  set_descales(call.p, features.descales, q);
  write_to(call, q, out, softmax_lse, row_max);
  append_and_launch(call, q, k_cache, v_cache, options, bias, queries_advance);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("fwd_kvcache", Boxed<&fwd_kvcache>::call);
  m.impl("fwd_kvcache_plain_out", Boxed<&fwd_kvcache_plain_out, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_kvcache_plain_into", Boxed<&fwd_kvcache_plain_into, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_kvcache_features", Boxed<&fwd_kvcache_features>::call);
  m.impl("fwd_kvcache_features_into", Boxed<&fwd_kvcache_features_into>::call);
}

}  // namespace flash::binding::attention
