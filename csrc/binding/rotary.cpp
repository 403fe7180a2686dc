#include <torch/csrc/stable/library.h>

#include "binding/stream.h"
#include "binding/tensor.h"
#include "rotary/launch.h"
#include "rotary/params.h"

namespace flash::binding {
namespace {

void check_offsets(const Tensor& offsets, int64_t sequences, const Tensor& x) {
  check_device(offsets, x, "seqlen_offsets");
  check_shape(offsets, {sequences}, "seqlen_offsets");
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Int || offsets.scalar_type() == ScalarType::Long,
                  "seqlen_offsets must have dtype int32 or int64, found ", offsets.scalar_type());
}

void check_cu_seqlens(const Tensor& cu_seqlens, const Tensor& x) {
  check_device(cu_seqlens, x, "cu_seqlens");
  check_dtype(cu_seqlens, ScalarType::Int, "cu_seqlens");
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0, "cu_seqlens must have shape (batch + 1,), found ",
                  shape_string(cu_seqlens.sizes()));
}

Tensor with_adjacent_columns(const Tensor& table) {
  return table.size(1) <= 1 || table.stride(1) == 1 ? table : torch::stable::contiguous(table);
}

// Rotates x into out, which may be x itself.
void rotate(const Tensor& x, const Tensor& out, const Tensor& cos, const Tensor& sin,
            const std::optional<Tensor>& seqlen_offsets, int64_t seqlen_offset, const std::optional<Tensor>& cu_seqlens,
            bool interleaved, bool conjugate, bool in_place) {
  const bool packed = cu_seqlens.has_value();
  STD_TORCH_CHECK(x.dim() == (packed ? 3 : 4),
                  "x must be (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) ",
                  "with cu_seqlens, found shape ", shape_string(x.sizes()));
  if (packed) check_cu_seqlens(*cu_seqlens, x);
  const int64_t batch = packed ? 1 : x.size(0);
  const int64_t sequences = packed ? cu_seqlens->numel() - 1 : batch;
  if (seqlen_offsets) check_offsets(*seqlen_offsets, sequences, x);
  const int64_t seqlen = x.size(-3), heads = x.size(-2), head_dim = x.size(-1);
  STD_TORCH_CHECK(cos.dim() == 2 && 2 * cos.size(1) <= head_dim,
                  "cos must have shape (positions, rotary_dim / 2) with rotary_dim at most ", head_dim, ", found ",
                  shape_string(cos.sizes()));
  check_shape(sin, {cos.size(0), cos.size(1)}, "sin");
  check_device(cos, x, "cos");
  check_device(sin, x, "sin");
  const DType table_dtype = dtype_of(cos, "cos");
  check_dtype(sin, cos.scalar_type(), "sin");

  const DeviceGuard guard(x.get_device_index());
  const auto target = mutable_ref(out);  // first, because it gives a lazy clone its own memory
  const Tensor cos_rows = with_adjacent_columns(cos), sin_rows = with_adjacent_columns(sin);
  const auto starts = as_contiguous(cu_seqlens), offsets = as_contiguous(seqlen_offsets);
  const rotary::Params params{
      .rows = narrow_size(batch * seqlen * heads, "the number of heads of all tokens of x"),
      .x = ref(x),
      .out = target,
      .dtype = dtype_of(x, "x"),
      .seqlen = narrow_size(seqlen, "seqlen"),
      .heads = narrow_size(heads, "the number of heads"),
      .head_dim = narrow_size(head_dim, "head_dim"),
      .cos = cos_rows.const_data_ptr(),
      .sin = sin_rows.const_data_ptr(),
      .table_dtype = table_dtype,
      .cos_stride = cos_rows.stride(0),
      .sin_stride = sin_rows.stride(0),
      .positions = narrow_size(cos.size(0), "the number of positions"),
      .rotary_dim = static_cast<int>(2 * cos.size(1)),
      .cu_seqlens = pointer<int32_t>(starts),
      .num_sequences = narrow_size(sequences, "the number of sequences"),
      .seqlen_offsets = pointer<void>(offsets),
      .wide_offsets = offsets && offsets->scalar_type() == ScalarType::Long,
      .seqlen_offset = seqlen_offset,
      .interleaved = interleaved,
      .conjugate = conjugate,
      .in_place = in_place,
  };
  rotary::apply(params, current_stream(x));
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& seqlen_offsets,
              int64_t seqlen_offset, const std::optional<Tensor>& cu_seqlens, bool interleaved, bool conjugate) {
  const Tensor out = torch::stable::empty_like(x);
  rotate(x, out, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate, /*in_place=*/false);
  return out;
}

void rotary_in_place(const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& seqlen_offsets,
                     int64_t seqlen_offset, const std::optional<Tensor>& cu_seqlens, bool interleaved, bool conjugate) {
  rotate(x, x, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate, /*in_place=*/true);
}

void rotary_into(const Tensor& x, const Tensor& out, const Tensor& cos, const Tensor& sin,
                 const std::optional<Tensor>& seqlen_offsets, int64_t seqlen_offset,
                 const std::optional<Tensor>& cu_seqlens, bool interleaved, bool conjugate) {
  check_device(out, x, "out");
  check_dtype(out, x.scalar_type(), "out");
  STD_TORCH_CHECK(out.sizes().equals(x.sizes()), "out must have shape ", shape_string(x.sizes()), ", found ",
                  shape_string(out.sizes()));
  rotate(x, out, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate, /*in_place=*/false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_", TORCH_BOX(&rotary_in_place));
  m.impl("rotary_into", TORCH_BOX(&rotary_into));
}

}  // namespace flash::binding
