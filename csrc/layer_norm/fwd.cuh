// The norm of a sum of branches, forward:
//
//   h = drop(rowscale x0) colscale + drop(x1) + residual,   y = (h - centre) rstd,   out = weight y + bias
//
// with centre = mean(h) and rstd = 1 / sqrt(var(h) + eps) for LayerNorm, centre = 0 and rstd = 1 / sqrt(mean(h^2) +
// eps) for RMSNorm. Maths in fp32; of what is stored, only h is rounded before others use it, in the backward.
//
// A row is read once and stays in registers, so that mean and variance are sums over it one after the other. All loads
// of a thread are under way before the first is used. A row that is too wide for a block is read twice: by a block that
// finds its moments, then by blocks that have a tile of it each.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "layer_norm/row.cuh"

namespace flash::layer_norm {

template <Types kTypes, int kVec_, int kVecs_, bool kGeneral_, bool kTiled_ = false>
struct FwdConfig : Elements<kTypes> {
  static constexpr int kVec = kVec_;           // elements per access
  static constexpr int kVecs = kVecs_;         // accesses per thread and matrix
  static constexpr bool kGeneral = kGeneral_;  // more than x0, residual, weight and bias
  static constexpr bool kTiled = kTiled_;      // a block has part of a row, whose moments are known

  // Blocks of kMaxThreads that a multiprocessor has registers for. H200, 16384 x 4096 in bf16, GB/s: 64 registers 3969,
  // 74 (weight and bias loaded early) 3728, 40 2002.
  static constexpr int kBlocks = !kGeneral && kVecs <= 2 ? 2 : 1;
};

// What is summed to a vector of h.
template <int kVec>
struct Branches {
  AnyVec<kVec> x0, x1, residual;
};

template <typename Config, int kVec = Config::kVec>
__device__ void load_branches(Branches<kVec>& vec, const FwdParams& p, int64_t row, int64_t x0_row, int col) {
  const auto load = [&](const auto& matrix, DType dtype, int64_t row) {
    return load_any<kVec>(matrix.data, row * matrix.stride + col, dtype);
  };
  if (!Config::kGeneral || x0_row >= 0) vec.x0 = load(p.x0, Config::x(p.x0.dtype), x0_row);
  if (Config::kGeneral && p.x1.data) vec.x1 = load(p.x1, p.x1.dtype, row);
  if (p.residual.data) vec.residual = load(p.residual, Config::h(p.residual.dtype), row);
}

// A byte for each column: 1 for those that are kept.
template <int kVec>
__device__ void store_mask(uint8_t* mask, int64_t index, uint32_t kept) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) mask[index + i] = kept >> i & 1;
}

// How a row's branches are dropped and scaled.
struct RowScaling {
  Dropout dropout;
  int64_t row, x0_row;
  float scale;  // of x0

  __device__ RowScaling(const Problem& p, int64_t row, int64_t x0_row)
      : dropout(p), row(row), x0_row(x0_row), scale(x0_row >= 0 ? scale_of_row(p, x0_row) : 0.f) {}
};

template <typename Config, int kVec = Config::kVec>
__device__ void sum_branches(float (&h)[kVec], const Branches<kVec>& vec, const FwdParams& p, const RowScaling& row,
                             int col, bool store_masks) {
  const Problem& problem = p.problem;
  float branch[kVec];
  fill(h, 0.f);
  if (row.x0_row >= 0) {
    const uint32_t kept = row.dropout.kept<kVec>(row.x0_row, col, 0);
    widen(h, vec.x0, Config::x(p.x0.dtype));
    multiply(h, row.scale);
    drop(h, kept);
    if (problem.colscale.data) {
      load_columns(branch, problem.colscale, col, 1.f);
      multiply(h, branch);
    }
    if (store_masks && p.mask0) store_mask<kVec>(p.mask0, row.x0_row * problem.cols + col, kept);
  }
  if (p.x1.data) {
    const uint32_t kept = row.dropout.kept<kVec>(row.row, col, 1);
    widen(branch, vec.x1, p.x1.dtype);
    multiply(branch, problem.keep_scale);
    drop(branch, kept);
    add(h, branch);
    if (store_masks && p.mask1) store_mask<kVec>(p.mask1, row.row * problem.cols + col, kept);
  }
}

// The sum of a vector's branches.
template <typename Config, int kVec = Config::kVec>
__device__ void sum_all(float (&h)[kVec], const Branches<kVec>& vec, const FwdParams& p, const RowScaling& row, int col,
                        bool store_masks) {
  if constexpr (Config::kGeneral) {
    sum_branches<Config>(h, vec, p, row, col, store_masks);
  } else {
    widen(h, vec.x0, Config::x(p.x0.dtype));
  }
  if (p.residual.data) {
    float residual[kVec];
    widen(residual, vec.residual, Config::h(p.residual.dtype));
    add(h, residual);
  }
}

struct Moments {
  float mean, rstd;
};

// Of a row, where walk(visit) calls visit(h) for each of the thread's vectors of it.
template <typename Walk>
__device__ Moments row_moments(const FwdParams& p, RowSums& sums, Walk&& walk) {
  const float scale = 1.f / p.problem.cols;
  if (p.problem.is_rms_norm) {
    float both[2] = {0.f, 0.f};
    walk([&](const auto& h) {
      for (float value : h) both[0] += value, both[1] += value * value;
    });
    sums.add_up(both);
    return {both[0] * scale, rsqrtf(both[1] * scale + p.eps)};
  }
  float sum[1] = {0.f}, squares[1] = {0.f};
  walk([&](const auto& h) {
    for (float value : h) sum[0] += value;
  });
  sums.add_up(sum);
  const float mean = sum[0] * scale;
  walk([&](const auto& h) {
    for (float value : h) squares[0] += (value - mean) * (value - mean);
  });
  sums.add_up(squares);
  return {mean, rsqrtf(squares[0] * scale + p.eps)};
}

template <typename Config>
__global__ __launch_bounds__(kMaxThreads, Config::kBlocks) void fwd_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  __shared__ RowSums::Shared shared;
  RowSums sums(shared);
  const Problem& problem = p.problem;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool row_exists = row < problem.rows;
  const int64_t x0_row = !row_exists        ? -1
                         : Config::kGeneral ? row_in_subset(problem.x0_subset, row, problem.x0_rows)
                                            : row;
  const auto for_each = [&](auto&& fn) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int col = column_of<kVec, kVecs>(j);
      if (row_exists && col < problem.cols) fn(j, col);
    }
  };

  Branches<kVec> branches[kVecs];
  for_each([&](int j, int col) { load_branches<Config>(branches[j], p, row, x0_row, col); });
  const RowScaling scaling(problem, row, x0_row);
  float h[kVecs][kVec];
  for_each([&](int j, int col) {
    sum_all<Config>(h[j], branches[j], p, scaling, col, /*store_masks=*/true);
    if (p.h.data) store_row(p.h, Config::h(p.h.dtype), row, col, h[j]);
  });

  Moments found;
  if constexpr (Config::kTiled) {
    if (!row_exists) return;
    found = {p.mean[row], p.rstd[row]};
  } else {
    found = row_moments(p, sums, [&](auto&& visit) { for_each([&](int j, int) { visit(h[j]); }); });
    if (row_exists && threadIdx.x == 0) p.mean[row] = found.mean, p.rstd[row] = found.rstd;
  }
  const int64_t out_row =
      Config::kGeneral && row_exists ? row_in_subset(problem.out_subset, row, problem.out_rows) : row;
  if (out_row < 0) return;
  const float centre = problem.is_rms_norm ? 0.f : found.mean;
  const auto store_out = [&](auto kWeights) {
    for_each([&](int j, int col) {
      float weight[kVec], bias[kVec];
      load_columns<kWeights>(weight, problem.weight, col, 0.f);
      load_columns<kWeights>(bias, problem.bias, col, 0.f);
      normalise(h[j], centre, found.rstd);
      apply_weight(h[j], weight, bias, problem);
      store_row(p.out, Config::kX, out_row, col, h[j]);
    });
  };
  if constexpr (Config::kGeneral) {
    for_each([&](int j, int col) {
      normalise(h[j], centre, found.rstd);
      store_affine(p.out, Config::x(p.out.dtype), out_row, col, problem, problem.weight, problem.bias, h[j]);
      if (p.out1.data) {
        store_affine(p.out1, Config::x(p.out1.dtype), out_row, col, problem, problem.weight1, problem.bias1, h[j]);
      }
    });
  } else if (problem.weight.dtype == DType::kFloat32) {
    store_out(Constant<DType::kFloat32>{});
  } else {
    store_out(Constant<Config::kX>{});
  }
}

// Mean and rstd of a row too wide for one block to hold: a block for each row.
template <typename Config>
__global__ __launch_bounds__(kMaxThreads) void moments_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kVec = Config::kVec;
  __shared__ RowSums::Shared shared;
  RowSums sums(shared);
  const int64_t row = blockIdx.x, x0_row = row_in_subset(p.problem.x0_subset, row, p.problem.x0_rows);
  const RowScaling scaling(p.problem, row, x0_row);
  const Moments found = row_moments(p, sums, [&](auto&& visit) {
    for (int col = threadIdx.x * kVec; col < p.problem.cols; col += blockDim.x * kVec) {
      Branches<kVec> branches;
      float h[kVec];
      load_branches<Config>(branches, p, row, x0_row, col);
      sum_all<Config>(h, branches, p, scaling, col, /*store_masks=*/false);
      visit(h);
    }
  });
  if (threadIdx.x == 0) p.mean[row] = found.mean, p.rstd[row] = found.rstd;
}

template <typename Config>
void run_fwd(const FwdParams& p, const RowShape& shape, cudaStream_t stream) {
  if constexpr (Config::kTiled) {
    launch<moments_kernel<Config>>({.grid = dim3(p.problem.rows), .block = dim3(kMaxThreads)}, p, stream);
  }
  launch<fwd_kernel<Config>>(
      {.grid = dim3(ceil_div(p.problem.rows, shape.rows), shape.tiles), .block = dim3(shape.lanes, shape.rows)}, p,
      stream);
}

}  // namespace flash::layer_norm
