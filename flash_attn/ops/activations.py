"""Activations of MLPs with their gradients: GELU in its tanh form (with or without a bias), squared ReLU, SwiGLU.

    out = swiglu(gate, value)        # silu(gate) * value, in one kernel forward and one backward

Maths is in float32, rounded once to the dtype of the inputs: float32, float16 or bfloat16. Inputs have any shape and
strides; halves of a wider tensor are read without a copy. Functions named *_fwd and *_bwd, `bias_gelu` and
`bias_gelu_back` do not record gradients; the others are differentiable. All raise TypeError or ValueError for arguments
that do not fit together.
"""

import torch

from flash_attn._ops import activation, checks

_GELU = "gelu_approx"


def bias_gelu(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns gelu(y + bias) in the dtype of y; y (..., features), bias (features,), in the same or another dtype.

    >>> from flash_attn.ops.activations import bias_gelu
    >>> bias_gelu(torch.randn(8, 64), torch.zeros(64)).shape
    torch.Size([8, 64])
    """
    with torch.no_grad():
        return activation.fwd(_biased(y, bias), None, _GELU).to(y.dtype)


def bias_gelu_back(g: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `bias_gelu` for an incoming g like y: (grad_y in y.dtype, grad_bias in bias.dtype).

    Example:
        >>> from flash_attn.ops.activations import bias_gelu_back
        >>> grad_y, grad_bias = bias_gelu_back(torch.ones(4, 8), torch.randn(4, 8), torch.randn(8))
        >>> torch.allclose(grad_y.sum(0), grad_bias)
        True
    """
    dy, _ = activation.differentiate(g, _biased(y, bias), None, _GELU, ("g", "y", ""))
    return dy.to(y.dtype), dy.sum(tuple(range(dy.dim() - 1))).to(bias.dtype)


def bias_gelu_impl(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU, by tanh, of input + bias (features,), for input (..., features). Differentiable; see `bias_gelu`.

    Example:
        >>> from flash_attn.ops.activations import bias_gelu_impl
        >>> bias_gelu_impl(torch.tensor([[0.0, 1.0]]), torch.tensor([1.0, -1.0]))
        tensor([[0.8412, 0.0000]])
    """
    return activation.activate(_biased(input, bias, "input"), None, _GELU).to(input.dtype)


def gelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """gelu(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    Example:
        >>> from flash_attn.ops.activations import gelu_fwd
        >>> gelu_fwd(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1588,  0.0000,  0.8412])
    """
    with torch.no_grad():
        return activation.activate(x, None, _GELU)


def gelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """g gelu'(x), in the dtype of x.

    Example:
        >>> from flash_attn.ops.activations import gelu_bwd
        >>> gelu_bwd(torch.ones(3), torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.0830,  0.5000,  1.0830])
    """
    return activation.differentiate(g, x, None, _GELU)[0]


def fast_gelu_impl(input: torch.Tensor) -> torch.Tensor:
    """GELU, by tanh, of input of any shape. Differentiable; see `gelu_fwd`.

    Example:
        >>> from flash_attn.ops.activations import fast_gelu_impl
        >>> fast_gelu_impl(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1588,  0.0000,  0.8412])
    """
    return activation.activate(input, None, _GELU, ("input", ""))


def relu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns g where x >= 0 (also at x = 0), else 0, in the dtype of x.

    Example:
        >>> from flash_attn.ops.activations import relu_bwd
        >>> relu_bwd(torch.ones(3), torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 1., 1.])
    """
    checks.tensor("x", x, dtypes=activation.DTYPES)
    checks.tensor("g", g, dtypes=activation.DTYPES, shape=tuple(x.shape), device=x.device)
    with torch.no_grad():
        return torch.where(x >= 0, g, 0).to(x.dtype)


def sqrelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2.

    Example:
        >>> from flash_attn.ops.activations import sqrelu_fwd
        >>> sqrelu_fwd(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 4.])
    """
    with torch.no_grad():
        return activation.activate(x, None, "sqrelu")


def sqrelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """2 g max(x, 0), in the dtype of x.

    Example:
        >>> from flash_attn.ops.activations import sqrelu_bwd
        >>> sqrelu_bwd(torch.ones(3), torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 4.])
    """
    return activation.differentiate(g, x, None, "sqrelu")[0]


def swiglu_fwd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y = x / (1 + exp(-x)) * y: the gate comes first (arXiv:2002.05202).

    Example:
        >>> from flash_attn.ops.activations import swiglu_fwd
        >>> swiglu_fwd(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    with torch.no_grad():
        return activation.activate(x, y, "silu")


def swiglu_bwd(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `swiglu` of x and y for an incoming g, all of one shape: (dx, dy).

    Example:
        >>> from flash_attn.ops.activations import swiglu_bwd
        >>> swiglu_bwd(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0]), torch.ones(2))
        (tensor([1.0000, 1.8553]), tensor([0.0000, 0.7311]))
    """
    return activation.differentiate(g, x, y, "silu")


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y, elementwise for x and y of one shape. Differentiable (Shazeer, arXiv:2002.05202).

    >>> from flash_attn.ops.activations import swiglu
    >>> gate, value = torch.randn(2, 5, 128, requires_grad=True).chunk(2, dim=-1)
    >>> swiglu(gate, value).sum().backward()
    """
    return activation.activate(x, y, "silu")


def swiglu_of_halves(x: torch.Tensor) -> torch.Tensor:
    """Returns `swiglu(gate, value)` of the halves (value, gate) of x (..., 2 * features); its gradient is one tensor.

    x is fp32, fp16 or bf16; the result (..., features) has its dtype. Raises ValueError if the last dimension is odd.

    >>> from flash_attn.ops.activations import swiglu_of_halves
    >>> swiglu_of_halves(torch.randn(2, 5, 256)).shape
    torch.Size([2, 5, 128])
    """
    return activation.activate_gate(x, "silu")


class GeLUFunction:
    """`GeLUFunction.apply` is `bias_gelu_impl`.

    Example:
        >>> from flash_attn.ops.activations import GeLUFunction
        >>> GeLUFunction.apply(torch.tensor([[0.0, 1.0]]), torch.tensor([1.0, -1.0]))
        tensor([[0.8412, 0.0000]])
    """

    apply = staticmethod(bias_gelu_impl)


class FastGeLUFunction:
    """`FastGeLUFunction.apply` is `fast_gelu_impl`.

    Example:
        >>> from flash_attn.ops.activations import FastGeLUFunction
        >>> FastGeLUFunction.apply(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1588,  0.0000,  0.8412])
    """

    apply = staticmethod(fast_gelu_impl)


class SwiGLUFunction:
    """`SwiGLUFunction.apply` is `swiglu`.

    Example:
        >>> from flash_attn.ops.activations import SwiGLUFunction
        >>> SwiGLUFunction.apply(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]))
        tensor([0.0000, 1.4621])
    """

    apply = staticmethod(swiglu)


def _biased(y, bias, name="y"):
    """Returns y + bias, in the wider dtype of the two."""
    checks.tensor(name, y, dtypes=activation.DTYPES)
    if y.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension (..., features), found shape ()")
    checks.tensor("bias", bias, dtypes=activation.DTYPES, shape=y.shape[-1:], device=y.device)
    return y + bias
