#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::xentropy {

// What both directions are given: logits, labels and the loss.
struct Problem {
  const void* logits;  // (rows, vocab), adjacent columns
  DType dtype;
  int64_t row_stride;  // elements from a row to the next
  int rows;
  int vocab;

  const void* labels;  // (rows), int32 or int64
  bool wide_labels;    // whether they are int64
  int64_t label_stride;
  int64_t class_start;    // the class of column 0
  int64_t total_classes;  // of all parts
  bool ignores;           // whether rows do not count whose label is ignore_index or no class
  int64_t ignore_index;

  float label_smoothing;
  float logit_scale;  // positive
  float lse_square_scale;
};

struct FwdParams {
  Problem problem;
  const float* known_lse;  // (rows), or null
  int64_t known_lse_stride;
  float* losses;    // (rows)
  float* z_losses;  // (rows)
  float* lse;       // (rows)
  bool* kept;       // (rows)
  bool partial;     // losses are this part's share
};

struct BwdParams {
  Problem problem;
  const float* dlosses;  // (rows)
  int64_t dlosses_stride;
  const float* lse;  // (rows)
  int64_t lse_stride;
  void* dlogits;  // (rows, vocab), adjacent columns; may be the logits
  int64_t dlogits_stride;
  Divisor pieces = {};  // of a row; chosen by bwd
};

}  // namespace flash::xentropy
