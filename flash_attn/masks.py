"""Builders of `key_ranges`, the masks of attention as one or two intervals of keys for each query row.

    from flash_attn import flash_attn_func, masks
    flash_attn_func(q, k, v, causal=True, key_ranges=masks.documents(cu_seqlens, seqlen))

A row sees the keys from start to end - 1, and with four numbers also those from start2 to end2 - 1. The ranges are
intersected with every other mask of the call, so `causal=True` makes any of them causal. Unless they say otherwise, the
builders return int32 (1, 1, seqlen_q, 2) on the device of their tensors, or on `device`. All except `from_bool` work
without waiting for a device or breaking a graph. Sizes are integers, or floats with whole values.

For packed tokens, (heads or 1, total_q, 2 or 4), pass `ranges[0]` of an entry, or concatenate those of several along
the rows: keys count from the first one of each entry.
"""

import torch
from torch import Tensor

from flash_attn import _library
from flash_attn._ops import checks

__all__ = [
    "chunks",
    "document_ids",
    "documents",
    "from_bool",
    "image_groups",
    "prefix_lm",
    "sink_and_window",
    "to_bool",
    "top_left_causal",
]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, *checks.INTEGER_DTYPES)
_FAR = torch.iinfo(torch.int32).max  # farther than any key


def documents(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """Each token sees the tokens of its own document.

    Arguments:
        cu_seqlens: int32 or int64 (documents + 1,) or (batch, documents + 1), never decreasing, which is checked
            on the CPU only: document n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Documents may be empty; a
            row may be padded by repeating its end.
        seqlen: the number of tokens. Those of no document see nothing.

    Returns:
        int32 (batch or 1, 1, seqlen, 2).

    Example:
        >>> from flash_attn.masks import documents
        >>> documents(torch.tensor([0, 2, 5]), 6)[0, 0].tolist()
        [[0, 2], [0, 2], [2, 5], [2, 5], [2, 5], [0, 0]]
    """
    checks.tensor("cu_seqlens", cu_seqlens, dtypes=checks.INTEGER_DTYPES)
    if cu_seqlens.dim() != 2:
        checks.ndim("cu_seqlens", cu_seqlens, "(documents + 1)")
        cu_seqlens = cu_seqlens[None]
    checks.number("cu_seqlens.shape[-1]", cu_seqlens.shape[-1], cu_seqlens.shape[-1] > 0, "at least 1")
    bounds = cu_seqlens.contiguous().long()
    if _library.can_be_read_at_once(bounds):
        step = min(bounds.diff().flatten().tolist(), default=0)
        checks.number("each cu_seqlens[n + 1] - cu_seqlens[n]", step, step >= 0, "at least 0")
    row = torch.arange(_size("seqlen", seqlen), device=bounds.device).expand(len(bounds), -1).contiguous()
    after = torch.searchsorted(bounds, row, right=True)  # the number of documents that start at or before the token
    within = (after > 0) & (after < bounds.shape[1])
    last = bounds.shape[1] - 1
    start, end = bounds.gather(1, (after - 1).clamp(min=0)), bounds.gather(1, after.clamp(max=last))
    return _ranges(start * within, end * within)[:, None]


def document_ids(ids: Tensor) -> Tensor:
    """Each token sees the tokens around it with the same id, as packed batches give the documents of a row.

    Arguments:
        ids: integers (batch, seqlen) or (seqlen,). Tokens of negative ids, as padding, see nothing. Two separate runs
            of one id are two documents.

    Returns:
        int32 (batch or 1, 1, seqlen, 2).

    Example:
        >>> from flash_attn.masks import document_ids
        >>> document_ids(torch.tensor([7, 7, 3, -1]))[0, 0].tolist()
        [[0, 2], [0, 2], [2, 3], [0, 0]]
    """
    ids = _two_dimensions("ids", ids)
    start, end = _runs(ids)
    seen = ids >= 0
    return _ranges(start * seen, end * seen)[:, None]


def prefix_lm(
    prefix: Tensor | int, seqlen_q: int, seqlen_k: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Each row sees the prefix and, causally, what follows it. For calls without `causal=True`, which hides the prefix.

    Arguments:
        prefix: how many keys all rows see: an int, or integers (batch,) or ().
        seqlen_q, seqlen_k: lengths; None means as many keys as queries. The last row sees the last key.
        device: where the ranges are; None means that of a tensor `prefix`, and torch's default for an int.

    Returns:
        int32 (batch or 1, 1, seqlen_q, 2).

    Example:
        >>> from flash_attn.masks import prefix_lm
        >>> prefix_lm(2, 4)[0, 0].tolist()
        [[0, 2], [0, 2], [0, 3], [0, 4]]
    """
    if isinstance(prefix, Tensor):
        checks.tensor("prefix", prefix, dtypes=_INTEGERS)
        if prefix.dim() != 0:
            checks.ndim("prefix", prefix, "(batch)")
    else:
        prefix = min(_size("prefix", prefix, expected="an integer or an integer tensor (batch,)"), _FAR)
    prefix = torch.as_tensor(prefix, device=device)
    own = _own_key(seqlen_q, seqlen_k, prefix.device)
    end = torch.maximum(own + 1, prefix.reshape(-1, 1))
    return _ranges(torch.zeros_like(end), end)[:, None]


def image_groups(ids: Tensor, window: int = -1) -> Tensor:
    """Each token sees what is before it; tokens of one image also see each other, in both directions.

    For calls without `causal=True`. (Gemma 3, arXiv:2503.19786.)

    Arguments:
        ids: integers (batch, seqlen) or (seqlen,): at least 0 for tokens of an image, which are neighbours with the
            same id; negative for text.
        window: how many tokens before its own a token sees; a negative number means all. An image is
            seen whole by its tokens.

    Returns:
        int32 (batch or 1, 1, seqlen, 2).

    Example:
        >>> from flash_attn.masks import image_groups
        >>> image_groups(torch.tensor([-1, 0, 0, -1]))[0, 0].tolist()
        [[0, 1], [0, 3], [0, 3], [0, 4]]
    """
    ids, window = _two_dimensions("ids", ids), min(checks.whole("window", window), _FAR)
    first, last = _runs(ids)
    own = torch.arange(ids.shape[1], device=ids.device)
    start = (own - window).clamp(min=0) if window >= 0 else torch.zeros_like(own)
    in_image = ids >= 0
    start = torch.where(in_image, first.minimum(start), start)
    return _ranges(start, torch.where(in_image, last, own + 1))[:, None]


def chunks(size: int, seqlen_q: int, seqlen_k: int | None = None, device: torch.device | str | None = None) -> Tensor:
    """Each row sees the keys of its own chunk of `size` keys; the argument `attention_chunk` says the same. (Llama 4.)

    Arguments:
        size: how many keys a chunk has.
        seqlen_q, seqlen_k: lengths; None means as many keys as queries. The last row is in the chunk of the last key.
        device: where the ranges are; None means torch's default.

    Returns:
        int32 (1, 1, seqlen_q, 2).

    Example:
        >>> from flash_attn.masks import chunks
        >>> chunks(2, 3)[0, 0].tolist()
        [[0, 2], [0, 2], [2, 4]]
    """
    size = min(_size("size", size, least=1), _FAR)
    start = _own_key(seqlen_q, seqlen_k, device).div(size, rounding_mode="floor") * size
    return _ranges(start, start + size)[None]


def sink_and_window(
    sinks: int,
    window_size: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Each row sees the first `sinks` keys and a window around its own key. (StreamingLLM, arXiv:2309.17453.)

    Add `causal=True` so that early rows do not see sinks that follow them.

    Arguments:
        sinks: how many leading keys all rows see.
        window_size: (left, right): how many keys before and after its own a row sees; -1 means no bound.
        seqlen_q, seqlen_k, device: as in `chunks`; the own key of the last row is the last one.

    Returns:
        int32 (1, 1, seqlen_q, 4).

    Example:
        >>> from flash_attn.masks import sink_and_window
        >>> sink_and_window(1, (1, 0), 4)[0, 0].tolist()
        [[0, 1, 0, 1], [0, 1, 0, 2], [0, 1, 1, 3], [0, 1, 2, 4]]
    """
    sinks, (left, right) = min(_size("sinks", sinks), _FAR), checks.window(window_size)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    own = _own_key(seqlen_q, seqlen_k, device)
    start = own - left if left >= 0 else torch.zeros_like(own)
    end = own + right + 1 if right >= 0 else torch.full_like(own, seqlen_k)
    first = _ranges(torch.zeros_like(own), torch.full_like(own, sinks))
    return torch.cat([first, _ranges(start, end)], -1)[None]


def top_left_causal(seqlen_q: int, device: torch.device | str | None = None) -> Tensor:
    """Row i sees the keys 0 to i, whatever the number of keys: aligned to the top left. For calls without `causal`.

    Returns:
        int32 (1, 1, seqlen_q, 2).

    Example:
        >>> from flash_attn.masks import top_left_causal
        >>> top_left_causal(3)[0, 0].tolist()
        [[0, 1], [0, 2], [0, 3]]
    """
    own = torch.arange(_size("seqlen_q", seqlen_q), device=device)
    return _ranges(torch.zeros_like(own), own + 1)[None, None]


def to_bool(key_ranges: Tensor, seqlen_k: int) -> Tensor:
    """Returns the mask that ranges stand for, bool (.., seqlen_q, seqlen_k), true where a row sees a key.

    Arguments:
        key_ranges: integers (.., seqlen_q, 2 or 4).
        seqlen_k: the number of keys.

    Example:
        >>> from flash_attn.masks import to_bool
        >>> to_bool(top_left_causal(2), 3)[0, 0].tolist()
        [[True, False, False], [True, True, False]]
    """
    checks.tensor("key_ranges", key_ranges, dtypes=_INTEGERS)
    checks.number("key_ranges.dim()", key_ranges.dim(), key_ranges.dim() >= 1, "at least 1")
    count = key_ranges.shape[-1]
    checks.number("key_ranges.shape[-1]", count, count in (2, 4), "2 or 4")
    key = torch.arange(_size("seqlen_k", seqlen_k), device=key_ranges.device)
    bounds = key_ranges.unsqueeze(-1).unflatten(-2, (-1, 2))  # (.., seqlen_q, 1 or 2, 2, 1)
    return ((key >= bounds[..., 0, :]) & (key < bounds[..., 1, :])).any(-2)


def from_bool(keep: Tensor) -> Tensor | None:
    """Returns the ranges that stand for a mask, the inverse of `to_bool`; None if some row needs more than two.

    It waits for the device, since the answer depends on what the mask holds.

    Arguments:
        keep: bool (.., seqlen_k), true where a row sees a key.

    Returns:
        int32 (.., 2), or (.., 4) if some row sees two ranges; or None.

    Example:
        >>> from flash_attn.masks import from_bool
        >>> from_bool(torch.tensor([[True, True, False, True], [False, True, True, False]])).tolist()
        [[0, 2, 3, 4], [1, 3, 3, 3]]
    """
    checks.tensor("keep", keep, dtypes=(torch.bool,))
    checks.number("keep.dim()", keep.dim(), keep.dim() >= 1, "at least 1")
    size = keep.shape[-1]
    if keep.numel() == 0:
        return keep.new_zeros(*keep.shape[:-1], 2, dtype=torch.int32)
    before, after = torch.nn.functional.pad(keep, (1, 1)).unfold(-1, size + 1, 1).unbind(-2)
    edges = torch.stack([after & ~before, before & ~after], -2).byte()  # where ranges start, and where they end
    runs = int(edges[..., 0, :].sum(-1).max())
    if runs > 2:
        return None
    first = edges.argmax(-1)
    if runs < 2:
        return first.int()
    last = size - edges.flip(-1).argmax(-1)
    is_one = first[..., :1] == last[..., :1]
    return torch.cat([first, torch.where(is_one, first[..., 1:], last)], -1).int()


def _ranges(start: Tensor, end: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(start, end), -1).clamp(0, _FAR).int()


def _size(name: str, value: int, least: int = 0, expected: str = "an integer") -> int:
    """Returns a size as an int, which must not be less than `least`."""
    value = checks.whole(name, value, expected)
    checks.number(name, value, value >= least, "at least {}", least)
    return value


def _own_key(seqlen_q: int, seqlen_k: int | None, device: torch.device | str | None) -> Tensor:
    """Returns i + seqlen_k - seqlen_q for each row i, (1, seqlen_q)."""
    seqlen_q = _size("seqlen_q", seqlen_q)
    seqlen_k = seqlen_q if seqlen_k is None else _size("seqlen_k", seqlen_k)
    return torch.arange(seqlen_k - seqlen_q, seqlen_k, device=device)[None]


def _two_dimensions(name: str, ids: Tensor) -> Tensor:
    checks.tensor(name, ids, dtypes=_INTEGERS)
    ids = ids[None] if ids.dim() == 1 else ids
    checks.ndim(name, ids, "(batch, seqlen)")
    return ids


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first position of the run of equal ids around each position, and the position after its last."""
    position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    changes = torch.ones_like(ids, dtype=torch.bool)
    changes[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = torch.where(changes, position, 0).cummax(1).values
    ends = torch.cat([changes[:, 1:], changes.new_ones(len(ids), min(1, ids.shape[1]))], 1)
    last = torch.where(ends, position + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return first, last
