// Sizes of blocks, as functions of the width of rows. Host code without CUDA.
#pragma once

#include <algorithm>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::layer_norm {

constexpr int kMaxThreads = 512;
constexpr int kUsualVecs = 2;  // accesses of a thread and matrix

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

// What a kernel can do. Forward: sum x0 and the residual, with weights of a type it knows; or also drop and scale rows
// of x0; or anything. Backward: the gradient of h; or also branches that are dropped or scaled; or also a second norm
// and a column scale, whose gradients take registers.
enum class Extent { kPlain, kBranches, kAll };

// Of which there are gradients in any backward: weight and bias.
constexpr int kFewParameters = 2;

// A block is `lanes` threads for each of `rows` rows; `tiles` blocks share a row.
struct RowShape {
  int lanes, rows, tiles;
};

// Blocks of a cluster, at most, which CUDA guarantees.
constexpr int kMaxTiles = 8;

// For rows of `cols` elements, `vec` in an access and `vecs` accesses of a matrix by each thread, in blocks of about
// `threads` threads. Lanes are whole warps or, if `splits_warps`, a power of two. Up to kMaxTiles, tiles are a power of
// two.
inline RowShape row_shape(int cols, int vec, int vecs, int threads, bool splits_warps) {
  const int needed = std::max(1, ceil_div(ceil_div(cols, vec), vecs));
  int lanes = splits_warps ? 1 : 32, tiles = 1;
  while (lanes < needed && lanes < 32) lanes *= 2;
  while (tiles < kMaxTiles && tiles * kMaxThreads < needed) tiles *= 2;
  tiles = std::max(tiles, ceil_div(needed, kMaxThreads));
  if (needed > 32) lanes = 32 * ceil_div(ceil_div(needed, tiles), 32);
  return {lanes, tiles > 1 ? 1 : std::max(1, threads / lanes), tiles};
}

// Of the backward: rows in shared memory, with the one at work (3 and 4 were no faster), and matrices that are copied.
constexpr int kStages = 2, kCopiedMatrices = 3;

// Bytes of shared memory that hold a vector; 8 stay empty for 4 elements of 16 bits.
constexpr int kSlotBytes = 16;

// Slots of a matrix: one for each vector and, of ragged rows, which have whole warps, one for the end of each.
constexpr int matrix_slots(int vecs, bool ragged) { return vecs * kMaxThreads + (ragged ? kMaxThreads / 32 : 0); }

// Of the backward's blocks.
constexpr int ring_bytes(int vecs, bool ragged) {
  return kStages * kCopiedMatrices * kSlotBytes * matrix_slots(vecs, ragged);
}

// Whether `blocks` blocks hold a row.
inline bool fits_blocks(int cols, int vec, int vecs, int blocks) { return cols <= vec * vecs * kMaxThreads * blocks; }

}  // namespace flash::layer_norm
