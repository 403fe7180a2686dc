// The options of the attention ops, and how each is parsed from a call: its fields are read in the order of the schema.
#pragma once

#include <cstdint>
#include <optional>

#include "binding/boxed.h"
#include "binding/tensor.h"

namespace flash::binding::attention {

using OptionalTensor = std::optional<Tensor>;

// The arguments of fwd, probabilities and bwd besides queries, keys and values: the fields of Options in
// flash_attn/_reference/attention/options.py, which says what they are.
struct Options {
  double softmax_scale;
  int64_t window_left;
  int64_t window_right;
  OptionalTensor cu_seqlens_q;
  OptionalTensor cu_seqlens_k;
  std::optional<int64_t> max_seqlen_q;
  std::optional<int64_t> max_seqlen_k;
  OptionalTensor block_table;
  OptionalTensor seqused_k;
  int64_t num_splits;
  bool deterministic;
  bool exact_gradients;
  double dropout_p;
  OptionalTensor rng_state;
  double softcap;
  OptionalTensor alibi_slopes;
  OptionalTensor leftpad_k;
};

inline void parse(Arguments& from, Options& options) {
  from.read(options.softmax_scale);
  from.read(options.window_left);
  from.read(options.window_right);
  from.read(options.cu_seqlens_q);
  from.read(options.cu_seqlens_k);
  from.read(options.max_seqlen_q);
  from.read(options.max_seqlen_k);
  from.read(options.block_table);
  from.read(options.seqused_k);
  from.read(options.num_splits);
  from.read(options.deterministic);
  from.read(options.exact_gradients);
  from.read(options.dropout_p);
  from.read(options.rng_state);
  from.read(options.softcap);
  from.read(options.alibi_slopes);
  from.read(options.leftpad_k);
}

// Likewise the arguments of fwd_kvcache besides queries and caches: the fields of CacheOptions there.
struct CacheOptions {
  double softmax_scale;
  int64_t window_left;
  int64_t window_right;
  OptionalTensor cache_seqlens;
  OptionalTensor block_table;
  OptionalTensor cu_seqlens_q;
  std::optional<int64_t> max_seqlen_q;
  int64_t num_splits;
  OptionalTensor k;
  OptionalTensor v;
  OptionalTensor rotary_cos;
  OptionalTensor rotary_sin;
  bool rotary_interleaved;
  std::optional<int64_t> cache_seqlen;
  double softcap;
  OptionalTensor alibi_slopes;
  OptionalTensor cache_batch_idx;
  OptionalTensor cache_leftpad;
};

inline void parse(Arguments& from, CacheOptions& options) {
  from.read(options.softmax_scale);
  from.read(options.window_left);
  from.read(options.window_right);
  from.read(options.cache_seqlens);
  from.read(options.block_table);
  from.read(options.cu_seqlens_q);
  from.read(options.max_seqlen_q);
  from.read(options.num_splits);
  from.read(options.k);
  from.read(options.v);
  from.read(options.rotary_cos);
  from.read(options.rotary_sin);
  from.read(options.rotary_interleaved);
  from.read(options.cache_seqlen);
  from.read(options.softcap);
  from.read(options.alibi_slopes);
  from.read(options.cache_batch_idx);
  from.read(options.cache_leftpad);
}

// The scales of keys and values that are codes.
struct Descales {
  OptionalTensor k_descale;
  OptionalTensor v_descale;
};

inline void parse(Arguments& from, Descales& descales) {
  from.read(descales.k_descale);
  from.read(descales.v_descale);
}

// Likewise the further arguments of fwd_features and fwd_kvcache_features, except the sink and the bias, which come
// before the options.
struct Features {
  OptionalTensor key_ranges;
  int64_t attention_chunk;
  OptionalTensor causal;
  OptionalTensor seqused_q;
  bool row_max;
  Descales descales;
};

inline void parse(Arguments& from, Features& features) {
  from.read(features.key_ranges);
  from.read(features.attention_chunk);
  from.read(features.causal);
  from.read(features.seqused_q);
  from.read(features.row_max);
  parse(from, features.descales);
}

}  // namespace flash::binding::attention
