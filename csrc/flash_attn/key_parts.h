// Into how many parts keys are cut so that all multiprocessors have work.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace flash::flash_attn {

constexpr int kMaxSplits = 128;

// The fewest parts, up to `most`, that keep the GPU nearly as busy as any number of parts would. It runs `places`
// blocks at a time; there is a block for each part of each of `tiles`.
inline int parts_for(int64_t tiles, int64_t most, int places) {
  most = std::min<int64_t>({most, kMaxSplits, places});
  const auto efficiency = [&](int64_t parts) {
    const double waves = static_cast<double>(tiles * parts) / places;
    return waves / std::ceil(waves);
  };
  double best = 0;
  for (int64_t parts = 1; parts <= most; ++parts) best = std::max(best, efficiency(parts));
  int parts = 1;
  while (parts < most && efficiency(parts) < 0.85 * best) ++parts;
  return parts;
}

}  // namespace flash::flash_attn
