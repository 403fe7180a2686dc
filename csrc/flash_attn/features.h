#pragma once

#include <cstdint>

#include "flash_attn/params.h"

namespace flash::flash_attn {

// The sets of features that kernels are compiled with. All have masks, lengths, packed heads and sinks, which cost the
// inner loop nothing.
enum class Features {
  kPlain,   // scores are scaled products; elements lie in aligned chunks of 16 bytes
  kRanged,  // also key ranges; on sm_90 only
  kAll,  // also softcap, ALiBi, biases, dropout, unaligned rows, the largest score of each row, keys in pages (as the
         // others have in decoding, too), values of another head dim than the keys (as the others have on sm_90, too)
};

constexpr bool has_plain_scores(Features features) { return features != Features::kAll; }
constexpr bool takes_ranges(Features features) { return features != Features::kPlain; }

// The first for code on the device, which calls no functions of the host, not even in constants.
template <Features kFeatures>
inline constexpr bool kHasPlainScores = has_plain_scores(kFeatures);

inline bool has_plain_scores(const Problem& p) {
  return p.softcap == 0 && p.alibi_slopes == nullptr && p.bias.data == nullptr && p.rng_state == nullptr;
}

// Whether rows of x can be moved in aligned chunks of 16 bytes, and 32 bits hold the distance of rows in chunks.
template <typename Data>
bool is_aligned(const TensorRef<Data>& x, int head_dim) {
  const auto in_chunks = [](int64_t elements) { return elements % 8 == 0 && elements >> 35 == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && in_chunks(x.batch) && in_chunks(x.seqlen) &&
         in_chunks(x.heads) && x.head_dim == 1 && in_chunks(head_dim);
}

inline bool all_aligned(const FwdParams& p) {
  const int head_dim = p.problem.head_dim, head_dim_v = p.problem.head_dim_v;
  return is_aligned(p.q, head_dim) && is_aligned(p.k, head_dim) && is_aligned(p.v, head_dim_v) &&
         is_aligned(p.out, head_dim_v);
}

// Whether instances with less than all features know where values end, in the kernels of a Plan.
template <typename Plan>
bool fits_values(const Problem& p) {
  return Plan::kPlainHasHeadDimV || p.head_dim_v == p.head_dim;
}

// The features of a problem, `plain` if it needs nothing but key ranges, in the kernels of a Plan.
template <typename Plan>
Features features_of(const Problem& p, bool plain) {
  if (plain && p.ranges.data == nullptr) return Features::kPlain;
  return plain && Plan::kHasRanged ? Features::kRanged : Features::kAll;
}

template <typename Plan>
Features features_of(const FwdParams& p) {
  const bool finds_keys = Plan::kPlainFindsPages || p.pages.block_table == nullptr;
  const bool plain =
      has_plain_scores(p.problem) && p.aligned && p.row_max == nullptr && finds_keys && fits_values<Plan>(p.problem);
  return features_of<Plan>(p.problem, plain);
}

inline bool all_aligned(const BwdParams& p) {
  const int head_dim = p.problem.head_dim, head_dim_v = p.problem.head_dim_v;
  return is_aligned(p.dout, head_dim_v) && is_aligned(p.q, head_dim) && is_aligned(p.k, head_dim) &&
         is_aligned(p.v, head_dim_v) && is_aligned(p.out, head_dim_v) &&
         (p.out_lo.data == nullptr || is_aligned(p.out_lo, head_dim_v)) && is_aligned(p.dq, head_dim) &&
         is_aligned(p.dk, head_dim) && is_aligned(p.dv, head_dim_v);
}

template <typename Plan>
Features features_of(const BwdParams& p) {
  return features_of<Plan>(p.problem, has_plain_scores(p.problem) && p.aligned && fits_values<Plan>(p.problem));
}

}  // namespace flash::flash_attn
