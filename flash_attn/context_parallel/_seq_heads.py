"""The exchange of Ulysses on its own, for code that has an attention of its own between the two."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._ops import checks
from flash_attn.context_parallel._exchange import HeadExchange
from flash_attn.context_parallel._plan import group_of


def seq_to_heads(x: Tensor, group: Any) -> Tensor:
    """Exchange some tokens of all heads for all tokens of some heads: the step before attention. Differentiable.

    Arguments:
        x: (batch, tokens, heads, head_dim) of this rank, of any dtype. All ranks have as many tokens, in the order of
            the ranks, and the number of ranks divides heads.
        group: a ProcessGroup, or a DeviceMesh of one dimension.

    Returns:
        (batch, ranks * tokens, heads / ranks, head_dim).

    Raises:
        ValueError: the number of ranks does not divide heads.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel import seq_to_heads
        >>> seq_to_heads(torch.randn(2, 128, 8, 64), dist.group.WORLD).shape  # on 4 ranks (2, 512, 2, 64)
        torch.Size([2, 128, 8, 64])
        >>> dist.destroy_process_group()
    """
    group = group_of(group)
    world_size = dist.get_world_size(group)
    checks.tensor("x", x)
    checks.ndim("x", x, "(batch, tokens, heads, head_dim)")
    fits = x.shape[2] % world_size == 0
    checks.number("x.shape[2]", x.shape[2], fits, "divisible by the {} ranks", world_size)
    return _Exchanged.apply(x, _exchange_of(group, x.shape[1], x.shape[2], x.device), True)


def heads_to_seq(x: Tensor, group: Any) -> Tensor:
    """Exchange all tokens of some heads for some tokens of all heads: the step after attention. Differentiable.

    Arguments:
        x: (batch, tokens, heads, head_dim), as `seq_to_heads` returns it. The number of ranks divides tokens.
        group: a ProcessGroup, or a DeviceMesh of one dimension.

    Returns:
        (batch, tokens / ranks, ranks * heads, head_dim).

    Raises:
        ValueError: the number of ranks does not divide tokens.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel import heads_to_seq, seq_to_heads
        >>> x = torch.randn(2, 128, 8, 64)
        >>> torch.equal(heads_to_seq(seq_to_heads(x, dist.group.WORLD), dist.group.WORLD), x)
        True
        >>> dist.destroy_process_group()
    """
    group = group_of(group)
    world_size = dist.get_world_size(group)
    checks.tensor("x", x)
    checks.ndim("x", x, "(batch, tokens, heads, head_dim)")
    fits = x.shape[1] % world_size == 0
    checks.number("x.shape[1]", x.shape[1], fits, "divisible by the {} ranks", world_size)
    exchange = _exchange_of(group, x.shape[1] // world_size, x.shape[2] * world_size, x.device)
    return _Exchanged.apply(x, exchange, False)


def _exchange_of(group, tokens, heads, device):
    world_size = dist.get_world_size(group)
    with torch.device("cpu"):
        positions = torch.arange(tokens * world_size).view(world_size, -1).unbind()
        parts = torch.arange(heads).view(world_size, -1).unbind()
        return HeadExchange(group, dist.get_rank(group), positions, parts, heads, device)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange, to_heads):
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.to_heads(x) if to_heads else exchange.to_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return _Exchanged.apply(grad, ctx.exchange, not ctx.to_heads), None, None
