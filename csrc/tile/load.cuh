// Copies between global memory and tiles in shared memory, and from fragments to either. A cursor (`rows`) says where
// rows lie in global memory. It stands at a row: `move(n)` goes n rows on, `exists()` says whether there is such a row,
// and `address()` is the address of its first element. Rows that do not exist are loaded as zeros and are not stored;
// the same goes for columns from `cols` on.
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
  T* data;  // the row where the cursor stands
  int64_t stride;
  int row, count;

  __device__ void move(int n) {
    data += n * stride;
    row += n;
  }
  __device__ bool exists() const { return static_cast<unsigned>(row) < static_cast<unsigned>(count); }
  __device__ T* address() const { return data; }
};

// kThreads threads load a tile together: a thread block, some of its warps, or each warp for itself. A row of a panel
// is loaded by kLanes neighbouring threads, as many as it has chunks: 128 (or 64) contiguous bytes; or by fewer, each
// of which then has fewer rows, and finds fewer addresses. Returns the first row of this thread.
template <int kThreads, typename Tile, int kLanes = Tile::kPanelChunks>
__device__ int first_loaded_row() {
  return threadIdx.x % kThreads / kLanes;
}

struct CopyChunk {
  __device__ void operator()(uint32_t shared, const void* global, bool valid) const {
    ptx::copy_async(shared, global, valid);
  }
};

// Starts the copies of a tile with a cursor that stands at this thread's first row. Rows are aligned to 16 bytes, and
// cols is a multiple of 8. kAllExist: all rows are known to exist. copy(shared, global, valid) starts one copy.
template <int kThreads, bool kAllExist, int kLanes, typename Tile, typename Rows, typename Copy = CopyChunk>
__device__ void load_own_rows_async(const Tile& tile, Rows rows, int cols, Copy&& copy = {}) {
  constexpr int kStep = kThreads / kLanes;
  static_assert(Tile::kRows % kStep == 0);
  const int chunk = threadIdx.x % kLanes;
  const uint32_t origin = tile.address(first_loaded_row<kThreads, Tile, kLanes>(), chunk);
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += kStep) {
    const auto* source = rows.address() + chunk * Tile::kChunk;
    const bool exists = kAllExist || rows.exists();
    const uint32_t target = (origin ^ Tile::turn(row)) + Tile::distance(row, 0);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
#pragma unroll
      for (int part = 0; part < Tile::kPanelChunks; part += kLanes) {
        const int col = panel * Tile::kPanelCols + part * Tile::kChunk;
        const bool valid = exists && col + chunk * Tile::kChunk < cols;
        copy((target ^ Tile::flip(part)) + Tile::distance(0, panel), source + col, valid);
      }
    }
    rows.move(kStep);
  }
}
template <int kThreads, bool kAllExist, typename Tile, typename Rows, typename Copy = CopyChunk>
__device__ void load_own_rows_async(const Tile& tile, Rows rows, int cols, Copy&& copy = {}) {
  load_own_rows_async<kThreads, kAllExist, Tile::kPanelChunks>(tile, rows, cols, copy);
}

// The same for elements with any alignment and stride `step`, through registers: done when it returns.
template <int kThreads, typename Tile, typename Rows>
__device__ void load_own_rows_scattered(Tile& tile, Rows rows, int cols, int64_t step) {
  using T = typename Tile::T;
  constexpr int kLanes = Tile::kPanelChunks, kStep = kThreads / kLanes;
  for (int row = first_loaded_row<kThreads, Tile>(); row < Tile::kRows; row += kStep, rows.move(kStep)) {
    for (int chunk = threadIdx.x % kLanes; chunk < Tile::kCols / Tile::kChunk; chunk += kLanes) {
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

// The same two with a cursor that stands at the first row of the tile.
template <int kThreads, typename Tile, typename Rows>
__device__ void load_async(const Tile& tile, Rows rows, int cols) {
  rows.move(first_loaded_row<kThreads, Tile>());
  load_own_rows_async<kThreads, false>(tile, rows, cols);
}
template <int kThreads, typename Tile, typename Rows>
__device__ void load_scattered(Tile& tile, Rows rows, int cols, int64_t step) {
  rows.move(first_loaded_row<kThreads, Tile>());
  load_own_rows_scattered<kThreads>(tile, rows, cols, step);
}

// The chunk of 8 columns to which element c of a lane belongs, of a fragment whose columns start at col0. With kShares
// > 1, the columns of each panel are cut into kShares equal parts; of every panel, the fragment has the part that
// starts at col0.
template <int kShares, int kPanelChunks>
__device__ constexpr int chunk_of(int c, int col0) {
  constexpr int kShareChunks = kPanelChunks / kShares;
  return c / 2 / kShareChunks * kPanelChunks + c / 2 % kShareChunks + col0 / 8;
}

// Stores a fragment, packed to 16 bits by `pack`, to the rows of a tile from row0 on. kShares: see chunk_of.
template <int kShares = 1, typename Tile, int kRows, int kCols, typename Pack = Rounded<typename Tile::T>>
__device__ void store_fragment(Tile& tile, const Fragment<kRows, kCols>& fragment, int row0, int col0 = 0,
                               Pack pack = {}) {
  static_assert(kCols <= Tile::kCols);
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
#pragma unroll
    for (int c = 0; c < kCols / 4; c += 2) {
      const int chunk = chunk_of<kShares, Tile::kPanelChunks>(c, col0);
      auto* pair = tile.chunk(row0 + fragment.row(r), chunk) + 2 * (lane_id() % 4);
      *reinterpret_cast<uint32_t*>(pair) = pack(fragment(r, c), fragment(r, c + 1));
    }
  }
}

// Stores a warp's 16 rows, transposed, to the 16 columns of a tile from col0 on. For sm_90.
template <typename Tile, typename T, int kCols>
__device__ void store_transposed(Tile& tile, const PackedFragment<T, 16, kCols>& fragment, int col0) {
  const int row = lane_id() / 16 * 8 + lane_id() % 8, chunk = col0 / Tile::kChunk + lane_id() / 8 % 2;
  const uint32_t origin = tile.address(row, chunk);
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
    ptx::store_matrices_transposed(origin + Tile::distance(16 * step, 0), fragment.values[0][step]);
  }
}

// The inverse: loads the 16 columns of a tile from col0 on as a warp's 16 rows. repeats: the tile has only its first
// row, which stands for all.
template <typename T, int kCols, typename Tile>
__device__ PackedFragment<T, 16, kCols> load_transposed(const Tile& tile, int col0, bool repeats = false) {
  const int row = lane_id() / 16 * 8 + lane_id() % 8, chunk = col0 / Tile::kChunk + lane_id() / 8 % 2;
  const uint32_t origin = tile.address(repeats ? 0 : row, chunk), step_bytes = repeats ? 0 : Tile::distance(16, 0);
  PackedFragment<T, 16, kCols> fragment;
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
    ptx::load_matrices_transposed(fragment.values[0][step], origin + step * step_bytes);
  }
  return fragment;
}

// A warp loads 16 rows of a tile, from row0 on. repeats: as above.
template <typename T, int kCols, typename Tile>
__device__ PackedFragment<T, 16, kCols> load_rows(const Tile& tile, int row0, bool repeats) {
  const uint32_t origin = tile.address(repeats ? 0 : row0 + lane_id() % 16, lane_id() / 16);
  PackedFragment<T, 16, kCols> fragment;
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
    const uint32_t in_panel = origin ^ Tile::flip(2 * step);
    ptx::load_matrices(fragment.values[0][step], in_panel + Tile::distance(0, 2 * step / Tile::kPanelChunks));
  }
  return fragment;
}

// A warp stores kRows rows of a tile, from row0 on, to global memory. Rows are aligned to 16 bytes, and cols is a
// multiple of 8.
template <int kRows, typename Tile, typename Rows>
__device__ void store_rows(Tile& tile, Rows rows, int row0, int cols) {
  constexpr int kLanes = Tile::kPanelChunks, kStep = 32 / kLanes;
  const int first_row = row0 + lane_id() / kLanes, first_chunk = lane_id() % kLanes;
  // All loads come first, so that they do not wait for one another.
  Vec<typename Tile::T, Tile::kChunk> chunks[kRows / kStep][Tile::kPanels];
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      chunks[i][panel] = load<Tile::kChunk>(tile.chunk(first_row + i * kStep, panel * kLanes + first_chunk));
    }
  }
  rows.move(first_row);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const int col = (panel * kLanes + first_chunk) * Tile::kChunk;
      if (rows.exists() && col < cols) store(rows.address() + col, chunks[i][panel]);
    }
    rows.move(kStep);
  }
}

// A warp stores a fragment, packed to 16 bits by `pack`, straight to global memory, to the rows from row0 on. Rows are
// aligned to 16 bytes, and cols is a multiple of 8. The lanes of a quad exchange their parts of four 8-column tiles, so
// that each lane stores 16 bytes and a quad 64 contiguous bytes.
template <typename T, int kRows, int kCols, typename Rows, typename Pack = Rounded<T>>
__device__ void store_rows(const Fragment<kRows, kCols>& fragment, Rows rows, int row0, int cols, Pack pack = {}) {
  static_assert(kCols % 32 == 0);
  rows.move(row0 + fragment.row(0));
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r, rows.move(8)) {
    const int first_col = 8 * (lane_id() % 4), end = rows.exists() ? cols : 0;
    T* target = rows.address() + first_col;
#pragma unroll
    for (int c = 0; c < kCols / 4; c += 8) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack(fragment(r, c + 2 * i), fragment(r, c + 2 * i + 1));
      transpose_quad(words);
      if (first_col + 4 * c < end) *reinterpret_cast<uint4*>(target + 4 * c) = {words[0], words[1], words[2], words[3]};
    }
  }
}

// A warp stores a fragment to rows of fp32 in global memory, from row0 on, or adds it to what they hold. Unless
// kAligned is false, strides and cols are even, so that pairs of elements are aligned. kShares, kPanelChunks: see
// chunk_of.
template <bool kAligned = true, int kShares = 1, int kPanelChunks = 8, int kRows, int kCols>
__device__ void store_float_rows(const Fragment<kRows, kCols>& fragment, StridedRows<float> rows, int row0, int cols,
                                 bool adds, int col0 = 0) {
  rows.move(row0 + fragment.row(0));
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r, rows.move(8)) {
    const int end = rows.exists() ? cols : 0;
#pragma unroll
    for (int c = 0; c < kCols / 4; c += 2) {
      const int col = 8 * chunk_of<kShares, kPanelChunks>(c, col0) + 2 * (lane_id() % 4);
      if constexpr (kAligned) {
        if (col >= end) continue;
        float2* pair = reinterpret_cast<float2*>(rows.address() + col);
        float2 sum{fragment(r, c), fragment(r, c + 1)};
        if (adds) sum.x += pair->x, sum.y += pair->y;
        *pair = sum;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (col + i >= end) continue;
          float& element = rows.address()[col + i];
          element = fragment(r, c + i) + (adds ? element : 0);
        }
      }
    }
  }
}

// A warp stores kRows rows of a tile, from row0 on, for elements with any alignment and stride `step`.
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
