// Puts the partial results of pieces together: for a row whose pieces have maxima m_i, sums l_i and outputs o_i,
//
//   out = sum_i w_i o_i / sum_i w_i l_i,   w_i = exp(m_i - m),   lse = m + log sum_i w_i l_i,
//
// with m = max_i m_i, where a sink is one more term of the lower sum. Pieces are folded into a total one by one, the
// last keys first, as a thread block does that computes all pieces of a tile (Consumer::fold_total): results have
// the same bits.
//
// A thread block for each slot merges its share of the rows of the slot's tile: so tiles with many pieces, whose rows
// take longer to merge, are divided among as many blocks.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/params.h"
#include "flash_attn/scores/descale.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/sync.cuh"
#include "tile/fragment.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

constexpr int kMergeWarps = 8;

__device__ inline int slot_of_piece(const PieceRecord& piece, int index) {
  return index == 0 ? piece.first_slot : piece.second_slot + (index - 1) * piece.stride;
}

// kCols: the channels of the instance.
template <typename T, Features kFeatures, int kCols>
__global__ __launch_bounds__(32 * kMergeWarps) void merge_pieces_kernel(const __grid_constant__ ServingParams p) {
  constexpr int kVectors = (kCols + 127) / 128;  // of four channels, for each lane
  constexpr int kTogether = 8;                   // pieces whose sums are loaded at a time
  ptx::wait_for_dependency();
  const PieceSlots& slots = p.plan.slots;
  const int own_slot = blockIdx.x, tile_rows = 64 * p.plan.warpgroups;
  if (slots.used[own_slot] == 0) return;
  const PieceRecord piece = slots.records[own_slot];
  __syncthreads();
  if (threadIdx.x == 0) slots.used[own_slot] = 0;

  const WorkTile tile{piece.entry, piece.head, piece.key_head, piece.row0, 0, 0};
  const Span q = query_span(p.problem, tile.entry);
  const TileRows rows(p.plan.tiling, q, tile, tile_rows);
  const float scale_log2 = score_scale_log2<kFeatures>(softmax_scale_of<T>(p.problem, tile));
  const RoundedToOut<T> pack(p);
  const int first = rows.count * piece.index / piece.count, end = rows.count * (piece.index + 1) / piece.count;
  const auto softmax_of = [&](int index, int row) {
    const int64_t slot = slot_of_piece(piece, index);
    return __ldcg(reinterpret_cast<const float2*>(slots.softmax) + slot * slots.rows + row);
  };
  for (int row = first + warp_id(); row < end; row += kMergeWarps) {
    float max = -INFINITY, sum = 0, out[kVectors][4] = {};
    for (int end = piece.count; end > 0; end -= 32) {
      const int index = end - 1 - lane_id();
      const float2 state = index >= 0 ? softmax_of(index, row) : float2{-INFINITY, 0};
      for (int first = 0; first < min(32, end); first += kTogether) {
        Fold::Partial own[kTogether];
        float4 x[kTogether][kVectors];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          // A piece without keys has no sums, and one before the first is not there.
          own[i] = {__shfl_sync(~0u, state.x, first + i), __shfl_sync(~0u, state.y, first + i)};
          const int64_t slot = slot_of_piece(piece, end - 1 - first - i);
          const float* source = slots.out + (slot * slots.rows + row) * kCols + 4 * lane_id();
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const bool exists = !own[i].is_empty() && 128 * v + 4 * lane_id() < kCols;
            x[i][v] = exists ? __ldcg(reinterpret_cast<const float4*>(source + 128 * v)) : float4{};
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Fold fold({max, sum}, own[i], scale_log2);
          max = fold.max, sum = fold(sum, own[i].sum);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            out[v][0] = fold(out[v][0], x[i][v].x), out[v][1] = fold(out[v][1], x[i][v].y);
            out[v][2] = fold(out[v][2], x[i][v].z), out[v][3] = fold(out[v][3], x[i][v].w);
          }
        }
      }
    }
    const int head = tile.head + rows.head(row), token = rows.token(row);
    const float sink = sink_of(p.problem, tile.entry, head);
    sum += exp_of_sink(sink, max, scale_log2);
    const float factor = sum == 0 ? 0.f : output_scale_of<T>(p.problem, tile) * ptx::reciprocal(sum);
    T* target = first_token<T>(p.out, q, head) + token * p.out.seqlen;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int col = 128 * v + 4 * lane_id();
      if (col >= p.problem.head_dim_v) continue;
      const uint2 words = {pack(out[v][0] * factor, out[v][1] * factor), pack(out[v][2] * factor, out[v][3] * factor)};
      *reinterpret_cast<uint2*>(target + col) = words;
    }
    if (lane_id() == 0 && p.softmax_lse != nullptr) {
      row_values(p.softmax_lse, p.problem, q, head)[token] = log_sum_exp(sink, max, sum, scale_log2).lse;
    }
  }
}

template <typename T, Features kFeatures, int kCols>
void merge_pieces(const ServingParams& p, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(p.plan.slots.count), .block = dim3(32 * kMergeWarps), .early = true};
  launch<merge_pieces_kernel<T, kFeatures, kCols>>(shape, p, stream);
}

}  // namespace flash::flash_attn
