"""Bits of a row in operations on rows, at level 1 of batch invariance: they depend on no other row, nor on place."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES

from flash_attn import batch_invariant
from flash_attn._ops import collectives, xentropy
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops import activations
from flash_attn.ops.layer_norm import dropout_add_layer_norm
from flash_attn.ops.linear import batch_invariant_linear
from flash_attn.ops.rms_norm import dropout_add_rms_norm, rms_norm
from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn, rms_norm_fn

COUNTS = (1, 3, 64, 1003)  # at most as many as there are


@pytest.fixture(autouse=True)
def level():
    with batch_invariant(1):
        yield


@pytest.fixture(params=["fp32", "bf16"])
def dtype(request):
    return DTYPES[request.param]


def total(device):
    return 1100 if device.type == "cuda" else 150


def assert_same_rows(function, *tensors):
    """function(*rows) of some rows gives the bits that it gives for all of them, also in training."""
    expected = function(*tensors)
    for count in COUNTS:
        places = torch.randperm(len(tensors[0]), device=tensors[0].device)[:count]
        for requires_grad in (False, True):
            some = [x[places] for x in tensors]
            if requires_grad:
                some = [x.requires_grad_() if x.is_floating_point() else x for x in some]
            for found, whole in zip(function(*some), expected, strict=True):
                assert torch.equal(found, whole[places])


def rows(device, dtype, columns, count=1):
    return [torch.randn(total(device), columns, device=device).to(dtype) for _ in range(count)]


def widths(device):
    return (64, 200, 1000, 5120) if device.type == "cuda" else (64, 33, 257)  # a GPU refuses the last two


NORMS = {
    "layer_norm": lambda w, b, x, h: (layer_norm_fn(x, w, b),),
    "layer_norm with residual": lambda w, b, x, h: layer_norm_fn(x, w, b, residual=h, prenorm=True),
    "layer_norm of two branches": lambda w, b, x, h: layer_norm_fn(x, w, b, residual=h, x1=x, weight1=b, prenorm=True),
    "rms_norm": lambda w, b, x, h: (rms_norm_fn(x, w, None),),
    "rms_norm with residual": lambda w, b, x, h: rms_norm_fn(x, w, None, residual=h, residual_in_fp32=True),
    "zero-centred": lambda w, b, x, h: (rms_norm_fn(x, w, None, zero_centered_weight=True),),
    "dropout_add_layer_norm": lambda w, b, x, h: (dropout_add_layer_norm(x, h, w, b, 0.0, 1e-5),),
    "dropout_add_rms_norm": lambda w, b, x, h: (dropout_add_rms_norm(x, h, w, None, 0.0, 1e-5),),
    "rms_norm of ops": lambda w, b, x, h: (rms_norm(x, w, 1e-6),),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name, dtype, device):
    for width in widths(device):
        weight, bias = torch.randn(2, width, device=device)

        def norm(x, h, weight=weight, bias=bias):
            results = NORMS[name](weight, bias, x, h)
            return results if isinstance(results, (tuple, list)) else (results,)

        # Without the rounding of what a training forward stores, which only level 2 makes the same.
        with batch_invariant(2):
            assert_same_rows(norm, *rows(device, dtype, width, 2))
        with torch.no_grad():
            assert_same_rows(norm, *rows(device, dtype, width, 2))


ACTIVATIONS = {
    "gelu": lambda x, y: activations.fast_gelu_impl(x),
    "bias_gelu": lambda x, y: activations.bias_gelu_impl(x, torch.ones_like(x[0])),
    "swiglu": activations.swiglu,
    "swiglu of halves": lambda x, y: activations.swiglu_of_halves(torch.cat([x, y], -1)),
    "sqrelu": lambda x, y: activations.sqrelu_fwd(x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype, device):
    for width in (64, 33, 1000):
        assert_same_rows(lambda x, y: (ACTIVATIONS[name](x, y),), *(3 * x for x in rows(device, dtype, width, 2)))


def test_activations_at_level_0_are_those_of_torch(device):
    """Formulas are slower."""
    x, y = 3 * torch.randn(2, 33, 70, device=device)
    with batch_invariant(0):
        found = activations.fast_gelu_impl(x), activations.swiglu(x, y)
    if device.type == "cpu":
        assert torch.equal(found[0], F.gelu(x, approximate="tanh")) and torch.equal(found[1], F.silu(x) * y)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved, dtype, device):
    """Each sequence, at its own offset."""
    for dim, head_dim in ((16, 16), (32, 40), (64, 128)):
        cos, sin = torch.randn(2, 300, dim // 2, device=device).to(dtype)
        x = torch.randn(total(device), 2, 3, head_dim, device=device).to(dtype)
        offsets = torch.randint(298, (total(device),), device=device)
        rotate = functools.partial(apply_rotary_emb, cos=cos, sin=sin, interleaved=interleaved)
        assert_same_rows(lambda x, offsets, rotate=rotate: (rotate(x, seqlen_offsets=offsets),), x, offsets)
        token = rotate(x[5:6, 1:], seqlen_offsets=offsets[5:6] + 1)
        assert torch.equal(token, rotate(x[5:6], seqlen_offsets=offsets[5:6])[:, 1:])


def test_scales_of_a_length_are_refused(device):
    x = torch.randn(2, 5, 3, 4, 16, device=device)
    with pytest.raises(NotImplementedError, match=r"do not depend on the length .* level .* is 1, found scale_base=64"):
        RotaryEmbedding(16, scale_base=64, device=device)(x)


@pytest.mark.parametrize(
    "options", [{}, dict(label_smoothing=0.1, lse_square_scale=1e-4), dict(logit_scale=0.7)], ids=str
)
def test_cross_entropy(options, dtype, device):
    """Also with logits whose rows begin at other alignments, and where the forward could make the gradient, too."""
    for vocab in (50, 1000, 2003):
        (logits,) = rows(device, dtype, vocab)
        labels = torch.randint(vocab, (total(device),), device=device)
        for at_once in (None, True):
            loss = CrossEntropyLoss(reduction="none", gradient_in_forward=at_once, **options)
            assert_same_rows(lambda logits, labels, loss=loss: (loss(logits, labels),), logits, labels)
        wide = torch.randn(total(device), vocab + 3, device=device).to(dtype)
        wide[:, 2:-1] = logits
        loss = CrossEntropyLoss(reduction="none", **options)
        assert torch.equal(loss(wide[:, 2:-1], labels), loss(logits, labels))


def test_compiled(device):
    """In one graph, which does not tell where in memory rows begin."""
    compute = torch.compile(
        lambda x, labels: (CrossEntropyLoss(reduction="none")(x, labels), layer_norm_fn(x, x[0], None)),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for columns in (48, 64):
        (x,) = rows(device, torch.float32, columns)
        labels = torch.randint(columns, (len(x),), device=device)
        expected = CrossEntropyLoss(reduction="none")(x, labels), layer_norm_fn(x, x[0], None)
        offset = F.pad(x, (3, 2))[:, 3:-2]
        for each in (x, offset):
            assert all(map(torch.equal, compute(each, labels), expected))


def test_a_single_long_row_on_several_threads(device):
    """Torch divides the sum of one row among threads, but not those of several."""
    if device.type != "cpu":
        pytest.skip("threads are of the CPU")
    x = torch.randn(3, 70000)
    labels = torch.tensor([1, 2, 3])
    loss = CrossEntropyLoss(reduction="none")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(loss(x, labels)[1:2], loss(x[1:2], labels[1:2]))
        assert torch.equal(rms_norm(x, torch.ones(70000), 1e-6)[1:2], rms_norm(x[1:2], torch.ones(70000), 1e-6))
    finally:
        torch.set_num_threads(before)


def test_sums_over_many_processes_are_refused(device, monkeypatch):
    """With label smoothing, which gives each process a part of the loss of a row."""
    logits, labels = torch.randn(3, 10, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    monkeypatch.setattr(collectives, "size", lambda group: 3)
    monkeypatch.setattr(collectives, "gather_rows", lambda x, group: (torch.cat([x] * 3), None))
    monkeypatch.setattr(collectives, "reduce", lambda x, group: (x, None))
    xentropy.forward(logits, (labels, None, 0.0, 1.0, 0.0, -100, 0, 30), "a group")
    message = r"process_group must have at most 2 processes that sum .* level .* is 1, found 3"
    with pytest.raises(NotImplementedError, match=message):
        xentropy.forward(logits, (labels, None, 0.1, 1.0, 0.0, -100, 0, 30), "a group")


def test_a_linear_layer_of_a_norm(dtype, device):
    """At level 2, as other linear layers."""
    weight, linear = torch.randn(64, device=device), torch.randn(48, 64, device=device)
    with batch_invariant(2):
        for residual in (False, True):

            def norm(x, h, residual=residual):
                return layer_norm_linear_fn(x, weight, None, linear, None, h if residual else None, prenorm=True)

            assert_same_rows(norm, *rows(device, dtype, 64, 2))
            (x, _) = rows(device, dtype, 64, 2)
            expected = batch_invariant_linear(layer_norm_fn(x, weight, None), linear.to(dtype))
            assert torch.equal(norm(x, None)[0] if not residual else expected, expected)


@pytest.mark.cuda
def test_parameters_that_begin_at_other_alignments(device):
    """As in one buffer that holds all parameters of a model."""
    x, flat = torch.randn(9, 1000, device=device).bfloat16(), torch.randn(2003, device=device).bfloat16()
    weight, bias = flat[:1000], flat[1003:]
    expected = layer_norm_fn(x, weight.clone(), bias.clone())
    assert torch.equal(layer_norm_fn(x, weight, bias), expected)


@pytest.mark.cuda
def test_rows_that_begin_at_other_alignments_are_refused(device):
    x = torch.randn(3, 33, device=device)
    with pytest.raises(NotImplementedError, match=r"x must have a multiple of 8 columns .* level .* is 1, found 33"):
        layer_norm_fn(x, torch.ones(33, device=device), None)
