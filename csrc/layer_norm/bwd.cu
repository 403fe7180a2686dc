// The choice of the backward's instance.
#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "common/dispatch.h"
#include "layer_norm/bwd.cuh"
#include "layer_norm/choice.h"
#include "layer_norm/launch.h"

namespace flash::layer_norm {

static bool fits(const BwdParams& p, int vec) {
  return fits(p.problem, vec) && fits(p.dout, vec) && fits(p.dout1, vec) && fits(p.dh, vec) && fits(p.h, vec) &&
         fits(p.x0, vec) && fits(p.dx0, vec) && fits(p.dx1, vec) && fits(p.dresidual, vec) && fits(p.out, vec);
}

static bool are_of(const BwdParams& p, Types types) {
  const DType x = x_type(types), h = h_type(types);
  return is_of(p.dout, x) && is_of(p.dx0, x) && is_of(p.h, h) && is_of(p.dh, h) && is_of(p.dresidual, h);
}

static Extent extent_of(const BwdParams& p) {
  const Problem& problem = p.problem;
  if (p.dout1.data || problem.colscale.data) return Extent::kAll;
  const bool branches =
      p.dx1.data || p.out.data || problem.rowscale.data || problem.x0_subset || problem.rng_state || p.mask0 || p.mask1;
  return branches ? Extent::kBranches : Extent::kPlain;
}

template <typename Config>
static void run_shaped(const BwdParams& p, cudaStream_t stream) {
  run_bwd<Config>(p, row_shape(p.problem.cols, Config::kVec, Config::kVecs, kMaxThreads), stream);
}

template <Types kTypes, Extent kExtent>
static void run_extent(const BwdParams& p, cudaStream_t stream) {
  constexpr int kVec = vec_of(kTypes);
  dispatch_value<2, 4>(fits_a_block(p.problem.cols, kVec, 2) ? 2 : 4,
                       [&](auto kVecs) { run_shaped<BwdConfig<kTypes, kVec, kVecs, kExtent>>(p, stream); });
}

// Single elements, where nothing wider fits, and rows that are wider than a block: these are rare and have one instance
// each, which can do all.
template <int kVec, int kVecs>
static void run_rare(const BwdParams& p, bool tiled, cudaStream_t stream) {
  dispatch_flags([&](auto kTiled) { run_shaped<BwdConfig<Types::kAny, kVec, kVecs, Extent::kAll, kTiled>>(p, stream); },
                 tiled);
}

// Whether a block has shared memory enough for so many accesses of each thread.
static bool has_room(int vecs) {
  constexpr int kStaticBytes = 1024;  // at most, of what the kernel declares
  return ring_bytes(/*vec=*/8, vecs) + kStaticBytes <= max_shared_bytes(current_device());
}

int max_parts(int64_t rows) { return static_cast<int>(std::min<int64_t>(rows, num_multiprocessors(current_device()))); }

void bwd(const BwdParams& p, cudaStream_t stream) {
  if (p.problem.x0_subset) clear_rows(p.dx0, p.problem.x0_rows, p.problem.cols, stream);
  const Extent extent = extent_of(p);
  const int vecs = has_room(kMostVecs) ? kMostVecs : kAllVecs;
  if (extent == Extent::kPlain &&
      run_known(p, vecs, [&](auto kTypes) { run_extent<kTypes, Extent::kPlain>(p, stream); })) {
    return;
  }
  if (extent != Extent::kAll &&
      run_general(p, vecs, [&](auto kTypes) { run_extent<kTypes, Extent::kBranches>(p, stream); })) {
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
