// Attention of few query rows over many keys (decoding), for every GPU from sm_80 on. The formulas are those of
// fwd_sm80.cuh. What limits it is how fast K and V arrive, so all warps of a block share one tile of 16 query rows,
// the heads that share a key head, and divide the keys:
//
// A warp is a pipeline of its own. It takes every num_warps-th chunk of 16 keys, has kStages of them on the way in its
// own part of shared memory, and waits for nobody. Q and O are in registers. In the end the warps merge through shared
// memory, and blocks with other keys of the same rows through global memory: the last to arrive merges in the order of
// the splits, so that the result does not depend on who is last.
#pragma once

#include "flash_attn/fwd_sm80.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_>
struct DecodeConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = kFeatures == Features::kPlain;
  static constexpr int kRows = kDecodeRows, kKeys = kDecodeKeys, kWarpRows = kRows;
  static constexpr int kThreads = 32;  // that load a tile together
  static constexpr int kStages = decode_stages(kHeadDim);
};

template <typename Config>
struct DecodeStage {
  SharedTile<typename Config::T, Config::kKeys, Config::kHeadDim> k, v;
};

// A warp's share of the dynamic shared memory: stages, and in the end its O, with rows apart by odd multiples of 8
// banks.
template <typename Config>
union DecodeRing {
  static constexpr int kRowStride = Config::kHeadDim + 8;
  DecodeStage<Config> stages[Config::kStages];
  float out[Config::kRows * kRowStride];

  __device__ DecodeRing() {}
};

struct RowState {
  float max, sum;
};

__device__ inline float weight_of(float max, float max_of_all, float scale_log2) {
  return ptx::exp2(max * scale_log2 - finite_or_zero(max_of_all) * scale_log2);
}

// The state of a row of which `count` parts are seen: part(i) is the state of one, and weight_of its weight.
template <typename Part>
__device__ RowState merge_states(int count, float scale_log2, Part&& part) {
  RowState all{-INFINITY, 0};
  for (int i = 0; i < count; ++i) all.max = fmaxf(all.max, part(i).max);
  for (int i = 0; i < count; ++i) all.sum += part(i).sum * weight_of(part(i).max, all.max, scale_log2);
  return all;
}

// Turns a tile of the ring, just loaded with Q, into registers.
template <typename Config>
__device__ auto load_fragment(const SharedTile<typename Config::T, Config::kRows, Config::kHeadDim>& tile) {
  PackedFragment<typename Config::T, Config::kRows, Config::kHeadDim> q;
  const auto blocks = left_loader(along_cols(tile));
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) blocks.load(q.values[0][step], 0, step);
  return q;
}

// Starts the copies of a chunk, if it is one of the split's.
template <typename Config>
__device__ void load_chunk(DecodeStage<Config>& stage, const KeyRows<Config>& keys, const KeyRows<Config>& values,
                           const FwdParams& p, int first_key, int chunk, const Interval& chunks) {
  if (chunk <= chunks.last) {
    load_keys<Config>(stage.k, keys, p, p.k.head_dim, chunk * Config::kKeys - first_key);
    load_keys<Config>(stage.v, values, p, p.v.head_dim, chunk * Config::kKeys - first_key);
  }
  ptx::commit_copies();
}

// One warp's walk over its chunks.
template <typename Config>
__device__ void decode_chunks(const FwdParams& p, const Sequence& seq, const WorkTile& tile, const TileRows& rows,
                              const Mask& mask, const Interval& seen, const Interval& chunks, DecodeRing<Config>& ring,
                              Output<Config>& o, Softmax<Config>& softmax) {
  using T = typename Config::T;
  const Interval seen_by_all = mask.keys_seen_by_all(rows.tokens());
  const auto keys = key_rows<Config>(p, p.k, seq, tile, seen), values = key_rows<Config>(p, p.v, seq, tile, seen);
  const auto load = [&](int stage, int chunk) {
    load_chunk<Config>(ring.stages[stage], keys, values, p, seen.first, chunk, chunks);
  };
  const int num_warps = blockDim.x / 32, first = chunks.first + warp_id();
  constexpr int kLast = Config::kStages - 1;
  load_tile<Config>(ring.stages[kLast].k, query_rows<T>(p.q, seq, tile, rows), p, p.q.head_dim);
  ptx::commit_copies();
#pragma unroll
  for (int i = 0; i < kLast; ++i) load(i, first + i * num_warps);
  ptx::wait_copies<kLast>();
  __syncwarp();
  const auto q = load_fragment<Config>(ring.stages[kLast].k);
  __syncwarp();
  load(kLast, first + kLast * num_warps);

  int stage = 0;
  for (int n = first; n <= chunks.last; n += num_warps) {
    ptx::wait_copies<kLast>();
    __syncwarp();
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kHeadDim>(s, q, along_cols(ring.stages[stage].k));
    make_scores<Config>(s, p, mask, tile, rows, 0, n, !seen_by_all.covers(interval_of<Config::kKeys>(n)));
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) o.scale_rows(shrink);
    gemm<Config::kKeys>(o, pack<T>(s), along_rows(ring.stages[stage].v));
    __syncwarp();
    load(stage, n + Config::kStages * num_warps);
    stage = stage == kLast ? 0 : stage + 1;
  }
  ptx::wait_copies<0>();
  softmax.finish();
}

// Merges the warps' states. Each warp leaves its O in its ring, relative to the maxima of all; states are those of all.
template <typename Config>
__device__ void merge_warps(DecodeRing<Config>& ring, Output<Config>& o, const Softmax<Config>& softmax,
                            RowState (&states)[Config::kRows]) {
  __shared__ RowState warp_states[kMaxDecodeWarps][Config::kRows];
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    if (lane_id() % 4 == 0) warp_states[warp_id()][o.row(r)] = {softmax.max[r], softmax.sum[r]};
  }
  __syncthreads();
  float weights[o.kLaneRows];
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    const RowState all =
        merge_states(blockDim.x / 32, softmax.scale_log2, [&](int warp) { return warp_states[warp][o.row(r)]; });
    weights[r] = weight_of(softmax.max[r], all.max, softmax.scale_log2);
    if (threadIdx.x % 4 == 0 && warp_id() == 0) states[o.row(r)] = all;
  }
  o.scale_rows(weights);
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
#pragma unroll
    for (int c = 0; c < o.kLaneCols; c += 2) {
      float2* pair = reinterpret_cast<float2*>(ring.out + o.row(r) * ring.kRowStride + o.col(c));
      *pair = {o(r, c), o(r, c + 1)};
    }
  }
  __syncthreads();
}

// fn(row, col) for every fourth column of the tile's rows, shared out among the block's threads.
template <typename Config, typename Fn>
__device__ void for_each_quad(const TileRows& rows, Fn&& fn) {
  constexpr int kQuads = Config::kHeadDim / 4;
  for (int i = threadIdx.x; i < rows.count * kQuads; i += blockDim.x) fn(i / kQuads, i % kQuads * 4);
}

__device__ inline float4 add_scaled(const float4& a, const float4& b, float factor) {
  return {a.x + b.x * factor, a.y + b.y * factor, a.z + b.z * factor, a.w + b.w * factor};
}

// Four elements of O that all warps have left in their rings.
template <typename Config>
__device__ float4 sum_of_warps(const DecodeRing<Config>* rings, int row, int col) {
  float4 sum{};
  for (int warp = 0; warp < blockDim.x / 32; ++warp) {
    const float* out = rings[warp].out + row * DecodeRing<Config>::kRowStride + col;
    sum = add_scaled(sum, *reinterpret_cast<const float4*>(out), 1);
  }
  return sum;
}

template <typename Config>
__device__ void store_quad(const FwdParams& p, typename Config::T* row, int col, const float4& x, float factor) {
  const float values[4] = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
  if (Config::kPlain || p.aligned) {
    if (col < p.problem.head_dim) store(row + col, narrow<typename Config::T>(values));
    return;
  }
  for (int i = 0; i < min(4, p.problem.head_dim - col); ++i) row[(col + i) * p.out.head_dim] = values[i];
}

// Writes out and lse, with `out(row, col)` relative to the maxima in `states`.
template <typename Config, typename Out>
__device__ void store_result(const FwdParams& p, const Sequence& seq, const WorkTile& tile, const TileRows& rows,
                             const RowState (&states)[Config::kRows], float scale_log2, Out&& out) {
  auto targets = query_rows<typename Config::T>(p.out, seq, tile, rows);
  for_each_quad<Config>(rows, [&](int row, int col) {
    targets.row = row;
    store_quad<Config>(p, targets.address(), col, out(row, col), states[row].sum == 0 ? 0.f : 1 / states[row].sum);
  });
  float* lse = row_values(p.softmax_lse, p.problem, seq.q, tile.head);
  for (int row = threadIdx.x; row < rows.count; row += blockDim.x) {
    lse[int64_t{rows.head(row)} * p.problem.seqlen_q + rows.token(row)] =
        log_sum_exp(states[row].max, states[row].sum, scale_log2);
  }
}

// The scratch of one tile's splits.
template <typename Config>
struct DecodeScratch {
  float* out;        // (splits, rows, head_dim), each relative to its split's maxima
  RowState* states;  // (splits, rows)

  __device__ DecodeScratch(const FwdParams& p, const WorkTile& tile) {
    const int64_t first_row = int64_t{tile.index} * p.num_splits * Config::kRows;
    out = p.partial_out + first_row * Config::kHeadDim;
    states = reinterpret_cast<RowState*>(p.partial_softmax) + first_row;
  }

  __device__ float4* quad(int split, int row, int col) const {
    return reinterpret_cast<float4*>(out + (split * Config::kRows + row) * Config::kHeadDim + col);
  }
};

// Brings the states of all splits to shared memory, `split_states`, and merges them into `states`.
template <typename Config>
__device__ void merge_split_states(const DecodeScratch<Config>& scratch, const TileRows& rows, int num_splits,
                                   float scale_log2, RowState (*split_states)[Config::kRows],
                                   RowState (&states)[Config::kRows]) {
  for (int i = threadIdx.x; i < num_splits * Config::kRows; i += blockDim.x) {
    const float2 state = __ldcg(reinterpret_cast<const float2*>(scratch.states + i));
    split_states[i / Config::kRows][i % Config::kRows] = {state.x, state.y};
  }
  __syncthreads();
  const int row = threadIdx.x;
  if (row < rows.count) {
    states[row] = merge_states(num_splits, scale_log2, [&](int split) { return split_states[split][row]; });
  }
  __syncthreads();
}

template <typename Config>
__global__ __launch_bounds__(32 * kMaxDecodeWarps, 1) void decode_kernel(const __grid_constant__ FwdParams p) {
  const WorkTile tile = work_tile<Config::kRows>(p);
  const Sequence seq(p.problem, tile.entry, p.pages.block_table != nullptr);
  const TileRows rows(p, seq, tile, Config::kRows);
  if (rows.count <= 0) return;
  const Mask mask(p.problem, seq);
  const Interval seen = mask.keys_seen_by_any(rows.tokens());
  const auto [chunks, num_splits] =
      KeyBlocks(blocks_of<Config::kKeys>(seen), p.num_splits, p.least_blocks_per_split, tile.split);
  if (tile.split >= num_splits) return;

  auto* rings = &shared_memory<DecodeRing<Config>>();
  auto& ring = rings[warp_id()];
  Output<Config> o;
  o.fill(0);
  Softmax<Config> softmax(score_scale_log2<Config::kFeatures>(p.problem));
  if (!chunks.empty()) decode_chunks(p, seq, tile, rows, mask, seen, chunks, ring, o, softmax);
  const float scale_log2 = softmax.scale_log2;

  __shared__ RowState states[Config::kRows];
  merge_warps<Config>(ring, o, softmax, states);
  const auto own_out = [&](int row, int col) { return sum_of_warps<Config>(rings, row, col); };
  if (num_splits == 1) return store_result<Config>(p, seq, tile, rows, states, scale_log2, own_out);

  const DecodeScratch<Config> scratch(p, tile);
  for_each_quad<Config>(rows, [&](int row, int col) { *scratch.quad(tile.split, row, col) = own_out(row, col); });
  if (threadIdx.x < Config::kRows) scratch.states[tile.split * Config::kRows + threadIdx.x] = states[threadIdx.x];
  if (!is_last_arrival(p.arrivals + tile.index, num_splits)) return;

  auto* split_states = reinterpret_cast<RowState(*)[Config::kRows]>(rings);
  merge_split_states(scratch, rows, num_splits, scale_log2, split_states, states);
  store_result<Config>(p, seq, tile, rows, states, scale_log2, [&](int row, int col) {
    float4 sum{};
#pragma unroll 8
    for (int split = 0; split < num_splits; ++split) {
      const float weight = weight_of(split_states[split][row].max, states[row].max, scale_log2);
      sum = add_scaled(sum, __ldcg(scratch.quad(split, row, col)), weight);
    }
    return sum;
  });
}

template <typename T, int kHeadDim, Features kFeatures>
void run_decode(const FwdParams& p, cudaStream_t stream) {
  using Config = DecodeConfig<T, kHeadDim, kFeatures>;
  const LaunchShape shape{.grid = dim3(p.tiles.value * p.num_splits),
                          .block = dim3(32 * p.decode_warps),
                          .shared_bytes = static_cast<int>(p.decode_warps * sizeof(DecodeRing<Config>))};
  launch<decode_kernel<Config>>(shape, p, stream);
}

}  // namespace flash::flash_attn
