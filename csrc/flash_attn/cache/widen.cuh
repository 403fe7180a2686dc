// Converts a cache of codes in 8 bits (e4m3) to fp16, for kernels that know nothing of codes, and queries in bf16 with
// it. Codes convert exactly. Queries are rounded to nearest, and beyond 65504 become infinite, as a caller's conversion
// to fp16 would make them. Only keys that some entry uses are read.
//
// Entries are divided among thread blocks, which take some rows at a time; a thread converts eight elements of a row.
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
#include "tile/vec.cuh"

namespace flash::flash_attn {

constexpr int kWidenThreads = 256, kWidenRows = 32, kWidenVector = 8;

// The heads of a token, in vectors of kWidenVector channels.
struct WidenShape {
  Divisor vectors;  // of a head
  Divisor row;      // vectors of all heads
  int head_dim;
  bool aligned;  // whether vectors can be loaded and stored at once

  WidenShape(int heads, int head_dim, bool aligned)
      : vectors(ceil_div(head_dim, kWidenVector)),
        row(heads * ceil_div(head_dim, kWidenVector)),
        head_dim(head_dim),
        aligned(aligned) {}
};

struct WidenLaunch : WidenParams {
  WidenShape k_shape, v_shape, q_shape;
};

using HalfVec = Vec<__half, kWidenVector>;

__device__ inline HalfVec widened(const Vec<uint8_t, kWidenVector>& codes) {
  HalfVec wide;
  const auto& words = reinterpret_cast<const uint2&>(codes);
  const uint2 low = ptx::widen_e4m3(words.x), high = ptx::widen_e4m3(words.y);
  reinterpret_cast<uint4&>(wide) = {low.x, low.y, high.x, high.y};
  return wide;
}
__device__ inline HalfVec widened(const Vec<__nv_bfloat16, kWidenVector>& x) {
  float wide[kWidenVector];
  widen(wide, x);
  return narrow<__half>(wide);
}

// Converts `count` rows of all heads. from_place(row): where a row is, in a page < 0 if it is zeros; to_place(row,
// source): where it goes, in a page < 0 if nowhere.
template <typename From, typename FromPlace, typename ToPlace>
__device__ void widen_rows(const WidenShape& shape, const TensorRef<const void>& from, const TensorRef<>& to, int count,
                           FromPlace&& from_place, ToPlace&& to_place) {
  const int vectors = kWidenRows * static_cast<int>(shape.row.value);
  for (int first = blockIdx.y * kWidenRows; first < count; first += gridDim.y * kWidenRows) {
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += kWidenThreads) {
      const int own = shape.row.divide(i), row = first + own;
      if (row >= count) break;
      const int in_row = shape.row.remainder(i, own), head = shape.vectors.divide(in_row);
      const int col = kWidenVector * shape.vectors.remainder(in_row, head);
      const Place source = from_place(row), target = to_place(row, source);
      if (target.page < 0) continue;
      const auto* x = static_cast<const From*>(from.data) + source.page * from.batch + source.row * from.seqlen +
                      head * from.heads + col * from.head_dim;
      auto* y = static_cast<__half*>(to.data) + target.page * to.batch + target.row * to.seqlen + head * to.heads + col;
      Vec<From, kWidenVector> narrow{};
      if (shape.aligned) {
        if (source.page >= 0) narrow = load<kWidenVector>(x);
        store(y, widened(narrow));
      } else {
        const int cols = min(kWidenVector, shape.head_dim - col);
        for (int j = 0; j < cols && source.page >= 0; ++j) narrow[j] = x[j * from.head_dim];
        const HalfVec wide = widened(narrow);
        for (int j = 0; j < cols; ++j) y[j] = wide[j];
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
    const auto same = [](int, const Place& source) { return source; };
    return widen_rows<__nv_bfloat16>(p.q_shape, fwd.q, p.q, q.length, place, same);
  }
  if (what == 0 && p.table != nullptr && blockIdx.y == 0 && threadIdx.x == 0) p.table[entry] = entry;
  const int* pages = fwd.pages.block_table;
  const Span keys = key_span(fwd.problem, entry, pages != nullptr);
  const auto place = [&](int row) {
    const int position = static_cast<int>(keys.first) + row;
    if (pages == nullptr) return Place{static_cast<int>(keys.batch), position};
    const int index = fwd.pages.page_size.divide(position),
              page = __ldg(pages + entry * fwd.pages.batch_stride + index);
    return Place{static_cast<unsigned>(page) < static_cast<unsigned>(fwd.pages.count) ? page : -1,
                 fwd.pages.page_size.remainder(position, index)};
  };
  const auto to_place = [&](int row, const Place& source) {
    return p.by_entry ? Place{entry, static_cast<int>(keys.first) + row} : source;
  };
  const bool is_k = what == 0;
  widen_rows<uint8_t>(is_k ? p.k_shape : p.v_shape, is_k ? fwd.k : fwd.v, is_k ? p.k : p.v, keys.length, place,
                      to_place);
}

inline void run_widen(const WidenParams& p, cudaStream_t stream) {
  constexpr int kBlocksEach = 64, kLeastBlocks = 16;  // for each multiprocessor, for each entry
  const Problem& problem = p.fwd.problem;
  if (problem.batch == 0) return;
  const auto shape_of = [](const TensorRef<const void>& x, int heads, int head_dim) {
    return WidenShape(heads, head_dim, is_aligned(x, head_dim, kWidenVector));
  };
  const WidenLaunch all{p, shape_of(p.fwd.k, problem.heads_k, problem.head_dim),
                        shape_of(p.fwd.v, problem.heads_k, problem.head_dim_v),
                        shape_of(p.fwd.q, problem.heads, problem.head_dim)};
  const int most = std::max(kLeastBlocks, kBlocksEach * num_multiprocessors(current_device()) / problem.batch);
  const int blocks = std::min(ceil_div(std::max({p.longest_k, p.longest_q, 1}), kWidenRows), most);
  const int parts = (p.k.data == nullptr ? 0 : 2) + (p.q.data == nullptr ? 0 : 1);
  const LaunchShape shape{.grid = dim3(problem.batch, blocks, parts), .block = dim3(kWidenThreads), .early = true};
  launch<widen_kernel>(shape, all, stream);
}

}  // namespace flash::flash_attn
