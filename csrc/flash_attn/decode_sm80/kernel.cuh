// Attention of few query rows over many keys (decoding), for every GPU from sm_80 on, by the formulas of fwd_sm80.
// It is bound by the bandwidth at which K and V arrive. So all warps of a thread block share one tile of 16 query rows,
// those of the heads that share a key head, and divide the keys among themselves.
//
// Each warp is a pipeline of its own: it takes every num_warps-th chunk of 16 keys, keeps kStages of them in flight to
// its own part of shared memory (cp.async), and synchronizes with no other warp. Q and O are in registers. In the end
// the warps merge their results through shared memory, and thread blocks with other splits of the keys through global
// memory: the last to arrive merges in the order of the splits, so that the result does not depend on which is last.
//
// The kernel can also append new keys and values to the cache (append.cuh), which saves a launch. While its first
// chunks are in flight, a thread block rotates its queries, and the new keys that fall in its split, into shared
// memory. Once a chunk has arrived, the warp that has it writes the new keys into their place in the chunk and in the
// cache.
//
// Beyond 256 channels, a team of two warps shares each chunk: each has half of the channels and is a pipeline as above,
// except that they exchange partial sums of S and so wait for each other.
//
// Where the cache is small, most of the time passes before the first copy, after the last product, and in fetching
// instructions. So the code is kept short.
#pragma once

#include <type_traits>

#include "common/launch.h"
#include "flash_attn/cache/append.cuh"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/split.cuh"
#include "flash_attn/fwd/steps.cuh"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/instances.h"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/partial_scores.cuh"
#include "flash_attn/scores/softmax.cuh"
#include "ptx/barrier.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

struct AppendingDecodeParams : DecodeParams {
  AppendParams append;
};

template <typename T_, int kHeadDim_, Features kFeatures_, bool kPaged_, bool kAppends_ = false>
struct DecodeConfig {
  using T = T_;
  using Params = std::conditional_t<kAppends_, AppendingDecodeParams, DecodeParams>;
  static constexpr bool kAppends = kAppends_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = has_plain_scores(kFeatures), kRanged = takes_ranges(kFeatures);
  static constexpr bool kPaged = kPaged_;
  static constexpr int kRows = kDecodeRows, kKeys = kDecodeKeys, kWarpRows = kRows;
  static constexpr int kThreads = 32;  // that load a tile together: a warp
  static constexpr int kParts = channel_slices(kHeadDim), kChannels = kHeadDim / kParts, kChannelsV = kChannels;
  static constexpr int kStages = decode_stages(kChannels);
};

// A warp's part of the thread block's work. A team consists of one warp for each part of the channels.
template <typename Config>
struct TeamMember {
  int team = warp_id() / Config::kParts, num_teams = blockDim.x / (32 * Config::kParts);
  int channel = warp_id() % Config::kParts * Config::kChannels;  // the warp's first
};

template <typename Config>
struct DecodeStage {
  SharedTile<typename Config::T, Config::kKeys, Config::kChannels> k, v;
};

// The same with partial scores for the team's other warp. That warp reads them before it comes to the team's next
// barrier, and so before this warp uses the stage again.
template <typename Config>
struct SharedDecodeStage : DecodeStage<Config> {
  PartialScores<Config::kRows, Config::kKeys> partial;
};

template <typename Config>
using RingStage = std::conditional_t<Config::kParts == 1, DecodeStage<Config>, SharedDecodeStage<Config>>;

struct RowState {
  float max, sum;
};

// A warp's share of the dynamic shared memory: its stages and, in the end, its O. The padding puts rows of O an odd
// multiple of 8 banks apart, so that the four rows that a half-warp stores with 8-byte accesses do not conflict.
template <typename Config>
union DecodeRing {
  static constexpr int kRowStride = Config::kChannels + 8;
  RingStage<Config> stages[Config::kStages];
  struct {
    float out[Config::kRows][kRowStride];  // relative to the maxima in states
    RowState states[Config::kRows];
  } result;

  __device__ DecodeRing() {}
};

// Loads Q as the left operand of an mma straight from global memory: a lane needs pairs of elements of two rows. Rows
// past the last read the last one; their results are not stored.
template <typename Config>
__device__ auto load_query_fragment(const DecodeParams& p, const FwdWork<Config>& work) {
  using T = typename Config::T;
  PackedFragment<T, Config::kRows, Config::kChannels> q;
  auto rows = packed_rows<T>(p.q, work);
  const TeamMember<Config> own;
#pragma unroll
  for (int r = 0; r < Config::kRows / 8; ++r) {
    if (8 * r >= work.rows.count) break;
    rows.row = min(Output<Config>::row(r), work.rows.count - 1);
    const int first_col = own.channel + Output<Config>::col(0), cols = p.problem.head_dim - first_col;
    const T* row = rows.address() + first_col * p.q.head_dim;
    const auto element = [&](int col) { return col < cols ? static_cast<float>(row[col * p.q.head_dim]) : 0.f; };
#pragma unroll
    for (int i = 0; i < Config::kChannels / 8; ++i) {
      if (Config::kPlain || p.aligned) {
        q.pair(r, i) = 8 * i < cols ? __ldg(reinterpret_cast<const uint32_t*>(row) + 4 * i) : 0;
      } else {
        q.pair(r, i) = ptx::pack<T>(element(8 * i), element(8 * i + 1));
      }
    }
  }
  return q;
}

// What a thread block that appends has in shared memory behind its rings: its rotated queries, and the new keys and
// values of its split.
template <typename Config>
struct FreshRows {
  using Row = typename Config::T[decode_fresh_stride(Config::kHeadDim)];
  alignas(16) Row q[Config::kRows];
  alignas(16) Row k[kMostAppended], v[kMostAppended];
};

// How the kernel gets its queries and new keys if it appends. Step<Config> is this or OnlyReading.
template <typename Config>
struct Appending {
  using T = typename Config::T;
  const AppendParams& p;
  const FwdWork<Config>& work;
  FreshRows<Config>& fresh;
  int before;       // the position of new token 0 in the cache
  Interval tokens;  // the new tokens whose keys are in the thread block's split
  const TeamMember<Config> own;

  __device__ Appending(const AppendingDecodeParams& params, const FwdWork<Config>& work, void* shared)
      : p(params.append),
        work(work),
        fresh(*static_cast<FreshRows<Config>*>(shared)),
        before(length_before(p, work.tile.entry)) {
    const int end = min((work.n_blocks.last + 1) * Config::kKeys, work.seq.k.length);
    tokens = intersection({0, p.seqlen_new - 1}, {work.n_blocks.first * Config::kKeys - before, end - 1 - before});
  }

  // Fills `fresh`, each warp a row at a time. All threads of the thread block must call it together.
  __device__ void prepare() const {
    const int queries = work.rows.count, keys = max(0, tokens.last - tokens.first + 1);
#pragma unroll 1
    for (int i = warp_id(); i < queries + 2 * keys; i += blockDim.x / 32) {
      const bool is_query = i < queries, is_key = !is_query && i < queries + keys;
      const int index = is_query ? i : is_key ? i - queries : i - queries - keys;
      const int token = is_query ? work.rows.token(i) : tokens.first + index;
      const int head = is_query ? work.tile.head + work.rows.head(i) : work.tile.key_head;
      const TensorRef<const void>& from = is_query ? p.q : is_key ? p.k : p.v;
      T* to = is_query ? fresh.q[index] : is_key ? fresh.k[index] : fresh.v[index];
      const int position = before + (is_query && !p.queries_advance ? 0 : token);
      move_head<Config::kHeadDim>(p, p.problem.head_dim, first_token<T>(from, Span{work.tile.entry, token, 1}, head),
                                  from.head_dim, to, 1, position, (is_query || is_key) && has_table_row(p, position));
    }
    __syncthreads();
  }

  __device__ auto queries() const {
    PackedFragment<T, Config::kRows, Config::kChannels> q;
#pragma unroll
    for (int r = 0; r < Config::kRows / 8; ++r) {
      if (8 * r >= work.rows.count) break;
      const int first_col = own.channel + Output<Config>::col(0), cols = p.problem.head_dim - first_col;
      const T* row = fresh.q[min(Output<Config>::row(r), work.rows.count - 1)] + first_col;
#pragma unroll
      for (int i = 0; i < Config::kChannels / 8; ++i) {
        q.pair(r, i) = 8 * i < cols ? *reinterpret_cast<const uint32_t*>(row + 8 * i) : 0;
      }
    }
    return q;
  }

  // Puts the new keys and values of a chunk that has arrived into its stage and into the cache.
  __device__ void append(DecodeStage<Config>& stage, int chunk) const {
    const int first = chunk * Config::kKeys - before;
    const Interval own = intersection(tokens, {first, first + Config::kKeys - 1});
#pragma unroll 1
    for (int token = own.first; token <= own.last; ++token) {
      const int index = token - tokens.first;
      put(stage.k, token - first, fresh.k[index], p.k_cache, before + token);
      put(stage.v, token - first, fresh.v[index], p.v_cache, before + token);
    }
    __syncwarp();
  }

 private:
  template <typename Tile>
  __device__ void put(Tile& tile, int row, const T* from, const TensorRef<>& cache, int position) const {
    T* to = first_token<T>(cache, Span{work.seq.k.batch, position, 1}, work.tile.key_head);
    static_assert(Tile::kCols <= 32 * Tile::kChunk);
    const int col = own.channel + lane_id() * Tile::kChunk;
    if (col >= p.problem.head_dim) return;
    const auto chunk = load<Tile::kChunk>(from + col);
    store(tile.chunk(row, lane_id()), chunk);
    store(to + col, chunk);
  }
};

// The same if all keys are in the cache already.
template <typename Config>
struct OnlyReading {
  const DecodeParams& p;
  const FwdWork<Config>& work;

  __device__ OnlyReading(const DecodeParams& p, const FwdWork<Config>& work, void*) : p(p), work(work) {}
  __device__ void prepare() const {}
  __device__ auto queries() const { return load_query_fragment<Config>(p, work); }
  __device__ void append(DecodeStage<Config>&, int) const {}
};

template <typename Config>
using Step = std::conditional_t<Config::kAppends, Appending<Config>, OnlyReading<Config>>;

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

// Starts the copies of a warp's chunks of K and V, one after the other. The pages of a chunk's rows are looked up one
// chunk ahead, so that no copy waits for the block table.
template <typename Config>
struct ChunkLoader {
  using T = const typename Config::T;
  using Tile = decltype(RingStage<Config>::k);
  using Places = LoadedPlaces<Tile, 32>;
  const DecodeParams& p;
  int chunk, last, step, channel;
  KeyRows<Config> keys, values;
  Places found;  // of the chunk's rows; unused without pages

  __device__ ChunkLoader(const DecodeParams& p, const FwdWork<Config>& work, int first, const TeamMember<Config>& own)
      : p(p),
        chunk(first),
        last(work.n_blocks.last),
        step(own.num_teams),
        channel(own.channel),
        keys(key_rows<Config, Tile>(p, p.k, work, first)),
        values(key_rows<Config, Tile>(p, p.v, work, first)) {
    keys.data += own.channel * p.k.head_dim;
    values.data += own.channel * p.v.head_dim;
    look_up();
  }

  __device__ void load(DecodeStage<Config>& stage) {
    if (chunk <= last) {
      if (Config::kPlain || p.aligned) {
        copy(stage.k, keys, p.problem.head_dim - channel);
        copy(stage.v, values, head_dim_v<Config::kPlain>(p.problem) - channel);
      } else {
        load_own_rows_scattered<32>(stage.k, keys, p.problem.head_dim - channel, p.k.head_dim);
        load_own_rows_scattered<32>(stage.v, values, p.problem.head_dim_v - channel, p.v.head_dim);
      }
    }
    ptx::commit_copies();
    chunk += step;
    keys.move(step * Config::kKeys);
    values.move(step * Config::kKeys);
    look_up();
  }

 private:
  __device__ void look_up() {
    if constexpr (Config::kPaged) {
      if (chunk <= last) found.find(keys.table, keys.row);
    }
  }

  __device__ void copy(Tile& tile, const KeyRows<Config>& rows, int cols) const {
    const uint64_t policy = ptx::cache_policy(p.plan.evict_keys);
    const auto copy_chunk = [policy](uint32_t shared, const void* global, bool valid) {
      ptx::copy_async(shared, global, valid, policy);
    };
    if constexpr (Config::kPaged) {
      load_own_rows_async<32, false>(tile, FoundRows<T, Places>(rows, found), cols, copy_chunk);
    } else {
      load_own_rows_async<32, false>(tile, rows, cols, copy_chunk);
    }
  }
};

// Adds the partial scores of the team's other warp. Barriers 1 .. 4 are those of the teams.
template <typename Config>
__device__ void add_other_part(Scores<Config>& s, DecodeRing<Config>* rings, int stage, int team) {
  if constexpr (Config::kParts == 2) {
    rings[warp_id()].stages[stage].partial.store(s, lane_id());
    ptx::sync_barrier<64>(1 + team);
    rings[warp_id() ^ 1].stages[stage].partial.add_to(s, lane_id());
  }
}

// A warp's loop over its chunks.
template <typename Config>
__device__ void decode_chunks(const typename Config::Params& p, const FwdWork<Config>& work, DecodeRing<Config>* rings,
                              Output<Config>& o, Softmax<Config>& softmax) {
  using T = typename Config::T;
  DecodeRing<Config>& ring = rings[warp_id()];
  const TeamMember<Config> own;
  const int first = work.n_blocks.first + own.team, last = work.n_blocks.last;
  const Step<Config> step(p, work, rings + blockDim.x / 32);
  ChunkLoader<Config> loader(p, work, first, own);
#pragma unroll 1
  for (RingStage<Config>& stage : ring.stages) loader.load(stage);
  step.prepare();
  const auto q = step.queries();
  prefetch_targets<Config>(p, work);
  const Interval whole = work.unmasked_n_blocks();

  int stage = 0;
  for (int n = first; n <= last; n += own.num_teams) {
    BlockBias<Config> bias(p.problem, work, /*warp_row=*/0, n);
    ptx::wait_copies<Config::kStages - 1>();
    __syncwarp();
    step.append(ring.stages[stage], n);
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kChannels>(s, q, along_cols(ring.stages[stage].k));
    add_other_part<Config>(s, rings, stage, own.team);
    make_scores<Config>(s, bias, p, work, /*warp_row=*/0, n, !whole.covers(n));
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) o.scale_rows(shrink);
    gemm<Config::kKeys>(o, pack<T>(s), along_rows(ring.stages[stage].v));
    __syncwarp();
    loader.load(ring.stages[stage]);
    stage = stage == Config::kStages - 1 ? 0 : stage + 1;
  }
  ptx::wait_copies<0>();
  softmax.finish();
  // Before store_in_ring overwrites the partial scores that the team's other warp may still have to read.
  if constexpr (Config::kParts == 2) ptx::sync_barrier<64>(1 + own.team);
}

// Stores the result of a warp in its ring, for the merge.
template <typename Config>
__device__ void store_in_ring(DecodeRing<Config>& ring, const Output<Config>& o, const Softmax<Config>& softmax,
                              int num_rows) {
  __syncwarp();  // the result overwrites the stages, which all lanes have read now
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    if (8 * r >= num_rows) break;
    if (lane_id() % 4 == 0) ring.result.states[o.row(r)] = {softmax.max[r], softmax.sum[r]};
#pragma unroll
    for (int c = 0; c < o.kLaneCols; c += 2) {
      *reinterpret_cast<float2*>(&ring.result.out[o.row(r)][o.col(c)]) = {o(r, c), o(r, c + 1)};
    }
  }
}

__device__ inline void add_scaled(Quad& a, const Quad& b, float factor) {
  a.state.sum += b.state.sum * factor;
  a.out = {a.out.x + b.out.x * factor, a.out.y + b.out.y * factor, a.out.z + b.out.z * factor,
           a.out.w + b.out.w * factor};
}

// Merges the quads of `count` parts of the keys; part(i) reads one. kBatch reads are in flight at a time.
template <int kBatch, typename Part>
__device__ Quad merge(int count, float scale_log2, Part&& part) {
  Quad all{{-INFINITY, 0}, {}};
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    Quad parts[kBatch], sum{all.state, {}};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      parts[i] = first + i < count ? part(first + i) : Quad{{-INFINITY, 0}, {}};
      sum.state.max = fmaxf(sum.state.max, parts[i].state.max);
    }
    sum.state.sum = 0;
    add_scaled(sum, all, weight_of(all.state.max, sum.state.max, scale_log2));
#pragma unroll
    for (const Quad& x : parts) add_scaled(sum, x, weight_of(x.state.max, sum.state.max, scale_log2));
    all = sum;
  }
  return all;
}

// Calls fn(row, col) for every fourth column of the tile's rows, distributed over the threads of the thread block.
template <typename Config, typename Fn>
__device__ void for_each_quad(const TileRows& rows, Fn&& fn) {
  constexpr int kQuads = Config::kHeadDim / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows.count * kQuads; i += blockDim.x) fn(i / kQuads, i % kQuads * 4);
}

// Stores four channels of a row, from `col` on, to a tensor shaped like out.
template <typename Config>
__device__ void store_to(const TensorRef<>& x, const DecodeParams& p, const FwdWork<Config>& work, int row, int col,
                         const float (&values)[4]) {
  using T = typename Config::T;
  auto rows = packed_rows<T>(x, work);
  rows.row = row;
  T* target = rows.address();
  if (Config::kPlain || p.aligned) {
    if (col < head_dim_v<Config::kPlain>(p.problem)) store(target + col, narrow<T>(values));
  } else {
    for (int i = 0; i < min(4, p.problem.head_dim_v - col); ++i) target[(col + i) * x.head_dim] = values[i];
  }
}

// Stores a quad of out and, if it is an output, of out_lo; the thread with a row's first quad also stores lse and
// row_max.
template <typename Config>
__device__ void store_result(const DecodeParams& p, const FwdWork<Config>& work, int row, int col, float scale_log2,
                             const Quad& x) {
  using T = typename Config::T;
  const float sink = sink_of(p, work, row), sum = x.state.sum + exp_of_sink(sink, x.state.max, scale_log2);
  const float factor = sum == 0 ? 0.f : ptx::reciprocal(sum);
  float values[4] = {x.out.x * factor, x.out.y * factor, x.out.z * factor, x.out.w * factor};
  store_to<Config>(p.out, p, work, row, col, values);
  if (p.out_lo.data != nullptr) {
    float rounded[4];
    widen(rounded, narrow<T>(values));
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] -= rounded[i];
    store_to<Config>(p.out_lo, p, work, row, col, values);
  }
  if (col != 0) return;
  const LogSumExp lse = log_sum_exp(sink, x.state.max, sum, scale_log2);
  store_row<Config>(p, work, row, lse, largest_score(x.state.max, scale_log2));
}

template <typename Config>
__global__ __launch_bounds__(32 * kMaxDecodeWarps,
                             1) void decode_kernel(const __grid_constant__ typename Config::Params p) {
  ptx::wait_for_dependency();
  const FwdWork<Config> work(p, p.plan.tiling, p.plan.splits);
  if (!work.exists()) return;
  auto* rings = &shared_memory<DecodeRing<Config>>();
  Output<Config> o;
  o.fill(0);
  Softmax<Config> softmax(score_scale_log2<Config::kFeatures>(p.problem));
  if (!work.n_blocks.empty()) decode_chunks<Config>(p, work, rings, o, softmax);
  store_in_ring(rings[warp_id()], o, softmax, work.rows.count);
  __syncthreads();

  const auto merge_warps = [&](int row, int col) {
    const int part = col / Config::kChannels;
    return merge<kMaxDecodeWarps>(TeamMember<Config>().num_teams, softmax.scale_log2, [&](int team) {
      const auto& result = rings[team * Config::kParts + part].result;
      return Quad{result.states[row],
                  *reinterpret_cast<const float4*>(&result.out[row][col - part * Config::kChannels])};
    });
  };
  const auto store = [&](int row, int col, const Quad& x) {
    store_result<Config>(p, work, row, col, softmax.scale_log2, x);
  };
  const int num_splits = work.num_splits();
  if (num_splits == 1) {
    return for_each_quad<Config>(work.rows, [&](int row, int col) { store(row, col, merge_warps(row, col)); });
  }
  const DecodeSplits<Config> splits(p.plan.splits, work.tile.index);
  for_each_quad<Config>(work.rows,
                        [&](int row, int col) { splits.store(work.tile.split, row, col, merge_warps(row, col)); });
  if (!is_last_arrival(p.plan.splits.arrivals + work.tile.index, num_splits)) return;
  for_each_quad<Config>(work.rows, [&](int row, int col) {
    store(row, col, merge<16>(num_splits, softmax.scale_log2, [&](int i) { return splits.load(i, row, col); }));
  });
}

template <typename Config>
void launch_decode(const typename Config::Params& p, cudaStream_t stream) {
  static_assert(sizeof(FreshRows<Config>) == decode_fresh_bytes(Config::kHeadDim));
  const int fresh_bytes = Config::kAppends ? sizeof(FreshRows<Config>) : 0;
  const LaunchShape shape{.grid = dim3(p.plan.tiling.tiles.value * p.plan.splits.count),
                          .block = dim3(32 * p.plan.warps),
                          .shared_bytes = static_cast<int>(p.plan.warps * sizeof(DecodeRing<Config>)) + fresh_bytes,
                          .early = true};
  launch<decode_kernel<Config>>(shape, p, stream);
}

template <typename T, int kHeadDim, Features kFeatures>
void run_decode(const DecodeParams& p, cudaStream_t stream) {
  if constexpr (kFeatures == Features::kPlain) {
    if (p.plan.append != nullptr) {
      return launch_decode<DecodeConfig<T, kHeadDim, kFeatures, false, true>>({p, *p.plan.append}, stream);
    }
    if (p.pages.block_table == nullptr) return launch_decode<DecodeConfig<T, kHeadDim, kFeatures, false>>(p, stream);
  }
  launch_decode<DecodeConfig<T, kHeadDim, kFeatures, true>>(p, stream);
}

}  // namespace flash::flash_attn
