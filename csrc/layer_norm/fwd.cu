// Chooses the kernel of the forward from the types, sizes and addresses of a call.
#include "common/dispatch.h"
#include "layer_norm/choice.h"
#include "layer_norm/fwd.cuh"
#include "layer_norm/launch.h"

namespace flash::layer_norm {

constexpr int kSmallBlock = 256;  // threads

static bool fits(const FwdParams& p, int vec) {
  return fits(p.problem, vec) && fits(p.x0, vec) && fits(p.x1, vec) && fits(p.residual, vec) && fits(p.out, vec) &&
         fits(p.out1, vec) && fits(p.h, vec);
}

static bool are_of(const FwdParams& p, Types types) {
  const DType x = x_type(types), h = h_type(types);
  return is_of(p.x0, x) && is_of(p.out, x) && is_of(p.out1, x) && is_of(p.residual, h) && is_of(p.h, h);
}

// Returns what the kernel has to do. Every extent but kAll requires that the bias has the type of the weight, and that
// this type is fp32 or the type of x0.
static Extent extent_of(const FwdParams& p) {
  const Problem& problem = p.problem;
  const DType weights = problem.weight.dtype;
  const bool known_weights = (weights == DType::kFloat32 || weights == p.x0.dtype) &&
                             (problem.bias.data == nullptr || problem.bias.dtype == weights);
  if (!known_weights || p.x1.data || p.out1.data || problem.colscale.data || problem.x0_subset) return Extent::kAll;
  if (problem.rowscale.data || problem.rng_state) return Extent::kBranches;
  return p.residual.data || p.h.data ? Extent::kPlain : Extent::kAlone;
}

// Runs blocks of one row or, where lanes of a warp can share a row, as many rows as fit 256 threads.
template <typename Config>
static void run_shaped(const FwdParams& p, cudaStream_t stream) {
  const int cols = Config::kRagged ? spanned_cols(p.problem.cols) : p.problem.cols;
  RowShape shape = row_shape(cols, Config::kVec, Config::kVecs, kSmallBlock, /*splits_warps=*/true);
  if (shape.lanes > 32) shape.rows = 1;
  run_fwd<Config>(p, shape, stream);
}

// Returns the most accesses per thread and aligned matrix: with more, the matrices do not fit in registers.
static constexpr int most_vecs(Extent extent) { return extent == Extent::kAll ? 4 : 8; }

// Chooses the smallest number of accesses with which a small block holds the row, since small blocks are faster. A
// cluster takes only rows that no block holds, because one block per row is faster than a cluster.
template <Types kTypes, Extent kExtent>
static void run_aligned(const FwdParams& p, cudaStream_t stream) {
  constexpr int kVec = vec_of(kTypes), kElements = kVec * kSmallBlock;
  if (p.problem.cols <= kUsualVecs * kElements) {
    run_shaped<FwdConfig<kTypes, kVec, kUsualVecs, kSmallBlock, kExtent>>(p, stream);
  } else if (p.problem.cols <= 2 * kUsualVecs * kElements) {
    run_shaped<FwdConfig<kTypes, kVec, 2 * kUsualVecs, kSmallBlock, kExtent>>(p, stream);
  } else {
    run_shaped<FwdConfig<kTypes, kVec, most_vecs(kExtent), kMaxThreads, kExtent>>(p, stream);
  }
}

// In fp32, a small block takes the rows that it holds with twice the usual accesses, because it is 8 % faster than a
// block of twice the threads. In 16 bits it is up to 4 % faster, which is not worth twice the code.
template <Types kTypes, Extent kExtent>
static void run_anywhere(const FwdParams& p, cudaStream_t stream) {
  constexpr int kVec = vec_of(kTypes), kElements = kVec * kSmallBlock;
  if constexpr (h_type(kTypes) == DType::kFloat32 && kExtent != Extent::kAll) {
    const int cols = spanned_cols(p.problem.cols);
    if (cols > kUsualVecs * kElements && cols <= 2 * kUsualVecs * kElements) {
      return run_shaped<FwdConfig<kTypes, kVec, 2 * kUsualVecs, kSmallBlock, kExtent, /*kRagged=*/true>>(p, stream);
    }
  }
  run_shaped<FwdConfig<kTypes, kVec, kUsualVecs, kMaxThreads, kExtent, /*kRagged=*/true>>(p, stream);
}

// Runs a kernel for known types for common calls. The kernels that can do everything look up the types of matrices at
// run time.
void fwd(const FwdParams& p, cudaStream_t stream) {
  if (has_subsets(p.problem)) {
    clear_rows(p.out, p.problem.out_rows, p.problem.cols, stream);
    clear_rows(p.out1, p.problem.out_rows, p.problem.cols, stream);
  }
  const Types known = known_types(p);
  const Extent extent = known == Types::kAny ? Extent::kAll : extent_of(p);
  const Types types = extent != Extent::kAll ? known : fits(p, 8) ? types_of<kHalf, kBrain>(p) : Types::kAny;
  using Widest = FwdConfig<Types::kAny, vec_of(Types::kAny), kUsualVecs, kMaxThreads, Extent::kAll, true, true>;
  const bool aligned = fits(p, vec_of(types));
  const int cols = aligned ? p.problem.cols : spanned_cols(p.problem.cols);
  const int vecs = aligned ? most_vecs(extent) : kUsualVecs;
  if (!holds_row<fwd_kernel<Widest>>(cols, vec_of(types), vecs)) return run_shaped<Widest>(p, stream);
  if (extent == Extent::kAll && aligned) {
    dispatch_value<kHalf, kBrain, Types::kAny>(types,
                                               [&](auto kTypes) { run_aligned<kTypes, Extent::kAll>(p, stream); });
  } else if (extent == Extent::kAll) {
    run_anywhere<Types::kAny, Extent::kAll>(p, stream);
  } else if (extent == Extent::kAlone && aligned) {  // the types that known_types finds first: there is no h
    dispatch_value<kHalf, kBrain, Types::kFloat32>(
        types, [&](auto kTypes) { run_aligned<kTypes, Extent::kAlone>(p, stream); });
  } else {
    dispatch_known(types, [&](auto kTypes) {
      if (!aligned) return run_anywhere<kTypes, Extent::kBranches>(p, stream);
      extent == Extent::kPlain ? run_aligned<kTypes, Extent::kPlain>(p, stream)
                               : run_aligned<kTypes, Extent::kBranches>(p, stream);
    });
  }
}

}  // namespace flash::layer_norm
