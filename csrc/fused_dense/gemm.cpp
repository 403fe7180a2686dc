// Matrix products by cuBLASLt. A plan, which algorithm computes a product, takes it tens of microseconds to find and is
// kept for all products alike; what describes an operation and its matrices is made for each call.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <tuple>

#include "common/check.h"
#include "common/device.h"
#include "fused_dense/cublaslt.h"
#include "fused_dense/launch.h"

namespace flash::fused_dense {
namespace {

constexpr uint64_t kMaxWorkspaceBytes = 32 << 20;  // what NVIDIA recommends for Hopper
constexpr int kMaxChoices = 8;
constexpr size_t kMaxPlans = 1 << 14;  // of a few hundred bytes each; a program whose shapes never repeat starts anew

// While it lives, this thread may allocate even if another of its streams is being captured.
class Uncaptured {
 public:
  Uncaptured() { exchange(); }
  ~Uncaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  void exchange() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Of the current device, made at first use and kept to the end, when CUDA may be gone before any destructor.
cublaslt::Handle current_handle() {
  static std::mutex mutex;
  static std::map<int, cublaslt::Handle> handles;
  const std::lock_guard lock(mutex);
  cublaslt::Handle& handle = handles[current_device()];
  if (handle == nullptr) {
    const Uncaptured uncaptured;
    cublaslt::check(cublaslt::library().create(&handle), "cublasLtCreate");
  }
  return handle;
}

cudaDataType cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
  }
  return CUDA_R_32F;
}

class Layout {
 public:
  Layout(DType dtype, int64_t rows, int64_t cols, int64_t ld) {
    cublaslt::check(cublaslt::library().create_layout(&layout_, cuda_type(dtype), rows, cols, ld),
                    "cublasLtMatrixLayoutCreate");
  }
  ~Layout() { cublaslt::library().destroy_layout(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  operator cublaslt::Layout() const { return layout_; }

 private:
  cublaslt::Layout layout_;
};

class Operation {
 public:
  explicit Operation(const GemmParams& p) {
    cublaslt::check(cublaslt::library().create_operation(&operation_, cublaslt::kCompute32F, CUDA_R_32F),
                    "cublasLtMatmulDescCreate");
    set(cublaslt::OperationAttribute::kTransposeA, int32_t{p.transposed_a});
    set(cublaslt::OperationAttribute::kTransposeB, int32_t{p.transposed_b});
    set(cublaslt::OperationAttribute::kEpilogue, p.epilogue);
    if (p.bias) set(cublaslt::OperationAttribute::kBias, p.bias);
    if (p.aux) {
      set(cublaslt::OperationAttribute::kAux, p.aux);
      set(cublaslt::OperationAttribute::kAuxLd, p.ld_d);
    }
  }
  ~Operation() { cublaslt::library().destroy_operation(operation_); }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  operator cublaslt::Operation() const { return operation_; }

 private:
  template <typename Value>
  void set(cublaslt::OperationAttribute attribute, Value value) {
    cublaslt::check(cublaslt::library().set_operation(operation_, attribute, &value, sizeof(value)),
                    "cublasLtMatmulDescSetAttribute");
  }
  cublaslt::Operation operation_;
};

// What cuBLASLt is told of a product.
struct Description {
  Operation operation;
  Layout a, b, d;
  std::optional<Layout> own_c;

  explicit Description(const GemmParams& p)
      : operation(p),
        a(p.dtype, p.transposed_a ? p.k : p.m, p.transposed_a ? p.m : p.k, p.ld_a),
        b(p.dtype, p.transposed_b ? p.n : p.k, p.transposed_b ? p.k : p.n, p.ld_b),
        d(p.dtype, p.m, p.n, p.ld_d) {
    if (p.c) own_c.emplace(p.dtype, p.m, p.n, p.ld_c);
  }
  cublaslt::Layout c() const { return own_c ? *own_c : d; }
};

uint32_t alignment(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<uint32_t>(bits & -bits);
}

class Preference {
 public:
  explicit Preference(const GemmParams& p) {
    using enum cublaslt::PreferenceAttribute;
    cublaslt::check(cublaslt::library().create_preference(&preference_), "cublasLtMatmulPreferenceCreate");
    set(kMaxWorkspaceBytes, fused_dense::kMaxWorkspaceBytes);
    set(kReductionSchemes, cublaslt::kExactReductionSchemes);
    set(kAlignmentA, alignment(p.a));
    set(kAlignmentB, alignment(p.b));
    set(kAlignmentC, alignment(p.c ? p.c : p.d));
    set(kAlignmentD, alignment(p.d));
  }
  ~Preference() { cublaslt::library().destroy_preference(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  operator cublaslt::Preference() const { return preference_; }

 private:
  template <typename Value>
  void set(cublaslt::PreferenceAttribute attribute, Value value) {
    cublaslt::check(cublaslt::library().set_preference(preference_, attribute, &value, sizeof(value)),
                    "cublasLtMatmulPreferenceSetAttribute");
  }
  cublaslt::Preference preference_;
};

std::optional<Plan> find_plan(const GemmParams& p) {
  const Description description(p);
  const Preference preference(p);
  std::array<cublaslt::HeuristicResult, kMaxChoices> results;
  int found = 0;
  const cublaslt::Status status = cublaslt::library().find_algorithms(
      current_handle(), description.operation, description.a, description.b, description.c(), description.d, preference,
      std::clamp(p.choice + 1, 1, kMaxChoices), results.data(), &found);
  if (status != 0 || found == 0) return std::nullopt;
  const auto& chosen = results[std::min(p.choice, found - 1)];
  Plan plan;
  std::copy_n(chosen.algorithm.data, 8, plan.algorithm);
  plan.workspace_bytes = chosen.workspace_bytes;
  return plan;
}

// All that a plan depends on.
auto key_of(const GemmParams& p) {
  return std::tuple(current_device(), p.dtype, p.transposed_a, p.transposed_b, p.m, p.n, p.k, p.ld_a, p.ld_b, p.ld_c,
                    p.ld_d, p.epilogue, p.choice, p.c != nullptr, alignment(p.a), alignment(p.b), alignment(p.c),
                    alignment(p.d), alignment(p.bias), alignment(p.aux));
}

}  // namespace

std::optional<Plan> plan_gemm(const GemmParams& p) {
  static std::mutex mutex;
  static std::map<decltype(key_of(p)), std::optional<Plan>> plans;
  const auto key = key_of(p);
  const std::lock_guard lock(mutex);
  if (const auto known = plans.find(key); known != plans.end()) return known->second;
  if (plans.size() == kMaxPlans) plans.clear();
  return plans[key] = find_plan(p);
}

void gemm(const GemmParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  const Description description(p);
  const float alpha = 1, beta = p.c ? 1 : 0;
  cublaslt::Algorithm algorithm;
  std::copy_n(plan.algorithm, 8, algorithm.data);
  cublaslt::check(cublaslt::library().matmul(current_handle(), description.operation, &alpha, p.a, description.a, p.b,
                                             description.b, &beta, p.c ? p.c : p.d, description.c(), p.d, description.d,
                                             &algorithm, workspace, plan.workspace_bytes, stream),
                  "cublasLtMatmul");
}

}  // namespace flash::fused_dense
