// Matrix products by cuBLASLt. A plan says which algorithm computes a product. Finding it takes cuBLASLt tens of
// microseconds, so plans are kept and used again for all products of the same kind. The descriptions of the operation
// and its matrices are made anew for each call.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/device.h"
#include "common/stream_capture.h"
#include "fused_dense/cublaslt.h"
#include "fused_dense/launch.h"

namespace flash::fused_dense {
namespace {

constexpr uint64_t kMaxWorkspaceBytes = 32 << 20;  // what NVIDIA recommends for Hopper
constexpr int kMaxChoices = 8;
constexpr size_t kMaxPlans = 1 << 14;  // a bound on memory, if shapes never repeat

// Returns the handle of the current device. It is made at first use and never destroyed, since CUDA may have shut down
// before any destructor runs.
cublaslt::Handle current_handle() {
  static std::mutex mutex;
  static std::map<int, cublaslt::Handle> handles;
  const std::lock_guard lock(mutex);
  cublaslt::Handle& handle = handles[current_device()];
  if (handle == nullptr) {
    const WhileOthersCapture allowed;
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

template <auto kDestroy>
struct Destroy {
  template <typename Object>
  void operator()(Object* object) const {
    (cublaslt::library().*kDestroy)(object);
  }
};

template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<kDestroy>>;
using Operation = Owned<cublaslt::Operation, &cublaslt::Library::destroy_operation>;
using Layout = Owned<cublaslt::Layout, &cublaslt::Library::destroy_layout>;
using Preference = Owned<cublaslt::Preference, &cublaslt::Library::destroy_preference>;

Layout layout(DType dtype, int64_t rows, int64_t cols, int64_t ld) {
  cublaslt::Layout made;
  cublaslt::check(cublaslt::library().create_layout(&made, cuda_type(dtype), rows, cols, ld),
                  "cublasLtMatrixLayoutCreate");
  return Layout(made);
}

Operation operation(const GemmParams& p) {
  cublaslt::Operation made;
  cublaslt::check(cublaslt::library().create_operation(&made, cublaslt::kCompute32F, CUDA_R_32F),
                  "cublasLtMatmulDescCreate");
  Operation owned(made);
  const auto set = [&](cublaslt::OperationAttribute attribute, auto value) {
    cublaslt::check(cublaslt::library().set_operation(made, attribute, &value, sizeof(value)),
                    "cublasLtMatmulDescSetAttribute");
  };
  using enum cublaslt::OperationAttribute;
  set(kTransposeA, int32_t{p.transposed_a});
  set(kTransposeB, int32_t{p.transposed_b});
  set(kEpilogue, p.epilogue);
  if (p.bias) set(kBias, p.bias);
  if (p.aux) set(kAux, p.aux), set(kAuxLd, p.ld_d);
  return owned;
}

// The descriptions of a product that cuBLASLt reads.
struct Description {
  Operation operation;
  Layout a, b, c, d;

  explicit Description(const GemmParams& p)
      : operation(fused_dense::operation(p)),
        a(layout(p.dtype, p.transposed_a ? p.k : p.m, p.transposed_a ? p.m : p.k, p.ld_a)),
        b(layout(p.dtype, p.transposed_b ? p.n : p.k, p.transposed_b ? p.k : p.n, p.ld_b)),
        c(p.c ? layout(p.dtype, p.m, p.n, p.ld_c) : nullptr),
        d(layout(p.dtype, p.m, p.n, p.ld_d)) {}

  cublaslt::Layout layout_of_c() const { return c ? c.get() : d.get(); }
};

uint32_t alignment(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<uint32_t>(bits & -bits);
}

Preference preference(const GemmParams& p) {
  cublaslt::Preference made;
  cublaslt::check(cublaslt::library().create_preference(&made), "cublasLtMatmulPreferenceCreate");
  Preference owned(made);
  const auto set = [&](cublaslt::PreferenceAttribute attribute, auto value) {
    cublaslt::check(cublaslt::library().set_preference(made, attribute, &value, sizeof(value)),
                    "cublasLtMatmulPreferenceSetAttribute");
  };
  using Attribute = cublaslt::PreferenceAttribute;
  set(Attribute::kMaxWorkspaceBytes, kMaxWorkspaceBytes);
  set(Attribute::kReductionSchemes, cublaslt::kExactReductionSchemes);
  set(Attribute::kAlignmentA, alignment(p.a));
  set(Attribute::kAlignmentB, alignment(p.b));
  set(Attribute::kAlignmentC, alignment(p.c ? p.c : p.d));
  set(Attribute::kAlignmentD, alignment(p.d));
  return owned;
}

std::optional<Plan> find_plan(const GemmParams& p) {
  const Description description(p);
  const Preference wanted = preference(p);
  std::array<cublaslt::HeuristicResult, kMaxChoices> results;
  int found = 0;
  const int choice = std::clamp(p.choice, 0, kMaxChoices - 1);
  const cublaslt::Status status = cublaslt::library().find_algorithms(
      current_handle(), description.operation.get(), description.a.get(), description.b.get(),
      description.layout_of_c(), description.d.get(), wanted.get(), choice + 1, results.data(), &found);
  if (status != 0 || found == 0) return std::nullopt;
  const auto& chosen = results[std::min(choice, found - 1)];
  Plan plan;
  std::copy_n(chosen.algorithm.data, 8, plan.algorithm);
  plan.workspace_bytes = chosen.workspace_bytes;
  return plan;
}

// Returns everything that a plan depends on.
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
  cublaslt::check(
      cublaslt::library().matmul(current_handle(), description.operation.get(), &alpha, p.a, description.a.get(), p.b,
                                 description.b.get(), &beta, p.c ? p.c : p.d, description.layout_of_c(), p.d,
                                 description.d.get(), &algorithm, workspace, plan.workspace_bytes, stream),
      "cublasLtMatmul");
}

}  // namespace flash::fused_dense
