"""The names of the package yunchang (USP): a module for attention of a sequence over two groups of ranks.

    from flash_attn.context_parallel.compat.yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg

    set_seq_parallel_pg(2, 2, rank, world_size)                        # heads over two ranks, and keys over two
    part = EXTRACT_FUNC_DICT["zigzag"](x, rank, world_size, rd=2, ud=2)
    out = LongContextAttention(ring_impl_type="zigzag")(q, k, v, causal=True)

Attention is that of `flash_attn.context_parallel.cp_attn_func` by method="usp", or "ulysses" where no keys are divided,
which also has dropout and ALiBi. Options that choose another attention or how it waits have no effect, and modules
return out alone, also with return_attn_probs.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flash_attn._ops import checks
from flash_attn.context_parallel import Plan, cp_attn_func, cp_attn_qkvpacked_func
from flash_attn.utils.distributed import device_of

__all__ = [
    "EXTRACT_FUNC_DICT",
    "RING_IMPL_QKVPACKED_DICT",
    "AttnType",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "UlyssesAttention",
    "basic_extract_local",
    "set_seq_parallel_pg",
    "stripe_extract_local",
    "zigzag_extract_local",
]
_LAYOUTS = {
    "basic": "contiguous",
    "basic_pytorch": "contiguous",
    "basic_flashinfer": "contiguous",
    "zigzag": "zigzag",
    "strip": "striped",
}
_GROUPS: dict[str, Any] = {}  # what `set_seq_parallel_pg` has set: the group, and where ranks are in it


class AttnType(enum.Enum):
    """The kernels of yunchang. Here attention is always that of this package.

    Example:
        >>> from flash_attn.context_parallel.compat.yunchang import AttnType
        >>> AttnType.from_string("fa3") is AttnType.FA3
        True
    """

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s: str) -> "AttnType":
        """Returns the member with this value."""
        return cls(s)


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Divide all processes into groups that share a sequence; all must call it.

    Arguments:
        sp_ulysses_degree, sp_ring_degree: over how many ranks heads and keys are divided; their product must divide
            world_size, and other groups have other sequences.
        rank, world_size: of this process among all.
        use_ulysses_low: whether neighbouring ranks share heads, or keys.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel.compat.yunchang import set_seq_parallel_pg
        >>> set_seq_parallel_pg(sp_ulysses_degree=1, sp_ring_degree=1, rank=0, world_size=1)
        >>> dist.destroy_process_group()
    """
    size = checks.count("sp_ulysses_degree", sp_ulysses_degree, 1) * checks.count("sp_ring_degree", sp_ring_degree, 1)
    checks.number("sp_ulysses_degree * sp_ring_degree", size, world_size % size == 0, "a divisor of {}", world_size)
    ranks = torch.arange(world_size)
    if use_ulysses_low:
        ranks = ranks.view(-1, sp_ring_degree, sp_ulysses_degree)
    else:
        ranks = ranks.view(-1, sp_ulysses_degree, sp_ring_degree).transpose(1, 2)
    device = device_of(cast(dist.ProcessGroup, dist.group.WORLD)).type
    mesh = DeviceMesh(device, ranks, mesh_dim_names=("dp", "ring", "ulysses"))
    _GROUPS["group"] = mesh["ulysses"].get_group() if sp_ring_degree == 1 else mesh["ring", "ulysses"]
    _GROUPS["places"], _GROUPS["ulysses"] = ranks[0].flatten().argsort().tolist(), sp_ulysses_degree
    _plan.cache_clear()


@functools.lru_cache(maxsize=16)
def _plan(total, group, layout):
    if isinstance(group, DeviceMesh):
        return Plan(total, group, layout=layout, method="usp", granularity=1)
    return Plan(total, group, layout="contiguous", method="ulysses", granularity=1)  # every layout is, with one ring


@functools.lru_cache(maxsize=16)
def _plan_of_ring(total, group, layout):
    return Plan(total, group, layout=layout, method="gather", granularity=1)


class _Attention(nn.Module):
    """Attention of sequences that are divided over the ranks of a group, in a layout."""

    def __init__(self, layout: str, group: Any = None) -> None:
        super().__init__()
        self.layout, self.group = layout, group

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        group = self.group
        if group is None:
            if not _GROUPS:
                raise RuntimeError("set_seq_parallel_pg must be called before attention")
            group = _GROUPS["group"]
        checks.tensor("query", q)
        checks.ndim("query", q, "(batch, seqlen, heads, head_dim)")
        plan = _plan(q.shape[1] * group.size(), group, self.layout)
        return cast(Tensor, cp_attn_func(q, k, v, *options, plan=plan))


class LongContextAttention(_Attention):
    """Attention over the groups of `set_seq_parallel_pg`.

    Arguments:
        scatter_idx, gather_idx: must be 2 and 1: tensors are (batch, seqlen, heads, head_dim).
        ring_impl_type: how tokens are divided, a key of EXTRACT_FUNC_DICT.
        use_pack_qkv, use_sync, attn_type, attn_processor: of no effect.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel.compat.yunchang import LongContextAttention, set_seq_parallel_pg
        >>> set_seq_parallel_pg(sp_ulysses_degree=1, sp_ring_degree=1, rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 64, 4, 16)
        >>> LongContextAttention(ring_impl_type="zigzag")(q, k, v, causal=True).shape
        torch.Size([1, 64, 4, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: Any = None,
        attn_processor: Any = None,
    ) -> None:
        _check_dimensions(scatter_idx, gather_idx, 2)
        super().__init__(_layout_of(ring_impl_type))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
    ) -> Tensor:
        """Attention of this rank's tokens, (batch, seqlen, heads, head_dim), as `cp_attn_func` computes it."""
        options = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        return self._attend(query, key, value, dropout_p, *options)


class LongContextAttentionQKVPacked(_Attention):
    """`LongContextAttention` of packed queries, keys and values (batch, seqlen, 3, heads, head_dim).

    The arguments are those of `LongContextAttention`, with a scatter_idx of 3.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel.compat.yunchang import LongContextAttentionQKVPacked, set_seq_parallel_pg
        >>> set_seq_parallel_pg(sp_ulysses_degree=1, sp_ring_degree=1, rank=0, world_size=1)
        >>> LongContextAttentionQKVPacked()(torch.randn(1, 64, 3, 4, 16), causal=True).shape
        torch.Size([1, 64, 4, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: Any = None,
    ) -> None:
        _check_dimensions(scatter_idx, gather_idx, 3)
        super().__init__(_layout_of(ring_impl_type))

    def forward(self, qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As `LongContextAttention.forward`, whose other arguments follow qkv."""
        checks.packed("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
        q, k, v = qkv.unbind(2)
        return LongContextAttention.forward(cast(LongContextAttention, self), q, k, v, *args, **kwargs)


class UlyssesAttention(_Attention):
    """Attention over one group, whose ranks have consecutive parts of the sequence and exchange them for heads.

    Arguments:
        sequence_process_group: the ranks; None: all.
        The others are those of `LongContextAttention`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel.compat.yunchang import UlyssesAttention
        >>> q, k, v = torch.randn(3, 1, 64, 4, 16)
        >>> UlyssesAttention(dist.group.WORLD)(q, k, v, causal=True).shape
        torch.Size([1, 64, 4, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        sequence_process_group: Any = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: Any = None,
    ) -> None:
        _check_dimensions(scatter_idx, gather_idx, 2)
        super().__init__("contiguous", dist.group.WORLD if sequence_process_group is None else sequence_process_group)

    forward = LongContextAttention.forward


def _layout_of(ring_impl_type):
    if ring_impl_type not in _LAYOUTS:
        raise ValueError(f"ring_impl_type must be one of {', '.join(_LAYOUTS)}, found {ring_impl_type!r}")
    return _LAYOUTS[ring_impl_type]


def _check_dimensions(scatter_idx, gather_idx, heads):
    checks.number("scatter_idx", scatter_idx, scatter_idx == heads, "{}", heads)
    checks.number("gather_idx", gather_idx, gather_idx == 1, "1")


def _of_ring(layout: str) -> Callable:
    def func(
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Any = None,
        attn_type: Any = None,
    ) -> Any:
        """Attention of qkv (batch, tokens, 3, heads, head_dim) over one group; with return_attn_probs, also its lse."""
        group = dist.group.WORLD if group is None else group
        checks.packed("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
        plan = _plan_of_ring(qkv.shape[1] * group.size(), group, layout)
        options = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        found: Any = cp_attn_qkvpacked_func(qkv, dropout_p, *options, plan=plan, return_lse=return_attn_probs)
        return (*found, None) if return_attn_probs else found

    return func


def _place(rank: int, world_size: int, ulysses: int | None = None) -> int:
    """Where a rank is in the mesh of `set_seq_parallel_pg`, counted along "ulysses" first.

    With another degree of ulysses than that mesh has, ranks are in their order: the caller has other groups.
    """
    places = _GROUPS.get("places", [])
    is_of_mesh = len(places) == world_size and ulysses in (None, _GROUPS["ulysses"])
    return places[rank] if is_of_mesh else rank


def basic_extract_local(value: Tensor, rank: int, world_size: int, *args: Any, dim: int = 1, **kwargs: Any) -> Tensor:
    """Returns the part of a whole sequence that a rank has, with ring_impl_type="basic".

    value: the sequence along dim. rank, world_size: among the ranks that share it. args, kwargs: of no effect.

    Example:
        >>> from flash_attn.context_parallel.compat.yunchang import basic_extract_local
        >>> basic_extract_local(torch.arange(8)[None], rank=1, world_size=2)
        tensor([[4, 5, 6, 7]])
    """
    return value.chunk(world_size, dim)[_place(rank, world_size)].detach().clone()


def zigzag_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1, *args: Any, **kwargs: Any
) -> Tensor:
    """`basic_extract_local` with ring_impl_type="zigzag". rd, ud: the degrees of ring and ulysses.

    Example:
        >>> from flash_attn.context_parallel.compat.yunchang import zigzag_extract_local
        >>> zigzag_extract_local(torch.arange(8)[None], rank=0, world_size=2, rd=2, ud=1)
        tensor([[0, 1, 6, 7]])
    """
    ring, ulysses = divmod(_place(rank, world_size, ud), ud)
    chunks = value.chunk(2 * rd, dim)
    return torch.cat([chunks[ring], chunks[2 * rd - 1 - ring]], dim).chunk(ud, dim)[ulysses].detach().clone()


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, *args: Any, dim: int = 1, **kwargs: Any
) -> Tensor:
    """`basic_extract_local` with ring_impl_type="strip". rd, ud: the degrees of ring and ulysses.

    Example:
        >>> from flash_attn.context_parallel.compat.yunchang import stripe_extract_local
        >>> stripe_extract_local(torch.arange(8)[None], rank=1, world_size=2, rd=2, ud=1)
        tensor([[1, 3, 5, 7]])
    """
    ring, ulysses = divmod(_place(rank, world_size, ud), ud)
    stripe = value.unflatten(dim, (-1, rd)).select(dim + 1, ring)
    return stripe.chunk(ud, dim)[ulysses].detach().clone()


RING_IMPL_QKVPACKED_DICT = {kind: _of_ring(layout) for kind, layout in _LAYOUTS.items() if kind != "basic_pytorch"}
EXTRACT_FUNC_DICT = {
    "basic": basic_extract_local,
    "basic_pytorch": basic_extract_local,
    "basic_flashinfer": basic_extract_local,
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
}
