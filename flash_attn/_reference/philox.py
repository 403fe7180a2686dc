"""Random bits for dropout, of attention and of norms: Philox-4x32.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Sequence

import torch

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox(
    counter: Sequence[torch.Tensor], key: Sequence[int], rounds: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32: four random 32-bit words for each counter.

    counter: four int64 tensors, broadcastable, that hold 32-bit words. key: two ints. Returns four int64 tensors.
    """
    c0, c1, c2, c3 = counter
    for i in range(rounds):
        k0, k1 = ((k + i * w) & _WORD for k, w in zip(key, _WEYL, strict=True))
        # An int64 product wraps modulo 2^64, so it has the same bits as the unsigned product.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
    return c0, c1, c2, c3
