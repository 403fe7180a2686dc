// S_dmask of a forward with dropout.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "binding/boxed.h"
#include "binding/flash_attn/fwd_call.h"
#include "binding/flash_attn/inputs.h"
#include "binding/flash_attn/options.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "flash_attn/launch.h"

namespace flash::binding::attention {
namespace {

Tensor probabilities(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options) {
  STD_TORCH_CHECK(options.dropout_p > 0, "dropout_p must be more than 0 for S_dmask, found ", options.dropout_p);
  const DeviceGuard guard(q.get_device_index());
  FwdCall call = fwd_call(q, k, v, options);
  flash_attn::FwdParams& p = call.p;
  STD_TORCH_CHECK(p.problem.head_dim <= flash_attn::kMostDmaskHeadDim, "head_dim must be at most ",
                  flash_attn::kMostDmaskHeadDim, " for S_dmask, found ", p.problem.head_dim);
  p.aligned = flash_attn::is_aligned(p.q, p.problem.head_dim) && flash_attn::is_aligned(p.k, p.problem.head_dim);
  const int64_t rows = round_up(options.max_seqlen_q.value_or(call.longest_q), 128);
  const int64_t cols = round_up(options.max_seqlen_k.value_or(call.longest_k), 128);
  Tensor s_dmask = torch::stable::new_zeros(q, {p.problem.batch, p.problem.heads, rows, cols});
  if (q.numel() == 0) return s_dmask;
  flash_attn::dmask({.fwd = p,
                     .s_dmask = s_dmask.mutable_data_ptr(),
                     .rows = seqlen(rows, "max_seqlen_q"),
                     .cols = seqlen(cols, "max_seqlen_k")},
                    current_stream(q));
  return s_dmask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) { m.impl("probabilities", Boxed<&probabilities>::call); }

}  // namespace flash::binding::attention
