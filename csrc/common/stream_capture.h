// Streams that are being captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "common/check.h"

namespace flash {

struct Capture {
  unsigned long long id = 0;  // 0: the stream is not captured
  cudaGraph_t graph = nullptr;
};

inline Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  Capture capture;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

// While it lives, this thread may make calls, such as cudaMalloc, that CUDA otherwise forbids while a stream is
// captured in another mode than "relaxed".
struct WhileOthersCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

  WhileOthersCapture() { exchange(); }
  WhileOthersCapture(const WhileOthersCapture&) = delete;
  ~WhileOthersCapture() { exchange(); }

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode); }  // which does not fail for a mode that exists
};

}  // namespace flash
