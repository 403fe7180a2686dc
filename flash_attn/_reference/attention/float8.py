"""Keys and values in float8: codes of the format e4m3, each of which stands for its value times a scale.

The scales, called descales after what they do, belong to a key head of a batch entry. A score is a product of codes
times softmax_scale times the descale of the keys; an output is a sum of codes times the descale of the values.
"""

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
PRODUCT_DTYPE = torch.float16  # to which queries and codes are converted, codes exactly


def encoded(x: torch.Tensor, descale: torch.Tensor | None) -> torch.Tensor:
    """Returns the codes nearest to x / descale, ties to even; beyond the largest code it, and NaN for NaN.

    descale: float32, of a shape that broadcasts to that of x; None means 1. 0 counts as the least normal number, so
    that 0 / 0 is not NaN.
    """
    x = x.float() if descale is None else x.float() / descale.clamp(min=2.0**-126)
    return x.clamp(-LARGEST, LARGEST).to(DTYPE)
