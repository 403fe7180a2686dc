#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::xentropy {

// The inputs that both directions share: logits, labels and the coefficients of the loss.
struct Problem {
  const void* logits;  // (rows, vocab), adjacent columns
  DType dtype;
  int64_t row_stride;  // elements between the starts of adjacent rows
  int rows;
  int vocab;

  const void* labels;  // (rows), int32 or int64
  bool wide_labels;    // whether they are int64
  int64_t label_stride;
  int64_t class_start;    // the class of column 0
  int64_t total_classes;  // classes in all parts of the vocabulary
  bool ignores;           // a row does not count if its label is ignore_index or names no class
  int64_t ignore_index;

  float label_smoothing;
  float logit_scale;  // positive
  float lse_square_scale;
};

struct FwdParams {
  Problem problem;
  const double* known_lse;  // (rows), computed before; null if the kernel computes it
  int64_t known_lse_stride;
  float* losses;    // (rows)
  float* z_losses;  // (rows)
  double* lse;      // (rows)
  bool* kept;       // (rows)
};

struct BwdParams {
  Problem problem;
  const float* dlosses;  // (rows)
  int64_t dlosses_stride;
  const float* expected;  // (rows); null, or what the dlosses were when dlogits were computed before
  int64_t expected_stride;
  const double* lse;  // (rows)
  int64_t lse_stride;
  void* dlogits;  // (rows, vocab), adjacent columns; may be the logits
  int64_t dlogits_stride;
  Divisor pieces = {};    // pieces per row; chosen by bwd, like the next
  int piece_columns = 0;  // columns per piece
};

// Both directions at once.
struct FwdBwdParams {
  FwdParams fwd;         // of the whole vocabulary; known_lse is null
  const float* dlosses;  // (rows)
  int64_t dlosses_stride;
  void* dlogits;  // (rows, vocab), adjacent columns; may be the logits
  int64_t dlogits_stride;
  Divisor parts = {};  // blocks that share a row; chosen by fwd_bwd, like the next
  int share = 0;       // columns per block
};

struct ScaleParams {
  void* dlogits;  // (rows, vocab), adjacent columns
  DType dtype;
  int64_t dlogits_stride;
  int rows;
  int vocab;
  const float* dlosses;  // (rows)
  int64_t dlosses_stride;
  const float* expected;  // (rows), what the dlosses were when dlogits were computed
  int64_t expected_stride;
  const bool* kept;  // (rows), whether a row counts
  int64_t kept_stride;
};

}  // namespace flash::xentropy
