// Makes CUDA C++ readable to the host's compiler: included before everything else. See ../README.md.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../block.h"

#define __CUDACC__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __CUDA_ARCH_LIST__ 800, 900

#undef __shared__
#define __shared__ thread_local  // all threads of a block run on one thread of the operating system
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __builtin_assume(...)
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#define asm \
  if constexpr (false) __asm__  // outside of ptx/, asm only keeps the device's compiler from moving code

#define cudaLaunchKernelEx ::emulator::launch

// threadIdx.x and the like: conversions look them up in the current thread.
#define EMULATOR_INDEX(name, place)                                      \
  inline const struct {                                                  \
    struct {                                                             \
      operator unsigned() const { return ::emulator::current->place.x; } \
    } x;                                                                 \
    struct {                                                             \
      operator unsigned() const { return ::emulator::current->place.y; } \
    } y;                                                                 \
    struct {                                                             \
      operator unsigned() const { return ::emulator::current->place.z; } \
    } z;                                                                 \
  } name{};
EMULATOR_INDEX(threadIdx, index)
EMULATOR_INDEX(blockIdx, block->index)
EMULATOR_INDEX(blockDim, block->size)
EMULATOR_INDEX(gridDim, block->grid)

template <typename Params>
cudaError_t cudaFuncSetAttribute(void (*)(Params), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, void (*)(Params)) {
  return cudaFuncGetAttributes(found, static_cast<const void*>(nullptr));
}
template <typename Params>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, void (*)(Params), const cudaLaunchConfig_t*) {
  return *count = 1, cudaSuccess;
}

namespace emulator {

template <typename Params, typename Given>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Given& given) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  }
  const std::remove_const_t<Params> params = given;
  run({config->gridDim, config->blockDim, cluster}, [&] { kernel(params); });
  return cudaSuccess;
}

// Shuffles: each lane in the mask gets the value of lane source(lane), or its own if that lane does not take part.
template <typename T, typename Source>
T exchange(uint32_t mask, T value, Source&& source) {
  struct Mine {
    T value, got;
    int from;
  } mine{value, value, source(current->lane())};
  meet_warp(
      mask, &mine,
      [](void** given, uint32_t present) {
        for (int lane = 0; lane < 32; ++lane) {
          if (!(present >> lane & 1)) continue;
          auto& to = *static_cast<Mine*>(given[lane]);
          if (to.from >= 0 && to.from < 32 && present >> to.from & 1)
            to.got = static_cast<Mine*>(given[to.from])->value;
        }
      },
      "a shuffle");
  return mine.got;
}

uint32_t ballot(uint32_t mask, bool predicate);
void sync_threads();
bool sync_threads_or(bool predicate);

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return emulator::exchange(mask, value, [&](int lane) { return lane / width * width + (from & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  return emulator::exchange(mask, value,
                            [&](int lane) { return (lane ^ with) / width == lane / width ? lane ^ with : -1; });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
  return emulator::exchange(mask, value,
                            [&](int lane) { return (lane + by) / width == lane / width ? lane + by : -1; });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
  return emulator::exchange(mask, value, [&](int lane) { return lane % width >= by ? lane - by : -1; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emulator::ballot(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return emulator::ballot(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emulator::ballot(mask, predicate == 0) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { emulator::ballot(mask, false); }
inline void __syncthreads() { emulator::sync_threads(); }
inline int __syncthreads_or(int predicate) { return emulator::sync_threads_or(predicate != 0); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() {}

template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
template <typename T>
T __ldcg(const T* pointer) {
  return *const_cast<const volatile T*>(pointer);
}
template <>
inline float4 __ldcg(const float4* pointer) {
  return *pointer;
}
template <>
inline float2 __ldcg(const float2* pointer) {
  return *pointer;
}

template <typename T>
T atomicAdd(T* pointer, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*pointer).fetch_add(value);
}

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 0xF, byte = (uint64_t{b} << 32 | a) >> 8 * (nibble & 7) & 0xFF;
    result |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return result;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

using std::isfinite, std::isinf, std::isnan, std::signbit;

template <typename A, typename B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
