// Integer division by numbers that are not known at compile time.
#pragma once

#include <cstdint>

namespace flash {

template <typename Count>
constexpr Count ceil_div(Count count, int size) {
  return (count + size - 1) / size;
}

// Division of numbers below 2^31 by a positive number that is fixed for a launch, as a multiplication and a shift
// (Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994).
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(int divisor) : value(divisor) {
    while ((uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - value) << 32) / value + 1);
  }
#ifdef __CUDACC__
  __device__ int divide(int n) const { return (__umulhi(n, multiplier) + n) >> shift; }
  __device__ int remainder(int n, int quotient) const { return n - quotient * static_cast<int>(value); }
#endif
};

}  // namespace flash
