// How threads share rows, and what is done with a vector of a row. Used by forward and backward.
//
// A block is (lanes of a row) x (rows). `lanes` threads, whole warps or a power of two up to 32, own kVecs vectors of
// kVec elements each: lane l owns vectors l, l + lanes, ... Rows wider than a block are cut into tiles, blockIdx.x:
// those of a row are a cluster, or where that does not do, blocks that know nothing of each other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "tile/any_vec.cuh"
#include "tile/philox.cuh"
#include "tile/ragged.cuh"

namespace flash::layer_norm {

constexpr int kMaxWarps = kMaxThreads / 32;

// Over each `lanes` of a warp's lanes, a power of two.
template <typename... Values>
__device__ void add_up_lanes(int lanes, Values&... values) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance < lanes) ((values += __shfl_xor_sync(~0u, values, distance)), ...);
  }
}

// What each of the warps that share a row gives to all of them, in `blocks` blocks of a cluster: kTurns times, or as
// often as one likes if that is 2. A block has several rows of more than a warp only if kGroups: these take all 16
// barriers, of which a multiprocessor has enough for 4 such blocks.
template <typename Given, int kTurns, bool kGroups>
class RowExchange {
 public:
  static constexpr int kMaxGiven = kMaxTiles * kMaxWarps;
  using Barriers = ptx::SharedBarrier[kTurns];  // of what is given, if that comes from several blocks

  // `given` is shared memory for kMaxGiven each turn; in the last, kMaxWarps for each block are enough.
  __device__ RowExchange(Given* given, Barriers& arrived, int blocks)
      : given_(given), arrived_(arrived), blocks_(blocks) {
#if __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
#pragma unroll
      for (ptx::SharedBarrier& barrier : arrived) barrier.init(1);
      ptx::fence_barrier_init();
    }
    ptx::arrive_at_cluster();
#endif
  }

  // Called once before anything is given. What there is to load meanwhile, should be on its way.
  __device__ void wait_for_blocks() const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1) ptx::wait_for_cluster();
#endif
  }

  __device__ bool has_others() const { return blockDim.x > 32 || blocks_ > 1; }

  // Gives what all lanes of the warp have, and waits for what the others give.
  __device__ void give(const Given& given) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = turn_ % kTurns;
    if (blocks_ == 1) {
      if (lane == 0) given_[turn * kMaxGiven + group() * warps() + warp] = given;
      if constexpr (kGroups) {
        ptx::sync_barrier(1 + threadIdx.y, blockDim.x);
      } else {
        __syncthreads();
      }
    } else {
      give_blocks(given, lane, warp, turn);
    }
    ++turn_;
  }

  // fn(given) for some of what was given last; all of it by lanes() neighbouring lanes together.
  template <typename Fn>
  __device__ void for_each(Fn&& fn) const {
    const Given* given = given_ + (turn_ - 1) % kTurns * kMaxGiven;
    const int lane = threadIdx.x % 32;
    if (blocks_ == 1) {
      const int other = lane & (lanes() - 1);
      if (other < warps()) fn(given[group() * warps() + other]);
      return;
    }
#pragma unroll
    for (int i = lane; i < kMaxGiven; i += 32) {
      if (i / kMaxWarps < blocks_ && i % kMaxWarps < warps()) fn(given[i]);
    }
  }

  __device__ int lanes() const { return blocks_ > 1 ? 32 : 1 << (32 - __clz(warps() - 1)); }

 private:
  __device__ static int warps() { return static_cast<int>(blockDim.x / 32); }
  __device__ static int group() { return kGroups ? static_cast<int>(threadIdx.y) : 0; }

  // Nobody is two turns ahead of a block that still reads: he would have waited for all of its warps to give what they
  // have after that.
  __device__ void give_blocks(const Given& given, int lane, int warp, int turn) {
#if __CUDA_ARCH__ >= 900
    ptx::SharedBarrier& arrived = arrived_[turn];
    if (threadIdx.x == 0) arrived.arrive_expect_tx(blocks_ * warps() * static_cast<int>(sizeof(given)));
    if (lane < blocks_) {
      const Given* place = given_ + turn * kMaxGiven + blockIdx.x * kMaxWarps + warp;
      ptx::store_async_in(ptx::address_in(lane, place), given, ptx::address_in(lane, &arrived));
    }
    ptx::wait_for_stores(arrived, turn_ / kTurns % 2);
#endif
  }

  Given* given_;  // in turns, so that one barrier each time is enough
  Barriers& arrived_;
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

// The column of thread `lane`'s j-th vector in a tile, if those of the row begin at column `first`.
template <int kVec, int kVecs>
__device__ int column_of(int j, int first, int tile = blockIdx.x, int lane = threadIdx.x) {
  return first + ((tile * kVecs + j) * static_cast<int>(blockDim.x) + lane) * kVec;
}

// Where a row of a matrix begins.
template <typename Data>
__device__ auto row_of(const Matrix<Data>& matrix, DType dtype, int64_t row) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  int64_t offset = byte_offset(row * matrix.stride, dtype);
  asm("" : "+l"(offset));  // else the compiler multiplies again for each access
  return static_cast<Byte*>(matrix.data) + offset;
}

// At what column vectors of a row begin: at 0, or if kRagged, at most that, so that accesses of this matrix are
// aligned. So are those of the others if all matrices are contiguous: they begin at aligned addresses.
template <int kVec, bool kRagged, typename Data>
__device__ int first_column(const Matrix<Data>& matrix, DType dtype, int64_t row) {
  return kRagged ? -misalignment<kVec>(row_of(matrix, dtype, row), dtype) / size_of(dtype) : 0;
}

// The column behind which there are no vectors.
template <bool kRagged>
__device__ int last_column(int first, int cols) {
  return kRagged ? end_of_vectors(first, cols) : cols;
}

// How many of a ragged vector's elements there are.
template <int kVec>
__device__ int count_of(int col, int cols) {
  const Place<kVec> place{col, cols};
  if (place.has_all()) return kVec;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) count += place.has(i);
  return count;
}

// Those that there are not become 0.
template <bool kRagged, int kVec>
__device__ void clear_outside(float (&values)[kVec], int col, int cols) {
  if constexpr (kRagged) {
    const Place<kVec> place{col, cols};
    if (place.has_all()) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = place.has(i) ? values[i] : 0.f;
  }
}

// The vector of a row at `col`.
template <bool kRagged, int kVec>
__device__ AnyVec<kVec> load_row(const char* row, DType dtype, int col, int cols) {
  if constexpr (kRagged) return load_ragged(row, Place<kVec>{col, cols}, dtype);
  return load_any<kVec>(row, col, dtype);
}

// The same as fp32, with 0 for elements that there are not.
template <bool kRagged, int kVec>
__device__ void load_wide(float (&values)[kVec], const Matrix<const void>& matrix, int64_t row, int col, int cols) {
  const char* start = row_of(matrix, matrix.dtype, row);
  widen(values, load_row<kRagged, kVec>(start, matrix.dtype, col, cols), matrix.dtype);
  clear_outside<kRagged>(values, col, cols);
}

template <bool kRagged, int kVec>
__device__ void store_row(char* row, DType dtype, int col, int cols, const float (&values)[kVec]) {
  if constexpr (kRagged) {
    store_ragged(row, Place<kVec>{col, cols}, dtype, values);
  } else {
    store_any(row, col, dtype, values);
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

// The elements of a vector's columns; `otherwise` if there is no vector. If the compiler knows its type, no branch
// stands between the loads of several.
template <bool kRagged, int kVec>
__device__ void load_columns(float (&values)[kVec], const Vector& vector, int col, int cols, float otherwise) {
  const auto load = [&](auto& values, int col, DType dtype) {
    constexpr int kSize = sizeof(values) / sizeof(float);
    const char* data = static_cast<const char*>(vector.data);
    if constexpr (kRagged) {
      widen(values, load_shifted(data, Place<kSize>{col, cols}, dtype), dtype);
    } else {
      widen(values, load_any<kSize>(data, col, dtype), dtype);
    }
  };
  fill(values, otherwise);
  if (vector.data == nullptr) return;
  if (kVec == 8 && vector.dtype == DType::kFloat32) {
#pragma unroll
    for (int half = 0; half < kVec / 4; ++half) {
      float wide[4];
      load(wide, col + 4 * half, DType::kFloat32);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * half + i] = wide[i];
    }
  } else {
    load(values, col, vector.dtype);
  }
}

// What is added to the weights that are stored.
__device__ inline float weight_centre(const Problem& p) { return p.zero_centered_weight ? 1.f : 0.f; }

// The weight that is used, of the norm or of the second norm.
template <bool kRagged, int kVec>
__device__ void load_weight(float (&values)[kVec], const Problem& p, const Vector& weight, int col) {
  load_columns<kRagged>(values, weight, col, p.cols, 0.f);
  clear_outside<kRagged>(values, col, p.cols);
#pragma unroll
  for (float& value : values) value += weight_centre(p);
}

// What a mask of bytes keeps of a row that begins with byte `start`: a bit for each element.
template <int kVec>
__device__ uint32_t load_mask(const uint8_t* mask, int64_t start, int col, int cols) {
  const Place<kVec> place{col, cols};
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) kept |= uint32_t{place.has(i) && mask[start + place.column(i)] != 0} << i;
  return kept;
}

template <int kVec>
__device__ void store_mask(uint8_t* mask, int64_t start, int col, int cols, uint32_t kept) {
  const Place<kVec> place{col, cols};
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (place.has(i)) mask[start + place.column(i)] = kept >> i & 1;
  }
}

// The random bits of dropout, or nothing to drop. Those of a row are a function of the seed, the offset, its number and
// its branch (flash_attn/_reference/layer_norm.py).
struct Dropout {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold;
  int groups;  // of columns that are drawn together
  bool drops;

  __device__ explicit Dropout(const Problem& p)
      : groups(spanned_cols(p.cols) / kRaggedUnit), drops(p.rng_state != nullptr) {
    threshold = drops ? p.keep_threshold : 1 << 16;
    if (drops) seed = __ldg(p.rng_state), offset = __ldg(p.rng_state + 1);
  }

  // 16 bits for each of the columns col .. col + kVec - 1. It takes long enough to be asked for while rows are on their
  // way.
  template <int kVec, bool kRagged>
  __device__ AnyVec<kVec> draw(int64_t row, int col, int branch) const {
    if (!drops) return {};
    const auto draw_group = [&](int group) {
      const uint4 drawn = philox<7>(seed, offset + row, kRagged && group < 0 ? groups - 1 : group, branch);
      return AnyVec<8>{{drawn.x, drawn.y, drawn.z, drawn.w}};
    };
    const int group = col >> 3, skip = col & 7;
    AnyVec<8> bits = draw_group(group);
    if (kRagged) {
      bits = shifted(bits, skip + kVec > 8 ? draw_group(group + 1) : AnyVec<8>{}, 2 * skip, DType::kFloat16);
    } else if (kVec == 4 && skip != 0) {
      bits.words[0] = bits.words[2], bits.words[1] = bits.words[3];
    }
    return {{bits.words[0], bits.words[1], bits.words[2], bits.words[3]}};
  }

  // Whether element i is kept of a vector for which these have been drawn.
  template <int kVec>
  __device__ bool keeps(const AnyVec<kVec>& drawn, int i) const {
    const uint32_t word = drawn.words[i / 2];
    return (i % 2 ? word >> 16 : word & 0xFFFF) < threshold;
  }

  // The same of all: a bit for each.
  template <int kVec>
  __device__ uint32_t kept(const AnyVec<kVec>& drawn) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) bits |= uint32_t{keeps(drawn, i)} << i;
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
__device__ void add_scaled(float (&values)[kVec], const float (&others)[kVec], float scale) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] += scale * others[i];
}

template <int kVec>
__device__ void normalise(float (&values)[kVec], float rstd, float shift) {
#pragma unroll
  for (float& value : values) value = value * rstd + shift;
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
__device__ void store_affine(char* out, DType dtype, int col, const Problem& p, const Vector& weight,
                             const Vector& bias, const float (&y)[kVec]) {
  float result[kVec], weights[kVec], biases[kVec];
  load_columns<kRagged>(weights, weight, col, p.cols, 0.f);
  load_columns<kRagged>(biases, bias, col, p.cols, 0.f);
#pragma unroll
  for (int i = 0; i < kVec; ++i) result[i] = y[i];
  apply_weight(result, weights, biases, p);
  store_row<kRagged>(out, dtype, col, p.cols, result);
}

}  // namespace flash::layer_norm
