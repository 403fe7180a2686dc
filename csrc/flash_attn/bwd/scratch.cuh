// Where the kernels of the backward find in memory what they leave for one another.
#pragma once

#include <cstdint>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"

namespace flash::flash_attn {

// How many blocks of `size` elements hold `count` elements.
__host__ __device__ inline int blocks_for(int64_t count, int size) {
  return static_cast<int>((count + size - 1) / size);
}

// The size of the batch dimension of tensors: packed entries have none, and count as 1.
__host__ __device__ inline int64_t num_entries(const Problem& p) { return p.cu_seqlens_q != nullptr ? 1 : p.batch; }

// ---------------------------------------------------------------------------------------------------------------------
// BwdParams::softmax_d, an output, with room for kRowPad more rows after each packed entry

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
// BwdScratch::key_sums

// Key heads of all dense entries; packed entries count as one.
__host__ __device__ inline int64_t num_key_heads(const Problem& p) {
  return int64_t{p.heads_k} * (p.cu_seqlens_k != nullptr ? 1 : p.batch);
}

// fp32 sums of dK and dV: (splits of n_blocks that have several, dK or dV, keys of an n_block, kHeadDim channels).
template <int kHeadDim>
struct KeySums {
  // Where the sum of a key begins. index: of the split; key: counted from the first one of its n_block.
  static __device__ float* address(const BwdCommonPlan& plan, int64_t index, bool of_values, int key) {
    return plan.scratch.key_sums + ((2 * index + of_values) * plan.block_keys + key) * kHeadDim;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rows in the padded layout of BwdScratch

// Where row 0 of an entry is within a head. Packed entries start at multiples of kRowPad.
__device__ inline int64_t padded_start(const Problem& p, int64_t first_token, int entry) {
  constexpr int64_t kPad = kRowPad;
  return p.cu_seqlens_q != nullptr ? first_token / kPad * kPad + kPad * entry : 0;
}

// Index of row 0 of an entry, all heads counted.
__device__ inline int64_t padded_row_index(const Problem& p, const BwdScratch& scratch, const Span& q, int entry,
                                           int head) {
  const int64_t first = padded_start(p, q.first, entry);
  return (q.batch * p.heads + head) * scratch.rows_per_head + first;
}

// How many query and key heads have key ranges of their own.
__host__ __device__ inline int ranged_heads(const Problem& p) { return p.ranges.heads == 0 ? 1 : p.heads; }
__host__ __device__ inline int ranged_key_heads(const Problem& p) { return p.ranges.heads == 0 ? 1 : p.heads_k; }

// Index of row 0 of an entry in BwdScratch::seen. Divided by the rows of a tile, it is an index into
// KeyRanges::of_tiles.
__device__ inline int64_t seen_index(const Problem& p, const BwdScratch& scratch, const Span& q, int entry, int head) {
  const int own_head = p.ranges.heads == 0 ? 0 : head;
  return (q.batch * ranged_heads(p) + own_head) * scratch.rows_per_head + padded_start(p, q.first, entry);
}

// The first semaphore of the m_block that starts at a padded index. An m_block of 64 rows or more also owns the next
// one.
__device__ inline int* semaphore_at(const BwdScratch& scratch, int64_t padded_index) {
  return scratch.semaphores + padded_index / kSemaphoreRows;
}

}  // namespace flash::flash_attn
