#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "fused_dense/params.h"

namespace flash::fused_dense {

// All of it on the current device.

// How to compute p, whose pointers count by their alignment only; nothing if cuBLASLt has no kernel for it. Plans are
// kept. Throws if there is no cuBLASLt.
std::optional<Plan> plan_gemm(const GemmParams& p);

// `workspace` has the bytes that the plan asks for.
void gemm(const GemmParams& p, const Plan& plan, void* workspace, cudaStream_t stream);

// Computes p and returns true, if a kernel that is made for few rows serves it.
bool few_rows(const FewRowsParams& p, cudaStream_t stream);

// The chunks of rows that sum_rows takes apart, if there are any rows; with more than one, `partial` has a row of fp32
// sums for each.
int64_t sum_rows_chunks(int64_t rows, int64_t cols);
void sum_rows(SumRowsParams p, float* partial, int64_t chunks, cudaStream_t stream);

void activation_fwd(const ActivationFwdParams& p, cudaStream_t stream);
void activation_bwd(const ActivationBwdParams& p, cudaStream_t stream);

}  // namespace flash::fused_dense
