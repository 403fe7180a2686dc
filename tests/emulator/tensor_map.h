// What the emulator stores in a CUtensorMap.
#pragma once

#include <cstdint>

namespace emulator {

struct TensorMap {
  char* data;
  int64_t sizes[4];
  int64_t strides[4];  // in bytes
  int16_t box[4];
  int16_t element_bytes, swizzle_bytes;
};

// Calls fn(address in shared memory, address in global memory or null outside of the tensor) for each element of a box.
// `base` is the box's address in shared memory; swizzling XORs address bits, so its pattern starts at multiples of
// 1024.
template <typename Fn>
void for_each_element(const TensorMap& map, const int (&first)[4], uint32_t base, Fn&& fn) {
  uint32_t at = base;
  for (int i3 = 0; i3 < map.box[3]; ++i3) {
    for (int i2 = 0; i2 < map.box[2]; ++i2) {
      for (int i1 = 0; i1 < map.box[1]; ++i1) {
        for (int i0 = 0; i0 < map.box[0]; ++i0, at += map.element_bytes) {
          const int64_t x[4] = {int64_t{first[0]} + i0, int64_t{first[1]} + i1, int64_t{first[2]} + i2,
                                int64_t{first[3]} + i3};
          bool inside = true;
          int64_t offset = 0;
          for (int i = 0; i < 4; ++i) {
            inside &= x[i] >= 0 && x[i] < map.sizes[i];
            offset += x[i] * map.strides[i];
          }
          const uint32_t chunks = map.swizzle_bytes == 128 ? 7 : map.swizzle_bytes == 64 ? 3 : map.swizzle_bytes == 32;
          const uint32_t swizzled = map.swizzle_bytes == 0 ? at : at ^ (at >> 7 & chunks) << 4;
          fn(swizzled, inside ? map.data + offset : nullptr);
        }
      }
    }
  }
}

}  // namespace emulator
