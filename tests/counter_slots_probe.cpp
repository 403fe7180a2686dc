// What test_counter_slots.py calls of csrc/common/counter_slots.h, with a CUDA runtime of its own that needs no GPU.
#include <chrono>
#include <cstdlib>
#include <future>
#include <map>
#include <thread>
#include <vector>

#include "common/counter_slots.h"
#include "probe.h"

namespace flash {
namespace {

int failing_mallocs = 0;
cudaGraph_t destroyed_by_malloc = nullptr;
std::future<void> destruction;
std::map<cudaStream_t, unsigned long long> ids;  // of streams that are not named by their handle
thread_local cudaStream_t captured = nullptr;    // the stream that is being captured
std::multimap<cudaGraph_t, cudaUserObject_t> owners;
cudaHostFn_t destructor = nullptr;

void destroy(cudaGraph_t graph) {
  for (auto [it, end] = owners.equal_range(graph); it != end; it = owners.erase(it)) destructor(it->second);
}

cudaGraph_t graph_of(int64_t capture) { return reinterpret_cast<cudaGraph_t>(capture); }

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t size) {
  if (destroyed_by_malloc != nullptr) {  // another thread has to come to an end first
    destruction = std::async(std::launch::async, destroy, destroyed_by_malloc);
    destroyed_by_malloc = nullptr;
    if (destruction.wait_for(std::chrono::seconds(5)) != std::future_status::ready) return cudaErrorTimeout;
  }
  if (failing_mallocs > 0) return --failing_mallocs, cudaErrorMemoryAllocation;
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // time for another thread to come in between
  *memory = std::malloc(size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  if (stream == captured) return cudaErrorStreamCaptureUnsupported;
  const auto found = ids.find(stream);
  *id = found == ids.end() ? reinterpret_cast<unsigned long long>(stream) : found->second;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t fn, unsigned, unsigned) {
  *object = static_cast<cudaUserObject_t>(data);
  destructor = fn;
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
  owners.emplace(graph, object);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorTimeout ? "timeout" : "no memory"; }
const char* cudaGetErrorString(cudaError_t) { return ""; }

// data: where the counters are.
const char* find_counters(int device, int64_t stream, int64_t capture, int64_t* data) {
  return error_of([&] {
    const Capture found{static_cast<unsigned long long>(capture), graph_of(capture)};
    captured = capture != 0 ? reinterpret_cast<cudaStream_t>(stream) : nullptr;
    *data = reinterpret_cast<int64_t>(CounterSlots::find(device, reinterpret_cast<cudaStream_t>(stream), found));
  });
}
// A new stream that has got the handle of a destroyed one. Ids are never given again.
int reuse_handle(int64_t stream, int64_t id) { return ids[reinterpret_cast<cudaStream_t>(stream)] = id, 0; }
// data: (threads), what each of as many threads finds at the same time.
const char* find_in_threads(int threads, int device, int64_t stream, int64_t* data) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([=] {
      data[i] = reinterpret_cast<int64_t>(CounterSlots::find(device, reinterpret_cast<cudaStream_t>(stream), {}));
    });
  }
  for (std::thread& thread : running) thread.join();
  return nullptr;
}
int destroy_graph(int64_t capture) { return destroy(graph_of(capture)), 0; }
int fail_mallocs(int count) { return failing_mallocs = count, 0; }
int destroy_in_malloc(int64_t capture) { return destroyed_by_malloc = graph_of(capture), 0; }

}  // extern "C"
}  // namespace flash
