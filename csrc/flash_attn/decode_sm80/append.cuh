// How the decode kernel appends new keys and values to the cache by itself, which saves a launch. AppendStep<Config>
// says what it does at each place where this makes a difference: Appending, or OnlyReading if nothing is appended.
//
// While its first n_blocks are in flight, a thread block rotates its queries, and the new keys that fall in its
// split, into shared memory. Once an n_block has arrived, the warp that has it writes the new keys into their place in
// the n_block and in the cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flash_attn/cache/append.cuh"
#include "flash_attn/decode_sm80/load.cuh"
#include "flash_attn/decode_sm80/shared.cuh"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/sequence.cuh"
#include "tile/vec.cuh"

namespace flash::flash_attn {

// What a thread block that appends has in shared memory behind its rings: its rotated queries, and the new keys and
// values of its split.
template <typename Config>
struct FreshRows {
  using Row = typename Config::T[decode_fresh_stride(Config::kHeadDim)];
  alignas(16) Row q[Config::kRows];
  alignas(16) Row k[kMostAppended], v[kMostAppended];
};

template <typename Config>
struct Appending {
  using T = typename Config::T;
  static constexpr int kSharedBytes = sizeof(FreshRows<Config>);
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

  // The rotated queries, as load_query_fragment.
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

  // Puts the new keys and values of an n_block that has arrived into its stage and into the cache.
  __device__ void write(DecodeStage<Config>& stage, int n_block) const {
    const int first = n_block * Config::kKeys - before;
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

// All keys are in the cache already.
template <typename Config>
struct OnlyReading {
  static constexpr int kSharedBytes = 0;
  const DecodeParams& p;
  const FwdWork<Config>& work;

  __device__ OnlyReading(const DecodeParams& p, const FwdWork<Config>& work, void*) : p(p), work(work) {}
  __device__ void prepare() const {}
  __device__ auto queries() const {
    if constexpr (Config::kCoded)
      return load_permuted_query_fragment<Config>(p, work);
    else
      return load_query_fragment<Config>(p, work);
  }
  __device__ void write(DecodeStage<Config>&, int) const {}
};

// The same where all warps read the queries from shared memory.
template <typename Config>
struct SharingQueries {
  using Queries = SharedFragment<typename Config::T, Config::kRows, Config::kChannels>;
  static constexpr int kSharedBytes = Queries::kBytes;
  const DecodeParams& p;
  const FwdWork<Config>& work;
  const Queries shared;

  __device__ SharingQueries(const DecodeParams& p, const FwdWork<Config>& work, void* shared)
      : p(p), work(work), shared{static_cast<uint4*>(shared)} {}
  __device__ void prepare() const {
    if (warp_id() == 0) shared.store(load_permuted_query_fragment<Config>(p, work));
    __syncthreads();
  }
  __device__ Queries queries() const { return shared; }
  __device__ void write(DecodeStage<Config>&, int) const {}
};

template <typename Config>
using AppendStep =
    std::conditional_t<Config::kAppends, Appending<Config>,
                       std::conditional_t<Config::kSharesQueries, SharingQueries<Config>, OnlyReading<Config>>>;

}  // namespace flash::flash_attn
