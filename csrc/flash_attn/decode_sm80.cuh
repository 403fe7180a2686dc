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

// Turns a tile of the ring, just loaded with Q, into registers.
template <typename Config>
__device__ auto load_fragment(const SharedTile<typename Config::T, Config::kRows, Config::kHeadDim>& tile) {
  PackedFragment<typename Config::T, Config::kRows, Config::kHeadDim> q;
  const auto blocks = left_loader(along_cols(tile));
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) blocks.load(q.values[0][step], 0, step);
  return q;
}

// One warp's walk over its chunks. The code is kept short: where the cache is small, fetching it takes a good part of
// the time.
template <typename Config>
__device__ void decode_chunks(const FwdParams& p, const FwdWork<Config>& work, DecodeRing<Config>& ring,
                              Output<Config>& o, Softmax<Config>& softmax) {
  using T = typename Config::T;
  constexpr int kLast = Config::kStages - 1;
  const auto keys = key_rows<Config>(p, p.k, work), values = key_rows<Config>(p, p.v, work);
  const int num_warps = blockDim.x / 32, first = work.blocks.first + warp_id(), last = work.blocks.last;
  const Interval whole = work.whole_blocks();
  const auto load = [&](int stage, int chunk) {
    const int first_key = chunk * Config::kKeys - work.seen.first;
    if (chunk <= last) {
      load_keys<Config>(ring.stages[stage].k, keys, p, p.k.head_dim, first_key);
      load_keys<Config>(ring.stages[stage].v, values, p, p.v.head_dim, first_key);
    }
    ptx::commit_copies();
  };

  load(0, first);
  load_tile<Config>(ring.stages[kLast].k, query_rows<T>(p.q, work), p, p.q.head_dim);
  ptx::commit_copies();
#pragma unroll 1
  for (int i = 1; i < kLast; ++i) load(i, first + i * num_warps);
  ptx::wait_copies<kLast - 1>();
  __syncwarp();
  const auto q = load_fragment<Config>(ring.stages[kLast].k);

  int stage = 0, free_stage = kLast;
  for (int n = first; n <= last; n += num_warps) {
    __syncwarp();  // all lanes have read the free stage
    load(free_stage, n + kLast * num_warps);
    ptx::wait_copies<kLast>();
    __syncwarp();
    Scores<Config> s;
    s.fill(0);
    gemm<Config::kHeadDim>(s, q, along_cols(ring.stages[stage].k));
    make_scores<Config>(s, p, work, /*warp_row=*/0, n, !whole.covers(n));
    float shrink[s.kLaneRows];
    softmax.update(s, shrink);
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) o.scale_rows(shrink);
    gemm<Config::kKeys>(o, pack<T>(s), along_rows(ring.stages[stage].v));
    free_stage = stage;
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
  const int num_warps = blockDim.x / 32;
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    if (lane_id() % 4 == 0) warp_states[warp_id()][o.row(r)] = {softmax.max[r], softmax.sum[r]};
  }
  __syncthreads();
  float weights[o.kLaneRows];
#pragma unroll
  for (int r = 0; r < o.kLaneRows; ++r) {
    RowState parts[kMaxDecodeWarps], all{-INFINITY, 0};
#pragma unroll
    for (int warp = 0; warp < kMaxDecodeWarps; ++warp) {
      parts[warp] = warp < num_warps ? warp_states[warp][o.row(r)] : RowState{-INFINITY, 0};
      all.max = fmaxf(all.max, parts[warp].max);
    }
#pragma unroll
    for (const RowState& part : parts) all.sum += part.sum * weight_of(part.max, all.max, softmax.scale_log2);
    weights[r] = weight_of(softmax.max[r], all.max, softmax.scale_log2);
    if (threadIdx.x < 32 && lane_id() % 4 == 0) states[o.row(r)] = all;
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
#pragma unroll 1
  for (int i = threadIdx.x; i < rows.count * kQuads; i += blockDim.x) fn(i / kQuads, i % kQuads * 4);
}

__device__ inline float4 add_scaled(const float4& a, const float4& b, float factor) {
  return {a.x + b.x * factor, a.y + b.y * factor, a.z + b.z * factor, a.w + b.w * factor};
}

// Four elements of O that all warps have left in their rings.
template <typename Config>
__device__ float4 sum_of_warps(const DecodeRing<Config>* rings, int row, int col) {
  float4 sum{};
#pragma unroll
  for (int warp = 0; warp < kMaxDecodeWarps; ++warp) {
    if (warp >= blockDim.x / 32) break;
    const float* out = rings[warp].out + row * DecodeRing<Config>::kRowStride + col;
    sum = add_scaled(sum, *reinterpret_cast<const float4*>(out), 1);
  }
  return sum;
}

// The scratch of one tile's splits, and what of it the last block to arrive brings to shared memory.
template <typename Config>
struct DecodeSplits {
  float* out;        // (splits, rows, head_dim), each relative to its split's maxima
  RowState* states;  // (splits, rows)
  float (*weights)[Config::kRows];

  __device__ DecodeSplits(const FwdParams& p, int tile, void* shared)
      : weights(reinterpret_cast<float (*)[Config::kRows]>(shared)) {
    const int64_t first_row = int64_t{tile} * p.num_splits * Config::kRows;
    out = p.partial_out + first_row * Config::kHeadDim;
    states = reinterpret_cast<RowState*>(p.partial_softmax) + first_row;
  }

  __device__ float4* quad(int split, int row, int col) const {
    return reinterpret_cast<float4*>(out + (split * Config::kRows + row) * Config::kHeadDim + col);
  }

  __device__ RowState state(int split, int row) const {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(states + split * Config::kRows + row));
    return {x.x, x.y};
  }

  // A warp takes a row, and a lane some of the splits.
  __device__ void merge_states(int count, int num_splits, float scale_log2, RowState (&merged)[Config::kRows]) const {
    constexpr int kLaneSplits = kMaxSplits / 32;
#pragma unroll 1
    for (int row = warp_id(); row < count; row += blockDim.x / 32) {
      RowState parts[kLaneSplits], all{-INFINITY, 0};
#pragma unroll
      for (int i = 0; i < kLaneSplits; ++i) {
        const int split = lane_id() + 32 * i;
        parts[i] = split < num_splits ? state(split, row) : RowState{-INFINITY, 0};
        all.max = fmaxf(all.max, parts[i].max);
      }
      all.max = warp_max(all.max);
#pragma unroll
      for (int i = 0; i < kLaneSplits; ++i) {
        const float weight = weight_of(parts[i].max, all.max, scale_log2);
        if (lane_id() + 32 * i < num_splits) weights[lane_id() + 32 * i][row] = weight;
        all.sum += parts[i].sum * weight;
      }
      all.sum = warp_sum(all.sum);
      merged[row] = all;
    }
    __syncthreads();
  }

  __device__ float4 merged_quad(int num_splits, int row, int col) const {
    float4 sum{};
#pragma unroll 16  // as many loads at a time
    for (int split = 0; split < num_splits; ++split) {
      sum = add_scaled(sum, __ldcg(quad(split, row, col)), weights[split][row]);
    }
    return sum;
  }
};

template <typename Config>
__device__ void store_quad(const FwdParams& p, typename Config::T* row, int col, const float4& x, float factor) {
  const float values[4] = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
  if constexpr (!Config::kPlain) {
    if (!p.aligned) {
      for (int i = 0; i < min(4, p.problem.head_dim - col); ++i) row[(col + i) * p.out.head_dim] = values[i];
      return;
    }
  }
  if (col < p.problem.head_dim) store(row + col, narrow<typename Config::T>(values));
}

// Writes out and lse, with `quad(row, col)` relative to the maxima in `states`.
template <typename Config, typename Quad>
__device__ void store_result(const FwdParams& p, const FwdWork<Config>& work, const RowState (&states)[Config::kRows],
                             float scale_log2, Quad&& quad) {
  auto targets = query_rows<typename Config::T>(p.out, work);
  for_each_quad<Config>(work.rows, [&](int row, int col) {
    targets.row = row;
    store_quad<Config>(p, targets.address(), col, quad(row, col), states[row].sum == 0 ? 0.f : 1 / states[row].sum);
  });
  const int row = threadIdx.x;
  if (row >= work.rows.count) return;
  float* lse = row_values(p.softmax_lse, p.problem, work.seq.q, work.tile.head);
  lse[int64_t{work.rows.head(row)} * p.problem.seqlen_q + work.rows.token(row)] =
      log_sum_exp(states[row].max, states[row].sum, scale_log2);
}

template <typename Config>
__global__ __launch_bounds__(32 * kMaxDecodeWarps, 1) void decode_kernel(const __grid_constant__ FwdParams p) {
  const FwdWork<Config> work(p);
  if (!work.exists()) return;
  if (work.num_splits > 1 && threadIdx.x == 0) ptx::prefetch(p.arrivals + work.tile.index);
  auto* rings = &shared_memory<DecodeRing<Config>>();
  auto& ring = rings[warp_id()];
  Output<Config> o;
  o.fill(0);
  Softmax<Config> softmax(score_scale_log2<Config::kFeatures>(p.problem));
  if (!work.blocks.empty()) decode_chunks<Config>(p, work, ring, o, softmax);

  __shared__ RowState states[Config::kRows];
  merge_warps<Config>(ring, o, softmax, states);
  const DecodeSplits<Config> splits(p, work.tile.index, rings);
  const bool split = work.num_splits > 1;
  if (split) {
    for_each_quad<Config>(work.rows, [&](int row, int col) {
      *splits.quad(work.tile.split, row, col) = sum_of_warps<Config>(rings, row, col);
    });
    if (threadIdx.x < Config::kRows) {
      splits.states[work.tile.split * Config::kRows + threadIdx.x] = states[threadIdx.x];
    }
    if (!is_last_arrival(p.arrivals + work.tile.index, work.num_splits)) return;
    splits.merge_states(work.rows.count, work.num_splits, softmax.scale_log2, states);
  }
  store_result<Config>(p, work, states, softmax.scale_log2, [&](int row, int col) {
    return split ? splits.merged_quad(work.num_splits, row, col) : sum_of_warps<Config>(rings, row, col);
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
