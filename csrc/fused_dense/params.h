#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace flash::fused_dense {

enum class Activation { kGelu, kRelu, kSquaredRelu, kSilu };  // gelu in its tanh form

// What follows a product within its kernel. The values are those of cublasLtEpilogue_t, of which the others are no
// gain: on an H200 a product that also sums its rows or columns for the gradient of a bias (BGRADB, DGELU_BGRAD) takes
// longer than the two apart, the latter up to three times as long, and so does one with the gradient of an activation
// (DGELU, DRELU) unless it happens to take as long: with 32768 rows, 1024 and 4096 features and gelu 719 us, where the
// product takes 235 us and the gradient 192 us.
enum class Epilogue : uint32_t {
  kNone = 1,
  kRelu = 2,
  kBias = 4,
  kReluBias = 6,
  kGelu = 32,
  kGeluBias = 36,
  kGeluAux = 160,  // stores what gelu is applied to
  kGeluAuxBias = 164,
};

// d = epilogue(op(a) op(b) + c) with fp32 sums. Matrices are stored by columns, as BLAS has them: element (i, j) is at
// i + j * ld. op(a) is (m, k), op(b) (k, n), c and d (m, n).
struct GemmParams {
  DType dtype;  // of all; 16 bits
  bool transposed_a;
  bool transposed_b;
  int64_t m;
  int64_t n;
  int64_t k;
  const void* a;
  const void* b;
  const void* c;  // may be null
  void* d;
  int64_t ld_a;
  int64_t ld_b;
  int64_t ld_c;
  int64_t ld_d;
  Epilogue epilogue;
  const void* bias;  // (m)
  void* aux;         // (m, n), ld as d
  int choice;        // among the algorithms that cuBLASLt proposes, the best by its estimate first; or the nearest
};

// How cuBLASLt computes a product.
struct Plan {
  uint64_t algorithm[8];
  size_t workspace_bytes;
};

// rows of cols adjacent elements each, `stride` elements apart.
struct Rows {
  void* data;
  int64_t stride;
};

constexpr int kFewRows = 8;

// out = act(x weight^T + bias) of at most kFewRows rows
struct FewRowsParams {
  DType dtype;  // of all; 16 bits
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  Rows x;
  Rows weight;
  const void* bias;  // (out_features); may be null
  Rows out;
  bool activates;  // else there is no activation
  Activation activation;
};

// out = the sum of the rows of x, or of x = x * act'(kept); or of each chunk of them, as rows of out
struct SumRowsParams {
  DType dtype;  // of x and kept; 16 bits if there is kept
  int64_t rows;
  int64_t cols;
  int64_t chunk_rows = 0;  // chosen by sum_rows
  Rows x;
  Rows kept;  // no data: there is none
  Activation activation;
  void* out;  // (cols)
  DType out_dtype;
};

// out = act(x), or act(x) * y
struct ActivationFwdParams {
  Activation activation;
  DType dtype;
  int64_t rows;
  int64_t cols;
  Rows x;
  Rows y;    // no data: there is none
  Rows out;  // may be x
};

// dx = dout * act'(x), or dout * act'(x) * y and dy = dout * act(x)
struct ActivationBwdParams {
  Activation activation;
  DType dtype;
  int64_t rows;
  int64_t cols;
  Rows dout;
  Rows x;
  Rows y;   // no data: there is none
  Rows dx;  // may be dout
  Rows dy;
};

}  // namespace flash::fused_dense
