// Run-time values become template arguments here and nowhere else:
//
//   dispatch_value<64, 128>(head_dim, [&](auto kHeadDim) {
//     dispatch_flags([&](auto kCausal, auto kPaged) { run<kHeadDim, kCausal, kPaged>(p, stream); }, causal, paged);
//   });
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/dtype.h"

namespace flash {

template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

// Calls fn(Constant<v>()) for the v among kValues that equals value; throws if there is none.
template <auto... kValues, typename Value, typename Fn>
void dispatch_value(Value value, Fn&& fn) {
  const bool found = ((value == kValues && (fn(Constant<kValues>{}), true)) || ...);
  if (found) return;
  std::string built;
  ((built += " " + std::to_string(static_cast<long long>(kValues))), ...);
  throw std::invalid_argument("no kernel is built for the value " + std::to_string(static_cast<long long>(value)) +
                              ", only for:" + built);
}

// Calls fn with each flag as Constant<true> or Constant<false>.
template <typename Fn>
void dispatch_flags(Fn&& fn) {
  fn();
}
template <typename Fn, typename... Rest>
void dispatch_flags(Fn&& fn, bool flag, Rest... rest) {
  auto with = [&](auto constant) { dispatch_flags([&](auto... more) { fn(constant, more...); }, rest...); };
  flag ? with(Constant<true>{}) : with(Constant<false>{});
}

template <DType kDType>
using element_t = std::conditional_t<kDType == DType::kFloat32, float,
                                     std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>>;

}  // namespace flash
