// Matrix products of a warpgroup (four warps, the first with a rank that is a multiple of four) with operands in shared
// memory. For sm_90a.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
//
// They run asynchronously. Code must not touch registers that an unfinished product reads or writes: otherwise ptxas
// serializes all products of the function, and says so in an advisory C75xx.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash::ptx {

// Must come before products whose accumulators or left operands ordinary instructions have accessed in registers.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group: the products that were started since the group before.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all groups but the newest kPending have finished.
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The descriptor of an operand in shared memory with the swizzle of tile/shared.cuh, in pages with rows of 128 or 64
// bytes. Bit fields: 0 .. 13 address / 16; 16 .. 29 "leading" offset / 16, from one page to the next; 32 .. 45 "stride"
// offset / 16, from one group of 8 rows to the next; 62 .. 63 swizzle, 1 for 128 and 2 for 64 bytes. The leading offset
// matters only if the contraction runs along the stored rows; along columns the hardware ignores it.
struct MatrixDescriptor {
  uint32_t low, high;

  __device__ MatrixDescriptor(uint32_t address, int row_bytes, int page_bytes)
      : low((address & 0x3FFFF) >> 4 | page_bytes >> 4 << 16),
        high(8 * row_bytes >> 4 | (row_bytes == 128 ? 1u : 2u) << 30) {}

  // The same, `bytes` further on.
  __device__ uint64_t after(int bytes) const { return uint64_t{high} << 32 | (low + (bytes >> 4)); }
};

// The operand types as text of the instruction, inserted through asm's "C" constraint.
template <typename T>
inline constexpr char kWgmmaTypes[] = ".bf16.bf16";
template <>
inline constexpr char kWgmmaTypes<__half>[] = ".f16.f16";

// Accumulators of 16, 32, .. columns: FLASH_R.. are their registers in the text of an instruction, FLASH_C.. the
// operands of asm. The numbers given to the two macros below are those of the asm operands that follow the
// accumulators.
#define FLASH_C8(t) "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])
#define FLASH_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_R32 FLASH_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_R48 FLASH_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_R64 FLASH_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_R80 FLASH_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_R96 FLASH_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_R112 FLASH_R96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_R128 FLASH_R112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_R144 FLASH_R128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_R160 FLASH_R144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_R176 FLASH_R160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_R192 FLASH_R176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_R208 FLASH_R192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_R224 FLASH_R208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_R240 FLASH_R224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_R256 FLASH_R240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_C16 FLASH_C8(0), FLASH_C8(1)
#define FLASH_C32 FLASH_C16, FLASH_C8(2), FLASH_C8(3)
#define FLASH_C48 FLASH_C32, FLASH_C8(4), FLASH_C8(5)
#define FLASH_C64 FLASH_C48, FLASH_C8(6), FLASH_C8(7)
#define FLASH_C80 FLASH_C64, FLASH_C8(8), FLASH_C8(9)
#define FLASH_C96 FLASH_C80, FLASH_C8(10), FLASH_C8(11)
#define FLASH_C112 FLASH_C96, FLASH_C8(12), FLASH_C8(13)
#define FLASH_C128 FLASH_C112, FLASH_C8(14), FLASH_C8(15)
#define FLASH_C144 FLASH_C128, FLASH_C8(16), FLASH_C8(17)
#define FLASH_C160 FLASH_C144, FLASH_C8(18), FLASH_C8(19)
#define FLASH_C176 FLASH_C160, FLASH_C8(20), FLASH_C8(21)
#define FLASH_C192 FLASH_C176, FLASH_C8(22), FLASH_C8(23)
#define FLASH_C208 FLASH_C192, FLASH_C8(24), FLASH_C8(25)
#define FLASH_C224 FLASH_C208, FLASH_C8(26), FLASH_C8(27)
#define FLASH_C240 FLASH_C224, FLASH_C8(28), FLASH_C8(29)
#define FLASH_C256 FLASH_C240, FLASH_C8(30), FLASH_C8(31)

#define FLASH_WGMMA_FROM_SHARED(N, A, B, ACCUMULATE, A_ALONG_ROWS, B_ALONG_ROWS, TYPES)              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE                                      \
               ", 0;\n"                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32%" #TYPES " {" FLASH_R##N              \
               "}, %" #A ", %" #B ", p, 1, 1, %" #A_ALONG_ROWS ", %" #B_ALONG_ROWS ";\n}"            \
               : FLASH_C##N                                                                          \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kAAlongRows)), "n"(int(kBAlongRows)), \
                 "C"(kWgmmaTypes<T>)                                                                 \
               : "memory")

#define FLASH_WGMMA_FROM_REGISTERS(N, A0, A1, A2, A3, B, ACCUMULATE, B_ALONG_ROWS, TYPES)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE                                                   \
               ", 0;\n"                                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32%" #TYPES " {" FLASH_R##N                           \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #B_ALONG_ROWS ";\n}"            \
               : FLASH_C##N                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kBAlongRows)), \
                 "C"(kWgmmaTypes<T>)                                                                              \
               : "memory")

// Starts c = a b, or c += a b if `accumulate`, with a (64 x 16), b (16 x kCols) and c (64 x kCols). Warp i of the
// warpgroup has rows 16 i .. 16 i + 15 of c, in tiles of 8 columns as in ptx/mma.cuh. a and b are descriptors;
// k..AlongRows: the contraction runs along the rows of the stored matrix, and not along its columns.
template <typename T, bool kAAlongRows, bool kBAlongRows, int kTiles>
__device__ void wgmma(float (&c)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
  constexpr int kCols = 8 * kTiles;
  if constexpr (kCols == 64) FLASH_WGMMA_FROM_SHARED(64, 32, 33, 34, 35, 36, 37);
  if constexpr (kCols == 80) FLASH_WGMMA_FROM_SHARED(80, 40, 41, 42, 43, 44, 45);
  if constexpr (kCols == 96) FLASH_WGMMA_FROM_SHARED(96, 48, 49, 50, 51, 52, 53);
  if constexpr (kCols == 112) FLASH_WGMMA_FROM_SHARED(112, 56, 57, 58, 59, 60, 61);
  if constexpr (kCols == 128) FLASH_WGMMA_FROM_SHARED(128, 64, 65, 66, 67, 68, 69);
  if constexpr (kCols == 160) FLASH_WGMMA_FROM_SHARED(160, 80, 81, 82, 83, 84, 85);
  if constexpr (kCols == 176) FLASH_WGMMA_FROM_SHARED(176, 88, 89, 90, 91, 92, 93);
  if constexpr (kCols == 192) FLASH_WGMMA_FROM_SHARED(192, 96, 97, 98, 99, 100, 101);
  if constexpr (kCols == 256) FLASH_WGMMA_FROM_SHARED(256, 128, 129, 130, 131, 132, 133);
  static_assert(kCols == 64 || kCols == 80 || kCols == 96 || kCols == 112 || kCols == 128 || kCols == 160 ||
                    kCols == 176 || kCols == 192 || kCols == 256,
                "no product of so many columns is listed here");
}

// The same with a in registers, each warp's 16 rows as in ptx/mma.cuh.
template <typename T, bool kBAlongRows, int kTiles>
__device__ void wgmma(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  constexpr int kCols = 8 * kTiles;
  if constexpr (kCols == 32) FLASH_WGMMA_FROM_REGISTERS(32, 16, 17, 18, 19, 20, 21, 22, 23);
  if constexpr (kCols == 64) FLASH_WGMMA_FROM_REGISTERS(64, 32, 33, 34, 35, 36, 37, 38, 39);
  if constexpr (kCols == 80) FLASH_WGMMA_FROM_REGISTERS(80, 40, 41, 42, 43, 44, 45, 46, 47);
  if constexpr (kCols == 96) FLASH_WGMMA_FROM_REGISTERS(96, 48, 49, 50, 51, 52, 53, 54, 55);
  if constexpr (kCols == 112) FLASH_WGMMA_FROM_REGISTERS(112, 56, 57, 58, 59, 60, 61, 62, 63);
  if constexpr (kCols == 128) FLASH_WGMMA_FROM_REGISTERS(128, 64, 65, 66, 67, 68, 69, 70, 71);
  if constexpr (kCols == 160) FLASH_WGMMA_FROM_REGISTERS(160, 80, 81, 82, 83, 84, 85, 86, 87);
  if constexpr (kCols == 176) FLASH_WGMMA_FROM_REGISTERS(176, 88, 89, 90, 91, 92, 93, 94, 95);
  if constexpr (kCols == 192) FLASH_WGMMA_FROM_REGISTERS(192, 96, 97, 98, 99, 100, 101, 102, 103);
  if constexpr (kCols == 256) FLASH_WGMMA_FROM_REGISTERS(256, 128, 129, 130, 131, 132, 133, 134, 135);
  static_assert(kCols == 32 || kCols == 64 || kCols == 80 || kCols == 96 || kCols == 112 || kCols == 128 ||
                    kCols == 160 || kCols == 176 || kCols == 192 || kCols == 256,
                "no product of so many columns is listed here");
}

#undef FLASH_WGMMA_FROM_SHARED
#undef FLASH_WGMMA_FROM_REGISTERS

}  // namespace flash::ptx
