"""Cross entropy in plain torch, with fp32 maths. Arguments as in `flash_attn._ops.xentropy`."""

import torch

from flash_attn._reference.rows import sum_of_each


def fwd(logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes):
    """Returns (losses, z_losses, lse, kept)."""
    kept = is_kept(labels, ignore_index, total_classes)
    rows, vocab = _rows(logits, kept), logits.shape[1]
    # A constant for autograd: the results do not depend on it. It is finite, so that differences are numbers.
    largest = rows.detach().amax(1).clamp(min=torch.finfo(rows.dtype).min) if vocab else rows.new_zeros(len(rows))
    below = (largest[:, None] - rows) * logit_scale
    if lse is None:
        log_sum = sum_of_each(below.neg().exp()).log()
        lse = largest.double() * logit_scale + log_sum
    else:
        log_sum = (lse - largest.double() * logit_scale).float()
    own, column = _own_column(labels, class_start, vocab)
    losses = (1 - label_smoothing) * torch.where(own, below.gather(1, column) + log_sum[:, None], 0).sum(1)
    if label_smoothing > 0 and vocab > 0:
        losses = losses + label_smoothing / total_classes * (sum_of_each(below) + vocab * log_sum)
    z_losses = lse_square_scale * lse.square().float() if lse_square_scale else torch.zeros_like(losses)
    losses, z_losses, lse = (torch.where(kept, x, 0) for x in (losses + z_losses, z_losses, lse))
    return losses, z_losses, lse, kept


def bwd(
    dlosses,
    logits,
    labels,
    lse,
    label_smoothing,
    logit_scale,
    lse_square_scale,
    ignore_index,
    class_start,
    total_classes,
):
    """Returns dlogits."""
    kept = is_kept(labels, ignore_index, total_classes)
    dlosses, lse = (torch.where(kept, x, 0) for x in (dlosses, lse))
    # The lse is logit_scale * centre + rest, of which float32 loses nothing: the centre is near the large logits.
    centre = (lse.detach() / logit_scale).float()
    rest = (lse - centre.double() * logit_scale).float()
    gradient = torch.exp((_rows(logits, kept) - centre[:, None]) * logit_scale - rest[:, None])
    gradient = gradient * (1 + 2 * lse_square_scale * lse.float())[:, None]
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
    losses, z_losses, lse, kept = fwd(logits, labels, None, *options)
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
    kept = (labels >= 0) & (labels < total_classes)
    return kept & (labels != ignore_index) if 0 <= ignore_index < total_classes else kept


def _rows(logits, kept):
    """Returns the logits in fp32: zeros in rows that do not count, whose NaN must not reach a derivative."""
    return torch.where(kept[:, None], logits.float(), 0)


def _own_column(labels, class_start, vocab):
    """Returns whether each label is among these columns, and its column if so: (rows, 1), or (rows, 0) without columns.

    A label elsewhere has any column, since indexing with a mask, which would leave it out, does not work under vmap.
    """
    column = (labels.long() - class_start)[:, None][:, :vocab]
    return (column >= 0) & (column < vocab), column.clamp(0, max(vocab - 1, 0))
