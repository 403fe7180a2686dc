// The compile-time configuration of fwd_sm90, its kernel parameters, and its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/tensor_map.h"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/schedule.cuh"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/fwd_serving/work_list.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores/dropped_bits.cuh"
#include "flash_attn/scores/partial_box.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash::flash_attn {

constexpr int kWarpgroupRows = 64;

// The kernel's parameters: TMA descriptors of the tensors, and the problem with its plan.
struct FwdSm90Launch {
  CUtensorMap q, k, v, out;
  CUtensorMap bias;  // only in instances of kBiased
  FwdSm90Params params;
};

// Strides of a tensor whose rows are aligned, in chunks of 16 bytes: they fit 32 bits (is_aligned in features.h).
struct ChunkStrides {
  uint32_t page, row;

  explicit ChunkStrides(const TensorRef<const void>& x) : page(x.batch / 8), row(x.seqlen / 8) {}
};

// The same of serving instances. The maps are for boxes of plan.box_rows rows; without boxes they are empty.
struct ServingLaunch {
  CUtensorMap k, v;
  ChunkStrides k_strides, v_strides;
  ServingParams params;
};

// Which instances: for dense tensors, with the ordinary or the wide tile, or with wide ones in pairs; for serving, with
// two warpgroups or one, over keys in 16 bits or codes in 8; or for dense tensors, with the tile and the bits of those
// for serving.
enum class FwdSm90Kind { kDense, kDenseWide, kDensePaired, kServing, kFewRows, kCoded, kCodedFewRows, kInvariant };

constexpr FwdSm90Tile tile_of(FwdSm90Kind kind, int head_dim, Features features, int head_dim_v) {
  if (kind == FwdSm90Kind::kInvariant) return invariant_tile(head_dim, features, head_dim_v);
  if (kind == FwdSm90Kind::kCoded) return coded_serving_tile(head_dim, features, 2);
  if (kind == FwdSm90Kind::kCodedFewRows) return coded_serving_tile(head_dim, features, 1);
  if (kind == FwdSm90Kind::kServing) return serving_tile(head_dim, features, 2, head_dim_v);
  if (kind == FwdSm90Kind::kFewRows) return serving_tile(head_dim, features, 1, head_dim_v);
  if (kind == FwdSm90Kind::kDensePaired) return paired(fwd_sm90_tile(head_dim, features, /*wide=*/true, head_dim_v));
  return fwd_sm90_tile(head_dim, features, kind == FwdSm90Kind::kDenseWide, head_dim_v);
}

template <typename T_, int kHeadDim_, Features kFeatures_, FwdSm90Kind kKind, int kHeadDimV_ = kHeadDim_>
struct FwdSm90Config {
  using T = T_;
  static constexpr bool kCoded = kKind == FwdSm90Kind::kCoded || kKind == FwdSm90Kind::kCodedFewRows;
  static constexpr bool kServing = kKind == FwdSm90Kind::kServing || kKind == FwdSm90Kind::kFewRows || kCoded;
  using Launch = std::conditional_t<kServing, ServingLaunch, FwdSm90Launch>;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr Features kFeatures = kFeatures_;
  static constexpr bool kBiased = kFeatures == Features::kBiased, kRanged = takes_ranges(kFeatures);
  static constexpr bool kDropped = kFeatures == Features::kDropped;
  static constexpr bool kHasBesideKeys = kBiased || kDropped;  // whether consumers read more than K of a stage of K
  static constexpr bool kPlain = kFeatures != Features::kAll;  // at most one feature, that of the instance
  static constexpr FwdSm90Tile kTile = tile_of(kKind, kHeadDim, kFeatures, kHeadDimV);
  static constexpr int kConsumers = kTile.warpgroups, kStages = kTile.stages, kQueryStages = kTile.query_stages;
  static constexpr int kRows = kWarpgroupRows * kConsumers, kKeys = kTile.keys, kWarpRows = 16;
  static constexpr int kSharers = kTile.sharers, kSharedRows = kSharers * kRows;  // of a cluster that shares keys
  static constexpr int kClusterSize = channel_slices(kHeadDim);                   // thread blocks that share a tile
  static constexpr bool kPersistent = kClusterSize == 1;  // whether a thread block processes one tile after another
  static constexpr int kChannels = kHeadDim / kClusterSize, kChannelsV = kHeadDimV / kClusterSize;  // of each of them
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1 + (kDropped || kCoded)), kConsumerWarps = 4 * kConsumers;
  // The source's stages of keys and values, in units of 16 bits: those that consumers read, or codes, two in a unit.
  static constexpr int kUnit = kCoded ? 2 : 1;
  static constexpr int kSourceStages = kCoded ? coded_serving_stages(kHeadDim, kTile) : kStages;
  // Whether a consumer without rows skips the mainloop. In a cluster, each thread block waits for scores of the other.
  static constexpr bool kSkips = kServing && kConsumers > 1 && kClusterSize == 1;
  // Whether a thread block may fold pieces of fixed length, and whether shared memory has room for their total.
  static constexpr bool kFolds = kServing || kKind == FwdSm90Kind::kInvariant;
  static constexpr int kTileBytes = 2 * (kStages * kKeys * (kChannels + kChannelsV) + kQueryStages * kRows * kChannels +
                                         kTile.staged_output * kRows * kChannelsV);  // of Q, K, V and O
  static constexpr bool kSharesTotal = kFolds && !kCoded && kTileBytes + 4 * kRows * kChannelsV <= 224 * 1024;
  static constexpr int kWriters = kServing ? 2 : 1;  // how many warps copy, or convert, a part of a tile each
  // The kernel starts with 168 registers a thread (384 threads) or 128 (512 threads). setmaxnreg moves those that the
  // producer does not need to the consumers: 2 * 232 + 40 = 2 * 208 + 88 = 3 * 168, 3 * 160 + 32 = 4 * 128, with
  // drawers 2 * 208 + 40 + 56 = 4 * 128, with converters 2 * 192 + 56 + 72 or, where scores take more, 2 * 208 + 56
  // + 40. With one consumer there are enough, except beside converters: 240 + 88 + 168.
  static constexpr bool kMovesRegisters = kConsumers > 1 || kCoded;
  static constexpr int kProducerRegisters = kCoded && kConsumers == 2 ? 56
                                            : kServing                ? 88
                                            : kSharers > 1            ? 56
                                            : kConsumers == 2         ? 40
                                                                      : 32;
  static constexpr int kDrawerRegisters = 56, kConverterRegisters = kConsumers == 1 ? 168 : kPlain ? 72 : 40;
  static constexpr int kConsumerRegisters = kCoded                 ? (kConsumers == 1 ? 240
                                                                      : kPlain        ? 192
                                                                                      : 208)
                                            : kServing || kDropped ? 208
                                            : kSharers > 1         ? 224
                                            : kConsumers == 2      ? 232
                                                                   : 160;
  // How many of a lane's two rows are exponentiated before the wait for P V. What comes after it overlaps with
  // rescaling O and packing P, and with products of the other warpgroups. Where everything does, dense calls without
  // features take up to 7 % fewer cycles, but not with more than 128 keys or 192 channels, or 128 rows of 64 channels.
  static constexpr bool kExpAfterProduct =
      kFeatures == Features::kPlain && !kFolds && kHeadDim <= 192 && kKeys <= 128 && (kHeadDim > 64 || kConsumers == 3);
  static constexpr int kRowsUnderProduct = kExpAfterProduct ? 0 : kChannelsV > 128 ? 2 : 1;
  // Whether O is rescaled only when a row maximum has grown much. That pays where O has many columns. With fewer,
  // rescaling is hidden by the exponentials, and a branch around it makes the compiler schedule these worse.
  static constexpr bool kRarelyRescales = kChannelsV > 192;
  static_assert(kClusterSize == 1 || kChannelsV == kChannels);
  static_assert(kSharers == 1 || (kPersistent && !kServing && !kHasBesideKeys));

  __device__ static int cluster_rank() { return kClusterSize == 1 ? 0 : ptx::cluster_rank(); }
  __device__ static int channel() { return cluster_rank() * kChannels; }  // the thread block's first
};

template <typename Config>
using TileWork = std::conditional_t<Config::kServing, ServingWork<Config>, FwdWork<Config>>;

// Calls fn with the tile's rows of out. Only serving instances pack heads.
template <typename Config, typename Params, typename Fn>
__device__ void with_output_rows(const Params& p, const TensorRef<>& x, const TileWork<Config>& work, Fn&& fn) {
  if constexpr (Config::kServing) {
    with_query_rows<typename Config::T>(p.plan.tiling, x, work, fn);
  } else {
    fn(strided_rows<typename Config::T>(x, work));
  }
}

template <typename Config>
struct FwdSm90Shared {
  using T = typename Config::T;
  using Rows = SharedTile<T, Config::kRows, Config::kChannelsV>;     // of O
  using OwnRows = SharedTile<T, kWarpgroupRows, Config::kChannels>;  // of Q, of a warpgroup
  using Keys = SharedTile<T, Config::kKeys, Config::kChannels>;
  using Values = SharedTile<T, Config::kKeys, Config::kChannelsV>;
  using SourceKeys = SharedTile<T, Config::kKeys, Config::kChannels / Config::kUnit>;
  using SourceValues = SharedTile<T, Config::kKeys, Config::kChannelsV / Config::kUnit>;
  using Bias = SharedTile<T, Config::kRows, Config::kKeys>;
  using Boxes = PartialBox<Config::kWarpRows, Config::kKeys>[Config::kConsumers];
  struct BiasedKeys : Keys {
    Bias bias;
  };
  using Dropped = DroppedBits<Config::kKeys>[Config::kConsumerWarps][32];  // of the rows and lanes of the consumers
  struct Mail {    // from the first of a pair of blocks to the second: which tile comes next
    Ring<2> ring;  // its full barriers are those of the second block, its empty ones those of the first
    alignas(16) uint32_t index[2][4];
  };
  struct None {};
  struct NoDropped {};
  struct NoCodes {};
  struct Codes {
    SourceKeys k[Config::kSourceStages];
    SourceValues v[Config::kSourceStages];
    Ring<Config::kSourceStages> k_ring, v_ring;
    // Full: copied, but not converted. Their empty barriers are idle: those of FwdSm90Shared::q_rings say when.
    Ring<Config::kQueryStages> q_rings[Config::kConsumers];
  };

  OwnRows q[Config::kQueryStages][Config::kConsumers];
  std::conditional_t<Config::kBiased, BiasedKeys, Keys> k[Config::kStages];
  Values v[Config::kStages];
  [[no_unique_address]] std::conditional_t<Config::kCoded, Codes, NoCodes> codes;
  std::conditional_t<Config::kTile.staged_output, Rows, None> out;
  std::conditional_t<Config::kSharesTotal, float4[Config::kRows * Config::kChannelsV / 4], None> total;
  TileWork<Config> work[2];  // of the tile in progress and of the next
  std::conditional_t<Config::kServing, WorkList, None> list;
  Ring<Config::kQueryStages> q_rings[Config::kConsumers];
  Ring<Config::kStages> k_ring, v_ring;
  Ring<2> work_ring;
  std::conditional_t<(Config::kClusterSize > 1), Boxes, None> boxes;
  std::conditional_t<(Config::kSharers > 1), Mail, None> mail;
  [[no_unique_address]] std::conditional_t<Config::kDropped, Dropped[Config::kStages], NoDropped> dropped;  // beside K

  // What the source fills: the stages of consumers, or of converters.
  __device__ auto& source() {
    if constexpr (Config::kCoded) {
      return codes;
    } else {
      return *this;
    }
  }

  // Each consumer releases a stage once, by its first thread, in all blocks that share it. The bias or the bits beside
  // K and the work are read with ordinary loads, which the end of a product does not cover: there every consumer warp
  // releases for itself.
  __device__ void init() {
    for (auto& ring : q_rings) ring.init(1, Config::kWriters);
    k_ring.init(Config::kSharers * (Config::kHasBesideKeys ? Config::kConsumerWarps : Config::kConsumers),
                Config::kWriters + (Config::kDropped ? kDrawers : 0));
    v_ring.init(Config::kSharers * Config::kConsumers, Config::kWriters);
    if constexpr (Config::kCoded) {
      codes.k_ring.init(Config::kWriters, Config::kWriters);
      codes.v_ring.init(Config::kWriters, Config::kWriters);
      for (auto& ring : codes.q_rings) ring.init(1, Config::kWriters);
    }
    // Of the producer, and converters; or drawers.
    constexpr int kOthers = Config::kServing ? 3 + 4 * Config::kCoded : Config::kDropped ? kDrawers : 0;
    work_ring.init(Config::kConsumerWarps + kOthers);
    if constexpr (Config::kClusterSize > 1) {
      for (auto& box : boxes) box.init();
    }
    if constexpr (Config::kSharers > 1) mail.ring.init(1);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash::flash_attn
