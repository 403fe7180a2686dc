#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::fused_softmax {

// The rows of contiguous tensors (batch, heads, seqlen_q, cols), and the order in which thread blocks take them: either
// all rows of a head and then the next head, or row i of every head of an entry and then row i + 1. With causal rows,
// the order within a head is the first row, the last, the second, the last but one, and so on, so that each SM always
// has both short and long rows.
struct Rows {
  int count;
  int cols;
  DType dtype;
  bool causal;        // row i of a head has columns 0 .. i
  bool heads_inside;  // row i of every head comes before row i + 1
  Divisor inner;      // rows of a head, or heads
  Divisor outer;      // heads, or rows of a head
};

// A mask (batch, heads, seqlen_q, cols), and its strides in bytes. The stride of a dimension is 0 where one entry
// serves all.
struct Mask {
  const uint8_t* data;  // nonzero means left out; null if there is no mask
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  bool one_for_all;  // one entry serves all columns of a row; otherwise the columns are adjacent
};

struct FwdParams {
  Rows rows;
  Mask mask;
  float scale;
  float exponent_scale = 0.f;  // factor of the scores, after the bits in `signs` are flipped in them; chosen by fwd
  uint32_t signs = 0;
  bool held = false;  // whether the lanes of a row can hold all of it; chosen by fwd
  int ahead = 0;      // a row prefetches the row that is this many rows later, 0: none; chosen by fwd
  const void* x;
  void* y;
};

struct BwdParams {
  Rows rows;
  float scale;
  bool held = false;  // as in FwdParams, but chosen by bwd
  const void* dy;
  const void* y;
  void* dx;
};

}  // namespace flash::fused_softmax
