"""Additive biases, and masks of bool, in the kernels: on a GPU, or emulated with --emulate.

Cases are in 16 bits and have nothing that kernels lack. Without kernels they test the reference. Decoding with a bias
is in test_flash_attn_ranges.py.
"""

import math

import oracle
import pytest
import torch
from cases import Case, cover, uncovered
from compare import assert_error_ratio
from features import BIASES, GROUPED, Featured
from recorder import kernels_of

from flash_attn import _library, flash_attn_func, flash_attn_varlen_func
from flash_attn._ops import flash_attn_features as with_features

KERNEL_BIASES = [name for name in BIASES if name not in ("rows", "one")]  # these have one key

FACTORS = dict(
    lengths=[(70, 70), (200, 333), (333, 200), (1, 300), (5, 301), (40, 2)],
    heads=[(4, 4), (6, 2), (4, 1)],
    head_dim=[64, 128, 40, 50],
    dtype=["bf16", "fp16"],
    bias=KERNEL_BIASES,
    bias_dtype=["fp32", "bf16", "fp16"],
    causal=[False, True, "entries"],
    window=[(-1, -1), (20, -1), (70, 9)],
    softcap=[0.0, 2.0],
    alibi=["", "bh"],
    dropout_p=[0.0, 0.17],
    deterministic=[False, True],
    sink=["", "fp32"],
    ranges=["", "2", "2h"],
    seqused_q=[False, True],
    seqused_k=[False, True],
    varlen=[False, True],
    packing=["", "kv"],
    dlse=[False, True],
    portable=[False, True],
)
TIED = "bias", "varlen", "seqused_q", "sink", "alibi"


def possible(row):
    """Whether kernels compute all of it, gradients too."""
    has_rows = not row["seqused_q"] or (not row["sink"] and not row["alibi"])
    return has_rows and not (row["varlen"] and row["bias"] in GROUPED)


ROWS = cover(FACTORS, valid=possible)


def make(lengths, heads, causal, portable, **rest):
    return Featured(4, *lengths, *heads, causal=causal is True, entries_causal=causal == "entries", **rest)


def test_sample_has_every_pair_of_values():
    assert not uncovered(ROWS, FACTORS, valid=possible, tied=TIED)


@pytest.fixture
def in_kernels(device, monkeypatch):
    """Without the reference, where there are kernels."""
    if _library.runs_in_kernel("fwd_features", torch.empty(0, device=device)):
        for name in ("fwd_features", "bwd_features"):
            monkeypatch.delattr(with_features.reference, name)


@pytest.mark.parametrize("case, portable", [(make(**row), row["portable"]) for row in ROWS], ids=str)
@pytest.mark.same_on_cpu("portable", "seqlen_q", "seqlen_k", "heads", "heads_k", "head_dim", "dtype", "deterministic")
def test_sample(case, portable, device, monkeypatch, in_kernels):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    case.check(device)


@pytest.mark.parametrize("bias", ["all", "heads", "keys", "bool"])
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("head_dim, head_dim_v", [(96, 0), (192, 0), (192, 128), (256, 0), (40, 136), (512, 0)])
@pytest.mark.same_on_cpu("portable", "head_dim", "head_dim_v")
def test_head_dims(head_dim, head_dim_v, portable, bias, device, monkeypatch, in_kernels):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    Featured(2, 150, 170, 4, 2, head_dim, head_dim_v=head_dim_v, causal=True, bias=bias).check(device)


# ---------------------------------------------------------------------------------------------------------------------
# Biases of which Hopper's kernels copy tiles: in the dtype of q, or masks. Rows that do not start at chunks of 16 bytes
# are moved first.

TILED = dict(
    lengths=[(200, 336), (333, 200), (70, 72), (129, 128), (90, 77)],
    heads=[(4, 4), (6, 2), (4, 1)],
    head_dim=[64, 40, 96, 128, 192, 256],
    dtype=["bf16", "fp16"],
    bias=["all", "heads", "entries", "groups", "keys", "first of groups", "bool", "bool keys"],
    fixed_bias=[False, True],
    causal=[False, True],
    window=[(-1, -1), (20, -1), (70, 9)],
    sink=["", "fp32"],
    seqused_k=[False, True],
    varlen=[False, True],
    packing=["", "kv"],
    dlse=[False, True],
)


def can_be_tiled(row):
    return not (row["varlen"] and row["bias"] in GROUPED)


TILED_ROWS = cover(TILED, valid=can_be_tiled)


def test_sample_of_tiles_has_every_pair_of_values():
    assert not uncovered(TILED_ROWS, TILED, valid=can_be_tiled, tied=("varlen", "bias"))


@pytest.mark.parametrize("case", [make(**row, portable=False) for row in TILED_ROWS], ids=str)
@pytest.mark.same_on_cpu("case")
def test_sample_of_tiles(case, device, in_kernels):
    case.check(device)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "softcap, head_dim, seqlen_q, in_tiles",
    [
        (0.0, 128, 150, True),
        (0.0, 64, 150, True),
        (1.0, 128, 150, False),
        (0.0, 50, 150, False),
        (0.0, 128, 3, False),
    ],
)
@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ((2, 1, 1, 301), torch.bool),
        ((150, 304), torch.bool),
        ((1, 4, 150, 301), torch.bfloat16),
    ],
)
def test_which_biases_are_copied_for_tiles(sizes, dtype, softcap, head_dim, seqlen_q, in_tiles, device):
    """On Hopper: where kernels then have tiles, and nowhere else."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")
    inputs = Case(seqlen_q=seqlen_q, seqlen_k=sizes[-1], head_dim=head_dim).tensors(device)
    *leaves, dout = (x.requires_grad_() for x in inputs)
    bias = torch.randn(*sizes[:-2], min(sizes[-2], seqlen_q), sizes[-1], device=device)
    bias = bias < 1 if dtype == torch.bool else bias.to(dtype)
    forward = kernels_of(lambda: flash_attn_func(*leaves, attn_bias=bias, softcap=softcap))
    out = flash_attn_func(*leaves, attn_bias=bias, softcap=softcap)
    backward = kernels_of(lambda: torch.autograd.grad(out, leaves, dout))
    for kernels, tiled in ((forward, in_tiles), (backward, in_tiles or seqlen_q == 3)):
        assert any("Features)2" in name for name in kernels) == tiled, kernels  # kBiased
        if dtype == torch.bool:
            assert any("log" in name for name in kernels) == tiled, kernels


# ---------------------------------------------------------------------------------------------------------------------
# Layouts

SHAPE = (2, 4, 70, 90)


def base(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


LAYOUTS = {  # a bias that kernels read as it is, or not
    "contiguous": lambda: base(*SHAPE),
    "expanded": lambda: base(1, 4, 1, 90).expand(SHAPE),
    "heads last": lambda: base(2, 70, 90, 4).movedim(-1, 1),
    "keys first": lambda: base(2, 4, 90, 70).mT,
    "part of more keys": lambda: base(2, 4, 70, 100)[..., :90],
    "from an odd key on": lambda: base(2, 4, 70, 100)[..., 3:93],
    "odd rows": lambda: base(2, 4, 70, 91)[..., :90],
    "expanded, odd rows": lambda: base(1, 1, 70, 91)[..., 1:].expand(SHAPE),
}


@pytest.mark.parametrize("kind", ["bf16", "fp32", "bool"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, kind, device, in_kernels):
    """What a bias means does not depend on its strides."""
    *inputs, dout = Case(seqlen_q=70, seqlen_k=90, heads_k=2).tensors(device)
    bias = LAYOUTS[name]().to(device)
    bias = bias < 0.5 if kind == "bool" else bias if kind == "bf16" else bias.float()
    results = []
    for each in (bias, bias.clone(memory_format=torch.contiguous_format)):
        leaves = [x.detach().requires_grad_() for x in (*inputs, each)[: 3 + (kind != "bool")]]
        out, lse = flash_attn_func(*leaves[:3], attn_bias=(*leaves, each)[3], return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def chunks(*shape):
    """Rows of 90 keys in the second chunk of 13 and those after it; all else is NaN."""
    x = base(*shape, 104)
    x[..., :8] = x[..., 98:] = math.nan
    return x[..., 8:98]


TILED_LAYOUTS = {
    "contiguous": lambda: chunks(2, 4, 70),
    "rows before heads": lambda: chunks(2, 70, 4).transpose(1, 2),
    "heads before entries": lambda: chunks(4, 2, 70).transpose(0, 1),
    "of one entry": lambda: chunks(1, 4, 70).expand(2, -1, -1, -1),
    "of one head": lambda: chunks(2, 1, 70).expand(-1, 4, -1, -1),
    "of one entry and head": lambda: chunks(70),
    "rows that overlap": lambda: base(80_000).as_strided((2, 4, 70, 90), (40_000, 8_000, 8, 1)),
}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", TILED_LAYOUTS)
def test_layouts_of_tiles(name, fixed, device, in_kernels):
    """As a bias in fp32, which kernels load otherwise. What lies beyond the keys has no part in anything."""
    *inputs, dout = Case(seqlen_q=70, seqlen_k=90, heads_k=2).tensors(device)
    bias = TILED_LAYOUTS[name]().to(device)
    results = []
    for each in (bias, bias.float()):
        leaves = [x.detach().requires_grad_() for x in (*inputs, each)[: 4 - fixed]]
        out, lse = flash_attn_func(*leaves[:3], attn_bias=(*leaves, each)[3], return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_a_packed_bias_of_one_entry_has_no_part_in_another(other, device, in_kernels):
    """Though kernels read the rows after those of an entry; here, beside keys that all of its own rows see."""
    q, k, v, dout = (x[0] for x in Case(seqlen_q=110, seqlen_k=200).tensors(device))
    bounds = [torch.tensor([0, *ends], dtype=torch.int32, device=device) for ends in ((40, 110), (130, 200))]
    bias = base(4, 110, 136).to(device)
    results = []
    for number in (0.0, other):
        bias[:, 40:] = number
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, *bounds, 70, 130, attn_bias=bias.clone())
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        results.append([out[:40], dq[:40], dk[:130], dv[:130]])
    for one, same in zip(*results, strict=True):
        assert torch.equal(one, same)


def test_a_packed_bias_may_have_more_keys_than_entries(device, in_kernels):
    q, k, v, _ = (x[0] for x in Case(seqlen_q=70, seqlen_k=70).tensors(device))
    cu_seqlens = torch.tensor([0, 20, 20, 70], dtype=torch.int32, device=device)
    bias = torch.randn(4, 70, 64, device=device)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 50, 50, attn_bias=bias)
    rows = [slice(0, 20), slice(20, 20), slice(20, 70)]

    def expected(to):
        inputs, of_entry = (x.to(to) for x in (q, k, v)), lambda _, row: bias[:, row].to(to)
        return oracle.featured_attention(*inputs, rows, rows, causal=[False] * 3, attn_bias=of_entry)[0]

    assert_error_ratio(out, expected(torch.double), expected(q.dtype))


@pytest.mark.parametrize("portable", [False, True])
def test_the_gradient_of_a_packed_bias_of_too_few_keys_stays_in_its_rows(portable, device, monkeypatch, in_kernels):
    """Only the device knows how many keys entries have. Here no row sees those for which there is no bias."""
    if not _library.runs_in_kernel("bwd_features", torch.empty(0, device=device)):
        pytest.skip("needs kernels of attention: the reference knows the lengths, and raises")
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q, k, v, dout = (x[0] for x in Case(seqlen_q=70, seqlen_k=70).tensors(device))
    cu_seqlens = torch.tensor([0, 20, 70], dtype=torch.int32, device=device)
    ranges = torch.tensor([0, 20], dtype=torch.int32, device=device).expand(1, 1, 2)
    bias = torch.randn(4, 70, 50, device=device)

    def gradient(bias):
        bias = bias.contiguous().requires_grad_()
        bounds = cu_seqlens, cu_seqlens, 50, None
        return torch.autograd.grad(
            flash_attn_varlen_func(q, k, v, *bounds, attn_bias=bias, key_ranges=ranges), bias, dout
        )[0]

    assert torch.equal(gradient(bias[..., :20]), gradient(bias)[..., :20])


# ---------------------------------------------------------------------------------------------------------------------
# Large numbers


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("seqlen_q", [2, 150])
@pytest.mark.parametrize("lowest", [-math.inf, "lowest", -1e9, -1e4])
@pytest.mark.parametrize("tiled, fixed", [(False, False), (True, False), (True, True)])
@pytest.mark.cover(2)
def test_numbers_that_hide(tiled, fixed, lowest, seqlen_q, portable, device, monkeypatch, in_kernels):
    """A row of -inf is empty, but in one of other lowest numbers all keys weigh the same. Gradients stay finite.

    Entry 0 hides all keys, and entry 1 the last half of them, which is where kernels begin.
    """
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q, k, v, dout = Case(seqlen_q=seqlen_q, seqlen_k=304, heads_k=2, scale_q=1e-3).tensors(device)
    rows, dtype = (seqlen_q, q.dtype) if tiled else (1, torch.float32)
    number = torch.finfo(dtype).min if lowest == "lowest" else lowest
    bias = torch.full((2, 1, rows, 304), number, device=device, dtype=dtype)
    bias[1, ..., :152] = 0
    leaves = [x.requires_grad_() for x in (q, k, v, bias)[: 4 - fixed]]
    out, lse = flash_attn_func(q, k, v, attn_bias=bias, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout)
    if lowest == -math.inf:
        assert (out[0] == 0).all() and (lse[0] == math.inf).all() and all((x[0] == 0).all() for x in grads)
    else:
        mean = v[0].float().mean(0).repeat_interleave(2, 0).expand_as(out[0])
        torch.testing.assert_close(out[0].float(), mean, atol=1e-2, rtol=1e-2)
    seen = flash_attn_func(q[1:], k[1:, :152], v[1:, :152])
    torch.testing.assert_close(out[1:], seen, atol=1e-2, rtol=1e-2)
    assert all(x.isfinite().all() for x in grads)
    most_dv = dout.float().abs().sum(1).unflatten(1, (2, 2)).sum(2)  # weights are at most 1
    assert (grads[2].float().abs() <= 1.01 * most_dv[:, None]).all()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("rows, seqlen_k", [(1, 304), (150, 304), (150, 301), (1, 301)])
def test_masks_that_hide(rows, seqlen_k, portable, device, monkeypatch, in_kernels):
    """A row that sees nothing is empty. Entry 0 hides all keys, and entry 1 those from the 152nd on."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q, k, v, dout = Case(seqlen_q=150, seqlen_k=seqlen_k, heads_k=2).tensors(device)
    mask = torch.zeros(2, 1, rows, seqlen_k, dtype=torch.bool, device=device)
    mask[1, ..., :152] = True
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, attn_bias=mask, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout)
    assert (out[0] == 0).all() and (lse[0] == math.inf).all() and all((x[0] == 0).all() for x in grads)
    shorter = [q[1:], k[1:, :152], v[1:, :152]]
    seen = flash_attn_func(*shorter)
    torch.testing.assert_close(out[1:], seen, atol=1e-2, rtol=1e-2)
    for grad, of_seen in zip(grads, torch.autograd.grad(seen, shorter, dout[1:]), strict=True):
        torch.testing.assert_close(grad[1:, : of_seen.shape[1]], of_seen, atol=1e-2, rtol=1e-2)
        assert (grad[1, of_seen.shape[1] :] == 0).all()


@pytest.mark.parametrize("portable", [False, True])
def test_nan_among_the_keys_that_a_mask_shows(portable, device, monkeypatch, in_kernels):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q, k, v, dout = Case(seqlen_q=150, seqlen_k=304, heads_k=2).tensors(device)
    k[0, 200] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, attn_bias=torch.arange(304, device=device) > 20)
    assert out[0].isnan().all() and out[1].isfinite().all()
    for grad in torch.autograd.grad(out, leaves, dout):
        assert grad[0].isnan().any() and grad[1].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of biases

SIZES = [  # of a bias, for 4 entries, 4 heads, 140 rows and 300 keys
    (4, 4, 140, 300),
    (1, 4, 140, 300),
    (4, 1, 140, 300),
    (1, 1, 140, 300),
    (4, 1, 1, 300),
    (1, 4, 1, 300),
    (1, 1, 1, 300),
    (2, 2, 4, 140, 300),
    (1, 2, 4, 140, 300),
    (2, 1, 1, 140, 300),
    (2, 1, 4, 1, 300),
    (1, 2, 1, 1, 300),
]


def gradient_of_bias(inputs, bias, dout, **options):
    torch.manual_seed(3)
    leaf = bias.detach().requires_grad_()
    return torch.autograd.grad(flash_attn_func(*inputs, attn_bias=leaf, **options), leaf, dout)[0]


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_are_the_same_in_every_run(sizes, portable, device, monkeypatch, in_kernels):
    """Though several blocks, which end in any order, may divide the sum."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    *inputs, dout = Case(batch=4, seqlen_q=140, seqlen_k=300, heads_k=2).tensors(device)
    bias = base(*sizes).to(device)
    first, second = (gradient_of_bias(inputs, bias, dout, causal=True) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("sizes", [(2, 4, 140, 304), (1, 1, 1, 304)], ids=str)
def test_gradients_in_little_shared_memory(sizes, head_dim, device, monkeypatch, in_kernels):
    """As that of a GPU whose blocks have 99 KB: a ring of fewer stages, which changes no sum."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", "1")
    *inputs, dout = Case(seqlen_q=140, seqlen_k=304, heads_k=2, head_dim=head_dim).tensors(device)
    bias = base(*sizes).to(device).requires_grad_()
    out = flash_attn_func(*inputs, attn_bias=bias, causal=True)
    usual = torch.autograd.grad(out, bias, dout, retain_graph=True)[0]
    monkeypatch.setenv("FLASH_ATTN_SHARED_BYTES", str(99 * 1024))
    assert torch.equal(torch.autograd.grad(out, bias, dout)[0], usual)


@pytest.mark.parametrize("options", [{}, dict(softcap=3.0, dropout_p=0.2)], ids=str)
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_a_shared_gradient_is_the_sum_of_those_of_all_scores(sizes, options, device, in_kernels):
    """It is rounded once."""
    *inputs, dout = Case(batch=4, seqlen_q=140, seqlen_k=300, heads_k=2).tensors(device)
    bias, full = base(*sizes).to(device), SIZES[0] if len(sizes) == 4 else (2, 2, *SIZES[0][1:])
    of_all = gradient_of_bias(inputs, bias.float().expand(full).reshape(SIZES[0]), dout, **options)
    found = gradient_of_bias(inputs, bias, dout, **options)
    torch.testing.assert_close(found.float(), of_all.view(full).sum_to_size(sizes), atol=2e-3, rtol=2**-8)


@pytest.mark.parametrize("sizes", [(4, 258, 64), (1, 258, 64), (4, 1, 64), (1, 1, 64)], ids=str)
def test_gradients_of_packed_biases(sizes, device, in_kernels):
    """As those in fp32, whose elements are stored one by one. Short entries leave places for tiles without rows."""
    q, k, v, dout = (x[0] for x in Case(seqlen_q=258, seqlen_k=94, heads_k=2).tensors(device))
    bounds = [
        torch.tensor(starts, dtype=torch.int32, device=device) for starts in ((0, 0, 81, 210, 258), (0, 20, 20, 32, 94))
    ]
    results = []
    for bias in (base(*sizes).to(device), base(*sizes).float().to(device)):
        out = flash_attn_varlen_func(q, k, v, *bounds, 129, 62, causal=True, attn_bias=bias.requires_grad_())
        results.append(torch.autograd.grad(out, bias, dout)[0].float())
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("sizes", [(2, 4, -1, 200), (1, 4, -1, 200), (1, 1, 1, 200)], ids=str)
@pytest.mark.parametrize("seqlen_q, window, rows, keys", [(330, (-1, 0), 130, 0), (70, (10, 0), 0, 120)])
def test_what_nobody_sees_has_no_part_in_a_gradient(seqlen_q, window, rows, keys, sizes, device, in_kernels):
    """The first rows, which see no keys, or the first keys, which no row sees: even if they are NaN."""
    q, k, v, dout = Case(seqlen_q=seqlen_q, seqlen_k=200, heads_k=2).tensors(device)
    bias = base(*(seqlen_q if size < 0 else size for size in sizes)).to(device)
    clean = gradient_of_bias((q, k, v), bias, dout, window_size=window)
    q[:, :rows] = dout[:, :rows] = k[:, :keys] = v[:, :keys] = math.nan
    assert torch.equal(clean, gradient_of_bias((q, k, v), bias, dout, window_size=window))


def test_the_gradient_of_a_bias_of_no_scores_is_zero(device, in_kernels):
    for batch, seqlen_q in ((0, 70), (2, 0)):
        *inputs, dout = Case(batch=batch, seqlen_q=seqlen_q, seqlen_k=90).tensors(device)
        bias = torch.ones(1, 4, 1, 90, device=device)
        assert torch.equal(gradient_of_bias([x.requires_grad_() for x in inputs], bias, dout), torch.zeros_like(bias))
