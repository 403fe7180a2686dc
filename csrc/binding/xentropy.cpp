#include <torch/csrc/stable/library.h>

#include <tuple>

#include "binding/stream.h"
#include "binding/tensor.h"
#include "xentropy/launch.h"
#include "xentropy/params.h"

namespace flash::binding {
namespace {

// The coefficients and numbers of classes that both ops take.
struct Options {
  double label_smoothing, logit_scale, lse_square_scale;
  std::optional<int64_t> ignore_index;
  int64_t class_start, total_classes;
};

bool has_adjacent_columns(const Tensor& logits) { return logits.size(1) <= 1 || logits.stride(1) == 1; }

// Checks a tensor of one number for each row.
void check_row_values(const Tensor& values, const Tensor& logits, const char* name,
                      ScalarType dtype = ScalarType::Float) {
  check_device(values, logits, name);
  check_shape(values, {logits.size(0)}, name);
  check_dtype(values, dtype, name);
}

// Returns the parameters that both directions share. `logits` must have adjacent columns.
xentropy::Problem problem_of(const Tensor& logits, const Tensor& labels, const Options& options) {
  check_device(labels, logits, "labels");
  check_shape(labels, {logits.size(0)}, "labels");
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Int || labels.scalar_type() == ScalarType::Long,
                  "labels must have dtype int32 or int64, found ", labels.scalar_type());
  return {
      .logits = logits.const_data_ptr(),
      .dtype = dtype_of(logits, "logits"),
      .row_stride = logits.stride(0),
      .rows = narrow_size(logits.size(0), "the number of rows"),
      .vocab = narrow_size(logits.size(1), "the vocabulary"),
      .labels = labels.const_data_ptr(),
      .wide_labels = labels.scalar_type() == ScalarType::Long,
      .label_stride = labels.stride(0),
      .class_start = options.class_start,
      .total_classes = options.total_classes,
      .ignores = options.ignore_index.has_value(),
      .ignore_index = options.ignore_index.value_or(0),
      .label_smoothing = static_cast<float>(options.label_smoothing),
      .logit_scale = static_cast<float>(options.logit_scale),
      .lse_square_scale = static_cast<float>(options.lse_square_scale),
  };
}

Tensor checked_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must have shape (rows, vocab), found ", shape_string(logits.sizes()));
  return has_adjacent_columns(logits) ? logits : torch::stable::contiguous(logits);
}

// Returns `logits`, or a copy if its rows are less aligned than those of a new contiguous tensor.
Tensor aligned_as_contiguous(const Tensor& logits) {
  const int64_t bytes_apart = (logits.stride(0) - logits.size(1)) * size_of(dtype_of(logits, "logits"));
  const bool alike = starts_aligned(logits) && (logits.size(0) <= 1 || bytes_apart % 16 == 0);
  return alike ? logits : torch::stable::clone(logits);
}

// What the forward computes for each row.
struct Results {
  explicit Results(const Tensor& logits)
      : losses(new_tensor({logits.size(0)}, aoti_torch_dtype_float32(), logits)),
        z_losses(new_tensor({logits.size(0)}, aoti_torch_dtype_float32(), logits)),
        lse(new_tensor({logits.size(0)}, aoti_torch_dtype_float64(), logits)),
        kept(new_tensor({logits.size(0)}, aoti_torch_dtype_bool(), logits)) {}

  xentropy::FwdParams params(const xentropy::Problem& problem) const {
    return {
        .problem = problem,
        .losses = static_cast<float*>(losses.mutable_data_ptr()),
        .z_losses = static_cast<float*>(z_losses.mutable_data_ptr()),
        .lse = static_cast<double*>(lse.mutable_data_ptr()),
        .kept = static_cast<bool*>(kept.mutable_data_ptr()),
    };
  }

  Tensor losses, z_losses, lse, kept;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> xentropy_fwd(const Tensor& logits, const Tensor& labels,
                                                        const std::optional<Tensor>& known_lse, double label_smoothing,
                                                        double logit_scale, double lse_square_scale,
                                                        std::optional<int64_t> ignore_index, int64_t class_start,
                                                        int64_t total_classes) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor rows = checked_logits(logits);
  if (known_lse) check_row_values(*known_lse, logits, "lse", ScalarType::Double);
  const auto problem = problem_of(
      rows, labels, {label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes});
  const Results results(logits);
  xentropy::FwdParams params = results.params(problem);
  params.known_lse = pointer<double>(known_lse);
  params.known_lse_stride = known_lse ? known_lse->stride(0) : 0;
  xentropy::fwd(params, current_stream(logits));
  return {results.losses, results.z_losses, results.lse, results.kept};
}

// Gives `target` what was written to `rows`, if checked_logits has made a copy for want of adjacent columns.
void copy_back(const Tensor& rows, Tensor target) {
  if (!has_adjacent_columns(target)) torch::stable::copy_(target, rows);
}

// Computes the gradient; if the `expected` dlosses are given, only for rows that have others.
void differentiate(const Tensor& dlosses, const std::optional<Tensor>& expected, const Tensor& logits,
                   const Tensor& labels, const Tensor& lse, const Options& options, const Tensor& dlogits) {
  check_row_values(dlosses, logits, "dlosses");
  if (expected) check_row_values(*expected, logits, "expected");
  check_row_values(lse, logits, "lse", ScalarType::Double);
  void* const target = dlogits.mutable_data_ptr();  // before reading logits: gives a lazy clone its own memory
  const xentropy::BwdParams params{
      .problem = problem_of(logits, labels, options),
      .dlosses = static_cast<const float*>(dlosses.const_data_ptr()),
      .dlosses_stride = dlosses.stride(0),
      .expected = pointer<float>(expected),
      .expected_stride = expected ? expected->stride(0) : 0,
      .lse = static_cast<const double*>(lse.const_data_ptr()),
      .lse_stride = lse.stride(0),
      .dlogits = target,
      .dlogits_stride = dlogits.stride(0),
  };
  xentropy::bwd(params, current_stream(logits));
}

Tensor xentropy_bwd(const Tensor& dlosses, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                    double label_smoothing, double logit_scale, double lse_square_scale,
                    std::optional<int64_t> ignore_index, int64_t class_start, int64_t total_classes) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor rows = aligned_as_contiguous(checked_logits(logits));
  const Tensor dlogits = new_tensor({rows.size(0), rows.size(1)}, logits);
  differentiate(dlosses, std::nullopt, rows, labels, lse,
                {label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes}, dlogits);
  return dlogits;
}

void xentropy_bwd_in_place(const Tensor& dlosses, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                           double label_smoothing, double logit_scale, double lse_square_scale,
                           std::optional<int64_t> ignore_index, int64_t class_start, int64_t total_classes) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor rows = checked_logits(logits);
  differentiate(dlosses, std::nullopt, rows, labels, lse,
                {label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes}, rows);
  copy_back(rows, logits);
}

// Computes the losses, and the gradient for these dlosses.
Results run_both(const Tensor& dlosses, const Tensor& logits, const Tensor& labels, const Options& options,
                 const Tensor& dlogits) {
  check_row_values(dlosses, logits, "dlosses");
  void* const target = dlogits.mutable_data_ptr();  // before reading logits: gives a lazy clone its own memory
  const Results results(logits);
  const xentropy::FwdBwdParams params{
      .fwd = results.params(problem_of(logits, labels, options)),
      .dlosses = static_cast<const float*>(dlosses.const_data_ptr()),
      .dlosses_stride = dlosses.stride(0),
      .dlogits = target,
      .dlogits_stride = dlogits.stride(0),
  };
  xentropy::fwd_bwd(params, current_stream(logits));
  return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> xentropy_fwd_bwd(const Tensor& dlosses, const Tensor& logits,
                                                                    const Tensor& labels, double label_smoothing,
                                                                    double logit_scale, double lse_square_scale,
                                                                    std::optional<int64_t> ignore_index,
                                                                    int64_t class_start, int64_t total_classes) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor rows = aligned_as_contiguous(checked_logits(logits));
  const Tensor dlogits = new_tensor({rows.size(0), rows.size(1)}, logits);
  const Results results =
      run_both(dlosses, rows, labels,
               {label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes}, dlogits);
  return {results.losses, results.z_losses, results.lse, results.kept, dlogits};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> xentropy_fwd_bwd_in_place(const Tensor& dlosses, const Tensor& logits,
                                                                     const Tensor& labels, double label_smoothing,
                                                                     double logit_scale, double lse_square_scale,
                                                                     std::optional<int64_t> ignore_index,
                                                                     int64_t class_start, int64_t total_classes) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor rows = checked_logits(logits);
  const Results results =
      run_both(dlosses, rows, labels,
               {label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes}, rows);
  copy_back(rows, logits);
  return {results.losses, results.z_losses, results.lse, results.kept};
}

void xentropy_redo(const Tensor& dlogits, const Tensor& dlosses, const Tensor& expected, const Tensor& logits,
                   const Tensor& labels, const Tensor& lse, double label_smoothing, double logit_scale,
                   double lse_square_scale, std::optional<int64_t> ignore_index, int64_t class_start,
                   int64_t total_classes) {
  const DeviceGuard guard(dlogits.get_device_index());
  const Tensor rows = aligned_as_contiguous(checked_logits(logits));
  check_device(rows, dlogits, "logits");
  check_shape(dlogits, {rows.size(0), rows.size(1)}, "dlogits");
  check_dtype(dlogits, rows.scalar_type(), "dlogits");
  STD_TORCH_CHECK(dlogits.is_contiguous() && starts_aligned(dlogits), "dlogits must be contiguous and aligned");
  differentiate(dlosses, expected, rows, labels, lse,
                {label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes}, dlogits);
}

void xentropy_scale(const Tensor& dlogits, const Tensor& dlosses, const Tensor& expected, const Tensor& kept) {
  const DeviceGuard guard(dlogits.get_device_index());
  const Tensor rows = checked_logits(dlogits);
  check_row_values(dlosses, rows, "dlosses");
  check_row_values(expected, rows, "expected");
  check_device(kept, rows, "kept");
  check_shape(kept, {rows.size(0)}, "kept");
  check_dtype(kept, ScalarType::Bool, "kept");
  const xentropy::ScaleParams params{
      .dlogits = rows.mutable_data_ptr(),
      .dtype = dtype_of(rows, "dlogits"),
      .dlogits_stride = rows.stride(0),
      .rows = narrow_size(rows.size(0), "the number of rows"),
      .vocab = narrow_size(rows.size(1), "the vocabulary"),
      .dlosses = static_cast<const float*>(dlosses.const_data_ptr()),
      .dlosses_stride = dlosses.stride(0),
      .expected = static_cast<const float*>(expected.const_data_ptr()),
      .expected_stride = expected.stride(0),
      .kept = static_cast<const bool*>(kept.const_data_ptr()),
      .kept_stride = kept.stride(0),
  };
  xentropy::scale(params, current_stream(rows));
  copy_back(rows, dlogits);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("xentropy_fwd", TORCH_BOX(&xentropy_fwd));
  m.impl("xentropy_bwd", TORCH_BOX(&xentropy_bwd));
  m.impl("xentropy_bwd_", TORCH_BOX(&xentropy_bwd_in_place));
  m.impl("xentropy_fwd_bwd", TORCH_BOX(&xentropy_fwd_bwd));
  m.impl("xentropy_fwd_bwd_", TORCH_BOX(&xentropy_fwd_bwd_in_place));
  m.impl("xentropy_redo_", TORCH_BOX(&xentropy_redo));
  m.impl("xentropy_scale_", TORCH_BOX(&xentropy_scale));
}

}  // namespace flash::binding
