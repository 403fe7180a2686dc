// Between global memory and tiles in shared memory, and from fragments to either. Where rows lie in global memory is
// told by a cursor, which stands at a row: `move(n)` goes n rows on, `exists()` says whether there is a row, and
// `address()` is that of its first element. Rows that do not exist read as zeros and are not written; so do columns
// from `cols` on.
#pragma once

#include <cstdint>

#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"
#include "tile/vec.cuh"

namespace flash {

// `count` rows of a matrix, `stride` elements apart.
template <typename T>
struct StridedRows {
  T* data;  // of the row where it stands
  int64_t stride;
  int row, count;

  __device__ void move(int n) {
    data += n * stride;
    row += n;
  }
  __device__ bool exists() const { return static_cast<unsigned>(row) < static_cast<unsigned>(count); }
  __device__ T* address() const { return data; }
};

// Starts the copies of a tile by kThreads threads, a block or each of its warps for itself. Rows are aligned to 16
// bytes and cols is a multiple of 8. As many neighbouring threads as a page has chunks share a row: 128 bytes that are
// adjacent in global memory.
template <int kThreads, typename Tile, typename Rows>
__device__ void load_async(const Tile& tile, Rows rows, int cols) {
  constexpr int kLanes = Tile::kPageChunks, kStep = kThreads / kLanes;
  static_assert(Tile::kRows % kStep == 0);
  const int thread = threadIdx.x % kThreads, chunk = thread % kLanes, first_row = thread / kLanes;
  rows.move(first_row);
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += kStep) {
    const auto* source = rows.address() + chunk * Tile::kChunk;
#pragma unroll
    for (int page = 0; page < Tile::kPages; ++page) {
      const bool valid = rows.exists() && (page * kLanes + chunk) * Tile::kChunk < cols;
      ptx::copy_async(tile.address(first_row + row, page * kLanes + chunk), source + page * Tile::kPageCols, valid);
    }
    rows.move(kStep);
  }
}

// The same for elements that lie `step` apart and anywhere, at once.
template <int kThreads, typename Tile, typename Rows>
__device__ void load_scattered(Tile& tile, Rows rows, int cols, int64_t step) {
  using T = typename Tile::T;
  constexpr int kLanes = Tile::kPageChunks, kStep = kThreads / kLanes;
  const int thread = threadIdx.x % kThreads;
  rows.move(thread / kLanes);
  for (int row = thread / kLanes; row < Tile::kRows; row += kStep, rows.move(kStep)) {
    for (int chunk = thread % kLanes; chunk < Tile::kCols / Tile::kChunk; chunk += kLanes) {
      Vec<T, Tile::kChunk> vec;
#pragma unroll
      for (int i = 0; i < Tile::kChunk; ++i) {
        const int col = chunk * Tile::kChunk + i;
        vec[i] = rows.exists() && col < cols ? rows.address()[col * step] : T(0.f);
      }
      store(tile.chunk(row, chunk), vec);
    }
  }
}

// Rounds a fragment to T and writes it to rows row0 .. of a tile. With kShares > 1 the fragment has one of as many
// equal parts of each page, from column col0 on.
template <int kShares = 1, typename Tile, int kRows, int kCols>
__device__ void store_fragment(Tile& tile, const Fragment<kRows, kCols>& fragment, int row0, int col0 = 0) {
  constexpr int kShareChunks = Tile::kPageChunks / kShares;
  static_assert(kCols <= Tile::kCols);
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
#pragma unroll
    for (int c = 0; c < kCols / 4; c += 2) {
      const int chunk = c / 2 / kShareChunks * Tile::kPageChunks + c / 2 % kShareChunks + col0 / Tile::kChunk;
      auto* pair = tile.chunk(row0 + fragment.row(r), chunk) + 2 * (lane_id() % 4);
      *reinterpret_cast<uint32_t*>(pair) = ptx::pack<typename Tile::T>(fragment(r, c), fragment(r, c + 1));
    }
  }
}

// A warp writes kRows rows of a tile, from row0 on, to global memory. Rows are aligned to 16 bytes and cols is a
// multiple of 8.
template <int kRows, typename Tile, typename Rows>
__device__ void store_rows(Tile& tile, Rows rows, int row0, int cols) {
  constexpr int kLanes = Tile::kPageChunks, kStep = 32 / kLanes;
  const int row = row0 + lane_id() / kLanes;
  rows.move(row);
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
#pragma unroll
    for (int page = 0; page < Tile::kPages; ++page) {
      const int chunk = page * kLanes + lane_id() % kLanes;
      if (!rows.exists() || chunk * Tile::kChunk >= cols) continue;
      store(rows.address() + chunk * Tile::kChunk, load<Tile::kChunk>(tile.chunk(row + i, chunk)));
    }
    rows.move(kStep);
  }
}

// The same for elements that lie `step` apart and anywhere.
template <int kRows, typename Tile, typename Rows>
__device__ void store_scattered(Tile& tile, Rows rows, int row0, int cols, int64_t step) {
  rows.move(row0);
  for (int row = row0; row < row0 + kRows; ++row, rows.move(1)) {
    if (!rows.exists()) continue;
    for (int col = lane_id(); col < cols; col += 32) {
      rows.address()[col * step] = tile.chunk(row, col / Tile::kChunk)[col % Tile::kChunk];
    }
  }
}

}  // namespace flash
