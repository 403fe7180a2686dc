// Sizes of blocks, computed from the width of rows. Host code that does not need CUDA.
#pragma once

#include <algorithm>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::layer_norm {

constexpr int kMaxThreads = 512;
constexpr int kUsualVecs = 2;  // accesses per thread and matrix

// The element types of a kernel: the type of x0, out and their gradients, and the type of h, the residual and their
// gradients. With kAny the type of each matrix is found at run time; the other values save those branches.
enum class Types { kAny, kFloat16, kBFloat16, kFloat32, kFloat16Stream32, kBFloat16Stream32 };

constexpr DType x_type(Types types) {
  return types == Types::kFloat32                                       ? DType::kFloat32
         : types == Types::kFloat16 || types == Types::kFloat16Stream32 ? DType::kFloat16
                                                                        : DType::kBFloat16;
}

constexpr DType h_type(Types types) {
  return types == Types::kFloat16 || types == Types::kBFloat16 ? x_type(types) : DType::kFloat32;
}

// Returns the widest access, in elements, of a kernel for known types.
constexpr int vec_of(Types types) { return h_type(types) == DType::kFloat32 ? 4 : 8; }

// What a kernel can do. Forward: kAlone normalises x0, with weights of a known type, and stores nothing else; kPlain
// also adds a residual and stores h; kBranches also has dropout and a scale per row of x0; kAll does everything.
// Backward: kPlain computes the gradient of h; kBranches also handles dropped or scaled branches; kAll also handles a
// second norm and a column scale, which take more registers.
enum class Extent { kAlone, kPlain, kBranches, kAll };

// The number of parameters with gradients in every backward: weight and bias.
constexpr int kFewParameters = 2;

// The shape of a block: `lanes` threads for each of `rows` rows. `tiles` blocks share a row.
struct RowShape {
  int lanes, rows, tiles;
};

// The most blocks in a cluster that CUDA guarantees.
constexpr int kMaxTiles = 8;

// Returns the shape of blocks of about `threads` threads for rows of `cols` elements, with `vec` elements in an access
// and `vecs` accesses per thread and matrix. Lanes are whole warps or, if `splits_warps`, a power of two. The number of
// tiles is a power of two up to kMaxTiles.
inline RowShape row_shape(int cols, int vec, int vecs, int threads, bool splits_warps) {
  const int needed = std::max(1, ceil_div(ceil_div(cols, vec), vecs));
  int lanes = splits_warps ? 1 : 32, tiles = 1;
  while (lanes < needed && lanes < 32) lanes *= 2;
  while (tiles < kMaxTiles && tiles * kMaxThreads < needed) tiles *= 2;
  tiles = std::max(tiles, ceil_div(needed, kMaxThreads));
  if (needed > 32) lanes = 32 * ceil_div(ceil_div(needed, tiles), 32);
  return {lanes, tiles > 1 ? 1 : std::max(1, threads / lanes), tiles};
}

// In the backward: rows in shared memory, including the row at work (more stages were no faster), and matrices that are
// copied.
constexpr int kStages = 2, kCopiedMatrices = 3;

// Bytes of shared memory for a vector. A vector of 4 elements of 16 bits leaves 8 of them empty.
constexpr int kSlotBytes = 16;

// Returns the number of slots of a matrix: one for each vector and, for ragged rows, one more per row for its end. The
// lanes of a ragged row are whole warps.
constexpr int matrix_slots(int vecs, bool ragged) { return vecs * kMaxThreads + (ragged ? kMaxThreads / 32 : 0); }

// Returns the bytes of shared memory for the rows in a block of the backward.
constexpr int ring_bytes(int vecs, bool ragged) {
  return kStages * kCopiedMatrices * kSlotBytes * matrix_slots(vecs, ragged);
}

// Returns whether `blocks` blocks can hold a row.
inline bool fits_blocks(int cols, int vec, int vecs, int blocks) { return cols <= vec * vecs * kMaxThreads * blocks; }

}  // namespace flash::layer_norm
