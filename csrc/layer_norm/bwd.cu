// Chooses the kernel of the backward from the types, sizes and addresses of a call.
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "common/device.h"
#include "common/dispatch.h"
#include "layer_norm/bwd_instances.cuh"
#include "layer_norm/choice.h"
#include "layer_norm/launch.h"

namespace flash::layer_norm {

static bool fits(const BwdParams& p, int vec) {
  return fits(p.problem, vec) && fits(p.dout, vec) && fits(p.dout1, vec) && fits(p.dh, vec) && fits(p.h, vec) &&
         fits(p.x0, vec) && fits(p.dx0, vec) && fits(p.dx1, vec) && fits(p.dresidual, vec) && fits(p.out, vec);
}

static bool are_of(const BwdParams& p, Types types) {
  const DType x = x_type(types), h = h_type(types);
  return is_of(p.dout, x) && is_of(p.dx0, x) && is_of(p.dx1, x) && is_of(p.out, x) && is_of(p.h, h) && is_of(p.dh, h) &&
         is_of(p.dresidual, h);
}

static Extent extent_of(const BwdParams& p) {
  const Problem& problem = p.problem;
  const auto is_wanted = [](const Matrix<>& gradient) { return gradient.data != nullptr; };
  const auto* more = p.dparameters + BwdParams::kFewParameters;  // wanted even if there are no rows
  if (std::any_of(more, std::end(p.dparameters), is_wanted)) return Extent::kAll;
  const bool branches =
      p.dx1.data || p.out.data || problem.rowscale.data || problem.x0_subset || problem.rng_state || p.mask0 || p.mask1;
  return branches ? Extent::kBranches : Extent::kPlain;
}

template <typename Config>
static void run_shaped(const BwdParams& p, cudaStream_t stream) {
  const int cols = Config::kRagged ? spanned_cols(p.problem.cols) : p.problem.cols;
  const RowShape shape = row_shape(cols, Config::kVec, Config::kVecs, kSmallThreads,
                                   /*splits_warps=*/!Config::kRagged, Config::kThreads);
  run_bwd<Config>(p, shape, stream);
}

// Returns the types for a kernel with branches. Such kernels exist for these types only, to keep the build small.
static Types types_of_branches(const BwdParams& p) {
  if (fits(p, 8)) return types_of<kHalf, kBrain>(p);
  if (fits(p, 4)) return types_of<Types::kFloat16Stream32, Types::kBFloat16Stream32>(p);
  return types_of<kHalf, kBrain, Types::kFloat16Stream32, Types::kBFloat16Stream32>(p);
}

// Returns whether a block has enough shared memory on the current device.
static bool has_room(bool ragged) {
  constexpr int kStaticBytes = 3 * 1024;  // upper bound for the arrays that the kernel declares
  return ring_bytes(kMaxThreads, kUsualVecs, ragged) + kStaticBytes <= max_shared_bytes(current_device());
}

int max_parts(int64_t rows, int cols) { return most_parts(rows, cols, num_multiprocessors(current_device())); }

void bwd(const BwdParams& p, cudaStream_t stream) {
  if (has_subsets(p.problem)) clear_rows(p.dx0, p.problem.x0_rows, p.problem.cols, stream);
  const Types known = known_types(p);
  Extent extent = extent_of(p);
  if (extent == Extent::kPlain && (known == Types::kAny || !fits(p, vec_of(known)))) extent = Extent::kBranches;
  const Types types = extent == Extent::kPlain ? known : extent == Extent::kAll ? Types::kAny : types_of_branches(p);
  const bool ragged = !fits(p, vec_of(types));
  const int cols = ragged ? spanned_cols(p.problem.cols) : p.problem.cols;
  if (!holds_row<finish_kernel>(cols, vec_of(types), kUsualVecs) || !has_room(ragged)) {
    run_shaped<Widest>(p, stream);
  } else if (extent == Extent::kPlain) {
    dispatch_known(types, [&](auto kTypes) { run_shaped<Aligned<kTypes, Extent::kPlain>>(p, stream); });
  } else if (extent == Extent::kAll) {
    ragged ? run_shaped<Ragged<Types::kAny, Extent::kAll>>(p, stream)
           : run_shaped<Aligned<Types::kAny, Extent::kAll>>(p, stream);
  } else if (ragged) {
    dispatch_value<kHalf, kBrain, Types::kFloat16Stream32, Types::kBFloat16Stream32, Types::kAny>(
        types, [&](auto kTypes) { run_shaped<Ragged<kTypes, Extent::kBranches>>(p, stream); });
  } else {
    dispatch_value<kHalf, kBrain, Types::kFloat16Stream32, Types::kBFloat16Stream32, Types::kAny>(
        types, [&](auto kTypes) { run_shaped<Aligned<kTypes, Extent::kBranches>>(p, stream); });
  }
}

}  // namespace flash::layer_norm
