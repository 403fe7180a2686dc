// The choice of instance.
#include <stdexcept>
#include <variant>

#include "common/device.h"
#include "common/dispatch.h"
#include "common/environment.h"
#include "flash_attn/append.cuh"
#include "flash_attn/bwd_plan.h"
#include "flash_attn/features.h"
#include "flash_attn/fwd_plan.h"
#include "flash_attn/fwd_tiles.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/instances.h"
#include "flash_attn/launch.h"

namespace flash::flash_attn {
namespace {

// Calls fn(type, head dim of the instance), both as constants. kMore: head dims besides those of all kernels.
template <int... kMore, typename Fn>
void dispatch_problem(const Problem& p, Fn&& fn) {
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    dispatch_value<64, 96, 128, 192, 256, kMore...>(instance_head_dim(p.head_dim),
                                                    [&](auto kHeadDim) { fn(kDType, kHeadDim); });
  });
}

template <typename Params>
void run_built(void (*instance)(const Params&, cudaStream_t), const Params& p, cudaStream_t stream) {
  void (*volatile linked)(const Params&, cudaStream_t) = instance;  // or the compiler assumes that it is not null
  const auto run = linked;
  if (run == nullptr) throw std::runtime_error("this development build of flash_attn leaves out the instance needed");
  run(p, stream);
}

template <typename T, int kHeadDim, Features kFeatures>
auto fwd_instance(const FwdSm80Plan&) {
  return run_fwd<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures>
auto fwd_instance(const DecodePlan&) {
  return run_decode<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures>
auto fwd_instance(const FwdSm90Plan& plan) {
  if constexpr (has_wide_tile(kHeadDim, kFeatures)) {
    if (plan.wide) return run_fwd_sm90<T, kHeadDim, kFeatures, true>;
  }
  return run_fwd_sm90<T, kHeadDim, kFeatures, false>;
}

template <typename Plan>
void run_fwd_with(const FwdParams& p, const Plan& plan, cudaStream_t stream) {
  const Features features = features_of(p, Plan::kPlainFindsPages);
  dispatch_problem<512>(p.problem, [&](auto kDType, auto kHeadDim) {
    dispatch_value<Features::kPlain, Features::kAll>(features, [&](auto kFeatures) {
      run_built(fwd_instance<element_t<kDType>, kHeadDim, kFeatures>(plan), Planned<Plan>{p, plan}, stream);
    });
  });
}

template <typename T, int kHeadDim, Features kFeatures>
auto bwd_instance(const BwdSm80Params&) {
  return run_bwd<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures>
auto bwd_instance(const BwdSm90Params&) {
  return run_bwd_sm90<T, kHeadDim, kFeatures>;
}

template <typename Plan>
void run_bwd_with(const BwdParams& p, const Plan& plan, cudaStream_t stream) {
  const PlannedBwd<Plan> params{p, plan};
  dispatch_problem(p.problem, [&](auto kDType, auto kHeadDim) {
    dispatch_value<Features::kPlain, Features::kAll>(features_of(p), [&](auto kFeatures) {
      run_built(bwd_instance<element_t<kDType>, kHeadDim, kFeatures>(params), params, stream);
    });
  });
}

constexpr bool is_compiled_for(int arch) {
  for (const int compiled : {__CUDA_ARCH_LIST__}) {
    if (compiled == arch) return true;
  }
  return false;
}

}  // namespace

bool has_sm90(int device) {
  if (!is_compiled_for(900) || is_switched_on("FLASH_ATTN_PORTABLE")) return false;
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 9;
}

void fwd(const FwdParams& p, const FwdPlan& plan, cudaStream_t stream) {
  std::visit([&](const auto& chosen) { run_fwd_with(p, chosen, stream); }, plan);
}

void bwd(const BwdParams& p, const BwdPlan& plan, cudaStream_t stream) {
  std::visit([&](const auto& chosen) { run_bwd_with(p, chosen, stream); }, plan);
}

void dmask(const DmaskParams& p, cudaStream_t stream) {
  dispatch_problem(p.fwd.problem, [&](auto kDType, auto kHeadDim) {
    using T = element_t<kDType>;
    if (dmask_width(p.fwd.problem.head_dim) == 128) return run_built(run_dmask<T, 64, 128>, p, stream);
    run_built(run_dmask<T, kHeadDim, dmask_width(kHeadDim)>, p, stream);
  });
}

void append(const AppendParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.problem.dtype,
                                                    [&](auto kDType) { run_append<element_t<kDType>>(p, stream); });
}

}  // namespace flash::flash_attn
