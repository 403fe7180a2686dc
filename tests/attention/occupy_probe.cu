// A kernel that keeps multiprocessors from others. `occupy` returns null, or the text of the error.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.h"
#include "probe.h"

namespace flash {
namespace {

struct OccupyParams {
  int* started;              // (blocks)
  const volatile int* done;  // (1), which the host sets
  int64_t nanoseconds;       // after which it is done in any case
};

__device__ int64_t now() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__global__ void occupy_kernel(const __grid_constant__ OccupyParams p) {
  const int64_t start = now();
  p.started[blockIdx.x] = 1;
  __threadfence_system();
  while (*p.done == 0 && now() - start < p.nanoseconds) __nanosleep(1000);
}

}  // namespace

// `blocks` blocks, each with nearly all shared memory of a multiprocessor.
extern "C" const char* occupy(int blocks, int64_t seconds, int* started, const int* done, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(blocks), .block = dim3(1), .shared_bytes = 220 * 1024};
  return error_of([&] { launch<occupy_kernel>(shape, OccupyParams{started, done, seconds * 1'000'000'000}, stream); });
}

}  // namespace flash
