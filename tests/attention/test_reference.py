"""The reference backend of attention: what the public functions cannot ask of it, and that it is frugal."""

import functools
import itertools
import math
import os
import subprocess
import sys

import oracle
import pytest
import torch
from cases import Case, cover, params
from compare import assert_error_ratio
from problems import SMALL, make_problem, possible

from flash_attn import _torch_private
from flash_attn._reference import attention as reference
from flash_attn._reference.attention import head_groups
from flash_attn._reference.attention.dropout import keep_mask, keep_threshold
from flash_attn._reference.attention.mask import Mask
from flash_attn._reference.attention.options import CacheOptions, Options
from flash_attn._reference.philox import philox

SEED, OFFSET = -0x1234567890ABCDEF, 2**40 + 7  # more than 32 bits each


def options_of(q, causal=False, **given):
    return Options(**dict(softmax_scale=q.shape[-1] ** -0.5, window_left=-1, window_right=0 if causal else -1) | given)


def fwd(q, k, v, return_softmax=False, **given):
    """(out, lse, S_dmask or None)."""
    options = options_of(q, **given)
    s_dmask = reference.probabilities(q, k, v, options) if return_softmax else None
    return *reference.fwd(q, k, v, options), s_dmask


def bwd(dout, q, k, v, out, lse, dq, dk, dv, dlse=None, **given):
    return reference.bwd(dout, q, k, v, out, lse, dlse, dq, dk, dv, options_of(q, **given))


def fwd_kvcache(q, k_cache, v_cache, **given):
    return reference.fwd_kvcache(q, k_cache, v_cache, CacheOptions(1.0, -1, -1, **given))


# ---------------------------------------------------------------------------------------------------------------------
# Against the oracle


# Of scores, rows, cols, and keys in a group. The usual blocks are larger than what is tested elsewhere.
BLOCKS = [(600, 16, 40, 1), (5000, 32, 64, 10**6)]
FACTORS = dict(
    SMALL,
    lengths=[(97, 97), (50, 130), (130, 50), (70, 1)],
    head_dim=[8, 33, 64],
    layout=["contiguous", "bhsd"],
    page=[0, 16],
)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("case", params(make_problem(**row) for row in cover(FACTORS, valid=possible)))
@pytest.mark.cover(2)
def test_blocks_of_any_size(case, blocks, monkeypatch):
    for name, size in zip(("_BLOCK_SCORES", "_BLOCK_ROWS", "_BLOCK_COLS", "_GROUP_KEYS"), blocks, strict=True):
        monkeypatch.setattr(head_groups, name, size)
    without_the_operator(monkeypatch)
    case.check(torch.device("cpu"))


def test_float64(device):
    """float64 tensors are computed in float64 throughout."""
    case = Case(seqlen_q=60, seqlen_k=90, causal=True, heads_k=2, alibi="bh", softcap=3.0, dtype="fp32")
    q, k, v, dout = (x.double() for x in case.tensors(device))
    options = dict(causal=True, softcap=3.0, alibi_slopes=case.alibi_slopes(device))
    out, lse, _ = fwd(q, k, v, **options)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    dlse = torch.randn_like(lse)
    bwd(dout, q, k, v, out, lse, *grads, dlse=dlse, **options)
    options["alibi_slopes"] = options["alibi_slopes"].double()
    expected = oracle.gradients(functools.partial(oracle.attention, **options), [q, k, v], dout, dlse)
    for found, exact in zip((out, lse, *grads), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def gradients_of(q, k, v, dout, out, lse, dlse=None, **options):
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    bwd(dout, q, k, v, out, lse, *grads, dlse=dlse, **options)
    return grads


# ---------------------------------------------------------------------------------------------------------------------
# Torch's operator for the CPU, and what it is asked for


def without_the_operator(monkeypatch):
    monkeypatch.setattr(_torch_private, "has_cpu_attention", lambda x: False)


@pytest.fixture
def asked(monkeypatch):
    """The calls of the operator, as (whether forward, shape of q, whether causal)."""
    calls = []

    def spy(name, at, is_causal):
        operator = getattr(_torch_private, name)

        def call(*args, **scale):
            calls.append((name == "cpu_attention", tuple(args[at].shape), args[is_causal]))
            return operator(*args, **scale)

        monkeypatch.setattr(_torch_private, name, call)

    spy("cpu_attention", 0, 4)
    spy("cpu_attention_backward", 1, 7)
    return calls


SLOPES = torch.tensor([0.5, 0.25, 0.5, 0.25])
OPERATOR = [  # lengths of q and k, key heads, options, and what the operator is asked for: (shape of q, causal) or None
    (70, 70, 4, dict(), ((2, 4, 70, 32), False)),
    (70, 70, 4, dict(causal=True), ((2, 4, 70, 32), True)),
    (70, 70, 2, dict(causal=True), ((4, 2, 70, 32), True)),
    (70, 90, 1, dict(), ((2, 4, 70, 32), False)),
    (90, 70, 4, dict(softmax_scale=0.0), ((2, 4, 90, 32), False)),
    (1, 70, 2, dict(causal=True), ((4, 2, 1, 32), False)),
    (1, 70, 2, dict(causal=True, softmax_scale=0.0), ((4, 2, 1, 32), False)),
    (70, 70, 4, dict(causal=True, softmax_scale=0.0), None),
    (70, 70, 4, dict(window_left=69, window_right=69), ((2, 4, 70, 32), False)),
    (70, 70, 4, dict(window_left=69, window_right=0), ((2, 4, 70, 32), True)),
    (70, 70, 4, dict(dropout_p=1e-30, rng_state=torch.tensor([1, 2])), ((2, 4, 70, 32), False)),
    (70, 70, 4, dict(window_left=68), None),
    (70, 70, 4, dict(window_right=1), None),
    (70, 90, 4, dict(causal=True), None),
    (90, 70, 4, dict(causal=True), None),
    (70, 70, 4, dict(softcap=5.0), None),
    (70, 70, 4, dict(alibi_slopes=SLOPES), None),
    (70, 70, 4, dict(dropout_p=0.5, rng_state=torch.tensor([1, 2])), None),
    (70, 0, 4, dict(), None),
    (0, 70, 4, dict(), None),
]


@pytest.mark.parametrize("layout", ["contiguous", "bhsd", "last_dim_strided"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seqlen_q, seqlen_k, heads_k, options, expected", OPERATOR)
@pytest.mark.cover(2)
def test_the_operator(seqlen_q, seqlen_k, heads_k, options, expected, dtype, layout, asked, monkeypatch):
    """It is asked for what it computes, and is at most twice as far from the results in float64 as the loops are."""
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads_k, head_dim=32, dtype=dtype, layout=layout)
    tensors = case.tensors("cpu")

    def run(*tensors):
        *inputs, dout = tensors
        out, lse, _ = fwd(*inputs, **options)
        return out, lse, *gradients_of(*inputs, dout, out, lse, **options)

    found = run(*tensors)
    assert asked == ([] if expected is None else [(True, *expected), (False, *expected)])
    exact = run(*(x.double() for x in tensors))
    without_the_operator(monkeypatch)
    for name, *results in zip(("out", "lse", "dq", "dk", "dv"), found, exact, run(*tensors), strict=True):
        assert_error_ratio(*results, name=name)


def test_the_operator_and_other_types_and_gradients(asked):
    """It is not asked for float64, for pages in the backward, or for a gradient of lse."""
    q, k, v, dout = Case(dtype="fp32").tensors("cpu")
    fwd(*(x.double() for x in (q, k, v)))
    assert not asked
    out, lse, _ = fwd(q, k, v)
    gradients_of(q, k, v, dout, out, lse, dlse=torch.ones_like(lse))
    assert [forward for forward, *_ in asked] == [True]


def test_the_operator_is_asked_for_each_part(asked):
    """Of packed tokens; and for those of a cache whose rows see all its keys."""
    q, k, v = torch.randn(3, 60, 4, 32)
    bounds = dict(cu_seqlens_q=ints(0, 20, 20, 50, 60), cu_seqlens_k=ints(0, 20, 30, 60, 60))
    out, lse, _ = fwd(q, k, v, causal=True, **bounds)
    gradients_of(q, k, v, q, out, lse, causal=True, **bounds)
    lengths = [20, 30]
    assert asked == [(forward, (1, 4, n, 32), True) for forward in (True, False) for n in lengths]
    asked.clear()
    caches = torch.randn(2, 2, 40, 4, 32)
    fwd_kvcache(q[:2, None], *caches, cache_seqlens=ints(7, 40))
    assert asked == [(True, (1, 4, 1, 32), False)] * 2


def test_rows_whose_scores_are_all_minus_infinity(asked):
    """They see no key, and their lse is +inf; the operator says 0."""
    q, k, v = torch.rand(3, 2, 70, 4, 32)
    q[1, 7, 2] = -math.inf
    out, lse, _ = fwd(q, k, v)
    assert asked and (out[1, 7, 2] == 0).all() and lse[1, 2, 7] == math.inf
    assert lse.isfinite().sum() == lse.numel() - 1 and out.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("heads_k", [1, 4])
@pytest.mark.cover(2)
def test_the_operator_hides_values_that_are_not_finite(heads_k, name, value, monkeypatch):
    """From rows and keys that do not see them: the results are nan and infinite where those of the loops are."""
    case = Case(seqlen_q=80, seqlen_k=80, heads_k=heads_k, dtype="fp32")
    tensors = dict(zip(("q", "k", "v", "dout"), case.tensors("cpu"), strict=True))
    tensors[name][1, 50, 0, 5] = value

    def run():
        q, k, v, dout = tensors.values()
        out, lse, _ = fwd(q, k, v, causal=True)
        return out, lse, *gradients_of(q, k, v, dout, out, lse, causal=True)

    found = run()
    without_the_operator(monkeypatch)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------------------
# Values that are not finite


SPECIAL = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("name, spoilt", [("k", "out dq dk dv"), ("v", "out dq dk")])
def test_a_key_spoils_only_the_rows_that_see_it(name, spoilt, value, device):
    """Rows 70 to 90 see key 70, and together they see keys 50 to 90."""
    check_spoilt(
        name, (1, 70, 1, 5), value, spoilt, rows=range(70, 91), heads=[2, 3], keys=range(50, 91), device=device
    )


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("name, spoilt", [("q", "out dq dk dv"), ("dout", "dq dk dv")])
def test_a_row_spoils_only_itself_and_the_keys_it_sees(name, spoilt, value, device):
    check_spoilt(name, (1, 70, 3, 5), value, spoilt, rows=range(70, 71), heads=[3], keys=range(50, 71), device=device)


def check_spoilt(name, index, value, spoilt, rows, heads, keys, device):
    """Put `value` at one place of one input: the results named `spoilt` change in these rows or keys, and no others do.

    With nan, all these rows and key 70 become nan; but an infinite score may hide its key, or all others.
    """
    case = Case(seqlen_q=150, seqlen_k=150, heads_k=2, causal=True, window=(20, -1), dtype="fp32")
    tensors = dict(zip(("q", "k", "v", "dout"), case.tensors(device), strict=True))
    clean = run_all(tensors, case)
    tensors[name][index] = value
    touched = {x: torch.zeros(2, 150, n, dtype=torch.bool, device=device) for x, n in (("rows", 4), ("keys", 2))}
    touched["rows"][1, rows.start : rows.stop, heads] = touched["keys"][1, keys.start : keys.stop, 1] = True
    for result, found in run_all(tensors, case).items():
        where = touched["rows" if result in ("out", "dq") else "keys"] & (result in spoilt.split())
        torch.testing.assert_close(found[~where], clean[result][~where])
        if value != value and result in spoilt.split():
            certain = found[where] if result in ("out", "dq") else found[1, 70, 1]
            assert certain.isnan().any(-1).all()


def run_all(tensors, case):
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    options = dict(causal=case.causal, window_left=case.window[0])
    out, lse, _ = fwd(q, k, v, **options)
    dq, dk, dv = gradients_of(q, k, v, dout, out, lse, **options)
    return dict(out=out, dq=dq, dk=dk, dv=dv)


def test_infinite_values_follow_the_formula(device):
    """out is inf where an inf weighs in, nan where inf meets -inf, and finite where neither is seen."""
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4, heads=1, heads_k=1, head_dim=2, dtype="fp32").tensors(device)
    v[0, 1:, 0, 0] = torch.tensor(SPECIAL[1:] + SPECIAL[:1])
    out, _, _ = fwd(q, k, v, causal=True)
    assert out[0, 0].isfinite().all() and out[0, 1, 0, 0] == float("inf")
    assert out[0, 2:, 0, 0].isnan().all() and out[..., 1].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Pages


@pytest.mark.parametrize("page", [1, 3, 16, 200])
def test_pages_of_a_dense_batch(page, device):
    """Without cu_seqlens. Pages that hold no used key may be missing from the table; what is not used may be nan."""
    case = Case(batch=3, seqlen_q=20, seqlen_k=75, heads_k=2, causal=True, dtype="fp32")
    q, k, v, _ = case.tensors(device)
    used, pad = torch.tensor([75, 31, 0], dtype=torch.int32), torch.tensor([0, 17, 0], dtype=torch.int32)
    lengths = dict(seqused_k=used.to(device), leftpad_k=pad.to(device))
    expected = fwd(q, k, v, causal=True, **lengths)
    per_entry = -(-case.seqlen_k // page)
    block_table = torch.randperm(2 * 3 * per_entry)[: 3 * per_entry].view(3, per_entry).int()
    paged = [torch.full((6 * per_entry, page, 2, case.head_dim), float("nan"), device=device) for _ in "kv"]
    for b, j in itertools.product(range(3), range(case.seqlen_k)):
        if pad[b] <= j < used[b]:
            for pages, x in zip(paged, (k, v), strict=True):
                pages[block_table[b, j // page], j % page] = x[b, j]
    position = torch.arange(per_entry) * page
    block_table[(position >= used[:, None]) | (position + page <= pad[:, None])] = -1
    found = fwd(q, *paged, causal=True, block_table=block_table.to(device), **lengths)
    assert all(torch.equal(x, y) for x, y in zip(found[:2], expected[:2], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Mask and dropout


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (5, 9), (9, 5), (8, 8), (1, 6)])
def test_mask_is_an_interval_for_each_row(seqlen_q, seqlen_k, device):
    """first and last bound what a row sees; hide_ writes everything else, in any block."""
    for left, right in itertools.product(range(-1, 7), range(-1, 7)):
        mask = Mask(seqlen_q, seqlen_k, left, right)
        allowed = oracle.allowed_keys(seqlen_q, seqlen_k, False, (left, right))
        for i in range(seqlen_q):
            assert list(range(mask.first(i), mask.last(i) + 1)) == allowed[i].nonzero().flatten().tolist()
        assert mask.is_full == allowed.all()
        is_triangle = seqlen_q == seqlen_k and torch.equal(allowed, torch.ones_like(allowed).tril())
        assert (mask.is_triangle or mask.is_full) == (is_triangle or mask.is_full)
        for rows, cols in itertools.product(ranges(seqlen_q, 3), ranges(seqlen_k, 4)):
            block = torch.zeros(2, len(rows), len(cols), device=device)
            mask.hide_(block, rows, cols, 1.0)
            assert torch.equal((block == 0).cpu().all(0), allowed[rows.start : rows.stop, cols.start : cols.stop])


def ranges(stop, size):
    return [range(start, min(start + size, stop)) for start in range(0, stop, size)]


@pytest.mark.parametrize("seed, offset", [(0, 0), (1, 7), (SEED, OFFSET), (2**63 - 1, 2**62)])
def test_keep_mask_is_the_documented_generator(seed, offset, device):
    rng_state = torch.tensor([seed, offset], device=device)
    batch_heads = torch.arange(2 * 3, device=device).view(2, 3)
    expected = oracle.dropout_keep(seed, offset, 2, 3, 45, 101, 0.4)
    assert torch.equal(keep_mask(rng_state, 0.4, batch_heads, range(45), range(101)).cpu(), expected)
    for rows, cols in [(range(3, 21), range(31, 33)), (range(16, 17), range(70, 101)), (range(44, 45), range(0, 1))]:
        block = keep_mask(rng_state, 0.4, batch_heads[1:, 1:], rows, cols)
        assert torch.equal(block.cpu(), expected[1:, 1:, rows.start : rows.stop, cols.start : cols.stop])


# Known answers published with Random123, https://github.com/DEShawResearch/random123 (tests/kat_vectors).
KNOWN_ANSWERS = [
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
]


@pytest.mark.parametrize("generator", [philox, oracle.philox], ids=["reference", "oracle"])
@pytest.mark.parametrize("rounds, counter, key, answer", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(rounds, counter, key, answer, generator):
    words = generator([torch.tensor(word) for word in counter], key, rounds)
    assert tuple(int(word) for word in words) == answer


@pytest.mark.parametrize("dropout_p, threshold", [(1e-30, 255), (0.17, 211), (0.5, 127), (0.999, 0)])
def test_keep_threshold(dropout_p, threshold):
    assert keep_threshold(dropout_p) == threshold


# ---------------------------------------------------------------------------------------------------------------------
# What the values can get wrong


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_LENGTHS = {
    "cu_seqlens_q must start at 0, found 1": dict(cu_seqlens_q=ints(1, 5), cu_seqlens_k=ints(0, 5)),
    "cu_seqlens_k must not decrease, found 3 after 4 for entry 1": dict(
        cu_seqlens_q=ints(0, 2, 4), cu_seqlens_k=ints(0, 4, 3)
    ),
    "cu_seqlens_k must end at the number of tokens, 6, or before it, found 7": dict(
        cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 7)
    ),
    "seqused_k must be between 0 and 6 for entry 0, found 7": dict(
        cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 6), seqused_k=ints(7)
    ),
    "seqused_k must be between 0 and 6 for entry 0, found -1": dict(
        cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 6), seqused_k=ints(-1)
    ),
    "leftpad_k must be between 0 and 4 for entry 0, found 5": dict(
        cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 6), seqused_k=ints(4), leftpad_k=ints(5)
    ),
    "rng_state must be given with dropout_p = 0.5, found None": dict(
        cu_seqlens_q=ints(0, 6), cu_seqlens_k=ints(0, 6), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("message, options", BAD_LENGTHS.items(), ids=BAD_LENGTHS)
def test_lengths_that_do_not_fit_are_refused_before_anything_is_written(message, options):
    x = torch.randn(6, 2, 8)
    with pytest.raises(ValueError, match=message):
        fwd(x, x, x, **options)
    grads = [torch.full_like(x, 7.0) for _ in "qkv"]
    with pytest.raises(ValueError, match=message):
        bwd(x, x, x, x, x, torch.zeros(2, 6), *grads, **options)
    assert all((grad == 7.0).all() for grad in grads)


BAD_CACHES = {
    "cache_seqlens must be at most 6, since the cache holds 8 keys, of which 2 will be new, found 7 for entry 1": dict(
        cache_seqlens=ints(6, 7)
    ),
    "cache_seqlens must be at most 6, .* found 8 for entry 0": dict(cache_seqlen=8),
    "cache_batch_idx must be between 0 and 2 for entry 1, found 3": dict(cache_seqlen=1, cache_batch_idx=ints(0, 3)),
    "cache_leftpad must be between 0 and 1 for entry 0, found 2": dict(cache_seqlen=1, cache_leftpad=ints(2, 0)),
    "cache_leftpad must be between 0 and 1 for entry 1, found -1": dict(cache_seqlen=1, cache_leftpad=ints(0, -1)),
    "block_table must name pages from 0 to 2 wherever keys are used, found 3 in column 0 for entry 1": dict(
        cache_seqlen=1, block_table=ints(1, 3).view(2, 1)
    ),
    "block_table must name pages .*, found -1 in column 1 for entry 0": dict(
        cache_seqlen=9, block_table=ints(1, -1, 2, 0).view(2, 2)
    ),
    "pages of block_table hold": dict(cache_seqlen=15, block_table=ints(0, 1, 2, 0).view(2, 2)),
    "rotary_cos and rotary_sin must have at least 7 rows, found 4": dict(
        cache_seqlen=5, rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4)
    ),
}


@pytest.mark.parametrize("message, options", BAD_CACHES.items(), ids=BAD_CACHES)
def test_caches_that_do_not_fit_are_refused_before_anything_is_written(message, options):
    q, k_cache, v_cache, new = (torch.randn(n, s, 2, 8) for n, s in ((2, 2), (3, 8), (3, 8), (2, 2)))
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match=message):
        fwd_kvcache(q, k_cache, v_cache, k=new, v=new, **options)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


# ---------------------------------------------------------------------------------------------------------------------
# Memory


MEASURE = """
import resource, sys, torch
from test_reference import bwd, fwd

def run(seqlen, heads, causal):
    q, k, v, dout, *grads = (torch.randn(1, seqlen, heads, 64) for _ in range(7))
    before = peak()
    out, lse, _ = fwd(q, k, v, causal=causal)
    bwd(dout, q, k, v, out, lse, *grads, causal=causal)
    return peak() - before - out.nbytes

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

run(256, 2, False)
print(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "causal"))
"""


@pytest.mark.parametrize(
    "seqlen, heads, mask, megabytes",
    [
        (8192, 2, "causal", 64),  # one matrix of scores would be 256
        pytest.param(16384, 16, "full", 256, marks=pytest.mark.slow),  # a matrix for each head: 16384
    ],
)
def test_memory_grows_with_the_sequence_not_with_its_square(seqlen, heads, mask, megabytes):
    arguments = [sys.executable, "-c", MEASURE, str(seqlen), str(heads), mask]
    result = subprocess.run(
        arguments, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < megabytes * 2**20
