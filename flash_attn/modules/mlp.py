"""MLPs of transformers: two linear layers with an activation or a gate between them, whole or divided over processes.

    GatedMlp(4096, hidden_features=11008, activation=torch.nn.functional.silu, bias1=False, bias2=False)   # Llama's

`FusedMLP` and `ParallelFusedMLP`, which compute the activation within the matrix products, can also be imported from
here.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flash_attn._ops import checks, fused_dense, fusing
from flash_attn.ops.activations import swiglu_of_halves
from flash_attn.ops.fused_dense import (
    PLAIN_LINEAR,
    ColumnParallelLinear,
    FusedMLP,
    Linear,
    ParallelFusedMLP,
    RowParallelLinear,
)
from flash_attn.parallel import chunked

__all__ = ["FusedMLP", "GatedMlp", "Mlp", "ParallelFusedMLP", "ParallelGatedMlp", "ParallelMLP"]


class _TwoLayers(nn.Module):
    """y = fc2(between(fc1(x))); classes that derive from this add the two layers."""

    fc1: nn.Module
    fc2: nn.Module
    mlp_chunks = 1  # in how many parts tokens are computed: see flash_attn.parallel.set_mlp_chunks

    def __init__(self, activation: Callable[[Tensor], Tensor], return_residual: bool = False) -> None:
        super().__init__()
        if not callable(activation):
            raise TypeError(f"activation must be a function of a tensor, found {activation!r}")
        self.activation = activation
        self.return_residual = return_residual

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """y (..., out_features) of x (..., in_features); (y, x) if return_residual."""
        y = self._whole(x) if self.mlp_chunks == 1 else chunked(self._whole, x, self.mlp_chunks, self.parameters())
        return (y, x) if self.return_residual else y

    def _whole(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """The input of fc2."""
        return self.between(self.fc1(x))

    def between(self, y: Tensor) -> Tensor:
        """What fc2 gets of the output y of fc1."""
        return self.activation(y)


class _Gated(_TwoLayers):
    """Layers with a gate: the output of fc1 is a value, then its gate."""

    def hidden(self, x: Tensor) -> Tensor:
        """The input of fc2. For few rows, as in a step of decoding, one kernel computes fc1 and the gate."""
        fc1 = self.fc1
        if self.activation is F.silu and _may_fuse(fc1, x) and fused_dense.is_for_few_rows(x, fc1.weight):
            return fused_dense.gated_linear(x, fc1.weight, fc1.bias, "silu")
        return super().hidden(x)

    def between(self, y: Tensor) -> Tensor:
        """value * activation(gate)."""
        if self.activation is F.sigmoid:
            return F.glu(y, dim=-1)
        if self.activation is F.silu and y.dtype != torch.float64:  # the fused function has no float64
            return swiglu_of_halves(y)
        value, gate = y.chunk(2, dim=-1)
        return value * self.activation(gate)


class Mlp(_TwoLayers):
    """y = fc2(activation(fc1(x))).

    >>> from flash_attn.modules.mlp import Mlp
    >>> Mlp(64)(torch.randn(2, 64)).shape
    torch.Size([2, 64])

    Arguments:
        in_features: features of x.
        hidden_features: features between the layers, 4 * in_features if None.
        out_features: features of y, in_features if None.
        activation: a function of a tensor.
        bias1, bias2: whether fc1 and fc2 have a bias.
        return_residual: return (y, x) instead of y.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation, return_residual)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        in_features, hidden_features, out_features = fused_dense.mlp_widths(
            in_features, _or_else(hidden_features, 4 * in_features), _or_else(out_features, in_features)
        )
        self.fc1 = Linear(in_features, hidden_features, bias=bias1, **factory)
        self.fc2 = Linear(hidden_features, out_features, bias=bias2, **factory)


class ParallelMLP(_TwoLayers):
    """`Mlp` with the hidden features divided over the processes of a group.

    Arguments:
        process_group: the group; must be given.
        sequence_parallel: the first dimension of x and y is divided, too.
        The others are those of `Mlp`. fc2 has its bias in the first process only.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.modules.mlp import ParallelMLP
        >>> ParallelMLP(64, process_group=dist.group.WORLD)(torch.randn(10, 64)).shape
        torch.Size([10, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        process_group: ProcessGroup | None = None,
        sequence_parallel: bool = True,
        bias1: bool = True,
        bias2: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation)
        options: dict[str, Any] = dict(
            process_group=process_group, sequence_parallel=sequence_parallel, device=device, dtype=dtype
        )
        in_features, hidden_features, out_features = fused_dense.mlp_widths(
            in_features, _or_else(hidden_features, 4 * in_features), _or_else(out_features, in_features)
        )
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, bias=bias1, **options)
        self.fc2 = RowParallelLinear(hidden_features, out_features, bias=bias2, **options)


class GatedMlp(_Gated):
    """y = fc2(value * activation(gate)), where fc1(x) is value and gate, in this order (GLU, arXiv:2002.05202).

    >>> from flash_attn.modules.mlp import GatedMlp
    >>> GatedMlp(64, activation=F.silu)(torch.randn(2, 64)).shape
    torch.Size([2, 64])

    Arguments:
        in_features: features of x.
        hidden_features: features of the value, int(8 / 3 * in_features) if None; rounded up to a multiple.
        out_features: features of y, in_features if None.
        activation: a function of the gate; torch.nn.functional.silu is fused with the product, except in float64.
        bias1, bias2: whether fc1 and fc2 have a bias.
        multiple_of: hidden_features is rounded up to a multiple of this.
        return_residual: return (y, x) instead of y.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation, return_residual)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        in_features, hidden_features, out_features = fused_dense.mlp_widths(
            in_features, _or_else(hidden_features, int(8 * in_features / 3)), _or_else(out_features, in_features)
        )
        hidden_features = _round_up(hidden_features, multiple_of)
        self.fc1 = Linear(in_features, 2 * hidden_features, bias=bias1, **factory)
        self.fc2 = Linear(hidden_features, out_features, bias=bias2, **factory)


class ParallelGatedMlp(_Gated):
    """`GatedMlp` with the hidden features divided over the processes of a group.

    fc1 of a process has its rows of the value, then its rows of the gate.

    Arguments:
        process_group: the group.
        sequence_parallel: the first dimension of x and y is divided, too.
        The others are those of `GatedMlp`. fc2 has its bias in the first process only.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.modules.mlp import ParallelGatedMlp
        >>> ParallelGatedMlp(64, dist.group.WORLD, activation=F.silu)(torch.randn(10, 64)).shape
        torch.Size([10, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        process_group: ProcessGroup,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(activation)
        factory: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        in_features, hidden_features, out_features = fused_dense.mlp_widths(
            in_features, _or_else(hidden_features, int(8 * in_features / 3)), _or_else(out_features, in_features)
        )
        hidden_features = _round_up(hidden_features, multiple_of)
        # multiple_of=2, so that a value and its gate go to the same process.
        self.fc1 = ColumnParallelLinear(
            in_features, 2 * hidden_features, process_group, bias=bias1, multiple_of=2, **factory
        )
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **factory)


def _may_fuse(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether calling the layer only computes the product with its weight: there is nothing to gather, either."""
    sends = isinstance(layer, ColumnParallelLinear) and layer.sequence_parallel
    return not sends and fusing.may_fuse(layer, (*PLAIN_LINEAR, ColumnParallelLinear), x)


def _or_else(features: int | None, default: int) -> int:
    return default if features is None else features


def _round_up(features: int, multiple_of: int) -> int:
    checks.integer("multiple_of", multiple_of)
    checks.number("multiple_of", multiple_of, multiple_of > 0, "positive")
    return (features + multiple_of - 1) // multiple_of * multiple_of
