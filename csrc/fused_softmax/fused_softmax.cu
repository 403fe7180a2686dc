// Chooses the instance: there is one for each type.
#include "common/dispatch.h"
#include "fused_softmax/fused_softmax.cuh"
#include "fused_softmax/launch.h"

namespace flash::fused_softmax {

void fwd(const FwdParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      p.rows.dtype, [&](auto kDType) { run_fwd<element_t<kDType>>(p, stream); });
}

void bwd(const BwdParams& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(
      p.rows.dtype, [&](auto kDType) { run_bwd<element_t<kDType>>(p, stream); });
}

}  // namespace flash::fused_softmax
