#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace flash::fused_dense {

enum class Activation { kGelu, kRelu, kSquaredRelu, kSilu };  // kGelu is the tanh form

// The operation that follows a product in the same kernel. The values are those of cublasLtEpilogue_t. Its other values
// are not used, because they are no faster than a separate kernel and often slower: a product that also sums its rows
// or columns for the gradient of a bias (BGRADB, DGELU_BGRAD), or that also computes the gradient of an activation
// (DGELU, DRELU).
enum class Epilogue : uint32_t {
  kNone = 1,
  kRelu = 2,
  kBias = 4,
  kReluBias = 6,
  kGelu = 32,
  kGeluBias = 36,
  kGeluAux = 160,  // also stores the input of gelu
  kGeluAuxBias = 164,
};

// Computes d = epilogue(op(a) op(b) + c), with sums in fp32. Matrices are stored by columns, as in BLAS: element (i, j)
// is at i + j * ld. op(a) has shape (m, k), op(b) (k, n), and c and d (m, n).
struct GemmParams {
  DType dtype;  // type of all matrices; 16 bits
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
  void* aux;         // (m, n), with the ld of d
  int choice;        // index of the algorithm that cuBLASLt proposes, best estimate first; or the nearest that exists
};

// The way in which cuBLASLt computes a product.
struct Plan {
  uint64_t algorithm[8];
  size_t workspace_bytes;
};

// A matrix of rows with `cols` adjacent elements each, `stride` elements apart.
struct Rows {
  void* data;
  int64_t stride;
};

constexpr int kFewRows = 8;

// Computes out = act(x weight^T + bias) for at most kFewRows rows. If `gated`, weight and bias have the rows of as many
// values as there are output features, and then the rows of their gates: out = act(gate) value.
struct FewRowsParams {
  DType dtype;  // type of all tensors; 16 bits
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  Rows x;
  Rows weight;
  const void* bias;  // a row each, adjacent; may be null
  Rows out;
  bool gated;
  bool activates;  // whether there is an activation; with gates there is one
  Activation activation;
};

// Computes out = the sum of the rows of x. With `kept`, x is first replaced by x * act'(kept). With several chunks, row
// i of out is the sum of chunk i.
struct SumRowsParams {
  DType dtype;  // type of x and kept; 16 bits if `kept` is given
  int64_t rows;
  int64_t cols;
  int64_t chunk_rows = 0;  // chosen by sum_rows
  Rows x;
  Rows kept;  // data is null if not given
  Activation activation;
  void* out;  // (cols)
  DType out_dtype;
};

// Computes out = act(x), or act(x) * y.
struct ActivationFwdParams {
  Activation activation;
  DType dtype;
  int64_t rows;
  int64_t cols;
  Rows x;
  Rows y;    // data is null if not given
  Rows out;  // may be x
};

// Computes dx = dout * act'(x), or with y: dx = dout * act'(x) * y and dy = dout * act(x).
struct ActivationBwdParams {
  Activation activation;
  DType dtype;
  int64_t rows;
  int64_t cols;
  Rows dout;
  Rows x;
  Rows y;   // data is null if not given
  Rows dx;  // may be dout
  Rows dy;
};

}  // namespace flash::fused_dense
