"""The op `rotary`, which turns pairs of channels by the angles of each token's position.

    rotary(x, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate) -> out
    rotary_(x, ...)                 in place
    rotary_into(x, out, ...)        into a tensor like x, with any strides, that shares no memory with x

x               (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with cu_seqlens; fp32, fp16, bf16 or
                fp64, any strides; kernels have no fp64, and take fewer than 2^30 heads of all tokens
cos, sin        (positions, rotary_dim / 2), of the same dtypes; fp64 only with an x in fp64
seqlen_offsets  (batch,) int32 or int64, or None; added to seqlen_offset, it gives the position of a sequence's first
                token
cu_seqlens      (batch + 1,) int32, or None: where each sequence starts in x
interleaved     pairs are (2i, 2i + 1) if true, (i, i + rotary_dim / 2) if not
conjugate       turn back: the inverse, and the gradient

(a, b) -> (a cos - b sin, a sin + b cos), in fp32, or in fp64 for an x in fp64. Three things keep their values: tokens
outside all sequences, tokens at positions without a row in the tables, and channels past rotary_dim. Differentiable in
x only.
"""

import torch
from torch import Tensor

from flash_attn import _library
from flash_attn._ops import autograd, checks, sharding, triton
from flash_attn._reference import rotary as reference

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float64)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rest):
        cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate = rest
        ctx.save_for_backward(cos, sin, seqlen_offsets, cu_seqlens)
        ctx.options = seqlen_offset, interleaved, conjugate
        return rotary.below_autograd(x, *rest)

    @staticmethod
    def backward(ctx, dout):
        cos, sin, seqlen_offsets, cu_seqlens = ctx.saved_tensors
        seqlen_offset, interleaved, conjugate = ctx.options
        return rotary(dout, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, not conjugate), None


_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? seqlen_offsets, SymInt seqlen_offset, Tensor? cu_seqlens, bool interleaved, "
    "bool conjugate"
)

rotary = _library.define(
    f"rotary(Tensor x, {_ARGUMENTS}) -> Tensor",
    reference=reference.rotary,
    fake=lambda x, *_: torch.empty_like(x),
    autograd=_Rotary,
    differentiable=1,
    kernel_dtypes=KERNEL_DTYPES,
    composite=autograd.in_plain_torch(reference.rotary),
    triton=triton.launch("rotary", "rotary"),
    sharding=sharding.rotary,
)
rotary_ = _library.define(
    f"rotary_(Tensor(a!) x, {_ARGUMENTS}) -> ()",
    reference=reference.rotary_,
    fake=lambda *_: None,
    kernel_dtypes=KERNEL_DTYPES,
    triton=triton.launch("rotary", "rotary_"),
    sharding=sharding.rotary_,
)
rotary_into = _library.define(
    f"rotary_into(Tensor x, Tensor(a!) out, {_ARGUMENTS}) -> ()",
    reference=reference.rotary_into,
    fake=lambda *_: None,
    kernel_dtypes=KERNEL_DTYPES,
    triton=triton.launch("rotary", "rotary_into"),
    sharding=sharding.rotary_into,
)


def arguments(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    names: tuple[str, str, str] = ("x", "cos", "sin"),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int, Tensor | None]:
    """Check the caller's arguments and return the ops' arguments from `x` to `cu_seqlens`.

    seqlen_offsets is an integer or a tensor here, and cos and sin may be float64. max_seqlen is the length of the
    longest packed sequence; a tensor is accepted but not read. The tables must have a row for every position that is
    known without reading a tensor. names: the caller's names for x, cos and sin.
    """
    checks.tensor(names[0], x, dtypes=DTYPES)
    device = x.device
    if cu_seqlens is None:
        checks.ndim(names[0], x, "(batch, seqlen, heads, head_dim)")
        batch, seqlen, _, head_dim = x.shape
    else:
        checks.ndim(names[0], x, "(tokens, heads, head_dim)")
        checks.tensor("cu_seqlens", cu_seqlens, dtypes=(torch.int32,), device=device)
        checks.ndim("cu_seqlens", cu_seqlens, "(batch + 1)")
        checks.number("the length of cu_seqlens", len(cu_seqlens), len(cu_seqlens) > 0, "batch + 1")
        batch, head_dim = len(cu_seqlens) - 1, x.shape[-1]
        seqlen = _known_length(max_seqlen)
    positions = _check_tables(names[1], cos, names[2], sin, head_dim, device)
    first, offsets = 0, None
    if isinstance(seqlen_offsets, Tensor):
        offsets = seqlen_offsets.expand(batch) if seqlen_offsets.dim() == 0 else seqlen_offsets
        dtypes = checks.INTEGER_DTYPES
        checks.tensor("seqlen_offsets", offsets, dtypes=dtypes, shape=(batch,), device=device)
    else:
        first = checks.whole("seqlen_offsets", seqlen_offsets, "an integer or an integer tensor")
        checks.number("seqlen_offsets", first, first >= 0, "at least 0")
    if seqlen is not None and first + seqlen > positions:
        raise ValueError(f"{names[1]} must have a row for each of {first + seqlen} positions, found {positions} rows")
    if cos.dtype == torch.float64 and x.dtype != torch.float64:
        cos, sin = cos.float(), sin.float()
    return x, cos, sin, offsets, first, cu_seqlens


def writable(name: str, x: torch.Tensor) -> None:
    """Check that no two elements of `x` share memory: rotating an expanded tensor in place has no meaning."""
    if not has_own_memory(x):
        raise ValueError(f"{name} must not be expanded to be rotated in place, found strides {tuple(x.stride())}")


def has_own_memory(x: torch.Tensor) -> bool:
    """Returns whether no dimension is expanded (has stride 0)."""
    strides = x.stride()
    return 0 not in strides or all(stride or size <= 1 for size, stride in zip(x.shape, strides, strict=True))


def _check_tables(cos_name, cos, sin_name, sin, head_dim, device):
    """Check the tables and return how many positions they have."""
    checks.tensor(cos_name, cos, dtypes=DTYPES, device=device)
    checks.ndim(cos_name, cos, "(positions, rotary_dim / 2)")
    checks.tensor(sin_name, sin, dtypes=(cos.dtype,), shape=cos.shape, device=device)
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        name = cos_name if cos.requires_grad else sin_name
        raise ValueError(f"{name} must not require grad, found requires_grad=True: the tables have no gradient")
    positions, columns = cos.shape
    if 2 * columns > head_dim:
        raise ValueError(f"{cos_name} must have at most head_dim / 2 = {head_dim // 2} columns, found {columns}")
    return positions


def _known_length(max_seqlen):
    """Returns max_seqlen if it is known without reading a tensor, else None."""
    if max_seqlen is None:
        raise ValueError("max_seqlen must be given with cu_seqlens, found None")
    if isinstance(max_seqlen, torch.Tensor):
        checks.tensor("max_seqlen", max_seqlen, dtypes=checks.INTEGER_DTYPES, shape=())
        return None
    checks.integer("max_seqlen", max_seqlen, "an integer or a 0-d integer tensor")
    checks.number("max_seqlen", max_seqlen, max_seqlen >= 0, "at least 0")
    return max_seqlen
