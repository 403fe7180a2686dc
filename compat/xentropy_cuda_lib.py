"""The functions that other packages call in place of flash-attn 2.8's separate extension of this name.

They are thin: checks, kernels and the reference backend are those of `flash_attn`. Labels outside the columns that are
given just have no positive term: leaving rows out, and dividing a vocabulary among processes, is up to the caller.
"""

import torch

from flash_attn._ops import checks
from flash_attn._ops import xentropy as ops


def forward(input, labels, smoothing, total_classes=-1):
    """Returns [losses, lse], each (rows,) float32, of logits `input` (rows, columns) and int64 labels (rows,).

    With V = total_classes, or the number of columns if that is not positive,

        lse = log sum_c exp(x_c)    loss = smoothing * (lse - sum_c x_c / V) + (1 - smoothing) * (lse - x_label)

    where the last term is missing for a label that is not in 0 .. columns - 1.
    """
    ops.check(input, labels, smoothing)
    options = _options(input, smoothing, total_classes)
    with torch.no_grad():
        losses, _, lse, _ = ops.fwd(input, labels, None, *options)
    lse, others = lse.float(), 1 - input.shape[1] / options[-1]  # the share of the classes that have no column
    return [losses + smoothing * others * lse if others else losses, lse]


def backward(grad_loss, logits, max_log_sum_exp, labels, smoothing, inplace, total_classes=-1):
    """Returns the gradient grad_loss * (exp(x_c - lse) - (1 - smoothing) * [c = label] - smoothing / V) of the logits.

    max_log_sum_exp is the lse that `forward` returned, so rounded to float32: with logits near 30000 that is a relative
    error of 0.1 % in exp(x_c - lse), which `flash_attn`'s own losses do not have. With inplace, the gradient overwrites
    the logits.
    """
    ops.check(logits, labels, smoothing)
    ops.check_row_values("grad_loss", grad_loss, logits)
    ops.check_row_values("max_log_sum_exp", max_log_sum_exp, logits)
    checks.flags(inplace=inplace)
    args = grad_loss, logits, labels, max_log_sum_exp.double(), *_options(logits, smoothing, total_classes)
    with torch.no_grad():
        if not inplace:
            return ops.bwd(*args)
        checks.own_memory(logits=logits)
        ops.bwd_(*args)
    return logits


def _options(logits, smoothing, total_classes):
    """The ops' arguments from label_smoothing to total_classes."""
    total_classes = checks.whole("total_classes", total_classes)
    return float(smoothing), 1.0, 0.0, None, 0, total_classes if total_classes > 0 else logits.shape[1]
