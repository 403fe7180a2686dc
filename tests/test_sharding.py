"""Operations on DTensors over two processes: results and gradients of one process, and placements that are refused."""

import itertools
import types
import unittest.mock
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from processes import over_processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from flash_attn import (
    _library,
    _sharding,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn._ops import activation, fused_softmax
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops import rms_norm
from flash_attn.ops.activations import swiglu, swiglu_of_halves
from flash_attn.ops.layer_norm import DropoutAddLayerNorm, dropout_add_layer_norm
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn

CU_SEQLENS = torch.tensor([0, 2, 5], dtype=torch.int32)
LENGTHS = torch.tensor([2, 3, 1, 4], dtype=torch.int32)
ANGLES = torch.outer(torch.arange(9), 10 ** -torch.linspace(0, 1, 4))
TABLES = ANGLES.cos(), ANGLES.sin()


class Case(NamedTuple):
    """A function of tensors with these dimensions, one letter each, of which any in `divides` may be sharded."""

    function: Callable
    inputs: str
    result: str
    divides: str


# batch, sequence, tokens (keys), heads, groups of heads, channels of keys and of values
SIZES = dict(b=4, s=5, t=6, h=4, g=2, d=8, e=16, c=12, p=9, o=1)
CASES = {
    "attention": Case(lambda q, k, v: flash_attn_func(q, k, v, causal=True), "bshd bthd bthd", "bshd", "bh"),
    "16 bits": Case(lambda *qkv: flash_attn_func(*(x.bfloat16() for x in qkv)).float(), "bshd bthd bthd", "bshd", "bh"),
    "groups": Case(lambda q, k, v: flash_attn_func(q, k, v, window_size=(2, 1)), "bshd btgd btgd", "bshd", "bh"),
    "groups, sink": Case(
        lambda q, k, v, sink: flash_attn_func(q, k, v, learnable_sink=sink), "bshd btgd btge h", "bshe", "bh"
    ),
    "groups, bias": Case(
        lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias), "bshd btgd btgd bhst", "bshd", "bh"
    ),
    "groups, 16 bits": Case(lambda *qkv: plain_in_16_bits(*qkv), "bshd btgd btge", "bshe", "bh"),
    "groups, two ranges": Case(lambda *args: in_two_ranges(*args), "bshd btgd btgd h", "bshd", "bh"),
    "packed keys": Case(flash_attn_kvpacked_func, "bshd bt2hd", "bshd", "bh"),
    "packed keys, groups": Case(flash_attn_kvpacked_func, "bshd bt2gd", "bshd", "bh"),
    "packed": Case(flash_attn_qkvpacked_func, "bs3hd", "bshd", "bh"),
    "lse": Case(lambda q, k, v: flash_attn_func(q, k, v, return_lse=True)[1], "bshd bthd bthd", "bhs", "bh"),
    "other values": Case(flash_attn_func, "bshd bthd bthe", "bshe", "bh"),
    "sink": Case(lambda q, k, v, sink: flash_attn_func(q, k, v, learnable_sink=sink), "bshd bthd bthd h", "bshd", "bh"),
    "bias": Case(lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias), "bshd bthd bthd bhst", "bshd", "bh"),
    "bias of heads": Case(
        lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias), "bshd bthd bthd hst", "bshd", "bh"
    ),
    "used keys": Case(
        lambda q, k, v: flash_attn_func(q, k, v, seqused_k=of_rows(LENGTHS, q)), "bshd bthd bthd", "bshd", "bh"
    ),
    "packed tokens": Case(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, CU_SEQLENS, CU_SEQLENS, 3, 3), "shd sgd sgd", "shd", "h"
    ),
    "rms norm": Case(lambda x, w: rms_norm_fn(x, w, None), "bsc c", "bsc", "bs"),
    "layer norm": Case(lambda x, w, b: layer_norm_fn(x, w, b), "bsc c c", "bsc", "bs"),
    "norm of a sum": Case(
        lambda x, r, w, b: layer_norm_fn(x, w, b, residual=r, prenorm=True)[0], "bsc bsc c c", "bsc", "bs"
    ),
    "residual": Case(
        lambda x, r, w, b: layer_norm_fn(x, w, b, residual=r, prenorm=True)[1], "bsc bsc c c", "bsc", "bs"
    ),
    "scaled norm": Case(
        lambda x, r, w, b, s: dropout_add_layer_norm(x, r, w, b, 0.0, 1e-5, layerscale=s), "bsc bsc c c c", "bsc", "bs"
    ),
    "gate": Case(swiglu, "bsc bsc", "bsc", "bsc"),
    "activation": Case(lambda x: activation.fwd(x, None, "gelu_approx"), "bsc", "bsc", "bsc"),
    "gate of halves": Case(swiglu_of_halves, "bsc", "bsx", "bs"),
    "rotation": Case(lambda x: apply_rotary_emb(x, *TABLES, seqlen_offsets=2), "bshd", "bshd", "bsh"),
    "interleaved": Case(lambda x: apply_rotary_emb(x, *TABLES, interleaved=True), "bshd", "bshd", "bsh"),
    "in place": Case(lambda x: apply_rotary_emb(x * 1, *TABLES, inplace=True), "bshd", "bshd", "bsh"),
    "packed rotation": Case(
        lambda x: apply_rotary_emb(x, *TABLES, cu_seqlens=CU_SEQLENS, max_seqlen=3), "shd", "shd", "h"
    ),
    "cross entropy": Case(
        lambda x: cross_entropy_loss(x, of_rows(LENGTHS, x).long(), label_smoothing=0.1)[0], "bc", "b", "b"
    ),
    "mean cross entropy": Case(
        lambda x: CrossEntropyLoss(inplace_backward=False)(x, of_rows(LENGTHS, x).long()), "bc", "", "b"
    ),
}


class Plain(torch.autograd.Function):
    """The ops of plain calls, whose backward returns new gradients."""

    @staticmethod
    def forward(ctx, *qkv):
        results = torch.ops.flash_attn.fwd_plain(*qkv, 0.5, -1, -1)
        ctx.save_for_backward(*qkv, *results)
        return results[0]

    @staticmethod
    def backward(ctx, dout):
        return torch.ops.flash_attn.bwd_plain(dout, *ctx.saved_tensors, 0.5, -1, -1)


def plain_in_16_bits(*qkv):
    return Plain.apply(*(x.bfloat16() for x in qkv)).float()


def in_two_ranges(q, k, v, sink):
    """As where there are kernels, which take one range of keys at a time."""
    ranges = torch.tensor([0, 2, 3, 6], dtype=torch.int32).expand(1, 1, q.shape[1], 4)
    with unittest.mock.patch.object(_library, "runs_in_kernel", lambda name, x: True):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        return flash_attn_func(q, k, v, learnable_sink=sink, key_ranges=ranges).float()


def of_rows(x, like):
    """`x` with the placement of the rows of `like`."""
    if not isinstance(like, DTensor):
        return x
    (placement,) = like.placements
    return distribute_tensor(x, like.device_mesh, [placement if placement == Shard(0) else Replicate()])


def placement(dims, letter):
    """Of a tensor if the mesh divides the dimension `letter`; groups are divided with the heads."""
    for each in {"h": "hg"}.get(letter, letter or " "):
        if each in dims:
            return [Shard(dims.index(each))]
    return [Replicate()]


def results(function, inputs, dout):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, dout(out))]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_results(group, name):
    mesh, case = DeviceMesh.from_group(group, "cpu"), CASES[name]
    dims = case.inputs.split()
    tensors = [torch.randn([SIZES.get(each) or int(each) for each in letters]) for letters in dims]
    given = {}

    def dout(out):
        return given.setdefault("dout", torch.randn(out.shape))

    expected = results(case.function, tensors, dout)
    for letter in (*case.divides, None):
        for placed in {None: [[Replicate()]], "b": [placement(case.result, letter), [Replicate()]]}.get(
            letter, [placement(case.result, letter)]
        ):
            parts = [distribute_tensor(x, mesh, placement(each, letter)) for x, each in zip(tensors, dims)]
            found = results(case.function, parts, lambda out: distribute_tensor(given["dout"], mesh, placed))  # noqa: B023
            if case.result:
                assert list(found[0].placements) == placement(case.result, letter), letter
            if placed == placement(case.result, letter):
                sums = letter and [each for each in dims if placement(each, letter) == [Replicate()]]
                for each, grad in zip(dims, found[1:]):
                    assert list(grad.placements) == [Partial()] if sums and each in sums else placement(each, letter)
            torch.testing.assert_close([whole(x) for x in found], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    """For each dimension that may be divided, and undivided. Incoming gradients may be placed in another way."""
    over_processes(2, check_results, name)


def check_refusals(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    for name, case in CASES.items():
        dims = case.inputs.split()
        tensors = [torch.randn([SIZES.get(each) or int(each) for each in letters]) for letters in dims]
        for letter in sorted({*dims[0]} - {*case.divides, *"23"}):
            parts = [distribute_tensor(x, mesh, placement(each, letter)) for x, each in zip(tensors, dims)]
            with pytest.raises((ValueError, NotImplementedError), match=r"to_local\(\)"):
                case.function(*parts)
                raise AssertionError(f"{name} has not refused {letter}")
        letter = case.divides[0]
        parts = [distribute_tensor(x, mesh, placement(each, letter)) for x, each in zip(tensors, dims)]
        for i, x in enumerate(parts[1:], 1):
            for other in (x.redistribute(placements=[Replicate()]), whole(x)):
                if x.placements != (Replicate(),):
                    with pytest.raises(ValueError, match=r"must (be a DTensor|have placements)"):
                        case.function(*parts[:i], other, *parts[i + 1 :])
                        raise AssertionError(f"{name} has not refused argument {i}")
        partial = DTensor.from_local(tensors[0], mesh, [Partial()])
        if "rotation" not in name and name not in ("interleaved", "in place"):
            with pytest.raises(ValueError, match=r"found \(Partial.*to_local\(\)"):
                case.function(partial, *parts[1:])


def test_other_placements_are_refused():
    over_processes(2, check_refusals)


def check_errors(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    decode = torch.no_grad()(flash_attn_with_kvcache)

    def sharded(*shape, dim=0):
        return distribute_tensor(torch.randn(shape), mesh, [Shard(dim)])

    x, weight, qkv = sharded(4, 5, 2, 8), torch.ones(8), sharded(4, 5, 3, 2, 8)
    heads = [sharded(4, 5, n, 8, dim=2) for n in (6, 3, 3)]
    for function, error, says in (
        (lambda: flash_attn_func(x, x, x, dropout_p=0.5), ValueError, "dropout_p must be 0"),
        (lambda: flash_attn_func(whole(x), x, x), ValueError, "q must be a DTensor"),
        (lambda: rms_norm_fn(x, weight, None), ValueError, "weight must be a DTensor"),
        (lambda: flash_attn_func(*heads), ValueError, "k must have a multiple of 2 heads_k.*, found 3 beside 6"),
        (lambda: RotaryEmbedding(8)(qkv), NotImplementedError, r"qkv must not be a DTensor.*to_local\(\)"),
        (lambda: fused_softmax.fwd(x, None, 1.0, False), NotImplementedError, r"softmax_fwd.*to_local\(\)"),
        (lambda: decode(x, x, x), NotImplementedError, r"fwd_kvcache.*to_local\(\)"),
    ):
        with pytest.raises(error, match=says):
            function()
            raise AssertionError(says)


def test_errors():
    over_processes(2, check_errors)


def check_uneven(group):
    """Five rows on two processes."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for shape, dim in (((5, 3, 8), 0), ((2, 5, 8), 1), ((1, 1, 8), 1)):
        x, weight = torch.randn(shape), torch.randn(8)
        expected = results(lambda x, w: rms_norm_fn(x, w, None), [x, weight], torch.ones_like)
        parts = distribute_tensor(x, mesh, [Shard(dim)]), distribute_tensor(weight, mesh, [Replicate()])
        found = results(lambda x, w: rms_norm_fn(x, w, None), parts, torch.ones_like)
        torch.testing.assert_close([whole(each) for each in found], expected, rtol=1e-4, atol=1e-5)


def test_parts_of_unequal_size():
    over_processes(2, check_uneven)


def check_two_dimensions(group):
    q, k, v = (torch.randn(4, n, 4, 8) for n in (5, 6, 6))
    expected = results(flash_attn_func, (q, k, v), torch.ones_like)
    for shape in ((1, 2), (2, 1)):
        mesh = DeviceMesh("cpu", torch.arange(2).view(shape))
        for placements in ([Shard(0), Shard(2)], [Shard(2), Replicate()], [Shard(0), Shard(0)]):
            parts = [distribute_tensor(x, mesh, placements) for x in (q, k, v)]
            found = results(flash_attn_func, parts, torch.ones_like)
            assert list(found[0].placements) == placements
            torch.testing.assert_close([whole(each) for each in found], expected, rtol=1e-4, atol=1e-5)


def test_meshes_of_two_dimensions():
    over_processes(2, check_two_dimensions)


@pytest.mark.parametrize("size", [1, 6, 7, 9, 16])
def test_where_parts_start(size):
    """If both dimensions of a mesh divide a dimension, the second divides each part of the first, as torch does."""
    starts = []
    for ranks in itertools.product(range(2), range(3)):
        mesh = types.SimpleNamespace(size=lambda i: (2, 3)[i], get_local_rank=ranks.__getitem__)
        starts.append(_sharding._start("rows", ["rows", "rows"], {"rows": size}, mesh))
    halves = torch.arange(size).split(-(-size // 2))
    parts = [part for half in halves for part in half.chunk(3)]
    assert {start for start in starts if start < size} >= {int(part[0]) for part in parts if len(part)}
    assert starts == sorted(starts)


class Layer(nn.Module):
    """A layer of a transformer as torchtitan divides it."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)) for layer in (self.q, self.k, self.v))
        q, k = (apply_rotary_emb(each, TABLES[0][:, :2], TABLES[1][:, :2]) for each in (q, k))
        return self.out(flash_attn_func(q, k, v, causal=True).flatten(-2))


NORMS = {"rms": RMSNorm, "rms of ops": rms_norm.RMSNorm, "layer": lambda width: DropoutAddLayerNorm(width, p=0.0)}


def check_layer(group, norm, compiled):
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    layer, x = Layer(NORMS[norm]), torch.randn(2, 6, 16)
    layer(x).square().sum().backward()
    expected = layer(x).detach(), {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    columns = dict.fromkeys("qkv", ColwiseParallel(input_layouts=Shard(1), use_local_output=False))
    plan = {
        "norm": SequenceParallel(),
        **columns,
        "out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(layer, mesh, plan)
    function = torch.compile(layer, backend="aot_eager") if compiled else layer
    out = function(distribute_tensor(x, mesh, [Shard(1)]))
    assert out.placements == (Shard(1),)
    out.square().sum().backward()
    found = whole(out.detach()), {name: whole(p.grad) for name, p in layer.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("norm", "compiled"), [*((norm, False) for norm in NORMS), ("rms", True)])
def test_layer_as_in_torchtitan(norm, compiled):
    """Norms on parts of the sequence, attention on parts of the heads, between linear layers of torch."""
    over_processes(2, check_layer, norm, compiled)
