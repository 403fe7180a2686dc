// How the decode kernel loads queries, to registers, and n_blocks, to the stages of a warp's ring.
#pragma once

#include <cstdint>

#include "flash_attn/decode_sm80/shared.cuh"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/rows.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "tile/codes.cuh"
#include "tile/load.cuh"

namespace flash::flash_attn {

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

// The same where K is codes: in fp16, with columns in the order of tile/codes.cuh. All rows are aligned.
template <typename Config>
__device__ auto load_permuted_query_fragment(const DecodeParams& p, const FwdWork<Config>& work) {
  using T = typename Config::T;
  PackedFragment<T, Config::kRows, Config::kChannels> q;
  auto rows = packed_rows<T>(p.q, work);
  const TeamMember<Config> own;
  const bool is_bf16 = p.out_dtype == DType::kBFloat16;
#pragma unroll
  for (int r = 0; r < Config::kRows / 8; ++r) {
    if (8 * r >= work.rows.count) break;
    rows.row = min(Output<Config>::row(r), work.rows.count - 1);
    const auto* row = reinterpret_cast<const uint2*>(rows.address() + own.channel + own_column());
#pragma unroll
    for (int step = 0; step < Config::kChannels / 16; ++step) {
      uint2 words = own.channel + 16 * step < p.problem.head_dim ? __ldg(row + 4 * step) : uint2{};
      if (is_bf16) {
        const float2 low = ptx::unpack<__nv_bfloat16>(words.x), high = ptx::unpack<__nv_bfloat16>(words.y);
        words = {ptx::pack<T>(low.x, low.y), ptx::pack<T>(high.x, high.y)};
      }
      q.pair(r, 2 * step) = words.x, q.pair(r, 2 * step + 1) = words.y;
    }
  }
  return q;
}

// Starts the copies of a warp's n_blocks, one after the other. The pages of an n_block's rows are looked up one n_block
// ahead, so that no copy waits for the block table.
template <typename Config>
struct KeyLoader {
  using T = const typename Config::T;
  using Tile = decltype(RingStage<Config>::k);
  // Codes take half the time of elements of 16 bits to arrive: so a lane finds half as many pages and addresses, and
  // does not wait for pages when it looks them up.
  static constexpr int kLanes = Config::kCoded ? 4 : Tile::kPanelChunks;
  using Places = LoadedPlaces<Tile, 32, kLanes, Config::kCoded>;
  const DecodeParams& p;
  int n_block, last, step, channel;
  KeyRows<Config> keys, values;
  Places found;  // of the n_block's rows; unused without pages

  __device__ KeyLoader(const DecodeParams& p, const FwdWork<Config>& work, int first, const TeamMember<Config>& own)
      : p(p),
        n_block(first),
        last(work.n_blocks.last),
        step(own.num_teams),
        channel(own.channel),
        keys(key_rows<Config, Tile, kLanes>(p, in_units<Config>(p.k), work, first)),
        values(key_rows<Config, Tile, kLanes>(p, in_units<Config>(p.v), work, first)) {
    keys.data += own.channel / Config::kUnit * p.k.head_dim;
    values.data += own.channel / Config::kUnit * p.v.head_dim;
    look_up();
  }

  // Starts to copy the next n_block, if there is one, to a stage.
  __device__ void load(DecodeStage<Config>& stage) {
    if (n_block <= last) {
      if (Config::kPlain || Config::kCoded || p.aligned) {
        copy(stage.k, keys, (p.problem.head_dim - channel) / Config::kUnit);
        copy(stage.v, values, (head_dim_v<Config::kPlain>(p.problem) - channel) / Config::kUnit);
      } else {
        load_own_rows_scattered<32>(stage.k, keys, p.problem.head_dim - channel, p.k.head_dim);
        load_own_rows_scattered<32>(stage.v, values, p.problem.head_dim_v - channel, p.v.head_dim);
      }
    }
    ptx::commit_copies();
    n_block += step;
    keys.move(step * Config::kKeys);
    values.move(step * Config::kKeys);
    look_up();
  }

 private:
  __device__ void look_up() {
    if constexpr (Config::kPaged) {
      if (n_block <= last) found.find(keys.table, keys.row);
    }
  }

  __device__ void copy(Tile& tile, const KeyRows<Config>& rows, int cols) const {
    const uint64_t policy = ptx::cache_policy(p.plan.evict_keys);
    const auto copy_chunk = [policy](uint32_t shared, const void* global, bool valid) {
      ptx::copy_async(shared, global, valid, policy);
    };
    if constexpr (Config::kPaged) {
      load_own_rows_async<32, false, kLanes>(tile, FoundRows<T, Places>(rows, found), cols, copy_chunk);
    } else {
      load_own_rows_async<32, false, kLanes>(tile, rows, cols, copy_chunk);
    }
  }
};

}  // namespace flash::flash_attn
