// Converts a cache of codes in 8 bits (e4m3) to fp16, for kernels that know nothing of codes, and queries in bf16 with
// it. Codes convert exactly. Queries are rounded to nearest, and beyond 65504 become infinite, as a caller's conversion
// to fp16 would make them. Only keys that some entry uses are read.
//
// Entries are divided among thread blocks, which take some rows at a time; a thread converts eight channels of a row.
// It is bound by the bandwidth of memory: three bytes for each code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/launch.h"
#include "flash_attn/features.h"
#include "flash_attn/params.h"
#include "flash_attn/rows.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace flash::flash_attn {

constexpr int kWidenThreads = 256, kWidenRows = 32;

// The heads of a token, in vectors of 8 channels or, where rows are not aligned, channel by channel.
struct WidenShape {
  int vector;       // 8 or 1
  Divisor vectors;  // of a head
  Divisor row;      // vectors of all heads

  WidenShape(int heads, int head_dim, bool aligned)
      : vector(aligned ? 8 : 1), vectors(head_dim / vector), row(heads * (head_dim / vector)) {}
};

struct WidenLaunch : WidenParams {
  WidenShape k_shape, v_shape, q_shape;
};

// Eight codes, or eight values in bf16, as fp16; and one.
__device__ inline uint4 widened(const uint2& codes) {
  const uint2 low = ptx::widen_e4m3(codes.x), high = ptx::widen_e4m3(codes.y);
  return {low.x, low.y, high.x, high.y};
}
__device__ inline uint4 widened(const uint4& x) {
  const auto pair = [](uint32_t word) {
    const float2 wide = ptx::unpack<__nv_bfloat16>(word);
    return ptx::pack<__half>(wide.x, wide.y);
  };
  return {pair(x.x), pair(x.y), pair(x.z), pair(x.w)};
}
__device__ inline uint16_t widened(uint8_t code) { return static_cast<uint16_t>(ptx::widen_e4m3(code).x); }
__device__ inline uint16_t widened(uint16_t x) {
  const float wide = ptx::unpack<__nv_bfloat16>(x).x;
  return static_cast<uint16_t>(ptx::pack<__half>(wide, wide));
}

// Where the rows that an entry has go: to [entry, first + row], or, if entry < 0, to the place where they are.
struct WidenTarget {
  int entry, first;
};

// Converts `count` rows of all heads. From: what a thread loads at once, kVector channels. place_of(row): where a row
// is; in a page that is not below `pages`, it counts as zeros, and goes to no place of its own. All lookups of a batch
// are issued before its first load, and all loads before its first store. A batch may end with its last vector several
// times, which is harmless.
template <typename From, int kVector, typename PlaceOf>
__device__ void widen_rows(const WidenShape& shape, const TensorRef<const void>& from, const TensorRef<>& to, int count,
                           unsigned pages, const WidenTarget& target, PlaceOf&& place_of) {
  constexpr int kBatch = 4, kElementBytes = sizeof(From) / kVector;
  using To = decltype(widened(From{}));
  for (int first = blockIdx.y * kWidenRows; first < count; first += gridDim.y * kWidenRows) {
    const int vectors = min(kWidenRows, count - first) * static_cast<int>(shape.row.value);
    for (int begin = threadIdx.x; begin < vectors; begin += kBatch * kWidenThreads) {
      Place sources[kBatch];
      From narrow[kBatch] = {};
      To* targets[kBatch];
      const auto vector = [&](int n) { return min(begin + n * kWidenThreads, vectors - 1); };
#pragma unroll
      for (int n = 0; n < kBatch; ++n) sources[n] = place_of(first + shape.row.divide(vector(n)));
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int row = shape.row.divide(vector(n)), in_row = shape.row.remainder(vector(n), row);
        const int head = shape.vectors.divide(in_row), col = kVector * shape.vectors.remainder(in_row, head);
        const Place& source = sources[n];
        const Place place = target.entry < 0 ? source : Place{target.entry, target.first + first + row};
        const bool exists = static_cast<unsigned>(source.page) < pages;
        const int64_t element =
            source.page * from.batch + source.row * from.seqlen + head * from.heads + col * from.head_dim;
        const char* x = static_cast<const char*>(from.data) + element * kElementBytes;
        if (exists) narrow[n] = *reinterpret_cast<const From*>(x);
        auto* y = static_cast<__half*>(to.data) + place.page * to.batch + place.row * to.seqlen + head * to.heads + col;
        targets[n] = exists || target.entry >= 0 ? reinterpret_cast<To*>(y) : nullptr;
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (targets[n] != nullptr) *targets[n] = widened(narrow[n]);
      }
    }
  }
}

// Of a grid (entries, blocks of each, 3): keys, values, queries.
__global__ __launch_bounds__(kWidenThreads) void widen_kernel(const __grid_constant__ WidenLaunch p) {
  ptx::launch_dependents();
  ptx::wait_for_dependency();
  const FwdParams& fwd = p.fwd;
  const int entry = blockIdx.x, what = p.k.data == nullptr ? 2 : blockIdx.z;
  if (what == 2) {
    const Span q = query_span(fwd.problem, entry);
    const auto place = [&](int row) { return Place{static_cast<int>(q.batch), static_cast<int>(q.first) + row}; };
    const auto widen_as = [&]<typename From, int kVector>() {
      widen_rows<From, kVector>(p.q_shape, fwd.q, p.q, q.length, kMaxSeqlen, {-1, 0}, place);
    };
    if (p.q_shape.vector == 8) return widen_as.template operator()<uint4, 8>();
    return widen_as.template operator()<uint16_t, 1>();
  }
  if (what == 0 && p.table != nullptr && blockIdx.y == 0 && threadIdx.x == 0) p.table[entry] = entry;
  const int* pages = fwd.pages.block_table;
  const Span keys = key_span(fwd.problem, entry, pages != nullptr);
  const auto place = [&](int row) {
    const int position = static_cast<int>(keys.first) + row, index = fwd.pages.page_size.divide(position);
    const int page = pages ? __ldg(pages + entry * fwd.pages.batch_stride + index) : static_cast<int>(keys.batch);
    return Place{page, fwd.pages.page_size.remainder(position, index)};
  };
  const bool is_k = what == 0;
  const WidenShape& shape = is_k ? p.k_shape : p.v_shape;
  const WidenTarget target = p.by_entry ? WidenTarget{entry, static_cast<int>(keys.first)} : WidenTarget{-1, 0};
  const auto widen_as = [&]<typename From, int kVector>() {
    widen_rows<From, kVector>(shape, is_k ? fwd.k : fwd.v, is_k ? p.k : p.v, keys.length, fwd.pages.count, target,
                              place);
  };
  if (shape.vector == 8) return widen_as.template operator()<uint2, 8>();
  widen_as.template operator()<uint8_t, 1>();
}

inline void run_widen(const WidenParams& p, cudaStream_t stream) {
  constexpr int kBlocksEach = 64, kLeastBlocks = 16;  // for each multiprocessor, for each entry
  const Problem& problem = p.fwd.problem;
  if (problem.batch == 0) return;
  const auto shape_of = [](const TensorRef<const void>& x, int heads, int head_dim) {
    return WidenShape(heads, head_dim, is_aligned(x, head_dim, 8));
  };
  const WidenLaunch all{p, shape_of(p.fwd.k, problem.heads_k, problem.head_dim),
                        shape_of(p.fwd.v, problem.heads_k, problem.head_dim_v),
                        shape_of(p.fwd.q, problem.heads, problem.head_dim)};
  const int most = std::max(kLeastBlocks, kBlocksEach * num_multiprocessors(current_device()) / problem.batch);
  const int blocks = std::min(ceil_div(std::max({p.longest_k, p.longest_q, 1}), kWidenRows), most);
  const int parts = (p.k.data == nullptr ? 0 : 2) + (p.q.data == nullptr ? 0 : 1);
  if (parts == 0) return;  // there are no keys, and queries are fp16
  const LaunchShape shape{.grid = dim3(problem.batch, blocks, parts), .block = dim3(kWidenThreads), .early = true};
  launch<widen_kernel>(shape, all, stream);
}

}  // namespace flash::flash_attn
