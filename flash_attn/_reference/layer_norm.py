"""LayerNorm and RMSNorm of a sum of branches in plain torch, with fp32 maths.

Arguments as in `flash_attn._ops.layer_norm`. Random bits come from Philox-4x32 with 7 rounds: eight neighbouring
columns share a draw of 16 bytes, two bytes decide one element, and it is kept if their value is below
round(65536 (1 - p)).

    key      the 64-bit seed
    counter  low 64 bits: offset + row of the branch;  high 64 bits: column // 8 in the low word, the branch (0 or 1)

Bytes 2i and 2i + 1 (i = 0 .. 7, the low byte first) belong to column 8 (column // 8) + i.
"""

import torch
from torch.nn import functional

from flash_attn._reference.fused_dense import sum_of_rows
from flash_attn._reference.philox import philox
from flash_attn._reference.rows import mean_of_each

_ROUNDS = 7
_WORD = 0xFFFFFFFF


def fwd(
    x0,
    x1,
    residual,
    weight,
    bias,
    weight1,
    bias1,
    colscale,
    rowscale,
    x0_subset,
    out_subset,
    rng_state,
    dropout_p,
    eps,
    rowscale_const,
    out_rows,
    is_rms_norm,
    zero_centered_weight,
    h_dtype,
    out_dtype,
    return_mask,
):
    """Returns (out, out1, h, mask0, mask1, mean, rstd)."""
    masks = _masks(x0, x1, rng_state, dropout_p, None, None)
    h = _branch(x0, masks[0], dropout_p, rowscale)
    if colscale is not None:
        h = h * colscale.float()
    if x0_subset is not None:
        h = _take_rows(h * rowscale_const, x0_subset)
    if x1 is not None:
        h = h + _branch(x1, masks[1], dropout_p, None)
    if residual is not None:
        h = h + residual.float()
    if h_dtype is not None:  # the backward reads the stored h, so the statistics must belong to it
        h = h.to(h_dtype).float()
    mean, rstd = (x.view(*h.shape[:-1], 1) for x in statistics(h, eps, is_rms_norm))
    normal = (h if is_rms_norm else h - mean) * rstd
    outs = [
        _stored(_put_rows(_affine(normal, *parameters, zero_centered_weight), out_subset, out_rows), out_dtype)
        for parameters in ((weight, bias), (weight1, bias1))
        if parameters[0] is not None
    ]
    results = (
        outs[0],
        outs[1] if len(outs) > 1 else None,
        None if h_dtype is None else _stored(h, h_dtype),
        *(_stored(mask, torch.uint8) if return_mask and mask is not None else None for mask in masks),
        mean.flatten(),
        rstd.flatten(),
    )
    return tuple(_nothing(x0) if x is None else x for x in results)


def statistics(h, eps, is_rms_norm):
    """Returns mean and rstd of the rows of h, both (rows,)."""
    mean = mean_of_each(h)
    variance = mean_of_each(h.square() if is_rms_norm else (h - mean[..., None]).square())
    return mean.flatten(), (variance + eps).rsqrt().flatten()


def bwd(
    dout,
    dout1,
    dh,
    h,
    x0,
    mean,
    rstd,
    weight,
    bias,
    weight1,
    bias1,
    colscale,
    rowscale,
    x0_subset,
    out_subset,
    rng_state,
    mask0,
    mask1,
    dropout_p,
    rowscale_const,
    x0_rows,
    is_rms_norm,
    zero_centered_weight,
    dx0_dtype,
    dx1_dtype,
    dresidual_dtype,
    out_dtype,
):
    """Returns (dx0, dx1, dresidual, dweight, dbias, dweight1, dbias1, dcolscale, out)."""
    mean, rstd = (x.view(*h.shape[:-1], 1) for x in (mean, rstd))
    normal = (h.float() - (0 if is_rms_norm else mean)) * rstd
    douts = [None if x is None else _take_rows(x.float(), out_subset) for x in (dout, dout1)]
    weighted = sum(d * _scale(w, zero_centered_weight) for d, w in zip(douts, (weight, weight1)) if d is not None)
    total = weighted - normal * (weighted * normal).mean(-1, keepdim=True)
    if not is_rms_norm:
        total = total - weighted.mean(-1, keepdim=True)
    total = total * rstd
    if dh is not None:
        total = total + dh.float()

    dbranch0 = _put_rows(total, x0_subset, x0_rows)
    if x0_subset is not None:
        dbranch0 = dbranch0 * rowscale_const
    masks = _masks(dbranch0, None if dx1_dtype is None else total, rng_state, dropout_p, mask0, mask1)
    dbranch0 = _branch(dbranch0, masks[0], dropout_p, rowscale)
    dcolscale = None if colscale is None else sum_of_rows(dbranch0 * x0.float()).to(colscale.dtype)
    if colscale is not None:
        dbranch0 = dbranch0 * colscale.float()
    dx1 = None if dx1_dtype is None else _stored(_branch(total, masks[1], dropout_p, None), dx1_dtype)
    parameters = (weight, bias, weight1, bias1)
    gradients = [d for dout in douts for d in ((None, None) if dout is None else (dout * normal, dout))]
    out = None if out_dtype is None else _stored(_affine(normal, weight, bias, zero_centered_weight), out_dtype)
    results = (
        None if dx0_dtype is None else _stored(dbranch0, dx0_dtype),
        dx1,
        None if dresidual_dtype is None else _stored(total, dresidual_dtype),
        *(None if p is None else sum_of_rows(d).to(p.dtype) for p, d in zip(parameters, gradients, strict=True)),
        dcolscale,
        out,
    )
    return tuple(_nothing(dout) if x is None else x for x in results)


def keep_mask(rng_state: torch.Tensor, dropout_p: float, branch: int, rows: int, cols: int) -> torch.Tensor:
    """Returns which elements of branch 0 or 1 dropout keeps: bool (rows, cols), true where kept.

    rng_state: (2,) int64, the seed (read as unsigned) and the offset.

    >>> keep_mask(torch.tensor([1, 0]), 0.5, 0, 3, 5).shape
    torch.Size([3, 5])
    """
    seed, offset = rng_state.tolist()
    device = rng_state.device
    low = offset + torch.arange(rows, device=device)[:, None]
    vector = torch.arange((cols + 7) // 8, device=device)
    counter = (low & _WORD, low >> 32 & _WORD, vector, torch.tensor(branch, device=device))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed & _WORD, seed >> 32 & _WORD), _ROUNDS)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # (rows, vectors, 4, 2)
    return halves.flatten(1)[:, :cols] < keep_threshold(dropout_p)


def keep_threshold(dropout_p: float) -> int:
    """Returns how many of the 65536 equally likely values keep an element."""
    return round(65536 * (1 - dropout_p))


def _masks(x0, x1, rng_state, dropout_p, mask0, mask1):
    """Returns the masks of both branches, given or drawn, shaped like the branches; None where nothing is dropped."""
    drawn = []
    for branch, (x, mask) in enumerate(((x0, mask0), (x1, mask1))):
        if x is not None and mask is None and rng_state is not None:
            mask = keep_mask(rng_state, dropout_p, branch, x.numel() // max(x.shape[-1], 1), x.shape[-1])
        drawn.append(None if x is None or mask is None else mask.view(x.shape) != 0)
    return drawn


def _branch(x, mask, dropout_p, rowscale):
    x = x.float()
    if rowscale is not None:
        x = x * rowscale.float().view(*x.shape[:-1], 1)
    return x if mask is None else torch.where(mask, x / (1 - dropout_p), 0)


def _scale(weight, zero_centered_weight):
    return weight.float() + 1 if zero_centered_weight else weight.float()


def _affine(normal, weight, bias, zero_centered_weight):
    out = normal * _scale(weight, zero_centered_weight)
    return out if bias is None else out + bias.float()


def _take_rows(x, subset):
    """Returns row subset[i] - 1 of x (rows, cols) for each i, zeros if there is no such row; x without a subset."""
    if subset is None:
        return x
    subset = subset.flatten().long()
    row = torch.where((subset > 0) & (subset <= len(x)), subset, 0)
    return functional.pad(x, (0, 0, 1, 0))[row]


def _put_rows(x, subset, rows):
    """Undo `_take_rows`: return (rows, cols) with row i of x (.., cols) at row subset[i] - 1, zeros elsewhere."""
    if subset is None:
        return x
    subset = subset.flatten().long()
    row = torch.where((subset > 0) & (subset <= rows), subset, 0)
    placed = x.new_zeros(rows + 1, x.shape[-1])
    placed[row] = x.flatten(0, -2)
    return placed[1:]


def _stored(x, dtype):
    """Returns x in `dtype` and contiguous."""
    return x.new_empty(x.shape, dtype=dtype).copy_(x)


def _nothing(x):
    return x.new_empty(0)
