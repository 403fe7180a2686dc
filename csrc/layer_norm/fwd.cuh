// The norm of a sum of branches, forward:
//
//   h = drop(rowscale x0) colscale + drop(x1) + residual,   y = (h - centre) rstd,   out = weight y + bias
//
// with centre = mean(h) and rstd = 1 / sqrt(var(h) + eps) for LayerNorm, and centre = 0 and rstd = 1 / sqrt(mean(h^2) +
// eps) for RMSNorm. All arithmetic is in fp32. Only h is rounded before it is used, because the backward reads the
// stored h.
//
// A row is read once and stays in registers. Each warp computes the mean of its part and then the sum of squared
// differences from that mean; the warps of a row exchange both values once. All loads of a thread are issued before the
// first result is used. A row that is too wide for a block goes to a cluster. If it is too wide for a cluster too, it
// is read twice: first by one block that computes its moments, then by independent blocks, one per tile.
#pragma once

#include <cstdint>

#include "common/dispatch.h"
#include "common/launch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "layer_norm/row.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/shared.cuh"

namespace flash::layer_norm {

template <Types kTypes, int kVec_, int kVecs_, int kThreads_, Extent kExtent_, bool kRagged_ = false,
          bool kTiled_ = false>
struct FwdConfig : Elements<kTypes> {
  static constexpr int kVec = kVec_;          // elements per access
  static constexpr int kVecs = kVecs_;        // accesses per thread and matrix
  static constexpr int kThreads = kThreads_;  // per block, at most
  static constexpr Extent kExtent = kExtent_;
  static constexpr bool kRagged = kRagged_;  // vectors need not be aligned
  static constexpr bool kTiled = kTiled_;    // a block has part of a row; the moments of the row are known
  static constexpr bool kAlone = kExtent == Extent::kAlone, kAll = kExtent == Extent::kAll;
  static constexpr bool kBranches = kExtent == Extent::kBranches || kAll;  // x0 may be dropped or scaled
  static constexpr bool kWhole = kThreads < kMaxThreads;  // a block has whole rows; otherwise a cluster may share them

  // Thread blocks per SM that the registers must allow: 48 registers for a thread with 2 accesses (64 if ragged), 80
  // with 4, 128 with 8 and in kernels that do everything; where x0 is alone, 40, 64 and 80. More registers leave too
  // few threads to hide latency; fewer would spill.
  static constexpr int kBlocks = kAll                  ? kMaxThreads / kThreads
                                 : kAlone              ? (kVecs == kUsualVecs ? 6
                                                          : kWhole            ? 4
                                                                              : 1)
                                 : kVecs == kUsualVecs ? (kWhole ? 5 : 2)
                                                       : (kWhole ? 3 : 1);

  // The threads to count on for that: three blocks of 256 with 8 accesses.
  static constexpr int kBoundThreads = kAlone && !kWhole ? 768 : kThreads;

  // The registers for weights and biases, where x0 is alone.
  static constexpr int kAffineRegisters = 16;
};

// The vectors that are added to get a vector of h.
template <typename Config>
struct Branches {
  AnyVec<Config::kVec> x0, x1, residual;
};

// The rows that are added to get a row of h; x0 is null if no row of x0 belongs to it.
template <typename Config>
struct Sources {
  const char *x0, *x1, *residual;

  __device__ Sources(const FwdParams& p, int64_t row, int64_t x0_row)
      : x0(Config::kAll && x0_row < 0 ? nullptr : row_of(p.x0, Config::x(p.x0.dtype), x0_row)),
        x1(Config::kAll ? row_of(p.x1, p.x1.dtype, row) : nullptr),
        residual(row_of(p.residual, Config::h(p.residual.dtype), row)) {}

  // Loads the vectors at column `col`. Of aligned ragged ones that begin before the row, this is only the part at its
  // start. The other part is loaded by load_ends, and they are put together by add_ends: a warp that did so at once
  // would wait for one matrix before it asks for the next.
  __device__ void load(Branches<Config>& vec, const FwdParams& p, int col) const {
    visit(p, [&](auto branch, const char* row, DType dtype) {
      if constexpr (Config::kRagged) {
        vec.*branch = load_start(row, place(p, col), dtype);
      } else {
        vec.*branch = load_any<Config::kVec>(row, col, dtype);
      }
    });
  }

  __device__ void load_ends(Branches<Config>& ends, const FwdParams& p, int col) const {
    visit(p, [&](auto branch, const char* row, DType dtype) { ends.*branch = load_end(row, place(p, col), dtype); });
  }

  __device__ void add_ends(Branches<Config>& vec, const Branches<Config>& ends, const FwdParams& p, int col) const {
    visit(p, [&](auto branch, const char* row, DType dtype) {
      add_end(vec.*branch, ends.*branch, row, place(p, col), dtype);
    });
  }

 private:
  __device__ static Place<Config::kVec> place(const FwdParams& p, int col) { return {col, p.problem.cols}; }

  // Calls fn(branch, row, dtype) for each branch.
  template <typename Fn>
  __device__ void visit(const FwdParams& p, Fn&& fn) const {
    if (!Config::kAll || x0) fn(&Branches<Config>::x0, x0, Config::x(p.x0.dtype));
    if (Config::kAll && p.x1.data) fn(&Branches<Config>::x1, x1, p.x1.dtype);
    if (!Config::kAlone && p.residual.data) fn(&Branches<Config>::residual, residual, Config::h(p.residual.dtype));
  }
};

// The dropout and the scale of a row.
struct RowScaling {
  Dropout dropout;
  int64_t row, x0_row;
  float scale;  // of x0

  __device__ RowScaling(const Problem& p, int64_t row, int64_t x0_row)
      : dropout(p), row(row), x0_row(x0_row), scale(x0_row >= 0 ? scale_of_row(p, x0_row) : 0.f) {}

  // Draws the random bits for elements of x0.
  template <typename Config>
  __device__ AnyVec<Config::kVec> draw(int col) const {
    if constexpr (!Config::kBranches) return {};
    return dropout.draw<Config::kVec, Config::kRagged>(x0_row, col, 0);
  }
};

// Adds the branches of a vector, with the random bits that were drawn for x0. If h is stored, the sum is rounded like
// the stored value: the backward reads that, and the statistics must agree with it.
template <typename Config, int kVec = Config::kVec>
__device__ void sum_branches(float (&h)[kVec], const Branches<Config>& vec, const FwdParams& p, const RowScaling& row,
                             const AnyVec<kVec>& drawn, int col, bool store_masks) {
  const Problem& problem = p.problem;
  const auto drop_branch = [&](float (&values)[kVec], const AnyVec<kVec>& drawn, int64_t row_of_branch, uint8_t* mask) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = row.dropout.keeps(drawn, i) ? values[i] : 0.f;
    if (!store_masks || !mask) return;
    store_mask<kVec>(mask, row_of_branch * problem.cols, col, problem.cols, row.dropout.kept(drawn));
  };
  fill(h, 0.f);
  if (p.residual.data) widen(h, vec.residual, Config::h(p.residual.dtype));
  float branch[kVec];
  if (!Config::kAll || row.x0_row >= 0) {
    widen(branch, vec.x0, Config::x(p.x0.dtype));
    if constexpr (Config::kBranches) drop_branch(branch, drawn, row.x0_row, p.mask0);
    if constexpr (Config::kAll) {
      if (problem.colscale.data) {
        float scales[kVec];
        load_columns<Config::kRagged>(scales, problem.colscale, col, problem.cols, 1.f);
        multiply(branch, scales);
      }
    }
    add_scaled(h, branch, Config::kBranches ? row.scale : 1.f);
  }
  if constexpr (Config::kAll) {
    if (p.x1.data) {
      widen(branch, vec.x1, p.x1.dtype);
      drop_branch(branch, row.dropout.draw<kVec, Config::kRagged>(row.row, col, 1), row.row, p.mask1);
      add_scaled(h, branch, problem.keep_scale);
    }
  }
  clear_outside<Config::kRagged>(h, col, problem.cols);
  if (p.h.data) round_to(Config::h(p.h.dtype), h);
}

// The statistics of a warp's part of the row: the mean, the sum of (h - centre)^2, and the number of elements. The
// centre is the mean for LayerNorm and 0 for RMSNorm.
using Part = float4;
using PartExchange = RowExchange<Part, /*kTurns=*/1, /*kGroups=*/false>;

// Prefetches weights and biases. This may run before the preceding kernel ends: what that kernel writes is still seen,
// because a prefetch goes only to the L2 cache.
template <typename ForEach>
__device__ void prefetch_weights(const Problem& p, ForEach&& for_each) {
  for_each([&](int, int col) {
    for (const Vector* vector : {&p.weight, &p.bias}) {
      if (vector->data) ptx::prefetch(element_address(vector->data, max(col, 0), vector->dtype));
    }
  });
}

struct Moments {
  float mean, rstd;
  float centre;  // what was subtracted from h
};

// Returns how many elements of an aligned row belong to the warp in this tile, or to its group of lanes if the warp has
// several.
template <typename Config>
__device__ float count_of_warp(int cols, int tile) {
  const int first = column_of<Config::kVec, Config::kVecs>(0, 0, tile, threadIdx.x / 32 * 32);
  int count = 0;
#pragma unroll
  for (int j = 0; j < Config::kVecs; ++j) {
    const int left = cols - first - j * static_cast<int>(blockDim.x) * Config::kVec;
    count += min(max(left, 0), min(static_cast<int>(blockDim.x), 32) * Config::kVec);
  }
  return static_cast<float>(count);
}

// What a thread holds of a row of h. x0 alone stays as it is stored, which in 16 bits takes half as many registers, so
// that more blocks fit a multiprocessor. It is widened wherever it is used; without `keep_as_stored`, nvcc would do so
// once and keep the result.
template <typename Config>
struct HeldRow {
  using Wide = float[Config::kVec];
  std::conditional_t<Config::kAlone, AnyVec<Config::kVec>, Wide> vecs[Config::kVecs];
  float centre = 0.f;  // what is subtracted from x0 alone

  // Calls fn with vector j in fp32.
  template <typename Fn>
  __device__ void visit(int j, Fn&& fn) {
    if constexpr (Config::kAlone) {
      Wide wide;
      keep_as_stored(vecs[j]);
      widen(wide, vecs[j], Config::kX);
#pragma unroll
      for (float& value : wide) value -= centre;
      fn(wide);
    } else {
      fn(vecs[j]);
    }
  }

 private:
  __device__ static void keep_as_stored(AnyVec<Config::kVec>& vec) {
#pragma unroll
    for (uint32_t& word : vec.words) asm volatile("" : "+r"(word));
  }
};

// Computes the moments of a row. walk(visit) must call visit(h, col) for each vector of the thread; elements outside
// the row must be 0.
template <typename Config, typename Walk>
__device__ Moments row_moments(const FwdParams& p, PartExchange& exchange, int tile, Walk&& walk) {
  const bool is_rms_norm = p.problem.is_rms_norm;
  // Where x0 is alone, both sums of RMSNorm go from lane to lane, and from warp to warp, at the same time. Elsewhere
  // the code for that takes more branches and moves, which made LayerNorm with 8 accesses 4 % slower.
  const bool together = Config::kAlone ? is_rms_norm : false;
  const int cols = p.problem.cols, lanes = static_cast<int>(blockDim.x);
  float sum = 0.f, squares = 0.f, centre = 0.f, count = Config::kRagged ? 0.f : count_of_warp<Config>(cols, tile);
  walk([&](const auto& h, int col) {
    if constexpr (Config::kRagged) count += count_of<Config::kVec>(col, cols);
    for (float value : h) sum += value;
    if (!is_rms_norm) return;
    for (float value : h) squares += value * value;
  });
  together ? add_up_lanes(lanes, sum, squares) : add_up_lanes(lanes, sum);
  if (is_rms_norm && !together) add_up_lanes(lanes, squares);
  if (Config::kRagged) add_up_lanes(lanes, count);
  float mean = count > 0.f ? sum * ptx::reciprocal(count) : 0.f;
  if (!is_rms_norm) {
    centre = mean;
    walk([&](auto& h, int col) {
      for (float& value : h) value -= centre;
      clear_outside<Config::kRagged>(h, col, cols);
      for (float value : h) squares += value * value;
    });
    add_up_lanes(lanes, squares);
  }
  const float scale = ptx::reciprocal(cols);
  if (exchange.has_others()) {
    exchange.give({mean, squares, count});
    sum = squares = 0.f;
    exchange.for_each([&](const Part& part) { sum += part.x * part.z, squares += together ? part.y : 0.f; });
    together ? add_up_lanes(exchange.lanes(), sum, squares) : add_up_lanes(exchange.lanes(), sum);
    mean = sum * scale;
    if (!together) {
      exchange.for_each([&](const Part& part) {
        const float apart = is_rms_norm ? 0.f : part.x - mean;
        squares += part.y + part.z * (apart * apart);
      });
      add_up_lanes(exchange.lanes(), squares);
    }
  }
  return {mean, rsqrtf(squares * scale + p.eps), centre};
}

// Mean and rstd of a row: those that moments_kernel has found, or else found and stored here, which moves h to a
// centre.
template <typename Config, typename ForEach>
__device__ Moments moments_of_row(const FwdParams& p, PartExchange& exchange, int64_t row, bool row_exists, int tile,
                                  HeldRow<Config>& h, const ForEach& for_each) {
  if constexpr (Config::kTiled) {
    return {p.mean[row], p.rstd[row]};
  } else {
    const Moments found = row_moments<Config>(p, exchange, tile, [&](auto&& visit) {
      for_each([&](int j, int col) { h.visit(j, [&](auto& vec) { visit(vec, col); }); });
    });
    h.centre = found.centre;
    if (row_exists && tile == 0 && threadIdx.x == 0) p.mean[row] = found.mean, p.rstd[row] = found.rstd;
    return found;
  }
}

// The weight and the bias for the columns of an aligned vector, as they are stored.
template <DType kDType, bool kBias, int kVec>
struct Affine {
  static constexpr int kSize = kDType == DType::kFloat32 ? 4 : kVec, kParts = kVec / kSize;
  static constexpr int kRegisters = kParts * AnyVec<kSize>::kWords * (kBias ? 2 : 1);
  AnyVec<kSize> weight[kParts], bias[kParts];

  __device__ void load(const Problem& p, int col) {
    load(weight, p.weight, col);
    if constexpr (kBias) load(bias, p.bias, col);
  }

  // Turns y into out.
  __device__ void apply(float (&y)[kVec], const Problem& p) const {
    float weights[kVec], biases[kVec];
    widen(weights, weight);
    fill(biases, 0.f);
    if constexpr (kBias) widen(biases, bias);
    apply_weight(y, weights, biases, p);
  }

 private:
  __device__ static void load(AnyVec<kSize> (&parts)[kParts], const Vector& vector, int col) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) parts[i] = load_any<kSize>(vector.data, col + i * kSize, kDType);
  }

  __device__ static void widen(float (&wide)[kVec], const AnyVec<kSize> (&parts)[kParts]) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float part[kSize];
      flash::widen(part, parts[i], kDType);
#pragma unroll
      for (int j = 0; j < kSize; ++j) wide[i * kSize + j] = part[j];
    }
  }
};

// Normalises h and stores the outputs of the row, if it has any.
template <typename Config, typename ForEach>
__device__ void store_normalised(const FwdParams& p, const Moments& found, int64_t row, bool row_exists,
                                 HeldRow<Config>& h, const ForEach& for_each) {
  constexpr bool kRagged = Config::kRagged;
  const Problem& problem = p.problem;
  const int64_t out_row = Config::kAll && row_exists ? row_in_subset(problem.out_subset, row, problem.out_rows) : row;
  if (out_row < 0) return;
  const float shift = problem.is_rms_norm ? 0.f : (found.centre - found.mean) * found.rstd;
  char* const out = row_of(p.out, Config::x(p.out.dtype), out_row);
  // Weights and biases of several vectors are asked for before the first is used: as many as there are registers for.
  const auto store_groups = [&](auto kWeights, auto kBias) {
    using Columns = Affine<kWeights, kBias, Config::kVec>;
    constexpr int kGroup = std::clamp(Config::kAffineRegisters / Columns::kRegisters, 1, Config::kVecs);
    Columns columns[kGroup];
#pragma unroll
    for (int begin = 0; begin < Config::kVecs; begin += kGroup) {
      const int end = begin + kGroup;
      for_each([&](int j, int col) { columns[j - begin].load(problem, col); }, begin, end);
      for_each(
          [&](int j, int col) {
            h.visit(j, [&](auto& y) {
              normalise(y, found.rstd, shift);
              columns[j - begin].apply(y, problem);
              store_row<kRagged>(out, Config::kX, col, problem.cols, y);
            });
          },
          begin, end);
    }
  };
  const auto store_out = [&](auto kWeights) {
    if constexpr (Config::kAlone) {
      problem.bias.data ? store_groups(kWeights, Constant<true>{}) : store_groups(kWeights, Constant<false>{});
    } else {
      for_each([&](int j, int col) {
        normalise(h.vecs[j], found.rstd, shift);
        store_affine<kRagged>(out, Config::kX, col, problem, {problem.weight.data, kWeights},
                              {problem.bias.data, kWeights}, h.vecs[j]);
      });
    }
  };
  if constexpr (Config::kAll) {
    char* const out1 = row_of(p.out1, Config::x(p.out1.dtype), out_row);
    for_each([&](int j, int col) {
      normalise(h.vecs[j], found.rstd, shift);
      store_affine<kRagged>(out, Config::x(p.out.dtype), col, problem, problem.weight, problem.bias, h.vecs[j]);
      if (!p.out1.data) return;
      store_affine<kRagged>(out1, Config::x(p.out1.dtype), col, problem, problem.weight1, problem.bias1, h.vecs[j]);
    });
  } else if (problem.weight.dtype == DType::kFloat32) {
    store_out(Constant<DType::kFloat32>{});
  } else {
    store_out(Constant<Config::kX>{});
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kBoundThreads,
                             Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  constexpr bool kRagged = Config::kRagged;
  __shared__ PartExchange::Barriers arrived;
  const Problem& problem = p.problem;
  const int64_t row = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  const bool row_exists = row < problem.rows;
  const int first = first_column<kVec, kRagged>(p.out, Config::x(p.out.dtype), row);
  const int last = last_column<kRagged>(first, problem.cols), tile = Config::kWhole ? 0 : blockIdx.x;
  const auto for_each = [&](auto&& fn, int begin = 0, int end = Config::kVecs) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int col = column_of<kVec, kVecs>(j, first, tile);
      if (j >= begin && j < end && row_exists && col < last) fn(j, col);
    }
  };
  if (blockIdx.y == 0 && blockIdx.z == 0) prefetch_weights(problem, for_each);
  ptx::launch_dependents();
  ptx::wait_for_dependency();

  const int64_t x0_row = !row_exists ? -1 : Config::kAll ? row_in_subset(problem.x0_subset, row, problem.x0_rows) : row;
  PartExchange exchange(&shared_memory<Part>(), arrived, Config::kTiled || Config::kWhole ? 1 : gridDim.x);
  const Sources<Config> sources(p, row, x0_row);
  Branches<Config> branches[kVecs], ends;
  for_each([&](int j, int col) {
    sources.load(branches[j], p, col);
    if (kRagged && j == 0 && col < 0) sources.load_ends(ends, p, col);
  });
  exchange.wait_for_blocks();
  const RowScaling scaling(problem, row, x0_row);
  AnyVec<kVec> drawn[kVecs];
  for_each([&](int j, int col) { drawn[j] = scaling.draw<Config>(col); });
  HeldRow<Config> h;
  char* const h_row = row_of(p.h, Config::h(p.h.dtype), row);
  for_each([&](int j, int col) {
    if (kRagged && j == 0 && col < 0) sources.add_ends(branches[0], ends, p, col);
    if constexpr (Config::kAlone) {
      h.vecs[j] = branches[j].x0;
    } else {
      sum_branches<Config>(h.vecs[j], branches[j], p, scaling, drawn[j], col, /*store_masks=*/true);
      if (p.h.data) store_row<kRagged>(h_row, Config::h(p.h.dtype), col, problem.cols, h.vecs[j]);
    }
  });

  if (Config::kTiled && !row_exists) return;
  const Moments found = moments_of_row<Config>(p, exchange, row, row_exists, tile, h, for_each);
  store_normalised<Config>(p, found, row, row_exists, h, for_each);
}

// Computes mean and rstd of each row that is too wide for a cluster; one block per row.
template <typename Config>
__global__ __launch_bounds__(kMaxThreads) void moments_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kVec = Config::kVec;
  __shared__ Part parts[kMaxWarps];
  __shared__ PartExchange::Barriers arrived;
  ptx::launch_dependents();
  ptx::wait_for_dependency();
  PartExchange exchange(parts, arrived, /*blocks=*/1);
  const int64_t row = blockIdx.x, x0_row = row_in_subset(p.problem.x0_subset, row, p.problem.x0_rows);
  const RowScaling scaling(p.problem, row, x0_row);
  const Sources<Config> sources(p, row, x0_row);
  const int first = first_column<kVec, Config::kRagged>(p.out, Config::x(p.out.dtype), row);
  const int last = last_column<Config::kRagged>(first, p.problem.cols);
  const Moments found = row_moments<Config>(p, exchange, /*tile=*/0, [&](auto&& visit) {
    for (int col = first + static_cast<int>(threadIdx.x) * kVec; col < last; col += blockDim.x * kVec) {
      Branches<Config> branches;
      float h[kVec];
      sources.load(branches, p, col);
      if (Config::kRagged && col < 0) {
        Branches<Config> ends;
        sources.load_ends(ends, p, col);
        sources.add_ends(branches, ends, p, col);
      }
      sum_branches<Config>(h, branches, p, scaling, scaling.draw<Config>(col), col, /*store_masks=*/false);
      visit(h, col);
    }
  });
  if (threadIdx.x == 0) p.mean[row] = found.mean, p.rstd[row] = found.rstd;
}

// Returns the grid of blocks with `rows` rows each. The tiles of a row are neighbours in x, since they form a cluster.
inline dim3 grid_of(int64_t blocks, int tiles) {
  constexpr int kMaxY = 65535;
  const int z = static_cast<int>(ceil_div(blocks, kMaxY));
  return z == 0 ? dim3(0) : dim3(tiles, static_cast<unsigned>(ceil_div(blocks, z)), z);
}

template <typename Config>
void run_fwd(const FwdParams& p, const RowShape& shape, cudaStream_t stream) {
  if constexpr (Config::kTiled) {
    launch<moments_kernel<Config>>({.grid = dim3(p.problem.rows), .block = dim3(kMaxThreads), .early = true}, p,
                                   stream);
  }
  const int warps = shape.tiles > 1 ? shape.tiles * kMaxWarps : shape.rows * ceil_div(shape.lanes, 32);
  launch<fwd_kernel<Config>>({.grid = grid_of(ceil_div(p.problem.rows, shape.rows), shape.tiles),
                              .block = dim3(shape.lanes, shape.rows),
                              .shared_bytes = Config::kTiled ? 0 : warps * static_cast<int>(sizeof(Part)),
                              .cluster = Config::kTiled ? 1 : shape.tiles,
                              .early = true},
                             p, stream);
}

}  // namespace flash::layer_norm
