// What single steps of the kernels for serving cost on a GPU: units.py says what each number is, and runs them.
//
// Each function measures one and returns null, or the text of an error. `out` points to the result on the device:
// clocks of each thread block, or what else the function says.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/shared.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Boxes: one thread, or the lanes of a warp, copy them as fast as they can, from memory that the L2 cache holds

constexpr int kRingBytes = 128 * 1024, kMostBoxes = 64, kMostPlaces = 4096;

struct BoxRing {
  alignas(1024) char data[kRingBytes];
  int places[kMostPlaces];
  flash::ptx::SharedBarrier full[kMostBoxes];
};

struct BoxParams {
  CUtensorMap map;
  const int* places;  // (count), coordinate 3 of each box; null: box i has row `rows` * i of entry 0
  int64_t* clocks;
  float* sum;  // of all that the first box of the last round holds: 0 for a page that does not exist
  int count, lanes, box_bytes, rows, most_rows;  // as many boxes; 64, 32 or 16 slots are a multiple of the lanes
};

// The lanes of a warp take turns with the boxes: each has slots of its own in the ring, so that none waits for another.
__global__ void boxes(const __grid_constant__ BoxParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& ring = flash::shared_memory<BoxRing>();
  const int slots = min(kMostBoxes, kRingBytes / p.box_bytes), lanes = min(p.lanes, slots), lane = threadIdx.x;
  const int row_step = p.places ? 0 : p.rows * lanes % p.most_rows;
  for (int i = lane; i < p.count; i += 32) ring.places[i] = p.places ? p.places[i] : 0;
  if (lane == 0) {
    for (int i = 0; i < slots; ++i) ring.full[i].init(1);
    flash::ptx::fence_barrier_init();
  }
  __syncwarp();
  const int64_t start = clock64();
  if (lane < lanes) {
    // Counters, not remainders: a thread alone would wait longer for a division than for a box.
    int slot = lane, parity = 1, row = p.places ? 0 : p.rows * lane % p.most_rows;
    for (int i = lane; i < p.count + slots; i += lanes) {
      if (i >= slots) ring.full[slot].wait(parity);
      if (i < p.count) {
        ring.full[slot].arrive_expect_tx(p.box_bytes);
        flash::ptx::copy_box_async(flash::ptx::shared_address(ring.data) + slot * p.box_bytes, p.map, 0, 0, row,
                                   ring.places[i], ring.full[slot]);
      }
      row = row + row_step < p.most_rows ? row + row_step : row + row_step - p.most_rows;
      const bool wraps = slot + lanes >= slots;
      slot = wraps ? lane : slot + lanes;
      parity ^= wraps;
    }
  }
  __syncwarp();
  if (lane == 0) {
    p.clocks[blockIdx.x] = clock64() - start;
    float sum = 0;
    for (int i = 0; i < p.box_bytes / 2; ++i)
      sum += fabsf(__bfloat162float(reinterpret_cast<__nv_bfloat16*>(ring.data)[i]));
    p.sum[blockIdx.x] = sum;
  }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

template <typename T>
struct Operands {
  flash::SharedTile<T, 64, 64> a;
  flash::SharedTile<T, 128, 64> b;
};

struct ProductParams {
  int64_t* clocks;
  float* sink;
  int count;
};

template <typename T>
__global__ __launch_bounds__(128) void products(const __grid_constant__ ProductParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = flash::shared_memory<Operands<T>>();
  for (int i = threadIdx.x; i < 64 * 64; i += 128) shared.a.data[i] = T(0.f);
  for (int i = threadIdx.x; i < 128 * 64; i += 128) shared.b.data[i] = T(0.f);
  flash::ptx::fence_async_shared();
  __syncthreads();
  using Tile = flash::SharedTile<T, 64, 64>;
  const flash::ptx::MatrixDescriptor a(shared.a.address(0, 0), Tile::kRowBytes, sizeof(shared.a));
  const flash::ptx::MatrixDescriptor b(shared.b.address(0, 0), Tile::kRowBytes, sizeof(shared.b));
  float c[16][4] = {};
  const int64_t start = clock64();
  for (int i = 0; i < p.count; i += 4) {
    flash::ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) flash::ptx::wgmma<T, false, false>(c, a.after(32 * k), b.after(32 * k), true);
    flash::ptx::wgmma_commit();
  }
  flash::ptx::wgmma_wait<0>();
  const int64_t clocks = clock64() - start;
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < 16; ++tile) sum += c[tile][0] + c[tile][1] + c[tile][2] + c[tile][3];
  if (sum != 0) *p.sink = sum;
  if (threadIdx.x == 0) p.clocks[blockIdx.x] = clocks;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Thread blocks

struct ResidentParams {
  int* here;      // (multiprocessors), how many blocks are on each
  int* together;  // (multiprocessors), the most that were there at a time
};

// A consumer with 216 registers a thread and a producer with 40. Each block waits a moment for others on its SM.
__global__ __launch_bounds__(256, 2) void resident(const __grid_constant__ ResidentParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x < 128) {
    flash::ptx::setmaxnreg_inc<216>();
    if (threadIdx.x == 0) {
      uint32_t sm;
      asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
      const int before = atomicAdd(p.here + sm, 1);
      atomicMax(p.together + sm, before + 1);
      for (const int64_t start = clock64(); clock64() - start < 100000;) {
      }
      atomicSub(p.here + sm, 1);
    }
  } else {
    flash::ptx::setmaxnreg_dec<40>();
  }
#endif
}

struct EmptyParams {
  const int* lengths;  // all 0: a block reads its own, and ends
  int* sink;
};

__global__ __launch_bounds__(384, 1) void empty(const __grid_constant__ EmptyParams p) {
  if (p.lengths[blockIdx.x] != 0) *p.sink = 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// The L2 cache

struct ReadParams {
  const uint4* data;
  int64_t* clocks;
  uint32_t* sink;
  int count, rounds;  // uint4 in all, a power of two
};

__global__ __launch_bounds__(1024, 1) void reads(const __grid_constant__ ReadParams p) {
  uint32_t sum = 0;
  for (int i = threadIdx.x; i < p.count; i += 1024) sum += __ldcg(p.data + i).x;  // now the cache holds it
  __syncthreads();
  const int64_t start = clock64();
  for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = (blockIdx.x * 4096 + (8 * round + i) * 1024 + threadIdx.x) & (p.count - 1);
      const uint4 x = __ldcg(p.data + at);
      sum += x.x ^ x.y ^ x.z ^ x.w;
    }
  }
  if (sum == 12345) *p.sink = sum;
  __syncthreads();
  if (threadIdx.x == 0) p.clocks[blockIdx.x] = clock64() - start;
}

template <typename Function>
const char* guarded(Function&& function) {
  static thread_local std::string text;
  try {
    function();
    flash::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

}  // namespace

extern "C" {

// data: bf16 (pages, page_size, heads, 64); boxes of box_rows rows and box_heads heads.
const char* run_boxes(int64_t data, int64_t pages, int64_t page_size, int64_t heads, int64_t box_rows,
                      int64_t box_heads, int64_t places, int64_t count, int64_t lanes, int64_t blocks, int64_t clocks,
                      int64_t sum) {
  return guarded([&] {
    const BoxParams p{.map = flash::tensor_map(
                          reinterpret_cast<const void*>(data), CU_TENSOR_MAP_DATA_TYPE_UINT16,
                          {64, heads, page_size, pages}, {128, 128 * heads, 128 * heads * page_size},
                          {64, static_cast<int>(box_heads), static_cast<int>(box_rows), 1}, CU_TENSOR_MAP_SWIZZLE_128B),
                      .places = reinterpret_cast<const int*>(places),
                      .clocks = reinterpret_cast<int64_t*>(clocks),
                      .sum = reinterpret_cast<float*>(sum),
                      .count = static_cast<int>(count),
                      .lanes = static_cast<int>(lanes),
                      .box_bytes = static_cast<int>(128 * box_rows * box_heads),
                      .rows = static_cast<int>(box_rows),
                      .most_rows = static_cast<int>(page_size)};
    if (count > kMostPlaces) throw std::invalid_argument("at most " + std::to_string(kMostPlaces) + " boxes");
    flash::launch<boxes>({.grid = dim3(blocks), .block = dim3(32), .shared_bytes = sizeof(BoxRing)}, p, nullptr);
  });
}

const char* run_products(int64_t is_half, int64_t count, int64_t blocks, int64_t clocks, int64_t sink) {
  return guarded([&] {
    const ProductParams p{reinterpret_cast<int64_t*>(clocks), reinterpret_cast<float*>(sink), static_cast<int>(count)};
    const flash::LaunchShape shape{.grid = dim3(blocks), .block = dim3(128), .shared_bytes = sizeof(Operands<__half>)};
    if (is_half) return flash::launch<products<__half>>(shape, p, nullptr);
    flash::launch<products<__nv_bfloat16>>(shape, p, nullptr);
  });
}

const char* run_resident(int64_t blocks, int64_t here, int64_t together) {
  return guarded([&] {
    const ResidentParams p{reinterpret_cast<int*>(here), reinterpret_cast<int*>(together)};
    flash::launch<resident>({.grid = dim3(blocks), .block = dim3(256), .shared_bytes = 96 * 1024}, p, nullptr);
  });
}

const char* run_empty(int64_t lengths, int64_t blocks, int64_t sink) {
  return guarded([&] {
    const EmptyParams p{reinterpret_cast<const int*>(lengths), reinterpret_cast<int*>(sink)};
    flash::launch<empty>({.grid = dim3(blocks), .block = dim3(384), .shared_bytes = 200 * 1024}, p, nullptr);
  });
}

const char* run_reads(int64_t data, int64_t count, int64_t rounds, int64_t blocks, int64_t clocks, int64_t sink) {
  return guarded([&] {
    const ReadParams p{reinterpret_cast<const uint4*>(data), reinterpret_cast<int64_t*>(clocks),
                       reinterpret_cast<uint32_t*>(sink), static_cast<int>(count), static_cast<int>(rounds)};
    flash::launch<reads>({.grid = dim3(blocks), .block = dim3(1024)}, p, nullptr);
  });
}

}  // extern "C"
