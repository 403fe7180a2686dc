"""flash_attn.flash_attn_triton: attention with an additive bias that has a gradient."""

import inspect

import oracle
import pytest
import torch
from cases import Case, params
from compare import assert_error_ratio, assert_same_but_for_rounding

from flash_attn import flash_attn_func, flash_attn_triton

BIASES = {  # shape of the bias for (batch, heads, seqlen_q, seqlen_k)
    "all": lambda b, h, i, j: (b, h, i, j),
    "of heads": lambda b, h, i, j: (1, h, i, j),
    "of entries": lambda b, h, i, j: (b, 1, i, j),
    "of keys": lambda b, h, i, j: (b, 1, 1, j),
    "two dimensions": lambda b, h, i, j: (i, j),
    "one dimension": lambda b, h, i, j: (j,),
}
CASES = [
    Case(seqlen_q=33, seqlen_k=33),
    Case(seqlen_q=17, seqlen_k=40, causal=True, heads_k=2),
    Case(seqlen_q=40, seqlen_k=17, causal=True, dtype="fp16"),
    Case(seqlen_q=20, seqlen_k=20, dtype="fp32", head_dim=33),
]


def with_bias(q, k, v, bias, causal):
    """The attention in the precision of its tensors."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in s.shape[-2:])
        s = s.masked_fill(j[None] > i[:, None] + len(j) - len(i), float("-inf"))
    p = torch.softmax(s, -1).nan_to_num(0)  # rows without keys
    return torch.einsum("bhij,bjhd->bihd", p, v)


def differentiate(function, q, k, v, bias, causal, dout):
    """out, dq, dk, dv and dbias."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    out = function(*leaves, causal)
    return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def check(q, k, v, bias, causal, dout):
    """Compare a call with the formulas in float64, and in the precision of q."""
    found = differentiate(flash_attn_triton.flash_attn_func, q, k, v, bias, causal, dout)
    exact, plain = (
        differentiate(with_bias, *(x.to(dtype) for x in (q, k, v, bias)), causal, dout)
        for dtype in (torch.float64, q.dtype)
    )
    for name, *three in zip(("out", "dq", "dk", "dv", "dbias"), found, exact, plain, strict=True):
        assert_error_ratio(*three, name=name)
        assert three[0].dtype == (bias if name == "dbias" else q).dtype


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("case", params(CASES))
def test_bias(case, shape, device):
    q, k, v, dout = case.tensors(device)
    generator = torch.Generator(device).manual_seed(1)
    size = BIASES[shape](case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    bias = torch.randn(size, device=device, generator=generator).to(q.dtype)
    check(q, k, v, bias, case.causal, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_may_be_more_exact_than_the_scores(dtype, device):
    q, k, v, dout = Case(seqlen_q=33, seqlen_k=33).tensors(device)
    check(q, k, v, torch.linspace(-1, 1, 33, device=device, dtype=dtype), False, dout)


def test_without_a_bias_it_is_attention(device):
    q, k, v, _ = Case(seqlen_q=33, seqlen_k=33).tensors(device)
    expected = flash_attn_func(q, k, v, causal=True, softmax_scale=0.5)
    assert torch.equal(flash_attn_triton.flash_attn_func(q, k, v, None, True, 0.5), expected)
    kv, qkv = torch.stack([k, v], dim=2), torch.stack([q, k, v], dim=2)
    assert torch.equal(flash_attn_triton.flash_attn_kvpacked_func(q, kv, None, True, 0.5), expected)
    assert torch.equal(flash_attn_triton.flash_attn_qkvpacked_func(qkv, None, True, 0.5), expected)


def test_a_bias_of_zeros_changes_nothing(device):
    case = Case(seqlen_q=33, seqlen_k=33, causal=True)
    q, k, v, _ = case.tensors(device)
    kv, qkv = torch.stack([k, v], dim=2), torch.stack([q, k, v], dim=2)
    exact, plain = (oracle.attention(q.to(t), k.to(t), v.to(t), causal=True)[0] for t in (torch.float64, q.dtype))
    zeros = torch.zeros(33, 33, device=device)
    for found in (
        flash_attn_triton.flash_attn_func(q, k, v, bias=zeros, causal=True),
        flash_attn_triton.flash_attn_kvpacked_func(q, kv, bias=zeros, causal=True),
        flash_attn_triton.flash_attn_qkvpacked_func(qkv, bias=zeros, causal=True),
    ):
        assert_error_ratio(found, exact, plain)


def test_keys_of_bias_minus_infinity_are_hidden(device):
    q, k, v, dout = Case(seqlen_q=9, seqlen_k=12).tensors(device)
    bias = torch.zeros(9, 12, device=device)
    bias[:, 8:], bias[3] = float("-inf"), float("-inf")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn_triton.flash_attn_func(*leaves, bias)
    grads = torch.autograd.grad(out, leaves, dout)
    expected = flash_attn_triton.flash_attn_func(q, k[:, :8], v[:, :8], bias[:, :8])
    assert_same_but_for_rounding([out], [expected])
    assert (out[:, 3] == 0).all()
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][:, 3] == 0).all() and all((x[:, 8:] == 0).all() for x in grads[1:])


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 5, 0)], ids=["no queries", "no keys"])
def test_nothing_to_attend_to(shape, device):
    batch, queries, keys = shape
    q = torch.randn(batch, queries, 2, 8, device=device, requires_grad=True)
    k = torch.randn(batch, keys, 2, 8, device=device)
    out = flash_attn_triton.flash_attn_func(q, k, k, torch.zeros(1, device=device))
    assert out.shape == q.shape and (out == 0).all()
    out.sum().backward()
    assert (q.grad == 0).all()


@pytest.mark.parametrize(
    ("bias", "error", "says"),
    [
        ([0.0], TypeError, "bias must be a torch.Tensor, found list"),
        (torch.zeros(9, 12).int(), TypeError, "bias must have dtype .* or torch.bool, found torch.int32"),
        (torch.zeros(9, 12, device="meta"), ValueError, "bias must be on .* found it on meta"),
        (torch.zeros(12, 9), ValueError, r"bias must broadcast to .* = \(2, 4, 9, 12\), found shape \(12, 9\)"),
        (torch.zeros(1, 3, 4, 9, 12), ValueError, r"bias must broadcast to .* found shape \(1, 3, 4, 9, 12\)"),
    ],
    ids=["a list", "int32", "elsewhere", "other lengths", "5-D"],
)
def test_bad_bias(bias, error, says, device):
    q, k, v, _ = Case(seqlen_q=9, seqlen_k=12).tensors(device)
    if isinstance(bias, torch.Tensor) and not bias.is_meta:
        bias = bias.to(device)
    with pytest.raises(error, match=says):
        flash_attn_triton.flash_attn_func(q, k, v, bias)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("flash_attn_func", ["q", "k", "v"]),
        ("flash_attn_kvpacked_func", ["q", "kv"]),
        ("flash_attn_qkvpacked_func", ["qkv"]),
    ],
)
def test_signatures(name, tensors):
    parameters = inspect.signature(getattr(flash_attn_triton, name)).parameters
    assert list(parameters) == [*tensors, "bias", "causal", "softmax_scale"]
    assert [p.default for p in parameters.values()][len(tensors) :] == [None, False, None]
