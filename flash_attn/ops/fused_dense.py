"""Linear layers and MLPs fused with bias, activation and their gradients, alone or divided among processes.

    out = fused_dense_func(x, weight, bias)
    mlp = FusedMLP(1024, 4096, activation="gelu_approx", checkpoint_lvl=1)

On a GPU, cuBLASLt computes float16 and bfloat16 products, with the bias and the activation in the same kernel where
that is faster. The library has its own kernels for up to eight rows, as in a step of decoding, and for the gradients of
an activation and of the bias before it. An MLP keeps less memory for its gradient than the same operations of torch;
with `checkpoint_lvl` it keeps only its input. Other dtypes and devices use torch's own operations, with the same
results up to rounding and the same collectives. Under autocast, inputs and parameters are cast to its dtype.

Layers divided among the processes of a group follow Megatron-LM (arXiv:1909.08053): `ColumnParallelLinear` divides the
output features, `RowParallelLinear` the input features. With sequence_parallel (arXiv:2205.05198) the first dimension
of x is divided too between such layers; otherwise every process has all of x. Gradients are sent while other gradients
are computed.

Every function raises TypeError or ValueError for arguments that do not fit together, before anything is computed.
"""

import dataclasses
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flash_attn._ops import checks, collectives, fused_dense, fusing, invariance, sharding
from flash_attn.utils.distributed import all_gather, all_reduce, get_dim_for_local_rank, reduce_scatter, replicated


@overload
def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: Literal[False] = False,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor: ...
@overload
def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]: ...
def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns x weight^T + bias, differentiable in x, weight and bias.

    Arguments:
        x: (..., in_features), float16, bfloat16, float32 or float64, any strides; weight and bias have its dtype unless
            autocast casts all three.
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        return_residual: also return x as it entered the product, after a cast. Its gradient, from a residual
            connection, is added within the product that gives x its gradient.
        process_group: a group of processes that divide out_features among them. With sequence_parallel the first
            dimension of x is divided too: x is gathered before the product, and its gradient is scattered back.
            Otherwise all processes have the same x, and its gradient is summed.

    Returns (..., out_features), with the first dimension of the gathered x; or a tuple of it and x.

    >>> from flash_attn.ops.fused_dense import fused_dense_func
    >>> x, weight = torch.randn(2, 5, 64), torch.randn(128, 64)
    >>> fused_dense_func(x, weight, torch.zeros(128)).shape
    torch.Size([2, 5, 128])
    """
    return fused_dense.linear(x, weight, bias, return_residual, _exchange(process_group, sequence_parallel))


class FusedDenseFunc:
    """`FusedDenseFunc.apply` is `fused_dense_func`.

    Example:
        >>> from flash_attn.ops.fused_dense import FusedDenseFunc
        >>> FusedDenseFunc.apply(torch.randn(5, 64), torch.randn(128, 64), torch.zeros(128)).shape
        torch.Size([5, 128])
    """

    apply = staticmethod(fused_dense_func)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns act(x weight1^T + bias1) weight2^T + bias2, differentiable in all five tensors.

    Arguments:
        x: (..., in_features), as in `fused_dense_func`.
        weight1, bias1: (hidden_features, in_features) and (hidden_features,); the bias may be None.
        weight2, bias2: (out_features, hidden_features) and (out_features,); the bias may be None.
        activation: "gelu_approx", the tanh form; "relu"; or "sqrelu", its square.
        save_pre_act: False keeps nothing for the gradient but x, like checkpoint_lvl=2.
        return_residual: also return x, as in `fused_dense_func`.
        checkpoint_lvl: the tensors kept for the gradient besides x. 0: the input and the output of the activation.
            1: its input; the backward computes the activation again. 2: neither; the backward computes the first
            product again too. With relu, levels 0 and 1 keep only the output.
        heuristic: -1 runs the activation as a separate kernel. From 0 to 4 it is part of the product if cuBLASLt has a
            kernel for that, and the number chooses one of the algorithms that cuBLASLt proposes. "sqrelu" and all
            gradients are always separate.
        process_group, sequence_parallel: as in `fused_dense_func`, with hidden_features divided. The result is this
            process's part of a sum over the group; the caller must compute the sum.

    Returns (..., out_features), or a tuple of it and x.

    >>> from flash_attn.ops.fused_dense import fused_mlp_func
    >>> x, weight1, weight2 = torch.randn(2, 5, 64), torch.randn(256, 64), torch.randn(64, 256)
    >>> fused_mlp_func(x, weight1, weight2, activation="relu").shape
    torch.Size([2, 5, 64])
    """
    exchange = _exchange(process_group, sequence_parallel)
    return fused_dense.mlp(
        x,
        weight1,
        bias1,
        weight2,
        bias2,
        activation,
        save_pre_act,
        return_residual,
        checkpoint_lvl,
        heuristic,
        exchange,
    )


class FusedMLPFunc:
    """`FusedMLPFunc.apply` is `fused_mlp_func` with each bias after its weight.

    Example:
        >>> from flash_attn.ops.fused_dense import FusedMLPFunc
        >>> x, weight1, weight2 = torch.randn(5, 64), torch.randn(256, 64), torch.randn(64, 256)
        >>> FusedMLPFunc.apply(x, weight1, torch.zeros(256), weight2, torch.zeros(64)).shape
        torch.Size([5, 64])
    """

    @staticmethod
    def apply(
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        activation: str = "gelu_approx",
        save_pre_act: bool = True,
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int = 0,
        process_group: ProcessGroup | None = None,
        sequence_parallel: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`fused_mlp_func` by position; it says what the arguments are."""
        return fused_mlp_func(
            x,
            weight1,
            weight2,
            bias1,
            bias2,
            activation,
            save_pre_act,
            return_residual,
            checkpoint_lvl,
            heuristic,
            process_group,
            sequence_parallel,
        )


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Communication of x and of its gradient between the processes of a group."""

    process_group: ProcessGroup
    sequence_parallel: bool

    def gather(self, x):
        """Returns the x of all processes, and a handle to wait for."""
        if not self.sequence_parallel:
            return x, None
        return collectives.gather_rows(x, self.process_group, async_op=True)

    def reduce(self, dx):
        """Returns this process's part of the sum of all gradients, and a handle to wait for."""
        reduce = collectives.scatter_rows if self.sequence_parallel else collectives.reduce
        return reduce(dx, self.process_group, async_op=True)

    def recorded(self):
        """The same, but known to autograd, for second derivatives."""
        return _RecordedExchange(self.process_group, self.sequence_parallel)


class _RecordedExchange(_Exchange):
    def gather(self, x):
        return (all_gather if self.sequence_parallel else replicated)(x, self.process_group), None

    def reduce(self, dx):
        return _reduced(dx, self.process_group, self.sequence_parallel), None


def _exchange(process_group, sequence_parallel):
    checks.flags(sequence_parallel=sequence_parallel)
    if process_group is None or collectives.size(process_group) == 1:
        return None
    return _Exchange(process_group, bool(sequence_parallel))


class FewRowsLinear(nn.Linear):
    """`nn.Linear` with a kernel of the library for few rows without gradients, as in a step of decoding.

    The kernel computes up to eight rows of float16 or bfloat16 on a GPU; other inputs are computed as in `nn.Linear`.
    Results are the same up to rounding.

    Some tools, such as torch.ao.quantization.quantize_dynamic, skip every module that is not exactly an `nn.Linear`.
    This class adds no state, so a layer can be turned into an `nn.Linear` by an assignment:

    >>> from flash_attn.ops.fused_dense import FewRowsLinear
    >>> layer = FewRowsLinear(1024, 4096)
    >>> layer(torch.randn(2, 1, 1024)).shape
    torch.Size([2, 1, 4096])
    >>> layer.__class__ = nn.Linear
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns (..., out_features) of an input (..., in_features)."""
        weight = self.weight  # read once: a parametrization computes it anew each time
        if fused_dense.is_for_few_rows(input, weight):
            return fused_dense_func(input, weight, self.bias)
        return F.linear(input, weight, self.bias)

    def _get_name(self) -> str:
        return "Linear"


# The linear layer of the package's modules: exactly nn.Linear where there is no kernel for few rows.
Linear: type[nn.Linear] = FewRowsLinear if fused_dense.HAS_KERNEL else nn.Linear
PLAIN_LINEAR = nn.Linear, FewRowsLinear  # whose call is one product with the weight, plus the bias


class FusedDense(nn.Linear):
    """`nn.Linear` computed by `fused_dense_func`.

    Arguments in addition to the arguments of `nn.Linear`:
        return_residual: forward returns (out, x).

    >>> from flash_attn.ops.fused_dense import FusedDense
    >>> FusedDense(64, 128)(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 128])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(  # type: ignore[override]
        self, x: Tensor, process_group: ProcessGroup | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """process_group: gather x (..., in_features) along its first dimension from these processes."""
        weight = self.weight  # read once: a parametrization computes it anew each time
        if process_group is None and not fusing.is_plain(weight):  # such as a quantized weight, which torch knows
            out = F.linear(x, weight, self.bias)
            return (out, x) if self.return_residual else out
        return fused_dense_func(x, weight, self.bias, self.return_residual, process_group)


class _ParallelLinear(nn.Linear):
    """A linear layer with this process's share of the weight; `_divided` names the features that are divided."""

    _divided: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        share: int | None = None,
    ) -> None:
        features = {"in_features": in_features, "out_features": out_features}
        features[self._divided] = _share(self._divided, features[self._divided], process_group, multiple_of, share)
        # If the outputs are divided, so is the bias. If they are summed, only one process may add the bias.
        bias = bias and (self._divided == "out_features" or dist.get_rank(process_group) == 0)
        super().__init__(**features, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    @property
    def divided_dims(self) -> dict[str, int]:
        """Along which dimension each parameter is divided; others are whole."""
        return {"weight": 0, "bias": 0} if self._divided == "out_features" else {"weight": 1}


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer with its output features divided among the processes of a group.

    Arguments in addition to the arguments of `nn.Linear`:
        process_group: the processes.
        sequence_parallel: the first dimension of x is divided among them too, and gathered.
        multiple_of: out_features is divided in units of this size; if the units do not divide evenly, the first
            processes have one unit more.
        share: how many of the out_features this process has, if they are divided in another way; a multiple of
            multiple_of. The processes must have all out_features together, which is not checked.

    `weight` (out_features of this process, in_features) and `bias` are this process's rows.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.ops.fused_dense import ColumnParallelLinear
        >>> ColumnParallelLinear(64, 128, dist.group.WORLD, sequence_parallel=False)(torch.randn(10, 64)).shape
        torch.Size([10, 128])
        >>> dist.destroy_process_group()
    """

    _divided = "out_features"

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features of this process)."""
        weight, bias = sharding.local(self.weight), sharding.local(self.bias)
        return fused_dense_func(
            x, weight, bias, process_group=self.process_group, sequence_parallel=self.sequence_parallel
        )


class RowParallelLinear(_ParallelLinear):
    """A linear layer with its input features divided among the processes of a group.

    Arguments as in `ColumnParallelLinear`, but in_features is divided, and sequence_parallel divides the first
    dimension of the result. `weight` is (out_features, in_features of this process); only the first process has a
    `bias`, (out_features,).

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.ops.fused_dense import RowParallelLinear
        >>> RowParallelLinear(128, 64, dist.group.WORLD, sequence_parallel=False)(torch.randn(10, 128)).shape
        torch.Size([10, 64])
        >>> dist.destroy_process_group()
    """

    _divided = "in_features"

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features of this process) to (..., out_features)."""
        out = fused_dense_func(x, sharding.local(self.weight), self.bias)
        return _reduced(out, self.process_group, self.sequence_parallel)


def _share(name, features, process_group, multiple_of, share):
    """Returns how many of the features this process has."""
    checks.integer(name, features)
    checks.integer("multiple_of", multiple_of)
    checks.number("multiple_of", multiple_of, multiple_of > 0, "positive")
    checks.process_group(process_group)
    checks.number(name, features, features % multiple_of == 0, "a multiple of {}", multiple_of)
    if share is not None:
        share = checks.whole("share", share)
        fits = 0 <= share <= features and share % multiple_of == 0
        checks.number("share", share, fits, "a multiple of {} from 0 to {}, {}", multiple_of, name, features)
        return share
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    return get_dim_for_local_rank(features, world_size, rank, multiple_of)


def _reduced(out, process_group, sequence_parallel):
    """Returns the sum of all processes' parts; with sequence_parallel, only this process's share of its rows."""
    if collectives.size(process_group) == 1:
        return out
    invariance.refuse_sums_of_many(collectives.size(process_group))
    return (reduce_scatter if sequence_parallel else all_reduce)(out, process_group)


class FusedMLP(nn.Module):
    """Two linear layers with an activation between them, by `fused_mlp_func`.

    Arguments:
        in_features, hidden_features, out_features: widths; by default hidden_features is 4 * in_features and
            out_features is in_features.
        bias1, bias2: whether the layers have a bias.
        activation, checkpoint_lvl, return_residual: as in `fused_mlp_func`. Nothing is kept outside of training.
        heuristic: as in `fused_mlp_func`, or "auto" for the choice that was fastest when measured.

    If more than its product is wanted of a layer (hooks, an adapter, weight_norm, another class), the layers are called
    one after the other; `checkpoint_lvl` then has no effect.

    >>> from flash_attn.ops.fused_dense import FusedMLP
    >>> FusedMLP(64, checkpoint_lvl=1)(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _configure(self, activation, checkpoint_lvl, heuristic)
        self.return_residual = return_residual
        in_features, hidden, out = fused_dense.mlp_widths(
            in_features, hidden_features or 4 * in_features, out_features or in_features
        )
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor, process_group: ProcessGroup | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """process_group: gather x (..., in_features) along its first dimension, and scatter the sum of all results."""
        if _may_fuse(self, x):
            out = _fused_mlp(self, x, process_group, True, self.return_residual)
        else:
            out = _called_mlp(self, x if process_group is None else all_gather(x, process_group))
            out = (out, x) if self.return_residual else out
        if process_group is None:
            return out
        invariance.refuse_sums_of_many(collectives.size(process_group))
        if not self.return_residual:
            return reduce_scatter(out, process_group)
        return reduce_scatter(out[0], process_group), out[1]

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return _described(self)


class ParallelFusedMLP(nn.Module):
    """`FusedMLP` with its hidden features divided among the processes of a group.

    Arguments as in `FusedMLP`, and
        process_group: the processes; required.
        sequence_parallel: the first dimension of x and of the result is divided among them too.

    `fc1` is a `ColumnParallelLinear` and `fc2` a `RowParallelLinear`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.ops.fused_dense import ParallelFusedMLP
        >>> ParallelFusedMLP(64, 256, process_group=dist.group.WORLD)(torch.randn(10, 64)).shape
        torch.Size([10, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: str = "gelu_approx",
        process_group: ProcessGroup | None = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _configure(self, activation, checkpoint_lvl, heuristic)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        in_features, hidden, out = fused_dense.mlp_widths(
            in_features, hidden_features or 4 * in_features, out_features or in_features
        )
        options: dict[str, Any] = dict(
            process_group=process_group, sequence_parallel=sequence_parallel, device=device, dtype=dtype
        )
        self.fc1 = ColumnParallelLinear(in_features, hidden, bias=bias1, **options)
        self.fc2 = RowParallelLinear(hidden, out, bias=bias2, **options)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        if not _may_fuse(self, x, (ColumnParallelLinear,), (RowParallelLinear,)):
            return _called_mlp(self, x)  # whose layers exchange x and the sum
        out = _fused_mlp(self, x, self.process_group, self.sequence_parallel)
        return _reduced(out, self.process_group, self.sequence_parallel)

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return _described(self)


def _configure(module, activation, checkpoint_lvl, heuristic):
    """Check and set the options that both MLP classes have."""
    fused_dense.check_mlp(activation, checkpoint_lvl, -1 if heuristic == "auto" else heuristic)
    module.activation = activation
    module.checkpoint_lvl = checkpoint_lvl
    module.heuristic = heuristic if activation != "sqrelu" else -1


def _described(module):
    return f"activation={module.activation!r}, checkpoint_lvl={module.checkpoint_lvl}"


def _may_fuse(module, x, first=PLAIN_LINEAR, second=PLAIN_LINEAR):
    """Whether `fused_mlp_func` does all that calling the layers of a module, of these classes, would do."""
    return fusing.may_fuse(module.fc1, first, x) and fusing.may_fuse(module.fc2, second, x)


def _called_mlp(module, x):
    """The MLP by calls of its layers."""
    return module.fc2(fused_dense.activate(module.fc1(x), module.activation))


def _fused_mlp(module, x, process_group, sequence_parallel, return_residual=False):
    """`fused_mlp_func` of the layers of a module."""
    fc1, fc2 = module.fc1, module.fc2
    return fused_mlp_func(
        x,
        fc1.weight,
        fc2.weight,
        fc1.bias,
        fc2.bias,
        activation=module.activation,
        save_pre_act=module.training,
        return_residual=return_residual,
        checkpoint_lvl=module.checkpoint_lvl,
        heuristic=_heuristic(module),
        process_group=process_group,
        sequence_parallel=sequence_parallel,
    )


def _heuristic(module):
    return 0 if module.heuristic == "auto" else module.heuristic
