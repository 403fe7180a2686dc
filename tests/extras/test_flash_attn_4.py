"""FlashAttention-4's names (extras/flash-attn-4): flash_attn's and the oracle's values, and the calls of others."""

import inspect
import math

import oracle
import pytest
import torch
from cases import Case
from compare import assert_error_ratio, assert_same_but_for_rounding
from newer import EMPTY_ROWS, WIDE, assert_all_equal, assert_model_is_right, ints, run, unseen
from problems import cumulative

import flash_attn
import flash_attn.cute
from flash_attn.cute import interface as fa4

SINK = torch.tensor([1.0, -2.0, 0.0, 3.0])


OPTIONS = {  # FlashAttention-4's keywords -> flash_attn's
    "plain": ({}, {}),
    "causal": (dict(causal=True), dict(causal=True)),
    "window": (dict(window_size=(20, 3)), dict(window_size=(20, 3))),
    "left window": (dict(window_size=(20, None)), dict(window_size=(20, -1))),
    "window of none": (dict(window_size=(-1, -1)), {}),
    "no key between": (dict(window_size=(-1, 0)), {}),
    "causal window of none": (dict(window_size=(-1, -1), causal=True), dict(causal=True)),
    "causal beats right": (dict(window_size=(9, 5), causal=True), dict(window_size=(9, 0))),
    "softcap": (dict(softcap=5.0, softmax_scale=0.3), dict(softcap=5.0, softmax_scale=0.3)),
    "no effect": (dict(num_splits=3, pack_gqa=True, deterministic=True), dict(deterministic=True)),
}


@pytest.mark.parametrize("case", [WIDE, EMPTY_ROWS.but(causal=False)], ids=["more keys", "more rows"])
@pytest.mark.parametrize(("theirs", "ours"), OPTIONS.values(), ids=OPTIONS)
def test_dense(case, theirs, ours, device):
    *inputs, dout = case.tensors(device)
    dlse = torch.randn(case.batch, case.heads, case.seqlen_q, device=device)
    expected = run(lambda *x: flash_attn.flash_attn_func(*x, return_lse=True, **ours), inputs, dout, dlse)
    found = run(lambda *x: fa4.flash_attn_func(*x, return_lse=True, **theirs), inputs, dout, dlse)
    assert_all_equal(found, (expected[0], unseen(expected[1]), *expected[2:]))


def test_values_and_gradients_with_a_sink(device):
    """Against float64: a row that sees no key has an out of 0 and the sink for lse."""
    *inputs, dout = EMPTY_ROWS.tensors(device)
    inputs.append(SINK.to(device))
    dlse = torch.randn(2, 4, 40, device=device)

    def reference(q, k, v, sink):
        return oracle.attention(q, k, v, causal=True, learnable_sink=sink)

    exact_out, exact_lse, exact_grads = oracle.gradients(reference, [x.double() for x in inputs], dout, dlse)
    plain_out, _, plain_grads = oracle.gradients(reference, inputs, dout, dlse)
    plain_lse = reference(*(x.float() for x in inputs))[1]
    out, lse, *grads = run(
        lambda *x: fa4.flash_attn_func(*x[:3], learnable_sink=x[3], causal=True, return_lse=True), inputs, dout, dlse
    )
    assert not out[:, :7].any() and torch.equal(lse[0, :, 0], inputs[3])
    assert_error_ratio(lse, exact_lse, plain_lse, name="lse")
    names = "out", "dq", "dk", "dv", "dsink"
    for name, *three in zip(names, (out, *grads), (exact_out, *exact_grads), (plain_out, *plain_grads), strict=True):
        assert_error_ratio(*three, name=name)
    raw = fa4._flash_attn_bwd(*inputs[:3], out, dout, lse, causal=True, dlse=dlse, learnable_sink=inputs[3])
    for name, *three in zip(names[1:], raw, exact_grads, plain_grads, strict=True):
        assert_error_ratio(*three, name=name)


def test_lse_is_there_where_it_may_be_needed(device):
    q, k, v, _ = EMPTY_ROWS.tensors(device)
    _, lse = fa4.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (lse[..., :7] == -math.inf).all() and lse[..., 7:].isfinite().all()
    assert fa4.flash_attn_func(q, k, v)[1] is None
    for inputs in ((q, k, v.detach().requires_grad_(), None), (q, k, v, SINK.to(device).requires_grad_())):
        out, lse = fa4.flash_attn_func(*inputs[:3], learnable_sink=inputs[3])
        assert out.requires_grad and lse is not None


OFFSETS = [(None, -2), (-3, None), (-2, 9), (9, -2), (None, -70), (-70, None)]


@pytest.mark.parametrize("window", OFFSETS, ids=str)
@pytest.mark.parametrize("kind", ["dense", "used", "varlen", "pages"])
def test_negative_windows_are_offsets(window, kind, device):
    """Against the oracle with a mask of its own, entry by entry."""
    q, k, v, _ = Case(seqlen_q=20, seqlen_k=24, heads_k=2).tensors(device)
    rows, keys = ([20, 20], [24, 24]) if kind == "dense" else ([20, 11], [24, 17])
    if kind == "dense":
        out, lse = fa4.flash_attn_func(q, k, v, window_size=window, return_lse=True)
        given = fa4._flash_attn_fwd(q, k, v, window_size_left=window[0], window_size_right=window[1], return_lse=True)
        assert_all_equal(given, (out, lse))
    elif kind == "used":
        used = dict(seqused_q=ints(device, *rows), seqused_k=ints(device, *keys))
        out, lse = fa4.flash_attn_varlen_func(q, k, v, window_size=window, return_lse=True, **used)
        assert not out[1, 11:].any() and (lse[1, :, 11:] == -math.inf).all()
    else:
        packed = [
            torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x, lengths in ((q, rows), (k, keys), (v, keys))
        ]
        where = dict(cu_seqlens_k=cumulative(keys, device))
        if kind == "pages":
            packed[1:] = (x.reshape(8, 6, 2, 64) for x in (k, v))
            where = dict(page_table=ints(device, [0, 1, 2, 3], [4, 5, 6, 7]), seqused_k=ints(device, *keys))
        bounds = cumulative(rows, device)
        packed_out, packed_lse = fa4.flash_attn_varlen_func(
            *packed, cu_seqlens_q=bounds, window_size=window, return_lse=True, **where
        )
        out, lse = torch.zeros_like(q), torch.zeros(2, 4, 20, device=device)
        for b, n in enumerate(rows):
            seen = slice(int(bounds[b]), int(bounds[b + 1]))
            out[b, :n], lse[b, :, :n] = packed_out[seen], packed_lse[:, seen]
    left, right = window
    for b, (m, n) in enumerate(zip(rows, keys)):
        distance = torch.arange(n, device=device) - torch.arange(m, device=device)[:, None] - (n - m)
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= distance >= -left if left is not None else True
        seen &= distance <= right if right is not None else True
        inputs = q[b : b + 1, :m], k[b : b + 1, :n], v[b : b + 1, :n]
        exact, exact_lse = oracle.attention(*(x.double() for x in inputs), seen=seen)
        plain, _ = oracle.attention(*inputs, seen=seen)
        _, plain_lse = oracle.attention(*(x.float() for x in inputs), seen=seen)
        assert_error_ratio(out[b : b + 1, :m], exact, plain)
        assert_error_ratio(lse[b : b + 1, :, :m], unseen(exact_lse), unseen(plain_lse))


def test_backward_of_an_offset(device):
    """From out and lse as they are given; the mask is one that only the op with features has."""
    *inputs, dout = WIDE.tensors(device)
    out, lse, *expected = run(
        lambda *x: fa4.flash_attn_func(*x, window_size=(None, -2), return_lse=True),
        inputs,
        dout,
        torch.zeros(2, 4, 33, device=device),
    )
    targets = [torch.full_like(x, math.nan) for x in inputs]
    given = dict(zip(("dq", "dk", "dv"), targets))
    found = fa4._flash_attn_bwd(*inputs, out, dout, lse, window_size_right=-2, **given)
    assert all(one is other for one, other in zip(found, targets, strict=True))
    assert_same_but_for_rounding(found, expected)


@pytest.mark.parametrize("used", [False, True], ids=["all", "used"])
def test_varlen(used, device):
    q, k, v, dout = (x[0] for x in Case(batch=1, seqlen_q=60, seqlen_k=80, heads_k=2).tensors(device))
    bounds = cumulative([20, 0, 40], device), cumulative([30, 10, 40], device), 40, 40
    seqused = dict(seqused_q=ints(device, 17, 0, 33), seqused_k=ints(device, 30, 5, 31)) if used else {}
    options = dict(causal=True, window_size=(25, None), **seqused)
    ours = {**options, "window_size": (25, -1)}
    dlse = torch.randn(4, 60, device=device)
    expected = run(
        lambda *x: flash_attn.flash_attn_varlen_func(*x, *bounds, return_lse=True, **ours), (q, k, v), dout, dlse
    )
    found = run(
        lambda *x: fa4.flash_attn_varlen_func(*x, None, *bounds, return_lse=True, **options), (q, k, v), dout, dlse
    )
    assert_all_equal(found, (expected[0], unseen(expected[1]), *expected[2:]))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("used", [False, True], ids=["all", "used"])
def test_pages(packed, used, device):
    q = torch.randn(2, 3, 4, 64, device=device).bfloat16()
    pages = [torch.randn(6, 4, 2, 64, device=device).bfloat16() for _ in range(2)]
    table, lengths = ints(device, [3, 1, 5], [0, 4, 2]), ints(device, 7, 10) if used else None
    options = dict(page_table=table, seqused_k=lengths, causal=True, return_lse=True)
    expected, expected_lse = flash_attn.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
    )
    if packed:
        out, lse = fa4.flash_attn_varlen_func(q.flatten(0, 1), *pages, cu_seqlens_q=ints(device, 0, 3, 6), **options)
        out, lse = out.view_as(q), lse.view(4, 2, 3).transpose(0, 1)
    else:
        out, lse = fa4.flash_attn_varlen_func(q, *pages, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_combine(device):
    q, k, v, _ = EMPTY_ROWS.tensors(device)
    parts = [fa4.flash_attn_func(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 9), slice(9, 33))]
    outs, lses = torch.stack([out for out, _ in parts]).float(), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    lses[:, :, 5] = -math.inf
    out, lse = fa4.flash_attn_combine(outs, lses)
    assert not out[:, 5].any() and (lse[:, 5] == -math.inf).all()
    exact, exact_lse = oracle.attention(q.double(), k.double(), v.double())
    rows = [i for i in range(40) if i != 5]
    torch.testing.assert_close(out[:, rows].double(), exact[:, rows], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse[:, rows].double(), exact_lse.transpose(1, 2)[:, rows], rtol=1e-5, atol=1e-5)
    packed, nothing = fa4.flash_attn_combine(
        outs.flatten(1, 2),
        lses.flatten(1, 2),
        out_dtype=torch.bfloat16,
        cu_seqlens=ints(device, 0, 40, 80),
        return_lse=False,
    )
    assert nothing is None and torch.equal(packed.view_as(out), out.bfloat16())
    with pytest.raises(NotImplementedError, match="seqused must be None"):
        fa4.flash_attn_combine(outs, lses, seqused=ints(device, 3, 4))


REFUSED = {
    fa4.flash_attn_func: (
        "qv gather_kv_indices score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors "
        "block_sparse_tensors_bwd"
    ),
    fa4.flash_attn_varlen_func: (
        "qv gather_kv_indices score_mod score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars "
        "seqlen_k_per_split"
    ),
    fa4._flash_attn_fwd: (
        "qv score_mod mask_mod block_sparse_tensors aux_tensors aux_scalars q_descale k_descale v_descale "
        "gather_kv_indices seqlen_k_per_split"
    ),
    fa4._flash_attn_bwd: "score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors",
}


@pytest.mark.parametrize(
    ("function", "argument"), [(function, name) for function, names in REFUSED.items() for name in names.split()]
)
def test_what_is_not_computed_is_refused(function, argument, device):
    q, k, v, dout = Case(batch=1, seqlen_q=4, seqlen_k=4).tensors(device)
    more = (q, dout, torch.zeros(1, 4, 4, device=device)) if function is fa4._flash_attn_bwd else ()
    with pytest.raises(NotImplementedError, match=f"{argument} must be None, found a int: .*key_ranges.*FlexAttention"):
        function(q, k, v, *more, **{argument: 1})


def test_other_refusals(device):
    q, k, v, _ = Case(batch=1, seqlen_q=4, seqlen_k=4).tensors(device)
    cu_seqlens, table = ints(device, 0, 4), ints(device, [0])
    with pytest.raises(NotImplementedError, match="cu_seqlens_q and cu_seqlens_k must be given together"):
        fa4.flash_attn_varlen_func(q[0], k, v, cu_seqlens_q=cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens_k must be None with page_table"):
        fa4.flash_attn_varlen_func(q[0], k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, page_table=table)
    with pytest.raises(ValueError, match=r"one of cu_seqlens_q, .* must be given"):
        fa4.get_scheduler_metadata(4, 4, 4, 4, 64, 1)
    with pytest.raises(ValueError, match="lse must have shape"):
        fa4._flash_attn_fwd(q, k, v, lse=torch.empty(1, 4, 5, device=device))
    lse = torch.zeros(1, 4, 4, device=device)
    with pytest.raises(ValueError, match="dlse must have shape"):
        fa4._flash_attn_bwd(q, k, v, q, q, lse, dlse=lse[:, :1])


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "wrong"), [(64, 64, ""), (512, 512, ""), (513, 64, "head_dim"), (64, 0, "head_dim_v")]
)
def test_head_dims(head_dim, head_dim_v, wrong):
    if not wrong:
        return fa4._validate_head_dims(head_dim, head_dim_v, 9, 8)
    with pytest.raises(AssertionError, match=f"^{wrong} must be between 1 and 512"):
        fa4._validate_head_dims(head_dim, head_dim_v, 9, 8)


def test_names():
    assert flash_attn.cute.flash_attn_func is fa4.flash_attn_func
    assert flash_attn.cute.flash_attn_varlen_func is fa4.flash_attn_varlen_func
    assert all(inspect.isfunction(getattr(fa4, name)) for name in fa4.__all__)


def test_compiles(device):
    *inputs, dout = WIDE.tensors(device)
    dlse = torch.ones(2, 4, 33, device=device)

    def step(q, k, v):
        out, lse = fa4.flash_attn_func(q, k, v, causal=True, window_size=(9, None), deterministic=True)
        offset, _ = fa4.flash_attn_func(q, k, v, window_size=(None, -2))
        return out + offset, lse

    expected = run(step, inputs, dout, dlse)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_all_equal(run(compiled, inputs, dout, dlse), expected)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch and transformers, as far as they go without a GPU


@pytest.fixture
def torch_fa4(monkeypatch):
    module = pytest.importorskip("torch.nn.attention._fa4", reason="this torch has no door for FlashAttention-4")
    module._fa4_import_module("flash_attn.cute.interface")
    monkeypatch.setattr(module, "_FA4_MODULE_PATH", "flash_attn.cute.interface")
    return module


def called(function, **arguments):
    """Call a function of PyTorch with those arguments that it has in this version; others are None."""
    return function(**{name: arguments.get(name) for name in inspect.signature(function).parameters})


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_torch(packed, torch_fa4, device):
    """What PyTorch's attention calls after activate_flash_attention_impl("FA4"), behind its test of the GPU."""
    case = Case(batch=1, seqlen_q=60, seqlen_k=80, heads_k=2) if packed else WIDE
    tensors = case.with_stored_out(device).tensors(device)
    q, k, v, dout = (x[0] for x in tensors) if packed else tensors
    bounds = (cumulative([20, 40], device), cumulative([30, 50], device)) if packed else (None, None)
    lengths = (40, 50) if packed else (33, 65)

    def ours(*x):
        options = dict(causal=True, softmax_scale=0.2, deterministic=True, return_lse=True)
        if packed:
            return flash_attn.flash_attn_varlen_func(*x, *bounds, *lengths, **options)
        return flash_attn.flash_attn_func(*x, **options)

    out, lse = (x.detach() for x in ours(q, k, v))
    _, _, *grads = run(ours, (q, k, v), dout, torch.zeros_like(lse))
    arguments = dict(
        query=q,
        key=k,
        value=v,
        cu_seq_q=bounds[0],
        cu_seq_k=bounds[1],
        max_q=lengths[0],
        max_k=lengths[1],
        scale=0.2,
        is_causal=True,
        window_size_left=-1,
        window_size_right=-1,
    )
    target = torch.empty_like(out)
    assert_all_equal(called(torch_fa4._fa4_run_forward, **arguments, out=target), (out, lse))
    assert torch.equal(target, out)
    arguments |= dict(grad_out=dout, out=out, logsumexp=lse, deterministic=True)
    assert_all_equal(called(torch_fa4._fa4_run_backward, **arguments), grads)


def test_transformers_finds_the_functions(monkeypatch):
    module = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(module, "is_flash_attn_4_available"):
        pytest.skip("this transformers does not know FlashAttention-4")
    monkeypatch.setattr(module, "_loaded_implementation", None)
    (dense, varlen, cached, *_), (of_varlen, _) = module.lazy_import_flash_attention("flash_attention_4")
    assert (dense, varlen, cached) == (fa4.flash_attn_func, fa4.flash_attn_varlen_func, None)
    supported = of_varlen.keywords["supports_mapping"]
    names = "window_size", "softcap", "deterministic", "learnable_sink", "s_aux", "dropout_p"
    assert [supported[name] for name in names] == [True, True, True, True, False, False]


@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_transformers_model_with_sinks(padded, monkeypatch, device):
    module = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(module, "is_flash_attn_4_available"):
        pytest.skip("this transformers does not know FlashAttention-4")
    monkeypatch.setattr(module, "_loaded_implementation", None)
    module.lazy_import_flash_attention("flash_attention_4")
    options = dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=1, head_dim=16)
    assert_model_is_right("GptOss", options, padded, "flash_attention_4", device)
