"""Cross entropy as a module, a replacement of torch.nn.CrossEntropyLoss for large vocabularies.

loss_fn = CrossEntropyLoss(inplace_backward=True)
loss = loss_fn(torch.randn(8, 50257, requires_grad=True) * 1, torch.randint(50257, (8,)))
"""

import torch
from torch.distributed import ProcessGroup

from flash_attn._ops import checks, xentropy

_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyLoss(torch.nn.Module):
    """Cross entropy of logits (rows, vocab) and labels (rows,), computed in float32.

    Arguments:
        ignore_index: the label of rows that do not count. Rows with a label that is no class do not count either.
        reduction: "mean" over the rows that count (NaN if there is none), "sum", or "none" for the loss of each row.
        label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group: as in
            `flash_attn.ops.triton.cross_entropy.cross_entropy_loss`.
        return_z_loss: also return the z-loss, which is part of the loss and has no gradient of its own.
        gradient_in_forward: whether the forward also makes the gradient of logits that require one, as in
            `cross_entropy_loss`, but for a gradient of 1 of what the module returns. None, the default, stands for True
            with "mean" and "sum", unless inplace_backward is set or the logits are float16, whose losses are usually
            scaled. False is faster where the loss is scaled, as by `(loss / steps).backward()`, or has no backward.

    Raises ValueError for an unknown reduction, and what cross_entropy_loss raises.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: ProcessGroup | None = None,
        return_z_loss: bool = False,
        gradient_in_forward: bool | None = None,
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, found {reduction!r}")
        checks.flags(return_z_loss=return_z_loss)
        if gradient_in_forward is not None:
            checks.flags(gradient_in_forward=gradient_in_forward)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss
        self.gradient_in_forward = gradient_in_forward

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, precomputed_lse: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, or (loss, z_loss), of logits `input` (rows, vocab) and labels `target` (rows,).

        precomputed_lse: float32 (rows,), the logsumexp of each row if it is known already.
        Each is a float32 scalar, or (rows,) with reduction="none".
        """
        losses, z_losses, count = xentropy.cross_entropy(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, self.inplace_backward, self.process_group, self.gradient_in_forward, self.reduction,
        )  # fmt: skip
        if self.return_z_loss:
            return self._reduced(losses, count), self._reduced(z_losses, count)
        return self._reduced(losses, count)

    def _reduced(self, losses, count):
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / count
