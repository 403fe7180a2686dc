"""The arguments by which servers call attention: results in their tensors, lengths on the device, packed queries.

Calls are compared with calls that other tests compare with an oracle.
"""

import functools
import itertools

import pytest
import torch
from compare import identical

from flash_attn import _library, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn._ops import flash_attn as ops
from flash_attn._ops.flash_attn_features import FeatureArguments
from flash_attn._reference.attention.options import CacheOptions, Options
from flash_attn.flash_attn_interface import flash_attn_gpu, get_scheduler_metadata

pytestmark = pytest.mark.usefixtures("way")
INT_MAX = 2**31 - 1
ROWS, KEYS = (3, 0, 1, 5), (20, 4, 0, 33)  # of each entry
HEADS, HEADS_K, DIM = 8, 2, 128  # for which there are kernels of serving


@pytest.fixture(params=["long", "short"])
def way(request, monkeypatch, device):
    """Whether calls may take their short way, also where the reference computes what kernels would."""
    if request.param == "long":
        for name in ("plain_forward", "plain_varlen", "plain_decode"):
            monkeypatch.setattr(ops, name, lambda *args: None)
    elif request.param == "short" and not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: not x.is_meta)
    return request.param


EITHER_WAY = pytest.mark.parametrize("way", ["either way"], indirect=True)  # that which a call takes by itself


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def bounds(device, lengths):
    return torch.nn.functional.pad(ints(device, *lengths).cumsum(0, dtype=torch.int32), (1, 0))


def randn(*shape, device, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def pages(device, page=16, dtype=torch.bfloat16):
    """Two pools, and a table of 33 keys for each of the entries, which belong to no other."""
    width = -(-max(KEYS) // page)
    count = len(KEYS) * width + 2
    pools = randn(2, count, page, HEADS_K, DIM, device=device, dtype=dtype)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: len(KEYS) * width]
    return *pools, order.view(len(KEYS), width).int().to(device)


def paged(device, page=16, **kinds):
    """The arguments of a varlen call over pages, without the lengths of keys."""
    k, v, table = pages(device, page, **kinds)
    q = randn(sum(ROWS) + 2, HEADS, DIM, device=device, seed=2, **kinds)
    return dict(q=q, k=k, v=v, cu_seqlens_q=bounds(device, ROWS), max_seqlen_q=5, max_seqlen_k=33, block_table=table)


def packed(device, **kinds):
    k, v = randn(2, sum(KEYS), HEADS_K, DIM, device=device, **kinds)
    return dict(paged(device, **kinds), k=k, v=v, block_table=None, cu_seqlens_k=bounds(device, KEYS))


def cached(device, rows=3, **kinds):
    """The arguments of a call with a cache of 40 positions and no pages."""
    q, caches = (
        randn(4, rows, HEADS, DIM, device=device, **kinds),
        randn(2, 4, 40, HEADS_K, DIM, device=device, seed=1, **kinds),
    )
    return dict(q=q, k_cache=caches[0], v_cache=caches[1], cache_seqlens=ints(device, *KEYS), causal=True)


# ---------------------------------------------------------------------------------------------------------------------
# Lengths of keys

GARBAGE = {
    "huge": (0, INT_MAX, INT_MAX, INT_MAX, INT_MAX),
    "negative": (-7, -12345, -1, -(2**31), -2),
    "decreasing": (1000, 700, 5, 3, 0),
    "of another batch": (0, 3),
    "none": None,
}


def private(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, **options):
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    more = dict(block_table=block_table, seqused_k=seqused_k)
    return torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, *bounds, 0.0, DIM**-0.5, True, **more)[:2]


def positional(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, **options):
    where = cu_seqlens_q, cu_seqlens_k, seqused_k, None, block_table, None, max_seqlen_q, max_seqlen_k
    scores = 0.0, DIM**-0.5, False, True, -1, -1, 0.0, False
    return flash_attn_gpu.varlen_fwd(q, k, v, None, *where, *scores)[:2]


def raw(q, k, v, block_table, **options):
    fields = {name: value for name, value in options.items() if name in Options._fields}
    return torch.ops.flash_attn.fwd(q, k, v, *Options(DIM**-0.5, -1, 0, block_table=block_table, **fields))


DOORS = {
    "public": functools.partial(flash_attn_varlen_func, causal=True, return_lse=True),
    "private": private,
    "positional": positional,
    "op": raw,
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.cover(2)
def test_cu_seqlens_k_is_ignored_beside_pages_and_seqused_k(door, garbage, device):
    call = paged(device)
    expected = flash_attn_varlen_func(**call, cu_seqlens_k=bounds(device, KEYS), causal=True, return_lse=True)
    anything = None if GARBAGE[garbage] is None else ints(device, *GARBAGE[garbage])
    found = DOORS[door](**call, cu_seqlens_k=anything, seqused_k=ints(device, *KEYS))
    assert all(map(identical, found, expected))


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize(
    "options", [{}, dict(window_size=[9, 2]), dict(learnable_sink=True, softcap=5.0), dict(attention_chunk=4)], ids=str
)
def test_seqused_k_has_the_lengths_of_keys_in_pages(options, page, device):
    call = paged(device, page)
    if "learnable_sink" in options:
        options = dict(options, learnable_sink=randn(HEADS, device=device))
    expected = flash_attn_varlen_func(**call, cu_seqlens_k=bounds(device, KEYS), **options, return_lse=True)
    found = flash_attn_varlen_func(**call, seqused_k=ints(device, *KEYS), **options, return_softmax_lse=True)
    assert all(map(identical, found, expected))


def test_seqused_k_bounds_packed_keys(device):
    call, used = packed(device), (7, 4, 0, 32)
    starts = call["cu_seqlens_k"].tolist()
    kept = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, used)]).to(device)
    fewer = dict(call, k=call["k"][kept], v=call["v"][kept], cu_seqlens_k=bounds(device, used))
    expected = flash_attn_varlen_func(**fewer, causal=True, return_lse=True)
    found = flash_attn_varlen_func(**call, seqused_k=ints(device, *used), causal=True, return_lse=True)
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("bound", [0, None, 1000, torch.tensor(5)], ids=str)
@pytest.mark.parametrize("make", [paged, packed])
def test_unknown_bounds_of_lengths(make, bound, device):
    """Where a graph is captured, engines pass 0. A bound changes only how the work is divided."""
    call = dict(make(device), seqused_k=ints(device, *KEYS), causal=True, return_lse=True)
    found = flash_attn_varlen_func(**dict(call, max_seqlen_q=bound, max_seqlen_k=bound))
    for each, wanted in zip(found, flash_attn_varlen_func(**call), strict=True):
        torch.testing.assert_close(each, wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("num_splits", [-1, 0, 1, 7, 128])
def test_splits_and_hints_of_varlen_calls(num_splits, device):
    call = dict(paged(device), seqused_k=ints(device, *KEYS), causal=True, return_lse=True)
    found = flash_attn_varlen_func(**call, num_splits=num_splits)
    for each, wanted in zip(found, flash_attn_varlen_func(**call), strict=True):
        torch.testing.assert_close(each, wanted, rtol=2**-7, atol=2**-9)
    hint = get_scheduler_metadata(4, 5, 33, HEADS, HEADS_K, DIM, call["seqused_k"], page_size=16, causal=True)
    assert hint.dtype == torch.int32 and hint.device == call["q"].device
    for metadata in (hint, torch.full((13,), -1, dtype=torch.int32, device=device)):
        again = flash_attn_varlen_func(**call, num_splits=num_splits, scheduler_metadata=metadata)
        assert all(map(identical, again, found))


def test_keys_in_pages_have_no_gradient(device):
    """A call with tensors that require grad is nothing to refuse; its backward is."""
    call = paged(device) | dict(seqused_k=ints(device, *KEYS), causal=True)
    expected = flash_attn_varlen_func(**call)
    for name in "qkv":
        leaf = call[name].clone().requires_grad_()
        out = flash_attn_varlen_func(**call | {name: leaf})
        torch.testing.assert_close(out.detach(), expected, rtol=2**-7, atol=2**-9)
        with pytest.raises(RuntimeError, match="block_table must be None in the backward"):
            out.sum().backward()
        assert leaf.grad is None


# ---------------------------------------------------------------------------------------------------------------------
# Results in tensors of the caller


def gaps(like):
    """A tensor with larger strides, which starts inside of its memory."""
    return like.new_full((*like.shape[:-2], like.shape[-2] + 3, like.shape[-1] + 8), 7)[..., 1:-2, :-8]


def heads_first(like):
    return torch.full_like(like.transpose(-2, -3), 7).contiguous().transpose(-2, -3)


LAYOUTS = {"contiguous": lambda like: torch.full_like(like, 7), "gaps": gaps, "heads first": heads_first}
OPTIONS = {
    "plain": {},
    "window": dict(window_size=(9, 0)),
    "sink": dict(learnable_sink=(HEADS,), softcap=5.0),
    "bias": dict(attn_bias=(1, 40)),
    "two ranges": dict(key_ranges=[0, 5, 7, 30]),
    "chunk": dict(attention_chunk=6),
}


def options_of(name, device):
    options = dict(OPTIONS[name])
    for key in ("learnable_sink", "attn_bias"):
        if key in options:
            options[key] = randn(*options[key], device=device)
    if "key_ranges" in options:
        options["key_ranges"] = ints(device, *options["key_ranges"])
    return options


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [paged, packed])
@pytest.mark.cover(2)
def test_varlen_writes_to_out(make, layout, options, device):
    call, more = make(device), options_of(options, device)
    if "key_ranges" in more:
        more["key_ranges"] = more["key_ranges"].expand(1, len(call["q"]), -1)
    call |= dict(seqused_k=ints(device, *KEYS), **more)
    assert_written(functools.partial(flash_attn_varlen_func, **call), "return_softmax_lse", layout)


def assert_written(call, flag, layout):
    wanted = call(**{flag: True}, return_max_logit=True)
    out = LAYOUTS[layout](wanted[0])
    base = out if out._base is None else out._base
    found = call(**{flag: True}, return_max_logit=True, out=out)
    assert found[0] is out and all(map(identical, found, wanted))
    assert (base == 7).sum() >= base.numel() - out.numel()  # nothing is written between its elements
    out.fill_(7)
    assert call(out=out) is out
    torch.testing.assert_close(out, wanted[0], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.cover(2)
def test_decoding_writes_to_out(layout, options, device):
    call, more = cached(device), options_of(options, device)
    if "key_ranges" in more:
        more["key_ranges"] = more["key_ranges"].expand(1, 1, 3, -1)
    assert_written(functools.partial(flash_attn_with_kvcache, **call, **more), "return_softmax_lse", layout)


def test_appending_and_writing_to_out(device):
    call, again = cached(device), cached(device)
    new = dict(zip("kv", randn(2, 4, 3, HEADS_K, DIM, device=device, seed=5), strict=True))
    wanted = flash_attn_with_kvcache(**call, **new)
    out = torch.full_like(wanted, 7)
    assert flash_attn_with_kvcache(**again, **new, out=out) is out
    assert identical(out, wanted) and identical(again["k_cache"], call["k_cache"])
    assert identical(again["v_cache"], call["v_cache"])


def test_versions_tell_autograd_what_was_written(device):
    call = cached(device)
    call |= {name: call[name].clone() for name in ("k_cache", "v_cache")}
    out, (k, v) = torch.empty_like(call["q"]), randn(2, 4, 3, HEADS_K, DIM, device=device)

    def versions():
        return [x._version for x in (call["k_cache"], call["v_cache"], out)]

    before = versions()
    flash_attn_with_kvcache(**call, out=out)
    read = versions()
    assert read[:2] == before[:2] and read[2] > before[2]
    flash_attn_with_kvcache(**call, k=k, v=v, out=out)
    assert all(after > earlier for after, earlier in zip(versions(), read, strict=True))


def test_out_may_lie_beside_q_in_one_tensor(device):
    """Columns of one matrix share no element, in whatever order they lie."""
    call = paged(device) | dict(seqused_k=ints(device, *KEYS))
    wanted = flash_attn_varlen_func(**call)
    both = call["q"].new_zeros(len(call["q"]), 2 * HEADS, DIM)
    for q, out in (
        (both[:, :HEADS], both[:, HEADS:]),
        (both[:, HEADS:], both[:, :HEADS]),
        (both[:, ::2], both[:, 1::2]),
    ):
        q.copy_(call["q"])
        assert identical(flash_attn_varlen_func(**call | dict(q=q), out=out), wanted)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("first", [0, 2, HEADS - 1])
@EITHER_WAY
def test_out_that_shares_columns_with_dense_queries(first, batch, rows, way, device):
    call = cached(device, rows)
    both = call["q"].new_zeros(4, rows, 2 * HEADS, DIM)[:batch]
    both[:, :, :HEADS] = call["q"][:batch]
    call |= {name: call[name][:batch] for name in ("k_cache", "v_cache", "cache_seqlens")}
    call["q"], untouched = both[:, :, :HEADS], both.clone()
    with pytest.raises(ValueError, match=r"out must have memory of its own.*found the memory of q"):
        flash_attn_with_kvcache(**call, out=both[:, :, first : first + HEADS])
    assert identical(both, untouched)
    wanted = flash_attn_with_kvcache(**call)
    assert identical(flash_attn_with_kvcache(**call, out=both[:, :, HEADS:]), wanted)


def test_out_of_a_head_dim_of_its_own(device):
    call = paged(device) | dict(seqused_k=ints(device, *KEYS), causal=True)
    call["v"] = call["v"][..., :48].contiguous()
    wanted = flash_attn_varlen_func(**call)
    out = torch.full_like(wanted, 7)
    assert flash_attn_varlen_func(**call, out=out) is out and identical(out, wanted) and out.shape[-1] == 48


def test_out_of_dropout(device):
    call = packed(device) | dict(dropout_p=0.3, return_attn_probs=True)
    torch.manual_seed(3)
    wanted = flash_attn_varlen_func(**call)
    torch.manual_seed(3)
    out = torch.empty_like(wanted[0])
    found = flash_attn_varlen_func(**call, out=out)
    assert found[0] is out and all(map(identical, found, wanted))


def test_out_without_gradients(device):
    call = packed(device)
    out, leaf = torch.empty_like(call["q"]), call["q"].clone().requires_grad_()
    with torch.no_grad():
        flash_attn_varlen_func(**call | dict(q=leaf), out=out)
    assert not out.requires_grad and identical(out, flash_attn_varlen_func(**call))


def test_inference_mode(device):
    """Tensors that are made there have no versions; those that are made before keep theirs."""
    call, before = paged(device) | dict(seqused_k=ints(device, *KEYS)), cached(device)
    wanted = flash_attn_varlen_func(**call), flash_attn_with_kvcache(**before)
    outs = [torch.empty_like(x) for x in wanted]
    with torch.inference_mode():
        outs += [torch.empty_like(x) for x in wanted]
        for varlen_out, cache_out in (outs[:2], outs[2:]):
            flash_attn_varlen_func(**call, out=varlen_out)
            flash_attn_with_kvcache(**before, out=cache_out)
        assert identical(flash_attn_varlen_func(**call), wanted[0])
    assert all(map(identical, outs, (*wanted, *wanted)))


@pytest.mark.parametrize("make", [paged, packed])
def test_out_of_no_rows(make, device):
    call = make(device) | dict(seqused_k=ints(device, *KEYS))
    call |= dict(q=call["q"][:0], cu_seqlens_q=ints(device, 0, 0, 0, 0, 0))
    out = call["q"].new_empty(0, HEADS, DIM)
    assert flash_attn_varlen_func(**call, out=out) is out


# ---------------------------------------------------------------------------------------------------------------------
# Packed queries over a cache


def entry_of(call, b, rows):
    """The call of one entry, with the dense queries `rows`."""
    per_entry = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "k", "v"
    own = {name: x[b : b + 1] for name, x in call.items() if name in per_entry}
    if "block_table" not in call and "cache_batch_idx" not in call:
        own |= {name: call[name][b : b + 1] for name in ("k_cache", "v_cache")}
    return {name: x for name, x in call.items() if "seqlen" not in name} | own | dict(q=call["q"][None, rows])


def rotation(device, rows=64):
    angle = torch.rand(rows, 16, generator=torch.Generator().manual_seed(4)) * 6.3
    return dict(rotary_cos=angle.cos().to(device), rotary_sin=angle.sin().to(device))


RAGGED = {
    "causal": dict(causal=True),
    "full": dict(),
    "append": dict(causal=True, new=2),
    "append, window": dict(window_size=(6, 1), new=2),
    "append, rotary": dict(causal=True, new=2, rotary=True),
    "append, rotary, halves": dict(causal=True, new=3, rotary=True, rotary_interleaved=False),
    "append, rotary, all queries at one position": dict(new=2, rotary=True),
    "append, rotary, some causal": dict(new=2, rotary=True, some=True),
    "rows of the cache": dict(causal=True, new=1, batch_idx=True),
    "left padding": dict(causal=True, leftpad=True),
    "sink and soft cap": dict(causal=True, sink=True, softcap=3.0),
    "splits": dict(causal=True, num_splits=3),
}


def ragged(device, *, page=0, new=0, rotary=False, some=False, batch_idx=False, leftpad=False, sink=False, **options):
    """A call with packed queries over a cache; `entry_of` tells what an entry of it is."""
    q = randn(sum(ROWS) + 2, HEADS, DIM, device=device, seed=2)
    call = dict(q=q, cu_seqlens_q=bounds(device, ROWS), max_seqlen_q=5, cache_seqlens=ints(device, 20, 4, 0, 30))
    if page:
        call["k_cache"], call["v_cache"], call["block_table"] = pages(device, page)
    else:
        call["k_cache"], call["v_cache"] = randn(2, 6 if batch_idx else 4, 40, HEADS_K, DIM, device=device)
    if new:
        call["k"], call["v"] = randn(2, 4, new, HEADS_K, DIM, device=device, seed=6)
    if rotary:
        call |= rotation(device)
    if some:
        options["causal"] = torch.tensor([True, False, False, True], device=device)
    if batch_idx:
        call["cache_batch_idx"] = ints(device, 5, 0, 3, 2)
    if leftpad:
        call["cache_leftpad"] = ints(device, 3, 0, 0, 29)
    if sink:
        call["learnable_sink"] = randn(HEADS, device=device)
    return call | options


@pytest.mark.parametrize(
    ("case", "page"), [(case, page) for case in RAGGED for page in (0, 5) if not (page and "batch_idx" in RAGGED[case])]
)
@pytest.mark.cover(2)
def test_packed_queries_over_a_cache(case, page, device):
    options = RAGGED[case] | dict(page=page)
    call, apart = ragged(device, **options), ragged(device, **options)
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert out.shape == call["q"].shape and lse.shape == (HEADS, len(out))
    rows = bounds("cpu", ROWS).tolist()
    for b, (start, end) in enumerate(itertools.pairwise(rows)):
        own = entry_of(apart, b, slice(start, end)) | dict(cache_seqlens=apart["cache_seqlens"][b : b + 1])
        if options.get("some"):
            own["causal"] = bool(call["causal"][b])
        wanted, wanted_lse = flash_attn_with_kvcache(**own, return_softmax_lse=True)
        torch.testing.assert_close(out[start:end], wanted[0], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(lse[:, start:end], wanted_lse[0], rtol=1e-5, atol=1e-5)
    assert not out[rows[-1] :].any()
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(call[name], apart[name], rtol=0, atol=2**-6 if options.get("rotary") else 0)


@pytest.mark.parametrize("bound", [0, None, 400, torch.tensor(5)], ids=str)
def test_unknown_bounds_of_packed_queries(bound, device):
    call = ragged(device, causal=True, page=16)
    found, wanted = (flash_attn_with_kvcache(**call | dict(max_seqlen_q=n)) for n in (bound, 5))
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("bound", [0, 1, 1000, torch.tensor(5)], ids=str)
def test_bound_of_queries_that_are_not_packed(bound, way, device):
    """transformers gives it in each step."""
    call = cached(device)
    assert identical(flash_attn_with_kvcache(**call, max_seqlen_q=bound), flash_attn_with_kvcache(**call))


def test_no_packed_queries(device):
    call = ragged(device, causal=True, new=2, rotary=True)
    nothing = dict(q=call["q"][:0], cu_seqlens_q=ints(device, 0, 0, 0, 0, 0))
    assert flash_attn_with_kvcache(**call | nothing).shape == (0, HEADS, DIM)
    before = call["k_cache"].clone()
    entries = dict(cu_seqlens_q=ints(device, 0), cache_seqlens=ints(device), k=call["k"][:0], v=call["v"][:0])
    entries |= {name: call[name][:0] for name in ("k_cache", "v_cache")}
    out, lse = flash_attn_with_kvcache(**call | entries, return_softmax_lse=True)
    assert not out.any() and lse.isinf().all() and identical(call["k_cache"], before)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_negative_lengths_read_and_append_nothing(sink, packs, device):
    """Whatever the entry's other arguments are. 0 with new keys is a first append."""
    call = ragged(device, page=16, new=5, causal=True, sink=sink)
    if not packs:
        call |= dict(q=randn(4, 3, HEADS, DIM, device=device), cu_seqlens_q=None, max_seqlen_q=None)
    call["cache_seqlens"] = ints(device, -1, 0, -INT_MAX, 43)
    call["block_table"] = call["block_table"].clone()
    call["block_table"][0], call["block_table"][2] = -1, INT_MAX
    before = call["k_cache"].clone()
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    rows = bounds("cpu", ROWS).tolist()
    for b in (0, 2):
        empty, empty_lse = (
            (out[b], lse[b]) if not packs else (out[rows[b] : rows[b + 1]], lse[:, rows[b] : rows[b + 1]])
        )
        nothing = call["learnable_sink"].float()[:, None] if sink else torch.tensor(float("inf"), device=device)
        assert not empty.any() and torch.equal(empty_lse, nothing.expand_as(empty_lse))
    table = call["block_table"].tolist()
    for b, first in ((1, 0), (3, 43)):
        for t in range(5):
            page, row = table[b][(first + t) // 16], (first + t) % 16
            assert torch.equal(call["k_cache"][page, row], call["k"][b, t])
            before[page, row] = call["k"][b, t]
    assert identical(call["k_cache"], before)


BEYOND = {  # what a table of 2 columns and a pool of 4 pages of 16 cannot serve; and whether a GPU's host knows
    "length": (dict(cache_seqlens=33), True),
    "length and new keys": (dict(cache_seqlens=30, new=3), True),
    "new keys": (dict(cache_seqlens=(0, 0), new=33), True),
    "lengths": (dict(cache_seqlens=(7, 33)), False),
    "lengths and new keys": (dict(cache_seqlens=(30, 4), new=3), False),
    "a page": (dict(cache_seqlens=(17, 4), table=[[0, 4], [1, 9]]), False),
    "a negative page": (dict(cache_seqlens=(17, 4), table=[[0, -1], [1, 9]]), False),
    "a page of new keys": (dict(cache_seqlens=(16, 4), new=3, table=[[0, 7], [1, 9]]), False),
}


def within(device, cache_seqlens, new=0, table=((0, 1), (2, 3))):
    """A call with a cache of pages."""
    q, k = randn(2, 1, HEADS, DIM, device=device), randn(2, new, HEADS_K, DIM, device=device)
    k_cache, v_cache = randn(2, 4, 16, HEADS_K, DIM, device=device)
    if not isinstance(cache_seqlens, int):
        cache_seqlens = ints(device, *cache_seqlens)
    caches = dict(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, causal=True)
    return caches | dict(block_table=ints(device, *table)) | (dict(k=k, v=k) if new else {})


@pytest.mark.parametrize("case", BEYOND)
@EITHER_WAY
def test_calls_beyond_a_table_name_it(way, case, device):
    """Where no device has to be waited for: a GPU's lengths and tables are not read by its host."""
    options, host_knows = BEYOND[case]
    if not host_knows and _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("needs a table that the host can read")
    call = within(device, **options)
    before = call["k_cache"].clone()
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_with_kvcache(**call)
    assert identical(call["k_cache"], before)


@pytest.mark.parametrize("options", [dict(cache_seqlens=32), dict(cache_seqlens=(32, 29))], ids=str)
@pytest.mark.parametrize("new", [0, 3])
@EITHER_WAY
def test_calls_up_to_the_end_of_a_table(way, new, options, device):
    """Entries are as long as their pages allow, and unused columns may hold anything."""
    lengths = options["cache_seqlens"]
    lengths = lengths - new if isinstance(lengths, int) else tuple(length - new for length in lengths)
    call = within(device, lengths, new)
    dense = {name: call[name].view(2, 32, HEADS_K, DIM).clone() for name in ("k_cache", "v_cache")}
    expected = flash_attn_with_kvcache(**call | dense | dict(block_table=None))
    call["block_table"] = torch.nn.functional.pad(call["block_table"], (0, 1), value=INT_MAX)
    torch.testing.assert_close(flash_attn_with_kvcache(**call), expected, rtol=2**-7, atol=2**-9)


@EITHER_WAY
def test_pages_outside_of_the_pool_are_not_written(way, device):
    """A table on a GPU is not looked at before. Entry 1 appends to such pages, entry 0 to its own."""
    rows = 20
    if not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("needs kernels of attention: the reference knows the table, and raises")
    around = torch.zeros(2, 6, 16, HEADS_K, DIM, device=device, dtype=torch.bfloat16)
    k_cache, v_cache = around[:, 1:5]
    q, new = (randn(3, rows, heads, DIM, device=device) for heads in (HEADS, HEADS_K))
    table = torch.tensor([[0, 1], [-1, 4], [2, 3]], dtype=torch.int32, device=device)
    lengths = ints(device, 0, 0, -1)
    flash_attn_with_kvcache(
        q, k_cache, v_cache, new, new, cache_seqlens=lengths, block_table=table, window_size=(0, 0), num_splits=1
    )
    expected = torch.zeros_like(around)
    expected[:, 1:3].flatten(1, 2)[:, :rows] = new[0]
    assert identical(around, expected)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
@EITHER_WAY
def test_pages_outside_of_the_pool_are_not_read(way, rows, sink, device):
    """By the kernels for few rows and for many. Entry 1 has such pages, and entry 0 gives what it gives without it."""
    if not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("needs kernels of attention: the reference knows the table, and raises")
    q, caches = randn(2, rows, HEADS, DIM, device=device), randn(2, 3, 16, HEADS_K, DIM, device=device)
    sinks = torch.full((HEADS,), 0.5, device=device) if sink else None
    table = torch.tensor([[0, 2, 1], [-1, INT_MAX, 3]], dtype=torch.int32, device=device)
    call = dict(k_cache=caches[0], v_cache=caches[1], causal=True, learnable_sink=sinks)
    lengths = ints(device, 43, 45)
    out = flash_attn_with_kvcache(q, cache_seqlens=lengths, block_table=table, **call)
    alone = flash_attn_with_kvcache(q[:1], cache_seqlens=lengths[:1], block_table=table[:1], **call)
    torch.testing.assert_close(out[:1], alone, rtol=2**-7, atol=2**-9)
    assert out.isfinite().all()


@pytest.mark.parametrize("seqused", [(3, 2, 1), (0, 3, 2)], ids=str)
def test_used_rows_over_a_cache(seqused, device):
    """As the functions of newer interfaces have them."""
    q, caches = randn(3, 3, HEADS, DIM, device=device), randn(2, 3, 40, HEADS_K, DIM, device=device)
    arguments = None, True, (-1, -1), ints(device, 20, 4, 30), None, None, None, None
    used = FeatureArguments(seqused_q=ints(device, *seqused))
    out, lse, _ = ops.decode(q, *caches, *arguments, used)
    for b, n in enumerate(seqused):
        own = dict(k_cache=caches[0, b : b + 1], v_cache=caches[1, b : b + 1], causal=True)
        wanted = flash_attn_with_kvcache(q[b : b + 1, :n], **own, cache_seqlens=[20, 4, 30][b])
        torch.testing.assert_close(out[b, :n], wanted[0], rtol=2**-7, atol=2**-9)
        assert not out[b, n:].any() and lse[b, :, n:].isinf().all()


# ---------------------------------------------------------------------------------------------------------------------
# Graphs, fake tensors, ops


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@EITHER_WAY
def test_compiled_varlen_calls(device):
    call = paged(device) | dict(seqused_k=ints(device, *KEYS), causal=True, num_splits=2, return_softmax_lse=True)
    wanted = flash_attn_varlen_func(**call)
    hint = torch.zeros(1, dtype=torch.int32, device=device)

    @compiled
    def step(out, **call):
        return flash_attn_varlen_func(**call, out=out, scheduler_metadata=hint)[1] + 1

    out = torch.zeros_like(wanted[0])
    torch.testing.assert_close(step(out, **call), wanted[1] + 1)
    assert identical(out, wanted[0])


@EITHER_WAY
def test_compiled_calls_with_a_cache(device):
    options = dict(page=16, new=2, causal=True, rotary=True)
    call, again = ragged(device, **options), ragged(device, **options)
    wanted = flash_attn_with_kvcache(**call)

    @compiled
    def step(out, **call):
        return flash_attn_with_kvcache(**call, out=out) * 2

    out = torch.zeros_like(wanted)
    torch.testing.assert_close(step(out, **again), wanted * 2)
    assert identical(out, wanted) and identical(again["k_cache"], call["k_cache"])


def captured(call):
    """A graph of the call, which has run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


STEPS = [((3, 0, 1, 5), (20, 4, 0, 33)), ((1, 1, 1, 1), (7, 33, 1, 20)), ((0, 0, 0, 9), (0, 0, 0, 30))]  # rows, keys


@pytest.mark.cuda
@pytest.mark.parametrize("bound", [0, 1])
def test_captured_varlen_calls(bound, device):
    """Captured before any length is known, or with bounds that later lengths exceed: replays have the bits of calls."""
    call = paged(device) | dict(seqused_k=ints(device, 0, 0, 0, 0), max_seqlen_q=bound, max_seqlen_k=bound, causal=True)
    call |= dict(cu_seqlens_q=ints(device, 0, 0, 0, 0, 0), out=torch.empty_like(call["q"]))
    graph = captured(lambda: flash_attn_varlen_func(**call))
    for rows, keys in STEPS:
        call["cu_seqlens_q"].copy_(bounds(device, rows))
        call["seqused_k"].copy_(ints(device, *keys))
        graph.replay()
        found = call["out"].clone()
        assert identical(found, flash_attn_varlen_func(**call))
        exact = flash_attn_varlen_func(**call | dict(max_seqlen_q=9, max_seqlen_k=33, out=None))
        torch.testing.assert_close(found, exact, rtol=2**-7, atol=2**-9)


@pytest.mark.cuda
@pytest.mark.parametrize("packs", [False, True])
def test_captured_appending(packs, device):
    """Entries come and go: those of negative length only pad the batch."""
    call = ragged(device, page=16, new=1, causal=True)
    rows = (
        dict(max_seqlen_q=0)
        if packs
        else dict(q=randn(4, 1, HEADS, DIM, device=device), cu_seqlens_q=None, max_seqlen_q=None)
    )
    call |= rows
    call["out"] = torch.empty_like(call["q"])
    call["cache_seqlens"].fill_(-1)
    graph = captured(lambda: flash_attn_with_kvcache(**call))
    for lengths in ((20, -1, 0, 30), (-1, -1, -1, -1), (21, 5, 1, -1)):
        call["cache_seqlens"].copy_(ints(device, *lengths))
        again = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        graph.replay()
        assert identical(call["out"], flash_attn_with_kvcache(**again))
        assert identical(call["k_cache"], again["k_cache"]) and identical(call["v_cache"], again["v_cache"])


@EITHER_WAY
def test_meta_tensors():
    call = paged("meta") | dict(seqused_k=ints("meta", *KEYS))
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    assert out.shape == (11, HEADS, DIM) and lse.shape == (HEADS, 11)
    assert flash_attn_varlen_func(**call, out=out) is out
    call = ragged("meta", causal=True, page=16, new=2)
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert out.shape == (11, HEADS, DIM) and lse.shape == (HEADS, 11)


@EITHER_WAY
def test_opcheck(device):
    call, caches = paged(device), cached(device)
    q, k, v = (call[name] for name in "qkv")
    lengths = dict(cu_seqlens_q=call["cu_seqlens_q"], block_table=call["block_table"], seqused_k=ints(device, *KEYS))
    options, features = Options(0.1, -1, 0, **lengths), (None, 0, None, None, False)
    out, lse, top = torch.empty_like(q), q.new_empty(HEADS, 11).float(), q.new_empty(HEADS, 11).float()
    ops = torch.ops.flash_attn
    torch.library.opcheck(ops.fwd_features_into.default, (q, k, v, out, lse, None, None, None, *options, *features))
    q, k, v = (caches[name] for name in ("q", "k_cache", "v_cache"))
    options = CacheOptions(0.1, -1, 0, cache_seqlens=caches["cache_seqlens"], k=k[:, :2].clone(), v=v[:, :2].clone())
    out, lse = torch.empty_like(q), q.new_empty(4, HEADS, 3).float()
    arguments = q, k, v, out, None, lse, None, None, *options, *features[:-1], True
    torch.library.opcheck(ops.fwd_kvcache_features_into.default, arguments)
    assert top.shape == (HEADS, 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype, device):
    call = paged(device, dtype=dtype) | dict(seqused_k=ints(device, *KEYS), causal=True)
    wanted = flash_attn_varlen_func(**call, cu_seqlens_k=bounds(device, KEYS))
    out = torch.empty_like(wanted)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert flash_attn_varlen_func(**call, out=out) is out
    assert identical(out, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def bad_out(change):
    return lambda good: dict(out=change(torch.empty_like(good["q"])))


def leaf(name):
    return lambda good: {name: good[name].clone().requires_grad_(), "out": torch.empty_like(good["q"])}


# fmt: off
ERRORS = {  # function: what is wrong, what is said
    flash_attn_varlen_func: [
        ("out: shape", bad_out(lambda x: x[1:]), r"out must have shape \(11, 8, 128\), found \(10, 8, 128\)"),
        ("out: dtype", bad_out(torch.Tensor.float), r"out must have dtype torch.bfloat16, found torch.float32"),
        ("out: device", bad_out(lambda x: x.to("meta")), r"out must be on .*found it on meta"),
        ("out: a list", lambda good: dict(out=[1]), r"out must be a torch.Tensor, found list"),
        ("out: strides", bad_out(lambda x: x.mT.contiguous().mT), r"out must have a contiguous last dimension"),
        ("out: expanded", bad_out(lambda x: x[:1].expand_as(x)), r"out must not be expanded"),
        ("out: a leaf", bad_out(torch.Tensor.requires_grad_), r"out must not require grad where it is written"),
        ("out: q", lambda good: dict(out=good["q"]), r"out must have memory of its own.*found the memory of q"),
        ("out: a part of q", lambda good: shifted(good["q"]), r"out must have memory of its own.*of q"),
        ("out: in k", lambda good: dict(out=good["k"].flatten()[:11264].view(11, 8, 128)), r"out .*memory of k"),
        *((f"{name}: a leaf", leaf(name), rf"{name} must not require grad with out.*no_grad") for name in "qkv"),
        ("num_splits", lambda good: dict(num_splits=129), r"num_splits must be at most 128, found 129"),
        ("metadata", lambda good: dict(scheduler_metadata=[1]), r"scheduler_metadata must be a torch.Tensor"),
        ("metadata: dtype", lambda good: dict(scheduler_metadata=torch.zeros(1)), r"scheduler_metadata must .*int32"),
        ("qv", lambda good: dict(qv=good["q"]), r"qv must be None.*not supported.*torch.cat"),
        ("q_v", lambda good: dict(q_v=good["q"]), r"q_v must be None.*not supported.*torch.cat"),
        ("no lengths of keys", lambda good: dict(seqused_k=None), r"seqused_k must .*with block_table, found NoneType"),
        ("no table", lambda good: dict(block_table=None), r"k must have 3 dimensions .* without block_table, found"),
        ("no starts of packed keys", lambda good: packed("cpu") | dict(cu_seqlens_k=None),
         r"cu_seqlens_k must be a torch.Tensor, found NoneType: seqused_k stands for it only with block_table"),
        ("seqused_k: dtype", lambda good: dict(seqused_k=good["seqused_k"].long()), r"seqused_k must .*torch.int64"),
        ("seqused_k: batch", lambda good: dict(seqused_k=good["seqused_k"][1:]), r"seqused_k must .*\(4,\).*\(3,\)"),
        ("table: dtype", lambda good: dict(block_table=good["block_table"].long()), r"block_table must .*torch.int64"),
        ("table: batch", lambda good: dict(block_table=good["block_table"][1:]), r"block_table must .*found \(3, 3\)"),
        ("table: device", lambda good: dict(block_table=good["block_table"].to("meta")), r"block_table must be on "),
        ("max_seqlen_q", lambda good: dict(max_seqlen_q=-1), r"max_seqlen_q must be at least 0, found -1"),
        ("window", lambda good: dict(window_size=[1, 2, 3]), r"window_size must be two integers .*\[1, 2, 3\]"),
        ("both lse", lambda good: dict(return_softmax_lse=True, return_attn_probs=True), r"return_lse must be False"),
        ("lse", lambda good: dict(return_softmax_lse=torch.ones(2)), r"return_softmax_lse must be a bool"),
    ],
    flash_attn_with_kvcache: [
        ("out: shape", bad_out(lambda x: x[1:]), r"out must have shape \(11, 8, 128\), found \(10, 8, 128\)"),
        ("out: q", lambda good: dict(out=good["q"]), r"out must have memory of its own.*found the memory of q"),
        ("out: a leaf", bad_out(torch.Tensor.requires_grad_), r"out must not require grad where it is written"),
        ("q: dense", lambda good: dict(q=good["q"][None]), r"q must have 3 dimensions \(total_q, heads, head_dim\)"),
        ("q: packed", lambda good: dict(cu_seqlens_q=None, max_seqlen_q=None), r"q must have 4 dimensions"),
        ("rows: dtype", lambda good: dict(cu_seqlens_q=good["cu_seqlens_q"].long()), r"cu_seqlens_q must .*int64"),
        ("rows: none", lambda good: dict(cu_seqlens_q=good["cu_seqlens_q"][:0]), r"cu_seqlens_q's length must be at"),
        ("table: batch", lambda good: dict(block_table=good["block_table"][1:]), r"block_table must .*found \(3, 3\)"),
        ("metadata", lambda good: dict(scheduler_metadata=torch.zeros(1)), r"scheduler_metadata must .*int32"),
        ("qv", lambda good: dict(qv=good["q"]), r"qv must be None.*not supported.*torch.cat"),
        ("k: batch", lambda good: dict(k=good["k"][1:], v=good["v"][1:]), r"k must have shape \(4, \*, 2, 128\)"),
    ],
}
VALUE_ERRORS = {  # of values, which are read where that waits for no device
    flash_attn_varlen_func: [
        ("seqused_k: past the table", lambda good: dict(seqused_k=good["seqused_k"] + 20),
         r"seqused_k must be between 0 and 48 for entry 3, found 53: the pages of block_table hold no more"),
        ("seqused_k: negative", lambda good: dict(seqused_k=good["seqused_k"] - 5), r"seqused_k .*entry 1, found -1"),
        ("seqused_k: past packed keys", lambda good: packed("cpu") | dict(seqused_k=ints("cpu", 20, 5, 0, 33)),
         r"seqused_k must be between 0 and 4 for entry 1, found 5"),
        ("cu_seqlens_k: past the table", lambda good: dict(seqused_k=None, cu_seqlens_k=good["cu_seqlens_q"] * 11),
         r"cu_seqlens_k must .*48 keys .*block_table hold, found 55 for entry 3"),
        ("table: too narrow", lambda good: dict(block_table=good["block_table"][:, :1]),
         r"seqused_k must be .*16 .*found 20.*block_table"),
        ("table: past the pool", lambda good: dict(block_table=good["block_table"] + 14),
         r"block_table must name pages from 0 to \d+ wherever keys are used, found \d+ in column \d for entry \d"),
        ("rows fall", lambda good: dict(cu_seqlens_q=good["cu_seqlens_q"].flip(0)), r"cu_seqlens_q must start at 0"),
    ],
    flash_attn_with_kvcache: [
        ("table: past the pool", lambda good: dict(block_table=good["block_table"] + 14),
         r"block_table must name pages from 0 to \d+ wherever keys are used, found \d+ in column \d for entry \d"),
        ("table: too narrow", lambda good: dict(block_table=good["block_table"][:, :1]),
         r"cache_seqlens must be at most 14, since the pages of block_table hold 16 keys.*found 20"),
        ("rows: too many", lambda good: dict(cu_seqlens_q=good["cu_seqlens_q"] * 2), r"cu_seqlens_q must end at"),
        ("tables too short", lambda good: rotation(good["q"].device, 48) | dict(q=good["q"].repeat(4, 1, 1),
         cu_seqlens_q=ints("cpu", 0, 3, 3, 4, 40)), r"rotary_cos and rotary_sin must have at least 66 rows, found 48"),
    ],
}
# fmt: on


def shifted(q):
    """q, and an out that is q but for one head."""
    wide = q.new_zeros(len(q), HEADS + 1, DIM)
    return dict(q=wide[:, :HEADS], out=wide[:, 1:])


def good(function, device):
    if function is flash_attn_varlen_func:
        return paged(device) | dict(seqused_k=ints(device, *KEYS))
    return ragged(device, page=16, new=2, causal=True)


def rows_of(table):
    return [
        pytest.param(function, *row[1:], id=f"{function.__name__}-{row[0]}")
        for function, rows in table.items()
        for row in rows
    ]


@EITHER_WAY
@pytest.mark.parametrize(("function", "change", "says"), rows_of(ERRORS))
def test_errors(function, change, says, device):
    call = good(function, device)
    call |= change(call)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor) and name != "out"}
    with pytest.raises((RuntimeError, NotImplementedError), match=rf"(?s){says}"):
        function(**call)
    for name, x in before.items():
        assert x.is_meta or identical(call[name], x), name


@EITHER_WAY
@pytest.mark.parametrize(("function", "change", "says"), rows_of(VALUE_ERRORS))
def test_errors_of_values(function, change, says, device):
    """Kernels cannot raise for them: they use what is there, and read and write nothing else."""
    call = good(function, device)
    if _library.runs_in_kernel("fwd", call["q"]):
        pytest.skip("only the reference reads values before it computes")
    call |= change(call)
    with pytest.raises(RuntimeError, match=rf"(?s){says}"):
        function(**call)
