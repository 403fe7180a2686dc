// What each backward kernel can do: which of its instances take which problems, as in fwd/kernels.h. Which kernel is
// used is decided by bwd/planner.h.
#pragma once

#include "flash_attn/features.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Beyond 256 channels, the backward is compiled with all features only: elementwise steps take a small part of the time
// there.
constexpr int kMostPlainBwdHeadDim = 256;

struct BwdSm80Kernel {
  static constexpr Features kInstances[] = {Features::kPlain, Features::kAll};

  static bool takes(Features instance, const BwdParams& params) {
    if (instance == Features::kAll) return true;
    const Problem& p = params.problem;
    return has_plain_products(p) && !has_dropout(p) && params.aligned && !has_bias(p) && !has_ranges(p) &&
           p.head_dim_v == p.head_dim && head_dims(p).of_keys <= kMostPlainBwdHeadDim;
  }
  static HeadDims head_dims(const Problem& p) { return sm80_head_dims(p.head_dim, p.head_dim_v); }
};

// bwd_sm90 and, above 128 channels, bwd_sm90_wide.
struct BwdSm90Kernel {
  static constexpr Features kInstances[] = {Features::kPlain, Features::kRanged, Features::kBiased, Features::kDropped,
                                            Features::kAll};
  static constexpr int kMostBiasedHeadDim = 128;  // bwd_sm90_wide has no instance of kBiased

  // No instance takes unaligned rows, which TMA cannot copy, or empty tensors.
  static bool takes_any(const BwdParams& params) {
    const Problem& p = params.problem;
    const bool empty = p.batch == 0 || p.heads == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
    return params.aligned && !empty;
  }

  // The problem's rows must be aligned (takes_any).
  static bool takes(Features instance, const Problem& p) {
    if (instance == Features::kAll) return true;
    if (!has_plain_products(p) || head_dims(p).of_keys > kMostPlainBwdHeadDim) return false;
    return takes_plain<BwdSm90Kernel>(instance, p);
  }
  static bool takes(Features instance, const BwdParams& params) {
    return instance == Features::kAll || (params.aligned && takes(instance, params.problem));
  }
  static HeadDims head_dims(const Problem& p) { return sm90_head_dims(p.head_dim, p.head_dim_v); }
};

}  // namespace flash::flash_attn
