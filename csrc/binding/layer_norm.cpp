#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <tuple>

#include "binding/stream.h"
#include "binding/tensor.h"
#include "layer_norm/launch.h"
#include "layer_norm/params.h"

namespace flash::binding {
namespace {

using layer_norm::Matrix;
using layer_norm::Problem;
using layer_norm::Vector;
using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<ScalarType>;

// The inputs of a call in the form that kernels take. It owns the copies that this needs.
class Inputs {
 public:
  // Takes the device from `first`.
  Inputs(const Tensor& first, int64_t cols) : first_(first), cols_(cols) {}

  Matrix<const void> rows(const OptionalTensor& x, int64_t rows, const char* name) {
    if (!x) return {};
    check_device(*x, first_, name);
    STD_TORCH_CHECK(x->dim() > 0 && x->size(-1) == cols_ && num_rows(*x) == rows, name, " must have ", rows,
                    " rows of ", cols_, " elements, found shape ", shape_string(x->sizes()));
    const auto stride = row_stride(*x);
    return {(stride ? *x : contiguous(*x)).const_data_ptr(), stride.value_or(cols_), dtype_of(*x, name)};
  }

  Vector vector(const OptionalTensor& x, int64_t count, const char* name) {
    return x ? Vector{elements(*x, count, name), dtype_of(*x, name)} : Vector{};
  }

  Vector columns(const OptionalTensor& x, const char* name) { return vector(x, cols_, name); }

  template <typename T>
  const T* pointer(const OptionalTensor& x, int64_t count, ScalarType type, const char* name) {
    if (!x) return nullptr;
    check_dtype(*x, type, name);
    return static_cast<const T*>(elements(*x, count, name));
  }

 private:
  const void* elements(const Tensor& x, int64_t count, const char* name) {
    check_device(x, first_, name);
    STD_TORCH_CHECK(x.numel() == count, name, " must have ", count, " elements, found ", x.numel());
    return contiguous(x).const_data_ptr();
  }

  const Tensor& contiguous(const Tensor& x) { return copies_.emplace_back(as_contiguous(x)); }

  const Tensor& first_;
  int64_t cols_;
  std::deque<Tensor> copies_;
};

int32_t dtype_code(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    default:
      STD_TORCH_CHECK(false, "a result must have dtype float32, float16 or bfloat16, found ", type);
  }
}

// Returns a new tensor, or an empty one if no type is given.
template <typename Sizes>
Tensor new_result(const Sizes& sizes, OptionalType type, const Tensor& like) {
  return type ? new_tensor_of(sizes, dtype_code(*type), like) : new_tensor({0}, like);
}

Matrix<> result_matrix(const Tensor& result, bool there) {
  return there ? Matrix<>{result.mutable_data_ptr(), result.size(-1), dtype_of(result, "a result")} : Matrix<>{};
}

// Returns a new mask with the shape of x, or an empty tensor if no mask is wanted.
Tensor new_mask(const Tensor& x, bool wanted) {
  return wanted ? new_tensor_of(x.sizes(), aoti_torch_dtype_uint8(), x) : new_tensor({0}, x);
}

template <typename T>
T* data(const Tensor& x, bool there = true) {
  return there ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

// Returns the parameters that forward and backward share. `drops` says whether elements are dropped, at random or by
// masks.
Problem problem_of(Inputs& inputs, int64_t rows, int64_t x0_rows, int64_t out_rows, int64_t cols, const Tensor& weight,
                   const OptionalTensor& bias, const OptionalTensor& weight1, const OptionalTensor& bias1,
                   const OptionalTensor& colscale, const OptionalTensor& rowscale, const OptionalTensor& x0_subset,
                   const OptionalTensor& out_subset, const OptionalTensor& rng_state, double dropout_p, bool drops,
                   double rowscale_const, bool is_rms_norm, bool zero_centered_weight) {
  STD_TORCH_CHECK(0 <= dropout_p && dropout_p < 1, "dropout_p must be at least 0 and less than 1, found ", dropout_p);
  return {
      .rows = rows,
      .x0_rows = x0_rows,
      .out_rows = out_rows,
      .cols = narrow_size(cols, "the number of features"),
      .is_rms_norm = is_rms_norm,
      .zero_centered_weight = zero_centered_weight,
      .weight = inputs.columns(weight, "weight"),
      .bias = inputs.columns(bias, "bias"),
      .weight1 = inputs.columns(weight1, "weight1"),
      .bias1 = inputs.columns(bias1, "bias1"),
      .colscale = inputs.columns(colscale, "colscale"),
      .rowscale = inputs.vector(rowscale, x0_rows, "rowscale"),
      .x0_subset = inputs.pointer<int32_t>(x0_subset, rows, ScalarType::Int, "x0_subset"),
      .out_subset = inputs.pointer<int32_t>(out_subset, rows, ScalarType::Int, "out_subset"),
      .rowscale_const = static_cast<float>(rowscale_const),
      .rng_state = inputs.pointer<int64_t>(rng_state, 2, ScalarType::Long, "rng_state"),
      .keep_threshold = static_cast<uint32_t>(std::nearbyint(65536 * (1 - dropout_p))),
      .keep_scale = static_cast<float>(drops ? 1 / (1 - dropout_p) : 1),
  };
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fwd(
    const Tensor& x0, const OptionalTensor& x1, const OptionalTensor& residual, const Tensor& weight,
    const OptionalTensor& bias, const OptionalTensor& weight1, const OptionalTensor& bias1,
    const OptionalTensor& colscale, const OptionalTensor& rowscale, const OptionalTensor& x0_subset,
    const OptionalTensor& out_subset, const OptionalTensor& rng_state, double dropout_p, double eps,
    double rowscale_const, int64_t out_rows, bool is_rms_norm, bool zero_centered_weight, OptionalType h_dtype,
    ScalarType out_dtype, bool return_mask) {
  STD_TORCH_CHECK(x0.dim() > 0, "x0 must have at least one dimension (..., features), found none");
  STD_TORCH_CHECK(x0_subset.has_value() == out_subset.has_value(), "x0_subset and out_subset must be given together");
  const bool subset = x0_subset.has_value();
  STD_TORCH_CHECK(out_rows >= 0 && (!subset || x0.dim() == 2), "x0 must be (x0_rows, cols) with subsets");
  const int64_t cols = x0.size(-1), x0_rows = num_rows(x0), rows = subset ? x0_subset->numel() : x0_rows;
  out_rows = subset ? out_rows : rows;

  const DeviceGuard guard(x0.get_device_index());
  const auto new_rows = [&](int64_t count, OptionalType type) {
    return subset ? new_result(std::initializer_list<int64_t>{count, cols}, type, x0)
                  : new_result(x0.sizes(), type, x0);
  };
  const Tensor out = new_rows(out_rows, out_dtype);
  const Tensor out1 = new_rows(out_rows, weight1 ? OptionalType(out_dtype) : std::nullopt);
  const Tensor h = new_rows(rows, h_dtype);
  const Tensor mean = new_tensor({rows}, aoti_torch_dtype_float32(), x0);
  const Tensor rstd = new_tensor({rows}, aoti_torch_dtype_float32(), x0);
  const bool has_mask0 = return_mask && rng_state, has_mask1 = has_mask0 && x1;
  const Tensor mask0 = new_mask(x0, has_mask0), mask1 = new_mask(x1.value_or(x0), has_mask1);

  Inputs inputs(x0, cols);
  const layer_norm::FwdParams params{
      .problem = problem_of(inputs, rows, x0_rows, out_rows, cols, weight, bias, weight1, bias1, colscale, rowscale,
                            x0_subset, out_subset, rng_state, dropout_p, rng_state.has_value(), rowscale_const,
                            is_rms_norm, zero_centered_weight),
      .x0 = inputs.rows(x0, x0_rows, "x0"),
      .x1 = inputs.rows(x1, rows, "x1"),
      .residual = inputs.rows(residual, rows, "residual"),
      .out = result_matrix(out, true),
      .out1 = result_matrix(out1, weight1.has_value()),
      .h = result_matrix(h, h_dtype.has_value()),
      .mask0 = data<uint8_t>(mask0, has_mask0),
      .mask1 = data<uint8_t>(mask1, has_mask1),
      .mean = data<float>(mean),
      .rstd = data<float>(rstd),
      .eps = static_cast<float>(eps),
  };
  if (cols > 0) layer_norm::fwd(params, current_stream(x0));  // even without rows, because out may have rows
  return {out, out1, h, mask0, mask1, mean, rstd};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients bwd(const Tensor& dout, const OptionalTensor& dout1, const OptionalTensor& dh, const Tensor& h,
              const OptionalTensor& x0, const Tensor& mean, const Tensor& rstd, const Tensor& weight,
              const OptionalTensor& bias, const OptionalTensor& weight1, const OptionalTensor& bias1,
              const OptionalTensor& colscale, const OptionalTensor& rowscale, const OptionalTensor& x0_subset,
              const OptionalTensor& out_subset, const OptionalTensor& rng_state, const OptionalTensor& mask0,
              const OptionalTensor& mask1, double dropout_p, double rowscale_const, int64_t x0_rows, bool is_rms_norm,
              bool zero_centered_weight, OptionalType dx0_dtype, OptionalType dx1_dtype, OptionalType dresidual_dtype,
              OptionalType out_dtype) {
  STD_TORCH_CHECK(h.dim() > 0, "h must have at least one dimension (..., features), found none");
  STD_TORCH_CHECK(x0_subset.has_value() == out_subset.has_value(), "x0_subset and out_subset must be given together");
  STD_TORCH_CHECK(weight1.has_value() == dout1.has_value(), "weight1 and dout1 must be given together");
  STD_TORCH_CHECK(!colscale || x0, "x0 must be given with colscale");
  STD_TORCH_CHECK(dx0_dtype || !colscale, "dx0_dtype must be given with colscale");
  const bool subset = x0_subset.has_value();
  STD_TORCH_CHECK(x0_rows >= 0 && (!subset || (h.dim() == 2 && dout.dim() == 2)),
                  "h and dout must be (rows, cols) with subsets");
  const int64_t cols = h.size(-1), rows = num_rows(h), out_rows = num_rows(dout);
  x0_rows = subset ? x0_rows : rows;
  STD_TORCH_CHECK(subset || out_rows == rows, "dout must have ", rows, " rows, found ", out_rows);

  const DeviceGuard guard(dout.get_device_index());
  const Tensor dx0 = subset ? new_result(std::initializer_list<int64_t>{x0_rows, cols}, dx0_dtype, dout)
                            : new_result(h.sizes(), dx0_dtype, dout);
  const Tensor dx1 = new_result(h.sizes(), dx1_dtype, dout);
  const Tensor dresidual = new_result(h.sizes(), dresidual_dtype, dout);
  const Tensor out = new_result(h.sizes(), out_dtype, dout);
  const auto new_gradient = [&](const OptionalTensor& parameter) {
    return parameter ? new_tensor({cols}, *parameter) : new_tensor({0}, dout);
  };
  const Tensor dweight = new_gradient(weight), dbias = new_gradient(bias), dweight1 = new_gradient(weight1);
  const Tensor dbias1 = new_gradient(bias1), dcolscale = new_gradient(colscale);
  const int max_parts = layer_norm::max_parts(rows);
  using layer_norm::BwdParams;
  const Tensor parts =
      new_tensor({max_parts, BwdParams::kParameters, BwdParams::part_cols(cols)}, aoti_torch_dtype_float32(), dout);
  const Tensor sums = new_tensor({rows, 2}, aoti_torch_dtype_float32(), dout);

  Inputs inputs(dout, cols);
  const BwdParams params{
      .problem = problem_of(inputs, rows, x0_rows, out_rows, cols, weight, bias, weight1, bias1, colscale, rowscale,
                            x0_subset, out_subset, rng_state, dropout_p, rng_state || mask0 || mask1, rowscale_const,
                            is_rms_norm, zero_centered_weight),
      .dout = inputs.rows(dout, out_rows, "dout"),
      .dout1 = inputs.rows(dout1, out_rows, "dout1"),
      .dh = inputs.rows(dh, rows, "dh"),
      .h = inputs.rows(h, rows, "h"),
      .x0 = inputs.rows(colscale ? x0 : std::nullopt, x0_rows, "x0"),
      .mean = inputs.pointer<float>(mean, rows, ScalarType::Float, "mean"),
      .rstd = inputs.pointer<float>(rstd, rows, ScalarType::Float, "rstd"),
      .mask0 = inputs.pointer<uint8_t>(mask0, x0_rows * cols, ScalarType::Byte, "mask0"),
      .mask1 = inputs.pointer<uint8_t>(mask1, rows * cols, ScalarType::Byte, "mask1"),
      .dx0 = result_matrix(dx0, dx0_dtype.has_value()),
      .dx1 = result_matrix(dx1, dx1_dtype.has_value()),
      .dresidual = result_matrix(dresidual, dresidual_dtype.has_value()),
      .out = result_matrix(out, out_dtype.has_value()),
      .dparameters = {result_matrix(dweight, true), result_matrix(dbias, bias.has_value()),
                      result_matrix(dweight1, weight1.has_value()), result_matrix(dbias1, bias1.has_value()),
                      result_matrix(dcolscale, colscale.has_value())},
      .parts = data<float>(parts),
      .max_parts = max_parts,
      .sums = data<float>(sums),
  };
  if (cols > 0) layer_norm::bwd(params, current_stream(dout));
  return {dx0, dx1, dresidual, dweight, dbias, dweight1, dbias1, dcolscale, out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&bwd));
}

}  // namespace flash::binding
