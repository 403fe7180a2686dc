// Turns the element type and head dims of a problem into template arguments.
#pragma once

#include "common/dispatch.h"
#include "flash_attn/head_dims.h"
#include "flash_attn/params.h"

namespace flash::flash_attn {

// Calls fn(type, head dim of keys, head dim of values) with those of the instance `built`, as constants.
template <typename Fn>
void dispatch_problem(const Problem& p, const HeadDims& built, Fn&& fn) {
  dispatch_value<DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    if (built == kUnequal) return fn(kDType, Constant<kUnequal.of_keys>{}, Constant<kUnequal.of_values>{});
    dispatch_value<64, 96, 128, 192, 256, 512>(built.of_keys, [&](auto kHeadDim) { fn(kDType, kHeadDim, kHeadDim); });
  });
}

// The same for kernels with one head dim for keys and values: fn(type, head dim).
template <typename Fn>
void dispatch_problem(const Problem& p, Fn&& fn) {
  dispatch_problem(p, sm80_head_dims(p.head_dim, p.head_dim_v),
                   [&](auto kDType, auto kHeadDim, auto) { fn(kDType, kHeadDim); });
}

}  // namespace flash::flash_attn
