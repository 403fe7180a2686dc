// Chooses the instance with the widest access that columns, strides and addresses allow.
#include <cstdint>
#include <initializer_list>

#include "common/dispatch.h"
#include "fused_dense/activation.cuh"
#include "fused_dense/launch.h"

namespace flash::fused_dense {
namespace {

template <typename Params>
using Members = std::initializer_list<Rows Params::*>;

// Joins all rows into one long row if there are no gaps between them.
template <typename Params>
Params joined(Params p, Members<Params> tensors) {
  for (const auto tensor : tensors) {
    if ((p.*tensor).data != nullptr && (p.*tensor).stride != p.cols) return p;
  }
  p.cols *= p.rows;
  p.rows = 1;
  return p;
}

template <typename Params>
bool are_aligned(const Params& p, int bytes, Members<Params> tensors) {
  const auto fits = [&](int64_t elements) { return elements * size_of(p.dtype) % bytes == 0; };
  for (const auto tensor : tensors) {
    const Rows& rows = p.*tensor;
    if (reinterpret_cast<uintptr_t>(rows.data) % bytes != 0 || (p.rows > 1 && !fits(rows.stride))) return false;
  }
  return fits(p.cols);
}

// Calls run(config, p) with the configuration that fits p.
template <typename Params, typename Run>
void dispatch(const Params& params, Members<Params> tensors, Run&& run) {
  const Params p = joined(params, tensors);
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    using T = element_t<kDType>;
    using enum Activation;
    dispatch_value<kGelu, kRelu, kSquaredRelu, kSilu>(p.activation, [&](auto kActivation) {
      dispatch_flags(
          [&](auto kWide, auto kGated) {
            run(ActivationConfig<T, kWide ? 16 / sizeof(T) : 1, kActivation, kGated>(), p);
          },
          are_aligned(p, 16, tensors), p.y.data != nullptr);
    });
  });
}

}  // namespace

void activation_fwd(const ActivationFwdParams& p, cudaStream_t stream) {
  using Params = ActivationFwdParams;
  dispatch<Params>(p, {&Params::x, &Params::y, &Params::out}, [&](auto config, const Params& p) {
    run_activation<decltype(config), activation_fwd_kernel<decltype(config)>>(p, stream);
  });
}

void activation_bwd(const ActivationBwdParams& p, cudaStream_t stream) {
  using Params = ActivationBwdParams;
  dispatch<Params>(p, {&Params::dout, &Params::x, &Params::y, &Params::dx, &Params::dy},
                   [&](auto config, const Params& p) {
                     run_activation<decltype(config), activation_bwd_kernel<decltype(config)>>(p, stream);
                   });
}

}  // namespace flash::fused_dense
