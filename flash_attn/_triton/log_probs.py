"""Log-probabilities in Triton, with fp32 maths. Arguments as in `flash_attn._ops.log_probs`."""

import torch
import triton
import triton.language as tl

FWD = BWD = {"columns": 4096, "warps": 8}  # that a program takes at a time, at most, and the warps that share them


def fwd(logits, labels, scale, softcap, class_start):
    """Returns (own, lse, mean). A program takes a row and reads it once."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    own, lse, mean = logits.new_empty(3, rows, dtype=torch.float64).unbind()
    if rows > 0:
        log_probs_fwd_kernel[(rows,)](
            own,
            lse,
            mean,
            logits,
            labels,
            scale,
            logits.stride(0),
            labels.stride(0),
            scale.stride(0),
            vocab,
            softcap,
            class_start,
            HAS_SOFTCAP=softcap > 0,
            LEAST=-1e30,
            BLOCK=_block(vocab, FWD["columns"]),
            num_warps=FWD["warps"],
        )
    return own, lse, mean


def bwd_(logits, labels, scale, lse, mean, dlog_probs, dentropy, dlse, softcap, class_start):
    """Replace logits by dlogits."""
    out = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = out.shape
    block = _block(vocab, BWD["columns"])
    of_rows = labels, scale, lse, mean, dlog_probs, dentropy, dlse
    if out.numel() > 0:
        log_probs_bwd_kernel[(rows, triton.cdiv(vocab, block))](
            out,
            *of_rows,
            out.stride(0),
            *(x.stride(0) for x in of_rows),
            vocab,
            softcap,
            class_start,
            HAS_SOFTCAP=softcap > 0,
            BLOCK=block,
            num_warps=BWD["warps"],
        )
    if out is not logits:
        logits.copy_(out)


@triton.jit
def log_probs_fwd_kernel(
    own,
    lse,
    mean,
    logits,
    labels,
    scales,
    logits_stride,
    labels_stride,
    scales_stride,
    vocab,
    softcap,
    class_start,
    HAS_SOFTCAP: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(labels + row * labels_stride).to(tl.int64)
    of_label, of_all, of_mean = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if label >= 0:
        scale = tl.load(scales + row * scales_stride)
        columns = tl.arange(0, BLOCK)
        # The largest logit is finite at first, so that differences of two of them are numbers. Lanes have sums of their
        # own, which meet at the end, and the next columns are on their way while these are added.
        largest = tl.full((), -3.402823e38, tl.float32)
        total, spread = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        following = tl.load(logits + columns, mask=columns < vocab, other=float("-inf"))
        for start in range(0, vocab, BLOCK):
            logit = following.to(tl.float32)
            if HAS_SOFTCAP:
                logit = tl.where(start + columns < vocab, softcap * _tanh(logit / softcap), float("-inf"))
            at = start + BLOCK + columns
            following = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logit))
            step = tl.maximum((largest - new_largest) * scale, LEAST)
            factor = tl.exp(step)
            below = (logit - new_largest) * scale
            below = tl.where(below < LEAST, LEAST, below)  # a number where a class is impossible, and NaN stays NaN
            weight = tl.exp(below)
            spread = factor * (spread + step * total) + weight * below
            total = factor * total + weight
            largest = new_largest
        sum_of_all, sum_of_spread = tl.sum(total), tl.sum(spread)
        centre = largest.to(tl.float64) * scale
        of_all = centre + tl.log(sum_of_all)
        of_mean = centre + tl.where(sum_of_all > 0, sum_of_spread / sum_of_all, 0.0)
        column_of_label = label - class_start
        if (column_of_label >= 0) & (column_of_label < vocab):
            logit_of_label = tl.load(logits + column_of_label).to(tl.float32)
            if HAS_SOFTCAP:
                logit_of_label = softcap * _tanh(logit_of_label / softcap)
            of_label = centre + (logit_of_label - largest) * scale
    tl.store(own + row, of_label)
    tl.store(lse + row, of_all)
    tl.store(mean + row, of_mean)


@triton.jit
def log_probs_bwd_kernel(
    logits,
    labels,
    scales,
    lse,
    mean,
    dlog_probs,
    dentropy,
    dlse,
    logits_stride,
    labels_stride,
    scales_stride,
    lse_stride,
    mean_stride,
    dlog_probs_stride,
    dentropy_stride,
    dlse_stride,
    vocab,
    softcap,
    class_start,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    pointers = logits + row * logits_stride + column
    label = tl.load(labels + row * labels_stride).to(tl.int64)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if label >= 0:
        scale = tl.load(scales + row * scales_stride)
        row_lse = tl.load(lse + row * lse_stride)
        # The lse is scale * centre + rest, of which float32 loses nothing: the centre is near the large logits.
        centre = row_lse.to(tl.float32) / scale
        at_centre = centre.to(tl.float64) * scale
        rest = (row_lse - at_centre).to(tl.float32)
        offset = (tl.load(mean + row * mean_stride) - at_centre).to(tl.float32)
        of_label = tl.load(dlog_probs + row * dlog_probs_stride)
        of_entropy = tl.load(dentropy + row * dentropy_stride)
        of_lse = tl.load(dlse + row * dlse_stride)
        logit, slope = tl.load(pointers, mask=inside, other=0).to(tl.float32), scale
        if HAS_SOFTCAP:
            tanh = _tanh(logit / softcap)
            logit, slope = softcap * tanh, scale * (1 - tanh * tanh)
        below = (logit - centre) * scale
        p = tl.exp(below - rest)
        gradient = p * (of_lse - of_label - of_entropy * tl.where(p > 0, below - offset, 0.0))
        gradient += tl.where(column == label - class_start, of_label, 0.0)
        gradient *= slope
    tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    """Of small numbers by its series, where 1 - 2 / (exp(2 x) + 1) would lose digits."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.1, series, 1 - 2 / (tl.exp(2 * x) + 1))


def _block(vocab, most):
    return min(max(triton.next_power_of_2(vocab), 16), most)
