// The choice of instance without any instance, as in a narrowed build. It needs nvcc, but no GPU.
#pragma GCC visibility push(hidden)  // as setup.py builds it
#include "flash_attn/flash_attn.cu"
#pragma GCC visibility pop
#include "probe.h"

namespace flash::flash_attn {

extern "C" {

// Null, or the text of the error.
const char* run_fwd_instance(int head_dim, int head_dim_v, int dtype, int kernel) {
  const FwdPlan plans[] = {FwdSm80Plan{}, DecodePlan{}, FwdSm90Plan{}, ServingPlan{}, InvariantPlan{}};
  FwdParams p{};
  p.problem.dtype = static_cast<DType>(dtype);
  p.problem.head_dim = head_dim;
  p.problem.head_dim_v = head_dim_v;
  return error_of([&] { fwd(p, plans[kernel], nullptr); });
}

const char* run_bwd_instance(int head_dim, int head_dim_v, int dtype, bool on_sm90) {
  BwdParams p{};
  p.problem.dtype = static_cast<DType>(dtype);
  p.problem.head_dim = head_dim;
  p.problem.head_dim_v = head_dim_v;
  const BwdPlan plan = on_sm90 ? BwdPlan(BwdSm90Plan{}) : BwdPlan(BwdSm80Plan{});
  return error_of([&] { bwd(p, plan, nullptr); });
}

}  // extern "C"
}  // namespace flash::flash_attn
