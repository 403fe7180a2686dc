// The choice of the forward's instance.
#include "common/dispatch.h"
#include "layer_norm/choice.h"
#include "layer_norm/fwd.cuh"
#include "layer_norm/launch.h"

namespace flash::layer_norm {

static bool fits(const FwdParams& p, int vec) {
  return fits(p.problem, vec) && fits(p.x0, vec) && fits(p.x1, vec) && fits(p.residual, vec) && fits(p.out, vec) &&
         fits(p.out1, vec) && fits(p.h, vec);
}

static bool are_of(const FwdParams& p, Types types) {
  const DType x = x_type(types), h = h_type(types);
  return is_of(p.x0, x) && is_of(p.out, x) && is_of(p.out1, x) && is_of(p.residual, h) && is_of(p.h, h);
}

// Whether plain kernels, which ask for a bias of the weight's type and that to be x0's or fp32, are not enough.
static bool is_general(const FwdParams& p) {
  const Problem& problem = p.problem;
  const DType weights = problem.weight.dtype;
  const bool known_weights = (weights == DType::kFloat32 || weights == p.x0.dtype) &&
                             (problem.bias.data == nullptr || problem.bias.dtype == weights);
  return !known_weights || p.x1.data || p.out1.data || problem.colscale.data || problem.rowscale.data ||
         problem.x0_subset || problem.rng_state;
}

template <typename Config>
static void run_shaped(const FwdParams& p, cudaStream_t stream) {
  run_fwd<Config>(p, row_shape(p.problem.cols, Config::kVec, Config::kVecs, Config::kVecs <= 2 ? 256 : 128), stream);
}

// In GB/s, 16384 rows in bf16 on an H200: 2 accesses of a thread and matrix in blocks of 256 threads do best for plain
// sums (4096 columns: 3969, with 4 in blocks of 128 3701, with 1 3625), 4 in blocks of 128 for others (8192 columns
// with dropout: 3001, with 2 2431).
template <Types kTypes>
static void run_plain(const FwdParams& p, cudaStream_t stream) {
  constexpr int kVec = vec_of(kTypes);
  dispatch_value<2, 4>(fits_a_block(p.problem.cols, kVec, 2) ? 2 : 4,
                       [&](auto kVecs) { run_shaped<FwdConfig<kTypes, kVec, kVecs, /*kGeneral=*/false>>(p, stream); });
}

// Single elements, where nothing wider fits, and rows that are wider than a block: these are rare and have one instance
// each, which can do all.
template <int kVec, int kVecs>
static void run_rare(const FwdParams& p, bool tiled, cudaStream_t stream) {
  dispatch_flags([&](auto kTiled) { run_shaped<FwdConfig<Types::kAny, kVec, kVecs, true, kTiled>>(p, stream); }, tiled);
}

void fwd(const FwdParams& p, cudaStream_t stream) {
  if (p.problem.x0_subset) {
    clear_rows(p.out, p.problem.out_rows, p.problem.cols, stream);
    clear_rows(p.out1, p.problem.out_rows, p.problem.cols, stream);
  }
  if (!is_general(p) && run_known(p, kMostVecs, [&](auto kTypes) { run_plain<kTypes>(p, stream); })) return;
  if (run_general(p, kMostVecs,
                  [&](auto kTypes) { run_shaped<FwdConfig<kTypes, vec_of(kTypes), kMostVecs, true>>(p, stream); })) {
    return;
  }
  const int cols = p.problem.cols;
  if (fits(p, 4)) {
    run_rare<4, kAllVecs>(p, !fits_a_block(cols, 4, kAllVecs), stream);
  } else {
    run_rare<1, kMostVecs>(p, !fits_a_block(cols, 1, kMostVecs), stream);
  }
}

}  // namespace flash::layer_norm
