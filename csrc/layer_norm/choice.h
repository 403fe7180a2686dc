// What the choice of an instance asks of the parameters. Host code. A direction adds fits(params, vec) and
// are_of(params, types).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/dispatch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"

namespace flash::layer_norm {

constexpr Types kHalf = Types::kFloat16, kBrain = Types::kBFloat16;
constexpr int kMostVecs = 4;  // accesses of a thread and matrix
constexpr int kAllVecs = 2;   // of the instances that can do all, and where shared memory is small

inline bool is_aligned(const void* data, int bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Whether accesses can be of `vec` elements.
template <typename Data>
bool fits(const Matrix<Data>& matrix, int vec) {
  const int bytes = vec * size_of(matrix.dtype);
  return matrix.data == nullptr || (bytes <= 16 && is_aligned(matrix.data, bytes) && matrix.stride % vec == 0);
}

inline bool fits(const Vector& vector, int vec) {
  return vector.data == nullptr || is_aligned(vector.data, std::min(16, vec * size_of(vector.dtype)));
}

inline bool fits(const Problem& p, int vec) {
  return p.cols % vec == 0 && fits(p.weight, vec) && fits(p.bias, vec) && fits(p.weight1, vec) && fits(p.bias1, vec) &&
         fits(p.colscale, vec);
}

template <typename Data>
bool is_of(const Matrix<Data>& matrix, DType dtype) {
  return matrix.data == nullptr || matrix.dtype == dtype;
}

// Those of the matrices, if kernels are built for them and their accesses fit.
template <Types... kBuilt, typename Params>
Types types_of(const Params& p) {
  Types found = Types::kAny;
  ((are_of(p, kBuilt) && fits(p, vec_of(kBuilt)) && (found = kBuilt, true)) || ...);
  return found;
}

// fn(Constant<types>) for the types of the matrices, if plain kernels are built for them and a block can hold a row
// with `vecs` accesses of a thread; else returns false.
template <typename Params, typename Fn>
bool run_known(const Params& p, int vecs, Fn&& fn) {
  const Types types = types_of<kHalf, kBrain, Types::kFloat32, Types::kFloat16Stream32, Types::kBFloat16Stream32>(p);
  if (types == Types::kAny || !fits_a_block(p.problem.cols, vec_of(types), vecs)) return false;
  dispatch_value<kHalf, kBrain, Types::kFloat32, Types::kFloat16Stream32, Types::kBFloat16Stream32>(types, fn);
  return true;
}

// The same for kernels that can do more: they are built for 16-bit matrices of one type and for any types.
template <typename Params, typename Fn>
bool run_general(const Params& p, int vecs, Fn&& fn) {
  const Types types = types_of<kHalf, kBrain>(p);
  const int vec = vec_of(types);
  if (!fits(p, vec) || !fits_a_block(p.problem.cols, vec, vecs)) return false;
  dispatch_value<kHalf, kBrain, Types::kAny>(types, fn);
  return true;
}

// Rows that no entry of a subset names are not written otherwise.
inline void clear_rows(const Matrix<>& matrix, int64_t rows, int cols, cudaStream_t stream) {
  if (matrix.data == nullptr || rows == 0 || cols == 0) return;
  check_cuda(cudaMemsetAsync(matrix.data, 0, rows * cols * size_of(matrix.dtype), stream), "cudaMemsetAsync");
}

}  // namespace flash::layer_norm
