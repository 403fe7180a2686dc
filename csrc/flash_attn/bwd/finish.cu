// After the main kernel of the backward: rounds dQ from dq_accum, unless the main kernel has done so; adds up dK and dV
// where an n_block was split among thread blocks; and zeroes dK and dV of keys that no entry uses.
//
// A thread takes 16 channels, a group of DqAccum, of a row of dQ, or of dK and dV.
#include <cstdint>

#include "common/launch.h"
#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/ranges.cuh"
#include "flash_attn/bwd/rows.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/dispatch.h"
#include "flash_attn/params.h"
#include "flash_attn/sequence.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {
namespace {

template <typename T_, int kHeadDim_>
struct BwdFinishConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kChannels = DqAccum<kHeadDim>::kGroup, kColumns = kHeadDim / kChannels;
  static constexpr int kRows = DqAccum<kHeadDim>::kRowsTogether;
  static constexpr int kThreads = 256;
};

__host__ __device__ bool may_skip_keys(const Problem& p) {
  return p.cu_seqlens_k != nullptr || p.seqused_k != nullptr || p.leftpad_k != nullptr;
}
__host__ __device__ bool may_split(const BwdCommonPlan& plan) {
  return plan.splits > 1 || plan.scratch.work_tiles != nullptr;
}

// The entry that uses a key, and which of its keys that is; a negative one if none does.
struct UsedKey {
  int entry, key;

  __device__ UsedKey(const Problem& p, const Span& token) {
    const auto start_of = [&](int entry) { return __ldg(p.cu_seqlens_k + entry); };
    entry = p.cu_seqlens_k != nullptr ? last_entry_from(p.batch + 1, token.first, start_of) : token.batch;
    const Span used = key_span(p, entry);
    key = used.first <= token.first && token.first < used.first + used.length ? token.first - used.first : -1;
  }
};

// Stores channels col .. col + 15 of a row, rounded; those from `cols` on do not exist. `step`: the stride of channels.
template <typename T>
__device__ void store_channels(T* row, const float (&values)[16], int col, int cols, int64_t step, bool aligned) {
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    const float half[8] = {values[i],     values[i + 1], values[i + 2], values[i + 3],
                           values[i + 4], values[i + 5], values[i + 6], values[i + 7]};
    const Vec<T, 8> vec = narrow<T>(half);
    if (aligned) {
      if (col + i < cols) store(row + col + i, vec);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (col + i + j < cols) row[(col + i + j) * step] = vec[j];
    }
  }
}

// The same for a row of fp32, to which the values are added if `adds`.
__device__ void store_floats(float* row, const float (&values)[16], int col, int cols, bool adds) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float* element = row + col + i;
    if (col + i < cols) *element = values[i] + (adds ? *element : 0);
  }
}

// Stores 16 channels, from `col` on, of dQ of a token.
template <typename Config>
__device__ void finish_dq(const BwdCommonParams& p, const Span& token, int head, int col) {
  using T = typename Config::T;
  using Accum = DqAccum<Config::kHeadDim>;
  const Problem& problem = p.problem;
  float values[Accum::kGroup];
  const float* group = Accum::address(p.plan.scratch.dq_accum, problem, token, head, 0, col / Accum::kGroup);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const Vec<float, 4> quad = load<4>(group + 4 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[Accum::channel(t, i)] = quad[i] * problem.softmax_scale;
  }
  store_channels(first_token<T>(p.dq, token, head), values, col, problem.head_dim, p.dq.head_dim, p.aligned);
}

// Stores 16 channels, from `col` on, of dK and dV of a key, or adds to them: zeros if no entry uses it, else what its
// splits add up to.
template <typename Config>
__device__ void finish_key(const BwdCommonParams& p, const Span& token, int head, int col) {
  using T = typename Config::T;
  const UsedKey used(p.problem, token);
  SplitSums splits{0, 0};
  if (used.key >= 0) {
    if (!may_split(p.plan)) return;
    splits = sums_of(p.problem, p.plan, {used.entry, head, used.key / p.plan.block_keys});
    if (splits.count == 1) return;
  } else if (p.adds_dkv) {
    return;
  }
  const auto finish = [&](bool of_values, const TensorRef<>& x, int cols, float factor) {
    float sums[16] = {};
    if (col < cols) {
#pragma unroll 4
      for (int split = splits.first; split < splits.first + splits.count; ++split) {
        const float* from =
            KeySums<Config::kHeadDim>::address(p.plan, split, of_values, used.key % p.plan.block_keys) + col;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          const Vec<float, 4> quad = load<4>(from + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i + j] += quad[j];
        }
      }
#pragma unroll
      for (float& sum : sums) sum *= factor;
    }
    if (p.float_dkv) {
      store_floats(first_token<float>(x, token, head), sums, col, cols, p.adds_dkv);
    } else {
      store_channels(first_token<T>(x, token, head), sums, col, cols, x.head_dim, p.aligned);
    }
  };
  finish(false, p.dk, p.problem.head_dim, p.problem.softmax_scale);
  finish(true, p.dv, p.problem.head_dim_v, p.problem.dropout_rescale);
}

// How many thread blocks a head of `seqlen` tokens takes.
template <typename Config>
__host__ __device__ int blocks_of_head(int seqlen) {
  constexpr int kRows = Config::kRows;
  return blocks_for((int64_t{seqlen} + kRows - 1) / kRows * kRows * Config::kColumns, Config::kThreads);
}

// Calls fn(token, head, col) for what this thread has to do in thread block `block` of those that share `seqlen` tokens
// of `heads` heads, one head after the other. Neighbouring threads take groups that are adjacent in dq_accum.
template <typename Config, typename Fn>
__device__ void for_thread(int block, int seqlen, int heads, Fn&& fn) {
  constexpr int kColumns = Config::kColumns, kRows = Config::kRows;
  const int blocks = blocks_of_head<Config>(seqlen), outer = block / blocks;
  const int64_t index = int64_t{block % blocks} * Config::kThreads + threadIdx.x;
  const int token = index / (kRows * kColumns) * kRows + index % kRows;
  if (token < seqlen) fn(Span{outer / heads, token, 1}, outer % heads, index / kRows % kColumns * Config::kChannels);
}

template <typename Config>
__host__ __device__ int64_t num_blocks(int64_t heads, int seqlen) {
  return heads * blocks_of_head<Config>(seqlen);
}

template <typename Config>
__host__ __device__ int64_t num_key_blocks(const BwdCommonParams& p) {
  if (!may_split(p.plan) && !may_skip_keys(p.problem)) return 0;
  return num_blocks<Config>(num_entries(p.problem) * p.problem.heads_k, p.problem.seqlen_k);
}

template <typename Config>
__host__ __device__ int64_t num_dq_blocks(const BwdCommonParams& p) {
  const int64_t heads = num_entries(p.problem) * p.problem.heads;
  return p.plan.rounds_dq ? 0 : num_blocks<Config>(heads, p.problem.seqlen_q);
}

// Keys first: the sums of many splits take long, but few threads.
template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void bwd_finish_kernel(const __grid_constant__ BwdCommonParams p) {
  const Problem& problem = p.problem;
  const int block = blockIdx.x, key_blocks = num_key_blocks<Config>(p);
  if (block < key_blocks) {
    for_thread<Config>(block, problem.seqlen_k, problem.heads_k,
                       [&](const Span& key, int head, int col) { finish_key<Config>(p, key, head, col); });
  } else {
    for_thread<Config>(block - key_blocks, problem.seqlen_q, problem.heads,
                       [&](const Span& token, int head, int col) { finish_dq<Config>(p, token, head, col); });
  }
}

template <typename Config>
void launch_bwd_finish(const BwdCommonParams& p, cudaStream_t stream) {
  const int64_t blocks = num_key_blocks<Config>(p) + num_dq_blocks<Config>(p);
  launch<bwd_finish_kernel<Config>>({.grid = dim3(blocks), .block = dim3(Config::kThreads)}, p, stream);
}

}  // namespace

void run_bwd_finish(const BwdCommonParams& p, cudaStream_t stream) {
  dispatch_problem(p.problem, [&](auto kDType, auto kHeadDim) {
    launch_bwd_finish<BwdFinishConfig<element_t<kDType>, kHeadDim>>(p, stream);
  });
}

}  // namespace flash::flash_attn
