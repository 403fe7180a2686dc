// What test_common.py calls of csrc/common, and test_tile.py of functions on the host: no GPU is needed but for
// `divide` and for launches that succeed.
#include <cstdint>
#include <string>

#include "common/check.h"
#include "common/device.h"
#include "common/dispatch.h"
#include "common/divmod.h"
#include "common/dtype.h"
#include "common/launch.h"
#include "probe.h"
#include "tile/row.cuh"
#include "tile/shared.cuh"

namespace flash {
namespace {

struct Division {
  Divisor divisor;
  const int* n;
  int* quotients;
  int* remainders;
  int64_t count;
};

__global__ void divide_kernel(const __grid_constant__ Division p) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const int n = p.n[i], quotient = p.divisor.divide(n);
  p.quotients[i] = quotient;
  p.remainders[i] = p.divisor.remainder(n, quotient);
}

__global__ void count_kernel(int* const __grid_constant__ threads) { atomicAdd(threads, 1); }

template <typename Fn>
void dispatch_cols(int cols, Fn&& fn) {
  dispatch_value<32, 64, 96, 128, 192, 256>(cols, fn);
}

}  // namespace

extern "C" {

const char* divide(int divisor, const int* n, int* quotients, int* remainders, int64_t count) {
  const dim3 grid(static_cast<unsigned>(ceil_div(count, 256)));
  return error_of([&] {
    launch<divide_kernel>({.grid = grid, .block = dim3(256)},
                          Division{Divisor(divisor), n, quotients, remainders, count}, nullptr);
  });
}

// In bytes, as SharedTile counts.
int tile_offset(int tile_cols, int row, int chunk) {
  int offset = 0;
  dispatch_cols(tile_cols, [&](auto kCols) { offset = SharedTile<__nv_bfloat16, 128, kCols>::offset(row, chunk); });
  return offset;
}
int tile_offset_by_parts(int tile_cols, int row, int chunk) {
  int offset = 0;
  dispatch_cols(tile_cols, [&](auto kCols) {
    using Tile = SharedTile<__nv_bfloat16, 128, kCols>;
    const int origin = Tile::offset(row % 8, chunk % 2);
    offset = (origin ^ Tile::flip(chunk - chunk % 2)) + Tile::distance(row - row % 8, chunk / Tile::kPanelChunks);
  });
  return offset;
}

// The lanes that a row of up to 1024 of them gets.
int count_lanes(int64_t elements, int per_lane) { return lanes_for<1024>(elements, per_lane); }

const char* count_threads(int grid_x, int grid_y, int grid_z, int block, int shared_bytes, int* threads) {
  return error_of(
      [&] { launch<count_kernel>({dim3(grid_x, grid_y, grid_z), dim3(block), shared_bytes}, threads, nullptr); });
}

const char* check_status(int status) {
  return error_of([&] { check_cuda(static_cast<cudaError_t>(status), "cudaProbe"); });
}

int multiprocessors(int device) { return num_multiprocessors(device); }

// The value that is found, as a text.
const char* find_value(int value) {
  std::string found;
  const char* error = error_of(
      [&] { dispatch_value<64, 96, 128>(value, [&](auto kValue) { found += std::to_string(kValue) + ";"; }); });
  return error ? error : keep(found);
}

// What the flags become, as decimal digits.
int find_flags(bool a, bool b, bool c) {
  int found = 0;
  dispatch_flags([&](auto kA, auto kB, auto kC) { found += kA * 100 + kB * 10 + kC; }, a, b, c);
  return found;
}

int find_element_size(int dtype) {
  int size = 0;
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(static_cast<DType>(dtype), [&](auto kDType) {
    static_assert(sizeof(element_t<kDType>) == size_of(kDType));
    size = sizeof(element_t<kDType>);
  });
  return size;
}

}  // extern "C"

}  // namespace flash
