// Rows of q, k, v and out as the loaders of tile/load.cuh want them, and the loading of tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/schedule.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/load.cuh"

namespace flash::flash_attn {

// Rows of q or out, from the tile's first.
template <typename T>
struct QueryRows {
  T* data;
  int64_t token_stride, head_stride;
  const TileRows& rows;
  int row;

  __device__ void move(int n) { row += n; }
  __device__ bool exists() const { return row < rows.count; }
  __device__ T* address() const { return data + rows.token(row) * token_stride + rows.head(row) * head_stride; }
};

template <typename T, typename Data>
__device__ auto query_rows(const TensorRef<Data>& x, const Sequence& seq, const WorkTile& tile, const TileRows& rows) {
  auto* data = first_token<T>(x, seq.q, tile.head);
  return QueryRows<std::remove_pointer_t<decltype(data)>>{data, x.seqlen, x.heads, rows, 0};
}

// Rows in pages. The page of a row that does not exist is not looked up: that of the nearest one serves, without a
// branch that would put the lookups one after the other.
template <typename T>
struct PagedRows {
  T* data;  // of page 0
  int64_t page_stride, stride;
  const int* pages;
  const Divisor& page_size;
  int first_position;  // of row 0
  int row, count;

  __device__ void move(int n) { row += n; }
  __device__ bool exists() const { return static_cast<unsigned>(row) < static_cast<unsigned>(count); }
  __device__ T* address() const {
    const int position = first_position + min(max(row, 0), count - 1);
    const int index = page_size.divide(position);
    return data + __ldg(pages + index) * page_stride + page_size.remainder(position, index) * stride;
  }
};

// Rows of k or v of which some row of the tile may see something, from the first of these keys on.
template <typename T>
struct AnyKeyRows {
  StridedRows<T> strided;
  PagedRows<T> paged;  // if it has pages
};

template <typename Config>
using KeyRows =
    std::conditional_t<Config::kPlain, StridedRows<const typename Config::T>, AnyKeyRows<const typename Config::T>>;

template <typename Config>
__device__ KeyRows<Config> key_rows(const FwdParams& p, const TensorRef<const void>& x, const Sequence& seq,
                                    const WorkTile& tile, const Interval& seen) {
  using T = typename Config::T;
  const int head = tile.head / (p.problem.heads / p.problem.heads_k), count = seen.last - seen.first + 1;
  const int64_t first = seq.k.first + seen.first;
  const StridedRows<const T> strided{first_token<T>(x, Span{seq.k.batch, first, count}, head), x.seqlen, 0, count};
  if constexpr (Config::kPlain) {
    return strided;
  } else {
    const T* page0 = first_token<T>(x, Span{0, 0, 0}, head);
    const int* pages = p.pages.block_table ? p.pages.block_table + tile.entry * p.pages.batch_stride : nullptr;
    return {strided, {page0, x.batch, x.seqlen, pages, p.pages.page_size, static_cast<int>(first), 0, count}};
  }
}

// `step` is the distance of the elements of a row.
template <typename Config, typename Tile, typename Rows>
__device__ void load_tile(Tile& tile, Rows rows, const FwdParams& p, int64_t step, int first_row = 0) {
  rows.move(first_row);
  if (Config::kPlain || p.aligned) {
    load_async<Config::kThreads>(tile, rows, p.problem.head_dim);
  } else {
    load_scattered<Config::kThreads>(tile, rows, p.problem.head_dim, step);
  }
}

template <typename Config, typename Tile>
__device__ void load_keys(Tile& tile, const KeyRows<Config>& rows, const FwdParams& p, int64_t step, int first_row) {
  if constexpr (Config::kPlain) {
    load_tile<Config>(tile, rows, p, step, first_row);
  } else if (rows.paged.pages != nullptr) {
    load_tile<Config>(tile, rows.paged, p, step, first_row);
  } else {
    load_tile<Config>(tile, rows.strided, p, step, first_row);
  }
}

}  // namespace flash::flash_attn
