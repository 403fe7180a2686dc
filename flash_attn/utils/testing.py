"""Tools for tests of attention: random lengths, one problem padded and packed, masks, attention by its definition.

    mask = generate_random_padding_mask(seqlen, batch, device)
    q_unpad, kv_unpad, cu_q, cu_k, _, _, max_q, max_k, q, kv, pad, *_ = generate_qkv(q, k, v, mask, mask, kvpacked=True)
    out = pad(flash_attn_varlen_kvpacked_func(q_unpad, kv_unpad, cu_q, cu_k, max_q, max_k, causal=True))
    expected, probabilities = attention_ref(q, *kv.unbind(2), mask, mask, causal=True)

Terms that the functions share:

Padding masks. bool (batch, seqlen), true for real tokens; None means that all are real. key_leftpad, int32 or int64
    (batch,): keys before this position are not real either. No query sees a token that is not real.
Positions. They count keys. The real tokens of an entry count as if they were packed, the last query standing at the
    last key: query i is at position i + len_k - len_q of len_q queries and len_k keys, if padding comes last.
Masks of scores. bool, true where a query does NOT see a key, (seqlen_q, seqlen_k) or, with any padding given, (batch,
    1, seqlen_q, seqlen_k).

All of it is plain torch, on every device, with memory that grows with the square of the sequence. Wrong types raise
TypeError, wrong shapes and values ValueError.
"""

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from flash_attn._ops import checks
from flash_attn._reference import fused_softmax
from flash_attn._reference.attention.mask import outside_window
from flash_attn.bert_padding import pad_input, unpad_input

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def generate_random_padding_mask(
    max_seqlen: int,
    batch_size: int,
    device: torch.device | str,
    mode: str = "random",
    zero_lengths: bool = False,
) -> Tensor:
    """Draw a padding mask with the real tokens first.

    Arguments:
        max_seqlen, batch_size: its sizes.
        device: where the mask is made. The lengths come from the default generator of this device.
        mode: "full": all tokens are real. "random": lengths are uniform from max_seqlen - 20 to max_seqlen; "third":
            from max_seqlen // 3. They are at least 1, with zero_lengths at least 0.
        zero_lengths: also make every fifth sequence, from the first on, and the last one empty.

    Returns bool (batch_size, max_seqlen). Raises ValueError for another mode.

    >>> from flash_attn.utils.testing import generate_random_padding_mask
    >>> generate_random_padding_mask(4, 3, "cpu", mode="full", zero_lengths=True).sum(-1)
    tensor([0, 4, 0])
    """
    _check_count("max_seqlen", max_seqlen)
    _check_count("batch_size", batch_size)
    checks.flags(zero_lengths=zero_lengths)
    shortest = {"full": max_seqlen, "random": max_seqlen - 20, "third": max_seqlen // 3}
    if mode not in shortest:
        raise ValueError(f"mode must be 'full', 'random' or 'third', found {mode!r}")
    least = min(max(shortest[mode], 0 if zero_lengths else 1), max_seqlen)
    lengths = torch.randint(least, max_seqlen + 1, (batch_size, 1), device=device)
    if zero_lengths:
        lengths[::5] = 0
        lengths[-1:] = 0
    return torch.arange(max_seqlen, device=device) < lengths


_Pad: TypeAlias = Callable[[Tensor], Tensor]


@overload
def generate_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    qv: Tensor | None = None,
    kvpacked: Literal[False] = False,
    qkvpacked: Literal[False] = False,
    query_unused_mask: Tensor | None = None,
    key_unused_mask: Tensor | None = None,
) -> tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    int,
    int,
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    _Pad,
    _Pad,
    _Pad,
]: ...
@overload
def generate_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    qv: None = None,
    *,
    kvpacked: Literal[True],
    qkvpacked: Literal[False] = False,
    query_unused_mask: Tensor | None = None,
    key_unused_mask: Tensor | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, _Pad, _Pad, _Pad
]: ...
@overload
def generate_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    qv: None = None,
    kvpacked: Literal[False] = False,
    *,
    qkvpacked: Literal[True],
) -> tuple[Tensor, Tensor, int, Tensor, _Pad, _Pad]: ...
def generate_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    qv: Tensor | None = None,
    kvpacked: bool = False,
    qkvpacked: bool = False,
    query_unused_mask: Tensor | None = None,
    key_unused_mask: Tensor | None = None,
) -> tuple:
    """The same queries, keys and values padded and packed, as leaves that require gradients.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64, as all of them.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads.
        v: (batch, seqlen_k, heads_k, head_dim_v).
        query_padding_mask, key_padding_mask: bool (batch, seqlen_q) and (batch, seqlen_k), true for real tokens; None
            means that all are real.
        qv: (batch, seqlen_q, heads, head_dim_v) or None. Only without kvpacked and qkvpacked.
        kvpacked: stack keys and values, which then have one shape.
        qkvpacked: stack all three, which then have one shape and one padding mask. Without masks of unused tokens.
        query_unused_mask, key_unused_mask: like the padding masks, true for tokens behind the real ones of an entry
            that have a place in the packed tensors but are not in use; or None.

    Returns a tuple. With qkvpacked:
        qkv_unpad, cu_seqlens_q, max_seqlen_q, qkv, output_pad_fn, dqkv_pad_fn
    with kvpacked:
        q_unpad, kv_unpad, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        q, kv, output_pad_fn, dq_pad_fn, dkv_pad_fn
    with neither:
        q_unpad, k_unpad, v_unpad, qv_unpad, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
        max_seqlen_k, q, k, v, qv, output_pad_fn, dq_pad_fn, dk_pad_fn
    where
        *_unpad: the tokens of all entries one behind the other, (total, heads, ..), stacked (total, 2 or 3, heads, ..).
        cu_seqlens_*: int32 (batch + 1,), where each entry starts, and the end.
        seqused_*: int32 (batch,), how many tokens of each entry are in use; None without a mask of unused ones.
        max_seqlen_*: int, the longest entry.
        q, k, v, qv: in the memory of what is given; kv, qkv: stacked, (batch, seqlen, 2 or 3, heads, ..).
        *_pad_fn: functions of what is packed like queries or keys, (total, ..). They return it padded, (batch, seqlen,
            ..), 0 where nothing was packed. output_pad_fn and dq_pad_fn are for queries, dk_pad_fn is for keys and
            values, and the others for what is stacked.

    >>> from flash_attn.utils.testing import generate_qkv
    >>> q, k, v = torch.randn(3, 2, 4, 1, 8)
    >>> mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    >>> qkv_unpad, cu_seqlens, max_seqlen, qkv, output_pad_fn, _ = generate_qkv(q, k, v, mask, mask, qkvpacked=True)
    >>> qkv_unpad.shape, cu_seqlens.tolist(), max_seqlen
    (torch.Size([6, 3, 1, 8]), [0, 2, 6], 4)
    >>> output_pad_fn(qkv_unpad[:, 0]).shape
    torch.Size([2, 4, 1, 8])
    """
    _check_qkv(q, k, v, qv)
    for name, mask, x in (
        ("query_padding_mask", query_padding_mask, q),
        ("query_unused_mask", query_unused_mask, q),
        ("key_padding_mask", key_padding_mask, k),
        ("key_unused_mask", key_unused_mask, k),
    ):
        if mask is not None:
            checks.tensor(name, mask, dtypes=(torch.bool,), shape=x.shape[:2], device=x.device)
    query_mask, key_mask = _given_or_all(query_padding_mask, q), _given_or_all(key_padding_mask, k)
    checks.flags(kvpacked=kvpacked, qkvpacked=qkvpacked)
    if kvpacked or qkvpacked:
        _check_none("kvpacked or qkvpacked", qv=qv)
        checks.has_shape("v", v, k.shape)
    if qkvpacked:
        checks.number("kvpacked", kvpacked, not kvpacked, "False with qkvpacked")
        _check_none("qkvpacked", query_unused_mask=query_unused_mask, key_unused_mask=key_unused_mask)
        checks.has_shape("k", k, q.shape)
        if not torch.equal(query_mask, key_mask):
            raise ValueError("key_padding_mask must equal query_padding_mask with qkvpacked, found other tokens in it")

    q_unpad, indices_q, cu_seqlens_q, max_seqlen_q, seqused_q = unpad_input(q, query_mask, query_unused_mask)
    k_unpad, indices_k, cu_seqlens_k, max_seqlen_k, seqused_k = unpad_input(k, key_mask, key_unused_mask)
    v_unpad = unpad_input(v, key_mask, key_unused_mask)[0]
    pad_q = functools.partial(pad_input, indices=indices_q, batch=q.shape[0], seqlen=q.shape[1])
    pad_k = functools.partial(pad_input, indices=indices_k, batch=k.shape[0], seqlen=k.shape[1])
    if qkvpacked:
        qkv_unpad, qkv = torch.stack([q_unpad, k_unpad, v_unpad], dim=1), torch.stack([q, k, v], dim=2)
        return _leaf(qkv_unpad), cu_seqlens_q, max_seqlen_q, _leaf(qkv), pad_q, pad_q
    used_q = None if query_unused_mask is None else seqused_q
    used_k = None if key_unused_mask is None else seqused_k
    lengths = cu_seqlens_q, cu_seqlens_k, used_q, used_k, max_seqlen_q, max_seqlen_k
    if kvpacked:
        kv_unpad, kv = torch.stack([k_unpad, v_unpad], dim=1), torch.stack([k, v], dim=2)
        return _leaf(q_unpad), _leaf(kv_unpad), *lengths, _leaf(q), _leaf(kv), pad_q, pad_q, pad_k
    qv_unpad = None if qv is None else unpad_input(qv, query_mask, query_unused_mask)[0]
    unpadded, padded = (q_unpad, k_unpad, v_unpad, qv_unpad), (q, k, v, qv)
    return *map(_leaf, unpadded), *lengths, *map(_leaf, padded), pad_q, pad_q, pad_k


def _given_or_all(padding_mask, x):
    if padding_mask is not None:
        return padding_mask
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def _leaf(x):
    return None if x is None else x.detach().requires_grad_()


# ---------------------------------------------------------------------------------------------------------------------
# Masks of scores


def construct_local_mask(
    seqlen_q: int,
    seqlen_k: int,
    window_size: tuple[int, int] = (-1, -1),
    sink_token_length: int = 0,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the mask of a sliding window, true where a query does not see a key.

    Positions count keys, of real tokens only, as if these were packed, and the last query stands at the last key: query
    i is at position i + len_k - len_q of len_q queries and len_k keys, if padding comes last.

    Arguments:
        seqlen_q, seqlen_k: the sizes of the mask.
        window_size: (left, right): a query at position p sees the keys p - left to p + right, both included; -1 means
            no bound. Causal attention has right = 0.
        sink_token_length: how many keys, from the first real one on, all queries behind them see, whatever left is.
        query_padding_mask, key_padding_mask: bool (batch, seqlen_q) and (batch, seqlen_k), true for real tokens; None
            means that all are real.
        key_leftpad: int32 or int64 (batch,), keys before this position are not real either; or None.
        device: of the result; by default the device of the padding.

    Returns bool (seqlen_q, seqlen_k), or with padding (batch, 1, seqlen_q, seqlen_k).

    >>> from flash_attn.utils.testing import construct_local_mask
    >>> construct_local_mask(2, 4, window_size=(1, 0), sink_token_length=1).int()
    tensor([[0, 0, 0, 1],
            [0, 1, 0, 0]], dtype=torch.int32)
    """
    left, right = checks.window(window_size)
    _check_count("sink_token_length", sink_token_length)
    padding = query_padding_mask, key_padding_mask, key_leftpad
    queries, keys, real = _positions(seqlen_q, seqlen_k, *padding, device)
    ahead, behind = outside_window(queries - keys, -1, right), outside_window(queries - keys, left, -1)
    return ~real | ahead | (behind & (keys >= sink_token_length))


def construct_chunk_mask(
    seqlen_q: int,
    seqlen_k: int,
    attention_chunk: int,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the mask of chunked attention, which hides the keys outside a query's own chunk.

    Arguments:
        attention_chunk: the size of chunks, at least 1. Position p is in chunk p // attention_chunk.
        For the other arguments see `construct_local_mask`.

    Returns bool (seqlen_q, seqlen_k), or (batch, 1, seqlen_q, seqlen_k), true where a query does not see a key.

    >>> from flash_attn.utils.testing import construct_chunk_mask
    >>> construct_chunk_mask(3, 5, attention_chunk=3).int()
    tensor([[0, 0, 0, 1, 1],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 0, 0]], dtype=torch.int32)
    """
    _check_count("attention_chunk", attention_chunk, at_least=1)
    padding = query_padding_mask, key_padding_mask, key_leftpad
    queries, keys, real = _positions(seqlen_q, seqlen_k, *padding, device)
    return ~real | (keys // attention_chunk != queries // attention_chunk)


def _positions(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device):
    """Returns positions of queries (.., seqlen_q, 1) and of keys (.., 1, seqlen_k), and which keys are real."""
    padding = query_padding_mask, key_padding_mask, key_leftpad
    _check_padding(seqlen_q, seqlen_k, *padding)
    if device is None:
        device = next((x.device for x in padding if x is not None), None)
    real_q, real_k = _real_queries_and_keys(seqlen_q, seqlen_k, *padding, device)
    diagonal = real_k.sum(-1, keepdim=True) - real_q.sum(-1, keepdim=True)
    return (_places(real_q) + diagonal)[..., None], _places(real_k)[..., None, :], real_k[..., None, :]


def _real_queries_and_keys(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device):
    """Returns which queries and which keys are real, each (seqlen,) or, if entries differ, (batch, 1, seqlen)."""
    real_q, real_k = (
        torch.ones(seqlen, dtype=torch.bool, device=device) if mask is None else mask[:, None].to(device)
        for seqlen, mask in ((seqlen_q, query_padding_mask), (seqlen_k, key_padding_mask))
    )
    if key_leftpad is not None:
        real_k = real_k & (torch.arange(seqlen_k, device=device) >= key_leftpad[:, None, None].to(device))
    return real_q, real_k


def _places(real):
    """The place of each token among the real ones of its row; padding counts on from the real token before it."""
    skipped = torch.where(real, (~real).cumsum(-1), 0).cummax(-1).values
    return torch.arange(real.shape[-1], device=real.device) - skipped


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    sink_token_length: int = 0,
    softcap: float = 0.0,
    upcast: bool = True,
    reorder_ops: bool = False,
    intermediate_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as it is defined, with all scores in memory: exact, or at the precision of its arguments.

        s(i, j) = (<q_i, k_j> + <qv_i, v_j>) / sqrt(d)    d = head_dim, with qv head_dim + head_dim_v
        s(i, j) = softcap tanh(s(i, j) / softcap)         if softcap > 0
        s(i, j) = s(i, j) + attn_bias(i, j)
        P(i, j) = exp(s(i, j)) / sum_l exp(s(i, l))       over the keys that query i sees
        out_i   = sum_j P(i, j) keep(i, j) / (1 - dropout_p) v_j

    The difference between upcast=False and upcast=True tells how large the error of a kernel may be. Differentiable in
    all tensors of floats, any number of times.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64, as k, v and qv.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads, and query head h uses key head
            h // (heads / heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v).
        query_padding_mask, key_padding_mask, key_leftpad: as in `construct_local_mask`. Values in padding have no
            effect, not even NaN.
        attn_bias: floats that broadcast to (batch, heads, seqlen_q, seqlen_k), or None; -inf hides a key.
        dropout_p: float in [0, 1).
        dropout_mask: bool (batch, heads, seqlen_q, seqlen_k), true where P is kept. Needed if dropout_p > 0.
        causal: bool; the same as window_size[1] = 0.
        qv: (batch, seqlen_q, heads, head_dim_v) or None: queries to the values.
        q_descale, k_descale, v_descale: float32 (batch, heads_k) or None: factors of q and qv, of k, and of v.
        window_size, sink_token_length: as in `construct_local_mask`.
        attention_chunk: as in `construct_chunk_mask`; 0 means no chunks.
        softcap: float; above 0, scores are capped at this magnitude.
        upcast: compute in float32, or in the type of q if that is wider; if False, in the type of q.
        reorder_ops: scale the keys instead of the queries. It is as exact but rounds differently.
        intermediate_dtype: a type to which P is rounded before it is multiplied with v, or None.

    Returns:
        out: (batch, seqlen_q, heads, head_dim_v), 0 for queries that see no key and for padding.
        P: (batch, heads, seqlen_q, seqlen_k), without dropout; 0 where a query does not see a key, and for padding.
        Both have the type of q.

    >>> from flash_attn.utils.testing import attention_ref
    >>> q, k, v = torch.randn(3, 2, 128, 8, 64, dtype=torch.bfloat16)
    >>> exact, probabilities = attention_ref(q, k, v, causal=True)
    >>> rounded, _ = attention_ref(q, k, v, causal=True, upcast=False, reorder_ops=True)
    >>> exact.shape, probabilities.shape, bool((rounded - exact).abs().max() < 0.1)
    (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128, 128]), True)
    """
    _check_qkv(q, k, v, qv)
    (batch, seqlen_q, heads, _), (seqlen_k, heads_k) = q.shape, k.shape[1:3]
    padding = query_padding_mask, key_padding_mask, key_leftpad
    _check_padding(seqlen_q, seqlen_k, *padding, batch=batch)
    _check_weights(q, (batch, heads, seqlen_q, seqlen_k), attn_bias, dropout_p, dropout_mask)
    for name, descale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            checks.tensor(name, descale, dtypes=(torch.float32,), shape=(batch, heads_k), device=q.device)
    _check_count("attention_chunk", attention_chunk)
    checks.real("softcap", softcap)
    checks.flags(causal=causal, upcast=upcast, reorder_ops=reorder_ops)
    if intermediate_dtype is not None and not isinstance(intermediate_dtype, torch.dtype):
        raise TypeError(f"intermediate_dtype must be a torch.dtype or None, found {intermediate_dtype!r}")
    left, right = checks.window(window_size)

    window_size = left, 0 if causal else right
    hidden = construct_local_mask(seqlen_q, seqlen_k, window_size, sink_token_length, *padding, q.device)
    if attention_chunk > 0:
        hidden = hidden | construct_chunk_mask(seqlen_q, seqlen_k, attention_chunk, *padding, q.device)
    real_q, real_k = _real_queries_and_keys(seqlen_q, seqlen_k, *padding, q.device)
    hidden = hidden | ~real_q[..., None]

    dtype = torch.promote_types(q.dtype, torch.float32) if upcast else q.dtype
    queries, keys = _heads_first(q, heads, real_q, q_descale, dtype), _heads_first(k, heads, real_k, k_descale, dtype)
    values = _heads_first(v, heads, real_k, v_descale, dtype)
    if qv is not None:
        queries = torch.cat([queries, _heads_first(qv, heads, real_q, q_descale, dtype)], dim=-1)
        keys = torch.cat([keys, values], dim=-1)
    scale = queries.shape[-1] ** -0.5
    scores = queries @ (keys * scale).mT if reorder_ops else (queries * scale) @ keys.mT
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_bias is not None:
        scores = scores + attn_bias
    probabilities = fused_softmax.fwd(scores, hidden, 1.0, False).to(dtype)
    weights = probabilities
    if dropout_mask is not None:
        weights = weights.masked_fill(~dropout_mask, 0) / (1 - dropout_p)
    if intermediate_dtype is not None:
        weights = weights.to(intermediate_dtype).to(dtype)
    out = (weights @ values).transpose(1, 2).contiguous()
    return out.to(q.dtype), probabilities.to(q.dtype)


def _heads_first(x, heads, real, descale, dtype):
    """x (batch, seqlen, heads or heads_k, any) as (batch, heads, seqlen, any), times descale, 0 where not real."""
    x = _for_heads(x.transpose(1, 2), heads).to(dtype).masked_fill(~real[..., None], 0)
    return x if descale is None else (x * _for_heads(descale, heads)[..., None, None]).to(dtype)


def _for_heads(x, heads):
    """x (batch, heads or heads_k, ..) as (batch, heads, ..)."""
    return x.repeat_interleave(heads // max(x.shape[1], 1), dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _check_count(name, value, at_least=0):
    checks.integer(name, value)
    checks.number(name, value, value >= at_least, "at least {}", at_least)


def _check_none(reason, **values):
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name} must be None with {reason}, found a {type(value).__name__}")


def _check_qkv(q, k, v, qv):
    given = {name: x for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv)) if x is not None or name != "qv"}
    checks.alike(tuple(given), tuple(given.values()), dtypes=_DTYPES)
    checks.ndim("q", q, "(batch, seqlen_q, heads, head_dim)")
    batch, seqlen_q, heads, head_dim = q.shape
    checks.has_shape("k", k, (batch, None, None, head_dim))
    checks.has_shape("v", v, (*k.shape[:3], None))
    if qv is not None:
        checks.has_shape("qv", qv, (batch, seqlen_q, heads, v.shape[3]))
    checks.number("head_dim", head_dim, head_dim >= 1, "at least 1")
    heads_k = k.shape[2]
    divides = heads == heads_k or (heads_k > 0 and heads % heads_k == 0)
    checks.number("k's number of heads", heads_k, divides, "a divisor of q's, {}", heads)


def _check_padding(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, batch=None):
    """Check the arguments that mark padding. Without `batch`, the first mask or leftpad sets the batch size."""
    _check_count("seqlen_q", seqlen_q)
    _check_count("seqlen_k", seqlen_k)
    for name, value, dtypes, sizes in (
        ("query_padding_mask", query_padding_mask, (torch.bool,), (seqlen_q,)),
        ("key_padding_mask", key_padding_mask, (torch.bool,), (seqlen_k,)),
        ("key_leftpad", key_leftpad, checks.INTEGER_DTYPES, ()),
    ):
        if value is not None:
            checks.tensor(name, value, dtypes=dtypes, shape=(batch, *sizes))
            batch = value.shape[0]


def _check_weights(q, shape, attn_bias, dropout_p, dropout_mask):
    """Check the arguments that change scores and probabilities of this shape."""
    if attn_bias is not None:
        checks.tensor("attn_bias", attn_bias, dtypes=_DTYPES, device=q.device)
        sizes = zip(reversed(attn_bias.shape), reversed(shape))
        if attn_bias.dim() > len(shape) or any(size not in (1, full) for size, full in sizes):
            raise ValueError(f"attn_bias must broadcast to shape {shape}, found {tuple(attn_bias.shape)}")
    checks.real("dropout_p", dropout_p)
    checks.number("dropout_p", dropout_p, 0 <= dropout_p < 1, "at least 0 and less than 1")
    if dropout_mask is not None:
        checks.tensor("dropout_mask", dropout_mask, dtypes=(torch.bool,), shape=shape, device=q.device)
    elif dropout_p > 0:
        raise ValueError(f"dropout_mask must be given with dropout_p = {dropout_p}, found None")
