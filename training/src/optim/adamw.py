"""AdamW in one kernel per group of parameters."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with fused=True, on GPUs and the CPU, with gradients that can be clipped under a GradScaler.

    torch's own leaves it to the kernel to divide the gradients by the loss scale. Then nothing can be done with them in
    between, and Lightning refuses to clip them with precision "16-mixed". Here the scaler divides them before.

    Arguments are those of torch.optim.AdamW. With fused=False it is the same as that.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused, **kwargs)
        self._step_supports_amp_scaling = False
