// Dropout in instances of kDropped: a warpgroup of drawers draws the random bytes (dropout.cuh) ahead of time, while
// the tensor cores are busy, and leaves in shared memory which elements are dropped, a bit for each. A warp that
// computes then reads a word for 32 elements of a lane, in the layout of its Fragment, and clears elements by masks.
#pragma once

#include <cstdint>

#include "flash_attn/scores/dropout.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// Which elements of a fragment of 16 rows a lane drops. Of 64 columns, which are 16 of the lane's, element (r, c) has
// in byte 2 r + c % 2 the bit c / 2 from the top: the word, shifted left by c / 2, has that bit as the byte's sign.
template <int kCols>
struct alignas(kCols == 128 ? 8 : 4) DroppedBits {
  uint32_t words[(kCols + 63) / 64];

  // Sets dropped elements to 0.
  template <typename T>
  __device__ void clear(PackedFragment<T, 16, kCols>& x) const {
#pragma unroll
    for (int c = 0; c < kCols / 8; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) x.pair(r, c) &= ~ptx::spread_signs<2>(words[c / 8] << c % 8, 2 * r);
    }
  }
  __device__ void clear(Fragment<16, kCols>& x) const {
    x.for_each([&](float& element, int r, int c) {
      const uint32_t dropped = ptx::spread_signs<4>(words[c / 16] << c / 2 % 8, 2 * r + c % 2);
      element = __uint_as_float(__float_as_uint(element) & ~dropped);
    });
  }
};

// How many warps draw: a warpgroup of their own.
constexpr int kDrawers = 4;

// Draws such bits. Loops are unrolled as far as registers allow: each random number takes a long chain of products.
class DropoutDrawer {
  Dropout dropout_;
  const uint32_t addend_, either_;

  // Moves the bits of each byte of a word down by one, and sets the high bits where one of four random bytes drops,
  // being larger than largest_kept. Its lower seven bits are larger than those of largest_kept if the sum carries into
  // the high bit; together with the high bit itself that decides, as a logical product if largest_kept has its high
  // bit, else as a sum.
  __device__ void mark(uint32_t& word, uint32_t bytes) const {
    const uint32_t sums = (bytes & 0x7F7F7F7Fu) + addend_;
    const uint32_t dropped = (bytes & sums) | (either_ & (bytes | sums));
    word = word >> 1 | (dropped & 0x80808080u);
  }

 public:
  __device__ explicit DropoutDrawer(const Problem& p)
      : dropout_(p),
        addend_(0x01010101u * (127 - dropout_.largest_kept % 128)),
        either_(dropout_.largest_kept < 128 ? ~0u : 0u) {}

  __device__ void move_to(const Problem& p, int entry, int head) { dropout_.move_to(p, entry, head); }

  // The bits of a fragment whose corner is at (row0, col0), multiples of 16 and 32.
  template <int kCols>
  __device__ DroppedBits<kCols> draw(int row0, int col0) const {
    DroppedBits<kCols> bits = {};
#pragma unroll
    for (int tile = 1; tile >= 0; --tile) {
      uint4 x[kCols / 64];
#pragma unroll
      for (int word = 0; word < kCols / 64; ++word) x[word] = dropout_.draw(row0 / 16, col0 / 32 + 2 * word + tile);
#pragma unroll
      for (int word = 0; word < kCols / 64; ++word) {
        mark(bits.words[word], x[word].w), mark(bits.words[word], x[word].z);
        mark(bits.words[word], x[word].y), mark(bits.words[word], x[word].x);
      }
    }
    return bits;
  }

  // Words of two transposed fragments, of 16 keys x 64 rows each, whose corners are at (key0, row0) and (key0 + 16,
  // row0). A lane needs what other lanes draw: two words of random bytes, of 16 rows x 16 keys, are regrouped by 8
  // rows, so that the two bytes of a lane's key and of the key 8 further make a 16-bit element. What a warp has marked
  // is then an 8 x 8 matrix of such elements, rows x keys, and movmatrix transposes it.
  __device__ void draw_transposed(uint32_t (&words)[2], int key0, int row0) const {
    words[0] = words[1] = 0;
#pragma unroll 1
    for (int slab = 3; slab >= 0; --slab) {
      const uint4 x = dropout_.draw(row0 / 16 + slab, key0 / 32);
      mark(words[0], __byte_perm(x.x, x.y, 0x7362));
      mark(words[0], __byte_perm(x.x, x.y, 0x5140));
      mark(words[1], __byte_perm(x.z, x.w, 0x7362));
      mark(words[1], __byte_perm(x.z, x.w, 0x5140));
    }
#pragma unroll
    for (uint32_t& word : words) word = __byte_perm(ptx::transpose_matrix(word), 0, 0x3120);
  }
};

}  // namespace flash::flash_attn
