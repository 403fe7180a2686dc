// The backward, in the same four steps as the forward (fwd_call.h): parse, parameters, plan, launch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "binding/boxed.h"
#include "binding/flash_attn/bias.h"
#include "binding/flash_attn/features.h"
#include "binding/flash_attn/inputs.h"
#include "binding/flash_attn/options.h"
#include "binding/flash_attn/problem.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "common/device.h"
#include "flash_attn/launch.h"

namespace flash::binding::attention {
namespace {

using flash_attn::BwdHints;
using flash_attn::BwdParams;
using flash_attn::Problem;

// The inputs of the forward and its results.
struct Forward {
  const Tensor& q;
  OptionalTensor k, v;
  const Tensor &out, &softmax_lse;
  OptionalTensor out_lo;
};

// The gradients that arrive, and those that are written. dk and dv may be fp32, and are then added to if `accumulate`.
struct Gradients {
  const Tensor& dout;
  OptionalTensor dlse;
  const Tensor& dq;
  OptionalTensor dk, dv;
  bool accumulate = false;

  bool in_float() const { return dk && dtype_number(*dk) == aoti_torch_dtype_float32(); }
};

// The inputs of a backward as kernels read them: as they are given, or copies.
struct Rows {
  Tensor q;
  OptionalTensor k, v;
  Tensor out;
  OptionalTensor out_lo;
  Tensor dout, softmax_lse;
  OptionalTensor dlse;
};

// The parameters of a backward, what its plan also depends on, and the tensors that must live until the last launch.
struct BwdCall {
  BwdParams p;
  BwdHints hints;
  Rows rows;
  OptionalTensor scratch;
};

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

void check_row_values(const Tensor& x, const Tensor& q, const Problem& p, const char* name) {
  check_device(x, q, name);
  check_dtype(x, ScalarType::Float, name);
  if (p.cu_seqlens_q) return check_shape(x, {p.heads, p.seqlen_q}, name);
  check_shape(x, {p.batch, p.heads, p.seqlen_q}, name);
}

const Tensor* address(const OptionalTensor& x) { return x ? &*x : nullptr; }

void check_tensors(const Forward& fwd, const Gradients& gradients) {
  for (const auto& [name, x] :
       {std::pair("q", &fwd.q), std::pair("k", address(fwd.k)), std::pair("v", address(fwd.v)),
        std::pair("dq", &gradients.dq), std::pair("out", &fwd.out), std::pair("out_lo", address(fwd.out_lo))}) {
    if (x != nullptr) check_like(*x, gradients.dout, name);
  }
  for (const auto& [name, x] : {std::pair("dk", address(gradients.dk)), std::pair("dv", address(gradients.dv))}) {
    if (x == nullptr) continue;
    check_device(*x, gradients.dout, name);
    check_same_dtype(*x, gradients.in_float() ? *gradients.dk : gradients.dout, name);
    STD_TORCH_CHECK(!gradients.in_float() || x->size(-1) == 1 || x->stride(-1) == 1, name,
                    " must have adjacent channels where it is float32, found stride ", x->stride(-1));
  }
  STD_TORCH_CHECK(gradients.in_float() || !gradients.accumulate, "dk and dv must be float32 with accumulate");
}

// The call with these arguments, without softmax_d and without features.
BwdCall bwd_call(const Forward& fwd, const Gradients& gradients, Options& options) {
  STD_TORCH_CHECK(!options.block_table,
                  "block_table must be None in the backward, found a tensor: keys in pages have no gradient");
  check_tensors(fwd, gradients);
  const bool tokens = options.cu_seqlens_q.has_value();
  // Before anything takes an address: writing to a lazy clone gives it memory of its own, and all its views move with
  // it.
  const Views<void> written = unpack<void>(gradients.dq, gradients.dk, gradients.dv, tokens, /*paged=*/false);
  BwdCall call{.p = {},
               .hints = {},
               .rows = {.q = in_chunks(fwd.q),
                        .k = in_chunks(fwd.k),
                        .v = in_chunks(fwd.v),
                        .out = in_chunks(fwd.out),
                        .out_lo = in_chunks(fwd.out_lo),
                        .dout = in_chunks(gradients.dout),
                        .softmax_lse = as_contiguous(fwd.softmax_lse),
                        .dlse = as_contiguous(gradients.dlse)},
               .scratch = std::nullopt};
  const Rows& rows = call.rows;
  const Inputs x = unpack<const void>(rows.q, rows.k, rows.v, tokens, /*paged=*/false);
  const auto out = view_of<const void>(rows.out, tokens, 1, 0, "out");
  const auto dout = view_of<const void>(rows.dout, tokens, 1, 0, "dout");
  check_inputs(x);
  check_same_shape(out, x.q, x.v.head_dim, "out", "q");
  check_same_shape(dout, x.q, x.v.head_dim, "dout", "q");
  check_same_shape(written.q, x.q, x.q.head_dim, "dq", "q");
  check_same_shape(written.k, x.k, x.k.head_dim, "dk", "k");
  check_same_shape(written.v, x.v, x.v.head_dim, "dv", "v");

  BwdParams& p = call.p;
  p.problem = problem_of(fwd.q, x, batch_of(x, options), options, /*coded=*/false);
  set_entries(p.problem, options, fwd.q);
  p.q = x.q.ref, p.k = x.k.ref, p.v = x.v.ref, p.out = out.ref, p.dout = dout.ref;
  p.dq = written.q.ref, p.dk = written.k.ref, p.dv = written.v.ref;
  p.float_dkv = gradients.in_float(), p.adds_dkv = gradients.accumulate;
  if (rows.out_lo) {
    const auto out_lo = view_of<const void>(*rows.out_lo, tokens, 1, 0, "out_lo");
    check_same_shape(out_lo, x.q, x.v.head_dim, "out_lo", "q");
    p.out_lo = out_lo.ref;
  }
  check_row_values(rows.softmax_lse, fwd.q, p.problem, "softmax_lse");
  if (rows.dlse) check_row_values(*rows.dlse, fwd.q, p.problem, "dlse");
  p.softmax_lse = static_cast<const float*>(rows.softmax_lse.const_data_ptr());
  p.dlse = pointer<float>(rows.dlse);
  p.aligned = all_aligned(p);
  const int device = fwd.q.get_device_index();
  call.hints = {.longest_q = std::max<int64_t>(longest(options.max_seqlen_q, x.q.seqlen), 1),
                .longest_k = std::max<int64_t>(longest(options.max_seqlen_k, x.k.seqlen), 1),
                .deterministic = options.deterministic,
                .has_sm90 = flash_attn::has_sm90(device),
                .multiprocessors = num_multiprocessors(device)};
  return call;
}

// Returns a new softmax_d, in the layout that BwdParams says, which the call then writes.
Tensor new_softmax_d(BwdCall& call, const Tensor& q) {
  constexpr int64_t kPad = flash_attn::kRowPad;
  const Problem& p = call.p.problem;
  const Tensor softmax_d =
      p.cu_seqlens_q ? new_tensor({p.heads, p.seqlen_q + kPad * p.batch}, aoti_torch_dtype_float32(), q)
                     : new_tensor({p.batch, p.heads, round_up(p.seqlen_q, kPad)}, aoti_torch_dtype_float32(), q);
  call.p.softmax_d = static_cast<float*>(softmax_d.mutable_data_ptr());
  return softmax_d;
}

// Chooses a kernel for a complete call and launches it.
void plan_and_launch(BwdCall& call, const Tensor& q) {
  auto [plan, sizes] = plan_bwd(call.p, call.hints);
  call.scratch = new_tensor({sizes.total()}, aoti_torch_dtype_float32(), q);
  use_scratch(call.p.problem, plan, sizes, static_cast<float*>(call.scratch->mutable_data_ptr()));
  flash_attn::bwd(call.p, plan, current_stream(q));
}

Tensor run_bwd(const Forward& fwd, const Gradients& gradients, Options& options) {
  BwdCall call = bwd_call(fwd, gradients, options);
  const Tensor softmax_d = new_softmax_d(call, fwd.q);
  plan_and_launch(call, fwd.q);
  return softmax_d;
}

Tensor bwd(const Tensor& dout, const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, const Tensor& out,
           const Tensor& softmax_lse, const OptionalTensor& dlse, const OptionalTensor& out_lo, const Tensor& dq,
           const OptionalTensor& dk, const OptionalTensor& dv, Options& options, bool accumulate) {
  const DeviceGuard guard(q.get_device_index());
  return run_bwd({q, k, v, out, softmax_lse, out_lo}, {dout, dlse, dq, dk, dv, accumulate}, options);
}

// An uninitialised tensor with the shape, and if possible the strides, of x.
Tensor new_like(const Tensor& x) {
  return x.is_contiguous() ? new_tensor_of(x.sizes(), static_cast<int32_t>(x.scalar_type()), x)
                           : torch::stable::empty_like(x);
}

// The plain op: the schema ends after the window.
std::tuple<Tensor, Tensor, Tensor> bwd_plain(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& out, const Tensor& softmax_lse, Options& options) {
  const DeviceGuard guard(q.get_device_index());
  const Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
  run_bwd({q, k, v, out, softmax_lse, /*out_lo=*/std::nullopt}, {dout, /*dlse=*/std::nullopt, dq, dk, dv}, options);
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
    OptionalTensor& sink, OptionalTensor& bias, Options& options, Features& features, bool float_dkv) {
  STD_TORCH_CHECK(bias || !wants_dbias, "wants_dbias must be false without an attn_bias, found true");
  const DeviceGuard guard(q.get_device_index());
  const auto like_key = [&](const Tensor& x) {
    return float_dkv ? new_tensor_of(x.sizes(), aoti_torch_dtype_float32(), x) : torch::stable::empty_like(x);
  };
  const Tensor dq = torch::stable::empty_like(q), dk = like_key(k), dv = like_key(v);
  const Tensor dsink = sink ? torch::stable::empty_like(*sink) : new_tensor({0}, q);
  const OptionalTensor given_bias = bias, lse_lo_rows = as_contiguous(lse_lo);

  BwdCall call = bwd_call({q, k, v, out, softmax_lse, out_lo}, {dout, dlse, dq, dk, dv}, options);
  if (lse_lo_rows) check_row_values(*lse_lo_rows, q, call.p.problem, "lse_lo");
  call.p.lse_lo = pointer<float>(lse_lo_rows);
  set_features(call.p.problem, sink, bias, features, /*paged=*/false, q);
  place_bias(call.p.problem, bias, q, wants_tiled_bias(call.p, call.hints));
  const Tensor softmax_d = new_softmax_d(call, q);

  plan_and_launch(call, q);
  if (sink) sink_gradient(call.p, dsink, q);
  const Tensor dbias = wants_dbias ? bias_gradient(call.p, *given_bias) : new_tensor({0}, q);
  return {dq, dk, dv, dsink, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("bwd", Boxed<&bwd>::call);
  m.impl("bwd_plain", Boxed<&bwd_plain, /*kMayEndEarly=*/true>::call);
  m.impl("bwd_features", Boxed<&bwd_features>::call);
}

}  // namespace flash::binding::attention
