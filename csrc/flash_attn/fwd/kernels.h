// What each forward kernel can do: which of its instances take which problems. Which kernel is used is decided by
// fwd/planner.h.
#pragma once

#include "flash_attn/features.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Scores are scaled products and perhaps a bias, and all rows can be moved in aligned chunks of 16 bytes.
inline bool is_plain(const FwdParams& p) { return has_plain_products(p.problem) && p.aligned && p.row_max == nullptr; }

struct FwdSm80Kernel {
  static constexpr Features kInstances[] = {Features::kPlain, Features::kAll};

  static bool takes(Features instance, const FwdParams& p) {
    if (instance == Features::kAll) return true;
    return !p.one_instance && is_plain(p) && !has_dropout(p.problem) && !has_bias(p.problem) &&
           !has_ranges(p.problem) && !has_pages(p) && p.problem.head_dim_v == p.problem.head_dim;
  }
  static HeadDims head_dims(const Problem& p) { return sm80_head_dims(p.head_dim, p.head_dim_v); }
};

struct DecodeKernel {
  static constexpr Features kInstances[] = {Features::kPlain, Features::kAll};

  static bool takes(Features instance, const FwdParams& p) {
    if (instance == Features::kAll) return true;
    return is_plain(p) && !has_bias(p.problem) && !has_ranges(p.problem) && p.problem.head_dim_v == p.problem.head_dim;
  }
  static HeadDims head_dims(const Problem& p) { return sm80_head_dims(p.head_dim, p.head_dim_v); }
};

// Instances of decode_sm80 for codes. Rows of 96 channels are 6 chunks of 16 bytes, which no tile in shared memory has:
// they take the instance of 128.
struct CodedDecodeKernel : DecodeKernel {
  static HeadDims head_dims(const Problem& p) {
    const HeadDims built = DecodeKernel::head_dims(p);
    return built.of_keys == 96 ? HeadDims{128, 128} : built;
  }
};

// Serving instances of fwd_sm90, of up to 256 channels. Dropout, biases and out_lo are for training, and not theirs.
struct ServingKernel {
  static constexpr Features kInstances[] = {Features::kPlain, Features::kAll};

  static bool takes(const FwdParams& p) {
    return p.aligned && !has_dropout(p.problem) && !has_bias(p.problem) && p.out_lo.data == nullptr &&
           p.row_max == nullptr && head_dims(p.problem).of_keys <= 256;
  }
  static bool takes(Features instance, const FwdParams& p) {
    return instance == Features::kAll || (is_plain(p) && !has_ranges(p.problem));
  }
  static HeadDims head_dims(const Problem& p) { return sm90_head_dims(p.head_dim, p.head_dim_v); }
};

// Serving instances for codes.
struct CodedServingKernel : ServingKernel {};

// Instances of fwd_sm90 for dense tensors that compute as those for serving do. They may have out_lo, but no pages.
struct InvariantKernel : ServingKernel {};

struct FwdSm90Kernel {
  static constexpr Features kInstances[] = {Features::kPlain, Features::kRanged, Features::kBiased, Features::kDropped,
                                            Features::kAll};
  static constexpr int kMostBiasedHeadDim = 256;  // the largest with an instance of kBiased

  static bool takes(Features instance, const FwdParams& p) {
    if (instance == Features::kAll) return true;
    return is_plain(p) && !has_pages(p) && takes_plain<FwdSm90Kernel>(instance, p.problem);
  }
  static HeadDims head_dims(const Problem& p) { return sm90_head_dims(p.head_dim, p.head_dim_v); }
};

}  // namespace flash::flash_attn
