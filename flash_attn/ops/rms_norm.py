"""RMSNorm fused with what comes before it: dropout, row scale, layer scale and the residual stream.

With h = dropout(rowscale * x0) * layerscale + residual, all of it optional except x0,

    out = h / sqrt(mean(h^2) + epsilon) * weight

over the last dimension, in float32 (Zhang and Sennrich, Root mean square layer normalization, arXiv:1910.07467), plus
bias if there is one. Functions and arguments are the same as in `flash_attn.ops.layer_norm`.
"""

import torch

from flash_attn._ops import layer_norm
from flash_attn.ops.layer_norm import (
    DropoutAddLayerNorm,
    DropoutAddLayerNormFn,
    DropoutAddLayerNormParallelResidualFn,
    DropoutAddLayerNormSubsetFn,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of x (..., features): x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, arXiv:1910.07467).

    weight: (features,). Returns a tensor like x.

    >>> from flash_attn.ops.rms_norm import rms_norm
    >>> rms_norm(torch.randn(2, 5, 64), torch.ones(64), 1e-5).shape
    torch.Size([2, 5, 64])
    """
    return layer_norm.forward(
        x, None, weight, None, epsilon, 0.0, is_rms_norm=True, names=("x", "weight", "bias", "epsilon")
    )[0]


def dropout_add_rms_norm(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Dropout, sum with the residual, RMSNorm: h = residual + dropout(x0), out = h / sqrt(mean h^2 + epsilon) * weight.

    The arguments and what is returned are those of `flash_attn.ops.layer_norm.dropout_add_layer_norm`.

    >>> from flash_attn.ops.rms_norm import dropout_add_rms_norm
    >>> x, residual = torch.randn(2, 2, 5, 64)
    >>> out, h = dropout_add_rms_norm(x, residual, torch.ones(64), None, 0.1, 1e-5, prenorm=True)
    >>> out.shape, h.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 64]))
    """
    return DropoutAddLayerNormFn.apply(
        x0,
        residual,
        weight,
        bias,
        rowscale,
        layerscale,
        dropout_p,
        epsilon,
        residual_in_fp32,
        prenorm,
        True,
        return_dropout_mask,
    )


def dropout_add_rms_norm_subset(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: torch.Tensor | None = None,
    x0_subset: torch.Tensor | None = None,
    out_subset: torch.Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`dropout_add_rms_norm` of some rows: see `flash_attn.ops.layer_norm.dropout_add_layer_norm_subset`.

    Example:
        >>> from flash_attn.ops.rms_norm import dropout_add_rms_norm_subset
        >>> rows = torch.tensor([0, 1, 0, 2], dtype=torch.int32)  # rows 1 and 3 of the residual take part
        >>> dropout_add_rms_norm_subset(
        ...     torch.randn(2, 8), torch.randn(4, 8), torch.ones(8), None, 0.0, 1e-5,
        ...     x0_subset=rows, out_subset=rows, out_numrows=2).shape
        torch.Size([2, 8])
    """
    return DropoutAddLayerNormSubsetFn.apply(
        x0,
        residual,
        weight,
        bias,
        layerscale,
        x0_subset,
        out_subset,
        dropout_p,
        epsilon,
        rowscale_const,
        out_numrows,
        residual_in_fp32,
        prenorm,
        True,
        return_dropout_mask,
    )


def dropout_add_rms_norm_parallel_residual(
    x0: torch.Tensor,
    x1: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight0: torch.Tensor,
    bias0: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """`dropout_add_rms_norm` of two branches, with two norms.

    See `flash_attn.ops.layer_norm.dropout_add_layer_norm_parallel_residual`.

    Example:
        >>> from flash_attn.ops.rms_norm import dropout_add_rms_norm_parallel_residual
        >>> (x0, x1, residual), weight = torch.randn(3, 4, 8), torch.ones(8)
        >>> out0, out1 = dropout_add_rms_norm_parallel_residual(
        ...     x0, x1, residual, weight, None, weight, None, dropout_p=0.0, epsilon=1e-5)
        >>> torch.allclose(out0, torch.nn.functional.rms_norm(x0 + x1 + residual, (8,), eps=1e-5), atol=1e-5)
        True
    """
    return DropoutAddLayerNormParallelResidualFn.apply(
        x0,
        x1,
        residual,
        weight0,
        bias0,
        weight1,
        bias1,
        dropout_p,
        epsilon,
        residual_in_fp32,
        prenorm,
        True,
        return_dropout_mask,
    )


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """`dropout_add_rms_norm` with its weight as a parameter; nothing is dropped outside training.

    Arguments:
        hidden_size: features.
        prenorm, residual_in_fp32: as in the function.
        p: probability of dropout.
        eps: added to the mean square.

    >>> from flash_attn.ops.rms_norm import DropoutAddRMSNorm
    >>> out, residual = DropoutAddRMSNorm(64, prenorm=True, p=0.1)(torch.randn(2, 5, 64))
    """

    is_rms_norm = True


class RMSNorm(torch.nn.Module):
    """`rms_norm` with its weight as a parameter.

    Arguments:
        hidden_size: features.
        eps: added to the mean square.

    >>> from flash_attn.ops.rms_norm import RMSNorm
    >>> RMSNorm(64)(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-05,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`rms_norm` of x (..., hidden_size). Returns a tensor like x."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
