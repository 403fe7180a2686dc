"""Cross entropy as a module, a replacement of torch.nn.CrossEntropyLoss for large vocabularies.

loss_fn = CrossEntropyLoss(inplace_backward=True)
loss = loss_fn(torch.randn(8, 50257, requires_grad=True) * 1, torch.randint(50257, (8,)))
"""

import torch
from torch.distributed import ProcessGroup

from flash_attn._ops import checks, xentropy

_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyLoss(torch.nn.Module):
    """Cross entropy of logits (rows, vocab) and labels (rows,), lse(logits) - logits[label], computed in float32.

    Arguments:
        ignore_index: the label of rows that do not count. Rows whose label is no class do not count either.
        reduction: "mean" over the rows that count (NaN if there is none, with gradients of 0), "sum", or "none" for the
            loss of each row.
        label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group: as in
            `flash_attn.ops.triton.cross_entropy.cross_entropy_loss`.
        return_z_loss: also return the z-loss, which is part of the loss and has no gradient of its own.
        gradient_in_forward: compute the gradient of the logits already in the forward, as in `cross_entropy_loss`, so
            that a GPU reads the logits once. It is computed for the gradient that the loss got in the last backward
            through this module (1 at first), so a loss that is always scaled alike, for gradient accumulation or
            float16, profits too; if another one arrives, the result is still right, but slower. From forward to
            backward the gradient takes as much memory as the logits. None, the default, means True with "mean" and
            "sum" for logits of at least 8192 classes and 120 MB, where it is faster, unless inplace_backward is set.
            Choose False for a loss without a backward, or whose scale changes in every step.

    Raises ValueError for an unknown reduction, and what cross_entropy_loss raises.

    >>> from flash_attn.losses.cross_entropy import CrossEntropyLoss
    >>> logits, labels = torch.randn(8, 1000, requires_grad=True), torch.randint(1000, (8,))
    >>> CrossEntropyLoss()(logits, labels).backward()
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
        self._expectation = xentropy.Expectation()

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, precomputed_lse: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, or (loss, z_loss), of logits `input` (rows, vocab) and labels `target` (rows,).

        precomputed_lse: (rows,) float32 or float64, the logsumexp of each row if it is known already.
        Each is a float32 scalar, or (rows,) with reduction="none".
        """
        losses, z_losses, count = xentropy.cross_entropy(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
            self.gradient_in_forward,
            self.reduction,
            self._expectation if self.reduction != "none" else None,
        )
        loss = self._reduced(losses, count)
        self._expectation.watch(loss)
        return (loss, self._reduced(z_losses, count)) if self.return_z_loss else loss

    @property
    def expected_gradient(self) -> float | None:
        """The gradient that the loss is expected to get, for gradient_in_forward; None before the first forward.

        Reading it waits for the device. A run that is resumed with it has the same bits as one that never stopped.
        """
        return self._expectation.value

    @expected_gradient.setter
    def expected_gradient(self, value: float | None) -> None:
        """Expect `value`, or 1 for None."""
        if value is not None:
            value = checks.as_float("expected_gradient", value)
            fits = self._expectation.LEAST <= abs(value) <= self._expectation.MOST
            checks.number("expected_gradient", value, fits, "of a size from 2^-60 to 2^60, or None")
        self._expectation.value = value

    def _reduced(self, losses, count):
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / count
