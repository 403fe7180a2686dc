"""Cross entropy in Triton, with fp32 maths. Arguments as in `flash_attn._ops.xentropy`."""

import torch
import triton
import triton.language as tl


def fwd(logits, labels, lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes):
    """Returns (losses, z_losses, lse, kept). A program takes a row and reads it once."""
    logits = _with_adjacent_columns(logits)
    rows, vocab = logits.shape
    losses, z_losses = logits.new_empty(2, rows, dtype=torch.float32).unbind()
    new_lse = torch.empty_like(losses, dtype=torch.float64)
    kept = torch.empty_like(losses, dtype=torch.bool)
    if rows > 0:
        cross_entropy_fwd_kernel[(rows,)](
            losses,
            z_losses,
            new_lse,
            kept,
            logits,
            labels,
            lse,
            logits.stride(0),
            labels.stride(0),
            0 if lse is None else lse.stride(0),
            vocab,
            label_smoothing,
            label_smoothing / max(total_classes, 1),
            logit_scale,
            lse_square_scale,
            ignore_index,
            class_start,
            total_classes,
            KNOWN_LSE=lse is not None,
            IGNORES=ignore_index is not None,
            SMOOTH=label_smoothing > 0 and vocab > 0,
            Z_LOSS=lse_square_scale != 0,
            BLOCK=_block(vocab, 8192),
            num_warps=8,
        )
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
    losses, z_losses, lse, kept = fwd(logits, labels, None, *options)
    return losses, z_losses, lse, kept, bwd(dlosses, logits, labels, lse, *options)


def fwd_bwd_(dlosses, logits, labels, *options):
    """Replace logits by dlogits; returns (losses, z_losses, lse, kept)."""
    losses, z_losses, lse, kept = fwd(logits, labels, None, *options)
    bwd_(dlosses, logits, labels, lse, *options)
    return losses, z_losses, lse, kept


def redo_(dlogits, dlosses, expected, logits, *args):
    """Replace the rows of dlogits whose dlosses are not what was expected."""
    _differentiate(dlosses, _with_adjacent_columns(logits), *args, dlogits, expected)


def scale_(dlogits, dlosses, expected, kept):
    """Multiply the rows of dlogits that count by dlosses / expected. Rows whose dlosses came as expected are not read.

    A program takes a row, of which there are few where nothing but that is to be found out.
    """
    out = _with_adjacent_columns(dlogits)
    rows, columns = out.shape
    if out.numel() > 0:
        cross_entropy_scale_kernel[(rows,)](
            out,
            dlosses,
            expected,
            kept,
            out.stride(0),
            dlosses.stride(0),
            expected.stride(0),
            kept.stride(0),
            columns,
            BLOCK=_block(columns, 4096),
            num_warps=8,
        )
    if out is not dlogits:
        dlogits.copy_(out)


def _differentiate(
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
    dlogits,
    expected=None,
):
    rows, vocab = logits.shape
    block = _block(vocab, 4096)
    if logits.numel() > 0:
        cross_entropy_bwd_kernel[(rows, triton.cdiv(vocab, block))](
            dlogits,
            dlosses,
            expected,
            logits,
            labels,
            lse,
            dlogits.stride(0),
            dlosses.stride(0),
            0 if expected is None else expected.stride(0),
            logits.stride(0),
            labels.stride(0),
            lse.stride(0),
            vocab,
            label_smoothing,
            label_smoothing / max(total_classes, 1),
            logit_scale,
            lse_square_scale,
            ignore_index,
            class_start,
            total_classes,
            IGNORES=ignore_index is not None,
            Z_LOSS=lse_square_scale != 0,
            EXPECTED=expected is not None,
            BLOCK=block,
            num_warps=8,
        )


@triton.jit
def cross_entropy_fwd_kernel(
    losses,
    z_losses,
    new_lse,
    kept,
    logits,
    labels,
    known_lse,
    logits_stride,
    labels_stride,
    known_lse_stride,
    vocab,
    label_smoothing,
    smooth_weight,
    logit_scale,
    lse_square_scale,
    ignore_index,
    class_start,
    total_classes,
    KNOWN_LSE: tl.constexpr,
    IGNORES: tl.constexpr,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(labels + row * labels_stride).to(tl.int64)
    keep = _is_kept(label, ignore_index, total_classes, IGNORES)
    loss, z_loss = 0.0, 0.0
    lse = tl.zeros((), tl.float64)
    if keep:
        own = label - class_start
        is_own = (own >= 0) & (own < vocab)
        of_label = tl.load(logits + own, mask=is_own, other=0).to(tl.float32)
        if KNOWN_LSE:  # the label takes the place of the largest logit, which is not known
            lse = tl.load(known_lse + row * known_lse_stride)
            largest, below = tl.where(of_label == float("-inf"), 0.0, of_label), 0.0
            log_sum = (lse - largest.to(tl.float64) * logit_scale).to(tl.float32)
        else:
            largest, exp_sum, below = _sum_row(logits, vocab, logit_scale, SMOOTH, BLOCK)
            log_sum = tl.log(exp_sum)
            lse = largest.to(tl.float64) * logit_scale + log_sum
        if is_own:
            loss = (1 - label_smoothing) * ((largest - of_label) * logit_scale + log_sum)
        if SMOOTH:
            loss += smooth_weight * (below * logit_scale + vocab * log_sum)
        if Z_LOSS:
            z_loss = lse_square_scale * (lse * lse).to(tl.float32)
            loss += z_loss
    tl.store(losses + row, loss)
    tl.store(z_losses + row, z_loss)
    tl.store(new_lse + row, lse)
    tl.store(kept + row, keep)


@triton.jit
def cross_entropy_bwd_kernel(
    dlogits,
    dlosses,
    expected,
    logits,
    labels,
    lse,
    dlogits_stride,
    dlosses_stride,
    expected_stride,
    logits_stride,
    labels_stride,
    lse_stride,
    vocab,
    label_smoothing,
    smooth_weight,
    logit_scale,
    lse_square_scale,
    ignore_index,
    class_start,
    total_classes,
    IGNORES: tl.constexpr,
    Z_LOSS: tl.constexpr,
    EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        # The lse is logit_scale * centre + rest, of which float32 loses nothing: the centre is near the large logits.
        centre = row_lse.to(tl.float32) / logit_scale
        rest = (row_lse - centre.to(tl.float64) * logit_scale).to(tl.float32)
        logit = tl.load(logits + row * logits_stride + column, mask=inside, other=0).to(tl.float32)
        gradient = tl.exp((logit - centre) * logit_scale - rest)
        if Z_LOSS:
            gradient *= 1 + 2 * lse_square_scale * row_lse.to(tl.float32)
        gradient -= smooth_weight + tl.where(column == label - class_start, 1 - label_smoothing, 0.0)
        gradient *= dloss * logit_scale
    tl.store(dlogits + row * dlogits_stride + column, gradient.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_scale_kernel(
    dlogits,
    dlosses,
    expected,
    kept,
    dlogits_stride,
    dlosses_stride,
    expected_stride,
    kept_stride,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dlogits += row * dlogits_stride
    dloss, was = tl.load(dlosses + row * dlosses_stride), tl.load(expected + row * expected_stride)
    if (dloss != was) & (tl.load(kept + row * kept_stride) != 0):
        factor = dloss / was
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(dlogits + column, mask=column < columns).to(tl.float32)
            tl.store(dlogits + column, (x * factor).to(dlogits.dtype.element_ty), mask=column < columns)


@triton.jit
def _is_kept(label, ignore_index, total_classes, IGNORES: tl.constexpr):
    keep = label == label
    if IGNORES:
        keep = (label != ignore_index) & (label >= 0) & (label < total_classes)
    return keep


@triton.jit
def _sum_row(logits, vocab, logit_scale, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest logit of a row, sum exp(logit_scale (logit - largest)), and sum largest - logit if SMOOTH."""
    largest, exp_sum, below = -3.402823e38, 0.0, 0.0  # finite, so that differences of maxima are numbers
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(logit))
        exp_sum *= tl.exp((largest - new_largest) * logit_scale)
        exp_sum += tl.sum(tl.exp((logit - new_largest) * logit_scale))
        if SMOOTH:
            below += tl.where(start > 0, start * (new_largest - largest), 0.0)
            below += tl.sum(tl.where(column < vocab, new_largest - logit, 0.0))
        largest = new_largest
    return largest, exp_sum, below


def _block(vocab, most):
    return min(max(triton.next_power_of_2(vocab), 16), most)


def _with_adjacent_columns(logits):
    return logits if logits.stride(1) == 1 else logits.contiguous()
