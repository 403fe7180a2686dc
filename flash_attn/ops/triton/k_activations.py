"""Activations for use within Triton kernels, and their names.

`relu`, `leaky_relu`, `squared_relu`, `gelu`, `gelu_approx`, the same with `_grad`, `tanh` and `cosh` are Triton device
functions of fp32 values, imported with Triton at their first use. `<name>_grad` takes the input of the activation and
returns the factor of the incoming gradient.
"""

import enum
import math
from collections.abc import Callable

from flash_attn._ops import triton

_sqrt2pi = math.sqrt(2.0 / math.pi)
_sqrt1_2 = math.sqrt(1.0 / 2)
_gaussian_pdf_normalization = 1.0 / math.sqrt(2 * math.pi)


class Activation(str, enum.Enum):
    """The names of the activations.

    Example:
        >>> from flash_attn.ops.triton.k_activations import Activation
        >>> [each.value for each in Activation]
        ['squared_relu', 'gelu', 'gelu_approx', 'leaky_relu', 'relu']
    """

    SquaredReLU = "squared_relu"
    GeLU = "gelu"
    GeLUApprox = "gelu_approx"
    LeakyReLU = "leaky_relu"
    ReLU = "relu"


def get_triton_activation_kernel(activation: Activation | str | None) -> Callable | None:
    """The device function of an activation, or None for None. Raises KeyError for an unknown name.

    Example:
        >>> from flash_attn.ops.triton.k_activations import get_triton_activation_kernel
        >>> function = get_triton_activation_kernel("gelu")  # doctest: +SKIP
    """
    return _device_function(activation, "")


def get_triton_activation_bwd_kernel(activation: Activation | str | None) -> Callable | None:
    """The device function of an activation's derivative, or None for None. Raises KeyError for an unknown name.

    Example:
        >>> from flash_attn.ops.triton.k_activations import get_triton_activation_bwd_kernel
        >>> function = get_triton_activation_bwd_kernel("gelu")  # doctest: +SKIP
    """
    return _device_function(activation, "_grad")


def _device_function(activation, suffix):
    if not activation:
        return None
    if activation not in tuple(Activation):
        names = ", ".join(repr(each.value) for each in Activation)
        raise KeyError(f"activation must be one of {names} or None, found {activation!r}")
    return triton.find("activations", Activation(activation).value + suffix)


_DEVICE_FUNCTIONS = ("tanh", "cosh", *(each.value + suffix for each in Activation for suffix in ("", "_grad")))
__getattr__ = triton.names(__name__, "activations", *_DEVICE_FUNCTIONS)
