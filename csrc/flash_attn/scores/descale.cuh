// Keys and values that were given as codes in 8 bits (e4m3): what they are multiplied by, a number for each entry and
// key head, is applied to sums. That of keys is a part of the softmax scale; that of values multiplies O, at the end,
// so that partial results know nothing of it. Codes are computed with in fp16, so only instances of fp16 ask.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "flash_attn/params.h"
#include "ptx/math.cuh"

namespace flash::flash_attn {

// Packed rows after the last entry have none.
__device__ inline float descale_of(const Descale& x, const Problem& p, int entry, int key_head) {
  if (x.data == nullptr || entry >= p.batch) return 1;
  return __ldg(x.data + entry * x.batch + key_head * x.heads);
}

// The softmax scale of a tile. AnyTile: WorkTile, or a record with its entry and key head.
template <typename T, typename AnyTile>
__device__ float softmax_scale_of(const Problem& p, const AnyTile& tile) {
  if constexpr (std::is_same_v<T, __half>) {
    const float scale = p.softmax_scale * descale_of(p.k_descale, p, tile.entry, tile.key_head);
    return scale < kLeastSoftmaxScale ? kLeastSoftmaxScale : scale;  // NaN stays NaN
  }
  return p.softmax_scale;
}

// The factor of a tile's O.
template <typename T, typename AnyTile>
__device__ float output_scale_of(const Problem& p, const AnyTile& tile) {
  if constexpr (std::is_same_v<T, __half>) return descale_of(p.v_descale, p, tile.entry, tile.key_head);
  return 1;
}

// Rounds results to the type of out, two at a time: T or, in instances of fp16, perhaps bf16.
template <typename T>
struct RoundedToOut {
  bool to_bf16;

  __device__ explicit RoundedToOut(const FwdParams& p) : to_bf16(p.out_dtype == DType::kBFloat16) {}
  __device__ uint32_t operator()(float low, float high) const {
    if constexpr (std::is_same_v<T, __half>) {
      if (to_bf16) return ptx::pack<__nv_bfloat16>(low, high);
    }
    return ptx::pack<T>(low, high);
  }
};

}  // namespace flash::flash_attn
