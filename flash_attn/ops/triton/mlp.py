"""An MLP with squared ReLU. Where there is no cuBLASLt product for a GPU, the first layer is one Triton kernel.

mlp = FusedDenseSqreluDense(1024, checkpoint_lvl=1)
"""

import torch
from torch import nn

from flash_attn._ops import fused_dense, fusing, linear_act
from flash_attn.ops.fused_dense import PLAIN_LINEAR


def fused_dense_sqrelu_dense_function(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
    checkpoint_lvl: int = 0,
) -> torch.Tensor:
    """relu(x weight1^T + bias1)^2 weight2^T + bias2, differentiable in all five tensors.

    Arguments:
        x: (..., in_features), float16, bfloat16, float32 or float64, as all tensors unless autocast casts them.
        weight1, bias1: (hidden_features, in_features) and (hidden_features,).
        weight2, bias2: (out_features, hidden_features) and (out_features,).
        checkpoint_lvl: kept for the gradient besides x. 0: the activation's input and output; 1: its input; 2: nothing.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.ops.triton.mlp import fused_dense_sqrelu_dense_function
    >>> x, weight1, weight2 = torch.randn(5, 64), torch.randn(256, 64), torch.randn(64, 256)
    >>> fused_dense_sqrelu_dense_function(x, weight1, torch.zeros(256), weight2, torch.zeros(64)).shape
    torch.Size([5, 64])
    """
    # An exported program calls ops directly, perhaps with parameters, and the ops of _PRODUCTS have no gradient.
    products = None if torch.compiler.is_exporting() else _PRODUCTS
    return fused_dense.mlp(x, weight1, bias1, weight2, bias2, "sqrelu", True, False, checkpoint_lvl, -1, None, products)


class FusedDenseSqreluDenseFunc:
    """`FusedDenseSqreluDenseFunc.apply` is `fused_dense_sqrelu_dense_function`.

    Example:
        >>> from flash_attn.ops.triton.mlp import FusedDenseSqreluDenseFunc
        >>> x, weight1, weight2 = torch.randn(5, 64), torch.randn(256, 64), torch.randn(64, 256)
        >>> FusedDenseSqreluDenseFunc.apply(x, weight1, torch.zeros(256), weight2, torch.zeros(64)).shape
        torch.Size([5, 64])
    """

    apply = staticmethod(fused_dense_sqrelu_dense_function)


class FusedDenseSqreluDense(nn.Module):
    """Two linear layers with relu(.)^2 between them.

    Arguments:
        in_features, hidden_features, out_features: widths; by default hidden_features is 4 * in_features and
            out_features is in_features.
        bias1, bias2: whether the layers have a bias.
        checkpoint_lvl: as in `fused_dense_sqrelu_dense_function`.

    Its layers are called one after the other where those of `flash_attn.ops.fused_dense.FusedMLP` are.

    >>> from flash_attn.ops.triton.mlp import FusedDenseSqreluDense
    >>> FusedDenseSqreluDense(64)(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        fused_dense.check_mlp("sqrelu", checkpoint_lvl, -1)
        self.checkpoint_lvl = checkpoint_lvl
        in_features, hidden, out = fused_dense.mlp_widths(
            in_features, hidden_features or 4 * in_features, out_features or in_features
        )
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """fc2(relu(fc1(x))^2) of x (..., in_features): (..., out_features)."""
        if not all(fusing.may_fuse(layer, PLAIN_LINEAR, x) for layer in (self.fc1, self.fc2)):
            return self.fc2(fused_dense.activate(self.fc1(x), "sqrelu"))
        return fused_dense_sqrelu_dense_function(
            x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, self.checkpoint_lvl
        )


def _fwd(x, weight, bias, activation, keep, heuristic):
    if activation == "identity" or linear_act.is_for_cublaslt(x, weight):
        return fused_dense.KERNELS.fwd(x, weight, bias, activation, keep, heuristic)
    return linear_act.fwd(x, weight, bias, "squared_relu", keep)


def _dgrad(dout, weight, dresidual, kept, activation, bias_grad):
    if activation == "identity" or linear_act.is_for_cublaslt(dout, weight):
        return fused_dense.KERNELS.dgrad(dout, weight, dresidual, kept, activation, bias_grad)
    dx = linear_act.dgrad(dout, weight, kept, "squared_relu")
    return dx, fused_dense.reference.sum_of_rows(dx, bias_grad)


_PRODUCTS = fused_dense.KERNELS._replace(fwd=_fwd, dgrad=_dgrad)
