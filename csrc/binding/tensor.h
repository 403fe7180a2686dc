// Conversions of tensors of PyTorch's stable ABI to what kernels take, and checks. The Python layer gives users the
// full error messages; these checks keep a direct call of an op from accessing memory that it should not.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "common/tensor_ref.h"

namespace flash::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The dtype of a tensor as a number of PyTorch's. Tensor::scalar_type() takes up to twenty calls to translate it.
inline int32_t dtype_number(const Tensor& tensor) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
  const int32_t dtype = dtype_number(tensor);
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (dtype == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  STD_TORCH_CHECK(false, name, " must have dtype float32, float16 or bfloat16, found ", tensor.scalar_type());
}

// The same of a dtype; only in the cases named does it take one call.
inline int32_t dtype_number(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    default:
      return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  }
}

inline void check_dtype(const Tensor& tensor, ScalarType expected, const char* name) {
  STD_TORCH_CHECK(dtype_number(tensor) == dtype_number(expected), name, " must have dtype ", expected, ", found ",
                  tensor.scalar_type());
}

inline void check_same_dtype(const Tensor& tensor, const Tensor& first, const char* name) {
  STD_TORCH_CHECK(dtype_number(tensor) == dtype_number(first), name, " must have dtype ", first.scalar_type(),
                  ", found ", tensor.scalar_type());
}

inline std::string device_string(const Tensor& tensor) {
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return tensor.is_cpu() ? "cpu" : "another kind of device";
}

// Checks that a tensor is on the same device as the first argument, which the dispatcher has found to be a CUDA tensor.
inline void check_device(const Tensor& tensor, const Tensor& first, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == first.get_device_index(), name, " must be on ",
                  device_string(first), " like the first argument, found it on ", device_string(tensor));
}

template <typename Sizes>
std::string shape_string(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> expected, const char* name) {
  const auto found = tensor.sizes();
  STD_TORCH_CHECK(std::equal(found.begin(), found.end(), expected.begin(), expected.end()), name, " must have shape ",
                  shape_string(expected), ", found ", shape_string(found));
}

// Returns a new contiguous tensor on the device of `like`, not initialised. Its dtype is one of aoti_torch_dtype_*(),
// or that of `like`. It calls a C function, which is much faster than torch::stable::new_empty.
template <typename Sizes>
Tensor new_tensor_of(const Sizes& sizes, int32_t dtype, const Tensor& like) {
  std::array<int64_t, 64> strides;  // PyTorch allows no more dimensions
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes.begin()[dim], 1);
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides.data(), dtype,
                                                  aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor new_tensor(std::initializer_list<int64_t> sizes, int32_t dtype, const Tensor& like) {
  return new_tensor_of(sizes, dtype, like);
}

inline Tensor new_tensor(std::initializer_list<int64_t> sizes, const Tensor& like) {
  return new_tensor(sizes, dtype_number(like), like);
}

// Returns the number of rows of a tensor (..., cols).
inline int64_t num_rows(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.size(dim);
  return rows;
}

// Returns the stride between rows of a tensor (..., cols), if there is a single one and the elements of a row are
// adjacent.
inline std::optional<int64_t> row_stride(const Tensor& tensor) {
  const int64_t cols = tensor.size(-1);
  if (cols > 1 && tensor.stride(-1) != 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t rows = 1;  // in the dimensions visited so far
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    if (tensor.size(dim) == 1) continue;
    if (stride && tensor.stride(dim) != *stride * rows) return std::nullopt;
    if (!stride) stride = tensor.stride(dim);
    rows *= tensor.size(dim);
  }
  return stride.value_or(cols);
}

inline bool starts_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// Returns `tensor` itself if it is contiguous, otherwise a copy. torch::stable::contiguous alone would go through the
// dispatcher even where there is nothing to do.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(as_contiguous(*tensor)) : std::nullopt;
}

// Returns a contiguous tensor that starts at an aligned address: `tensor` itself if possible, otherwise a copy.
inline Tensor aligned_contiguous(const Tensor& tensor) {
  const Tensor rows = as_contiguous(tensor);
  return starts_aligned(rows) ? rows : torch::stable::clone(rows);
}

// Returns a size as 32 bits. The limit is half of their range, because kernels may count past the size.
inline int narrow_size(int64_t size, const char* name) {
  STD_TORCH_CHECK(size <= std::numeric_limits<int>::max() / 2, name, " is too large: ", size);
  return static_cast<int>(size);
}

template <typename T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// Returns the data and the strides of a tensor (batch, seqlen, heads, head_dim), or of a tensor (tokens, heads,
// head_dim) as one entry of a batch. In PyTorch the stride of a dimension of size 1 has no meaning; here it becomes 0.
template <typename Data>
TensorRef<Data> tensor_ref(Data* data, const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  const auto stride = [&](int64_t dim) { return dim < 0 || sizes[dim] == 1 ? 0 : strides[dim]; };
  return {data, stride(last - 3), stride(last - 2), stride(last - 1), sizes[last] == 1 ? 1 : strides[last]};
}

// The same for contiguous elements at an address.
template <typename Data>
TensorRef<Data> contiguous_ref(Data* data, int64_t batch, int64_t seqlen, int64_t heads, int64_t head_dim) {
  const auto stride = [](int64_t size, int64_t elements) { return size == 1 ? 0 : elements; };
  return {data, stride(batch, seqlen * heads * head_dim), stride(seqlen, heads * head_dim), stride(heads, head_dim), 1};
}

inline TensorRef<const void> ref(const Tensor& tensor) { return tensor_ref(tensor.const_data_ptr(), tensor); }
inline TensorRef<> mutable_ref(const Tensor& tensor) { return tensor_ref(tensor.mutable_data_ptr(), tensor); }

}  // namespace flash::binding
