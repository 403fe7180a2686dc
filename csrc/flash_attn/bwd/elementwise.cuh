// The elementwise steps of the backward, which all its kernels share. Fragments are transposed: row r of a lane is a
// key, column c a query row.
//
//   P = exp(score(S) - lse)    dS = P (Z dP / (1 - p) - softmax_d) dscore/dS    Z: 1 where dropout keeps an element
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias.cuh"
#include "flash_attn/scores/dropout.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// Where a fragment lies among the scores of an entry.
struct ScorePlace {
  int entry, head;
  int64_t first_token;  // of the entry in the tensor; 0 unless rows are packed
  int key0;             // of row 0 of the fragment
  int row0;             // query row of column 0
};

// Sets scores to -inf where a row does not see a key.
template <int kRows, int kCols>
__device__ void hide_rows(Fragment<kRows, kCols>& s, const Mask& mask, const ScorePlace& place) {
  hide_outside(s, [&](int r) { return mask.rows_that_see(place.key0 + s.row(r)); }, place.row0, -INFINITY);
}

// The same with key ranges. seen(c): the first and the last key that column c of the lane sees, then those of c + 1.
template <int kRows, int kCols, typename Seen>
__device__ void hide_unseen(Fragment<kRows, kCols>& s, int key0, Seen&& seen) {
#pragma unroll
  for (int c = 0; c < s.kLaneCols; c += 2) {
    const int4 two = seen(c);
#pragma unroll
    for (int r = 0; r < s.kLaneRows; ++r) {
      const int key = key0 + s.row(r);
      if (key < two.x || key > two.y) s(r, c) = -INFINITY;
      if (key < two.z || key > two.w) s(r, c + 1) = -INFINITY;
    }
  }
}

// A score with its bias, less lse: exact where a large bias has absorbed the digits of both. Exact scores are at most
// lse; rounding may push one beyond it, and its probability far beyond 1, so the difference is clamped.
__device__ inline float relative_score(float score, float lse) { return ptx::at_most_zero(score - lse); }

// Adds the bias to scores, and takes lse off them. lse(c): of columns c and c + 1 of the lane.
template <typename T, int kRows, int kCols, typename Lse>
__device__ void add_bias(Fragment<kRows, kCols>& s, const Bias& bias, const Mask& mask, const ScorePlace& place,
                         Lse&& lse) {
  const int64_t start = row_start(bias.rows, place.entry, place.head, place.first_token);
  with_type<T>(bias, [&](auto type) {
    using Element = decltype(type);
    const int row0 = place.row0 + s.col(0);
    const Element* row =
        static_cast<const Element*>(bias.data) + start + place.key0 + s.row(0) + row0 * bias.rows.seqlen;
    constexpr int kLoads = 16;  // in flight at a time: __syncwarp keeps the compiler from hoisting more into registers
#pragma unroll
    for (int c = 0; c < s.kLaneCols; c += 2) {
      if (c * s.kLaneRows % kLoads == 0) __syncwarp();
      const float2 of_rows = lse(c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool row_exists = row0 + c / 2 * 8 + i < mask.seqlen_q;
#pragma unroll
        for (int r = 0; r < s.kLaneRows; ++r) {
          Element element{};
          if (row_exists && place.key0 + s.row(r) < bias.keys) element = row[8 * r];
          float& score = s(r, c + i);
          if constexpr (std::is_same_v<Element, bool>) {
            score = element ? score : -INFINITY;
          } else {
            score += static_cast<float>(element);
          }
          score = relative_score(score, i == 0 ? of_rows.x : of_rows.y);
        }
        row += (i == 0 ? 1 : 7) * bias.rows.seqlen;
      }
    }
  });
}

// The same from products, with the bias in registers.
template <typename T, int kRows, int kCols, typename Lse>
__device__ void scale_and_add(Fragment<kRows, kCols>& s, float scale, const PackedFragment<T, kRows, kCols>& bias,
                              Lse&& lse) {
#pragma unroll
  for (int c = 0; c < s.kLaneCols; c += 2) {
    const float2 of_rows = lse(c);
#pragma unroll
    for (int r = 0; r < s.kLaneRows; ++r) {
      const float2 pair = ptx::unpack<T>(bias.pair(r, c / 2));
      s(r, c) = relative_score(s(r, c) * scale + pair.x, of_rows.x);
      s(r, c + 1) = relative_score(s(r, c + 1) * scale + pair.y, of_rows.y);
    }
  }
}

// Turns scores, already capped if there is a softcap, into P^T. hide() sets those of keys that a row does not see to
// -inf. Of columns c and c + 1 of the lane, lse_log2(c) is log2(e) lse or, with a bias, log2(e) times its rounding
// error; and lse(c), with a bias, is lse, which is taken off the scores when the bias is added.
template <typename T, Features kFeatures, int kRows, int kCols, typename Hide, typename LseLog2, typename Lse>
__device__ void make_probabilities(Fragment<kRows, kCols>& s, const Problem& p, const Mask& mask,
                                   const ScorePlace& place, Hide&& hide, LseLog2&& lse_log2, Lse&& lse) {
  if (kFeatures == Features::kAll && p.alibi_slopes != nullptr) {
    const float slope = alibi_slope(p, place.entry, place.head);
    float slopes[s.kLaneRows];
    int own_rows[s.kLaneRows];
#pragma unroll
    for (int r = 0; r < s.kLaneRows; ++r) {
      slopes[r] = slope;
      own_rows[r] = place.key0 + s.row(r) - mask.diagonal();
    }
    subtract_distance(s, slopes, own_rows, place.row0);
  }
  if (kFeatures == Features::kAll && p.bias.data != nullptr) add_bias<T>(s, p.bias, mask, place, lse);
  hide();
  const float scale_log2 = score_scale_log2<kFeatures>(p);
#pragma unroll
  for (int c = 0; c < s.kLaneCols; c += 2) {
    const float2 of_rows = lse_log2(c);
#pragma unroll
    for (int r = 0; r < s.kLaneRows; ++r) {
      s(r, c) = ptx::exp2(s(r, c) * scale_log2 - of_rows.x);
      s(r, c + 1) = ptx::exp2(s(r, c + 1) * scale_log2 - of_rows.y);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// For kernels that pass P^T through shared memory, rounded, as weights P dscore/dS: negative where dropout drops

// Negates dropped elements: the sign carries the keep mask, and the magnitude is still needed for dS.
template <int kRows, int kCols>
__device__ void negate_dropped(Fragment<kRows, kCols>& s, const Problem& p, const ScorePlace& place) {
  if (p.rng_state == nullptr) return;
  Dropout(p, place.entry, place.head).for_each_dropped_transposed(s, place.key0, place.row0, [&](int r, int c) {
    s(r, c) = -s(r, c);
  });
}

// Multiplies two pairs of packed numbers.
template <typename T>
__device__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const float2 x = ptx::unpack<T>(a), y = ptx::unpack<T>(b);
  return ptx::pack<T>(x.x * y.x, x.y * y.y);
}

// Turns an element of dP^T into dS^T. Of a dropped one, which has a negative weight, only -P softmax_d is left.
template <Features kFeatures>
__device__ void apply_weight(float& dp, float weight, float softmax_d, const Problem& p) {
  if constexpr (kFeatures == Features::kAll) {
    dp = weight * (signbit(weight) ? softmax_d : dp * p.dropout_rescale - softmax_d);
  } else {
    dp = weight * (dp - softmax_d);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// For kernels that have P^T and dP^T in registers at once

// Which elements of a fragment of 16 rows a lane drops.
struct Dropped {
  uint32_t bits[2] = {};
  __device__ bool has(int r, int c) const { return bits[r] >> c & 1; }
};

// Draws the random bits: finds which elements are dropped.
template <Features kFeatures, int kCols>
__device__ Dropped dropped_of(const Fragment<16, kCols>& s, const Problem& p, const ScorePlace& place) {
  Dropped dropped;
  if (kHasPlainScores<kFeatures> || p.rng_state == nullptr) return dropped;
  Dropout(p, place.entry, place.head).for_each_dropped_transposed(s, place.key0, place.row0, [&](int r, int c) {
    dropped.bits[r] |= 1u << c;
  });
  return dropped;
}

// Applies dropout to dP^T and subtracts softmax_d. softmax_d(c): of columns c and c + 1 of the lane.
template <Features kFeatures, int kCols, typename SoftmaxD>
__device__ void subtract_softmax_d(Fragment<16, kCols>& dp, const Dropped& dropped, const Problem& p,
                                   SoftmaxD&& softmax_d) {
#pragma unroll
  for (int c = 0; c < dp.kLaneCols; c += 2) {
    const float2 subtracted = softmax_d(c);
#pragma unroll
    for (int r = 0; r < dp.kLaneRows; ++r) {
      if constexpr (kFeatures == Features::kAll) {
        dp(r, c) = dropped.has(r, c) ? 0 : dp(r, c) * p.dropout_rescale;
        dp(r, c + 1) = dropped.has(r, c + 1) ? 0 : dp(r, c + 1) * p.dropout_rescale;
      }
      dp(r, c) -= subtracted.x;
      dp(r, c + 1) -= subtracted.y;
    }
  }
}

}  // namespace flash::flash_attn
