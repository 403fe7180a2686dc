"""Norms: what only a kernel can trip over."""

import functools
import itertools

import native
import pytest
import torch
from cases import DTYPES, params, sample
from compare import assert_same_but_for_rounding
from layer_norm_cases import Case, W, X, assert_right, out_and_h, results_and_gradients

from flash_attn._ops import layer_norm as layer_norm_ops
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_alignment(dtype, shift, device):
    """Inputs anywhere in memory give what aligned ones give, but for the order of sums."""
    case = Case(shape=(9,), cols=256, dtype=dtype, residual=dtype, weight=dtype)
    inputs, options = case.draw(device)

    def moved(x):
        return torch.zeros(x.numel() + shift, device=device, dtype=x.dtype)[shift:].view_as(x).copy_(x)

    results, grads, incoming = results_and_gradients(out_and_h(case, options), inputs)
    elsewhere = {name: None if x is None else moved(x) for name, x in inputs.items()}
    leaves = {name: None if x is None else x.requires_grad_() for name, x in elsewhere.items()}
    found = out_and_h(case, options)(leaves)
    there = [x for x in leaves.values() if x is not None]
    found_grads = torch.autograd.grad(found, there, [moved(g) for g in incoming])
    assert_same_but_for_rounding([*found, *found_grads], [*results, *grads])


# Rows of any width, in matrices that are aligned like the output or are not: a vector that begins before a row comes
# from two accesses, or from one for each element. The wide ones are where the size of a block changes.
GAPS = (0, 0, 0), (0, 0, 1), (1, 0, 0), (2, 3, 8), (3, 0, 4), (8, 1, 2)
NARROW = dict(
    shape=[(11,)],
    cols=range(3, 34),  # of two columns, gradients of LayerNorm are little but rounding
    dtype=list(DTYPES),
    residual=["", *DTYPES],
    x1=["", "bf16"],
    dropout_p=[0.0, 0.3],
    is_rms_norm=[False, True],
    gaps=GAPS,
)
WIDE = [
    Case(shape=(5,), cols=cols, dtype=dtype, residual="fp32", dropout_p=0.3, gaps=gaps)
    for cols, dtype, gaps in itertools.product((2047, 2055, 4095, 4097), DTYPES, GAPS[:3])
]


@pytest.mark.parametrize("case", [*sample(NARROW, Case), *params(WIDE)])
def test_matrices_that_lie_unlike(case, device):
    assert_right(case, device)


@pytest.mark.parametrize("cols, weight, bias", [(200, "bf16", True), (4104, "bf16", False), (8200, "fp32", True)])
def test_x_alone_has_the_bits_of_a_sum_with_zeros(cols, weight, bias, device):
    """A call without a residual has a kernel of its own, which computes the same."""
    inputs, _ = Case(shape=(9,), cols=cols, weight=weight, bias=bias).draw(device)
    for function in (layer_norm_fn, rms_norm_fn):
        norm = functools.partial(function, inputs["x0"], inputs["weight"], inputs["bias"])
        assert torch.equal(norm(), norm(residual=torch.zeros_like(inputs["x0"])))


def test_gradients_of_parameters_do_not_change(device):
    """Sums over rows have one order, however blocks are scheduled."""
    case = Case(shape=(777,), cols=512, residual="bf16", dropout_p=0.1)
    inputs, options = case.draw(device)
    incoming, found = None, []
    for _ in range(3):
        torch.manual_seed(5)
        _, grads, incoming = results_and_gradients(out_and_h(case, options), inputs, incoming)
        found.append(grads)
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))


@pytest.mark.cuda
def test_more_elements_than_32_bits_count(device, memory_guard):
    cols = 4096
    rows = 2**31 // cols + 100
    memory_guard(6 * 2 * rows * cols)
    x = torch.randn(1, cols, device=device, dtype=torch.bfloat16).expand(rows, cols).contiguous().requires_grad_()
    weight = torch.rand(cols, device=device, requires_grad=True)
    out, h = rms_norm_fn(x, weight, None, residual=x.detach(), prenorm=True)
    last, last_h = rms_norm_fn(x[-50:], weight, None, residual=x.detach()[-50:], prenorm=True)
    assert torch.equal(out[-50:], last) and torch.equal(h[-50:], last_h)
    (dx,) = torch.autograd.grad(out, x, out.detach())
    (last_dx,) = torch.autograd.grad(last, x, out.detach()[-50:])
    assert torch.equal(dx[-50:], last_dx[-50:])


@pytest.mark.cuda
def test_other_stream(device):
    x, weight = torch.randn(4096, 2048, device=device), torch.rand(2048, device=device)
    expected = layer_norm_fn(x, weight, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would be done before the copy below begins
        late = torch.zeros_like(x).copy_(x)
        out = layer_norm_fn(late, weight, None)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.cuda
def test_graph_capture(device):
    """Forward and backward, with a new mask at each replay."""
    x, residual = torch.randn(2, 64, 512, device=device, dtype=torch.bfloat16)
    weight = torch.rand(512, device=device, requires_grad=True)

    def step():
        out, h = layer_norm_fn(x, weight, None, residual, dropout_p=0.5, prenorm=True)
        return out, h, *torch.autograd.grad(out, weight, torch.ones_like(out))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, h, dweight = step()
    graph.replay()
    first = h.clone()
    graph.replay()
    assert not torch.equal(h, first)
    normal = layer_norm_fn(h, torch.ones_like(weight), None, out_dtype=torch.float32)
    torch.testing.assert_close(out.float(), normal * weight, rtol=0.02, atol=0.05)
    torch.testing.assert_close(dweight, normal.sum(0), rtol=0.02, atol=0.1)


@pytest.mark.multi_gpu
def test_device_that_is_not_current():
    case = Case(residual="bf16", dropout_p=0.1)
    with torch.cuda.device(0):
        assert_right(case, torch.device("cuda:1"))
        assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_kernel_refuses_what_does_not_fit(device):
    """The op itself, called around the checks in Python, must not reach memory that is not its own."""
    x, weight = X.to(device), W.to(device)
    names = "x0 x1 residual weight bias weight1 bias1 colscale rowscale x0_subset out_subset rng_state".split()
    good = dict.fromkeys(names) | dict(x0=x, weight=weight)
    rest = (0.0, 1e-5, 1.0, 0, False, False, None, torch.float32, False)
    layer_norm_ops.fwd.default(*good.values(), *rest)
    subset = torch.zeros(12, dtype=torch.int32, device=device)
    for changes, message in (
        (dict(x0=x.double()), "x0 must have dtype"),
        (dict(residual=x[0]), "residual must have 12 rows"),
        (dict(x1=X), "x1 must be on cuda:.*, found it on cpu"),
        (dict(weight=weight[:8]), "weight must have 64 elements"),
        (dict(rowscale=weight), "rowscale must have 12 elements"),
        (dict(rng_state=subset[:2]), "rng_state must have dtype"),
        (dict(x0_subset=subset), "must be given together"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer_norm_ops.fwd.default(*(good | changes).values(), *rest)


# The sizes of blocks, which host code chooses.


@pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")
@pytest.mark.parametrize("vec, vecs, splits_warps", list(itertools.product((4, 8), (1, 2, 4, 8), (False, True))))
def test_shapes_of_blocks(vec, vecs, splits_warps):
    host = native.library(native.HERE / "host_probe.cpp", native.HOST)
    found = torch.zeros(3, dtype=torch.int64)
    for cols in [*range(1, 70), *range(100, 2**17, 509)]:
        for threads in (128, 256, 512):
            host.run("find_row_shape", cols, vec, vecs, threads, splits_warps, found)
            lanes, rows, tiles = found.tolist()
            assert lanes <= 512 and (lanes * rows % 32 == 0 or tiles > 1)
            assert cols > 256 * vec * vecs or (lanes <= 256 and tiles == 1)  # a small block holds what it has room for
            assert lanes % 32 == 0 or (splits_warps and lanes < 32 and lanes & (lanes - 1) == 0)
            assert (rows <= 15 or lanes <= 32) and (rows == 1 or (tiles == 1 and lanes * rows <= threads))
            assert (tiles & (tiles - 1) == 0 or tiles > 8) and lanes * vec * vecs * tiles >= cols
            assert tiles == 1 or (tiles // 2 if tiles <= 8 else tiles - 1) * 512 * vec * vecs < cols
    for vecs, ragged in ((2, False), (1, True)):  # of what any GPU from sm_80 on can have
        assert host.call("find_ring_bytes", vecs, ragged) + 3 * 1024 <= 99 * 1024
