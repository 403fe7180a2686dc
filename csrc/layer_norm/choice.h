// What the choice of an instance asks of the parameters. Host code. A direction adds fits(params, vec) and
// are_of(params, types).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/launch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"

namespace flash::layer_norm {

constexpr Types kHalf = Types::kFloat16, kBrain = Types::kBFloat16;

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

// Those of the matrices, if kernels are built for them.
template <Types... kBuilt, typename Params>
Types types_of(const Params& p) {
  Types found = Types::kAny;
  ((are_of(p, kBuilt) && (found = kBuilt, true)) || ...);
  return found;
}

template <typename Params>
Types known_types(const Params& p) {
  return types_of<kHalf, kBrain, Types::kFloat32, Types::kFloat16Stream32, Types::kBFloat16Stream32>(p);
}

// fn(Constant<types>) for what known_types finds, but not kAny.
template <typename Fn>
void dispatch_known(Types types, Fn&& fn) {
  dispatch_value<kHalf, kBrain, Types::kFloat32, Types::kFloat16Stream32, Types::kBFloat16Stream32>(types, fn);
}

// Whether a block of threads with `vecs` accesses holds a row or, where the code of kKernel is for sm_90, the blocks of
// a cluster do with kUsualVecs. Wider aligned rows would fit clusters too, but have not been measured in them.
template <auto kKernel>
bool holds_row(int cols, int vec, int vecs) {
  return fits_blocks(cols, vec, vecs, 1) ||
         (fits_blocks(cols, vec, kUsualVecs, kMaxTiles) && can_start_early<kKernel>());
}

// Whether there are subsets, or may be: those of no entries have no address.
inline bool has_subsets(const Problem& p) { return p.x0_subset != nullptr || p.rows == 0; }

// Rows that no entry of a subset names are not written otherwise.
inline void clear_rows(const Matrix<>& matrix, int64_t rows, int cols, cudaStream_t stream) {
  if (matrix.data == nullptr || rows == 0 || cols == 0) return;
  check_cuda(cudaMemsetAsync(matrix.data, 0, rows * cols * size_of(matrix.dtype), stream), "cudaMemsetAsync");
}

}  // namespace flash::layer_norm
