// A bias that is added to the scores, or a bool mask.
#pragma once

#include "binding/flash_attn/options.h"
#include "binding/tensor.h"
#include "flash_attn/params.h"

namespace flash::binding::attention {

// BiasRows::batch2_size for a bias (batch1, batch2, heads, rows, keys): how many entries its second dimension stands
// for. Each size but that of keys may be 1, and packed tokens are one entry.
int batch2_size(const Tensor& bias, const flash_attn::Problem& p);

flash_attn::BiasRows bias_rows(const Tensor& x, int batch2_size);

// Checks the bias and sets it as it is given, except that one in bf16 becomes float32 where kernels compute in fp16.
void set_bias(flash_attn::Problem& p, OptionalTensor& bias, const Tensor& q);

// Copies a bias if the kernels cannot read it as it is: in pairs of keys or, if `tiled`, in tiles that TMA copies,
// which must have the dtype of the queries. `bias` then holds the copy. In tiles, a bool mask for all heads took a half
// to two thirds less time at 512 to 4096 tokens, the copy included.
void place_bias(flash_attn::Problem& p, OptionalTensor& bias, const Tensor& q, bool tiled);

}  // namespace flash::binding::attention
