#include "binding/flash_attn/bias.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "binding/flash_attn/inputs.h"
#include "binding/tensor.h"
#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::binding::attention {
namespace {

using flash_attn::Problem;

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
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::log", "out", stack.data(), TORCH_ABI_VERSION));
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

}  // namespace

int batch2_size(const Tensor& bias, const Problem& p) {
  const int64_t batch1 = bias.size(0), batch2 = bias.size(1);
  return static_cast<int>(std::max<int64_t>(batch2 > 1 ? batch2 : p.batch / std::max<int64_t>(batch1, 1), 1));
}

flash_attn::BiasRows bias_rows(const Tensor& x, int batch2_size) {
  const auto stride = [&](int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  return {stride(0), stride(1), stride(2), stride(3), Divisor(batch2_size)};
}

void set_bias(Problem& p, OptionalTensor& bias, const Tensor& q) {
  if (!bias) return;
  check_device(*bias, q, "attn_bias");
  const bool of_coded = dtype_of(q, "q") != p.dtype;  // kernels compute in another dtype
  if (of_coded && dtype_number(*bias) == dtype_number(q)) bias = torch::stable::to(*bias, ScalarType::Float);
  check_bias_shape(*bias, p);
  p.bias.is_bool = bias->scalar_type() == ScalarType::Bool;
  if (!p.bias.is_bool) p.bias.dtype = dtype_of(*bias, "attn_bias");
  STD_TORCH_CHECK(p.bias.is_bool || p.bias.dtype == DType::kFloat32 || p.bias.dtype == p.dtype,
                  "attn_bias has no kernel unless it has the dtype of q, float32 or bool: call the op ..._reference");
  p.bias.data = bias->const_data_ptr();
  p.bias.keys = seqlen(bias->size(4), "attn_bias");
  p.bias.rows = bias_rows(*bias, batch2_size(*bias, p));
}

void place_bias(Problem& p, OptionalTensor& bias, const Tensor& q, bool tiled) {
  if (!bias) return;
  const bool was_bool = p.bias.is_bool;
  if (tiled) p.bias.is_bool = false, p.bias.dtype = p.dtype;
  const ScalarType of_problem = p.dtype == DType::kFloat16 ? ScalarType::Half : ScalarType::BFloat16;
  const ScalarType dtype = tiled ? of_problem : bias->scalar_type();
  const int group = tiled ? 8 : 2, per_batch1 = batch2_size(*bias, p);
  if (was_bool != p.bias.is_bool || !is_in_groups(*bias, group, was_bool ? 1 : size_of(p.bias.dtype))) {
    bias = copied_in_groups(*bias, group, dtype);
  }
  p.bias.data = bias->const_data_ptr();
  p.bias.keys = static_cast<int>(bias->size(4));
  p.bias.rows = bias_rows(*bias, per_batch1);
}

}  // namespace flash::binding::attention
