// Chooses the instance and the number of chunks.
#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/dispatch.h"
#include "fused_dense/launch.h"
#include "fused_dense/sum_rows.cuh"

namespace flash::fused_dense {
namespace {

// Returns whether every row starts at an aligned address.
bool are_aligned(const Rows& rows, int elements) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % elements == 0;
}

void sum_chunks(const SumRowsParams& p, cudaStream_t stream) {
  using enum DType;
  using enum Activation;
  const int elements = 16 / size_of(p.dtype);
  const bool is_wide = are_aligned(p.x, elements) && are_aligned(p.kept, elements) && p.cols % elements == 0;
  const auto run = [&](auto kIsWide) {
    if (p.kept.data == nullptr) {
      dispatch_value<kFloat32, kFloat16, kBFloat16>(p.dtype, [&](auto kDType) {
        run_sum_rows<SumConfig<kDType, kIsWide ? 16 / size_of(kDType) : 1>>(p, stream);
      });
    } else {
      dispatch_value<kFloat16, kBFloat16>(p.dtype, [&](auto kDType) {
        dispatch_value<kGelu, kRelu, kSquaredRelu, kSilu>(p.activation, [&](auto kActivation) {
          run_sum_rows<GradientSumConfig<kDType, kIsWide ? 8 : 1, kActivation>>(p, stream);
        });
      });
    }
  };
  dispatch_flags(run, is_wide);
}

}  // namespace

// Chooses as many chunks as fill the device with blocks at one time, but leaves enough rows for every warp of a block.
int64_t sum_rows_chunks(int64_t rows, int64_t cols) {
  const int64_t blocks = kSumBlocks * num_multiprocessors(current_device());
  return std::clamp<int64_t>(blocks / ceil_div(cols, 256), 1, ceil_div(rows, 64));
}

void sum_rows(SumRowsParams p, float* partial, int64_t chunks, cudaStream_t stream) {
  p.chunk_rows = ceil_div(p.rows, static_cast<int>(chunks));
  if (chunks == 1) return sum_chunks(p, stream);
  auto first = p;
  first.out = partial;
  first.out_dtype = DType::kFloat32;
  sum_chunks(first, stream);
  const int64_t parts = ceil_div(p.rows, static_cast<int>(p.chunk_rows));
  sum_chunks({.dtype = DType::kFloat32,
              .rows = parts,
              .cols = p.cols,
              .chunk_rows = parts,
              .x = {partial, p.cols},
              .out = p.out,
              .out_dtype = p.out_dtype},
             stream);
}

}  // namespace flash::fused_dense
