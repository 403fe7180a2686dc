"""Sinks, key ranges and what becomes key ranges, in the kernels: on a GPU, or emulated with --emulate.

Cases are in 16 bits and have no feature that kernels lack. Without kernels they test the reference.
"""

import math

import oracle
import pytest
import torch
from cases import Case, cover, params, uncovered
from compare import assert_error_ratio
from features import Featured

from flash_attn import flash_attn_func, flash_attn_with_kvcache, masks
from flash_attn._ops import flash_attn_features as with_features
from flash_attn._reference.attention.options import CacheOptions, Features, Options

FACTORS = dict(
    lengths=[(60, 60), (200, 333), (333, 200), (1, 300), (5, 300), (40, 1)],
    heads=[(4, 4), (6, 2), (4, 1)],
    head_dim=[64, 128, 40, 50],
    dtype=["bf16", "fp16"],
    causal=[False, True, "entries"],
    window=[(-1, -1), (20, -1), (70, 9)],
    softcap=[0.0, 2.0],
    alibi=["", "bh"],
    dropout_p=[0.0, 0.17],
    sink=["", "fp32", "same"],
    ranges=["", "2", "2h"],
    chunk=[0, 48],
    seqused_q=[False, True],
    seqused_k=[False, True],
    varlen=[False, True],
    packing=["", "kv"],
    dlse=[False, True],
    portable=[False, True],
)


def possible(row):
    return not row["seqused_q"] or (not row["sink"] and not row["alibi"])


ROWS = cover(FACTORS, valid=possible)


def make(lengths, heads, causal, portable, **rest):
    return Featured(4, *lengths, *heads, causal=causal is True, entries_causal=causal == "entries", **rest)


def test_sample_has_every_pair_of_values():
    assert not uncovered(ROWS, FACTORS, valid=possible, tied=("seqused_q", "sink", "alibi"))


@pytest.mark.parametrize("case, portable", [(make(**row), row["portable"]) for row in ROWS], ids=str)
@pytest.mark.same_on_cpu("portable", "seqlen_q", "seqlen_k", "heads", "heads_k", "head_dim", "dtype", "deterministic")
def test_sample(case, portable, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    case.check(device)


# ---------------------------------------------------------------------------------------------------------------------
# Masks that people use, in sequences of several tiles

SEQLEN = 700
MASKS = {  # the same for all entries and heads, or not
    "documents": masks.documents(torch.tensor([0, 90, 91, 350, 512, 700]), SEQLEN),
    "documents of heads": torch.cat(
        [masks.documents(torch.tensor(x), SEQLEN) for x in ([0, 300, 700], [0, 699, 700])], 1
    ).repeat(1, 2, 1, 1),
    "prefixes": masks.prefix_lm(torch.tensor([30, 600]), SEQLEN),
    "chunks": masks.chunks(128, SEQLEN),
    "rows without keys": masks.chunks(128, SEQLEN) * (torch.arange(SEQLEN) % 150 < 100)[:, None],
    "one for all rows": torch.tensor([130, 260]).int().view(1, 1, 1, 2),
    "backwards": masks.chunks(100, SEQLEN).flip(2),
}


def inputs_of(case, device):
    *inputs, _ = case.tensors(device)
    return inputs


def assert_is_attention(out, lse, inputs, ranges, **options):
    ranges = ranges.expand(-1, -1, inputs[0].shape[1], -1)
    seen = masks.to_bool(ranges, inputs[1].shape[1])
    exact, plain = (oracle.attention(*(x.to(t) for x in inputs), seen=seen, **options) for t in (torch.double, None))
    assert_error_ratio(out, exact[0], plain[0], name="out")
    assert_error_ratio(lse, exact[1], plain[1], plus=1e-3, name="lse")


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("heads_k", [4, 1])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.same_on_cpu("portable", "heads_k")
def test_masks(name, heads_k, portable, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    inputs = inputs_of(Case(seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads_k=heads_k), device)
    ranges, sink = MASKS[name].to(device), torch.tensor([0.5, -1, 2, 0], device=device)
    assert_is_attention(*flash_attn_func(*inputs, key_ranges=ranges, return_lse=True), inputs, ranges)
    results = flash_attn_func(*inputs, key_ranges=ranges, learnable_sink=sink, causal=True, return_lse=True)
    assert_is_attention(*results, inputs, ranges, learnable_sink=sink, causal=True)


@pytest.mark.parametrize("seqlen_q", [3, 300])
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("head_dim", [96, 192, 256])
@pytest.mark.cover(2)
def test_head_dims(head_dim, portable, seqlen_q, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    inputs = inputs_of(Case(seqlen_q=seqlen_q, seqlen_k=300, heads_k=2, head_dim=head_dim), device)
    ranges, sink = masks.documents(torch.tensor([0, 90, 91, 300]), 300)[:, :, -seqlen_q:].to(device), torch.randn(4)
    results = flash_attn_func(*inputs, key_ranges=ranges, learnable_sink=sink.to(device), return_lse=True)
    assert_is_attention(*results, inputs, ranges, learnable_sink=sink.to(device))


@pytest.mark.sm90
@pytest.mark.parametrize("head_dim, seqlen_q, seqlen_k", [(64, 2100, 2100), (128, 1000, 16400)])
def test_tiles_for_long_sequences(head_dim, seqlen_q, seqlen_k, device):
    inputs = inputs_of(Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=2, head_dim=head_dim), device)
    row = torch.arange(seqlen_q, device=device)
    first = row * seqlen_k // seqlen_q // 300 * 300
    ranges = torch.stack([first, first + 777 + row % 5], dim=-1).int().view(1, 1, -1, 2)
    results = flash_attn_func(*inputs, key_ranges=ranges, return_lse=True)
    assert_is_attention(*results, inputs, ranges)


@pytest.mark.parametrize("seqlen_q", [2, 200])
@pytest.mark.parametrize("portable", [False, True])
def test_keys_that_no_row_sees_may_be_nan(seqlen_q, portable, device, monkeypatch):
    """Whether in a block of their own, or beside keys that rows see."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q, k, v = inputs_of(Case(seqlen_q=seqlen_q, seqlen_k=500), device)
    first, end = 133, 290
    ranges = torch.tensor([first, end], device=device).int().view(1, 1, 1, 2)
    expected = flash_attn_func(q, k[:, first:end], v[:, first:end])
    for x in (k, v):
        x[:, :first] = x[:, end:] = math.nan
    torch.testing.assert_close(flash_attn_func(q, k, v, key_ranges=ranges), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 150])
def test_sinks_of_any_size(seqlen_q, portable, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    inputs = inputs_of(Case(seqlen_q=seqlen_q, seqlen_k=90, heads_k=2), device)
    sink = torch.tensor([math.inf, 1e4, -1e4, -math.inf], device=device)
    out, lse = flash_attn_func(*inputs, learnable_sink=sink, causal=True, return_lse=True)
    plain, plain_lse = flash_attn_func(*inputs, causal=True, return_lse=True)
    empty = max(0, seqlen_q - 90)
    assert (out[:, :, :2] == 0).all() and (lse[:, :2] == sink[:2, None]).all()
    assert torch.equal(out[:, :, 2:], plain[:, :, 2:]) and torch.equal(lse[:, 2:, empty:], plain_lse[:, 2:, empty:])
    assert (lse[:, 2, :empty] == -1e4).all() and (lse[:, 3, :empty] == math.inf).all()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

CACHE_FACTORS = dict(
    seqlen_q=[1, 3, 70],
    heads=[(4, 4), (8, 2)],
    head_dim=[64, 40],
    sink=[False, True],
    ranges=["", "all", "heads"],
    chunk=[0, 30],
    causal=[False, True, "entries"],
    window=[(-1, -1), (50, 3)],
    page=[0, 16, 24],
    new=[0, 3],
    leftpad=[False, True],
    num_splits=[0, 1, 3],
    bias=["", "all", "rows", "bool"],
    portable=[False, True],
)


def cache_possible(row):
    return not (row["page"] and row["leftpad"])


@pytest.mark.parametrize("row", params(cover(CACHE_FACTORS, valid=cache_possible)))
def test_decoding(row, device, monkeypatch):
    """The keys of the cache that an entry does not use are NaN."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(row["portable"])))
    capacity, dtype, new, (heads, heads_k) = 240 if row["page"] else 237, torch.bfloat16, row["new"], row["heads"]
    lengths, pads = [7, 200, 111], [0, 20, 111] if row["leftpad"] else [0, 0, 0]

    def draw(*shape):
        return torch.randn(*shape, row["head_dim"], device=device).to(dtype)

    q, added = draw(3, row["seqlen_q"], heads), [draw(3, new, heads_k) for _ in "kv"]
    caches = [draw(3, capacity, heads_k) for _ in "kv"]
    full = [
        torch.cat(
            [
                x[b, pad:length] if new == 0 else torch.cat([x[b, pad:length], y[b]])
                for b, (pad, length) in enumerate(zip(pads, lengths, strict=True))
            ]
        )
        for x, y in zip(caches, added, strict=True)
    ]
    counts = [length + new - pad for length, pad in zip(lengths, pads, strict=True)]
    for x in caches:
        for b, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
            x[b, :pad] = x[b, length:] = math.nan

    options = dict(causal=row["causal"] is True, window_size=row["window"])
    same = dict(attention_chunk=row["chunk"])
    sink = torch.randn(heads, device=device) if row["sink"] else None
    ranges = None
    if row["ranges"]:
        sizes = (3, heads if row["ranges"] == "heads" else 1, row["seqlen_q"], 2)
        ranges = torch.randint(-20, capacity, sizes, device=device).sort(-1).values.int()
    bias = None
    if row["bias"]:
        sizes = {"all": (3, heads, row["seqlen_q"]), "rows": (1, 1, row["seqlen_q"]), "bool": (3, 1, 1)}[row["bias"]]
        bias = torch.randn(*sizes, capacity, device=device)
        bias = bias < 1 if row["bias"] == "bool" else bias
        same["attn_bias"] = bias.expand(3, -1, -1, -1)
    flags = [True, False, True] if row["causal"] == "entries" else [options["causal"]] * 3
    if row["causal"] == "entries":
        options["causal"] = torch.tensor(flags, device=device)
    addresses = dict(cache_leftpad=torch.tensor(pads, dtype=torch.int32, device=device)) if row["leftpad"] else {}
    if row["page"]:
        caches = [x.reshape(-1, row["page"], *x.shape[2:]) for x in caches]
        addresses["block_table"] = torch.arange(len(caches[0]), device=device).view(3, -1).int()
    out, lse = flash_attn_with_kvcache(
        q,
        *caches,
        *(added if new else (None, None)),
        cache_seqlens=torch.tensor(lengths, device=device).int(),
        num_splits=row["num_splits"],
        return_softmax_lse=True,
        learnable_sink=sink,
        key_ranges=ranges,
        **options,
        **same,
        **addresses,
    )

    starts = [sum(counts[:b]) for b in range(3)]
    keys = [slice(a, a + n) for a, n in zip(starts, counts, strict=True)]
    rows = [slice(b * row["seqlen_q"], (b + 1) * row["seqlen_q"]) for b in range(3)]

    def expected(to):
        return oracle.featured_attention(
            *(x.to(to) for x in (q.flatten(0, 1), *full)),
            rows,
            keys,
            causal=flags,
            window_size=row["window"],
            key_ranges=ranges if ranges is None else lambda b, _: ranges[b],
            attn_bias=bias if bias is None else lambda b, _: same["attn_bias"][b],
            attention_chunk=row["chunk"],
            learnable_sink=sink if sink is None else sink.to(to),
        )

    exact, plain = expected(torch.double), expected(dtype)
    assert_error_ratio(out.flatten(0, 1), exact[0], plain[0], name="out")
    assert_error_ratio(lse.transpose(0, 1).flatten(1), exact[1], plain[1], plus=1e-3, name="lse")


# ---------------------------------------------------------------------------------------------------------------------
# What kernels take

Q, V = torch.zeros(2, 8, 4, 64), torch.zeros(2, 8, 4, 64)
NUMBERS = torch.zeros(2, dtype=torch.int32)
PLAIN, CACHED = Options(1.0, -1, -1), CacheOptions(1.0, -1, -1)
SINK = Features(learnable_sink=torch.zeros(4))
RANGES = SINK._replace(key_ranges=torch.zeros(1, 1, 8, 2).int(), row_max=True)
CALLS = {  # what of a call is beyond kernels -> its arguments
    "": (
        Q,
        V[..., :32],
        PLAIN,
        RANGES._replace(attention_chunk=3, causal=NUMBERS, attn_bias=torch.zeros(2, 1, 1, 8, 8)),
    ),
    "attn_bias with one key": (Q, V, PLAIN, SINK._replace(attn_bias=torch.zeros(1, 1, 1, 1, 1))),
    "attn_bias of dtype torch.float64": (Q, V, PLAIN, SINK._replace(attn_bias=torch.zeros(1, 1, 1, 1, 8).double())),
    "key_ranges with two intervals": (Q, V, PLAIN, Features(key_ranges=torch.zeros(1, 1, 8, 4).int())),
    "seqused_q with learnable_sink": (Q, V, PLAIN, SINK._replace(seqused_q=NUMBERS)),
    "seqused_q with alibi_slopes": (Q, V, PLAIN._replace(alibi_slopes=torch.zeros(4)), Features(seqused_q=NUMBERS)),
    "causal as a tensor with rotary_cos": (Q, V, CACHED._replace(rotary_cos=Q), Features(causal=NUMBERS)),
    "head dims 64 of keys and 520 of values": (Q, torch.zeros(2, 8, 4, 520), PLAIN, SINK),
}


@pytest.mark.parametrize("says", CALLS)
def test_what_is_beyond_kernels(says):
    assert with_features.beyond_kernels(*CALLS[says]) == ([says] if says else [])


def test_wide_heads_are_beyond_kernels():
    narrow, wide, widest = (torch.zeros(1, 2, 1, head_dim) for head_dim in (256, 512, 520))
    assert not with_features.beyond_kernels(wide, wide, PLAIN, SINK)
    assert with_features.beyond_kernels(narrow, widest, PLAIN, SINK) == ["head dims 256 of keys and 520 of values"]
    assert not with_features.beyond_dmask_kernels(narrow)
    assert with_features.beyond_dmask_kernels(wide) == ["head dims 512 of keys and 512 of values"]
