// The sink, the bias, the key ranges and the descales of the ops with features.
#pragma once

#include "binding/flash_attn/options.h"
#include "binding/tensor.h"
#include "flash_attn/params.h"

namespace flash::binding::attention {

// Sets the sink, the bias and the key ranges of a problem that is complete otherwise. Kernels know only windows and
// ranges: other restrictions of the keys that rows see are turned into ranges, whose memory `features` then holds.
void set_features(flash_attn::Problem& p, OptionalTensor& sink, OptionalTensor& bias, Features& features, bool paged,
                  const Tensor& q);

// Sets what the codes of a call are multiplied by: scales of any shapes that broadcast to (batch, heads_k).
void set_descales(flash_attn::FwdParams& p, const Descales& descales, const Tensor& q);

}  // namespace flash::binding::attention
