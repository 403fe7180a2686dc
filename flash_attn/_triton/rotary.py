"""Rotary embedding in Triton, with fp32 maths. Arguments as in `flash_attn._ops.rotary`.

A row is one head of one token. A program takes several rows, and for each of them a block of channel pairs.
"""

import torch
import triton
import triton.language as tl

_PAIRS = 1024  # in one program
_MOST_COLUMNS = 256


def rotary(x, *args):
    """Returns the rotated copy of x."""
    out = torch.empty_like(x)
    rotary_into(x, out, *args)
    return out


def rotary_into(x, out, cos, *args):
    """Rotate x into out."""
    rotary_dim = 2 * cos.shape[1]
    out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    _rotate(x, out, cos, *args)


def rotary_(x, *args):
    """Rotate x in place."""
    _rotate(x, x, *args)


def _rotate(x, out, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate):
    if cu_seqlens is not None:  # packed tokens are one batch row; only their positions depend on cu_seqlens
        x, out, cu_seqlens = x[None], out[None], cu_seqlens.contiguous()
    seqlen_offsets = None if seqlen_offsets is None else seqlen_offsets.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, seqlen, heads, _ = x.shape
    rows, (positions, columns) = batch * seqlen * heads, cos.shape
    if rows == 0 or columns == 0:
        return
    block = min(max(triton.next_power_of_2(columns), 16), _MOST_COLUMNS)
    entries = 0 if cu_seqlens is None else len(cu_seqlens)
    grid = triton.cdiv(rows, _PAIRS // block), triton.cdiv(columns, block)
    rotary_kernel[grid](
        x,
        out,
        cos,
        sin,
        seqlen_offsets,
        cu_seqlens,
        seqlen_offset,
        rows,
        seqlen,
        heads,
        positions,
        columns,
        entries,
        entries.bit_length(),
        *x.stride(),
        *out.stride(),
        INTERLEAVED=interleaved,
        CONJUGATE=conjugate,
        ROWS=_PAIRS // block,
        COLUMNS=block,
    )


@triton.jit
def rotary_kernel(
    x,
    out,
    cos,
    sin,
    seqlen_offsets,
    cu_seqlens,
    seqlen_offset,
    rows,
    seqlen,
    heads,
    positions,
    columns,
    entries,
    steps,
    x_batch,
    x_token,
    x_head,
    x_channel,
    out_batch,
    out_token,
    out_head,
    out_channel,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    head, token, batch = row % heads, row // heads % seqlen, row // heads // seqlen
    position, has_sequence = token + seqlen_offset, there
    sequence = batch
    if cu_seqlens is not None:
        sequence = _entries_up_to(cu_seqlens, entries, steps, token) - 1
        has_sequence = there & (sequence >= 0) & (sequence < entries - 1)
        position -= tl.load(cu_seqlens + sequence, mask=has_sequence, other=0)
    if seqlen_offsets is not None:
        position += tl.load(seqlen_offsets + sequence, mask=has_sequence, other=0)
    turns = (has_sequence & (position >= 0) & (position < positions))[:, None] & (column < columns)[None, :]
    at = position[:, None] * columns + column[None, :]
    c = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
    if CONJUGATE:
        s = -s
    low = 2 * column if INTERLEAVED else column
    high = low + (1 if INTERLEAVED else columns)
    x += (batch * x_batch + token * x_token + head * x_head)[:, None]
    out += (batch * out_batch + token * out_token + head * out_head)[:, None]
    inside = there[:, None] & (column < columns)[None, :]
    a = tl.load(x + low[None, :] * x_channel, mask=inside)
    b = tl.load(x + high[None, :] * x_channel, mask=inside)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    turned_a = (wide_a * c - wide_b * s).to(a.dtype)
    turned_b = (wide_a * s + wide_b * c).to(b.dtype)
    tl.store(out + low[None, :] * out_channel, tl.where(turns, turned_a, a), mask=inside)
    tl.store(out + high[None, :] * out_channel, tl.where(turns, turned_b, b), mask=inside)


@triton.jit
def _entries_up_to(cu_seqlens, entries, steps, token):
    """Returns how many entries of cu_seqlens are <= each token, by a binary search of `steps` steps."""
    least, most = tl.zeros_like(token), tl.zeros_like(token) + entries
    for _ in range(steps):
        middle, is_open = (least + most) // 2, least < most
        up_to = tl.load(cu_seqlens + middle, mask=is_open, other=0) <= token
        least = tl.where(is_open & up_to, middle + 1, least)
        most = tl.where(is_open & ~up_to, middle, most)
    return least
