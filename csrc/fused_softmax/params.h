#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::fused_softmax {

// The rows of contiguous tensors (batch, heads, seqlen_q, cols).
struct Rows {
  int count;
  int cols;
  DType dtype;
  Divisor seqlen_q;  // rows of a head
  bool causal;       // row i of a head has columns 0 .. i
};

// A mask (batch, heads, seqlen_q, cols) and its strides in bytes, 0 where it has one entry for all.
struct Mask {
  const uint8_t* data;  // nonzero is left out; null if there is no mask
  Divisor heads;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  bool one_for_all;  // of the columns of a row, which else are adjacent
};

struct FwdParams {
  Rows rows;
  Mask mask;
  float scale;
  int lanes = 0;      // that take a row; chosen by fwd
  bool held = false;  // whether they have room for all of it; likewise
  const void* x;
  void* y;
};

struct BwdParams {
  Rows rows;
  float scale;
  int lanes = 0;      // that take a row; chosen by bwd
  bool held = false;  // whether they have room for all of it; likewise
  const void* dy;
  const void* y;
  void* dx;
};

}  // namespace flash::fused_softmax
