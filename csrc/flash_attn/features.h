// Which features the instances of the kernels are compiled with, and which of these instances a problem needs.
#pragma once

#include <cstdint>

#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// The sets of features that kernels are compiled with. All instances have masks, lengths, packed heads and sinks, which
// cost the inner loop nothing. kAll adds softcap, ALiBi, biases that the warps load themselves, dropout, unaligned
// rows, the largest score of each row, keys in pages (decoding: in all instances), and values of another head dim than
// the keys (sm_90: in all instances).
enum class Features {
  kPlain,    // scores are scaled products; all rows can be moved in aligned chunks of 16 bytes
  kRanged,   // kPlain and key ranges; on sm_90 only
  kBiased,   // kPlain and a bias that TMA copies in tiles; on sm_90 only
  kDropped,  // kPlain and dropout, whose bits a warpgroup of its own draws; on sm_90 only
  kAll,      // everything
};

constexpr bool has_plain_scores(Features features) {
  return features == Features::kPlain || features == Features::kRanged || features == Features::kDropped;
}
constexpr bool takes_ranges(Features features) { return features == Features::kRanged || features == Features::kAll; }

// has_plain_scores for device code, which may not call host functions, not even in constant expressions.
template <Features kFeatures>
inline constexpr bool kHasPlainScores = has_plain_scores(kFeatures);

inline bool has_dropout(const Problem& p) { return p.rng_state != nullptr; }

// Whether scores are scaled products and perhaps a bias: no softcap or ALiBi.
inline bool has_plain_products(const Problem& p) { return p.softcap == 0 && p.alibi_slopes == nullptr; }

inline bool has_bias(const Problem& p) { return p.bias.data != nullptr; }
inline bool has_ranges(const Problem& p) { return p.ranges.data != nullptr; }
inline bool has_pages(const FwdParams& p) { return p.pages.block_table != nullptr; }

// The instance that takes a problem, that with the fewest features: kernels list them in this order.
template <typename Kernel, typename Params>
Features instance_for(const Params& p) {
  for (const Features instance : Kernel::kInstances) {
    if (Kernel::takes(instance, p)) return instance;
  }
  return Features::kAll;
}

// Whether rows of x can be moved in aligned chunks of 16 bytes (8 elements or, of codes, 16), and strides in chunks fit
// 32 bits.
template <typename Data>
bool is_aligned(const TensorRef<Data>& x, int head_dim, int chunk = 8) {
  const auto in_chunks = [chunk](int64_t elements) { return elements % chunk == 0 && elements >> 35 == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && in_chunks(x.batch) && in_chunks(x.seqlen) &&
         in_chunks(x.heads) && x.head_dim == 1 && in_chunks(head_dim);
}

inline bool all_aligned(const FwdParams& p) {
  const int head_dim = p.problem.head_dim, head_dim_v = p.problem.head_dim_v;
  const int chunk = p.coded ? 16 : 8;  // of keys and values
  return is_aligned(p.q, head_dim) && is_aligned(p.k, head_dim, chunk) && is_aligned(p.v, head_dim_v, chunk) &&
         is_aligned(p.out, head_dim_v);
}

// The bias as a tensor (entries, rows, heads, keys), with stride 0 where one element serves all. If entries lie in two
// dimensions that cannot be merged into one, there is no such tensor, and data is null.
inline TensorRef<const void> bias_tensor(const Problem& p) {
  const BiasRows& rows = p.bias.rows;
  const int batch2_size = static_cast<int>(rows.batch2_size.value);
  const int64_t stride = batch2_size > 1 ? rows.batch2 : rows.batch1;
  const bool in_one = batch2_size == 1 || batch2_size >= p.batch || rows.batch1 == batch2_size * rows.batch2;
  return {.data = in_one ? p.bias.data : nullptr,
          .batch = stride,
          .seqlen = rows.seqlen,
          .heads = rows.heads,
          .head_dim = 1};
}

// Whether a Kernel has an instance of kBiased for a problem, as far as head dims and key ranges go.
template <typename Kernel>
bool takes_tiled_bias(const Problem& p) {
  const HeadDims built = sm90_head_dims(p.head_dim, p.head_dim_v);
  return p.ranges.data == nullptr && built.of_keys == built.of_values && built.of_keys <= Kernel::kMostBiasedHeadDim;
}

// Whether a Kernel can have TMA copy the bias in tiles. Strides may be 0.
template <typename Kernel>
bool has_tiled_bias(const Problem& p) {
  const TensorRef<const void> bias = bias_tensor(p);
  const bool is_in_tiles =
      bias.data != nullptr && !p.bias.is_bool && p.bias.dtype == p.dtype && is_aligned(bias, /*head_dim=*/8);
  return is_in_tiles && takes_tiled_bias<Kernel>(p);
}

// The largest head dim with instances of kDropped. Beyond, random bits are a small part of the work.
constexpr int kMostDroppedHeadDim = 128;

// Whether an instance for sm_90 takes a problem whose products are plain and whose rows are aligned.
template <typename Kernel>
bool takes_plain(Features instance, const Problem& p) {
  if (has_dropout(p)) {
    const HeadDims built = sm90_head_dims(p.head_dim, p.head_dim_v);
    return instance == Features::kDropped && !has_bias(p) && !has_ranges(p) && built.of_keys <= kMostDroppedHeadDim;
  }
  if (instance == Features::kBiased) return has_bias(p) && has_tiled_bias<Kernel>(p);
  return !has_bias(p) && (instance == Features::kRanged || !has_ranges(p));
}

// Whether it could if the bias were copied to a layout that suits TMA, and no other feature forbids it. An fp32 bias
// is not copied: rounded to the queries' type, it would lose bits.
template <typename Kernel>
bool could_tile_bias(const Problem& p) {
  const bool fits = p.bias.is_bool || p.bias.dtype == p.dtype;
  return fits && bias_tensor(p).data != nullptr && has_plain_products(p) && !has_dropout(p) &&
         takes_tiled_bias<Kernel>(p);
}

inline bool all_aligned(const BwdParams& p) {
  const int head_dim = p.problem.head_dim, head_dim_v = p.problem.head_dim_v;
  return is_aligned(p.dout, head_dim_v) && is_aligned(p.q, head_dim) && is_aligned(p.k, head_dim) &&
         is_aligned(p.v, head_dim_v) && is_aligned(p.out, head_dim_v) &&
         (p.out_lo.data == nullptr || is_aligned(p.out_lo, head_dim_v)) && is_aligned(p.dq, head_dim) &&
         is_aligned(p.dk, head_dim) && is_aligned(p.dv, head_dim_v);
}

}  // namespace flash::flash_attn
