// How the three kernels of the backward find what they leave for one another.
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"

namespace flash::flash_attn {

// Blocks of kSize that hold `count` of something.
template <int kSize>
__host__ __device__ int blocks_for(int64_t count) {
  return static_cast<int>((count + kSize - 1) / kSize);
}

// Batch entries as tensors have them: packed ones are one.
__host__ __device__ inline int64_t num_entries(const Problem& p) { return p.cu_seqlens_q != nullptr ? 1 : p.batch; }

__host__ __device__ inline int64_t row_sums_per_head(const Problem& p) {
  if (p.cu_seqlens_q != nullptr) return p.seqlen_q + int64_t{kRowSumsPad} * p.batch;
  return (int64_t{p.seqlen_q} + kRowSumsPad - 1) / kRowSumsPad * kRowSumsPad;
}

__host__ __device__ inline int64_t num_row_sums(const Problem& p) {
  return num_entries(p) * p.heads * row_sums_per_head(p);
}

// Address of row 0 of an entry in softmax_d.
__device__ inline float* row_sums(const BwdParams& p, const Span& q, int entry, int head) {
  const int64_t first = p.problem.cu_seqlens_q != nullptr ? q.first + int64_t{kRowSumsPad} * entry : 0;
  return p.softmax_d + (q.batch * p.problem.heads + head) * row_sums_per_head(p.problem) + first;
}

// Where row 0 of an entry stands among the rows_per_head of a head: packed entries start at whole blocks.
__device__ inline int64_t padded_first(const BwdParams& p, const Span& q, int entry) {
  constexpr int64_t kPad = kRowSumsPad;
  return p.problem.cu_seqlens_q != nullptr ? q.first / kPad * kPad + kPad * entry : 0;
}

// Index of row 0 of an entry in lse_log2 and delta.
__device__ inline int64_t row_value_index(const BwdParams& p, const Span& q, int entry, int head) {
  return (q.batch * p.problem.heads + head) * p.rows_per_head + padded_first(p, q, entry);
}

// Two of BwdParams::turns for each block of 64 rows; `index` is that of a row in lse_log2.
__device__ inline int* turns_of(const BwdParams& p, int64_t index) { return p.turns + index / kRowsPerTurn; }

// The sums of dQ: 16 channels of kDqRowsTogether rows lie together, for rows of all heads and entries in their order. A
// warp adds to 16 channels of 8 rows at a time, which is faster in whole cache lines; bwd_sm90.cuh adds boxes. The
// channels of a row are in the order in which the lanes of a quad hold them: channel 8 x + 2 t + z at 4 t + 2 x + z.
template <int kHeadDim>
constexpr int kDqRowsTogether = kHeadDim > 128 ? 8 : 1;
template <int kHeadDim>
constexpr int kDqGroupStep = 16 * kDqRowsTogether<kHeadDim>;  // from one group of 16 channels to the next

// Address of a group of channels of a row of an entry.
template <int kHeadDim>
__device__ float* dq_sums(const BwdParams& p, const Span& q, int head, int row, int group) {
  constexpr int kRows = kDqRowsTogether<kHeadDim>;
  const int64_t index = row_index(p.problem, q, head) + row;
  return p.dq_sums + index / kRows * kRows * kHeadDim + group * kDqGroupStep<kHeadDim> + index % kRows * 16;
}

}  // namespace flash::flash_attn
