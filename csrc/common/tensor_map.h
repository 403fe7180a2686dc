// Tensor maps: the descriptors of tensors for the TMA copies of ptx/tma.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.h"
#include "common/tensor_ref.h"

namespace flash {

// Looks up the driver's cuTensorMapEncodeTiled at run time, since the library does not link the driver.
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

// Describes a tensor in four dimensions, fastest first, and the box of it that a copy moves. Strides are those of the
// dimensions after the first, in bytes. They and the address must be multiples of 16.
inline CUtensorMap tensor_map(const void* data, CUtensorMapDataType type, const std::array<int64_t, 4>& sizes,
                              const std::array<int64_t, 3>& strides, const std::array<int, 4>& box,
                              CUtensorMapSwizzle swizzle) {
  cuuint64_t dims[4], dim_strides[3];
  cuuint32_t box_dims[4];
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  std::ranges::copy(sizes, dims);
  std::ranges::copy(strides, dim_strides);
  std::ranges::copy(box, box_dims);
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(&map, type, 4, const_cast<void*>(data), dims, dim_strides, box_dims,
                                               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with error " + std::to_string(status));
  }
  return map;
}

// Describes a tensor (entries, rows, heads, head_dim) of 16-bit elements, for copies of box_rows rows of one panel of a
// SharedTile (tile/shared.cuh): rows of the box fill 64 or 128 bytes, swizzled as there. The stride of a dimension of
// size 1 does not matter, and is replaced by a valid one.
template <typename Tile, typename Data>
CUtensorMap map_of(const TensorRef<Data>& x, int64_t head_dim, int64_t heads, int64_t rows, int64_t entries,
                   int box_rows = Tile::kRows) {
  constexpr int64_t kElementBytes = sizeof(typename Tile::T);
  const auto stride = [](int64_t elements, int64_t size) { return size > 1 ? elements * kElementBytes : 16; };
  return tensor_map(x.data, CU_TENSOR_MAP_DATA_TYPE_UINT16, {head_dim, heads, rows, entries},
                    {stride(x.heads, heads), stride(x.seqlen, rows), stride(x.batch, entries)},
                    {Tile::kPanelCols, 1, box_rows, 1},
                    Tile::kPanelCols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace flash
