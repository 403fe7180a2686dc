// The entry points of launch.h: each chooses the kernel instance for a problem and launches it.
#include <iterator>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

#include "common/device.h"
#include "common/environment.h"
#include "flash_attn/bwd/plan.h"
#include "flash_attn/cache/append.cuh"
#include "flash_attn/cache/widen.cuh"
#include "flash_attn/dispatch.h"
#include "flash_attn/features.h"
#include "flash_attn/fwd/kernels.h"
#include "flash_attn/fwd/plan.h"
#include "flash_attn/fwd/tiles.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/instances.h"
#include "flash_attn/launch.h"
#include "flash_attn/scores/ranges.cuh"
#include "flash_attn/scores/sink.cuh"

namespace flash::flash_attn {
namespace {

// Calls fn with the instance that takes a problem, as a constant.
template <typename Kernel, typename Params, typename Fn>
void dispatch_instance(const Params& p, Fn&& fn) {
  const auto dispatch = [&]<std::size_t... kIndices>(std::index_sequence<kIndices...>) {
    dispatch_value<Kernel::kInstances[kIndices]...>(instance_for<Kernel>(p), fn);
  };
  dispatch(std::make_index_sequence<std::size(Kernel::kInstances)>());
}

template <typename Params>
void run_built(void (*instance)(const Params&, cudaStream_t), const std::type_identity_t<Params>& p,
               cudaStream_t stream) {
  void (*volatile linked)(const Params&, cudaStream_t) = instance;  // volatile: the compiler assumes it is not null
  const auto run = linked;
  if (run == nullptr) throw std::runtime_error("this development build of flash_attn leaves out the instance needed");
  run(p, stream);
}

template <typename T, int kHeadDim, Features kFeatures, int>
auto fwd_instance(const FwdSm80Plan&) {
  return run_fwd<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures, int>
auto fwd_instance(const DecodePlan&) {
  return run_decode<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures, int>
auto fwd_instance(const CodedDecodePlan&) {
  return run_decode_coded<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
auto fwd_instance(const FwdSm90Plan& plan) {
  if constexpr (has_paired_tile(kHeadDim, kFeatures)) {
    if (plan.paired) return run_fwd_paired<T, kHeadDim, kFeatures, kHeadDimV>;
  }
  if constexpr (has_wide_tile(kHeadDim, kFeatures)) {
    if (plan.wide) return run_fwd_sm90<T, kHeadDim, kFeatures, true, kHeadDimV>;
  }
  return run_fwd_sm90<T, kHeadDim, kFeatures, false, kHeadDimV>;
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
auto fwd_instance(const ServingPlan& plan) {
  if (plan.warpgroups == 1) return run_fwd_serving<T, kHeadDim, kFeatures, true, kHeadDimV>;
  return run_fwd_serving<T, kHeadDim, kFeatures, false, kHeadDimV>;
}

template <typename T, int kHeadDim, Features kFeatures, int>
auto fwd_instance(const CodedServingPlan& plan) {
  if (plan.warpgroups == 1) return run_fwd_serving_coded<T, kHeadDim, kFeatures, true>;
  return run_fwd_serving_coded<T, kHeadDim, kFeatures, false>;
}

template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
auto fwd_instance(const InvariantPlan&) {
  return run_fwd_invariant<T, kHeadDim, kFeatures, kHeadDimV>;
}

template <typename Plan>
void run_fwd_with(const FwdParams& p, const Plan& plan, cudaStream_t stream) {
  using Kernel = typename Plan::Kernel;
  dispatch_problem(p.problem, Kernel::head_dims(p.problem), [&](auto kDType, auto kHeadDim, auto kHeadDimV) {
    dispatch_instance<Kernel>(p, [&](auto kFeatures) {
      run_built(fwd_instance<element_t<kDType>, kHeadDim, kFeatures, kHeadDimV>(plan), {p, plan}, stream);
    });
  });
}

template <typename T, int kHeadDim, Features kFeatures, int>
auto bwd_instance(const BwdSm80Plan&) {
  return run_bwd<T, kHeadDim, kFeatures>;
}
template <typename T, int kHeadDim, Features kFeatures, int kHeadDimV>
auto bwd_instance(const BwdSm90Plan&) {
  return run_bwd_sm90<T, kHeadDim, kFeatures, kHeadDimV>;
}

template <typename Plan>
void run_bwd_with(const BwdParams& p, const Plan& plan, cudaStream_t stream) {
  using Kernel = typename Plan::Kernel;
  dispatch_problem(p.problem, Kernel::head_dims(p.problem), [&](auto kDType, auto kHeadDim, auto kHeadDimV) {
    dispatch_instance<Kernel>(p, [&](auto kFeatures) {
      run_built(bwd_instance<element_t<kDType>, kHeadDim, kFeatures, kHeadDimV>(plan), PlannedBwd<Plan>{p, plan},
                stream);
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

void sink_gradient(const SinkParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat16, DType::kBFloat16, DType::kFloat32>(
      p.bwd.problem.sink_dtype, [&](auto kDType) { run_sink_gradient<element_t<kDType>>(p, stream); });
}

void bias_gradient(const DbiasParams& p, const DbiasPlan& plan, cudaStream_t stream) {
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.bwd.problem.dtype, [&](auto kDType) {
    run_built(run_dbias<element_t<kDType>>, PlannedDbias{p, plan}, stream);
  });
}

void dmask(const DmaskParams& p, cudaStream_t stream) {
  const Problem& problem = p.fwd.problem;
  dispatch_problem(problem, sm80_head_dims(problem.head_dim, 0), [&](auto kDType, auto kHeadDim, auto) {
    using T = element_t<kDType>;
    if (dmask_width(problem.head_dim) == 128) return run_built(run_dmask<T, 64, 128>, p, stream);
    run_built(run_dmask<T, kHeadDim, dmask_width(kHeadDim)>, p, stream);
  });
}

void append(const AppendParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.dtype,
                                                    [&](auto kDType) { run_append<element_t<kDType>>(p, stream); });
}

void widen(const WidenParams& p, cudaStream_t stream) { run_widen(p, stream); }

void ranges(const RangesParams& p, cudaStream_t stream) { run_ranges(p, stream); }

}  // namespace flash::flash_attn
