// The additive bias where fragments are rows x keys, in the forward and in dbias_sm80: s(i, j) + bias(i, j). In
// instances of kBiased, TMA copies tiles of it; in those of kAll, lanes load their elements from global memory.
// dbias_sm80 has both ways.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/score.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

// The index of the first key of a row; `row` counts from the first token of the tensor.
__device__ inline int64_t row_start(const BiasRows& x, int entry, int head, int64_t row) {
  const int batch1 = x.batch2_size.divide(entry), batch2 = x.batch2_size.remainder(entry, batch1);
  return batch1 * x.batch1 + batch2 * x.batch2 + head * x.heads + row * x.seqlen;
}

// Calls fn(Element()) with the type of a floating-point bias: fp32, or T, that of the queries.
template <typename T, typename Fn>
__device__ void with_type(DType dtype, Fn&& fn) {
  dtype == DType::kFloat32 ? fn(float()) : fn(T());
}

// The same for a bias, whose elements may be bool.
template <typename T, typename Fn>
__device__ void with_type(const Bias& bias, Fn&& fn) {
  bias.is_bool ? fn(bool()) : with_type<T>(bias.dtype, fn);
}

// Turns products into scores, scaled and with the bias added.
template <typename T, int kRows, int kCols>
__device__ void scale_and_add(Fragment<kRows, kCols>& s, float scale, const PackedFragment<T, kRows, kCols>& bias) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
#pragma unroll
    for (int i = 0; i < kCols / 8; ++i) {
      const float2 pair = ptx::unpack<T>(bias.pair(r, i));
      s(r, 2 * i) = s(r, 2 * i) * scale + pair.x, s(r, 2 * i + 1) = s(r, 2 * i + 1) * scale + pair.y;
    }
  }
}

// Two adjacent elements of a bias in their own type.
template <typename T>
struct BiasPair {
  static constexpr int kWords = sizeof(T) == 4 ? 2 : 1;
  alignas(4 * kWords) uint32_t words[kWords];

  // Beyond the last key of the tensor, elements become NaN or true (all bits set); the mask hides these keys anyway.
  __device__ void load(const T* row, int key, int keys) {
    using Bits = Word<2 * sizeof(T)>;
    for (uint32_t& word : words) word = ~0u;
    if (key < keys) *reinterpret_cast<Bits*>(words) = *reinterpret_cast<const Bits*>(row + key);
  }

  __device__ void add_to(float& first, float& second) const {
    if constexpr (std::is_same_v<T, bool>) {
      first = words[0] & 0xff ? first : -INFINITY, second = words[0] & 0xff00 ? second : -INFINITY;
    } else {
      float pair[2];
      widen(pair, reinterpret_cast<const Packed<T, 2>&>(words));
      first += pair[0], second += pair[1];
    }
  }
};

// Adds a row of a block of a bias, already loaded, to the lane's r-th row of scores.
template <typename Element, int kPairs, int kRows, int kCols>
__device__ void add_pairs(Fragment<kRows, kCols>& s, int r, const BiasPair<Element> (&row)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) row[i].add_to(s(r, 2 * i), s(r, 2 * i + 1));
}

// Loads the lane's elements of a row of a block of a bias. start: the index of the row's first key; col0: the key of
// column 0.
template <typename Element, int kPairs>
__device__ void load_pairs(BiasPair<Element> (&row)[kPairs], const Bias& bias, int64_t start, int col0) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int key = col0 + Fragment<16, 8 * kPairs>::col(2 * i);
    row[i].load(static_cast<const Element*>(bias.data) + start, key, bias.keys);
  }
}

// Loads a block of a bias and adds it to the scores, one row after the other, which takes few registers.
// starts and col0 as in BiasBlock.
template <typename Element, int kRows, int kCols>
__device__ void load_and_add(Fragment<kRows, kCols>& s, const Bias& bias, const int64_t (&starts)[kRows / 8],
                             int col0) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
    BiasPair<Element> row[kCols / 8];
    load_pairs(row, bias, starts[r], col0);
    add_pairs(s, r, row);
  }
}

// The lane's elements of a block of a bias. Loads are issued before the products that hide their latency. Of fp32
// elements, which take two words a pair, only half of the lane's rows are in registers at a time: the second half is
// loaded when the first has been added, and the first early only with kEarlyFp32.
template <typename T, int kRows, int kCols, bool kEarlyFp32>
struct BiasBlock {
  static constexpr int kLaneRows = kRows / 8, kPairs = kCols / 8;
  alignas(8) uint32_t words[kLaneRows][kPairs];

  // Here and in add_to: starts[r] is the index of the first key of the lane's r-th row; col0 is the key of column 0.
  __device__ void load(const Bias& bias, const int64_t (&starts)[kLaneRows], int col0) {
    with_type<T>(bias, [&](auto type) {
      if constexpr (kIsEarly<decltype(type)>) load_part<decltype(type)>(0, bias, starts, col0);
    });
  }

  __device__ void add_to(Fragment<kRows, kCols>& s, const Bias& bias, const int64_t (&starts)[kLaneRows], int col0) {
    with_type<T>(bias, [&](auto type) {
      using Element = decltype(type);
#pragma unroll
      for (int part = 0; part < kParts<Element>; ++part) {
        if (part > 0 || !kIsEarly<Element>) load_part<Element>(part, bias, starts, col0);
#pragma unroll
        for (int r = 0; r < kLaneRows / kParts<Element>; ++r) {
          add_pairs(s, part * kLaneRows / kParts<Element> + r, row<Element>(r));
        }
      }
    });
  }

 private:
  template <typename Element>
  static constexpr bool kIsEarly = kEarlyFp32 || !std::is_same_v<Element, float>;
  template <typename Element>
  static constexpr int kParts = BiasPair<Element>::kWords;  // of the block, whose rows `words` has room for

  template <typename Element>
  using Row = BiasPair<Element>[kPairs];

  template <typename Element>
  __device__ Row<Element>& row(int r) {
    return reinterpret_cast<Row<Element>&>(words[r * kParts<Element>]);
  }

  template <typename Element>
  __device__ void load_part(int part, const Bias& bias, const int64_t (&starts)[kLaneRows], int col0) {
    constexpr int kRowsOfPart = kLaneRows / kParts<Element>;
#pragma unroll
    for (int r = 0; r < kRowsOfPart; ++r) load_pairs(row<Element>(r), bias, starts[part * kRowsOfPart + r], col0);
  }
};

}  // namespace flash::flash_attn
