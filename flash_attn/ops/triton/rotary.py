"""`apply_rotary`, the rotation without autograd. Other projects use it in their own autograd functions.

It runs the same op as `flash_attn.layers.rotary`: the library's own kernel on a GPU, Triton's `rotary_kernel` where
the library is not built, plain torch elsewhere.
"""

import torch

from flash_attn._ops import checks, rotary, triton


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Rotate pairs of channels of x by the angles of each token's position.

    Arguments:
        x: (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with cu_seqlens; any floating-point dtype and
            strides. float64 is computed in plain torch.
        cos, sin: (positions, rotary_dim / 2), rotary_dim <= head_dim; any floating-point dtype.
        seqlen_offsets: position of the first token of every sequence, an integer or an int32 or int64 tensor (batch,).
        cu_seqlens: (batch + 1,) int32, where each sequence starts in x.
        max_seqlen: length of the longest packed sequence.
        interleaved: the pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        inplace: write into x.
        conjugate: rotate the other way, which is the inverse and the gradient.

    Returns the rotated tensor, x itself if inplace. No gradient is recorded. Positions past the end of the tables,
    which only a tensor of offsets can reach, leave their tokens unchanged.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.ops.triton.rotary import apply_rotary
    >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
    >>> apply_rotary(torch.randn(2, 16, 4, 64), angles.cos(), angles.sin()).shape
    torch.Size([2, 16, 4, 64])
    """
    checks.flags(interleaved=interleaved, inplace=inplace, conjugate=conjugate)
    with torch.no_grad():
        arguments = rotary.arguments(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
        if not inplace:
            return rotary.rotary(*arguments, bool(interleaved), bool(conjugate))
        rotary.writable("x", x)
        rotary.rotary_(*arguments, bool(interleaved), bool(conjugate))
    return x


__getattr__ = triton.names(__name__, "rotary", "rotary_kernel")
