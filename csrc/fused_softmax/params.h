#pragma once

#include <cstdint>

#include "common/divmod.h"
#include "common/dtype.h"

namespace flash::fused_softmax {

// The rows of contiguous tensors (batch, heads, seqlen_q, cols), and the order in which they are taken: an entry's
// heads one after the other, or row i of each of its heads before row i + 1. Where rows are causal, the first row of a
// head is followed by its last, then by the second: of short and long ones, each multiprocessor has some at any time.
struct Rows {
  int count;
  int cols;
  DType dtype;
  bool causal;        // row i of a head has columns 0 .. i
  bool heads_inside;  // the second order
  Divisor inner;      // rows of a head, or heads
  Divisor outer;      // heads, or rows of a head
};

// A mask (batch, heads, seqlen_q, cols) and its strides in bytes, 0 where it has one entry for all.
struct Mask {
  const uint8_t* data;  // nonzero is left out; null if there is no mask
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  bool one_for_all;  // of the columns of a row, which else are adjacent
};

struct FwdParams {
  Rows rows;
  Mask mask;
  float scale;
  float exponent_scale = 0.f;  // of the scores, whose signs are changed where bits are set in `signs`; chosen by fwd
  uint32_t signs = 0;
  bool held = false;  // whether the lanes of a row have room for all of it; likewise
  int ahead = 0;      // how many rows after a row comes the one that is then brought into the cache; likewise; 0: none
  const void* x;
  void* y;
};

struct BwdParams {
  Rows rows;
  float scale;
  bool held = false;  // as in FwdParams; chosen by bwd
  const void* dy;
  const void* y;
  void* dx;
};

}  // namespace flash::fused_softmax
