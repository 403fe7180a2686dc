// The keep mask of dropout depends on (seed, offset, batch entry, query head, row, column) alone, not on a kernel's
// tile sizes, so that forward and backward agree. The scores of an (entry, head) are cut into tiles of 16 rows x 32
// columns, and each of the 32 lanes of a warp draws 16 bytes of a tile from Philox with
//
//   key      the seed
//   counter  low 64 bits: offset + 32 (entry * heads + head) + lane; high: row / 16 in the low word, column / 32
//
// Byte 8y + 4x + 2u + z of a lane decides row lane / 4 + 8u, column 16y + 8x + 2 (lane % 4) + z of the tile: these are
// the elements that the lane holds of a Fragment, word 2y + x for the (2y + x)-th of its four 8-column parts. An
// element is kept if its byte is at most floor(255 (1 - p)).
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "ptx/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/philox.cuh"

namespace flash::flash_attn {

struct Dropout {
  uint64_t seed, offset, counter;
  uint32_t largest_kept;

  // p.rng_state must not be null.
  __device__ explicit Dropout(const Problem& p)
      : seed(p.rng_state[0]), offset(p.rng_state[1]), largest_kept(p.dropout_largest_kept) {}
  __device__ Dropout(const Problem& p, int entry, int head) : Dropout(p) { move_to(p, entry, head); }

  __device__ void move_to(const Problem& p, int entry, int head) {
    counter = offset + 32 * (int64_t{entry} * p.heads + head) + lane_id();
  }

  // The lane's bytes of a tile.
  __device__ uint4 draw(int row_tile, int col_tile) const { return philox<7>(seed, counter, row_tile, col_tile); }

  // Calls fn(r, c) for the lane's dropped elements of a fragment whose corner is at (row0, col0), multiples of 16 and
  // 32.
  template <int kRows, int kCols, typename Fn>
  __device__ void for_each_dropped(const Fragment<kRows, kCols>&, int row0, int col0, Fn&& fn) const {
    static_assert(kCols % 32 == 0);
#pragma unroll
    for (int slab = 0; slab < kRows / 16; ++slab) {
#pragma unroll
      for (int part = 0; part < kCols / 32; ++part) {
        const uint4 bits = draw(row0 / 16 + slab, col0 / 32 + part);
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const uint32_t byte = words[i / 4] >> (8 * (i % 4)) & 255;
          if (byte > largest_kept) fn(2 * slab + i % 4 / 2, 8 * part + i / 4 * 2 + i % 2);
        }
      }
    }
  }

  // The same for a transposed fragment of 16 or 32 keys x kCols query rows: in fn(r, c), r counts keys. A lane now
  // needs bytes that other lanes draw. Word w of all lanes covers 16 rows x keys 8w .. 8w + 7; byte 2u + z is row lane
  // / 4 + 8u and key 2 (lane % 4) + z of these. __byte_perm groups the bytes by z, so that the two bytes over u form
  // one 16-bit element; the words of a warp are then an 8 x 8 matrix of such elements, rows x keys, and movmatrix
  // transposes it.
  template <int kRows, int kCols, typename Fn>
  __device__ void for_each_dropped_transposed(const Fragment<kRows, kCols>&, int key0, int row0, Fn&& fn) const {
    static_assert(kRows == 16 || kRows == 32);
    const bool upper = key0 % 32 != 0;
#pragma unroll
    for (int part = 0; part < kCols / 16; ++part) {
      const uint4 bits = draw(row0 / 16 + part, key0 / 32);
      const uint32_t words[4] = {upper ? bits.z : bits.x, upper ? bits.w : bits.y, bits.z, bits.w};
#pragma unroll
      for (int r = 0; r < kRows / 8; ++r) {
        const uint32_t word = ptx::transpose_matrix(__byte_perm(words[r], 0, 0x3120));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t byte = word >> (8 * i) & 255;
          if (byte > largest_kept) fn(r, 4 * part + 2 * (i % 2) + i / 2);
        }
      }
    }
  }
};

}  // namespace flash::flash_attn
