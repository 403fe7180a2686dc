"""Activations and their derivatives as Triton device functions, for use within kernels.

Each takes fp32 values. `<name>_grad` gives the derivative there, to be multiplied with the incoming gradient.
"""

import math

import triton
import triton.language as tl

_TANH_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_PDF_SCALE = tl.constexpr(1 / math.sqrt(2 * math.pi))  # of the normal distribution
_CUBIC = tl.constexpr(0.044715)
_CUBIC_SLOPE = tl.constexpr(3 * 0.044715)
_LEAK = tl.constexpr(0.01)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def cosh(x):
    return (tl.exp(x) + tl.exp(-x)) * 0.5


@triton.jit
def relu(x):
    return tl.where(x >= 0, x, 0.0)


@triton.jit
def relu_grad(x):
    return tl.where(x >= 0, 1.0, 0.0)


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, _LEAK * x)


@triton.jit
def leaky_relu_grad(x):
    return tl.where(x >= 0, 1.0, _LEAK)


@triton.jit
def squared_relu(x):
    positive = relu(x)
    return positive * positive


@triton.jit
def squared_relu_grad(x):
    return 2 * relu(x)


@triton.jit
def gelu(x):
    return x * 0.5 * (1 + tl.erf(x * _SQRT_HALF))


@triton.jit
def gelu_grad(x):
    return 0.5 * (1 + tl.erf(x * _SQRT_HALF)) + x * tl.exp(-0.5 * x * x) * _PDF_SCALE


@triton.jit
def gelu_approx(x):
    """x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x * tl.sigmoid(x * _TANH_SLOPE * (1 + x * x * _CUBIC))


@triton.jit
def gelu_approx_grad(x):
    part = tl.sigmoid(x * _TANH_SLOPE * (1 + x * x * _CUBIC))
    return part + x * part * (1 - part) * _TANH_SLOPE * (1 + x * x * _CUBIC_SLOPE)
