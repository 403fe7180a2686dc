// Vectors of rows that may begin at any element and have any length. A vector moves in one access only if it is
// aligned, so vectors begin where accesses are aligned, even if the first one then begins before the row. Its places
// before the row are not wasted: they hold the last elements of the row, so that no further vector is needed at the
// end.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "tile/any_vec.cuh"

namespace flash {

// Vectors cover a multiple of this many columns, whatever the size of an access, because random bits are drawn for this
// many columns together.
constexpr int kRaggedUnit = 8;

constexpr int spanned_cols(int cols) { return (cols + kRaggedUnit - 1) / kRaggedUnit * kRaggedUnit; }

// The columns of the vector that begins at `col` in a row of `cols` columns; `col` is more than -kRaggedUnit.
template <int kSize>
struct Place {
  int col, cols;

  __device__ int column(int i) const { return col + i + (col + i < 0 ? spanned_cols(cols) : 0); }
  __device__ bool has(int i) const { return column(i) < cols; }
  __device__ bool has_all() const { return col >= 0 && col + kSize <= cols; }
};

// Returns the column at which vectors end, if the first one begins at column `first`.
__device__ inline int end_of_vectors(int first, int cols) { return min(cols, first + spanned_cols(cols)); }

// Returns the number of bytes by which the address is past an aligned one, for an access of kSize elements.
template <int kSize>
__device__ int misalignment(const char* address, DType dtype) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & (kSize * size_of(dtype) - 1));
}

template <int kSize>
__device__ bool is_aligned(const char* row, const Place<kSize>& place, DType dtype) {
  return misalignment<kSize>(element_address(row, place.col, dtype), dtype) == 0;
}

// Merges the two parts of a vector that begins before the row: the access at the start of the row and the one at its
// end.
template <int kSize>
__device__ AnyVec<kSize> merged(const AnyVec<kSize>& at_start, const AnyVec<kSize>& at_end, int col, DType dtype) {
  const int per_word = dtype == DType::kFloat32 ? 1 : 2;
  AnyVec<kSize> vec;
#pragma unroll
  for (int i = 0; i < vec.kWords; ++i) {
    const int left = -col - per_word * i;  // elements of the word that come from the end of the row
    const uint32_t mask = left >= per_word ? ~0u : left <= 0 ? 0 : 0xFFFF;
    vec.words[i] = (at_end.words[i] & mask) | (at_start.words[i] & ~mask);
  }
  return vec;
}

// Loads a vector, or, if it begins before the row and is aligned, only its part at the start of the row: the other part
// is loaded by load_end. Elements outside the row have arbitrary values: an aligned access may go past the ends of the
// row, but only within a word of memory that holds a part of it.
template <int kSize>
__device__ AnyVec<kSize> load_start(const char* row, const Place<kSize>& place, DType dtype) {
  AnyVec<kSize> vec{};
  if (is_aligned(row, place, dtype)) {
    if (place.col > -kSize) vec = load_any<kSize>(row, place.col, dtype);
    return vec;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const uint32_t bits = place.has(i) ? load_any<1>(row, place.column(i), dtype).words[0] : 0;
    if (dtype == DType::kFloat32) {
      vec.words[i % vec.kWords] |= bits;
    } else {
      vec.words[i / 2] |= bits << 16 * (i % 2);
    }
  }
  return vec;
}

// Loads the part at the end of the row of a vector that begins before it.
template <int kSize>
__device__ AnyVec<kSize> load_end(const char* row, const Place<kSize>& place, DType dtype) {
  if (place.column(0) >= place.cols || !is_aligned(row, place, dtype)) return {};
  return load_any<kSize>(row, place.column(0), dtype);
}

// Completes a vector that begins before the row, from load_start, by the part from load_end.
template <int kSize>
__device__ void add_end(AnyVec<kSize>& vec, const AnyVec<kSize>& at_end, const char* row, const Place<kSize>& place,
                        DType dtype) {
  if (is_aligned(row, place, dtype)) vec = merged(vec, at_end, place.col, dtype);
}

// Loads a vector. Elements outside the row have arbitrary values, as with load_start.
template <int kSize>
__device__ AnyVec<kSize> load_ragged(const char* row, const Place<kSize>& place, DType dtype) {
  AnyVec<kSize> vec = load_start(row, place, dtype);
  if (place.col < 0) add_end(vec, load_end(row, place, dtype), row, place, dtype);
  return vec;
}

template <int kSize>
__device__ void store_ragged(char* row, const Place<kSize>& place, DType dtype, const float (&wide)[kSize]) {
  if (place.has_all() && is_aligned(row, place, dtype)) return store_any(row, place.col, dtype, wide);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float one[1] = {wide[i]};
    if (place.has(i)) store_any(row, place.column(i), dtype, one);
  }
}

// Returns the vector that begins `skip` bytes into two adjacent accesses.
template <int kSize>
__device__ AnyVec<kSize> shifted(const AnyVec<kSize>& low, const AnyVec<kSize>& high, int skip, DType dtype) {
  static_assert(kSize > 1);
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = low.words[i], words[i + 4] = high.words[i];
  if (kSize == 4 && dtype != DType::kFloat32) words[2] = high.words[0], words[3] = high.words[1];
  if (skip & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if (skip & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  if (skip & 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 16);
  }
  AnyVec<kSize> vec;
#pragma unroll
  for (int i = 0; i < 4; ++i) vec.words[i] = words[i];
  return vec;
}

// Loads a vector as load_ragged does, but from the two aligned accesses that hold it. This is for a row at any address
// that is read often.
template <int kSize>
__device__ AnyVec<kSize> load_shifted(const char* row, const Place<kSize>& place, DType dtype) {
  if (place.col < 0) return load_ragged(row, place, dtype);
  const int skip = misalignment<kSize>(element_address(row, place.col, dtype), dtype);
  const int first = place.col - skip / size_of(dtype);
  const auto load = [&](int col) { return col < place.cols ? load_any<kSize>(row, col, dtype) : AnyVec<kSize>{}; };
  return shifted(load(first), load(first + kSize), skip, dtype);
}

}  // namespace flash
