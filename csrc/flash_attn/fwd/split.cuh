// Thread blocks that share a tile of rows and divide its keys (splits) merge their results through global memory. Each
// stores its O and softmax state and increments a counter; the last to arrive reads all of them in the order of the
// splits, so that the result does not depend on which block that is. A thread reads back what the thread of the same
// rank has stored, so fragments are stored in register order.
#pragma once

#include <cstdint>

#include "flash_attn/fwd/plan.h"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/sync.cuh"
#include "tile/fragment.cuh"

namespace flash::flash_attn {

// Calls fn(r) for the lane's rows that are below `count`; row0 is the warp's first row.
template <int kRows, typename Fn>
__device__ void for_each_row(int row0, int count, Fn&& fn) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
    if (row0 + Fragment<kRows, 16>::row(r) < count) fn(r);
  }
}

// One thread's part of O of a tile in memory, row by row. Neighbouring threads are 16 bytes apart.
template <int kThreads, int kRows, int kCols>
struct StoredOutput {
  static constexpr int kVectors = kCols / 16;  // of four columns
  float4* data;

  __device__ StoredOutput(void* out, int64_t slot)
      : data(static_cast<float4*>(out) + slot * kThreads * kRows * kCols / 128 + threadIdx.x) {}

  __device__ void store(int r, const Fragment<kRows, kCols>& o) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      data[(r * kVectors + i) * kThreads] = {o(r, 4 * i), o(r, 4 * i + 1), o(r, 4 * i + 2), o(r, 4 * i + 3)};
    }
  }

  // Folds a row of o into what is stored, with the result in o. load: how an element of data is read.
  template <typename Load>
  __device__ void fold(int r, Fragment<kRows, kCols>& o, const Fold& fold, Load&& load) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = load(data + (r * kVectors + i) * kThreads);
      o(r, 4 * i) = fold(x.x, o(r, 4 * i));
      o(r, 4 * i + 1) = fold(x.y, o(r, 4 * i + 1));
      o(r, 4 * i + 2) = fold(x.z, o(r, 4 * i + 2));
      o(r, 4 * i + 3) = fold(x.w, o(r, 4 * i + 3));
    }
  }
};

// One thread's part of the scratch of a split; slot = tile * splits + split.
template <int kThreads, int kRows, int kCols>
struct PartialState {
  StoredOutput<kThreads, kRows, kCols> out;
  float2* softmax;

  __device__ PartialState(const KeySplits& splits, int64_t slot)
      : out(splits.out, slot),
        softmax(reinterpret_cast<float2*>(splits.softmax) + slot * kRows / 8 * kThreads + threadIdx.x) {}

  template <bool kSubtractsFirst>
  __device__ void store(int r, const Fragment<kRows, kCols>& o,
                        const OnlineSoftmax<kRows, kSubtractsFirst>& state) const {
    softmax[r * kThreads] = {state.max[r], state.sum[r]};
    out.store(r, o);
  }

  // Merges what is stored into (o, state). __ldcg reads from L2: other SMs have written it.
  template <bool kSubtractsFirst>
  __device__ void merge_into(int r, Fragment<kRows, kCols>& o, OnlineSoftmax<kRows, kSubtractsFirst>& state) const {
    const float2 other = __ldcg(softmax + r * kThreads);
    const Fold fold = state.fold(r, {other.x, other.y});
    out.fold(r, o, fold, [](const float4* x) { return __ldcg(x); });
  }
};

// Whether this thread block is the last of `count` to arrive at a counter; what the others wrote before is then
// visible. The last one resets the counter to 0 for the next launch.
__device__ inline bool is_last_arrival(int* arrivals, int count) {
  __syncthreads();
  const bool last = __syncthreads_or(threadIdx.x == 0 && ptx::arrive(arrivals) == count - 1);
  if (last && threadIdx.x == 0) *arrivals = 0;
  return last;
}

// Merges the splits of a tile. Returns true in the one thread block that then has the whole result in (o, state).
template <int kThreads, typename Work, int kRows, int kCols, bool kSubtractsFirst>
__device__ bool merge_splits(const KeySplits& splits, const Work& work, int warp_row, Fragment<kRows, kCols>& o,
                             OnlineSoftmax<kRows, kSubtractsFirst>& state) {
  const int64_t first_slot = int64_t{work.tile.index} * splits.count;
  const auto stored = [&](int split) { return PartialState<kThreads, kRows, kCols>(splits, first_slot + split); };
  const auto for_rows = [&](auto fn) { for_each_row<kRows>(warp_row, work.rows.count, fn); };
  for_rows([&](int r) { stored(work.tile.split).store(r, o, state); });
  const int num_splits = work.num_splits();
  if (!is_last_arrival(splits.arrivals + work.tile.index, num_splits)) return false;
  o.fill(0);
  state = OnlineSoftmax<kRows, kSubtractsFirst>(state.scale_log2);
  for (int split = 0; split < num_splits; ++split) {
    for_rows([&](int r) { stored(split).merge_into(r, o, state); });
  }
  return true;
}

}  // namespace flash::flash_attn
