"""The functions of the package ring-flash-attention, with its arguments and its divisions of tokens.

    from flash_attn.context_parallel.compat.ring_flash_attn import zigzag_ring_flash_attn_func
    out = zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group)

| functions | a rank has |
|---|---|
| `ring_flash_attn_*` | one part of the sequence |
| `zigzag_ring_flash_attn_*` | chunk r and, from the end, chunk r |
| `stripe_flash_attn_*` | token r, r + ranks, ... |
| `*_varlen_*` | the same of each document; cu_seqlens counts the tokens of one rank |
| `llama3_flash_attn_varlen_*` | one part of a row of documents |

Each computes what `flash_attn.flash_attn_func` computes for the whole sequence, windows included, by gathered keys, and
not by a ring: see `flash_attn.context_parallel.cp_attn_func`. Dropout and ALiBi are refused, and so are windows that
are not causal in `llama3_*`. New code should make a
`flash_attn.context_parallel.Plan`: functions with cu_seqlens read it from its device once for each new tensor, and with
zigzag they call attention once for each document.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_attn._errors import ArgumentError
from flash_attn._ops import checks, collectives
from flash_attn.context_parallel import Plan, cp_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
_LENGTHS = WeakIdKeyDictionary()  # of cu_seqlens that were read: their versions and lengths


def _attend(plan, q, k, v, dropout_p, scale, causal, window, slopes, deterministic, return_attn_probs):
    options = dict(plan=plan, deterministic=deterministic, return_lse=return_attn_probs)
    found: Any = cp_attn_func(q, k, v, dropout_p, scale, causal, window, alibi_slopes=slopes, **options)
    return (*found, None) if return_attn_probs else found


@functools.lru_cache(maxsize=64)
def _plan(lengths, group, layout, each_document):
    return Plan(list(lengths), group, layout=layout, method="gather", granularity=1, each_document=each_document)


def _group(group):
    return dist.group.WORLD if group is None else group


def _dense(layout: str) -> tuple[Callable, Callable, Callable]:
    """The functions of separate and of packed tensors, whose sequences are divided in this layout."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        group = _group(group)
        checks.tensor("q", q)
        checks.ndim("q", q, "(batch, seqlen, heads, head_dim)")
        plan = _plan((q.shape[1] * dist.get_world_size(group),), group, layout, False)
        options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
        return _attend(plan, q, k, v, *options)

    return func, *_packed(func)


def _varlen(layout: str) -> tuple[Callable, Callable, Callable]:
    """The same for packed documents, each divided by itself."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:
        group = _group(group)
        checks.tensor("q", q)
        checks.ndim("q", q, "(total, heads, head_dim)")
        world_size = dist.get_world_size(group)
        plan = _plan(tuple(world_size * n for n in _lengths(cu_seqlens)), group, layout, True)
        options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
        return _attend(plan, q, k, v, *options)

    return func, *_packed(func)


def _lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The lengths of documents, read once from each tensor, and again when it has been written to."""
    checks.tensor("cu_seqlens", cu_seqlens, dtypes=checks.INTEGER_DTYPES)
    if cu_seqlens.is_inference():  # it does not count what is written to it
        return tuple(cu_seqlens.diff().tolist())
    version, lengths = _LENGTHS.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version:
        version, lengths = cu_seqlens._version, tuple(cu_seqlens.diff().tolist())
        _LENGTHS[cu_seqlens] = version, lengths
    return lengths


def _packed(func: Callable) -> tuple[Callable, Callable]:
    """The forms of a function that take keys and values, or all three, in one tensor along dimension -3."""

    def kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        checks.tensor("kv", kv)
        checks.number("kv.shape[-3]", kv.shape[-3], kv.shape[-3] == 2, "2")
        return func(q, *kv.unbind(-3), *args, **kwargs)

    def qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
        checks.tensor("qkv", qkv)
        checks.number("qkv.shape[-3]", qkv.shape[-3], qkv.shape[-3] == 3, "3")
        return func(*qkv.unbind(-3), *args, **kwargs)

    _sign(kvpacked_func, func, ("q", "k", "v"), ("q", "kv"))
    _sign(qkvpacked_func, func, ("q", "k", "v"), ("qkv",))
    return kvpacked_func, qkvpacked_func


def _sign(function, model, replaced, names):
    """Give a function the signature of another, with other first parameters."""
    rest = [each for name, each in inspect.signature(model).parameters.items() if name not in replaced]
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for name in names]
    function.__signature__ = inspect.Signature([*first, *rest], return_annotation=Any)


# ---------------------------------------------------------------------------------------------------------------------
# A row of documents, of which each rank has one part


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Returns what `llama3_flash_attn_varlen_func` needs for rank `rank`: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, local_k_slice), the slice of the row that its queries see.

    Arguments:
        cu_seqlens: int32 (documents + 1,), of the whole row, whose length world_size must divide.
        causal: as in the call of attention.
        rank, world_size: of the group.

    Raises:
        ValueError: world_size does not divide the length.

    Example:
        >>> from flash_attn.context_parallel.compat.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
        >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 5, 8], dtype=torch.int32), True, rank=1, world_size=2)
        (tensor([0, 1, 4], dtype=torch.int32), tensor([0, 5, 8], dtype=torch.int32), 3, 5, slice(0, 8, None))
    """
    starts = [0, *torch.tensor(_lengths(cu_seqlens)).cumsum(0).tolist()]
    fits = starts[-1] % world_size == 0
    checks.number("cu_seqlens[-1]", starts[-1], fits, "divisible by world_size, {}", world_size)
    size = starts[-1] // world_size
    begin, end = rank * size, (rank + 1) * size
    parts = [(a, b) for a, b in itertools.pairwise(starts) if a < end and b > begin]
    rows = [0, *(min(b, end) - begin for _, b in parts)]
    first = parts[0][0] if parts else begin
    keys = [0, *(b - first for _, b in parts)]
    if causal and parts:
        keys[-1] = end - first
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(each, dtype=torch.int32, device=cu_seqlens.device) for each in (rows, keys)
    )
    longest = [max((y - x for x, y in itertools.pairwise(each)), default=0) for each in (rows, keys)]
    return cu_seqlens_q, cu_seqlens_k, longest[0], longest[1], slice(first, first + keys[-1])


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Any:
    """Attention of this rank's part of a row of documents to the keys of all ranks, which it gathers.

    Gradients of keys are summed in float32.

    Arguments:
        q, k, v: (tokens of this rank, heads, head_dim), as many on all ranks.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: as
            `llama3_flash_attn_prepare_cu_seqlens` returns them.
        heads_k_stride: how many key heads are gathered at a time; it must divide their number.
        dropout_p, alibi_slopes: must be left out.
        softmax_scale, causal, window_size, deterministic: as in `flash_attn.flash_attn_varlen_func`; windows only with
            causal.
        return_attn_probs: return (out, softmax_lse, None).
        group: a ProcessGroup; None: the default one.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel.compat import ring_flash_attn
        >>> cu_seqlens = torch.tensor([0, 40, 64], dtype=torch.int32)
        >>> *bounds, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 0, 1)
        >>> q, k, v = torch.randn(3, 64, 4, 16)
        >>> ring_flash_attn.llama3_flash_attn_varlen_func(
        ...     q, k, v, *bounds, heads_k_stride=1, local_k_slice=keys, causal=True, group=dist.group.WORLD).shape
        torch.Size([64, 4, 16])
        >>> dist.destroy_process_group()
    """
    if dropout_p or alibi_slopes is not None:
        raise ArgumentError("dropout_p and alibi_slopes must be left out where keys are gathered, found one of them")
    if not causal and max(checks.window(window_size)) >= 0:  # keys go on to the document's end, rows do not
        raise ArgumentError(f"window_size must be (-1, -1) without causal here, found {tuple(window_size)}: use Plan")
    group = _group(group)
    heads_k = k.shape[1]
    fits = heads_k_stride > 0 and heads_k % heads_k_stride == 0
    checks.number("heads_k_stride", heads_k_stride, fits, "a divisor of the number of key heads, {}", heads_k)
    outs, lses, share = [], [], q.shape[1] // heads_k
    for first in range(0, heads_k, heads_k_stride):
        part = slice(first, first + heads_k_stride)
        keys, values = (_Gathered.apply(x[:, part], group)[local_k_slice] for x in (k, v))
        queries = q[:, first * share : (first + heads_k_stride) * share]
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = flash_attn_varlen_func(
            queries, keys, values, *lengths, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, 1)
    return (out, torch.cat(lses), None) if return_attn_probs else out


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. Their gradients are summed in float32."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.dtype = group, x.dtype
        return collectives.gather_rows(x, group)[0]

    @staticmethod
    def backward(ctx, grad):
        total, _ = collectives.scatter_rows(grad.to(torch.promote_types(grad.dtype, torch.float32)), ctx.group)
        return total.to(ctx.dtype), None


# ---------------------------------------------------------------------------------------------------------------------
# transformers

_NEVER_TAKEN = ("softcap", "attention_mask", "s_aux", "sinks", "position_bias", "head_mask", "cache")
_OF_BATCH: dict[str, Any] = {}  # what `update_ring_flash_attn_params` has set


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Have transformers' models with attn_implementation="flash_attention_2" attend to the tokens of all ranks.

    `update_ring_flash_attn_params` must be called for each batch, whose only row is divided into equal parts.

    Arguments:
        process_group: the ranks. heads_k_stride: as in `llama3_flash_attn_varlen_func`.

    Models with sinks, softcap, masks, a position bias, or attention that is not causal raise an error that names it.

    Example:
        >>> from flash_attn.context_parallel.compat.ring_flash_attn import (
        ...     substitute_hf_flash_attn, update_ring_flash_attn_params)
        >>> substitute_hf_flash_attn(group, heads_k_stride=1)                                     # doctest: +SKIP
        >>> options = dict(attn_implementation="flash_attention_2", dtype=torch.bfloat16)
        >>> model = AutoModelForCausalLM.from_pretrained(name, **options)                         # doctest: +SKIP
        >>> update_ring_flash_attn_params(cu_seqlens, group)  # before each batch                 # doctest: +SKIP
        >>> logits = model(input_ids, position_ids=position_ids).logits  # of this rank's tokens  # doctest: +SKIP
    """
    from transformers import AttentionInterface

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        if not _OF_BATCH:
            raise RuntimeError("update_ring_flash_attn_params must be called before the model")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        needed = "use flash_attn.integrations.transformers"
        for name, given in (("softcap", softcap or None), ("attention_mask", attention_mask), *rest.items()):
            if name in _NEVER_TAKEN and given is not None:
                found = given if isinstance(given, float) else f"a {type(given).__name__}"
                raise ArgumentError(f"{name} must be None here, found {found}: {needed}")
        if not is_causal:
            raise ArgumentError(f"is_causal must be True here, found {is_causal}: {needed}")
        checks.number("query.shape[0]", query.shape[0], query.shape[0] == 1, "1, a row of documents")
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        options = dict(dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=window, group=process_group)
        out = llama3_flash_attn_varlen_func(q, k, v, **_OF_BATCH, heads_k_stride=heads_k_stride, **options)
        return out[None], None

    AttentionInterface.register("flash_attention_2", attention)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """Set the documents of the next batch for models of transformers: see `substitute_hf_flash_attn`.

    cu_seqlens: int32 (documents + 1,), of the whole row. process_group: the ranks.

    Example:
        >>> from flash_attn.context_parallel.compat.ring_flash_attn import update_ring_flash_attn_params
        >>> cu_seqlens = torch.tensor([0, 40, 64], dtype=torch.int32)  # two documents
        >>> update_ring_flash_attn_params(cu_seqlens, group)                                      # doctest: +SKIP
        >>> logits = model(input_ids, position_ids=position_ids).logits  # of this rank's tokens  # doctest: +SKIP
    """
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    _OF_BATCH.update(zip(names, prepared, strict=True))


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _dense("contiguous")
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _dense(
    "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _dense("striped")
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen(
    "contiguous"
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen("zigzag")
llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = _packed(llama3_flash_attn_varlen_func)


def _example(name):
    """Lines that call a function on one rank."""
    packed = next((each for each in ("qkvpacked", "kvpacked") if f"_{each}_" in name), "")
    tensors = {"qkvpacked": "qkv", "kvpacked": "q, kv", "": "q, k, v"}[packed]
    batch = "" if "varlen" in name else "1, "
    sizes = {
        "qkvpacked": f"torch.randn({batch}64, 3, 4, 16)",
        "kvpacked": f"torch.randn({batch}64, 4, 16), torch.randn({batch}64, 2, 4, 16)",
        "": f"torch.randn(3, {batch}64, 4, 16)",
    }[packed]
    lines, bounds = [f"{tensors} = {sizes}"], ""
    if "varlen" in name:
        lines, bounds = [*lines, "cu_seqlens = torch.tensor([0, 40, 64], dtype=torch.int32)"], "cu_seqlens, 40, "
    if "llama3" in name:
        lines += ["*bounds, keys = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank=0, world_size=1)"]
        bounds = "*bounds, 1, keys, "
    lines += [f"{name}({tensors}, {bounds}causal=True, group=dist.group.WORLD).shape"]
    return "\n".join(f"    >>> {line}" for line in lines) + f"\n    torch.Size([{batch}64, 4, 16])"


for _name in __all__:
    _function = globals()[_name]
    if not _function.__doc__:
        _function.__name__ = _function.__qualname__ = _name
        _function.__doc__ = f"""`flash_attn.flash_attn_func` of a sequence that is divided over the ranks of a group.

With the arguments of the package ring-flash-attention, and its division of tokens: one part of the sequence for each
rank (ring), chunk r and, from the end, chunk r (zigzag), token r, r + ranks, ... (stripe), or one part of a row of
documents (llama3); varlen divides each document so, and cu_seqlens counts the tokens of one rank.

Example:
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
    >>> from flash_attn.context_parallel.compat.ring_flash_attn import {_name}
{_example(_name)}
    >>> dist.destroy_process_group()
"""
