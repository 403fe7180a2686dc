#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace flash {

// Throws unless a call of the CUDA runtime has succeeded. The message names the call, the place and the error.
inline void check_cuda(cudaError_t status, const char* call,
                       std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + " failed at " + where.file_name() + ":" + std::to_string(where.line()) +
                           ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

}  // namespace flash
