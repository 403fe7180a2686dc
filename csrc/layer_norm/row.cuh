// How threads share rows, and what is done with a vector of a row. Used by forward and backward.
//
// A block is (lanes of a row) x (rows). `lanes` threads, a power of two up to 32 or whole warps, own kVecs vectors of
// kVec elements each: lane l owns vectors l, l + lanes, ... Rows wider than a block are cut into tiles, blockIdx.y.
#pragma once

#include <cstdint>

#include "common/dispatch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "ptx/barrier.cuh"
#include "tile/any_vec.cuh"
#include "tile/philox.cuh"
#include "tile/vec.cuh"

namespace flash::layer_norm {

constexpr int kMaxWarps = kMaxThreads / 32;

// Sums over the threads that share a row. All threads of a block with fewer than 32 lanes take part together.
class RowSums {
 public:
  struct Shared {
    float partial[2][kMaxWarps][2];  // alternating, so that one barrier a sum is enough
  };

  __device__ explicit RowSums(Shared& shared) : shared_(shared) {}

  template <int kCount>
  __device__ void add_up(float (&values)[kCount]) {
    const int lanes = blockDim.x;
    if (lanes < 32) {
      add_up_lanes(values, lanes);
    } else {
      add_up_lanes(values, 32);
      if (lanes > 32) add_up_warps(values);
    }
  }

 private:
  template <int kCount>
  __device__ static void add_up_lanes(float (&values)[kCount], int lanes) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance >= lanes) continue;
#pragma unroll
      for (float& value : values) value += __shfl_xor_sync(~0u, value, distance);
    }
  }

  template <int kCount>
  __device__ void add_up_warps(float (&values)[kCount]) {
    auto& partial = shared_.partial[parity_];
    parity_ ^= 1;
    const int warps = blockDim.x / 32, first = threadIdx.y * warps;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) partial[first + threadIdx.x / 32][i] = values[i];
    }
    ptx::sync_barrier(1 + threadIdx.y, blockDim.x);
    const int warp = threadIdx.x % kMaxWarps;  // whose sums this lane adds
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = warp < warps ? partial[first + warp][i] : 0.f;
    add_up_lanes(values, kMaxWarps);
  }

  Shared& shared_;
  int parity_ = 0;
};

// The types of a kernel's matrices: known ones, or what is found at run time.
template <Types kTypes>
struct Elements {
  static constexpr DType kX = x_type(kTypes), kH = h_type(kTypes);

  __device__ static DType x(DType found) { return kTypes == Types::kAny ? found : kX; }
  __device__ static DType h(DType found) { return kTypes == Types::kAny ? found : kH; }
};

// The column of a thread's j-th vector.
template <int kVec, int kVecs>
__device__ int column_of(int j) {
  return ((static_cast<int>(blockIdx.y) * kVecs + j) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) *
         kVec;
}

// Row `row` of `count` that a subset names; negative if it names none.
__device__ inline int64_t row_in_subset(const int32_t* subset, int64_t row, int64_t count) {
  if (subset == nullptr) return row;
  const int number = __ldg(subset + row);
  return number <= count ? int64_t{number} - 1 : -1;
}

template <int kVec>
__device__ void fill(float (&values)[kVec], float with) {
#pragma unroll
  for (float& value : values) value = with;
}

// Element `index` of a vector.
__device__ inline float element(const Vector& vector, int64_t index) {
  float value[1];
  widen(value, load_any<1>(vector.data, index, vector.dtype), vector.dtype);
  return value[0];
}

// kVec elements of a vector, as they are stored.
template <int kVec>
struct alignas(kVec == 1 ? 4 : 16) RawColumns {
  uint32_t words[kVec];
};

template <int kVec>
__device__ void load_raw(RawColumns<kVec>& raw, const Vector& vector, int col) {
  if (vector.data == nullptr) return;
  if constexpr (kVec == 8) {
    uint4* words = reinterpret_cast<uint4*>(raw.words);
    const uint4* source = reinterpret_cast<const uint4*>(element_address(vector.data, col, vector.dtype));
    words[0] = __ldg(source);
    if (vector.dtype == DType::kFloat32) words[1] = __ldg(source + 1);
  } else {
    reinterpret_cast<AnyVec<kVec>&>(raw) = load_any<kVec>(vector.data, col, vector.dtype);
  }
}

// The elements; `otherwise` if there is no vector.
template <int kVec>
__device__ void widen(float (&values)[kVec], const RawColumns<kVec>& raw, const Vector& vector, float otherwise) {
  if (vector.data == nullptr) {
    fill(values, otherwise);
  } else if (vector.dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = __uint_as_float(raw.words[i]);
  } else {
    widen(values, reinterpret_cast<const AnyVec<kVec>&>(raw), vector.dtype);
  }
}

template <int kVec>
__device__ void load_columns(float (&values)[kVec], const Vector& vector, int col, float otherwise) {
  RawColumns<kVec> raw;
  load_raw(raw, vector, col);
  widen(values, raw, vector, otherwise);
}

// The same for a vector whose type is known: no branch stands between the loads of several.
template <DType kDType, int kVec>
__device__ void load_columns(float (&values)[kVec], const Vector& vector, int col, float otherwise) {
  using T = element_t<kDType>;
  constexpr int kWidth = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;
  fill(values, otherwise);
  if (vector.data == nullptr) return;
  const T* source = static_cast<const T*>(vector.data) + col;
#pragma unroll
  for (int i = 0; i < kVec; i += kWidth) {
    Vec<T, kWidth> vec;
    using Bits = Word<sizeof(T) * kWidth>;
    reinterpret_cast<Bits&>(vec) = __ldg(reinterpret_cast<const Bits*>(source + i));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[i + j] = static_cast<float>(vec[j]);
  }
}

// What is added to the weights that are stored.
__device__ inline float weight_centre(const Problem& p) { return p.zero_centered_weight ? 1.f : 0.f; }

// The weight that is used, of the norm or of the second norm.
template <int kVec>
__device__ void load_weight(float (&values)[kVec], const Problem& p, const Vector& weight, int col) {
  load_columns(values, weight, col, 0.f);
#pragma unroll
  for (float& value : values) value += weight_centre(p);
}

// The i-th of eight 16-bit halves, the low one of a word first.
__device__ inline uint32_t half_of(const uint4& bits, int i) {
  const uint32_t low = i & 2 ? bits.y : bits.x, high = i & 2 ? bits.w : bits.z;
  return (i & 4 ? high : low) >> (16 * (i & 1)) & 0xFFFF;
}

// The random bits of dropout, or nothing to drop. Those of a row are a function of the seed, the offset, its number and
// its branch (flash_attn/_reference/layer_norm.py).
struct Dropout {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold;
  bool drops;

  __device__ explicit Dropout(const Problem& p) : threshold(p.keep_threshold), drops(p.rng_state != nullptr) {
    if (drops) seed = __ldg(p.rng_state), offset = __ldg(p.rng_state + 1);
  }

  // Which of the columns col .. col + kVec - 1 are kept: a bit for each.
  template <int kVec>
  __device__ uint32_t kept(int64_t row, int col, int branch) const {
    uint32_t bits = 0;
    if (!drops) return (1u << kVec) - 1;
    const uint4 drawn = philox<7>(seed, offset + row, col / 8, branch);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int number = kVec == 8 ? i : col % 8 + i;
      bits |= static_cast<uint32_t>(half_of(drawn, number) < threshold) << i;
    }
    return bits;
  }
};

template <int kVec>
__device__ void drop(float (&values)[kVec], uint32_t kept_bits) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = kept_bits >> i & 1 ? values[i] : 0.f;
}

// The factor of row `row` of x0.
__device__ inline float scale_of_row(const Problem& p, int64_t row) {
  const float scale = p.x0_subset != nullptr ? p.rowscale_const : 1.f;
  return scale * p.keep_scale * (p.rowscale.data != nullptr ? element(p.rowscale, row) : 1.f);
}

template <int kVec>
__device__ void multiply(float (&values)[kVec], float scale) {
#pragma unroll
  for (float& value : values) value *= scale;
}

template <int kVec>
__device__ void multiply(float (&values)[kVec], const float (&scales)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] *= scales[i];
}

template <int kVec>
__device__ void add(float (&values)[kVec], const float (&others)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] += others[i];
}

template <int kVec>
__device__ void normalise(float (&values)[kVec], float centre, float rstd) {
#pragma unroll
  for (float& value : values) value = (value - centre) * rstd;
}

// y, with weight and bias, becomes out.
template <int kVec>
__device__ void apply_weight(float (&y)[kVec], const float (&weight)[kVec], const float (&bias)[kVec],
                             const Problem& p) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) y[i] = y[i] * (weight[i] + weight_centre(p)) + bias[i];
}

template <int kVec>
__device__ void store_row(const Matrix<>& matrix, DType dtype, int64_t row, int col, const float (&values)[kVec]) {
  store_any(matrix.data, row * matrix.stride + col, dtype, values);
}

// weight * y + bias, stored.
template <int kVec>
__device__ void store_affine(const Matrix<>& out, DType dtype, int64_t row, int col, const Problem& p,
                             const Vector& weight, const Vector& bias, const float (&y)[kVec]) {
  float result[kVec], weights[kVec], biases[kVec];
  load_columns(weights, weight, col, 0.f);
  load_columns(biases, bias, col, 0.f);
#pragma unroll
  for (int i = 0; i < kVec; ++i) result[i] = y[i];
  apply_weight(result, weights, biases, p);
  store_row(out, dtype, row, col, result);
}

}  // namespace flash::layer_norm
