// Before the backward: delta, the row sums of dO * O, less the gradient of lse, 0 for rows that see no key, and zeros
// for the sums of dQ. For bwd_sm90.cuh also a copy of lse and delta in whole blocks of rows.
//
// kLanes threads share a row, 8 channels each. The rows are those of softmax_d; between entries it has some that stand
// for no token and get 0. So do packed tokens after the last entry, but they have sums of dQ.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/score.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_>
struct BwdPrepareConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kChunk = 8;
  static constexpr int kLanes = kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 16 : 32;  // a power of two
  static constexpr int kThreads = 256, kRows = kThreads / kLanes;
};

// A row of softmax_d, at `position` of the `outer`-th head of all entries, or of all heads of packed entries.
struct SumRow {
  int entry, head;
  int row;  // in the entry; past its end if there is no token

  __device__ SumRow(const Problem& p, int outer, int64_t position) {
    const auto start_of = [&](int entry) { return __ldg(p.cu_seqlens_q + entry) + int64_t{kRowSumsPad} * entry; };
    const bool packed = p.cu_seqlens_q != nullptr;
    entry = packed ? last_entry_from(p.batch + 1, position, start_of) : outer / p.heads;
    head = outer % p.heads;
    row = position - (packed ? start_of(entry) : 0);
  }
};

// 8 channels of a row, from `col` on, in fp32; channels from `cols` on are 0.
template <typename T>
__device__ void load_chunk(float (&chunk)[8], const T* row, int col, int cols, int64_t step, bool aligned) {
  Vec<T, 8> vec{};
  if (aligned) {
    if (col < cols) vec = load<8>(row + col);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < cols) vec[i] = row[(col + i) * step];
    }
  }
  widen(chunk, vec);
}

__device__ inline void store_row_values(const BwdParams& p, const SumRow& at, const Span& span, float sum) {
  const Problem& problem = p.problem;
  const Sequence seq(problem, at.entry);
  const bool live = Mask(problem, seq).rows_that_see(Interval{0, seq.k.length - 1}).covers({at.row, at.row});
  const int64_t index = row_value_index(p, span, at.entry, at.head) + at.row;
  p.lse_log2[index] = live ? row_values(p.softmax_lse, problem, span, at.head)[at.row] * kLog2e : INFINITY;
  p.delta[index] = live ? sum : 0.f;
  if (p.turns != nullptr && index % kRowsPerTurn == 0) *turns_of(p, index) = 0;
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void bwd_prepare_kernel(const __grid_constant__ BwdParams p) {
  using T = typename Config::T;
  const Problem& problem = p.problem;
  const int64_t per_head = row_sums_per_head(problem);
  const int blocks_per_head = blocks_for<Config::kRows>(per_head), outer = blockIdx.x / blocks_per_head;
  const int64_t position = int64_t{blockIdx.x % blocks_per_head} * Config::kRows + threadIdx.x / Config::kLanes;
  const int col = threadIdx.x % Config::kLanes * Config::kChunk;
  const SumRow at(problem, outer, position);
  const Span span = query_span(problem, at.entry);
  const bool has_token = position < per_head && at.row < span.length, attends = has_token && at.entry < problem.batch;

  float sum = 0;
  if (attends && col < Config::kHeadDim) {
    float out[8], dout[8];
    load_chunk(out, first_token<T>(p.out, span, at.head) + at.row * p.out.seqlen, col, problem.head_dim, p.out.head_dim,
               p.aligned);
    load_chunk(dout, first_token<T>(p.dout, span, at.head) + at.row * p.dout.seqlen, col, problem.head_dim,
               p.dout.head_dim, p.aligned);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += out[i] * dout[i];
  }
  for (int part = 0; part < p.num_parts && has_token && col < Config::kHeadDim; ++part) {
    float* sums = dq_sums<Config::kHeadDim>(p, span, at.head, part, at.row, col / 16) + col % 16;
    store(sums, Vec<float, 4>{});
    store(sums + 4, Vec<float, 4>{});
  }
#pragma unroll
  for (int lanes = 1; lanes < Config::kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (attends) {
    if (p.dlse != nullptr) sum -= row_values(p.dlse, problem, span, at.head)[at.row];
    if (row_values(p.softmax_lse, problem, span, at.head)[at.row] == INFINITY) sum = 0;
  }
  if (col != 0 || position >= per_head) return;
  p.softmax_d[outer * per_head + position] = sum;
  const bool in_block = at.row < (span.length + kRowSumsPad - 1) / kRowSumsPad * kRowSumsPad;
  if (p.on_sm90 && at.entry < problem.batch && in_block) store_row_values(p, at, span, sum);
}

template <typename Config>
void run_bwd_prepare(const BwdParams& p, cudaStream_t stream) {
  const int64_t per_head = row_sums_per_head(p.problem);
  const int64_t blocks = per_head == 0 ? 0 : num_row_sums(p.problem) / per_head * blocks_for<Config::kRows>(per_head);
  launch<bwd_prepare_kernel<Config>>({.grid = dim3(blocks), .block = dim3(Config::kThreads)}, p, stream);
}

}  // namespace flash::flash_attn
