// Rows of q, k, v and out as the iterators that the loaders of tile/load.cuh take (move, exists, address), and the
// loading of tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/copy.cuh"
#include "tile/load.cuh"

namespace flash::flash_attn {

// Rows of q or out in a tile with several packed heads. Mapping a row to its token and head takes a division.
template <typename T>
struct PackedRows {
  T* data;
  int64_t token_stride, head_stride;
  const TileRows& rows;
  int row;

  __device__ void move(int n) { row += n; }
  __device__ bool exists() const { return row < rows.count; }
  __device__ T* address() const { return data + rows.token(row) * token_stride + rows.head(row) * head_stride; }
};

template <typename T, typename Data, typename Work>
__device__ auto packed_rows(const TensorRef<Data>& x, const Work& work) {
  auto* data = first_token<T>(x, work.seq.q, work.tile.head);
  return PackedRows<std::remove_pointer_t<decltype(data)>>{data, x.seqlen, x.heads, work.rows, 0};
}

// Rows of q or out in a tile of one head: a constant stride.
template <typename T, typename Data, typename Work>
__device__ auto strided_rows(const TensorRef<Data>& x, const Work& work) {
  auto* data = first_token<T>(x, work.seq.q, work.tile.head) + work.tile.row0 * x.seqlen;
  return StridedRows<std::remove_pointer_t<decltype(data)>>{data, x.seqlen, 0, work.rows.count};
}

// Calls fn with the tile's rows of q or out, in whichever of the two forms suffices.
template <typename T, typename Data, typename Work, typename Fn>
__device__ void with_query_rows(const Tiling& tiling, const TensorRef<Data>& x, const Work& work, Fn&& fn) {
  if (tiling.packed_heads.value > 1) return fn(packed_rows<T>(x, work));
  fn(strided_rows<T>(x, work));
}

// k or v as kernels move it: in units of 16 bits, an element each or, of codes in 8 bits, two.
template <typename Config>
__host__ __device__ TensorRef<const void> in_units(const TensorRef<const void>& x) {
  if constexpr (Config::kCoded) {
    return {x.data, x.batch / 2, x.seqlen / 2, x.heads / 2, 1};
  } else {
    return x;
  }
}

// Where a row of k or v is: the page, and the row in it.
struct Place {
  int page, row;
};

// Maps keys, counted from the first that some row of the tile sees, to pages. A row that does not exist is clamped to
// the nearest one that does: a branch around the lookup would serialize the loads of several rows. For the same reason
// a page that the table names, but that there is not, is replaced by the last page. Without a block table all keys are
// in one page, the row of the batch dimension.
struct PageTable {
  const int* pages;
  unsigned last_page;
  Divisor page_size;
  int only_page;
  int first_position;  // of row 0
  int count;

  __device__ bool has(int row) const { return static_cast<unsigned>(row) < static_cast<unsigned>(count); }
  __device__ Place find(int row) const {
    const int position = first_position + min(max(row, 0), count - 1), index = page_size.divide(position);
    const int page = pages ? min(static_cast<unsigned>(__ldg(pages + index)), last_page) : only_page;
    return {page, page_size.remainder(position, index)};
  }

  // The same without waiting for the page, which is as the table names it: `existing` replaces it before it is used.
  __device__ Place find_early(int row) const {
    const int position = first_position + min(max(row, 0), count - 1), index = page_size.divide(position);
    return {ptx::load_early(pages + index, pages != nullptr, only_page), page_size.remainder(position, index)};
  }
  __device__ Place existing(const Place& place) const {
    return {static_cast<int>(min(static_cast<unsigned>(place.page), last_page)), place.row};
  }
};

// The places of those rows of a tile that a thread loads, looked up ahead of the copies. kLanes: load_own_rows_async.
template <typename Tile, int kThreads, int kLanes = Tile::kPanelChunks, bool kEarly = false>
struct LoadedPlaces {
  static constexpr int kStep = kThreads / kLanes;
  Place places[Tile::kRows / kStep];

  __device__ void find(const PageTable& table, int first_row) {
#pragma unroll
    for (int i = 0; i < Tile::kRows / kStep; ++i) {
      const int row = first_row + i * kStep;
      places[i] = kEarly ? table.find_early(row) : table.find(row);
    }
  }
  __device__ Place place(const PageTable& table, int i) const { return kEarly ? table.existing(places[i]) : places[i]; }
};

// Rows of k or v in pages, from `row` on, looked up one at a time.
template <typename T>
struct PagedRows {
  T* data;  // of page 0
  int64_t page_stride, stride;
  PageTable table;
  int row;

  __device__ void move(int n) { row += n; }
  __device__ bool exists() const { return table.has(row); }
  __device__ T* address(const Place& place) const { return data + place.page * page_stride + place.row * stride; }
  __device__ T* address() const { return address(table.find(row)); }
};

// Rows whose places are known already. Strides are in chunks of 16 bytes, which fit 32 bits (is_aligned in features.h),
// so that an address takes few instructions.
template <typename T, typename Places>
struct FoundRows {
  const uint4* data;
  uint32_t page_stride, stride;
  const PageTable& table;
  const Places& found;
  int row, index;

  __device__ FoundRows(const PagedRows<T>& rows, const Places& found)
      : data(reinterpret_cast<const uint4*>(rows.data)),
        page_stride(rows.page_stride / 8),
        stride(rows.stride / 8),
        table(rows.table),
        found(found),
        row(rows.row),
        index(0) {}

  __device__ void move(int) { ++index; }
  __device__ bool exists() const { return table.has(row + index * Places::kStep); }
  __device__ T* address() const {
    const Place place = found.place(table, index);
    const uint64_t chunks =
        uint64_t{static_cast<uint32_t>(place.page)} * page_stride + uint64_t{static_cast<uint32_t>(place.row)} * stride;
    return reinterpret_cast<T*>(data + chunks);
  }
};

template <typename Config>
using KeyRows =
    std::conditional_t<!Config::kPaged, StridedRows<const typename Config::T>, PagedRows<const typename Config::T>>;

// The keys or values of a key block and of those that follow, from the first row that this thread loads. Rows are
// counted from the first key that some row of the tile sees; those outside of the seen keys do not exist.
template <typename Config, typename Tile, int kLanes = Tile::kPanelChunks, typename Work>
__device__ KeyRows<Config> key_rows(const FwdParams& p, const TensorRef<const void>& x, const Work& work, int block) {
  using T = typename Config::T;
  const int head = work.tile.key_head, count = work.seen.last - work.seen.first + 1;
  const int row = block * Config::kKeys - work.seen.first + first_loaded_row<Config::kThreads, Tile, kLanes>();
  const int64_t first = work.seq.k.first + work.seen.first;
  if constexpr (!Config::kPaged) {
    return {first_token<T>(x, Span{work.seq.k.batch, first + row, count}, head), x.seqlen, row, count};
  } else {
    const int* pages = p.pages.block_table ? p.pages.block_table + work.tile.entry * p.pages.batch_stride : nullptr;
    return {.data = first_token<T>(x, Span{0, 0, 0}, head),
            .page_stride = x.batch,
            .stride = x.seqlen,
            .table = {pages, static_cast<unsigned>(p.pages.count) - 1, p.pages.page_size,
                      static_cast<int>(work.seq.k.batch), static_cast<int>(first), count},
            .row = row};
  }
}

// Loads a tile with channels `channel` .. cols - 1 of each row. `rows` starts at the first row that the thread loads;
// `step` is the stride of channels.
template <typename Config, bool kAllExist = false, typename Tile, typename Rows>
__device__ void load_own_rows(Tile& tile, Rows rows, const FwdParams& p, int cols, int64_t step, int channel = 0) {
  rows.data += channel * step;
  if (Config::kPlain || p.aligned) {
    load_own_rows_async<Config::kThreads, kAllExist>(tile, rows, cols - channel);
  } else {
    load_own_rows_scattered<Config::kThreads>(tile, rows, cols - channel, step);
  }
}

template <typename Config, typename Tile, typename Work>
__device__ void load_queries(Tile& tile, const FwdParams& p, const Tiling& tiling, const Work& work, int channel = 0) {
  with_query_rows<typename Config::T>(tiling, p.q, work, [&](auto rows) {
    rows.move(first_loaded_row<Config::kThreads, Tile>());
    load_own_rows<Config>(tile, rows, p, p.problem.head_dim, p.q.head_dim, channel);
  });
}

}  // namespace flash::flash_attn
