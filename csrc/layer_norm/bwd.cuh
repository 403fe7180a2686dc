// The norm of a sum of branches, backward. With y = (h - centre) rstd and g = weight dout + weight1 dout1,
//
//   dtotal = rstd (g - mean(g) - y mean(g y)) + dh          without mean(g) for RMSNorm
//   dresidual = dtotal,   dx1 = drop(dtotal),   dx0 = drop(rowscale dtotal) colscale
//   dweight = sum of dout y,   dbias = sum of dout,   dcolscale = sum of drop(rowscale dtotal) x0      over the rows
//
// Blocks stay, a row at a time for each group of lanes, and sum the gradients of parameters in registers: a thread owns
// the same columns of every row. Each block writes its sums as one part; finish_kernel adds the parts up, always in the
// same order. The next rows are copied to shared memory meanwhile, where a thread reads what it has copied itself, or
// its warp has: no barrier but that of the row's two sums. h and dout are read from there twice, before and after
// these.
//
// Rows that are too wide for a block are cut into tiles of columns, and a cluster takes the place of a block. If rows
// are too wide for that too, sums_kernel finds the two sums of each row first, and then the blocks of a tile do the
// rest.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "layer_norm/row.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "tile/shared.cuh"
#include "tile/vec.cuh"

namespace flash::layer_norm {

template <Types kTypes, int kVec_, int kVecs_, Extent kExtent_, bool kRagged_ = false, bool kTiled_ = false>
struct BwdConfig : Elements<kTypes> {
  static constexpr int kVec = kVec_;    // elements per access
  static constexpr int kVecs = kVecs_;  // accesses per thread and matrix
  static constexpr Extent kExtent = kExtent_;
  static constexpr bool kRagged = kRagged_;  // vectors need not be aligned
  static constexpr bool kTiled = kTiled_;    // a block has part of a row, whose sums are known
  static constexpr int kParameters = kExtent == Extent::kAll ? BwdParams::kParameters : 2;
  static constexpr bool kHoldsWeight = kExtent != Extent::kAll;  // in registers, of which the sums leave enough

  static constexpr int kWarpBytes = warp_slots(kRagged) * kSlotBytes;
  static constexpr int kMatrixBytes = kVecs * kMaxThreads / 32 * kWarpBytes;
  static constexpr int kRingBytes = ring_bytes(kVecs, kRagged);
  static_assert(kStages * kCopiedMatrices * kSlotBytes >= kVec * 4, "sums of a parameter take the place of the ring");
};

// Which rows of the matrices make row `row` of h; negative if there is none.
template <typename Config>
struct Rows {
  int64_t h, out, x0;

  __device__ Rows(const Problem& p, int64_t row) : h(row < p.rows ? row : -1), out(h), x0(h) {
    if (Config::kExtent != Extent::kPlain && h >= 0 && p.x0_subset != nullptr) {
      out = row_in_subset(p.out_subset, row, p.out_rows);
      x0 = row_in_subset(p.x0_subset, row, p.x0_rows);
    }
  }
};

// Slots of shared memory, an access each, that a warp copies into and reads from: it alone, so that it need not wait
// for others. Neighbouring threads have neighbouring slots.
template <typename Config>
class Ring {
 public:
  static constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  enum Which { kH, kDout, kDh };

  __device__ explicit Ring(int cols) : cols_(cols) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    base_ = &shared_memory<char>() + thread / 32 * Config::kWarpBytes + thread % 32 * kSlotBytes;
  }

  // Starts the copies of a row.
  __device__ void start(const BwdParams& p, int stage, const Rows<Config>& rows) {
    if (Config::kRagged) __syncwarp();  // others have read what was there
    copy(stage, kH, p.h, Config::h(p.h.dtype), rows.h);
    copy(stage, kDout, p.dout, Config::x(p.dout.dtype), rows.out);
    if (p.dh.data) copy(stage, kDh, p.dh, Config::h(p.dh.dtype), rows.h);
    ptx::commit_copies();
  }

  // Waits for the copies of all rows but the newest.
  __device__ void wait() const {
    ptx::wait_copies<kStages - 1>();
    if (Config::kRagged) __syncwarp();
  }

  // Moves the vectors of a row that has come to slots of their own, from the two that hold them.
  __device__ void align(const BwdParams& p, int stage, const Rows<Config>& rows) const {
    if constexpr (Config::kRagged) {
      align(stage, kH, p.h, Config::h(p.h.dtype), rows.h);
      align(stage, kDout, p.dout, Config::x(p.dout.dtype), rows.out);
      if (p.dh.data) align(stage, kDh, p.dh, Config::h(p.dh.dtype), rows.h);
    }
  }

  // Reads a thread's j-th vector, of `col` and the columns behind.
  __device__ void read(float (&values)[kVec], int stage, Which which, int j, DType dtype, int col) const {
    widen(values, *vector(stage, which, j), dtype);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = !Config::kRagged || col + i < cols_ ? values[i] : 0.f;
  }

 private:
  __device__ AnyVec<kVec>* vector(int stage, Which which, int j) const {
    return reinterpret_cast<AnyVec<kVec>*>(slot(stage, which, j));
  }

  template <typename Data>
  __device__ void align(int stage, Which which, const Data& matrix, DType dtype, int64_t row) const {
    const int skip = misalignment<kVec>(element_address(matrix.data, row * matrix.stride, dtype), dtype);
    if (skip == 0) return;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      AnyVec<kVec>* own = vector(stage, which, j);
      const AnyVec<kVec> vec = shifted(own[0], own[1], skip, dtype);
      __syncwarp();
      own[0] = vec;
    }
  }

  __device__ char* slot(int stage, Which which, int j) const {
    return base_ + (stage * kCopiedMatrices + which) * Config::kMatrixBytes +
           j * (kMaxThreads / 32 * Config::kWarpBytes);
  }

  // A row that does not exist reads as zeros.
  template <typename Data>
  __device__ void copy(int stage, Which which, const Data& matrix, DType dtype, int64_t row) {
    const char* source = element_address(matrix.data, row * matrix.stride, dtype);
    const int skip = Config::kRagged ? misalignment<kVec>(source, dtype) : 0;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int col = column_of<kVec, kVecs>(j);
      const int64_t begin = byte_offset(col, dtype) - skip, end = byte_offset(cols_, dtype);
      copy(slot(stage, which, j), source + begin, dtype, row >= 0 && begin < end);
      if (Config::kRagged && threadIdx.x % 32 == 31) {
        const int64_t next = begin + kVec * size_of(dtype);
        copy(slot(stage, which, j) + kSlotBytes, source + next, dtype, row >= 0 && skip > 0 && next < end);
      }
    }
  }

  __device__ static void copy(char* slot, const char* source, DType dtype, bool exists) {
    const uint32_t target = ptx::shared_address(slot);
    if (kVec == 8 || dtype == DType::kFloat32) {
      ptx::copy_async(target, source, exists);
    } else {
      ptx::copy_half_async(target, source, exists);
    }
  }

  int cols_;
  char* base_;
};

// The gradients of parameters that a thread sums, and the weights of its columns.
template <typename Config>
struct Columns {
  static constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  enum Parameter { kWeight, kBias, kWeight1, kBias1, kColscale };

  float sums[Config::kParameters][kVecs][kVec] = {};
  float weight[Config::kHoldsWeight ? kVecs : 1][kVec] = {};

  __device__ explicit Columns(const Problem& p) {
    if constexpr (Config::kHoldsWeight) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int col = column_of<kVec, kVecs>(j);
        if (col < p.cols) load_weight<Config::kRagged>(weight[j], p, p.weight, col);
      }
    }
  }

  // g = weight dout
  __device__ void weigh(float (&g)[kVec], const float (&dout)[kVec], const Problem& p, int j, int col) const {
    if constexpr (Config::kHoldsWeight) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) g[i] = weight[j][i] * dout[i];
    } else {
      load_weight<Config::kRagged>(g, p, p.weight, col);
      multiply(g, dout);
    }
  }

  __device__ void add_up(int parameter, int j, const float (&dout)[kVec], const float (&y)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sums[parameter][j][i] += dout[i] * y[i];
      sums[parameter + 1][j][i] += dout[i];
    }
  }
};

// fn(j, col) for the thread's vectors of a row.
template <typename Config, typename Fn>
__device__ void for_each_vector(const Problem& p, Fn&& fn) {
#pragma unroll
  for (int j = 0; j < Config::kVecs; ++j) {
    const int col = column_of<Config::kVec, Config::kVecs>(j);
    if (takes_part<Config::kVec, Config::kRagged>(col, p.cols)) fn(j, col);
  }
}

// A row at work.
template <typename Config>
struct Row {
  static constexpr int kVec = Config::kVec;
  static constexpr bool kRagged = Config::kRagged;
  const BwdParams& p;
  const Ring<Config>& ring;
  Columns<Config>& columns;
  Rows<Config> rows;
  int stage;
  float centre, rstd;
  Dropout dropout;
  uint32_t kept0[Config::kVecs] = {};  // elements of x0

  // Finds out what is kept of x0, which takes long enough to do it while the row is on its way.
  __device__ void draw() {
    if (Config::kExtent == Extent::kPlain || !p.dx0.data || rows.x0 < 0) return;
    for_each_vector<Config>(p.problem, [&](int j, int col) { kept0[j] = kept(p.mask0, rows.x0, col, 0); });
  }

  // y and g of a vector; if kAdding, what the row gives to the gradients of weights and biases is added to these.
  template <bool kAdding>
  __device__ void normal_and_weighted(float (&y)[kVec], float (&g)[kVec], int j, int col) const {
    using C = Columns<Config>;
    float dout[kVec];
    ring.read(y, stage, Ring<Config>::kH, j, Config::h(p.h.dtype), col);
    ring.read(dout, stage, Ring<Config>::kDout, j, Config::x(p.dout.dtype), col);
    normalise(y, centre, rstd);
    columns.weigh(g, dout, p.problem, j, col);
    if (kAdding) columns.add_up(C::kWeight, j, dout, y);
    if constexpr (Config::kExtent == Extent::kAll) {
      if (!p.dout1.data || rows.out < 0) return;
      float weight[kVec];
      widen(dout, load_row<kRagged, kVec>(p.dout1, p.dout1.dtype, rows.out, col, p.problem.cols), p.dout1.dtype);
      load_weight<kRagged>(weight, p.problem, p.problem.weight1, col);
      multiply(weight, dout);
      add(g, weight);
      if (kAdding) columns.add_up(C::kWeight1, j, dout, y);
    }
  }

  // The gradient of h from the sums of g and of g y over the row.
  __device__ void total(float (&dtotal)[kVec], const float (&y)[kVec], const float (&g)[kVec], float sum_g,
                        float sum_gy, int j, int col) const {
    const float scale = rstd / p.problem.cols, shift = p.problem.is_rms_norm ? 0.f : sum_g * scale;
    fill(dtotal, 0.f);
    if (p.dh.data) ring.read(dtotal, stage, Ring<Config>::kDh, j, Config::h(p.dh.dtype), col);
#pragma unroll
    for (int i = 0; i < kVec; ++i) dtotal[i] += g[i] * rstd - shift - y[i] * (sum_gy * scale);
  }

  // Stores the gradients of the branches, of a column scale also the sum.
  __device__ void store_branches(float (&dtotal)[kVec], int j, int col) const {
    if (p.dresidual.data) store(p.dresidual, Config::h(p.dresidual.dtype), rows.h, col, dtotal);
    if constexpr (Config::kExtent == Extent::kPlain) {
      if (p.dx0.data) store(p.dx0, Config::x(p.dx0.dtype), rows.h, col, dtotal);
    } else {
      store_scaled(dtotal, j, col);
    }
  }

 private:
  __device__ void store(const Matrix<>& matrix, DType dtype, int64_t row, int col, const float (&values)[kVec]) const {
    store_row<kRagged>(matrix, dtype, row, col, p.problem.cols, values);
  }

  __device__ uint32_t kept(const uint8_t* mask, int64_t row, int col, int branch) const {
    return mask == nullptr ? dropout.kept<kVec>(row, col, branch)
                           : load_mask<kVec>(mask, row * p.problem.cols, col, p.problem.cols);
  }

  __device__ void store_scaled(float (&dtotal)[kVec], int j, int col) const {
    const Problem& problem = p.problem;
    float branch[kVec];
    if (p.dx1.data) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) branch[i] = dtotal[i] * problem.keep_scale;
      drop(branch, kept(p.mask1, rows.h, col, 1));
      store(p.dx1, p.dx1.dtype, rows.h, col, branch);
    }
    if (!p.dx0.data || rows.x0 < 0) return;
    multiply(dtotal, scale_of_row(problem, rows.x0));
    drop(dtotal, kept0[j]);
    if constexpr (Config::kExtent == Extent::kAll) {
      if (problem.colscale.data) {
        widen(branch, load_row<kRagged, kVec>(p.x0, p.x0.dtype, rows.x0, col, problem.cols), p.x0.dtype);
#pragma unroll
        for (int i = 0; i < kVec; ++i) columns.sums[Columns<Config>::kColscale][j][i] += branch[i] * dtotal[i];
        load_columns<kRagged>(branch, problem.colscale, col, problem.cols, 1.f);
        multiply(dtotal, branch);
      }
    }
    store(p.dx0, Config::x(p.dx0.dtype), rows.x0, col, dtotal);
  }
};

// Adds what the groups of a block have summed, and writes it as part blockIdx.y. Groups of fewer lanes than a warp add
// up within it; then what the others have goes through the ring's memory, one parameter at a time.
template <typename Config>
__device__ void store_part(const BwdParams& p, Columns<Config>& columns) {
  constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  const int lanes = blockDim.x, width = max(lanes, 32);
  const int thread = threadIdx.y * lanes + threadIdx.x, groups = blockDim.x * blockDim.y / width;
  float* exchange = &shared_memory<float>();
#pragma unroll
  for (int parameter = 0; parameter < Config::kParameters; ++parameter) {
    if (!p.dparameters[parameter].data) continue;
    auto& sums = columns.sums[parameter];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < lanes) continue;
#pragma unroll
      for (int n = 0; n < kVecs * kVec; ++n) {
        float& sum = sums[n / kVec][n % kVec];
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
    }
    __syncthreads();
    if (thread >= width) {
#pragma unroll
      for (int n = 0; n < kVecs * kVec; ++n) exchange[n * kMaxThreads + thread] = sums[n / kVec][n % kVec];
    }
    __syncthreads();
    if (thread >= lanes) continue;
    float* part =
        p.parts + (int64_t{blockIdx.y} * BwdParams::kParameters + parameter) * BwdParams::part_cols(p.problem.cols);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int col = column_of<kVec, kVecs>(j);
      if (col >= p.problem.cols) continue;
#pragma unroll
      for (int i = 0; i < kVec; i += 4) {  // one by one, neighbours would be written in eight turns
        Vec<float, 4> total;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          total[n] = sums[j][i + n];
          for (int group = 1; group < groups; ++group) {
            total[n] += exchange[(j * kVec + i + n) * kMaxThreads + group * width + thread];
          }
        }
        store(part + col + i, total);
      }
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(kMaxThreads, 1) void bwd_kernel(const __grid_constant__ BwdParams p) {
  constexpr int kVec = Config::kVec;
  __shared__ RowSums::Shared shared;
  const Problem& problem = p.problem;
  Ring<Config> ring(problem.cols);
  Columns<Config> columns(problem);
  const Dropout dropout(problem);

  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  int64_t index = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) ring.start(p, stage, Rows<Config>(problem, index + stage * step));
  RowSums row_sums(shared, Config::kTiled ? 1 : gridDim.x);
  int stage = 0;
  const auto moment = [&](const float* of, int64_t row) { return row < problem.rows ? __ldg(of + row) : 0.f; };
  float mean = moment(p.mean, index), rstd = moment(p.rstd, index);
  // Groups of a block take turns together, since a warp may hold several of them.
  for (int64_t first = int64_t{blockIdx.y} * blockDim.y; first < problem.rows; first += step, index += step) {
    const int next = stage + 1 < kStages ? stage + 1 : 0, last = kStages == 2 ? next
                                                                 : stage > 0  ? stage - 1
                                                                              : kStages - 1;
    ring.start(p, last, Rows<Config>(problem, index + (kStages - 1) * step));
    const float next_mean = moment(p.mean, index + step), next_rstd = moment(p.rstd, index + step);
    const float centre = problem.is_rms_norm ? 0.f : mean;
    Row<Config> row{p, ring, columns, Rows<Config>(problem, index), stage, centre, rstd, dropout};
    row.draw();
    ring.wait();
    ring.align(p, stage, row.rows);
    float sums[2] = {0.f, 0.f};
    for_each_vector<Config>(problem, [&](int j, int col) {
      float y[kVec], g[kVec];
      row.template normal_and_weighted<true>(y, g, j, col);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[0] += g[i], sums[1] += g[i] * y[i];
    });
    if constexpr (!Config::kTiled) {
      row_sums.add_up(sums);
    } else if (row.rows.h >= 0) {
      sums[0] = p.sums[2 * row.rows.h], sums[1] = p.sums[2 * row.rows.h + 1];
    }
    if (row.rows.h >= 0) {
      for_each_vector<Config>(problem, [&](int j, int col) {
        float y[kVec], g[kVec], dtotal[kVec];
        row.template normal_and_weighted<false>(y, g, j, col);
        row.total(dtotal, y, g, sums[0], sums[1], j, col);
        row.store_branches(dtotal, j, col);
        if (Config::kExtent != Extent::kPlain && p.out.data) {
          store_affine<Config::kRagged>(p.out, p.out.dtype, row.rows.h, col, problem, problem.weight, problem.bias, y);
        }
      });
    }
    mean = next_mean, rstd = next_rstd, stage = next;
  }
  ptx::wait_copies<0>();
  ptx::launch_dependents();
  store_part(p, columns);
}

// The two sums of a row too wide for a cluster to hold: a block for each row.
template <typename Config>
__global__ __launch_bounds__(kMaxThreads) void sums_kernel(const __grid_constant__ BwdParams p) {
  constexpr int kVec = Config::kVec;
  constexpr bool kRagged = Config::kRagged;
  __shared__ RowSums::Shared shared;
  RowSums row_sums(shared, /*blocks=*/1);
  const Problem& problem = p.problem;
  const Rows<Config> rows(problem, blockIdx.x);
  const float centre = problem.is_rms_norm ? 0.f : p.mean[rows.h], rstd = p.rstd[rows.h];
  float sums[2] = {0.f, 0.f};
  const auto add_up = [&](const Matrix<const void>& dout, const Vector& weight, int col) {
    float y[kVec], g[kVec], w[kVec];
    widen(y, load_row<kRagged, kVec>(p.h, p.h.dtype, rows.h, col, problem.cols), p.h.dtype);
    normalise(y, centre, rstd);
    widen(g, load_row<kRagged, kVec>(dout, dout.dtype, rows.out, col, problem.cols), dout.dtype);
    load_weight<kRagged>(w, problem, weight, col);
    multiply(g, w);
    for (int i = 0; i < kVec; ++i) sums[0] += g[i], sums[1] += g[i] * y[i];
  };
  for (int col = threadIdx.x * kVec; rows.out >= 0 && col < problem.cols; col += kMaxThreads * kVec) {
    add_up(p.dout, problem.weight, col);
    if (p.dout1.data) add_up(p.dout1, problem.weight1, col);
  }
  row_sums.add_up(sums);
  if (threadIdx.x == 0) p.sums[2 * rows.h] = sums[0], p.sums[2 * rows.h + 1] = sums[1];
}

// Adds up the parts of 32 columns of a parameter: thread (x, y) those whose number is y modulo kFinishRows.
constexpr int kFinishRows = 32;

struct FinishParams {
  BwdParams bwd;
  int num_parts;
};

static __global__ __launch_bounds__(32 * kFinishRows) void finish_kernel(const __grid_constant__ FinishParams p) {
  const Matrix<>& target = p.bwd.dparameters[blockIdx.y];
  if (!target.data) return;
  ptx::wait_for_dependency();
  __shared__ float partial[kFinishRows][32];
  const int cols = p.bwd.problem.cols, col = blockIdx.x * 32 + threadIdx.x;
  float sum = 0.f;
  if (col < cols) {
#pragma unroll 4
    for (int part = threadIdx.y; part < p.num_parts; part += kFinishRows) {
      sum += p.bwd.parts[(int64_t{part} * BwdParams::kParameters + blockIdx.y) * BwdParams::part_cols(cols) + col];
    }
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  float total[1] = {0.f};
#pragma unroll
  for (int y = 0; y < kFinishRows; ++y) total[0] += partial[y][threadIdx.x];
  store_any(target.data, col, target.dtype, total);
}

// How many clusters of `tiles` blocks run at once.
template <typename Config>
int clusters_at_once(const RowShape& shape) {
  const dim3 grid(shape.tiles), block(shape.lanes);
  allow_shared_memory<bwd_kernel<Config>>(
      {.grid = grid, .block = block, .shared_bytes = Config::kRingBytes, .cluster = shape.tiles});
  cudaLaunchAttribute attribute{.id = cudaLaunchAttributeClusterDimension};
  attribute.val.clusterDim = {static_cast<unsigned>(shape.tiles), 1, 1};
  cudaLaunchConfig_t config{.gridDim = grid, .blockDim = block};
  config.dynamicSmemBytes = Config::kRingBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, bwd_kernel<Config>, &config), "cudaOccupancyMaxActiveClusters");
  return std::max(count, 1);
}

template <typename Config>
void run_bwd(const BwdParams& p, const RowShape& shape, cudaStream_t stream) {
  if constexpr (Config::kTiled) {
    launch<sums_kernel<Config>>({.grid = dim3(p.problem.rows), .block = dim3(kMaxThreads)}, p, stream);
  }
  const int cluster = Config::kTiled ? 1 : shape.tiles;
  int blocks = static_cast<int>(std::min<int64_t>(p.max_parts, ceil_div(p.problem.rows, shape.rows)));
  if (cluster > 1) blocks = std::min(blocks, clusters_at_once<Config>(shape));
  launch<bwd_kernel<Config>>({.grid = dim3(shape.tiles, blocks),
                              .block = dim3(shape.lanes, shape.rows),
                              .shared_bytes = Config::kRingBytes,
                              .cluster = cluster},
                             p, stream);
  launch<finish_kernel>({.grid = dim3(ceil_div(p.problem.cols, 32), BwdParams::kParameters),
                         .block = dim3(32, kFinishRows),
                         .early = true},
                        FinishParams{p, blocks}, stream);
}

}  // namespace flash::layer_norm
