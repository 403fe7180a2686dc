// Before the main kernel of the backward:
//
// - computes softmax_d, the row sums of dO * O less the gradient of lse, where O is out + out_lo if there is an out_lo;
// - zeroes dq_accum or, if the main kernel rounds dQ, dQ of rows that see no key; and the semaphores and next_work;
// - for the kernels for sm_90, stores lse and softmax_d in the padded layout of BwdScratch;
// - fills the work list, if there is one: the first thread block does only that, beside the others.
//
// kLanes threads share a row, each with kLaneChunks chunks of 8 channels, and load several rows at a time. The rows are
// those of BwdParams::softmax_d. Its padding between entries stands for no token and gets 0. Packed tokens after the
// last entry get 0, too, but do have rows in dq_accum.
#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/rows.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/bwd/work_list.cuh"
#include "flash_attn/dispatch.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {
namespace {

template <typename T_, int kHeadDim_>
struct BwdPrepareConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kChunk = 8;
  static constexpr int kLanes = kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 16 : 32;  // a power of two
  static constexpr int kLaneChunks = (kHeadDim + kChunk * kLanes - 1) / (kChunk * kLanes);
  static constexpr int kThreads = 256, kStepRows = kThreads / kLanes, kSteps = 4;
  static constexpr int kRows = kSteps * kStepRows;
  static constexpr int kBlockKeys = bwd_sm90_keys(kHeadDim);  // of n_blocks in the work list
};

// The position of row 0 of an entry among the rows of a head in softmax_d.
__device__ int64_t first_position(const Problem& p, int entry) {
  return p.cu_seqlens_q != nullptr ? __ldg(p.cu_seqlens_q + entry) + int64_t{kRowPad} * entry : 0;
}
// The entry of a row at `position`, in the `outer`-th head of all entries or, if packed, of all heads. Packed tokens
// after the last entry are entry `batch`.
__device__ int entry_of(const Problem& p, int outer, int64_t position) {
  if (p.cu_seqlens_q == nullptr) return outer / p.heads;
  return last_entry_from(p.batch + 1, position, [&](int entry) { return first_position(p, entry); });
}

// A row of softmax_d.
struct SoftmaxDRow {
  int entry, head;
  int row;         // in the entry; past its end if it is padding
  bool exists;     // whether softmax_d has such a row
  bool has_token;  // whether it is not padding: a token of an entry, or one after the last entry
  bool attends;    // whether it is a token of an entry
  Span span;       // the tokens of the entry

  __device__ SoftmaxDRow(const Problem& p, int entry, int outer, int64_t position)
      : entry(entry),
        head(outer % p.heads),
        row(position - first_position(p, entry)),
        exists(position < softmax_d_per_head(p)),
        span(query_span(p, entry)) {
    has_token = exists && row < span.length;
    attends = has_token && entry < p.batch;
  }

  __device__ float value(const float* values, const Problem& p) const { return row_values(values, p, span, head)[row]; }

  __device__ bool sees_keys(const BwdCommonParams& p) const {
    if (!attends) return false;
    const Problem& problem = p.problem;
    if (problem.ranges.data != nullptr) {
      return !p.plan.scratch.seen[seen_index(problem, p.plan.scratch, span, entry, head) + row].empty();
    }
    return !Mask(problem, Sequence(problem, entry)).keys_seen_by(row).empty();
  }
};

// Loads 8 channels of a row, from `col` on. Aligned loads have no branch, so that several can be in flight; channels
// from `cols` on then have arbitrary values.
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

// Adds a chunk to the fp32 sum.
template <typename T>
__device__ void add(float (&sum)[8], const Vec<T, 8>& vec) {
  float x[8];
  widen(x, vec);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += x[i];
}

// Returns the sum of out * dout over the channels of a row, to each of its lanes. counts(i): whether the lane's i-th
// chunk exists; if not, its values, which may be NaN, are left out.
template <int kLanes, typename T, int kChunks, typename Counts>
__device__ float row_sum(const float (&out)[kChunks][8], const Vec<T, 8> (&dout)[kChunks], Counts&& counts) {
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    float y[8];
    const float before = sum;
    widen(y, dout[chunk]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += out[chunk][i] * y[i];
    if (!counts(chunk)) sum = before;
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}

// Zeroes dq_accum of a row. Neighbouring lanes take neighbouring vectors of four floats, so that accesses fill cache
// lines.
template <typename Config>
__device__ void clear_dq_accum(const BwdCommonParams& p, const SoftmaxDRow& at, int lane) {
  using Accum = DqAccum<Config::kHeadDim>;
  constexpr int kGroup = Accum::kGroup;
#pragma unroll
  for (int i = 4 * lane; i < Config::kHeadDim; i += 4 * Config::kLanes) {
    float* group = Accum::address(p.plan.scratch.dq_accum, p.problem, at.span, at.head, at.row, i / kGroup);
    store(group + i % kGroup, Vec<float, 4>{});
  }
}

// Zeroes dQ of a row that sees no key: where the main kernel rounds dQ, it does not visit such rows.
template <typename Config>
__device__ void clear_unseen_dq(const BwdCommonParams& p, const SoftmaxDRow& at, int lane) {
  using T = typename Config::T;
  T* row = first_token<T>(p.dq, at.span, at.head) + at.row * p.dq.seqlen;
#pragma unroll
  for (int col = lane * Config::kChunk; col < Config::kHeadDim; col += Config::kLanes * Config::kChunk) {
    if (col < p.problem.head_dim && !at.sees_keys(p)) store(row + col, Vec<T, 8>{});
  }
}

// Stores what the main kernel reads of a row in the padded layout, and zeroes the semaphore that starts there.
__device__ void prepare_padded_row(const BwdCommonParams& p, const SoftmaxDRow& at, float lse, float softmax_d) {
  const BwdScratch& scratch = p.plan.scratch;
  const bool in_block = at.row < (at.span.length + kRowPad - 1) / kRowPad * kRowPad;
  if (at.entry >= p.problem.batch || !in_block) return;
  const int64_t index = padded_row_index(p.problem, scratch, at.span, at.entry, at.head) + at.row;
  if (p.plan.waits && index % kSemaphoreRows == 0) *semaphore_at(scratch, index) = 0;
  if (p.plan.lse_log2 == nullptr) return;
  const bool sees = at.sees_keys(p);
  if (p.plan.lse == nullptr) {
    p.plan.lse_log2[index] = sees ? lse * kLog2e : INFINITY;
  } else {
    p.plan.lse[index] = sees ? lse : INFINITY;
    p.plan.lse_log2[index] = sees && p.lse_lo != nullptr ? at.value(p.lse_lo, p.problem) * kLog2e : 0;
  }
  p.plan.softmax_d[index] = sees ? softmax_d : 0.f;
}

// Prepares kSteps rows, kStepRows apart, from `first` on. kExact: there is an out_lo.
template <typename Config, int kSteps, bool kAligned, bool kExact>
__device__ void prepare_rows(const BwdCommonParams& p, int outer, int64_t first) {
  using T = typename Config::T;
  const Problem& problem = p.problem;
  const int lane = threadIdx.x % Config::kLanes;
  const auto col_of = [&](int chunk) { return (chunk * Config::kLanes + lane) * Config::kChunk; };
  const auto position_of = [&](int step) { return first + step * Config::kStepRows; };
  const int own_entry = entry_of(problem, outer, position_of(lane));
  const auto row_of = [&](int step) {
    const int entry = __shfl_sync(~0u, own_entry, step, Config::kLanes);
    return SoftmaxDRow(problem, entry, outer, position_of(step));
  };
  const auto load = [&](Vec<T, 8>(&chunks)[Config::kLaneChunks], const SoftmaxDRow& at,
                        const TensorRef<const void>& x) {
    const int64_t token = min(at.span.first + at.row, int64_t{problem.seqlen_q - 1});
    const T* row = first_token<T>(x, Span{at.span.batch, token, 1}, at.head);
#pragma unroll
    for (int chunk = 0; chunk < Config::kLaneChunks; ++chunk) {
      chunks[chunk] = load_chunk<kAligned>(row, col_of(chunk), problem.head_dim_v, x.head_dim);
    }
  };

  constexpr int kChunks = Config::kLaneChunks;
  Vec<T, 8> out[kSteps][kChunks], out_lo[kSteps][kChunks], dout[kSteps][kChunks];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const SoftmaxDRow at = row_of(step);
    load(out[step], at, p.out);
    if constexpr (kExact) load(out_lo[step], at, p.out_lo);
    load(dout[step], at, p.dout);
  }
  // Lane i of the row's threads finishes the i-th of the kSteps rows.
  const SoftmaxDRow own(problem, own_entry, outer, position_of(lane));
  const bool finishes = lane < kSteps && own.exists;
  const float lse = finishes && own.attends ? own.value(p.softmax_lse, problem) : INFINITY;
  const float dlse = finishes && own.attends && p.dlse != nullptr ? own.value(p.dlse, problem) : 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const SoftmaxDRow at = row_of(step);
    if (at.has_token) p.plan.rounds_dq ? clear_unseen_dq<Config>(p, at, lane) : clear_dq_accum<Config>(p, at, lane);
  }
  float softmax_d = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool attends = row_of(step).attends;
    const auto counts = [&](int chunk) { return attends && col_of(chunk) < problem.head_dim_v; };
    float x[kChunks][8];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      widen(x[chunk], out[step][chunk]);
      if constexpr (kExact) add(x[chunk], out_lo[step][chunk]);
    }
    const float sum = row_sum<Config::kLanes>(x, dout[step], counts);
    if (lane == step) softmax_d = sum - dlse;
  }
  if (!finishes) return;
  if (lse == INFINITY) softmax_d = 0;
  p.softmax_d[outer * softmax_d_per_head(problem) + position_of(lane)] = softmax_d;
  prepare_padded_row(p, own, lse, softmax_d);
}

// Prepares all rows of a thread, kSteps at a time.
template <typename Config, int kSteps, bool kAligned, bool kExact>
__device__ void prepare_in_steps(const BwdCommonParams& p, int outer, int64_t first) {
#pragma unroll 1
  for (int step = 0; step < Config::kSteps; step += kSteps) {
    prepare_rows<Config, kSteps, kAligned, kExact>(p, outer, first + step * Config::kStepRows);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void bwd_prepare_kernel(const __grid_constant__ BwdCommonParams p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.plan.scratch.next_work = 0;
  const bool lists_work = p.plan.scratch.work_tiles != nullptr;
  if (lists_work && blockIdx.x == 0) return list_work<Config::kBlockKeys, Config::kThreads>(p);
  const int blocks_per_head = blocks_for(softmax_d_per_head(p.problem), Config::kRows);
  const int block = blockIdx.x - lists_work, outer = block / blocks_per_head;
  const int64_t first = int64_t{block % blocks_per_head} * Config::kRows + threadIdx.x / Config::kLanes;
  const bool exact = p.out_lo.data != nullptr;
  if (p.aligned && !exact) return prepare_rows<Config, Config::kSteps, true, false>(p, outer, first);
  // With out_lo, half as many rows at a time, to save registers.
  if (p.aligned) return prepare_in_steps<Config, Config::kSteps / 2, true, true>(p, outer, first);
  exact ? prepare_in_steps<Config, 1, false, true>(p, outer, first)
        : prepare_in_steps<Config, 1, false, false>(p, outer, first);
}

template <typename Config>
void launch_bwd_prepare(const BwdCommonParams& p, cudaStream_t stream) {
  const int64_t per_head = softmax_d_per_head(p.problem), sums = softmax_d_size(p.problem);
  if (sums == 0) return;
  if (p.problem.seqlen_q == 0) {  // the kernel reads some token for each row, and here there is none
    return check_cuda(cudaMemsetAsync(p.softmax_d, 0, sums * sizeof(float), stream), "cudaMemsetAsync");
  }
  const bool lists_work = p.plan.scratch.work_tiles != nullptr;
  const int64_t blocks = sums / per_head * blocks_for(per_head, Config::kRows) + lists_work;
  launch<bwd_prepare_kernel<Config>>({.grid = dim3(blocks), .block = dim3(Config::kThreads)}, p, stream);
}

}  // namespace

void run_bwd_prepare(const BwdCommonParams& p, cudaStream_t stream) {
  dispatch_problem(p.problem, [&](auto kDType, auto kHeadDim) {
    launch_bwd_prepare<BwdPrepareConfig<element_t<kDType>, kHeadDim>>(p, stream);
  });
}

}  // namespace flash::flash_attn
