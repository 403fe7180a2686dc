// Before the backward: delta, the row sums of dO * O, less the gradient of lse, 0 for rows that see no key, and zeros
// for the sums of dQ, or for dQ of such rows. For bwd_sm90.cuh also a copy of lse and delta in whole blocks of rows.
//
// kLanes threads share a row, 8 channels each, and have kSteps rows on the way at a time. The rows are those of
// softmax_d; between entries it has some that stand for no token and get 0. So do packed tokens after the last entry,
// but they have sums of dQ.
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
  static constexpr int kThreads = 256, kStepRows = kThreads / kLanes, kSteps = 4;
  static constexpr int kRows = kSteps * kStepRows;
};

// The entry of a row of softmax_d, at `position` of the `outer`-th head of all entries, or of all heads of packed
// entries. Of those, one more stands for the tokens after the last.
__device__ inline int64_t first_sum(const Problem& p, int entry) {
  return p.cu_seqlens_q != nullptr ? __ldg(p.cu_seqlens_q + entry) + int64_t{kRowSumsPad} * entry : 0;
}
__device__ inline int entry_of(const Problem& p, int outer, int64_t position) {
  if (p.cu_seqlens_q == nullptr) return outer / p.heads;
  return last_entry_from(p.batch + 1, position, [&](int entry) { return first_sum(p, entry); });
}

struct SumRow {
  int entry, head;
  int row;         // in the entry; past its end if there is no token
  bool exists;     // in softmax_d
  bool has_token;  // perhaps one after the last entry
  bool attends;    // an entry's
  Span span;       // of the entry

  __device__ SumRow(const Problem& p, int entry, int outer, int64_t position)
      : entry(entry),
        head(outer % p.heads),
        row(position - first_sum(p, entry)),
        exists(position < row_sums_per_head(p)),
        span(query_span(p, entry)) {
    has_token = exists && row < span.length;
    attends = has_token && entry < p.batch;
  }

  __device__ float value(const float* values, const Problem& p) const { return row_values(values, p, span, head)[row]; }

  __device__ bool sees_keys(const Problem& p) const {
    return attends && !Mask(p, Sequence(p, entry)).keys_seen_by(row).empty();
  }
};

// 8 channels of a row, from `col` on. Aligned ones are loaded without a branch, which would wait for each of them: if
// they do not exist, they are anything.
template <bool kAligned, typename T>
__device__ Vec<T, 8> load_chunk(const T* row, int col, int cols, int64_t step) {
  if constexpr (kAligned) return load<8>(row + (col < cols ? col : 0));
  Vec<T, 8> chunk{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < cols) chunk[i] = row[(col + i) * step];
  }
  return chunk;
}

// What the lanes of a row have of its sum, in each of them.
template <int kLanes, typename T>
__device__ float row_sum(const Vec<T, 8>& out, const Vec<T, 8>& dout, bool counts) {
  float x[8], y[8], sum = 0;
  widen(x, out);
  widen(y, dout);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  if (!counts) sum = 0;
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}

// Zeros for the sums of dQ of a row: four floats of a lane beside those of the next, so that an access fills lines. Or,
// if the sums need none, for dQ of a row that sees no key.
template <typename Config>
__device__ void clear_dq(const BwdParams& p, const SumRow& at, int lane) {
  using T = typename Config::T;
  if (p.rounds_dq) {
    const int col = lane * Config::kChunk;
    T* row = first_token<T>(p.dq, at.span, at.head) + at.row * p.dq.seqlen;
    if (col < p.problem.head_dim && !at.sees_keys(p.problem)) store(row + col, Vec<T, 8>{});
    return;
  }
#pragma unroll
  for (int i = 4 * lane; i < Config::kHeadDim; i += 4 * Config::kLanes) {
    store(dq_sums<Config::kHeadDim>(p, at.span, at.head, at.row, i / 16) + i % 16, Vec<float, 4>{});
  }
}

__device__ inline void store_row_values(const BwdParams& p, const SumRow& at, float lse, float delta) {
  const int64_t index = row_value_index(p, at.span, at.entry, at.head) + at.row;
  if (p.turns != nullptr && index % kRowsPerTurn == 0) *turns_of(p, index) = 0;
  if (!p.on_sm90) return;
  const bool sees = at.sees_keys(p.problem);
  p.lse_log2[index] = sees ? lse * kLog2e : INFINITY;
  p.delta[index] = sees ? delta : 0.f;
}

// kSteps rows of a lane, from `first` on.
template <typename Config, int kSteps, bool kAligned>
__device__ void prepare_rows(const BwdParams& p, int outer, int64_t first) {
  using T = typename Config::T;
  const Problem& problem = p.problem;
  const int lane = threadIdx.x % Config::kLanes, col = lane * Config::kChunk;
  const auto position_of = [&](int step) { return first + step * Config::kStepRows; };
  const int own_entry = entry_of(problem, outer, position_of(lane));
  const auto row_of = [&](int step) {
    const int entry = __shfl_sync(~0u, own_entry, step, Config::kLanes);
    return SumRow(problem, entry, outer, position_of(step));
  };
  const auto load = [&](const SumRow& at, const TensorRef<const void>& x) {
    const int64_t token = min(at.span.first + at.row, int64_t{problem.seqlen_q - 1});
    const T* row = first_token<T>(x, Span{at.span.batch, token, 1}, at.head);
    return load_chunk<kAligned>(row, col, problem.head_dim, x.head_dim);
  };

  Vec<T, 8> out[kSteps], dout[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const SumRow at = row_of(step);
    out[step] = load(at, p.out);
    dout[step] = load(at, p.dout);
  }
  // Each of the first lanes finishes one of the rows.
  const SumRow own(problem, own_entry, outer, position_of(lane));
  const bool finishes = lane < kSteps && own.exists;
  const float lse = finishes && own.attends ? own.value(p.softmax_lse, problem) : INFINITY;
  const float dlse = finishes && own.attends && p.dlse != nullptr ? own.value(p.dlse, problem) : 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const SumRow at = row_of(step);
    if (at.has_token) clear_dq<Config>(p, at, lane);
  }
  float delta = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool counts = row_of(step).attends && col < problem.head_dim;
    const float sum = row_sum<Config::kLanes>(out[step], dout[step], counts);
    if (lane == step) delta = sum - dlse;
  }
  if (!finishes) return;
  if (lse == INFINITY) delta = 0;
  p.softmax_d[outer * row_sums_per_head(problem) + position_of(lane)] = delta;
  const bool in_block = own.row < (own.span.length + kRowSumsPad - 1) / kRowSumsPad * kRowSumsPad;
  if (own.entry < problem.batch && in_block) store_row_values(p, own, lse, delta);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void bwd_prepare_kernel(const __grid_constant__ BwdParams p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.taken = 0;
  const int blocks_per_head = blocks_for<Config::kRows>(row_sums_per_head(p.problem));
  const int outer = blockIdx.x / blocks_per_head;
  const int64_t first = int64_t{blockIdx.x % blocks_per_head} * Config::kRows + threadIdx.x / Config::kLanes;
  if (p.aligned) return prepare_rows<Config, Config::kSteps, true>(p, outer, first);
#pragma unroll 1
  for (int step = 0; step < Config::kSteps; ++step) {
    prepare_rows<Config, 1, false>(p, outer, first + step * Config::kStepRows);
  }
}

template <typename Config>
void run_bwd_prepare(const BwdParams& p, cudaStream_t stream) {
  const int64_t per_head = row_sums_per_head(p.problem), sums = num_row_sums(p.problem);
  if (sums == 0) return;
  if (p.problem.seqlen_q == 0) {  // the kernel reads a token for each row, be it another's; here there is none
    return check_cuda(cudaMemsetAsync(p.softmax_d, 0, sums * sizeof(float), stream), "cudaMemsetAsync");
  }
  const int64_t blocks = sums / per_head * blocks_for<Config::kRows>(per_head);
  launch<bwd_prepare_kernel<Config>>({.grid = dim3(blocks), .block = dim3(Config::kThreads)}, p, stream);
}

}  // namespace flash::flash_attn
