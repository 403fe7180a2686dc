// Chooses the instance with the widest access that shape, strides and addresses allow.
#include <algorithm>
#include <cstdint>

#include "common/dispatch.h"
#include "rotary/launch.h"
#include "rotary/rotary.cuh"

namespace flash::rotary {
namespace {

template <typename Data>
bool fits(const TensorRef<Data>& tensor, int vec, int bytes) {
  return tensor.head_dim == 1 && reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && tensor.batch % vec == 0 &&
         tensor.seqlen % vec == 0 && tensor.heads % vec == 0;
}

bool fits_table(const void* table, int64_t stride, int vec, DType dtype) {
  return reinterpret_cast<uintptr_t>(table) % std::min(16, vec * size_of(dtype)) == 0 && stride % vec == 0;
}

// Returns whether accesses of `vec` channels are aligned in all tensors.
bool fits(const Params& p, int vec) {
  const int bytes = vec * size_of(p.dtype);
  return p.rotary_dim / 2 % vec == 0 && (p.in_place || (p.head_dim - p.rotary_dim) % vec == 0) &&
         fits(p.x, vec, bytes) && fits(p.out, vec, bytes) && fits_table(p.cos, p.cos_stride, vec, p.table_dtype) &&
         fits_table(p.sin, p.sin_stride, vec, p.table_dtype);
}

template <typename T, bool kInterleaved>
void run_widest(const Params& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T), kNarrow = 4 / sizeof(T);
  const int vec = fits(p, kWide) ? kWide : fits(p, kNarrow) ? kNarrow : 1;
  dispatch_value<kWide, kNarrow, 1>(vec, [&](auto kVec) { run_apply<Config<T, kVec, kInterleaved>>(p, stream); });
}

}  // namespace

void apply(const Params& p, cudaStream_t stream) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto kDType) {
    dispatch_flags([&](auto kInterleaved) { run_widest<element_t<kDType>, kInterleaved>(p, stream); }, p.interleaved);
  });
}

}  // namespace flash::rotary
