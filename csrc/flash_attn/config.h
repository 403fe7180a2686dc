// What is chosen for a problem: sizes of tiles, how heads are grouped, how often keys are split. Pure host code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "flash_attn/features.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

constexpr int kMaxSplits = 128;

// Head dims that instances exist for; others take the next larger one, and zeros fill it up.
constexpr int kHeadDims[] = {64, 96, 128, 192, 256};

constexpr int instance_head_dim(int head_dim) {
  for (const int built : kHeadDims) {
    if (head_dim <= built) return built;
  }
  return 0;
}

struct TileSize {
  int rows;
  int keys;
  int warps;
};

// 32 rows per warp halve the shared memory that a product reads; from 192 channels on they do not fit the registers.
// Random bits and transformed scores take registers, too.
constexpr TileSize fwd_tile(int head_dim, Features features) {
  const bool plain = features == Features::kPlain;
  if (head_dim <= 64) return {128, plain ? 128 : 64, 4};
  if (head_dim <= 96) return {128, plain ? 64 : 32, 4};
  if (head_dim <= 128) return {128, plain ? 64 : 32, 4};
  return {64, 64, 4};
}

inline int heads_to_pack(const Problem& p, int64_t seqlen_q, int tile_rows) {
  const int group = p.heads / p.heads_k;
  const int64_t apart = group * ceil_div(seqlen_q, tile_rows), together = ceil_div(seqlen_q * group, tile_rows);
  return p.rng_state == nullptr && together < apart ? group : 1;
}

// The fewest parts that keep the multiprocessors nearly as busy as any number of parts can.
inline int splits_for(int64_t tiles, int64_t key_blocks, int slots) {
  if (tiles * 10 >= slots * 8 || key_blocks <= 1) return 1;
  const int most = static_cast<int>(std::min<int64_t>({kMaxSplits, slots, key_blocks}));
  const auto efficiency = [&](int splits) {
    const double waves = static_cast<double>(tiles * splits) / slots;
    return waves / std::ceil(waves);
  };
  double best = 0;
  for (int splits = 1; splits <= most; ++splits) best = std::max(best, efficiency(splits));
  int splits = 1;
  while (efficiency(splits) < 0.85 * best) ++splits;
  return splits;
}

}  // namespace flash::flash_attn
