// The gradient of a sink, which acts as one more key with score sink_h and value 0:
//
//   dsink_h = - sum over the rows i of head h of exp(sink_h - lse_i) softmax_d_i
//
// lse includes the sink. The rows of all entries are numbered one after the other and divided into chunks, which do not
// depend on the GPU: one thread block sums a chunk of a head, and another one adds up the chunks of the head, each
// always in the same order. So the result is deterministic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

constexpr int kSinkThreads = 1024;
static_assert(kSinkChunk % kSinkThreads == 0);

// The sum of x over the threads of the block, in thread 0.
__device__ inline float sum_of_block(float x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  __shared__ float sums[kSinkThreads / 32];
  if (lane_id() == 0) sums[warp_id()] = x;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  for (int warp = 1; warp < kSinkThreads / 32; ++warp) x += sums[warp];
  return x;
}

// The term of one row in the sum dsink. `row` counts the rows of all entries; packed tokens after the last entry add
// nothing.
__device__ inline float sink_gradient_of_row(const SinkParams& p, float sink, int head, int64_t row) {
  const Problem& problem = p.bwd.problem;
  const bool packed = problem.cu_seqlens_q != nullptr;
  if (packed && (problem.batch == 0 || row >= __ldg(problem.cu_seqlens_q + problem.batch))) return 0;
  const auto start_of = [&](int entry) { return int64_t{__ldg(problem.cu_seqlens_q + entry)}; };
  const int entry = packed ? last_entry_from(problem.batch, row, start_of) : static_cast<int>(row / problem.seqlen_q);
  const Span q = query_span(problem, entry);
  const int own = static_cast<int>(packed ? row - q.first : row % problem.seqlen_q);
  const float lse = row_values(p.bwd.softmax_lse, problem, q, head)[own];
  const float lse_lo = p.bwd.lse_lo == nullptr ? 0 : row_values(p.bwd.lse_lo, problem, q, head)[own];
  const float softmax_d = softmax_d_of(p.bwd, q, entry, head)[own];
  return lse == INFINITY ? 0 : -expf((sink - lse) - lse_lo) * softmax_d;
}

template <typename T>
__global__ __launch_bounds__(kSinkThreads) void sink_gradient_kernel(const __grid_constant__ SinkParams p) {
  const Problem& problem = p.bwd.problem;
  const int head = blockIdx.x, chunk = blockIdx.y;
  const float sink = static_cast<float>(static_cast<const T*>(problem.sink)[head]);
  const int64_t first = int64_t{chunk} * kSinkChunk;
  float sum = 0;
#pragma unroll
  for (int i = threadIdx.x; i < kSinkChunk; i += kSinkThreads) {
    if (first + i < p.rows) sum += sink_gradient_of_row(p, sink, head, first + i);
  }
  sum = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  if (p.chunks == 1) {
    static_cast<T*>(p.dsink)[head] = T(sum);
  } else {
    p.partial[int64_t{head} * p.chunks + chunk] = sum;
  }
}

template <typename T>
__global__ __launch_bounds__(kSinkThreads) void sum_sink_chunks_kernel(const __grid_constant__ SinkParams p) {
  const float* partial = p.partial + int64_t{blockIdx.x} * p.chunks;
  float sum = 0;
  for (int i = threadIdx.x; i < p.chunks; i += kSinkThreads) sum += partial[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) static_cast<T*>(p.dsink)[blockIdx.x] = T(sum);
}

template <typename T>
void run_sink_gradient(const SinkParams& p, cudaStream_t stream) {
  const int heads = p.bwd.problem.heads;
  launch<sink_gradient_kernel<T>>({.grid = dim3(heads, p.chunks), .block = dim3(kSinkThreads)}, p, stream);
  if (p.chunks == 1) return;
  launch<sum_sink_chunks_kernel<T>>({.grid = dim3(heads), .block = dim3(kSinkThreads)}, p, stream);
}

}  // namespace flash::flash_attn
