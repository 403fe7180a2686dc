// Helpers that choose an instance from the parameters of a call. Host code. Each direction adds its own fits(params,
// vec) and are_of(params, types).
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

// Returns whether accesses of `vec` elements are aligned in every row.
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

// Returns the types of the matrices if kernels are built for them, and kAny otherwise.
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

// Calls fn(Constant<types>) for a result of known_types other than kAny.
template <typename Fn>
void dispatch_known(Types types, Fn&& fn) {
  dispatch_value<kHalf, kBrain, Types::kFloat32, Types::kFloat16Stream32, Types::kBFloat16Stream32>(types, fn);
}

// Returns whether one block can hold a row with `vecs` accesses per thread. Where the code of kKernel is for sm_90, a
// cluster may hold the row too, but only with kUsualVecs: wider aligned rows would fit clusters, but their speed there
// is not known.
template <auto kKernel>
bool holds_row(int cols, int vec, int vecs) {
  return fits_blocks(cols, vec, vecs, 1) ||
         (fits_blocks(cols, vec, kUsualVecs, kMaxTiles) && can_start_early<kKernel>());
}

// Returns whether there may be subsets. A subset without entries has a null address, so no rows counts as having
// subsets.
inline bool has_subsets(const Problem& p) { return p.x0_subset != nullptr || p.rows == 0; }

// Clears a matrix, because rows that no entry of a subset names are not written by the kernels.
inline void clear_rows(const Matrix<>& matrix, int64_t rows, int cols, cudaStream_t stream) {
  if (matrix.data == nullptr || rows == 0 || cols == 0) return;
  check_cuda(cudaMemsetAsync(matrix.data, 0, rows * cols * size_of(matrix.dtype), stream), "cudaMemsetAsync");
}

}  // namespace flash::layer_norm
