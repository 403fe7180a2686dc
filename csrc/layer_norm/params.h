#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace flash::layer_norm {

// Rows of adjacent elements, `stride` elements apart; data is null if there is no such matrix.
template <typename Data = void>
struct Matrix {
  Data* data;
  int64_t stride;
  DType dtype;
};

// One element for each column; data is null if there is none.
struct Vector {
  const void* data;
  DType dtype;
};

// The parameters that forward and backward share. With subsets, entry i of x0_subset names the row of x0 that is added
// to row i of h, and entry i of out_subset names the row of out that receives the result. An entry is 1 + the number of
// the row; any other value means that there is no such row. Without subsets, row i corresponds to row i everywhere.
struct Problem {
  int64_t rows;  // of h
  int64_t x0_rows;
  int64_t out_rows;
  int cols;
  bool is_rms_norm;
  bool zero_centered_weight;  // 1 is added to weight and weight1 before use

  Vector weight, bias;
  Vector weight1, bias1;
  Vector colscale;
  Vector rowscale;            // (x0_rows)
  const int32_t* x0_subset;   // (rows); null without subsets
  const int32_t* out_subset;  // (rows)
  float rowscale_const;       // factor for rows of x0 if there are subsets

  const int64_t* rng_state;  // (2): seed, offset; null if nothing is dropped, or masks are given
  uint32_t keep_threshold;   // an element is kept if its 16 random bits are below this
  float keep_scale;          // 1 / (1 - p); 1 if nothing is dropped
};

struct FwdParams {
  Problem problem;
  Matrix<const void> x0;  // (x0_rows, cols)
  Matrix<const void> x1, residual;
  Matrix<> out, out1;  // (out_rows, cols)
  Matrix<> h;          // (rows, cols)
  uint8_t* mask0;      // (x0_rows, cols), 1 where kept; may be null
  uint8_t* mask1;      // (rows, cols)
  float* mean;         // (rows)
  float* rstd;         // (rows)
  float eps;
};

struct BwdParams {
  Problem problem;
  Matrix<const void> dout, dout1;  // (out_rows, cols)
  Matrix<const void> dh;           // (rows, cols)
  Matrix<const void> h;            // as the forward stored it
  Matrix<const void> x0;           // (x0_rows, cols); only needed with colscale
  const float* mean;               // (rows)
  const float* rstd;               // (rows)
  const uint8_t* mask0;            // used in place of rng_state; may be null
  const uint8_t* mask1;
  Matrix<> dx0;                  // (x0_rows, cols); any output of this struct may be null
  Matrix<> dx1, dresidual, out;  // (rows, cols)

  // Gradients of weight, bias, weight1, bias1 and colscale, in this order; null if there is no such parameter.
  static constexpr int kParameters = 5;
  Matrix<> dparameters[kParameters];  // (1, cols)
  float* parts;                       // (max_parts, kParameters, part_cols(cols)): the sums of one thread block each
  int max_parts;
  static constexpr int64_t part_cols(int64_t cols) { return (cols + 7) / 8 * 8; }  // rounds up to whole vectors
  float* sums;  // (rows, 2): scratch for rows that are wider than a block
};

}  // namespace flash::layer_norm
