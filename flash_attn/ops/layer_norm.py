"""LayerNorm fused with what comes before it: dropout, row scale, layer scale and the residual stream.

With h = dropout(rowscale * x0) * layerscale + residual, all of it optional except x0,

    out = (h - mean(h)) / sqrt(var(h) + epsilon) * weight + bias

over the last dimension, in float32 (Ba et al., Layer normalization, arXiv:1607.06450). `flash_attn.ops.rms_norm` has
the same functions for RMSNorm. With `prenorm` they return h too, the residual stream of the next block.

    norm = DropoutAddLayerNorm(1024, prenorm=True, p=0.1)
    out, residual = norm(torch.randn(2, 512, 1024), residual)

Every tensor may be float32, float16 or bfloat16, with any number of features. Dropout draws from PyTorch's default
generator of the device; masks are not stored, since the backward draws them again.
"""

import torch

from flash_attn._ops import layer_norm as layer_norm_ops


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """LayerNorm of x (..., features): (x - mean) / sqrt(variance + epsilon) * weight + bias.

    weight, bias: (features,); bias may be None. Returns a tensor like x (Ba et al., arXiv:1607.06450).

    >>> from flash_attn.ops.layer_norm import layer_norm
    >>> layer_norm(torch.randn(2, 5, 64), torch.ones(64), torch.zeros(64), 1e-5).shape
    torch.Size([2, 5, 64])
    """
    return layer_norm_ops.forward(x, None, weight, bias, epsilon, 0.0, names=("x", "weight", "bias", "epsilon"))[0]


def dropout_add_layer_norm(
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
    """Dropout, sum with the residual, LayerNorm. Differentiable in x0, residual, weight, bias and layerscale.

    Arguments:
        x0: (..., features).
        residual: like x0, or None.
        weight, bias: (features,); bias may be None.
        dropout_p: probability that an element of x0 is dropped, at least 0 and less than 1; the others are divided by
            1 - dropout_p. Elements are dropped in every call, since there is no training mode here.
        epsilon: added to the variance.
        rowscale: a factor for each row, of the shape of x0 without features, or None.
        layerscale: (features,), a factor for each feature (Touvron et al., CaiT, arXiv:2103.17239), or None.
        prenorm: also return h, the sum.
        residual_in_fp32: without a residual, h is float32 instead of the dtype of x0. With one, h has the residual's.
        return_dropout_mask: also return which elements were kept, uint8, 1 for kept.

    Returns out like x0, or a tuple (out, h, mask), without the results not asked for. If nothing changes x0, h is x0.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.ops.layer_norm import dropout_add_layer_norm
    >>> x, residual, ones = torch.randn(2, 2, 5, 64), torch.randn(2, 2, 5, 64), torch.ones(64)
    >>> out, h = dropout_add_layer_norm(x, residual, ones, None, 0.1, 1e-5, prenorm=True)
    >>> out.shape, h.shape
    (torch.Size([2, 2, 5, 64]), torch.Size([2, 2, 5, 64]))
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
        False,
        return_dropout_mask,
    )


def dropout_add_layer_norm_subset(
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
    """`dropout_add_layer_norm` where only some rows take part: stochastic depth that skips the dropped rows.

    Arguments, where they differ from `dropout_add_layer_norm`:
        x0: (entries, ..., features), only the rows that take part.
        residual: all rows.
        x0_subset, out_subset: int32, of any shape, one number for each row of the residual: 1 + the row of x0 that is
            added to it, and 1 + the row of out that gets its norm; 0 if there is none. No row may be named twice. Give
            both or neither; with neither, this is `dropout_add_layer_norm`.
        rowscale_const: factor of every row of x0, such as 1 / (1 - drop rate).
        out_numrows: how many rows out has.

    Returns the same as `dropout_add_layer_norm`: out and h are (-1, *x0.shape[1:]), the mask is like x0. Rows of out
    that out_subset does not name are 0, and so are gradients of rows of x0 that x0_subset does not name.

    Example:
        >>> from flash_attn.ops.layer_norm import dropout_add_layer_norm_subset
        >>> x0, residual, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.ones(8), torch.zeros(8)
        >>> rows = torch.tensor([0, 1, 0, 2], dtype=torch.int32)  # rows 1 and 3 of the residual take part
        >>> out, h = dropout_add_layer_norm_subset(
        ...     x0, residual, weight, bias, 0.0, 1e-5, x0_subset=rows, out_subset=rows, out_numrows=2, prenorm=True)
        >>> out.shape, torch.equal(h, residual.index_add(0, torch.tensor([1, 3]), x0))
        (torch.Size([2, 8]), True)
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
        False,
        return_dropout_mask,
    )


def dropout_add_layer_norm_parallel_residual(
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
    """Two branches on one residual stream, and two norms of it: h = dropout(x0) + dropout(x1) + residual.

    x1 is like x0, or None; weight1 may be None too, for one norm that both branches of the next block share. For the
    other arguments see `dropout_add_layer_norm`. Returns (out0, out1, h, mask0, mask1) without the results not asked
    for; out1 is None without weight1.

    Example:
        >>> from flash_attn.ops.layer_norm import dropout_add_layer_norm_parallel_residual
        >>> (x0, x1, residual), weight, bias = torch.randn(3, 4, 8), torch.ones(8), torch.zeros(8)
        >>> out0, out1 = dropout_add_layer_norm_parallel_residual(
        ...     x0, x1, residual, weight, bias, weight, bias, dropout_p=0.0, epsilon=1e-5)
        >>> torch.allclose(out0, torch.nn.functional.layer_norm(x0 + x1 + residual, (8,)), atol=1e-5)
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
        False,
        return_dropout_mask,
    )


# The autograd functions of flash-attn by their names, for LayerNorm and RMSNorm; other packages call `apply`.


class DropoutAddLayerNormFn:
    """`apply` is `dropout_add_layer_norm` or `dropout_add_rms_norm`, with its arguments in another order.

    Example:
        >>> from flash_attn.ops.layer_norm import DropoutAddLayerNormFn
        >>> x, residual, ones = torch.randn(5, 8), torch.randn(5, 8), torch.ones(8)
        >>> DropoutAddLayerNormFn.apply(x, residual, ones, torch.zeros(8), None, None, 0.1, 1e-5).shape
        torch.Size([5, 8])
    """

    @staticmethod
    def apply(
        x0: torch.Tensor,
        residual: torch.Tensor | None,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        rowscale: torch.Tensor | None,
        colscale: torch.Tensor | None,
        dropout_p: float,
        epsilon: float,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As `dropout_add_layer_norm`, or `dropout_add_rms_norm` with is_rms_norm. gamma, beta: weight and bias."""
        out, _, h, mask, *_ = layer_norm_ops.forward(
            x0,
            residual,
            gamma,
            beta,
            epsilon,
            dropout_p,
            rowscale=rowscale,
            colscale=colscale,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=is_rms_norm,
            return_mask=return_dmask,
        )
        masks = [_mask(mask, x0)] if return_dmask else []
        return (out, *([h] if prenorm else []), *masks) if prenorm or masks else out


class DropoutAddLayerNormSubsetFn:
    """`apply` is the `subset` function of LayerNorm or RMSNorm, with its arguments in another order.

    Example:
        >>> from flash_attn.ops.layer_norm import DropoutAddLayerNormSubsetFn
        >>> x0, residual, ones = torch.randn(2, 8), torch.randn(4, 8), torch.ones(8)
        >>> rows = torch.tensor([0, 1, 0, 2], dtype=torch.int32)  # rows 1 and 3 of the residual take part
        >>> DropoutAddLayerNormSubsetFn.apply(x0, residual, ones, None, None, rows, rows, 0.0, 1e-5, 1.0, 2).shape
        torch.Size([2, 8])
    """

    @staticmethod
    def apply(
        x0: torch.Tensor,
        residual: torch.Tensor | None,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        colscale: torch.Tensor | None,
        x0_subset: torch.Tensor | None,
        out_subset: torch.Tensor | None,
        dropout_p: float,
        epsilon: float,
        rowscale_const: float,
        out_numrows: int,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As `dropout_add_layer_norm_subset`, or the function of RMSNorm with is_rms_norm."""
        out, _, h, mask, *_ = layer_norm_ops.forward(
            x0,
            residual,
            gamma,
            beta,
            epsilon,
            dropout_p,
            colscale=colscale,
            x0_subset=x0_subset,
            out_subset=out_subset,
            rowscale_const=rowscale_const,
            out_rows=out_numrows,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=is_rms_norm,
            return_mask=return_dmask,
        )
        masks = [_mask(mask, x0)] if return_dmask else []
        return (out, *([h] if prenorm else []), *masks) if prenorm or masks else out


class DropoutAddLayerNormParallelResidualFn:
    """`apply` is the `parallel_residual` function of LayerNorm or RMSNorm, with its arguments in another order.

    Example:
        >>> from flash_attn.ops.layer_norm import DropoutAddLayerNormParallelResidualFn
        >>> x0, x1, residual, ones = torch.randn(5, 8), torch.randn(5, 8), torch.randn(5, 8), torch.ones(8)
        >>> out0, out1 = DropoutAddLayerNormParallelResidualFn.apply(
        ...     x0, x1, residual, ones, None, 2 * ones, None, 0.0, 1e-5)
        >>> torch.allclose(out1, 2 * out0)
        True
    """

    @staticmethod
    def apply(
        x0: torch.Tensor,
        x1: torch.Tensor | None,
        residual: torch.Tensor | None,
        gamma0: torch.Tensor,
        beta0: torch.Tensor | None,
        gamma1: torch.Tensor | None,
        beta1: torch.Tensor | None,
        dropout_p: float,
        epsilon: float,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """As `dropout_add_layer_norm_parallel_residual`, or the function of RMSNorm with is_rms_norm."""
        out0, out1, h, mask0, mask1, *_ = layer_norm_ops.forward(
            x0,
            residual,
            gamma0,
            beta0,
            epsilon,
            dropout_p,
            x1=x1,
            weight1=gamma1,
            bias1=beta1,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=is_rms_norm,
            return_mask=return_dmask,
            names=("x0", "weight0", "bias0", "epsilon"),
        )
        masks = [_mask(mask, x0) for mask in (mask0, mask1)] if return_dmask else []
        return (out0, out1, *([h] if prenorm else []), *masks)


def _mask(mask, x):
    """The mask, or ones like x if nothing was dropped."""
    return torch.ones_like(x, dtype=torch.uint8) if mask is None else mask


class DropoutAddLayerNorm(torch.nn.Module):
    """`dropout_add_layer_norm` with weight and bias as parameters; nothing is dropped outside training.

    Arguments:
        hidden_size: features.
        prenorm, residual_in_fp32: as in the function.
        p: probability of dropout.
        eps: added to the variance.

    >>> from flash_attn.ops.layer_norm import DropoutAddLayerNorm
    >>> out, residual = DropoutAddLayerNorm(64, prenorm=True, p=0.1)(torch.randn(2, 5, 64))
    """

    is_rms_norm = False
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-05,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None if self.is_rms_norm else torch.nn.Parameter(torch.empty_like(self.weight)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self, x0: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The norm of dropout(x0) + residual, for x0 and residual (..., hidden_size); residual may be None.

        Returns a tensor like x0; with prenorm also the sum, which is the next residual.
        """
        return DropoutAddLayerNormFn.apply(
            x0,
            residual,
            self.weight,
            self.bias,
            None,
            None,
            self.p if self.training else 0.0,
            self.eps,
            self.residual_in_fp32,
            self.prenorm,
            self.is_rms_norm,
        )

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        options = "prenorm={prenorm}, p={p}, eps={eps}, residual_in_fp32={residual_in_fp32}".format_map(vars(self))
        return f"{self.weight.shape[0]}, {options}"


def maybe_align(x: torch.Tensor, alignment_in_bytes: int = 16) -> torch.Tensor:
    """Returns x, or a copy if its address is not a multiple of `alignment_in_bytes`.

    Example:
        >>> from flash_attn.ops.layer_norm import maybe_align
        >>> x = torch.randn(9)[1:]  # its address is 4 bytes behind a multiple of 16
        >>> maybe_align(x).data_ptr() % 16
        0
    """
    return x if x.data_ptr() % alignment_in_bytes == 0 else x.clone()
