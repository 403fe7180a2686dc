// Kernels for tests of the emulator: each computes something, and some have a mistake that it must find.
#include <cuda_bf16.h>

#include <cstdint>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "ptx/cluster.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"
#include "tile/warpgroup.cuh"

namespace flash {
namespace {

using T = __nv_bfloat16;

struct Args {
  float* out;
  const float* in;
  int mistake;
};

// out[i] = in[i + 1 mod 64], through shared memory; the mistake is a missing barrier.
__global__ void turn_kernel(const __grid_constant__ Args p) {
  __shared__ float x[64];
  x[threadIdx.x] = p.in[threadIdx.x];
  if (!p.mistake) __syncthreads();
  p.out[threadIdx.x] = x[(threadIdx.x + 1) % 64];
}

// out = in by an asynchronous copy. Mistakes: 1, a missing wait; 2, an address that is not aligned.
__global__ void copy_kernel(const __grid_constant__ Args p) {
  __shared__ __align__(16) float x[4 * 32];
  ptx::copy_async(ptx::shared_address(&x[4 * threadIdx.x]), p.in + 4 * threadIdx.x + (p.mistake == 2), true);
  ptx::commit_copies();
  if (p.mistake != 1) ptx::wait_copies<0>();
  for (int i = 0; i < 4; ++i) p.out[4 * threadIdx.x + i] = x[4 * threadIdx.x + i];
}

// out[i] = in[i + 32 mod 64]: two warps exchange values and then use the place again; the mistake is that a warp does
// not wait until the other one has read them.
__global__ void reuse_kernel(const __grid_constant__ Args p) {
  __shared__ float x[64];
  x[threadIdx.x] = p.in[threadIdx.x];
  ptx::sync_barrier<64>(1);
  p.out[threadIdx.x] = x[(threadIdx.x + 32) % 64];
  for (int i = 0; i < 8; ++i) __syncwarp();  // work that takes long
  if (!p.mistake) ptx::sync_barrier<64>(1);
  x[threadIdx.x] = 0;
}

// Half of the threads wait for all, which with the mistake do not come.
__global__ void barrier_kernel(const __grid_constant__ Args p) {
  if (threadIdx.x < 32) {
    ptx::sync_barrier<64>(1);
  } else if (!p.mistake) {
    ptx::arrive_at_barrier<64>(1);
  }
  p.out[threadIdx.x] = p.in[threadIdx.x];
}

// out = in in two rounds, by bulk copies to one place and one barrier. Mistakes: 1 and 2, a wait for the wrong phase in
// the second round and in the first; 3, an address that is not aligned.
__global__ void rounds_kernel(const __grid_constant__ Args p) {
  __shared__ __align__(16) float x[32];
  __shared__ ptx::SharedBarrier arrived;
  const int lane = threadIdx.x;
  if (lane == 0) arrived.init(1);
  for (int round = 0; round < 2; ++round) {
    __syncthreads();
    if (lane == 0) {
      arrived.arrive_expect_tx(sizeof(x));
      ptx::copy_bytes_async(ptx::shared_address(x), p.in + 32 * round + (p.mistake == 3), sizeof(x), arrived);
    }
    arrived.wait(p.mistake == 2 - round ? 1 - round : round);
    p.out[32 * round + lane] = x[lane];
  }
}

// Block r of a cluster of two gives its values to the other one; the mistake is that it does not wait for them.
__global__ void swap_kernel(const __grid_constant__ Args p) {
  __shared__ float4 got[32];
  __shared__ ptx::SharedBarrier arrived;
  const int rank = ptx::cluster_rank(), lane = threadIdx.x;
  if (lane == 0) {
    arrived.init(1);
    arrived.arrive_expect_tx(sizeof(got));
  }
  ptx::sync_cluster();
  const auto* mine = reinterpret_cast<const float4*>(p.in) + 32 * rank;
  ptx::store_async_in(ptx::address_in(1 - rank, &got[lane]), mine[lane], ptx::address_in(1 - rank, &arrived.state));
  if (!p.mistake) ptx::wait_for_stores(arrived, 0);
  reinterpret_cast<float4*>(p.out)[32 * rank + lane] = got[lane];
}

// c (64, 64) = a (64, 64) b (64, 64)^T of bf16 by wgmma, from boxes of a tensor copy. Mistakes: 1, the copy is not
// waited for; 2, the product is not.
struct ProductArgs {
  CUtensorMap a, b;
  float* c;
  int mistake;
};
struct ProductShared {
  SharedTile<T, 64, 64> a, b;
  ptx::SharedBarrier arrived;
};
__global__ void product_kernel(const __grid_constant__ ProductArgs p) {
  auto& shared = shared_memory<ProductShared>();
  if (threadIdx.x == 0) {
    shared.arrived.init(1);
    shared.arrived.arrive_expect_tx(2 * sizeof(shared.a));
    ptx::copy_box_async(ptx::shared_address(shared.a.data), p.a, 0, 0, 0, 0, shared.arrived);
    ptx::copy_box_async(ptx::shared_address(shared.b.data), p.b, 0, 0, 0, 0, shared.arrived);
  }
  __syncthreads();
  if (p.mistake != 1) shared.arrived.wait(0);
  Fragment<16, 64> c;
  c.fill(0);
  ptx::wgmma_fence();
  start_gemm<64>(c, along_cols(shared.a), along_cols(shared.b), false);
  if (p.mistake != 2) wait_gemms<0>(c);
  c.for_each([&](float x, int r, int col) { p.c[(warp_id() * 16 + c.row(r)) * 64 + c.col(col)] = x; });
  wait_gemms<0>(c);
}

// out = how many of eight votes in a row had somebody in favour, which is thread 0 each time but for the mistake.
__global__ void vote_kernel(const __grid_constant__ Args p) {
  int count = 0;
  for (int i = 0; i < 8; ++i) count += __syncthreads_or(threadIdx.x == 0 && i >= p.mistake) != 0;
  p.out[threadIdx.x] = count;
}

template <auto kKernel>
const char* run(const Args& args, int threads, int cluster = 1) {
  static std::string error;
  try {
    launch<kKernel>({.grid = dim3(cluster), .block = dim3(threads), .cluster = cluster}, args, nullptr);
    return nullptr;
  } catch (const std::exception& thrown) {
    return (error = thrown.what()).c_str();
  }
}

}  // namespace
}  // namespace flash

using namespace flash;

extern "C" {

const char* turn(float* out, const float* in, int64_t mistake) { return run<turn_kernel>({out, in, int(mistake)}, 64); }
const char* reuse(float* out, const float* in, int64_t mistake) {
  return run<reuse_kernel>({out, in, int(mistake)}, 64);
}
const char* copy(float* out, const float* in, int64_t mistake) { return run<copy_kernel>({out, in, int(mistake)}, 32); }
const char* rounds(float* out, const float* in, int64_t mistake) {
  return run<rounds_kernel>({out, in, int(mistake)}, 32);
}
const char* wait(float* out, const float* in, int64_t mistake) {
  return run<barrier_kernel>({out, in, int(mistake)}, 64);
}
const char* swap(float* out, const float* in, int64_t mistake) {
  return run<swap_kernel>({out, in, int(mistake)}, 32, 2);
}

const char* vote(float* out, const float* in, int64_t mistake) { return run<vote_kernel>({out, in, int(mistake)}, 64); }

const char* product(float* c, const T* a, const T* b, int64_t mistake) {
  using Tile = decltype(ProductShared::a);
  const auto map = [](const T* x) { return map_of<Tile>(TensorRef<const void>{x, 64 * 64, 64, 64, 1}, 64, 1, 64, 1); };
  launch<product_kernel>({.grid = dim3(1), .block = dim3(128), .shared_bytes = sizeof(ProductShared)},
                         ProductArgs{map(a), map(b), c, int(mistake)}, nullptr);
  return nullptr;
}

}  // extern "C"
