"""Cross entropy in Triton, with fp32 maths. Arguments as in `flash_attn._ops.xentropy`."""

import torch
import triton
import triton.language as tl


def fwd(
    logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes,
    partial,
):  # fmt: skip
    """Returns (losses, z_losses, lse, kept). A program takes a row and reads it once."""
    logits = _with_adjacent_columns(logits)
    rows, vocab = logits.shape
    losses, z_losses, new_lse = logits.new_empty(3, rows, dtype=torch.float32).unbind()
    kept = torch.empty_like(losses, dtype=torch.bool)
    if rows > 0:
        cross_entropy_fwd_kernel[(rows,)](
            losses, z_losses, new_lse, kept, logits, labels, lse,
            logits.stride(0), labels.stride(0), 0 if lse is None else lse.stride(0), vocab,
            label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes,
            KNOWN_LSE=lse is not None, IGNORES=ignore_index is not None, SMOOTH=label_smoothing > 0,
            Z_LOSS=lse_square_scale != 0, PARTIAL=partial, BLOCK=_block(vocab, 8192), num_warps=8,
        )  # fmt: skip
    return losses, z_losses, new_lse, kept


def bwd(dlosses, logits, *args):
    """Returns dlogits."""
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _differentiate(dlosses, _with_adjacent_columns(logits), *args, dlogits)
    return dlogits


def bwd_(dlosses, logits, *args):
    """Replace logits by dlogits."""
    if logits.stride(1) == 1:
        _differentiate(dlosses, logits, *args, logits)
    else:
        logits.copy_(bwd(dlosses, logits, *args))


def fwd_bwd(dlosses, logits, labels, *options):
    """Returns (losses, z_losses, lse, kept, dlogits), with one kernel after the other."""
    losses, z_losses, lse, kept = fwd(logits, labels, None, *options, False)
    return losses, z_losses, lse, kept, bwd(dlosses, logits, labels, lse, *options)


def fwd_bwd_(dlosses, logits, labels, *options):
    """Replace logits by dlogits; returns (losses, z_losses, lse, kept)."""
    losses, z_losses, lse, kept = fwd(logits, labels, None, *options, False)
    bwd_(dlosses, logits, labels, lse, *options)
    return losses, z_losses, lse, kept


def redo_(dlogits, dlosses, expected, logits, *args):
    """Replace the rows of dlogits whose dlosses are not what was expected."""
    _differentiate(dlosses, _with_adjacent_columns(logits), *args, dlogits, expected)


def _differentiate(
    dlosses, logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start,
    total_classes, dlogits, expected=None,
):  # fmt: skip
    rows, vocab = logits.shape
    block = _block(vocab, 4096)
    if logits.numel() > 0:
        cross_entropy_bwd_kernel[(rows, triton.cdiv(vocab, block))](
            dlogits, dlosses, expected, logits, labels, lse,
            dlogits.stride(0), dlosses.stride(0), 0 if expected is None else expected.stride(0),
            logits.stride(0), labels.stride(0), lse.stride(0), vocab,
            label_smoothing, label_smoothing / max(total_classes, 1), logit_scale, lse_square_scale,
            ignore_index, class_start, total_classes,
            IGNORES=ignore_index is not None, Z_LOSS=lse_square_scale != 0, EXPECTED=expected is not None,
            BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit
def cross_entropy_fwd_kernel(
    losses, z_losses, new_lse, kept, logits, labels, known_lse,
    logits_stride, labels_stride, known_lse_stride, vocab,
    label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes,
    KNOWN_LSE: tl.constexpr, IGNORES: tl.constexpr, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(labels + row * labels_stride).to(tl.int64)
    keep = _is_kept(label, ignore_index, total_classes, IGNORES)
    loss, z_loss, lse = 0.0, 0.0, 0.0
    if keep:
        own = label - class_start
        of_label = tl.load(logits + own, mask=(own >= 0) & (own < vocab), other=0).to(tl.float32) * logit_scale
        total = 0.0
        if KNOWN_LSE:
            largest = 0.0
            log_sum = tl.load(known_lse + row * known_lse_stride)
        else:
            largest, exp_sum, total = _sum_row(logits, vocab, logit_scale, SMOOTH, BLOCK)
            log_sum = tl.log(exp_sum)
        lse = largest + log_sum
        if PARTIAL:
            largest, log_sum = 0.0, 0.0
        elif Z_LOSS:
            z_loss = lse_square_scale * lse * lse
        loss = largest - of_label  # exact where the label has the largest logit
        if SMOOTH:
            loss = (1 - label_smoothing) * loss + label_smoothing * (largest - total / total_classes)
        loss += log_sum + z_loss
    tl.store(losses + row, loss)
    tl.store(z_losses + row, z_loss)
    tl.store(new_lse + row, lse)
    tl.store(kept + row, keep)


@triton.jit
def cross_entropy_bwd_kernel(
    dlogits, dlosses, expected, logits, labels, lse,
    dlogits_stride, dlosses_stride, expected_stride, logits_stride, labels_stride, lse_stride, vocab,
    label_smoothing, smooth_weight, logit_scale, lse_square_scale, ignore_index, class_start, total_classes,
    IGNORES: tl.constexpr, Z_LOSS: tl.constexpr, EXPECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dloss = tl.load(dlosses + row * dlosses_stride)
    if EXPECTED:  # no column is left to do if it came
        vocab = tl.where(dloss == tl.load(expected + row * expected_stride), 0, vocab)
    inside = column < vocab
    label = tl.load(labels + row * labels_stride).to(tl.int64)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if _is_kept(label, ignore_index, total_classes, IGNORES):
        row_lse = tl.load(lse + row * lse_stride)
        scores = tl.load(logits + row * logits_stride + column, mask=inside, other=0).to(tl.float32) * logit_scale
        gradient = tl.exp(scores - row_lse)
        if Z_LOSS:
            gradient *= 1 + 2 * lse_square_scale * row_lse
        gradient -= smooth_weight + tl.where(column == label - class_start, 1 - label_smoothing, 0.0)
        gradient *= dloss * logit_scale
    tl.store(dlogits + row * dlogits_stride + column, gradient.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def _is_kept(label, ignore_index, total_classes, IGNORES: tl.constexpr):
    keep = label == label
    if IGNORES:
        keep = (label != ignore_index) & (label >= 0) & (label < total_classes)
    return keep


@triton.jit
def _sum_row(logits, vocab, logit_scale, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest score of a row, the sum of exp(score - largest), and the sum of the scores if SMOOTH."""
    largest, exp_sum, total = -3.402823e38, 0.0, 0.0  # finite, so that differences of maxima are numbers
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        scores = logit * logit_scale
        new_largest = tl.maximum(largest, tl.max(scores))
        exp_sum = exp_sum * tl.exp(largest - new_largest) + tl.sum(tl.exp(scores - new_largest))
        largest = new_largest
        if SMOOTH:
            total += tl.sum(tl.where(column < vocab, scores, 0.0))
    return largest, exp_sum, total


def _block(vocab, most):
    return min(max(triton.next_power_of_2(vocab), 16), most)


def _with_adjacent_columns(logits):
    return logits if logits.stride(1) == 1 else logits.contiguous()
