// The part of cuBLASLt that is used here. It is declared by hand and looked up at first use in the library that PyTorch
// has loaded, so that nothing is linked and the toolkit need not have its header.
// https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace flash::fused_dense::cublaslt {

using Status = int;  // cublasStatus_t; 0 is success
using Handle = struct Context*;
using Operation = struct OperationDesc*;
using Layout = struct MatrixLayout*;
using Preference = struct PreferenceDesc*;

struct Algorithm {
  uint64_t data[8];
};

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

constexpr int kCompute32F = 68;  // cublasComputeType_t

enum class OperationAttribute { kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBias = 8, kAux = 11, kAuxLd = 12 };

enum class PreferenceAttribute {
  kMaxWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8,
};

// Adds the parts of a split k out of place in the compute type. The other schemes, in place or out of place, add them
// in the type of d, which is less exact.
constexpr uint32_t kExactReductionSchemes = 2;

struct Library {
  Status (*create)(Handle*);
  Status (*matmul)(Handle, Operation, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                   const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, size_t, cudaStream_t);
  Status (*find_algorithms)(Handle, Operation, Layout a, Layout b, Layout c, Layout d, Preference, int wanted,
                            HeuristicResult*, int* found);
  Status (*create_operation)(Operation*, int compute_type, cudaDataType scale_type);
  Status (*destroy_operation)(Operation);
  Status (*set_operation)(Operation, OperationAttribute, const void*, size_t);
  Status (*create_layout)(Layout*, cudaDataType, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*destroy_layout)(Layout);
  Status (*create_preference)(Preference*);
  Status (*destroy_preference)(Preference);
  Status (*set_preference)(Preference, PreferenceAttribute, const void*, size_t);
};

inline void check(Status status, const char* call) {
  if (status != 0)
    throw std::runtime_error(std::string(call) + " failed with cublasStatus_t " + std::to_string(status));
}

inline void* open() {
  for (const int mode : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY}) {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (void* library = dlopen(name, mode)) return library;
    }
  }
  throw std::runtime_error("there is no libcublasLt.so.13 or .12, which PyTorch built with CUDA comes with");
}

template <typename Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("libcublasLt has no function ") + name);
}

inline const Library& library() {
  static const Library found = [] {
    void* library = open();
    Library functions;
    find(library, "cublasLtCreate", functions.create);
    find(library, "cublasLtMatmul", functions.matmul);
    find(library, "cublasLtMatmulAlgoGetHeuristic", functions.find_algorithms);
    find(library, "cublasLtMatmulDescCreate", functions.create_operation);
    find(library, "cublasLtMatmulDescDestroy", functions.destroy_operation);
    find(library, "cublasLtMatmulDescSetAttribute", functions.set_operation);
    find(library, "cublasLtMatrixLayoutCreate", functions.create_layout);
    find(library, "cublasLtMatrixLayoutDestroy", functions.destroy_layout);
    find(library, "cublasLtMatmulPreferenceCreate", functions.create_preference);
    find(library, "cublasLtMatmulPreferenceDestroy", functions.destroy_preference);
    find(library, "cublasLtMatmulPreferenceSetAttribute", functions.set_preference);
    return functions;
  }();
  return found;
}

}  // namespace flash::fused_dense::cublaslt
