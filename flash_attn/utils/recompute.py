"""What need not be computed again in activation checkpointing.

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

computes the block again in the backward, but not its attention: out and softmax_lse are kept, as much memory as one
more input of the block. With long sequences that is most of the time of the block.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn._torch_private import DispatchMode

__all__ = ["keep_attention", "state_of_forward"]


def keep_attention(offload: bool = False) -> tuple[Any, Any]:
    """Returns two contexts for the context_fn of `torch.utils.checkpoint.checkpoint`, with use_reentrant=False.

    In the first, which the forward runs in, results of attention are kept; in the second, they stand for calls of
    attention. Attention is what `flash_attn.flash_attn_func` and its like compute, also under a plan of
    `flash_attn.context_parallel`.

    Arguments:
        offload: keep them in the memory of the host. Give it by functools.partial(keep_attention, offload=True).

    Raises:
        RuntimeError: in the backward, if more attention is computed there than in the forward, or once more.
        ImportError: in a torch without modes of the dispatcher.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.utils.recompute import keep_attention
        >>> q = torch.randn(1, 16, 4, 32, requires_grad=True)
        >>> block = lambda x: flash_attn_func(x, x, x, causal=True).sin()  # of which the sine is recomputed
        >>> checkpoint(block, q, use_reentrant=False, context_fn=keep_attention).sum().backward()
    """
    if DispatchMode is object:
        raise ImportError(f"keep_attention needs modes of torch's dispatcher, which torch {torch.__version__} lacks")
    kept: list[list[tuple[Tensor, torch.device]]] = []
    return _Keeping(kept, offload), _Giving(kept)


def state_of_forward(x: Tensor) -> Callable[[], contextlib.AbstractContextManager]:
    """Returns a function that makes a context in which a layer computes of x the same again, with its dropout.

    x: a tensor on the device of the layer, whose generator and autocast are restored, and the generator of the CPU.

    Example:
        >>> from flash_attn.utils.recompute import state_of_forward
        >>> x = torch.randn(4, 8)
        >>> again = state_of_forward(x)
        >>> out = torch.dropout(x, 0.5, train=True)
        >>> with again():
        ...     torch.equal(torch.dropout(x, 0.5, train=True), out)
        True
    """
    device = x.device
    generators = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    states, enabled = [each.get_rng_state() for each in generators], torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)

    @contextlib.contextmanager
    def again():
        before = [each.get_rng_state() for each in generators]
        for each, state in zip(generators, states, strict=True):
            each.set_rng_state(state)
        try:
            with torch.autocast(device.type, dtype=dtype, enabled=enabled):
                yield
        finally:
            for each, state in zip(generators, before, strict=True):
                each.set_rng_state(state)

    return again


def _is_attention(function: Any) -> bool:
    namespace, _, name = function.name().partition("::")
    name = name.partition(".")[0].removesuffix("_reference")
    if namespace == "flash_attn_context_parallel":
        return name == "gather"
    return namespace == "flash_attn" and name in ("fwd", "fwd_plain", "fwd_features", "fwd_with_residue")


class _Keeping(DispatchMode):
    def __init__(self, kept: list, offload: bool) -> None:
        super().__init__()
        self.kept, self.offload = kept, offload

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if _is_attention(func):
            self.kept.append([(self._put(x), x.device) for x in results])
        return results

    def _put(self, x: Tensor) -> Tensor:
        if not self.offload or x.device == torch.device("cpu"):
            return x.detach()
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


class _Giving(DispatchMode):
    def __init__(self, kept: list) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        if not self.kept:
            raise RuntimeError(
                "keep_attention has no more results of attention: the backward computes more of it than the forward, "
                "or runs a second time"
            )
        return tuple(x.to(device, non_blocking=True) for x, device in self.kept.pop(0))
