// The head dims that kernels are compiled for.
#pragma once

namespace flash::flash_attn {

constexpr int kHeadDims[] = {64, 96, 128, 192, 256};

// The compiled head dim that serves a problem's: the next larger one, of which the rest is filled with zeros. 0 if
// there is none.
constexpr int instance_head_dim(int head_dim) {
  for (const int built : kHeadDims) {
    if (head_dim <= built) return built;
  }
  return 0;
}

}  // namespace flash::flash_attn
