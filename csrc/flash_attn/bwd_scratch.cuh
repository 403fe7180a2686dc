// How the three kernels of the backward find what they leave for one another.
#pragma once

#include <cstdint>

#include "flash_attn/bwd_plan.h"
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

// ---------------------------------------------------------------------------------------------------------------------
// BwdParams::softmax_d, which the caller sees

__host__ __device__ inline int64_t softmax_d_per_head(const Problem& p) {
  if (p.cu_seqlens_q != nullptr) return p.seqlen_q + int64_t{kRowPad} * p.batch;
  return (int64_t{p.seqlen_q} + kRowPad - 1) / kRowPad * kRowPad;
}

__host__ __device__ inline int64_t softmax_d_size(const Problem& p) {
  return num_entries(p) * p.heads * softmax_d_per_head(p);
}

// Address of row 0 of an entry.
__device__ inline float* softmax_d_of(const BwdParams& p, const Span& q, int entry, int head) {
  const int64_t first = p.problem.cu_seqlens_q != nullptr ? q.first + int64_t{kRowPad} * entry : 0;
  return p.softmax_d + (q.batch * p.problem.heads + head) * softmax_d_per_head(p.problem) + first;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows in whole blocks, as BwdScratch has them

// Index of row 0 of an entry. Packed entries start at whole blocks of kRowPad.
__device__ inline int64_t padded_row_index(const Problem& p, const BwdScratch& scratch, const Span& q, int entry,
                                           int head) {
  constexpr int64_t kPad = kRowPad;
  const int64_t first = p.cu_seqlens_q != nullptr ? q.first / kPad * kPad + kPad * entry : 0;
  return (q.batch * p.heads + head) * scratch.rows_per_head + first;
}

// The first semaphore of a block of rows that starts at an index; a block of 64 rows or more has a second one beside
// it.
__device__ inline int* semaphore_at(const BwdScratch& scratch, int64_t padded_index) {
  return scratch.semaphores + padded_index / kSemaphoreRows;
}

}  // namespace flash::flash_attn
