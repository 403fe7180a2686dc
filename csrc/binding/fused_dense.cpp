#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
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

// A tensor (..., cols) as rows of adjacent elements, with one stride between rows.
struct Matrix {
  Tensor tensor;
  int64_t rows, cols, stride;

  const void* data() const { return tensor.const_data_ptr(); }
  void* mutable_data() const { return tensor.mutable_data_ptr(); }
  fused_dense::Rows as_rows() const { return {tensor.mutable_data_ptr(), stride}; }
};

// Returns `tensor` as a matrix, or a copy if its rows overlap, have no single stride, or are less aligned than those of
// a new tensor.
Matrix matrix_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() >= 1, name, " must have at least one dimension, found shape ()");
  const int64_t rows = num_rows(tensor), cols = tensor.size(-1);
  const int size = size_of(dtype_of(tensor, name));
  const auto stride = row_stride(tensor);
  if (stride && *stride >= cols && (*stride - cols) * size % 16 == 0 && starts_aligned(tensor)) {
    return {tensor, rows, cols, *stride};
  }
  return {aligned_contiguous(tensor), rows, cols, cols};
}

void check_like(const Tensor& tensor, const Tensor& x, const char* name) {
  check_device(tensor, x, name);
  check_dtype(tensor, x.scalar_type(), name);
  STD_TORCH_CHECK(tensor.sizes().equals(x.sizes()), name, " must have shape ", shape_string(x.sizes()), ", found ",
                  shape_string(tensor.sizes()));
}

// Returns a new tensor (..., cols) with the leading dimensions of `like`.
Tensor new_rows(const Tensor& like, int64_t cols) {
  std::vector<int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = cols;
  const IntHeaderOnlyArrayRef shape(sizes.data(), sizes.size());
  return new_tensor_of(shape, static_cast<int32_t>(like.scalar_type()), like);
}

// Returns the sum of the rows of x, computed in fp32. If `kept` is given, x is first replaced by x * act'(kept).
Tensor sum_of_rows(const Matrix& x, const Matrix* kept = nullptr, Activation activation = {}) {
  const Tensor out = new_tensor({x.cols}, x.tensor);
  const int64_t chunks = fused_dense::sum_rows_chunks(x.rows, x.cols);
  const Tensor partial = new_tensor({chunks > 1 ? chunks * x.cols : 0}, aoti_torch_dtype_float32(), out);
  const DType dtype = dtype_of(out, "x");
  fused_dense::sum_rows({.dtype = dtype,
                         .rows = x.rows,
                         .cols = x.cols,
                         .x = x.as_rows(),
                         .kept = kept ? kept->as_rows() : fused_dense::Rows{},
                         .activation = activation,
                         .out = out.mutable_data_ptr(),
                         .out_dtype = dtype},
                        static_cast<float*>(partial.mutable_data_ptr()), chunks, current_stream(out));
  return out;
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
  STD_TORCH_CHECK(false, "activation must be 'identity', 'gelu_approx', 'relu', 'sqrelu' or 'silu', found '", name,
                  "'");
}

// ---------------------------------------------------------------------------------------------------------------------
// Products. A matrix stored by rows is its transpose stored by columns, which is how cuBLASLt reads it. Parameters hold
// only addresses: a matrix, which may be a copy, has to live until `multiply` returns, because otherwise the workspace
// may get its memory.

// Computes p by a plan of cuBLASLt; returns false if there is none.
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
  STD_TORCH_CHECK(dtype_of(tensor, name) != DType::kFloat32, name,
                  " must have dtype float16 or bfloat16, found float32");
}

// The length of a contraction over zeros that replaces an empty contraction.
constexpr int64_t kNone = 8;
Matrix zeros(int64_t rows, int64_t cols, const Tensor& like) {
  Tensor tensor = new_tensor({rows, cols}, like);
  return whole(torch::stable::zero_(tensor));
}

// Parameters of out = x weight^T; by columns: out^T = weight x^T.
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

// Parameters of dx = dout weight; by columns: dx^T = weight^T dout^T.
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
          .ld_d = dx.stride,
          .epilogue = Epilogue::kNone};
}

// Parameters of dweight = dout^T x; by columns: dweight^T = x^T dout.
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
          .ld_d = dweight.stride,
          .epilogue = Epilogue::kNone};
}

void must(bool computed, const char* what) { STD_TORCH_CHECK(computed, "cuBLASLt has no kernel for ", what); }

// Computes out = act(x), or act(x) * y.
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
  if (activation == Activation::kRelu) return has_bias ? Epilogue::kReluBias : Epilogue::kRelu;
  if (keep) return has_bias ? Epilogue::kGeluAuxBias : Epilogue::kGeluAux;
  return has_bias ? Epilogue::kGeluBias : Epilogue::kGelu;
}

void check_weight(const Tensor& weight, const Tensor& rows, int64_t inner, const char* name) {
  check_half(rows, name);
  STD_TORCH_CHECK(weight.dim() == 2, "weight must have shape (out, in), found ", shape_string(weight.sizes()));
  check_device(weight, rows, "weight");
  check_dtype(weight, rows.scalar_type(), "weight");
  STD_TORCH_CHECK(rows.dim() >= 1 && rows.size(-1) == weight.size(inner), name, " must have shape (..., ",
                  weight.size(inner), "), found ", shape_string(rows.sizes()));
}

void check_bias(const std::optional<Tensor>& bias, const Tensor& x, const Tensor& weight) {
  if (!bias) return;
  check_device(*bias, x, "bias");
  check_dtype(*bias, x.scalar_type(), "bias");
  check_shape(*bias, {weight.size(0)}, "bias");
}

std::optional<Matrix> bias_of(const std::optional<Tensor>& bias) {
  return bias ? std::optional(matrix_of(*bias, "bias")) : std::nullopt;
}

// Parameters of a layer without activation.
fused_dense::FewRowsParams few_rows_params(const Matrix& x, const Matrix& weight, const std::optional<Matrix>& bias,
                                           const Matrix& out) {
  return {.dtype = dtype_of(out.tensor, "out"),
          .rows = out.rows,
          .in_features = x.cols,
          .out_features = out.cols,
          .x = x.as_rows(),
          .weight = weight.as_rows(),
          .bias = bias ? bias->data() : nullptr,
          .out = out.as_rows()};
}

std::tuple<Tensor, Tensor> fused_dense_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                           std::string activation_name, bool keep, int64_t heuristic) {
  check_weight(weight, x, 1, "x");
  check_bias(bias, x, weight);
  const int64_t in = weight.size(1), out_features = weight.size(0);
  const auto activation = activation_of(activation_name);
  keep = keep && activation && activation != Activation::kRelu;

  const DeviceGuard guard(x.get_device_index());
  const Tensor out = new_rows(x, out_features), kept = keep ? new_rows(x, out_features) : new_tensor({0}, x);
  if (out.numel() == 0) return {out, kept};
  const Matrix to = whole(out);
  const Matrix from = in > 0 ? matrix_of(x, "x") : zeros(to.rows, kNone, x);
  const Matrix weights = in > 0 ? matrix_of(weight, "weight") : zeros(out_features, kNone, x);
  const auto aligned_bias = bias_of(bias);

  auto few = few_rows_params(from, weights, aligned_bias, to);
  few.activates = activation.has_value();
  few.activation = activation.value_or(Activation::kRelu);
  if (!keep && fused_dense::few_rows(few, current_stream(x))) return {out, kept};

  auto params = forward_params(from, weights, to);
  params.bias = aligned_bias ? aligned_bias->data() : nullptr;
  if (!activation || (heuristic >= 0 && (activation == Activation::kGelu || activation == Activation::kRelu))) {
    params.epilogue = forward_epilogue(activation, bias.has_value(), keep);
    params.aux = keep ? kept.mutable_data_ptr() : nullptr;
    params.choice = static_cast<int>(heuristic);
    if (multiply(params, x)) return {out, kept};
    params.aux = nullptr;
  }
  params.epilogue = forward_epilogue(std::nullopt, bias.has_value(), false);
  params.choice = 0;
  if (keep) params.d = kept.mutable_data_ptr();
  must(multiply(params, x), "such a product");
  if (activation) activate(*activation, keep ? whole(kept) : to, nullptr, to);
  return {out, kept};
}

std::tuple<Tensor, Tensor> fused_dense_dgrad(const Tensor& dout, const Tensor& weight,
                                             const std::optional<Tensor>& dresidual, const std::optional<Tensor>& kept,
                                             std::string activation_name, bool bias_grad) {
  check_weight(weight, dout, 0, "dout");
  const auto activation = activation_of(activation_name);
  STD_TORCH_CHECK(kept.has_value() == activation.has_value(), "kept must be given with an activation, and only then");
  STD_TORCH_CHECK(!dresidual || !activation, "dresidual must be None with an activation");
  const int64_t in = weight.size(1), out_features = weight.size(0);
  bias_grad = bias_grad && activation;

  const DeviceGuard guard(dout.get_device_index());
  const Tensor dx = new_rows(dout, in);
  if (kept) check_like(*kept, dx, "kept");
  if (dresidual) check_like(*dresidual, dx, "dresidual");
  if (dx.numel() == 0) {
    Tensor dbias = new_tensor({bias_grad ? in : 0}, dout);
    return {dx, torch::stable::zero_(dbias)};
  }
  const Matrix to = whole(dx);
  const Matrix from = out_features > 0 ? matrix_of(dout, "dout") : zeros(to.rows, kNone, dout);
  const Matrix weights = out_features > 0 ? matrix_of(weight, "weight") : zeros(kNone, in, dout);
  auto params = dgrad_params(from, weights, to);
  const auto residual = dresidual ? std::optional(matrix_of(*dresidual, "dresidual")) : std::nullopt;
  if (residual) params.c = residual->data(), params.ld_c = residual->stride;
  must(multiply(params, dout), "such a gradient");

  const auto kept_rows = kept ? std::optional(matrix_of(*kept, "kept")) : std::nullopt;
  if (bias_grad) return {dx, sum_of_rows(to, &*kept_rows, *activation)};
  if (activation) differentiate(*activation, to, *kept_rows, nullptr, to, nullptr);
  return {dx, new_tensor({0}, dout)};
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
  Tensor dweight = new_tensor({out_features, in}, x);
  if (rows == 0 || out_features == 0) {
    Tensor dbias = new_tensor({bias_grad ? out_features : 0}, x);
    return {torch::stable::zero_(dweight), torch::stable::zero_(dbias)};
  }
  const Matrix from = matrix_of(dout, "dout");
  if (dweight.numel() > 0) {
    const Matrix rows_of_x = matrix_of(x, "x");
    must(multiply(wgrad_params(from, rows_of_x, whole(dweight)), x), "such a gradient");
  }
  return {dweight, bias_grad ? sum_of_rows(from) : new_tensor({0}, x)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Activations without a product.

Activation some_activation(const std::string& name) {
  const auto activation = activation_of(name);
  STD_TORCH_CHECK(activation.has_value(), "activation must not be 'identity'");
  return *activation;
}

// Returns a tensor as a matrix. A tensor without dimensions becomes a row of one element.
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

// Returns the first or second half of the columns.
fused_dense::Rows half(const Matrix& matrix, int index) {
  const int64_t bytes = index * matrix.cols / 2 * size_of(dtype_of(matrix.tensor, "x"));
  return {static_cast<char*>(matrix.mutable_data()) + bytes, matrix.stride};
}

void check_halves(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0, "x must have an even number of features, found shape ",
                  shape_string(x.sizes()));
}

Tensor gated_fwd(const Tensor& x, std::string activation) {
  check_halves(x);
  const DeviceGuard guard(x.get_device_index());
  const Tensor out = new_rows(x, x.size(-1) / 2);
  const Matrix from = matrix_of(x, "x");
  fused_dense::activation_fwd({.activation = some_activation(activation),
                               .dtype = dtype_of(x, "x"),
                               .rows = from.rows,
                               .cols = from.cols / 2,
                               .x = half(from, 1),
                               .y = half(from, 0),
                               .out = whole(out).as_rows()},
                              current_stream(x));
  return out;
}

Tensor gated_dense_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       std::string activation) {
  check_weight(weight, x, 1, "x");
  check_bias(bias, x, weight);
  STD_TORCH_CHECK(weight.size(0) % 2 == 0, "weight must have an even number of rows, found shape ",
                  shape_string(weight.sizes()));
  const DeviceGuard guard(x.get_device_index());
  const Tensor out = new_rows(x, weight.size(0) / 2);
  if (out.numel() > 0 && weight.size(1) > 0) {
    const Matrix from = matrix_of(x, "x"), weights = matrix_of(weight, "weight");
    const auto aligned_bias = bias_of(bias);
    auto few = few_rows_params(from, weights, aligned_bias, whole(out));
    few.gated = true;
    few.activation = some_activation(activation);
    if (fused_dense::few_rows(few, current_stream(x))) return out;
  }
  return gated_fwd(std::get<0>(fused_dense_fwd(x, weight, bias, "identity", false, 0)), activation);
}

Tensor gated_bwd(const Tensor& dout, const Tensor& x, std::string activation) {
  check_halves(x);
  const DeviceGuard guard(x.get_device_index());
  const Tensor dx = new_rows(x, x.size(-1));
  check_device(dout, x, "dout");
  check_dtype(dout, x.scalar_type(), "dout");
  STD_TORCH_CHECK(dout.dim() == x.dim() && num_rows(dout) == num_rows(x) && 2 * dout.size(-1) == x.size(-1),
                  "dout must have half the features of x, found shapes ", shape_string(dout.sizes()), " and ",
                  shape_string(x.sizes()));
  const Matrix incoming = matrix_of(dout, "dout"), from = matrix_of(x, "x"), to = whole(dx);
  fused_dense::activation_bwd({.activation = some_activation(activation),
                               .dtype = dtype_of(x, "x"),
                               .rows = from.rows,
                               .cols = from.cols / 2,
                               .dout = incoming.as_rows(),
                               .x = half(from, 1),
                               .y = half(from, 0),
                               .dx = half(to, 1),
                               .dy = half(to, 0)},
                              current_stream(x));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("fused_dense_fwd", TORCH_BOX(&fused_dense_fwd));
  m.impl("fused_dense_dgrad", TORCH_BOX(&fused_dense_dgrad));
  m.impl("fused_dense_wgrad", TORCH_BOX(&fused_dense_wgrad));
  m.impl("gated_dense_fwd", TORCH_BOX(&gated_dense_fwd));
  m.impl("activation_fwd", TORCH_BOX(&activation_fwd));
  m.impl("activation_bwd", TORCH_BOX(&activation_bwd));
  m.impl("gated_fwd", TORCH_BOX(&gated_fwd));
  m.impl("gated_bwd", TORCH_BOX(&gated_bwd));
}

}  // namespace flash::binding
