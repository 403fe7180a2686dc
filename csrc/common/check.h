#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace flash {

// What the user can do about an error that comes from how the library was built: for other GPUs, or by a CUDA that is
// newer than the driver. Empty for other errors.
inline const char* advice_for(cudaError_t status) {
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
      return ". flash_attn was built without code for this GPU: `python -m flash_attn` says for which it has some; "
             "build it with this GPU's compute capability in FLASH_ATTN_CUDA_ARCHS";
    case cudaErrorUnsupportedPtxVersion:
      return ". flash_attn has only PTX for this GPU, from a CUDA newer than the driver: update the driver, or build "
             "flash_attn with this GPU's compute capability in FLASH_ATTN_CUDA_ARCHS";
    default:
      return "";
  }
}

// Throws unless a call of the CUDA runtime has succeeded. The message names the call, the place and the error.
inline void check_cuda(cudaError_t status, const char* call,
                       std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + " failed at " + where.file_name() + ":" + std::to_string(where.line()) +
                           ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status) + advice_for(status));
}

}  // namespace flash
