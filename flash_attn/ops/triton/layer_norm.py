"""LayerNorm and RMSNorm of a residual stream, with dropout, a row scale, a second branch and a second norm.

With h = dropout(rowscale * x) + dropout(x1) + residual, all of it optional except x, the last dimension is normalised
in float32 as in `flash_attn.ops.layer_norm` and `flash_attn.ops.rms_norm`. A GPU runs the library's own kernels, or the
kernels of `flash_attn._triton.layer_norm` if the library is not built. Other devices use plain torch.

    out, residual = rms_norm_fn(x, weight, None, residual=residual, prenorm=True)
"""

import functools
from typing import Literal, overload

import torch
from torch.nn import functional

from flash_attn._ops import checks, fusing, layer_norm

_NAMES = "x", "weight", "bias", "eps"


@overload
def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: Literal[False] = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    *,
    prenorm: Literal[True],
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]: ...
def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """LayerNorm, or RMSNorm, differentiable in x, weight, bias, residual, x1, weight1 and bias1.

    Arguments:
        x: (..., features), float32, float16 or bfloat16, as all tensors may be.
        weight, bias: (features,); bias may be None.
        residual, x1: like x, or None.
        weight1, bias1: parameters of a second norm of the same h, or None.
        eps: added to the variance, or for RMSNorm to the mean square.
        dropout_p: probability that an element of x and, independently, of x1 is dropped, at least 0 and less than 1.
            Elements are dropped in every call, since there is no training mode here.
        rowscale: a factor for each row of x, of any shape; not together with x1.
        prenorm: also return h.
        residual_in_fp32: without a residual, h is float32 instead of the dtype of x. With one, h has the residual's.
        zero_centered_weight: the norms multiply by 1 + weight and 1 + weight1.
        is_rms_norm: RMSNorm instead of LayerNorm.
        return_dropout_mask: also return which elements of x and of x1 were kept, bool; None where nothing is dropped.
        out_dtype: dtype of the results; by default the dtype of x.
        out: a tensor like x, of any dtype; the first result is written to it.
        residual_out: a tensor like x, which h is written to.

    Returns out, or a tuple of out, out1 (with weight1), h (with prenorm), mask and mask1 (with return_dropout_mask), in
    this order. If nothing changes x, h is x.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.ops.triton.layer_norm import layer_norm_fn
    >>> x, weight = torch.randn(2, 5, 64), torch.ones(64)
    >>> layer_norm_fn(x, weight, None, residual=torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """
    if rowscale is not None and x1 is not None:
        raise ValueError("rowscale must be None with x1, found a tensor: two branches cannot share a scale")
    buffers = {name: given for name, given in (("out", out), ("residual_out", residual_out)) if given is not None}
    for name, buffer in buffers.items():
        checks.tensor(name, buffer, dtypes=layer_norm.DTYPES, shape=x.shape, device=x.device)
    checks.own_memory(**buffers)
    result, result1, h, mask, mask1, *_ = layer_norm.forward(
        x,
        residual,
        weight,
        bias,
        eps,
        dropout_p,
        x1=x1,
        weight1=weight1,
        bias1=bias1,
        rowscale=rowscale,
        prenorm=prenorm or residual_out is not None,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        zero_centered_weight=zero_centered_weight,
        out_dtype=out_dtype if out is None else out.dtype,
        return_mask=return_dropout_mask,
        names=_NAMES,
    )
    result = result if out is None else out.copy_(result)
    h = h if residual_out is None else residual_out.copy_(h)
    masks = [None if each is None else each.view(torch.bool) for each in (mask, mask1)]
    results = (
        result,
        *([] if weight1 is None else [result1]),
        *([h] if prenorm else []),
        *(masks if return_dropout_mask else []),
    )
    return results if len(results) > 1 else result


@overload
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: Literal[False] = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    *,
    prenorm: Literal[True],
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]: ...
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """RMSNorm: `layer_norm_fn` with is_rms_norm=True.

    >>> from flash_attn.ops.triton.layer_norm import rms_norm_fn
    >>> out, h = rms_norm_fn(torch.randn(2, 5, 64), torch.ones(64), None, prenorm=True)
    """
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
        out_dtype,
        out,
        residual_out,
    )


class LayerNormFn:
    """`LayerNormFn.apply` is `layer_norm_fn`.

    Example:
        >>> from flash_attn.ops.triton.layer_norm import LayerNormFn
        >>> LayerNormFn.apply(torch.randn(2, 5, 64), torch.ones(64), torch.zeros(64)).shape
        torch.Size([2, 5, 64])
    """

    apply = staticmethod(layer_norm_fn)


def layer_norm_linear_fn(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """A linear layer of the norm of h = x + residual. The norm is not stored: the backward computes it again.

    Arguments:
        x, residual, eps, prenorm, residual_in_fp32, is_rms_norm: as in `layer_norm_fn`.
        norm_weight, norm_bias: (features,); the bias may be None.
        linear_weight, linear_bias: (outputs, features) and (outputs,); the bias may be None.

    The output of the norm has the dtype of autocast, or without autocast the dtype of x; linear_weight and linear_bias
    are cast to it. Returns (..., outputs) of that dtype, or with prenorm a tuple of it and h.

    >>> from flash_attn.ops.triton.layer_norm import layer_norm_linear_fn
    >>> layer_norm_linear_fn(torch.randn(2, 5, 64), torch.ones(64), None, torch.randn(8, 64), None).shape
    torch.Size([2, 5, 8])
    """
    out, h = layer_norm.normalize_linear(
        x, residual, norm_weight, norm_bias, linear_weight, linear_bias, eps, prenorm, residual_in_fp32, is_rms_norm
    )
    return (out, h) if prenorm else out


class LayerNormLinearFn:
    """`LayerNormLinearFn.apply` is `layer_norm_linear_fn`.

    Example:
        >>> from flash_attn.ops.triton.layer_norm import LayerNormLinearFn
        >>> x, weight = torch.randn(2, 5, 64), torch.randn(128, 64)
        >>> LayerNormLinearFn.apply(x, torch.ones(64), torch.zeros(64), weight, None).shape
        torch.Size([2, 5, 128])
    """

    apply = staticmethod(layer_norm_linear_fn)


class RMSNorm(torch.nn.Module):
    """`rms_norm_fn` with its weight as a parameter; nothing is dropped outside training.

    Arguments:
        hidden_size: features.
        eps: added to the mean square.
        dropout_p: probability of dropout.
        zero_centered_weight: the norm multiplies by 1 + the parameter.

    >>> from flash_attn.ops.triton.layer_norm import RMSNorm
    >>> out, residual = RMSNorm(64)(torch.randn(2, 5, 64), prenorm=True)
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one, or with zero_centered_weight to zero: both only normalize."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """The norm of dropout(x) + residual, for x and residual (..., hidden_size); residual may be None.

        Returns a tensor like x; with prenorm also the sum, in float32 with residual_in_fp32.
        """
        dropout_p = 0.0
        if self.drop is not None and (not fusing.may_fuse(self.drop, (torch.nn.Dropout,), x) or self.drop.p == 1):
            x = self.drop(x)
        elif self.drop is not None and self.drop.training:
            dropout_p = self.drop.p
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=dropout_p,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}, zero_centered_weight={self.zero_centered_weight}"


def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: torch.Tensor | None = None,
    dropout_mask1: torch.Tensor | None = None,
    upcast: bool = False,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """`layer_norm_fn` spelled out in torch operations, in the dtypes of the arguments, or in float32 if upcast.

    The masks are bool, true for kept; without them, dropout draws its own. Returns what `layer_norm_fn` does, without
    masks; h has the dtype in which it is computed.

    Example:
        >>> from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_ref
        >>> x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
        >>> torch.allclose(layer_norm_fn(x, weight, bias), layer_norm_ref(x, weight, bias), atol=1e-5)
        True
    """
    normalise = functools.partial(_layer_norm, eps=eps)
    return _reference(
        normalise,
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        dropout_p,
        rowscale,
        prenorm,
        zero_centered_weight,
        dropout_mask,
        dropout_mask1,
        upcast,
    )


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: torch.Tensor | None = None,
    dropout_mask1: torch.Tensor | None = None,
    upcast: bool = False,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """`layer_norm_ref` for RMSNorm.

    Example:
        >>> from flash_attn.ops.triton.layer_norm import rms_norm_fn, rms_norm_ref
        >>> x, weight = torch.randn(4, 8), torch.randn(8)
        >>> torch.allclose(rms_norm_fn(x, weight, None), rms_norm_ref(x, weight, None), atol=1e-5)
        True
    """
    normalise = functools.partial(_rms_norm, eps=eps)
    return _reference(
        normalise,
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        dropout_p,
        rowscale,
        prenorm,
        zero_centered_weight,
        dropout_mask,
        dropout_mask1,
        upcast,
    )


def _reference(
    normalise,
    x,
    weight,
    bias,
    residual,
    x1,
    weight1,
    bias1,
    dropout_p,
    rowscale,
    prenorm,
    zero_centered_weight,
    dropout_mask,
    dropout_mask1,
    upcast,
):
    dtype = x.dtype
    if upcast:
        x, weight, bias, residual, x1, weight1, bias1, rowscale = (
            None if tensor is None else tensor.float()
            for tensor in (x, weight, bias, residual, x1, weight1, bias1, rowscale)
        )
    if zero_centered_weight:
        weight, weight1 = weight + 1, None if weight1 is None else weight1 + 1
    h = x if rowscale is None else x * rowscale[..., None]
    h = _dropout(h, dropout_p, dropout_mask)
    if x1 is not None:
        h = h + _dropout(x1, dropout_p, dropout_mask1)
    if residual is not None:
        h = (h + residual).to(h.dtype)
    outs = [normalise(h, weight, bias).to(dtype)]
    if weight1 is not None:
        outs.append(normalise(h, weight1, bias1).to(dtype))
    results = (*outs, h) if prenorm else tuple(outs)
    return results if len(results) > 1 else results[0]


def _dropout(x, dropout_p, mask):
    if dropout_p == 0:
        return x
    return functional.dropout(x, dropout_p) if mask is None else x.masked_fill(~mask, 0) / (1 - dropout_p)


def _layer_norm(h, weight, bias, eps):
    return functional.layer_norm(h.to(weight.dtype), weight.shape, weight, bias, eps)


def _rms_norm(h, weight, bias, eps):
    out = h / torch.sqrt(h.square().mean(-1, keepdim=True) + eps) * weight
    return out if bias is None else out + bias
