"""Cross entropy in plain torch, with fp32 maths. Arguments as in `flash_attn._ops.xentropy`."""

import torch


def fwd(
    logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes,
    partial,
):  # fmt: skip
    """Returns (losses, z_losses, lse, kept)."""
    kept = is_kept(labels, ignore_index, total_classes)
    scores = _scores(logits, kept, logit_scale)
    lse = scores.logsumexp(dim=-1) if lse is None else lse
    own, column = _own_column(labels, class_start, logits.shape[1])
    of_label = torch.where(own, scores.gather(1, column), 0).sum(1)
    lse = torch.where(kept, lse, 0)
    base = torch.zeros_like(lse) if partial else lse
    # The difference is taken before the factor, because it is exact where the label has nearly all of the probability.
    losses = (1 - label_smoothing) * (base - of_label)
    if label_smoothing > 0:
        losses += label_smoothing * (base - scores.sum(dim=-1) / max(total_classes, 1))
    z_losses = lse_square_scale * base**2 if lse_square_scale else torch.zeros_like(lse)
    return losses + z_losses, z_losses, lse, kept


def bwd(
    dlosses, logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start,
    total_classes,
):  # fmt: skip
    """Returns dlogits."""
    kept = is_kept(labels, ignore_index, total_classes)
    dlosses, lse = (torch.where(kept, x, 0) for x in (dlosses, lse))
    gradient = torch.exp(_scores(logits, kept, logit_scale) - lse[:, None]) * (1 + 2 * lse_square_scale * lse)[:, None]
    own, column = _own_column(labels, class_start, logits.shape[1])
    gradient.scatter_add_(1, column, (label_smoothing - 1) * own.float())
    gradient -= label_smoothing / max(total_classes, 1)
    gradient *= logit_scale * dlosses[:, None]
    return gradient.to(logits.dtype).contiguous()


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


def is_kept(labels, ignore_index, total_classes):
    """Returns which rows count."""
    if ignore_index is None:
        return torch.ones_like(labels, dtype=torch.bool)
    return (labels != ignore_index) & (labels >= 0) & (labels < total_classes)


def _scores(logits, kept, logit_scale):
    """Returns the scaled logits in fp32: zeros in rows that do not count, whose NaN must not reach a derivative."""
    return torch.where(kept[:, None], logits.float() * logit_scale, 0)


def _own_column(labels, class_start, vocab):
    """Returns whether each label is among these columns, and its column if so: (rows, 1), or (rows, 0) without columns.

    A label elsewhere has any column, since indexing with a mask, which would leave it out, does not work under vmap.
    """
    column = (labels.long() - class_start)[:, None][:, :vocab]
    return (column >= 0) & (column < vocab), column.clamp(0, max(vocab - 1, 0))
