#include <torch/csrc/stable/library.h>

#include "binding/stream.h"
#include "binding/tensor.h"
#include "fused_softmax/launch.h"
#include "fused_softmax/params.h"

namespace flash::binding {
namespace {

// Checks what both ops require of a tensor of rows.
void check_rows(const Tensor& rows, bool causal, const char* name) {
  STD_TORCH_CHECK(rows.dim() >= 2, name, " must have rows and columns as its last dimensions, found shape ",
                  shape_string(rows.sizes()));
  STD_TORCH_CHECK(!causal || rows.size(-2) == rows.size(-1), name, " must have as many rows as columns to be causal, ",
                  "found shape ", shape_string(rows.sizes()));
}

// Returns the rows of a contiguous tensor. `heads` matters only where there is a mask.
fused_softmax::Rows rows_of(const Tensor& tensor, int64_t heads, bool heads_inside, bool causal, const char* name) {
  const Divisor rows_of_a_head(std::max(1, narrow_size(tensor.size(-2), "seqlen_q")));
  const Divisor heads_of_an_entry(std::max(1, narrow_size(heads, "the number of heads")));
  return {
      .count = narrow_size(num_rows(tensor), "the number of rows"),
      .cols = narrow_size(tensor.size(-1), "the number of columns"),
      .dtype = dtype_of(tensor, name),
      .causal = causal,
      .heads_inside = heads_inside,
      .inner = heads_inside ? heads_of_an_entry : rows_of_a_head,
      .outer = heads_inside ? rows_of_a_head : heads_of_an_entry,
  };
}

// Returns whether heads that share a mask take turns. Without turns, a large mask would leave the cache before the next
// head reads it.
bool take_turns(const std::optional<Tensor>& mask) {
  constexpr int64_t kCachedBytes = 4 << 20;
  return mask && mask->size(1) == 1 && mask->size(2) * mask->size(3) > kCachedBytes;
}

void check_mask(const Tensor& mask, const Tensor& x) {
  check_device(mask, x, "mask");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool || mask.scalar_type() == ScalarType::Byte,
                  "mask must have dtype bool or uint8, found ", mask.scalar_type());
  STD_TORCH_CHECK(mask.dim() == 4 && x.dim() == 4, "mask must have four dimensions, as x then must, found shapes ",
                  shape_string(mask.sizes()), " and ", shape_string(x.sizes()));
  for (int64_t dim = 0; dim < 4; ++dim) {
    STD_TORCH_CHECK(mask.size(dim) == 1 || mask.size(dim) == x.size(dim), "mask must have shape ",
                    shape_string(x.sizes()), " or ones in it, found ", shape_string(mask.sizes()));
  }
}

// Returns the mask in the form that kernels take. `mask` must have adjacent columns, or a single one.
fused_softmax::Mask mask_of(const Tensor& mask) {
  const auto stride = [&](int64_t dim) { return mask.size(dim) == 1 ? 0 : mask.stride(dim); };
  return {.data = static_cast<const uint8_t*>(mask.const_data_ptr()),
          .batch_stride = stride(0),
          .head_stride = stride(1),
          .row_stride = stride(2),
          .one_for_all = mask.size(3) == 1};
}

Tensor softmax_fwd(const Tensor& x, const std::optional<Tensor>& mask, double scale, bool causal) {
  check_rows(x, causal, "x");
  if (mask) check_mask(*mask, x);
  const DeviceGuard guard(x.get_device_index());
  const bool adjacent = !mask || mask->size(3) == 1 || mask->stride(3) == 1;
  const auto columns = adjacent ? mask : std::optional(torch::stable::contiguous(*mask));
  const Tensor scores = aligned_contiguous(x), y = torch::stable::empty_like(scores);
  const fused_softmax::FwdParams params{
      .rows = rows_of(scores, mask ? x.size(1) : 1, take_turns(mask), causal, "x"),
      .mask = columns ? mask_of(*columns) : fused_softmax::Mask{},
      .scale = static_cast<float>(scale),
      .x = scores.const_data_ptr(),
      .y = y.mutable_data_ptr(),
  };
  fused_softmax::fwd(params, current_stream(x));
  return y;
}

Tensor softmax_bwd(const Tensor& dy, const Tensor& y, double scale, bool causal) {
  check_rows(y, causal, "y");
  check_device(y, dy, "y");
  STD_TORCH_CHECK(dy.sizes().equals(y.sizes()), "dy must have shape ", shape_string(y.sizes()), ", found ",
                  shape_string(dy.sizes()));
  check_dtype(dy, y.scalar_type(), "dy");
  const DeviceGuard guard(y.get_device_index());
  const Tensor incoming = aligned_contiguous(dy), weights = aligned_contiguous(y);
  const Tensor dx = torch::stable::empty_like(weights);
  const fused_softmax::BwdParams params{
      .rows = rows_of(weights, /*heads=*/1, /*heads_inside=*/false, causal, "y"),
      .scale = static_cast<float>(scale),
      .dy = incoming.const_data_ptr(),
      .y = weights.const_data_ptr(),
      .dx = dx.mutable_data_ptr(),
  };
  fused_softmax::bwd(params, current_stream(y));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("softmax_fwd", TORCH_BOX(&softmax_fwd));
  m.impl("softmax_bwd", TORCH_BOX(&softmax_bwd));
}

}  // namespace flash::binding
