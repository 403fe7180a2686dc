// Tiles of matrices in shared memory, and the dynamic shared memory of a thread block.
#pragma once

#include <cstdint>

#include "ptx/copy.cuh"

namespace flash {

// kRows x kCols 16-bit elements in shared memory, cut into panels of 64 columns (32 if kCols is not a multiple of 64),
// one panel after the other. Within a panel, the index of a 16-byte chunk is XORed with the row number (swizzled), so
// that the same chunk of eight adjacent rows lies in eight different groups of banks: copies by row and ldmatrix by row
// or by column are free of bank conflicts. TMA copies with 128- or 64-byte swizzle and wgmma use the same layout, whose
// pattern requires the alignment.
template <typename T_, int kRows_, int kCols_>
struct alignas(1024) SharedTile {
  using T = T_;
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kChunk = 8;  // elements in 16 bytes
  static constexpr int kPanelCols = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kCols / kPanelCols;
  static constexpr int kPanelChunks = kPanelCols / kChunk;
  static constexpr int kRowBytes = kPanelCols * sizeof(T);  // within a panel
  static_assert(sizeof(T) == 2 && kCols % 32 == 0 && kRows % 8 == 0);

  T data[kRows * kCols];

  // The offset in bytes of the chunk that holds columns 8 chunk .. 8 chunk + 7 of `row`. A loop can go on from one
  // offset to the next without computing it anew:
  //   by a multiple of 8 rows, or by panels:  + distance(rows, panels)
  //   by `chunks` within the panel:           ^ flip(chunks), if `chunks` and the index in the panel have no common
  //   bits by fewer than 8 rows:                  + distance(rows, 0), ^ turn(rows), if `rows` and `row` have no common
  //   bits
  __device__ static constexpr int offset(int row, int chunk) {
    return distance(row, chunk / kPanelChunks) + (flip(chunk) ^ turn(row));
  }

  __device__ static constexpr int distance(int rows, int panels) { return (panels * kRows + rows) * kRowBytes; }
  __device__ static constexpr int flip(int chunks) { return chunks % kPanelChunks * 16; }
  __device__ static constexpr int turn(int rows) { return (kPanelChunks == 8 ? rows & 7 : (rows >> 1) & 3) * 16; }

  __device__ uint32_t address(int row, int chunk) const { return ptx::shared_address(data) + offset(row, chunk); }

  __device__ T* chunk(int row, int chunk) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(data) + offset(row, chunk));
  }
};

// The index-th kCols columns of a tile, which must be whole panels, as a tile of its own.
template <int kCols, typename T, int kRows, int kAllCols>
__device__ SharedTile<T, kRows, kCols>& columns_of(SharedTile<T, kRows, kAllCols>& tile, int index) {
  static_assert(kAllCols % kCols == 0 && SharedTile<T, kRows, kCols>::kPanelCols == tile.kPanelCols);
  return *reinterpret_cast<SharedTile<T, kRows, kCols>*>(tile.data + index * kRows * kCols);
}

// The thread block's dynamic shared memory as one struct. It begins behind static shared memory, at the next multiple
// of kAlignment. All kernels of a file must have the same kAlignment, since they declare the same array.
template <typename Shared, int kAlignment = 1024>
__device__ Shared& shared_memory() {
  extern __shared__ __align__(kAlignment) char bytes[];
  return *reinterpret_cast<Shared*>(bytes);
}

}  // namespace flash
