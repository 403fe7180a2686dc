#include "binding/flash_attn/append.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "binding/flash_attn/inputs.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "flash_attn/launch.h"

namespace flash::binding::attention {
namespace {

using flash_attn::AppendParams;

void set_rotation(Append& append, const Tensor& q, const CacheOptions& options) {
  const Tensor &cos = *options.rotary_cos, &sin = *options.rotary_sin;
  check_device(cos, q, "rotary_cos");
  check_device(sin, q, "rotary_sin");
  STD_TORCH_CHECK(cos.dim() == 2 && 2 * cos.size(1) <= q.size(3),
                  "rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim at most ", q.size(3));
  check_shape(sin, {cos.size(0), cos.size(1)}, "rotary_sin");
  check_dtype(sin, cos.scalar_type(), "rotary_sin");
  append.cos = as_contiguous(cos), append.sin = as_contiguous(sin);
  AppendParams& p = append.p;
  p.cos = pointer<void>(append.cos), p.sin = pointer<void>(append.sin);
  p.table_dtype = dtype_of(cos, "rotary_cos");
  p.positions = seqlen(cos.size(0), "rotary_cos");
  p.rotary_dim = static_cast<int>(2 * cos.size(1));
  p.interleaved = options.rotary_interleaved;
}

// Checks that the rotary tables have enough rows. Where only the device knows the lengths, the kernel checks
// (has_table_row).
void check_table_rows(const AppendParams& p, int64_t num_queries) {
  if (p.problem.seqused_k) return;
  const int64_t tokens = std::max<int64_t>(p.seqlen_new, p.queries_advance ? num_queries : 1);
  const int64_t needed = p.problem.seqlen_k - p.seqlen_new + tokens;
  STD_TORCH_CHECK(needed <= p.positions, "rotary_cos and rotary_sin must have at least ", needed, " rows, found ",
                  p.positions);
}

}  // namespace

Append append_of(const flash_attn::FwdParams& fwd, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                 const CacheOptions& options, bool queries_advance) {
  STD_TORCH_CHECK(options.v.has_value() && options.rotary_cos.has_value() == options.rotary_sin.has_value(),
                  "k comes with v, and rotary_cos with rotary_sin");
  STD_TORCH_CHECK(!options.rotary_cos || !options.cu_seqlens_q, "rotary_cos has no kernel with cu_seqlens_q");
  const Tensor &k = *options.k, &v = *options.v;
  const int64_t batch = fwd.problem.batch;
  check_like(k, q, "k");
  check_shape(k, {batch, k.size(1), k_cache.size(2), k_cache.size(3)}, "k");
  check_like(v, q, "v");
  check_shape(v, {batch, k.size(1), k_cache.size(2), v_cache.size(3)}, "v");
  const int64_t least = options.cache_seqlens ? k.size(1) : fwd.problem.seqlen_k;
  STD_TORCH_CHECK(least <= fwd.problem.capacity_k, "k must fit into the cache, which has ", fwd.problem.capacity_k,
                  " positions");
  Append append{
      .p = {.problem = fwd.problem, .dtype = fwd.out_dtype, .coded = fwd.coded, .q = fwd.q, .pages = fwd.pages}};
  AppendParams& p = append.p;
  p.seqlen_new = fwd.problem.appended_k;
  p.k = ref(k), p.v = ref(v);
  p.k_cache = mutable_ref(k_cache), p.v_cache = mutable_ref(v_cache);
  if (!options.rotary_cos) return append;
  set_rotation(append, q, options);
  p.queries_advance = options.window_left >= 0 || options.window_right >= 0 || queries_advance;
  check_table_rows(p, q.size(1));
  return append;
}

TensorRef<const void> append_apart(Append& append, const Tensor& q) {
  if (append.p.cos != nullptr) {
    append.q_rotated = new_tensor({q.size(0), q.size(1), q.size(2), q.size(3)}, q);
    append.p.q_rotated = mutable_ref(*append.q_rotated);
  }
  flash_attn::append(append.p, current_stream(q));
  return append.q_rotated ? ref(*append.q_rotated) : append.p.q;
}

}  // namespace flash::binding::attention
