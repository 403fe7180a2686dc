"""Transformer blocks: a mixer and an MLP with dropout, residual connections and norms around them.

    block = Block(768, mixer_cls=functools.partial(MHA, num_heads=12, causal=True), fused_dropout_add_ln=True)
    hidden_states, residual = block(torch.randn(2, 512, 768))

A block with prenorm begins with the addition that ends the block before: dropout, add, norm, mixer, dropout, add, norm,
MLP. It returns the output of the MLP and the residual stream without adding them, so that dropout, add and norm can be
one kernel with fused_dropout_add_ln (`layer_norm_fn`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn


class StochasticDepth(nn.Module):
    """In training, drop whole entries of the first dimension with probability p (Huang et al., arXiv:1603.09382).

    The others are divided by 1 - p. Raises ValueError for a p that is not from 0 to 1.

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
        if not isinstance(self.mlp, nn.Identity):
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
        if not isinstance(self.mlp, nn.Identity):
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
        if not isinstance(self.mlp, nn.Identity):
            out = self.mlp(hidden_states)
            out, residual = out if self.return_residual else (out, hidden_states)
            hidden_states, _ = self._add_norm(out, residual, self.dropout2, self.drop_path2, self.norm2)
        return hidden_states

    def _add_norm(
        self, x: Tensor, residual: Tensor | None, dropout: Any, drop_path: StochasticDepth, norm: nn.Module
    ) -> tuple[Tensor, Any]:
        """(norm(h), h) of h = drop_path(dropout(x)) + residual; h only with prenorm, else None."""
        if self.fused_dropout_add_ln:
            rowscale = None
            if self.training and drop_path.p > 0:
                rowscale = drop_path(torch.ones(x.shape[:-1], device=x.device, dtype=x.dtype))
            dropout_p = dropout.p if self.training else 0.0
            out = _fused_norm(self, norm, x, residual, dropout_p, prenorm=self.prenorm, rowscale=rowscale)
            return out if self.prenorm else (out, None)
        h = drop_path(dropout(x))
        h = h if residual is None else h + residual
        out = _normed(norm, h, x.dtype)
        return out, h.float() if self.residual_in_fp32 else h


class ParallelBlock(nn.Module):
    """A mixer and an MLP side by side, with a norm of the same residual stream before each (GPT-J, PaLM).

    Arguments:
        tied_norm: one norm for both.
        resid_dropout1, resid_dropout2: probabilities of dropout, of the mixer's output and of the MLP's.
        The others are those of `Block`.

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
        add_norm = self._fused_add_norm if self.fused_dropout_add_ln else self._add_norm
        normed1, normed2, residual = add_norm(hidden_states1, hidden_states2, residual)
        return self.mixer(normed1, **(mixer_kwargs or {})), self.mlp(normed2), residual

    def _add_norm(self, x1: Tensor, x2: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(norm1(h), norm2(h), h) of h = dropout1(x1) + dropout2(x2) + residual."""
        h = self.dropout1(x1)
        if x2 is not None:
            h = h + self.dropout2(x2)
        h = h if residual is None else h + residual
        normed1 = _normed(self.norm1, h, x1.dtype)
        normed2 = normed1 if self.tied_norm else _normed(self.norm2, h, x1.dtype)
        return normed1, normed2, h.float() if self.residual_in_fp32 else h

    def _fused_add_norm(self, x1: Tensor, x2: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`_add_norm` in one kernel."""
        dropout_p = self.dropout1.p if self.training else 0.0
        if self.training and x2 is not None and self.dropout1.p != self.dropout2.p:  # the kernel has one for both
            x1, x2, dropout_p = self.dropout1(x1), self.dropout2(x2), 0.0
        norm2 = {} if self.tied_norm else dict(weight1=self.norm2.weight, bias1=self.norm2.bias)
        normed, *normed2, h = _fused_norm(self, self.norm1, x1, residual, dropout_p, prenorm=True, x1=x2, **norm2)
        return normed, normed if self.tied_norm else normed2[0], h


def _normed(norm: nn.Module, h: Tensor, dtype: torch.dtype) -> Tensor:
    """norm(h), in the dtype of its weight, or in this one if it has none."""
    weight = getattr(norm, "weight", None)
    return norm(h.to(dtype if weight is None else weight.dtype))


def _fused_norm(block: Any, norm: Any, x: Tensor, residual: Tensor | None, dropout_p: float, **options: Any) -> Any:
    """`layer_norm_fn` with the options of the block and of its norm."""
    return layer_norm_fn(
        x,
        norm.weight,
        norm.bias,
        residual=residual,
        eps=norm.eps,
        dropout_p=dropout_p,
        residual_in_fp32=block.residual_in_fp32,
        is_rms_norm=isinstance(norm, RMSNorm),
        zero_centered_weight=getattr(norm, "zero_centered_weight", False),
        **options,
    )


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
