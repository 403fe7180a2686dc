// The forward, dense, packed or paged.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "binding/boxed.h"
#include "binding/flash_attn/features.h"
#include "binding/flash_attn/fwd_call.h"
#include "binding/flash_attn/options.h"
#include "binding/stream.h"
#include "binding/tensor.h"

namespace flash::binding::attention {
namespace {

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  const Tensor softmax_lse = new_lse(call, q), out = new_out(call, q);
  plan_and_launch(call, q);
  return {out, softmax_lse};
}

// The plain ops: k and v are tensors, and the schema ends after the window.

std::tuple<Tensor, Tensor> fwd_plain(const Tensor& q, const Tensor& k, const Tensor& v, Options& options) {
  return fwd(q, k, v, options);
}

Tensor fwd_plain_out(const Tensor& q, const Tensor& k, const Tensor& v, Options& options) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  const Tensor out = new_out(call, q);
  plan_and_launch(call, q);
  return out;
}

// The plain op that writes to tensors of its caller: the schema ends after num_splits.
void fwd_plain_into(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, OptionalTensor& softmax_lse,
                    Descales& descales, Options& options) {
  check_apart(out, {&q, &k, &v});
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options, /*takes_codes=*/true);
  set_descales(call.p, descales, q);
  write_to(call, q, out, softmax_lse);
  plan_and_launch(call, q);
}

// Returns out, softmax_lse, row_max and lse_lo.
std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_features(const Tensor& q, const Tensor& k, const Tensor& v,
                                                        OptionalTensor& sink, OptionalTensor& bias, Options& options,
                                                        Features& features) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options, /*takes_codes=*/true);
  set_features(call.p.problem, sink, bias, features, /*paged=*/options.block_table.has_value(), q);
  set_descales(call.p, features.descales, q);
  const Tensor row_max = new_row_max(call, q, features.row_max), lse_lo = new_lse_lo(call, q, bias);
  const Tensor softmax_lse = new_lse(call, q), out = new_out(call, q);
  plan_and_launch(call, q, bias);
  return {out, softmax_lse, row_max, lse_lo};
}

void fwd_features_into(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                       OptionalTensor& softmax_lse, OptionalTensor& row_max, OptionalTensor& sink, OptionalTensor& bias,
                       Options& options, Features& features) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options, /*takes_codes=*/true);
  set_features(call.p.problem, sink, bias, features, /*paged=*/options.block_table.has_value(), q);
  set_descales(call.p, features.descales, q);
  write_to(call, q, out, softmax_lse, row_max);
  plan_and_launch(call, q, bias);
}

// Also returns the rounding error of out (FwdParams::out_lo).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fwd_with_residue(const Tensor& q, const OptionalTensor& k,
                                                                    const OptionalTensor& v, OptionalTensor& sink,
                                                                    OptionalTensor& bias, Options& options,
                                                                    Features& features) {
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  set_features(call.p.problem, sink, bias, features, /*paged=*/options.block_table.has_value(), q);
  const Tensor row_max = new_row_max(call, q, features.row_max), lse_lo = new_lse_lo(call, q, bias);
  const Tensor softmax_lse = new_lse(call, q), out = new_out(call, q), out_lo = new_out_lo(call, q);
  plan_and_launch(call, q, bias);
  return {out, softmax_lse, row_max, lse_lo, out_lo};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("fwd", Boxed<&fwd>::call);
  m.impl("fwd_plain", Boxed<&fwd_plain, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_plain_out", Boxed<&fwd_plain_out, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_plain_into", Boxed<&fwd_plain_into, /*kMayEndEarly=*/true>::call);
  m.impl("fwd_features", Boxed<&fwd_features>::call);
  m.impl("fwd_features_into", Boxed<&fwd_features_into>::call);
  m.impl("fwd_with_residue", Boxed<&fwd_with_residue>::call);
}

}  // namespace flash::binding::attention
