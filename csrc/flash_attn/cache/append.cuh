// The step before attention over a cache. New key t of entry b, and its value, go to position n_b + t of the cache,
// where n_b is the entry's length before. With rotary tables, keys and queries are rotated by the angles of their
// positions (rotary embedding); query i is at position n_b + i or, if no mask tells the queries apart, at n_b. Rotated
// queries go to a tensor of their own. In a cache of codes (e4m3), rotated keys are then divided by their descale, and
// values by theirs, and rounded to nearest; what exceeds 448 becomes 448. At a position for which the tables have no
// row, nothing is rotated. Nothing is appended to an entry of negative length. Where decode_sm80 appends by itself,
// this kernel is not launched.
//
// A warp moves one head of one token, a lane pairs of channels. Rotation is computed in fp32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/descale.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/any_vec.cuh"
#include "tile/fragment.cuh"
#include "tile/rotate.cuh"

namespace flash::flash_attn {

constexpr int kAppendThreads = 128;

// The two channels of pair i. Pairs that are rotated come first; the channels of all other pairs are adjacent.
__device__ inline int2 channels_of_pair(const AppendParams& p, int i) {
  const int half = p.rotary_dim / 2;
  if (i >= half || p.interleaved) return {2 * i, 2 * i + 1};
  return {i, i + half};
}

// Whether the tables have a row for a position, which may be negative.
__device__ inline bool has_table_row(const AppendParams& p, int position) {
  return p.cos != nullptr && static_cast<unsigned>(position) < static_cast<unsigned>(p.positions);
}

// How many keys an entry has before its new ones; negative if nothing is appended to it. Clamped to kMaxSeqlen, so that
// adding a token's index does not overflow.
__device__ inline int length_before(const AppendParams& p, int entry) {
  const int length = p.problem.seqused_k ? __ldg(p.problem.seqused_k + entry) : p.problem.seqlen_k - p.seqlen_new;
  return min(length, kMaxSeqlen);
}

struct Unchanged {
  template <typename T>
  __device__ T operator()(T x) const {
    return x;
  }
};

// A warp copies `head_dim` <= kMostChannels channels of one head of one token, with strides from_step and to_step, and
// rotates them if `rotates`; they are stored as `convert` makes them. All loads are issued first, so that they do not
// wait for one another.
template <int kMostChannels, typename T, typename To, typename Convert = Unchanged>
__device__ void move_head(const AppendParams& p, int head_dim, const T* from, int64_t from_step, To* to,
                          int64_t to_step, int position, bool rotates, Convert&& convert = {}) {
  constexpr int kPairs = (kMostChannels + 63) / 64;
  const int half = p.rotary_dim / 2;
  T xs[kPairs], ys[kPairs];
  AnyVec<1> cos[kPairs], sin[kPairs];
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int i = lane_id() + 32 * n;
    const int2 channels = channels_of_pair(p, i);
    if (channels.x < head_dim) xs[n] = from[channels.x * from_step];
    if (channels.y < head_dim) ys[n] = from[channels.y * from_step];
    if (rotates && i < half) {
      cos[n] = load_any<1>(p.cos, int64_t{position} * half + i, p.table_dtype);
      sin[n] = load_any<1>(p.sin, int64_t{position} * half + i, p.table_dtype);
    }
  }
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int i = lane_id() + 32 * n;
    const int2 channels = channels_of_pair(p, i);
    if (rotates && i < half) {
      float x = xs[n], y = ys[n], angle_cos[1], angle_sin[1];
      widen(angle_cos, cos[n], p.table_dtype);
      widen(angle_sin, sin[n], p.table_dtype);
      rotate(x, y, angle_cos[0], angle_sin[0]);
      xs[n] = x, ys[n] = y;
    }
    if (channels.x < head_dim) to[channels.x * to_step] = convert(xs[n]);
    if (channels.y < head_dim) to[channels.y * to_step] = convert(ys[n]);
  }
}

// The address of a position in an entry's cache; null if the cache has no such position, or no such page.
template <typename T>
__device__ T* cache_row(const AppendParams& p, const TensorRef<>& cache, int entry, int64_t batch, int position,
                        int head) {
  if (position < 0 || position >= p.problem.capacity_k) return nullptr;
  T* data = static_cast<T*>(cache.data) + int64_t{head} * cache.heads;
  if (p.pages.block_table == nullptr) return data + batch * cache.batch + int64_t{position} * cache.seqlen;
  const int index = p.pages.page_size.divide(position);
  const int page = p.pages.block_table[entry * p.pages.batch_stride + index];
  if (static_cast<unsigned>(page) >= static_cast<unsigned>(p.pages.count)) return nullptr;
  return data + page * cache.batch + int64_t{p.pages.page_size.remainder(position, index)} * cache.seqlen;
}

// of_key, of_value: how channels are stored.
template <typename T, int kMostChannels, typename Cached, typename OfKey, typename OfValue>
__device__ void append_token_as(const AppendParams& p, int entry, int64_t batch, int token, int position, int head,
                                OfKey&& of_key, OfValue&& of_value) {
  Cached* key = cache_row<Cached>(p, p.k_cache, entry, batch, position, head);
  Cached* value = cache_row<Cached>(p, p.v_cache, entry, batch, position, head);
  if (key == nullptr) return;
  const Span span{entry, token, 1};
  move_head<kMostChannels>(p, p.problem.head_dim, first_token<T>(p.k, span, head), p.k.head_dim, key,
                           p.k_cache.head_dim, position, has_table_row(p, position), of_key);
  move_head<kMostChannels>(p, p.problem.head_dim_v, first_token<T>(p.v, span, head), p.v.head_dim, value,
                           p.v_cache.head_dim, position, false, of_value);
}

template <typename T, int kMostChannels>
__device__ void append_token(const AppendParams& p, int entry, int64_t batch, int token, int position, int head) {
  const auto append_as = [&]<typename Cached>(Cached, auto&& of_key, auto&& of_value) {
    append_token_as<T, kMostChannels, Cached>(p, entry, batch, token, position, head, of_key, of_value);
  };
  if (!p.coded) return append_as(T{}, Unchanged(), Unchanged());
  const auto code_of = [](float descale) {  // 0 counts as the least number: 0 / 0 would stay in the cache as NaN
    constexpr float kLeast = 0x1p-126f;
    const float divisor = descale < kLeast ? kLeast : descale;
    return [divisor](T x) { return ptx::narrow_e4m3(static_cast<float>(x) / divisor); };
  };
  append_as(uint8_t{}, code_of(descale_of(p.problem.k_descale, p.problem, entry, head)),
            code_of(descale_of(p.problem.v_descale, p.problem, entry, head)));
}

template <typename T, int kMostChannels>
__device__ void rotate_query(const AppendParams& p, int entry, int token, int position, int head) {
  const Span span{entry, token, 1};
  move_head<kMostChannels>(p, p.problem.head_dim, first_token<T>(p.q, span, head), p.q.head_dim,
                           first_token<T>(p.q_rotated, span, head), p.q_rotated.head_dim, position,
                           has_table_row(p, position));
}

// The warps of the grid as (entry, token, head): as many tokens as there are new keys or queries, whichever are more,
// and key heads before query heads. Without tables there are no queries to rotate.
struct AppendGrid {
  int tokens, heads;

  __host__ __device__ explicit AppendGrid(const AppendParams& p) : tokens(p.seqlen_new), heads(p.problem.heads_k) {
    if (p.cos == nullptr) return;
    if (p.problem.seqlen_q > tokens) tokens = p.problem.seqlen_q;
    heads += p.problem.heads;
  }
};

template <typename T, int kMostChannels>
__global__ __launch_bounds__(kAppendThreads) void append_kernel(const __grid_constant__ AppendParams p) {
  ptx::launch_dependents();
  ptx::wait_for_dependency();
  const AppendGrid grid(p);
  const int64_t warp = (int64_t{blockIdx.x} * kAppendThreads + threadIdx.x) / 32;
  const int head = warp % grid.heads, token = warp / grid.heads % grid.tokens, entry = warp / grid.heads / grid.tokens;
  if (entry >= p.problem.batch) return;

  const int length = length_before(p, entry);
  if (head < p.problem.heads_k) {
    const int64_t batch = p.problem.batch_index ? __ldg(p.problem.batch_index + entry) : entry;
    if (length < 0 || token >= p.seqlen_new) return;
    append_token<T, kMostChannels>(p, entry, batch, token, length + token, head);
  } else if (token < p.problem.seqlen_q) {
    rotate_query<T, kMostChannels>(p, entry, token, length + (p.queries_advance ? token : 0), head - p.problem.heads_k);
  }
}

template <typename T>
void run_append(const AppendParams& p, cudaStream_t stream) {
  const AppendGrid grid(p);
  const int64_t threads = 32 * int64_t{p.problem.batch} * grid.tokens * grid.heads;
  const LaunchShape shape{
      .grid = dim3(ceil_div(threads, kAppendThreads)), .block = dim3(kAppendThreads), .early = true};
  if (std::max(p.problem.head_dim, p.problem.head_dim_v) <= 256) return launch<append_kernel<T, 256>>(shape, p, stream);
  launch<append_kernel<T, kMostHeadDim>>(shape, p, stream);
}

}  // namespace flash::flash_attn
