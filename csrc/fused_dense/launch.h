#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "fused_dense/params.h"

namespace flash::fused_dense {

// All functions work on the current device.

// Returns how to compute p, or nothing if cuBLASLt has no kernel for it. Only the alignment of the pointers in p
// matters, since plans are kept. Throws if there is no cuBLASLt.
std::optional<Plan> plan_gemm(const GemmParams& p);

// Computes p by a plan. `workspace` must have the bytes that the plan asks for.
void gemm(const GemmParams& p, const Plan& plan, void* workspace, cudaStream_t stream);

// Computes p and returns true, if the kernel for few rows can do it; otherwise returns false.
bool few_rows(const FewRowsParams& p, cudaStream_t stream);

// Returns the number of chunks of rows that sum_rows sums separately; there must be at least one row. With more than
// one chunk, `partial` must have a row of fp32 sums for each.
int64_t sum_rows_chunks(int64_t rows, int64_t cols);
void sum_rows(SumRowsParams p, float* partial, int64_t chunks, cudaStream_t stream);

void activation_fwd(const ActivationFwdParams& p, cudaStream_t stream);
void activation_bwd(const ActivationBwdParams& p, cudaStream_t stream);

}  // namespace flash::fused_dense
