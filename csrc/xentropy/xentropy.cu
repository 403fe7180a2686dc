// Chooses the instance: there is one for each type of the logits.
#include "common/dispatch.h"
#include "xentropy/launch.h"
#include "xentropy/xentropy.cuh"

namespace flash::xentropy {

void fwd(const FwdParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      p.problem.dtype, [&](auto kDType) { run_fwd<FwdConfig<element_t<kDType>>>(p, stream); });
}

void bwd(const BwdParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      p.problem.dtype, [&](auto kDType) { run_bwd<BwdConfig<element_t<kDType>>>(p, stream); });
}

void fwd_bwd(const FwdBwdParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      p.fwd.problem.dtype, [&](auto kDType) { run_fwd_bwd<element_t<kDType>>(p, stream); });
}

void scale(const ScaleParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      p.dtype, [&](auto kDType) { run_scale<BwdConfig<element_t<kDType>>>(p, stream); });
}

}  // namespace flash::xentropy
