// Attention, backward, for every GPU from sm_80 on. With P recomputed from lse, softmax_d from bwd/prepare.cu, p the
// probability of dropout, and Z 1 where it keeps an element and 0 elsewhere:
//
//   S = Q K^T              P = exp(score(S) - lse)                      dV = (P Z / (1 - p))^T dO
//   dP = dO V^T Z / (1-p)  dS = P (dP - softmax_d) dscore/dS            dK = dS^T Q,  dQ = dS K
//
// A thread block takes an n_block, kBlockN keys of a key head, and visits the query rows that see them, kBlockM at a
// time, of every query head that shares the key head. dK and dV stay in registers; dQ is added to dq_accum, fp32 in
// global memory, which bwd/finish.cu rounds.
//
// Reads of shared memory are the bottleneck, so the kernel makes few of them. Tiles are transposed: a warp computes S^T
// for 32 keys. This fragment, exponentiated and rounded, is in registers the left operand of dV. That takes many
// registers, so two teams of four warps divide the work, each with two products of the same shapes:
//
//   value team    S^T = K Q^T     P^T                    dV += P^T dO
//   key team      dP^T = V dO^T   dS^T from P^T          dK += dS^T Q
//
// A warp hands P^T, negative where dropout drops, to its partner in the other team through shared memory; the partner
// overwrites it with dS^T. The two teams share dQ = dS K, which is computed one step late: the value team computes its
// half after P^T, the key team before dP^T. So the tensor cores are busy while one team computes exponentials or the
// other its elementwise step. Where dV or dK of 32 keys does not fit the registers (head_dim > 128), pairs of warps
// divide the channels, and P^T and dS^T pass through shared memory to reach both.
//
// The next rows are loaded during the computation. Beyond 256 channels there is room for one tile of rows only, and dQ
// is computed in the step of its own rows: last, while the next rows are loaded.
//
// Deterministic: thread blocks add to the same rows of dQ in the order of their keys, and wait at dQ semaphores
// (DqOrder).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/launch.h"
#include "flash_attn/bwd/dq_accum.cuh"
#include "flash_attn/bwd/elementwise.cuh"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/bwd/ranges.cuh"
#include "flash_attn/bwd/rows.h"
#include "flash_attn/bwd/scratch.cuh"
#include "flash_attn/bwd/tile_scheduler.cuh"
#include "flash_attn/bwd/tiles.h"
#include "flash_attn/features.h"
#include "flash_attn/instances.h"
#include "flash_attn/params.h"
#include "flash_attn/scores/mask.cuh"
#include "flash_attn/scores/score.cuh"
#include "flash_attn/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/fragment.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/shared.cuh"

namespace flash::flash_attn {

template <typename T_, int kHeadDim_, Features kFeatures_, bool kCompact>
struct BwdConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kPlain = has_plain_scores(kFeatures);
  static constexpr BwdTile kTile = bwd_tile(kHeadDim, kCompact);
  static constexpr int kBlockM = kTile.rows, kBlockN = kTile.keys, kWarpKeys = kTile.warp_keys, kStages = kTile.stages;
  static constexpr int kTeamWarps = kTile.team_warps, kWarps = 2 * kTeamWarps;
  static constexpr int kTeamThreads = 32 * kTeamWarps, kThreads = 32 * kWarps, kPairThreads = 64;
  static constexpr int kKeyWarps = kTeamWarps * kWarpKeys / kBlockN;  // warps of a team with the same keys
  static constexpr int kWarpRows = kBlockM / kKeyWarps;               // query rows of a warp's S^T or dP^T
  static constexpr int kWarpDim = kHeadDim / kKeyWarps;               // channels of a warp's dV or dK
  static constexpr int kPanelCols = kHeadDim % 64 == 0 ? 64 : 32;     // of a SharedTile
  static constexpr int kDqRows = kPanelCols * kBlockM >= kWarps * 16 * 32 ? 32 : 16;  // rows of a warp's piece of dQ
  static constexpr int kDqColWarps = kWarps * kDqRows / kBlockM;  // warps that divide the channels of the same rows
  static constexpr bool kDelaysDq = kHeadDim <= 256;              // dQ of a step is computed in the next one
  static constexpr int kDqPasses = kDelaysDq ? 1 : kHeadDim / kDqColWarps / 64;  // in which a warp computes it
  static constexpr int kDqDim = kHeadDim / kDqColWarps / kDqPasses;
  static_assert(kBlockN % kWarpKeys == 0 && kTeamWarps * kWarpKeys % kBlockN == 0);
  static_assert(kThreads >= 2 * kBlockM, "a thread loads one row value");
};

// An m_block: block `index` of the query rows, in one of the heads that share the key head.
struct MBlock {
  int head, index;

  __device__ MBlock next(const Interval& blocks) const {
    return index == blocks.last ? MBlock{head + 1, blocks.first} : MBlock{head, index + 1};
  }
  __device__ MBlock previous(const Interval& blocks) const {
    return index == blocks.first ? MBlock{head - 1, blocks.last} : MBlock{head, index - 1};
  }
};

template <typename Config>
struct BwdShared {
  using T = typename Config::T;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  struct Nothing {};
  using Weights = SharedTile<T, kBlockN, kBlockM>;

  SharedTile<T, kBlockN, kHeadDim> k, v;  // at the end, dK and dV on their way out
  SharedTile<T, kBlockM, kHeadDim> q[Config::kStages], dout[Config::kStages];
  Weights ds[Config::kDelaysDq ? 2 : 1];  // P^T for the key team, then dS^T; two stages, as dQ is a step late
  [[no_unique_address]] std::conditional_t<Config::kKeyWarps == 1, Nothing, Weights> p;  // P^T, for dV
  alignas(16) float lse[Config::kStages][kBlockM];
  float softmax_d[Config::kStages][kBlockM];
  NBlock n_block;  // this and all below are in shared memory because the loop has no registers to spare
  Sequence seq;
  Interval live_rows;  // rows that see some key; others are loaded as zeros, since products would spread their NaN
  Interval live_keys;  // keys that some row sees; likewise
  Interval keys;       // the keys of the n_block
  Interval m_blocks;   // from the first to the last that see some of these; with key ranges, some between may not
  const uint32_t* live_bits;  // with key ranges, in place of live_keys: KeyUse::live
  struct {
    MBlock previous, next;  // see sync_at_semaphores; head -1: none
  } dq_order;
};

template <typename Config>
using Scores = Fragment<Config::kWarpKeys, Config::kWarpRows>;  // S^T, then P^T; or dP^T, then dS^T
template <typename Config>
using KeySum = Fragment<Config::kWarpKeys, Config::kWarpDim>;  // dV or dK

// ---------------------------------------------------------------------------------------------------------------------
// Which warp does what

// What a warp does in the products. It is constructed anew wherever it is used: otherwise the compiler would keep it,
// and all addresses that follow from it, in registers.
template <typename Config>
struct WarpRole {
  int warp = __shfl_sync(~0u, warp_id(), 0);                  // tells the compiler that all lanes have the same value
  bool sums_dv = warp < Config::kTeamWarps;                   // a warp of the value team
  int member = warp % Config::kTeamWarps;                     // partners in the two teams have the same
  int key0 = member / Config::kKeyWarps * Config::kWarpKeys;  // of S^T, dV and dK
  int row0 = member % Config::kKeyWarps * Config::kWarpRows;  // of S^T
  int dim0 = member % Config::kKeyWarps * (Config::kPanelCols / Config::kKeyWarps);  // of dV and dK, in every panel
  int dq_row0 = warp / Config::kDqColWarps * Config::kDqRows;
  int dq_dim0 = warp % Config::kDqColWarps * (Config::kPanelCols / Config::kDqColWarps);  // in every panel

  // Named barriers. 1 .. 4: partners meet when the value team has stored its weights. Only the key team would need to
  // wait, but head dim 192 is faster this way, and compute-sanitizer's racecheck understands it. 5, 6: the warps of a
  // team meet.
  __device__ int partner_barrier() const { return 1 + member; }
  __device__ int team_barrier() const { return 5 + sums_dv; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Loads

// With key ranges: rows, as tile/load.cuh takes them, that are loaded as zeros unless is_live(index of the row).
template <typename T, typename IsLive>
struct LiveRows {
  T* data;
  int64_t stride;
  int row;
  IsLive is_live;

  __device__ void move(int n) {
    data += n * stride;
    row += n;
  }
  __device__ bool exists() const { return is_live(row); }
  __device__ T* address() const { return data; }
};

template <typename Config, typename Tile, typename Rows, typename Data>
__device__ void load_tile(Tile& tile, const BwdSm80Params& p, const TensorRef<Data>& x, int cols, const Rows& rows) {
  if (Config::kPlain || p.aligned) {
    load_async<Config::kThreads>(tile, rows, cols);
  } else {
    load_scattered<Config::kThreads>(tile, rows, cols, x.head_dim);
  }
}

// Starts to load the rows of a span from row0 on. Rows outside of `live` are loaded as zeros or, with key ranges, those
// for which is_live(row), counted from row0, is false; so are columns from `cols` on.
template <typename Config, typename Tile, typename Data, typename IsLive>
__device__ void load_tile(Tile& tile, const BwdSm80Params& p, const TensorRef<Data>& x, int cols, const Span& span,
                          int head, int row0, const Interval& live, const IsLive& is_live) {
  using T = const typename Config::T;
  T* first = first_token<typename Config::T>(x, span, head) + row0 * x.seqlen;
  if (has_ranges<Config::kFeatures>(p.problem)) {
    load_tile<Config>(tile, p, x, cols, LiveRows<T, IsLive>{first, x.seqlen, 0, is_live});
  } else {
    load_tile<Config>(tile, p, x, cols, StridedRows<T>{first, x.seqlen, row0 - live.first, live.last - live.first + 1});
  }
}

// Starts to load K and V.
template <typename Config>
__device__ void load_keys(BwdShared<Config>& shared, const BwdSm80Params& p) {
  const auto is_live = [&](int key) { return (__ldg(shared.live_bits + key / 32) >> key % 32 & 1) != 0; };
  const auto load = [&](auto& tile, const TensorRef<const void>& x, int cols) {
    load_tile<Config>(tile, p, x, cols, shared.seq.k, shared.n_block.head_k, shared.keys.first, shared.live_keys,
                      is_live);
  };
  load(shared.k, p.k, p.problem.head_dim);
  load(shared.v, p.v, head_dim_v<Config::kPlain>(p.problem));
}

// With key ranges: the intervals of keys that rows see, from row 0 of the entry on, and those that a tile of rows sees.
template <typename Config>
__device__ int64_t seen_index(const BwdShared<Config>& shared, const BwdSm80Params& p, int head) {
  return seen_index(p.problem, p.plan.scratch, shared.seq.q, shared.n_block.entry, head);
}
template <typename Config>
__device__ const Interval* seen_rows(const BwdShared<Config>& shared, const BwdSm80Params& p, int head) {
  return p.plan.scratch.seen + seen_index(shared, p, head);
}
template <typename Config>
__device__ TileSeen seen_by_tile(const BwdShared<Config>& shared, const BwdSm80Params& p, const MBlock& m_block) {
  return TileSeen(
      __ldg(p.problem.ranges.of_tiles + seen_index(shared, p, m_block.head) / Config::kBlockM + m_block.index));
}

// Starts to load Q, dO, lse and softmax_d of an m_block.
template <typename Config>
__device__ void load_rows(BwdShared<Config>& shared, int stage, const BwdSm80Params& p, const MBlock& m_block) {
  constexpr int kBlockM = Config::kBlockM;
  const Span& span = shared.seq.q;
  const int row0 = m_block.index * kBlockM;
  const auto sees_keys = [&](int row) { return !seen_rows(shared, p, m_block.head)[row0 + row].empty(); };
  const auto load = [&](auto& tile, const TensorRef<const void>& x, int cols) {
    load_tile<Config>(tile, p, x, cols, span, m_block.head, row0, shared.live_rows, sees_keys);
  };
  load(shared.q[stage], p.q, p.problem.head_dim);
  load(shared.dout[stage], p.dout, head_dim_v<Config::kPlain>(p.problem));
  const int row = threadIdx.x % kBlockM;
  const bool is_live =
      has_ranges<Config::kFeatures>(p.problem) ? sees_keys(row) : shared.live_rows.covers({row0 + row, row0 + row});
  if (threadIdx.x < kBlockM) {
    const float* lse = row_values(p.softmax_lse, p.problem, span, m_block.head) + row0 + row;
    ptx::copy_word_async(ptx::shared_address(&shared.lse[stage][row]), lse, is_live);
  } else if (threadIdx.x < 2 * kBlockM) {
    const float* softmax_d = softmax_d_of(p, span, shared.n_block.entry, m_block.head) + row0 + row;
    ptx::copy_word_async(ptx::shared_address(&shared.softmax_d[stage][row]), softmax_d, is_live);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The elementwise steps, on transposed fragments: element (r, c) of a lane is key key0 + row(r), query row row0 +
// col(c)

// Calls fn(r, i) for the lane's pairs of elements (r, 2 i), (r, 2 i + 1) of a fragment.
template <typename Fragment, typename Fn>
__device__ void for_each_pair(const Fragment&, Fn&& fn) {
#pragma unroll
  for (int r = 0; r < Fragment::kRows / 8; ++r) {
#pragma unroll
    for (int i = 0; i < Fragment::kCols / 8; ++i) fn(r, i);
  }
}

// The lane's pairs of elements (r, 2 i), (r, 2 i + 1) in a tile, for a fragment whose corner is at (row0, col0).
template <typename Tile>
struct Pairs {
  uint32_t origin;

  __device__ Pairs(const Tile& tile, int row0, int col0)
      : origin(tile.address(row0 + lane_id() / 4, col0 / Tile::kChunk) + lane_id() % 4 * 4) {}

  __device__ uint32_t address(int r, int i) const {
    return (origin ^ Tile::flip(i)) + Tile::distance(8 * r, i / Tile::kPanelChunks);
  }
  __device__ uint32_t load(int r, int i) const { return ptx::load_word(address(r, i)); }
  __device__ void store(int r, int i, uint32_t pair) const { ptx::store_word(address(r, i), pair); }

  template <typename Packed>
  __device__ void store(const Packed& packed) const {
    for_each_pair(packed, [&](int r, int i) { store(r, i, packed.pair(r, i)); });
  }
};

// Where a warp's piece of S^T lies among the scores.
template <typename Config>
__device__ ScorePlace place_of(const BwdShared<Config>& shared, const WarpRole<Config>& role, const MBlock& m_block) {
  return {.entry = shared.n_block.entry,
          .head = m_block.head,
          .first_token = shared.seq.q.first,
          .key0 = shared.keys.first + role.key0,
          .row0 = m_block.index * Config::kBlockM + role.row0};
}

// The rounding error of lse of two consecutive rows of an entry. Rows past the end read the last row's: the mask hides
// their scores.
__device__ inline float2 lse_lo_of_two(const BwdSm80Params& p, const Span& q, int head, int row) {
  if (p.lse_lo == nullptr) return {0, 0};
  const float* values = row_values(p.lse_lo, p.problem, q, head);
  return {__ldg(values + min(row, q.length - 1)), __ldg(values + min(row + 1, q.length - 1))};
}

// Turns S^T into P^T, negative where dropped. With softcap, leaves its derivative dscore/dS in the tile of `slopes`.
template <typename Config, typename Tile>
__device__ void probabilities(Scores<Config>& s, const Pairs<Tile>& slopes, const BwdShared<Config>& shared,
                              const BwdSm80Params& p, const WarpRole<Config>& role, const MBlock& m_block, int stage) {
  const Mask mask(p.problem, shared.seq);
  const Interval rows = interval_of<Config::kBlockM>(m_block.index);
  const ScorePlace place = place_of(shared, role, m_block);
  if constexpr (Config::kFeatures == Features::kAll) {
    scale_and_cap(s, p.problem);
    if (const float softcap = p.problem.softcap; softcap > 0) {
      for_each_pair(s, [&](int r, int i) {
        const float first = cap_slope(s(r, 2 * i), softcap), second = cap_slope(s(r, 2 * i + 1), softcap);
        slopes.store(r, i, ptx::pack<typename Config::T>(first, second));
      });
    }
  }
  const auto hide = [&] {
    if (has_ranges<Config::kFeatures>(p.problem)) {
      if (seen_by_tile(shared, p, m_block).all.covers(shared.keys)) return;
      const Interval* seen = seen_rows(shared, p, m_block.head) + place.row0;
      return hide_unseen(s, place.key0, [&](int c) { return seen_by_two(seen + s.col(c)); });
    }
    const bool cut = rows.last >= mask.seqlen_q || !mask.keys_seen_by_all(rows).covers(shared.keys);
    if (cut) hide_rows(s, mask, place);
  };
  const auto lse = [&](int c) { return *reinterpret_cast<const float2*>(&shared.lse[stage][role.row0 + s.col(c)]); };
  const auto lse_log2 = [&](int c) {
    float2 row = lse(c);
    if constexpr (!Config::kPlain) {
      // Shared memory has no room for it: with large tiles, an A100's is full.
      if (p.problem.bias.data != nullptr) row = lse_lo_of_two(p, shared.seq.q, m_block.head, place.row0 + s.col(c));
    }
    return float2{row.x * kLog2e, row.y * kLog2e};
  };
  make_probabilities<typename Config::T, Config::kFeatures>(s, p.problem, mask, place, hide, lse_log2, lse);
  if constexpr (Config::kFeatures == Features::kAll) negate_dropped(s, p.problem, place);
}

// Stores the weights P^T dscore/dS, negative where dropped, for the key team, in the tile that holds dscore/dS. Leaves
// P^T in `probabilities`, 0 where dropped.
template <typename Config, typename Packed, typename Tile>
__device__ void hand_over(Packed& probabilities, const Pairs<Tile>& weights, const Problem& p) {
  using T = typename Config::T;
  if (Config::kPlain || p.softcap == 0) {
    weights.store(probabilities);
  } else {
    for_each_pair(probabilities, [&](int r, int i) {
      weights.store(r, i, multiply_pairs<T>(probabilities.pair(r, i), weights.load(r, i)));
    });
  }
  if (Config::kPlain || p.rng_state == nullptr) return;
  for_each_pair(probabilities,
                [&](int r, int i) { probabilities.pair(r, i) = ptx::clamp_below<T>(probabilities.pair(r, i)); });
}

// Turns dP^T into dS^T, with the weights that the value team has stored.
template <typename Config, typename Tile>
__device__ void gradients(Scores<Config>& s, const Pairs<Tile>& weights, const Problem& p, const float* softmax_d) {
#pragma unroll
  for (int i = 0; i < s.kTiles; ++i) {
    const float2 subtracted = *reinterpret_cast<const float2*>(softmax_d + s.col(2 * i));
#pragma unroll
    for (int r = 0; r < s.kLaneRows; ++r) {
      const float2 weight = ptx::unpack<typename Config::T>(weights.load(r, i));
      apply_weight<Config::kFeatures>(s(r, 2 * i), weight.x, subtracted.x, p);
      apply_weight<Config::kFeatures>(s(r, 2 * i + 1), weight.y, subtracted.y, p);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The order of m_blocks

template <typename Config>
__device__ int end_head(const BwdShared<Config>& shared, const BwdSm80Params& p) {
  return (shared.n_block.head_k + 1) * (p.problem.heads / p.problem.heads_k);
}

// With key ranges: whether an m_block sees none of the keys and is skipped.
template <typename Config>
__device__ bool is_skipped(const BwdShared<Config>& shared, const BwdSm80Params& p, const MBlock& m_block) {
  return has_ranges<Config::kFeatures>(p.problem) && m_block.head < end_head(shared, p) &&
         !touches(seen_by_tile(shared, p, m_block).any, shared.keys);
}

// The first m_block to visit, and those after and before another one. After the last comes one with head end_head.
template <typename Config>
__device__ MBlock next_m_block(const BwdShared<Config>& shared, const BwdSm80Params& p, MBlock m_block) {
  do {
    m_block = m_block.next(shared.m_blocks);
  } while (is_skipped(shared, p, m_block));
  return m_block;
}
template <typename Config>
__device__ MBlock previous_m_block(const BwdShared<Config>& shared, const BwdSm80Params& p, MBlock m_block) {
  do {
    m_block = m_block.previous(shared.m_blocks);
  } while (is_skipped(shared, p, m_block));
  return m_block;
}
template <typename Config>
__device__ MBlock first_m_block(const BwdShared<Config>& shared, const BwdSm80Params& p) {
  const MBlock m_block{shared.n_block.head_k * (p.problem.heads / p.problem.heads_k), shared.m_blocks.first};
  return is_skipped(shared, p, m_block) ? next_m_block(shared, p, m_block) : m_block;
}

// ---------------------------------------------------------------------------------------------------------------------
// dQ

// Adds this warp's piece of dQ = dS K: for the m_block before `m_block` if dQ is a step late, otherwise for `m_block`.
template <typename Config>
__device__ void add_dq(const BwdShared<Config>& shared, const BwdSm80Params& p, const WarpRole<Config>& role,
                       const MBlock& m_block, int parity) {
  using Accum = DqAccum<Config::kHeadDim>;
  constexpr int kPassCols = Config::kHeadDim / Config::kDqPasses;
#pragma unroll
  for (int pass = 0; pass < Config::kDqPasses; ++pass) {
    Fragment<Config::kDqRows, Config::kDqDim> dq;
    dq.fill(0);
    gemm<Config::kBlockN>(dq, along_rows(shared.ds[parity], role.dq_row0),
                          along_rows<Config::kDqColWarps>(shared.k, pass * kPassCols + role.dq_dim0));

    const MBlock added = Config::kDelaysDq ? previous_m_block(shared, p, m_block) : m_block;
    const int row0 = added.index * Config::kBlockM + role.dq_row0;
#pragma unroll
    for (int r = 0; r < dq.kLaneRows; ++r) {
      const int row = row0 + dq.row(r);
      if (row >= shared.seq.q.length) continue;
      float* groups = Accum::address(p.plan.scratch.dq_accum, p.problem, shared.seq.q, added.head, row,
                                     (pass * kPassCols + role.dq_dim0) / Accum::kGroup);
#pragma unroll
      for (int c = 0; c < dq.kLaneCols; c += 4) {
        constexpr int kWarpCols = Config::kPanelCols / Config::kDqColWarps;
        const int channel = 4 * c / kWarpCols * Config::kPanelCols + 4 * c % kWarpCols;
        ptx::add_global(groups + channel / Accum::kGroup * Accum::kGroupStep + 4 * (lane_id() % 4), dq(r, c),
                        dq(r, c + 1), dq(r, c + 2), dq(r, c + 3));
      }
    }
  }
}

// The semaphore of an m_block. It counts the n_blocks that have added their dQ.
template <typename Config>
__device__ int* semaphore_of(const BwdShared<Config>& shared, const BwdSm80Params& p, const MBlock& m_block) {
  const BwdScratch& scratch = p.plan.scratch;
  const int64_t first = padded_row_index(p.problem, scratch, shared.seq.q, shared.n_block.entry, m_block.head);
  return semaphore_at(scratch, first + m_block.index * Config::kBlockM);
}

// Waits at the dQ semaphore of an m_block until all n_blocks with earlier keys have added to it. One thread calls it.
template <typename Config>
__device__ void acquire_dq(const BwdShared<Config>& shared, const BwdSm80Params& p, const MBlock& m_block) {
  using Order = DqOrder<Config::kBlockM, Config::kBlockN>;
  const Mask mask(p.problem, shared.seq);
  const Order order = has_ranges<Config::kFeatures>(p.problem)
                          ? Order(seen_by_tile(shared, p, m_block).any, shared.n_block.index)
                          : Order(mask, m_block.index, shared.n_block.index);
  ptx::wait_semaphore(semaphore_of(shared, p, m_block), order.before);
}

// Synchronizes the thread block just before it adds the next dQ, that of dq_order.next: waits at its semaphore. By then
// all warps have added dQ of dq_order.previous: releases the semaphore there. Then advances both. (Not inlined, so that
// the loop needs no more registers and instructions than without semaphores.)
template <typename Config>
__noinline__ __device__ void sync_at_semaphores(BwdShared<Config>& shared, const BwdSm80Params& p) {
  auto& [previous, next] = shared.dq_order;
  if (threadIdx.x == 0 && next.head >= 0) acquire_dq(shared, p, next);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (previous.head >= 0) ptx::release_semaphore(semaphore_of(shared, p, previous));
  previous = next;
  next = next.head < 0 ? first_m_block(shared, p) : next_m_block(shared, p, next);
}

// ---------------------------------------------------------------------------------------------------------------------
// dV and dK

// Adds the team's product of a step to dV or dK. If pairs of warps divide the channels, the left operand passes through
// shared memory.
template <typename Config, typename Packed>
__device__ void add_product(KeySum<Config>& sum, const Packed& left, BwdShared<Config>& shared,
                            const WarpRole<Config>& role, int stage, int parity) {
  const auto right = along_rows<Config::kKeyWarps>(role.sums_dv ? shared.dout[stage] : shared.q[stage], role.dim0);
  if constexpr (Config::kKeyWarps == 1) {
    gemm<Config::kBlockM>(sum, left, right);
  } else {
    if (role.sums_dv) Pairs(shared.p, role.key0, role.row0).store(left);
    ptx::sync_barrier<Config::kTeamThreads>(role.team_barrier());
    gemm<Config::kBlockM>(sum, along_cols(role.sums_dv ? shared.p : shared.ds[parity], role.key0), right);
  }
}

// sync_at_semaphores, or a mere barrier if thread blocks do not wait for one another.
template <typename Config>
__device__ void sync_step(BwdShared<Config>& shared, const BwdSm80Params& p) {
  p.plan.waits ? sync_at_semaphores(shared, p) : __syncthreads();
}

// A step: adds the products of an m_block to dV or dK and, if dQ is a step late, dQ of the m_block before.
template <typename Config>
__device__ void add_products(BwdShared<Config>& shared, const BwdSm80Params& p, KeySum<Config>& sum,
                             const MBlock& m_block, int step) {
  using T = typename Config::T;
  const int stage = step % Config::kStages, parity = Config::kDelaysDq ? step % 2 : 0;
  const WarpRole<Config> role;
  if (Config::kDelaysDq && !role.sums_dv && step > 0) add_dq(shared, p, role, m_block, 1 - parity);
  Scores<Config> s;
  s.fill(0);
  gemm<Config::kHeadDim>(s, along_cols(role.sums_dv ? shared.k : shared.v, role.key0),
                         along_cols(role.sums_dv ? shared.q[stage] : shared.dout[stage], role.row0));
  const Pairs weights(shared.ds[parity], role.key0, role.row0);
  PackedFragment<T, Config::kWarpKeys, Config::kWarpRows> left;
  if (role.sums_dv) {
    probabilities<Config>(s, weights, shared, p, role, m_block, stage);
    left = pack<T>(s);
    hand_over<Config>(left, weights, p.problem);
    ptx::sync_barrier<Config::kPairThreads>(role.partner_barrier());
    if (Config::kDelaysDq && step > 0) add_dq(shared, p, role, m_block, 1 - parity);
  } else {
    ptx::sync_barrier<Config::kPairThreads>(role.partner_barrier());
    gradients<Config>(s, weights, p.problem, shared.softmax_d[stage] + role.row0);
    left = pack<T>(s);
    weights.store(left);
  }
  add_product(sum, left, shared, role, stage, parity);
}

// How many steps there are at most, and which of them do something: with key ranges, some m_blocks are skipped.
template <typename Config>
struct Steps {
  const BwdShared<Config>& shared;
  const BwdSm80Params& p;
  int most;

  __device__ bool has(int step, const MBlock& m_block) const {
    return has_ranges<Config::kFeatures>(p.problem) ? m_block.head < end_head(shared, p) : step < most;
  }
};

// Starts to load K, V and the rows of the first m_block, which it returns.
template <typename Config>
__device__ MBlock prologue(BwdShared<Config>& shared, const BwdSm80Params& p) {
  const MBlock m_block = first_m_block(shared, p);
  load_keys(shared, p);
  load_rows(shared, 0, p, m_block);
  if (!Config::kDelaysDq && threadIdx.x == 0) shared.dq_order.next = m_block;
  return m_block;
}

// Visits all m_blocks from `m_block` on: the value team sums dV, and the key team dK / softmax_scale. dQ of a step is
// computed in the next one, and the last dQ after all steps. Steps 0 and 1:
//
//   copies      Q1, dO1               |                     | Q2, dO2
//   value team  S0 = K Q0, exp P0     | dV += P0 dO0        | S1 = K Q1, exp P1, dQ0 = dS0 K    | dV += P1 dO1
//   key team    dP0 = V dO0, wait P0  | dS0, dK += dS0 Q0   | dQ0 = dS0 K, dP1 = V dO1, wait P1 | dS1, dK += dS1 Q1
template <typename Config>
__device__ void mainloop_with_late_dq(BwdShared<Config>& shared, const BwdSm80Params& p, KeySum<Config>& sum,
                                      const Steps<Config>& steps, MBlock m_block) {
  int step = 0;
  for (; steps.has(step, m_block); ++step) {
    ptx::commit_copies();
    ptx::wait_copies<0>();
    // The rows have arrived, and no warp reads the rows of the stage to be filled next any more, or the dS to be
    // overwritten.
    sync_step(shared, p);
    if constexpr (Config::kStages > 1) {
      const MBlock next = next_m_block(shared, p, m_block);
      if (steps.has(step + 1, next)) load_rows(shared, 1 - step % Config::kStages, p, next);
    }
    add_products(shared, p, sum, m_block, step);
    m_block = next_m_block(shared, p, m_block);
    if (Config::kStages == 1 && steps.has(step + 1, m_block)) {
      __syncthreads();
      load_rows(shared, 0, p, m_block);
    }
  }
  sync_step(shared, p);
  add_dq(shared, p, WarpRole<Config>(), m_block, (step - 1) % 2);
}

// The same where dQ of a step is its last product, computed while the next rows are loaded into the only stage:
//
//   copies                            |                     | Q1, dO1
//   value team  S0 = K Q0, exp P0     | dV += P0 dO0        | dQ0 = dS0 K  | S1 = K Q1, exp P1
//   key team    dP0 = V dO0, wait P0  | dS0, dK += dS0 Q0   | dQ0 = dS0 K  | dP1 = V dO1, wait P1
template <typename Config>
__device__ void mainloop(BwdShared<Config>& shared, const BwdSm80Params& p, KeySum<Config>& sum,
                         const Steps<Config>& steps, MBlock m_block) {
  for (int step = 0; steps.has(step, m_block); ++step) {
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
    add_products(shared, p, sum, m_block, step);
    sync_step(shared, p);  // dS is complete, and no warp reads the rows any more
    const MBlock next = next_m_block(shared, p, m_block);
    if (steps.has(step + 1, next)) load_rows(shared, 0, p, next);
    add_dq(shared, p, WarpRole<Config>(), m_block, 0);
    m_block = next;
  }
}

template <typename Config>
__device__ void sum_keys(BwdShared<Config>& shared, const BwdSm80Params& p, KeySum<Config>& sum) {
  const Interval& blocks = shared.m_blocks;
  const int group = p.problem.heads / p.problem.heads_k, most_steps = (blocks.last - blocks.first + 1) * group;
  if (most_steps == 0) return;
  const MBlock first = prologue(shared, p);
  const Steps<Config> steps{shared, p, most_steps};
  if constexpr (Config::kDelaysDq) {
    mainloop_with_late_dq(shared, p, sum, steps, first);
  } else {
    mainloop(shared, p, sum, steps, first);
  }
  __syncthreads();
  if (p.plan.waits && threadIdx.x == 0) {
    ptx::release_semaphore(semaphore_of(shared, p, shared.dq_order.previous));
  }
}

// Stores dV or dK times `factor`, rounded by way of a tile that no warp reads any more, unless they are fp32.
template <typename Config, typename Tile>
__device__ void store_sum(Tile& tile, KeySum<Config>& sum, float factor, const BwdShared<Config>& shared,
                          const WarpRole<Config>& role, const BwdSm80Params& p, const TensorRef<>& x, int cols) {
  using T = typename Config::T;
  constexpr int kRows = Config::kBlockN / Config::kTeamWarps;
#pragma unroll
  for (int r = 0; r < sum.kLaneRows; ++r) {
#pragma unroll
    for (int c = 0; c < sum.kLaneCols; ++c) sum(r, c) *= factor;
  }
  const Span& span = shared.seq.k;
  if (p.float_dkv) {
    float* first = first_token<float>(x, span, shared.n_block.head_k) + shared.keys.first * x.seqlen;
    const StridedRows<float> rows{first, x.seqlen, 0, span.length - shared.keys.first};
    return store_float_rows<Config::kPlain, Config::kKeyWarps, Tile::kPanelChunks>(sum, rows, role.key0, cols,
                                                                                   p.adds_dkv, role.dim0);
  }
  store_fragment<Config::kKeyWarps>(tile, sum, role.key0, role.dim0);
  ptx::sync_barrier<Config::kTeamThreads>(role.team_barrier());
  T* first = first_token<T>(x, span, shared.n_block.head_k) + shared.keys.first * x.seqlen;
  const StridedRows<T> rows{first, x.seqlen, 0, span.length - shared.keys.first};
  if (Config::kPlain || p.aligned) {
    store_rows<kRows>(tile, rows, kRows * role.member, cols);
  } else {
    store_scattered<kRows>(tile, rows, kRows * role.member, cols, x.head_dim);
  }
}

// ---------------------------------------------------------------------------------------------------------------------

// Takes an n_block, and finds the m_blocks that see it. One thread calls it.
template <typename Config>
__device__ void take_work(BwdShared<Config>& shared, const BwdSm80Params& p) {
  const int index = p.plan.waits ? atomicAdd(p.plan.scratch.next_work, 1) : blockIdx.x;
  shared.n_block = n_block_at<Config::kBlockN, Swizzle::kHeads>(p.problem, p.plan, index);
  shared.seq = Sequence(p.problem, shared.n_block.entry);
  const Mask mask(p.problem, shared.seq);
  shared.live_rows = mask.rows_that_see(Interval{0, mask.seqlen_k - 1});
  shared.live_keys = mask.keys_seen_by_any({0, mask.seqlen_q - 1});
  shared.dq_order = {{-1, 0}, {-1, 0}};
  shared.keys = interval_of<Config::kBlockN>(shared.n_block.index);
  shared.m_blocks =
      blocks_of(mask.rows_that_see({shared.keys.first, min(shared.keys.last, mask.seqlen_k - 1)}), Config::kBlockM);
  if (has_ranges<Config::kFeatures>(p.problem)) {
    const KeyUse& use = p.plan.scratch.key_uses[key_use_index(p.problem, shared.n_block, Config::kBlockN)];
    shared.m_blocks = use.first_m > use.last_m ? Interval{0, -1} : Interval{use.first_m, use.last_m};
    shared.live_bits = use.live;
  }
}

// Stores dV or dK, whichever the team has summed.
template <typename Config>
__device__ void epilogue(BwdShared<Config>& shared, const BwdSm80Params& p, KeySum<Config>& sum) {
  const WarpRole<Config> role;
  if (role.sums_dv) {
    store_sum(shared.v, sum, p.problem.dropout_rescale, shared, role, p, p.dv, head_dim_v<Config::kPlain>(p.problem));
  } else {
    store_sum(shared.k, sum, p.problem.softmax_scale, shared, role, p, p.dk, p.problem.head_dim);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void bwd_kernel(const __grid_constant__ BwdSm80Params p) {
  auto& shared = shared_memory<BwdShared<Config>>();
  if (threadIdx.x == 0) take_work(shared, p);
  __syncthreads();
  if (shared.keys.first >= shared.seq.k.length) return;
  KeySum<Config> sum;
  sum.fill(0);
  sum_keys(shared, p, sum);
  epilogue(shared, p, sum);
}

template <typename Config>
void launch_bwd(const BwdSm80Params& p, cudaStream_t stream) {
  run_before_bwd({p, p.plan}, Config::kBlockM, Config::kBlockN, stream);
  const LaunchShape shape{.grid = dim3(num_n_blocks<Config::kBlockN>(p.problem)),
                          .block = dim3(Config::kThreads),
                          .shared_bytes = sizeof(BwdShared<Config>)};
  launch<bwd_kernel<Config>>(shape, p, stream);
}

// Calls fn(Config) for the largest tile of which a thread block has room in shared_bytes.
template <typename T, int kHeadDim, Features kFeatures, typename Fn>
void with_tile_for(int shared_bytes, Fn&& fn) {
  using Large = BwdConfig<T, kHeadDim, kFeatures, false>;
  using Compact = BwdConfig<T, kHeadDim, kFeatures, true>;
  static_assert(sizeof(BwdShared<Compact>) <= kLeastSharedBytes);
  sizeof(BwdShared<Large>) <= static_cast<size_t>(shared_bytes) ? fn(Large{}) : fn(Compact{});
}

template <typename T, int kHeadDim, Features kFeatures>
void run_bwd(const BwdSm80Params& p, cudaStream_t stream) {
  with_tile_for<T, kHeadDim, kFeatures>(max_shared_bytes(current_device()),
                                        [&](auto config) { launch_bwd<decltype(config)>(p, stream); });
  run_bwd_finish({p, p.plan}, stream);
}

}  // namespace flash::flash_attn
