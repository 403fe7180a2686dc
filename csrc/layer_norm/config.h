// Sizes of blocks, computed from the width of rows. Host code that does not need CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

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

// What a kernel can do. Forward: kPlain adds x0 and the residual, with weights of a known type; kBranches also has
// dropout and a scale per row of x0; kAll does everything. Backward: kPlain computes the gradient of h; kBranches also
// handles dropped or scaled branches; kAll also handles a second norm and a column scale, which take more registers.
enum class Extent { kPlain, kBranches, kAll };

// The shape of a block: `lanes` threads for each of `rows` rows. `tiles` blocks share a row.
struct RowShape {
  int lanes, rows, tiles;
};

// The most blocks in a cluster that CUDA guarantees.
constexpr int kMaxTiles = 8;

// Returns the shape of blocks of about `threads` threads, and at most `most`, for rows of `cols` elements, with `vec`
// elements in an access and `vecs` accesses per thread and matrix. Lanes are whole warps or, if `splits_warps`, a power
// of two. The number of tiles is a power of two up to kMaxTiles.
inline RowShape row_shape(int cols, int vec, int vecs, int threads, bool splits_warps, int most = kMaxThreads) {
  const int needed = std::max(1, ceil_div(ceil_div(cols, vec), vecs));
  int lanes = splits_warps ? 1 : 32, tiles = 1;
  while (lanes < needed && lanes < 32) lanes *= 2;
  while (tiles < kMaxTiles && tiles * most < needed) tiles *= 2;
  tiles = std::max(tiles, ceil_div(needed, most));
  if (needed > 32) lanes = 32 * ceil_div(ceil_div(needed, tiles), 32);
  return {lanes, tiles > 1 ? 1 : std::max(1, threads / lanes), tiles};
}

// The accesses per thread and matrix in the backward. A thread has 16 elements of a row if their types are known, so
// that what a row costs once is spread over many elements. A kernel that looks up types has no registers for more
// than 8.
constexpr int bwd_vecs(Types types) { return types == Types::kAny ? kUsualVecs : 16 / vec_of(types); }

// 512 threads of 128 registers fill a multiprocessor. The blocks of the backward are as small as the rows let them be:
// while one begins, ends or waits for a barrier, others use the memory.
constexpr int kSmallThreads = 128;

// Returns the most threads of a block. What a block can hold does not depend on the number of accesses.
constexpr int max_bwd_threads(int vecs) { return kMaxThreads * kUsualVecs / std::max(vecs, kUsualVecs); }

// Returns how many blocks of `threads` threads can run on a multiprocessor: it has named barriers for 4.
constexpr int blocks_at_once(int threads) { return std::clamp(kMaxThreads / threads, 1, 4); }

// Small blocks take turns on the multiprocessors, in up to kMaxRounds rounds, as long as each has kRowsPerBlock rows.
// If another kernel keeps some multiprocessors to itself, the blocks then divide the others evenly. More rounds would
// make more parts, which are written and read again.
constexpr int kMaxRounds = 4, kRowsPerBlock = 24;

// Returns how many blocks of `threads` threads divide the rows, and so the number of parts of the gradients of
// parameters. Larger blocks never make more parts.
inline int num_parts(int64_t rows, int threads, int multiprocessors) {
  const int64_t at_once = int64_t{multiprocessors} * blocks_at_once(threads);
  const int64_t rounds = std::clamp<int64_t>(rows / (kRowsPerBlock * at_once), 1, kMaxRounds);
  return static_cast<int>(std::min(rows, threads <= kSmallThreads ? rounds * at_once : at_once));
}

// Returns the most parts for rows of `cols` elements, of which a thread has at most 16.
inline int most_parts(int64_t rows, int cols, int multiprocessors) {
  return num_parts(rows, std::max(1, ceil_div(cols, 16)), multiprocessors);
}

// Rows in shared memory, including the row at work (more stages were no faster), and matrices that are copied.
constexpr int kStages = 2, kCopiedMatrices = 3;

// Bytes of shared memory for a vector. A vector of 4 elements of 16 bits leaves 8 of them empty.
constexpr int kSlotBytes = 16;

// Returns the number of slots of a warp for a matrix: one for each vector and, for ragged rows, one more for the end of
// the row. The lanes of a ragged row are whole warps.
constexpr int matrix_slots(int vecs, bool ragged) { return vecs * 32 + (ragged ? 1 : 0); }

// Returns the bytes of shared memory for the rows of a warp, and of a block of `threads` threads.
constexpr int warp_ring_bytes(int vecs, bool ragged) {
  return kStages * kCopiedMatrices * kSlotBytes * matrix_slots(vecs, ragged);
}
constexpr int ring_bytes(int threads, int vecs, bool ragged) { return threads / 32 * warp_ring_bytes(vecs, ragged); }

// Returns whether `blocks` blocks can hold a row.
inline bool fits_blocks(int cols, int vec, int vecs, int blocks) { return cols <= vec * vecs * kMaxThreads * blocks; }

}  // namespace flash::layer_norm
