// The head dims that kernels are compiled for.
#pragma once

#include <algorithm>

namespace flash::flash_attn {

constexpr int kHeadDims[] = {64, 96, 128, 192, 256, 512};

// The largest head dim of attention, and of S_dmask.
constexpr int kMostHeadDim = 512, kMostDmaskHeadDim = 256;

// Returns the smallest compiled head dim that is not less than the problem's, or 0 if there is none. The additional
// channels are filled with zeros.
constexpr int instance_head_dim(int head_dim) {
  for (const int built : kHeadDims) {
    if (head_dim <= built) return built;
  }
  return 0;
}

// The head dims of keys and of values in an instance.
struct HeadDims {
  int of_keys;
  int of_values;

  bool operator==(const HeadDims&) const = default;
};

// The portable kernels have instances of one head dim for both.
constexpr HeadDims sm80_head_dims(int head_dim, int head_dim_v) {
  const int built = instance_head_dim(std::max(head_dim, head_dim_v));
  return {built, built};
}

// The kernels for sm_90 also have instances of kUnequal, the head dims of multi-head latent attention (DeepSeek-AI,
// "DeepSeek-V2", 2024) in training and prefill.
constexpr HeadDims kUnequal = {192, 128};
constexpr HeadDims sm90_head_dims(int head_dim, int head_dim_v) {
  const HeadDims equal = sm80_head_dims(head_dim, head_dim_v);
  return equal.of_keys == kUnequal.of_keys && head_dim_v <= kUnequal.of_values ? kUnequal : equal;
}

}  // namespace flash::flash_attn
