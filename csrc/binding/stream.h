// Where a kernel runs: the device of its tensors and PyTorch's current stream there.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

#include "common/device.h"

namespace flash::binding {

// Makes a device the current one while it lives. PyTorch's guard does the same, but takes time even where there is
// nothing to do.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (device != current_device()) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// PyTorch has the function only in its CUDA library, which it loads with local visibility. A plain reference would
// stay unresolved and keep our library from loading beside a PyTorch without CUDA, so it is looked up at first use.
inline auto find_current_stream_function() {
  using Function = int32_t(int32_t device, void** stream);
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* function = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  STD_TORCH_CHECK(function != nullptr, "libtorch_cuda.so does not provide aoti_torch_get_current_cuda_stream: ",
                  "flash_attn needs PyTorch 2.10 or newer built with CUDA");
  return reinterpret_cast<Function*>(function);
}

inline cudaStream_t current_stream(const torch::stable::Tensor& tensor) {
  static const auto get_stream = find_current_stream_function();
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(tensor.get_device_index(), &stream) == 0, "PyTorch has no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace flash::binding
