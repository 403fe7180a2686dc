#pragma once

#include "ptx/math.cuh"

namespace flash::ptx {

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Mine {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
  } mine{c, a, {b0, b1}};
  emulator::meet_warp(
      ~0u, &mine,
      [](void** given, uint32_t mask) {
        if (mask != ~0u) emulator::fail("mma in a part of a warp");
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; ++lane) {
          const Mine& from = *static_cast<Mine*>(given[lane]);
          const int g = lane / 4, t = lane % 4 * 2;
          for (int i = 0; i < 4; ++i) {
            const float2 x = unpack<T>(from.a[i]);
            left[g + i % 2 * 8][t + i / 2 * 8] = x.x, left[g + i % 2 * 8][t + 1 + i / 2 * 8] = x.y;
          }
          for (int i = 0; i < 2; ++i) {
            const float2 x = unpack<T>(from.b[i]);
            right[t + 8 * i][g] = x.x, right[t + 1 + 8 * i][g] = x.y;
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          float* c = static_cast<Mine*>(given[lane])->c;
          for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            double sum = c[i];  // exact, as good as always: as on Hopper, the order of products makes no difference
            for (int k = 0; k < 16; ++k) sum += double{left[row][k]} * right[k][col];
            c[i] = static_cast<float>(sum);
          }
        }
      },
      "mma");
}

}  // namespace flash::ptx
