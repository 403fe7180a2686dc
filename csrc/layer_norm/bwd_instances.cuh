// The configurations of the backward, and the list of those that bwd_ragged.cu compiles.
#pragma once

#include "layer_norm/bwd.cuh"
#include "layer_norm/choice.h"

namespace flash::layer_norm {

template <Types kTypes, Extent kExtent>
using Aligned = BwdConfig<kTypes, vec_of(kTypes), bwd_vecs(kTypes), kExtent>;
template <Types kTypes, Extent kExtent>
using Ragged = BwdConfig<kTypes, vec_of(kTypes), kUsualVecs, kExtent, /*kRagged=*/true>;
using Widest = BwdConfig<Types::kAny, vec_of(Types::kAny), 1, Extent::kAll, /*kRagged=*/true, /*kTiled=*/true>;

extern template void run_bwd<Ragged<kHalf, Extent::kBranches>>(const BwdParams&, const RowShape&, cudaStream_t);
extern template void run_bwd<Ragged<kBrain, Extent::kBranches>>(const BwdParams&, const RowShape&, cudaStream_t);
extern template void run_bwd<Ragged<Types::kFloat16Stream32, Extent::kBranches>>(const BwdParams&, const RowShape&,
                                                                                 cudaStream_t);
extern template void run_bwd<Ragged<Types::kBFloat16Stream32, Extent::kBranches>>(const BwdParams&, const RowShape&,
                                                                                  cudaStream_t);
extern template void run_bwd<Ragged<Types::kAny, Extent::kBranches>>(const BwdParams&, const RowShape&, cudaStream_t);
extern template void run_bwd<Ragged<Types::kAny, Extent::kAll>>(const BwdParams&, const RowShape&, cudaStream_t);
extern template void run_bwd<Widest>(const BwdParams&, const RowShape&, cudaStream_t);

}  // namespace flash::layer_norm
