// How threads share rows, and the operations on a vector of a row. Forward and backward use it.
//
// A block has `lanes` threads for each of its rows. The lanes are whole warps, or a power of two up to 32. Each lane
// owns kVecs vectors of kVec elements: lane l owns vectors l, l + lanes, ... Rows wider than a block are cut into
// tiles, numbered by blockIdx.x: the tiles of a row form a cluster or, if that is not enough, independent blocks.
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

// Sums over each group of `lanes` lanes of a warp; `lanes` is a power of two.
template <typename... Values>
__device__ void add_up_lanes(int lanes, Values&... values) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance < lanes) ((values += __shfl_xor_sync(~0u, values, distance)), ...);
  }
}

// Exchanges one value per warp between all warps that share a row, in `blocks` thread blocks of a cluster. kTurns: 1 if
// there is one exchange; 2 (double buffering) if there may be any number. Only with kGroups may a thread block have
// several rows of more than one warp: their named barrier depends on the row, so that all 16 barriers of the thread
// block are reserved, and an SM has enough barriers for 4 such thread blocks.
template <typename Given, int kTurns, bool kGroups>
class RowExchange {
 public:
  static constexpr int kMaxGiven = kMaxTiles * kMaxWarps;
  using Barriers = ptx::SharedBarrier[kTurns];  // for values that come from several blocks

  // `given` is shared memory for kMaxGiven values each turn; in the last turn, kMaxWarps values per block are enough.
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

  // Waits until all blocks of the cluster run. Called once, before the first value is given. Loads should be issued
  // before it, so that they overlap with the wait.
  __device__ void wait_for_blocks() const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1) ptx::wait_for_cluster();
#endif
  }

  __device__ bool has_others() const { return blockDim.x > 32 || blocks_ > 1; }

  // Gives a value, the same in all lanes of the warp, to all warps, and waits for the values of the others.
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

  // Calls fn(given) for some of the values given last; lanes() neighbouring lanes together see all of them.
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

  // Writes the value to all thread blocks of the cluster. None can be two turns ahead of one that still reads, and
  // overwrite its values: for that it would have needed values that the warps there give only after they have read.
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

  Given* given_;  // alternates between turns, so that one barrier per turn is enough
  Barriers& arrived_;
  int blocks_;
  uint32_t turn_ = 0;
};

// The types of the matrices of a kernel: known at compile time, or found at run time.
template <Types kTypes>
struct Elements {
  static constexpr DType kX = x_type(kTypes), kH = h_type(kTypes);

  __device__ static DType x(DType found) { return kTypes == Types::kAny ? found : kX; }
  __device__ static DType h(DType found) { return kTypes == Types::kAny ? found : kH; }
};

// Returns the column of vector number j of thread `lane` in a tile, if the vectors of the row begin at column `first`.
template <int kVec, int kVecs>
__device__ int column_of(int j, int first, int tile = blockIdx.x, int lane = threadIdx.x) {
  return first + ((tile * kVecs + j) * static_cast<int>(blockDim.x) + lane) * kVec;
}

// Returns the address of a row of a matrix.
template <typename Data>
__device__ auto row_of(const Matrix<Data>& matrix, DType dtype, int64_t row) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  int64_t offset = byte_offset(row * matrix.stride, dtype);
  asm("" : "+l"(offset));  // keeps the compiler from repeating the multiplication for each access
  return static_cast<Byte*>(matrix.data) + offset;
}

// Returns the column at which vectors of a row begin: 0 or, if kRagged, a column of at most 0 such that accesses to
// this matrix are aligned. If all matrices are contiguous, accesses to the others are aligned too, because every matrix
// begins at an aligned address.
template <int kVec, bool kRagged, typename Data>
__device__ int first_column(const Matrix<Data>& matrix, DType dtype, int64_t row) {
  return kRagged ? -misalignment<kVec>(row_of(matrix, dtype, row), dtype) / size_of(dtype) : 0;
}

// Returns the column at which the vectors of a row end.
template <bool kRagged>
__device__ int last_column(int first, int cols) {
  return kRagged ? end_of_vectors(first, cols) : cols;
}

// Returns how many elements of a ragged vector are in the row.
template <int kVec>
__device__ int count_of(int col, int cols) {
  const Place<kVec> place{col, cols};
  if (place.has_all()) return kVec;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) count += place.has(i);
  return count;
}

// Sets elements outside the row to 0.
template <bool kRagged, int kVec>
__device__ void clear_outside(float (&values)[kVec], int col, int cols) {
  if constexpr (kRagged) {
    const Place<kVec> place{col, cols};
    if (place.has_all()) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = place.has(i) ? values[i] : 0.f;
  }
}

// Loads the vector of a row at column `col`.
template <bool kRagged, int kVec>
__device__ AnyVec<kVec> load_row(const char* row, DType dtype, int col, int cols) {
  if constexpr (kRagged) return load_ragged(row, Place<kVec>{col, cols}, dtype);
  return load_any<kVec>(row, col, dtype);
}

// Loads the vector as fp32, with 0 for elements outside the row.
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

// Returns the row, out of `count`, that entry `row` of a subset names; negative if it names none.
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

// Returns element `index` of a vector.
__device__ inline float element(const Vector& vector, int64_t index) {
  float value[1];
  widen(value, load_any<1>(vector.data, index, vector.dtype), vector.dtype);
  return value[0];
}

// Loads the elements of a parameter for the columns of a vector, or `otherwise` if there is no such parameter. If the
// type is known at compile time, no branch stands between the loads of several parameters.
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

// Returns the value that is added to stored weights.
__device__ inline float weight_centre(const Problem& p) { return p.zero_centered_weight ? 1.f : 0.f; }

// Loads the weight as it is used, for the norm or the second norm.
template <bool kRagged, int kVec>
__device__ void load_weight(float (&values)[kVec], const Problem& p, const Vector& weight, int col) {
  load_columns<kRagged>(values, weight, col, p.cols, 0.f);
  clear_outside<kRagged>(values, col, p.cols);
#pragma unroll
  for (float& value : values) value += weight_centre(p);
}

// Loads a mask of bytes for a row that begins at byte `start`, and returns one bit for each element: set if kept.
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

// Dropout, or nothing if no element is dropped. The random bits of a row are a function of the seed, the offset, the
// number of the row and the number of the branch (flash_attn/_reference/layer_norm.py).
struct Dropout {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold;
  int groups;  // groups of columns that are drawn together
  bool drops;

  __device__ explicit Dropout(const Problem& p)
      : groups(spanned_cols(p.cols) / kRaggedUnit), drops(p.rng_state != nullptr) {
    threshold = drops ? p.keep_threshold : 1 << 16;
    if (drops) seed = __ldg(p.rng_state), offset = __ldg(p.rng_state + 1);
  }

  // Draws 16 bits for each of the columns col .. col + kVec - 1. This takes long, so it is best called while rows are
  // being loaded.
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

  // Returns whether element i of a vector with these random bits is kept.
  template <int kVec>
  __device__ bool keeps(const AnyVec<kVec>& drawn, int i) const {
    const uint32_t word = drawn.words[i / 2];
    return (i % 2 ? word >> 16 : word & 0xFFFF) < threshold;
  }

  // Returns one bit for each element: set if it is kept.
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

// Returns the factor of row `row` of x0.
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

// Turns y into out by weight and bias.
template <int kVec>
__device__ void apply_weight(float (&y)[kVec], const float (&weight)[kVec], const float (&bias)[kVec],
                             const Problem& p) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) y[i] = y[i] * (weight[i] + weight_centre(p)) + bias[i];
}

// Stores weight * y + bias.
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
