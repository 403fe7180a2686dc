"""Attention with features beyond flash-attn 2.8: sinks, biases, intervals, lengths, and head dims."""

import dataclasses
import functools
import math

import numpy as np
import oracle
import pytest
import torch
from attention_calls import Calling, assert_same_with_ranges
from cache_cases import CacheCase
from cases import Case, cover, params, uncovered
from compare import assert_error_ratio, assert_same_but_for_rounding
from features import BIASES, GROUPED, Featured

from flash_attn import (
    _library,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    masks,
)
from flash_attn._ops import flash_attn as flash_attn_ops
from flash_attn._ops import flash_attn_features as with_features
from flash_attn._reference.attention.options import CacheOptions, Features, Options
from flash_attn._reference.attention.score_modifiers import Scores

FACTORS = dict(
    lengths=[(60, 60), (50, 130), (130, 50), (1, 70), (33, 1)],
    heads=[(4, 4), (6, 2), (4, 1)],
    head_dims=[(64, 0), (48, 32), (32, 64), (257, 0), (320, 64)],
    dtype=["fp16", "bf16", "fp32"],
    causal=[False, True, "entries"],
    window=[(-1, -1), (20, -1), (7, 9)],
    softcap=[0.0, 2.0],
    alibi=["", "bh"],
    dropout_p=[0.0, 0.17],
    deterministic=[False, True],
    scale_q=[1.0, 4.0],
    sink=["", "fp32", "same"],
    bias=["", *BIASES],
    ranges=["", "2", "2h", "4", "4h"],
    chunk=[0, 16, 1000],
    seqused_q=[False, True],
    seqused_k=[False, True],
    varlen=[False, True],
    packing=["", "kv", "qkv"],
    dlse=[False, True],
    max_logit=[False, True],
)
TIED = "lengths", "heads", "head_dims", "packing", "varlen", "bias"


def possible(row):
    square = row["lengths"][0] == row["lengths"][1] and row["heads"] == (4, 4)
    fits = (square or row["packing"] != "qkv") and (row["head_dims"][1] == 0 or not row["packing"])
    return fits and not (row["varlen"] and row["bias"] in GROUPED)


def make(lengths, heads, head_dims, causal, **rest):
    entries = causal == "entries"
    return Featured(
        4,
        *lengths,
        *heads,
        head_dims[0],
        head_dim_v=head_dims[1],
        causal=causal is True,
        entries_causal=entries,
        **rest,
    )


ROWS = cover(FACTORS, valid=possible)


def test_sample_has_every_pair_of_values():
    assert not uncovered(ROWS, FACTORS, valid=possible, tied=TIED)


@pytest.mark.parametrize("case", params(make(**row) for row in ROWS))
@pytest.mark.same_on_cpu("seqlen_q", "seqlen_k", "heads", "heads_k", "head_dim", "head_dim_v", "dtype", "deterministic")
def test_sample(case, device):
    case.check(torch.device(device))


# Features where several thread blocks share a block of keys (FEW_BLOCKS_OF_KEYS in test_flash_attn.py).
FEW_KEYS = FACTORS | dict(
    lengths=[(1100, 77), (700, 130), (64, 20)], heads=[(2, 2), (6, 1)], dtype=["fp16", "bf16"], packing=["", "kv"]
)


@pytest.mark.parametrize("case", params(make(**row) for row in cover(FEW_KEYS, valid=possible)))
@pytest.mark.same_on_cpu("case")
def test_few_keys(case, device):
    case.check(torch.device(device))


# ---------------------------------------------------------------------------------------------------------------------
# Two key ranges for each row, of which kernels take one at a time

TWO_RANGES = FACTORS | dict(
    lengths=[(60, 60), (50, 130), (130, 50), (1, 70)],
    head_dims=[(64, 0), (48, 32)],
    dtype=["fp16", "bf16"],
    bias=["", "all", "entries", "keys", "first of groups", "bool", "bool keys"],
    ranges=["4", "4h"],
    seqused_q=[False],
)


def two_calls(monkeypatch):
    """A list that gets an item for each such call."""
    calls, call = [], with_features._merged
    monkeypatch.setattr(with_features, "_merged", lambda *args: calls.append(args) or call(*args))
    return calls


@pytest.mark.parametrize("case", params(make(**row) for row in cover(TWO_RANGES, valid=possible)))
@pytest.mark.same_on_cpu("seqlen_q", "seqlen_k", "heads", "heads_k", "head_dim", "head_dim_v", "dtype", "deterministic")
def test_two_ranges(case, device, monkeypatch):
    """Without kernels the test pretends that there are some, so that the call is divided all the same."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: True)
    calls = two_calls(monkeypatch)
    case.check(torch.device(device))
    assert len(calls) == 1


@pytest.mark.parametrize("beyond", [dict(dtype="fp32"), dict(bias="one"), dict(head_dim=520), dict(ranges="2")])
def test_calls_that_are_not_divided(beyond, device, monkeypatch):
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: x.is_cuda)
    calls = two_calls(monkeypatch)
    dataclasses.replace(Featured(batch=2, seqlen_q=9, seqlen_k=30, dtype="bf16", ranges="4"), **beyond).check(device)
    assert not calls


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("lengths", ["tensor", "int", "full"])
@pytest.mark.parametrize("rotary, interleaved", [(0, True), (0.5, True), (1, False)])
def test_two_ranges_of_a_cache(rotary, interleaved, lengths, page, device, monkeypatch):
    """Both calls see what is appended."""
    new = 3 * (lengths != "full")
    options = dict(rotary=rotary * (new > 0), interleaved=interleaved, lengths=lengths, page=page)
    case = CacheCase(batch=3, seqlen_q=3, seqlen_k=96, heads_k=2, dtype="bf16", seqlen_new=new, leftpad=True, **options)
    features = dict(key_ranges=torch.randint(-3, 100, (3, 4, 3, 4), dtype=torch.int32, device=device))
    features |= dict(learnable_sink=torch.randn(4, device=device), return_softmax_lse=True, return_max_logit=True)
    calls, results = two_calls(monkeypatch), []
    for divided in (False, True):
        monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x, divided=divided: divided)
        arguments = case.arguments(device)
        if lengths == "tensor":
            arguments["cache_seqlens"][1] = -1
            arguments["cache_leftpad"][1] = 0
        found = flash_attn_with_kvcache(**arguments, **features)
        results.append((*found, arguments["k_cache"], arguments["v_cache"]))
        assert len(calls) == divided
    (expected, *exact, k_cache, v_cache), (out, *numbers, new_k, new_v) = results
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(numbers, exact, rtol=1e-2 if rotary else 1e-4, atol=2e-2 if rotary else 1e-4)
    torch.testing.assert_close([new_k, new_v], [k_cache, v_cache], rtol=0, atol=0, equal_nan=True)


def test_ranges_that_share_no_key(device):
    """Each key that a row sees is in one of them: of random bounds, some equal, reversed or beyond the keys."""
    ranges = torch.randint(-3, 13, (1, 1, 4000, 4), dtype=torch.int32, device=device)
    first, second = (masks.to_bool(each, 10) for each in with_features.disjoint(ranges))
    assert torch.equal(first | second, masks.to_bool(ranges, 10))
    assert not (first & second).any()
    whole = torch.tensor([-(2**31), 2**31 - 1, 2, 5], dtype=torch.int32, device=device)
    assert [x.tolist() for x in with_features.disjoint(whole)] == [[-(2**31), 2**31 - 1], [2, 2]]


SINKS = {"-inf": -math.inf, "+inf": math.inf, "finite": 0.5, "each": None}
EXTRAS = {  # beside two ranges of each row
    "nothing": {},
    "bias": dict(bias="all", bias_dtype="fp32"),
    "bias in tiles": dict(bias="all"),
    "softcap": dict(softcap=2.0),
    "chunks": dict(chunk=40),
    "entries": dict(entries_causal=True, seqused_k=True),
    "packed": dict(varlen=True),
    "odd": dict(bias="all", head_dim=111, seqlen_q=65, seqlen_k=187, heads_k=2, deterministic=True),
}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_sinks_of_two_ranges(extra, sink, device, monkeypatch):
    """Every kind of sink, in rows that see both ranges, one, or none; ranges that touch and that overlap."""
    options = dict(seqlen_q=40, seqlen_k=90, heads_k=4, dtype="bf16", ranges="4", sink="fp32", dlse=True)
    case = Featured(**options | EXTRAS[extra])
    rows, keys, (tensors, differentiable, others, dout, lengths) = case.problem(torch.device(device))
    ranges = others["key_ranges"]
    ranges[..., 3::9, :] = 0  # nothing
    ranges[..., 4::9, :] = torch.tensor([3, 20, 20, 31], dtype=torch.int32)  # ranges that touch
    ranges[..., 5::9, :] = torch.tensor([3, 25, 9, 31], dtype=torch.int32)  # ranges that overlap
    given = SINKS[sink]
    values = [-math.inf, math.inf, 0.5, -3.0] if given is None else [given] * 4
    differentiable["learnable_sink"] = torch.tensor(values, device=device)
    results = []
    for divided in (True, False):
        monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x, divided=divided: divided)
        leaves = [x.detach().requires_grad_() for x in (*tensors, *differentiable.values())]
        out, lse = case.attend(*leaves, lengths=lengths, **others)
        dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(lse).masked_fill(lse.isinf(), 0)
        results.append((out, lse, *torch.autograd.grad([out, lse], leaves, [dout, dlse])))
    (out, lse, *grads), (exact_out, exact_lse, *exact_grads) = results
    torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=1e-4)
    for found, expected in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert found.isfinite().all() == expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=2**-5, atol=2**-5 * expected.abs().max().clamp(min=1).item())
    closed = torch.tensor(values, device=device) == math.inf
    assert (lse.movedim(-2, 0)[closed] == math.inf).all()


@pytest.mark.parametrize("level", [-1e4, -1e9, "lowest"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_buried_rows_of_two_ranges(bias_dtype, level, device, monkeypatch):
    """A range counts by its number of keys, however large a bias they all share."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: True)
    q, k, v, dout = Case(batch=1, seqlen_q=20, seqlen_k=70, dtype="bf16", scale_q=1e-3).tensors(device)
    ranges = torch.tensor([0, 7, 9, 70], dtype=torch.int32, device=device).expand(1, 1, 20, 4)
    number = torch.finfo(bias_dtype).min if level == "lowest" else level
    results = []
    for bias in (None, torch.full((1, 1, 20, 70), number, device=device, dtype=bias_dtype)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn_func(*leaves, attn_bias=bias, key_ranges=ranges, return_lse=True)
        results.append((out, *torch.autograd.grad(out, leaves[2], dout)))
    torch.testing.assert_close(*results, rtol=2**-6, atol=2**-6)
    expected = bias.float().flatten()[0] + math.log(68)
    torch.testing.assert_close(lse, expected.expand_as(lse), rtol=1e-6, atol=1e-2)


NOT_A_NUMBER = {  # what is done to q, k, v and the sink
    "q": lambda q, k, v, sink: q[0, 40].fill_(math.nan),
    "k of the first range": lambda q, k, v, sink: k[0, 2].fill_(math.nan),
    "k of the second range": lambda q, k, v, sink: k[0, 38].fill_(math.inf),
    "v of a key that no row sees": lambda q, k, v, sink: v[0, 69].fill_(math.nan),
    "sink": lambda q, k, v, sink: sink[1].fill_(math.inf),
}


@pytest.mark.parametrize("name", NOT_A_NUMBER)
def test_what_is_no_number_stays_none(name, device, monkeypatch):
    q, k, v, _ = Case(batch=1, seqlen_q=70, seqlen_k=70, dtype="bf16").tensors(device)
    sink, results = torch.randn(4, device=device), []
    NOT_A_NUMBER[name](q, k, v, sink)
    ranges = masks.sink_and_window(4, (16, 0), 70, device=device).clamp(max=69)
    for divided in (False, True):
        monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x, divided=divided: divided)
        results.append(flash_attn_func(q, k, v, causal=True, key_ranges=ranges, learnable_sink=sink))
    torch.testing.assert_close(*results, rtol=2**-6, atol=2**-6, equal_nan=True)


def test_exact_gradients_of_two_ranges(device, monkeypatch):
    """Two ranges that are one: no larger errors, for values with which an out in 16 bits would spoil the gradients."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: True)
    monkeypatch.setattr(flash_attn_ops, "exact_gradients", True)  # as precision.use_exact_gradients does
    q, k, v, dout = Case(batch=1, seqlen_q=70, seqlen_k=70, dtype="bf16").tensors(device)
    q, v = 3 * q, v + 30

    def gradients(ranges, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        ranges = torch.tensor(ranges, dtype=torch.int32, device=device).view(1, 1, 1, -1)
        out = flash_attn_func(*leaves, key_ranges=ranges, causal=True)
        return torch.autograd.grad(out, leaves[:2], dout.to(dtype))

    exact, one, two = gradients([0, 70], torch.float32), *(gradients(x, q.dtype) for x in ([0, 70], [0, 20, 20, 70]))
    for expected, of_one, of_two in zip(exact, one, two, strict=True):
        assert (of_two - expected).norm() < 2 * (of_one - expected).norm()


def test_sinks_and_a_window_compile(device, monkeypatch):
    """In one graph, as one op, with gradients."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: True)
    q, k, v, dout = Case(batch=1, seqlen_q=70, seqlen_k=70, dtype="bf16").tensors(device)
    ranges = masks.sink_and_window(4, (16, 0), 70, device=device)
    graphs, results = [], []
    compiled = torch.compile(
        flash_attn_func, fullgraph=True, backend=lambda graph, _: graphs.append(graph.graph) or graph
    )
    for function in (compiled, flash_attn_func):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, key_ranges=ranges, causal=True)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    assert sum("fwd_features" in str(node.target) for node in graphs[0].nodes) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is the same bit by bit


def run(inputs, dout, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = flash_attn_func(*leaves, return_lse=True, **options)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


CASE = Case(seqlen_q=70, seqlen_k=90, heads_k=2, dtype="bf16")
BIAS_OF_ZEROS = dict(attn_bias=torch.zeros(1))  # sends a call to the op of the calls that it is compared with


def full(value, *shape):
    return torch.full(shape, value, dtype=torch.int32)


SAME = {  # options, and others that say the same
    "a sink of -inf, beside a bias": (dict(BIAS_OF_ZEROS, learnable_sink=torch.full((4,), -math.inf)), BIAS_OF_ZEROS),
    "all keys": (
        dict(BIAS_OF_ZEROS, key_ranges=full(0, 1, 1, 70, 2) + full(90, 2) * full(1, 2).cumsum(0).sub(1).int()),
        BIAS_OF_ZEROS,
    ),
    "bounds beyond the keys": (
        dict(key_ranges=torch.tensor([-(2**31), 2**31 - 1]).int().view(1, 1, 1, 2)),
        dict(key_ranges=torch.tensor([0, 90]).int().view(1, 1, 1, 2)),
    ),
    "reversed bounds are empty": (
        dict(key_ranges=torch.tensor([60, 20, 5, 40]).int().view(1, 1, 1, 4)),
        dict(key_ranges=torch.tensor([5, 40, 0, 0]).int().view(1, 1, 1, 4)),
    ),
    "two that overlap are their union": (
        dict(key_ranges=torch.tensor([5, 40, 20, 60]).int().view(1, 1, 1, 4)),
        dict(key_ranges=torch.tensor([5, 60, 5, 60]).int().view(1, 1, 1, 4)),
    ),
    "causal and as ranges": (
        dict(key_ranges=masks.chunks(10**6, 70, 90), causal=True),
        dict(key_ranges=masks.prefix_lm(0, 70, 90)),
    ),
    "chunks and as ranges": (dict(attention_chunk=16), dict(key_ranges=masks.chunks(16, 70, 90))),
    "one chunk": (dict(attention_chunk=90), {}),
    "entries beside a bias": (dict(BIAS_OF_ZEROS, causal=torch.ones(2).int()), dict(BIAS_OF_ZEROS, causal=True)),
    "all keys are used": (dict(seqused_k=full(90, 2)), {}),
    "bias as bool": (
        dict(attn_bias=torch.arange(90) % 3 > 0),
        dict(attn_bias=torch.where(torch.arange(90) % 3 > 0, 0.0, -math.inf).bfloat16()),
    ),
    "bias of more dimensions": (
        dict(attn_bias=torch.arange(90.0)),
        dict(attn_bias=torch.arange(90.0).view(1, 1, 1, 1, 90)),
    ),
    "bias that is expanded": (
        dict(attn_bias=torch.arange(90.0).expand(2, 4, 70, 90)),
        dict(attn_bias=torch.arange(90.0)),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_same(name, device):
    *inputs, dout = CASE.tensors(device)
    ours, theirs = ({a: b.to(device) if torch.is_tensor(b) else b for a, b in x.items()} for x in SAME[name])
    assert_equal(run(inputs, dout, **ours), run(inputs, dout, **theirs))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("entries", [torch.tensor([True, True]), torch.zeros(2).int()], ids=["causal", "none causal"])
def test_entries_that_agree(entries, portable, device, monkeypatch):
    """For kernels, entries are key ranges."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    *inputs, dout = CASE.tensors(device)
    agreed = run(inputs, dout, causal=bool(entries[0]))
    assert_same_with_ranges(run(inputs, dout, causal=entries.to(device)), agreed, device)


def test_a_sink_of_minus_infinity_is_none(device):
    """The backward has a gradient of lse, of zeros, and may take another way."""
    *inputs, dout = CASE.tensors(device)
    found = run(inputs, dout, learnable_sink=torch.full((4,), -math.inf, device=device))
    expected = run(inputs, dout)
    assert_equal(found[:2], expected[:2])
    assert_same_but_for_rounding(found[2:], expected[2:])


@pytest.mark.parametrize("beside", [{}, BIAS_OF_ZEROS], ids=["alone", "beside a bias"])
def test_sinks_of_any_size(beside, device):
    """Infinite and huge sinks give no NaN; a row without keys has the sink as its lse, which gives it its gradient."""
    *inputs, dout = CASE.but(seqlen_q=90, seqlen_k=70, dtype="fp32").tensors(device)
    sink = torch.tensor([math.inf, 1e4, -1e4, -math.inf], device=device)
    leaves = [x.requires_grad_() for x in (*inputs, sink)]
    beside = {name: x.to(device) for name, x in beside.items()}
    out, lse = flash_attn_func(*leaves[:3], causal=True, learnable_sink=sink, return_lse=True, **beside)
    plain, plain_lse = flash_attn_func(*inputs, causal=True, return_lse=True)
    assert (out[:, :, :2] == 0).all() and torch.equal(lse[:, :2, :20], sink[:2, None].expand(2, 2, 20))
    torch.testing.assert_close(out[:, :, 2:], plain[:, :, 2:])
    torch.testing.assert_close(lse[:, 2:, 20:], plain_lse[:, 2:, 20:])
    assert (lse[:, 2, :20] == -1e4).all() and (lse[:, 3, :20] == math.inf).all()
    *grads, dsink = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
    assert all(x.isfinite().all() for x in (*grads, dsink[1:]))
    torch.testing.assert_close(dsink[1:], torch.tensor([2.0 * 90, 2 * 20, 0], device=device))


def test_a_bias_whose_rows_are_all_the_smallest_number(device):
    """They are no empty rows: the weights of all keys are equal."""
    q, k, v, _ = CASE.but(dtype="fp32").tensors(device)
    out = flash_attn_func(q * 0, k, v, attn_bias=torch.full((1,), torch.finfo(torch.float32).min, device=device))
    torch.testing.assert_close(out, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out))


def test_a_gradient_of_the_bias_alone(device):
    q, k, v, dout = CASE.tensors(device)
    bias = torch.zeros(70, 90, device=device, requires_grad=True)
    flash_attn_func(q, k, v, attn_bias=bias).backward(dout)
    expected = torch.zeros_like(bias).requires_grad_()
    oracle.attention(*(x.double() for x in (q, k, v)), attn_bias=expected)[0].backward(dout.double())
    torch.testing.assert_close(bias.grad, expected.grad, atol=2e-2, rtol=0)


@pytest.mark.parametrize("groups", [(0,), (1,), (0, 1), (1, 0), (0, 3)], ids=str)
def test_a_bias_of_an_empty_batch(groups, device):
    q, k, v, dout = (x[:0] for x in CASE.tensors(device))
    bias = torch.randn(*groups, 4, 70, 90, device=device, requires_grad=True)
    out = flash_attn_func(q, k, v, attn_bias=bias)
    out.backward(dout)
    assert out.shape == q.shape and not bias.grad.any()


def test_blocks_that_no_row_sees_are_skipped(device, monkeypatch):
    """In documents of 64 tokens a block of 256 rows and 64 keys is computed only if they share a document."""
    seen = []
    compute = Scores.compute
    monkeypatch.setattr(
        Scores, "compute", lambda *args: (seen.append(len(args[-1]) * len(args[-2])), compute(*args))[1]
    )
    q, k, v, dout = CASE.but(batch=1, seqlen_q=2048, seqlen_k=2048, dtype="fp32", head_dim=8).tensors("cpu")
    ranges = masks.documents(torch.arange(0, 2049, 64), 2048)
    out = flash_attn_func(q.requires_grad_(), k, v, key_ranges=ranges)
    assert sum(seen) <= 2 * 2048 * 256  # two groups at most
    seen.clear()
    out.backward(dout)
    assert sum(seen) <= 2 * 2048 * 256


def test_many_tokens_in_documents():
    """Memory grows with the sequence: a score for each row and key would take 256 GB."""
    total = 2**18
    q = torch.randn(1, total, 1, 8)
    ranges = masks.documents(torch.arange(0, total + 1, 256), total)
    out = flash_attn_func(q, q, q, key_ranges=ranges, causal=True)
    expected = flash_attn_func(*(q[:, -256:] for _ in range(3)), causal=True)
    torch.testing.assert_close(out[:, -256:], expected)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

CACHE_OPTIONS = {
    "sink": dict(learnable_sink=torch.randn(4)),
    "bias": dict(attn_bias=torch.randn(2, 4, 3, 48)),
    "bool bias of keys": dict(attn_bias=torch.arange(48) % 5 > 0),
    "ranges": dict(key_ranges=torch.tensor([[[[0, 9], [4, 30], [7, 7]]]]).int()),
    "two ranges of heads": dict(key_ranges=torch.randint(0, 40, (2, 4, 3, 4)).int()),
    "chunks": dict(attention_chunk=8),
    "causal entries": dict(causal=torch.tensor([True, False])),
    "a sink and everything": dict(
        learnable_sink=torch.randn(4).bfloat16(),
        attn_bias=torch.randn(48),
        key_ranges=torch.tensor([[[[0, 9], [4, 30], [7, 7]]]]).int(),
        attention_chunk=24,
        causal=torch.tensor([0, 1]).int(),
        window_size=(20, 5),
    ),
}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head_dim, head_dim_v", [(32, 32), (64, 32), (288, 288)])
@pytest.mark.parametrize("name", CACHE_OPTIONS)
@pytest.mark.cover(2)
def test_decoding(name, head_dim, head_dim_v, paged, device):
    """Appending to a cache and attending to it is attention over the keys of each entry."""
    options = {a: b.to(device) if torch.is_tensor(b) else b for a, b in CACHE_OPTIONS[name].items()}
    q = torch.randn(2, 3, 4, head_dim, device=device)
    caches = [torch.randn(2, 48, 2, d, device=device) for d in (head_dim, head_dim_v)]
    new = [torch.randn(2, 3, 2, d, device=device) for d in (head_dim, head_dim_v)]
    lengths = torch.tensor([7, 40], dtype=torch.int32, device=device)
    expected = []
    for b, length in enumerate(lengths.tolist()):
        key, value = (torch.cat([c[b, :length], n[b]])[None] for c, n in zip(caches, new, strict=True))
        each = dict(options)
        if "key_ranges" in each and each["key_ranges"].shape[0] > 1:
            each["key_ranges"] = each["key_ranges"][b : b + 1]
        if "causal" in each:
            each["causal"] = bool(each["causal"][b])
        if "attn_bias" in each:
            bias = each["attn_bias"][..., : length + 3]
            each["attn_bias"] = bias[b] if bias.dim() == 4 else bias
        out, lse, top = flash_attn_func(q[b : b + 1], key, value, return_lse=True, return_max_logit=True, **each)
        expected.append((out, lse, top))
    caches = [x.clone() for x in caches]
    table = {}
    if paged:
        caches = [x.reshape(12, 8, 2, -1) for x in caches]
        table["block_table"] = torch.arange(12, device=device).view(2, 6).int()
    for max_logit in (False, True):
        out, lse, *top = flash_attn_with_kvcache(
            q,
            *caches,
            *new,
            cache_seqlens=lengths,
            return_softmax_lse=True,
            return_max_logit=max_logit,
            **options,
            **table,
        )
        torch.testing.assert_close(out, torch.cat([x[0] for x in expected]))
        torch.testing.assert_close(lse, torch.cat([x[1] for x in expected]))
    torch.testing.assert_close(top[0], torch.stack([x[2] for x in expected]).amax(0))


PAGED_OPTIONS = {
    "sink": dict(learnable_sink=torch.randn(4), causal=True),
    "bias": dict(attn_bias=torch.randn(4, 20, 40)),
    "mask": dict(attn_bias=torch.arange(40) % 5 > 0),
    "ranges": dict(key_ranges=torch.tensor([3, 17]).int().expand(1, 20, 2)),
    "two ranges": dict(key_ranges=torch.tensor([0, 2, 7, 30]).int().expand(1, 20, 4)),
    "chunks": dict(attention_chunk=6),
    "entries": dict(causal=torch.tensor([True, False])),
    "lengths": dict(seqused_q=torch.tensor([4, 9]).int(), seqused_k=torch.tensor([30, 11]).int(), causal=True),
}


@pytest.mark.parametrize("name", PAGED_OPTIONS)
def test_features_of_packed_queries_over_pages(name, device):
    """Pages give what the same keys give in a row."""
    options = {a: b.to(device) if torch.is_tensor(b) else b for a, b in PAGED_OPTIONS[name].items()}
    q = torch.randn(20, 4, 32, device=device)
    pages = [torch.randn(12, 8, 2, d, device=device) for d in (32, 24)]
    table = torch.tensor([[3, 0, 7, 2, 11], [1, 5, 4, 10, 9]], dtype=torch.int32, device=device)
    rows, keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 7, 20], [0, 40, 65]))
    bounds = rows, keys, 13, 40
    k, v = (torch.cat([x[table[0].long()].flatten(0, 1), x[table[1].long()].flatten(0, 1)[:25]]) for x in pages)
    results = dict(return_lse=True, return_max_logit=True)
    found = flash_attn_varlen_func(q, *pages, *bounds, block_table=table, **options, **results)
    expected = flash_attn_varlen_func(q, k, v, *bounds, **options, **results)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_max_logit_where_scores_rise_from_block_to_block(head_dim, softcap, device):
    """By so little that a kernel need not scale its sums again."""
    k = torch.ones(1, 700, 2, head_dim, device=device) * torch.linspace(0.1, 1, 700, device=device)[:, None, None]
    q = torch.tensor([1.0, 0.5], device=device)[:, None].expand(1, 700, 2, head_dim)
    q, k = q.bfloat16(), k.bfloat16()
    _, top = flash_attn_func(q, k, k, 0.0, 4 / head_dim, softcap=softcap, return_max_logit=True)
    scores = torch.einsum("bihd,bjhd->hij", q.double(), k.double()) * (4 / head_dim)
    exact = (softcap * (scores / softcap).tanh() if softcap else scores).amax((1, 2))
    torch.testing.assert_close(top, exact.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seqlen_q, num_splits", [(1, 0), (1, 3), (4, 1), (70, 2)])
@pytest.mark.parametrize("paged", [False, True])
def test_max_logit_of_a_cache(seqlen_q, num_splits, paged, device):
    q, k, v = (torch.randn(3, n, h, 64, device=device).bfloat16() for n, h in ((seqlen_q, 4), (512, 2), (512, 2)))
    lengths = torch.tensor([0, 17, 512], dtype=torch.int32, device=device)
    sink = torch.full((4,), 100.0, device=device)  # it does not count
    table = dict(block_table=torch.arange(12, device=device).view(3, 4).int()) if paged else {}
    caches = [x.view(12, 128, 2, 64) if paged else x for x in (k, v)]
    _, top = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, num_splits=num_splits, learnable_sink=sink, return_max_logit=True, **table
    )
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, dim=2)) / 8
    used = torch.arange(512, device=device) < lengths[:, None, None, None]
    exact = scores.masked_fill(~used, -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(top, exact.float(), rtol=1e-5, atol=1e-5)


def test_queries_of_causal_entries_are_rotated_by_their_positions(device):
    q, k, v = (torch.randn(2, 3, 2, 16, device=device) for _ in range(3))
    caches = [torch.randn(2, 8, 2, 16, device=device) for _ in "kv"]
    tables = dict(rotary_cos=torch.randn(8, 8, device=device), rotary_sin=torch.randn(8, 8, device=device))
    both = flash_attn_with_kvcache(
        q,
        *(x.clone() for x in caches),
        k,
        v,
        **tables,
        cache_seqlens=4,
        causal=torch.tensor([1, 0], device=device).int(),
    )
    for b, causal in enumerate((True, False)):
        one = flash_attn_with_kvcache(q, *(x.clone() for x in caches), k, v, **tables, cache_seqlens=4, causal=causal)
        torch.testing.assert_close(both[b], one[b])


# ---------------------------------------------------------------------------------------------------------------------
# Graphs and the ops


def graph_calls(device):
    """name -> (function of tensors only, tensors)."""
    q, k, v, _ = CASE.but(seqlen_q=64, seqlen_k=64, head_dim=32).tensors(device)
    sink, bias = torch.randn(4, device=device), torch.randn(1, 4, 64, 64, device=device)
    ranges, lengths = masks.chunks(16, 64, device=device), torch.tensor([50, 64], dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor([0, 20, 64], dtype=torch.int32, device=device)
    flags = torch.tensor([True, False], device=device)
    return {
        "sink": (lambda q, k, v, s: flash_attn_func(q, k, v, causal=True, learnable_sink=s), (q, k, v, sink)),
        "values of another head_dim": (lambda q, k, v: flash_attn_func(q, k, v, return_lse=True), (q, k, v[..., :24])),
        "sink and bias": (
            lambda q, k, v, s, b: flash_attn_func(
                q, k, v, learnable_sink=s, attn_bias=b, return_lse=True, return_max_logit=True
            ),
            (q, k, v, sink, bias),
        ),
        "ranges": (lambda q, k, v: flash_attn_func(q, k, v, key_ranges=ranges, causal=flags), (q, k, v)),
        "lengths": (
            lambda q, k, v: flash_attn_func(q, k, v, seqused_q=lengths, seqused_k=lengths, attention_chunk=9),
            (q, k, v),
        ),
        "qkvpacked": (
            lambda qkv, b: flash_attn_qkvpacked_func(qkv, attn_bias=b),
            (torch.stack([q, q + 1, q - 1], 2), bias),
        ),
        "varlen": (
            lambda q, k, v, b: flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 64, 64, attn_bias=b),
            (q[0], k[0].repeat_interleave(2, 1), v[0].repeat_interleave(2, 1), bias[0]),
        ),
    }


GRAPH_CALLS = list(graph_calls("cpu"))


def differentiate(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    result = function(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    return *outputs, *torch.autograd.grad(sum(x.float().sum() for x in outputs[:2]), leaves)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GRAPH_CALLS)
@pytest.mark.same_on_cpu("dynamic")
def test_compiles_to_one_graph(name, dynamic, device):
    function, tensors = graph_calls(device)[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same_but_for_rounding(differentiate(compiled, tensors), differentiate(function, tensors))


IN_SECONDS = () if torch.cuda.is_available() else pytest.mark.slow  # a CPU has a compiler of C++ run for each kernel


@pytest.mark.parametrize("name", [pytest.param(name, marks=IN_SECONDS) for name in ("sink", "sink and bias")])
def test_compiles_with_inductor(name, device):
    """The compiler may leave out a rounding to 16 bits between two operations."""
    function, tensors = graph_calls(device)[name]
    compiled = torch.compile(function, fullgraph=True)
    exact = differentiate(function, [x.float() for x in tensors])
    for one, *others in zip(differentiate(compiled, tensors), exact, differentiate(function, tensors), strict=True):
        assert_error_ratio(one, *others)


@pytest.mark.parametrize("name", GRAPH_CALLS)
def test_exports(name, device):
    function, tensors = graph_calls(device)[name]
    program = torch.export.export(Calling(function), tensors)
    torch.testing.assert_close(program.module()(*tensors), function(*tensors))


def dynamic_calls(seqlen, device):
    """name -> (function of tensors, tensors, which of their dimensions have this length)."""
    q, k, v, _ = CASE.but(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=32).tensors(device)
    bias = torch.randn(4, seqlen, seqlen, device=device)
    lengths = torch.tensor([9, 0], dtype=torch.int32, device=device)
    flags = torch.tensor([True, False], device=device)

    def call(**options):
        return functools.partial(flash_attn_func, **options), (q, k, v), [(1,)] * 3

    def masked(q, k, v, b):
        return flash_attn_func(q, k, v, attn_bias=b, key_ranges=masks.chunks(5, q.shape[1], device=device))

    return {
        "sink": call(learnable_sink=torch.ones(4, device=device)),
        "chunks": call(attention_chunk=16),
        "lengths": call(seqused_q=lengths, seqused_k=lengths, attention_chunk=7),
        "entries and largest score": call(causal=flags, return_max_logit=True),
        "bias and ranges": (masked, (q, k, v, bias), [*[(1,)] * 3, (1, 2)]),
    }


@pytest.mark.parametrize("name", dynamic_calls(2, "cpu"))
def test_exports_for_all_lengths(name, device):
    function, tensors, dims = dynamic_calls(64, device)[name]
    length = torch.export.Dim("length", min=2, max=512)
    shapes = tuple({i: length for i in each} for each in dims)
    program = torch.export.export(Calling(function), tensors, dynamic_shapes=(shapes,))
    _, others, _ = dynamic_calls(12, device)[name]
    torch.testing.assert_close(program.module()(*others), function(*others))


def op_arguments(device, without=""):
    """Tensors of fwd_features, and the arguments after them: every feature, but for the one named `without`."""
    q, k, v, _ = CASE.but(seqlen_q=9, seqlen_k=12, head_dim=8).tensors(device)
    options = Options(0.3, -1, 3, seqused_k=torch.tensor([12, 7], dtype=torch.int32, device=device))
    given = dict(
        learnable_sink=torch.randn(4, device=device),
        attn_bias=torch.randn(1, 1, 1, 9, 12, device=device),
        key_ranges=masks.chunks(4, 9, 12, device=device),
        attention_chunk=7,
        causal=torch.tensor([True, False], device=device),
        seqused_q=torch.tensor([9, 3], dtype=torch.int32, device=device),
        row_max=True,
    )
    features = Features(**{name: value for name, value in given.items() if name != without})
    return (q, k, v[..., :5].contiguous(), *features[:2]), (*options, *features[2:])


# Kernels take all features, except seqused_q with a sink: both are for the ops that run in plain torch everywhere.
OVERLOADS = [("", "seqused_q"), ("", "learnable_sink"), ("_reference", "")]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "overload, without, dtype",
    [
        *((*overload, torch.bfloat16) for overload in OVERLOADS),
        ("_reference", "", torch.float32),
    ],
)
def test_opcheck_fwd_features(overload, without, dtype, requires_grad, device):
    tensors, others = op_arguments(device, without)
    tensors = [x if x is None else x.to(dtype).requires_grad_(requires_grad) for x in tensors]
    op = getattr(torch.ops.flash_attn, f"fwd_features{overload}")
    torch.library.opcheck(op.default, (*tensors, *others))


@pytest.mark.parametrize("wants_dbias", [False, True])
@pytest.mark.parametrize("overload, without", OVERLOADS)
def test_opcheck_bwd_features(overload, without, wants_dbias, device):
    tensors, others = op_arguments(device, without)
    fwd, bwd = (getattr(torch.ops.flash_attn, f"{name}_features{overload}") for name in ("fwd", "bwd"))
    out, lse, _, lse_lo = fwd(*tensors, *others)
    results = out, lse, torch.randn_like(lse), None, lse_lo
    arguments = torch.randn_like(out), *tensors[:3], *results, wants_dbias, *tensors[3:], *others
    torch.library.opcheck(bwd.default, arguments)


def test_opcheck_weights(device):
    tensors, others = op_arguments(device)
    _, lse, _, lse_lo = torch.ops.flash_attn.fwd_features_reference(*tensors, *others)
    torch.library.opcheck(torch.ops.flash_attn.weights.default, (*tensors[:2], lse, lse_lo, *tensors[3:], *others))


def test_opcheck_fwd_kvcache_features(device):
    (q, _, _, sink, _), _ = op_arguments(device)
    caches = [torch.randn(2, 16, 2, d, device=device).bfloat16() for d in (8, 5)]
    new = [torch.randn(2, 2, 2, d, device=device).bfloat16() for d in (8, 5)]
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    options = CacheOptions(0.3, -1, -1, cache_seqlens=lengths, k=new[0], v=new[1])
    bias = torch.randn(1, 1, 4, 1, 16, device=device)
    others = Features(row_max=True, attention_chunk=4)[2:]
    torch.library.opcheck(
        torch.ops.flash_attn.fwd_kvcache_features.default, (q, *caches, sink, bias, *options, *others)
    )


@pytest.mark.parametrize("name", GRAPH_CALLS)
def test_meta_tensors_tell_shapes_types_and_strides(name, device):
    function, tensors = graph_calls(device)[name]
    expected = differentiate(function, tensors)
    on_meta, tensors = graph_calls("meta")[name]
    for found, real in zip(differentiate(on_meta, tensors), expected, strict=True):
        assert found.is_meta
        assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


CU_SEQLENS = ints(0, 20, 70)
BAD = {  # function, changed arguments, error, and what it says
    "sink: a list": ("func", dict(learnable_sink=[0.0] * 4), TypeError, "learnable_sink must be a torch.Tensor"),
    "sink: float64": (
        "func",
        dict(learnable_sink=torch.zeros(4).double()),
        TypeError,
        "learnable_sink must have dtype",
    ),
    "sink: of key heads": (
        "func",
        dict(learnable_sink=torch.zeros(2)),
        ValueError,
        r"learnable_sink .*\(4,\), found \(2,\)",
    ),
    "bias: int": ("func", dict(attn_bias=ints(1)), TypeError, r"attn_bias must have dtype .* or torch\.bool, found"),
    "bias: float8": (
        "varlen",
        dict(attn_bias=torch.zeros(1).to(torch.float8_e4m3fn)),
        TypeError,
        r"attn_bias must have dtype .* or torch\.bool, found torch\.float8",
    ),
    "bias: other lengths": (
        "func",
        dict(attn_bias=torch.zeros(90, 70)),
        ValueError,
        r"attn_bias .*= \(2, 4, 70, 90\), found",
    ),
    "bias: key heads": ("func", dict(attn_bias=torch.zeros(2, 70, 90)), ValueError, r"attn_bias must broadcast"),
    "bias: other groups": (
        "func",
        dict(attn_bias=torch.zeros(2, 2, 1, 1, 90)),
        ValueError,
        r"attn_bias .*batch1 \* batch2",
    ),
    "bias: 6-D": ("func", dict(attn_bias=torch.zeros(1, 1, 1, 1, 1, 90)), ValueError, "attn_bias must broadcast"),
    "bias: too few keys": (
        "varlen",
        dict(attn_bias=torch.zeros(4, 70, 40)),
        ValueError,
        "attn_bias .*max_seqlen_k, 50, found 40",
    ),
    "bias: packed, 4-D": (
        "varlen",
        dict(attn_bias=torch.zeros(1, 4, 70, 50)),
        ValueError,
        r"attn_bias .*at least max_seqlen_k, or 1",
    ),
    "bias: of less than the capacity": (
        "kvcache",
        dict(attn_bias=torch.zeros(3)),
        ValueError,
        "attn_bias must broadcast",
    ),
    "ranges: int64": (
        "func",
        dict(key_ranges=ints(0, 1).long().view(1, 1, 1, 2)),
        TypeError,
        "key_ranges must have dtype",
    ),
    "ranges: three": (
        "func",
        dict(key_ranges=torch.zeros(1, 1, 70, 3).int()),
        ValueError,
        "key_ranges must have 4 dimensions, .*2 or 4",
    ),
    "ranges: a dimension less": (
        "func",
        dict(key_ranges=torch.zeros(1, 70, 2).int()),
        ValueError,
        r"key_ranges must have 4 dimensions, \(batch, heads, seqlen_q, 2 or 4\), .* found shape \(1, 70, 2\)",
    ),
    "ranges: other rows": (
        "func",
        dict(key_ranges=torch.zeros(1, 1, 90, 2).int()),
        ValueError,
        r"\(2, 4, 70\).*found shape",
    ),
    "ranges: packed, 4-D": (
        "varlen",
        dict(key_ranges=torch.zeros(1, 1, 70, 2).int()),
        ValueError,
        r"3 dimensions, \(heads, total_q",
    ),
    "chunk: negative": ("func", dict(attention_chunk=-1), ValueError, "attention_chunk must be at least 0, found -1"),
    "chunk: a float": ("func", dict(attention_chunk=1.5), ValueError, "attention_chunk must be a whole number"),
    "chunk: None": (
        "func",
        dict(attention_chunk=None),
        TypeError,
        "attention_chunk must be an integer, found NoneType",
    ),
    "causal: floats": (
        "func",
        dict(causal=torch.zeros(2)),
        TypeError,
        "causal must have dtype torch.bool or torch.int32",
    ),
    "causal: of heads": (
        "func",
        dict(causal=ints(1, 1, 1, 1)),
        ValueError,
        r"causal must have shape \(2,\), found \(4,\)",
    ),
    "causal: a list": ("func", dict(causal=[1, 0]), TypeError, r"a bool or a tensor \(batch,\), found \[1, 0\]"),
    "causal: an array": (
        "func",
        dict(causal=np.array([True, False])),
        TypeError,
        r"causal must be a bool or a tensor \(batch,\), found an array of shape \(2,\)",
    ),
    "causal: a tensor of no dimensions": (
        "kvcache",
        dict(causal=torch.tensor(True)),
        TypeError,
        r"a tensor \(batch,\)",
    ),
    "seqused_q: int64": ("func", dict(seqused_q=ints(1, 2).long()), TypeError, "seqused_q must have dtype torch.int32"),
    "seqused_q: shape": ("func", dict(seqused_q=ints(1)), ValueError, r"seqused_q must have shape \(2,\)"),
    "seqused_q: too long": (
        "func",
        dict(seqused_q=ints(1, 71)),
        ValueError,
        "seqused_q must be between 0 and 70 for entry 1",
    ),
    "seqused_q: negative": (
        "func",
        dict(seqused_q=ints(-1, 7)),
        ValueError,
        "seqused_q must be between 0 and 70 for entry 0",
    ),
    "seqused_k: too long": (
        "func",
        dict(seqused_k=ints(1, 91)),
        ValueError,
        "seqused_k must be between 0 and 90 for entry 1",
    ),
    "seqused_k: shape": ("varlen", dict(seqused_k=ints(1)), ValueError, r"seqused_k must have shape \(2,\)"),
    "return_lse: a word": ("func", dict(return_lse="no"), TypeError, "return_lse must be a bool"),
    "return_max_logit: two": ("kvcache", dict(return_max_logit=2), TypeError, "return_max_logit must be a bool"),
    "lse twice": (
        "func",
        dict(return_lse=True, return_attn_probs=True),
        ValueError,
        "return_lse must be False with return_attn_probs",
    ),
    "S_dmask of a bias": (
        "func",
        dict(attn_bias=torch.zeros(1), dropout_p=0.1, return_attn_probs=True),
        ValueError,
        "return_attn_probs must be False with dropout_p > 0 and attn_bias",
    ),
    "v of other heads": ("func", dict(v=torch.zeros(2, 90, 1, 64).bfloat16()), ValueError, "v must have shape"),
    "v_cache of other heads": (
        "kvcache",
        dict(v_cache=torch.zeros(2, 8, 1, 64).bfloat16()),
        ValueError,
        "v_cache must have",
    ),
}


def good_arguments(name):
    q, k, v, _ = CASE.tensors("cpu")
    if name == "func":
        return flash_attn_func, dict(q=q, k=k, v=v)
    if name == "kvcache":
        return flash_attn_with_kvcache, dict(q=q, k_cache=k[:, :8], v_cache=v[:, :8], cache_seqlens=4)
    bounds = dict(cu_seqlens_q=CU_SEQLENS, cu_seqlens_k=CU_SEQLENS, max_seqlen_q=50, max_seqlen_k=50)
    return flash_attn_varlen_func, dict(q=q[0], k=k[0], v=v[0], **bounds)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    which, change, error, says = BAD[name]
    function, good = good_arguments(which)
    function(**good)
    with pytest.raises(error, match=says) as caught:
        function(**good | change)
    assert isinstance(caught.value, RuntimeError)


def test_keys_in_pages_have_no_gradient():
    function, good = good_arguments("varlen")
    pages = dict(k=good["k"][:64].view(8, 8, 2, 64), v=good["v"][:64].view(8, 8, 2, 64))
    table = torch.arange(8).view(2, 4).int().repeat(1, 2)
    q = good["q"].requires_grad_()
    out = function(**good | pages | dict(q=q), block_table=table, attn_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="block_table must be None in the backward"):
        out.sum().backward()


def test_a_slow_call_on_a_gpu_names_its_arguments_once(monkeypatch, recwarn):
    monkeypatch.setattr(_library, "is_where_kernels_run", lambda x: True)
    _library.warn_once.cache_clear()
    q, k, v, _ = CASE.but(head_dim=528).tensors("cpu")
    for _ in range(2):
        flash_attn_func(q, k, v, attn_bias=torch.zeros(1), return_max_logit=True)
    (warning,) = [str(w.message) for w in recwarn if "slower reference backend" in str(w.message)]
    assert "attn_bias with one key and head dims 528 of keys and 528 of values" in warning
