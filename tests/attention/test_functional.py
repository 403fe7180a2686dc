"""`flash_attn.functional` against the oracle in float64."""

import math

import oracle
import pytest
import torch
from cases import Case
from compare import assert_error_ratio

from flash_attn import flash_attn_func, flash_attn_varlen_func, functional, masks

CASE = Case(seqlen_q=40, seqlen_k=70, heads_k=2, dtype="fp32", head_dim=16)
SINK = torch.tensor([0.5, -1.0, 3.0, -math.inf])
RANGES = masks.chunks(13, 40, 70)
SEEN = masks.to_bool(RANGES, 70)
OPTIONS = {  # options of ours, and of the oracle
    "plain": ({}, {}),
    "causal": (dict(causal=True), dict(causal=True)),
    "window, softcap": (dict(window_size=(9, 3), softcap=2.0), dict(window_size=(9, 3), softcap=2.0)),
    "sink": (dict(learnable_sink=SINK), dict(learnable_sink=SINK)),
    "ranges": (dict(key_ranges=RANGES), dict(seen=SEEN)),
    "bias": (dict(attn_bias=torch.arange(70.0)), dict(attn_bias=torch.arange(70.0))),
}


def problem(name, device):
    ours, theirs = OPTIONS[name]
    q, k, _, _ = CASE.tensors(device)
    ours, theirs = ({a: b.to(device) if torch.is_tensor(b) else b for a, b in x.items()} for x in (ours, theirs))
    return q, k, ours, theirs


def exact_weights(q, k, **options):
    """Out of the oracle for values that are unit vectors: (batch, heads, seqlen_q, seqlen_k)."""
    units = torch.eye(k.shape[1], dtype=q.dtype, device=q.device)[None, :, None].expand(len(q), -1, k.shape[2], -1)
    return oracle.attention(q, k, units, **options)[0].transpose(1, 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_their_sums(name, device):
    q, k, ours, theirs = problem(name, device)
    exact = exact_weights(q.double(), k.double(), **theirs)
    plain = exact_weights(q, k, **theirs)
    assert_error_ratio(functional.weights(q, k, **ours), exact, plain)
    _, lse = flash_attn_func(q, k, k, return_lse=True, **ours)
    assert_error_ratio(functional.weights(q, k, lse, **ours), exact, plain)
    for rows in (None, 3, 1000):
        first = 0 if rows is None else max(0, 40 - rows)
        three = functional.column_sums(q, k, rows, **ours), exact[:, :, first:].sum(2), plain[:, :, first:].sum(2)
        assert_error_ratio(*three)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_column_sums_are_counts_in_float32(dtype, device):
    """Of more rows than float16 holds, and not a number of bfloat16."""
    q, k = torch.zeros(1, 70001, 1, 8, dtype=dtype, device=device), torch.zeros(1, 1, 1, 8, dtype=dtype, device=device)
    assert functional.column_sums(q, k).tolist() == [[[70001.0]]]


BIASES = {
    "of each row": lambda: torch.randn(40, 70),
    "mask": lambda: torch.rand(4, 40, 70) < 0.7,
    "of one key": lambda: torch.randn(40, 1),
    "of each entry of a group": lambda: torch.randn(1, 2, 4, 1, 70),
    "of each group": lambda: torch.randn(2, 1, 1, 1, 70, dtype=torch.float64),
}


@pytest.mark.parametrize("name", BIASES)
def test_column_sums_beside_a_bias(name, device):
    q, k = CASE.tensors(device)[:2]
    options = dict(attn_bias=BIASES[name]().to(device), softcap=3.0, learnable_sink=SINK.to(device))
    expected = functional.weights(q, k, **options).sum(2)
    torch.testing.assert_close(functional.column_sums(q, k, **options), expected)


@pytest.mark.parametrize("last_rows", [0, 3, 40, None])
def test_column_sums_of_used_rows(last_rows, device):
    q, k = CASE.tensors(device)[:2]
    options = dict(seqused_q=torch.tensor([12, 40], dtype=torch.int32, device=device), causal=True)
    rows = 40 if last_rows is None else last_rows
    weights = functional.weights(q, k, **options)
    expected = torch.stack([x[:, max(0, used - rows) : used].sum(1) for x, used in zip(weights, (12, 40), strict=True)])
    torch.testing.assert_close(functional.column_sums(q, k, last_rows, **options), expected)


def test_column_sums_transformed(device):
    q, k = CASE.tensors(device)[:2]
    expected = functional.column_sums(q, k, 5, causal=True)
    with torch.inference_mode():
        assert torch.equal(functional.column_sums(q.clone(), k.clone(), 5, causal=True), expected)
    compiled = torch.compile(functional.column_sums, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q.requires_grad_(), k, 5, causal=True), expected)
    each = torch.vmap(lambda q, k: functional.column_sums(q[None], k[None], 5, causal=True)[0])
    torch.testing.assert_close(each(q, k), expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_row_max_and_sum(name, device):
    q, k, ours, theirs = problem(name, device)
    _, lse = oracle.attention(q.double(), k.double(), k.double(), **theirs)
    top, total = functional.row_max_and_sum(q, k, **ours)
    torch.testing.assert_close(top + total.log(), lse.masked_fill(lse == math.inf, -math.inf).float())
    assert torch.equal(top, functional.row_max(q, k, **ours))
    weights = exact_weights(q.double(), k.double(), **theirs)
    torch.testing.assert_close(top, (weights.amax(-1).log() + lse).nan_to_num(nan=-math.inf).float())


@pytest.mark.parametrize("sink", [None, SINK])
def test_row_max_and_sum_of_rows_that_see_nothing(sink, device):
    q, k = CASE.tensors(device)[:2]
    empty = torch.zeros(1, 1, 40, 2, dtype=torch.int32, device=device)
    top, total = functional.row_max_and_sum(
        q, k, key_ranges=empty, learnable_sink=None if sink is None else sink.to(device)
    )
    assert torch.all(top == -math.inf) and torch.all(total == 0)


@pytest.mark.parametrize("name", ["plain", "causal", "ranges"])
def test_entropy(name, device):
    q, k, ours, theirs = problem(name, device)
    q, k = q.double(), k.double()
    leaves = [x.requires_grad_() for x in (q, k)]
    p = exact_weights(*leaves, **theirs)
    exact = -(p * p.where(p > 0, 1).log()).sum(-1)
    singles = [x.detach().float().requires_grad_() for x in leaves]
    found = functional.entropy(*singles, **ours)
    torch.testing.assert_close(found, exact.float())
    upstream = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, leaves, upstream)
    grads = torch.autograd.grad(found, singles, upstream.float())
    torch.testing.assert_close([x.double() for x in grads], list(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entropy_of_peaked_rows(dtype, device):
    """Scores are hundreds, and the entropy is far smaller than what rounding takes off their mean."""
    q, k = (x.to(dtype) for x in CASE.tensors(device)[:2])
    q, empty = 40 * q, torch.zeros(1, 1, 40, 2, dtype=torch.int32, device=device)
    leaves = [x.double().requires_grad_() for x in (q, k)]
    p = exact_weights(*leaves)
    exact = -(p * p.where(p > 0, 1).log()).sum(-1)
    found = functional.entropy(q.requires_grad_(), k.requires_grad_())
    assert found.amin() >= 0
    torch.testing.assert_close(found, exact.float(), atol=5e-3, rtol=2**-7)
    expected = torch.autograd.grad(exact.sum(), leaves)
    for one, two in zip(torch.autograd.grad(found.sum(), (q, k)), expected, strict=True):
        assert (one - two).norm() < 8 * torch.finfo(dtype).eps * two.norm()
    nothing = functional.entropy(q, k, key_ranges=empty)
    assert not any(x.any() for x in (nothing, *torch.autograd.grad(nothing.sum(), (q, k))))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_entropy_transformed(dtype, device):
    """Gradients in a graph, and in transforms of torch.func, are those of autograd."""
    q, k = (x.requires_grad_() for x in CASE.but(dtype=dtype).tensors(device)[:2])

    def gradients(q, k):
        return torch.autograd.grad(functional.entropy(q, k, causal=True).sum(), (q, k))

    def of_one(q, k):
        return functional.entropy(q[None], k[None], causal=True).sum()

    expected = gradients(q, k)
    tolerance = dict(atol=1e-5, rtol=1e-4) if dtype == "fp32" else dict(atol=0.02, rtol=0.02)
    torch.testing.assert_close(torch.vmap(torch.func.grad(of_one, (0, 1)))(q, k), expected, **tolerance)
    compiled = torch.compile(functional.entropy, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(q, k, causal=True).sum(), (q, k))
    torch.testing.assert_close(found, expected)
    _, tangent = torch.func.jvp(lambda q: functional.entropy(q, k, causal=True), (q,), (q,))
    torch.testing.assert_close(tangent.sum(), (expected[0] * q).float().sum(), **tolerance)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_combine(dtype, device):
    """Merged results of parts, and their gradients, are those of all keys; a sink counts in the part that has it."""
    q, k, v, dout = CASE.but(dtype=dtype).tensors(device)
    ranges = [torch.tensor([[[[a, b]]]], dtype=torch.int32, device=device) for a, b in ((0, 20), (20, 20), (20, 70))]
    sink = SINK.to(device)

    def merged(q, k, v, sink):
        sinks = sink, None, None
        parts = [
            flash_attn_func(q, k, v, causal=True, key_ranges=r, learnable_sink=s, return_lse=True)
            for r, s in zip(ranges, sinks, strict=True)
        ]
        return functional.combine(*(torch.stack(x) for x in zip(*parts, strict=True)))

    def exact(q, k, v, sink):
        return oracle.attention(q, k, v, causal=True, learnable_sink=sink)

    dlse = torch.randn(2, 4, 40, device=device)
    found = oracle.gradients(merged, [q, k, v, sink], dout, dlse)
    expected = oracle.gradients(exact, [x.double() for x in (q, k, v, sink)], dout, dlse)
    plain = oracle.gradients(exact, [q, k, v, sink], dout, dlse)
    for one, two, three in zip(*((x[0], x[1], *x[2]) for x in (found, expected, plain)), strict=True):
        assert_error_ratio(one, two, three, at_most=3.0)  # rounds three parts, and then their sum


def test_combine_of_rows_that_see_nothing(device):
    outs = torch.tensor([1.0, float("nan")], device=device).view(2, 1, 1, 1, 1).requires_grad_()
    lses = torch.tensor([2.0, math.inf], device=device).view(2, 1, 1, 1).requires_grad_()
    out, lse = functional.combine(outs, lses)
    assert out.item() == 1 and lse.item() == 2
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    assert outs.grad.flatten().tolist() == [1, 0] and lses.grad.flatten().tolist() == [1, 0]
    out, lse = functional.combine(outs[1:], lses[1:])
    assert out.item() == 0 and lse.item() == math.inf


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_combine_into_a_tensor(out_dtype, device):
    outs = torch.randn(3, 2, 8, 4, 16, device=device, dtype=torch.bfloat16)
    lses = torch.randn(3, 2, 4, 8, device=device)
    exact, _ = functional.combine(outs.double(), lses)
    target = torch.empty(2, 8, 4, 16, device=device)
    out, _ = functional.combine(outs, lses, out=target, out_dtype=out_dtype)
    assert out is target
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)  # not rounded to bfloat16 on the way
    assert functional.combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16
    assert functional.combine(outs, lses)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_combine_returns_lse_in_float32(dtype, device):
    outs, lses = torch.randn(3, 2, 8, 4, 16, device=device), torch.randn(3, 2, 4, 8, device=device).to(dtype)
    out, lse = functional.combine(outs, lses)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(lse, lses.double().logsumexp(0).float())


BAD = {
    "lses of integers": (lambda q, k: functional.combine(q[None], k.long()), TypeError, "lses must have dtype"),
    "outs of integers": (lambda q, k: functional.combine(q.long(), k), TypeError, "outs must have dtype"),
    "a dtype by name": (
        lambda q, k: functional.combine(q[None], q[None, ..., 0].mT, out_dtype="bf16"),
        TypeError,
        "out_dtype must be torch.float16 or .*, found 'bf16'",
    ),
    "out of integers": (
        lambda q, k: functional.combine(q[None], q[None, ..., 0].mT, out=q.long()),
        TypeError,
        "out must have dtype",
    ),
    "out of other shape": (
        lambda q, k: functional.combine(q[None], q[None, ..., 0].mT, out=q[:1]),
        ValueError,
        "out must have shape",
    ),
    "out of other dtype": (
        lambda q, k: functional.combine(q[None], q[None, ..., 0].mT, out=q.clone(), out_dtype=torch.float16),
        TypeError,
        "out must have dtype torch.float16, found torch.float32",
    ),
    "lses of other shape": (lambda q, k: functional.combine(q, q), ValueError, "lses must have shape"),
    "a number": (lambda q, k: functional.combine(1, q), TypeError, "outs must be a torch.Tensor"),
    "packed queries": (lambda q, k: functional.column_sums(q[0], k), ValueError, "q must have 4 dimensions"),
    "an unknown option": (
        lambda q, k: functional.row_max(q, k, bias=q),
        TypeError,
        r"^row_max\(\) takes .*attn_bias, .*found bias$",
    ),
    "packed rows": (
        lambda q, k: functional.row_max_and_sum(q, k, cu_seqlens_q=q),
        TypeError,
        r"^row_max_and_sum\(\) takes .*found cu_seqlens_q$",
    ),
    "dropout": (lambda q, k: functional.weights(q, k, dropout_p=0.5), TypeError, r"^weights\(\) .*found dropout_p$"),
    "another result": (
        lambda q, k: functional.column_sums(q, k, return_lse=True),
        TypeError,
        r"^column_sums\(\) takes .*found return_lse$",
    ),
    "a list": (lambda q, k: functional.column_sums([1], k), TypeError, "q must be a torch.Tensor, found list"),
    "rows before the last": (
        lambda q, k: functional.column_sums(q, k, -1),
        ValueError,
        "last_rows must be at least 0, found -1",
    ),
    "half a row": (lambda q, k: functional.column_sums(q, k, 0.5), ValueError, "last_rows must be a whole number"),
    "lse of other shape": (lambda q, k: functional.weights(q, k, q), ValueError, "softmax_lse must have shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, device):
    call, error, says = BAD[name]
    q, k, _, _ = CASE.tensors(device)
    with pytest.raises(error, match=says):
        call(q, k)


# ---------------------------------------------------------------------------------------------------------------------
# merge_attn_states


def two_states(heads, tokens, dtype, device):
    """Two results (out, lse) over different keys; some rows have seen none in one or both, and hold anything there."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(2, tokens, heads, 48, generator=generator).to(device, dtype)
    lses = 5 * torch.randn(2, heads, tokens, generator=generator).to(device)
    lses[0, 0, 0], lses[0, 1, 2], lses[1, 0, 0], lses[1, 2, 3] = math.inf, -math.inf, -math.inf, math.inf
    outs[:, 0, 0], outs[0, 2, 1], outs[1, 3, 2] = math.nan, math.inf, math.nan
    return (outs[0], lses[0]), (outs[1], lses[1])


def exactly_merged(a, b):
    """In float64, from the formula."""
    sums, total = 0, 0
    for out, lse in (a, b):
        weight = lse.double().exp().masked_fill(lse.isinf(), 0).t()[..., None]
        sums, total = sums + (weight * out.double()).masked_fill(weight == 0, 0), total + weight
    return (sums / total).masked_fill(total == 0, 0), total[..., 0].log().t().masked_fill(
        total[..., 0].t() == 0, math.inf
    )


@pytest.fixture(params=["as it runs", "triton"])
def merge_kernel(request, monkeypatch):
    """The op, or its kernel where no GPU runs it: by Triton's interpreter."""
    if request.param == "triton":
        kernels = pytest.importorskip("flash_attn._triton.merge_states")
        monkeypatch.setattr(functional, "merge_states_", kernels.merge_states_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("heads", "tokens"), [(3, 7), (5, 5)])
def test_merge_attn_states(heads, tokens, heads_first, dtype, merge_kernel, device):
    a, b = two_states(heads, tokens, dtype, device)
    exact, exact_lse = exactly_merged(a, b)
    rows = [(out, lse if heads_first else lse.t().contiguous()) for out, lse in (a, b)]
    told = dict(heads_first=heads_first) if heads == tokens else {}
    out, lse = functional.merge_attn_states(None, None, *rows[0], *rows[1], **told)
    assert out.dtype == dtype and lse.dtype == torch.float32
    lse = lse if heads_first else lse.t()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=max(unit, 1e-5), atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert not out[0, 0].any() and lse[0, 0] == math.inf


def test_states_are_merged_into_tensors_of_the_caller(merge_kernel, device):
    """With any strides and dtypes, also over the inputs."""
    a, b = two_states(3, 7, torch.float32, device)
    expected, expected_lse = functional.merge_attn_states(None, None, *a, *b)
    out = torch.empty(3, 7, 48, device=device, dtype=torch.bfloat16).transpose(0, 1)
    lse = torch.empty(7, 3, device=device, dtype=torch.float64).t()
    found = functional.merge_attn_states(out, lse, *a, *b)
    assert found[0] is out and found[1] is lse
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-6)  # the interpreter rounds towards 0
    torch.testing.assert_close(lse.float(), expected_lse, rtol=1e-6, atol=1e-6)  # a double is merged in plain torch
    for into in (0, 1):
        states = [[x.clone() for x in state] for state in (a, b)]
        functional.merge_attn_states(*states[into], *states[0], *states[1])
        assert torch.equal(states[into][0], expected) and torch.equal(states[into][1], expected_lse)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_merged_states_are_not_written_to_a_part_of_another(name, device):
    a, b = two_states(8, 4, torch.float32, device)
    both = [torch.cat([x, x]) for x in (a[0], a[1])]
    state = both[0][:4], both[1][:8]
    into = dict(out=both[0][1:5] if name == "out" else None, lse=both[1][1:9] if name == "lse" else None)
    with pytest.raises(ValueError, match=f"{name} must have memory of its own.*of {name}_a"):
        functional.merge_attn_states(into["out"], into["lse"], *state, *b)


def test_a_shared_prefix(device):
    """As engines compute it: all rows over the prefix, then each entry's over its own pages, then both merged."""
    q, pages = torch.randn(6, 4, 64, device=device), torch.randn(2, 7, 16, 2, 64, device=device)
    table = torch.tensor([[3, 1, 5], [3, 6, 0]], dtype=torch.int32, device=device)

    def attend(rows, used, table, causal):
        ints = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, used))
        lengths = dict(zip(("cu_seqlens_q", "seqused_k"), ints), max_seqlen_q=6, max_seqlen_k=48)
        options = dict(block_table=table, causal=causal, return_softmax_lse=True)
        return flash_attn_varlen_func(q, *pages, **lengths, **options)

    expected, expected_lse = attend([0, 2, 6], [40, 37], table, True)
    prefix = attend([0, 6], [16], table[:1, :1], False)
    rest = attend([0, 2, 6], [24, 21], table[:, 1:], True)
    out, lse = functional.merge_attn_states(None, None, *prefix, *rest)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(out_a=torch.ones(3)), r"out_a must have 3 dimensions \(tokens, heads, head_dim\)"),
        (dict(out_b=torch.ones(7, 3, 8)), r"out_b must have shape \(7, 3, 48\), found \(7, 3, 8\)"),
        (dict(lse_a=torch.ones(7)), r"lse_a must have shape \(3, 7\), or \(7, 3\).*found \(7,\)"),
        (dict(lse_b=torch.ones(7, 3)), r"lse_b must have shape \(3, 7\), found \(7, 3\)"),
        (dict(heads_first=False), r"lse_a must have shape .*found \(3, 7\) with heads_first=False"),
        (dict(heads_first=2), r"heads_first must be a bool or None, found 2"),
        (dict(out=torch.ones(7, 3, 1).expand(7, 3, 48)), r"out must not be expanded"),
        (dict(lse=torch.ones(7, 3)), r"lse must have shape \(3, 7\), found \(7, 3\)"),
        (dict(out_b=torch.ones(7, 3, 48).int()), r"out_b must have dtype .*found torch.int32"),
        (dict(lse_b=torch.ones(3, 7, requires_grad=True)), r"lse_b must not require grad.*`combine`"),
        (dict(out_a=torch.ones(7, 3, 48, device="meta")), r"out_b must be on meta"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_states(change, says):
    (out_a, lse_a), (out_b, lse_b) = two_states(3, 7, torch.float32, "cpu")
    good = dict(out=None, lse=None, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    with pytest.raises(RuntimeError, match=says):
        functional.merge_attn_states(**good | change)


def test_merging_states_in_graphs(device):
    a, b = two_states(3, 7, torch.float32, device)
    torch.library.opcheck(
        torch.ops.flash_attn.merge_states_.default,
        (torch.empty_like(a[0]), torch.empty_like(a[1]).t(), a[0], a[1].t(), b[0], b[1].t()),
        test_utils=("test_schema", "test_faketensor"),
    )
    merge = torch.compile(functional.merge_attn_states, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(merge(None, None, *a, *b), functional.merge_attn_states(None, None, *a, *b), strict=True):
        torch.testing.assert_close(found, wanted)
