// Partial results of pieces of keys: how serving instances of fwd_sm90 leave them. merge.cuh puts them together.
#pragma once

#include <cmath>
#include <cstdint>

#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/split.cuh"
#include "flash_attn/fwd_serving/work_list.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// One thread writes what merging must know of a piece.
__device__ inline void record_piece(const PieceSlots& slots, const WorkTile& tile, const Piece& piece) {
  if (piece.is_whole()) return;
  slots.records[piece.slot] = {tile.entry,  tile.head,        tile.key_head,     tile.row0,   piece.index,
                               piece.count, piece.first_slot, piece.second_slot, piece.stride};
  slots.used[piece.slot] = 1;
}

__device__ inline float2* softmax_of_slot(const PieceSlots& slots, int slot) {
  return reinterpret_cast<float2*>(slots.softmax) + int64_t{slot} * slots.rows;
}

// A warp writes the softmax state of a piece without keys. Merging then does not read its sums.
__device__ inline void store_empty_piece(const PieceSlots& slots, int slot) {
  float2* softmax = softmax_of_slot(slots, slot);
  for (int row = lane_id(); row < slots.rows; row += 32) softmax[row] = {-INFINITY, 0};
}

// A warp stores its rows, from warp_row on, of the first `count` rows of a tile.
template <int kRows, int kCols, bool kSubtractsFirst>
__device__ void store_piece(const PieceSlots& slots, int slot, int warp_row, int count, const Fragment<kRows, kCols>& o,
                            const OnlineSoftmax<kRows, kSubtractsFirst>& state) {
  float2* softmax = softmax_of_slot(slots, slot);
  for_each_row<kRows>(warp_row, count, [&](int r) {
    const int row = warp_row + o.row(r);
    if (lane_id() % 4 == 0) softmax[row] = {state.max[r], state.sum[r]};
    float* out = slots.out + (int64_t{slot} * slots.rows + row) * kCols;
#pragma unroll
    for (int c = 0; c < kCols / 4; c += 2) {
      *reinterpret_cast<float2*>(out + o.col(c)) = {o(r, c), o(r, c + 1)};
    }
  });
}

}  // namespace flash::flash_attn
