"""The six attention functions and their gradients: against the oracle, and one test for each promise."""

import functools
import itertools
import math
import re

import numpy
import oracle
import pytest
import torch
from attention_calls import dense, dense_oracle, op, op_arguments, options_of, packed_batch, varlen, varlen_oracle
from cases import LAYOUTS, Case, cover, covering_sample, laid_out, params, sample, slow_or_cuda, uncovered
from compare import assert_error_ratio, assert_same_but_for_rounding
from problems import FACTORS, SMALL, Problem, apart, check, cumulative, make_problem, possible, terms_of_gradients
from recorder import kernels_of

from flash_attn import (
    _library,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_forward

NAMED = {
    "one query, one key": Problem(seqlen_q=1, seqlen_k=1),
    "one key": Problem(seqlen_q=64, seqlen_k=1, heads_k=2),
    "two keys": Problem(seqlen_q=64, seqlen_k=2, heads_k=2),
    "two keys, large scores": Problem(seqlen_q=64, seqlen_k=2, scale_q=8.0),
    "two keys, large scores, fp16": Problem(seqlen_q=64, seqlen_k=2, scale_q=8.0, dtype="fp16"),
    "three keys": Problem(seqlen_q=64, seqlen_k=3, heads_k=2),
    "three keys, large scores": Problem(seqlen_q=64, seqlen_k=3, scale_q=8.0),
    "head_dim 1": Problem(head_dim=1),
    "head_dim 255": Problem(head_dim=255, seqlen_q=33, seqlen_k=65),
    "head_dim 256, all heads share a key": Problem(head_dim=256, heads=8, heads_k=1),
    "head_dim 257, all heads share a key": Problem(head_dim=257, heads_k=1, seqlen_k=65),
    "head_dim 512, causal": Problem(head_dim=512, seqlen_q=150, seqlen_k=200, heads=2, heads_k=2, causal=True),
    "head_dim 512, softcap and dropout": Problem(
        head_dim=512, heads=2, heads_k=1, seqlen_k=65, softcap=2.0, dropout_p=0.17
    ),
    "causal, rows without keys": Problem(seqlen_q=113, seqlen_k=20, causal=True),
    "window, rows without keys": Problem(seqlen_q=20, seqlen_k=150, window=(0, 0)),
    "window beyond the first key": Problem(seqlen_q=100, seqlen_k=20, window=(3, 3)),
    "one key less than a tile": Problem(seqlen_q=127, seqlen_k=127, causal=True),
    "one key more than a tile": Problem(seqlen_q=129, seqlen_k=129, causal=True),
    "softmax is one-hot": Problem(scale_q=60.0),
    "softmax is one-hot, fp16": Problem(scale_q=60.0, dtype="fp16"),
    "large scores, causal, fp16": Problem(seqlen_q=128, seqlen_k=128, scale_q=15.0, causal=True, dtype="fp16"),
    "softcap and dropout": Problem(softcap=2.0, dropout_p=0.17),
    "everything at once": Problem(
        seqlen_q=113,
        seqlen_k=203,
        heads=6,
        heads_k=2,
        head_dim=59,
        causal=True,
        window=(70, -1),
        softcap=2.0,
        alibi="bh",
        dropout_p=0.17,
        deterministic=True,
        layout="bhsd",
    ),
    "float32": Problem(dtype="fp32", causal=True, heads_k=2),
    "float32 with all score changes": Problem(dtype="fp32", window=(30, 7), softcap=2.0, alibi="h", dropout_p=0.17),
}


@functools.cache
def wide_rows():
    return covering_sample(FACTORS, 1800, valid=possible)


@pytest.mark.slow
def test_sample_has_every_pair_of_values():
    tied = "lengths", "heads", "deterministic", "varlen", "packing", "page", "dlse"
    assert not uncovered(wide_rows(), FACTORS, valid=possible, tied=tied)


@pytest.mark.parametrize("case", sample(SMALL, make_problem, valid=possible, wide=wide_rows, marks=slow_or_cuda))
@pytest.mark.same_on_cpu("head_dim", "dtype", "deterministic")
def test_sample(case, device, memory_guard):
    if max(case.seqlen_q, case.seqlen_k) > 2048:
        memory_guard(2**34)
    case.check(device)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_named(case, varlen, device):
    case.but(varlen=varlen, batch=4 if varlen else 2).check(device)


HOPPER = dict(
    SMALL,
    lengths=[(64, 64), (97, 97), (128, 128), (113, 203), (203, 113), (129, 65), (193, 385), (400, 1), (512, 512)],
    dtype=["fp16", "bf16"],
    scale_q=[1.0, 4.0],
    page=[0],
    dlse=[False],
)


@pytest.mark.sm90
@pytest.mark.parametrize("case", sample(HOPPER, make_problem, valid=possible))
def test_hopper_kernels_agree_with_portable_ones(case, device, monkeypatch):
    """The same but for rounding, and the same elements dropped."""
    *inputs, dout = (case.formed(x) for x in case.tokens(device))
    leaves = [x.requires_grad_() for x in case.packed(inputs)]

    def attend():
        torch.manual_seed(0)
        out, lse, _ = case.attend(case.lengths(), *leaves, pages=None)
        return out.detach(), lse.detach(), *apart(torch.autograd.grad(out, leaves, dout), dout.dim())

    monkeypatch.setenv("FLASH_ATTN_PORTABLE", "0")
    hopper = attend()
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", "1")
    eps = torch.finfo(torch.float32).eps
    assert_same_but_for_rounding(hopper, attend(), [0, 0, *(terms * eps for terms in terms_of_gradients(case))])


@pytest.mark.sm90
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "head_dim, portable, kernel",
    [
        (64, False, "bwd_sm90_kernel"),
        (256, False, "bwd_wide_kernel"),
        (64, True, "bwd_kernel"),
        (256, True, "bwd_kernel"),
    ],
)
def test_which_backward_runs(head_dim, portable, kernel, deterministic, device, monkeypatch):
    q = torch.randn(1, 128, 4, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    out = flash_attn_func(q, q, q, deterministic=deterministic)
    assert any(f"::{kernel}<" in name for name in kernels_of(out.sum().backward))


@pytest.mark.sm90
@pytest.mark.parametrize(
    "head_dim, packed, finishes", [(64, False, False), (64, True, True), (128, True, True), (256, False, True)]
)
def test_where_dq_takes_a_kernel_of_its_own(head_dim, packed, finishes, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", "0")
    q = torch.randn(64, 2, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    cu_seqlens = torch.tensor([0, 64], dtype=torch.int32, device=device)
    x = q if packed else q[None]
    out = flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 64, 64) if packed else flash_attn_func(x, x, x)
    assert any("::bwd_finish_kernel<" in name for name in kernels_of(out.sum().backward)) == finishes


@pytest.mark.sm90
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, portable, kernel",
    [
        (128, 128, False, "fwd_sm90_kernel"),
        (128, 128, True, "fwd_kernel"),
        (1, 128, False, "decode_kernel"),
        (128, 8192, False, "fwd_sm90_kernel"),
        (128, 8192, True, "fwd_kernel"),
    ],
)
def test_which_kernel_runs(seqlen_q, seqlen_k, portable, kernel, device, monkeypatch):
    q, k = (torch.randn(1, seqlen, 4, 64, dtype=torch.bfloat16, device=device) for seqlen in (seqlen_q, seqlen_k))
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    assert any(f"::{kernel}<" in name for name in kernels_of(lambda: flash_attn_func(q, k, k)))


LITTLE_SHARED_MEMORY = [
    Problem(seqlen_q=203, seqlen_k=321, heads=6, heads_k=2, head_dim=head_dim, **options)
    for head_dim in (64, 96, 128, 192, 256, 512)
    for options in (
        dict(),
        dict(causal=True, deterministic=True, varlen=True),
        dict(window=(90, 20), softcap=2.0, alibi="bh", dropout_p=0.17, layout="unaligned"),
    )
]


@pytest.mark.parametrize("case", params(LITTLE_SHARED_MEMORY))
def test_with_little_shared_memory(case, device, little_shared_memory):
    case.check(device)


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_compact_backward_runs_with_little_shared_memory(head_dim, device, little_shared_memory):
    q = torch.randn(1, 128, 4, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = flash_attn_func(q, q, q)
    (name,) = (name for name in kernels_of(out.sum().backward) if "::bwd_kernel<" in name)
    assert re.search(r"BwdConfig<[^<>]*, true>", name)


SEVERAL_BLOCKS_OF_KEYS = [
    Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, heads=4, heads_k=2, **mask)
    for head_dim in (64, 96, 128)
    for seqlen_q, seqlen_k, mask in (
        (70, 128, {}),
        (130, 300, {}),
        (300, 513, dict(causal=True)),
        (300, 130, dict(causal=True)),
        (520, 520, dict(window=(100, 40))),
        (260, 640, dict(window=(200, 0))),
        (300, 4500, {}),  # so many that dq is not rounded where it is summed
        (300, 4500, dict(causal=True)),
    )
] + [  # 5 x 80 of them, more than there are multiprocessors: a thread block takes several
    Problem(seqlen_q=300, seqlen_k=513, head_dim=head_dim, heads=40, heads_k=40, causal=True) for head_dim in (64, 128)
]


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", params(SEVERAL_BLOCKS_OF_KEYS))
@pytest.mark.same_on_cpu("case", "deterministic")
def test_dq_adds_up_over_blocks_of_keys(case, deterministic, varlen, device):
    """One or several of them, and whatever was in the memory where it is added up."""
    for elements in (2**18, 2**20, 2**22) if device.type == "cuda" else ():
        torch.full((elements,), math.nan, device=device)  # torch keeps the memory for those who ask next
    case.but(deterministic=deterministic, varlen=varlen).check(device)


# So few blocks of keys that several thread blocks share each: they divide its query heads, its rows, or both. Shares of
# short packed entries may have no rows at all.
FEW_BLOCKS_OF_KEYS = [
    Problem(
        batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads[0], heads_k=heads[1], head_dim=head_dim, **options
    )
    for head_dim in (64, 96, 128, 192, 256, 512)
    for seqlen_q, seqlen_k, heads, options in (
        (1500, 77, (1, 1), {}),
        (1000, 130, (6, 1), {}),
        (700, 700, (4, 1), dict(causal=True)),
        (1000, 300, (2, 2), dict(window=(100, 40))),
        (64, 64, (32, 1), dict(causal=True, dtype="fp16")),
        (900, 200, (3, 1), dict(softcap=2.0, alibi="bh", dropout_p=0.17, layout="bhsd")),
    )
]


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", params(FEW_BLOCKS_OF_KEYS))
@pytest.mark.same_on_cpu("case", "deterministic")
def test_thread_blocks_share_a_block_of_keys(case, deterministic, varlen, device):
    """Packed entries, of which some may be empty, also leave some of their keys out, whose gradients are 0."""
    for elements in (2**18, 2**20, 2**22) if device.type == "cuda" else ():
        torch.full((elements,), math.nan, device=device)  # torch keeps the memory for those who ask next
    changes = dict(varlen=True, batch=2, seqused=True, leftpad=True) if varlen else {}
    case.but(deterministic=deterministic, **changes).check(device)


@pytest.mark.sm90
@pytest.mark.parametrize(
    "batch, rows, heads, heads_k, shared",
    [(1, 4096, 4, 4, True), (1, 256, 32, 1, True), (1, 64, 4, 4, False), (64, 4096, 4, 4, False)],
)
def test_which_blocks_of_keys_are_shared(batch, rows, heads, heads_k, shared, device, monkeypatch):
    """Then the last kernel adds up the shares; dq alone would not need it."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", "0")
    q = torch.randn(batch, rows, heads, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    k = torch.randn(batch, 77, heads_k, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = flash_attn_func(q, k, k)
    assert any("::bwd_finish_kernel<" in name for name in kernels_of(out.sum().backward)) == shared


# ---------------------------------------------------------------------------------------------------------------------
# Variable length


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths_q, lengths_k",
    [
        ([0], [0]),
        ([5], [0]),
        ([0], [5]),
        ([0, 0, 7], [3, 0, 0]),
        ([1, 1, 1], [0, 4, 0]),
        ([1, 0, 1], [5, 9, 300]),
        ([76, 34, 146], [1, 1, 1]),
    ],
)
def test_varlen_with_entries_of_length_zero(lengths_q, lengths_k, causal, device):
    """Rows without keys give 0, lse = +inf and no gradient; no NaN anywhere."""
    case = Case(causal=causal, heads_k=2, seqlen_q=max(lengths_q), seqlen_k=max(lengths_k))
    cu_seqlens = cumulative(lengths_q, device), cumulative(lengths_k, device)
    q, k, v, dout = case.but(batch=1, seqlen_q=sum(lengths_q), seqlen_k=sum(lengths_k)).tensors(device)
    tensors = q[0], k[0], v[0], dout[0]
    check(case, tensors, varlen(case, device, cu_seqlens), varlen_oracle(case, device, cu_seqlens))


def test_varlen_ignores_what_lies_past_the_last_entry(device):
    """Tokens past cu_seqlens[-1] may be NaN; they get no gradient."""
    case = Case(batch=3, seqlen_q=40, seqlen_k=50, causal=True)
    (q, k, v, dout), cu_seqlens = packed_batch(case, device)

    def lengthened(x):
        return torch.cat([x, torch.full_like(x[:1], float("nan")).expand(7, -1, -1)])

    leaves = [lengthened(x).requires_grad_() for x in (q, k, v)]
    out, lse, _ = varlen(case, device, cu_seqlens)(*leaves)
    grads = torch.autograd.grad(out, leaves, lengthened(dout))
    expected_leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected, expected_lse, _ = varlen(case, device, cu_seqlens)(*expected_leaves)
    expected_grads = torch.autograd.grad(expected, expected_leaves, dout)
    assert torch.equal(out[:-7], expected) and torch.equal(lse[:, :-7], expected_lse)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad[:-7], expected_grad)
        assert (grad[-7:] == 0).all()


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_uses_seqused_k_keys_after_leftpad_k(causal, leftpad, device):
    """The private forward: unused keys may be NaN."""
    case = Case(batch=3, seqlen_q=20, seqlen_k=50, causal=causal, heads_k=2)
    (q, k, v, _), (cu_seqlens_q, cu_seqlens_k) = packed_batch(case, device)
    lengths = cu_seqlens_k.diff()
    used = (lengths * 2 // 3).int()
    pad = (used // 3).int() if leftpad else None
    position = torch.arange(len(k), device=device)
    entry = torch.searchsorted(cu_seqlens_k[1:], position.int(), right=True)
    within = position - cu_seqlens_k[entry]
    unused = (within >= used[entry]) | (within < (0 if pad is None else pad[entry]))
    dirty_k, dirty_v = (x.masked_fill(unused[:, None, None], float("nan")) for x in (k, v))
    out, lse, _, _ = _flash_attn_varlen_forward(
        q,
        dirty_k,
        dirty_v,
        cu_seqlens_q,
        cu_seqlens_k,
        case.seqlen_q,
        case.seqlen_k,
        0.0,
        case.head_dim**-0.5,
        causal,
        seqused_k=used,
        leftpad_k=pad,
    )
    reference = functools.partial(oracle.varlen_attention, causal=causal, seqused_k=used, leftpad_k=pad)
    exact, exact_lse = reference(q.double(), k.double(), v.double(), cu_seqlens_q, cu_seqlens_k)
    assert_error_ratio(out, exact, reference(q, k, v, cu_seqlens_q, cu_seqlens_k)[0], name="out")
    assert_error_ratio(lse, exact_lse, exact_lse.float(), name="lse")


BOUNDS = {"none": lambda n: None, "too small": lambda n: 3, "too large": lambda n: 7 * n, "huge": lambda n: 2**60}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["tensor", *BOUNDS])
def test_max_seqlen_is_only_a_bound(kind, deterministic, device):
    """No result depends on max_seqlen; a 0-d tensor will do, and is not read on the host."""
    case = Case(batch=4, seqlen_q=60, seqlen_k=90, causal=True)
    (q, k, v, dout), cu_seqlens = packed_batch(case, device)
    bound = dict(BOUNDS, tensor=lambda n: torch.tensor(n, device=device))[kind]

    def run(bound):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(
            *leaves, *cu_seqlens, bound(case.seqlen_q), bound(case.seqlen_k), causal=True, deterministic=deterministic
        )
        return out, *torch.autograd.grad(out, leaves, dout)

    assert_same_but_for_rounding(run(bound), run(lambda n: n))


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_packed_gradient_is_one_contiguous_tensor(packing, device):
    q, k, v, dout = Case().tensors(device)
    leaves = {"qkv": [torch.stack([q, k, v], dim=2)], "kv": [q, torch.stack([k, v], dim=2)]}[packing]
    leaves = [x.requires_grad_() for x in leaves]
    out = {"qkv": flash_attn_qkvpacked_func, "kv": flash_attn_kvpacked_func}[packing](*leaves)
    out.backward(dout)
    assert all(x.grad.shape == x.shape and x.grad.is_contiguous() for x in leaves)


DOUTS = {
    "stride 0": lambda dout: dout[:1, :1, :1, :1].expand_as(dout),
    "stride 0 in heads": lambda dout: dout[:, :, :1].expand_as(dout),
    "transposed": lambda dout: dout.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed in the last dimensions": lambda dout: dout.transpose(2, 3).contiguous().transpose(2, 3),
    "every second row": lambda dout: torch.stack([dout, torch.full_like(dout, float("nan"))], dim=2)[:, :, 0],
    "strided last dimension": lambda dout: laid_out(dout, "last_dim_strided"),
    "unaligned": lambda dout: laid_out(dout, "unaligned"),
}


@pytest.mark.parametrize("layout", DOUTS.values(), ids=DOUTS)
@pytest.mark.parametrize("head_dim", [59, 64])
def test_layout_of_the_incoming_gradient(layout, head_dim, device):
    case = Case(seqlen_q=97, seqlen_k=97, head_dim=head_dim, heads_k=2, causal=True)
    *inputs, dout = case.tensors(device)
    check(case, (*inputs, layout(dout)), dense(case, device), dense_oracle(case, device))


def test_expanded_keys_and_values(device):
    """One key and value for the whole batch and all heads, as stride 0."""
    case = Case(batch=3, seqlen_q=65, seqlen_k=33)
    q, k, v, dout = case.tensors(device)
    k, v = (x[:1, :, :1].expand_as(x) for x in (k, v))
    check(case, (q, k, v, dout), dense(case, device), dense_oracle(case, device))


@pytest.mark.parametrize("layout", ["contiguous", "bhsd"])
def test_out_and_gradients_keep_the_memory_order_of_their_inputs(layout, device):
    q, k, v, dout = Case(layout=layout).tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    assert [x.stride() for x in (out, *grads)] == [x.stride() for x in (q, q, k, v)]


@pytest.mark.parametrize("tokens", [False, True])
def test_out_of_packed_queries_is_contiguous(tokens, device):
    """Whatever the order of the dimensions in memory; a graph relies on the strides that it was told."""
    for where in (device, "meta"):
        qkv = torch.randn(2, 3, 4, 17, 64, dtype=torch.bfloat16, device=where).permute(0, 3, 1, 2, 4)
        cu_seqlens = torch.tensor([0, 5, 17], dtype=torch.int32, device=where)
        leaf = (qkv[0] if tokens else qkv).detach().requires_grad_()
        out = flash_attn_varlen_qkvpacked_func(leaf, cu_seqlens, 12) if tokens else flash_attn_qkvpacked_func(leaf)
        (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        assert out.is_contiguous()
        assert grad.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_may_have_any_strides(layout, device):
    """The private backward writes where it is told to, and leaves alone what is beside it.

    Rows that are not aligned are the portable kernel's, which rounds elsewhere.
    """
    *inputs, dout = Case(seqlen_q=40, seqlen_k=50, heads_k=2).tensors(device)
    out, lse, _, _ = _flash_attn_forward(*inputs, 0.0, 0.125, True, -1, -1, 0.0, None, False)

    def gradients(layout):
        grads = [laid_out(torch.full_like(x, float("nan")), layout) for x in inputs]
        _flash_attn_backward(dout, *inputs, out, lse, *grads, 0.0, 0.125, True, -1, -1, 0.0, None, True)
        return grads

    found = gradients(layout)
    assert_same_but_for_rounding(found, gradients("contiguous"))
    for grad in found:
        whole = grad if grad._base is None else grad._base
        assert whole.isfinite().sum() == grad.numel()


def test_inputs_are_not_written(device):
    case = Case(seqlen_q=33, seqlen_k=65, alibi="bh", dropout_p=0.2, causal=True)
    (*inputs, dout), options = case.tensors(device), options_of(case, device)
    before = [x.clone() for x in (*inputs, dout, options["alibi_slopes"])]
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.grad(flash_attn_func(*leaves, **options)[0], leaves, dout)
    assert all(torch.equal(x, y) for x, y in zip((*inputs, dout, options["alibi_slopes"]), before, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def assert_mask(seqlen_q, seqlen_k, causal, window, device):
    """Read the mask off: with q = 0 all allowed keys weigh the same; identities as v and dout show which these are."""

    def identity(seqlen):
        return torch.eye(seqlen, max(seqlen_q, seqlen_k), device=device, dtype=torch.bfloat16)[None, :, None]

    v, dout = identity(seqlen_k).requires_grad_(), identity(seqlen_q)
    q, k = torch.zeros_like(dout), torch.zeros_like(v)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    (dv,) = torch.autograd.grad(out, v, dout)
    allowed = oracle.allowed_keys(seqlen_q, seqlen_k, causal, window).to(device)
    found = {"out": out[0, :, 0, :seqlen_k] > 0, "dv": dv[0, :, 0, :seqlen_q].T > 0, "lse": lse[0, 0].exp().round()}
    expected = {"out": allowed, "dv": allowed, "lse": allowed.sum(1).where(allowed.any(1), float("inf"))}
    for name in found:
        assert torch.equal(found[name], expected[name].to(found[name].dtype)), f"{name}: {causal=}, {window=}"


@pytest.mark.parametrize("seqlen_k", [1, 2, 3, 5])
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 5])
def test_every_window_of_short_sequences(seqlen_q, seqlen_k, device):
    for causal, left, right in itertools.product([False, True], range(-1, 7), range(-1, 7)):
        assert_mask(seqlen_q, seqlen_k, causal, (left, right), device)


BORDERS = dict(
    seqlen_q=[1, 63, 64, 65, 127, 128, 129, 192, 255],
    seqlen_k=[1, 63, 64, 65, 127, 128, 129, 192, 255],
    left=[-1, 0, 1, 31, 63, 64, 65, 127, 128, 200, 1000],
    right=[-1, 0, 1, 31, 63, 64, 65, 127, 128, 200, 1000],
    causal=[False, True],
)


def test_windows_at_tile_borders(device):
    for row in cover(BORDERS):
        assert_mask(row["seqlen_q"], row["seqlen_k"], row["causal"], (row["left"], row["right"]), device)


@pytest.mark.parametrize("window", [torch.tensor([3, 5]), [3, 5], (torch.tensor(3), 5), numpy.array([3, 5])])
def test_window_size_as_other_pairs(window, device):
    q, k, v, _ = Case().tensors(device)
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, window_size=(3, 5)))


@pytest.mark.parametrize("window", [(-1, -1), (-7, -2), (64, 64)])
def test_unbounded_windows_are_none(window, device):
    q, k, v, _ = Case().tensors(device)
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v))


@pytest.mark.parametrize("seqlen_q", [33, 65])
@pytest.mark.parametrize("scale", [0.0, 0.3, 1, 5.0])
def test_softmax_scale(scale, seqlen_q, device):
    case = Case(seqlen_q=seqlen_q, seqlen_k=65, causal=True)
    attend = functools.partial(dense(case, device), softmax_scale=scale)
    check(case, case.tensors(device), attend, functools.partial(dense_oracle(case, device), softmax_scale=scale))


def test_default_scale_uses_the_true_head_dim(device):
    q, k, v, _ = Case(head_dim=59).tensors(device)
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=59**-0.5))


def test_alibi_alone_decides_where_the_scale_is_zero(device):
    case = Case(seqlen_q=33, seqlen_k=65, causal=True, alibi="bh")
    attend = functools.partial(dense(case, device), softmax_scale=0.0)
    check(case, case.tensors(device), attend, functools.partial(dense_oracle(case, device), softmax_scale=0.0))


def test_lse_with_causal_alibi_follows_the_formula(device):
    """The bias is -slope |i - j|, not equal to it up to a constant of the row."""
    case = Case(seqlen_q=33, seqlen_k=65, causal=True, alibi="h", dtype="fp32")
    q, k, v, _ = case.tensors(device)
    lse = dense(case, device)(q, k, v)[1]
    exact = dense_oracle(case, device)(q.double(), k.double(), v.double())[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "heads"), [(64, 264), (64, 2), (1, 2)])
def test_lse_does_not_drift_over_many_keys(rows, heads, device):
    """One key decides; a rounding that is repeated at each of the blocks that do not change it would add up.

    Many heads occupy a GPU; for few, keys are split, and the splits are merged one after the other.
    """
    q = torch.empty(1, rows, heads, 8, dtype=torch.bfloat16, device=device)
    q[:] = 20 + 20 * torch.rand(1, rows, heads, 1, device=device)
    k = torch.zeros(1, 100_000, 1, 8, dtype=torch.bfloat16, device=device)
    k[:, [0, -1]] = 3
    _, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
    exact = 3 * q.double().sum(-1).transpose(1, 2) * 8**-0.5 + math.log(2)
    torch.testing.assert_close(lse.double(), exact, rtol=2**-21, atol=0)


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 1000), (256, 1000), (256, 1100)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_that_grow_from_key_to_key(dtype, head_dim, keys, device):
    """In some rows slowly, in others fast, or they fall: sums follow each maximum, at once or later."""
    slopes, steps = torch.linspace(-4, 4, 96), torch.arange(keys) / 16
    q, k = torch.zeros(2, 96, 2, head_dim), torch.zeros(2, keys, 2, head_dim)
    q[..., 0], k[..., 0] = slopes[:, None], steps[:, None]
    q, k, v = (x.to(device, dtype) for x in (q, k, torch.randn(k.shape)))
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=1.0, return_attn_probs=True)
    exact, exact_lse = oracle.attention(*(x.double() for x in (q, k, v)), softmax_scale=1.0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-6 * exact_lse.abs().max().item())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Empty and special inputs


EMPTY = [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(seqlen_q=0, seqlen_k=0)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_empty_tensors(shape, causal, dropout_p, device):
    case = Case(causal=causal, dropout_p=dropout_p, **shape)
    check(case, case.tensors(device), dense(case, device), dense_oracle(case, device))


def test_varlen_of_no_entries_and_of_no_tokens(device):
    empty = torch.empty(0, 4, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    for batch in (0, 1, 3):
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        out = flash_attn_varlen_func(empty, empty, empty, cu_seqlens, cu_seqlens, 0, 0)
        (grad,) = torch.autograd.grad(out, empty, empty)
        assert out.shape == grad.shape == (0, 4, 64)


def test_no_heads(device):
    q = torch.empty(2, 5, 0, 64, dtype=torch.bfloat16, device=device)
    k = torch.empty(2, 7, 4, 64, dtype=torch.bfloat16, device=device)
    assert flash_attn_func(q, k, k).shape == q.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_special_values_stay_in_their_rows(value, device):
    """A query that is not finite spoils its row of out, lse and dq, and dk and dv of its head, nothing else."""
    case = Case(seqlen_q=70, seqlen_k=70, deterministic=True)
    q, k, v, dout = case.tensors(device)
    spoilt = q.clone()
    spoilt[1, 3, 2, 5] = value

    def run(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse, _ = dense(case, device)(*leaves)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return dict(out=out, lse=lse.transpose(1, 2), dq=dq, dk=dk, dv=dv)

    found, clean = run(spoilt, k, v), run(q, k, v)
    assert found["out"][1, 3, 2].isnan().all() and not found["lse"][1, 3, 2].isfinite()
    row = torch.zeros(2, 70, 4, dtype=torch.bool, device=device)
    row[1, 3, 2] = True
    head = row.any(dim=1, keepdim=True).expand_as(row)
    for name, where in dict(out=row, lse=row, dq=row, dk=head, dv=head).items():
        assert torch.equal(found[name][~where], clean[name][~where]), name


@pytest.mark.parametrize("key", [25, 153, 299])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("head_dim")
def test_a_key_that_is_nan_spoils_all_rows(head_dim, key, device):
    case = Case(seqlen_q=70, seqlen_k=300, head_dim=head_dim)
    q, k, v, _ = case.tensors(device)
    k = k.index_fill(1, torch.tensor([key], device=device), float("nan"))
    assert flash_attn_func(q, k, v).isnan().all()


@pytest.mark.parametrize("rise", [3.0, 40.0, 3000.0, -40.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("head_dim")
def test_scores_that_rise_from_block_to_block(head_dim, dtype, rise, device):
    """Kernels start with the last keys, and keep a row's maximum until a later score exceeds it by much."""
    case = Case(seqlen_q=100, seqlen_k=1000, head_dim=head_dim, dtype=dtype)
    q, k, v, dout = (x.clone() for x in case.tensors(device))
    q[..., 0] = head_dim**0.5
    k[..., 0] = torch.linspace(rise, 0, case.seqlen_k, device=device)[:, None]
    check(case, (q, k, v, dout), dense(case, device), dense_oracle(case, device))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("spoilt", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("head_dim")
def test_varlen_a_token_spoils_its_entry_alone(head_dim, spoilt, value, device):
    """Also where tiles of its rows or keys reach into the entries before and after it."""
    bounds = [0, 70, 160, 300]
    tensors = torch.randn(4, bounds[-1], 4, head_dim, dtype=torch.bfloat16, device=device)
    clean = dict(zip(("q", "k", "v", "dout"), tensors, strict=True))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)

    def run(dout, **inputs):
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        out = flash_attn_varlen_func(*leaves, cu_seqlens, cu_seqlens, 140, 140, deterministic=True)
        return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]

    expected = run(**clean)
    for token in (69, 100, 160):  # in the first entry, the second and the third
        dirty = clean | {spoilt: clean[spoilt].index_fill(0, torch.tensor([token], device=device), value)}
        first, end = next((a, b) for a, b in itertools.pairwise(bounds) if a <= token < b)
        for found, same in zip(run(**dirty), expected, strict=True):
            assert torch.equal(found[:first], same[:first]) and torch.equal(found[end:], same[end:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("seqlen", [20, 200])
def test_a_value_that_is_not_finite_reaches_rows_of_its_entry_and_head(seqlen, value, device):
    """In its channel all rows that see it are spoilt. Others may be spoilt, too, or else are what they are without it.

    Nothing else changes; lse does not depend on v.
    """
    case = Case(seqlen_q=seqlen, seqlen_k=seqlen, causal=True)
    q, k, v, _ = case.tensors(device)
    dirty = v.clone()
    dirty[1, seqlen // 2, 3, 5] = value
    found, clean = (flash_attn_func(q, k, x, causal=True, return_attn_probs=True) for x in (dirty, v))
    assert torch.equal(found[1], clean[1])
    assert not found[0][1, seqlen // 2 :, 3, 5].isfinite().any()
    earlier = found[0][1, : seqlen // 2, 3, 5]
    spared = earlier.isfinite()
    assert torch.equal(earlier[spared], clean[0][1, : seqlen // 2, 3, 5][spared])
    for out in (found[0], clean[0]):
        out[1, :, 3, 5] = 0
    assert torch.equal(found[0], clean[0])


@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("page", [1, 16])
def test_varlen_keys_beyond_the_block_table_are_left_out(page, seqlen_q, device):
    """Kernels use as many keys of an entry as the table has room for; where lengths are read, more are an error."""
    q = torch.randn(2 * seqlen_q, 4, 64, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 9 * 32 // page, page, 2, 64, dtype=torch.bfloat16, device=device)
    table = torch.arange(2 * 64 // page, dtype=torch.int32, device=device).view(2, -1)[:, : 32 // page].contiguous()

    def attend(*lengths, seqused_k=None):
        bounds = cumulative([seqlen_q] * 2, device), cumulative(lengths, device), seqlen_q, 100
        options = dict(causal=True, block_table=table, seqused_k=seqused_k)
        return flash_attn_varlen_func(q, k, v, *bounds, **options, return_attn_probs=True)[:2]

    beyond = torch.tensor([50, 100], dtype=torch.int32, device=device)
    calls = [lambda: attend(50, 100), lambda: attend(0, 0, seqused_k=beyond)]
    for call, name in zip(calls, ("cu_seqlens_k", "seqused_k"), strict=True):
        if not _library.runs_in_kernel("fwd", q):
            with pytest.raises(ValueError, match=f"{name} must .*32.*block_table|{name} must .*block_table hold"):
                call()
            continue
        for found, fitting in zip(call(), attend(32, 32), strict=True):
            assert torch.equal(found, fitting)


def test_ops_refuse_keys_and_values_of_different_shapes(device):
    """Also where they are called without the checks of the public functions."""
    q, k, v, _ = Case().tensors(device)
    for wrong in (v[:, :-1], v[:, :, :2], v[:1]):
        for call in (torch.ops.flash_attn.fwd, torch.ops.flash_attn.fwd_kvcache):
            with pytest.raises((ValueError, RuntimeError), match=r"k must have the head_dim of q.*, and v .*k"):
                call(q, k, wrong, 0.1, -1, -1)


@pytest.mark.parametrize("softcap", [100.0, 1e4, 1e6])
@pytest.mark.parametrize("seqlen_q", [1, 130])
def test_large_softcaps_are_exact(seqlen_q, softcap, device):
    """Scores that are small beside the cap stay as they are, to the precision of float32."""
    case = Case(seqlen_q=seqlen_q, seqlen_k=130, softcap=softcap, heads_k=2, causal=True)
    inputs = case.tensors(device)
    check(case, inputs, dense(case, device), dense_oracle(case, device))
    lse = dense(case, device)(*inputs[:3])[1]
    exact, plain = (
        dense_oracle(case, device)(*(x.to(dtype) for x in inputs[:3]))[1] for dtype in (torch.float64, torch.float32)
    )
    assert_error_ratio(lse, exact, plain, name="lse")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("seqlen_k", [2, 3, 64, 300])
@pytest.mark.cover(2)
def test_gradients_of_rows_with_one_large_weight(seqlen_k, alpha, dtype, device):
    """Queries are alpha times a key. dS nearly cancels, and delta from a rounded out has up to 12 times the error."""
    case = Case(seqlen_k=seqlen_k, head_dim=128, dtype=dtype)
    q, k, v, dout = case.tensors(device)
    chosen = torch.randint(seqlen_k, (64,), generator=torch.Generator().manual_seed(seqlen_k))
    q = alpha * k[:, chosen.to(device)] + 0.05 * q
    check(case, (q, k, v, dout), dense(case, device), dense_oracle(case, device))


@pytest.mark.parametrize("softcap", [1e4, 1e5, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("head_dim")
def test_gradients_of_large_softcaps_are_exact(head_dim, softcap, device):
    """Without a cap the gradients are the same but for rounding; a probability that is off by 1e-2 would show."""
    case = Case(seqlen_q=200, seqlen_k=150, head_dim=head_dim, softcap=softcap, heads_k=2, causal=True)
    *inputs, dout = case.tensors(device)

    def run(case):
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(dense(case, device)(*leaves)[0], leaves, dout)

    check(case, (*inputs, dout), dense(case, device), dense_oracle(case, device))
    assert_same_but_for_rounding(run(case), run(case.but(softcap=0.0)))


@pytest.mark.parametrize("quarter", [10, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("head_dim")
def test_a_key_that_no_row_sees_may_be_nan(head_dim, quarter, device):
    """Few rows, and as many as take the kernels for sm_90."""
    case = Case(seqlen_q=2 * quarter, seqlen_k=4 * quarter, head_dim=head_dim, causal=True, window=(quarter, 0))
    q, k, v, dout = case.tensors(device)
    dirty = [x.clone() for x in (k, v)]
    for x in dirty:
        x[:, :quarter] = float("nan")  # bottom right: row i sees keys i + quarter to i + 2 quarter
    leaves = [x.detach().requires_grad_() for x in (q, *dirty)]
    out = flash_attn_func(*leaves, causal=True, window_size=(quarter, 0))
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert (dk[:, :quarter] == 0).all() and (dv[:, :quarter] == 0).all()


@pytest.mark.parametrize("lse", [float("inf"), float("-inf"), 0.0])
def test_backward_of_rows_without_keys_whatever_they_hold(lse, device):
    """Callers that merge blocks of keys write -inf, or anything, where a row has seen none."""
    case = Case(seqlen_q=40, seqlen_k=20, heads_k=2, causal=True)
    *inputs, dout = case.tensors(device)
    out, softmax_lse, _ = dense(case, device)(*inputs)
    dlse = torch.randn_like(softmax_lse)
    exact = oracle.gradients(dense_oracle(case, device), [x.double() for x in inputs], dout, dlse)[2]
    plain = oracle.gradients(dense_oracle(case, device), inputs, dout, dlse)[2]
    for x in (inputs[0], dout, out):
        x[:, :20] = float("nan")
    softmax_lse[..., :20], dlse[..., :20] = lse, float("nan")
    grads = [torch.empty_like(x) for x in inputs]
    op("bwd", case)(dout, *inputs, out, softmax_lse, dlse, None, *grads, *op_arguments(case, device))
    for three in zip(grads, exact, plain, strict=True):
        assert_error_ratio(*three)
    assert (grads[0][:, :20] == 0).all()


@pytest.mark.parametrize("packing", ["", "kv", "qkv"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.same_on_cpu("head_dim")
def test_gradients_into_lazy_clones(head_dim, packing, device):
    """A copy on write gets memory of its own when it is written; what it was cloned from stays."""
    case = Case(seqlen_q=130, seqlen_k=130, head_dim=head_dim, causal=True)
    *inputs, dout = case.tensors(device)
    out, softmax_lse, _ = dense(case, device)(*inputs)
    alone = {"": 3, "kv": 1, "qkv": 0}[packing]
    together = [torch.stack(inputs[alone:], dim=2)] if alone < 3 else []
    tensors = [*inputs[:alone], *together]
    bases = [torch.full_like(x, 7.0) for x in tensors]
    missing = [None] * (3 - len(tensors))

    def run(grads):
        others = out, softmax_lse, None, None
        arguments = *tensors, *missing, *others, *grads, *missing, *op_arguments(case, device)
        op("bwd", case)(dout, *arguments)
        return grads

    found = run([torch._lazy_clone(x) for x in bases])
    expected = run([torch.empty_like(x) for x in tensors])
    assert_same_but_for_rounding(found, expected)
    assert all((base == 7.0).all() for base in bases)


def test_keys_in_pages_have_no_gradient(device):
    """A forward under grad mode is nothing to refuse; the backward is."""
    case = Case(batch=2, seqlen_q=5, seqlen_k=8)
    q = case.tensors(device)[0].flatten(0, 1).requires_grad_()
    pages = torch.randn(2, 4, 4, *q.shape[1:], dtype=q.dtype, device=device)
    bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (5, 8)]
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    out = flash_attn_varlen_func(q, *pages, *bounds, 5, 8, causal=True, block_table=table)
    with torch.no_grad():
        assert torch.equal(out, flash_attn_varlen_func(q, *pages, *bounds, 5, 8, causal=True, block_table=table))
    with pytest.raises(RuntimeError, match="block_table must be None in the backward"):
        out.sum().backward()
    assert q.grad is None


def test_scores_beyond_float16(device):
    """Scores are float32: products of 16-bit numbers may exceed 65504."""
    q, k, v, dout = Case(dtype="fp16", seqlen_q=17, seqlen_k=17).tensors(device)
    leaves = [x.detach().requires_grad_() for x in (q * 600, k * 600, v)]
    out, lse, _ = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    exact, exact_lse = oracle.attention(*(x.detach().double() for x in leaves), causal=True)
    assert all(x.isfinite().all() for x in (out, lse, dv))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-6 * exact_lse.abs().max().item())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def rng_state_of(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@pytest.mark.parametrize("dropout_p", [0.0001, 0.17, 0.5, 0.99])
def test_dropout_keeps_the_documented_share(dropout_p, device):
    """An element stays if 8 random bits are at most floor(255 (1 - p))."""
    q, k, v, _ = Case(batch=4, heads=8, heads_k=8, seqlen_q=256, seqlen_k=256, head_dim=8).tensors(device)
    keep = ~flash_attn_func(q, k, v, dropout_p=dropout_p, return_attn_probs=True)[2].signbit()
    share = (int(255 * (1 - dropout_p)) + 1) / 256
    deviation = (share * (1 - share) / keep.numel()) ** 0.5
    assert abs(keep.double().mean().item() - share) <= 5 * deviation


@pytest.mark.parametrize(
    "case",
    params(
        [
            Case(seqlen_q=97, seqlen_k=203, heads_k=2, dropout_p=0.17),
            Case(batch=3, seqlen_q=130, seqlen_k=17, dropout_p=0.6),
            Case(seqlen_q=64, seqlen_k=64, head_dim=256, dropout_p=0.17, dtype="fp16"),
        ]
    ),
)
def test_dropout_mask_is_a_function_of_rng_state(case, device):
    q, k, v, _ = case.tensors(device)
    _, _, s_dmask, rng_state = _flash_attn_forward(
        q, k, v, case.dropout_p, case.head_dim**-0.5, False, -1, -1, 0.0, None, True
    )
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    shape = case.batch, case.heads, case.seqlen_q, case.seqlen_k
    expected = oracle.dropout_keep(*rng_state.tolist(), *shape, case.dropout_p)
    found = ~s_dmask[..., : case.seqlen_q, : case.seqlen_k].signbit()
    assert torch.equal(found.cpu(), expected)


DROPPED = [
    dict(seqlen_q=203, seqlen_k=331, heads_k=2, causal=True),
    dict(seqlen_q=331, seqlen_k=203, heads_k=1, window=(90, 20)),
    dict(seqlen_q=130, seqlen_k=129),
    dict(seqlen_q=17, seqlen_k=600, causal=True, deterministic=True),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.17, 0.6])
@pytest.mark.parametrize("changes", DROPPED, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.same_on_cpu("head_dim")
def test_dropout_without_other_features(head_dim, changes, dropout_p, packed, device):
    """Which has instances of its own, whose random bits other warps draw."""
    case = Case(batch=3, head_dim=head_dim, dropout_p=dropout_p, **changes)
    if packed:
        tensors, cu_seqlens = packed_batch(case, device)
        check(case, tensors, varlen(case, device, cu_seqlens), varlen_oracle(case, device, cu_seqlens))
    else:
        check(case, case.tensors(device), dense(case, device), dense_oracle(case, device))


@pytest.mark.parametrize("leftpad", [False, True])
def test_varlen_dropout_mask_counts_from_the_first_used_key_of_each_entry(leftpad, device):
    case = Case(batch=3, seqlen_q=97, seqlen_k=130, dropout_p=0.3)
    (q, k, v, _), (cu_seqlens_q, cu_seqlens_k) = packed_batch(case, device)
    lengths = cu_seqlens_k.diff()
    pad = lengths // 3 if leftpad else torch.zeros_like(lengths)
    _, _, s_dmask, rng_state = _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, 97, 130, 0.3, 0.125, False, return_softmax=True, leftpad_k=pad
    )
    keep = oracle.dropout_keep(*rng_state.tolist(), 3, 4, 97, 130, 0.3)
    for b, (rows, keys) in enumerate(zip(cu_seqlens_q.diff().tolist(), (lengths - pad).tolist(), strict=True)):
        assert torch.equal(~s_dmask[b, :, :rows, :keys].signbit().cpu(), keep[b, :, :rows, :keys])


def test_dropout_follows_the_seed(device):
    case = Case(seqlen_q=97, seqlen_k=97, dropout_p=0.17)
    q, k, v, _ = case.tensors(device)

    def run(seed):
        torch.manual_seed(seed)
        return dense(case, device)(q, k, v)

    assert all(torch.equal(x, y) for x, y in zip(run(1), run(1), strict=True))
    assert not torch.equal(run(1)[2].signbit(), run(2)[2].signbit())


def test_each_call_drops_other_elements(device):
    case = Case(dropout_p=0.5)
    q, k, v, _ = case.tensors(device)
    assert not torch.equal(dense(case, device)(q, k, v)[2].signbit(), dense(case, device)(q, k, v)[2].signbit())


def test_generator_moves_only_in_a_forward_with_dropout(device):
    q, k, v, dout = Case().tensors(device)
    q.requires_grad_()
    before = rng_state_of(device)
    flash_attn_func(q, k, v).backward(dout)
    assert torch.equal(rng_state_of(device), before)
    out = flash_attn_func(q, k, v, dropout_p=0.1)
    after_forward = rng_state_of(device)
    assert not torch.equal(after_forward, before)
    out.backward(dout)
    assert torch.equal(rng_state_of(device), after_forward)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_minute_dropout_changes_nothing(dtype, device):
    """dropout_p = 1e-30 keeps everything: callers pass it to get S_dmask and lse."""
    q, k, v, dout = Case(causal=True, dtype=dtype).tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(dropout_p):
        out, lse, s_dmask = flash_attn_func(
            *leaves, dropout_p=dropout_p, causal=True, deterministic=True, return_attn_probs=True
        )
        return s_dmask, (out, lse, *torch.autograd.grad(out, leaves, dout))

    s_dmask, with_dropout = run(1e-30)
    assert not s_dmask[..., :64, :64].signbit().any()
    assert_same_but_for_rounding(with_dropout, run(0.0)[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_the_same_mask(use_reentrant, device):
    q, k, v, dout = Case(seqlen_q=97, seqlen_k=97).tensors(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = functools.partial(flash_attn_func, dropout_p=0.3, deterministic=True)

    def gradients(function):
        torch.manual_seed(5)
        out = function(*leaves)
        torch.rand(3, device=device)  # something else draws between the forward and its recomputation
        out.backward(dout)
        grads = [x.grad.clone() for x in leaves]
        for x in leaves:
            x.grad = None
        return out, *grads

    def checkpointed(*args):
        return torch.utils.checkpoint.checkpoint(attend, *args, use_reentrant=use_reentrant, preserve_rng_state=True)

    assert all(torch.equal(x, y) for x, y in zip(gradients(checkpointed), gradients(attend), strict=True))
