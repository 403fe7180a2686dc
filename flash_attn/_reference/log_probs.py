"""Log-probabilities in plain torch, with fp32 maths. Arguments as in `flash_attn._ops.log_probs`."""

import torch

from flash_attn._reference.rows import sum_of_each


def fwd(logits, labels, scale, softcap, class_start):
    """Returns (own, lse, mean)."""
    counts, vocab = labels >= 0, logits.shape[1]
    rows, _ = _capped(logits, counts, softcap)
    # A constant for autograd: the results do not depend on it. It is finite, so that differences are numbers.
    largest = rows.detach().amax(1).clamp(min=torch.finfo(rows.dtype).min) if vocab else rows.new_zeros(len(rows))
    below = (rows - largest[:, None]) * scale[:, None]
    weights = below.exp()
    total = sum_of_each(weights)
    spread = sum_of_each(weights * torch.where(weights > 0, below, 0))
    spread = torch.where(total > 0, spread / total, 0)
    centre = largest.double() * scale.double()
    is_own, column = _own_column(labels, class_start, vocab)
    own = torch.where(is_own, centre[:, None] + below.gather(1, column), 0).sum(1)
    return tuple(torch.where(counts, x, 0) for x in (own, centre + total.log(), centre + spread))


def bwd_(logits, labels, scale, lse, mean, dlog_probs, dentropy, dlse, softcap, class_start):
    """Replace logits by dlogits."""
    counts = labels >= 0
    # The lse is scale * centre + rest, of which float32 loses nothing: the centre is near the large logits.
    centre = (lse / scale).float()
    rest, offset = ((x - centre.double() * scale).float() for x in (lse, mean))
    rows, tanh = _capped(logits, counts, softcap)
    below = (rows - centre[:, None]) * scale[:, None]
    p = torch.exp(below - rest[:, None])
    dlog_probs, dentropy, dlse = (torch.where(counts, x, 0)[:, None] for x in (dlog_probs, dentropy, dlse))
    gradient = p * (dlse - dlog_probs - dentropy * torch.where(p > 0, below - offset[:, None], 0))
    is_own, column = _own_column(labels, class_start, logits.shape[1])
    gradient.scatter_add_(1, column, is_own * dlog_probs)
    gradient *= scale[:, None]
    logits.copy_(gradient if tanh is None else gradient * (1 - tanh.square()))


def _capped(logits, counts, softcap):
    """Returns the logits in fp32, zeros in rows that do not count, and the tanh that they are made of, if any."""
    rows = torch.where(counts[:, None], logits.float(), 0)
    if softcap == 0:
        return rows, None
    tanh = torch.tanh(rows / softcap)
    return softcap * tanh, tanh


def _own_column(labels, class_start, vocab):
    """Returns whether each label is among these columns, and its column if so: (rows, 1), or (rows, 0) without columns.

    A label elsewhere has any column, since indexing with a mask, which would leave it out, does not work under vmap.
    """
    column = (labels.long() - class_start)[:, None][:, :vocab]
    is_own = (labels[:, None][:, :vocab] >= 0) & (column >= 0) & (column < vocab)
    return is_own, column.clamp(0, max(vocab - 1, 0))
