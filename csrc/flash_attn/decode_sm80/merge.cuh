// How the decode kernel merges partial results, which are of the same rows and of different keys: those of the warps of
// a thread block through shared memory, and those of the splits through global memory. A thread merges four channels of
// a row at a time (a quad), and adds partial results in a fixed order.
#pragma once

#include <cmath>
#include <cstdint>

#include "flash_attn/decode_sm80/shared.cuh"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/descale.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "tile/codes.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

// Four columns of a row of O, relative to the row's maximum.
struct Quad {
  RowState state;
  float4 out;
};

// The scratch of one tile. The splits of a row are adjacent: then their distance is a compile-time constant.
template <typename Config>
struct DecodeSplits {
  int count;         // of splits
  float* out;        // (rows, splits, head_dim), O before normalization, relative to the maximum of its split
  RowState* states;  // (rows, splits)

  __device__ DecodeSplits(const KeySplits& splits, int tile) : count(splits.count) {
    const int64_t first = int64_t{tile} * splits.rows * count;
    out = splits.out + first * Config::kHeadDim;
    states = reinterpret_cast<RowState*>(splits.softmax) + first;
  }

  __device__ float4* place(int split, int row, int col) const {
    return reinterpret_cast<float4*>(out + (row * count + split) * Config::kHeadDim + col);
  }

  __device__ void store(int split, int row, int col, const Quad& x) const {
    *place(split, row, col) = x.out;
    if (col == 0) states[row * count + split] = x.state;
  }

  __device__ Quad load(int split, int row, int col) const {
    const float2 state = __ldcg(reinterpret_cast<const float2*>(states + row * count + split));
    return {{state.x, state.y}, __ldcg(place(split, row, col))};
  }
};

// Prefetches the first lines that the thread block will access after its keys: address translation (TLB) takes long,
// too.
template <typename Config>
__device__ void prefetch_targets(const DecodeParams& p, const FwdWork<Config>& work) {
  if (threadIdx.x != 0) return;
  ptx::prefetch(packed_rows<typename Config::T>(p.out, work).address());
  if (p.plan.splits.count == 1) return;
  ptx::prefetch(p.plan.splits.arrivals + work.tile.index);
  const DecodeSplits<Config> splits(p.plan.splits, work.tile.index);
  ptx::prefetch(splits.place(work.tile.split, 0, 0));
  ptx::prefetch(splits.states + work.tile.split);
}

// Stores the result of a warp in its ring.
template <typename Config>
__device__ void store_in_ring(DecodeRing<Config>& ring, const Output<Config>& o, const Softmax<Config>& softmax,
                              int num_rows) {
  __syncwarp();  // the result overwrites the stages, which all lanes have read now
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    if (8 * r >= num_rows) break;
    if (lane_id() % 4 == 0) ring.result.states[o.row(r)] = {softmax.max[r], softmax.sum[r]};
    float* out = ring.result.out[o.row(r)];
#pragma unroll
    for (int c = 0; c < o.kLaneCols; c += 2 * Config::kUnit) {
      if constexpr (Config::kCoded) {  // the order of columns in tile/codes.cuh
        const float4 columns = {o(r, c), o(r, c + 2), o(r, c + 1), o(r, c + 3)};
        *reinterpret_cast<float4*>(out + 4 * c + own_column()) = columns;
      } else {
        *reinterpret_cast<float2*>(out + o.col(c)) = {o(r, c), o(r, c + 1)};
      }
    }
  }
}

template <typename Config>
__device__ Quad load_from_ring(const DecodeRing<Config>& ring, int row, int col) {
  return {ring.result.states[row], *reinterpret_cast<const float4*>(&ring.result.out[row][col])};
}

__device__ inline void add_scaled(Quad& a, const Quad& b, float factor) {
  a.state.sum += b.state.sum * factor;
  a.out = {a.out.x + b.out.x * factor, a.out.y + b.out.y * factor, a.out.z + b.out.z * factor,
           a.out.w + b.out.w * factor};
}

// Merges `count` quads; load(i) reads one. kBatch loads are in flight at a time.
template <int kBatch, typename Load>
__device__ Quad merge(int count, float scale_log2, Load&& load) {
  Quad all{{-INFINITY, 0}, {}};
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    Quad batch[kBatch], sum{all.state, {}};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      batch[i] = first + i < count ? load(first + i) : Quad{{-INFINITY, 0}, {}};
      sum.state.max = fmaxf(sum.state.max, batch[i].state.max);
    }
    sum.state.sum = 0;
    add_scaled(sum, all, weight_of(all.state.max, sum.state.max, scale_log2));
#pragma unroll
    for (const Quad& x : batch) add_scaled(sum, x, weight_of(x.state.max, sum.state.max, scale_log2));
    all = sum;
  }
  return all;
}

// Calls fn(row, col) for every quad of the tile's rows, distributed over the threads of the thread block.
template <typename Config, typename Fn>
__device__ void for_each_quad(const TileRows& rows, Fn&& fn) {
  constexpr int kQuads = Config::kHeadDim / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows.count * kQuads; i += blockDim.x) fn(i / kQuads, i % kQuads * 4);
}

// Stores four channels of a row, from `col` on, packed by `pack`, to a tensor shaped like out.
template <typename Config, typename Pack>
__device__ void store_to(const TensorRef<>& x, const DecodeParams& p, const FwdWork<Config>& work, int row, int col,
                         const float (&values)[4], const Pack& pack) {
  using T = typename Config::T;
  auto rows = packed_rows<T>(x, work);
  rows.row = row;
  T* target = rows.address();
  Vec<T, 4> packed;
  reinterpret_cast<uint2&>(packed) = {pack(values[0], values[1]), pack(values[2], values[3])};
  if (Config::kPlain || p.aligned) {
    if (col < head_dim_v<Config::kPlain>(p.problem)) store(target + col, packed);
  } else {
    for (int i = 0; i < min(4, p.problem.head_dim_v - col); ++i) target[(col + i) * x.head_dim] = packed[i];
  }
}

// Stores a quad of out and, if it is an output, of out_lo; the thread with a row's first quad also stores lse and
// row_max.
template <typename Config>
__device__ void store_result(const DecodeParams& p, const FwdWork<Config>& work, int row, int col, float scale_log2,
                             const Quad& x) {
  using T = typename Config::T;
  const float sink = sink_of(p, work, row), sum = x.state.sum + exp_of_sink(sink, x.state.max, scale_log2);
  const float factor = sum == 0 ? 0.f : output_scale_of<T>(p.problem, work.tile) * ptx::reciprocal(sum);
  float values[4] = {x.out.x * factor, x.out.y * factor, x.out.z * factor, x.out.w * factor};
  store_to<Config>(p.out, p, work, row, col, values, RoundedToOut<T>(p));
  if (p.out_lo.data != nullptr) {
    float rounded[4];
    widen(rounded, narrow<T>(values));
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] -= rounded[i];
    store_to<Config>(p.out_lo, p, work, row, col, values, Rounded<T>());
  }
  if (col != 0) return;
  const LogSumExp lse = log_sum_exp(sink, x.state.max, sum, scale_log2);
  store_row<Config>(p, work, row, lse, largest_score(x.state.max, scale_log2));
}

}  // namespace flash::flash_attn
