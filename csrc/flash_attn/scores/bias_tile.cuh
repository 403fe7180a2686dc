// Tiles of a bias, query rows x keys, that TMA copies to shared memory (sm_90): see has_tiled_bias in features.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/tensor_map.h"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "ptx/barrier.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// Whether all query rows share one row of the bias. Then only the first row of a tile is filled: copying it for each
// row, from the few lines of L2 that all thread blocks read, took up to twice as long as everything else.
__host__ __device__ inline bool has_one_row(const BiasRows& strides) { return strides.seqlen == 0; }

template <typename Tile>
__device__ int bytes_of_bias(const BiasRows& strides) {
  return sizeof(Tile) / (has_one_row(strides) ? Tile::kRows : 1);
}

// The TMA descriptor. A dimension with stride 0 gets size 1, and coordinate 0 in load_bias.
template <typename Tile>
CUtensorMap map_of_bias(const Problem& p) {
  const TensorRef<const void> bias = bias_tensor(p);
  const bool one_row = has_one_row(p.bias.rows);
  return map_of<Tile>(bias, p.bias.keys, bias.heads == 0 ? 1 : p.heads, one_row ? 1 : p.seqlen_q,
                      bias.batch == 0 ? 1 : p.batch, one_row ? 1 : Tile::kRows);
}

// One thread starts the copy of a tile. `row` counts from the first token of the tensor, `key` from the entry's first
// key. What lies beyond the entry is arbitrary, and the mask hides it.
template <typename Tile>
__device__ void load_bias(Tile& tile, const CUtensorMap& map, const BiasRows& strides, int entry, int head, int64_t row,
                          int key, ptx::SharedBarrier& arrived) {
  const bool one_entry = strides.batch1 == 0 && strides.batch2 == 0;
  load_async(tile, map, has_one_row(strides) ? 0 : row, strides.heads == 0 ? 0 : head, one_entry ? 0 : entry, arrived,
             key);
}

}  // namespace flash::flash_attn
