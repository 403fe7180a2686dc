"""Linear layers with bias and activation, and the gradient that goes back through both.

    out, act_input = triton_linear_act(x, weight, bias, activation="gelu", save_act_input=True)

On a GPU, cuBLASLt computes what is float16 or bfloat16 and not transposed, if the library is compiled, and one Triton
kernel the rest; elsewhere, plain torch does. Sums, bias and activation are computed in float32. Triton rounds nothing
between them; the others may, as `F.linear` does. Nothing here records a gradient. `kernel_fwd` and `kernel_bwd` are the
Triton kernels.
"""

from collections.abc import Callable
from typing import Any

import torch

from flash_attn._ops import checks, linear_act, triton


def triton_linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "id",
    save_act_input: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """act(x weight^T + bias).

    Arguments:
        x: (..., in_features), float16, bfloat16 or float32. An operand is copied if none of its dimensions is
            contiguous, and for cuBLASLt also if it is a slice whose rows are not aligned to 16 bytes.
        weight: (out_features, in_features), of the dtype of x.
        bias: (out_features,), of the dtype of x, or None.
        activation: "id", "gelu" (the exact one), "gelu_approx" (its tanh form) or "squared_relu".
        save_act_input: also return the input of the activation, in the dtype of x.

    Returns (..., out_features), or a tuple of two such. Raises TypeError or ValueError for arguments that do not fit.

    >>> from flash_attn.ops.triton.linear import triton_linear_act
    >>> triton_linear_act(torch.randn(2, 5, 64), torch.randn(128, 64), activation="gelu").shape
    torch.Size([2, 5, 128])
    """
    activation = linear_act.check(("x", "weight"), x, weight, 1, activation)
    if bias is not None:
        checks.tensor("bias", bias, dtypes=(x.dtype,), shape=weight.shape[:1], device=x.device)
    checks.flags(save_act_input=save_act_input)
    with torch.no_grad():
        out, act_input = linear_act.forward(x, weight, bias, activation, bool(save_act_input))
    return (out, act_input) if save_act_input else out


def triton_dgrad_act(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    activation: str = "id",
    act_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns (grad_output weight) * act'(act_input): the gradient of the input of the activation before the layer.

    Arguments:
        grad_output: (..., out_features), float16, bfloat16 or float32.
        weight: (out_features, in_features), of the same dtype.
        activation: as in `triton_linear_act`.
        act_input: (..., in_features) or (rows, in_features), of the same dtype; needed unless the activation is "id".

    Returns (..., in_features).

    >>> from flash_attn.ops.triton.linear import triton_dgrad_act
    >>> triton_dgrad_act(torch.randn(2, 5, 128), torch.randn(128, 64)).shape
    torch.Size([2, 5, 64])
    """
    activation = linear_act.check(("grad_output", "weight"), grad_output, weight, 0, activation)
    if activation == "id":
        act_input = None
    else:
        checks.tensor("act_input", act_input, dtypes=(weight.dtype,), device=weight.device)
        assert act_input is not None
        rows = grad_output.shape[:-1].numel()
        fits = act_input.shape[-1:] == weight.shape[1:] and act_input.shape[:-1].numel() == rows
        checks.number("act_input", tuple(act_input.shape), fits, "of shape ({}, {})", rows, weight.shape[1])
    with torch.no_grad():
        return linear_act.backward(grad_output, weight, act_input, activation)


def init_to_zero(name: str) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """A hook for Triton's autotuner that zeroes the kernel argument `name` before each run.

    Example:
        >>> from flash_attn.ops.triton.linear import init_to_zero
        >>> init_to_zero("C")({"C": torch.ones(2)})
        tensor([0., 0.])
    """
    return lambda nargs: nargs[name].zero_()


def get_configs_io_bound() -> list[Any]:
    """Configurations of tiles for products of few rows, as Triton's autotuner takes them.

    Example:
        >>> from flash_attn.ops.triton.linear import get_configs_io_bound
        >>> configs = get_configs_io_bound()  # doctest: +SKIP
    """
    return triton.find("linear_act", "get_configs_io_bound")()


__getattr__ = triton.names(__name__, "linear_act", "kernel_fwd", "kernel_bwd")
