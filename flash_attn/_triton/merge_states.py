"""The merging of two results of attention in Triton, with fp32 maths. Arguments as in `flash_attn._ops.merge_states`.

A row is one head of one token. A program takes whole rows, so that it has read all that it overwrites.
"""

import triton
import triton.language as tl

_ELEMENTS = 2048  # in one program


def merge_states_(out, lse, out_a, lse_a, out_b, lse_b):
    """Write the merged result to out and, unless it is None, to lse."""
    tokens, heads, head_dim = out.shape
    rows = tokens * heads
    if rows == 0:
        return
    columns = triton.next_power_of_2(head_dim)
    block = max(_ELEMENTS // columns, 1)
    merge_states_kernel[(triton.cdiv(rows, block),)](
        out,
        lse,
        out_a,
        lse_a,
        out_b,
        lse_b,
        rows,
        heads,
        head_dim,
        *out.stride(),
        *(lse_a if lse is None else lse).stride(),
        *out_a.stride(),
        *lse_a.stride(),
        *out_b.stride(),
        *lse_b.stride(),
        ROWS=block,
        COLUMNS=columns,
    )


@triton.jit
def merge_states_kernel(
    out,
    lse,
    out_a,
    lse_a,
    out_b,
    lse_b,
    rows,
    heads,
    head_dim,
    out_token,
    out_head,
    out_channel,
    lse_token,
    lse_head,
    out_a_token,
    out_a_head,
    out_a_channel,
    lse_a_token,
    lse_a_head,
    out_b_token,
    out_b_head,
    out_b_channel,
    lse_b_token,
    lse_b_head,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = row < rows
    token, head = row // heads, row % heads
    a = tl.load(lse_a + token * lse_a_token + head * lse_a_head, mask=there, other=0.0).to(tl.float32)
    b = tl.load(lse_b + token * lse_b_token + head * lse_b_head, mask=there, other=0.0).to(tl.float32)
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    sees_a, sees_b = a != float("-inf"), b != float("-inf")
    empty = (a == float("-inf")) & (b == float("-inf"))
    top = tl.where(empty, 0.0, tl.where(a > b, a, b))
    top = tl.where((a != a) | (b != b), a + b, top)  # NaN stays NaN
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = tl.where(empty, 1.0, weight_a + weight_b)
    inside = there[:, None] & (column < head_dim)[None, :]
    at_a = (token * out_a_token + head * out_a_head)[:, None] + (column * out_a_channel)[None, :]
    at_b = (token * out_b_token + head * out_b_head)[:, None] + (column * out_b_channel)[None, :]
    # Where a part saw no key, its out may hold anything, also NaN: it is not read.
    x = tl.load(out_a + at_a, mask=inside & sees_a[:, None], other=0.0).to(tl.float32)
    y = tl.load(out_b + at_b, mask=inside & sees_b[:, None], other=0.0).to(tl.float32)
    merged = x * (weight_a / total)[:, None] + y * (weight_b / total)[:, None]
    tl.debug_barrier()  # the results may be written over the inputs, which other warps of the program also read
    at = (token * out_token + head * out_head)[:, None] + (column * out_channel)[None, :]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        both = tl.where(empty, float("inf"), top + tl.log(total))
        tl.store(lse + token * lse_token + head * lse_head, both, mask=there)
