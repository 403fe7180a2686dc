"""LayerNorm and RMSNorm: values and gradients, masks, modules, errors, graphs."""

import dataclasses
import itertools

import oracle
import pytest
import torch
import torch._dynamo.testing
from cases import params, sample
from compare import assert_error_ratio, assert_same_but_for_rounding
from layer_norm_cases import (
    DTYPE_FIELDS,
    EDGES,
    FACTORS,
    SAMPLE,
    Case,
    W,
    X,
    allowed,
    assert_right,
    has_valid_layout,
    norm,
    out_and_h,
    results_and_gradients,
)
from recorder import Recorder
from torch.nn import functional

import dropout_layer_norm
from flash_attn._ops import layer_norm as layer_norm_ops
from flash_attn.ops import layer_norm, rms_norm
from flash_attn.ops.triton import layer_norm as triton_norm
from flash_attn.ops.triton.layer_norm import (
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)


@pytest.mark.parametrize("case", [*params(EDGES), *SAMPLE])
def test_against_float64(case, device):
    assert_right(case, device)


@pytest.fixture
def with_triton(monkeypatch):
    """The Triton kernels, in the interpreter where there is no GPU, in place of the op's implementation."""
    pytest.importorskip("triton", reason="triton is not installed")
    from flash_attn._triton import layer_norm as kernels

    monkeypatch.setattr(layer_norm_ops.fwd, "below_autograd", kernels.fwd)
    monkeypatch.setattr(layer_norm_ops.bwd, "below_autograd", kernels.bwd)
    return kernels


# Small ones, since the interpreter takes its time, and without bf16, which it rounds towards zero.
HALVES = {name: [dtype for dtype in FACTORS[name] if dtype != "bf16"] for name in DTYPE_FIELDS}
TRITON_EDGES = [
    dataclasses.replace(
        case, shape=(2, 3), **{name: getattr(case, name).replace("bf16", "fp16") for name in DTYPE_FIELDS}
    )
    for case in EDGES
    if case.cols <= 300
]
TRITON_SAMPLE = sample(FACTORS | HALVES | dict(shape=[(5,), (2, 3)], cols=[24, 100, 150]), Case, valid=has_valid_layout)


@pytest.mark.parametrize("case", [*params(TRITON_EDGES), *TRITON_SAMPLE])
@pytest.mark.same_on_cpu("dtype", "weight", "out_dtype", "layout")
def test_triton_against_float64(case, device, with_triton, monkeypatch):
    monkeypatch.setattr(with_triton, "MAX_BLOCK", 128)  # so that some of the rows are wider
    assert_right(case, device)


@pytest.mark.parametrize("kernels", ["op", "triton"])
def test_backward_reads_statistics_and_masks_of_any_strides(kernels, device, request):
    if kernels == "triton":
        request.getfixturevalue("with_triton")
    dz, x, x1 = torch.randn(3, 6, 64, device=device)
    weight = torch.rand(64, device=device)
    args = x, x1, None, weight, None, weight, None, 0.3, 1e-5, None
    *_, h, dmask0, dmask1, mu, rsigma = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(*args)

    def gradients(*saved):
        args = dz, dz, None, h, *saved, weight, weight, 0.3, True, False
        return dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(*args)

    saved = dmask0, dmask1, mu, rsigma
    apart = [torch.stack([each, torch.zeros_like(each)], dim=-1)[..., 0] for each in saved]
    for found, expected in zip(gradients(*apart), gradients(*saved), strict=True):
        assert found is expected is None or torch.equal(found, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("case", params(EDGES))
def test_triton_on_a_gpu(case, device, with_triton):
    assert_right(case, device)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_no_rows(shape, dropout_p, device):
    case = Case(shape=shape, residual="fp32", dropout_p=dropout_p, weight1=True)
    inputs, options = case.draw(device)
    results, grads, _ = results_and_gradients(lambda leaves: list(norm(case, leaves, options)[:3]), inputs)
    assert [x.shape for x in results] == [(*shape, case.cols)] * 3
    for grad in grads[2:]:
        assert torch.equal(grad, torch.zeros_like(grad))  # sums over no rows


# Dropout.


@pytest.mark.parametrize("kernels, cols", [*(("op", n) for n in (8, 33, 100, 2048, 4095, 20_000)), ("triton", 100)])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_masks(cols, dropout_p, kernels, device, monkeypatch, request):
    """They are functions of the random state alone."""
    if kernels == "triton":
        request.getfixturevalue("with_triton")
    state = torch.tensor([-(2**63) + 12345678901, 2**62 + 5], device=device)
    monkeypatch.setattr(layer_norm_ops.rng, "draw_state", lambda device: state)
    case = Case(shape=(40,), cols=cols, x1="bf16", dropout_p=dropout_p)
    masks = norm(case, *case.draw(device))[3:5]
    for branch, mask in enumerate(masks):
        expected = oracle.layer_norm_keep(*state.tolist(), branch, 40, cols, dropout_p)
        assert torch.equal(mask.cpu(), expected.to(torch.uint8))


def test_masks_drop_as_many_as_asked_for(device):
    x = torch.ones(2, 512, 1024, device=device)
    weight = torch.ones(1024, device=device)
    for dropout_p in (0.01, 0.37, 0.9):
        results = layer_norm_fn(x, weight, None, x1=x, dropout_p=dropout_p, return_dropout_mask=True)
        for mask in results[1:]:
            assert mask.dtype == torch.bool
            assert abs(mask.float().mean().item() - (1 - dropout_p)) < 0.003
        assert not torch.equal(*results[1:])


def test_masks_follow_the_seed(device):
    x, weight = torch.randn(8, 64, device=device), torch.ones(64, device=device)

    def mask():
        return layer_norm.dropout_add_layer_norm(x, None, weight, None, 0.5, 1e-5, return_dropout_mask=True)[1]

    torch.manual_seed(1)
    first, second = mask(), mask()
    torch.manual_seed(1)
    assert torch.equal(first, mask())
    assert not torch.equal(first, second)


def test_what_is_dropped_may_be_anything(device):
    x = torch.full((64, 64), float("nan"), device=device, requires_grad=True)
    residual, weight = torch.randn(64, 64, device=device), torch.ones(64, device=device)
    torch.manual_seed(0)
    *_, mask = layer_norm.dropout_add_layer_norm(x, residual, weight, None, 0.999, 1e-5, return_dropout_mask=True)
    torch.manual_seed(0)
    out = layer_norm.dropout_add_layer_norm(x, residual, weight, None, 0.999, 1e-5)
    whole = (mask == 0).all(-1)
    assert whole.any()
    assert torch.equal(out.isnan().any(-1), ~whole)


# The public functions: what they return.

BUFFER = torch.empty(2, 6, 64)
LAYER_FUNCTIONS = (
    layer_norm.dropout_add_layer_norm,
    layer_norm.dropout_add_layer_norm_parallel_residual,
    layer_norm_fn,
)
RMS_FUNCTIONS = rms_norm.dropout_add_rms_norm, rms_norm.dropout_add_rms_norm_parallel_residual, rms_norm_fn


def shapes(results):
    return [None if x is None else (tuple(x.shape), x.dtype) for x in results]


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("prenorm, with_mask", list(itertools.product([False, True], repeat=2)))
def test_what_is_returned(prenorm, with_mask, dropout_p, rms, device):
    x, weight = X.to(device, torch.bfloat16), W.to(device)
    plain, parallel, fn = RMS_FUNCTIONS if rms else LAYER_FUNCTIONS
    options = dict(prenorm=prenorm, return_dropout_mask=with_mask)
    like_x, stream = (tuple(x.shape), x.dtype), (tuple(x.shape), torch.float32)
    out, h, mask = [like_x], [stream] * prenorm, [(tuple(x.shape), torch.uint8)] * with_mask

    def listed(results):
        return shapes(results if isinstance(results, tuple) else [results])

    assert listed(plain(x, x.float(), weight, None, dropout_p, 1e-5, **options)) == out + h + mask
    results = parallel(x, None, x.float(), weight, None, None, None, dropout_p, 1e-5, **options)
    assert listed(results) == [*out, None, *h, *mask, *mask]
    results = parallel(x, x, None, weight, weight, weight, None, dropout_p, 1e-5, residual_in_fp32=True, **options)
    assert listed(results) == [*out, *out, *h, *mask, *mask]
    mask = [(tuple(x.shape), torch.bool) if dropout_p else None] * with_mask
    none = [None] * with_mask
    assert listed(fn(x, weight, None, x.float(), dropout_p=dropout_p, **options)) == out + h + mask + none
    results = fn(x, weight, None, None, x, weight, dropout_p=dropout_p, residual_in_fp32=True, **options)
    assert listed(results) == out + out + h + mask + mask


def test_ones_for_a_mask_of_nothing(device):
    x, weight = X.to(device), W.to(device)
    _, mask = layer_norm.dropout_add_layer_norm(x, None, weight, None, 0.0, 1e-5, return_dropout_mask=True)
    assert torch.equal(mask, torch.ones_like(x, dtype=torch.uint8))


def test_the_stream_is_x_where_nothing_changes_it(device):
    x, weight = X.to(device), W.to(device)
    assert layer_norm.dropout_add_layer_norm(x, None, weight, None, 0.0, 1e-5, prenorm=True)[1] is x
    assert rms_norm_fn(x, weight, None, prenorm=True)[1] is x
    x = x.clone().requires_grad_()
    out, h = rms_norm_fn(x, weight, None, prenorm=True)
    (dx,) = torch.autograd.grad((out, h), x, (torch.zeros_like(x), torch.ones_like(x)))
    assert torch.equal(dx, torch.ones_like(x))


def test_plain_functions(device):
    x, weight, bias = X.to(device), torch.rand(64, device=device), torch.rand(64, device=device)
    torch.testing.assert_close(
        layer_norm.layer_norm(x, weight, bias, 1e-5), functional.layer_norm(x, (64,), weight, bias)
    )
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, 1e-5), functional.rms_norm(x, (64,), weight, 1e-5))


@pytest.mark.parametrize("kernels", ["op", "triton"])
def test_subsets_of_sequences(kernels, device, request):
    """Entries of sequences: shapes with and without a mask, and zeros where nothing goes, also by numbers of no row."""
    if kernels == "triton":
        request.getfixturevalue("with_triton")
    x0, residual = torch.randn(2, 3, 64, device=device, requires_grad=True), torch.randn(4, 3, 64, device=device)
    x0_subset = torch.tensor([[1, 2, 3], [0, 7, -1], [4, 5, 0], [0, 0, 0]], dtype=torch.int32, device=device)
    out_subset = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 10, -1], [0, 0, 0]], dtype=torch.int32, device=device)
    for p, with_mask in itertools.product((0.0, 0.5), (False, True)):
        out, h, *mask = layer_norm.dropout_add_layer_norm_subset(
            x0,
            residual,
            W.to(device),
            None,
            p,
            1e-5,
            None,
            x0_subset,
            out_subset,
            1.5,
            9,
            True,
            return_dropout_mask=with_mask,
        )
        assert (out.shape, h.shape) == ((3, 3, 64), (4, 3, 64))
        assert [m.shape for m in mask] == [x0.shape] * with_mask
        assert torch.equal(out[2], torch.zeros_like(out[2]))
        assert torch.equal(h[1], residual[1])
        (dx0,) = torch.autograd.grad((out, h), x0, (torch.randn_like(out), torch.ones_like(h)))
        assert torch.equal(dx0[1, 2], torch.zeros(64, device=device))
        assert dx0[1, 1].any()


@pytest.mark.parametrize("kernels", ["op", "triton"])
def test_rows_that_nothing_becomes_are_zeros(kernels, device, request):
    """Also if there is nothing at all."""
    if kernels == "triton":
        request.getfixturevalue("with_triton")
    for entries in (0, 3):
        subset = torch.zeros(entries * 4, dtype=torch.int32, device=device)
        out, h = layer_norm.dropout_add_layer_norm_subset(
            torch.empty(0, 4, 64, device=device),
            None,
            W.to(device),
            None,
            0.0,
            1e-5,
            x0_subset=subset,
            out_subset=subset,
            out_numrows=8,
            prenorm=True,
        )
        assert torch.equal(out, torch.zeros(2, 4, 64, device=device))
        assert torch.equal(h, torch.zeros(entries, 4, 64, device=device))


def test_without_subsets_it_is_the_plain_function(device):
    x, weight = X.to(device), W.to(device)
    subset = rms_norm.dropout_add_rms_norm_subset(x, x, weight, None, 0.0, 1e-5, rowscale_const=3.0)
    assert torch.equal(subset, rms_norm.dropout_add_rms_norm(x, x, weight, None, 0.0, 1e-5))


def test_buffers(device):
    x, residual, weight = X.to(device, torch.bfloat16), X.to(device), torch.rand(64, device=device)
    expected = layer_norm_fn(x, weight, None, residual, prenorm=True, out_dtype=torch.float32)
    out, stream = torch.empty_like(residual), torch.empty_like(residual)
    found = layer_norm_fn(x, weight, None, residual, prenorm=True, out=out, residual_out=stream)
    assert found[0] is out and found[1] is stream
    assert torch.equal(out, expected[0]) and torch.equal(stream, expected[1])
    stream.zero_()
    layer_norm_fn(x, weight, None, residual, residual_out=stream)
    assert torch.equal(stream, expected[1])
    leaf = residual.clone().requires_grad_()
    out, h = layer_norm_fn(x, weight, None, leaf, prenorm=True, residual_out=torch.empty_like(residual))
    (dleaf,) = torch.autograd.grad((out, h), leaf, (torch.zeros_like(out), torch.ones_like(h)))
    assert torch.equal(dleaf, torch.ones_like(h))


@pytest.mark.parametrize("function, reference", [(layer_norm_fn, layer_norm_ref), (rms_norm_fn, rms_norm_ref)])
@pytest.mark.parametrize("upcast", [False, True])
def test_torch_versions(function, reference, upcast, device):
    x, x1, residual = torch.randn(3, 2, 6, 64, device=device)
    weight, bias, weight1 = torch.rand(3, 64, device=device)
    options = dict(residual=residual, prenorm=True, dropout_p=0.3, zero_centered_weight=True)
    *found, mask, mask1 = function(x, weight, bias, x1=x1, weight1=weight1, return_dropout_mask=True, **options)
    expected = reference(
        x, weight, bias, x1=x1, weight1=weight1, dropout_mask=mask, dropout_mask1=mask1, upcast=upcast, **options
    )
    torch.testing.assert_close(tuple(found), expected)
    rowscale = torch.rand(2, 6, device=device)
    found = function(x, weight, None, rowscale=rowscale)
    torch.testing.assert_close(found, reference(x, weight, None, rowscale=rowscale))
    assert (reference(x, weight, None, dropout_p=0.99, prenorm=True)[1] == 0).float().mean() > 0.9
    assert reference(x.half(), weight, bias, upcast=upcast).dtype == torch.float16


# Modules.


@pytest.mark.parametrize("rms", [False, True])
def test_fused_modules(rms, device):
    make, function = (
        (rms_norm.DropoutAddRMSNorm, rms_norm.dropout_add_rms_norm)
        if rms
        else (layer_norm.DropoutAddLayerNorm, layer_norm.dropout_add_layer_norm)
    )
    module = make(64, prenorm=True, p=0.5, eps=1e-3, residual_in_fp32=True, device=device, dtype=torch.float16)
    assert list(module.state_dict()) == (["weight"] if rms else ["weight", "bias"])
    assert module.bias is None if rms else not module.bias.any()
    assert torch.equal(module.weight, torch.ones(64, device=device, dtype=torch.float16))
    x = X.to(device, torch.float16)
    torch.manual_seed(3)
    out, h = module(x)
    assert (out.dtype, h.dtype) == (torch.float16, torch.float32)
    assert (h == 0).any()
    torch.manual_seed(3)
    expected = function(x, None, module.weight, module.bias, 0.5, 1e-3, prenorm=True, residual_in_fp32=True)
    assert all(map(torch.equal, (out, h), expected))
    assert torch.equal(module.eval()(x)[1], x.float())
    torch.nn.init.zeros_(module.weight)
    module.reset_parameters()
    assert module.weight.all()


@pytest.mark.parametrize("zero_centered_weight", [False, True])
def test_rms_norm_modules(zero_centered_weight, device):
    x, residual = X.to(device), torch.randn(2, 6, 64, device=device)
    plain = rms_norm.RMSNorm(64, eps=1e-3, device=device)
    module = triton_norm.RMSNorm(64, 1e-3, 0.5, zero_centered_weight, device=device)
    assert list(plain.state_dict()) == list(module.state_dict()) == ["weight"]
    torch.testing.assert_close(plain(x), functional.rms_norm(x, (64,), eps=1e-3))
    assert torch.equal(module.eval()(x), plain(x))
    out, h = module(x, residual, prenorm=True)
    assert torch.equal(out, plain(x + residual)) and torch.equal(h, x + residual)
    assert (module.train()(torch.ones_like(x), prenorm=True)[1] == 0).any()
    assert module(x.half(), prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32


# A linear layer of the norm.


@pytest.mark.parametrize("rms, prenorm, residual", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(5, 7), ()], ids=["rows", "one row"])
@pytest.mark.cover(2)
def test_norm_and_linear(rms, prenorm, residual, bias, rows, device):
    x, residual = torch.randn(2, *rows, 64, device=device)
    inputs = dict(
        x=x,
        residual=residual,
        norm_weight=torch.rand(64, device=device),
        norm_bias=None,
        linear_weight=torch.randn(48, 64, device=device),
        linear_bias=None,
    )
    if bias:
        inputs |= dict(norm_bias=torch.randn(64, device=device), linear_bias=torch.randn(48, device=device))
    inputs["residual"] = residual if prenorm else None

    def ours(leaves):
        results = layer_norm_linear_fn(**leaves, eps=1e-5, prenorm=prenorm, is_rms_norm=rms)
        return list(results) if prenorm else [results]

    def plain(leaves):
        x, residual, weight, bias, linear_weight, linear_bias = leaves.values()
        out, h = oracle.layer_norm(x, None, residual, weight, bias, None, None, None, is_rms_norm=rms)
        out = functional.linear(out, linear_weight, linear_bias)
        return [out, h] if prenorm else [out]

    results, grads, incoming = results_and_gradients(ours, inputs)
    wide = {name: None if x is None else x.double() for name, x in inputs.items()}
    exact, exact_grads, _ = results_and_gradients(plain, wide, incoming)
    baseline, baseline_grads, _ = results_and_gradients(plain, inputs, incoming)
    for found, want, other in zip(
        (*results, *grads), (*exact, *exact_grads), (*baseline, *baseline_grads), strict=True
    ):
        assert_error_ratio(found, want, other, plus=allowed(Case(), want, found.dtype))


@pytest.mark.parametrize("prenorm", [False, True])
def test_norm_and_linear_under_autocast(prenorm, device):
    x = torch.randn(2, 5, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(64, device=device, requires_grad=True)
    linear = torch.randn(48, 64, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        results = layer_norm_linear_fn(x, weight, None, linear, None, x.float() if prenorm else None, prenorm=prenorm)
        out = results[0] if prenorm else results
        plain = layer_norm_fn(x.float(), weight, None)
    assert out.dtype == torch.bfloat16
    assert plain.dtype == torch.float32  # which knows nothing of autocast
    grads = torch.autograd.grad(out, (x, weight, linear), torch.randn_like(out))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]


def test_norm_and_linear_keeps_no_normal(device):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x = X.clone().to(device).requires_grad_()
        layer_norm_linear_fn(x, W.to(device), None, torch.randn(8, 64, device=device), None)
    assert sum(saved.shape == x.shape for saved in kept) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_no_gradient_is_computed_of_a_frozen_linear_layer(frozen, device):
    """As under LoRA: the backward then has one product of matrices, not two."""
    x, linear_weight, linear_bias = X.to(device), torch.randn(8, 64, device=device), torch.randn(8, device=device)

    def gradients(frozen):
        leaves = [t.clone().requires_grad_() for t in (x, W.to(device))]
        trained = [t.clone().requires_grad_(not frozen) for t in (linear_weight, linear_bias)]
        out = layer_norm_linear_fn(*leaves, None, *trained)
        with Recorder() as recorder:
            out.square().sum().backward()
        return (
            sum(op in ("aten::mm", "aten::addmm") for op in recorder.ops),
            [leaf.grad for leaf in leaves],
            [leaf.grad for leaf in trained],
        )

    count, grads, of_linear = gradients(frozen)
    assert count == (1 if frozen else 2)
    assert all((grad is None) == frozen for grad in of_linear)
    for found, right in zip(grads, gradients(False)[1], strict=True):
        assert torch.equal(found, right)
    alone = torch.zeros_like(linear_bias).requires_grad_()
    layer_norm_linear_fn(x, W.to(device), None, linear_weight, alone).sum().backward()
    assert (alone.grad == x.shape[:-1].numel()).all()


# Graphs, fakes, other ways to call.


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_compiled(prenorm, requires_grad, backend, device):
    x, residual = torch.randn(2, 3, 5, 64, device=device)
    weight = torch.rand(64, device=device)

    def function(x, residual, weight):
        return layer_norm_fn(x, weight, weight, residual, prenorm=prenorm, weight1=weight)

    def run(function):
        leaves = [t.clone().requires_grad_(requires_grad) for t in (x, residual, weight)]
        results = function(*leaves)
        grads = torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results]) if requires_grad else ()
        return [*results, *grads]

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for found, expected in zip(run(compiled), run(function), strict=True):
        torch.testing.assert_close(found, expected)


def test_compiled_with_dropout(device):
    """Each call has a mask of its own, and the backward has the forward's."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda x: layer_norm_fn(x, W.to(device), None, prenorm=True, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    (out, h), (_, other) = compiled(x), compiled(x)
    assert not torch.equal(h, other)
    (dx,) = torch.autograd.grad((out, h), x, (torch.zeros_like(out), torch.ones_like(h)))
    assert torch.equal(dx, h)


@pytest.mark.parametrize("prenorm, rms", list(itertools.product([False, True], repeat=2)))
def test_compiled_linear(prenorm, rms, device):
    tensors = (X.to(device), torch.rand(64, device=device), torch.randn(48, 64, device=device))

    def function(x, weight, linear_weight):
        results = layer_norm_linear_fn(x, weight, None, linear_weight, None, prenorm=prenorm, is_rms_norm=rms)
        return results if prenorm else (results,)

    def run(function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        results = function(*leaves)
        return [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])]

    for found, want in zip(
        run(torch.compile(function, fullgraph=True, backend="aot_eager")), run(function), strict=True
    ):
        torch.testing.assert_close(found, want)


def test_compiled_once_for_all_rows(device):
    frames = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: rms_norm_fn(x, W.to(device), None), fullgraph=True, backend=frames)
    for rows in range(3, 9):
        x = torch.randn(rows, 64, device=device)
        torch.testing.assert_close(compiled(x), rms_norm_fn(x, W.to(device), None))
    assert frames.frame_count <= 2


def test_exported(device):
    module = layer_norm.DropoutAddLayerNorm(64, prenorm=True, device=device).eval()
    x, residual = X.to(device), torch.randn(2, 6, 64, device=device)
    exported = torch.export.export(module, (x, residual)).module()
    for found, expected in zip(exported(x, residual), module(x, residual), strict=True):
        torch.testing.assert_close(found, expected)


OP_CASES = [
    Case(residual="fp32", colscale=True, rowscale=True, dropout_p=0.3),
    Case(x1="bf16", weight1=True, is_rms_norm=True, bias=False, layout="transposed"),
    Case(subset=True, residual="bf16"),
    Case(dtype="fp32"),
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", params(OP_CASES))
def test_opcheck(case, requires_grad, device, monkeypatch):
    calls = {"fwd": [], "bwd": []}
    for name in calls:
        below = getattr(layer_norm_ops, name).below_autograd
        record = lambda *args, name=name, below=below: calls[name].append(args) or below(*args)  # noqa: E731
        monkeypatch.setattr(getattr(layer_norm_ops, name), "below_autograd", record)
    inputs, options = case.draw(device)
    results_and_gradients(out_and_h(case, options), inputs)
    if not requires_grad:
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in calls["bwd"][0]]
        torch.library.opcheck(layer_norm_ops.bwd.default, args)
    args = calls["fwd"][0]
    count = layer_norm_ops.fwd.differentiable
    leaves = [None if x is None else x.detach().requires_grad_(requires_grad) for x in args[:count]]
    torch.library.opcheck(layer_norm_ops.fwd.default, (*leaves, *args[count:]))


@pytest.mark.parametrize("kernels", ["op", "triton"])
def test_mask_of_a_second_branch_beside_subsets(kernels, device, request):
    """The op allows it: x1 has a row for each of h, of which x0 may have fewer."""
    x0, x1, weight = X[0, :2].to(device), X.flatten(0, 1).to(device), W.to(device)
    subset = (torch.arange(12, dtype=torch.int32, device=device) - 8).clamp(min=0)
    state = torch.tensor([1, 2], device=device)
    tensors = x0, x1, None, weight, None, None, None, None, None, subset, subset, state
    args = *tensors, 0.5, 1e-5, 1.0, 3, False, False, None, torch.float32, True
    torch.library.opcheck(layer_norm_ops.fwd.default, args, test_utils=("test_schema", "test_faketensor"))
    fwd = request.getfixturevalue("with_triton").fwd if kernels == "triton" else layer_norm_ops.fwd
    *_, mask0, mask1, _, _ = fwd(*args)
    assert mask0.shape == x0.shape
    assert torch.equal(mask1.cpu(), oracle.layer_norm_keep(1, 2, 1, *x1.shape, 0.5).to(torch.uint8))


def test_meta():
    x, weight = torch.empty(2, 5, 64, device="meta"), torch.empty(64, device="meta")
    out, h = layer_norm_fn(x, weight, None, x, prenorm=True)
    assert out.shape == h.shape == x.shape


@pytest.mark.parametrize("wanted", range(3))
def test_gradient_of_one_result(wanted, device):
    """Through one of out, out1 and h alone."""
    case = Case(dtype="fp32", residual="fp32", weight1=True)
    inputs, options = case.draw(device)
    _, grads, incoming = results_and_gradients(lambda leaves: [norm(case, leaves, options)[wanted]], inputs)
    wide = {name: None if x is None else x.double() for name, x in inputs.items()}
    leaves = {name: None if x is None else x.requires_grad_() for name, x in wide.items()}
    result = oracle.layer_norm(*leaves.values())[wanted]
    there = [x for x in leaves.values() if x is not None]
    exact = torch.autograd.grad(result, there, incoming[0].double(), allow_unused=True, materialize_grads=True)
    for found, want in zip(grads, exact, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def test_expanded_gradient(device):
    x = X.clone().to(device).requires_grad_()
    (found,) = torch.autograd.grad(layer_norm_fn(x, W.to(device), None).sum(), x)
    assert found.abs().max() < 1e-5  # the sum of what is normalised is 0


def test_nothing_is_kept_without_a_gradient(device, monkeypatch):
    """The sum is stored only for a caller or a backward that needs it."""
    seen, below = [], layer_norm_ops.fwd.below_autograd
    monkeypatch.setattr(layer_norm_ops.fwd, "below_autograd", lambda *args: seen.append(args[-3]) or below(*args))
    x, weight = X.to(device), W.to(device).requires_grad_()
    layer_norm_fn(x, weight, None, x)
    with torch.no_grad():
        layer_norm_fn(x, weight, None, x)
        layer_norm_fn(x, weight, None, x, prenorm=True)
    assert seen == [torch.float32, None, torch.float32]


# Names and signatures that callers know.


def test_other_names():
    for name in ("DropoutAddLayerNormFn", "DropoutAddLayerNormSubsetFn", "DropoutAddLayerNormParallelResidualFn"):
        assert getattr(rms_norm, name) is getattr(layer_norm, name)
    assert triton_norm.LayerNormLinearFn.apply is layer_norm_linear_fn
    x = torch.zeros(17)
    assert layer_norm.maybe_align(x, 4) is x
    assert layer_norm.maybe_align(x[1:], 16).data_ptr() % 16 == 0


# Other packages' module of the kernels.


@pytest.mark.parametrize(
    "case",
    params(
        [
            Case(shape=(40,), dropout_p=0.3, residual="fp32", rowscale=True, colscale=True),
            Case(shape=(40,), is_rms_norm=True),
            Case(shape=(40,), subset=True, residual="bf16", dropout_p=0.3),
            Case(shape=(40,), residual_in_fp32=True, bias=False),
        ]
    ),
)
def test_dropout_layer_norm(case, device):
    """dropout_layer_norm gives what the op and its autograd give."""
    inputs, options = case.draw(device)
    dz, dx = None, None
    torch.manual_seed(11)
    results, grads, (dz, dx) = results_and_gradients(out_and_h(case, options), inputs)
    subsets = options.get("x0_subset"), options.get("out_subset")
    const, out_rows = options.get("rowscale_const", 1.0), options.get("out_rows", 0)
    torch.manual_seed(11)
    z, x, dmask, mu, rsigma = dropout_layer_norm.dropout_add_ln_fwd(
        inputs["x0"],
        inputs["residual"],
        inputs["weight"],
        inputs["bias"],
        options.get("rowscale"),
        inputs["colscale"],
        *subsets,
        case.dropout_p,
        1e-5,
        const,
        out_rows,
        None,
        residual_in_fp32=case.residual_in_fp32,
        is_rms_norm=case.is_rms_norm,
    )
    assert (x is None) == (case == Case(shape=(40,), is_rms_norm=True))
    assert (dmask is None) == (case.dropout_p == 0)
    x = inputs["x0"] if x is None else x
    assert torch.equal(z, results[0]) and torch.equal(x, results[1])
    torch.testing.assert_close(mu, x.float().mean(-1), rtol=0.02, atol=0.01)
    dx0, dresidual, dgamma, dbeta, _, _, *dcolscale = dropout_layer_norm.dropout_add_ln_bwd(
        dz,
        dx,
        x,
        inputs["x0"] if case.colscale else None,
        dmask,
        mu,
        rsigma,
        inputs["weight"],
        options.get("rowscale"),
        inputs["colscale"],
        *subsets,
        case.dropout_p,
        const,
        len(inputs["x0"]),
        bool(case.residual),
        is_rms_norm=case.is_rms_norm,
    )
    expected = dict(zip([name for name, value in inputs.items() if value is not None], grads, strict=True))
    found = dict(x0=dx0, residual=dresidual, weight=dgamma, bias=dbeta if case.bias else None)
    found |= dict(colscale=dcolscale[0] if dcolscale else None)
    assert {name for name, value in found.items() if value is not None} == expected.keys()
    for name, value in expected.items():
        assert_same_but_for_rounding([found[name]], [value])  # autograd adds that of h where h is x0


@pytest.mark.parametrize("tied, has_x1", list(itertools.product([False, True], repeat=2)))
def test_dropout_layer_norm_of_two_branches(tied, has_x1, device):
    case = Case(shape=(40,), dropout_p=0.3, residual="bf16", x1="bf16" * has_x1, weight1=not tied)
    inputs, options = case.draw(device)
    torch.manual_seed(11)
    results, grads, incoming = results_and_gradients(
        lambda leaves: [x for x in norm(case, leaves, options)[:3] if x is not None], inputs
    )
    *order, _ = inputs.values()
    torch.manual_seed(11)
    z0, z1, x, dmask0, dmask1, mu, rsigma = dropout_layer_norm.dropout_add_ln_parallel_residual_fwd(
        *order, case.dropout_p, 1e-5, None
    )
    assert (z1 is None) == tied and (dmask1 is None) != has_x1
    for found, expected in zip([y for y in (z0, z1, x) if y is not None], results, strict=True):
        assert torch.equal(found, expected)
    gradients = dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(
        incoming[0],
        None if tied else incoming[1],
        incoming[-1],
        x,
        dmask0,
        dmask1,
        mu,
        rsigma,
        inputs["weight"],
        inputs["weight1"],
        case.dropout_p,
        has_x1,
        True,
    )
    assert len(gradients) == 11
    for found, expected in zip([d for d in gradients if d is not None], grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Errors: what is wrong, the class, what the message names.

ERRORS = {
    "x0 is no tensor": (dict(x0=[1.0]), TypeError, "x0 must be a torch.Tensor"),
    "x0 is float64": (dict(x0=X.double()), TypeError, "x0 must have dtype"),
    "x0 has no dimension": (dict(x0=torch.tensor(1.0)), ValueError, "x0 must have at least one dimension"),
    "residual has another shape": (dict(residual=X[0]), ValueError, "residual must have shape"),
    "residual is integer": (dict(residual=X.int()), TypeError, "residual must have dtype"),
    "residual is on another device": (dict(residual=X.to("meta")), ValueError, "residual must be on cpu"),
    "weight is missing": (dict(weight=None), TypeError, "weight must be a torch.Tensor"),
    "weight has another shape": (dict(weight=W[:8]), ValueError, r"weight must have shape \(64,\), found \(8,\)"),
    "bias has two dimensions": (dict(bias=W[None]), ValueError, "bias must have shape"),
    "layerscale is float64": (dict(layerscale=W.double()), TypeError, "layerscale must have dtype"),
    "rowscale is too short": (dict(rowscale=W[:5]), ValueError, "rowscale must have one element for each of x0's 12"),
    "dropout_p is 1": (dict(dropout_p=1.0), ValueError, "dropout_p must be at least 0 and less than 1, found 1.0"),
    "dropout_p is negative": (dict(dropout_p=-0.1), ValueError, "dropout_p must be"),
    "dropout_p is no number": (dict(dropout_p="0"), TypeError, "dropout_p must be a real number"),
    "epsilon is negative": (dict(epsilon=-1e-5), ValueError, "epsilon must be at least 0"),
    "epsilon is NaN": (dict(epsilon=float("nan")), ValueError, "epsilon must be finite"),
    "prenorm is no flag": (dict(prenorm="yes"), TypeError, "prenorm must be a bool"),
}


@pytest.mark.parametrize("function", [layer_norm.dropout_add_layer_norm, rms_norm.dropout_add_rms_norm])
@pytest.mark.parametrize("what", ERRORS)
def test_error(what, function):
    changes, error, message = ERRORS[what]
    good = dict(x0=X, residual=X, weight=W, bias=W, dropout_p=0.0, epsilon=1e-5)
    with pytest.raises(error, match=message):
        function(**(good | changes))


SUBSETS = torch.arange(1, 13, dtype=torch.int32)
SUBSET_ERRORS = {
    "only x0_subset": (dict(out_subset=None), ValueError, "out_subset must be given together with x0_subset"),
    "only out_subset": (dict(x0_subset=None), ValueError, "x0_subset must be given together with out_subset"),
    "int64": (dict(x0_subset=SUBSETS.long()), TypeError, "x0_subset must have dtype torch.int32"),
    "of two lengths": (
        dict(out_subset=SUBSETS[:6]),
        ValueError,
        "out_subset's number of entries must be x0_subset's, 12",
    ),
    "rows of no whole entry": (dict(out_numrows=5), ValueError, "out_numrows must be a multiple of 6"),
    "out_numrows is text": (dict(out_numrows="6"), TypeError, "out_numrows must be an integer, found str"),
    "out_numrows is no whole number": (dict(out_numrows=6.5), ValueError, "out_numrows must be a whole number"),
    "residual of fewer rows": (dict(residual=X[:1]), ValueError, "residual must have 12 rows of 64 features"),
    "one row": (dict(x0=X[0, 0]), ValueError, "x0 must have at least two dimensions"),
}


@pytest.mark.parametrize("what", SUBSET_ERRORS)
def test_subset_error(what):
    changes, error, message = SUBSET_ERRORS[what]
    good = dict(
        x0=X,
        residual=X,
        weight=W,
        bias=W,
        dropout_p=0.0,
        epsilon=1e-5,
        x0_subset=SUBSETS,
        out_subset=SUBSETS,
        out_numrows=12,
    )
    with pytest.raises(error, match=message):
        layer_norm.dropout_add_layer_norm_subset(**(good | changes))


def test_odd_but_legal():
    """Tensors without dimensions and whole floats are numbers; but a number that is learned would not be."""
    good = dict(x0=X, residual=X, weight=W, bias=W, dropout_p=0.0, epsilon=0.25)
    odd = dict(dropout_p=torch.tensor(0.0), epsilon=torch.tensor(0.25))
    function = layer_norm.dropout_add_layer_norm
    assert torch.equal(function(**good | odd), function(**good))
    good |= dict(x0_subset=SUBSETS, out_subset=SUBSETS, rowscale_const=2.0, out_numrows=12)
    function = layer_norm.dropout_add_layer_norm_subset
    for rows in (12.0, torch.tensor(12)):
        changes = odd | dict(rowscale_const=torch.tensor(2.0), out_numrows=rows)
        assert torch.equal(function(**good | changes), function(**good))
    rows = X.flatten(0, 1)
    z, h, _, mu, rsigma = dropout_layer_norm.dropout_add_ln_fwd(
        rows, None, W, None, None, None, SUBSETS, SUBSETS, 0.0, 1e-5, 1.0, 12.0, None
    )
    given = z, None, h, None, None, mu, rsigma, W, None, None, SUBSETS, SUBSETS, 0.0, 1.0
    found, expected = (dropout_layer_norm.dropout_add_ln_bwd(*given, n, False)[0] for n in (12.0, 12))
    assert torch.equal(found, expected)
    good = dict(x=X, norm_weight=W, norm_bias=None, linear_weight=X[0], linear_bias=None, eps=0.25)
    assert torch.equal(layer_norm_linear_fn(**good | dict(eps=torch.tensor(0.25))), layer_norm_linear_fn(**good))
    with pytest.raises(ValueError, match="eps must not require grad, since no gradient is computed for it"):
        layer_norm_linear_fn(**good | dict(eps=torch.tensor(0.25, requires_grad=True)))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(x=X.double()), TypeError, "x must have dtype"),
        (dict(x1=X[0]), ValueError, "x1 must have shape"),
        (dict(x1=X, rowscale=X[..., 0]), ValueError, "rowscale must be None with x1"),
        (dict(eps=-1.0), ValueError, r"^eps must be at least 0, found -1\.0"),
        (dict(bias1=W), ValueError, "weight1 must be given together with bias1"),
        (dict(weight1=W[:3]), ValueError, "weight1 must have shape"),
        (dict(out_dtype=torch.float64), TypeError, "out_dtype must be"),
        (dict(out=X[0]), ValueError, "out must have shape"),
        (dict(residual_out=X.double()), TypeError, "residual_out must have dtype"),
        (dict(out=X[:1].expand_as(X)), ValueError, "out must not be expanded"),
        (dict(out=BUFFER, residual_out=BUFFER), ValueError, "residual_out must have memory of its own"),
    ],
)
def test_error_of_layer_norm_fn(changes, error, message):
    with pytest.raises(error, match=message):
        layer_norm_fn(**(dict(x=X, weight=W, bias=None) | changes))


def test_other_errors():
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        layer_norm_linear_fn(X, W, None, W[None, :8], None)
    with pytest.raises(ValueError, match="linear_bias must have shape"):
        layer_norm_linear_fn(X, W, None, torch.zeros(8, 64), W)
    with pytest.raises(ValueError, match="norm_weight must have shape"):
        layer_norm_linear_fn(X, W[:8], None, torch.zeros(8, 64), None)
    with pytest.raises(ValueError, match="weight0 must have shape"):
        layer_norm.dropout_add_layer_norm_parallel_residual(X, None, None, W[:8], None, None, None, 0.0, 1e-5)
    x = X[0]
    good = [x, None, W, None, None, None, None, None, 0.0, 1e-5, 1.0, 0, None]
    with pytest.raises(ValueError, match="gen_ must be None"):
        dropout_layer_norm.dropout_add_ln_fwd(*good[:-1], torch.Generator())
    z, _, _, mu, rsigma = dropout_layer_norm.dropout_add_ln_fwd(*good)
    subsets = dict.fromkeys(("x0_subset_", "z_subset_"), torch.arange(1, 7, dtype=torch.int32))
    for changes, message in (
        (dict(dz=z[0]), "dz must have shape"),
        (
            dict(dmask_=torch.ones(6, 64, dtype=torch.uint8)),
            "dmask_ must be given with dropout_p > 0 and must be None without it",
        ),
        (dict(colscale_=W), "x0_ must be given with colscale_ and must be None without it"),
        (dict(mu=mu[:3]), "mu must have shape"),
        (dict(**subsets, x0_numrows=-1), "x0_numrows must be at least 0"),
        (dict(z_subset_=subsets["z_subset_"]), "z_subset_ must be given with x0_subset_ and must be None without it"),
    ):
        arguments = dict(
            dz=z,
            dx_=None,
            x=x,
            x0_=None,
            dmask_=None,
            mu=mu,
            rsigma=rsigma,
            gamma=W,
            rowscale_=None,
            colscale_=None,
            x0_subset_=None,
            z_subset_=None,
            dropout_p=0.0,
            rowscale_const=1.0,
            x0_numrows=6,
            has_residual=False,
        )
        with pytest.raises(ValueError, match=message):
            dropout_layer_norm.dropout_add_ln_bwd(**(arguments | changes))
    with pytest.raises(TypeError, match=r"rsigma must be a torch\.Tensor"):
        dropout_layer_norm.dropout_add_ln_bwd(**(arguments | dict(rsigma=None)))
    with pytest.raises(TypeError, match="x0_numrows must be an integer"):
        dropout_layer_norm.dropout_add_ln_bwd(**(arguments | subsets | dict(x0_numrows="6")))
    with pytest.raises(ValueError, match="dz1_ must be given with gamma1_ and must be None without it"):
        dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(
            z, None, None, x, None, None, mu, rsigma, W, W, 0.0, False, False
        )
