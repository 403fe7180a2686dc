// Queries, keys and values as the attention ops get them: separate or packed, dense or as tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "binding/flash_attn/options.h"
#include "binding/tensor.h"
#include "common/dtype.h"
#include "common/tensor_ref.h"
#include "flash_attn/launch.h"
#include "flash_attn/params.h"

namespace flash::binding::attention {

// A tensor (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), or one of the tensors that a packed one
// holds. Data is const void or, if it is written to, void: taking the address then gives a lazy clone memory of its
// own.
template <typename Data>
struct View {
  TensorRef<Data> ref;
  int64_t batch, seqlen, heads, head_dim;  // without a batch dimension, all tokens are one batch entry
};

// x itself or, if it packs `count` tensors along its dimension -3, the one at `index`.
template <typename Data>
View<Data> view_of(const Tensor& x, bool tokens, int64_t count, int64_t index, const char* name) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  const auto sizes = x.sizes(), strides = x.strides();
  const size_t dims = (tokens ? 3 : 4) + (count > 1);
  STD_TORCH_CHECK(sizes.size() == dims, name, " must have ", dims, " dimensions, found shape ", shape_string(sizes));
  STD_TORCH_CHECK(count == 1 || sizes[dims - 3] == count, name, " must have size ", count,
                  " in dimension -3, found shape ", shape_string(sizes));
  const size_t seqlen_dim = dims - 3 - (count > 1);
  const auto stride = [&](size_t dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
  Byte* data;
  if constexpr (std::is_const_v<Data>) {
    data = static_cast<Byte*>(x.const_data_ptr());
  } else {
    data = static_cast<Byte*>(x.mutable_data_ptr());
  }
  if (count > 1) data += index * strides[dims - 3] * size_of(dtype_of(x, name));
  return {.ref = {.data = data,
                  .batch = tokens ? 0 : stride(0),
                  .seqlen = stride(seqlen_dim),
                  .heads = stride(dims - 2),
                  .head_dim = sizes[dims - 1] == 1 ? 1 : strides[dims - 1]},
          .batch = tokens ? 1 : sizes[0],
          .seqlen = sizes[seqlen_dim],
          .heads = sizes[dims - 2],
          .head_dim = sizes[dims - 1]};
}

template <typename Data>
struct Views {
  View<Data> q, k, v;
};
using Inputs = Views<const void>;

// q, k and v, given separately or packed: without v, k holds keys and values; without k, too, q holds all three.
template <typename Data>
Views<Data> unpack(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, bool tokens, bool paged) {
  if (!k) {
    return {view_of<Data>(q, tokens, 3, 0, "qkv"), view_of<Data>(q, tokens, 3, 1, "qkv"),
            view_of<Data>(q, tokens, 3, 2, "qkv")};
  }
  const bool key_tokens = tokens && !paged;
  const View<Data> queries = view_of<Data>(q, tokens, 1, 0, "q");
  if (!v) return {queries, view_of<Data>(*k, key_tokens, 2, 0, "kv"), view_of<Data>(*k, key_tokens, 2, 1, "kv")};
  return {queries, view_of<Data>(*k, key_tokens, 1, 0, "k"), view_of<Data>(*v, key_tokens, 1, 0, "v")};
}

inline void check_like(const Tensor& x, const Tensor& q, const char* name) {
  check_device(x, q, name);
  check_same_dtype(x, q, name);
}

// Whether a tensor holds codes in 8 bits.
inline bool is_coded(const Tensor& x) { return dtype_number(x) == aoti_torch_dtype_float8_e4m3fn(); }

// Checks keys or values, which may be codes if the op takes them.
inline void check_keys(const Tensor& x, const Tensor& q, const char* name, bool takes_codes) {
  check_device(x, q, name);
  if (!takes_codes || !is_coded(x)) check_same_dtype(x, q, name);
}
inline bool check_coded(const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(is_coded(k) == is_coded(v), "k and v must have one dtype, found ", k.scalar_type(), " and ",
                  v.scalar_type());
  return is_coded(k);
}

inline void check_inputs(const Inputs& x) {
  const auto& [q, k, v] = x;
  for (const auto& [name, x] : {std::pair("q", &q), std::pair("v", &v)}) {
    STD_TORCH_CHECK(x->head_dim >= 1 && x->head_dim <= flash_attn::kMostHeadDim, name,
                    "'s head_dim must be between 1 and ", flash_attn::kMostHeadDim, ", found ", x->head_dim);
  }
  STD_TORCH_CHECK(k.head_dim == q.head_dim && v.heads == k.heads && v.seqlen == k.seqlen && v.batch == k.batch,
                  "k must have the head_dim of q, ", q.head_dim, ", and v the other sizes of k");
  STD_TORCH_CHECK(q.heads == k.heads || (k.heads > 0 && q.heads % k.heads == 0),
                  "k must have a number of heads that divides q's ", q.heads, ", found ", k.heads);
}

// An int32 tensor (size,) that is read on the device; null if there is none. `x` is made contiguous.
inline const int* index_pointer(OptionalTensor& x, const Tensor& q, int64_t size, const char* name) {
  if (!x) return nullptr;
  check_device(*x, q, name);
  check_dtype(*x, ScalarType::Int, name);
  check_shape(*x, {size}, name);
  x = as_contiguous(*x);
  return pointer<int>(x);
}

inline int seqlen(int64_t length, const char* name) {
  STD_TORCH_CHECK(length < flash_attn::kMaxSeqlen, name, " is too long: ", length, " positions");
  return static_cast<int>(length);
}

inline int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

}  // namespace flash::binding::attention
