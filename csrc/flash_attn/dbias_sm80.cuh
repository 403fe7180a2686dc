// The gradient of the bias, for every GPU from sm_80 on, after the backward: dS, before the factor of softcap, added up
// along the dimensions in which one element of the bias serves all (dbias_plan.h):
//
//   S = Q K^T    P = exp(score(S) - lse)    dP = dO V^T Z / (1-p)    dbias = sum of P (dP - softmax_d)
//
// with the names of bwd_sm80.cuh. Products are thus computed once more, and the kernels of the backward need not know
// that there is such a gradient. In return, a sum stays in registers: a thread block makes a tile of dbias, 128 rows x
// 128 keys, from all scores that share its elements, its items. It adds them in one order and rounds once. With too few
// tiles for the GPU, several blocks divide the items of one, and a second kernel adds what they have found.
//
// Eight warps have 32 rows x 64 keys each. Both products take 64 channels of a row at a time, so that head dims are
// values of the problem. Their operands, chunks of Q and K or of dO and V, pass through a ring of stages in shared
// memory that reaches from one item into the next:
//
//   chunks of Q, K       S          then P
//   chunks of dO, V      dP         then sum += P (dP - softmax_d)
//
// Half of the warps turn S into P before their first products of dP, and the others after them, so that the tensor
// cores are busy meanwhile. All items of a tile have the same bias. Of the queries' type, it is copied to shared memory
// once, unless scores have features that instances of kAll are for: then lanes load their elements.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/launch.h"
#include "flash_attn/bias.cuh"
#include "flash_attn/bwd_scratch.cuh"
#include "flash_attn/dbias_plan.h"
#include "flash_attn/dropout.cuh"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/mask.cuh"
#include "flash_attn/params.h"
#include "flash_attn/schedule.cuh"
#include "flash_attn/score.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

template <typename T_, int kStages_>
struct DbiasConfig {
  using T = T_;
  static constexpr int kStages = kStages_;
  static constexpr int kRows = kDbiasRows, kKeys = kDbiasKeys, kChannels = 64;
  static constexpr int kWarpRows = 32, kWarpKeys = 64, kRowWarps = kRows / kWarpRows;
  static constexpr int kWarps = kRowWarps * (kKeys / kWarpKeys), kThreads = 32 * kWarps;
};

// A tile of dbias, or the part of its items that a thread block adds.
struct DbiasTile {
  int entry, head, slot;  // of the first item
  int key0;
  int split;
  int first_item, end_item;
};

// A tile of scores: query rows row0 .. row0 + 127 of an entry and head, and the keys of the tile of dbias.
struct DbiasItem {
  int index;  // among the items of the tile; end_item if there is none left
  int entry, head, row0;
  Sequence seq;
  RangedMask mask;
};

template <typename Config>
struct DbiasShared {
  using T = typename Config::T;
  SharedTile<T, Config::kRows, Config::kChannels> left[Config::kStages];   // of Q or dO
  SharedTile<T, Config::kKeys, Config::kChannels> right[Config::kStages];  // of K or V
  SharedTile<T, Config::kRows, Config::kKeys> bias;
  float sums[Config::kRowWarps][Config::kKeys];  // of the rows of each warp
  // Of the item that is computed, the one after it, which may be loaded already, and the one after that, which is
  // looked for while slow warps still compute the item before.
  DbiasItem items[4];
  DbiasTile tile;  // here because the loop has no registers to spare
};

template <typename Config>
struct DbiasSum {
  using T = typename Config::T;
  using Scores = Fragment<Config::kWarpRows, Config::kWarpKeys>;
  static constexpr int kLaneRows = Scores::kLaneRows;

  const PlannedDbias& p;
  const Problem& problem;
  DbiasShared<Config>& shared;
  const DbiasTile& tile;
  int stage = 0;                                    // of the chunk that is computed next
  int loaded_item = 0, loaded_chunk = 0, fill = 0;  // what is loaded next, and to which stage
  Scores sum;

  __device__ DbiasSum(const PlannedDbias& p, DbiasShared<Config>& shared)
      : p(p), problem(p.bwd.problem), shared(shared), tile(shared.tile) {}

  __device__ int warp_row() const { return warp_id() % Config::kRowWarps * Config::kWarpRows; }
  __device__ int warp_key() const { return warp_id() / Config::kRowWarps * Config::kWarpKeys; }
  __device__ Interval keys() const { return {tile.key0, tile.key0 + Config::kKeys - 1}; }
  __device__ DbiasItem& item(int n) const { return shared.items[n % 4]; }
  __device__ bool exists(int n) const { return item(n).index < tile.end_item; }

  // -------------------------------------------------------------------------------------------------------------------
  // Items

  // Sets entry and row0 for a slot of an entry; of packed ones, the slot tells which it is. All lanes of a warp call it
  // together.
  __device__ static void find_rows(const Problem& problem, int slot, int& entry, int& row0) {
    if (problem.cu_seqlens_q != nullptr) {
      entry = entry_of_slot(problem, slot, /*rows_per_token=*/1, Config::kRows);
      slot -= __ldg(problem.cu_seqlens_q + entry) / Config::kRows + entry;
    }
    row0 = slot * Config::kRows;
  }

  // Returns the index-th item of the tile. All lanes of a warp call it together.
  __device__ DbiasItem item_at(int index) const {
    const DbiasCounts& counts = p.plan.items;
    const int outer = index / counts.slots, head = tile.head + outer % counts.heads;
    int entry = tile.entry + outer / counts.heads * p.plan.entries_of_items, row0;
    find_rows(problem, tile.slot + index % counts.slots, entry, row0);
    const Sequence seq(problem, entry);
    const Interval rows = {row0, min(row0 + Config::kRows, seq.q.length) - 1};
    return {index, entry, head, row0, seq, RangedMask(problem, seq, head, rows)};
  }

  __device__ bool is_seen(const DbiasItem& x) const {
    return x.row0 < x.seq.q.length && !intersection(x.mask.keys_seen_by_any({}), keys()).empty();
  }

  // The first warp finds item n: the first one from `index` on of which something is seen.
  __device__ void find_item(int n, int index) const {
    if (warp_id() != 0) return;
    for (; index < tile.end_item; ++index) {
      const DbiasItem found = item_at(index);
      if (!is_seen(found)) continue;
      if (lane_id() == 0) item(n) = found;
      return;
    }
    if (lane_id() == 0) item(n).index = tile.end_item;
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Loads

  // Starts to load 64 channels of a tile's rows, from `channel` on. Rows and channels that do not exist become 0.
  template <typename Tile>
  __device__ void load_channels(Tile& target, const TensorRef<const void>& x, const Span& span, int head, int row0,
                                int channel, int channels) const {
    const T* first = first_token<T>(x, span, head) + row0 * x.seqlen + channel * x.head_dim;
    const StridedRows<const T> rows{first, x.seqlen, 0, span.length - row0};
    if (p.bwd.aligned) {
      load_async<Config::kThreads>(target, rows, channels - channel);
    } else {
      load_scattered<Config::kThreads>(target, rows, channels - channel, x.head_dim);
    }
  }

  // Starts to load the chunk after those that have been loaded, if there is one, and ends the group of copies.
  __device__ void load_next() {
    if (exists(loaded_item)) {
      const DbiasItem& x = item(loaded_item);
      const int head_k = x.head / (problem.heads / problem.heads_k);
      const int of_keys = problem.head_dim, chunks_of_keys = (of_keys + Config::kChannels - 1) / Config::kChannels;
      const bool first = loaded_chunk < chunks_of_keys;
      const int channels = first ? of_keys : problem.head_dim_v;
      const int channel = (first ? loaded_chunk : loaded_chunk - chunks_of_keys) * Config::kChannels;
      load_channels(shared.left[fill], first ? p.bwd.q : p.bwd.dout, x.seq.q, x.head, x.row0, channel, channels);
      load_channels(shared.right[fill], first ? p.bwd.k : p.bwd.v, x.seq.k, head_k, tile.key0, channel, channels);
      ++loaded_chunk;
      if (!first && channel + Config::kChannels >= channels) loaded_chunk = 0, ++loaded_item;
    }
    ptx::commit_copies();
    fill = fill + 1 == Config::kStages ? 0 : fill + 1;
  }

  // Waits for the next chunk, and starts to load another one to the stage that all warps have read.
  __device__ void await_chunk() {
    ptx::wait_copies<Config::kStages - 2>();
    __syncthreads();
    load_next();
  }

  // Whether the bias passes through shared memory.
  __device__ bool has_bias_tile() const {
    const Problem& x = problem;
    return x.bias.dtype == x.dtype && x.softcap == 0 && x.alibi_slopes == nullptr;
  }

  // Starts to copy the bias of item 0, in pairs of keys. If all rows have the same, only the first row is filled.
  __device__ void load_bias() const {
    const DbiasItem& x = item(0);
    const Bias& bias = problem.bias;
    const T* first =
        static_cast<const T*>(bias.data) + row_start(bias.rows, x.entry, x.head, x.seq.q.first + x.row0) + tile.key0;
    const int rows = bias.rows.seqlen == 0 ? 1 : min(Config::kRows, x.seq.q.length - x.row0);
    const int col0 = 2 * lane_id();
    for (int row = warp_id(); row < rows; row += Config::kWarps) {
#pragma unroll
      for (int col = col0; col < Config::kKeys; col += 64) {
        const uint32_t target = shared.bias.address(row, col / 8) + col % 8 * sizeof(T);
        ptx::copy_word_async(target, first + row * bias.rows.seqlen + col, tile.key0 + col < bias.keys);
      }
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Scores

  // s += the product of the next chunk.
  __device__ void multiply(Scores& s) {
    gemm<Config::kChannels>(s, along_cols(shared.left[stage], warp_row()), along_cols(shared.right[stage], warp_key()));
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  __device__ int row_of(const DbiasItem& x, int r) const { return x.row0 + warp_row() + Scores::row(r); }

  // values[r]: that of the lane's r-th row, or `beyond` for a row that does not exist.
  __device__ void load_values(float (&values)[kLaneRows], const float* first, const DbiasItem& x, float beyond) const {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int row = row_of(x, r);
      values[r] = row < x.seq.q.length ? first[row] : beyond;
    }
  }

  // Turns products into log2(e) times scores, with the bias in global memory.
  __device__ void score(Scores& s, const DbiasItem& x) const {
    const int col0 = tile.key0 + warp_key();
    scale_and_cap(s, problem);
    if (problem.alibi_slopes != nullptr) {
      const float slope = alibi_slope(problem, x.entry, x.head);
      float slopes[kLaneRows];
      int own_keys[kLaneRows];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) slopes[r] = slope, own_keys[r] = row_of(x, r) + x.mask.diagonal();
      subtract_distance(s, slopes, own_keys, col0);
    }
    int64_t starts[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int row = min(row_of(x, r), x.seq.q.length - 1);
      starts[r] = row_start(problem.bias.rows, x.entry, x.head, x.seq.q.first + row);
    }
    with_type<T>(problem.bias.dtype, [&](auto type) { load_and_add<decltype(type)>(s, problem.bias, starts, col0); });
  }

  // Turns products into scores, with the bias in shared memory.
  __device__ void score_with_tile(Scores& s) const {
    const bool repeats = problem.bias.rows.seqlen == 0;
    const auto& columns = columns_of<Config::kWarpKeys>(shared.bias, warp_id() / Config::kRowWarps);
#pragma unroll
    for (int slab = 0; slab < Scores::kSlabs; ++slab) {
      const auto bias = load_rows<T, Config::kWarpKeys>(columns, warp_row() + 16 * slab, repeats);
      scale_and_add(reinterpret_cast<Fragment<16, Config::kWarpKeys>&>(s.values[slab]), problem.softmax_scale, bias);
    }
  }

  // Turns scores into probabilities; those that have no bias yet are products. unit * (score - lse) is the exponent.
  // Exact scores are at most lse: see add_bias in bwd_elementwise.cuh.
  __device__ void probabilities(Scores& s, const DbiasItem& x, const float (&lse)[kLaneRows], float unit) const {
    if (has_bias_tile()) score_with_tile(s);
    if (!x.mask.keys_seen_by_all({}).covers(keys())) {
      int rows[kLaneRows];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) rows[r] = row_of(x, r);
      hide(s, x.mask, rows, tile.key0 + warp_key(), -INFINITY);
    }
    s.for_each([&](float& score, int r, int) { score = ptx::exp2((fminf(score, lse[r]) - lse[r]) * unit); });
  }

  // sum += P (dP - softmax_d). Hidden scores, whose P is 0, are left out: their dP may be NaN.
  __device__ void add(const Scores& probabilities, Scores& dp, const DbiasItem& x,
                      const float (&softmax_d)[kLaneRows]) {
    if (problem.rng_state != nullptr) {
      Dropout(problem, x.entry, x.head)
          .for_each_dropped(dp, x.row0 + warp_row(), tile.key0 + warp_key(), [&](int r, int c) { dp(r, c) = 0; });
    }
    dp.for_each([&](float& gradient, int r, int c) {
      const float weight = probabilities(r, c);
      if (weight != 0) sum(r, c) += weight * (gradient * problem.dropout_rescale - softmax_d[r]);
    });
  }

  // Adds item n, and finds the item after the next.
  __device__ void add_item(int n) {
    find_item(n + 2, item(n + 1).index + 1);
    const DbiasItem& x = item(n);
    float lse[kLaneRows], softmax_d[kLaneRows];
    load_values(lse, row_values(p.bwd.softmax_lse, problem, x.seq.q, x.head), x, INFINITY);
    load_values(softmax_d, softmax_d_of(p.bwd, x.seq.q, x.entry, x.head), x, 0);
    Scores s, dp;
    s.fill(0);
#pragma unroll 1
    for (int channel = 0; channel < problem.head_dim; channel += Config::kChannels) {
      await_chunk();
      multiply(s);
    }
    float unit = kLog2e;
    if (!has_bias_tile()) {
      unit = 1;
      for (float& value : lse) value *= kLog2e;
      score(s, x);
    }
    dp.fill(0);
    await_chunk();
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if ((turn == 0) == (warp_id() < Config::kWarps / 2)) {
        probabilities(s, x, lse, unit);
      } else {
        multiply(dp);
      }
    }
#pragma unroll 1
    for (int channel = Config::kChannels; channel < problem.head_dim_v; channel += Config::kChannels) {
      await_chunk();
      multiply(dp);
    }
    add(s, dp, x, softmax_d);
  }

  __device__ void add_items() {
    sum.fill(0);
    find_item(0, tile.first_item);
    __syncwarp();
    find_item(1, item(0).index + 1);
    __syncthreads();
    if (exists(0) && has_bias_tile()) load_bias();
#pragma unroll 1
    for (int i = 0; i < Config::kStages - 1; ++i) load_next();
#pragma unroll 1
    for (int n = 0; exists(n); ++n) add_item(n);
    ptx::wait_copies<0>();
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Results

  // Stores the sum to its rows in a tensor like dbias, at `data`.
  template <typename Element>
  __device__ void store_rows_of_sum(Element* data, int entry, const Span& span, int row0) const {
    const int64_t step = p.rows.seqlen;
    const int rows = span.length - row0, keys = p.keys - tile.key0 - warp_key();
    Element* first = data + row_start(p.rows, entry, tile.head, span.first + row0) + tile.key0 + warp_key();
    if constexpr (sizeof(Element) == 2) {
      if (p.keys % 8 == 0)
        return store_rows<Element>(sum, StridedRows<Element>{first, step, 0, rows}, warp_row(), keys);
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int row = warp_row() + sum.row(r);
#pragma unroll
      for (int c = 0; c < sum.kLaneCols; ++c) {
        if (row < rows && sum.col(c) < keys) first[row * step + sum.col(c)] = Element(sum(r, c));
      }
    }
  }

  // Stores the sums over the rows, where one row of dbias serves all.
  template <typename Element>
  __device__ void store_sum_of_rows(Element* data) {
#pragma unroll
    for (int c = 0; c < sum.kLaneCols; ++c) {
      float x = 0;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) x += sum(r, c);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
      if (lane_id() < 4) shared.sums[warp_id() % Config::kRowWarps][warp_key() + sum.col(c)] = x;
    }
    __syncthreads();
    const int key = threadIdx.x;
    if (key >= min(Config::kKeys, p.keys - tile.key0)) return;
    float total = 0;
    for (const auto& of_warp : shared.sums) total += of_warp[key];
    data[row_start(p.rows, tile.entry, tile.head, 0) + tile.key0 + key] = Element(total);
  }

  template <typename Element>
  __device__ void store_as(Element* data) {
    if (p.rows.seqlen == 0) return store_sum_of_rows(data);
    int entry = tile.entry, row0;
    find_rows(problem, tile.slot, entry, row0);
    store_rows_of_sum(data, entry, query_span(problem, entry), row0);
  }

  __device__ void store() {
    if (p.plan.splits > 1) return store_as(p.plan.partial + tile.split * p.plan.size);
    with_type<T>(p.dtype, [&](auto type) { store_as(static_cast<decltype(type)*>(p.dbias)); });
  }
};

// The tile of a thread block. Blocks that run at the same time take the tiles of the same entries and heads, and visit
// these in the same order, so that what they read is in the L2 cache.
__device__ inline DbiasTile tile_of_block(const DbiasPlan& plan) {
  int index = blockIdx.x;
  const auto take = [&](int count) {
    const int taken = index % count;
    index /= count;
    return taken;
  };
  const int key_block = take(plan.key_blocks), slot = take(plan.tiles.slots), head = take(plan.tiles.heads);
  const int entry = take(plan.tiles.entries) * plan.entries_of_tiles;
  const int first = index * plan.items_of_split;
  const int end = min(first + plan.items_of_split, plan.num_items);
  return {entry, head, slot, key_block * kDbiasKeys, index, min(first, end), end};
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void dbias_kernel(const __grid_constant__ PlannedDbias p) {
  auto& shared = shared_memory<DbiasShared<Config>>();
  if (threadIdx.x == 0) shared.tile = tile_of_block(p.plan);
  __syncthreads();
  DbiasSum<Config> sum(p, shared);
  sum.add_items();
  sum.store();
}

constexpr int kMergeThreads = 256;

// Adds the partial sums of all splits, in their order, and rounds.
template <typename Element>
__global__ __launch_bounds__(kMergeThreads) void merge_dbias_kernel(const __grid_constant__ PlannedDbias p) {
  const int64_t index = int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
  if (index >= p.plan.size) return;
  float sum = 0;
#pragma unroll 8  // keeps several loads in flight
  for (int split = 0; split < p.plan.splits; ++split) sum += p.plan.partial[split * p.plan.size + index];
  static_cast<Element*>(p.dbias)[index] = Element(sum);
}

template <typename Config>
void launch_dbias(const PlannedDbias& p, cudaStream_t stream) {
  const DbiasPlan& plan = p.plan;
  const LaunchShape shape{.grid = dim3(plan.num_tiles * plan.splits),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(DbiasShared<Config>)};
  launch<dbias_kernel<Config>>(shape, p, stream);
}

template <typename Element>
void launch_merge(const PlannedDbias& p, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(ceil_div(p.plan.size, kMergeThreads)), .block = dim3(kMergeThreads)};
  launch<merge_dbias_kernel<Element>>(shape, p, stream);
}

template <typename T>
void run_dbias(const PlannedDbias& p, cudaStream_t stream) {
  using Deep = DbiasConfig<T, 3>;
  const bool fits = sizeof(DbiasShared<Deep>) <= static_cast<size_t>(max_shared_bytes(current_device()));
  fits ? launch_dbias<Deep>(p, stream) : launch_dbias<DbiasConfig<T, 2>>(p, stream);
  if (p.plan.splits == 1) return;
  p.dtype == DType::kFloat32 ? launch_merge<float>(p, stream) : launch_merge<T>(p, stream);
}

}  // namespace flash::flash_attn
