"""Values of another head dim than the keys, and head dims above 256, against the oracle.

On a GPU, kernels compute all of this.
"""

import functools

import oracle
import pytest
import torch
from cases import LAYOUTS, Case, cover, laid_out, params, uncovered
from features import Featured
from problems import check

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn._reference.attention.options import CacheOptions, Options

PAIRS = [(192, 128), (160, 96), (129, 33), (128, 64), (64, 128), (40, 256), (320, 128), (64, 384), (512, 512)]
PAIRS += [(264, 264), (301, 77), (320, 512)]
FACTORS = dict(
    head_dims=PAIRS,
    lengths=[(130, 200), (200, 130), (64, 64), (3, 150)],  # few rows are for the kernel that decodes
    heads=[(4, 4), (4, 1)],
    dtype=["fp16", "bf16"],
    causal=[False, True],
    window=[(-1, -1), (40, -1), (7, 9)],
    softcap=[0.0, 2.0],
    alibi=["", "h"],
    dropout_p=[0.0, 0.17],
    sink=["", "fp32"],
    ranges=["", "2", "2h"],
    deterministic=[False, True],
    seqused_k=[False, True],
    varlen=[False, True],
    dlse=[False, True],
)
PLAIN = dict(softcap=0.0, alibi="", dropout_p=0.0)  # what the fastest kernels take


def make(lengths, heads, head_dims, **rest):
    return Featured(4, *lengths, *heads, head_dims[0], head_dim_v=head_dims[1], **rest)


ROWS = cover(FACTORS)
PLAIN_ROWS = cover({name: values for name, values in FACTORS.items() if name not in PLAIN}, seed=1)


def test_samples_have_every_pair_of_values():
    assert not uncovered(ROWS, FACTORS, valid=lambda row: True, tied=())


@pytest.mark.parametrize("case", params(make(**row) for row in ROWS + [row | PLAIN for row in PLAIN_ROWS]))
@pytest.mark.same_on_cpu("head_dim", "head_dim_v", "dtype", "deterministic")
def test_sample(case, device):
    case.check(torch.device(device))


def drawn(case, head_dim_v, device):
    """q, k, v and dout of a case whose values have head_dim_v channels."""
    values = case.but(head_dim=head_dim_v).tensors(device)
    return *case.tensors(device)[:2], *values[2:]


LONG = Case(batch=1, seqlen_q=520, seqlen_k=700, heads=2, heads_k=1, head_dim=192, causal=True)
SHORTER = LONG.but(seqlen_q=150, seqlen_k=210, head_dim=512)  # whose tiles are smaller, too


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case, window", [(LONG, (-1, -1)), (LONG, (200, 0)), (SHORTER, (-1, -1)), (SHORTER, (70, 0))])
def test_several_blocks_of_keys(case, window, deterministic, device):
    case = case.but(window=window, deterministic=deterministic)
    function = functools.partial(flash_attn_func, **case.options(device), deterministic=deterministic)
    exact = functools.partial(oracle.attention, **case.options(device))
    check(case, drawn(case, 128, device), functools.partial(function, return_attn_probs=True), exact)


@pytest.mark.parametrize("case", [LONG, SHORTER], ids=str)
def test_deterministic_gradients_repeat(case, device):
    q, k, v, dout = drawn(case, 128, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients():
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    first = gradients()
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 128), (64, 32), (320, 264)])
def test_layouts_of_values(head_dim, head_dim_v, layout, device):
    """What lies between and behind the channels, NaN here, is not read."""
    case = Case(seqlen_q=70, seqlen_k=90, head_dim=head_dim, causal=True)
    q, k, v, dout = drawn(case, head_dim_v, device)
    tensors = q, k, laid_out(v, layout), laid_out(dout, layout)
    function = functools.partial(flash_attn_func, causal=True, return_attn_probs=True)
    check(case, tensors, function, functools.partial(oracle.attention, causal=True))


def test_keys_and_values_of_one_projection(device):
    """As in models with latent attention: the values are the last channels of a tensor, behind a part of the keys."""
    case = Case(seqlen_q=80, seqlen_k=80, head_dim=256, causal=True)
    q, both, _, dout = case.tensors(device)
    q, dout = q[..., :192], dout[..., :128]
    rope = torch.randn_like(both[..., :1, :64]).expand(-1, -1, 4, -1)

    def run(function, q, both):
        k, v = both.split([128, 128], -1)
        return function(q, torch.cat([k, rope.to(k.dtype)], -1), v, causal=True)

    leaves = [x.detach().requires_grad_() for x in (q, both)]
    out = run(flash_attn_func, *leaves)
    exact_leaves = [x.detach().double().requires_grad_() for x in (q, both)]
    exact = run(oracle.attention, *exact_leaves)[0]
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    exact_grads = torch.autograd.grad(exact, exact_leaves, dout.double())
    for grad, exact_grad in zip(torch.autograd.grad(out, leaves, dout), exact_grads, strict=True):
        torch.testing.assert_close(grad.double(), exact_grad, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("seqlen_q, seqlen_k, heads", [(0, 70, 2), (70, 0, 2), (70, 70, 0)])
def test_empty(seqlen_q, seqlen_k, heads, device):
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads, heads_k=heads, head_dim=192)
    q, k, v, dout = drawn(case, 128, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves)
    assert out.shape == dout.shape and (out == 0).all()
    for x, grad in zip(leaves, torch.autograd.grad(out, leaves, dout), strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 128), (64, 32), (32, 64)])
def test_cache(head_dim, head_dim_v, seqlen_q, page, device):
    """Appending to a cache is attention over the keys of each entry, and writes all channels and no others."""
    case = Case(seqlen_q=seqlen_q, seqlen_k=160, heads_k=2, head_dim=head_dim)
    q, k, v, _ = drawn(case, head_dim_v, device)
    lengths = torch.tensor([10, 150], dtype=torch.int32, device=device)
    new = [torch.randn_like(x[:, :3]) for x in (k, v)]
    full = [x.clone() for x in (k, v)]
    for cache, fresh in zip(full, new, strict=True):
        for b, length in enumerate(lengths.tolist()):
            cache[b, length : length + 3] = fresh[b]
    expected = [
        oracle.attention(q[b : b + 1].double(), *(x[b : b + 1, : n + 3].double() for x in full), causal=True)[0]
        for b, n in enumerate(lengths.tolist())
    ]
    caches, table = [k.clone(), v.clone()], None
    if page:
        caches = [x.reshape(-1, page, *x.shape[2:]) for x in caches]
        table = torch.arange(len(caches[0]), device=device).view(2, -1).int()
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, block_table=table, causal=True)
    for cache, whole in zip(caches, full, strict=True):
        assert torch.equal(cache.view_as(whole), whole)
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-2, rtol=2e-2)


def test_pages_without_a_cache_call(device):
    case = Case(batch=1, seqlen_q=70, seqlen_k=96, heads_k=2, head_dim=192)
    q, k, v, _ = drawn(case, 128, device)
    pages = [x.reshape(6, 16, *x.shape[2:]) for x in (k, v)]
    cu_seqlens = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (70, 96)]
    table = torch.arange(6, device=device).view(1, 6).int()
    out = flash_attn_varlen_func(q[0], *pages, *cu_seqlens, 70, 96, block_table=table)
    torch.testing.assert_close(out, flash_attn_func(q, k, v)[0], atol=1e-2, rtol=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Ops


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_fwd(requires_grad, transposed, device):
    case = Case(seqlen_q=70, seqlen_k=90, head_dim=192, layout="bhsd" if transposed else "contiguous")
    tensors = [x.requires_grad_(requires_grad) for x in drawn(case, 128, device)[:3]]
    torch.library.opcheck(torch.ops.flash_attn.fwd.default, (*tensors, *Options(0.1, -1, 0)))


def test_opcheck_bwd(device):
    q, k, v, dout = drawn(Case(seqlen_q=70, seqlen_k=90, head_dim=192), 128, device)
    options = Options(0.1, -1, 0)
    out, lse = torch.ops.flash_attn.fwd(q, k, v, *options)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    torch.library.opcheck(torch.ops.flash_attn.bwd.default, (dout, q, k, v, out, lse, None, None, *grads, *options))


def test_opcheck_fwd_kvcache(device):
    q, k, v, _ = drawn(Case(seqlen_q=3, seqlen_k=90, head_dim=192), 128, device)
    torch.library.opcheck(torch.ops.flash_attn.fwd_kvcache.default, (q, k, v, *CacheOptions(0.1, -1, 0)))


def test_compiles_to_one_graph(device):
    tensors = drawn(Case(seqlen_q=70, seqlen_k=90, head_dim=192), 128, device)[:3]
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, causal=True), flash_attn_func(*tensors, causal=True))
