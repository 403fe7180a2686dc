// The functions of the CUDA runtime that the library calls, for the one device that there is (-1, as PyTorch numbers
// the CPU), and votes and barriers of threads.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "block.h"
#include "tensor_map.h"

namespace emulator {

uint32_t ballot(uint32_t mask, bool predicate) {
  struct Mine {
    bool predicate;
    uint32_t got;
  } mine{predicate, 0};
  meet_warp(
      mask, &mine,
      [](void** given, uint32_t present) {
        uint32_t votes = 0;
        for (int lane = 0; lane < 32; ++lane) {
          if (present >> lane & 1) votes |= uint32_t{static_cast<Mine*>(given[lane])->predicate} << lane;
        }
        for (int lane = 0; lane < 32; ++lane) {
          if (present >> lane & 1) static_cast<Mine*>(given[lane])->got = votes;
        }
      },
      "its warp");
  return mine.got;
}

void sync_threads() {
  Block& block = *current->block;
  NamedBarrier& barrier = block.barriers[0];
  const int64_t generation = barrier.generation;
  ++barrier.arrived, ++block.progress;
  wait_until(
      [&] {
        if (barrier.generation == generation && barrier.arrived == block.alive) {
          barrier.arrived = 0;
          ++barrier.generation;
        }
        return barrier.generation != generation;
      },
      "__syncthreads");
}

bool sync_threads_or(bool predicate) {
  Block& block = *current->block;
  const int64_t now = block.barriers[0].generation;
  if (predicate) block.voted = now;
  sync_threads();
  const bool any = block.voted == now;
  sync_threads();
  return any;
}

}  // namespace emulator

namespace {

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*,
                           CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                           CUtensorMapFloatOOBfill) {
  emulator::TensorMap made{};
  made.data = static_cast<char*>(data);
  made.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2 : 4;
  made.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                       : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                       : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                              : 0;
  if (rank != 4 || reinterpret_cast<uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 4; ++i) {
    if (box[i] > 256 || sizes[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    made.sizes[i] = sizes[i], made.box[i] = box[i];
    made.strides[i] = i == 0 ? made.element_bytes : strides[i - 1];
    if (i > 0 && strides[i - 1] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  const int inner = made.box[0] * made.element_bytes;
  if (inner % 16 != 0 || (made.swizzle_bytes != 0 && inner > made.swizzle_bytes)) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof(made) <= sizeof(CUtensorMap));
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

int attribute(cudaDeviceAttr which) {
  const auto from = [](const char* name, int otherwise) {
    return std::getenv(name) ? std::atoi(std::getenv(name)) : otherwise;
  };
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      return from("EMULATOR_MULTIPROCESSORS", 4);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return from("EMULATOR_SHARED_BYTES", 232448);
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  return *value = attribute(which), cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = -1, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->ptxVersion = 90;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "an error of the emulator"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulator"; }
cudaError_t cudaMalloc(void** memory, size_t bytes) { return *memory = std::malloc(bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return std::memset(memory, value, bytes), cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) { return *id = 1, cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
  return *count = 1, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(encode_tensor_map);
  return *found = cudaDriverEntryPointSuccess, cudaSuccess;
}

}  // extern "C"
