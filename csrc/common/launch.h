// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <source_location>
#include <string>

#include "common/check.h"
#include "common/device.h"
#include "common/divmod.h"

namespace flash {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;  // dynamic shared memory
  int cluster = 1;       // blocks per cluster, along grid.x
  bool early = false;    // programmatic dependent launch, if it can: the kernel must call ptx::wait_for_dependency
};

// Throws unless a call that `launcher` made for a launch succeeded. The message names the kernel, which is a template
// argument of the launcher, and the shape.
inline void check_launch(cudaError_t status, const char* call, const LaunchShape& shape,
                         std::source_location launcher = std::source_location::current()) {
  if (status == cudaSuccess) return;
  const auto text = [](const dim3& size) {
    return std::to_string(size.x) + " x " + std::to_string(size.y) + " x " + std::to_string(size.z);
  };
  const std::string what = std::string(call) + " in " + launcher.function_name() + " with a grid of " +
                           text(shape.grid) + " blocks of " + text(shape.block) + " threads, " +
                           std::to_string(shape.shared_bytes) + " bytes of shared memory and clusters of " +
                           std::to_string(shape.cluster);
  check_cuda(status, what.c_str(), launcher);
}

// Allows kKernel the dynamic shared memory that it asks for, which is always the same on a device, except in tests. A
// kernel with at most 48 KB, static shared memory included, needs no permission; 8 KB are left to the static one here.
template <auto kKernel>
void allow_shared_memory(const LaunchShape& shape) {
  if (shape.shared_bytes <= 40 * 1024) return;
  static std::array<std::atomic<int>, 64> allowed{};  // by device
  int device = 0;
  check_launch(cudaGetDevice(&device), "cudaGetDevice", shape);
  std::atomic<int>& bytes = allowed[device % 64];
  if (bytes.load(std::memory_order_relaxed) >= shape.shared_bytes) return;
  check_launch(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
               "cudaFuncSetAttribute", shape);
  bytes.store(shape.shared_bytes, std::memory_order_relaxed);
}

// Whether kKernel may start early on the current device: only code for sm_90 and later waits for the kernel before it,
// and newer devices may also run code for sm_80.
template <auto kKernel>
bool can_start_early() {
  static std::atomic<uint64_t> asked{0}, able{0};  // a bit per device
  const uint64_t bit = uint64_t{1} << (current_device() % 64);
  if (!(asked.load(std::memory_order_acquire) & bit)) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
    if (attributes.ptxVersion >= 90) able.fetch_or(bit, std::memory_order_relaxed);
    asked.fetch_or(bit, std::memory_order_release);
  }
  return able.load(std::memory_order_relaxed) & bit;
}

// Launches kKernel(params) on the current device; an empty grid launches nothing.
template <auto kKernel, typename Params>
void launch(const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  allow_shared_memory<kKernel>(shape);
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.early && can_start_early<kKernel>()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{.gridDim = shape.grid, .blockDim = shape.block};
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check_launch(cudaLaunchKernelEx(&config, kKernel, params), "cudaLaunchKernelEx", shape);
}

}  // namespace flash
