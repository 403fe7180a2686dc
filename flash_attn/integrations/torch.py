"""PyTorch's own attention, computed by this library.

    import flash_attn.integrations.torch
    name = flash_attn.integrations.torch.register()
    torch.nn.attention.activate_flash_attention_impl(name)

From then on `torch.nn.functional.scaled_dot_product_attention`, where it chooses its flash backend, and
`torch.nn.attention.varlen.varlen_attn` are computed by this library for CUDA tensors, until
`torch.nn.attention.restore_flash_attention_impl()`. What they take and refuse stays as torch documents it, and so does
which backend `scaled_dot_product_attention` chooses; fp8 is left to torch. A row that sees no key has an lse of +inf.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attn import flash_attn_interface as attention
from flash_attn._errors import ArgumentError

__all__ = ["register"]

_NAMES: set[str] = set()  # the names that `register` has given to torch


def register(name: str = "fused_attention") -> str:
    """Make the implementation known to torch, which uses it once it is activated by that name.

    Arguments:
        name: any string except torch's own names, "FA3" and "FA4".

    Returns:
        name.

    Raises:
        ImportError: torch has no registry of implementations.
        ValueError: name is taken.

    Example:
        >>> from flash_attn.integrations.torch import register
        >>> name = register()
        >>> name in torch.nn.attention.list_flash_attention_impls()
        True
    """
    import torch.nn.attention

    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise ImportError(
            "flash_attn.integrations.torch needs torch.nn.attention.register_flash_attention_impl, which torch "
            f"{torch.__version__} does not have: install a newer torch"
        )
    if not isinstance(name, str) or name in ("FA3", "FA4"):
        raise ArgumentError(f"name must be a string that is not one of torch's own, found {name!r}")
    if name in torch.nn.attention.list_flash_attention_impls() and name not in _NAMES:
        raise ArgumentError(f"name must be one that no other implementation has, found {name!r}")
    _NAMES.add(name)
    torch.nn.attention.register_flash_attention_impl(name, register_fn=Activated)
    return name


class Activated:
    """Replaces torch's operators in its dispatcher, from when an object of this class is made until its `remove`."""

    def __init__(self, dispatch_key: str = "CUDA"):
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", dispatch_key)
        for function in (
            _flash_attention_forward,
            _flash_attention_forward_no_dropout_inplace,
            _flash_attention_backward,
            _scaled_dot_product_flash_attention,
            _scaled_dot_product_flash_attention_backward,
        ):
            self._library.impl(function.__name__, function)

    def remove(self) -> None:
        """Give the operators back to torch."""
        self._library = None


# ---------------------------------------------------------------------------------------------------------------------
# torch's operators, with its names and argument orders; (batch, seqlen, heads, head_dim), or packed (total, heads,
# head_dim).


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, lse, state of the random numbers, an unused tensor, S_dmask)."""
    common: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": is_causal,
        "softcap": 0.0,
        "window_size_left": _bound(window_size_left),
        "window_size_right": _bound(window_size_right),
        "alibi_slopes": alibi_slopes,
        "return_softmax": return_debug_mask,
    }
    if cum_seq_q is None:
        for name, given in (("seqused_k", seqused_k), ("block_table", block_table)):
            if given is not None:
                raise ArgumentError(f"{name} must be None without cum_seq_q, found a tensor")
        out, lse, s_dmask, rng_state = attention._flash_attn_forward(query, key, value, **common)
    else:
        if cum_seq_k is None and seqused_k is not None and block_table is None:
            cum_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()
        if cum_seq_k is None and seqused_k is None:
            raise ArgumentError("cum_seq_k must be given with cum_seq_q unless seqused_k is, found None")
        out, lse, s_dmask, rng_state = attention._flash_attn_varlen_forward(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            **common,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits or 0,
        )
    return _like(query, out), lse, rng_state.view(torch.uint64), query.new_zeros((), dtype=torch.uint64), s_dmask


def _flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor:
    """Writes out and returns lse."""
    result, lse, *_ = _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
    )
    out.copy_(result)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv)."""
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    common: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": is_causal,
        "softcap": 0.0,
        "window_size_left": _bound(window_size_left),
        "window_size_right": _bound(window_size_right),
        "alibi_slopes": None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rng_state": rng_state.view(torch.int64) if dropout_p else None,
    }
    if cum_seq_q is None or cum_seq_k is None:
        attention._flash_attn_backward(grad_out, query, key, value, out, logsumexp, *gradients, **common)
    else:
        attention._flash_attn_varlen_backward(
            grad_out, query, key, value, out, logsumexp, *gradients, cum_seq_q, cum_seq_k, max_q, max_k, **common
        )
    return gradients


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """_flash_attention_forward for (batch, heads, seqlen, head_dim), with the results that torch's backward takes."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = q.shape[1], k.shape[1]
    out, lse, rng_state, unused, s_dmask = _flash_attention_forward(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, max_q, max_k, rng_state, unused, s_dmask


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Returns (dq, dk, dv), (batch, heads, seqlen, head_dim)."""
    grad_out, query, key, value, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return tuple(x.transpose(1, 2) for x in gradients)


def _bound(size: int | None) -> int:
    return -1 if size is None else size


def _like(x: Tensor, out: Tensor) -> Tensor:
    """out with the strides that torch expects of a result for x, as compiled graphs rely on them."""
    expected = torch.empty_like(x)
    return out if out.stride() == expected.stride() else expected.copy_(out)
