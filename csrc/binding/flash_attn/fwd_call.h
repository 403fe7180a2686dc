// What the forward ops have in common. Each is four steps: its arguments are parsed (boxed.h, options.h); they become
// the parameters of a kernel, a FwdCall, and so do the results; the kernel is planned; it is launched.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "binding/flash_attn/append.h"
#include "binding/flash_attn/inputs.h"
#include "binding/flash_attn/options.h"
#include "binding/tensor.h"
#include "flash_attn/params.h"

namespace flash::binding::attention {

// The parameters of a forward, and what its results and its plan also depend on.
struct FwdCall {
  flash_attn::FwdParams p;
  View<const void> q;
  bool tokens, packed;
  int64_t longest_q, longest_k;
  int64_t num_splits = 0;  // 0: as many as is best
};

// The call of fwd or probabilities with these arguments, without results. takes_codes: whether k and v may be codes.
FwdCall fwd_call(const Tensor& q, const OptionalTensor& k, const OptionalTensor& v, Options& options,
                 bool takes_codes = false);

// Results: each function returns a new tensor, which the call then writes.
Tensor new_out(FwdCall& call, const Tensor& q);
Tensor new_out_lo(FwdCall& call, const Tensor& q);
Tensor new_lse(FwdCall& call, const Tensor& q);
Tensor new_row_max(FwdCall& call, const Tensor& q, bool wanted);                // empty if it is not wanted
Tensor new_lse_lo(FwdCall& call, const Tensor& q, const OptionalTensor& bias);  // empty without a bias

// Has a call write its results to tensors of the caller: out with any strides but the last, and values of each row.
void write_to(FwdCall& call, const Tensor& q, const Tensor& out, const OptionalTensor& softmax_lse,
              const OptionalTensor& row_max = std::nullopt);
// Refuses a tensor to be written that lies between the first and last element of another, even if they share none.
void check_apart(const Tensor& written, std::initializer_list<const Tensor*> read);

// Chooses a kernel for a complete call and launches it. append: new keys and values, which are appended before.
void plan_and_launch(FwdCall& call, const Tensor& q, OptionalTensor bias = std::nullopt, Append* append = nullptr);

}  // namespace flash::binding::attention
