"""Attention of transformers' models, with the features that its own integration of flash-attn does not know.

    import flash_attn.integrations.transformers
    flash_attn.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_attention")

`register` puts two functions into transformers' registries. The mask function turns the mask that a model asks for into
arguments of `flash_attn.flash_attn_func`, once in each forward pass of a model, since its layers share masks; the
attention function makes the call. What is computed is what transformers' eager attention computes, except in rows
that see no key: they give 0 here, and a mean of hidden values there.

Masks that transformers builds itself (causal, sliding windows, chunks, packed sequences, padding) are recognised by the
functions that they are made of, and cost memory that grows with the sequence only. Any other mask is evaluated by
transformers, in blocks of rows, at most 2^24 bools at once, and becomes one or two ranges of keys for each row. If some
row needs more than two, the mask is held whole: (batch, 1, seqlen_q, seqlen_k) bools. It is also held whole where
torch.compile traces the creation of the mask, unless it is causal or full and the batch has no padding; masks that are
created before the compiled graph, as by `generate`, keep their compact form.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attn import _library, masks
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks, invariance
from flash_attn._ops.flash_attn_features import BIAS_DTYPES, FLOAT8, SINK_DTYPES
from flash_attn.context_parallel import Plan, cp_attn_func
from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.integrations._float8_cache import codes_of, float8_cache, refuse_gradients, scales_of

__all__ = ["Mask", "attention", "float8_cache", "mask", "register"]

_BLOCK = 2**24  # elements of a mask that are evaluated at once
_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_OWN: dict[type, str | None] = {}  # the answers of `_attention_of_its_own`, by the class of the configuration


def register(name: str = "fused_attention") -> str:
    """Make `attn_implementation=name` known to transformers. Doing so again changes nothing.

    Arguments:
        name: a string without "flash" in it. transformers takes a name with "flash" for a build of flash-attn, to
            which it passes less (no sinks, no masks except padding), and redirects models that need more.

    Returns:
        name.

    Raises:
        ImportError: transformers is not installed, or older than 5.
        ValueError: name has "flash" in it, or is one of transformers' own.

    Example:
        >>> from flash_attn.integrations.transformers import register
        >>> name = register()
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 8])
    """
    if not isinstance(name, str) or "flash" in name.lower():
        raise ArgumentError(f'name must be a string without "flash", which transformers redirects, found {name!r}')
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError("flash_attn.integrations.transformers needs transformers 5 or newer: install it") from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("flash_attn.integrations.transformers needs transformers 5 or newer, found an older one")
    if AttentionInterface().get(name, attention) is not attention or name == "eager":
        raise ArgumentError(f"name must not be one of transformers' own, found {name!r}")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


# ---------------------------------------------------------------------------------------------------------------------
# The attention function


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Mask | Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    cache: object = None,
    output_attentions: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    head_mask: Tensor | None = None,
    cp_plan: Plan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it. Other keyword arguments have no effect, as in its "sdpa".

    Arguments:
        module: the layer; its `is_causal` (true if it has none) counts where neither a mask nor is_causal is given.
        query: (batch, heads, seqlen_q, head_dim). float16 and bfloat16 run in kernels; under autocast, query, key and
            value are cast to its dtype.
        key, value: (batch, heads_k, seqlen_k, head_dim), where heads_k divides heads; value may have another head_dim.
            Those of a `float8_cache` are in float8, beside a query in 16 bits.
        attention_mask: what `mask` returned; or a tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k), bool,
            true where a row sees a key, or numbers to add. None: causal or full, and within sliding_window.
        dropout: probability; scaling: factor of the scores, None for head_dim ** -0.5; softcap: see
            `flash_attn.flash_attn_func`.
        sliding_window: how many keys a row sees, its own included. Counts only without a mask, which knows it already.
        is_causal: without a mask, row i sees the keys 0 to i; a single row sees all.
        s_aux: (heads,), the score of the attention sink of each head; has a gradient.
        position_bias: broadcasts to (batch, heads, seqlen_q, seqlen_k), added to the scores; has a gradient. seqlen_k
            is that of key, also where a cache holds room for more keys than are seen.
        sinks: (batch, heads, seqlen_q, 1), the score of a sink for each row; has a gradient.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: the bounds of packed sequences, int32
            (sequences + 1,), over the tokens of the whole batch, and the longest ones.
        cp_plan: a `flash_attn.context_parallel.Plan` of which the tokens are those of this rank. Models hand it on:
            call them with input_ids and position_ids of `cp_plan.shard_batch`, without attention_mask, and
            cp_plan=plan. What a row sees then follows from the plan, is_causal and sliding_window.

    Returns:
        (out, None), out (batch, seqlen_q, heads, head_dim of value). Rows that see no key are 0, with no gradient.

    Raises:
        ValueError: output_attentions, a head_mask, a paged cache, or the indices or block_indices of sparse attention,
            which only transformers' own functions have; a result of `mask` for other lengths; with cp_plan, padding,
            biases, sinks of rows and models with chunks; or a wrong shape or value. Wrong types raise TypeError.
        NotImplementedError: a mask, or packed sequences beside a bias, sinks or a `float8_cache`, with which the level
            of batch invariance in force cannot be kept; a `float8_cache` where gradients are computed.

    Example:
        >>> from flash_attn.integrations.transformers import attention
        >>> q, k, v = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
        >>> attention(torch.nn.Module(), q, k, v, None)[0].shape  # causal
        torch.Size([1, 5, 8, 16])
    """
    if output_attentions:
        raise ArgumentError(
            f'output_attentions must be false, found {output_attentions!r}: use "eager", which holds weights'
        )
    if cache is not None:
        raise ArgumentError(
            f"cache must be None, found a {type(cache).__name__}: a paged cache needs transformers' own functions"
        )
    for name, given in (("indices", indices), ("block_indices", block_indices)):
        if given is not None:
            what = 'sparse attention is not computed here, use "eager" or "sdpa"'
            raise ArgumentError(f"{name} must be None, found a {type(given).__name__}: {what}")
    if head_mask is not None:
        what = 'heads are not masked here, use "eager"'
        raise ArgumentError(f"head_mask must be None, found a {type(head_mask).__name__}: {what}")
    key, value = codes_of(key), codes_of(value)
    _check_scores(query, key, attention_mask, scaling, s_aux, position_bias, sinks)
    if cp_plan is not None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        _refuse_with_plan(module, attention_mask, position_bias, sinks)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = _without_mask(bool(is_causal), sliding_window).window_size
        options: dict[str, Any] = dict(softmax_scale=scaling, window_size=window, softcap=softcap or 0.0)
        out = cp_attn_func(q, k, v, dropout, causal=bool(is_causal), plan=cp_plan, learnable_sink=s_aux, **options)
        return cast(Tensor, out), None
    lengths = (query.shape[2], key.shape[2])
    if isinstance(attention_mask, Mask) and attention_mask.shape[2:] != lengths:
        raise ArgumentError(
            f"attention_mask must be made for (seqlen_q, seqlen_k) = {lengths}, those of query and key, "
            f"found {tuple(attention_mask.shape[2:])}"
        )
    scales = scales_of(key, value)
    if scales:
        refuse_gradients(query)  # the cache has refused those of keys and values
    if (dtype := _library.autocast_dtype(query)) is not None:
        query, key, value = (x if x.dtype == FLOAT8 else x.to(dtype) for x in (query, key, value))
    if isinstance(attention_mask, Mask):
        seen = attention_mask.seen
        if seen.unpadded is not None and position_bias is None and sinks is None and cu_seq_lens_q is None:
            seen = seen.unpadded
    elif attention_mask is not None:
        seen = Seen(attn_bias=attention_mask)
    else:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        seen = _without_mask(bool(is_causal) and query.shape[2] > 1, sliding_window)
        if seen.causal and cu_seq_lens_q is None:  # row i is at key i, also where a cache holds room for more
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    documents = seen.documents
    if documents is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        documents = Documents(cu_seq_lens_q.int(), cu_seq_lens_k.int(), max_length_q, max_length_k)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    bias, ranges = _sum(seen.attn_bias, position_bias), seen.key_ranges
    common: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": seen.causal,
        "window_size": seen.window_size,
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
    }
    if documents is not None:
        if bias is None and ranges is None and sinks is None and seen.seqused_k is None and not scales:
            tokens, keys, values = (x.flatten(0, 1) for x in (q, k, v))
            out = flash_attn_varlen_func(tokens, keys, values, **documents.bounds(), **common)
            return torch.unflatten(out, 0, q.shape[:2]), None
        if scales and invariance.level():
            raise NotImplementedError(
                "past_key_values must not be a float8_cache beside padding or packed sequences at a level of batch "
                f"invariance, found level {invariance.level()}: pass sequences one by one, or use another cache"
            )
        ranges = _intersection(ranges, documents.key_ranges(*q.shape[:2]))
    if ranges is not None or seen.attn_bias is not None:
        invariance.refuse_masks_of_batches(query, moves_tokens=seen.moves_tokens or documents is not None)
    common |= dict(attn_bias=bias, key_ranges=ranges)
    if scales:
        if common.pop("dropout_p"):
            raise ArgumentError(f"dropout must be 0 with a float8_cache, found {dropout}")
        held: dict[str, Any] = dict(cache_seqlens=seen.seqused_k, return_softmax_lse=sinks is not None)
        out = flash_attn_with_kvcache(q, k, v, **common, **held, **scales)
    else:
        out = flash_attn_func(q, k, v, **common, seqused_k=seen.seqused_k, return_lse=sinks is not None)
    if sinks is not None:  # a sink of its own for each row leaves exp(lse) / (exp(lse) + exp(sink)) to the keys
        out, lse = out
        share = torch.sigmoid(lse.unsqueeze(-1) - sinks.float()).transpose(1, 2)
        out = (out * share).to(q.dtype)
    return out, None


def _refuse_with_plan(module, attention_mask, position_bias, sinks):
    """Refuse what a plan does not know. It knows documents and the mask of packed ones, which has no other tensors."""
    seen = attention_mask.seen if isinstance(attention_mask, Mask) else None
    has_padding = seen is not None and (seen.seqused_k is not None or seen.attn_bias is not None)
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    found = {
        "attention_mask": None if seen is not None and not has_padding else attention_mask,
        "position_bias": position_bias,
        "sinks": sinks,
        "config.attention_chunk_size": chunk,
    }
    for name, value in found.items():
        if value is not None:
            raise ArgumentError(f"{name} must be None with cp_plan, found {chunk or 'a ' + type(value).__name__}")
    _refuse_model_with_plan(getattr(module, "config", None))


_LAYERS_WITH_PLAN = ("full_attention", "sliding_attention", "attention", "moe")  # "moe": a layer without attention


def _refuse_model_with_plan(config):
    """Refuse models whose other layers need the whole row: they have the tokens of a rank, and would not say so."""
    for name in ("layer_types", "layers_block_type"):
        others = sorted({str(each) for each in getattr(config, name, None) or ()} - {*_LAYERS_WITH_PLAN})
        if others:
            raise ArgumentError(f"config.{name} must be of {', '.join(_LAYERS_WITH_PLAN)} with cp_plan, found {others}")
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None) or {}
        for options in (given, *given.values()):  # of all layers, or of each type of layer
            kind = str(options.get("rope_type", options.get("type"))) if isinstance(options, Mapping) else ""
            if kind == "longrope" or "dynamic" in kind:
                what = "its frequencies depend on the longest position, and ranks have different ones"
                raise ArgumentError(f"config.{name} must have another rope_type with cp_plan, found {kind!r}: {what}")


def _check_scores(query, key, attention_mask, scaling, s_aux, position_bias, sinks):
    """Check what changes the scores, under the names that the caller knows."""
    rows = query.shape[:3]
    mask = None if isinstance(attention_mask, Mask) else attention_mask
    options: dict[str, Any] = dict(dtypes=BIAS_DTYPES, device=query.device)
    if mask is not None:
        checks.broadcasts("attention_mask", mask, (*rows, key.shape[2]), **options)
    if position_bias is not None:
        checks.broadcasts("position_bias", position_bias, (*rows, key.shape[2]), **options)
    if sinks is not None:
        checks.broadcasts("sinks", sinks, (*rows, 1), **options)
    if s_aux is not None:
        checks.tensor("s_aux", s_aux, dtypes=SINK_DTYPES, shape=rows[1:2], device=query.device)
    if scaling is not None:
        checks.number("scaling", scaling, checks.as_float("scaling", scaling) >= 0, "at least 0")


def _without_mask(is_causal: bool, sliding_window: int | None) -> "Seen":
    if sliding_window is None:
        return Seen(is_causal)
    return Seen(is_causal, (sliding_window - 1, 0 if is_causal else sliding_window - 1))


def _sum(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask, bool or numbers, and a bias as one bias."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else mask + bias


def _intersection(ranges: Tensor | None, others: Tensor | None) -> Tensor | None:
    """What both of two `key_ranges` show. One of them has one range for each row."""
    if ranges is None or others is None:
        return others if ranges is None else ranges
    # Not the method, at which Dynamo breaks graphs within `batch_invariant_layers()`.
    ranges, others = (torch.unflatten(x, -1, (-1, 2)) for x in (ranges, others))
    start, end = torch.maximum(ranges, others)[..., 0], torch.minimum(ranges, others)[..., 1]
    return torch.stack([start, end], -1).flatten(-2)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


class Documents(NamedTuple):
    """Packed sequences, over the tokens of a whole batch: arguments of `flash_attn.flash_attn_varlen_func`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None
    seqused_k: Tensor | None = None

    def bounds(self) -> dict[str, Any]:
        """The arguments, with the longest sequences where they were not given."""
        longest = {
            "max_seqlen_q": self.cu_seqlens_q.diff().max() if self.max_seqlen_q is None else self.max_seqlen_q,
            "max_seqlen_k": self.cu_seqlens_k.diff().max() if self.max_seqlen_k is None else self.max_seqlen_k,
        }
        return {**self._asdict(), **longest}

    def key_ranges(self, batch: int, seqlen: int) -> Tensor:
        """The same as `key_ranges` of a dense batch."""
        ranges = masks.documents(self.cu_seqlens_k, batch * seqlen).view(batch, 1, seqlen, 2)
        return ranges - seqlen * torch.arange(batch, device=ranges.device, dtype=torch.int32).view(-1, 1, 1, 1)


class Seen(NamedTuple):
    """What the rows of a batch see: arguments of `flash_attn.flash_attn_func`.

    unpadded: the same with documents, and padding as documents whose rows see no key, if that can be said and a level
        of batch invariance is in force. Then kernels compute a padded sequence as they do without padding.
    moves_tokens: padding, or other packed sequences, come before a token, so that its place depends on the batch. It
        is known at a level only, and counts where no documents leave out what comes before.
    """

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    key_ranges: Tensor | None = None
    seqused_k: Tensor | None = None
    attn_bias: Tensor | None = None
    documents: Documents | None = None
    unpadded: "Seen | None" = None
    moves_tokens: bool = False


class Mask:
    """A mask on its way from `mask` to `attention`, in the place of a tensor.

    A model that treats it as a tensor (slices it, adds to it, hands it to a function of torch) gets one, bool
    (batch, 1, seqlen_q, seqlen_k), true where a row sees a key, evaluated then. Where it is added to scores, it is the
    mask of numbers that eager attention adds.

    Example:
        >>> from flash_attn.integrations.transformers import Mask, mask
        >>> seen = mask(batch_size=1, q_length=2, kv_length=2)
        >>> isinstance(seen, Mask), seen.shape
        (True, torch.Size([1, 1, 2, 2]))
        >>> seen.dense()[0, 0]
        tensor([[ True, False],
                [ True,  True]])
    """

    dtype, ndim, is_nested = torch.bool, 4, False

    def __init__(self, seen: Seen, evaluate: Callable[[], Tensor], shape: tuple[int, ...], device: torch.device | str):
        self.seen, self.shape, self.device = seen, torch.Size(shape), torch.device(device)
        self._evaluate = evaluate

    def dense(self) -> Tensor:
        """The mask as a tensor."""
        return self._evaluate().expand(self.shape)

    def eager(self, other: Any) -> Any:
        """The mask as numbers to add to `other`: 0 where a row sees a key, elsewhere the least number of its dtype."""
        if not isinstance(other, Tensor) or not other.is_floating_point():
            return self.dense()
        least = torch.finfo(other.dtype).min
        return torch.zeros(self.shape, dtype=other.dtype, device=self.device).masked_fill(~self.dense(), least)

    def to(self, *args: Any, **kwargs: Any) -> "Mask | Tensor":
        """A copy on another device, or, as with a dtype, what a tensor would become."""
        if len(args) != 1 or not isinstance(args[0], (torch.device, str)) or kwargs.keys() - {"non_blocking"}:
            return self.dense().to(*args, **kwargs)
        seen = _mapped(lambda x: x.to(args[0]), Tensor, self.seen)
        return Mask(seen, lambda: self.dense().to(args[0]), self.shape, args[0])

    def contiguous(self) -> "Mask":
        """This mask, which `generate` asks for before it hands masks to a compiled model."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __and__(self, other: Tensor) -> Tensor:
        return self.dense() & other

    def __or__(self, other: Tensor) -> Tensor:
        return self.dense() | other

    def __invert__(self) -> Tensor:
        return ~self.dense()

    def __add__(self, other: Any) -> Tensor:
        return self.eager(other) + other

    def __radd__(self, other: Any) -> Tensor:
        return other + self.eager(other)

    def __eq__(self, other: object) -> Any:
        return self.dense() == (other.dense() if isinstance(other, Mask) else other)

    def __ne__(self, other: object) -> Any:
        return self.dense() != (other.dense() if isinstance(other, Mask) else other)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", None) in _ADDITIONS:
            summands = [*args, *(kwargs or {}).values()]
            scores = next((x for x in summands if isinstance(x, Tensor)), None)
            args, kwargs = (_mapped(lambda x: x.eager(scores), cls, x) for x in (args, kwargs or {}))
        return function(*_mapped(cls.dense, cls, args), **_mapped(cls.dense, cls, kwargs or {}))


def _mapped(function: Callable, kind: type, value: Any) -> Any:
    """value, with each x of the kind in it, also inside tuples, lists and dicts, replaced by function(x)."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(function, kind, x) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_mapped(function, kind, x) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: "Tensor | Mask | None" = None,
    *,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Mask:
    """What a kind of layer sees, as transformers asks for it once in a forward pass.

    Arguments:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: positions in the text of the first query and of the first key.
        mask_function: (batch index, head index, position of the query, position of the key) -> bool, on integer tensors
            that broadcast; None is causal.
        attention_mask: bool (batch_size, positions), false where a key is padding; keys beyond its end are, too.
            Or a result of this function, which is returned as it is.
        use_vmap: evaluate mask_function position by position.
        config: the configuration of the model that asks.

    Returns:
        Exactly what mask_function and attention_mask say. Never None, which layers interpret in different ways.

    Raises:
        ValueError: the model computes attention in code of its own, which would misread the mask.
        NotImplementedError: the cache has dropped keys, and the level of batch invariance is 2.

    Example:
        >>> from flash_attn.integrations.transformers import mask
        >>> seen = mask(1, 3, 3, attention_mask=torch.tensor([[False, True, True]]))
        >>> seen[0, 0].int()  # causal, and the first token is padding
        tensor([[0, 0, 0],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    if (own := _attention_of_its_own(type(config))) is not None:
        raise ArgumentError(
            f"attn_implementation must be one that {type(config).__name__} computes itself, found flash_attn's: {own} "
            'does not go through transformers\' AttentionInterface, use "eager"'
        )
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    invariance.refuse_rolling_caches(kv_offset)
    function = causal_mask_function if mask_function is None else mask_function

    def evaluate(first: int = 0, rows: int = q_length) -> Tensor:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=rows,
            kv_length=kv_length,
            q_offset=q_offset + first,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    shape = (batch_size, 1, q_length, kv_length)
    pattern = _pattern(function)
    seen = None if pattern is None else _known(pattern, attention_mask, q_offset, kv_offset, shape, device)
    seen = _evaluated(evaluate, shape) if seen is None else seen
    if invariance.level():
        is_packed = pattern is not None and pattern.documents is not None
        seen = seen._replace(moves_tokens=is_packed or _has_padding_inside(attention_mask, kv_offset, kv_length))
    return Mask(seen, evaluate, shape, device)


def _not_padding(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """Bool (batch, kv_length), true at the keys that attention_mask keeps; it may end before them."""
    keep = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return pad(keep, (0, kv_length - keep.shape[1]))


def _has_padding_inside(attention_mask: Tensor | None, kv_offset: int, kv_length: int) -> bool:
    """Whether there is padding before a key that is none. A graph does not tell."""
    if attention_mask is None or torch.compiler.is_compiling():
        return False
    keep = _not_padding(attention_mask, kv_offset, kv_length)
    return bool((keep[:, 1:] & ~keep[:, :-1]).any())


@torch.compiler.assume_constant_result
def _attention_of_its_own(config: type) -> str | None:
    """The name of a class of the model that computes attention without transformers' interface, if there is one."""
    if config not in _OWN:
        package = config.__module__.rpartition(".")[0]
        _OWN[config] = next(
            (
                own
                for name, module in list(sys.modules.items())
                if name.startswith(f"{package}.modeling_") and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")
                for own, value in vars(module).items()
                if "Attention" in own and isinstance(value, type) and value.__module__ == name
            ),
            None,
        )
    return _OWN[config]


def _evaluated(evaluate: Callable[..., Tensor], shape: tuple[int, ...]) -> Seen:
    """A mask of any kind: as ranges if one or two for each row express it, else whole, as a bias."""
    batch, _, seqlen_q, seqlen_k = shape
    if torch.compiler.is_compiling():
        return Seen(attn_bias=evaluate())
    rows = max(1, _BLOCK // max(1, batch * seqlen_k))
    blocks = []
    for first in range(0, seqlen_q, rows):
        keep = evaluate(first, min(rows, seqlen_q - first))
        block = masks.from_bool(keep[:1] if keep.stride(0) == 0 else keep)
        if block is None:
            return Seen(attn_bias=evaluate())
        blocks.append(block)
    count = max(block.shape[-1] for block in blocks)
    return Seen(key_ranges=torch.cat([pad(block, (0, count - block.shape[-1])) for block in blocks], 2))


class _Pattern(NamedTuple):
    """A mask that is recognised: query q sees keys from q - left to q + right, of its chunk, and of its document.

    chunk: the size of chunks, and the positions (batch,) from which they count.
    documents: (batch, seqlen), a number for each token; positions: (batch, seqlen), which left and right count.
    """

    left: int | None = None
    right: int | None = None
    chunk: tuple[int, Tensor] | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None


def _pattern(function: Callable) -> _Pattern | None:
    """The pattern of a mask function, if it is made of functions of transformers that are known here; else None."""
    if torch.compiler.is_compiling():  # which cannot look into closures
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if function is causal_mask_function:
            return _Pattern(right=0)
        return _Pattern() if function is bidirectional_mask_function else None
    kind = _known_functions().get(getattr(function, "__code__", None))
    if kind is None:
        return None
    free = inspect.getclosurevars(function).nonlocals
    if kind == "and_masks":
        return _all([_pattern(part) for part in free["mask_functions"]])
    if kind == "remap_positions_for_packed_sequence":
        inner = _pattern(free["mask_function"])
        if inner is None or inner[2:] != (None, None, None):
            return None
        return inner._replace(positions=free["position_ids"])
    return {
        "bidirectional_mask_function": lambda: _Pattern(),
        "causal_mask_function": lambda: _Pattern(right=0),
        "sliding_window_overlay": lambda: _Pattern(left=free["sliding_window"] - 1),
        "sliding_window_bidirectional_overlay": lambda: _Pattern(free["sliding_window"], free["sliding_window"]),
        "chunked_overlay": lambda: _Pattern(chunk=(free["chunk_size"], free["left_padding"])),
        "packed_sequence_mask_function": lambda: _Pattern(documents=free["packed_sequence_mask"]),
    }[kind]()


def _all(parts: list[_Pattern | None]) -> _Pattern | None:
    """The intersection of patterns; None if no pattern expresses it."""
    known = [part for part in parts if part is not None]
    sides = [[x for x in side if x is not None] for side in zip(*known, strict=True)]
    if len(known) < len(parts) or any(len(side) > 1 for side in sides[2:]):
        return None
    return _Pattern(
        *(min(side, default=None) for side in sides[:2]), *(side[0] if side else None for side in sides[2:])
    )


@cache
def _known_functions() -> dict[Any, str]:
    """The names of the mask functions by their code objects, which all functions made by one maker share."""
    from transformers import masking_utils

    makers: dict[str, tuple | None] = {
        "bidirectional_mask_function": None,
        "causal_mask_function": None,
        "and_masks": (),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "chunked_overlay": (1, None),
        "packed_sequence_mask_function": (None,),
        "remap_positions_for_packed_sequence": (None, None),
    }
    functions = {}
    for name, arguments in makers.items():
        if (function := getattr(masking_utils, name, None)) is not None:
            functions[(function if arguments is None else function(*arguments)).__code__] = name
    return functions


def _known(
    pattern: _Pattern,
    attention_mask: Tensor | None,
    q_offset: int | Tensor,
    kv_offset: int,
    shape: tuple[int, ...],
    device: torch.device | str,
) -> Seen | None:
    """A pattern and padding as arguments of attention; None if the mask must be evaluated instead."""
    batch, _, seqlen_q, seqlen_k = shape
    left, right, chunk, ids, positions = pattern
    shift = q_offset - kv_offset  # where the first query is among the keys; a tensor in compiled graphs with a cache
    ranges: Tensor | None = None
    seqused_k: Tensor | None = None
    used = torch.tensor([[0, seqlen_k]], dtype=torch.int32, device=device)  # the range of keys that are no padding
    if attention_mask is not None:
        if attention_mask.dim() != 2 or torch.compiler.is_compiling():
            return None
        keep = _not_padding(attention_mask, kv_offset, seqlen_k)
        if not keep.all():
            if (ranges := masks.from_bool(keep)) is None:
                return None
            if pattern == _Pattern() and ranges.shape[-1] == 2 and not ranges[:, 0].any():
                return Seen(seqused_k=ranges[:, 1].contiguous())
            used = ranges
            ranges = ranges[:, None, None]
    if ids is not None or positions is not None:
        if ranges is not None or chunk is not None or (seqlen_q, shift) != (seqlen_k, 0):
            return None
        documents = _documents(ids, positions)
        return None if documents is None else Seen(right == 0, _window(left, right), documents=documents)
    query = torch.arange(seqlen_q, device=device) + shift
    if chunk is not None:
        size, first = chunk[0], chunk[1].view(-1, 1) - kv_offset
        start = first + (query - first).div(size, rounding_mode="floor") * size
        ranges = _intersection(ranges, torch.stack([start, start + size], -1)[:, None].int())
    if isinstance(shift, int):
        left = None if left is None or left >= shift + seqlen_q - 1 else left
        right = None if right is None or right >= seqlen_k - 1 - shift else right
    unpadded = None
    if invariance.level() and chunk is None and used.shape[1] == 2:
        told = seqlen_k if attention_mask is None else attention_mask.shape[1] - kv_offset
        unpadded = _unpadded(used.expand(batch, 2), left, right, shift, seqlen_q, seqlen_k, told)
    if (left, right) != (None, None) and not (isinstance(shift, int) and shift == seqlen_k - seqlen_q):
        # Attention aligns the last row with the last key that is used.
        if right == 0 and not (isinstance(shift, int) and not 0 <= shift <= seqlen_k - seqlen_q):
            seqused_k = torch.as_tensor(shift + seqlen_q, dtype=torch.int32, device=device).repeat(batch)
        else:
            start = torch.zeros_like(query) if left is None else query - left
            end = torch.full_like(query, seqlen_k) if right is None else query + right + 1
            ranges = _intersection(ranges, torch.stack([start, end], -1)[None, None].int())
            left = right = None
    if ranges is None:
        return Seen(right == 0, _window(left, right), seqused_k=seqused_k)
    ranges = ranges.expand(-1, -1, seqlen_q, -1)
    return Seen(right == 0, _window(left, right), ranges, seqused_k, unpadded=unpadded)


def _unpadded(
    used: Tensor, left: int | None, right: int | None, shift: int | Tensor, seqlen_q: int, seqlen_k: int, told: int
) -> Seen | None:
    """`Seen.unpadded`, where entry i has the keys used[i, 0] to used[i, 1] - 1, and row 0 the key `shift`.

    told: how many keys the padding was told of. Later rows are no padding, though their own keys are not seen.
    """
    first, end = used.unbind(1)
    rows = torch.tensor([0, seqlen_q], dtype=torch.int32, device=used.device).expand_as(used)
    if (left, right) != (None, None):  # which count from the last row, whose own key must then be the last
        if shift + seqlen_q > told:
            return None
        if right == 0:
            end = end.clamp(max=shift + seqlen_q)
        elif not isinstance(shift, int) or shift + seqlen_q < seqlen_k:
            return None
        rows = (torch.stack([first, end], 1) - shift).clamp(0, seqlen_q)
    count = (end - first).clamp(min=0)
    documents = Documents(
        _with_padding(rows, seqlen_q),
        _with_padding(used, seqlen_k),
        seqlen_q,
        seqlen_k,
        torch.stack([0 * count, count, 0 * count], 1).flatten().int(),
    )
    return Seen(right == 0, _window(left, right), documents=documents)


def _with_padding(spans: Tensor, seqlen: int) -> Tensor:
    """cu_seqlens of a whole batch, with three sequences for an entry: before, in and after its span [first, end)."""
    starts = seqlen * torch.arange(len(spans), device=spans.device).view(-1, 1)
    bounds = (starts + pad(spans, (1, 0))).flatten()
    return pad(bounds, (0, 1), value=len(spans) * seqlen).int()


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return (-1 if left is None else left, -1 if right is None else right)


def _documents(ids: Tensor | None, positions: Tensor | None) -> Documents | None:
    """The documents, if the tokens of each stand side by side at consecutive positions; else None."""
    if ids is None or torch.compiler.is_compiling():
        return None
    step = ids.diff()
    is_known = (step >= 0).all()
    if positions is not None:
        is_known &= ((positions.diff() == 1) | (step != 0)).all()
    if not is_known:
        return None
    starts = pad(step != 0, (1, 0), value=True).flatten().nonzero()[:, 0]
    cu_seqlens = pad(starts, (0, 1), value=ids.numel()).int()
    longest = int(cu_seqlens.diff().max())
    return Documents(cu_seqlens, cu_seqlens, longest, longest)
