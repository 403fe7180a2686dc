// Sizes of blocks, as functions of the width of rows. Host code without CUDA.
#pragma once

#include <algorithm>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::layer_norm {

constexpr int kMaxThreads = 512;

// The element types of a kernel: of x0, out and their gradients, and of h, the residual and theirs. kAny leaves each
// matrix's to run time; the others save the branches.
enum class Types { kAny, kFloat16, kBFloat16, kFloat32, kFloat16Stream32, kBFloat16Stream32 };

constexpr DType x_type(Types types) {
  return types == Types::kFloat32                                       ? DType::kFloat32
         : types == Types::kFloat16 || types == Types::kFloat16Stream32 ? DType::kFloat16
                                                                        : DType::kBFloat16;
}

constexpr DType h_type(Types types) {
  return types == Types::kFloat16 || types == Types::kBFloat16 ? x_type(types) : DType::kFloat32;
}

// The widest access that a kernel for known types makes, in elements.
constexpr int vec_of(Types types) { return h_type(types) == DType::kFloat32 ? 4 : 8; }

// What a backward kernel can do besides the gradient of h: nothing, or branches that are dropped or scaled, or also a
// second norm and a column scale, whose gradients take registers.
enum class Extent { kPlain, kBranches, kAll };

// A block is `lanes` threads for each of `rows` rows; `tiles` blocks share a row.
struct RowShape {
  int lanes, rows, tiles;
};

// For rows of `cols` elements, `vec` in an access and `vecs` accesses of a matrix by each thread, in blocks of about
// `threads` threads. Lanes are a power of two or whole warps.
inline RowShape row_shape(int cols, int vec, int vecs, int threads) {
  const int needed = std::max(1, ceil_div(ceil_div(cols, vec), vecs));
  int lanes = 1;
  while (lanes < needed && lanes < 32) lanes *= 2;
  if (needed > 32) lanes = std::min(32 * ceil_div(needed, 32), kMaxThreads);
  return {lanes, std::max(1, threads / lanes), ceil_div(needed, lanes)};
}

// Of the backward: rows in shared memory, with the one at work (3 and 4 were no faster), and matrices that are copied.
constexpr int kStages = 2, kCopiedMatrices = 3;

// Bytes of shared memory that hold a vector; 8 of 16 bytes stay empty for 4 elements of 16 bits.
constexpr int slot_bytes(int vec) { return vec == 1 ? 4 : 16; }

// Of the backward's blocks.
constexpr int ring_bytes(int vec, int vecs) { return kStages * kCopiedMatrices * vecs * slot_bytes(vec) * kMaxThreads; }

// Whether one block holds a row.
inline bool fits_a_block(int cols, int vec, int vecs) { return cols <= vec * vecs * kMaxThreads; }

}  // namespace flash::layer_norm
