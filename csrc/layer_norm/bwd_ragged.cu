// Instances of the backward for vectors that may begin at any element. They have a file of their own so that no file
// takes long to compile.
#include "layer_norm/bwd_instances.cuh"

namespace flash::layer_norm {

template void run_bwd<Ragged<kHalf, Extent::kBranches>>(const BwdParams&, const RowShape&, cudaStream_t);
template void run_bwd<Ragged<kBrain, Extent::kBranches>>(const BwdParams&, const RowShape&, cudaStream_t);
template void run_bwd<Ragged<Types::kFloat16Stream32, Extent::kBranches>>(const BwdParams&, const RowShape&,
                                                                          cudaStream_t);
template void run_bwd<Ragged<Types::kBFloat16Stream32, Extent::kBranches>>(const BwdParams&, const RowShape&,
                                                                           cudaStream_t);
template void run_bwd<Ragged<Types::kAny, Extent::kBranches>>(const BwdParams&, const RowShape&, cudaStream_t);
template void run_bwd<Ragged<Types::kAny, Extent::kAll>>(const BwdParams&, const RowShape&, cudaStream_t);
template void run_bwd<Widest>(const BwdParams&, const RowShape&, cudaStream_t);

}  // namespace flash::layer_norm
