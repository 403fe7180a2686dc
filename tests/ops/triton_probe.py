"""A Triton kernel that applies a device function to a vector."""

import torch
import triton
import triton.language as tl


def apply(function, x):
    """function(x) of a vector whose length is a power of two."""
    out = torch.empty_like(x)
    _apply[(1,)](out, x, function, SIZE=len(x))
    return out


@triton.jit
def _apply(out, x, function: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, function(tl.load(x + at)))
