// How threads share rows, and what is done with a vector of a row. Used by forward and backward.
//
// A block is (lanes of a row) x (rows). `lanes` threads, whole warps or a power of two up to 32, own kVecs vectors of
// kVec elements each: lane l owns vectors l, l + lanes, ... Rows wider than a block are cut into tiles, blockIdx.x:
// those of a row are a cluster, or where that does not do, blocks that know nothing of each other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dispatch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "tile/any_vec.cuh"
#include "tile/philox.cuh"
#include "tile/ragged.cuh"
#include "tile/vec.cuh"

namespace flash::layer_norm {

constexpr int kMaxWarps = kMaxThreads / 32;

// Sums over the threads that share a row, in `blocks` blocks of a cluster. All threads of a block with fewer than 32
// lanes take part together.
class RowSums {
 public:
  struct Shared {
    float2 partial[2][kMaxTiles * kMaxWarps];  // alternating, so that one barrier a sum is enough
    ptx::SharedBarrier arrived[2];             // of the partial sums, if they come from several blocks
  };

  __device__ RowSums(Shared& shared, int blocks) : shared_(shared), blocks_(blocks) {
#if __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      shared.arrived[0].init(1), shared.arrived[1].init(1);
      ptx::fence_barrier_init();
    }
    ptx::sync_cluster();
#endif
  }

  template <int kCount>
  __device__ void add_up(float (&values)[kCount]) {
    const int lanes = blockDim.x;
    add_up_lanes(values, lanes);
    if (lanes > 32 || blocks_ > 1) add_up_warps(values);
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
    static_assert(kCount <= 2);
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const float2 sum{values[0], values[kCount - 1]};
    const float2* partial = shared_.partial[turn_ % 2];
    if (blocks_ == 1) {
      const int first = threadIdx.y * warps, other = lane % kMaxWarps;
      if (lane == 0) shared_.partial[turn_ % 2][first + threadIdx.x / 32] = sum;
      ptx::sync_barrier(1 + threadIdx.y, blockDim.x);
      const float2 found = other < warps ? partial[first + other] : float2{0.f, 0.f};
      values[0] = found.x, values[kCount - 1] = kCount > 1 ? found.y : found.x;
      add_up_lanes(values, kMaxWarps);
    } else {
      exchange(sum);
#pragma unroll
      for (float& value : values) value = 0.f;
#pragma unroll
      for (int i = lane; i < kMaxTiles * kMaxWarps; i += 32) {
        if (i / kMaxWarps >= blocks_ || i % kMaxWarps >= warps) continue;
        const float2 found = partial[i];
        values[0] += found.x;
        if (kCount > 1) values[kCount - 1] += found.y;
      }
      add_up_lanes(values, 32);
    }
    ++turn_;
  }

  // Each warp gives its sum to all blocks. Nobody is two turns ahead of a block that still reads: he would have waited
  // for all of its warps to give what they sum after that.
  __device__ void exchange(float2 sum) {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    ptx::SharedBarrier& arrived = shared_.arrived[turn_ % 2];
    if (threadIdx.x == 0) arrived.arrive_expecting(blocks_ * warps * static_cast<int>(sizeof(sum)));
    if (lane < blocks_) {
      const float2* place = &shared_.partial[turn_ % 2][blockIdx.x * kMaxWarps + warp];
      ptx::store_async_in(ptx::address_in(lane, place), sum, ptx::address_in(lane, &arrived));
    }
    ptx::wait_for_stores(arrived, turn_ / 2 % 2);
#endif
  }

  Shared& shared_;
  int blocks_;
  uint32_t turn_ = 0;
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
  return ((static_cast<int>(blockIdx.x) * kVecs + j) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) *
         kVec;
}

// Whether a thread takes part in an access: if it has columns of it or, if the warp's lanes need each other, any of
// them has.
template <int kVec, bool kRagged>
__device__ bool takes_part(int col, int cols) {
  return (kRagged ? col - static_cast<int>(threadIdx.x) % 32 * kVec : col) < cols;
}

// A vector as it is stored: anywhere if kRagged, else where an access is aligned.
template <int kVec, bool kRagged>
using RawVec = std::conditional_t<kRagged, RaggedVec<kVec>, AnyVec<kVec>>;

// That of column `col` of a row that begins with element `start`.
template <bool kRagged, int kVec>
__device__ RawVec<kVec, kRagged> load_raw(const void* data, int64_t start, int col, int cols, DType dtype) {
  if constexpr (kRagged) {
    return load_ragged<kVec>(element_address(data, start + col, dtype), cols - col, dtype);
  } else {
    return load_any<kVec>(data, start + col, dtype);
  }
}

template <bool kRagged, int kVec, typename Data>
__device__ RawVec<kVec, kRagged> load_row(const Matrix<Data>& matrix, DType dtype, int64_t row, int col, int cols) {
  return load_raw<kRagged, kVec>(matrix.data, row * matrix.stride, col, cols, dtype);
}

template <bool kRagged, int kVec>
__device__ void store_row(const Matrix<>& matrix, DType dtype, int64_t row, int col, int cols,
                          const float (&values)[kVec]) {
  const int64_t index = row * matrix.stride + col;
  if constexpr (kRagged) {
    store_ragged(static_cast<char*>(matrix.data) + byte_offset(index, dtype), cols - col, dtype, values);
  } else {
    store_any(matrix.data, index, dtype, values);
  }
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

// The elements of a vector's columns; `otherwise` if there is no vector.
template <bool kRagged, int kVec>
__device__ void load_columns(float (&values)[kVec], const Vector& vector, int col, int cols, float otherwise) {
  if (vector.data == nullptr) {
    fill(values, otherwise);
  } else if (kVec == 8 && vector.dtype == DType::kFloat32) {
#pragma unroll
    for (int half = 0; half < kVec / 4; ++half) {
      float wide[4];
      widen(wide, load_raw<kRagged, 4>(vector.data, 0, col + 4 * half, cols, DType::kFloat32), DType::kFloat32);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * half + i] = wide[i];
    }
  } else {
    widen(values, load_raw<kRagged, kVec>(vector.data, 0, col, cols, vector.dtype), vector.dtype);
  }
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
template <bool kRagged, int kVec>
__device__ void load_weight(float (&values)[kVec], const Problem& p, const Vector& weight, int col) {
  load_columns<kRagged>(values, weight, col, p.cols, 0.f);
#pragma unroll
  for (float& value : values) value += weight_centre(p);
}

// What a mask of bytes keeps of a row that begins with byte `start`: a bit for each element.
template <int kVec>
__device__ uint32_t load_mask(const uint8_t* mask, int64_t start, int col, int cols) {
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) kept |= uint32_t{col + i < cols && mask[start + col + i] != 0} << i;
  return kept;
}

template <int kVec>
__device__ void store_mask(uint8_t* mask, int64_t start, int col, int cols, uint32_t kept) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (col + i < cols) mask[start + col + i] = kept >> i & 1;
  }
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

  // Which of the columns col .. col + kVec - 1 are kept: a bit for each. It takes long enough to be
  // asked for while rows are on their way.
  template <int kVec>
  __device__ uint32_t kept(int64_t row, int col, int branch) const {
    if (!drops) return (1u << kVec) - 1;
    const uint4 drawn = philox<7>(seed, offset + row, col / 8, branch);
    const bool second = kVec == 4 && col % 8 != 0;
    const uint32_t words[4] = {second ? drawn.z : drawn.x, second ? drawn.w : drawn.y, drawn.z, drawn.w};
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const uint32_t half = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFF;
      bits |= half < threshold ? 1u << i : 0;
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

// weight * y + bias, stored.
template <bool kRagged, int kVec>
__device__ void store_affine(const Matrix<>& out, DType dtype, int64_t row, int col, const Problem& p,
                             const Vector& weight, const Vector& bias, const float (&y)[kVec]) {
  float result[kVec], weights[kVec], biases[kVec];
  load_columns<kRagged>(weights, weight, col, p.cols, 0.f);
  load_columns<kRagged>(biases, bias, col, p.cols, 0.f);
#pragma unroll
  for (int i = 0; i < kVec; ++i) result[i] = y[i];
  apply_weight(result, weights, biases, p);
  store_row<kRagged>(out, dtype, row, col, p.cols, result);
}

}  // namespace flash::layer_norm
