"""`cross_entropy_loss`: cross entropy of each row of logits, in one pass forward and one backward, or one for both.

It runs the same op as `flash_attn.losses.cross_entropy`: the library's own kernel on a GPU, the Triton kernel where
that library is not built, plain torch elsewhere.
"""

import torch
from torch.distributed import ProcessGroup

from flash_attn._ops import triton, xentropy


def cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: ProcessGroup | None = None,
    gradient_in_forward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each row, with label smoothing and a penalty on the log-sum-exp, the z-loss.

    With s = logit_scale * logits, the label y and V classes,

        lse = log sum_j exp(s_j)        z_loss = lse_square_scale * lse^2
        loss = lse - (1 - label_smoothing) * s_y - label_smoothing / V * sum_j s_j + z_loss

    Arguments:
        logits: (rows, vocab), float32, float16 or bfloat16, any strides (columns that lie apart are copied).
        labels: (rows,) int32 or int64. A row with label ignore_index, or with a label that is no class, has loss 0 and
            no gradient.
        precomputed_lse: (rows,) float32 or float64, log sum_j exp(logits_j) over the columns given here. Saves reading
            the logits; used if logit_scale is 1 and label_smoothing 0. It has no gradient of its own. The result is as
            exact as it is: with logits near 30000, one in float32 is off by up to 1e-3.
        label_smoothing: from 0 to 1, the weight of the uniform distribution in the target.
        logit_scale: positive.
        lse_square_scale: weight of the z-loss (PaLM, arXiv:2204.02311, section 5).
        ignore_index: the label of rows that do not count.
        inplace_backward: let the gradient overwrite the logits, which saves its memory. The logits must not be needed
            afterwards; autograd raises if they are. Without effect under torch.compile and transforms of torch.func,
            and for a gradient that may be differentiated again (create_graph).
        process_group: a torch.distributed group over which the classes are divided: the process of rank r in it has
            columns r * vocab to (r + 1) * vocab, and labels, the same in all, count from the first of all columns.
        gradient_in_forward: if the logits require a gradient, let the forward make it for dlosses of 1, the gradient of
            losses.sum(). A GPU then reads the logits once instead of twice. For rows with other dlosses the backward
            computes the gradient again, so the result is always the same; if these are all rows, it takes longer than
            without this option. With inplace_backward the forward already overwrites the logits; the backward then
            scales rows with other dlosses, which rounds them twice, and a second derivative raises RuntimeError, since
            the logits are gone. The option has no effect with inplace_backward on float16 logits, whose range is too
            small for that scaling; under torch.compile, transforms of torch.func and hooks of saved tensors, such as
            those of activation checkpoints; with a process_group of several processes; with a precomputed_lse that is
            used; and for logits whose rows are not aligned as in a new tensor.

    Returns (losses, z_losses), each (rows,) float32. losses contains z_losses, which has no gradient of its own. Both
    are computed in float32 of differences of logits, so that logits may be large.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    >>> logits, labels = torch.randn(4, 50257, dtype=torch.bfloat16), torch.tensor([3, -100, 0, 50256])
    >>> losses, z_losses = cross_entropy_loss(logits, labels, lse_square_scale=1e-4)
    >>> losses.shape, losses.dtype, losses[1].item()
    (torch.Size([4]), torch.float32, 0.0)
    """
    losses, z_losses, _ = xentropy.cross_entropy(
        logits,
        labels,
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
        gradient_in_forward,
    )
    return losses, z_losses


class CrossEntropyLoss:
    """`CrossEntropyLoss.apply` is `cross_entropy_loss`.

    Example:
        >>> from flash_attn.ops.triton.cross_entropy import CrossEntropyLoss
        >>> losses, z_losses = CrossEntropyLoss.apply(torch.zeros(2, 8), torch.tensor([3, -100]))
        >>> losses
        tensor([2.0794, 0.0000])
    """

    apply = staticmethod(cross_entropy_loss)


__getattr__ = triton.names(__name__, "xentropy", "cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel")
