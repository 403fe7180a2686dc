"""Second derivatives of the layers, tangents, and transforms of torch.func, against formulas in float64."""

import functools

import oracle
import pytest
import torch
from compare import assert_error_ratio
from processes import over_processes
from recorder import Recorder
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flash_attn import _library, fused_softmax
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.mlp import GatedMlp
from flash_attn.ops import activations, layer_norm
from flash_attn.ops.fused_dense import (
    ColumnParallelLinear,
    FusedMLP,
    ParallelFusedMLP,
    RowParallelLinear,
    fused_dense_func,
    fused_mlp_func,
)
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn, rms_norm_fn
from flash_attn.ops.triton.mlp import fused_dense_sqrelu_dense_function

LABELS = torch.tensor([3, -100, 0, 7, 11, 2])
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls the ops in turn


def dense(**options):
    return functools.partial(fused_dense_func, **options), oracle.linear, ((6, 8), (5, 8), (5,))


def mlp(activation, **options):
    def ours(x, weight1, bias1, weight2, bias2):
        return fused_mlp_func(x, weight1, weight2, bias1, bias2, activation=activation, **options)

    return ours, functools.partial(oracle.mlp, activation=activation), MLP_SHAPES


def norm(function, names, *, exact=None, wants=slice(-1), **options):
    """A norm of tensors with these names, among those of the oracle."""
    exact = options if exact is None else exact
    exact = {"is_rms_norm": False, **{key: exact[key] for key in exact if key in EXACT}}
    sizes = [(6, 8) if name in ("x0", "x1", "residual") else (8,) for name in names]

    def right(*tensors):
        given = dict.fromkeys(("x0", "x1", "residual", "weight", "bias", "weight1", "bias1", "colscale"))
        given |= dict(zip(names, tensors, strict=True))
        results = oracle.layer_norm(*given.values(), **exact)[wants]
        return results if wants == 0 else tuple(results)

    return functools.partial(function, **options), right, sizes


def subset(x0, residual, weight, bias):
    places = [torch.tensor(x, dtype=torch.int32, device=x0.device) for x in SUBSETS]
    return layer_norm.dropout_add_layer_norm_subset(
        x0, residual, weight, bias, 0.0, 1e-6, None, *places, rowscale_const=1.5, out_numrows=4, prenorm=True
    )


def dropped(x0, residual, weight):
    torch.manual_seed(0)
    out, _ = layer_norm_fn(x0, weight, None, residual, dropout_p=0.4, return_dropout_mask=True)[:2]
    return out


def exactly_dropped(x0, residual, weight):
    torch.manual_seed(0)
    ones = torch.ones(6, 8, device=x0.device)
    *_, mask, _ = layer_norm_fn(ones, ones[0], None, ones, dropout_p=0.4, return_dropout_mask=True, prenorm=True)
    return oracle.layer_norm(
        x0, None, residual, weight, None, None, None, None, keep=(mask != 0, None), dropout_p=0.4, eps=1e-6
    )[0]


def tables(device, dtype=torch.float32):
    angles = torch.arange(24, device=device, dtype=dtype).view(8, 3)
    return angles.cos(), angles.sin()


def rotated(x, interleaved=False):
    """The oracle's (2, 6, 2, 8)."""
    positions = torch.arange(6, device=x.device)
    return torch.stack([oracle.rotate(one, *tables(x.device, x.dtype), positions, interleaved) for one in x])


def rotated_parts(x, parts):
    return torch.stack([rotated(one) if i < parts else one for i, one in enumerate(x.unbind(2))], 2)


def loss(gradient_in_forward=False, inplace_backward=False, **options):
    def ours(logits):
        logits = 1 * logits if inplace_backward else logits
        how = dict(gradient_in_forward=gradient_in_forward, inplace_backward=inplace_backward)
        return cross_entropy_loss(logits, LABELS.to(logits.device), **options, **how)[0]

    def exact(logits):
        return oracle.cross_entropy(logits, LABELS.to(logits.device), **options)[0]

    return ours, exact, ((6, 12),)


def mean_loss():
    module = CrossEntropyLoss()  # one for all tests: it remembers the gradient that it got last

    def exact(logits):
        return oracle.cross_entropy(logits, LABELS.to(logits.device))[0].sum() / (LABELS >= 0).sum()

    return (lambda logits: module(logits, LABELS.to(logits.device))), exact, ((6, 12),)


def gated_mlp(x, weight1, weight2):
    return torch.func.functional_call(GATED_MLP, {"fc1.weight": weight1, "fc2.weight": weight2}, (x,))


def exact_gated_mlp(x, weight1, weight2):
    value, gate = oracle.linear(x, weight1).chunk(2, -1)
    return oracle.linear(value * oracle.ACTIVATIONS["silu"](gate), weight2)


def activation(function, name, *shapes):
    exact = oracle.ACTIVATIONS[name]
    if len(shapes) == 1:
        return function, exact, shapes
    return function, (lambda x, y: exact(x + y)) if len(shapes[1]) == 1 else (lambda x, y: exact(x) * y), shapes


def halves(x):
    value, gate = x.chunk(2, -1)
    return value * oracle.ACTIVATIONS["silu"](gate)


GATED_MLP = GatedMlp(8, 4, activation=torch.nn.functional.silu, bias1=False, bias2=False, multiple_of=4)
EXACT = ("eps", "is_rms_norm", "zero_centered_weight")
MLP_SHAPES = (6, 8), (10, 8), (10,), (4, 10), (4,)
SUBSETS = [1, 0, 2, 3, 0, 0], [0, 4, 2, 0, 1, 0]
RMS = dict(eps=1e-6, is_rms_norm=True)
LN = dict(eps=1e-6)
# name: (ours, the same in float64, the shapes of its tensors)
ROWS = {
    "dense": dense(),
    "dense with residual": (
        lambda *x: fused_dense_func(*x, return_residual=True),
        lambda x, weight, bias: (oracle.linear(x, weight, bias), x),
        ((6, 8), (5, 8), (5,)),
    ),
    **{
        f"mlp {name}, level {level}": mlp(name, checkpoint_lvl=level)
        for name, level in (("gelu_approx", 0), ("gelu_approx", 1), ("sqrelu", 1), ("relu", 0), ("gelu_approx", 2))
    },
    "mlp with residual": (
        lambda x, w1, b1, w2, b2: fused_mlp_func(x, w1, w2, b1, b2, return_residual=True),
        lambda x, *others: (oracle.mlp(x, *others, "gelu_approx"), x),
        MLP_SHAPES,
    ),
    "mlp without kernels": (
        fused_dense_sqrelu_dense_function,
        functools.partial(oracle.mlp, activation="sqrelu"),
        MLP_SHAPES,
    ),
    "gated mlp": (gated_mlp, exact_gated_mlp, ((6, 8), (8, 8), (8, 4))),
    "gelu": activation(activations.fast_gelu_impl, "gelu_approx", (6, 8)),
    "bias gelu": activation(activations.bias_gelu_impl, "gelu_approx", (6, 8), (8,)),
    "swiglu": activation(activations.swiglu, "silu", (6, 8), (6, 8)),
    "swiglu of halves": (activations.swiglu_of_halves, halves, ((6, 8),)),
    "norm": norm(layer_norm_fn, ["x0", "weight", "bias"], wants=0, **LN),
    "rms norm": norm(rms_norm_fn, ["x0", "weight", "bias"], wants=0, exact=RMS, **LN),
    "norm, zero-centred": norm(layer_norm_fn, ["x0", "weight", "bias"], wants=0, zero_centered_weight=True, **LN),
    "norm of a sum": norm(
        lambda x, weight, bias, residual: layer_norm_fn(x, weight, bias, residual, prenorm=True, **LN),
        ["x0", "weight", "bias", "residual"],
        wants=slice(None),
        exact=LN,
    ),
    "two norms of a sum": norm(
        layer_norm.dropout_add_layer_norm_parallel_residual,
        ["x0", "x1", "residual", "weight", "bias", "weight1", "bias1"],
        wants=slice(None),
        dropout_p=0.0,
        epsilon=1e-6,
        prenorm=True,
        exact=LN,
    ),
    "layerscale": norm(
        lambda x, residual, weight, colscale: layer_norm.dropout_add_layer_norm(
            x, residual, weight, None, 0.0, 1e-6, layerscale=colscale
        ),
        ["x0", "residual", "weight", "colscale"],
        wants=0,
        exact=LN,
    ),
    "dropout": (dropped, exactly_dropped, ((6, 8), (6, 8), (8,))),
    "subset": (
        subset,
        lambda x0, residual, weight, bias: tuple(
            oracle.layer_norm(
                x0,
                None,
                residual,
                weight,
                bias,
                None,
                None,
                None,
                x0_subset=SUBSETS[0],
                out_subset=SUBSETS[1],
                rowscale_const=1.5,
                out_rows=4,
                eps=1e-6,
            )
        ),
        ((3, 8), (6, 8), (8,), (8,)),
    ),
    "norm and linear": (
        lambda x, w, b, linear_w, linear_b: layer_norm_linear_fn(x, w, b, linear_w, linear_b),
        lambda x, w, b, linear_w, linear_b: oracle.linear(
            oracle.layer_norm(x, None, None, w, b, None, None, None, eps=1e-6)[0], linear_w, linear_b
        ),
        ((6, 8), (8,), (8,), (5, 8), (5,)),
    ),
    "norm of a sum and linear": (
        lambda x, residual, w, linear_w: layer_norm_linear_fn(
            x, w, None, linear_w, None, residual, prenorm=True, is_rms_norm=True
        ),
        lambda x, residual, w, linear_w: (
            oracle.linear(
                oracle.layer_norm(x, None, residual, w, None, None, None, None, eps=1e-6, is_rms_norm=True)[0],
                linear_w,
            ),
            x + residual,
        ),
        ((6, 8), (6, 8), (8,), (5, 8)),
    ),
    "rotary": (lambda x: apply_rotary_emb(x, *tables(x.device)), rotated, ((2, 6, 2, 8),)),
    "rotary, interleaved": (
        lambda x: apply_rotary_emb(x, *tables(x.device), interleaved=True),
        lambda x: rotated(x, True),
        ((2, 6, 2, 8),),
    ),
    "rotary in place": (lambda x: apply_rotary_emb(1 * x, *tables(x.device), inplace=True), rotated, ((2, 6, 2, 8),)),
    "rotary of qkv": (
        lambda x: apply_rotary_emb_qkv_(1 * x, *tables(x.device)),
        lambda x: rotated_parts(x, 2),
        ((2, 6, 3, 2, 8),),
    ),
    "rotary of kv": (
        lambda x: apply_rotary_emb_kv_(1 * x, *tables(x.device)),
        lambda x: rotated_parts(x, 1),
        ((2, 6, 2, 2, 8),),
    ),
    "cross entropy": loss(),
    "cross entropy with options": loss(label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.02),
    "cross entropy in place": loss(inplace_backward=True),
    "cross entropy in one pass": loss(gradient_in_forward=True),
    "cross entropy in one pass, with options": loss(
        gradient_in_forward=True, label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.02
    ),
    "cross entropy in one pass, in place": loss(gradient_in_forward=True, inplace_backward=True),
    "mean cross entropy": mean_loss(),
    "softmax": (
        lambda x: fused_softmax.scaled_masked_softmax(x, None, 0.7),
        lambda x: oracle.masked_softmax(x, 0.7, torch.zeros_like(x, dtype=torch.bool)),
        ((2, 2, 3, 5),),
    ),
    "causal softmax": (
        lambda x: fused_softmax.scaled_upper_triang_masked_softmax(x, None, 0.7),
        lambda x: oracle.masked_softmax(x, 0.7, torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1)),
        ((2, 5, 5),),
    ),
}
TWICE = [name for name in ROWS if name != "cross entropy in one pass, in place"]


def problem(name, device):
    ours, exact, shapes = ROWS[name]
    generator = torch.Generator().manual_seed(len(name))
    return ours, exact, tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)


def curved(function, tensors):
    """A number that depends on the results by other than constant gradients."""
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    return sum((x.sin() * torch.linspace(1, 2, x.numel(), device=x.device).view(x.shape)).sum() for x in results)


def penalty(function, tensors, wanted=None):
    """Gradients of the squared norm of gradients, plus a gradient of what is earlier in the graph."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    inputs = [1.5 * x for x in leaves]
    grads = torch.autograd.grad(curved(function, inputs), inputs[wanted or slice(None)], create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), leaves, materialize_grads=True)


def assert_accurate(found, tensors, function):
    """Compare with function(*tensors) in float64, by the errors that it has in float32."""
    exact, baseline = (as_tuple(function(*(x.to(dtype) for x in tensors))) for dtype in (torch.float64, torch.float32))
    for one, right, plain in zip(as_tuple(found), exact, baseline, strict=True):
        assert_error_ratio(one, right, plain, at_most=4, plus=1e-6 * right.abs().max().item() + 1e-6)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name, checkpointed, device):
    ours, exact, tensors = problem(name, device)
    if checkpointed:
        ours = functools.partial(checkpoint, ours, use_reentrant=False)
    assert_accurate(penalty(ours, tensors), tensors, lambda *tensors: penalty(exact, tensors))


@pytest.mark.parametrize("name", [name for name in ROWS if len(ROWS[name][2]) > 1])
def test_second_derivatives_of_each_gradient(name, device):
    """Of the first tensor alone, while the others require none: nothing of the first one's history is lost."""
    ours, exact, tensors = problem(name, device)
    alone = functools.partial(penalty_of_first, others=tensors[1:])
    assert_accurate(alone(ours, tensors[0]), tensors, lambda x, *others: penalty_of_first(exact, x, others))


def penalty_of_first(function, x, others):
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(curved(lambda x: function(x, *others), [1.5 * x]), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum() + x.sum(), x)


@pytest.mark.parametrize("mode", ["jvp", "dual"])
@pytest.mark.parametrize("name", ROWS)
def test_tangents(name, mode, device):
    ours, exact, tensors = problem(name, device)
    tangents = tuple(torch.randn_like(x) for x in tensors)
    if mode == "jvp":
        _, found = torch.func.jvp(ours, tensors, tangents)
    else:
        with forward_ad.dual_level():
            results = as_tuple(ours(*map(forward_ad.make_dual, tensors, tangents)))
            found = tuple(forward_ad.unpack_dual(x).tangent for x in results)

    def right(*tensors):
        return torch.func.jvp(exact, tensors, tuple(x.to(tensors[0].dtype) for x in tangents))[1]

    assert_accurate(found, tensors, right)


ONE_OF_EACH = ["dense", "mlp relu, level 0", "gated mlp", "gelu", "norm", "rotary in place", "cross entropy", "softmax"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_tangents_in_a_graph(name, device):
    ours, _, tensors = problem(name, device)

    def tangent(tensors, tangents):
        return torch.func.jvp(ours, tensors, tangents)[1]

    tangents = tuple(torch.randn_like(x) for x in tensors)
    found = torch.compile(tangent, backend="aot_eager", fullgraph=True)(tensors, tangents)
    torch.testing.assert_close(found, tangent(tensors, tangents))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_tangents_outside_of_vmap(name, device):
    ours, _, tensors = problem(name, device)

    def function(x):
        return ours(x, *tensors[1:])

    several, tangents = torch.randn(2, 2, *tensors[0].shape, device=device)
    _, found = torch.func.jvp(torch.func.vmap(function), (several,), (tangents,))
    for one, x, tangent in zip(found, several, tangents, strict=True):
        torch.testing.assert_close(one, torch.func.jvp(function, (x,), (tangent,))[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_grad_and_vmap(name, device):
    """Gradients of torch.func are those of autograd, also for each of several inputs."""
    ours, _, tensors = problem(name, device)

    def loss(x):
        return curved(ours, [x, *tensors[1:]])

    several = torch.stack([tensors[0], 2 * tensors[0]])
    expected = torch.stack([torch.autograd.grad(loss(x), x)[0] for x in several.clone().requires_grad_()])
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    close(torch.func.grad(loss)(several[0]), expected[0])
    if name != "dropout":  # vmap allows no random numbers
        close(torch.func.vmap(torch.func.grad(loss))(several), expected)
        close(torch.func.vmap(loss)(several), torch.stack([loss(x) for x in several]))


DERIVATIVES = {
    "gradient": lambda function: torch.func.grad(function),
    "second derivative": lambda function: lambda x: penalty(function, (x,))[0],
    "gradient of a gradient": lambda function: torch.func.grad(lambda x: torch.func.grad(function)(x).square().sum()),
    "tangent": lambda function: lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
    "tangent of a gradient": lambda function: (
        lambda x: torch.func.jvp(torch.func.grad(function), (x,), (torch.ones_like(x),))[1]
    ),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", [name for name in TWICE if name.startswith("cross entropy")])
@pytest.mark.cover(2)
def test_rows_that_do_not_count_have_no_part_in_a_derivative(name, derivative, value, device):
    ours, _, (logits,) = problem(name, device)
    logits[1] = 0.0
    derivative = DERIVATIVES[derivative](lambda x: ours(x).square().sum())
    expected = derivative(logits.clone())
    logits[1] = value
    found = derivative(logits)
    assert torch.equal(found, expected) and found.isfinite().all()
    assert found.dim() == 0 or not found[1].any()


@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.02)])
def test_gradients_of_each_sample(options, device):
    """vmap over logits and labels, and over labels alone."""
    logits, labels = torch.randn(3, 6, 12, device=device), torch.randint(12, (3, 6), device=device)
    labels[:, 2] = -100

    def loss(logits, labels):
        return cross_entropy_loss(logits, labels, **options)[0].square().sum()

    def expected(logits, labels):
        x = logits.clone().requires_grad_()
        return torch.autograd.grad(loss(x, labels), x)[0]

    of_each = torch.func.vmap(torch.func.grad(loss))(logits, labels)
    of_labels = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(logits[0], labels)
    for i in range(3):
        torch.testing.assert_close(of_each[i], expected(logits[i], labels[i]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_labels[i], expected(logits[0], labels[i]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dense", "dense with residual", "mlp gelu_approx, level 1"])
def test_float64(name):
    ours, _, tensors = problem(name, "cpu")
    leaves = [x.double().requires_grad_() for x in tensors]
    assert torch.autograd.gradgradcheck(ours, leaves)


@pytest.mark.parametrize(
    "name", ["dense", "mlp gelu_approx, level 0", "swiglu", "norm of a sum", "cross entropy", "mean cross entropy"]
)
def test_16_bits(name, device):
    """The errors are those of the formula in bfloat16, many of which are roundings of what is summed."""
    ours, exact, tensors = problem(name, device)
    tensors = [x.bfloat16() for x in tensors]
    right, plain = (penalty(exact, [x.to(dtype) for x in tensors]) for dtype in (torch.float64, torch.bfloat16))
    for found, *others in zip(penalty(ours, tensors), right, plain, strict=True):
        assert_error_ratio(found, *others, plus=0.02 * others[0].abs().max().item())


def test_mlp_in_16_bits_whose_weights_are_frozen(device):
    """It keeps no input, for the memory, so a second derivative is an error, whatever is asked for."""
    x = torch.randn(6, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    module = FusedMLP(64, device=device, dtype=torch.bfloat16).requires_grad_(False)
    (dx,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice an MLP in 16 bits"):
        torch.autograd.grad(dx.square().sum() + x.sum(), x)


def test_refusing_costs_the_forward_nothing(device):
    x = torch.randn(6, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    frozen, trained = (FusedMLP(64, device=device, dtype=torch.bfloat16).requires_grad_(on) for on in (False, True))
    with Recorder() as kept:
        trained(x)
    with Recorder() as refused:
        frozen(x)
    for name in kept.ops:
        refused.ops.remove(name)
    assert refused.ops == ["aten::detach"]  # of an empty tensor, as it is saved


def test_logits_that_were_overwritten_in_the_forward_have_no_second_derivative(device):
    """But a first one, whatever is asked for, even if it does not depend on the other gradients."""
    ours, exact, (logits,) = problem("cross entropy in one pass, in place", device)
    x = logits.requires_grad_()
    for weights in (torch.ones(6, device=device), torch.rand(6, device=device)):
        (dx,) = torch.autograd.grad(ours(x), x, weights, create_graph=True)
        torch.testing.assert_close(dx.detach(), torch.autograd.grad(exact(x), x, weights)[0])
        with pytest.raises(RuntimeError, match="gradient has overwritten the logits"):
            torch.autograd.grad(dx.square().sum() + x.sum(), x)


@pytest.mark.parametrize("name", ["dense with residual", "mlp gelu_approx, level 0", "norm", "gelu", "softmax"])
def test_third_derivatives_are_refused(name, device):
    ours, _, tensors = problem(name, device)
    x = tensors[0].requires_grad_()
    function = (lambda *x: ours(*(each.bfloat16() for each in x))) if name.startswith("dense") else ours
    (dx,) = torch.autograd.grad(curved(function, tensors), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second.sum().backward()


def test_it_warns_once_where_kernels_run(device, monkeypatch, recwarn):
    monkeypatch.setattr(_library, "is_where_kernels_run", lambda x: True)
    _library.warn_once.cache_clear()
    for name in ("norm", "swiglu"):
        ours, _, tensors = problem(name, device)
        penalty(ours, tensors)
        torch.func.jvp(ours, tensors, tensors)
    assert len([w for w in recwarn if "layers run as operations of plain torch" in str(w.message)]) == 1


def divided(group, sequence_parallel):
    """A penalty on gradients of layers that are divided: each process computes its part of one for whole layers."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    x, weight1, bias1, weight2, bias2 = (torch.randn(shape, generator=generator) for shape in MLP_SHAPES)

    def part(tensor, dim, divides=True):
        return tensor.chunk(world, dim)[rank].contiguous() if divides else tensor

    own = part(x, 0, sequence_parallel), part(weight1, 0), part(bias1, 0), part(weight2, 1)
    first = ColumnParallelLinear(8, 10, group, sequence_parallel=sequence_parallel)
    second = RowParallelLinear(10, 4, group, bias=False, sequence_parallel=sequence_parallel)
    fused = ParallelFusedMLP(8, 10, 4, process_group=group, bias2=False, sequence_parallel=sequence_parallel)

    def layers(x, weight1, bias1, weight2):
        hidden = torch.func.functional_call(first, {"weight": weight1, "bias": bias1}, (x,))
        hidden = activations.fast_gelu_impl(hidden)
        return torch.func.functional_call(second, {"weight": weight2}, (hidden,))

    def module(x, weight1, bias1, weight2):
        parameters = {"fc1.weight": weight1, "fc1.bias": bias1, "fc2.weight": weight2}
        return torch.func.functional_call(fused, parameters, (x,))

    def squares(function, tensors):
        """Gradients of the squared norm of the gradients of the sum of squares."""
        leaves = [x.detach().requires_grad_() for x in tensors]
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)

    def whole(*tensors):
        grads = squares(lambda *x: oracle.mlp(*x, None, "gelu_approx"), tensors)
        dims = (0, sequence_parallel), (0, True), (0, True), (1, True)
        return tuple(part(grad, *how) for grad, how in zip(grads, dims, strict=True))

    for function in (layers, module):
        assert_accurate(tuple(squares(function, own)), (x, weight1, bias1, weight2), whole)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_layers_divided_among_processes(processes, sequence_parallel):
    over_processes(processes, divided, sequence_parallel)
