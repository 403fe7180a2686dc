"""FlashAttention-3's names (extras/flash-attn-3): flash_attn's and the oracle's values, and the calls of others."""

import inspect
import math

import interpreters
import oracle
import pytest
import torch
from cases import Case
from compare import assert_error_ratio, assert_same_but_for_rounding
from newer import EMPTY_ROWS, WIDE, assert_all_equal, assert_model_is_right, ints, run, unseen
from problems import cumulative

import flash_attn
import flash_attn_3
import flash_attn_config
import flash_attn_interface as fa3
from flash_attn import functional

OPTIONS = {  # FlashAttention-3's keywords -> flash_attn's
    "plain": ({}, {}),
    "causal": (dict(causal=True), dict(causal=True)),
    "window": (dict(window_size=(20, 3)), dict(window_size=(20, 3))),
    "softcap": (dict(softcap=5.0, softmax_scale=0.3), dict(softcap=5.0, softmax_scale=0.3)),
    "chunk": (dict(attention_chunk=16, causal=True), dict(attention_chunk=16, causal=True)),
    "sink": (dict(s_aux=torch.tensor([1.0, -2.0, 0.0, 3.0])), dict(learnable_sink=torch.tensor([1.0, -2.0, 0.0, 3.0]))),
    "no effect": (dict(num_splits=3, pack_gqa=True, sm_margin=8, deterministic=True), dict(deterministic=True)),
}


def on(device, options):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("case", [WIDE, EMPTY_ROWS.but(causal=False)], ids=["more keys", "more rows"])
@pytest.mark.parametrize(("theirs", "ours"), OPTIONS.values(), ids=OPTIONS)
def test_dense(case, theirs, ours, device):
    *inputs, dout = case.tensors(device)
    theirs, ours = on(device, theirs), on(device, ours)
    dlse = torch.randn(case.batch, case.heads, case.seqlen_q, device=device)
    expected = run(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, return_lse=True, **ours), inputs, dout, dlse)
    found = run(lambda q, k, v: fa3.flash_attn_func(q, k, v, return_attn_probs=True, **theirs), inputs, dout, dlse)
    assert_all_equal(found, (expected[0], unseen(expected[1]), *expected[2:]))
    out = fa3.flash_attn_func(*inputs, **theirs)
    assert isinstance(out, torch.Tensor) and torch.equal(out, expected[0])


def test_values_and_gradients(device):
    """Against float64; rows that see no key have an out of 0 and an lse of -inf."""
    *inputs, dout = EMPTY_ROWS.tensors(device)

    def reference(q, k, v):
        return oracle.attention(q, k, v, causal=True)

    exact_out, exact_lse, exact_grads = oracle.gradients(reference, [x.double() for x in inputs], dout)
    plain_out, plain_lse, plain_grads = oracle.gradients(reference, inputs, dout)
    out, lse, *grads = run(
        lambda *x: fa3.flash_attn_func(*x, causal=True, return_attn_probs=True),
        inputs,
        dout,
        torch.zeros_like(plain_lse),
    )
    assert (lse[..., :7] == -math.inf).all() and not out[:, :7].any()
    assert_error_ratio(lse, unseen(exact_lse), unseen(plain_lse), name="lse")
    names = "out", "dq", "dk", "dv"
    for name, *three in zip(names, (out, *grads), (exact_out, *exact_grads), (plain_out, *plain_grads), strict=True):
        assert_error_ratio(*three, name=name)


@pytest.mark.parametrize("used", [False, True], ids=["all", "used"])
def test_varlen(used, device):
    q, k, v, dout = (x[0] for x in Case(batch=1, seqlen_q=60, seqlen_k=80, heads_k=2).tensors(device))
    bounds = cumulative([20, 0, 40], device), cumulative([30, 10, 40], device), 40, 40
    names = ("seqused_q", "seqused_k")
    lengths = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([17, 0, 33], [30, 5, 31])]
    seqused = dict(zip(names, lengths)) if used else {}
    options = dict(causal=True, window_size=(25, -1), **seqused)
    dlse = torch.randn(4, 60, device=device)
    expected = run(
        lambda *x: flash_attn.flash_attn_varlen_func(*x, *bounds, return_lse=True, **options), (q, k, v), dout, dlse
    )
    found = run(
        lambda *x: fa3.flash_attn_varlen_func(*x, *bounds, return_attn_probs=True, **options), (q, k, v), dout, dlse
    )
    assert_all_equal(found, (expected[0], unseen(expected[1]), *expected[2:]))
    by_position = fa3.flash_attn_varlen_func(q, k, v, *bounds, *(seqused.get(name) for name in names), None, True)
    assert torch.equal(by_position, flash_attn.flash_attn_varlen_func(q, k, v, *bounds, causal=True, **seqused))


def test_qkvpacked(device):
    """As three of equal heads, and as the heads of queries, keys and values after one another."""
    *inputs, dout = Case(heads_k=2).tensors(device)
    qkv, dlse = torch.cat(inputs, dim=2), torch.randn(2, 4, 64, device=device)

    def apart(qkv):
        return flash_attn.flash_attn_func(*qkv.split([4, 2, 2], dim=2), causal=True, return_lse=True)

    def packed(qkv):
        return fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4, causal=True, return_attn_probs=True)

    assert_all_equal(run(packed, [qkv], dout, dlse), run(apart, [qkv], dout, dlse))
    same = torch.stack([inputs[0]] * 3, dim=2)
    found = fa3.flash_attn_qkvpacked_func(same, causal=True)
    assert torch.equal(found, flash_attn.flash_attn_qkvpacked_func(same, causal=True))
    for wrong in (None, 3, 8):
        with pytest.raises(ValueError, match="num_heads_q must"):
            fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=wrong)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_kvcache_appends(paged, device):
    """The caches and the results are those of flash_attn, by its own names."""
    q, k, v, _ = Case(seqlen_q=3, seqlen_k=3, heads_k=2).tensors(device)
    cos, sin = (torch.randn(48, 8, device=device) for _ in range(2))
    where = dict(
        cache_seqlens=ints(device, 20, 33), causal=True, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False
    )
    shape = (6, 16, 2, 64) if paged else (4, 48, 2, 64)
    caches = [torch.randn(shape, device=device).bfloat16() for _ in range(2)]
    table = ints(device, [4, 1, 0], [2, 5, 3])
    ours = (
        dict(block_table=table) if paged else dict(cache_batch_idx=ints(device, 3, 1), cache_leftpad=ints(device, 0, 7))
    )
    theirs = dict(page_table=table) if paged else ours
    expected_caches = [x.clone() for x in caches]
    expected = flash_attn.flash_attn_with_kvcache(
        q, *expected_caches, k, v, return_softmax_lse=True, num_splits=2, **where, **ours
    )
    found = fa3.flash_attn_with_kvcache(q, *caches, k, v, return_softmax_lse=True, num_splits=2, **where, **theirs)
    assert_all_equal((*found, *caches), (*expected, *expected_caches))
    assert isinstance(
        fa3.flash_attn_with_kvcache(q, *caches, **{**where, "rotary_cos": None, "rotary_sin": None}, **theirs),
        torch.Tensor,
    )


def lengths_of(x, batch):
    return [int(n) for n in torch.as_tensor(x).expand(batch)]


@pytest.mark.parametrize("length", ["int", "tensor", "none"])
@pytest.mark.parametrize("kind", ["rows", "batch_idx", "leftpad", "pages"])
def test_packed_queries_over_a_cache(kind, length, device):
    """They have no counterpart in flash_attn: against the oracle, entry by entry."""
    q = torch.randn(9, 4, 64, device=device).bfloat16()
    k, v = (torch.randn(4, 12, 2, 64, device=device).bfloat16() for _ in range(2))
    bounds, cu_seqlens_q = [0, 4, 4, 9], ints(device, 0, 4, 4, 9)
    filled = {"int": 7, "tensor": ints(device, 10, 3, 8), "none": None}[length]
    capacity, where, rows = 12, {}, [k[[0, 1, 2]], v[[0, 1, 2]]]
    if kind == "rows":
        k, v = k[:3], v[:3]
    elif kind == "batch_idx":
        where, rows = dict(cache_batch_idx=ints(device, 3, 0, 2)), [x[[3, 0, 2]] for x in (k, v)]
    elif kind == "leftpad":
        k, v, where = k[:3], v[:3], dict(cache_leftpad=ints(device, 2, 0, 5))
    else:
        table = ints(device, [5, 0], [1, 7], [3, 2])
        k, v = (x.reshape(8, 6, 2, 64) for x in (k, v))
        where, rows = dict(page_table=table), [x[table.long()].flatten(1, 2) for x in (k, v)]
    out, lse = fa3.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=filled,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=5,
        causal=True,
        return_softmax_lse=True,
        **where,
    )
    first = where.get("cache_leftpad", [0, 0, 0])
    for b, n in enumerate(lengths_of(capacity if filled is None else filled, 3)):
        queries, seen = slice(bounds[b], bounds[b + 1]), slice(int(first[b]), n)
        inputs = q[None, queries], *(x[b : b + 1, seen] for x in rows)
        exact, exact_lse = oracle.attention(*(x.double() for x in inputs), causal=True)
        plain, plain_lse = oracle.attention(*inputs, causal=True)
        assert_error_ratio(out[None, queries], exact, plain)
        plain_lse = oracle.attention(*(x.float() for x in inputs), causal=True)[1]
        assert_error_ratio(lse[None, :, queries], unseen(exact_lse), unseen(plain_lse))


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_packed_queries_append(paged, device):
    """As in flash_attn, by its names; lse is -inf for an entry that sees nothing."""
    q, (k, v) = torch.randn(9, 4, 64, device=device), torch.randn(2, 3, 2, 2, 64, device=device)
    caches = torch.randn(2, 6, 16, 2, 64, device=device) if paged else torch.randn(2, 3, 32, 2, 64, device=device)
    table = ints(device, [5, 0], [1, 4], [3, 2])
    common = dict(cu_seqlens_q=ints(device, 0, 4, 4, 9), max_seqlen_q=5, causal=True, return_softmax_lse=True)
    common |= dict(cache_seqlens=ints(device, 20, 3, -1))
    again = caches.clone()
    found = fa3.flash_attn_with_kvcache(q, *caches, k, v, **common, **(dict(page_table=table) if paged else {}))
    expected = flash_attn.flash_attn_with_kvcache(
        q, *again, k, v, **common, **(dict(block_table=table) if paged else {})
    )
    assert_all_equal((found[0], found[1], caches), (expected[0], unseen(expected[1]), again))
    assert (found[1][:, 4:] == -math.inf).all()


@pytest.mark.parametrize("packs", [False, True])
def test_used_rows_over_a_cache_and_out(packs, device):
    """Rows that seqused_q leaves out are 0, and the others as without it; the result is written to out."""
    q, caches = torch.randn(2, 4, 4, 64, device=device), torch.randn(2, 2, 16, 2, 64, device=device)
    filled, used = ints(device, 12, 7), ints(device, 3, 0)
    out = torch.full_like(q, 7)
    expected = fa3.flash_attn_with_kvcache(q[:1, :3], *caches[:, :1], cache_seqlens=filled[:1], causal=True)
    more = dict(causal=True, seqused_q=used, seqused_k=filled)
    if packs:
        more |= dict(cu_seqlens_q=ints(device, 0, 4, 8), max_seqlen_q=4)
    given = (q.flatten(0, 1), out.flatten(0, 1)) if packs else (q, out)
    found = fa3._flash_attn_forward(given[0], *caches, out=given[1], **more)
    assert found[0] is given[1]
    torch.testing.assert_close(out[:1, :3], expected)
    assert not out[0, 3:].any() and not out[1].any()


def test_combine(device):
    """Heads last in lse; -inf for what a part did not see, and for what none saw."""
    q, k, v, _ = EMPTY_ROWS.tensors(device)
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 9), slice(9, 33))]
    outs, lses = (torch.stack(x) for x in zip(*parts))
    outs, lses = outs.float(), lses.transpose(-1, -2).contiguous()
    lses[:, :, 5], lses[0, :, 6] = -math.inf, -math.inf
    out, lse = fa3.flash_attn_combine(outs, lses)
    expected = functional.combine(outs, lses.transpose(-1, -2))
    assert torch.equal(out, expected[0]) and torch.equal(lse, unseen(expected[1]).transpose(-1, -2))
    assert (lse[:, 5] == -math.inf).all() and not out[:, 5].any()
    torch.testing.assert_close(out[:, 6], outs[1, :, 6])
    target = torch.empty_like(out, dtype=torch.bfloat16)
    given, _ = fa3.flash_attn_combine(outs, lses, target)
    assert given is target and torch.equal(target, out.bfloat16())
    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16
    with pytest.raises(ValueError, match="out must have shape"):
        fa3.flash_attn_combine(outs, lses, target[:1])


REFUSED = {  # an argument -> the functions that have it
    "qv": ["func", "varlen_func", "with_kvcache"],
    "cu_seqlens_k_new": ["with_kvcache"],
    "rotary_seqlens": ["with_kvcache"],
}


@pytest.mark.parametrize(
    ("argument", "name"), [(argument, name) for argument, names in REFUSED.items() for name in names]
)
def test_what_is_not_computed_is_refused(argument, name, device):
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4).tensors(device)
    cu_seqlens = ints(device, 0, 4)
    arguments = {
        "func": (q, k, v),
        "varlen_func": (q[0], k[0], v[0], cu_seqlens, cu_seqlens, 4, 4),
        "qkvpacked_func": (torch.stack([q, k, v], dim=2),),
        "with_kvcache": (q, k, v, k, v),
    }
    with pytest.raises(NotImplementedError, match=f"{argument} must be None, found a Tensor"):
        getattr(fa3, f"flash_attn_{name}")(*arguments[name], **{argument: torch.ones(1, 4)})


DESCALES = "q_descale", "k_descale", "v_descale"


@pytest.mark.parametrize("name", ["func", "qkvpacked_func", "varlen_func", "with_kvcache"])
def test_descales_belong_to_float8(name, device):
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4).tensors(device)
    cu_seqlens = ints(device, 0, 4)
    packed = (*(x[0] for x in (q, k, v)), cu_seqlens, cu_seqlens, 4, 4)
    arguments = dict(func=(q, k, v), qkvpacked_func=(torch.stack([q, k, v], 2),), varlen_func=packed)
    for descale in DESCALES:
        with pytest.raises(ValueError, match=f"{descale} must be None unless .* torch.float8_e4m3fn, found"):
            getattr(fa3, f"flash_attn_{name}")(
                *arguments.get(name, (q, k, v)), **{descale: torch.ones(1, q.shape[2], device=device)}
            )


@pytest.mark.parametrize("name", ["varlen_func", "with_kvcache", "op"])
def test_keys_in_float8(name, device):
    """Beside queries of 16 bits, to which keys are appended, and of float8, which are converted."""
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4, dtype="bf16").tensors(device)
    codes = [functional.to_float8(x, 0.5) for x in (q, k, v)]
    halves = {descale: torch.full((1, k.shape[2]), 0.5, device=device) for descale in DESCALES}
    scales = {descale: half for descale, half in halves.items() if descale != "q_descale"}
    ends = ints(device, 0, 4)
    expected = flash_attn.flash_attn_varlen_func(
        codes[0][0].bfloat16() / 2, *(x[0] for x in codes[1:]), ends, ends, 4, 4, causal=True, **scales
    )

    def call(queries, *new, **given):
        if name == "varlen_func":
            return fa3.flash_attn_varlen_func(
                queries[0], *(x[0] for x in codes[1:]), ends, ends, 4, 4, causal=True, **given
            )
        caches = [torch.zeros_like(x) for x in codes[1:]] if new else codes[1:]
        length = ints(device, 0 if new else 4)
        if name == "op":
            return torch.ops.flash_attn_3.fwd(queries, *caches, *new, seqused_k=length, is_causal=True, **given)[0][0]
        return fa3.flash_attn_with_kvcache(queries, *caches, *new, cache_seqlens=length, causal=True, **given)[0]

    assert torch.equal(call(codes[0].bfloat16() / 2, k, v, **scales), expected)
    assert torch.equal(call(codes[0], **halves), expected)


@pytest.mark.parametrize("paged", [False, True])
def test_what_engines_pass_by_other_names(paged, device):
    """A sink by either of its names; starts of new keys where there are none, which say nothing."""
    q, k, v, _ = Case(batch=2, seqlen_q=3, seqlen_k=8).tensors(device)
    sink, starts, lengths = torch.randn(q.shape[2], device=device), ints(device, 0, 2, 6), ints(device, 5, 8)
    packed = dict(cu_seqlens_q=starts, max_seqlen_q=4, causal=True)
    if paged:
        where = dict(cache_seqlens=lengths, page_table=ints(device, [1], [0]))
        call, inputs = fa3.flash_attn_with_kvcache, (q.flatten(0, 1), k, v)
        extra = dict(cu_seqlens_k_new=ints(device, 0, 5, 13))
    else:
        where = dict(cu_seqlens_k=ints(device, 0, 5, 13), max_seqlen_k=8)
        call, inputs, extra = fa3.flash_attn_varlen_func, [x.flatten(0, 1) for x in (q, k, v)], {}
    expected = call(*inputs, **packed, **where, s_aux=sink)
    assert torch.equal(call(*inputs, **packed, **where, **extra, sinks=sink), expected)
    assert not torch.equal(call(*inputs, **packed, **where), expected)
    with pytest.raises(ValueError, match="s_aux must be None where sinks is given, found both"):
        call(*inputs, **packed, **where, s_aux=sink, sinks=sink.clone())


@pytest.mark.parametrize("lengths", ["seqused_k", "cu_seqlens_k", "both"])
def test_packed_queries_over_pages(lengths, device):
    """As SGLang calls it, by names."""
    q, k, v, _ = Case(batch=2, seqlen_q=3, seqlen_k=8).tensors(device)
    q, out = q.flatten(0, 1), torch.empty_like(q.flatten(0, 1))
    starts, used, ends = ints(device, 0, 2, 6), ints(device, 5, 8), ints(device, 0, 5, 13)
    call = dict(max_seqlen_q=4, max_seqlen_k=8, causal=True, page_table=ints(device, [1], [0]), only_qv=False)
    keys = dict(seqused_k=None if lengths == "cu_seqlens_k" else used)
    garbage = ints(device, 3, -9, 10**9)
    keys["cu_seqlens_k"] = dict(seqused_k=None, cu_seqlens_k=ends, both=garbage)[lengths]
    found, lse = fa3.flash_attn_varlen_func(q, k, v, starts, **keys, **call, out=out, return_softmax_lse=True)
    del call["max_seqlen_k"]
    cached = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, cu_seqlens_q=starts, **call, out=torch.empty_like(q), return_softmax_lse=True
    )
    assert found is out and torch.equal(found, cached[0]) and torch.equal(lse, cached[1])


@pytest.mark.parametrize("name", ["varlen_func", "with_kvcache"])
def test_only_qv_is_refused(name, device):
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4).tensors(device)
    cu_seqlens = ints(device, 0, 4)
    arguments = (*(x[0] for x in (q, k, v)), cu_seqlens, cu_seqlens, 4, 4) if name == "varlen_func" else (q, k, v)
    with pytest.raises(NotImplementedError, match="only_qv must be False, found True"):
        getattr(fa3, f"flash_attn_{name}")(*arguments, only_qv=True)
    with pytest.raises(TypeError, match="only_qv must be a bool, found None"):
        getattr(fa3, f"flash_attn_{name}")(*arguments, only_qv=None)


def test_other_refusals(device):
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4).tensors(device)
    cu_seqlens = ints(device, 0, 4)
    with pytest.raises(ValueError, match="cu_seqlens_q must be given with cu_seqlens_k"):
        fa3._flash_attn_forward(q, k, v, cu_seqlens_k=cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens_k must be None with page_table"):
        fa3._flash_attn_forward(
            q[0], k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, page_table=ints(device, [0])
        )
    for appended in (dict(k_new=k[0], v_new=v[0]), dict(rotary_cos=q, rotary_sin=q)):
        with pytest.raises(NotImplementedError, match="must be None with cu_seqlens_k"):
            fa3._flash_attn_forward(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **appended)
    with pytest.raises(TypeError, match=r"cu_seqlens_k must be a torch\.Tensor"):
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, None, 4, 4)
    with pytest.raises(TypeError, match=r"k must have dtype .* here, found torch\.float8_e4m3fn"):
        fa3.flash_attn_func(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)))
    with pytest.raises(ValueError, match="head_size must be at most 256, found 257"):
        fa3.round_up_headdim(257)


# ---------------------------------------------------------------------------------------------------------------------
# Private functions: what other packages pass


@pytest.fixture
def problem(device):
    """q, k, v, dout, and (out, lse, dq, dk, dv) of flash_attn, where the first rows see no key."""
    *inputs, dout = EMPTY_ROWS.with_stored_out(device).tensors(device)
    dlse = torch.zeros(2, 4, 40, device=device)
    out, lse, *grads = run(
        lambda *x: flash_attn.flash_attn_func(*x, causal=True, deterministic=True, return_lse=True), inputs, dout, dlse
    )
    return *inputs, dout, (out.detach(), unseen(lse.detach()), *grads)


FORWARDS = {
    "diffusers": lambda q, k, v: fa3._flash_attn_forward(
        q,
        k,
        v,
        *[None] * 20,
        softmax_scale=None,
        causal=True,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ),
    "yunchang": lambda q, k, v: fa3._flash_attn_forward(
        q=q,
        k=k,
        v=v,
        k_new=None,
        v_new=None,
        qv=None,
        out=None,
        seqused_k=None,
        page_table=None,
        kv_batch_idx=None,
        seqlens_rotary=None,
        causal=True,
        window_size=(-1, -1),
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
    ),
    "Megatron-LM": lambda q, k, v: fa3._flash_attn_forward(
        q=q, k=k, v=v, out_=None, out=None, window_size=(-1, -1), window_size_left=-1, window_size_right=-1, causal=True
    ),
    "ops": lambda q, k, v: fa3.flash_attn_3_gpu.fwd(q, k, v, *[None] * 20, None, True),
}


@pytest.mark.parametrize("call", FORWARDS.values(), ids=FORWARDS)
def test_private_forward(call, problem):
    q, k, v, _, (out, lse, *_) = problem
    results = call(q.requires_grad_(), k, v)
    assert len(results) == 4 and not any(x.requires_grad for x in results)
    assert_all_equal(results[:2], (out, lse))
    assert all(x.numel() == 0 for x in results[2:])


@pytest.mark.parametrize("name", ["out", "out_"])
def test_private_forward_writes_out(name, problem):
    q, k, v, _, (out, *_) = problem
    target = torch.full_like(q, math.nan)
    assert fa3._flash_attn_forward(q, k, v, causal=True, **{name: target})[0] is target
    assert torch.equal(target, out)
    with pytest.raises(ValueError, match="out must have shape"):
        fa3._flash_attn_forward(q, k, v, **{name: target[:, :1]})


BACKWARDS = {
    "TransformerEngine": dict(is_causal=True, window_size_left=-1, window_size_right=0, deterministic=True),
    "yunchang": dict(
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        sm_margin=0,
    ),
}


@pytest.mark.parametrize("options", BACKWARDS.values(), ids=BACKWARDS)
def test_private_backward(options, problem):
    q, k, v, dout, (out, lse, *grads) = problem
    targets = [torch.full_like(x, math.nan) for x in (q, k, v)]
    softmax_d = fa3._flash_attn_backward(dout, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), targets)), **options)
    assert_all_equal(targets, grads)
    torch.testing.assert_close(softmax_d[..., :40], (dout * out).float().sum(-1).transpose(1, 2), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("given", [{}, {"dq": 1, "dk": 1}], ids=["none", "two"])
def test_private_backward_needs_targets(given, problem):
    q, k, v, dout, (out, lse, *_) = problem
    targets = {name: torch.empty_like(q if name == "dq" else k) for name in given}
    with pytest.raises(ValueError, match="must be given, since the gradients are written there"):
        fa3._flash_attn_backward(dout, q, k, v, out, lse, **targets)


TWO_NAMES = {
    "causal": (dict(causal=False, is_causal=True), "causal must be None where is_causal is given"),
    "window": (dict(window_size=(3, 0), window_size_left=2), r"window_size must be \(2, -1\) .* found \(3, 0\)"),
}


@pytest.mark.parametrize(("options", "error"), TWO_NAMES.values(), ids=TWO_NAMES)
def test_two_names_of_one_argument_agree(options, error, problem):
    q, k, v, dout, (out, lse, *_) = problem
    targets = dict(zip(("dq", "dk", "dv"), (torch.empty_like(x) for x in (q, k, v))))
    with pytest.raises(ValueError, match=error):
        fa3._flash_attn_backward(dout, q, k, v, out, lse, **targets, **options)
    with pytest.raises(ValueError, match="out must be None where out_ is given"):
        fa3._flash_attn_forward(q, k, v, out=out, out_=torch.empty_like(out))


HARD = {  # what the backward of 2.8's private functions does not take
    "values of 32": (dict(), dict(), 32),
    "values of 96": (dict(causal=True), dict(is_causal=True), 96),
    "head_dim 288": (dict(causal=True), dict(is_causal=True), 288),
    "used": (dict(causal=True), dict(is_causal=True), 64),
}


@pytest.mark.parametrize(("forward", "backward", "head_dim_v"), HARD.values(), ids=HARD)
def test_private_backward_of_features(forward, backward, head_dim_v, device, request):
    """From out and lse as they are given, here those of the forward."""
    q, k, v, _ = Case(seqlen_q=33, seqlen_k=40, heads_k=2).tensors(device)
    v = torch.randn(*v.shape[:-1], head_dim_v, device=device, dtype=v.dtype)
    if head_dim_v > 256:
        q, k = (torch.randn(*x.shape[:-1], head_dim_v, device=device, dtype=x.dtype) for x in (q, k))
    used = (ints(device, 20, 33), ints(device, 40, 11)) if "used" in request.node.callspec.id else (None, None)
    dout = torch.randn(*q.shape[:-1], head_dim_v, device=device, dtype=q.dtype)
    out, lse, *expected = run(
        lambda *x: flash_attn.flash_attn_func(
            *x, deterministic=True, return_lse=True, seqused_q=used[0], seqused_k=used[1], **forward
        ),
        (q, k, v),
        dout,
        torch.zeros(2, 4, 33, device=device),
    )
    targets = [torch.full_like(x, math.nan) for x in (q, k, v)]
    fa3._flash_attn_backward(
        dout, q, k, v, out, unseen(lse), None, None, *used, None, None, *targets, deterministic=True, **backward
    )
    assert_same_but_for_rounding(targets, expected)


def test_function_classes(problem):
    q, k, v, _, (out, *_) = problem
    found = fa3.FlashAttnFunc.apply(q.requires_grad_(), k, v, None, True)
    assert torch.equal(found, out) and found.requires_grad


def test_other_names():
    assert [fa3.round_up_headdim(n) for n in (8, 65, 96, 100, 193)] == [64, 96, 96, 128, 256]
    assert fa3.round_multiple(65, 64) == 128 and fa3.maybe_contiguous(None) is None
    assert fa3.flash_attn_3_gpu is torch.ops.flash_attn_3
    from flash_attn_3 import flash_attn_interface as within

    assert all(getattr(within, name) is getattr(fa3, name) for name in fa3.__all__)
    assert within._flash_attn_forward is fa3._flash_attn_forward
    assert inspect.isfunction(fa3._flash_attn_forward)
    assert flash_attn_3.__version__


def test_config(capsys):
    flags = flash_attn_config.CONFIG["build_flags"]
    assert flags["FLASHATTENTION_DISABLE_FP8"] and not flags["FLASHATTENTION_DISABLE_BACKWARD"]
    assert all(isinstance(value, bool) for value in flags.values()) and len(flags) == 20
    flash_attn_config.show()
    assert "FLASHATTENTION_DISABLE_FP8: True\n" in capsys.readouterr().out
    from flash_attn_3.flash_attn_config import CONFIG, show

    assert CONFIG is flash_attn_config.CONFIG and show is flash_attn_config.show


# ---------------------------------------------------------------------------------------------------------------------
# torch.ops.flash_attn_3

SCHEMAS = {  # name -> arguments; ? and no default: None
    "fwd": (
        "q, k, v, k_new?, v_new?, q_v?, out?, cu_seqlens_q?, cu_seqlens_k?, cu_seqlens_k_new?, seqused_q?, seqused_k?, "
        "max_seqlen_q?, max_seqlen_k?, page_table?, kv_batch_idx?, leftpad_k?, rotary_cos?, rotary_sin?, "
        "seqlens_rotary?, q_descale?, k_descale?, v_descale?, softmax_scale?, is_causal=False, window_size_left=-1, "
        "window_size_right=-1, attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata?, "
        "num_splits=0, pack_gqa?, sm_margin=0",
        4,
    ),
    "bwd": (
        "dout, q, k, v, out, softmax_lse, dq?, dk?, dv?, cu_seqlens_q?, cu_seqlens_k?, seqused_q?, seqused_k?, "
        "max_seqlen_q?, max_seqlen_k?, softmax_scale?, is_causal=False, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, deterministic=False, sm_margin=0",
        5,
    ),
    "fwd_combine": ("out_partial, lse_partial, out?, out_dtype?", 2),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k, "
        "cu_seqlens_q?, cu_seqlens_k?, cu_seqlens_k_new?, seqused_q?, leftpad_k?, page_size?, max_seqlen_k_new=0, "
        "is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, has_softcap=False, "
        "num_splits=0, pack_gqa?, sm_margin=0",
        1,
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name):
    def shown(argument):
        if not argument.has_default_value():
            return argument.name
        default = argument.default_value
        return f"{argument.name}?" if default is None else f"{argument.name}={default}"

    schema = getattr(torch.ops.flash_attn_3, name).default._schema
    assert (", ".join(map(shown, schema.arguments)), len(schema.returns)) == SCHEMAS[name]


def cases_of_ops(device):
    q, k, v, dout = Case(seqlen_q=5, seqlen_k=9, heads_k=2, head_dim=16).tensors(device)
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = dict(cu_seqlens_q=ints(device, 0, 5, 10), cu_seqlens_k=ints(device, 0, 9, 18))
    bounds |= dict(max_seqlen_q=5, max_seqlen_k=9)
    pages = [torch.randn(6, 4, 2, 16, device=device).bfloat16() for _ in range(2)]
    filled = dict(page_table=ints(device, [3, 1, 5], [0, 4, 2]), seqused_k=ints(device, 7, 8))
    new = dict(k_new=k[:, :2].clone(), v_new=v[:, :2].clone())
    grads = [torch.empty_like(x) for x in (q, k, v)]
    return {
        "fwd": ("fwd", (q, k, v), dict(is_causal=True)),
        "fwd, out": ("fwd", (q, k, v), dict(out=torch.empty_like(q))),
        "fwd, varlen": ("fwd", packed, bounds),
        "fwd, pages": ("fwd", (packed[0], *pages), dict(cu_seqlens_q=bounds["cu_seqlens_q"], max_seqlen_q=5, **filled)),
        "fwd, appended": ("fwd", (q[:, :2], *pages), dict(**filled, **new)),
        "bwd": ("bwd", (dout, q, k, v, out, lse, *grads), {}),
        "bwd, values": (
            "bwd",
            (dout[..., :8], q, k, v[..., :8], out[..., :8], lse, *grads[:2], grads[2][..., :8].clone()),
            {},
        ),
        "combine": ("fwd_combine", (torch.randn(2, 3, 5, 4, 16), torch.randn(2, 3, 5, 4)), {}),
        "metadata": ("get_scheduler_metadata", (2, 1, 9, 4, 2, 16, 16, torch.bfloat16, ints(device, 3, 4)), {}),
    }


@pytest.mark.parametrize("name", cases_of_ops("cpu"))
def test_ops(name, device):
    op, args, kwargs = cases_of_ops(device)[name]
    torch.library.opcheck(getattr(torch.ops.flash_attn_3, op).default, tuple(args), kwargs)


def test_ops_and_functions_compile(device):
    q, k, v, dout = Case(seqlen_q=20, seqlen_k=30, heads_k=2).tensors(device)

    def step(q, k, v):
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, deterministic=True, return_attn_probs=True)
        target = torch.empty_like(q)
        again, _, *_ = torch.ops.flash_attn_3.fwd(q.detach(), k.detach(), v.detach(), out=target, is_causal=True)
        return out + again + target, lse

    expected = run(step, (q, k, v), dout, torch.ones(2, 4, 20, device=device))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_all_equal(run(compiled, (q, k, v), dout, torch.ones(2, 4, 20, device=device)), expected)


def test_ops_of_the_original_stay(device):
    """Where its library is loaded before, importing the names here defines nothing."""
    code = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.impl("fwd", lambda q: q + 1, "CPU")
import flash_attn_interface
assert torch.ops.flash_attn_3.fwd(torch.ones(1)) == 2
assert hasattr(torch.ops.flash_attn_3, "bwd")
"""
    interpreters.run(code)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch and transformers, as far as they go without a GPU


@pytest.fixture
def torch_fa3():
    module = pytest.importorskip("torch.nn.attention._fa3", reason="this torch has no door for FlashAttention-3")
    module._fa3_import_module("flash_attn_interface")
    yield module
    module._FA3_CUDA_FWD = module._FA3_CUDA_BWD = None


def test_torch_dense(torch_fa3, problem):
    """What PyTorch's attention calls after activate_flash_attention_impl("FA3"), behind its test of the GPU."""
    q, k, v, dout, (out, lse, *grads) = problem
    target = torch.empty(2, 4, 40, 64, dtype=q.dtype, device=q.device).transpose(1, 2)
    found, found_lse = torch_fa3._fa3_run_forward(q, k, v, None, None, 40, 33, None, True, None, None, None, target)
    assert_all_equal((target, found, found_lse), (out, out, lse))
    arguments = dout, q, k, v, out, lse, None, None, 40, 33, None, True, -1, -1, True
    assert_all_equal(torch_fa3._fa3_run_backward(*arguments), grads)


def test_torch_varlen(torch_fa3, device):
    case = Case(batch=1, seqlen_q=60, seqlen_k=80, heads_k=2).with_stored_out(device)
    q, k, v, dout = (x[0] for x in case.tensors(device))
    bounds = cumulative([20, 40], device), cumulative([30, 50], device), 40, 50
    dlse = torch.zeros(4, 60, device=device)
    options = dict(window_size=(9, 0), softmax_scale=0.2, return_lse=True)
    out, lse, *grads = run(
        lambda *x: flash_attn.flash_attn_varlen_func(*x, *bounds, deterministic=True, **options), (q, k, v), dout, dlse
    )
    found = torch_fa3._fa3_run_forward(q, k, v, *bounds, 0.2, False, 9, 0, None)
    assert_all_equal(found, (out, lse))
    found = torch_fa3._fa3_run_backward(dout, q, k, v, out, lse, *bounds, 0.2, False, 9, 0, True)
    assert_all_equal(found, grads)


def test_torch_pages(torch_fa3, device):
    if "block_table" not in inspect.signature(torch_fa3._fa3_run_forward).parameters:
        pytest.skip("this torch passes no pages")
    pages = [torch.randn(6, 4, 2, 64, device=device).bfloat16() for _ in range(2)]
    q, table, used = (
        torch.randn(5, 4, 64, device=device).bfloat16(),
        ints(device, [3, 1, 5], [0, 4, 2]),
        ints(device, 7, 10),
    )
    arguments = ints(device, 0, 2, 5), None, 3, 12, None, False, -1, 0, used
    out, _ = torch_fa3._fa3_run_forward(q, *pages, *arguments, block_table=table, num_splits=1)
    for b, rows in enumerate((slice(0, 2), slice(2, 5))):
        keys, values = (x[table[b].long()].flatten(0, 1)[None, : used[b]] for x in pages)
        expected = flash_attn.flash_attn_func(q[None, rows], keys, values, causal=True)
        torch.testing.assert_close(out[None, rows], expected)


@pytest.fixture
def transformers_fa3(monkeypatch):
    """transformers with flash_attention_3 for its choice, without what asks for a GPU and for installed packages."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(module, "_process_with_kvcache_kwargs_fn"):
        pytest.skip("this transformers looks for FlashAttention-3 in another way")
    monkeypatch.setattr(module, "_loaded_implementation", None)
    module.lazy_import_flash_attention("flash_attention_3")
    return transformers, module


def test_transformers_finds_the_functions(transformers_fa3):
    _, module = transformers_fa3
    (dense, varlen, cached, *_), (of_varlen, of_cache) = module.lazy_import_flash_attention("flash_attention_3")
    assert (dense, varlen) == (fa3.flash_attn_func, fa3.flash_attn_varlen_func)
    assert inspect.unwrap(cached) is fa3.flash_attn_with_kvcache
    supported = of_varlen.keywords["supports_mapping"]
    assert {name for name in ("window_size", "softcap", "deterministic", "s_aux", "dropout_p") if supported[name]} == {
        "window_size",
        "softcap",
        "deterministic",
        "s_aux",
    }
    supported = of_cache.keywords["supports_mapping"]
    assert supported["page_table"] and not supported["block_table"] and supported["cache_seqlens"]


MODELS = {
    "Llama": ("Llama", {}),
    "Mistral, window": ("Mistral", dict(sliding_window=5)),
    # For this one, transformers itself takes s_aux from FlashAttention-3 of its hub only.
    "gpt-oss, sinks": ("GptOss", dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=1, head_dim=16)),
}


@pytest.mark.parametrize(("family", "options"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_transformers_models(family, options, padded, transformers_fa3, device):
    assert_model_is_right(family, options, padded, "flash_attention_3", device)
