"""Attention by torch's own operator for the CPU, which keeps the scores of a block in the cache.

It has no score modifiers, and no mask but the causal one of as many rows as keys, with a scale that is not 0. It is
given fp32: with 16-bit tensors it would round between blocks, which leaves gradients with up to four times the error,
and in fp16 it is slow.

It takes (batch, heads, seqlen, head_dim) with a contiguous last dimension and any other strides, and as many heads of k
as of q. So query heads that share a key head become a batch entry of their own, for which the key head is expanded. If
keys and values differ in head dim, the narrower of the two is padded with zeros.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _torch_private

from .batch_layout import Part
from .dropout import keep_threshold
from .mask import Mask
from .options import Options

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_THREAD_KEYS = 2**20  # elements of k that the forward loads at a time, for each thread: 4 MiB stay in the cache


def computes(part: Part, options: Options, q: Tensor) -> bool:
    """Whether the operator can compute this part, if its values are finite. q: (batch, seqlen_q, heads, any)."""
    if not _torch_private.has_cpu_attention(q) or q.dtype not in _DTYPES:
        return False
    drops = options.dropout_p > 0 and keep_threshold(options.dropout_p) < 255
    if options.softcap > 0 or options.alibi_slopes is not None or drops:
        return False
    mask = _mask(part, options)
    hides = not mask.is_full  # by -inf, which it then multiplies with the scale
    if hides and not (mask.is_triangle and options.softmax_scale > 0):
        return False
    return part.seqlen_q > 0 and part.seqlen_k > 0 and q.shape[2] > 0


def forward(
    part: Part,
    options: Options,
    scales: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> bool:
    """Write the part's rows of out and softmax_lse, (batch, seqlen_q, heads, head_dim or 1).

    scales: (batch, heads_k), the factors of the scores; None: softmax_scale for all.
    Returns whether it did. If not, some rows may have been written, and the caller computes all in another way.
    """
    if not computes(part, options, q):
        return False
    if scales is not None and not (scales > 0).all():  # 0 times the -inf of a mask, as in `computes`
        return False
    size = torch.get_num_threads() * _THREAD_KEYS // (part.seqlen_k * k.shape[2] * k.shape[3])
    return all(_forward(piece, options, scales, q, k, v, out, softmax_lse) for piece in part.split(max(1, size)))


def _forward(
    part: Part,
    options: Options,
    scales: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> bool:
    channels = max(k.shape[3], v.shape[3])
    rows = _load_rows(part, q, k.shape[2], channels)
    keys, values = (_load_keys(part, x, q.shape[2], channels) for x in (k, v))
    causal, spoilt = not _mask(part, options).is_full, None
    if causal and not _all_finite(values):  # 0 times inf is nan, also in rows that do not see the value
        values, spoilt = values.where(values.isfinite(), 0), values.where(~values.isfinite(), 0)
    if scales is None:
        o, lse = _torch_private.cpu_attention(rows, keys, values, 0.0, causal, scale=options.softmax_scale)
    else:
        o, lse = _by_key_head(rows, keys, values, causal, scales[part.entries])
    if (lse == 0).any():  # also its lse of rows whose scores are all -inf, which have +inf here
        return False
    if spoilt is not None:
        o = o + spoilt.cumsum(2)
    _store_rows(part, out, o)
    _store_rows(part, softmax_lse, lse.masked_fill_(lse.isnan(), math.inf)[..., None])
    return True


def _by_key_head(rows: Tensor, keys: Tensor, values: Tensor, causal: bool, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The operator's results, called for each entry and key head with its scale; scales: (entries, heads_k)."""
    pairs = [x.reshape(scales.numel(), 1, -1, *x.shape[2:]) for x in (rows, keys, values)]
    results = [
        _torch_private.cpu_attention(*inputs, 0.0, causal, scale=scale)
        for *inputs, scale in zip(*pairs, scales.flatten().tolist(), strict=True)
    ]
    o, lse = (torch.cat(x) for x in zip(*results, strict=True))
    return o.reshape(*rows.shape[:-1], -1), lse.reshape(rows.shape[:-1])


def backward(
    part: Part,
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> bool:
    """Write the part of dq, dk, dv and delta, the row sums of dout * out, (batch, seqlen_q, heads, 1).

    Returns whether it did. It writes nothing with a gradient of softmax_lse, which the operator does not take; nor if a
    gradient of a causal part is not finite, since values may have reached rows and keys that do not see each other.
    """
    if dlse is not None or not computes(part, options, q):
        return False
    channels = max(k.shape[3], v.shape[3])
    rows, o, do = (_load_rows(part, x, k.shape[2], channels) for x in (q, out, dout))
    lse = _load_rows(part, softmax_lse, k.shape[2], 1)
    keys = (_load_keys(part, x, q.shape[2], channels) for x in (k, v))
    causal = not _mask(part, options).is_full
    dq_rows, *dkeys = _torch_private.cpu_attention_backward(
        do, rows, *keys, o, lse[..., 0], 0.0, causal, scale=options.softmax_scale
    )
    if causal and not _all_finite(dq_rows, *dkeys):
        return False
    _store_rows(part, dq, dq_rows)
    for target, gradient in zip((dk, dv), dkeys, strict=True):
        _store_keys(part, target, gradient)
    _store_rows(part, delta, (do * o).sum(-1, keepdim=True))
    return True


def _mask(part: Part, options: Options) -> Mask:
    return Mask(part.seqlen_q, part.seqlen_k, options.window_left, options.window_right)


def _load_rows(part: Part, x: Tensor, heads_k: int, channels: int) -> Tensor:
    x = _heads_first(part.rows(x), channels)
    sharing = x.shape[1] // heads_k
    return x if sharing == 1 else x.reshape(-1, sharing, *x.shape[2:])


def _load_keys(part: Part, x: Tensor, heads: int, channels: int) -> Tensor:
    x = _heads_first(part.keys(x), channels)
    sharing = heads // x.shape[1]
    return x if sharing == 1 else x.reshape(-1, 1, *x.shape[2:]).expand(-1, sharing, -1, -1)


def _heads_first(x: Tensor, channels: int) -> Tensor:
    """Returns x (entries, seqlen, heads, any) as fp32 (entries, heads, seqlen, channels), a view if possible."""
    x = x.float().transpose(1, 2)
    if x.shape[-1] < channels:
        return F.pad(x, (0, channels - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _store_rows(part: Part, x: Tensor, rows: Tensor) -> None:
    target = part.rows(x).transpose(1, 2)
    target.copy_(rows[..., : target.shape[-1]].reshape(target.shape))


def _store_keys(part: Part, x: Tensor, keys: Tensor) -> None:
    target = part.keys(x).transpose(1, 2)
    keys = keys[..., : target.shape[-1]]
    target.copy_(keys if keys.shape == target.shape else keys.sum(1).view(target.shape))


def _all_finite(*tensors: Tensor) -> bool:
    return bool(torch.stack([bound for x in tensors for bound in x.aminmax()]).isfinite().all())
