// What test_config.py asks about the instances of kernels: bytes of shared memory and threads. It needs nvcc, but no
// GPU. Functions return null, or the text of their error.
#include <cstdint>

#include "common/dispatch.h"
#include "flash_attn/decode_sm80/kernel.cuh"
#include "flash_attn/dmask_sm80/kernel.cuh"
#include "flash_attn/features.h"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/fwd_sm80/kernel.cuh"
#include "flash_attn/fwd_sm90/kernel.cuh"
#include "probe.h"

namespace flash::flash_attn {
namespace {

template <int... kMore, typename Fn>
const char* for_head_dim(int head_dim, Fn&& fn) {
  return error_of([&] { dispatch_value<64, 96, 128, 192, 256, kMore...>(head_dim, fn); });
}

template <typename Shared>
void answer(int64_t* sizes, int threads) {
  sizes[0] = sizeof(Shared), sizes[1] = threads;
}

}  // namespace

extern "C" {

const char* find_fwd_sizes(int head_dim, Features features, int64_t* sizes) {
  return for_head_dim<512>(head_dim, [&](auto kHeadDim) {
    dispatch_value<Features::kPlain, Features::kAll>(features, [&](auto kFeatures) {
      using Config = FwdConfig<__nv_bfloat16, kHeadDim, kFeatures>;
      answer<FwdShared<Config>>(sizes, Config::kBlockThreads);
    });
  });
}

const char* find_fwd_sm90_sizes(int head_dim, int head_dim_v, Features features, bool wide, int64_t* sizes) {
  const auto find = [&](auto kHeadDim, auto kHeadDimV) {
    dispatch_value<Features::kPlain, Features::kRanged, Features::kBiased, Features::kDropped, Features::kAll>(
        features, [&](auto kFeatures) {
          const auto run = [&](auto kWide) {
            constexpr auto kKind = kWide ? FwdSm90Kind::kDenseWide : FwdSm90Kind::kDense;
            using Config = FwdSm90Config<__nv_bfloat16, kHeadDim, kFeatures, kKind, kHeadDimV>;
            answer<FwdSm90Shared<Config>>(sizes, Config::kThreads);
          };
          dispatch_flags(run, wide);
        });
  };
  if (head_dim != head_dim_v) return error_of([&] { find(Constant<192>{}, Constant<128>{}); });
  return for_head_dim<512>(head_dim, [&](auto kHeadDim) { find(kHeadDim, kHeadDim); });
}

const char* find_serving_sizes(int head_dim, int head_dim_v, Features features, bool few_rows, int64_t* sizes) {
  const auto find = [&](auto kHeadDim, auto kHeadDimV) {
    dispatch_value<Features::kPlain, Features::kAll>(features, [&](auto kFeatures) {
      const auto run = [&](auto kFewRows) {
        constexpr auto kKind = kFewRows ? FwdSm90Kind::kFewRows : FwdSm90Kind::kServing;
        using Config = FwdSm90Config<__nv_bfloat16, kHeadDim, kFeatures, kKind, kHeadDimV>;
        answer<FwdSm90Shared<Config>>(sizes, Config::kThreads);
      };
      dispatch_flags(run, few_rows);
    });
  };
  if (head_dim != head_dim_v) return error_of([&] { find(Constant<192>{}, Constant<128>{}); });
  return for_head_dim(head_dim, [&](auto kHeadDim) { find(kHeadDim, kHeadDim); });
}

const char* find_invariant_sizes(int head_dim, int head_dim_v, Features features, int64_t* sizes) {
  const auto find = [&](auto kHeadDim, auto kHeadDimV) {
    dispatch_value<Features::kPlain, Features::kAll>(features, [&](auto kFeatures) {
      using Config = FwdSm90Config<__nv_bfloat16, kHeadDim, kFeatures, FwdSm90Kind::kInvariant, kHeadDimV>;
      answer<FwdSm90Shared<Config>>(sizes, Config::kThreads);
    });
  };
  if (head_dim != head_dim_v) return error_of([&] { find(Constant<192>{}, Constant<128>{}); });
  return for_head_dim(head_dim, [&](auto kHeadDim) { find(kHeadDim, kHeadDim); });
}

const char* find_dmask_sizes(int head_dim, int64_t* sizes) {
  return for_head_dim(head_dim, [&](auto kHeadDim) {
    using Config = DmaskConfig<__nv_bfloat16, kHeadDim, dmask_width(kHeadDim)>;
    answer<DmaskShared<Config>>(sizes, Config::kThreads);
  });
}

// Of a warp.
const char* find_decode_sizes(int head_dim, int64_t* sizes) {
  return for_head_dim<512>(head_dim, [&](auto kHeadDim) {
    using Config = DecodeConfig<__nv_bfloat16, kHeadDim, Features::kAll, true>;
    answer<DecodeRing<Config>>(sizes, Config::kThreads);
  });
}

}  // extern "C"
}  // namespace flash::flash_attn
