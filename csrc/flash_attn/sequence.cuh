// Where the query rows and keys of a batch entry lie in memory. Kernels count both from 0 in every entry; how dense,
// packed, left-padded, indexed and paged tensors differ is hidden here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/params.h"

namespace flash::flash_attn {

// `length` tokens of a tensor, at positions first, first + 1, .. of the row `batch` of its batch dimension.
struct Span {
  int64_t batch;
  int64_t first;
  int length;
};

__device__ inline int length_at(const int* cu_seqlens, int entry) {
  return max(0, __ldg(cu_seqlens + entry + 1) - __ldg(cu_seqlens + entry));
}

// The query rows of an entry. Packed rows after the last entry are treated as an entry `batch` that sees no keys, so
// that they get defined results.
__device__ inline Span query_span(const Problem& p, int entry) {
  if (p.cu_seqlens_q == nullptr) return {entry, 0, p.seqlen_q};
  if (entry == p.batch) {
    const int first = __ldg(p.cu_seqlens_q + entry);
    return {0, first, max(0, p.seqlen_q - first)};
  }
  return {0, __ldg(p.cu_seqlens_q + entry), length_at(p.cu_seqlens_q, entry)};
}

// How many keys of an entry are used: `given` unless seqused_k says otherwise, where a negative length means none.
__device__ inline int used_keys(const Problem& p, int entry, int given) {
  if (p.seqused_k == nullptr) return given;
  const int used = __ldg(p.seqused_k + entry);
  return used < 0 ? 0 : min(used, kMaxSeqlen) + p.appended_k;
}

// The keys of an entry. With pages, positions count from the start of its first page. Lengths are clamped to the room
// that the tensor, or the entry's row of the block table, has.
__device__ inline Span key_span(const Problem& p, int entry, bool paged = false) {
  if (entry == p.batch) return {0, 0, 0};
  const bool packed = p.cu_seqlens_k != nullptr;
  const int room = packed ? min(length_at(p.cu_seqlens_k, entry), p.capacity_k) : p.capacity_k;
  const int end = min(max(used_keys(p, entry, packed ? room : p.seqlen_k), 0), room);
  const int begin = p.leftpad_k ? min(max(__ldg(p.leftpad_k + entry), 0), end) : 0;
  const int64_t batch = packed ? 0 : p.batch_index ? __ldg(p.batch_index + entry) : entry;
  const int64_t start = packed && !paged ? __ldg(p.cu_seqlens_k + entry) : 0;
  return {batch, start + begin, end - begin};
}

struct Sequence {
  Span q, k;

  __device__ Sequence(const Problem& p, int entry, bool paged = false)
      : q(query_span(p, entry)), k(key_span(p, entry, paged)) {}

  // The key with which row 0 is aligned (negative if there are fewer keys than rows): the last row is aligned with the
  // last key.
  __device__ int diagonal() const { return k.length - q.length; }
};

// Returns the last of `count` entries that starts at or before `position`, by bisection: the first one does, and
// start_of is non-decreasing.
template <typename StartOf>
__device__ int last_entry_from(int count, int64_t position, StartOf&& start_of) {
  int entry = 0, end = count;
  while (end - entry > 1) {
    const int middle = entry + (end - entry) / 2;
    (start_of(middle) <= position ? entry : end) = middle;
  }
  return entry;
}

// The address of the first token of a span, in the given head.
template <typename T, typename Data>
__device__ auto* first_token(const TensorRef<Data>& x, const Span& span, int head) {
  using Element = std::conditional_t<std::is_const_v<Data>, const T, T>;
  return static_cast<Element*>(x.data) + span.batch * x.batch + span.first * x.seqlen + int64_t{head} * x.heads;
}

// The head dim of values. In plain instances of the portable kernels it is that of the keys.
template <bool kPlain>
__device__ int head_dim_v(const Problem& p) {
  return kPlain ? p.head_dim : p.head_dim_v;
}

// The index of row 0 of an entry in tensors like softmax_lse, (batch, heads, seqlen_q) or packed (heads, total_q).
__device__ inline int64_t row_index(const Problem& p, const Span& q, int head) {
  return (q.batch * p.heads + head) * p.seqlen_q + q.first;
}
template <typename Data>
__device__ Data* row_values(Data* values, const Problem& p, const Span& q, int head) {
  return values + row_index(p, q, head);
}

}  // namespace flash::flash_attn
