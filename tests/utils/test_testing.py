"""Random lengths, problems padded and packed, masks, and attention by its definition."""

import functools
import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import cover
from compare import assert_error_ratio, rms_error

from flash_attn import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
from flash_attn.utils.testing import (
    attention_ref,
    construct_chunk_mask,
    construct_local_mask,
    generate_qkv,
    generate_random_padding_mask,
)

assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def draw(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, device=device).to(dtype)


def tokens(rows, device="cpu"):
    """The padding mask that strings of x (a token) and . (none) draw."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows], device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Random lengths


@pytest.mark.parametrize(
    "mode, zero_lengths, max_seqlen, lengths",
    [
        ("full", False, 7, {7}),
        ("full", True, 7, {7}),
        ("random", False, 30, set(range(10, 31))),
        ("random", False, 7, set(range(1, 8))),
        ("random", True, 7, set(range(8))),
        ("random", True, 30, set(range(10, 31))),
        ("third", False, 31, set(range(10, 32))),
        ("third", False, 2, {1, 2}),
        ("third", True, 2, {0, 1, 2}),
        ("random", False, 0, {0}),
    ],
)
def test_random_lengths(mode, zero_lengths, max_seqlen, lengths, device):
    batch = 1002
    mask = generate_random_padding_mask(max_seqlen, batch, device, mode, zero_lengths)
    assert mask.shape == (batch, max_seqlen) and mask.dtype == torch.bool and mask.device.type == device.type
    found = mask.sum(-1)
    assert_equal(mask, torch.arange(max_seqlen, device=device) < found[:, None])
    drawn = torch.ones(batch, dtype=torch.bool, device=device)
    if zero_lengths:
        drawn[::5] = drawn[-1] = False
        assert not found[~drawn].any()
    assert set(found[drawn].tolist()) == lengths
    assert found[drawn].double().mean().item() == pytest.approx(sum(lengths) / len(lengths), abs=1)


def test_no_sequences(device):
    assert generate_random_padding_mask(5, 0, device, zero_lengths=True).shape == (0, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Padded and packed

QUERIES, UNUSED_QUERIES = ["xx...", "xxxxx", "....."], ["..xx.", ".....", "x...."]
KEYS, UNUSED_KEYS = ["xxx.", "x...", "xx.."], ["...x", ".xx.", "...."]


def problem(device, packing="", dtype=torch.float64):
    """q, k, v and their padding masks."""
    keys, heads_k, head_dim_v = (QUERIES, 4, 8) if packing == "qkv" else (KEYS, 2, 8 if packing else 6)
    q = draw(3, 5, 4, 8, device=device, dtype=dtype)
    k = draw(3, len(keys[0]), heads_k, 8, device=device, dtype=dtype)
    v = draw(3, len(keys[0]), heads_k, head_dim_v, device=device, dtype=dtype)
    return q, k, v, tokens(QUERIES, device), tokens(keys, device)


def assert_packed(unpadded, padded, mask, pad):
    """`unpadded` holds what `mask` marks in `padded`, both are leaves, and `pad` puts it back."""
    assert_equal(unpadded, padded[mask])
    for leaf in (unpadded, padded):
        assert leaf.is_leaf and leaf.requires_grad
    back = pad(unpadded)
    assert_equal(back, padded.detach() * mask.view(*mask.shape, *[1] * (padded.dim() - 2)))
    (gradient,) = torch.autograd.grad(back, unpadded, padded.detach())
    assert_equal(gradient, padded[mask])


def test_all_apart(device):
    q, k, v, queries, keys = problem(device)
    q.requires_grad_()
    qv = draw(3, 5, 4, 6, device=device)
    *unpadded, cu_q, cu_k, used_q, used_k, max_q, max_k, q1, k1, v1, qv1, out_pad, dq_pad, dk_pad = generate_qkv(
        q, k, v, queries, keys, qv
    )
    assert [cu_q.tolist(), cu_k.tolist(), max_q, max_k] == [[0, 2, 7, 7], [0, 3, 4, 6], 5, 3]
    assert used_q is None and used_k is None and cu_q.dtype == cu_k.dtype == torch.int32
    pads = [(dq_pad, queries), (dk_pad, keys), (dk_pad, keys), (out_pad, queries)]
    for x, packed, given, (pad, mask) in zip((q1, k1, v1, qv1), unpadded, (q, k, v, qv), pads, strict=True):
        assert_packed(packed, x, mask, pad)
        assert_equal(x.detach(), given.detach())


def test_keys_with_values(device):
    q, k, v, queries, keys = problem(device, "kv")
    q_unpad, kv_unpad, cu_q, cu_k, used_q, used_k, max_q, max_k, q1, kv, out_pad, dq_pad, dkv_pad = generate_qkv(
        q, k, v, queries, keys, kvpacked=True
    )
    assert [cu_q.tolist(), cu_k.tolist(), max_q, max_k, used_q, used_k] == [
        [0, 2, 7, 7],
        [0, 3, 4, 6],
        5,
        3,
        None,
        None,
    ]
    assert_packed(q_unpad, q1, queries, dq_pad)
    assert_packed(q_unpad, q1, queries, out_pad)
    assert_packed(kv_unpad, kv, keys, dkv_pad)
    assert_equal(q1.detach(), q)
    assert_equal(kv.detach(), torch.stack([k, v], dim=2))


def test_all_three(device):
    q, k, v, queries, keys = problem(device, "qkv")
    qkv_unpad, cu_seqlens, max_seqlen, qkv, out_pad, dqkv_pad = generate_qkv(q, k, v, queries, keys, qkvpacked=True)
    assert [cu_seqlens.tolist(), max_seqlen] == [[0, 2, 7, 7], 5]
    assert_packed(qkv_unpad, qkv, queries, dqkv_pad)
    assert_equal(qkv.detach(), torch.stack([q, k, v], dim=2))
    assert_equal(out_pad(qkv_unpad[:, 0].detach()), q * queries[..., None, None])


def test_without_masks_all_is_packed(device):
    q, k, v, *_ = problem(device)
    q_unpad, k_unpad, v_unpad, qv_unpad, cu_q, cu_k, _, _, max_q, max_k, *_, qv, pad_q, _, pad_k = generate_qkv(q, k, v)
    assert [cu_q.tolist(), cu_k.tolist(), max_q, max_k] == [[0, 5, 10, 15], [0, 4, 8, 12], 5, 4]
    assert qv_unpad is None and qv is None
    for x, packed, pad in ((q, q_unpad, pad_q), (k, k_unpad, pad_k), (v, v_unpad, pad_k)):
        assert_equal(packed.detach(), x.flatten(0, 1))
        assert_equal(pad(packed.detach()), x)


@pytest.mark.parametrize("kvpacked", [False, True])
@pytest.mark.parametrize("which", ["queries", "keys", "both"])
def test_unused_tokens_are_packed_but_do_not_count(which, kvpacked, device):
    q, k, v, queries, keys = problem(device, "kv")
    unused_q = tokens(UNUSED_QUERIES, device) if which != "keys" else None
    unused_k = tokens(UNUSED_KEYS, device) if which != "queries" else None
    results = generate_qkv(
        q, k, v, queries, keys, kvpacked=kvpacked, query_unused_mask=unused_q, key_unused_mask=unused_k
    )
    cu_q, cu_k, used_q, used_k, max_q, max_k = results[2:8] if kvpacked else results[4:10]
    if unused_q is None:
        assert used_q is None and cu_q.tolist() == [0, 2, 7, 7]
    else:
        assert [cu_q.tolist(), used_q.tolist(), max_q] == [[0, 4, 9, 10], [2, 5, 0], 5]
        assert used_q.dtype == torch.int32
        assert_packed(results[0], results[8] if kvpacked else results[10], queries | unused_q, results[-2])
    if unused_k is None:
        assert used_k is None and cu_k.tolist() == [0, 3, 4, 6]
    else:
        assert [cu_k.tolist(), used_k.tolist(), max_k] == [[0, 4, 7, 9], [3, 1, 2], 4]
        assert_packed(results[1], results[9] if kvpacked else results[11], keys | unused_k, results[-1])


@pytest.mark.parametrize("packing", ["", "kv", "qkv"])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(2, 1), softcap=2.0)], ids=str)
def test_attention_of_packed_tokens(options, packing, device):
    """Varlen attention of what is packed is attention_ref of what is padded, and so are the gradients."""
    lengths = dict(device=device, mode="third", zero_lengths=True)
    queries = generate_random_padding_mask(40, 7, **lengths)
    keys = queries if packing == "qkv" else generate_random_padding_mask(50, 7, **lengths)
    q, k, v = (
        draw(7, mask.shape[1], heads, 24, device=device, dtype=torch.bfloat16)
        for mask, heads in ((queries, 4), (keys, 4 if packing == "qkv" else 2), (keys, 4 if packing == "qkv" else 2))
    )
    results = generate_qkv(q, k, v, queries, keys, kvpacked=packing == "kv", qkvpacked=packing == "qkv")
    if packing == "qkv":
        qkv_unpad, cu_seqlens, max_seqlen, qkv, pad, dqkv_pad = results
        leaves, padded, pads = (qkv_unpad,), (qkv,), (dqkv_pad,)
        out = flash_attn_varlen_qkvpacked_func(qkv_unpad, cu_seqlens, max_seqlen, **options)
    elif packing == "kv":
        q_unpad, kv_unpad, cu_q, cu_k, _, _, max_q, max_k, q, kv, pad, *pads = results
        leaves, padded = (q_unpad, kv_unpad), (q, kv)
        out = flash_attn_varlen_kvpacked_func(q_unpad, kv_unpad, cu_q, cu_k, max_q, max_k, **options)
    else:
        *leaves, _, cu_q, cu_k, _, _, max_q, max_k, q, k, v, _, pad, dq_pad, dk_pad = results
        padded, pads = (q, k, v), (dq_pad, dk_pad, dk_pad)
        out = flash_attn_varlen_func(*leaves, cu_q, cu_k, max_q, max_k, **options)

    def reference(*inputs, **precision):
        if packing:
            inputs = [x for packed in inputs for x in (packed.unbind(2) if packed.dim() == 5 else [packed])]
        return attention_ref(*inputs, queries, keys, **options, **precision)

    dout = draw(*q.shape, device=device, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(out, leaves, dout[queries])
    exact = oracle.gradients(reference, [x.double() for x in padded], dout)
    plain = oracle.gradients(functools.partial(reference, upcast=False), padded, dout)
    assert_error_ratio(pad(out), exact[0], plain[0], name="out")
    for x, pad, *others in zip(gradients, pads, exact[2], plain[2], strict=True):
        assert_error_ratio(pad(x), *others, name="gradient")


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def sees(position, key, window=(-1, -1), sinks=0, chunk=0):
    """Whether a query at this position sees this key."""
    left, right = window
    if right >= 0 and key > position + right:
        return False
    if left >= 0 and key < position - left and key >= sinks:
        return False
    return not chunk or key // chunk == position // chunk


def hidden_keys(len_q, len_k, rows=None, **options):
    """True where one of `rows` queries, of which len_q are real, does not see one of len_k keys."""
    rows = len_q if rows is None else rows
    hidden = [not sees(i + len_k - len_q, j, **options) for i in range(rows) for j in range(len_k)]
    return torch.tensor(hidden, dtype=torch.bool).view(rows, len_k)


WINDOWS = [
    *(dict(window=window) for window in ((-1, -1), (-1, 0), (2, 0), (0, 3), (-1, 1), (3, -1), (0, 0), (40, 40))),
    *(dict(window=window, sinks=sinks) for window in ((1, 0), (0, 2), (2, -1), (-1, 0)) for sinks in (1, 3, 50)),
]
CHUNKS = [dict(chunk=chunk) for chunk in (1, 2, 3, 5, 100)]
SIZES = [(5, 5), (3, 8), (8, 3), (1, 6), (0, 4), (4, 0)]


def construct(seqlen_q, seqlen_k, *padding, window=None, sinks=0, chunk=0, device=None):
    if chunk:
        return construct_chunk_mask(seqlen_q, seqlen_k, chunk, *padding, device=device)
    return construct_local_mask(seqlen_q, seqlen_k, window, sinks, *padding, device=device)


@pytest.mark.parametrize("options", [*WINDOWS, *CHUNKS], ids=str)
@pytest.mark.parametrize("seqlen_q, seqlen_k", SIZES)
def test_mask_without_padding(seqlen_q, seqlen_k, options, device):
    mask = construct(seqlen_q, seqlen_k, **options, device=device)
    assert mask.device.type == device.type
    assert_equal(mask.cpu(), hidden_keys(seqlen_q, seqlen_k, **options))


PADDING = {  # query_padding_mask, key_padding_mask, key_leftpad
    "queries": (["xxxxx", "xx...", "....."], ["xxxxxx"] * 3, None),
    "keys": (["xxxxx"] * 3, ["xxxxxx", "xx....", "......"], None),
    "both": (["xxx..", "x....", "xxxxx"], ["xx....", "xxxxxx", "xxx..."], None),
    "leftpad": (["xxxxx"] * 3, ["xxxxxx"] * 3, [0, 2, 6]),
    "leftpad of padded keys": (["xxxxx", "xxx..", "x...."], ["xxxx..", "xxxxx.", "xx...."], [1, 2, 2]),
    "leftpad twice": (["xxxxx", "xxx.."], [".xxx..", "..xxxx"], [1, 2]),
    "padding first": (["..xxx", "....x"], ["...xxx", ".xxxxx"], None),
    "holes": (["x.xx.", ".x..x"], ["x..x.x", "xx.x.."], None),
}


def padding(name, device="cpu", dtype=torch.int32):
    queries, keys, leftpad = PADDING[name]
    leftpad = None if leftpad is None else torch.tensor(leftpad, dtype=dtype, device=device)
    return tokens(queries, device), tokens(keys, device), leftpad


def real_tokens(queries, keys, leftpad):
    """Which queries and keys are real."""
    if leftpad is not None:
        keys = keys & (torch.arange(keys.shape[1], device=keys.device) >= leftpad[:, None])
    return queries, keys


@pytest.mark.parametrize("options", [*WINDOWS, *CHUNKS], ids=str)
@pytest.mark.parametrize("name", PADDING)
@pytest.mark.cover(1)
def test_mask_with_padding(name, options, device):
    """Each entry is as if its real tokens stood alone; if padding comes last, rows of padding count on."""
    masks = padding(name, device)
    found = construct(5, 6, *masks, **options).cpu()
    assert found.shape == (len(masks[0]), 1, 5, 6)
    for (hidden,), queries, keys in zip(found, *(x.cpu() for x in real_tokens(*masks)), strict=True):
        len_q, len_k = int(queries.sum()), int(keys.sum())
        assert_equal(hidden[queries][:, keys], hidden_keys(len_q, len_k, **options))
        assert hidden[:, ~keys].all()
        if queries[:len_q].all():
            assert_equal(hidden[:, keys], hidden_keys(len_q, len_k, rows=5, **options))


@pytest.mark.parametrize("given", range(3), ids=["queries", "keys", "leftpad"])
@pytest.mark.parametrize("options", [WINDOWS[2], CHUNKS[1]], ids=str)
def test_what_is_left_out_of_the_padding(options, given, device):
    """None is a mask of all tokens, and no keys before the others."""
    masks = padding("leftpad of padded keys", device, torch.int64)
    everything = [torch.ones_like(masks[0]), torch.ones_like(masks[1]), torch.zeros_like(masks[2])]
    alone, expected = [None] * 3, list(everything)
    alone[given] = expected[given] = masks[given]
    assert_equal(construct(5, 6, *alone, **options), construct(5, 6, *expected, **options))


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def naive(q, k, v, masks, *, keep=None, dropout_p=0.0, bias=None, qv=None, softcap=0.0, rounded=None, **visible):
    """(out, P) of the real tokens of each entry on their own, in the type of q. `visible`: options of `sees`."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    probabilities = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    bias = torch.zeros_like(probabilities) if bias is None else bias.expand(probabilities.shape)
    keep = torch.ones_like(probabilities) if keep is None else keep
    for b, masks_of_b in enumerate(zip(*real_tokens(*masks), strict=True)):
        rows, cols = (mask.nonzero().flatten() for mask in masks_of_b)
        queries, keys, values = q[b, rows], k[b, cols], v[b, cols]
        if qv is not None:
            queries = torch.cat([queries, qv[b, rows]], dim=-1)
            keys = torch.cat([keys, values], dim=-1)
        scores = oracle.raw_scores(queries[None], keys[None], softcap=softcap)[0]
        hidden = hidden_keys(len(rows), len(cols), **visible).to(q.device)
        weights = oracle.masked_softmax(scores + bias[b][:, rows][..., cols], 1.0, hidden)
        dropped = weights * keep[b][:, rows][..., cols] / (1 - dropout_p)
        dropped = dropped if rounded is None else dropped.to(rounded).to(q.dtype)
        values = values.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        out[b, rows] = torch.einsum("hij,jhd->ihd", dropped, values)
        probabilities[b, :, rows[:, None], cols] = weights
    return out, probabilities


FACTORS = {
    "padding": [None, *PADDING],
    "heads": [(4, 4), (4, 2), (3, 1)],
    "head_dims": [(8, 8), (8, 3), (5, 12)],
    "visible": [{}, dict(window=(-1, 0)), dict(window=(2, 0)), dict(window=(1, 1), sinks=2), dict(chunk=2)],
    "bias": [None, "full", "of heads", "of columns"],
    "softcap": [0.0, 1.5],
    "dropout_p": [0.0, 0.3],
    "with_qv": [False, True],
    "descaled": [False, True],
    "precision": [{}, dict(upcast=False), dict(reorder_ops=True)],
    "rounded": [None, torch.bfloat16],
}


@pytest.mark.parametrize("case", cover(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_attention(case, device):
    """out, probabilities and all gradients of float64 tensors."""
    draw_here = functools.partial(draw, device=device)
    masks = None, None, None
    if case["padding"] is not None:
        masks = padding(case["padding"], device)
    batch = 3 if masks[0] is None else len(masks[0])
    (heads, heads_k), (head_dim, head_dim_v) = case["heads"], case["head_dims"]
    shape = batch, heads, 5, 6
    floats = dict(
        q=draw_here(batch, 5, heads, head_dim),
        k=draw_here(batch, 6, heads_k, head_dim),
        v=draw_here(batch, 6, heads_k, head_dim_v),
    )
    if case["with_qv"]:
        floats["qv"] = draw_here(batch, 5, heads, head_dim_v)
    if case["bias"]:
        bias_shape = {"full": shape, "of heads": (heads, 1, 1), "of columns": (6,)}[case["bias"]]
        floats["bias"] = draw_here(*bias_shape)
    keep = torch.rand(shape, device=device) > case["dropout_p"] if case["dropout_p"] else None
    names = ("q_descale", "k_descale", "v_descale") if case["descaled"] else ()
    descales = {name: torch.rand(batch, heads_k, device=device) + 0.5 for name in names}
    options = dict(softcap=case["softcap"], dropout_p=case["dropout_p"])
    visible = case["visible"]

    def ours(q, k, v, bias=None, qv=None):
        causal = visible.get("window") == (-1, 0)
        return attention_ref(
            q,
            k,
            v,
            *masks,
            bias,
            dropout_mask=keep,
            qv=qv,
            **descales,
            causal=causal,
            window_size=(-1, -1) if causal else visible.get("window", (-1, -1)),
            attention_chunk=visible.get("chunk", 0),
            sink_token_length=visible.get("sinks", 0),
            intermediate_dtype=case["rounded"],
            **options,
            **case["precision"],
        )

    def expected(q, k, v, bias=None, qv=None):
        def scaled(x, name):
            factors = descales[name].repeat_interleave(x.shape[2] // heads_k, dim=1)
            return x * factors[:, None, :, None]

        if descales:
            q, k, v = scaled(q, "q_descale"), scaled(k, "k_descale"), scaled(v, "v_descale")
            qv = None if qv is None else scaled(qv, "q_descale")
        full = [torch.ones(x.shape[:2], dtype=torch.bool, device=device) for x in (q, k)]
        real = (*full, None) if masks[0] is None else masks
        return naive(q, k, v, real, keep=keep, bias=bias, qv=qv, rounded=case["rounded"], **options, **visible)

    inputs = {name: x.requires_grad_() for name, x in floats.items()}
    found, exact = ours(**inputs), expected(**inputs)
    douts = [torch.randn_like(x) for x in exact]
    for name, one, other in zip(("out", "P"), found, exact, strict=True):
        assert one.dtype == torch.float64 and one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    gradients = [torch.autograd.grad(results, list(inputs.values()), douts) for results in (found, exact)]
    # Where P is rounded, so is its gradient, in an order of its own.
    tolerance = 1e-12 if case["rounded"] is None else 0.05
    for name, one, other in zip(inputs, *gradients, strict=True):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(3, 2), softcap=2.0)], ids=str)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 9), (4, 11), (11, 4)])
def test_attention_is_that_of_the_oracle(seqlen_q, seqlen_k, options, device):
    """Which knows nothing of this module; where a row sees no key, all is 0."""
    sizes = (seqlen_q, 6), (seqlen_k, 2), (seqlen_k, 2)
    q, k, v = (draw(2, *size, 8, device=device) for size in sizes)
    dout = torch.randn_like(q)
    found = oracle.gradients(functools.partial(attention_ref, **options), (q, k, v), dout)
    exact = oracle.gradients(functools.partial(oracle.attention, **options), (q, k, v), dout)
    torch.testing.assert_close((found[0], found[2]), (exact[0], exact[2]), rtol=1e-12, atol=1e-12)
    rows = exact[1].isfinite().double()
    torch.testing.assert_close(found[1].sum(-1), rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_torch(causal, device):
    q, k, v = (draw(2, 9, heads, 8, device=device) for heads in (4, 2, 2))
    found, _ = attention_ref(q, k, v, causal=causal)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_two_derivatives(device):
    q, k, v = (draw(1, seqlen, 2, 3, device=device).requires_grad_() for seqlen in (3, 4, 4))
    masks = tokens(["xx."], device), tokens(["xxx."], device)

    def attend(q, k, v):
        return attention_ref(q, k, v, *masks, causal=True, softcap=2.0)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradgradcheck(attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_precision(dtype, device):
    """upcast is float32 until the end; without it, either order of operations is about as good, and not the same."""
    q, k, v = (draw(2, 64, 4, 40, device=device, dtype=dtype) for _ in range(3))
    scales = {name: torch.rand(2, 4, device=device) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    attend = functools.partial(attention_ref, causal=True, softcap=4.0, **scales)
    exact = attend(q.double(), k.double(), v.double())
    upcast, queries, keys = (
        attend(q, k, v, **options) for options in ({}, dict(upcast=False), dict(upcast=False, reorder_ops=True))
    )
    in_float = attend(q.float(), k.float(), v.float())
    for i in range(2):
        assert upcast[i].dtype == queries[i].dtype == keys[i].dtype == dtype
        assert_equal(upcast[i], in_float[i].to(dtype))
        assert not torch.equal(in_float[i], exact[i].float())
        assert rms_error(queries[i], exact[i]) > rms_error(upcast[i], exact[i])
        assert_error_ratio(keys[i], exact[i], queries[i], at_most=3)
        assert not torch.equal(keys[i], queries[i])


@pytest.mark.parametrize("reorder_ops", [False, True])
def test_what_is_scaled(reorder_ops, device):
    """The smallest number becomes 0 if it is scaled: as a key, all keys are then alike."""
    q = torch.full((1, 1, 1, 40), 60000.0, dtype=torch.float16, device=device)
    k = torch.zeros(1, 2, 1, 40, dtype=torch.float16, device=device)
    k[:, 0] = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    _, probabilities = attention_ref(q, k, k, upcast=False, reorder_ops=reorder_ops)
    assert (probabilities.flatten().tolist() == [0.5, 0.5]) == reorder_ops


@pytest.mark.parametrize("upcast", [False, True])
def test_a_wider_bias_does_not_widen_the_result(upcast, device):
    q, k, v = (draw(1, 4, 2, 8, device=device, dtype=torch.bfloat16) for _ in range(3))
    bias = draw(4, 4, device=device, dtype=torch.float32)
    out, probabilities = attention_ref(q, k, v, attn_bias=bias, upcast=upcast)
    assert out.dtype == probabilities.dtype == torch.bfloat16


def test_padding_may_hold_anything(device):
    """NaN there changes neither results nor gradients, and padding has none."""
    masks = padding("leftpad of padded keys", device)
    q, k, v, qv = (draw(3, *shape, device=device) for shape in ((5, 4, 8), (6, 2, 8), (6, 2, 3), (5, 4, 3)))
    queries, keys = (x[..., None, None] for x in real_tokens(*masks))
    dout = draw(3, 5, 4, 3, device=device)

    def results(junk):
        inputs = (q, queries), (k, keys), (v, keys), (qv, queries)
        leaves = [torch.where(real, x, junk).requires_grad_() for x, real in inputs]
        q1, k1, v1, qv1 = leaves
        out, probabilities = attention_ref(q1, k1, v1, *masks, qv=qv1)
        return out, probabilities, *torch.autograd.grad(out, leaves, dout)

    clean, found = results(0.0), results(math.nan)
    for one, other in zip(found, clean, strict=True):
        assert_equal(one, other)
    out, probabilities, dq, dk, *_ = found
    assert not (out * ~queries).any() and not (probabilities * ~queries.movedim(1, 2)).any()
    assert not (dq * ~queries).any() and not (dk * ~keys).any()


def test_a_bias_may_hide_keys(device):
    """-inf is a key that is not seen; a row of it is 0, with no gradient."""
    q, k, v = (draw(1, 5, 2, 8, device=device).requires_grad_() for _ in range(3))
    hidden = construct_local_mask(5, 5, (-1, 0), device=device)
    hidden[3] = True
    bias = torch.zeros(5, 5, dtype=torch.float64, device=device).masked_fill_(hidden, -math.inf)
    out, probabilities = attention_ref(q, k, v, attn_bias=bias)
    assert not out[:, 3].any() and not probabilities[:, :, hidden].any()
    expected, _ = attention_ref(q, k, v, causal=True)
    assert_equal(out[:, :3], expected[:, :3])
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq[:, 3].any() and all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("shape", [(0, 4, 5, 1), (2, 0, 5, 1), (2, 4, 0, 1), (2, 4, 5, 0)], ids=str)
def test_attention_of_nothing(shape, device):
    batch, seqlen_q, seqlen_k, heads = shape
    q, k = draw(batch, seqlen_q, 2 * heads, 8, device=device), draw(batch, seqlen_k, heads, 8, device=device)
    masks = (torch.ones(x.shape[:2], dtype=torch.bool, device=device) for x in (q, k))
    scales = torch.ones(batch, heads, device=device)
    out, probabilities = attention_ref(q, k, k, *masks, q_descale=scales, causal=True, attention_chunk=2)
    assert out.shape == q.shape and not out.any() and probabilities.shape == (batch, 2 * heads, seqlen_q, seqlen_k)
    q_unpad, k_unpad, *_, pad_q, _, pad_k = generate_qkv(q, k, k)
    assert_equal(pad_q(q_unpad), q)
    assert_equal(pad_k(k_unpad), k)


# ---------------------------------------------------------------------------------------------------------------------
# Signatures, examples, errors


Q, K, V, MASK_Q, MASK_K = problem("cpu")
RANDOM = functools.partial(generate_random_padding_mask, 5, 3, "cpu")
QKV = functools.partial(generate_qkv, Q, K, V)
SQUARE = functools.partial(generate_qkv, Q, Q, Q, qkvpacked=True)
LOCAL = functools.partial(construct_local_mask, 5, 4)
REF = functools.partial(attention_ref, Q, K, V)
ERRORS = {
    "negative seqlen": (lambda: generate_random_padding_mask(-1, 3, "cpu"), ValueError, "max_seqlen must be at least"),
    "batch of 1.5": (lambda: generate_random_padding_mask(5, 1.5, "cpu"), TypeError, "batch_size must be an integer"),
    "mode": (lambda: RANDOM(mode="half"), ValueError, "mode must be 'full', 'random' or 'third', found 'half'"),
    "zero_lengths": (lambda: RANDOM(zero_lengths=3), TypeError, "zero_lengths must be a bool"),
    "integers": (lambda: generate_qkv(Q.int(), K, V), TypeError, "q must have dtype"),
    "two types": (lambda: generate_qkv(Q, K.float(), V), TypeError, "k must have dtype torch.float64, found torch.fl"),
    "no values": (lambda: generate_qkv(Q, K, None), TypeError, "v must be a torch.Tensor"),
    "packed": (lambda: generate_qkv(Q[0], K, V), ValueError, "q must have 4 dimensions"),
    "batches differ": (lambda: generate_qkv(Q, K[:2], V), ValueError, r"k must have shape \(3, \*, \*, 8\)"),
    "fewer values": (lambda: generate_qkv(Q, K, V[:, :3]), ValueError, r"v must have shape \(3, 4, 2, \*\), found"),
    "heads": (lambda: generate_qkv(Q[:, :, :3], K, V), ValueError, "k's number of heads must be a divisor of q's, 3"),
    "no head_dim": (lambda: generate_qkv(Q[..., :0], K[..., :0], V), ValueError, "head_dim must be at least 1"),
    "qv": (lambda: QKV(qv=Q), ValueError, r"qv must have shape \(3, 5, 4, 6\), found \(3, 5, 4, 8\)"),
    "mask of integers": (lambda: QKV(MASK_Q.int()), TypeError, "query_padding_mask must have dtype torch.bool"),
    "mask of others": (lambda: QKV(MASK_K), ValueError, r"query_padding_mask must have shape \(3, 5\), found \(3, 4\)"),
    "mask of keys": (lambda: QKV(MASK_Q, MASK_Q), ValueError, "key_padding_mask must have shape"),
    "unused queries": (lambda: QKV(query_unused_mask=MASK_K), ValueError, "query_unused_mask must have shape"),
    "unused keys": (lambda: QKV(key_unused_mask=MASK_Q), ValueError, "key_unused_mask must have shape"),
    "mask elsewhere": (lambda: QKV(MASK_Q.to("meta")), ValueError, "query_padding_mask must be on cpu"),
    "kvpacked": (lambda: QKV(kvpacked=None), TypeError, "kvpacked must be a bool"),
    "packed values of another size": (lambda: QKV(kvpacked=True), ValueError, r"v must have shape \(3, 4, 2, 8\)"),
    "packed keys of another size": (
        lambda: generate_qkv(Q, K, K, qkvpacked=True),
        ValueError,
        r"k must have shape \(3, 5, 4, 8\)",
    ),
    "qv with packing": (
        lambda: generate_qkv(Q, K, K, qv=Q, kvpacked=True),
        ValueError,
        "qv must be None with kvpacked or qkvpacked",
    ),
    "packed twice": (lambda: SQUARE(kvpacked=True), ValueError, "kvpacked must be False with qkvpacked, found True"),
    "unused and qkvpacked": (
        lambda: SQUARE(query_unused_mask=~MASK_Q),
        ValueError,
        "query_unused_mask must be None with qkvpacked",
    ),
    "padding differs": (lambda: SQUARE(MASK_Q), ValueError, "key_padding_mask must equal query_padding_mask"),
    "window": (lambda: LOCAL((1,)), ValueError, r"window_size must be two integers \(left, right\), found \(1,\)"),
    "sinks": (lambda: LOCAL(sink_token_length=-1), ValueError, "sink_token_length must be at least 0, found -1"),
    "seqlen_q": (lambda: construct_local_mask(-1, 4), ValueError, "seqlen_q must be at least 0, found -1"),
    "seqlen_k": (lambda: construct_local_mask(4, 4.0), TypeError, "seqlen_k must be an integer, found float"),
    "no chunk": (lambda: construct_chunk_mask(5, 4, 0), ValueError, "attention_chunk must be at least 1, found 0"),
    "padding of a seqlen": (
        lambda: LOCAL(query_padding_mask=MASK_K),
        ValueError,
        r"query_padding_mask must have shape \(\*, 5\), found",
    ),
    "padding of two batches": (
        lambda: LOCAL(query_padding_mask=MASK_Q, key_padding_mask=MASK_K[:2]),
        ValueError,
        r"have shape \(3, 4\)",
    ),
    "leftpad of floats": (lambda: LOCAL(key_leftpad=torch.zeros(3)), TypeError, "key_leftpad must have dtype torch.in"),
    "leftpad of a number": (
        lambda: construct_chunk_mask(5, 4, 2, key_leftpad=torch.tensor(1)),
        ValueError,
        "key_leftpad must have shape",
    ),
    "ref: values": (lambda: attention_ref(Q, K, V[:, 1:]), ValueError, r"v must have shape \(3, 4, 2, \*\)"),
    "ref: padding": (lambda: REF(MASK_Q[:1]), ValueError, r"query_padding_mask must have shape \(3, 5\)"),
    "ref: bias": (
        lambda: REF(attn_bias=torch.zeros(3, 2, 5, 4)),
        ValueError,
        r"attn_bias must broadcast to shape \(3, 4, 5, 4\), found \(3, 2, 5, 4\)",
    ),
    "ref: bias of five": (lambda: REF(attn_bias=torch.zeros(1, 1, 1, 1, 1)), ValueError, "attn_bias must broadcast"),
    "ref: mask as a bias": (lambda: REF(attn_bias=MASK_K), TypeError, "attn_bias must have dtype"),
    "ref: dropout_p": (lambda: REF(dropout_p=1.0), ValueError, "dropout_p must be at least 0 and less than 1, found"),
    "ref: no dropout_mask": (lambda: REF(dropout_p=0.1), ValueError, "dropout_mask must be given with dropout_p = 0.1"),
    "ref: dropout_mask": (
        lambda: REF(dropout_mask=MASK_K),
        ValueError,
        r"dropout_mask must have shape \(3, 4, 5, 4\), found \(3, 4\)",
    ),
    "ref: q_descale": (lambda: REF(q_descale=torch.ones(3, 4)), ValueError, r"q_descale must have shape \(3, 2\)"),
    "ref: k_descale": (lambda: REF(k_descale=torch.ones(3)), ValueError, r"k_descale must have shape \(3, 2\)"),
    "ref: v_descale": (
        lambda: REF(v_descale=torch.ones(3, 2).half()),
        TypeError,
        "v_descale must have dtype torch.float32",
    ),
    "ref: chunk": (lambda: REF(attention_chunk=-1), ValueError, "attention_chunk must be at least 0, found -1"),
    "ref: softcap": (lambda: REF(softcap=None), TypeError, "softcap must be a real number"),
    "ref: causal": (lambda: REF(causal=MASK_Q), TypeError, "causal must be a bool"),
    "ref: upcast": (lambda: REF(upcast="no"), TypeError, "upcast must be a bool"),
    "ref: reorder_ops": (lambda: REF(reorder_ops=None), TypeError, "reorder_ops must be a bool"),
    "ref: window": (lambda: REF(window_size=(1.5, 0)), ValueError, "window_size must be two integers"),
    "ref: sinks": (lambda: REF(sink_token_length=1.0), TypeError, "sink_token_length must be an integer"),
    "ref: intermediate_dtype": (
        lambda: REF(intermediate_dtype="fp8"),
        TypeError,
        "intermediate_dtype must be a torch.dtype or None",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    call, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        call()
