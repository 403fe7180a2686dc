// The launch functions of all kernel instances. Each instance is compiled by itself, from a file that instances.py
// writes. The functions are weak, so that a development build may leave some out: their addresses are then null.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_attn/bwd/plan.h"
#include "flash_attn/dbias_sm80/plan.h"
#include "flash_attn/features.h"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

template <typename T, int kHeadDim, Features kFeatures>
[[gnu::weak]] void run_fwd(const FwdSm80Params& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures, bool kWide, int kHeadDimV = kHeadDim>
[[gnu::weak]] void run_fwd_sm90(const FwdSm90Params& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
[[gnu::weak]] void run_fwd_paired(const FwdSm90Params& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures, bool kFewRows, int kHeadDimV = kHeadDim>
[[gnu::weak]] void run_fwd_serving(const ServingParams& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures, bool kFewRows>
[[gnu::weak]] void run_fwd_serving_coded(const ServingParams& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
[[gnu::weak]] void run_fwd_invariant(const FwdSm90Params& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures>
[[gnu::weak]] void run_decode(const DecodeParams& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures>
[[gnu::weak]] void run_decode_coded(const DecodeParams& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures>
[[gnu::weak]] void run_bwd(const BwdSm80Params& p, cudaStream_t stream);

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV = kHeadDim>
[[gnu::weak]] void run_bwd_sm90(const BwdSm90Params& p, cudaStream_t stream);

template <typename T, int kHeadDim, int kWidth>
[[gnu::weak]] void run_dmask(const DmaskParams& p, cudaStream_t stream);

template <typename T>
[[gnu::weak]] void run_dbias(const PlannedDbias& p, cudaStream_t stream);

}  // namespace flash::flash_attn
