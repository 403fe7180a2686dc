// The mask is an interval of keys for each row: row i sees keys max(0, i + D - left) .. min(seqlen_k - 1, i + D +
// right), inclusive, with D = seqlen_k - seqlen_q. Both ends are non-decreasing in i, so the first and the last row of
// a tile tell what all its rows see. With key ranges, a row sees the part of this interval that lies in its range.
// Ranges are arbitrary, so the lanes of a warp then look at every row of a tile.
#pragma once

#include <cmath>

#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// first .. last, both included; empty if last < first.
struct Interval {
  int first, last;

  __device__ bool empty() const { return last < first; }
  __device__ bool covers(int i) const { return first <= i && i <= last; }
  __device__ bool covers(const Interval& other) const { return first <= other.first && other.last <= last; }
};

__device__ inline Interval intersection(const Interval& a, const Interval& b) {
  return {max(a.first, b.first), min(a.last, b.last)};
}

struct Mask {
  int left, right;
  int seqlen_q, seqlen_k;

  __device__ Mask(const Problem& p, const Sequence& seq)
      : left(p.window_left), right(p.window_right), seqlen_q(seq.q.length), seqlen_k(seq.k.length) {}

  // The key that row 0 is aligned with, as Sequence::diagonal.
  __device__ int diagonal() const { return seqlen_k - seqlen_q; }

  __device__ Interval keys_seen_by(int row) const {
    const int own = row + diagonal();
    return {max(0, own - left), min(seqlen_k - 1, own + right)};
  }
  __device__ Interval keys_seen_by_any(const Interval& rows) const {
    return {keys_seen_by(rows.first).first, keys_seen_by(rows.last).last};
  }
  __device__ Interval keys_seen_by_all(const Interval& rows) const {
    return {keys_seen_by(rows.last).first, keys_seen_by(rows.first).last};
  }
  __device__ Interval rows_that_see(int key) const {
    return key < seqlen_k ? rows_that_see(Interval{key, key}) : Interval{0, -1};
  }
  // The rows that see some of the keys.
  __device__ Interval rows_that_see(const Interval& keys) const {
    return {max(0, keys.first - diagonal() - right), min(seqlen_q - 1, keys.last - diagonal() + left)};
  }
};

// The mask of a tile of rows if there are key ranges; if not, it behaves as Mask.
struct RangedMask : Mask {
  const int* ranges;  // of row 0; null: no ranges
  int64_t step;       // from row to row, in ints
  Interval any, all;  // from the first to the last key that some row of the tile sees; and the keys that all rows see

  // All lanes of a warp must call it together.
  __device__ RangedMask(const Problem& p, const Sequence& seq, int head, const Interval& rows)
      : Mask(p, seq), ranges(p.ranges.data), step(p.ranges.seqlen) {
    if (ranges == nullptr) {
      any = Mask::keys_seen_by_any(rows), all = Mask::keys_seen_by_all(rows);
      return;
    }
    ranges += seq.q.batch * p.ranges.batch + head * p.ranges.heads + seq.q.first * step;
    any = {kMaxSeqlen, -1}, all = {0, kMaxSeqlen};
    for (int row = rows.first + lane_id(); row <= rows.last; row += 32) {
      const Interval seen = keys_seen_by(row);
      all = intersection(all, seen);
      if (!seen.empty()) any = {min(any.first, seen.first), max(any.last, seen.last)};
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const auto of_others = [&](int x) { return __shfl_xor_sync(~0u, x, lanes); };
      any = {min(any.first, of_others(any.first)), max(any.last, of_others(any.last))};
      all = intersection(all, {of_others(all.first), of_others(all.last)});
    }
    if (all.empty()) all = {0, -1};
  }

  // Past the end of the entry, the range of its last row applies: there are none to read.
  __device__ Interval keys_seen_by(int row) const {
    const Interval seen = Mask::keys_seen_by(row);
    if (ranges == nullptr) return seen;
    const int2 range = __ldg(reinterpret_cast<const int2*>(ranges + min(row, seqlen_q - 1) * step));
    return intersection(seen, {range.x, min(max(range.y, 0), seqlen_k) - 1});
  }
  // Their argument is ignored: the answers are those for the rows given to the constructor.
  __device__ Interval keys_seen_by_any(const Interval&) const { return any; }
  __device__ Interval keys_seen_by_all(const Interval&) const { return all; }
};

// The blocks of `size` elements that an interval touches.
__device__ inline Interval blocks_of(const Interval& interval, int size) {
  if (interval.empty()) return {0, -1};
  return {interval.first / size, interval.last / size};
}

template <int kSize>
__device__ Interval interval_of(int block) {
  return {block * kSize, block * kSize + kSize - 1};
}

// How many of a lane's columns of a Fragment lie before column `end`, which may be negative or past the fragment.
__device__ inline int lane_cols_before(int end) {
  const int own = max(0, end - lane_id() % 4 * 2);  // columns 0, 1, 8, 9, 16, .. count for the lane
  return own / 8 * 2 + min(own % 8, 2);
}

// A word with the lowest `count` bits set: none if count is negative, all if it is 32 or more.
__device__ inline uint32_t low_bits(int count) { return count >= 32 ? ~0u : (1u << max(count, 0)) - 1; }

// Writes `value` outside of interval(r), the columns that the lane's r-th row sees. Column 0 of the fragment counts as
// col0.
//
// A word has a bit for each column, and the compiler turns many bits into predicates at a time. Fragments of 32 rows
// leave no registers for that: there each column is compared, which takes more instructions but does not spill.
template <int kRows, int kCols, typename IntervalOf>
__device__ void hide_outside(Fragment<kRows, kCols>& s, IntervalOf&& interval, int col0, float value) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
    const Interval seen = interval(r);
    if constexpr (kRows > 16) {
      const int first_col = col0 + s.col(0) - seen.first;
      const unsigned count = max(0, seen.last - seen.first + 1);
#pragma unroll
      for (int c = 0; c < kCols / 4; ++c) {
        const unsigned from_first = first_col + c / 2 * 8 + c % 2;
        if (from_first >= count) s(r, c) = value;
      }
    } else {
      const int first = lane_cols_before(seen.first - col0), end = lane_cols_before(seen.last + 1 - col0);
#pragma unroll
      for (int word = 0; word < kCols / 4; word += 32) {
        const uint32_t visible = low_bits(end - word) & ~low_bits(first - word);
#pragma unroll
        for (int c = word; c < kCols / 4 && c < word + 32; ++c) {
          if (!(visible >> (c - word) & 1)) s(r, c) = value;
        }
      }
    }
  }
}

// Writes `value` where a row does not see a key. rows[r]: the query row of the lane's r-th row; col0: the key of column
// 0.
template <typename AnyMask, int kRows, int kCols>
__device__ void hide(Fragment<kRows, kCols>& s, const AnyMask& mask, const int (&rows)[kRows / 8], int col0,
                     float value) {
  hide_outside(s, [&](int r) { return mask.keys_seen_by(rows[r]); }, col0, value);
}

}  // namespace flash::flash_attn
