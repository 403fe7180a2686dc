// The gradient of a sink, which acts as one more key with score sink_h and value 0:
//
//   dsink_h = - sum over the rows i of head h of exp(sink_h - lse_i) softmax_d_i
//
// lse includes the sink. One thread block sums a head, always in the same order, so the result is deterministic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

constexpr int kSinkThreads = 1024;

template <typename T>
__global__ __launch_bounds__(kSinkThreads) void sink_gradient_kernel(const __grid_constant__ SinkParams p) {
  const Problem& problem = p.bwd.problem;
  const int head = blockIdx.x;
  const float sink = static_cast<float>(static_cast<const T*>(problem.sink)[head]);
  const bool packed = problem.cu_seqlens_q != nullptr;
  const int tokens = packed ? (problem.batch > 0 ? __ldg(problem.cu_seqlens_q + problem.batch) : 0) : problem.seqlen_q;
  const auto start_of = [&](int entry) { return int64_t{__ldg(problem.cu_seqlens_q + entry)}; };
  float sum = 0;
  for (int batch = 0; batch < (packed ? 1 : problem.batch); ++batch) {
#pragma unroll 8  // keeps several loads in flight: with one thread block a head, little else hides their latency
    for (int token = threadIdx.x; token < tokens; token += kSinkThreads) {
      const int entry = packed ? last_entry_from(problem.batch, token, start_of) : batch;
      const Span q = query_span(problem, entry);
      const int row = token - static_cast<int>(q.first);
      const float lse = row_values(p.bwd.softmax_lse, problem, q, head)[row];
      const float softmax_d = softmax_d_of(p.bwd, q, entry, head)[row];
      sum -= lse == INFINITY ? 0 : expf(sink - lse) * softmax_d;
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  __shared__ float sums[kSinkThreads / 32];
  if (lane_id() == 0) sums[warp_id()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kSinkThreads / 32; ++warp) sum += sums[warp];
  static_cast<T*>(p.dsink)[head] = T(sum);
}

template <typename T>
void run_sink_gradient(const SinkParams& p, cudaStream_t stream) {
  launch<sink_gradient_kernel<T>>({.grid = dim3(p.bwd.problem.heads), .block = dim3(kSinkThreads)}, p, stream);
}

}  // namespace flash::flash_attn
