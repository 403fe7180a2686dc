"""LAMB (You et al., arXiv:1904.00962), for large batches."""

from collections.abc import Iterable
from typing import Any

import torch


def Lamb(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """timm's LAMB, with the defaults of Apex' FusedLAMB.

    Other arguments are those of timm.optim.Lamb. Raises ImportError if timm is not installed; PyTorch has no LAMB.
    """
    try:
        from timm.optim import Lamb as TimmLamb
    except ImportError as error:
        raise ImportError("the optimizer LAMB is that of timm: `pip install timm`") from error
    return TimmLamb(
        params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm, **kwargs
    )
