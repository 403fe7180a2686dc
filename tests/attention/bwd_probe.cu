// As instance_probe.cu, of the backward, whose names are those of the forward.
#include <cstdint>
#include <type_traits>

#include "common/dispatch.h"
#include "flash_attn/bwd_sm80/kernel.cuh"
#include "flash_attn/bwd_sm90/kernel.cuh"
#include "flash_attn/features.h"
#include "probe.h"

namespace flash::flash_attn {

extern "C" const char* find_bwd_sizes(int head_dim, bool plain, bool compact, int64_t* sizes) {
  return error_of([&] {
    dispatch_value<64, 96, 128, 192, 256, 512>(head_dim, [&](auto kHeadDim) {
      dispatch_flags(
          [&](auto kPlain, auto kCompact) {
            constexpr Features kFeatures = kPlain ? Features::kPlain : Features::kAll;
            using Config = BwdConfig<__nv_bfloat16, kHeadDim, kFeatures, kCompact>;
            sizes[0] = sizeof(BwdShared<Config>), sizes[1] = Config::kThreads;
          },
          plain, compact);
    });
  });
}

// Of the tile that run_bwd takes where a thread block can have shared_bytes, and whether it is the compact one.
extern "C" const char* find_bwd_choice(int head_dim, bool plain, int shared_bytes, int64_t* choice) {
  return error_of([&] {
    dispatch_value<64, 96, 128, 192, 256, 512>(head_dim, [&](auto kHeadDim) {
      dispatch_flags(
          [&](auto kPlain) {
            constexpr Features kFeatures = kPlain ? Features::kPlain : Features::kAll;
            using Compact = BwdConfig<__nv_bfloat16, kHeadDim, kFeatures, true>;
            with_tile_for<__nv_bfloat16, kHeadDim, kFeatures>(shared_bytes, [&](auto config) {
              using Config = decltype(config);
              choice[0] = sizeof(BwdShared<Config>), choice[1] = std::is_same_v<Config, Compact>;
            });
          },
          plain);
    });
  });
}

extern "C" const char* find_bwd_sm90_sizes(int head_dim, Features features, int64_t* sizes) {
  return error_of([&] {
    dispatch_value<64, 96, 128>(head_dim, [&](auto kHeadDim) {
      const auto find = [&](auto kFeatures) {
        using Config = BwdSm90Config<__nv_bfloat16, kHeadDim, kFeatures>;
        sizes[0] = sizeof(BwdSm90Shared<Config>), sizes[1] = Config::kThreads;
      };
      dispatch_value<Features::kPlain, Features::kRanged, Features::kBiased, Features::kDropped, Features::kAll>(
          features, find);
    });
  });
}

}  // namespace flash::flash_attn
