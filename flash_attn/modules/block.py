"""Transformer blocks: a mixer and an MLP with dropout, residual connections and norms around them.

    block = Block(768, mixer_cls=functools.partial(MHA, num_heads=12, causal=True), fused_dropout_add_ln=True)
    hidden_states, residual = block(torch.randn(2, 512, 768))

A block with prenorm begins with the addition that ends the block before: dropout, add, norm, mixer, dropout, add, norm,
MLP. It returns the output of the MLP and the residual stream without adding them, so that dropout, add and norm can be
one kernel with fused_dropout_add_ln (`layer_norm_fn`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_attn._ops import fusing
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn


class StochasticDepth(nn.Module):
    """In training, drop whole entries of the first dimension with probability p (Huang et al., arXiv:1603.09382).

    The others are divided by 1 - p. Raises ValueError for a p that is not from 0 to 1.

    >>> from flash_attn.modules.block import StochasticDepth
    >>> StochasticDepth(0.5).eval()(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be from 0 to 1, found {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, ...) with entries dropped."""
        if not self.training or self.p == 0:
            return x
        kept = torch.empty(x.shape[:1] + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        return x * (kept if self.p == 1 else kept / (1 - self.p))

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return f"p={self.p}"


class Block(nn.Module):
    """A mixer and an MLP, each with a residual connection.

    Arguments:
        dim: features.
        mixer_cls: returns the mixer when called with dim; if None, MHA with dim / 64 heads of 64 features.
        mlp_cls: returns the MLP when called with dim; if None, Mlp with 4 * dim hidden features. If the MLP is an
            nn.Identity, the block ends after the mixer.
        norm_cls: returns a norm when called with dim.
        dropout_cls: returns a dropout when called with resid_dropout1 or resid_dropout2, which act before the first and
            the second residual connection.
        prenorm: the norms are before mixer and MLP; otherwise after the residual connections.
        resid_dropout1, resid_dropout2, drop_path1, drop_path2: probabilities of dropout and of `StochasticDepth`.
        fused_dropout_add_ln: dropout, add and norm in one kernel. The norms must be nn.LayerNorm or
            `flash_attn.ops.triton.layer_norm.RMSNorm`. The norm's output then has the dtype of the hidden states
            instead of that of the norm's weight, and a residual that is given keeps its dtype.
        return_residual: the mixer and the MLP return (output, input), and the block adds these inputs as residuals.
            Only used without prenorm.
        residual_in_fp32: keep the residual stream in float32. Only with prenorm.
        sequence_parallel: mark the norms' parameters for `allreduce_sequence_parallel_grad`.
        mark_shared_params: mark the norms' parameters for `sync_shared_params`.
        output_cls: returns a module when called with dim, which the outputs of mixer and MLP go through before their
            dropout: a norm (as in Gemma 2) or a factor (as in Granite). Only with prenorm. They are called output1 and
            output2, and marked like the norms.

    Raises TypeError for norms and dropouts that cannot be fused, and for a module in place of what makes one, and
    ValueError for options that do not fit together.

    >>> from flash_attn.modules.block import Block
    >>> hidden_states, residual = Block(128)(torch.randn(2, 16, 128))
    """

    mixer: Any  # a module; it needs allocate_inference_cache only if that method of the block is called

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[..., nn.Module] | None = None,
        mlp_cls: Callable[..., nn.Module] | None = None,
        norm_cls: Callable[..., nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[..., nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
        *,
        output_cls: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise ValueError("residual_in_fp32 must be False without prenorm, found True")
        if output_cls is not None and not prenorm:
            raise ValueError(f"output_cls must be None without prenorm, found {output_cls}")
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = _mixer(dim, mixer_cls)
        self.dropout1 = _made("dropout_cls", dropout_cls, resid_dropout1)
        self.drop_path1 = StochasticDepth(drop_path1)
        self.norm1 = _made("norm_cls", norm_cls, dim)
        self.output1 = None if output_cls is None else _made("output_cls", output_cls, dim)
        self.mlp = _mlp(dim, mlp_cls)
        if not isinstance(self.mlp, nn.Identity):  # else the block ends after the mixer, which `_has_mlp` asks
            self.dropout2 = _made("dropout_cls", dropout_cls, resid_dropout2)
            self.drop_path2 = StochasticDepth(drop_path2)
            self.norm2 = _made("norm_cls", norm_cls, dim)
            self.output2 = None if output_cls is None else _made("output_cls", output_cls, dim)
        if fused_dropout_add_ln:
            _check_fused(self)
        _mark_norms(self, sequence_parallel, mark_shared_params)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The cache that the mixer needs to decode batch_size sequences of at most max_seqlen tokens.

        dtype: of the cache; by default that of the mixer. kwargs: what else the mixer's method of this name takes.
        """
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: slice | list[int] | Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One step of the residual stream.

        Arguments:
            hidden_states: (..., dim), the output of the block before, not yet added to the residual.
            residual: (..., dim), the residual stream; None in the first block, and without prenorm.
            mixer_subset: a slice or list of the tokens that are kept, as MHA with cross_attn takes it. Only used with
                prenorm.
            mixer_kwargs: more arguments of the mixer.

        Returns (hidden_states, residual) with prenorm, otherwise the new hidden_states. Raises ValueError for a
        residual without prenorm, and TypeError for both outputs of a block in one tuple.
        """
        _refuse_tuple("hidden_states", hidden_states)
        mixer_kwargs = dict(mixer_kwargs or {})
        if not self.prenorm:
            if residual is not None:
                raise ValueError("residual must be None without prenorm, found a tensor")
            return self._postnorm(hidden_states, mixer_kwargs)
        if mixer_subset is not None:
            mixer_kwargs["mixer_subset"] = mixer_subset
        hidden_states, residual = self._add_norm(hidden_states, residual, self.dropout1, self.drop_path1, self.norm1)
        hidden_states = self.mixer(hidden_states, **mixer_kwargs)
        if self.output1 is not None:
            hidden_states = self.output1(hidden_states)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if self._has_mlp():
            hidden_states, residual = self._add_norm(
                hidden_states, residual, self.dropout2, self.drop_path2, self.norm2
            )
            hidden_states = self.mlp(hidden_states)
            if self.output2 is not None:
                hidden_states = self.output2(hidden_states)
        return hidden_states, residual

    def _postnorm(self, hidden_states: Tensor, mixer_kwargs: dict[str, Any]) -> Tensor:
        out = self.mixer(hidden_states, **mixer_kwargs)
        out, residual = out if self.return_residual else (out, hidden_states)
        hidden_states, _ = self._add_norm(out, residual, self.dropout1, self.drop_path1, self.norm1)
        if self._has_mlp():
            out = self.mlp(hidden_states)
            out, residual = out if self.return_residual else (out, hidden_states)
            hidden_states, _ = self._add_norm(out, residual, self.dropout2, self.drop_path2, self.norm2)
        return hidden_states

    def _has_mlp(self) -> bool:
        """Whether there is an MLP, and not an nn.Identity: from the start, however it is wrapped, or put in later."""
        return hasattr(self, "norm2") and not isinstance(self.mlp, nn.Identity)

    def _add_norm(
        self, x: Tensor, residual: Tensor | None, dropout: Any, drop_path: StochasticDepth, norm: nn.Module
    ) -> tuple[Tensor, Any]:
        """(norm(h), h) of h = drop_path(dropout(x)) + residual; h only with prenorm, else None."""
        (out,), h = _add_and_norm(
            [norm],
            [_Branch(x, dropout, drop_path)],
            residual,
            fused=self.fused_dropout_add_ln,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )
        return out, h


class ParallelBlock(nn.Module):
    """A mixer and an MLP side by side, with a norm of the same residual stream before each (GPT-J, PaLM).

    Arguments:
        tied_norm: one norm for both.
        resid_dropout1, resid_dropout2: probabilities of dropout, of the mixer's output and of the MLP's.
        The others are those of `Block`.

    >>> from flash_attn.modules.block import ParallelBlock
    >>> hidden_states1, hidden_states2, residual = ParallelBlock(128)(torch.randn(2, 16, 128))
    """

    mixer: Any
    dropout1: Any
    dropout2: Any

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[..., nn.Module] | None = None,
        mlp_cls: Callable[..., nn.Module] | None = None,
        norm_cls: Callable[..., nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[..., nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = _mixer(dim, mixer_cls)
        self.dropout1 = _made("dropout_cls", dropout_cls, resid_dropout1)
        self.norm1 = _made("norm_cls", norm_cls, dim)
        self.mlp = _mlp(dim, mlp_cls)
        self.dropout2 = _made("dropout_cls", dropout_cls, resid_dropout2)
        if not tied_norm:
            self.norm2 = _made("norm_cls", norm_cls, dim)
        if fused_dropout_add_ln:
            _check_fused(self)
        _mark_norms(self, sequence_parallel, mark_shared_params)

    allocate_inference_cache = Block.allocate_inference_cache

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the residual stream.

        Arguments:
            hidden_states1, hidden_states2: (..., dim), the outputs of mixer and MLP of the block before. In the first
                block, hidden_states1 is the embedding and hidden_states2 None.
            residual: (..., dim), the residual stream; None in the first block.
            mixer_kwargs: more arguments of the mixer.

        Returns (hidden_states1, hidden_states2, residual).
        """
        _refuse_tuple("hidden_states1", hidden_states1)
        branches = [_Branch(hidden_states1, self.dropout1)]
        if hidden_states2 is not None:
            branches.append(_Branch(hidden_states2, self.dropout2))
        norms = [self.norm1] if self.tied_norm else [self.norm1, self.norm2]
        normed, residual = _add_and_norm(
            norms,
            branches,
            residual,
            fused=self.fused_dropout_add_ln,
            prenorm=True,
            residual_in_fp32=self.residual_in_fp32,
        )
        return self.mixer(normed[0], **(mixer_kwargs or {})), self.mlp(normed[-1]), residual


class _Branch(NamedTuple):
    """What is added to the residual stream: drop_path(dropout(x))."""

    x: Tensor
    dropout: Any = None  # modules, or None
    drop_path: Any = None

    def dropped(self) -> Tensor:
        """drop_path(dropout(x))."""
        x = self.x if self.dropout is None else self.dropout(self.x)
        return x if self.drop_path is None else self.drop_path(x)

    def p_of_kernel(self) -> float | None:
        """The probability of dropout with which a kernel does the same; None if the modules must be called."""
        _, dropout, drop_path = self
        if drop_path is not None and not fusing.may_fuse(drop_path, (StochasticDepth,), self.x):
            return None
        if dropout is None:
            return 0.0
        if not fusing.may_fuse(dropout, (nn.Dropout,), self.x) or dropout.p == 1:
            return None
        return dropout.p if dropout.training else 0.0

    def rowscale(self) -> Tensor | None:
        """What drop_path multiplies the rows of x by, (...); None for 1."""
        if self.drop_path is None or not self.drop_path.training or self.drop_path.p == 0:
            return None
        return self.drop_path(torch.ones(self.x.shape[:-1], device=self.x.device, dtype=self.x.dtype))


def _add_and_norm(
    norms: list[nn.Module],
    branches: list[_Branch],
    residual: Tensor | None,
    *,
    fused: bool,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> tuple[list[Tensor], Any]:
    """The norms of h, the sum of the residual (...,  dim) and one or two branches, and h.

    Arguments:
        norms: one norm, or two of the same h.
        branches: two cannot have a drop_path.
        fused: by `layer_norm_fn`. Then the norms' results have the dtype of the first branch, and h that of the
            residual if there is one. Norms that are more than nn.LayerNorm or RMSNorm (hooks, an adapter, another
            class) are called, with results of the same dtypes.
        prenorm: h is wanted; with fused, it is None otherwise.
        residual_in_fp32: h is float32.
    """
    x = branches[0].x
    if fused and (kind := _kind(norms[0], x)) is not None and all(_kind(norm, x) == kind for norm in norms[1:]):
        return _fused(norms, kind, branches, residual, prenorm, residual_in_fp32)
    h = residual
    for branch in branches:
        h = branch.dropped() if h is None else branch.dropped() + h
    assert h is not None
    outs = [_normed(norm, h, x.dtype) for norm in norms]
    if not fused:
        return outs, h.float() if residual_in_fp32 else h
    wide = torch.float32 if residual_in_fp32 else x.dtype
    return [out.to(x.dtype) for out in outs], h.to(wide if residual is None else residual.dtype)


def _kind(norm: Any, x: Tensor) -> tuple[bool, float, bool] | None:
    """(is_rms_norm, eps, zero_centered_weight) of a norm that `layer_norm_fn` computes; None of any other."""
    if not fusing.may_fuse(norm, (nn.LayerNorm, RMSNorm), x):
        return None
    if type(norm) is RMSNorm:
        return (True, norm.eps, norm.zero_centered_weight) if norm.drop is None else None
    return (False, norm.eps, False) if norm.elementwise_affine and len(norm.normalized_shape) == 1 else None


def _fused(
    norms: list[Any],
    kind: tuple[bool, float, bool],
    branches: list[_Branch],
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
) -> tuple[list[Tensor], Any]:
    """`_add_and_norm` in one kernel."""
    first, norm = branches[0], norms[0]
    dropout_p = first.p_of_kernel()
    options: dict[str, Any] = dict(x=first.x)
    if len(branches) > 1:
        options["x1"] = branches[1].x
        if branches[1].p_of_kernel() != dropout_p:  # the kernel has one for both
            dropout_p = None
    if dropout_p is None:
        options = dict(zip(("x", "x1"), [branch.dropped() for branch in branches]))
    else:
        options |= dict(dropout_p=dropout_p, rowscale=first.rowscale())
    if len(norms) > 1:
        options |= dict(weight1=norms[1].weight, bias1=norms[1].bias)
    is_rms_norm, eps, zero_centered = kind
    results: Any = layer_norm_fn(
        weight=norm.weight,
        bias=norm.bias,
        residual=residual,
        eps=eps,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        zero_centered_weight=zero_centered,
        is_rms_norm=is_rms_norm,
        **options,
    )
    results = results if isinstance(results, tuple) else (results,)
    return list(results[: len(norms)]), results[-1] if prenorm else None


def _normed(norm: nn.Module, h: Tensor, dtype: torch.dtype) -> Tensor:
    """norm(h), in the dtype of its weight, or in this one if it has none."""
    weight = getattr(norm, "weight", None)
    return norm(h.to(dtype if weight is None else weight.dtype))


def _mixer(dim: int, mixer_cls: Callable[..., nn.Module] | None) -> nn.Module:
    if mixer_cls is not None:
        return _made("mixer_cls", mixer_cls, dim)
    if dim % 64 or dim < 64:
        raise ValueError(
            f"dim must be a multiple of 64, the size of a head, unless mixer_cls is given, found {dim}: "
            "give mixer_cls=functools.partial(MHA, num_heads=...)"
        )
    return MHA(dim, num_heads=dim // 64)


def _mlp(dim: int, mlp_cls: Callable[..., nn.Module] | None) -> nn.Module:
    return Mlp(dim, hidden_features=4 * dim) if mlp_cls is None else _made("mlp_cls", mlp_cls, dim)


def _made(name: str, cls: Callable[..., nn.Module], argument: float) -> nn.Module:
    """cls(argument). Raises TypeError for a module, which would take the argument for its input."""
    if isinstance(cls, nn.Module):
        raise TypeError(f"{name} must be a class or function that makes a module, found a module, {type(cls).__name__}")
    return cls(argument)


def _refuse_tuple(name: str, hidden_states: Tensor) -> None:
    """Raise TypeError for all outputs of another block in one argument, as nn.Sequential would give them."""
    if isinstance(hidden_states, tuple):
        raise TypeError(
            f"{name} must be a tensor, found a tuple: give outputs of a block as arguments, block(*outputs)"
        )


def _check_fused(block: nn.Module) -> None:
    """Check that norms and dropouts are of the kinds that the kernel computes."""
    for name, child in block.named_children():
        kind: tuple[type, ...] = {"norm": (nn.LayerNorm, RMSNorm), "dropout": (nn.Dropout,)}.get(name.rstrip("12"), ())
        if kind and not isinstance(child, kind):
            expected = "nn.Dropout" if nn.Dropout in kind else f"nn.LayerNorm or {_path(RMSNorm)}"
            raise TypeError(f"{name} must be {expected} with fused_dropout_add_ln, found {_path(type(child))}")


def _path(cls: type) -> str:
    """The full name of a class, as there are several called RMSNorm."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _mark_norms(block: nn.Module, sequence_parallel: bool, mark_shared_params: bool) -> None:
    marked: Any
    for name, norm in block.named_children():
        # The module is marked too: unlike its parameters it keeps the mark in a copy, and when to_empty replaces them.
        for marked in (norm, *norm.parameters()) if name in ("norm1", "norm2", "output1", "output2") else ():
            if sequence_parallel:
                marked._sequence_parallel = True
            if mark_shared_params:
                marked._shared_params = True
