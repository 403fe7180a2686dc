"""Rows whose visible keys all carry one large negative bias, as padding has: they are buried, not hidden.

A bias that all keys of a row share changes nothing but the row's lse, however large it is. Here the products of queries
and keys are 0, so that neither float32 nor float64 rounds a score: every key that a row sees at the row's level has the
weight 1 / n, and results and gradients follow from formulas without a bias.
"""

import math

import oracle
import pytest
import torch
from cases import DTYPES
from compare import assert_error_ratio, unavoidable

from flash_attn import _library, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, functional
from flash_attn._ops import flash_attn as flash_attn_ops
from flash_attn._ops import flash_attn_features as with_features

BATCH, HEADS, HEADS_K, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 40, 152
LOWEST = "lowest"  # of the dtype of the bias
LEVELS = -1e4, -1e6, -1e9, -1e30, LOWEST


def problem(device, dtype=torch.bfloat16, head_dim=64, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K):
    """q, k, v and dout of a dense batch. Queries have only the first half of the channels, keys the other."""
    half = head_dim // 2
    q = torch.randn(BATCH, seqlen_q, HEADS, head_dim, device=device)
    k, v = torch.randn(2, BATCH, seqlen_k, HEADS_K, head_dim, device=device)
    q[..., half:] = 0
    k[..., :half] = 0
    return [x.to(dtype) for x in (q, k, v, torch.randn_like(q))]


def levels_of_keys(bias_dtype, level, rows, seqlen_k, device):
    """A bias (BATCH, 1, rows, seqlen_k) whose rows have 0, the level, or at the level some keys and the others below.

    Entry 1 has 0 for the first keys of half of its rows, so that the others have no weight.
    """
    lowest = torch.finfo(bias_dtype).min
    number = lowest if level == LOWEST else max(level, lowest)
    bias = torch.full((BATCH, 1, rows, seqlen_k), number, device=device)
    if level != LOWEST:
        bias[0, :, :: 1 + rows // 2, 5:90] = max(4 * number, lowest)
    bias[1, :, : (rows + 1) // 2, :77] = 0
    return bias.to(bias_dtype)


def exact(q, k, v, bias, dout, causal):
    """out, lse and gradients of (q, k, v, bias) in float64; and these gradients as products of 16 bits give them.

    The level of a row is taken off before the softmax. The last are those of the formulas of the backward, where P, dS
    and the out that it keeps have the dtype of q.
    """
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    dtype, (q, k, v, bias), dout = q.dtype, leaves, dout.double()
    sharing, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    allowed = oracle.allowed_keys(q.shape[1], k.shape[1], causal, device=q.device)
    scores = (oracle.raw_scores(q, k) + bias).masked_fill(~allowed, -math.inf)
    level = scores.detach().amax(-1, keepdim=True)
    empty = level == -math.inf
    relative = (scores - level.masked_fill(empty, 0)).masked_fill(empty, 0)
    weights = relative.softmax(-1).masked_fill(~allowed, 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(sharing, dim=2))
    lse = (relative.logsumexp(-1) + level[..., 0]).masked_fill(empty[..., 0], math.inf)
    grads = torch.autograd.grad(out, leaves, dout)

    def rounded(x):
        return x.detach().to(dtype).double()

    def summed(x):  # over the query heads that share a key head
        return x.unflatten(2, (-1, sharing)).sum(3)

    with torch.no_grad():
        softmax_d = (dout * rounded(out)).sum(-1).transpose(1, 2)[..., None]
        ds = weights * (torch.einsum("bihd,bjhd->bhij", dout, v.repeat_interleave(sharing, dim=2)) - softmax_d)
        in_16_bits = [
            scale * torch.einsum("bhij,bjhd->bihd", rounded(ds), k.repeat_interleave(sharing, dim=2)),
            summed(scale * torch.einsum("bhij,bihd->bjhd", rounded(ds), q)),
            summed(torch.einsum("bhij,bihd->bjhd", rounded(weights), dout)),
            ds.sum_to_size(bias.shape),
        ]
    return out.detach(), lse.detach(), grads, in_16_bits


def assert_gradients(found, expected, in_16_bits, rows):
    """That (dq, dk, dv, dbias) err at most twice as much as plain products of 16 bits, rounded."""
    for name, grad, each, plain in zip(("dq", "dk", "dv", "dbias"), found, expected, in_16_bits, strict=True):
        assert_error_ratio(grad, each, plain.to(grad.dtype), plus=unavoidable(each, grad.dtype, 8 * rows), name=name)


@pytest.fixture(params=[False, True], ids=["hopper", "portable"])
def in_kernels(request, device, monkeypatch):
    """Without the reference, where there are kernels: those for sm_90, or those for every GPU."""
    has_kernels = _library.runs_in_kernel("fwd_features", torch.empty(0, device=device))
    if not has_kernels and request.param:
        pytest.skip("there is one reference")
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(request.param)))
    if has_kernels:
        for name in ("fwd_features", "bwd_features"):
            monkeypatch.delattr(with_features.reference, name)


# How kernels read the bias: a bias in the dtype of q is copied in tiles by TMA, the others element by element.
KINDS = {
    "tiles": dict(),
    "tiles of one row": dict(rows=1),
    "tiles, wide heads": dict(head_dim=128),
    "tiles in the forward only": dict(head_dim=192),
    "elements": dict(bias_dtype=torch.float32),
    "elements of one row": dict(bias_dtype=torch.float32, rows=1),
    "elements, odd head dim": dict(head_dim=50),
    "elements, wide heads": dict(bias_dtype=torch.float32, head_dim=256),
    "few rows": dict(seqlen_q=3),
}


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, causal", [("bf16", False), ("fp16", True)])
@pytest.mark.same_on_cpu("dtype", "causal")
def test_weights_of_one_over_n(kind, level, dtype, causal, device, in_kernels):
    options = dict(head_dim=64, seqlen_q=SEQLEN_Q, rows=None, bias_dtype=DTYPES[dtype]) | KINDS[kind]
    *inputs, dout = problem(device, DTYPES[dtype], options["head_dim"], options["seqlen_q"])
    bias = levels_of_keys(
        options["bias_dtype"], level, options["rows"] or options["seqlen_q"], inputs[1].shape[1], device
    )
    leaves = [x.requires_grad_() for x in (*inputs, bias)]
    out, lse = flash_attn_func(*leaves, attn_bias=leaves.pop(), causal=causal, return_lse=True)
    grads = torch.autograd.grad(out, [*leaves, bias], dout)
    exact_out, exact_lse, *exact_grads = exact(*leaves, bias, dout, causal)
    assert_error_ratio(out, exact_out, exact_out.to(out.dtype), plus=unavoidable(exact_out, out.dtype), name="out")
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    assert_gradients(grads, *exact_grads, options["seqlen_q"])


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_packed_tokens(level, device, in_kernels):
    """Entries of other lengths, each buried; their tokens are those of a dense batch."""
    q, k, v, dout = problem(device)
    bias = levels_of_keys(torch.float32, level, SEQLEN_Q, SEQLEN_K, device)
    *packed, packed_dout = (x.flatten(0, 1).detach().requires_grad_() for x in (q, k, v, dout))
    bounds = [torch.arange(BATCH + 1, device=device, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    tokens_first = bias.expand(-1, HEADS, -1, -1).transpose(0, 1).flatten(1, 2).detach().requires_grad_()
    out = flash_attn_varlen_func(*packed, *bounds, SEQLEN_Q, SEQLEN_K, attn_bias=tokens_first)
    grads = torch.autograd.grad(out, [*packed, tokens_first], packed_dout)
    _, _, *dense = exact(q, k, v, bias.expand(-1, HEADS, -1, -1), dout, causal=False)
    expected, in_16_bits = (
        [*(x.flatten(0, 1) for x in each[:3]), each[3].transpose(0, 1).flatten(1, 2)] for each in dense
    )
    assert_gradients(grads, expected, in_16_bits, SEQLEN_Q)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 5, 40])
def test_lse_over_a_cache(seqlen_q, level, device, in_kernels):
    """With splits of the keys, which are merged."""
    q, k, v, dout = problem(device, seqlen_q=seqlen_q, seqlen_k=600)
    bias = levels_of_keys(torch.bfloat16, level, seqlen_q, 600, device)
    exact_out, exact_lse, *_ = exact(q, k, v, bias, dout, causal=False)
    out, lse = flash_attn_with_kvcache(q, k, v, attn_bias=bias, return_softmax_lse=True, num_splits=3)
    assert_error_ratio(out, exact_out, exact_out.to(out.dtype), plus=unavoidable(exact_out, out.dtype), name="out")
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("sink", [-math.inf, "level", 0.0, math.inf], ids=str)
def test_sinks(sink, level, device, in_kernels):
    """A sink at the level of the keys is one more of them; a higher one leaves them no weight."""
    q, k, v, dout = problem(device)
    bias = levels_of_keys(torch.float32, level, 1, SEQLEN_K, device)
    score = bias[0].max().item() if sink == "level" else sink
    sinks = torch.full((HEADS,), score, device=device)
    # As one more key: its product with each query is 0, too, and its value is 0.
    if math.isinf(score):
        keys, values, biases = k, v, bias
    else:
        keys, values = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
        biases = torch.cat([bias, torch.full_like(bias[..., :1], score)], -1)
    exact_out, exact_lse, *exact_grads = exact(q, keys, values, biases, dout, causal=False)
    if score == math.inf:
        exact_out, exact_lse = torch.zeros_like(exact_out), torch.full_like(exact_lse, math.inf)
        exact_grads = [[torch.zeros_like(x) for x in each] for each in exact_grads]
    leaves = [x.requires_grad_() for x in (q, k, v, bias, sinks)]
    out, lse = flash_attn_func(q, k, v, attn_bias=bias, learnable_sink=sinks, return_lse=True)
    *grads, dsink = torch.autograd.grad(out, leaves, dout)
    assert_error_ratio(out, exact_out, exact_out.to(out.dtype), plus=unavoidable(exact_out, out.dtype), name="out")
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    of_keys = [[dq, dk[:, :SEQLEN_K], dv[:, :SEQLEN_K], dbias[..., :SEQLEN_K]] for dq, dk, dv, dbias in exact_grads]
    assert_gradients(grads, *of_keys, SEQLEN_Q)
    # The weight of the sink in each row, from the definition; its gradient is that of its score.
    share = (sinks.double()[:, None] - exact_lse).masked_fill(exact_lse == math.inf, -math.inf).exp()
    if sink == "level":
        share = 1 / (exact_counts(bias, score) + 1).expand_as(share)
    rows = (dout.double() * exact_out).sum(-1).transpose(1, 2)
    expected = -(share * rows).sum((0, 2))
    torch.testing.assert_close(dsink.double(), expected, rtol=2e-2, atol=2e-2)


def exact_counts(bias, score):
    """How many keys each row has at this score, or infinitely many if it has some above; (entries, 1, 1)."""
    keys = bias.detach()[:, 0]
    above = (keys > score).any(-1, keepdim=True)
    return (keys == score).sum(-1, keepdim=True).double().masked_fill(above, math.inf)


OPTIONS = {  # that leave scores of 0 as they are, or drop the same elements
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi_slopes=torch.zeros(HEADS)),
    "deterministic": dict(deterministic=True),
    "dropout": dict(dropout_p=0.2),
}


@pytest.mark.parametrize("level", [-1e4, -1e9, LOWEST], ids=str)
@pytest.mark.parametrize("exact_gradients", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.cover(2)
def test_beside_other_options(name, exact_gradients, level, device, in_kernels, monkeypatch):
    """A bias that all keys share changes no result."""
    monkeypatch.setattr(flash_attn_ops, "exact_gradients", exact_gradients)
    *inputs, dout = problem(device)
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    number = torch.finfo(torch.float32).min if level == LOWEST else level
    results = []
    for bias in (torch.full((1, 1, 1, SEQLEN_K), number, device=device), torch.zeros(1, 1, 1, SEQLEN_K, device=device)):
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.manual_seed(1)
        out = flash_attn_func(*leaves, attn_bias=bias, **options)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    torch.testing.assert_close(*results, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("seqlen_q", [3, SEQLEN_Q])
def test_scores_that_lose_digits(seqlen_q, head_dim, device, in_kernels):
    """At -1e6 a score is rounded to 1/16: weights err by e^(1/16) in each pass, and no weight is beyond 1."""
    q, k, v, dout = problem(device, head_dim=head_dim, seqlen_q=seqlen_q)
    q = torch.randn_like(q)
    k = torch.randn_like(k)
    bias = torch.full((1, 1, 1, SEQLEN_K), -1e6, device=device, dtype=torch.bfloat16)
    results = []
    for given in (bias, torch.zeros_like(bias)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, attn_bias=given)
        results.append((out, torch.autograd.grad(out, leaves[2], torch.ones_like(dout))[0]))
    (out, dv), (exact_out, exact_dv) = results
    torch.testing.assert_close(out, exact_out, rtol=0.2, atol=0.2)
    torch.testing.assert_close(dv, exact_dv, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("where", ["q", "k", "sink", "bias"])
def test_nan_stays(where, device, in_kernels):
    """In the results of rows that see it, and in no others."""
    *inputs, dout = problem(device)
    bias = torch.full((BATCH, 1, SEQLEN_Q, SEQLEN_K), -1e9, device=device)
    sink = torch.zeros(HEADS, device=device)
    {"q": inputs[0][1, 7], "k": inputs[1][1, 9], "sink": sink[:1], "bias": bias[1, 0, 7, 9:10]}[where].fill_(math.nan)
    leaves = [x.requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, attn_bias=bias, learnable_sink=sink)
    dq, _, dv = torch.autograd.grad(out, leaves, dout)
    rows = torch.zeros(BATCH, SEQLEN_Q, HEADS, dtype=torch.bool, device=device)
    {"q": rows[1, 7], "k": rows[1], "sink": rows[..., 0], "bias": rows[1, 7]}[where].fill_(True)
    assert torch.equal(out.isnan().all(-1), rows) and torch.equal(out.isnan().any(-1), rows)
    assert dq.isnan().flatten().any() and not dq[0].isnan()[..., 1:, :].any()
    if where in ("q", "k"):
        assert dv[1].isnan().any() and not dv[0].isnan().any()


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_statistics_of_weights(level, device):
    """`weights` and `column_sums`, which takes the gradient of lse, find the weights 1 / n, too."""
    q, k, _, _ = problem(device)
    bias = torch.full((1, 1, 1, SEQLEN_K), 0.0, device=device)
    bias += torch.finfo(bias.dtype).min if level == LOWEST else level
    expected = torch.full((BATCH, HEADS, SEQLEN_Q, SEQLEN_K), 1 / SEQLEN_K, device=device)
    torch.testing.assert_close(functional.weights(q, k, attn_bias=bias), expected, rtol=1e-5, atol=0)
    _, lse = flash_attn_func(q, k, k, attn_bias=bias, return_lse=True)
    torch.testing.assert_close(functional.weights(q, k, lse, attn_bias=bias), expected, rtol=1e-5, atol=0)
    top, total = functional.row_max_and_sum(q, k, attn_bias=bias)
    assert (top == bias.max()).all()
    torch.testing.assert_close(total, torch.full_like(total, SEQLEN_K), rtol=1e-5, atol=0)
    torch.testing.assert_close(functional.column_sums(q, k, attn_bias=bias), expected.sum(2), rtol=1e-2, atol=0)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_second_derivatives(level, device):
    """Of the composition that they run in: the gradient of the norm of dv is that of weights 1 / n."""
    q, k, v, dout = problem(device, torch.float32, head_dim=16, seqlen_q=4, seqlen_k=9)
    bias = torch.full((1, 1, 1, 9), 0.0, device=device)
    bias += torch.finfo(bias.dtype).min if level == LOWEST else level
    q.requires_grad_()
    results = []
    for given in (bias, torch.zeros_like(bias)):
        out = flash_attn_func(q, k, v, attn_bias=given)
        (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
        results.append(torch.autograd.grad(dq.square().sum(), q)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("sink", [-math.inf, 0.5, math.inf], ids=str)
def test_second_derivatives_with_a_sink(sink, device):
    """A sink of -inf is none, and one of +inf leaves the keys no weight: nothing is NaN."""
    q, k, v, dout = problem(device, torch.float32, head_dim=16, seqlen_q=4, seqlen_k=9)
    leaves = [q.requires_grad_(), torch.full((HEADS,), sink, device=device).requires_grad_()]
    out = flash_attn_func(q, k, v, learnable_sink=leaves[1])
    dq, dsink = torch.autograd.grad(out, leaves, dout, create_graph=True)
    found = torch.autograd.grad(dq.square().sum() + dsink.square().sum(), leaves)
    assert all(x.isfinite().all() for x in found)
    if sink == -math.inf:
        (dq,) = torch.autograd.grad(flash_attn_func(q, k, v), q, dout, create_graph=True)
        torch.testing.assert_close(found[0], torch.autograd.grad(dq.square().sum(), q)[0])
