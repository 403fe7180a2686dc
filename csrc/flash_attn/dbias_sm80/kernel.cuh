// The gradient of the bias, for every GPU from sm_80 on, after the backward: dS, before the factor of softcap, added up
// along the dimensions in which one element of the bias serves all (dbias_sm80/plan.h):
//
//   S = Q K^T    P = exp(score(S) - lse)    dP = dO V^T Z / (1-p)    dbias = sum of P (dP - softmax_d)
//
// with the names of bwd_sm80. Two products are thus computed once more, and the kernels of the backward need not
// know that there is such a gradient. In return, a sum stays in registers: a thread block makes a tile of dbias, 128
// rows x 128 keys, from all scores that share its elements, its items. It adds them in one order and rounds once. With
// too few tiles for the GPU, several blocks divide the items of one, and a second kernel adds what they have found.
//
// Blocks are persistent. Eight warps have 32 rows x 64 keys each. Both products take 64 channels of a row at a time, so
// that head dims are values of the problem. Their operands, chunks of Q and K or of dO and V, pass through a ring of
// stages in shared memory, which reaches from one item or tile into the next:
//
//   chunks of Q, K       S          then P
//   chunks of dO, V      dP         then sum += P (dP - softmax_d)
//
// Half of the warps turn S into P before their first products of dP, and the others after them, so that the tensor
// cores are busy meanwhile. All items of a tile have the same bias, which is copied to shared memory once, if it can be
// (copies_bias); if not, lanes load its elements, one row after the other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/launch.h"
#include "flash_attn/bwd/elementwise.cuh"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/dbias_sm80/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/bias.cuh"
#include "flash_attn/scores/dropout.cuh"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
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

// A split of a tile of dbias: those of its items that one thread block adds.
struct DbiasSplit {
  int entry, head, slot;  // of the first item of the tile
  int key0;
  int number;  // of the split in its tile
  Interval items;
};

// A tile of scores: query rows row0 .. row0 + 127 of an entry and head, and 128 keys.
struct DbiasItem {
  int split;  // among the splits of all tiles; not less than their number if there is no item any more
  int index;  // among the items of the tile
  int entry, head, row0, key0;
  Sequence seq;
  RangedMask mask;

  __device__ Interval keys() const { return {key0, key0 + kDbiasKeys - 1}; }
  __device__ bool is_seen() const {
    return row0 < seq.q.length && !intersection(mask.keys_seen_by_any({}), keys()).empty();
  }
  // Whether all rows that exist see all keys.
  __device__ bool is_whole() const { return mask.keys_seen_by_all({}).covers(keys()); }
};

template <typename Config>
struct DbiasShared {
  using T = typename Config::T;
  SharedTile<T, Config::kRows, Config::kChannels> left[Config::kStages];   // of Q or dO
  SharedTile<T, Config::kKeys, Config::kChannels> right[Config::kStages];  // of K or V
  SharedTile<T, Config::kRows, Config::kKeys> bias;
  float sums[Config::kRowWarps][Config::kKeys];  // over the rows of each warp
  // The item that is computed, the one before, the one after it, which may be loaded already, and the one after that,
  // which is being looked for.
  DbiasItem items[4];
};

// Which tiles a thread block makes of which items.
struct DbiasOrder {
  const DbiasPlan& plan;
  const Problem& problem;

  __device__ int num_splits() const { return plan.num_tiles * plan.splits; }

  // Blocks that run at the same time take tiles of the same entries and heads, and visit these in the same order, so
  // that what they read is in the L2 cache.
  __device__ DbiasSplit split_at(int index) const {
    const auto take = [&](const Divisor& count) {
      const int rest = count.divide(index), taken = count.remainder(index, rest);
      index = rest;
      return taken;
    };
    const int n_block = take(plan.n_blocks), slot = take(plan.tiles.slots), head = take(plan.tiles.heads);
    const int entry = take(plan.tiles.entries) * plan.entries_of_tiles, first = index * plan.items_of_split;
    const Interval items = {first, min(first + plan.items_of_split, plan.num_items) - 1};
    return {entry, head, slot, n_block * kDbiasKeys, /*number=*/index, items};
  }

  // The split that a thread block takes after another. Every second time, blocks take splits in reverse order: under a
  // mask, a block might otherwise always get those of which much is seen, or little.
  __device__ int next_split(int split) const {
    const int blocks = plan.blocks.value, round = plan.blocks.divide(split) + 1, own = blockIdx.x;
    return round * blocks + (round % 2 == 0 ? own : blocks - 1 - own);
  }

  // Sets the entry of packed rows to that which a slot belongs to, and returns the slot's first row. All lanes of a
  // warp call it together.
  __device__ int first_row(int slot, int& entry) const {
    if (problem.cu_seqlens_q == nullptr) return slot * kDbiasRows;
    entry = entry_of_slot(problem, slot, /*rows_per_token=*/1, kDbiasRows);
    return (slot - __ldg(problem.cu_seqlens_q + entry) / kDbiasRows - entry) * kDbiasRows;
  }

  // All lanes of a warp call it together.
  __device__ DbiasItem item_at(int split_index, const DbiasSplit& split, int index) const {
    const int outer = plan.items.slots.divide(index), step = plan.items.heads.divide(outer);
    const int head = split.head + plan.items.heads.remainder(outer, step);
    int entry = split.entry + step * plan.entries_of_items;
    const int row0 = first_row(split.slot + plan.items.slots.remainder(index, outer), entry);
    const Sequence seq(problem, entry);
    const Interval rows = {row0, min(row0 + kDbiasRows, seq.q.length) - 1};
    return {split_index, index, entry, head, row0, split.key0, seq, RangedMask(problem, seq, head, rows)};
  }

  // A warp finds the first item from the index-th of a split on of which something is seen, in this split or those that
  // follow.
  __device__ void find(DbiasItem& found, int split_index, int index) const {
    for (; split_index < num_splits(); split_index = next_split(split_index), index = 0) {
      const DbiasSplit split = split_at(split_index);
      for (index = max(index, split.items.first); index <= split.items.last; ++index) {
        const DbiasItem item = item_at(split_index, split, index);
        if (!item.is_seen()) continue;
        if (lane_id() == 0) found = item;
        return;
      }
    }
    if (lane_id() == 0) found.split = split_index;
  }
};

template <typename Config>
struct DbiasSum {
  using T = typename Config::T;
  using Scores = Fragment<Config::kWarpRows, Config::kWarpKeys>;
  using RowValues = float[Scores::kLaneRows];  // of the lane's rows

  const PlannedDbias& p;
  const Problem& problem;
  DbiasShared<Config>& shared;
  int stage = 0;                          // of the chunk that is computed next
  int loaded_item = 0, loaded_chunk = 0;  // what is loaded next
  Scores sum;

  __device__ DbiasSum(const PlannedDbias& p, DbiasShared<Config>& shared)
      : p(p), problem(p.bwd.problem), shared(shared) {}

  __device__ static int warp_row() { return warp_id() % Config::kRowWarps * Config::kWarpRows; }
  __device__ static int warp_key() { return warp_id() / Config::kRowWarps * Config::kWarpKeys; }
  __device__ static int row_of(const DbiasItem& x, int r) { return x.row0 + warp_row() + Scores::row(r); }
  __device__ DbiasOrder order() const { return {p.plan, problem}; }

  __device__ DbiasItem& item(int n) const { return shared.items[n % 4]; }
  __device__ bool exists(int n) const { return item(n).split < order().num_splits(); }
  __device__ void find_next_item(int n) const {
    if (warp_id() == 0) order().find(item(n + 1), item(n).split, item(n).index + 1);
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Loads

  __device__ bool repeats_row() const { return problem.bias.rows.seqlen == 0; }

  // Starts to copy the bias of an item. If all rows have the same, only the first row is filled.
  __device__ void load_bias(const DbiasItem& x) const {
    const Bias& bias = problem.bias;
    const int64_t first = row_start(bias.rows, x.entry, x.head, x.seq.q.first + x.row0) + x.key0;
    const int rows = repeats_row() ? 1 : x.seq.q.length - x.row0;
    load_async<Config::kThreads>(
        shared.bias, StridedRows<const T>{static_cast<const T*>(bias.data) + first, bias.rows.seqlen, 0, rows},
        bias.keys - x.key0);
  }

  // Starts to load 64 channels, from `channel` on, of rows from row0 on. Those that do not exist become 0.
  template <typename Tile>
  __device__ void load_channels(Tile& tile, const TensorRef<const void>& x, const Span& span, int head, int row0,
                                int channel, int channels) const {
    const T* first = first_token<T>(x, span, head) + row0 * x.seqlen + channel * x.head_dim;
    const StridedRows<const T> rows{first, x.seqlen, 0, span.length - row0};
    if (p.bwd.aligned) {
      load_async<Config::kThreads>(tile, rows, channels - channel);
    } else {
      load_scattered<Config::kThreads>(tile, rows, channels - channel, x.head_dim);
    }
  }

  // Starts to load the next chunk, if there is one, and ends the group of copies.
  __device__ void load_chunk(int to_stage) {
    if (exists(loaded_item)) {
      const DbiasItem& x = item(loaded_item);
      const int of_keys = (problem.head_dim + Config::kChannels - 1) / Config::kChannels;
      const bool scores = loaded_chunk < of_keys;
      const int channels = scores ? problem.head_dim : problem.head_dim_v;
      const int channel = (scores ? loaded_chunk : loaded_chunk - of_keys) * Config::kChannels;
      const int head_k = p.plan.heads_of_key.divide(x.head);
      load_channels(shared.left[to_stage], scores ? p.bwd.q : p.bwd.dout, x.seq.q, x.head, x.row0, channel, channels);
      load_channels(shared.right[to_stage], scores ? p.bwd.k : p.bwd.v, x.seq.k, head_k, x.key0, channel, channels);
      ++loaded_chunk;
      if (!scores && channel + Config::kChannels >= channels) loaded_chunk = 0, ++loaded_item;
    }
    ptx::commit_copies();
  }

  // Waits for the chunk in `stage`, and then starts to load another one, and the bias of an item if it is given, to
  // where all warps have read. all: waits for all copies.
  __device__ void await_chunk(const DbiasItem* of_bias = nullptr, bool all = false) {
    all ? ptx::wait_copies<0>() : ptx::wait_copies<Config::kStages - 2>();
    __syncthreads();
    if (of_bias != nullptr) load_bias(*of_bias);
    load_chunk(stage == 0 ? Config::kStages - 1 : stage - 1);
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Scores

  // s += the product of the chunk in `stage`.
  __device__ void multiply(Scores& s) {
    gemm<Config::kChannels>(s, along_cols(shared.left[stage], warp_row()), along_cols(shared.right[stage], warp_key()));
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // beyond: of rows that do not exist.
  __device__ static void load_values(RowValues& values, const float* first, const DbiasItem& x, float beyond) {
#pragma unroll
    for (int r = 0; r < Scores::kLaneRows; ++r) {
      const int row = row_of(x, r);
      values[r] = row < x.seq.q.length ? first[row] : beyond;
    }
  }

  // Turns products into scores, with the bias in global memory.
  __device__ void score(Scores& s, const DbiasItem& x) const {
    const int col0 = x.key0 + warp_key();
    scale_and_cap(s, problem);
    if (problem.alibi_slopes != nullptr) {
      const float slope = alibi_slope(problem, x.entry, x.head);
      RowValues slopes;
      int own_keys[s.kLaneRows];
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) slopes[r] = slope, own_keys[r] = row_of(x, r) + x.mask.diagonal();
      subtract_distance(s, slopes, own_keys, col0);
    }
    int64_t starts[s.kLaneRows];
#pragma unroll
    for (int r = 0; r < s.kLaneRows; ++r) {
      const int row = min(row_of(x, r), x.seq.q.length - 1);
      starts[r] = row_start(problem.bias.rows, x.entry, x.head, x.seq.q.first + row);
    }
    with_type<T>(problem.bias.dtype, [&](auto type) { load_and_add<decltype(type)>(s, problem.bias, starts, col0); });
  }

  // Turns products into scores, with the bias in shared memory.
  __device__ void score_with_tile(Scores& s) const {
    const auto& columns = columns_of<Config::kWarpKeys>(shared.bias, warp_key() / Config::kWarpKeys);
#pragma unroll
    for (int slab = 0; slab < s.kSlabs; ++slab) {
      const auto bias = load_rows<T, Config::kWarpKeys>(columns, warp_row() + 16 * slab, repeats_row());
      scale_and_add(reinterpret_cast<Fragment<16, Config::kWarpKeys>&>(s.values[slab]), problem.softmax_scale, bias);
    }
  }

  // Turns scores into probabilities; those whose bias is in shared memory are products yet.
  __device__ void probabilities(Scores& s, const DbiasItem& x, const RowValues& lse, const RowValues& lo_log2) const {
    if (p.plan.copies_bias) score_with_tile(s);
    if (!x.is_whole()) {
      int rows[s.kLaneRows];
#pragma unroll
      for (int r = 0; r < s.kLaneRows; ++r) rows[r] = row_of(x, r);
      hide(s, x.mask, rows, x.key0 + warp_key(), -INFINITY);
    }
    s.for_each(
        [&](float& score, int r, int) { score = ptx::exp2(relative_score(score, lse[r]) * kLog2e - lo_log2[r]); });
  }

  // sum += P (dP - softmax_d). Hidden scores, whose P is 0, are left out: their dP may be NaN.
  __device__ void add(const Scores& probabilities, Scores& dp, const DbiasItem& x, const RowValues& softmax_d) {
    if (problem.rng_state != nullptr) {
      Dropout(problem, x.entry, x.head)
          .for_each_dropped(dp, x.row0 + warp_row(), x.key0 + warp_key(), [&](int r, int c) { dp(r, c) = 0; });
    }
    dp.for_each([&](float& gradient, int r, int c) {
      const float weight = probabilities(r, c);
      if (weight != 0) sum(r, c) += weight * (gradient * problem.dropout_rescale - softmax_d[r]);
    });
  }

  // Adds item n, and finds the item after the next.
  __device__ void add_item(int n) {
    const DbiasItem& x = item(n);
    const bool has_new_bias = p.plan.copies_bias && (n == 0 || x.split != item(n - 1).split);
    RowValues lse, lo_log2{}, softmax_d;
    load_values(lse, row_values(p.bwd.softmax_lse, problem, x.seq.q, x.head), x, INFINITY);
    if (p.bwd.lse_lo != nullptr) {
      load_values(lo_log2, row_values(p.bwd.lse_lo, problem, x.seq.q, x.head), x, 0);
      for (float& value : lo_log2) value *= kLog2e;
    }
    load_values(softmax_d, softmax_d_of(p.bwd, x.seq.q, x.entry, x.head), x, 0);
    Scores s, dp;
    s.fill(0);
    await_chunk(has_new_bias ? &x : nullptr);
    find_next_item(n + 1);
    multiply(s);
#pragma unroll 1
    for (int channel = Config::kChannels; channel < problem.head_dim; channel += Config::kChannels) {
      await_chunk();
      multiply(s);
    }
    if (!p.plan.copies_bias) score(s, x);
    dp.fill(0);
    await_chunk(nullptr, /*all=*/has_new_bias);
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      if ((phase == 0) == (warp_id() < Config::kWarps / 2)) {
        probabilities(s, x, lse, lo_log2);
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

  // -------------------------------------------------------------------------------------------------------------------
  // Results

  // Stores the sum to a tensor like dbias, at `data`.
  template <typename Element>
  __device__ void store_tile(Element* data, const DbiasSplit& split) const {
    int entry = split.entry;
    const int row0 = order().first_row(split.slot, entry);
    const Span span = query_span(problem, entry);
    const int rows = max(0, span.length - row0);  // of packed entries, a slot may have none
    const int col0 = split.key0 + warp_key(), cols = p.keys - col0;
    Element* first = data + row_start(p.rows, entry, split.head, span.first + row0) + col0;
    if constexpr (sizeof(Element) == 2) {
      const StridedRows<Element> to_rows{first, p.rows.seqlen, 0, rows};
      if (p.keys % 8 == 0) return store_rows<Element>(sum, to_rows, warp_row(), cols);
    }
#pragma unroll
    for (int r = 0; r < sum.kLaneRows; ++r) {
      const int row = warp_row() + sum.row(r), end = row < rows ? cols : 0;
      Element* target = first + row * p.rows.seqlen + sum.col(0);
#pragma unroll
      for (int c = 0; c < sum.kLaneCols; ++c) {
        if (sum.col(c) < end) target[c / 2 * 8 + c % 2] = Element(sum(r, c));
      }
    }
  }

  // The same where one row of dbias serves all: the sum over the rows, too.
  template <typename Element>
  __device__ void store_sum_of_rows(Element* data, const DbiasSplit& split) const {
#pragma unroll
    for (int c = 0; c < sum.kLaneCols; ++c) {
      float x = 0;
#pragma unroll
      for (int r = 0; r < sum.kLaneRows; ++r) x += sum(r, c);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
      if (lane_id() < 4) shared.sums[warp_id() % Config::kRowWarps][warp_key() + sum.col(c)] = x;
    }
    __syncthreads();
    const int col = threadIdx.x;
    if (col < min(Config::kKeys, p.keys - split.key0)) {
      float x = 0;
      for (const auto& of_warp : shared.sums) x += of_warp[col];
      data[row_start(p.rows, split.entry, split.head, 0) + split.key0 + col] = Element(x);
    }
    __syncthreads();
  }

  template <typename Element>
  __device__ void store_as(Element* data, const DbiasSplit& split) const {
    p.rows.seqlen == 0 ? store_sum_of_rows(data, split) : store_tile(data, split);
  }

  // Stores the sum as that of a split, and zeros for the splits between this and the split `end`, of which nothing is
  // seen.
  __device__ void store_splits(int index, int end) {
    for (; index != end && index < order().num_splits(); index = order().next_split(index)) {
      const DbiasSplit split = order().split_at(index);
      if (p.plan.splits > 1 || p.dtype == DType::kFloat32) {
        float* partial = p.plan.partial + split.number * p.plan.size;
        store_as(p.plan.splits > 1 ? partial : static_cast<float*>(p.dbias), split);
      } else {
        store_as(static_cast<T*>(p.dbias), split);
      }
      sum.fill(0);
    }
  }

  // Finds the first two items, and fills the ring but for one stage.
  __device__ void prologue() {
    sum.fill(0);
    if (warp_id() == 0) order().find(item(0), blockIdx.x, 0);
    __syncwarp();
    find_next_item(0);
    __syncthreads();
#pragma unroll 1
    for (int to_stage = 0; to_stage < Config::kStages - 1; ++to_stage) load_chunk(to_stage);
  }

  // Items 0 and 1, with one chunk of 64 channels each:
  //
  //   copies     Q0, K0 | dO0, V0      | Q1, K1             | dO1, V1            |
  //   warps 0-3         | S0 = Q0 K0   | exp P0             | dP0 = dO0 V0       | sum += P0 (dP0 - softmax_d) | S1 ...
  //   warps 4-7         | S0 = Q0 K0   | dP0 = dO0 V0       | exp P0             | sum += P0 (dP0 - softmax_d) | S1 ...
  //
  // The epilogue, store_splits, comes whenever the items of a split end; copies go on meanwhile.
  __device__ void run() {
    prologue();
    int split = blockIdx.x;  // that the sum belongs to
#pragma unroll 1
    for (int n = 0;; ++n) {
      store_splits(split, item(n).split);
      if (!exists(n)) return;
      split = item(n).split;
      add_item(n);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void dbias_kernel(const __grid_constant__ PlannedDbias p) {
  DbiasSum<Config>(p, shared_memory<DbiasShared<Config>>()).run();
}

constexpr int kMergeThreads = 256;

// Adds the sums of the splits of each tile, in their order, and rounds.
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
  const LaunchShape shape{
      .grid = dim3(p.plan.blocks.value), .block = dim3(Config::kThreads), .shared_bytes = sizeof(DbiasShared<Config>)};
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
  using Flat = DbiasConfig<T, 2>;
  static_assert(sizeof(DbiasShared<Flat>) <= kLeastSharedBytes);
  const bool fits = sizeof(DbiasShared<Deep>) <= static_cast<size_t>(max_shared_bytes(current_device()));
  fits ? launch_dbias<Deep>(p, stream) : launch_dbias<Flat>(p, stream);
  if (p.plan.splits == 1) return;
  p.dtype == DType::kFloat32 ? launch_merge<float>(p, stream) : launch_merge<T>(p, stream);
}

}  // namespace flash::flash_attn
