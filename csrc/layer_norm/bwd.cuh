// The norm of a sum of branches, backward. With y = (h - centre) rstd and g = weight dout + weight1 dout1,
//
//   dtotal = rstd (g - mean(g) - y mean(g y)) + dh          without mean(g) for RMSNorm
//   dresidual = dtotal,   dx1 = drop(dtotal),   dx0 = drop(rowscale dtotal) colscale
//   dweight = sum of dout y,   dbias = sum of dout,   dcolscale = sum of drop(rowscale dtotal) x0      over the rows
//
// Each group of lanes of a block takes one row after the other and sums the gradients of parameters in registers, since
// a thread owns the same columns in every row. Each block writes its sums as one part; finish_kernel adds the parts,
// always in the same order. Which rows make a part depends on sizes alone, not on when a block runs. While a row is at
// work, the next rows are copied to shared memory. A thread reads only what it copied itself, so the only barrier is
// the one for the two sums of the row. h and dout are read from shared memory twice: before and after that barrier.
//
// A row that is too wide for a block is cut into tiles of columns, and a cluster takes the place of the block. If a row
// is too wide for a cluster too, sums_kernel first computes the two sums of each row, and then independent blocks, one
// per tile, do the rest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/launch.h"
#include "layer_norm/config.h"
#include "layer_norm/params.h"
#include "layer_norm/row.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "tile/shared.cuh"

namespace flash::layer_norm {

template <Types kTypes, int kVec_, int kVecs_, Extent kExtent_, bool kRagged_ = false, bool kTiled_ = false>
struct BwdConfig : Elements<kTypes> {
  static constexpr int kVec = kVec_;    // elements per access
  static constexpr int kVecs = kVecs_;  // accesses per thread and matrix
  static constexpr Extent kExtent = kExtent_;
  static constexpr bool kRagged = kRagged_;  // vectors need not be aligned
  static constexpr bool kTiled = kTiled_;    // a block has part of a row; the sums of the row are known
  static constexpr int kParameters = kExtent == Extent::kAll ? BwdParams::kParameters : BwdParams::kFewParameters;
  static constexpr bool kHoldsWeight = kExtent != Extent::kAll;  // in registers: the sums leave enough of them

  static constexpr int kThreads = max_bwd_threads(kVecs), kBlocks = blocks_at_once(kThreads);
  static_assert(kStages * kCopiedMatrices * kSlotBytes >= kVec * 4, "sums of a parameter take the place of the ring");
};

using SumExchange = RowExchange<float2, /*kTurns=*/2, /*kGroups=*/true>;

// Sums over the threads that share a row. In a block with fewer than 32 lanes per row, all threads must call it
// together.
__device__ inline void add_up_row(float (&sums)[2], SumExchange& exchange) {
  add_up_lanes(blockDim.x, sums[0], sums[1]);
  if (!exchange.has_others()) return;
  exchange.give({sums[0], sums[1]});
  sums[0] = sums[1] = 0.f;
  exchange.for_each([&](float2 given) { sums[0] += given.x, sums[1] += given.y; });
  add_up_lanes(exchange.lanes(), sums[0], sums[1]);
}

// The rows of the matrices that belong to row `row` of h; negative where there is none.
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

// Slots of shared memory: a thread copies vectors into its own slots and reads only those, so it need not wait for
// other threads. Neighbouring threads have neighbouring slots.
template <typename Config>
class Ring {
 public:
  static constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  enum Which { kH, kDout, kDh };

  __device__ Ring(const BwdParams& p, int first)
      : p_(p), first_(first), thread_(static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x)) {}

  // Starts the copies of a row.
  __device__ void start(int stage, const Rows<Config>& rows) const {
    copy(stage, kH, p_.h, Config::h(p_.h.dtype), rows.h);
    copy(stage, kDout, p_.dout, Config::x(p_.dout.dtype), rows.out);
    if (p_.dh.data) copy(stage, kDh, p_.dh, Config::h(p_.dh.dtype), rows.h);
    ptx::commit_copies();
  }

  // Waits for the copies of all rows but the newest.
  __device__ void wait() const { ptx::wait_copies<kStages - 1>(); }

  // Reads the thread's vector number j, which is at column `col`.
  __device__ void read(float (&values)[kVec], int stage, Which which, int j, DType dtype, int col) const {
    AnyVec<kVec> vec = *vector(stage, which, j);
    if (Config::kRagged && col < 0) vec = merged(vec, *vector_at_end(stage, which), col, dtype);
    widen(values, vec, dtype);
    clear_outside<Config::kRagged>(values, col, p_.problem.cols);
  }

 private:
  // The slots of a warp lie together, so that all distances are known when the kernel is compiled.
  __device__ AnyVec<kVec>* slots(int stage, Which which) const {
    constexpr int kSlots = matrix_slots(kVecs, Config::kRagged);
    return reinterpret_cast<AnyVec<kVec>*>(&shared_memory<char>() +
                                           thread_ / 32 * warp_ring_bytes(kVecs, Config::kRagged) +
                                           (stage * kCopiedMatrices + which) * kSlots * kSlotBytes);
  }

  __device__ AnyVec<kVec>* vector(int stage, Which which, int j) const {
    return slots(stage, which) + j * 32 + thread_ % 32;
  }

  // The slot for the end of the row: a vector that begins before the row takes its remaining elements from there.
  __device__ AnyVec<kVec>* vector_at_end(int stage, Which which) const { return slots(stage, which) + kVecs * 32; }

  // Starts the copies of one matrix. A row that does not exist reads as zeros.
  template <typename Data>
  __device__ void copy(int stage, Which which, const Matrix<Data>& matrix, DType dtype, int64_t row) const {
    const char* source = row_of(matrix, dtype, row);
    const int cols = p_.problem.cols, last = last_column<Config::kRagged>(first_, cols);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int col = column_of<kVec, kVecs>(j, first_);
      const Place<kVec> place{col, cols};
      const bool exists = row >= 0 && col < last, aligned = !Config::kRagged || is_aligned(source, place, dtype);
      AnyVec<kVec>* vec = vector(stage, which, j);
      if (aligned) {
        copy(vec, element_address(source, col, dtype), dtype, exists);
      } else {
        copy_elements(vec, source, place, dtype, exists);
      }
      if (!Config::kRagged || j > 0 || col >= 0) continue;
      if (aligned) {
        copy(vector_at_end(stage, which), element_address(source, place.column(0), dtype), dtype,
             exists && place.column(0) < cols);
      } else {
        copy_elements(vector_at_end(stage, which), source, place, dtype, exists);
      }
    }
  }

  __device__ static void copy(AnyVec<kVec>* slot, const char* source, DType dtype, bool exists) {
    if (kVec == 8 || dtype == DType::kFloat32) {
      ptx::copy_async(ptx::shared_address(slot), source, exists);
    } else {
      ptx::copy_half_async(ptx::shared_address(slot), source, exists);
    }
  }

  // Copies element by element. The loop is not unrolled, because few vectors are unaligned.
  __device__ static void copy_elements(AnyVec<kVec>* slot, const char* row, const Place<kVec>& place, DType dtype,
                                       bool exists) {
#pragma unroll 1
    for (int i = 0; i < kVec; ++i) {
      const uint32_t bits = exists && place.has(i) ? load_any<1>(row, place.column(i), dtype).words[0] : 0;
      if (dtype == DType::kFloat32) {
        reinterpret_cast<uint32_t*>(slot)[i] = bits;
      } else {
        reinterpret_cast<uint16_t*>(slot)[i] = static_cast<uint16_t>(bits);
      }
    }
  }

  const BwdParams& p_;
  int first_, thread_;
};

// The sums of a thread for the gradients of parameters, and the weights of its columns.
template <typename Config>
struct Columns {
  static constexpr int kVec = Config::kVec, kVecs = Config::kVecs;
  enum Parameter { kWeight, kBias, kWeight1, kBias1, kColscale };

  float sums[Config::kParameters][kVecs][kVec] = {};
  float weight[Config::kHoldsWeight ? kVecs : 1][kVec] = {};

  __device__ Columns(const Problem& p, int first) {
    if constexpr (Config::kHoldsWeight) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int col = column_of<kVec, kVecs>(j, first);
        if (col < last_column<Config::kRagged>(first, p.cols))
          load_weight<Config::kRagged>(weight[j], p, p.weight, col);
      }
    }
  }

  // Computes g = weight dout.
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

// Calls fn(j, col) for each vector of the thread in a row, if the vectors of the row begin at column `first`.
template <typename Config, typename Fn>
__device__ void for_each_vector(const Problem& p, int first, Fn&& fn) {
#pragma unroll
  for (int j = 0; j < Config::kVecs; ++j) {
    const int col = column_of<Config::kVec, Config::kVecs>(j, first);
    if (col < last_column<Config::kRagged>(first, p.cols)) fn(j, col);
  }
}

// The rows that receive the gradients of the branches, and the output if it is wanted.
template <typename Config>
struct Targets {
  char *dresidual, *dx0, *dx1, *out;

  __device__ Targets(const BwdParams& p, const Rows<Config>& rows)
      : dresidual(row_of(p.dresidual, Config::h(p.dresidual.dtype), rows.h)),
        dx0(row_of(p.dx0, Config::x(p.dx0.dtype), rows.x0)),
        dx1(row_of(p.dx1, p.dx1.dtype, rows.h)),
        out(row_of(p.out, p.out.dtype, rows.h)) {}
};

// Turns h into y. fma(h, rstd, -mean * rstd) would save one instruction, but where h equals its mean, as in rows of one
// column, the result would be the rounding error of the product and not 0.
template <int kVec>
__device__ void centre_and_scale(float (&values)[kVec], float centre, float rstd) {
#pragma unroll
  for (float& value : values) value = (value - centre) * rstd;
}

// The row that a group of lanes works on.
template <typename Config>
struct Row {
  static constexpr int kVec = Config::kVec;
  static constexpr bool kRagged = Config::kRagged;
  const BwdParams& p;
  const Ring<Config>& ring;
  Columns<Config>& columns;
  Rows<Config> rows;
  int first, stage;
  float centre, rstd;  // y = (h - centre) rstd
  Dropout dropout;
  uint32_t kept0[Config::kVecs] = {};  // one bit for each element of x0

  // Determines which elements of x0 are kept. This takes long, so it runs while the row is being copied.
  __device__ void draw() {
    if (Config::kExtent == Extent::kPlain || !p.dx0.data) return;
    if constexpr (kVec == 4 && !kRagged) {
      if (p.mask0 == nullptr) return draw_in_pairs();
    }
    if (rows.x0 < 0) return;
    for_each_vector<Config>(p.problem, first, [&](int j, int col) { kept0[j] = kept(p.mask0, rows.x0, col, 0); });
  }

  // Computes y and g of a vector. If kAdding, also adds the row's contribution to the gradients of weights and biases.
  template <bool kAdding>
  __device__ void normal_and_weighted(float (&y)[kVec], float (&g)[kVec], int j, int col) const {
    using C = Columns<Config>;
    float dout[kVec];
    ring.read(y, stage, Ring<Config>::kH, j, Config::h(p.h.dtype), col);
    ring.read(dout, stage, Ring<Config>::kDout, j, Config::x(p.dout.dtype), col);
    centre_and_scale(y, centre, rstd);
    columns.weigh(g, dout, p.problem, j, col);
    if (kAdding) columns.add_up(C::kWeight, j, dout, y);
    if constexpr (Config::kExtent == Extent::kAll) {
      if (!p.dout1.data || rows.out < 0) return;
      float weight[kVec];
      load_wide<kRagged>(dout, p.dout1, rows.out, col, p.problem.cols);
      load_weight<kRagged>(weight, p.problem, p.problem.weight1, col);
      multiply(weight, dout);
      add(g, weight);
      if (kAdding) columns.add_up(C::kWeight1, j, dout, y);
    }
  }

  // Computes the gradient of h from the means of g and of g y over the row.
  __device__ void total(float (&dtotal)[kVec], const float (&y)[kVec], const float (&g)[kVec], float mean_g,
                        float mean_gy, int j, int col) const {
    fill(dtotal, 0.f);
    if (p.dh.data) ring.read(dtotal, stage, Ring<Config>::kDh, j, Config::h(p.dh.dtype), col);
#pragma unroll
    for (int i = 0; i < kVec; ++i) dtotal[i] += rstd * (g[i] - mean_g - y[i] * mean_gy);
  }

  // Stores the gradients of the branches; with a column scale, also adds to its gradient.
  __device__ void store_branches(const Targets<Config>& to, float (&dtotal)[kVec], int j, int col) const {
    if (p.dresidual.data) store(to.dresidual, Config::h(p.dresidual.dtype), col, dtotal);
    if constexpr (Config::kExtent == Extent::kPlain) {
      if (p.dx0.data) store(to.dx0, Config::x(p.dx0.dtype), col, dtotal);
    } else {
      store_scaled(to, dtotal, j, col);
    }
  }

 private:
  __device__ void store(char* row, DType dtype, int col, const float (&values)[kVec]) const {
    store_row<kRagged>(row, dtype, col, p.problem.cols, values);
  }

  // Draws for vectors of 4 elements. 8 columns are drawn together, and two neighbouring lanes have them. So one lane
  // draws for vector j of both and the other for vector j + 1. All lanes of a warp must call it.
  __device__ void draw_in_pairs() {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int j = 0; j < Config::kVecs; j += 2) {
      const int col = column_of<kVec, Config::kVecs>(odd ? j + 1 : j, first) & ~7;
      const uint32_t drawn = dropout.kept(dropout.draw<8, kRagged>(rows.x0, col, 0));
      uint32_t other = __shfl_xor_sync(~0u, drawn, 1);
      if (blockDim.x == 1) other = drawn >> 4;  // the lane has both vectors
      kept0[j] = odd ? other >> 4 : drawn, kept0[j + 1] = odd ? drawn >> 4 : other;
    }
  }

  __device__ uint32_t kept(const uint8_t* mask, int64_t row, int col, int branch) const {
    return mask == nullptr ? dropout.kept(dropout.draw<kVec, kRagged>(row, col, branch))
                           : load_mask<kVec>(mask, row * p.problem.cols, col, p.problem.cols);
  }

  __device__ void store_scaled(const Targets<Config>& to, float (&dtotal)[kVec], int j, int col) const {
    const Problem& problem = p.problem;
    float branch[kVec];
    if (p.dx1.data) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) branch[i] = dtotal[i] * problem.keep_scale;
      drop(branch, kept(p.mask1, rows.h, col, 1));
      store(to.dx1, p.dx1.dtype, col, branch);
    }
    if (!p.dx0.data || rows.x0 < 0) return;
    multiply(dtotal, scale_of_row(problem, rows.x0));
    drop(dtotal, kept0[j]);
    if constexpr (Config::kExtent == Extent::kAll) {
      if (problem.colscale.data) {
        load_wide<kRagged>(branch, p.x0, rows.x0, col, problem.cols);
#pragma unroll
        for (int i = 0; i < kVec; ++i) columns.sums[Columns<Config>::kColscale][j][i] += branch[i] * dtotal[i];
        load_columns<kRagged>(branch, problem.colscale, col, problem.cols, 1.f);
        multiply(dtotal, branch);
      }
    }
    store(to.dx0, Config::x(p.dx0.dtype), col, dtotal);
  }
};

// Adds the sums of the groups of a block and writes the result as part blockIdx.y. Groups add in pairs, one parameter
// at a time, through the memory of the ring.
template <typename Config>
__device__ void store_part(const BwdParams& p, Columns<Config>& columns, int first) {
  constexpr int kVec = Config::kVec, kVecs = Config::kVecs, kQuads = kVecs * kVec / 4;
  const int lanes = blockDim.x, group = threadIdx.y, thread = group * lanes + threadIdx.x;
  const int threads = lanes * static_cast<int>(blockDim.y);
  float4* exchange = &shared_memory<float4>();  // neighbouring threads have neighbouring places
#pragma unroll
  for (int parameter = 0; parameter < Config::kParameters; ++parameter) {
    if (!p.dparameters[parameter].data) continue;
    auto& quads = reinterpret_cast<float (&)[kQuads][4]>(columns.sums[parameter]);
#pragma unroll 1
    for (int groups = blockDim.y; groups > 1; groups = ceil_div(groups, 2)) {
      const int half = ceil_div(groups, 2);
      __syncthreads();
      if (group >= half && group < groups) {
#pragma unroll
        for (int n = 0; n < kQuads; ++n) {
          exchange[n * threads + thread] = {quads[n][0], quads[n][1], quads[n][2], quads[n][3]};
        }
      }
      __syncthreads();
      if (group + half < groups) {
#pragma unroll
        for (int n = 0; n < kQuads; ++n) {
          const float4 other = exchange[n * threads + thread + half * lanes];
          add(quads[n], {other.x, other.y, other.z, other.w});
        }
      }
    }
    if (group > 0) continue;
    float* part = p.parts + (int64_t{blockIdx.y} * p.num_parameters + parameter) * BwdParams::part_cols(p.problem.cols);
    for_each_vector<Config>(p.problem, first, [&](int j, int col) {
#pragma unroll
      for (int i = 0; i < kVec; i += 4) {
        store_row<Config::kRagged>(reinterpret_cast<char*>(part), DType::kFloat32, col + i, p.problem.cols,
                                   quads[(j * kVec + i) / 4]);
      }
    });
  }
}

// Returns the column at which vectors begin in all rows of a block, from `row` on; 0 if that differs between the rows.
template <typename Config>
__device__ int first_column_of_rows(const BwdParams& p, int64_t row) {
  const bool differs = p.problem.rows > gridDim.y && gridDim.y * p.h.stride % Config::kVec != 0;
  return differs ? 0 : first_column<Config::kVec, Config::kRagged>(p.h, Config::h(p.h.dtype), row);
}

// Sums g and g y over a row, y the normalised row and g its weighted gradient, and adds both to the sums of columns.
template <typename Config>
__device__ void sum_row(float (&sums)[2], const BwdParams& p, Row<Config>& row, SumExchange& row_sums, int first_col) {
  constexpr int kVec = Config::kVec;
  for_each_vector<Config>(p.problem, first_col, [&](int j, int col) {
    float y[kVec], g[kVec];
    row.template normal_and_weighted<true>(y, g, j, col);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums[0] += g[i], sums[1] += g[i] * y[i];
  });
  if constexpr (!Config::kTiled) {
    add_up_row(sums, row_sums);
  } else if (row.rows.h >= 0) {
    sums[0] = p.sums[2 * row.rows.h], sums[1] = p.sums[2 * row.rows.h + 1];
  }
}

// Stores the gradients of a row's branches, and its output again where that is asked for.
template <typename Config>
__device__ void store_gradients(const BwdParams& p, Row<Config>& row, const float (&sums)[2], float scale,
                                int first_col) {
  constexpr int kVec = Config::kVec;
  const Problem& problem = p.problem;
  const Targets<Config> to(p, row.rows);
  const float mean_g = problem.is_rms_norm ? 0.f : sums[0] * scale, mean_gy = sums[1] * scale;
  for_each_vector<Config>(problem, first_col, [&](int j, int col) {
    float y[kVec], g[kVec], dtotal[kVec];
    row.template normal_and_weighted<false>(y, g, j, col);
    row.total(dtotal, y, g, mean_g, mean_gy, j, col);
    row.store_branches(to, dtotal, j, col);
    if (Config::kExtent != Extent::kPlain && p.out.data) {
      store_affine<Config::kRagged>(to.out, p.out.dtype, col, problem, problem.weight, problem.bias, y);
    }
  });
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocks) void bwd_kernel(const __grid_constant__ BwdParams p) {
  __shared__ float2 given[2 * SumExchange::kMaxGiven];
  __shared__ SumExchange::Barriers arrived;
  const Problem& problem = p.problem;
  SumExchange row_sums(given, arrived, Config::kTiled ? 1 : gridDim.x);
  // Rows are dealt out to blocks first and to groups second. So all blocks have work until the end, and in a block with
  // ragged rows the vectors can begin at the same column in all rows.
  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  int64_t first = blockIdx.y, index = first + int64_t{threadIdx.y} * gridDim.y;
  const int first_col = first_column_of_rows<Config>(p, index);
  const Ring<Config> ring(p, first_col);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) ring.start(stage, Rows<Config>(problem, index + stage * step));
  Columns<Config> columns(problem, first_col);
  const Dropout dropout(problem);
  row_sums.wait_for_blocks();
  int stage = 0;
  const auto moment = [&](const float* of, int64_t row) { return row < problem.rows ? __ldg(of + row) : 0.f; };
  float mean = moment(p.mean, index), rstd = moment(p.rstd, index);
  const float scale = 1.f / problem.cols;
  // All groups of a block do the same number of turns, since a warp may hold several groups.
  for (; first < problem.rows; first += step, index += step) {
    const int next = stage + 1 < kStages ? stage + 1 : 0, last = kStages == 2 ? next
                                                                 : stage > 0  ? stage - 1
                                                                              : kStages - 1;
    ring.start(last, Rows<Config>(problem, index + (kStages - 1) * step));
    const float next_mean = moment(p.mean, index + step), next_rstd = moment(p.rstd, index + step);
    const float centre = problem.is_rms_norm ? 0.f : mean;
    Row<Config> row{p, ring, columns, Rows<Config>(problem, index), first_col, stage, centre, rstd, dropout};
    row.draw();
    ring.wait();
    float sums[2] = {0.f, 0.f};
    sum_row(sums, p, row, row_sums, first_col);
    if (row.rows.h >= 0) store_gradients(p, row, sums, scale, first_col);
    mean = next_mean, rstd = next_rstd, stage = next;
  }
  ptx::wait_copies<0>();
  ptx::launch_dependents();
  store_part(p, columns, first_col);
}

// Computes the two sums of each row that is too wide for a cluster; one block per row.
template <typename Config>
__global__ __launch_bounds__(kMaxThreads) void sums_kernel(const __grid_constant__ BwdParams p) {
  constexpr int kVec = Config::kVec;
  constexpr bool kRagged = Config::kRagged;
  __shared__ float2 given[2 * SumExchange::kMaxGiven];
  __shared__ SumExchange::Barriers arrived;
  SumExchange row_sums(given, arrived, /*blocks=*/1);
  const Problem& problem = p.problem;
  const Rows<Config> rows(problem, blockIdx.x);
  const float rstd = p.rstd[rows.h], centre = problem.is_rms_norm ? 0.f : p.mean[rows.h];
  float sums[2] = {0.f, 0.f};
  const auto add_up = [&](const Matrix<const void>& dout, const Vector& weight, int col) {
    float y[kVec], g[kVec], w[kVec];
    load_wide<kRagged>(y, p.h, rows.h, col, problem.cols);
    centre_and_scale(y, centre, rstd);
    load_wide<kRagged>(g, dout, rows.out, col, problem.cols);
    load_weight<kRagged>(w, problem, weight, col);
    multiply(g, w);
    for (int i = 0; i < kVec; ++i) sums[0] += g[i], sums[1] += g[i] * y[i];
  };
  const int first = first_column<kVec, kRagged>(p.h, p.h.dtype, rows.h);
  const int last = last_column<kRagged>(first, rows.out >= 0 ? problem.cols : 0);
  for (int col = first + static_cast<int>(threadIdx.x) * kVec; col < last; col += kMaxThreads * kVec) {
    add_up(p.dout, problem.weight, col);
    if (p.dout1.data) add_up(p.dout1, problem.weight1, col);
  }
  add_up_row(sums, row_sums);
  if (threadIdx.x == 0) p.sums[2 * rows.h] = sums[0], p.sums[2 * rows.h + 1] = sums[1];
}

// Adds the parts of 32 columns of a parameter. Thread (x, y) adds the parts with numbers that are y modulo kFinishRows,
// and keeps kFinishLoads loads in flight.
constexpr int kFinishRows = 32, kFinishLoads = 16;

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
  const int64_t apart = p.bwd.num_parameters * BwdParams::part_cols(cols);
  const float* parts = p.bwd.parts + blockIdx.y * BwdParams::part_cols(cols) + col;
  float sum = 0.f;
  for (int first = threadIdx.y; first < p.num_parts && col < cols; first += kFinishLoads * kFinishRows) {
    float loaded[kFinishLoads];
#pragma unroll
    for (int i = 0; i < kFinishLoads; ++i) {
      const int part = first + i * kFinishRows;
      loaded[i] = part < p.num_parts ? parts[part * apart] : 0.f;
    }
#pragma unroll
    for (float value : loaded) sum += value;
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  float total[1] = {0.f};
#pragma unroll
  for (int y = 0; y < kFinishRows; ++y) total[0] += partial[y][threadIdx.x];
  store_any(target.data, col, target.dtype, total);
}

// Returns how many clusters of `tiles` blocks can run at the same time.
template <typename Config>
int clusters_at_once(const RowShape& shape) {
  const dim3 grid(shape.tiles), block(shape.lanes);
  const int shared_bytes = ring_bytes(shape.lanes, Config::kVecs, Config::kRagged);
  allow_shared_memory<bwd_kernel<Config>>(
      {.grid = grid, .block = block, .shared_bytes = shared_bytes, .cluster = shape.tiles});
  cudaLaunchAttribute attribute{.id = cudaLaunchAttributeClusterDimension};
  attribute.val.clusterDim = {static_cast<unsigned>(shape.tiles), 1, 1};
  cudaLaunchConfig_t config{.gridDim = grid, .blockDim = block};
  config.dynamicSmemBytes = shared_bytes;
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
  const int cluster = Config::kTiled ? 1 : shape.tiles, threads = shape.lanes * shape.rows;
  const int most = cluster > 1 ? std::min(p.max_parts, clusters_at_once<Config>(shape)) : p.max_parts;
  const int wanted = num_parts(p.problem.rows, threads, num_multiprocessors(current_device()));
  int blocks = static_cast<int>(std::min<int64_t>({most, wanted, ceil_div(p.problem.rows, shape.rows)}));
  if (Config::kRagged) {  // so that in all rows of a block the same accesses are aligned
    const int like = Config::kVec / std::gcd(Config::kVec, static_cast<int>(p.h.stride % Config::kVec));
    blocks = most < like ? most : std::min(ceil_div(blocks, like), most / like) * like;
  }
  launch<bwd_kernel<Config>>({.grid = dim3(shape.tiles, blocks),
                              .block = dim3(shape.lanes, shape.rows),
                              .shared_bytes = ring_bytes(threads, Config::kVecs, Config::kRagged),
                              .cluster = cluster},
                             p, stream);
  launch<finish_kernel>(
      {.grid = dim3(ceil_div(p.problem.cols, 32), p.num_parameters), .block = dim3(32, kFinishRows), .early = true},
      FinishParams{p, blocks}, stream);
}

}  // namespace flash::layer_norm
