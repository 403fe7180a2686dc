#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/stream.h"
#include "binding/tensor.h"
#include "fused_dense/launch.h"
#include "fused_dense/params.h"

namespace flash::binding {
namespace {

using fused_dense::Activation;
using fused_dense::Epilogue;
using torch::headeronly::IntHeaderOnlyArrayRef;

// A tensor (..., cols) as rows of adjacent elements, one distance apart.
struct Matrix {
  Tensor tensor;
  int64_t rows, cols, stride;

  const void* data() const { return tensor.const_data_ptr(); }
  void* mutable_data() const { return tensor.mutable_data_ptr(); }
  fused_dense::Rows as_rows() const { return {tensor.mutable_data_ptr(), stride}; }
};

int64_t num_rows(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.size(dim);
  return rows;
}

// Whether all rows are one distance apart, and which.
std::optional<int64_t> row_stride(const Tensor& tensor) {
  const int64_t cols = tensor.size(-1);
  if (cols > 1 && tensor.stride(-1) != 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t expected = 0;
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    if (tensor.size(dim) == 1) continue;
    if (stride && tensor.stride(dim) != expected) return std::nullopt;
    if (!stride) stride = tensor.stride(dim);
    expected = tensor.stride(dim) * tensor.size(dim);
  }
  return stride.value_or(cols) >= cols ? std::optional(stride.value_or(cols)) : std::nullopt;
}

// `tensor`, or a copy where its rows do not lie in that way or less aligned than those of a new tensor.
Matrix matrix_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() >= 1, name, " must have at least one dimension, found shape ()");
  const int64_t rows = num_rows(tensor), cols = tensor.size(-1);
  const int size = size_of(dtype_of(tensor, name));
  if (const auto stride = row_stride(tensor); stride && starts_aligned(tensor)) {
    if ((*stride - cols) * size % 16 == 0) return {tensor, rows, cols, *stride};
  }
  const Tensor copy = torch::stable::contiguous(tensor);
  return {starts_aligned(copy) ? copy : torch::stable::clone(copy), rows, cols, cols};
}

// A new tensor (..., cols) with the leading dimensions of `like`.
Tensor new_rows(const Tensor& like, int64_t cols, int32_t dtype) {
  std::vector<int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = cols;
  return new_tensor_of(IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), dtype, like);
}

Tensor new_rows(const Tensor& like, int64_t cols) {
  return new_rows(like, cols, static_cast<int32_t>(like.scalar_type()));
}

Matrix whole(const Tensor& contiguous) {
  return {contiguous, num_rows(contiguous), contiguous.size(-1), contiguous.size(-1)};
}

std::optional<Activation> activation_of(const std::string& name) {
  if (name == "identity") return std::nullopt;
  if (name == "gelu_approx") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "sqrelu") return Activation::kSquaredRelu;
  if (name == "silu") return Activation::kSilu;
  STD_TORCH_CHECK(false, "activation must be 'identity', 'gelu_approx', 'relu', 'sqrelu' or 'silu', found '", name, "'");
}

// Whether what relu keeps for its gradient are bits: a rule that flash_attn/_ops/fused_dense.py has too.
bool keeps_bits(std::optional<Activation> activation, int64_t heuristic, int64_t in, int64_t out) {
  return activation == Activation::kRelu && heuristic >= 0 && in % 8 == 0 && out % 128 == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Products. A matrix by rows is its transpose by columns, which is how cuBLASLt sees it.

// Computes p in the way that cuBLASLt plans it; false if it has none.
bool multiply(const fused_dense::GemmParams& p, const Tensor& like) {
  const auto plan = fused_dense::plan_gemm(p);
  if (!plan) return false;
  std::optional<Tensor> workspace;
  if (plan->workspace_bytes > 0) {
    workspace = new_tensor({static_cast<int64_t>(plan->workspace_bytes)}, aoti_torch_dtype_uint8(), like);
  }
  fused_dense::gemm(p, *plan, workspace ? workspace->mutable_data_ptr() : nullptr, current_stream(like));
  return true;
}

void check_half(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(dtype_of(tensor, name) != DType::kFloat32, name, " must have dtype float16 or bfloat16, found float32");
}

// A sum of no products is one of products with zero.
constexpr int64_t kNone = 8;
Matrix zeros(int64_t rows, int64_t cols, const Tensor& like) {
  Tensor tensor = new_tensor({rows, cols}, like);
  return whole(torch::stable::zero_(tensor));
}

// out = x weight^T, by columns out^T = weight x^T.
fused_dense::GemmParams forward_params(const Matrix& x, const Matrix& weight, const Matrix& out) {
  return {.dtype = dtype_of(out.tensor, "out"),
          .transposed_a = true,
          .m = weight.rows,
          .n = x.rows,
          .k = x.cols,
          .a = weight.data(),
          .b = x.data(),
          .d = out.mutable_data(),
          .ld_a = weight.stride,
          .ld_b = x.stride,
          .ld_d = out.stride};
}

// dx = dout weight, by columns dx^T = weight^T dout^T.
fused_dense::GemmParams dgrad_params(const Matrix& dout, const Matrix& weight, const Matrix& dx) {
  return {.dtype = dtype_of(dx.tensor, "dx"),
          .m = weight.cols,
          .n = dout.rows,
          .k = dout.cols,
          .a = weight.data(),
          .b = dout.data(),
          .d = dx.mutable_data(),
          .ld_a = weight.stride,
          .ld_b = dout.stride,
          .ld_d = dx.stride};
}

// dweight = dout^T x, by columns dweight^T = x^T dout.
fused_dense::GemmParams wgrad_params(const Matrix& dout, const Matrix& x, const Matrix& dweight) {
  return {.dtype = dtype_of(dweight.tensor, "dweight"),
          .transposed_b = true,
          .m = x.cols,
          .n = dout.cols,
          .k = x.rows,
          .a = x.data(),
          .b = dout.data(),
          .d = dweight.mutable_data(),
          .ld_a = x.stride,
          .ld_b = dout.stride,
          .ld_d = dweight.stride};
}

void must(bool computed, const char* what) {
  STD_TORCH_CHECK(computed, "cuBLASLt has no kernel for ", what);
}

// act(x), or act(x) * y.
void activate(Activation activation, const Matrix& x, const Matrix* y, const Matrix& out) {
  fused_dense::activation_fwd({.activation = activation,
                               .dtype = dtype_of(x.tensor, "x"),
                               .rows = x.rows,
                               .cols = x.cols,
                               .x = x.as_rows(),
                               .y = y ? y->as_rows() : fused_dense::Rows{},
                               .out = out.as_rows()},
                              current_stream(x.tensor));
}

void differentiate(Activation activation, const Matrix& dout, const Matrix& x, const Matrix* y, const Matrix& dx,
                   const Matrix* dy) {
  fused_dense::activation_bwd({.activation = activation,
                               .dtype = dtype_of(x.tensor, "x"),
                               .rows = x.rows,
                               .cols = x.cols,
                               .dout = dout.as_rows(),
                               .x = x.as_rows(),
                               .y = y ? y->as_rows() : fused_dense::Rows{},
                               .dx = dx.as_rows(),
                               .dy = dy ? dy->as_rows() : fused_dense::Rows{}},
                              current_stream(x.tensor));
}

Epilogue forward_epilogue(std::optional<Activation> activation, bool has_bias, bool keep) {
  if (!activation) return has_bias ? Epilogue::kBias : Epilogue::kNone;
  if (*activation == Activation::kGelu) {
    if (keep) return has_bias ? Epilogue::kGeluAuxBias : Epilogue::kGeluAux;
    return has_bias ? Epilogue::kGeluBias : Epilogue::kGelu;
  }
  if (keep) return has_bias ? Epilogue::kReluAuxBias : Epilogue::kReluAux;
  return has_bias ? Epilogue::kReluBias : Epilogue::kRelu;
}

std::tuple<Tensor, Tensor> fused_dense_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                           std::string activation_name, bool keep, int64_t heuristic) {
  check_half(x, "x");
  STD_TORCH_CHECK(weight.dim() == 2, "weight must have shape (out, in), found ", shape_string(weight.sizes()));
  check_device(weight, x, "weight");
  check_dtype(weight, x.scalar_type(), "weight");
  const int64_t in = weight.size(1), out_features = weight.size(0);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(-1) == in, "x must have shape (..., ", in, "), found ",
                  shape_string(x.sizes()));
  if (bias) {
    check_device(*bias, x, "bias");
    check_dtype(*bias, x.scalar_type(), "bias");
    check_shape(*bias, {out_features}, "bias");
  }
  const auto activation = activation_of(activation_name);
  const bool bits = keep && keeps_bits(activation, heuristic, in, out_features);

  const DeviceGuard guard(x.get_device_index());
  const Tensor out = new_rows(x, out_features);
  const Tensor kept = !keep || !activation ? new_tensor({0}, x)
                      : bits               ? new_rows(x, out_features / 8, aoti_torch_dtype_uint8())
                                           : new_rows(x, out_features);
  if (out.numel() == 0) return {out, kept};
  const Matrix to = whole(out);
  const Matrix from = in > 0 ? matrix_of(x, "x") : zeros(to.rows, kNone, x);
  const Matrix weights = in > 0 ? matrix_of(weight, "weight") : zeros(out_features, kNone, x);
  const auto aligned_bias = bias ? std::optional(matrix_of(*bias, "bias")) : std::nullopt;

  auto params = forward_params(from, weights, to);
  params.bias = aligned_bias ? aligned_bias->mutable_data() : nullptr;
  const bool fused = !activation || (heuristic >= 0 && (activation == Activation::kGelu ||
                                                        (activation == Activation::kRelu && (bits || !keep))));
  if (fused) {
    params.epilogue = forward_epilogue(activation, bias.has_value(), keep);
    params.aux = keep && activation ? kept.mutable_data_ptr() : nullptr;
    params.choice = static_cast<int>(heuristic);
    if (multiply(params, x)) return {out, kept};
    must(!bits && activation, "such a product");
    params.aux = nullptr;
  }
  params.epilogue = forward_epilogue(std::nullopt, bias.has_value(), false);
  params.choice = 0;
  if (keep) params.d = kept.mutable_data_ptr();
  must(multiply(params, x), "such a product");
  activate(*activation, keep ? whole(kept) : to, nullptr, to);
  return {out, kept};
}

Epilogue dgrad_epilogue(Activation activation, bool bias_grad) {
  if (activation == Activation::kGelu) return bias_grad ? Epilogue::kGeluGradBias : Epilogue::kGeluGrad;
  return bias_grad ? Epilogue::kReluGradBias : Epilogue::kReluGrad;
}

std::tuple<Tensor, Tensor> fused_dense_dgrad(const Tensor& dout, const Tensor& weight,
                                             const std::optional<Tensor>& dresidual, const std::optional<Tensor>& kept,
                                             std::string activation_name, bool bias_grad, int64_t heuristic) {
  check_half(dout, "dout");
  STD_TORCH_CHECK(weight.dim() == 2, "weight must have shape (out, in), found ", shape_string(weight.sizes()));
  check_device(weight, dout, "weight");
  check_dtype(weight, dout.scalar_type(), "weight");
  const int64_t in = weight.size(1);
  STD_TORCH_CHECK(dout.dim() >= 1 && dout.size(-1) == weight.size(0), "dout must have shape (..., ", weight.size(0),
                  "), found ", shape_string(dout.sizes()));
  const auto activation = activation_of(activation_name);
  STD_TORCH_CHECK(kept.has_value() == activation.has_value(), "kept must be given with an activation, and only then");
  STD_TORCH_CHECK(!dresidual || !activation, "dresidual must be None with an activation");

  const DeviceGuard guard(dout.get_device_index());
  const Tensor dx = new_rows(dout, in);
  const Tensor dbias = new_tensor({bias_grad ? in : 0}, dout);
  const bool bits = kept && kept->scalar_type() == ScalarType::Byte;
  if (kept) {
    check_device(*kept, dout, "kept");
    if (!bits) check_dtype(*kept, dout.scalar_type(), "kept");
    STD_TORCH_CHECK(num_rows(*kept) == num_rows(dx) && kept->size(-1) == (bits ? in / 8 : in) &&
                        (!bits || keeps_bits(activation, 0, 8, in)),
                    "kept must be what the forward kept for shape ", shape_string(dx.sizes()), ", found shape ",
                    shape_string(kept->sizes()));
  }
  if (dresidual) {
    check_device(*dresidual, dout, "dresidual");
    check_dtype(*dresidual, dout.scalar_type(), "dresidual");
    STD_TORCH_CHECK(dresidual->sizes().equals(dx.sizes()), "dresidual must have shape ", shape_string(dx.sizes()),
                    ", found ", shape_string(dresidual->sizes()));
  }
  if (dx.numel() == 0) {
    Tensor zero = dbias;
    return {dx, torch::stable::zero_(zero)};
  }
  const Matrix to = whole(dx);
  const Matrix from = dout.size(-1) > 0 ? matrix_of(dout, "dout") : zeros(to.rows, kNone, dout);
  const Matrix weights = dout.size(-1) > 0 ? matrix_of(weight, "weight") : zeros(kNone, in, dout);
  auto params = dgrad_params(from, weights, to);
  const auto residual = dresidual ? std::optional(matrix_of(*dresidual, "dresidual")) : std::nullopt;
  if (residual) params.c = residual->data(), params.ld_c = residual->stride;
  const auto kept_rows = !kept ? std::nullopt
                         : bits ? std::optional(Matrix{torch::stable::contiguous(*kept), to.rows, in / 8, in / 8})
                                : std::optional(matrix_of(torch::stable::contiguous(*kept), "kept"));
  if (bits || (activation == Activation::kGelu && heuristic >= 0)) {
    params.epilogue = dgrad_epilogue(*activation, bias_grad);
    params.aux = kept_rows->mutable_data();
    params.bias = bias_grad ? dbias.mutable_data_ptr() : nullptr;
    params.choice = static_cast<int>(std::max<int64_t>(heuristic, 0));
    if (multiply(params, dout)) return {dx, dbias};
    must(!bits, "such a gradient");
    params.aux = params.bias = nullptr;
  }
  params.epilogue = Epilogue::kNone;
  params.choice = 0;
  must(multiply(params, dout), "such a gradient");
  if (activation) differentiate(*activation, to, *kept_rows, nullptr, to, nullptr);
  if (!bias_grad) return {dx, dbias};
  const std::vector<int64_t> flat{to.rows, in}, dims{0};
  return {dx, torch::stable::sum(torch::stable::view(dx, IntHeaderOnlyArrayRef(flat.data(), 2)),
                                 IntHeaderOnlyArrayRef(dims.data(), 1))};
}

std::tuple<Tensor, Tensor> fused_dense_wgrad(const Tensor& dout, const Tensor& x, bool bias_grad) {
  check_half(dout, "dout");
  check_device(x, dout, "x");
  check_dtype(x, dout.scalar_type(), "x");
  STD_TORCH_CHECK(dout.dim() >= 1 && x.dim() >= 1 && num_rows(x) == num_rows(dout),
                  "x must have as many rows as dout, found shapes ", shape_string(x.sizes()), " and ",
                  shape_string(dout.sizes()));
  const int64_t rows = num_rows(x), in = x.size(-1), out_features = dout.size(-1);
  const DeviceGuard guard(x.get_device_index());
  Tensor dweight = new_tensor({out_features, in}, x), dbias = new_tensor({bias_grad ? out_features : 0}, x);
  if (rows == 0 || out_features == 0) return {torch::stable::zero_(dweight), torch::stable::zero_(dbias)};
  const Matrix from = matrix_of(dout, "dout");
  const Matrix features = in > 0 ? matrix_of(x, "x") : zeros(rows, kNone, x);
  const Matrix to = in > 0 ? whole(dweight) : zeros(out_features, kNone, x);
  auto params = wgrad_params(from, features, to);
  params.epilogue = bias_grad ? Epilogue::kBiasGrad : Epilogue::kNone;
  params.bias = bias_grad ? dbias.mutable_data_ptr() : nullptr;
  if (multiply(params, x)) return {dweight, dbias};
  params.epilogue = Epilogue::kNone;
  params.bias = nullptr;
  must(multiply(params, x), "such a gradient");
  if (!bias_grad) return {dweight, dbias};
  const std::vector<int64_t> flat{rows, out_features}, dims{0};
  const Tensor incoming = torch::stable::reshape(dout, IntHeaderOnlyArrayRef(flat.data(), 2));
  return {dweight, torch::stable::sum(incoming, IntHeaderOnlyArrayRef(dims.data(), 1))};
}

// ---------------------------------------------------------------------------------------------------------------------
// Activations of their own

void check_like(const Tensor& tensor, const Tensor& x, const char* name) {
  check_device(tensor, x, name);
  check_dtype(tensor, x.scalar_type(), name);
  STD_TORCH_CHECK(tensor.sizes().equals(x.sizes()), name, " must have shape ", shape_string(x.sizes()), ", found ",
                  shape_string(tensor.sizes()));
}

Activation some_activation(const std::string& name) {
  const auto activation = activation_of(name);
  STD_TORCH_CHECK(activation.has_value(), "activation must not be 'identity'");
  return *activation;
}

// A tensor without dimensions is a row of one element.
Matrix elements_of(const Tensor& tensor, const char* name) {
  return tensor.dim() > 0 ? matrix_of(tensor, name) : Matrix{torch::stable::clone(tensor), 1, 1, 1};
}

Tensor activation_fwd(const Tensor& x, const std::optional<Tensor>& y, std::string activation) {
  if (y) check_like(*y, x, "y");
  const DeviceGuard guard(x.get_device_index());
  const Tensor out = new_tensor_of(x.sizes(), static_cast<int32_t>(x.scalar_type()), x);
  const Matrix from = elements_of(x, "x");
  const auto gated = y ? std::optional(elements_of(*y, "y")) : std::nullopt;
  activate(some_activation(activation), from, gated ? &*gated : nullptr, {out, from.rows, from.cols, from.cols});
  return out;
}

std::tuple<Tensor, Tensor> activation_bwd(const Tensor& dout, const Tensor& x, const std::optional<Tensor>& y,
                                          std::string activation) {
  check_like(x, dout, "x");
  if (y) check_like(*y, dout, "y");
  const DeviceGuard guard(x.get_device_index());
  const auto new_like = [&] { return new_tensor_of(x.sizes(), static_cast<int32_t>(x.scalar_type()), x); };
  const Tensor dx = new_like(), dy = y ? new_like() : new_tensor({0}, x);
  const Matrix incoming = elements_of(dout, "dout"), from = elements_of(x, "x");
  const auto gated = y ? std::optional(elements_of(*y, "y")) : std::nullopt;
  const Matrix to{dx, from.rows, from.cols, from.cols}, to_gated{dy, from.rows, from.cols, from.cols};
  differentiate(some_activation(activation), incoming, from, gated ? &*gated : nullptr, to, y ? &to_gated : nullptr);
  return {dx, dy};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("fused_dense_fwd", TORCH_BOX(&fused_dense_fwd));
  m.impl("fused_dense_dgrad", TORCH_BOX(&fused_dense_dgrad));
  m.impl("fused_dense_wgrad", TORCH_BOX(&fused_dense_wgrad));
  m.impl("activation_fwd", TORCH_BOX(&activation_fwd));
  m.impl("activation_bwd", TORCH_BOX(&activation_bwd));
}

}  // namespace flash::binding
