"""What attention should give, naively, independent of the package.

Every function computes in the dtype of its arguments: with `.double()` tensors it is the exact answer, with the tensors
under test it is the baseline ("the same maths in plain torch at the same precision"). Gradients come from autograd.

    q (batch, seqlen_q, heads, head_dim)    k, v (batch, seqlen_k, heads_k, head_dim)    lse (batch, heads, seqlen_q)

Options: softmax_scale=None (head_dim ** -0.5), causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
keep=None (dropout mask, bool (batch, heads, seqlen_q, seqlen_k) or larger), dropout_p=0.0; learnable_sink=None
(heads,), attn_bias=None (numbers or bool, broadcasting to (batch, heads, seqlen_q, seqlen_k)), and seen=None, a mask.
"""

import math

import numpy as np
import torch


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    keep=None,
    dropout_p=0.0,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    learnable_sink=None,
    attn_bias=None,
    seen=None,
):
    """softmax(score(q k^T)) v as (out, lse). A row without any allowed key gives 0, and lse = +inf, or the sink."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    allowed = allowed_keys(seqlen_q, seqlen_k, causal, window_size, q.device)
    allowed = allowed if seen is None else allowed & seen
    scores = raw_scores(q, k, softmax_scale, softcap, alibi_slopes)
    if attn_bias is not None:
        open_ = attn_bias if attn_bias.dtype == torch.bool else attn_bias != float("-inf")
        allowed = allowed & open_
        if attn_bias.dtype != torch.bool:
            scores = scores + attn_bias.masked_fill(~open_, 0).to(scores.dtype)
    empty = ~allowed.any(dim=-1, keepdim=True)
    if learnable_sink is not None:
        empty = torch.zeros_like(empty)
        column = learnable_sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores, allowed = torch.cat([scores, column], -1), allowed.expand_as(scores)
        allowed = torch.cat([allowed, torch.ones_like(allowed[..., :1])], -1) if seqlen_k else allowed.new_ones(1)
    scores = scores.masked_fill(~allowed & ~empty, float("-inf"))  # an empty row stays finite: no NaN in its gradient
    weights = scores.softmax(dim=-1).masked_fill(~allowed, 0)[..., :seqlen_k]
    lse = scores.logsumexp(dim=-1).masked_fill(empty.squeeze(-1), float("inf"))
    if keep is not None:
        weights = weights * keep[..., :seqlen_q, :seqlen_k] / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(q.shape[2] // k.shape[2], dim=2)), lse


def raw_scores(q, k, softmax_scale=None, softcap=0.0, alibi_slopes=None):
    """The scores before any mask, (batch, heads, seqlen_q, seqlen_k)."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k.repeat_interleave(q.shape[2] // k.shape[2], dim=2))
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes, q.shape[1], k.shape[1]).to(scores.dtype)
    return scores


def allowed_keys(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), device=None):
    """Which keys a query sees, bool (seqlen_q, seqlen_k): bottom-right aligned, bounds inclusive, -1 unbounded."""
    left, right = (int(bound) for bound in window_size)
    right = 0 if causal else right
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        allowed &= key >= diagonal - left
    if right >= 0:
        allowed &= key <= diagonal + right
    return allowed


def alibi_bias(slopes, seqlen_q, seqlen_k):
    """-slope * |i + seqlen_k - seqlen_q - j|, (batch or 1, heads, seqlen_q, seqlen_k), of slopes ([batch,] heads)."""
    i, j = (torch.arange(n, device=slopes.device) for n in (seqlen_q, seqlen_k))
    distance = (i[:, None] + seqlen_k - seqlen_q - j[None, :]).abs()
    return -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance


def _entry_slopes(slopes, b):
    return slopes if slopes is None or slopes.dim() == 1 else slopes[b]


def varlen_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, seqused_k=None, leftpad_k=None, keep=None, alibi_slopes=None, **options
):
    """`attention` of each entry of a packed batch: q (total_q, heads, head_dim) -> out like q, lse (heads, total_q).

    Entry b sees the keys from leftpad_k[b] on, up to seqused_k[b] of its own; column 0 of `keep` is the first key seen.
    Rows past cu_seqlens[-1] are left out.
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [q[:0]], [q.new_empty(q.shape[1], 0)]
    for b in range(len(starts_q) - 1):
        first = starts_k[b] + (0 if leftpad_k is None else int(leftpad_k[b]))
        last = starts_k[b + 1] if seqused_k is None else starts_k[b] + int(seqused_k[b])
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(first, last)
        out, lse = attention(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            keep=None if keep is None else keep[b : b + 1],
            alibi_slopes=_entry_slopes(alibi_slopes, b),
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def intervals(seqlen_q, seqlen_k, key_ranges=None, attention_chunk=0, causal=None, device=None):
    """Which keys a row sees by key_ranges (.., seqlen_q, 2 or 4), chunks and a flag; bool (.., seqlen_q, seqlen_k)."""
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        seen &= j <= i
    if attention_chunk:
        seen &= torch.floor(i / attention_chunk) == torch.floor(j / attention_chunk)
    if key_ranges is not None:
        pairs = key_ranges.unflatten(-1, (-1, 2))[..., None, :]
        seen = seen & (
            (j[:, None] >= pairs[..., 0].transpose(-1, -2)) & (j[:, None] < pairs[..., 1].transpose(-1, -2))
        ).any(-1)
    return seen


def featured_attention(
    q,
    k,
    v,
    rows,
    keys,
    *,
    key_ranges=None,
    attention_chunk=0,
    causal=False,
    attn_bias=None,
    keep=None,
    alibi_slopes=None,
    **options,
):
    """`attention` with features of the entries of packed tokens: out (total_q, heads, any), lse (heads, total_q).

    rows, keys: the slices of tokens of each entry that are used. Tokens of none give 0 and +inf. causal: one flag for
    each entry. key_ranges, attn_bias: functions of an entry and its slice of rows.
    """
    out, lse = q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full((q.shape[1], q.shape[0]), float("inf"))
    for b, (row, key) in enumerate(zip(rows, keys, strict=True)):
        seqlen_q, seqlen_k = row.stop - row.start, key.stop - key.start
        ranges = None if key_ranges is None else key_ranges(b, row)
        seen = intervals(seqlen_q, seqlen_k, ranges, attention_chunk, causal[b], q.device)
        bias = None if attn_bias is None else attn_bias(b, row)
        if bias is not None and bias.shape[-1] > 1:
            bias = bias[..., :seqlen_k]
        o, m = attention(
            q[None, row],
            k[None, key],
            v[None, key],
            seen=seen,
            attn_bias=bias,
            keep=None if keep is None else keep[b : b + 1],
            alibi_slopes=_entry_slopes(alibi_slopes, b),
            **options,
        )
        index = torch.arange(row.start, row.stop, device=q.device)
        out, lse = out.index_copy(0, index, o[0]), lse.index_copy(1, index, m[0])
    return out, lse


def gradients(function, tensors, dout, dlse=None):
    """`function(*tensors)` -> (out, lse), and the gradients of the tensors for dout (and dlse): (out, lse, grads)."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    outputs, incoming = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    grads = torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(incoming, outputs, strict=True)])
    return out.detach(), lse.detach(), grads


def kvcache_attention(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    *,
    rotary_interleaved=True,
    rotated_dtype=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    **options,
):
    """Append k, v to the caches, then attend to them: (out, lse, k_cache, v_cache), the caches being new tensors.

    The caches: (batch_cache, capacity, heads_k, head_dim), or (num_blocks, page, heads_k, head_dim) with block_table.
    rotated_dtype: a type to which queries and keys are rounded after they are rotated.
    """

    def rotated(x, positions):
        x = rotate(x, rotary_cos, rotary_sin, positions, rotary_interleaved)
        return x if rotated_dtype is None else x.to(rotated_dtype).to(x.dtype)

    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    outs, lses = [], []
    for b in range(q.shape[0]):
        entry = b if cache_batch_idx is None else int(cache_batch_idx[b])
        blocks, offsets = _cache_addresses(k_cache, entry, None if block_table is None else block_table[b])
        length = len(blocks) if cache_seqlens is None else int(torch.as_tensor(cache_seqlens).expand(q.shape[0])[b])
        query, used = q[b], length
        if rotary_cos is not None:
            advance = causal or window_size[0] >= 0 or window_size[1] >= 0
            positions = length + (torch.arange(q.shape[1]) if advance else torch.zeros(q.shape[1], dtype=torch.long))
            query = rotated(query, positions)
        if k is not None:
            used = length + k.shape[1]
            key, new = k[b], slice(length, used)
            if rotary_cos is not None:
                key = rotated(key, torch.arange(length, used))
            k_cache[blocks[new], offsets[new]], v_cache[blocks[new], offsets[new]] = key, v[b]
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        seen = blocks[first:used], offsets[first:used]
        out, lse = attention(
            query[None],
            k_cache[seen][None],
            v_cache[seen][None],
            causal=causal,
            window_size=window_size,
            alibi_slopes=_entry_slopes(alibi_slopes, b),
            **options,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), k_cache, v_cache


def _cache_addresses(cache, entry, blocks):
    """(first index, second index) into the cache of each logical position of one entry."""
    page = cache.shape[1]
    blocks = torch.tensor([entry], device=cache.device) if blocks is None else blocks.long()
    return blocks.repeat_interleave(page), torch.arange(page, device=cache.device).repeat(len(blocks))


def rotate(x, cos, sin, positions, interleaved):
    """Rotary embedding of x (seqlen, heads, head_dim) by rows `positions` of cos, sin (rows, rotary_dim / 2)."""
    cos, sin = (table[positions.to(table.device)][:, None] for table in (cos, sin))
    rotary_dim = 2 * cos.shape[-1]
    pairs = x[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1 if interleaved else -2)
    return torch.cat([turned.flatten(-2), x[..., rotary_dim:]], dim=-1)


def dropout_keep(seed, offset, batch, heads, seqlen_q, seqlen_k, dropout_p):
    """The keep mask (batch, heads, seqlen_q, seqlen_k) that rng_state = (seed, offset) stands for.

    Philox-4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Its key is the seed; its counter
    is (offset + 32 * (b * heads + h) + lane, row // 16, column // 32). The 16 bytes of a lane belong to a 16 x 32 tile:
    byte 8y + 4x + 2u + z decides row lane // 4 + 8u and column 16y + 8x + 2 (lane % 4) + z, and keeps it if it is at
    most floor(255 (1 - p)).
    """
    b, h, i, j = np.ogrid[:batch, :heads, :seqlen_q, :seqlen_k]
    lane = i % 8 * 4 + j % 8 // 2
    byte = j % 32 // 16 * 8 + j % 16 // 8 * 4 + i % 16 // 8 * 2 + j % 2
    low = np.uint64(offset % 2**64) + (32 * (b * heads + h) + lane).astype(np.uint64)
    words = philox([low & _WORD, low >> 32, i // 16, j // 32], [seed % 2**32, seed // 2**32 % 2**32])
    word = np.choose(byte // 4, np.broadcast_arrays(*words))
    return torch.from_numpy((word >> (8 * (byte % 4)).astype(np.uint64) & 255) <= int(255 * (1 - dropout_p)))


_WORD = np.uint64(2**32 - 1)


def philox(counter, key, rounds=7):
    c = [np.asarray(x).astype(np.uint64) for x in counter]
    k = [np.uint64(x) for x in key]
    for _ in range(rounds):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [product1 >> 32 ^ c[1] ^ k[0], product1 & _WORD, product0 >> 32 ^ c[3] ^ k[1], product0 & _WORD]
        k = [(k[0] + np.uint64(0x9E3779B9)) & _WORD, (k[1] + np.uint64(0xBB67AE85)) & _WORD]
    return c


def cross_entropy(logits, labels, *, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, ignore_index=-100):
    """(losses, z_losses) of each row; 0 where the label is ignore_index or no class."""
    kept = (labels != ignore_index) & (labels >= 0) & (labels < logits.shape[1])
    scores = logits[kept] * logit_scale
    lse = scores.logsumexp(dim=-1)
    own = scores.gather(1, labels[kept].long()[:, None])[:, 0]
    z_losses = lse_square_scale * lse**2
    losses = lse - (1 - label_smoothing) * own - label_smoothing * scores.mean(dim=-1) + z_losses
    return tuple(logits.new_zeros(len(logits)).masked_scatter(kept, x) for x in (losses, z_losses))


def masked_softmax(x, scale, masked):
    """Softmax over the last dimension of scale * x where not `masked`; rows with nothing left are 0."""
    empty = masked.all(dim=-1, keepdim=True)
    weights = (x * scale).masked_fill(masked & ~empty, float("-inf")).softmax(dim=-1)
    return weights.masked_fill(masked, 0)


def layer_norm(
    x0,
    x1,
    residual,
    weight,
    bias,
    weight1,
    bias1,
    colscale,
    *,
    rowscale=None,
    keep=(None, None),
    dropout_p=0.0,
    x0_subset=None,
    out_subset=None,
    rowscale_const=1.0,
    out_rows=0,
    eps=1e-5,
    is_rms_norm=False,
    zero_centered_weight=False,
    h_dtype=None,
):
    """The norm of h = drop(rowscale x0) colscale + drop(x1) + residual: [out, out1, h], or [out, h] without weight1.

    keep: bool masks of x0 and x1. Subsets are lists, 1 + the row that is added to or made of each row of h. With
    h_dtype h is rounded before it is normalised.
    """
    h = _dropped(x0 if rowscale is None else x0 * rowscale[..., None], keep[0], dropout_p)
    h = h if colscale is None else h * colscale
    if x0_subset is not None:
        none = torch.zeros_like(h[0])
        h = torch.stack([h[row - 1] * rowscale_const if row else none for row in x0_subset])
    h = h if x1 is None else h + _dropped(x1, keep[1], dropout_p)
    h = h if residual is None else h + residual
    h = h if h_dtype is None else h.to(h_dtype)
    centred = h if is_rms_norm else h - h.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    outs = []
    for w, b in ((weight, bias), (weight1, bias1)):
        if w is not None:
            out = normal * (w + 1 if zero_centered_weight else w)
            out = out if b is None else out + b
            outs.append(out if out_subset is None else _rows_at(out, out_subset, out_rows))
    return [*outs, h]


def _dropped(x, keep, dropout_p):
    return x if keep is None else torch.where(keep, x, torch.zeros_like(x)) / (1 - dropout_p)


def _rows_at(x, subset, rows):
    sources = [subset.index(row + 1) if row + 1 in subset else None for row in range(rows)]
    return torch.stack([torch.zeros_like(x[0]) if i is None else x[i] for i in sources])


def layer_norm_keep(seed, offset, branch, rows, cols, dropout_p):
    """The keep mask (rows, cols) of branch 0 or 1 that rng_state = (seed, offset) stands for in the fused norms.

    Philox with the seed as its key and the counter (offset + row, column // 8, branch) gives 16 bytes; the 16-bit word
    column % 8 of them, low byte first, keeps the element if it is below round(65536 (1 - p)).
    """
    i, j = np.ogrid[:rows, :cols]
    low = np.uint64(offset % 2**64) + i.astype(np.uint64)
    words = philox([low & _WORD, low >> 32, j // 8, np.uint64(branch)], [seed % 2**32, seed // 2**32 % 2**32])
    word = np.choose(j % 8 // 2, np.broadcast_arrays(*words))
    return torch.from_numpy((word >> (16 * (j % 2)).astype(np.uint64) & 65535) < round(65536 * (1 - dropout_p)))


ACTIVATIONS = {
    "identity": lambda x: x,
    "gelu_approx": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: torch.where(x > 0, x, 0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "sqrelu": lambda x: torch.where(x > 0, x, 0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def linear(x, weight, bias=None, activation="identity"):
    """act(x weight^T + bias)."""
    out = torch.einsum("...i,oi->...o", x, weight)
    return ACTIVATIONS[activation](out if bias is None else out + bias)


def mlp(x, weight1, bias1, weight2, bias2, activation):
    """Two layers, the first with an activation."""
    return linear(linear(x, weight1, bias1, activation), weight2, bias2)
