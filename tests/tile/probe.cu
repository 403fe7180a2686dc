// What test_tile.py calls: a function runs one operation of csrc/tile, and with it of csrc/ptx, on the default stream.
// Those that launch return null, or the text of the error. All of them need a GPU.
#include <cstdint>
#include <string>

#include "common/dispatch.h"
#include "common/divmod.h"
#include "common/dtype.h"
#include "common/launch.h"
#include "common/tensor_map.h"
#include "flash_attn/scores/dropout.cuh"
#include "probe.h"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "tile/any_vec.cuh"
#include "tile/exp_sum.cuh"
#include "tile/fragment.cuh"
#include "tile/gemm.cuh"
#include "tile/load.cuh"
#include "tile/philox.cuh"
#include "tile/pipeline.cuh"
#include "tile/reduce.cuh"
#include "tile/rotate.cuh"
#include "tile/row.cuh"
#include "tile/shared.cuh"
#include "tile/vec.cuh"
#include "tile/warpgroup.cuh"

namespace flash {
namespace {

template <typename Fn>
void dispatch_half(int dtype, Fn&& fn) {
  dispatch_value<DType::kFloat16, DType::kBFloat16>(static_cast<DType>(dtype), fn);
}

template <typename Fn>
void dispatch_dtype(int dtype, Fn&& fn) {
  dispatch_value<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(static_cast<DType>(dtype), fn);
}

__device__ int64_t thread_id() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// One thread for each of `count` elements.
template <auto kKernel, typename Params>
void launch_flat(const Params& p) {
  launch<kKernel>({.grid = dim3(static_cast<unsigned>(ceil_div(p.count, 256))), .block = dim3(256)}, p, nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Elements

struct Elementwise {
  const void* x;
  void* y;
  int64_t count;
};

// `count` accesses of kSize elements.
template <typename From, typename To, int kSize>
__global__ void convert_kernel(const __grid_constant__ Elementwise p) {
  if (thread_id() >= p.count) return;
  float wide[kSize];
  widen(wide, load<kSize>(static_cast<const From*>(p.x) + thread_id() * kSize));
  store(static_cast<To*>(p.y) + thread_id() * kSize, narrow<To>(wide));
}

// The same for types that are known at run time.
struct AnyElementwise {
  const void* x;
  void* y;
  int64_t count;
  DType from, to;
};

template <int kSize>
__global__ void convert_any_kernel(const __grid_constant__ AnyElementwise p) {
  if (thread_id() >= p.count) return;
  float wide[kSize];
  widen(wide, load_any<kSize>(p.x, thread_id() * kSize, p.from), p.from);
  store_any(p.y, thread_id() * kSize, p.to, wide);
}

// `count` pairs.
template <typename T>
__global__ void pack_kernel(const __grid_constant__ Elementwise p) {
  if (thread_id() >= p.count) return;
  const float* x = static_cast<const float*>(p.x) + 2 * thread_id();
  static_cast<uint32_t*>(p.y)[thread_id()] = ptx::pack<T>(x[0], x[1]);
}

// `count` pairs, back to fp32.
template <typename T>
__global__ void unpack_kernel(const __grid_constant__ Elementwise p) {
  if (thread_id() >= p.count) return;
  static_cast<float2*>(p.y)[thread_id()] = ptx::unpack<T>(static_cast<const uint32_t*>(p.x)[thread_id()]);
}

// `count` pairs.
template <typename T>
__global__ void clamp_kernel(const __grid_constant__ Elementwise p) {
  if (thread_id() >= p.count) return;
  static_cast<uint32_t*>(p.y)[thread_id()] = ptx::clamp_below<T>(static_cast<const uint32_t*>(p.x)[thread_id()]);
}

// Adds quad i of x to quad i % kTargets of y.
constexpr int kTargets = 7;

__global__ void add_kernel(const __grid_constant__ Elementwise p) {
  if (thread_id() >= p.count) return;
  const float* x = static_cast<const float*>(p.x) + 4 * thread_id();
  ptx::add_global(static_cast<float*>(p.y) + thread_id() % kTargets * 4, x[0], x[1], x[2], x[3]);
}

// 8 x 8 elements of 16 bits, two by two over the lanes of a warp.
__global__ void transpose_kernel(const __grid_constant__ Elementwise p) {
  static_cast<uint32_t*>(p.y)[threadIdx.x] = ptx::transpose_matrix(static_cast<const uint32_t*>(p.x)[threadIdx.x]);
}

// A word for each thread of a block, of which the first `count` exist: to shared memory and, reversed, on to y.
constexpr int kWords = 128;

__global__ void word_kernel(const __grid_constant__ Elementwise p) {
  __shared__ uint32_t copied[kWords], reversed[kWords];
  const int i = threadIdx.x;
  copied[i] = ~0u;
  ptx::copy_word_async(ptx::shared_address(&copied[i]), static_cast<const uint32_t*>(p.x) + i, i < p.count);
  ptx::commit_copies();
  ptx::wait_copies<0>();
  ptx::store_word(ptx::shared_address(&reversed[kWords - 1 - i]), ptx::load_word(ptx::shared_address(&copied[i])));
  __syncthreads();
  static_cast<uint32_t*>(p.y)[i] = reversed[i];
}

// Pairs of warps hand a number to and fro `count` times, each pair at a barrier of its own; the pairs do so at
// different paces. The first warp of a pair adds 1 to it, the second doubles it.
constexpr int kPairs = 4;

__global__ void barrier_kernel(const __grid_constant__ Elementwise p) {
  __shared__ volatile uint32_t numbers[kPairs][32];
  const int pair = threadIdx.x / 64, barrier = 1 + pair;
  const bool is_first = threadIdx.x % 64 < 32;
  volatile uint32_t& number = numbers[pair][31 - lane_id()];  // that another lane of the other warp writes
  volatile uint32_t& next = numbers[pair][lane_id()];
  if (is_first) next = static_cast<const uint32_t*>(p.x)[pair * 32 + lane_id()];
  ptx::sync_barrier<64>(barrier);
  for (int i = 0; i < p.count; ++i) {
    const bool is_mine = is_first == (i % 2 == 0);
    const uint32_t found = number;
    ptx::sync_barrier<64>(barrier);
    if (is_mine) {
      __nanosleep(100 * (pair + i % 3));
      next = is_first ? found + 1 : 2 * found;
    }
    ptx::sync_barrier<64>(barrier);
  }
  if (is_first) static_cast<uint32_t*>(p.y)[pair * 32 + lane_id()] = next;
}

enum class Function { kExp2, kLog2, kReciprocal };

template <Function kFunction>
__global__ void function_kernel(const __grid_constant__ Elementwise p) {
  if (thread_id() >= p.count) return;
  const float x = static_cast<const float*>(p.x)[thread_id()];
  float& y = static_cast<float*>(p.y)[thread_id()];
  if constexpr (kFunction == Function::kExp2) y = ptx::exp2(x);
  if constexpr (kFunction == Function::kLog2) y = ptx::log2(x);
  if constexpr (kFunction == Function::kReciprocal) y = ptx::reciprocal(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rotation: rows of 16 channels and 8 angles

constexpr int kAngles = 8;

struct Rotation {
  const float* x;
  const float* cos;
  const float* sin;
  float* y;
  int64_t count;
};

__device__ void load_row(float (&row)[kAngles], const float* x) {
  for (int i = 0; i < kAngles; ++i) row[i] = x[thread_id() * kAngles + i];
}

template <bool kInterleaved>
__global__ void rotate_kernel(const __grid_constant__ Rotation p) {
  if (thread_id() >= p.count) return;
  float low[kAngles], high[kAngles], cos[kAngles], sin[kAngles];
  load_row(cos, p.cos);
  load_row(sin, p.sin);
  load_row(low, p.x + thread_id() * kAngles);
  load_row(high, p.x + (thread_id() + 1) * kAngles);
  if constexpr (kInterleaved) {
    rotate_interleaved(low, cos, sin, 0);
    rotate_interleaved(high, cos, sin, kAngles / 2);
  } else {
    rotate_halves(low, high, cos, sin);
  }
  float* y = p.y + 2 * thread_id() * kAngles;
  for (int i = 0; i < kAngles; ++i) y[i] = low[i], y[kAngles + i] = high[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles of 128 rows, by eight warps

constexpr int kTileRows = 128, kTileThreads = 256, kWarpRows = 16;

struct Copy {
  void* image;  // the tile's shared memory as it is
  const float* values;
  void* rows;  // address of the one where the cursor stands
  int64_t stride;
  int row, count, cols;
  int64_t step;
  bool scattered;
};

template <typename Tile>
__device__ void dump(const Tile& tile, void* image) {
  __syncthreads();
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += kTileThreads) {
    static_cast<typename Tile::T*>(image)[i] = tile.data[i];
  }
}

// kLoaders: threads that load the tile together. If 32, each warp loads it, all the same.
template <typename T, int kCols, int kLoaders>
__global__ void load_kernel(const __grid_constant__ Copy p) {
  using Tile = SharedTile<T, kTileRows, kCols>;
  auto& tile = shared_memory<Tile>();
  for (int i = threadIdx.x; i < kTileRows * kCols; i += kTileThreads) tile.data[i] = T(NAN);
  __syncthreads();
  const StridedRows<const T> rows{static_cast<const T*>(p.rows), p.stride, p.row, p.count};
  if (p.scattered) {
    load_scattered<kLoaders>(tile, rows, p.cols, p.step);
  } else {
    load_async<kLoaders>(tile, rows, p.cols);
    ptx::commit_copies();
    ptx::wait_copies<0>();
  }
  dump(tile, p.image);
}

template <typename T, int kCols>
__global__ void store_kernel(const __grid_constant__ Copy p) {
  auto& tile = shared_memory<SharedTile<T, kTileRows, kCols>>();
  const int row0 = warp_id() * kWarpRows;
  Fragment<kWarpRows, kCols> fragment;
  for (int r = 0; r < fragment.kLaneRows; ++r) {
    for (int c = 0; c < fragment.kLaneCols; ++c) {
      fragment(r, c) = p.values[(row0 + fragment.row(r)) * kCols + fragment.col(c)];
    }
  }
  store_fragment(tile, fragment, row0);
  dump(tile, p.image);
  const StridedRows<T> rows{static_cast<T*>(p.rows), p.stride, p.row, p.count};
  if (p.scattered) {
    store_scattered<kWarpRows>(tile, rows, row0, p.cols, p.step);
  } else {
    store_rows<kWarpRows>(tile, rows, row0, p.cols);
  }
}

template <typename Fn>
void dispatch_tile(int dtype, int cols, Fn&& fn) {
  dispatch_half(dtype, [&](auto kDType) {
    dispatch_value<32, 64, 96, 128, 192, 256>(cols, [&](auto kCols) { fn(kDType, kCols); });
  });
}

template <typename T, int kCols>
LaunchShape tile_shape() {
  return {.grid = dim3(1), .block = dim3(kTileThreads), .shared_bytes = sizeof(SharedTile<T, kTileRows, kCols>)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Fragments and products

struct Statistics {
  const float* x;  // (32, 64)
  const float* factors;
  float* row_max;
  float* row_sum;
  float* scaled;
};

__global__ void fragment_kernel(const __grid_constant__ Statistics p) {
  Fragment<32, 64> x;
  float factors[x.kLaneRows];
  for (int r = 0; r < x.kLaneRows; ++r) {
    factors[r] = p.factors[x.row(r)];
    float max = -INFINITY, sum = 0;
    for (int c = 0; c < x.kLaneCols; ++c) {
      x(r, c) = p.x[x.row(r) * x.kCols + x.col(c)];
      max = fmaxf(max, x(r, c));
      sum += x(r, c);
    }
    p.row_max[x.row(r)] = quad_max(max);
    p.row_sum[x.row(r)] = quad_sum(sum);
  }
  x.scale_rows(factors);
  for (int r = 0; r < x.kLaneRows; ++r) {
    for (int c = 0; c < x.kLaneCols; ++c) p.scaled[x.row(r) * x.kCols + x.col(c)] = x(r, c);
  }
}

enum class Left { kAlongCols, kAlongRows, kPacked };

// C = 1 + A B, C of 64 rows by two warps. B is one of the equal parts of what its tile holds.
struct Product {
  const void* a;  // as the tile holds it: (64, depth) or, along rows, (depth, 64)
  const void* b;  // likewise (parts * cols, depth) or (depth, parts * cols)
  float* c;       // (64, cols)
  int part;
};

struct ProductShape {
  int depth, cols;
};
constexpr ProductShape kProductShapes[] = {{64, 32}, {32, 64}, {96, 96}, {64, 128}};  // as in test_tile.py

template <typename T, Left kLeft, bool kRightAlongCols, int kDepth_, int kCols_>
struct ProductConfig {
  static constexpr int kRows = 64, kWarpRows = 32, kThreads = 64, kDepth = kDepth_, kCols = kCols_;
  static constexpr int kParts = (kCols & (kCols - 1)) == 0 ? 2 : 1;  // columns of other numbers cannot be cut
  static constexpr bool kLeftAlongRows = kLeft == Left::kAlongRows;
  using A = SharedTile<T, kLeftAlongRows ? kDepth : kRows, kLeftAlongRows ? kRows : kDepth>;
  using B = SharedTile<T, kRightAlongCols ? kParts * kCols : kDepth, kRightAlongCols ? kDepth : kParts * kCols>;
  struct Shared {
    A a;
    B b;
  };
};

template <int kThreads, typename Tile>
__device__ void load_whole(const Tile& tile, const void* matrix) {
  using T = typename Tile::T;
  const StridedRows<const T> rows{static_cast<const T*>(matrix), Tile::kCols, 0, Tile::kRows};
  load_async<kThreads>(tile, rows, Tile::kCols);
}

template <typename T, Left kLeft, bool kRightAlongCols, int kDepth, int kCols>
__global__ void product_kernel(const __grid_constant__ Product p) {
  using Config = ProductConfig<T, kLeft, kRightAlongCols, kDepth, kCols>;
  constexpr int kWarpRows = Config::kWarpRows;
  auto& shared = shared_memory<typename Config::Shared>();
  load_whole<Config::kThreads>(shared.a, p.a);
  load_whole<Config::kThreads>(shared.b, p.b);
  ptx::commit_copies();
  ptx::wait_copies<0>();
  __syncthreads();

  const int row0 = warp_id() * kWarpRows;
  Fragment<kWarpRows, kCols> c;
  c.fill(1);
  const auto add_product = [&](const auto& left) {
    const int first = p.part * kCols;
    if constexpr (kRightAlongCols) {
      gemm<kDepth>(c, left, along_cols(shared.b, first));
    } else {
      gemm<kDepth>(c, left, along_rows(shared.b, first));
    }
  };
  if constexpr (kLeft == Left::kAlongCols) add_product(along_cols(shared.a, row0));
  if constexpr (kLeft == Left::kAlongRows) add_product(along_rows(shared.a, row0));
  if constexpr (kLeft == Left::kPacked) {
    Fragment<kWarpRows, kDepth> a;
    for (int r = 0; r < a.kLaneRows; ++r) {
      for (int i = 0; i < a.kLaneCols; ++i) {
        const int64_t element = (row0 + a.row(r)) * kDepth + a.col(i);
        a(r, i) = static_cast<float>(static_cast<const T*>(p.a)[element]);
      }
    }
    add_product(pack<T>(a));
  }
  for (int r = 0; r < c.kLaneRows; ++r) {
    for (int i = 0; i < c.kLaneCols; ++i) p.c[(row0 + c.row(r)) * kCols + c.col(i)] = c(r, i);
  }
}

template <typename T, Left kLeft, bool kRightAlongCols, int kDepth, int kCols>
void run_product(const Product& p) {
  using Config = ProductConfig<T, kLeft, kRightAlongCols, kDepth, kCols>;
  const LaunchShape shape{
      .grid = dim3(1), .block = dim3(Config::kThreads), .shared_bytes = sizeof(typename Config::Shared)};
  launch<product_kernel<T, kLeft, kRightAlongCols, kDepth, kCols>>(shape, p, nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies of boxes and products of warpgroups (sm_90)

constexpr int kBoxRows = 128;

// C = A B, or C + A B, by two warpgroups. A has 128 rows. B lies as its tile does: (cols, depth) or (depth, cols).
struct BoxProduct {
  CUtensorMap a, b;
  float* c;  // (128, cols)
  bool accumulate;
};

struct BoxProductShape {
  int depth, cols;
  bool right_along_cols;
};
constexpr BoxProductShape kBoxProductShapes[] = {
    // likewise
    {64, 128, true},  {96, 128, true},  {128, 176, true},  {192, 112, true},  {256, 80, true}, {256, 64, true},
    {128, 64, false}, {128, 96, false}, {176, 128, false}, {112, 192, false}, {80, 256, false}};

template <typename T, int kIndex>
struct BoxProductConfig {
  static constexpr BoxProductShape kShape = kBoxProductShapes[kIndex];
  static constexpr int kDepth = kShape.depth, kCols = kShape.cols;
  using A = SharedTile<T, kBoxRows, (kDepth + 31) / 32 * 32>;
  using B = SharedTile<T, kShape.right_along_cols ? kCols : kDepth, kShape.right_along_cols ? kDepth : kCols>;
  struct Shared {
    A a;
    B b;
    Ring<1> ring;
  };
};

template <typename T, int kIndex, bool kPacked>
__global__ __launch_bounds__(2 * kWarpgroup) void box_product_kernel(const __grid_constant__ BoxProduct p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Config = BoxProductConfig<T, kIndex>;
  constexpr int kDepth = Config::kDepth, kCols = Config::kCols;
  auto& shared = shared_memory<typename Config::Shared>();
  const RingCursor<1> at;
  if (threadIdx.x == 0) {
    shared.ring.init(1);
    ptx::fence_barrier_init();
    auto& arrived = shared.ring.expect_tx(at, sizeof(shared.a) + sizeof(shared.b));
    load_async(shared.a, p.a, 0, 0, 0, arrived);
    load_async(shared.b, p.b, 0, 0, 0, arrived);
  }
  __syncthreads();
  shared.ring.wait_full(at);

  const int row0 = 16 * warp_id();
  Fragment<16, kCols> c;
  for (int r = 0; r < c.kLaneRows; ++r) {
    for (int i = 0; i < c.kLaneCols; ++i) c(r, i) = p.c[(row0 + c.row(r)) * kCols + c.col(i)];
  }
  const auto add_product = [&](auto& left) {
    fence(c);
    if constexpr (Config::kShape.right_along_cols) {
      start_gemm<kDepth>(c, left, along_cols(shared.b), p.accumulate);
    } else {
      start_gemm<kDepth>(c, left, along_rows(shared.b), p.accumulate);
    }
    wait_gemms<0>(c);
  };
  if constexpr (kPacked) {
    PackedFragment<T, 16, kDepth> a;
    const auto blocks = left_loader(along_cols(shared.a, row0));
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) blocks.load(a.values[0][step], 0, step);
    pin(a);
    add_product(a);
  } else {
    const auto a = along_cols(shared.a, 64 * warpgroup_id());
    add_product(a);
  }
  for (int r = 0; r < c.kLaneRows; ++r) {
    for (int i = 0; i < c.kLaneCols; ++i) p.c[(row0 + c.row(r)) * kCols + c.col(i)] = c(r, i);
  }
#endif
}

// A matrix of `rows` x `cols` in memory, for boxes of a page of the tile.
template <typename Tile>
CUtensorMap matrix_map(const void* data, int64_t rows, int64_t cols) {
  return map_of<Tile>(TensorRef<const void>{.data = data, .seqlen = cols, .head_dim = 1}, cols, 1, rows, 1);
}

// values (128, cols), rounded, to a matrix: as a box, or by each warp from its registers.
struct BoxStore {
  CUtensorMap map;
  const float* values;
  void* matrix;
  int rows, cols;
  bool direct;
};

template <typename T, int kCols>
__global__ void box_store_kernel(const __grid_constant__ BoxStore p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& tile = shared_memory<SharedTile<T, kBoxRows, kCols>>();
  const int row0 = 16 * warp_id();
  Fragment<16, kCols> x;
  for (int r = 0; r < x.kLaneRows; ++r) {
    for (int c = 0; c < x.kLaneCols; ++c) x(r, c) = p.values[(row0 + x.row(r)) * kCols + x.col(c)];
  }
  if (p.direct) {
    return store_rows<T>(x, StridedRows<T>{static_cast<T*>(p.matrix), p.cols, 0, p.rows}, row0, p.cols);
  }
  store_matrices(tile, pack<T>(x), row0);
  ptx::fence_async_shared();
  __syncthreads();
  if (threadIdx.x != 0) return;
  store_async<kBoxRows>(tile, 0, p.map, 0, 0, 0);
  ptx::wait_stores_read();
#endif
}

// values (128, 64), rounded, to a tile that holds their transpose.
struct TransposedStore {
  const float* values;
  void* image;
};

template <typename T>
__global__ void transposed_store_kernel(const __grid_constant__ TransposedStore p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& tile = shared_memory<SharedTile<T, 64, kTileRows>>();
  const int row0 = 16 * warp_id();
  Fragment<16, 64> x;
  x.for_each([&](float& element, int r, int c) { element = p.values[(row0 + x.row(r)) * 64 + x.col(c)]; });
  store_transposed(tile, pack<T>(x), row0);
  dump(tile, p.image);
#endif
}

// A box (4, 64, 16) of floats added to a tensor (groups, rows, 16), twice, from a group and a row on.
struct BoxSum {
  CUtensorMap map;
  const float* box;
  int group, row;
};

__global__ void box_sum_kernel(const __grid_constant__ BoxSum p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  struct Box {
    alignas(128) float values[4 * 64 * 16];
  };
  auto& box = shared_memory<Box>();
  for (int i = threadIdx.x; i < 4 * 64 * 16; i += blockDim.x) box.values[i] = p.box[i];
  ptx::fence_async_shared();
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 2; ++i) ptx::add_box_async(p.map, ptx::shared_address(box.values), 0, p.row, p.group, 0);
  ptx::commit_stores();
  ptx::wait_stores();
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Random bits

struct Draw {
  uint64_t key;
  const uint64_t* counters;  // (count, 2), low and high
  uint4* words;
  int64_t count;
};

template <int kRounds>
__global__ void philox_kernel(const __grid_constant__ Draw p) {
  if (thread_id() >= p.count) return;
  const uint64_t low = p.counters[2 * thread_id()], high = p.counters[2 * thread_id() + 1];
  p.words[thread_id()] = philox<kRounds>(p.key, low, static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
}

struct Keep {
  flash_attn::Problem problem;
  uint8_t* kept;  // (batch, heads, rows, cols), ones
  int rows, cols;
};

// A block for each 32 x 64 scores of an entry and a head.
__global__ void drop_kernel(const __grid_constant__ Keep p) {
  const int entry = blockIdx.z / p.problem.heads, head = blockIdx.z % p.problem.heads;
  const Fragment<32, 64> scores{};
  const int row0 = blockIdx.x * scores.kRows, col0 = blockIdx.y * scores.kCols;
  const flash_attn::Dropout dropout(p.problem, entry, head);
  dropout.for_each_dropped(scores, row0, col0, [&](int r, int c) {
    p.kept[(int64_t{blockIdx.z} * p.rows + row0 + scores.row(r)) * p.cols + col0 + scores.col(c)] = 0;
  });
}

// The same by kKeys x 64 transposed scores.
template <int kKeys>
__global__ void drop_transposed_kernel(const __grid_constant__ Keep p) {
  const int entry = blockIdx.z / p.problem.heads, head = blockIdx.z % p.problem.heads;
  const Fragment<kKeys, 64> scores{};
  const int key0 = blockIdx.x * scores.kRows, row0 = blockIdx.y * scores.kCols;
  const flash_attn::Dropout dropout(p.problem, entry, head);
  dropout.for_each_dropped_transposed(scores, key0, row0, [&](int r, int c) {
    p.kept[(int64_t{blockIdx.z} * p.rows + row0 + scores.col(c)) * p.cols + key0 + scores.row(r)] = 0;
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Rows

struct RowCopy {
  const void* x;  // (rows, cols), rows `stride` apart
  void* y;        // like x; both aligned alike
  int64_t stride;
  int rows, cols;
  int lanes;
  float* sums;    // (rows, threads of a group), the sum of the row as each lane knows it
  float* maxima;  // like sums
  float* exp_max;
  float* exp_sum;  // (rows)
};

// Copies rows, and reduces them.
template <typename T>
__global__ void row_kernel(const __grid_constant__ RowCopy p) {
  constexpr int kWidth = 16 / sizeof(T);
  const RowGroup group;
  const bool exists = group.row < p.rows;
  const T* x = static_cast<const T*>(p.x) + (exists ? group.row : 0) * p.stride;
  T* y = static_cast<T*>(p.y) + (exists ? group.row : 0) * p.stride;
  const int apart = p.lanes * kWidth, cols = exists ? p.cols : 0;
  float sum = 0.f, largest = Max::kOfNone;
  ExpSum exps;
  walk_row<4, kWidth>(first_aligned<kWidth>(x) + group.lane * kWidth, apart, cols, [&](auto kCount, int column) {
    Vec<T, kWidth> vecs[kCount];
    load_step(vecs, x, column, apart, cols, static_cast<T>(-INFINITY));
    float values[kCount * kWidth];
    for (int i = 0; i < kCount; ++i) {
      store_within<kWidth>(y, column + i * apart, cols, vecs[i]);
      const Inside<kWidth> inside(column + i * apart, cols);
      for (int j = 0; j < kWidth; ++j) {
        const float value = values[i * kWidth + j] = static_cast<float>(vecs[i][j]);
        if (inside[j]) sum += value;
        largest = fmaxf(largest, value);
      }
    }
    exps.add(values, 1.f);
  });
  const auto max_over_lanes = [](float x, int lanes) { return reduce_lanes<Max>(x, lanes); };
  sum = sum_group(sum, group);
  largest = reduce_group(largest, group, Max::kOfNone, max_over_lanes);
  exps = sum_group(exps, 1.f, group);
  if (!exists) return;
  p.sums[group.row * p.lanes + group.lane] = sum;
  p.maxima[group.row * p.lanes + group.lane] = largest;
  if (group.lane == 0) p.exp_max[group.row] = exps.max, p.exp_sum[group.row] = exps.sum;
}

extern "C" {

const char* convert(int from, int to, int size, const void* x, void* y, int64_t count) {
  return error_of([&] {
    dispatch_dtype(from, [&](auto kFrom) {
      dispatch_dtype(to, [&](auto kTo) {
        dispatch_value<1, 2, 4, 8>(size, [&](auto kSize) {
          if constexpr (kSize * size_of(kFrom) <= 16 && kSize * size_of(kTo) <= 16) {
            launch_flat<convert_kernel<element_t<kFrom>, element_t<kTo>, kSize>>(Elementwise{x, y, count});
          }
        });
      });
    });
  });
}

const char* convert_any(int from, int to, int size, const void* x, void* y, int64_t count) {
  return error_of([&] {
    const AnyElementwise p{x, y, count, static_cast<DType>(from), static_cast<DType>(to)};
    dispatch_value<1, 4, 8>(size, [&](auto kSize) { launch_flat<convert_any_kernel<kSize>>(p); });
  });
}

const char* pack_pairs(int dtype, const void* x, void* y, int64_t count) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) { launch_flat<pack_kernel<element_t<kDType>>>(Elementwise{x, y, count}); });
  });
}

const char* unpack_pairs(int dtype, const void* x, void* y, int64_t count) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) { launch_flat<unpack_kernel<element_t<kDType>>>(Elementwise{x, y, count}); });
  });
}

const char* clamp_pairs(int dtype, const void* x, void* y, int64_t count) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) { launch_flat<clamp_kernel<element_t<kDType>>>(Elementwise{x, y, count}); });
  });
}

const char* add_quads(const void* x, void* y, int64_t count) {
  return error_of([&] { launch_flat<add_kernel>(Elementwise{x, y, count}); });
}

const char* transpose(const void* x, void* y) {
  return error_of([&] { launch<transpose_kernel>({dim3(1), dim3(32)}, Elementwise{x, y, 32}, nullptr); });
}

const char* reverse_words(const void* x, void* y, int64_t count) {
  return error_of([&] { launch<word_kernel>({dim3(1), dim3(kWords)}, Elementwise{x, y, count}, nullptr); });
}

const char* hand_over(const void* x, void* y, int64_t times) {
  return error_of([&] { launch<barrier_kernel>({dim3(1), dim3(64 * kPairs)}, Elementwise{x, y, times}, nullptr); });
}

const char* apply(int function, const void* x, void* y, int64_t count) {
  return error_of([&] {
    dispatch_value<Function::kExp2, Function::kLog2, Function::kReciprocal>(
        static_cast<Function>(function),
        [&](auto kFunction) { launch_flat<function_kernel<kFunction>>(Elementwise{x, y, count}); });
  });
}

const char* rotate_rows(bool interleaved, const float* x, const float* cos, const float* sin, float* y, int64_t rows) {
  return error_of([&] {
    dispatch_flags([&](auto kInterleaved) { launch_flat<rotate_kernel<kInterleaved>>(Rotation{x, cos, sin, y, rows}); },
                   interleaved);
  });
}

const char* load_tile(int loaders, int dtype, int tile_cols, bool scattered, void* image, void* rows, int64_t stride,
                      int row, int count, int cols, int64_t step) {
  return error_of([&] {
    dispatch_tile(dtype, tile_cols, [&](auto kDType, auto kCols) {
      using T = element_t<kDType>;
      const Copy p{image, nullptr, rows, stride, row, count, cols, step, scattered};
      dispatch_value<32, kTileThreads>(
          loaders, [&](auto kLoaders) { launch<load_kernel<T, kCols, kLoaders>>(tile_shape<T, kCols>(), p, nullptr); });
    });
  });
}

const char* store_tile(int dtype, int tile_cols, bool scattered, void* image, const float* values, void* rows,
                       int64_t stride, int row, int count, int cols, int64_t step) {
  return error_of([&] {
    dispatch_tile(dtype, tile_cols, [&](auto kDType, auto kCols) {
      using T = element_t<kDType>;
      const Copy p{image, values, rows, stride, row, count, cols, step, scattered};
      launch<store_kernel<T, kCols>>(tile_shape<T, kCols>(), p, nullptr);
    });
  });
}

const char* fragment_rows(const float* x, const float* factors, float* row_max, float* row_sum, float* scaled) {
  return error_of([&] {
    launch<fragment_kernel>({.grid = dim3(1), .block = dim3(32)}, Statistics{x, factors, row_max, row_sum, scaled},
                            nullptr);
  });
}

const char* multiply(int dtype, int left, bool right_along_cols, int shape, const void* a, const void* b, float* c,
                     int part) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) {
      dispatch_value<Left::kAlongCols, Left::kAlongRows, Left::kPacked>(static_cast<Left>(left), [&](auto kLeft) {
        dispatch_value<0, 1, 2, 3>(shape, [&](auto kShape) {
          constexpr ProductShape size = kProductShapes[kShape];
          const auto run = [&](auto kAlongCols) {
            run_product<element_t<kDType>, kLeft, kAlongCols, size.depth, size.cols>({a, b, c, part});
          };
          dispatch_flags(run, right_along_cols);
        });
      });
    });
  });
}

const char* multiply_boxes(int dtype, int shape, bool packed, const void* a, int64_t a_rows, int64_t a_cols,
                           const void* b, float* c, bool accumulate) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) {
      dispatch_value<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10>(shape, [&](auto kShape) {
        using T = element_t<kDType>;
        using Config = BoxProductConfig<T, kShape>;
        const BoxProduct p{matrix_map<typename Config::A>(a, a_rows, a_cols),
                           matrix_map<typename Config::B>(b, Config::B::kRows, Config::B::kCols), c, accumulate};
        const LaunchShape launch_shape{
            .grid = dim3(1), .block = dim3(2 * kWarpgroup), .shared_bytes = sizeof(typename Config::Shared)};
        const auto run = [&](auto kPacked) {
          launch<box_product_kernel<T, kShape, kPacked>>(launch_shape, p, nullptr);
        };
        dispatch_flags(run, packed);
      });
    });
  });
}

const char* store_transposed_tile(int dtype, const float* values, void* image) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) {
      using T = element_t<kDType>;
      const LaunchShape shape{
          .grid = dim3(1), .block = dim3(kTileThreads), .shared_bytes = sizeof(SharedTile<T, 64, kTileRows>)};
      launch<transposed_store_kernel<T>>(shape, TransposedStore{values, image}, nullptr);
    });
  });
}

const char* add_box(float* sums, int64_t groups, int64_t rows, const float* box, int group, int row) {
  return error_of([&] {
    const BoxSum p{tensor_map(sums, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {16, rows, groups, 1}, {64, rows * 64, 16},
                              {16, 64, 4, 1}, CU_TENSOR_MAP_SWIZZLE_NONE),
                   box, group, row};
    launch<box_sum_kernel>({.grid = dim3(1), .block = dim3(256), .shared_bytes = 4 * 64 * 16 * sizeof(float)}, p,
                           nullptr);
  });
}

const char* store_box(int dtype, int tile_cols, bool direct, const float* values, void* matrix, int64_t rows,
                      int64_t cols) {
  return error_of([&] {
    dispatch_half(dtype, [&](auto kDType) {
      dispatch_value<64, 96, 128, 192, 256>(tile_cols, [&](auto kCols) {
        using T = element_t<kDType>;
        using Tile = SharedTile<T, kBoxRows, kCols>;
        const BoxStore p{matrix_map<Tile>(matrix, rows, cols),
                         values,
                         matrix,
                         static_cast<int>(rows),
                         static_cast<int>(cols),
                         direct};
        const LaunchShape shape{.grid = dim3(1), .block = dim3(256), .shared_bytes = sizeof(Tile)};
        launch<box_store_kernel<T, kCols>>(shape, p, nullptr);
      });
    });
  });
}

const char* draw(int rounds, uint64_t key, const uint64_t* counters, uint4* words, int64_t count) {
  return error_of([&] {
    dispatch_value<7, 10>(
        rounds, [&](auto kRounds) { launch_flat<philox_kernel<kRounds>>(Draw{key, counters, words, count}); });
  });
}

// rows and cols are multiples of 64. transposed_keys: of a transposed fragment, 16 or 32; 0 for one that is not.
const char* drop(int transposed_keys, int batch, int heads, int rows, int cols, const int64_t* rng_state,
                 int largest_kept, uint8_t* kept) {
  return error_of([&] {
    flash_attn::Problem problem{};
    problem.heads = heads;
    problem.rng_state = rng_state;
    problem.dropout_largest_kept = largest_kept;
    const Keep p{problem, kept, rows, cols};
    const unsigned outer = batch * heads;
    if (transposed_keys == 0) {
      return launch<drop_kernel>({dim3(rows / 32, cols / 64, outer), dim3(32)}, p, nullptr);
    }
    dispatch_value<16, 32>(transposed_keys, [&](auto kKeys) {
      launch<drop_transposed_kernel<kKeys>>({dim3(cols / kKeys, rows / 64, outer), dim3(32)}, p, nullptr);
    });
  });
}

const char* copy_rows(int dtype, const void* x, void* y, int64_t stride, int rows, int cols, int lanes, float* sums,
                      float* maxima, float* exp_max, float* exp_sum) {
  return error_of([&] {
    dispatch_dtype(dtype, [&](auto kDType) {
      launch<row_kernel<element_t<kDType>>>(
          row_groups(rows, lanes), RowCopy{x, y, stride, rows, cols, lanes, sums, maxima, exp_max, exp_sum}, nullptr);
    });
  });
}

}  // extern "C"

}  // namespace flash
