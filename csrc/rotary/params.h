#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"
#include "common/tensor_ref.h"

namespace flash::rotary {

// How many units a head has: pairs of vectors, see rotary.cuh. The first `turning` units are rotated. The others, up to
// `all`, are only copied; in place, there are none.
struct Units {
  uint32_t turning, all;
};

struct Params {
  int rows;                                                // heads of all tokens
  Divisor heads_of_a_token = {}, tokens_of_an_entry = {};  // set by run_apply, like units
  Units units = {};

  TensorRef<const void> x;  // (batch, seqlen, heads, head_dim); packed sequences: (1, tokens, heads, head_dim)
  TensorRef<> out;          // same shape as x; same memory and strides if in_place
  DType dtype;              // of x and out
  int seqlen;
  int heads;
  int head_dim;

  const void* cos;  // (positions, rotary_dim / 2), columns contiguous
  const void* sin;  // same shape as cos
  DType table_dtype;
  int64_t cos_stride;  // elements between the starts of adjacent rows
  int64_t sin_stride;
  int positions;
  int rotary_dim;

  const int32_t* cu_seqlens;   // (num_sequences + 1), where packed sequences start; null if x is a batch
  int num_sequences;           // number of packed sequences
  const void* seqlen_offsets;  // (batch or num_sequences), int32 or int64, added to seqlen_offset; may be null
  bool wide_offsets;           // whether they are int64
  int64_t seqlen_offset;       // position of the first token of every sequence

  bool interleaved;  // pairs are (2i, 2i + 1); otherwise (i, i + rotary_dim / 2)
  bool conjugate;    // rotate in the opposite direction
  bool in_place;
};

}  // namespace flash::rotary
