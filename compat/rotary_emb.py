"""The function that other packages call in place of flash-attn's former extension of this name."""

import torch

from flash_attn._ops import checks
from flash_attn._ops import rotary as ops


@torch.no_grad()
def apply_rotary(x1, x2, cos, sin, out1, out2, conj, /):
    """Write the pairs (x1, x2) turned by their angles to (out1, out2).

        out1 = x1 cos - x2 sin, out2 = x1 sin + x2 cos;        with conj, sin counts negative

    x1, x2, out1, out2: one shape, (batch, seqlen, heads, rotary_dim / 2) as a rule, and one floating-point dtype; the
    maths is in float32. The outputs may be the inputs. cos, sin: of a shape that broadcasts to it, (seqlen, 1,
    rotary_dim / 2). A kernel runs, in place or not, if x1 and x2 are the halves of a tensor or its even and odd
    channels, and out1 and out2 are, too. Other layouts, and float64, use torch's operations. Returns None.
    """
    checks.alike(("x1", "x2", "out1", "out2"), (x1, x2, out1, out2), dtypes=ops.DTYPES)
    for name, value in (("x2", x2), ("out1", out1), ("out2", out2)):
        checks.has_shape(name, value, tuple(x1.shape))
    checks.alike(("cos", "sin"), (cos, sin), dtypes=ops.DTYPES)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.tensor(name, table, device=x1.device)
        sizes = zip(reversed(table.shape), reversed(x1.shape))
        if table.dim() > x1.dim() or any(size not in (1, full) for size, full in sizes):
            raise ValueError(f"{name} must broadcast to shape {tuple(x1.shape)}, found {tuple(table.shape)}")
    checks.flags(conj=conj)
    checks.own_memory(out1=out1, out2=out2)
    source, target, tables = _joined(x1, x2), _joined(out1, out2), _rows(x1, cos, sin)
    if (
        source is None
        or target is None
        or tables is None
        or source[1] != target[1]
        or x1.dtype not in ops.KERNEL_DTYPES
    ):
        x1, x2, cos, sin = (x.float() for x in (x1, x2, cos, sin))
        sin = -sin if conj else sin
        turned = x1 * cos - x2 * sin, x1 * sin + x2 * cos
        out1.copy_(turned[0])
        out2.copy_(turned[1])
        return
    (x, interleaved), (out, _) = source, target
    x, *rest = ops.arguments(x, *tables)
    if out.data_ptr() == x.data_ptr() and out.stride() == x.stride():
        ops.rotary_(x, *rest, interleaved, bool(conj))
    elif out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        ops.rotary_into(x, out, *rest, interleaved, bool(conj))
    else:
        out.copy_(ops.rotary(x, *rest, interleaved, bool(conj)))


def _joined(first, second):
    """The tensor that the two are parts of, and whether they are its even and odd channels; None if there is none.

    Otherwise they are its halves.
    """
    strides, half = first.stride(), first.shape[-1]
    if (
        first.dim() != 4
        or strides != second.stride()
        or first.untyped_storage()._cdata != second.untyped_storage()._cdata
    ):
        return None
    apart = second.storage_offset() - first.storage_offset()
    if (strides[-1], apart) not in ((1, half), (2, 1)):
        return None
    return first.as_strided((*first.shape[:-1], 2 * half), (*strides[:-1], 1)), strides[-1] == 2


def _rows(x, cos, sin):
    """The tables as (seqlen, rotary_dim / 2), if they are the same for all of a batch and its heads."""
    if x.dim() != 4 or any(table.shape != (x.shape[1], 1, x.shape[3]) for table in (cos, sin)):
        return None
    return cos[:, 0], sin[:, 0]
