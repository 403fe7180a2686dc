"""Cross entropy in plain torch, with fp32 maths. Arguments as in `flash_attn._ops.xentropy`."""

import torch


def fwd(
    logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes,
    partial,
):  # fmt: skip
    """Returns (losses, z_losses, lse, kept)."""
    scaled = logits.float() * logit_scale
    lse = scaled.logsumexp(dim=-1) if lse is None else lse
    kept = _is_kept(labels, ignore_index, total_classes)
    own, column = _own_column(labels, class_start, logits.shape[1])
    of_label = torch.zeros_like(lse)
    of_label[own] = scaled[own, column[own]]
    lse, of_label = (torch.where(kept, x, 0) for x in (lse, of_label))
    base = torch.zeros_like(lse) if partial else lse
    # The difference is taken before the factor, because it is exact where the label has nearly all of the probability.
    losses = (1 - label_smoothing) * (base - of_label)
    if label_smoothing > 0:
        mean = torch.where(kept, scaled.sum(dim=-1) / max(total_classes, 1), 0)
        losses += label_smoothing * (base - mean)
    z_losses = lse_square_scale * base**2 if lse_square_scale else torch.zeros_like(lse)
    return losses + z_losses, z_losses, lse, kept


def bwd(
    dlosses, logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start,
    total_classes,
):  # fmt: skip
    """Returns dlogits."""
    scaled = logits.float() * logit_scale
    gradient = torch.exp(scaled - lse[:, None]) * (1 + 2 * lse_square_scale * lse)[:, None]
    target = torch.full_like(gradient, label_smoothing / max(total_classes, 1))
    own, column = _own_column(labels, class_start, logits.shape[1])
    target[own, column[own]] += 1 - label_smoothing
    gradient -= target
    gradient *= logit_scale * dlosses[:, None]
    kept = _is_kept(labels, ignore_index, total_classes)
    return torch.where(kept[:, None], gradient, 0).to(logits.dtype).contiguous()


def bwd_(dlosses, logits, *args):
    """Replace logits by dlogits."""
    logits.copy_(bwd(dlosses, logits, *args))


def fwd_bwd(dlosses, logits, labels, *options):
    """Returns (losses, z_losses, lse, kept, dlogits)."""
    losses, z_losses, lse, kept = fwd(logits, labels, None, *options, False)
    return losses, z_losses, lse, kept, bwd(dlosses, logits, labels, lse, *options)


def fwd_bwd_(dlosses, logits, *args):
    """Replace logits by dlogits; returns (losses, z_losses, lse, kept)."""
    *results, dlogits = fwd_bwd(dlosses, logits, *args)
    logits.copy_(dlogits)
    return tuple(results)


def redo_(dlogits, dlosses, expected, logits, labels, lse, *options):
    """Replace the rows of dlogits whose dlosses are not what was expected."""
    (rows,) = torch.where(dlosses != expected)
    dlogits[rows] = bwd(dlosses[rows], logits[rows], labels[rows], lse[rows], *options)


def scale_(dlogits, dlosses, expected, kept):
    """Multiply the rows of dlogits that count by dlosses / expected."""
    factor = torch.where(kept & (dlosses != expected), dlosses / expected, 1)
    dlogits.mul_(factor[:, None])


def _is_kept(labels, ignore_index, total_classes):
    """Returns which rows count."""
    if ignore_index is None:
        return torch.ones_like(labels, dtype=torch.bool)
    return (labels != ignore_index) & (labels >= 0) & (labels < total_classes)


def _own_column(labels, class_start, vocab):
    """Returns which labels are among these columns, and the column of each label."""
    column = labels.long() - class_start
    return (column >= 0) & (column < vocab), column
