#pragma once

namespace flash {

// Element types that kernels take at run time. The C++ type of each is element_t in dispatch.h.
enum class DType { kFloat32, kFloat16, kBFloat16 };

constexpr int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace flash
