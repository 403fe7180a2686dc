// Between global memory and tiles in shared memory, and from fragments to either. `rows` says where rows lie in global
// memory: rows(i) is the address of the first element of row i, or null where there is none. Such rows read as zeros
// and are not written; so do columns from `cols` on.
#pragma once

#include <cstdint>

#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"
#include "tile/vec.cuh"

namespace flash {

// Rows begin .. end - 1 of a matrix; row 0 is at `data`.
template <typename T>
struct StridedRows {
  T* data;
  int64_t stride;
  int begin, end;

  __device__ T* operator()(int row) const { return begin <= row && row < end ? data + row * stride : nullptr; }
};

// fn(row, chunk) for the chunks of a tile that a thread of kThreads moves. As many neighbouring threads as a page has
// chunks share a row: 128 bytes that are adjacent in global memory.
template <int kThreads, typename Tile, typename Fn>
__device__ void for_each_chunk(int thread, Fn&& fn) {
  constexpr int kLanes = Tile::kPageChunks, kStep = kThreads / kLanes;
  static_assert(Tile::kRows % kStep == 0);
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += kStep) fn(row + thread / kLanes, thread % kLanes);
}

// Starts the copies of a tile by kThreads threads. Rows are aligned to 16 bytes and cols is a multiple of 8.
template <int kThreads, typename Tile, typename Rows>
__device__ void load_async(const Tile& tile, const Rows& rows, int cols) {
  for_each_chunk<kThreads, Tile>(threadIdx.x, [&](int row, int first_chunk) {
    const auto* source = rows(row);
#pragma unroll
    for (int page = 0; page < Tile::kPages; ++page) {
      const int chunk = page * Tile::kPageChunks + first_chunk;
      ptx::copy_async(tile.address(row, chunk), source + chunk * Tile::kChunk,
                      source != nullptr && chunk * Tile::kChunk < cols);
    }
  });
}

// The same for elements that lie `step` apart and anywhere, at once.
template <int kThreads, typename Tile, typename Rows>
__device__ void load_scattered(Tile& tile, const Rows& rows, int cols, int64_t step) {
  using T = typename Tile::T;
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols / Tile::kChunk; i += kThreads) {
    const int row = i / (Tile::kCols / Tile::kChunk), chunk = i % (Tile::kCols / Tile::kChunk);
    const T* source = rows(row);
    Vec<T, Tile::kChunk> vec;
#pragma unroll
    for (int j = 0; j < Tile::kChunk; ++j) {
      const int col = chunk * Tile::kChunk + j;
      vec[j] = source != nullptr && col < cols ? source[col * step] : T(0.f);
    }
    store(tile.chunk(row, chunk), vec);
  }
}

// Rounds a fragment to T and writes it to rows row0 .. of a tile.
template <typename Tile, int kRows, int kCols>
__device__ void store_fragment(Tile& tile, const Fragment<kRows, kCols>& fragment, int row0) {
  static_assert(kCols <= Tile::kCols);
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
#pragma unroll
    for (int c = 0; c < kCols / 4; c += 2) {
      auto* pair = tile.chunk(row0 + fragment.row(r), c / 2) + 2 * (lane_id() % 4);
      *reinterpret_cast<uint32_t*>(pair) = ptx::pack<typename Tile::T>(fragment(r, c), fragment(r, c + 1));
    }
  }
}

// A warp writes rows row0 .. row0 + kRows - 1 of a tile to global memory. Rows are aligned to 16 bytes and cols is a
// multiple of 8.
template <int kRows, typename Tile, typename Rows>
__device__ void store_rows(Tile& tile, const Rows& rows, int row0, int cols) {
  using T = typename Tile::T;
  constexpr int kLanes = Tile::kPageChunks, kStep = 32 / kLanes;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    const int row = row0 + i + lane_id() / kLanes;
    T* target = rows(row);
#pragma unroll
    for (int page = 0; page < Tile::kPages; ++page) {
      const int chunk = page * kLanes + lane_id() % kLanes;
      if (target == nullptr || chunk * Tile::kChunk >= cols) continue;
      store(target + chunk * Tile::kChunk, load<Tile::kChunk>(tile.chunk(row, chunk)));
    }
  }
}

// The same for elements that lie `step` apart and anywhere.
template <int kRows, typename Tile, typename Rows>
__device__ void store_scattered(Tile& tile, const Rows& rows, int row0, int cols, int64_t step) {
  for (int i = lane_id(); i < kRows * cols; i += 32) {
    const int row = row0 + i / cols, col = i % cols;
    auto* target = rows(row);
    if (target != nullptr) target[col * step] = tile.chunk(row, col / Tile::kChunk)[col % Tile::kChunk];
  }
}

}  // namespace flash
