// Tiles of a bias, rows of queries by keys, that TMA copies (sm_90): see has_tiled_bias in features.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/tensor_map.h"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "ptx/barrier.cuh"
#include "tile/pipeline.cuh"

namespace flash::flash_attn {

// Whether one row serves all. Then a tile has only its first row: to copy it for each row, from the few lines of the L2
// cache that all blocks read, took up to twice as long as all else.
__host__ __device__ inline bool has_one_row(const BiasRows& strides) { return strides.seqlen == 0; }

template <typename Tile>
__device__ int bytes_of_bias(const BiasRows& strides) {
  return sizeof(Tile) / (has_one_row(strides) ? Tile::kRows : 1);
}

// A dimension in which one serves all has size 1.
template <typename Tile>
CUtensorMap map_of_bias(const Problem& p) {
  const TensorRef<const void> bias = bias_tensor(p);
  const bool one_row = has_one_row(p.bias.rows);
  return map_of<Tile>(bias, p.bias.keys, bias.heads == 0 ? 1 : p.heads, one_row ? 1 : p.seqlen_q,
                      bias.batch == 0 ? 1 : p.batch, one_row ? 1 : Tile::kRows);
}

// Starts the copy of a tile, by one thread. `row` counts from the first token of the tensor, and `key` from the entry's
// first. What lies beyond the entry may be anything.
template <typename Tile>
__device__ void load_bias(Tile& tile, const CUtensorMap& map, const BiasRows& strides, int entry, int head, int64_t row,
                          int key, ptx::SharedBarrier& arrived) {
  const bool one_entry = strides.batch1 == 0 && strides.batch2 == 0;
  load_async(tile, map, has_one_row(strides) ? 0 : row, strides.heads == 0 ? 0 : head, one_entry ? 0 : entry, arrived,
             key);
}

}  // namespace flash::flash_attn
