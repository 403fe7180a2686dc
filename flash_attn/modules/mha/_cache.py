"""The rules of a layer's cache: which rows and positions belong to a batch.

A cache is (rows, capacity, 2, heads_kv, head_dim), or with a block table (num_pages, page_size, 2, heads_kv, head_dim).
`inference_params` is a `flash_attn.utils.generation.InferenceParams`, or an object of another class with its first six
fields.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flash_attn import _library
from flash_attn._ops import checks


def _update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: Any) -> Tensor:
    """Append kv (batch, seqlen, 2, heads_kv, head_dim) to the cache of a layer, which is made if there is none.

    Returns the cache of these sequences up to the last key, (batch, seqlen_offset + seqlen, 2, heads_kv, head_dim).
    Raises ValueError if they do not fit into it, with a block table, and for a prompt behind other keys.

    Example:
        >>> from flash_attn.modules.mha import _update_kv_cache
        >>> from flash_attn.utils.generation import InferenceParams
        >>> state = InferenceParams(max_seqlen=8, max_batch_size=2)
        >>> _update_kv_cache(torch.randn(2, 5, 2, 4, 16), state, layer_idx=0).shape
        torch.Size([2, 5, 2, 4, 16])
        >>> state.seqlen_offset = 5
        >>> _update_kv_cache(torch.randn(2, 1, 2, 4, 16), state, layer_idx=0).shape
        torch.Size([2, 6, 2, 4, 16])
    """
    if has_pages(inference_params):
        raise ValueError("inference_params.block_table must be None for a cache in one piece, found a tensor")
    cache = inference_params.key_value_memory_dict.get(layer_idx)
    if cache is None:
        cache = kv.new_empty(inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:])
        inference_params.key_value_memory_dict[layer_idx] = cache
    name = f"key_value_memory_dict[{layer_idx!r}]"
    checks.tensor(name, cache, shape=(None, None, *kv.shape[2:]), device=kv.device)
    rows = cache_rows(cache, kv, inference_params)
    _check_prompt(kv, inference_params)
    end = inference_params.seqlen_offset + kv.shape[1]
    rows[:, inference_params.seqlen_offset : end] = kv
    return rows[:, :end]


def cache_rows(cache: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
    """The rows of `cache` that belong to the sequences of kv; it must have room for them."""
    check_room(kv, inference_params, *cache.shape[:2])
    first = inference_params.batch_size_offset
    return cache[first : first + kv.shape[0]]


def has_pages(inference_params: Any) -> bool:
    """Whether the caches are pools of pages."""
    return getattr(inference_params, "block_table", None) is not None


def size(inference_params: Any, layer_idx: Any) -> tuple[int, int]:
    """(rows, capacity) of the cache of a layer, or of what it will be: how many sequences of how many tokens."""
    if has_pages(inference_params):
        return len(inference_params.block_table), inference_params.max_seqlen
    cache = inference_params.key_value_memory_dict.get(layer_idx)
    return (inference_params.max_batch_size, inference_params.max_seqlen) if cache is None else cache.shape[:2]


def num_positions(cache: Tensor, inference_params: Any) -> int:
    """How many positions of a sequence a cache has. With pages, they are those of max_seqlen, rounded up to pages."""
    if not has_pages(inference_params):
        return cache.shape[1]
    table = inference_params.block_table
    checks.tensor("inference_params.block_table", table, dtypes=(torch.int32,), device=cache.device)
    checks.ndim("inference_params.block_table", table, "(max_batch_size, columns)")
    return table.shape[1] * cache.shape[1]


def pages_of_batch(cache: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
    """The block table (batch, columns) of the sequences of kv; it must have room for them."""
    found, longest = num_positions(cache, inference_params), inference_params.max_seqlen
    expected = "for at least max_seqlen, {}, positions in pages of {}"
    checks.number("inference_params.block_table", found, found >= longest, expected, longest, cache.shape[1])
    check_room(kv, inference_params, len(inference_params.block_table), longest)
    first = inference_params.batch_size_offset
    return inference_params.block_table[first : first + kv.shape[0]]


def check_room(x: Tensor, inference_params: Any, rows: int, capacity: int) -> None:
    """Check that x (batch, seqlen, ...) fits into a cache (rows, capacity, ...)."""
    last_row = inference_params.batch_size_offset + x.shape[0]
    last_position = inference_params.seqlen_offset + x.shape[1]
    expected = "at most {}, as the cache"
    checks.number("inference_params.batch_size_offset + batch", last_row, last_row <= rows, expected, rows)
    checks.number(
        "inference_params.seqlen_offset + seqlen", last_position, last_position <= capacity, expected, capacity
    )


def claim_cache(layer: nn.Module, layer_idx: Any, inference_params: Any) -> None:
    """Check that no other layer has written to this layer's cache since the prompt, and record that this one does."""
    writers = getattr(inference_params, "writers", None)
    if writers is None or torch.compiler.is_compiling():
        return
    is_own = inference_params.seqlen_offset == 0 or writers.get(layer_idx, id(layer)) == id(layer)
    checks.number("layer_idx", f"{layer_idx} in two", is_own, "different in each layer of a model")
    writers[layer_idx] = id(layer)


def has_rows_of_different_lengths(inference_params: Any) -> bool:
    """Whether the rows of the cache may hold different numbers of keys."""
    lengths = inference_params.lengths_per_sample, getattr(inference_params, "leftpad_per_sample", None)
    return any(each is not None for each in lengths)


def lengths(inference_params: Any, x: Tensor) -> int | Tensor:
    """How many keys the cache holds for the rows of x: an integer, or integers (batch,) where rows may differ."""
    per_sample = _of_rows("lengths_per_sample", inference_params, x)
    if per_sample is not None:
        return per_sample
    offset = inference_params.seqlen_offset
    leftpad = _of_rows("leftpad_per_sample", inference_params, x)
    return offset if leftpad is None or offset == 0 else offset - leftpad


def leftpad_of_prompt(inference_params: Any, x: Tensor) -> Tensor | None:
    """How many tokens of each row of a prompt x are padding, (batch,); None after the prompt, and without padding."""
    if inference_params is None or inference_params.seqlen_offset > 0:
        return None
    return _of_rows("leftpad_per_sample", inference_params, x)


def positions(inference_params: Any, tokens: Tensor) -> Tensor:
    """The position of each token (batch, seqlen, ...) in its own sequence, by which rotary embeddings rotate.

    Returns (seqlen,), or (batch, seqlen) where rows may differ. Padding gets 0, which every model has.
    """
    first, leftpad = lengths(inference_params, tokens), leftpad_of_prompt(inference_params, tokens)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    if leftpad is not None:
        first = first - leftpad
    return (columns + first[:, None]).clamp(min=0) if isinstance(first, Tensor) else columns + first


def _check_prompt(kv: Tensor, inference_params: Any) -> None:
    """Check that the rows of a cache hold nothing before a prompt, where that waits for no device."""
    held = _of_rows("lengths_per_sample", inference_params, kv)
    if inference_params.seqlen_offset == 0 and held is not None and _library.can_be_read_at_once(held):
        most = max(held.tolist(), default=0)
        expected = "at least {}, as lengths_per_sample says, since with 0 tokens are a prompt that sees only itself"
        checks.number("inference_params.seqlen_offset", 0, most <= 0, expected, most)


def _of_rows(name: str, inference_params: Any, x: Tensor) -> Tensor | None:
    """The part of a field (max_batch_size,) that belongs to the rows of x (batch, ...); None if it is not given."""
    values, first = getattr(inference_params, name, None), inference_params.batch_size_offset
    if values is None:
        return None
    name, end = f"inference_params.{name}", first + x.shape[0]
    checks.tensor(name, values, dtypes=checks.INTEGER_DTYPES, device=x.device)
    checks.ndim(name, values, "(max_batch_size)")
    checks.number(f"the length of {name}", len(values), len(values) >= end, "at least {}, for each row", end)
    return values[first:end]
