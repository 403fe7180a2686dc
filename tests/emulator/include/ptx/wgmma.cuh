#pragma once

#include <vector>

#include "ptx/copy.cuh"
#include "ptx/math.cuh"

namespace flash::ptx {

struct MatrixDescriptor {
  uint32_t low, high;

  MatrixDescriptor(uint32_t address, int row_bytes, int page_bytes)
      : low((address & 0x3FFFF) >> 4 | page_bytes >> 4 << 16),
        high(8 * row_bytes >> 4 | (row_bytes == 128 ? 1u : 2u) << 30) {}

  uint64_t after(int bytes) const { return uint64_t{high} << 32 | (low + (bytes >> 4)); }
};

// An operand in shared memory as the instruction reads it by its descriptor: element (i, k), with k along the
// contraction.
template <typename T>
struct Operand {
  uint32_t start, page_bytes, group_bytes, row_bytes, chunks;
  bool along_rows;
  const char* shared;

  Operand(uint64_t descriptor, bool along_rows)
      : start((descriptor & 0x3FFF) << 4),
        page_bytes((descriptor >> 16 & 0x3FFF) << 4),
        group_bytes((descriptor >> 32 & 0x3FFF) << 4),
        row_bytes(descriptor >> 62 == 1   ? 128
                  : descriptor >> 62 == 2 ? 64
                                          : 32),
        chunks(row_bytes / 16 - 1),
        along_rows(along_rows),
        shared(emulator::current->block->shared) {}

  float operator()(int i, int k) const {
    const int row = along_rows ? k : i, col = along_rows ? i : k, page_cols = row_bytes / 2;
    uint32_t at = start + row / 8 * group_bytes + row % 8 * row_bytes + col % page_cols * 2;
    if (along_rows) at += col / page_cols * page_bytes;
    at ^= (at >> 7 & chunks) << 4;
    uint16_t element;
    std::memcpy(&element, shared + at, 2);
    return widened<T>(element);
  }
};

inline emulator::Warpgroup& warpgroup() {
  return emulator::current->block->warpgroups[emulator::current->number / 128];
}

// Computes the warpgroup's oldest products until `count` of them have been computed in all.
inline void finish_products(int64_t count) {
  emulator::Warpgroup& group = warpgroup();
  while (group.finished < count) {
    group.products.front()();
    group.products.pop_front();
    ++group.finished;
  }
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::current->products.push_back(warpgroup().started); }
template <int kPending>
void wgmma_wait() {
  auto& groups = emulator::current->products;
  for (; groups.size() > kPending; groups.pop_front()) finish_products(groups.front());
}

// Starts a product of a warpgroup. left_of(what the threads have given, row, k) is an element of a.
template <typename T, int kTiles, typename Given, typename Left>
void start_product(Given& mine, uint64_t b, bool b_along_rows, bool accumulate, Left&& left_of) {
  emulator::Warpgroup& group = warpgroup();
  emulator::meet(
      group.meeting, emulator::current->number % 128, 128, &mine,
      [&](void** given) {
        std::vector<Given> all(128);
        for (int i = 0; i < 128; ++i) all[i] = *static_cast<Given*>(given[i]);
        const Operand<T> right(b, b_along_rows);
        emulator::Work product = [=, all = std::move(all)] {
          constexpr int kCols = 8 * kTiles;
          std::vector<float> x(64 * 16), y(16 * kCols);
          for (int row = 0; row < 64; ++row) {
            for (int k = 0; k < 16; ++k) x[row * 16 + k] = left_of(all, row, k);
          }
          for (int col = 0; col < kCols; ++col) {
            for (int k = 0; k < 16; ++k) y[k * kCols + col] = right(col, k);
          }
          for (int row = 0; row < 64; ++row) {
            float sums[kCols];
            for (int col = 0; col < kCols; ++col) sums[col] = 0;
            for (int k = 0; k < 16; ++k) {
              for (int col = 0; col < kCols; ++col) sums[col] += x[row * 16 + k] * y[k * kCols + col];
            }
            for (int col = 0; col < kCols; ++col) {
              const int lane = row % 8 * 4 + col % 8 / 2;
              float& c = all[row / 16 * 32 + lane].c[col / 8 * 4 + row % 16 / 8 * 2 + col % 2];
              c = accumulate ? c + sums[col] : sums[col];
            }
          }
        };
        group.products.push_back(std::move(product));
        ++group.started;
        if (!emulator::current->block->lazy()) finish_products(group.started);
      },
      "wgmma");
}

template <typename T, bool kAAlongRows, bool kBAlongRows, int kTiles>
void wgmma(float (&c)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
  struct Mine {
    float* c;
  } mine{&c[0][0]};
  const Operand<T> left(a, kAAlongRows);
  start_product<T, kTiles>(mine, b, kBAlongRows, accumulate,
                           [left](const std::vector<Mine>&, int row, int k) { return left(row, k); });
}

template <typename T, bool kBAlongRows, int kTiles>
void wgmma(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  struct Mine {
    float* c;
    uint32_t a[4];
  } mine{&c[0][0], {a[0], a[1], a[2], a[3]}};
  start_product<T, kTiles>(mine, b, kBAlongRows, accumulate, [](const std::vector<Mine>& all, int row, int k) {
    const int lane = row % 8 * 4 + k % 8 / 2;
    const float2 pair = unpack<T>(all[row / 16 * 32 + lane].a[row % 16 / 8 + k / 8 * 2]);
    return k % 2 ? pair.y : pair.x;
  });
}

}  // namespace flash::ptx
