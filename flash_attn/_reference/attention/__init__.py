"""Attention in plain torch. The functions below are the ops; they take what is in `options`.

blockwise           the ops: forward, backward and decoding, block by block with an online softmax
batch_layout        where the rows and keys of each entry are: dense, packed, padded or in pages
head_groups         which heads and rows are computed together, and their layout for batched products
score_modifiers     what happens to scores between the two products: softcap, ALiBi, bias, mask, dropout
mask, bias, dropout what each of these needs
float8              keys and values of 8 bits
torch_cpu_operator  torch's own attention for the CPU, which computes the parts without modified scores
differentiable      attention made of differentiable operations, for second derivatives and torch.func
"""

from .blockwise import (
    block_size_n,
    bwd,
    bwd_features,
    fwd,
    fwd_features,
    fwd_kvcache,
    fwd_kvcache_features,
    probabilities,
    weights,
)

__all__ = [
    "block_size_n",
    "bwd",
    "bwd_features",
    "fwd",
    "fwd_features",
    "fwd_kvcache",
    "fwd_kvcache_features",
    "probabilities",
    "weights",
]
