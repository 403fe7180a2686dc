"""CUDA graphs of decoding: capturing one step of a model, replaying it, and the caches that the graphs write to.

cache = update_graph_cache(model, None, batch_size=8, seqlen_og=0, max_seqlen=512)
logits = cache.run(tokens, position_ids, seqlen=100)                        # (8, 1, vocab)
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_attn._ops import checks, invariance
from flash_attn.utils.generation.inference_params import InferenceParams

_CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Run = Callable[[Tensor, Tensor, "int | Tensor"], Tensor]  # (input_ids, position_ids, seqlen) -> logits


def allocate_inference_cache(
    max_batch_size: int,
    max_seqlen: int,
    nheads: int,
    headdim: int,
    layers: int | Sequence[Hashable],
    device: torch.device | str | None,
    dtype: torch.dtype = torch.float16,
) -> dict[Hashable, Tensor]:
    """Uninitialised caches (max_batch_size, max_seqlen, 2, nheads, headdim), one for each layer.

    layers: the number of layers, which then are keyed 0, 1, ..., or their keys. Raises TypeError if dtype is not
    float16, bfloat16 or float32, and TypeError or ValueError for what is no size.

    >>> from flash_attn.utils.generation import allocate_inference_cache
    >>> {key: tuple(cache.shape) for key, cache in allocate_inference_cache(8, 512, 4, 64, 2, "cpu").items()}
    {0: (8, 512, 2, 4, 64), 1: (8, 512, 2, 4, 64)}
    """
    if dtype not in _CACHE_DTYPES:
        raise TypeError(f"dtype must be one of {_CACHE_DTYPES}, found {dtype}")
    shape = (
        checks.count("max_batch_size", max_batch_size),
        checks.count("max_seqlen", max_seqlen),
        2,
        checks.count("nheads", nheads),
        checks.count("headdim", headdim),
    )
    keys = range(layers) if isinstance(layers, int) else layers
    return {key: torch.empty(shape, device=device, dtype=dtype) for key in keys}


@dataclasses.dataclass
class DecodingCGCache:
    """The CUDA graphs of a model and the caches that they write to.

    max_batch_size, max_seqlen, device, dtype: of the caches.
    pool: (num_pages, page_size) of caches that are pools of pages, else None.
    callables: a graph for each (batch size, tokens of a step), as `capture_graph` returns it.
    mempool: the memory that the graphs share.
    inference_params: the state that the graphs read; it holds the caches.
    autocast: the dtype of autocast when the graphs were captured, None without autocast.
    addresses: where the graphs read the model's parameters and buffers.
    level: of batch invariance, when the graphs were captured.

    Example:
        >>> from flash_attn.utils.generation import DecodingCGCache, update_graph_cache
        >>> cache = update_graph_cache(model, DecodingCGCache(), 1, seqlen_og=3, max_seqlen=64)  # doctest: +SKIP
        >>> logits = cache.run(token, position_ids, seqlen=3)  # token (1, 1), position_ids 3    # doctest: +SKIP
    """

    max_batch_size: int = 0
    max_seqlen: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    callables: dict[tuple[int, ...], Run] = dataclasses.field(default_factory=dict)
    mempool: Any = None
    inference_params: InferenceParams | None = None
    autocast: torch.dtype | None = None
    addresses: list[int] = dataclasses.field(default_factory=list)
    pool: tuple[int, int] | None = None
    level: int = 0

    def run(self, input_ids: Tensor, position_ids: Tensor, seqlen: int | Tensor) -> Tensor:
        """Replay the graph for input_ids (batch, tokens of a step), where the caches hold seqlen tokens.

        seqlen is an integer, or an integer tensor (batch,) where rows differ.
        Returns logits (batch, tokens of a step, vocab). Raises KeyError if there is no graph of this shape.
        """
        return self.callables[tuple(input_ids.shape)](input_ids, position_ids, seqlen)

    def clear(self) -> None:
        """Free the graphs and the caches."""
        vars(self).update(vars(DecodingCGCache()))

    def __reduce__(self) -> tuple[type["DecodingCGCache"], tuple[()]]:
        """A copy of the model starts without graphs, since these would go on reading the parameters of the original."""
        return DecodingCGCache, ()


@torch.inference_mode(False)  # a later call outside of inference mode must be able to write
@torch.no_grad()
def update_graph_cache(
    model: nn.Module,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Iterable[int] = (1,),
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
) -> DecodingCGCache:
    """Capture the graphs that `cache` does not have yet, and return it; a new one if it is None.

    Caches and all graphs are replaced if the caches are too small, or, for a model with `depends_on_capacity`, of any
    other size; if they have pages of another size; if the model has moved to another device; if a parameter or buffer
    has another address; if autocast has another dtype; or if the level of batch invariance is another one.

    Arguments:
        batch_size, max_seqlen: the size of the batch, and of its longest sequence.
        cache: what an earlier call returned, or None.
        seqlen_og: how many tokens the caches hold.
        decoding_seqlens: for which numbers of tokens in a step graphs are captured.
        tensor_parallel: how many processes share the heads that model.config names.
        dtype: of the caches; if None, the dtype of autocast, or without autocast the dtype of the model's parameters.
        n_warmups: how often the model runs before the capture.
        page_size, num_pages: as in `decode`. The block table of `inference_params` is empty: before a replay, its rows
            must get the pages that they need, in place.

    Raises ValueError if the model is not on a GPU.

    Example:
        >>> from flash_attn.utils.generation import update_graph_cache
        >>> cache = update_graph_cache(model, None, batch_size=1, seqlen_og=3, max_seqlen=64)    # doctest: +SKIP
        >>> logits = cache.run(token, position_ids, seqlen=3)  # token (1, 1), position_ids 3    # doctest: +SKIP
    """
    parameter = next(model.parameters())
    device = parameter.device
    mempool = _mempool(device)
    autocast = _autocast_dtype(device)
    dtype = dtype or autocast or parameter.dtype
    cache = DecodingCGCache() if cache is None else cache
    fits = batch_size <= cache.max_batch_size and max_seqlen <= cache.max_seqlen
    fits &= max_seqlen == cache.max_seqlen or not getattr(model, "depends_on_capacity", False)
    pool = pool_size(page_size, num_pages, batch_size, max_seqlen)
    fits &= _has_room_of(cache.pool, pool)
    made_for = cache.device, cache.dtype, cache.autocast, cache.addresses, cache.level
    params = cache.inference_params
    if params is None or made_for != (device, dtype, autocast, _addresses(model), invariance.level()) or not fits:
        params = None
        cache.clear()  # frees the old caches before there are new ones
        cache.inference_params = params = InferenceParams(
            max_seqlen,
            batch_size,
            seqlen_offset=seqlen_og,
            key_value_memory_dict=new_caches(model, batch_size, max_seqlen, tensor_parallel, device, dtype, pool),
            lengths_per_sample=torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=device),
            block_table=empty_block_table(batch_size, max_seqlen, pool, device),
        )
        cache.device, cache.dtype, cache.autocast, cache.mempool = device, dtype, autocast, mempool
        cache.level = invariance.level()
        cache.max_batch_size, cache.max_seqlen = batch_size, max_seqlen
        cache.pool = pool
    if params.block_table is not None:
        params.block_table.zero_()  # the runs of a capture write to the page 0, which no sequence has yet
    for decoding_seqlen in decoding_seqlens:
        if (batch_size, decoding_seqlen) not in cache.callables:
            cache.callables[batch_size, decoding_seqlen] = capture_graph(
                model, params, batch_size, cache.max_seqlen, decoding_seqlen, cache.mempool, n_warmups
            )
    cache.addresses = _addresses(model)  # after the first run of the model, which may move a buffer to the GPU
    params.seqlen_offset = 0
    return cache


@torch.inference_mode(False)
@torch.no_grad()
def capture_graph(
    model: nn.Module,
    inference_params: InferenceParams,
    batch_size: int,
    max_seqlen: int,
    decoding_seqlen: int = 1,
    mempool: Any = None,
    n_warmups: int = 2,
) -> Run:
    """Capture one step of a model as a CUDA graph.

    Arguments:
        inference_params: holds the caches that the graph writes to; lengths_per_sample must be given.
        batch_size, decoding_seqlen: the shape of the step's input; it follows a prompt, so is shorter than max_seqlen.
        max_seqlen: how many tokens the caches have room for.
        mempool: memory that is shared by graphs which do not run at the same time, or None.
        n_warmups: how often the model runs before the capture.

    Returns run(input_ids, position_ids, seqlen) -> logits (batch_size, decoding_seqlen, vocab), where the caches hold
    seqlen tokens, an integer or a tensor (batch_size,). Raises ValueError for a decoding_seqlen that is out of range.

    Example:
        >>> from flash_attn.utils.generation import capture_graph
        >>> run = capture_graph(model, inference_params, batch_size=1, max_seqlen=64)            # doctest: +SKIP
        >>> logits = run(token, position_ids, 3)  # token (1, 1), position_ids 3                 # doctest: +SKIP
    """
    checks.integer("decoding_seqlen", decoding_seqlen)
    fits = 0 < decoding_seqlen < max_seqlen
    checks.number("decoding_seqlen", decoding_seqlen, fits, "at least 1 and less than max_seqlen, {}", max_seqlen)
    device = next(model.parameters()).device
    input_ids, position_ids = torch.zeros(2, batch_size, decoding_seqlen, dtype=torch.int64, device=device)
    before = inference_params.seqlen_offset, inference_params.max_seqlen
    inference_params.seqlen_offset, inference_params.max_seqlen = max_seqlen - decoding_seqlen, max_seqlen
    inference_params.set_lengths(batch_size, inference_params.seqlen_offset)

    def step() -> Tensor:
        with _autocast_without_cache(device.type):
            return model(
                input_ids, position_ids=position_ids, inference_params=inference_params, num_last_tokens=decoding_seqlen
            ).logits

    graph, logits = _captured(step, device, mempool, n_warmups)
    inference_params.seqlen_offset, inference_params.max_seqlen = before
    # Some modules, such as the rotary embedding, replace their tables to grow; the graph still reads the old ones.
    tables = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]

    def run(
        new_input_ids: Tensor, new_position_ids: Tensor, seqlen: int | Tensor, tables: list[Tensor] = tables
    ) -> Tensor:
        inference_params.set_lengths(batch_size, seqlen)
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        graph.replay()
        return logits.clone()

    return run


def _captured(
    step: Callable[[], Tensor], device: torch.device, mempool: Any, n_warmups: int
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of step() and the tensor that each replay writes, which is what step returns."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(n_warmups):
                step()
            stream.synchronize()
            if dist.is_initialized():  # otherwise one process may capture while another still sends
                dist.barrier()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=mempool):
            result = step()
    return graph, result


def _autocast_without_cache(device_type: str) -> torch.autocast:
    """Returns the caller's autocast without its cache: the cache is freed with it, but a graph would still read it."""
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )


def _addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def _mempool(device: torch.device) -> Any:
    checks.number("the model's device", device, device.type == "cuda", "a GPU for CUDA graphs")
    return torch.cuda.graphs.graph_pool_handle()


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def pool_size(page_size: int | None, num_pages: int | None, batch_size: int, max_seqlen: int) -> tuple[int, int] | None:
    """(num_pages, page_size) of caches with pages, by default for batch_size sequences of max_seqlen tokens.

    Returns None without page_size. Raises TypeError or ValueError for what is no size.
    """
    if page_size is None:
        checks.number("num_pages", num_pages, num_pages is None, "None without page_size")
        return None
    page_size = checks.whole("page_size", page_size, "an integer or None")
    checks.number("page_size", page_size, page_size > 0, "positive")
    if num_pages is None:
        return max(batch_size, 1) * -(-max_seqlen // page_size), page_size
    num_pages = checks.whole("num_pages", num_pages, "an integer or None")
    checks.number("num_pages", num_pages, num_pages > 0, "positive")
    return num_pages, page_size


def _has_room_of(pool: tuple[int, int] | None, wanted: tuple[int, int] | None) -> bool:
    """Whether a pool has at least as many pages as another one, of the same size; or neither is one."""
    if pool is None or wanted is None:
        return pool is wanted
    return pool[0] >= wanted[0] and pool[1] == wanted[1]


def empty_block_table(
    batch_size: int, max_seqlen: int, pool: tuple[int, int] | None, device: torch.device | None
) -> Tensor | None:
    """A block table (batch_size, pages of max_seqlen tokens) of zeros for a pool (num_pages, page_size), or None."""
    if pool is None:
        return None
    return torch.zeros(batch_size, -(-max_seqlen // pool[1]), dtype=torch.int32, device=device)


def new_caches(
    model: Any,
    batch_size: int,
    max_seqlen: int,
    tensor_parallel: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    pool: tuple[int, int] | None = None,
) -> dict[Hashable, Any]:
    """The caches that the model allocates, or without such a method, new ones of the sizes in its config.

    Arguments:
        batch_size, max_seqlen: the size of the batch, and of its longest sequence.
        tensor_parallel: how many processes share the heads that model.config names.
        dtype: by default that of autocast, or without autocast that of the model's parameters.
        pool: (num_pages, page_size) of caches with pages, or None.
    """
    if pool is not None:
        batch_size, max_seqlen = pool
    dtype = dtype or _autocast_dtype(device) or next(model.parameters()).dtype
    if hasattr(model, "allocate_inference_cache"):
        return model.allocate_inference_cache(batch_size, max_seqlen, dtype)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return allocate_inference_cache(
        batch_size,
        max_seqlen,
        config.num_attention_heads // tensor_parallel,
        head_dim,
        config.num_hidden_layers,
        device,
        dtype,
    )
