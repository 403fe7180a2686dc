"""The choice between exact gradients of attention and fast ones, for the whole process.

    import flash_attn.precision

    flash_attn.precision.use_exact_gradients()

docs/guides/precision.md says when it matters, and what it costs.
"""

from flash_attn._ops import checks, flash_attn

__all__ = ["use_exact_gradients", "uses_exact_gradients"]


def use_exact_gradients(mode: bool = True) -> None:
    """Choose whether the backward of attention in 16 bits uses the output as it was before rounding.

    The gradient of the scores of a row is dS = P * (dP - delta), with delta = sum(dout * out). Kernels round out to 16
    bits. Where few keys have all the weight of a row, dP and delta nearly cancel, and this rounding is most of the
    error of dq and dk (arXiv:2510.04212). With mode=True, the forward of a call that needs gradients also stores the
    rounding error of out, and the backward adds it. This is the choice of all calls that follow in this process, like
    that of `torch.use_deterministic_algorithms`; compiled functions are compiled anew after it changes.

    It makes no difference without kernels, where out is kept in float32 anyway; for float32 inputs; in calls that need
    no gradients; and for code that calls a backward itself, such as `_flash_attn_backward`, with a rounded out.

    Arguments:
        mode: true for exact gradients. A process starts with False.

    Example:
        >>> from flash_attn.precision import use_exact_gradients
        >>> use_exact_gradients()
        >>> uses_exact_gradients()
        True
        >>> use_exact_gradients(False)
    """
    checks.flag("mode", mode)
    flash_attn.exact_gradients = bool(mode)


def uses_exact_gradients() -> bool:
    """Whether the backward of attention uses the output as it was before rounding: see `use_exact_gradients`.

    Example:
        >>> from flash_attn.precision import uses_exact_gradients
        >>> uses_exact_gradients()
        False
    """
    return flash_attn.exact_gradients
