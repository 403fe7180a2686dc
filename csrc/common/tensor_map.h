// Descriptions of tensors for the copies of ptx/tma.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.h"

namespace flash {

// cuTensorMapEncodeTiled of the driver, which is not linked.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// A tensor of 16-bit elements in four dimensions, the fastest first, and the box of it that a copy moves. Rows of the
// box fill 64 or 128 bytes of shared memory, permuted as in SharedTile (tile/shared.cuh). Strides are in bytes, of the
// dimensions after the first, and multiples of 16, as is the address.
inline CUtensorMap tensor_map(const void* data, const std::array<int64_t, 4>& sizes,
                              const std::array<int64_t, 3>& strides, const std::array<int, 4>& box) {
  cuuint64_t dims[4], dim_strides[3];
  cuuint32_t box_dims[4];
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  std::ranges::copy(sizes, dims);
  std::ranges::copy(strides, dim_strides);
  std::ranges::copy(box, box_dims);
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(data), dims,
                                               dim_strides, box_dims, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                               box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with error " + std::to_string(status));
  }
  return map;
}

}  // namespace flash
