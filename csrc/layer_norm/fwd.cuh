// The norm of a sum of branches, forward:
//
//   h = drop(rowscale x0) colscale + drop(x1) + residual,   y = (h - centre) rstd,   out = weight y + bias
//
// with centre = mean(h) and rstd = 1 / sqrt(var(h) + eps) for LayerNorm, centre = 0 and rstd = 1 / sqrt(mean(h^2) +
// eps) for RMSNorm. Maths in fp32; of what is stored, only h is rounded before others use it, in the backward.
//
// A row is read once and stays in registers, so that mean and variance are sums over it one after the other. All loads
// of a thread are under way before the first is used. A row that is too wide for a block is a cluster's. If it is too
// wide for that too, it is read twice: by a block that finds its moments, then by blocks that have a tile of it each.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "layer_norm/row.cuh"

namespace flash::layer_norm {

template <Types kTypes, int kVec_, int kVecs_, Extent kExtent_, bool kRagged_ = false, bool kTiled_ = false>
struct FwdConfig : Elements<kTypes> {
  static constexpr int kVec = kVec_;    // elements per access
  static constexpr int kVecs = kVecs_;  // accesses per thread and matrix
  static constexpr Extent kExtent = kExtent_;
  static constexpr bool kRagged = kRagged_;  // vectors need not be aligned
  static constexpr bool kTiled = kTiled_;    // a block has part of a row, whose moments are known
  static constexpr bool kAll = kExtent == Extent::kAll;

  // Blocks of kMaxThreads that a multiprocessor has registers for. H200, 16384 x 4096 in bf16, GB/s: 64 registers 3969,
  // 74 (weight and bias loaded early) 3728, 40 2002; 8192 x 16384: 64, of which 8 bytes spill, 3945, 68 3633.
  static constexpr int kBlocks = kAll ? 1 : 2;
};

// What is summed to a vector of h.
template <typename Config>
struct Branches {
  RawVec<Config::kVec, Config::kRagged> x0, x1, residual;
};

template <typename Config>
__device__ void load_branches(Branches<Config>& vec, const FwdParams& p, int64_t row, int64_t x0_row, int col) {
  const auto load = [&](const auto& matrix, DType dtype, int64_t row) {
    return load_row<Config::kRagged, Config::kVec>(matrix, dtype, row, col, p.problem.cols);
  };
  if (!Config::kAll || x0_row >= 0) vec.x0 = load(p.x0, Config::x(p.x0.dtype), x0_row);
  if (Config::kAll && p.x1.data) vec.x1 = load(p.x1, p.x1.dtype, row);
  if (p.residual.data) vec.residual = load(p.residual, Config::h(p.residual.dtype), row);
}

// How a row's branches are dropped and scaled.
struct RowScaling {
  Dropout dropout;
  int64_t row, x0_row;
  float scale;  // of x0

  __device__ RowScaling(const Problem& p, int64_t row, int64_t x0_row)
      : dropout(p), row(row), x0_row(x0_row), scale(x0_row >= 0 ? scale_of_row(p, x0_row) : 0.f) {}

  // Which of x0's elements are kept.
  template <typename Config>
  __device__ uint32_t kept(int col) const {
    return Config::kExtent == Extent::kPlain ? 0 : dropout.kept<Config::kVec>(x0_row, col, 0);
  }
};

// The sum of a vector's branches; `kept` are x0's elements that are.
template <typename Config, int kVec = Config::kVec>
__device__ void sum_branches(float (&h)[kVec], const Branches<Config>& vec, const FwdParams& p, const RowScaling& row,
                             uint32_t kept, int col, bool store_masks) {
  const Problem& problem = p.problem;
  const auto drop_branch = [&](float (&values)[kVec], uint32_t kept, int64_t row_of_branch, uint8_t* mask) {
    drop(values, kept);
    if (store_masks && mask) store_mask<kVec>(mask, row_of_branch * problem.cols, col, problem.cols, kept);
  };
  fill(h, 0.f);
  if (!Config::kAll || row.x0_row >= 0) {
    widen(h, vec.x0, Config::x(p.x0.dtype));
    if constexpr (Config::kExtent != Extent::kPlain) {
      multiply(h, row.scale);
      drop_branch(h, kept, row.x0_row, p.mask0);
    }
  }
  float branch[kVec];
  if constexpr (Config::kAll) {
    if (row.x0_row >= 0 && problem.colscale.data) {
      load_columns<Config::kRagged>(branch, problem.colscale, col, problem.cols, 1.f);
      multiply(h, branch);
    }
    if (p.x1.data) {
      widen(branch, vec.x1, p.x1.dtype);
      multiply(branch, problem.keep_scale);
      drop_branch(branch, row.dropout.kept<kVec>(row.row, col, 1), row.row, p.mask1);
      add(h, branch);
    }
  }
  if (p.residual.data) {
    widen(branch, vec.residual, Config::h(p.residual.dtype));
    add(h, branch);
  }
}

struct Moments {
  float mean, rstd;
};

// Of a row, where walk(visit) calls visit(h, count) for each of the thread's vectors of it; the row ends behind the
// first `count` elements, and those that there are not are 0.
template <typename Walk>
__device__ Moments row_moments(const FwdParams& p, RowSums& sums, Walk&& walk) {
  const float scale = 1.f / p.problem.cols;
  if (p.problem.is_rms_norm) {
    float both[2] = {0.f, 0.f};
    walk([&](const auto& h, int) {
      for (float value : h) both[0] += value, both[1] += value * value;
    });
    sums.add_up(both);
    return {both[0] * scale, rsqrtf(both[1] * scale + p.eps)};
  }
  float sum[1] = {0.f}, squares[1] = {0.f};
  walk([&](const auto& h, int) {
    for (float value : h) sum[0] += value;
  });
  sums.add_up(sum);
  const float mean = sum[0] * scale;
  walk([&](const auto& h, int count) {
    int i = 0;
    for (float value : h) squares[0] += i++ < count ? (value - mean) * (value - mean) : 0.f;
  });
  sums.add_up(squares);
  return {mean, rsqrtf(squares[0] * scale + p.eps)};
}

// How many elements of a vector there are.
template <typename Config>
__device__ int count_from(int col, int cols) {
  return Config::kRagged ? cols - col : Config::kVec;
}

template <typename Config>
__global__ __launch_bounds__(kMaxThreads, Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  constexpr bool kRagged = Config::kRagged;
  __shared__ RowSums::Shared shared;
  const Problem& problem = p.problem;
  const int64_t row = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  const bool row_exists = row < problem.rows;
  const int64_t x0_row = !row_exists ? -1 : Config::kAll ? row_in_subset(problem.x0_subset, row, problem.x0_rows) : row;
  const auto for_each = [&](auto&& fn) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int col = column_of<kVec, kVecs>(j);
      if (row_exists && takes_part<kVec, kRagged>(col, problem.cols)) fn(j, col);
    }
  };

  Branches<Config> branches[kVecs];
  for_each([&](int j, int col) { load_branches<Config>(branches[j], p, row, x0_row, col); });
  RowSums sums(shared, Config::kTiled ? 1 : gridDim.x);
  const RowScaling scaling(problem, row, x0_row);
  uint32_t kept[kVecs];
  for_each([&](int j, int col) { kept[j] = scaling.kept<Config>(col); });
  float h[kVecs][kVec];
  for_each([&](int j, int col) {
    sum_branches<Config>(h[j], branches[j], p, scaling, kept[j], col, /*store_masks=*/true);
    if (p.h.data) store_row<kRagged>(p.h, Config::h(p.h.dtype), row, col, problem.cols, h[j]);
  });

  Moments found;
  if constexpr (Config::kTiled) {
    if (!row_exists) return;
    found = {p.mean[row], p.rstd[row]};
  } else {
    found = row_moments(p, sums, [&](auto&& visit) {
      for_each([&](int j, int col) { visit(h[j], count_from<Config>(col, problem.cols)); });
    });
    if (row_exists && blockIdx.x == 0 && threadIdx.x == 0) p.mean[row] = found.mean, p.rstd[row] = found.rstd;
  }
  const int64_t out_row = Config::kAll && row_exists ? row_in_subset(problem.out_subset, row, problem.out_rows) : row;
  if (out_row < 0) return;
  const float centre = problem.is_rms_norm ? 0.f : found.mean;
  const auto store_out = [&](auto kWeights) {
    for_each([&](int j, int col) {
      float weight[kVec], bias[kVec];
      load_columns<kWeights>(weight, problem.weight, col, 0.f);
      load_columns<kWeights>(bias, problem.bias, col, 0.f);
      normalise(h[j], centre, found.rstd);
      apply_weight(h[j], weight, bias, problem);
      store_row<false>(p.out, Config::kX, out_row, col, problem.cols, h[j]);
    });
  };
  if constexpr (Config::kAll || kRagged) {
    for_each([&](int j, int col) {
      normalise(h[j], centre, found.rstd);
      store_affine<kRagged>(p.out, Config::x(p.out.dtype), out_row, col, problem, problem.weight, problem.bias, h[j]);
      if (Config::kAll && p.out1.data) {
        store_affine<kRagged>(p.out1, Config::x(p.out1.dtype), out_row, col, problem, problem.weight1, problem.bias1,
                              h[j]);
      }
    });
  } else if (problem.weight.dtype == DType::kFloat32) {
    store_out(Constant<DType::kFloat32>{});
  } else {
    store_out(Constant<Config::kX>{});
  }
}

// Mean and rstd of a row too wide for a cluster to hold: a block for each row.
template <typename Config>
__global__ __launch_bounds__(kMaxThreads) void moments_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kVec = Config::kVec;
  __shared__ RowSums::Shared shared;
  RowSums sums(shared, /*blocks=*/1);
  const int64_t row = blockIdx.x, x0_row = row_in_subset(p.problem.x0_subset, row, p.problem.x0_rows);
  const RowScaling scaling(p.problem, row, x0_row);
  const Moments found = row_moments(p, sums, [&](auto&& visit) {
    for (int col = threadIdx.x * kVec; col < p.problem.cols; col += blockDim.x * kVec) {
      Branches<Config> branches;
      float h[kVec];
      load_branches<Config>(branches, p, row, x0_row, col);
      sum_branches<Config>(h, branches, p, scaling, scaling.kept<Config>(col), col, /*store_masks=*/false);
      visit(h, count_from<Config>(col, p.problem.cols));
    }
  });
  if (threadIdx.x == 0) p.mean[row] = found.mean, p.rstd[row] = found.rstd;
}

// The grid of blocks that have `rows` rows each: tiles side by side, since these are a cluster.
inline dim3 grid_of(int64_t blocks, int tiles) {
  constexpr int kMaxY = 65535;
  const int z = static_cast<int>(ceil_div(blocks, kMaxY));
  return z == 0 ? dim3(0) : dim3(tiles, static_cast<unsigned>(ceil_div(blocks, z)), z);
}

template <typename Config>
void run_fwd(const FwdParams& p, const RowShape& shape, cudaStream_t stream) {
  if constexpr (Config::kTiled) {
    launch<moments_kernel<Config>>({.grid = dim3(p.problem.rows), .block = dim3(kMaxThreads)}, p, stream);
  }
  launch<fwd_kernel<Config>>({.grid = grid_of(ceil_div(p.problem.rows, shape.rows), shape.tiles),
                              .block = dim3(shape.lanes, shape.rows),
                              .cluster = Config::kTiled ? 1 : shape.tiles},
                             p, stream);
}

}  // namespace flash::layer_norm
