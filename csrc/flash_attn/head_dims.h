// The head dims that kernels are compiled for.
#pragma once

namespace flash::flash_attn {

constexpr int kHeadDims[] = {64, 96, 128, 192, 256, 512};

// The largest of the forward, and of what else there is: the backward and S_dmask.
constexpr int kMostHeadDim = 512, kMostBwdHeadDim = 256;

// Returns the smallest compiled head dim that is not less than the problem's, or 0 if there is none. The additional
// channels are filled with zeros.
constexpr int instance_head_dim(int head_dim) {
  for (const int built : kHeadDims) {
    if (head_dim <= built) return built;
  }
  return 0;
}

}  // namespace flash::flash_attn
