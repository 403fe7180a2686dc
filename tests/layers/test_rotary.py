"""Rotary embedding: the functions, their gradients, graphs, the errors, and what a kernel may trip over."""

import dataclasses
import functools
import math
import zlib

import oracle
import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, LAYOUTS, cover, laid_out, params, random_rows
from compare import assert_error_ratio, identical, unavoidable

from flash_attn._ops import rotary as rotary_ops
from flash_attn.layers import rotary
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flash_attn.ops.triton.rotary import apply_rotary

TABLE_DTYPES = {**DTYPES, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One rotation. Packed sequences have their lengths in `lengths`, and one stray token before and after them."""

    batch: int = 2
    seqlen: int = 33
    heads: int = 3
    head_dim: int = 64
    rotary_dim: int = 64
    dtype: str = "bf16"
    table: str = "fp32"
    interleaved: bool = False
    offset: str = "0"  # "int", "int32", "int64": in the table; "past": beyond both of its ends
    layout: str = "contiguous"
    lengths: tuple = ()

    def __str__(self):
        parts = [
            f"b{self.batch}-s{self.seqlen}" if not self.lengths else "packed" + ".".join(map(str, self.lengths)),
            f"h{self.heads}-d{self.head_dim}-r{self.rotary_dim}-{self.dtype}-{self.table}",
            "interleaved" * self.interleaved,
            f"offset_{self.offset}" * (self.offset != "0"),
            self.layout * (self.layout != "contiguous"),
        ]
        return "-".join(part for part in parts if part)

    @property
    def starts(self):
        """Where each packed sequence starts, and where the last one ends."""
        return [1 + sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @property
    def longest(self):
        return max(self.lengths) if self.lengths else self.seqlen

    @property
    def sequences(self):
        return len(self.lengths) if self.lengths else self.batch

    @property
    def rows(self):
        return self.longest + 9

    def draw(self, device):
        """x as (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), and a gradient like it."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))
        batch, seqlen = (1, sum(self.lengths) + 2) if self.lengths else (self.batch, self.seqlen)
        shape = batch, seqlen, self.heads, self.head_dim
        x, dout = torch.randn(2, *shape, device=device, generator=generator).to(DTYPES[self.dtype])
        x = laid_out(x, self.layout)
        return (x[0], dout[0]) if self.lengths else (x, dout)

    def tables(self, device):
        frequencies = (
            100 ** -torch.arange(0, 1, 2 / max(self.rotary_dim, 1), dtype=torch.float64)[: self.rotary_dim // 2]
        )
        angles = torch.outer(torch.arange(self.rows, dtype=torch.float64), frequencies).to(device)
        return angles.cos().to(TABLE_DTYPES[self.table]), angles.sin().to(TABLE_DTYPES[self.table])

    def offsets(self):
        """The position at which each sequence starts."""
        if self.offset == "past":
            return [(-3, self.rows - 2, 2**31 - 2, -(2**32))[n % 4] for n in range(self.sequences)]
        return [{"0": 0, "int": 7}.get(self.offset, 5 * n % 9) for n in range(self.sequences)]

    def arguments(self, device):
        """Arguments of apply_rotary_emb after the tables."""
        offsets = self.offsets()
        if self.offset not in ("0", "int"):
            dtype = torch.int32 if self.offset == "int32" else torch.int64
            offset = torch.tensor(offsets, dtype=dtype, device=device)
        else:
            offset = offsets[0]
        arguments = dict(interleaved=self.interleaved, seqlen_offsets=offset)
        if self.lengths:
            cu_seqlens = torch.tensor(self.starts, dtype=torch.int32, device=device)
            arguments |= dict(cu_seqlens=cu_seqlens, max_seqlen=self.longest)
        return arguments

    def expected(self, x, cos, sin, conjugate=False):
        """The oracle for each sequence, in the dtype of x. A position without a row has the angle 0."""
        cos = torch.cat([cos, torch.ones_like(cos[:1])]).to(x.dtype)
        sin = torch.cat([-sin if conjugate else sin, torch.zeros_like(sin[:1])]).to(x.dtype)
        out = x.clone()
        for n, offset in enumerate(self.offsets()):
            tokens = out[self.starts[n] : self.starts[n + 1]] if self.lengths else out[n]
            position = torch.arange(len(tokens)) + offset
            position[(position < 0) | (position >= self.rows)] = self.rows
            tokens.copy_(oracle.rotate(tokens.clone(), cos, sin, position, self.interleaved))
        return out


def assert_rotated(ours, case, x, tables, conjugate=False, name="out"):
    exact = case.expected(x.double(), *(table.double() for table in tables), conjugate)
    baseline = case.expected(x, *tables, conjugate)
    assert_error_ratio(ours, exact, baseline, plus=unavoidable(exact, ours.dtype, terms=2), name=name)


EDGES = [
    Case(batch=1, seqlen=1, heads=1),
    Case(heads=70, head_dim=128, rotary_dim=128, dtype="fp16"),  # more heads than one block takes
    Case(head_dim=256, rotary_dim=256, heads=9, dtype="fp32"),
    Case(head_dim=512, rotary_dim=500, layout="sliced"),  # more channels than one block takes
    Case(head_dim=33, rotary_dim=32),  # one channel is left over
    Case(head_dim=33, rotary_dim=32, interleaved=True, layout="last_dim_strided"),
    Case(head_dim=72, rotary_dim=72),  # halves of 36 channels: no 16-byte accesses
    Case(head_dim=100, rotary_dim=50, interleaved=True),  # halves of 25 channels
    Case(head_dim=2, rotary_dim=2, dtype="fp32", interleaved=True),
    Case(rotary_dim=0),
    Case(lengths=(5, 0, 17, 1, 33)),
    Case(lengths=(5, 0, 17, 1, 33), offset="past", table="bf16", head_dim=80, rotary_dim=32),
    Case(lengths=(40,), offset="int64", interleaved=True, layout="packed"),
]
FACTORS = dict(
    size=[(1, 1, 1), (2, 33, 3), (3, 17, 8)],
    dims=[(64, 64), (128, 64), (80, 32), (40, 20), (33, 32), (16, 6)],
    dtype=["fp32", "fp16", "bf16"],
    table=["fp32", "fp16", "bf16", "fp64"],
    interleaved=[False, True],
    offset=["0", "int", "int32", "int64", "past"],
    layout=LAYOUTS,
    lengths=[(), (), (5, 0, 17, 1)],
)


def make_case(size, dims, **options):
    batch, seqlen, heads = size
    return Case(batch, seqlen, heads, *dims, **options)


SAMPLE = [(make_case(**row), ()) for row in cover(FACTORS)]
SAMPLE += [(make_case(**row), pytest.mark.slow) for row in random_rows(FACTORS, 200, seed=1)]
CASES = params(EDGES + SAMPLE)


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradient(case, device):
    (x, dout), tables = case.draw(device), case.tables(device)
    before = x.clone()
    out = apply_rotary_emb(x.requires_grad_(), *tables, **case.arguments(device))
    (dx,) = torch.autograd.grad(out, x, dout)
    assert identical(x, before)
    assert_rotated(out, case, x.detach(), tables)
    assert_rotated(dx, case, dout, tables, conjugate=True, name="dx")
    assert identical(out[..., case.rotary_dim :], x[..., case.rotary_dim :])


@pytest.mark.parametrize("case", CASES)
def test_in_place_is_the_same_in_its_own_memory(case, device):
    (x, dout), tables, arguments = case.draw(device), case.tables(device), case.arguments(device)
    expected = apply_rotary_emb(x, *tables, **arguments)
    expected_dx = apply_rotary(dout, *tables, **arguments, conjugate=True)
    out = apply_rotary_emb(x.requires_grad_(), *tables, **arguments, inplace=True)
    assert out.data_ptr() == x.data_ptr()
    assert identical(out, expected)
    assert identical(x, expected)
    before = dout.clone()
    (dx,) = torch.autograd.grad(out, x, dout)
    assert identical(dx, expected_dx)
    assert identical(dout, before)


@pytest.fixture
def with_triton(monkeypatch, device):
    """The Triton kernel, in the interpreter where there is no GPU, in place of the ops' implementation."""
    pytest.importorskip("triton", reason="triton is not installed")
    from flash_attn._triton import rotary as kernels

    if device.type == "cpu":  # a program takes as long as another, however many rows it has
        monkeypatch.setattr(kernels, "_PAIRS", 4 * kernels._PAIRS)
    for name in ("rotary", "rotary_", "rotary_into"):
        monkeypatch.setattr(getattr(rotary_ops, name), "below_autograd", getattr(kernels, name))
    return kernels


def for_the_interpreter(case):
    """Small, since the interpreter takes its time, and without bf16, which it rounds towards zero."""
    return dataclasses.replace(case, heads=min(case.heads, 5), dtype=case.dtype.replace("bf16", "fp16"))


TRITON_CASES = [(case, ()) for case in EDGES] + SAMPLE
TRITON_CASES = params([(for_the_interpreter(case), marks) for case, marks in TRITON_CASES])


@pytest.mark.parametrize("case", TRITON_CASES)
@pytest.mark.same_on_cpu("dtype", "table", "layout")
def test_triton(case, device, with_triton):
    test_forward_and_gradient(case, device)
    test_in_place_is_the_same_in_its_own_memory(case, device)


@pytest.mark.cuda
@pytest.mark.parametrize("case", params(EDGES))
def test_triton_on_a_gpu(case, device, with_triton):
    test_forward_and_gradient(case, device)
    test_in_place_is_the_same_in_its_own_memory(case, device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_not_rotated_keeps_its_bits(inplace, interleaved, device):
    """Neither a channel past rotary_dim nor a token without a row takes part in the arithmetic."""
    case = Case(head_dim=80, rotary_dim=32, offset="past", interleaved=interleaved)
    (x, _), (cos, sin) = case.draw(device), case.tables(device)
    x[..., 32:] = torch.tensor([float("nan"), float("inf"), -0.0, 1.0] * 12)
    x[0, 0, :, ::2] = float("inf")  # position -3
    expected = x.clone()
    out = apply_rotary_emb(x, cos, sin, inplace=inplace, **case.arguments(device))
    assert identical(out[..., 32:], expected[..., 32:])
    assert identical(out[0, :3], expected[0, :3])
    assert not torch.equal(out[0, 4:, :, :32], expected[0, 4:, :, :32])


def test_conjugate_is_the_inverse(device):
    case = Case(dtype="fp32", head_dim=80, rotary_dim=32)
    (x, _), tables = case.draw(device), case.tables(device)
    turned = apply_rotary(x, *tables, interleaved=True)
    torch.testing.assert_close(apply_rotary(turned, *tables, interleaved=True, conjugate=True), x)
    again = turned.clone()
    assert apply_rotary(again, *tables, interleaved=True, conjugate=True, inplace=True) is again
    torch.testing.assert_close(again, x)


def test_gradient_of_the_gradient(device):
    case = Case(dtype="fp32")
    (x, dout), tables = case.draw(device), case.tables(device)
    out = apply_rotary_emb(x.requires_grad_(), *tables)
    (dx,) = torch.autograd.grad(out, x, dout.requires_grad_(), create_graph=True)
    (ddout,) = torch.autograd.grad(dx, dout, x.detach())
    assert_rotated(ddout, case, x.detach(), tables)


def test_inference_tensor_is_not_written_outside_of_inference_mode(device, monkeypatch):
    """Not even by a kernel, which would not notice."""
    with torch.inference_mode():
        x, (cos, sin) = torch.randn(2, 5, 4, 32, device=device), torch.rand(2, 5, 16, device=device)
    monkeypatch.setattr(rotary_ops.rotary_, "default", lambda *_: pytest.fail("it is written"))
    with pytest.raises(ValueError, match="must not write to an inference tensor"):
        apply_rotary_emb(x, cos, sin, inplace=True)


def test_expanded_gradient_is_not_written_to(device):
    case = Case(dtype="fp32")
    (x, _), tables = case.draw(device), case.tables(device)
    apply_rotary_emb(x.requires_grad_(), *tables, inplace=True).sum().backward()
    assert_rotated(x.grad, case, torch.ones_like(x), tables, conjugate=True)


IN_PLACE = {
    "in place": ((2, 5, 4, 32), lambda x, *tables: apply_rotary_emb(x, *tables, inplace=True)),
    "qkv": ((2, 5, 3, 4, 32), apply_rotary_emb_qkv_),
    "gqa": ((2, 5, 8, 32), lambda x, *tables: apply_rotary_emb_qkv_(x, *tables, num_heads_q=4)),
    "kv": ((2, 5, 2, 4, 32), apply_rotary_emb_kv_),
}


@pytest.mark.parametrize("function", IN_PLACE)
def test_gradient_that_two_branches_share(function, device):
    """What flows into an in-place rotation may also flow elsewhere."""
    shape, rotate = IN_PLACE[function]
    factor, (cos, sin) = torch.randn(shape, device=device), torch.rand(2, 5, 16, device=device)
    a, b = torch.randn(2, *shape, device=device)
    other = b.requires_grad_() * 1  # so that its turn in the backward pass comes after that of the rotation
    ((rotate(a.requires_grad_() * 1, cos, sin) + other) * factor).sum().backward()
    assert identical(b.grad, factor)
    assert identical(a.grad, rotate(factor, cos, -sin))


@pytest.mark.parametrize("compiled", [False, True])
def test_tensor_rotated_in_place_knows_its_gradient(compiled, device, compile_whole):
    """Unless it is a leaf or a view."""
    case = Case(dtype="fp32")
    (x, dout), tables = case.draw(device), case.tables(device)
    function = compile_whole(apply_rotary_emb, backend="aot_eager") if compiled else apply_rotary_emb
    y = x.requires_grad_() * 1
    function(y, *tables, inplace=True)
    (dx,) = torch.autograd.grad(y, x, dout)
    assert_rotated(dx, case, dout, tables, conjugate=True, name="dx")


def test_views_of_a_tensor_are_rotated_in_place(device):
    """Also outputs of functions that return several views, which torch's own functions must not change in place."""
    case = Case(dtype="fp32")
    (x, dout), tables = case.draw(device), case.tables(device)
    stacked = torch.stack([x, x]).requires_grad_()
    both = stacked * 1
    out = apply_rotary_emb(both.unbind()[1], *tables, inplace=True)
    assert out.data_ptr() == both[1].data_ptr()
    (dstacked,) = torch.autograd.grad(out, stacked, dout)
    assert_rotated(dstacked[1], case, dout, tables, conjugate=True, name="dx")
    assert not dstacked[0].any()


def test_in_place_change_is_seen_by_autograd(device):
    case = Case(dtype="fp32")
    (x, _), tables = case.draw(device), case.tables(device)
    y = x.requires_grad_().exp()  # keeps y for its backward
    out = apply_rotary_emb(y, *tables, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tables_may_be_slices(device):
    """Rows that lie apart, columns that lie apart, and rows at an odd address."""
    case = Case(dtype="bf16")
    (x, _), (cos, sin) = case.draw(device), case.tables(device)
    expected = apply_rotary_emb(x, cos, sin)
    wide = torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1)
    assert identical(apply_rotary_emb(x, *(table[:, : cos.shape[1]] for table in wide)), expected)
    assert identical(apply_rotary_emb(x, cos.t().contiguous().t(), sin.t().contiguous().t()), expected)
    shifted = (torch.cat([table[:, :1], table], dim=1)[:, 1:] for table in (cos, sin))
    assert identical(apply_rotary_emb(x, *shifted), expected)


@pytest.mark.parametrize("shape", [(0, 5, 3, 64), (2, 0, 3, 64), (2, 5, 0, 64), (2, 5, 3, 0)])
@pytest.mark.parametrize("inplace", [False, True])
def test_empty(shape, inplace, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    table = torch.rand(5, min(32, shape[-1] // 2), device=device)
    out = apply_rotary_emb(x, table, table, inplace=inplace)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


def test_empty_tables_and_no_sequences(device):
    table = torch.rand(0, 32, device=device)
    x = torch.randn(2, 3, 64, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    assert identical(apply_rotary_emb(x, table, table, cu_seqlens=none, max_seqlen=0), x)
    offsets = torch.zeros(0, dtype=torch.int32, device=device)
    table = torch.rand(4, 32, device=device)
    out = apply_rotary_emb(x, table, table, cu_seqlens=none, max_seqlen=0, seqlen_offsets=offsets)
    assert identical(out, x)


@pytest.mark.parametrize("shape", [(0, 5, 3, 64), (2, 0, 3, 64), (2, 5, 3, 0)])
def test_triton_empty(shape, device, with_triton):
    test_empty(shape, False, device)
    test_empty_tables_and_no_sequences(device)


def test_max_seqlen_may_be_a_tensor(device):
    case = Case(lengths=(5, 9))
    (x, _), tables, arguments = case.draw(device), case.tables(device), case.arguments(device)
    expected = apply_rotary_emb(x, *tables, **arguments)
    arguments["max_seqlen"] = torch.tensor(9)
    assert identical(apply_rotary_emb(x, *tables, **arguments), expected)


# Packed queries, keys and values.

# Shape, num_heads_q, where the queries and the keys are, and whether the heads are to be apart in memory.
PACKED = {
    "contiguous": ((2, 9, 3, 4, 64), None, (2, [0]), (2, [1]), False),
    "apart": ((2, 9, 3, 4, 64), None, (2, [0]), (2, [1]), True),
    "gqa": ((2, 9, 8, 64), 4, (2, [0, 1, 2, 3]), (2, [4, 5]), False),
    "gqa_apart": ((2, 9, 8, 64), 4, (2, [0, 1, 2, 3]), (2, [4, 5]), True),
    "mqa": ((2, 9, 3, 64), 1, (2, [0]), (2, [1]), False),
}


def part(tensor, where):
    """The heads of a packed tensor that `where` = (dimension, indices) names, (batch, seqlen, heads, head_dim)."""
    dim, indices = where
    chosen = tensor.index_select(dim, torch.tensor(indices, device=tensor.device))
    return chosen.flatten(2, 3) if chosen.dim() == 5 else chosen


def apart(x):
    """x in memory where its heads are not adjacent."""
    return torch.stack([x, x], dim=-2).clone()[..., 0, :]


@pytest.mark.parametrize("xpos", [False, True])
@pytest.mark.parametrize("layout", PACKED)
def test_packed_qkv(layout, xpos, device):
    shape, num_heads_q, queries, keys, is_apart = PACKED[layout]
    arrange = apart if is_apart else torch.clone
    qkv, grad = (arrange(torch.randn(shape, device=device, dtype=torch.bfloat16)) for _ in range(2))
    cos, sin, cos_k, sin_k = torch.rand(4, 20, 16, device=device)
    tables_k = (cos_k, sin_k) if xpos else (cos, sin)
    expected = {
        (name, where): apply_rotary(part(x, places), *tables, 2, conjugate=conjugate, interleaved=True)
        for name, x, conjugate in (("out", qkv, False), ("grad", grad, True))
        for where, places, tables in (("q", queries, (cos, sin)), ("k", keys, tables_k))
    }
    values = queries[0], sorted(set(range(shape[2])) - set(queries[1]) - set(keys[1]))
    before = part(qkv, values), part(grad, values)
    out = apply_rotary_emb_qkv_(
        qkv.requires_grad_(),
        cos,
        sin,
        *(tables_k if xpos else ()),
        interleaved=True,
        seqlen_offsets=2,
        num_heads_q=num_heads_q,
    )
    assert out.data_ptr() == qkv.data_ptr()
    (dqkv,) = torch.autograd.grad(out, qkv, grad)
    for name, found in (("out", out), ("grad", dqkv)):
        assert identical(part(found, queries), expected[name, "q"])
        assert identical(part(found, keys), expected[name, "k"])
    assert identical(part(out, values), before[0])
    assert identical(part(dqkv, values), before[1])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("arrangements", [(torch.clone, apart), (apart, torch.clone)], ids=["dqkv", "qkv"])
def test_queries_and_keys_apart_in_one_of_qkv_and_its_gradient(arrangements, heads, device):
    tensors = torch.randn(2, 2, 5, 3, heads, 32, device=device)
    qkv, dout = (arrange(tensor) for arrange, tensor in zip(arrangements, tensors))
    cos, sin = torch.rand(2, 5, 16, device=device)
    out = apply_rotary_emb_qkv_(qkv.requires_grad_(), cos, sin)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    assert identical(dqkv, apply_rotary_emb_qkv_(tensors[1].clone(), cos, -sin))


@pytest.mark.parametrize("arrange", [torch.clone, apart])
def test_packed_kv(arrange, device):
    kv, grad = (arrange(torch.randn(2, 9, 2, 3, 64, device=device)) for _ in range(2))
    cos, sin = torch.rand(2, 20, 16, device=device)
    before, grad_before = kv.clone(), grad.clone()
    out = apply_rotary_emb_kv_(kv.requires_grad_(), cos, sin, seqlen_offsets=3)
    (dkv,) = torch.autograd.grad(out, kv, grad)
    assert out.data_ptr() == kv.data_ptr()
    assert identical(out[:, :, 0], apply_rotary(before[:, :, 0], cos, sin, 3))
    assert identical(dkv[:, :, 0], apply_rotary(grad_before[:, :, 0], cos, sin, 3, conjugate=True))
    assert identical(out[:, :, 1], before[:, :, 1])
    assert identical(dkv[:, :, 1], grad_before[:, :, 1])


# Graphs, fakes, signatures.

GRAD_MODES = {  # name: whether the input requires grad, the mode, whether there is a gradient
    "gradient": (True, torch.enable_grad, True),
    "no gradient wanted": (False, torch.enable_grad, False),
    "no_grad": (True, torch.no_grad, False),
    "inference_mode": (False, torch.inference_mode, False),
}


def results_in(mode, function, inputs, dout):
    """What `function` returns, what it leaves in its argument, and the gradient, if it has one."""
    requires_grad, context, has_gradient = GRAD_MODES[mode]
    with torch.inference_mode(mode == "inference_mode"):
        leaf = inputs.clone().requires_grad_(requires_grad)
        x = leaf * 1
    with context():
        out = function(x)
    gradient = torch.autograd.grad(out, leaf, dout.clone()) if has_gradient else ()
    return out.detach(), x.detach(), *gradient


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "gqa"])
def test_compiled_in_place(layout, leaf, backend, device, compile_whole):
    shape, num_heads_q, *_ = PACKED[layout]
    tables, grad = torch.rand(2, 20, 16, device=device), torch.randn(shape, device=device)
    inputs = torch.randn(shape, device=device)

    def run(function):
        x = inputs.clone().requires_grad_()
        qkv = x if leaf else x * 1
        out = function(qkv, *tables, num_heads_q=num_heads_q)
        (dx,) = torch.autograd.grad(out, x, grad.clone())
        return out.detach(), qkv.detach(), dx

    compiled = run(compile_whole(apply_rotary_emb_qkv_, backend=backend))
    for found, expected in zip(compiled, run(apply_rotary_emb_qkv_), strict=True):
        assert identical(found, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("case", params([Case(dtype="fp32", offset="int"), Case(lengths=(5, 9), offset="int32")]))
@pytest.mark.cover(2)
def test_compiled(case, inplace, mode, backend, device, compile_whole):
    (x, dout), (cos, sin) = case.draw(device), case.tables(device)
    arguments = case.arguments(device) | dict(cos=cos, sin=sin, inplace=inplace)

    def rotate(x):
        return apply_rotary_emb(x, **arguments)

    compiled = results_in(mode, compile_whole(rotate, backend=backend), x, dout)
    for found, expected in zip(compiled, results_in(mode, rotate, x, dout), strict=True):
        assert identical(found, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("scale_base", [None, 8])
@pytest.mark.cover(1)
def test_compiled_module(scale_base, mode, backend, device, compile_whole):
    module = RotaryEmbedding(16, scale_base=scale_base, device=device)
    qkv, dout = torch.randn(2, 2, 9, 3, 4, 16, device=device)
    compiled = compile_whole(module, backend=backend)
    for _ in range(2):  # without tables, and with them; the compiler may round them in another way
        results = results_in(mode, compiled, qkv, dout), results_in(mode, module, qkv, dout)
        torch.testing.assert_close(*results)


def test_compiled_keys_and_values_apart(device, compile_whole):
    module = RotaryEmbedding(32, device=device)
    q, kv = torch.randn(2, 5, 4, 32, device=device), torch.randn(2, 5, 2, 2, 32, device=device)
    expected = module(q.clone(), kv.clone(), 3, 20)
    compiled = compile_whole(module, backend="aot_eager")(q, kv, 3, 20)
    for found, changed, want in zip(compiled, (q, kv), expected, strict=True):
        assert identical(found, want)
        assert identical(changed, want)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled_once_for_all_offsets(requires_grad, inplace, device, compile_whole):
    tables, frames = torch.rand(2, 20, 16, device=device), torch._dynamo.testing.CompileCounter()
    x = torch.randn(2, 1, 3, 32, device=device, requires_grad=requires_grad)

    def rotate(x, offset):
        return apply_rotary_emb(x * 1, *tables, inplace=inplace, seqlen_offsets=offset)

    compiled = compile_whole(rotate, backend=frames)
    for offset in range(3, 13):
        expected = apply_rotary_emb(x, *tables, seqlen_offsets=offset)
        assert identical(compiled(x, offset), expected)
    assert frames.frame_count <= 2  # once for a constant, once for any


def test_compiled_module_once_for_all_offsets(device, compile_whole):
    """If max_seqlen keeps the tables as they are."""
    module, frames = RotaryEmbedding(32, device=device), torch._dynamo.testing.CompileCounter()
    compiled = compile_whole(module, backend=frames)
    qkv = torch.randn(2, 1, 3, 2, 32, device=device)
    for offset in range(3, 13):
        expected = module(qkv.clone(), seqlen_offset=offset, max_seqlen=20)
        assert identical(compiled(qkv.clone(), seqlen_offset=offset, max_seqlen=20), expected)
    assert frames.frame_count <= 2


class Projected(torch.nn.Module):
    """What IN_PLACE[name] rotates, as models have it: a view of what a linear layer gives."""

    def __init__(self, name, device):
        super().__init__()
        self.shape, self.rotate = IN_PLACE[name]
        self.project = torch.nn.Linear(6, math.prod(self.shape[2:]), device=device)
        self.register_buffer("tables", torch.rand(2, 5, 16, device=device))

    def forward(self, x):
        return self.rotate(self.project(x).unflatten(-1, self.shape[2:]), *self.tables)


class ProjectedForModule(Projected):
    def __init__(self, device):
        super().__init__("qkv", device)
        self.embedding = RotaryEmbedding(32, device=device)

    def forward(self, x):
        return self.embedding(self.project(x).unflatten(-1, self.shape[2:]))


@pytest.mark.filterwarnings("ignore:.*assigned during export", "ignore:.*side effects")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", [*IN_PLACE, "module"])
@pytest.mark.same_on_cpu("mode", "strict")
def test_exported_in_place_on_a_view(name, mode, strict, device):
    """The program can be trained, whatever the mode in which it was exported."""
    model = ProjectedForModule(device) if name == "module" else Projected(name, device)
    x, dout = torch.randn(2, 5, 6, device=device), torch.randn(model.shape, device=device)
    with mode():
        program = torch.export.export(model, (x,), strict=strict)
    exported, expected = program.module(), model(x)
    found = exported(x)
    assert identical(found, expected)
    assert identical(program.run_decompositions().module()(x), expected)
    (dweight,) = torch.autograd.grad(expected, model.project.weight, dout)
    (found,) = torch.autograd.grad(found, exported.get_parameter("project.weight"), dout)
    torch.testing.assert_close(found, dweight)


@pytest.mark.parametrize("case", params([Case(dtype="fp32", offset="int"), Case(lengths=(5, 9), offset="int32")]))
def test_opcheck(case, device):
    (x, _), tables, options = case.draw(device), case.tables(device), case.arguments(device)
    options.pop("interleaved")
    arguments = rotary_ops.arguments(x, *tables, **options)[1:]
    torch.library.opcheck(rotary_ops.rotary.default, (x.clone().requires_grad_(), *arguments, True, False))
    torch.library.opcheck(rotary_ops.rotary.default, (x, *arguments, False, True))
    torch.library.opcheck(rotary_ops.rotary_.default, (x, *arguments, False, False))
    torch.library.opcheck(rotary_ops.rotary_into.default, (x, torch.empty_like(x), *arguments, False, False))


def test_meta():
    x, table = torch.empty(2, 5, 3, 64, device="meta"), torch.empty(5, 32, device="meta")
    assert apply_rotary_emb(x, table, table).shape == x.shape
    assert apply_rotary_emb(x, table, table, inplace=True) is x


def test_other_names():
    assert rotary.apply_rotary_emb_func is apply_rotary_emb
    assert rotary.ApplyRotaryEmb.apply is apply_rotary_emb
    assert rotary.ApplyRotaryEmbQKV_.apply is apply_rotary_emb_qkv_
    assert rotary.ApplyRotaryEmbKV_.apply is apply_rotary_emb_kv_


def test_name_of_the_triton_kernel():
    pytest.importorskip("triton", reason="triton is not installed")
    from flash_attn.ops.triton.rotary import rotary_kernel

    assert "cos" in rotary_kernel.arg_names


@pytest.mark.parametrize("interleaved", [False, True])
def test_torch_versions_agree_with_the_oracle(interleaved):
    case = Case(dtype="fp32", table="fp32", head_dim=80, rotary_dim=32, interleaved=interleaved)
    (x, _), (cos, sin) = case.draw("cpu"), case.tables("cpu")
    out = apply_rotary_emb_torch(x, cos[: case.seqlen], sin[: case.seqlen], interleaved)
    assert_rotated(out, case, x, (cos, sin))
    per_entry = (table[: case.seqlen].expand(case.batch, -1, -1) for table in (cos, sin))
    assert identical(apply_rotary_emb_torch(x, *per_entry, interleaved), out)


@pytest.mark.parametrize("layout", ["whole", "packed", "heads", "keys", "sequences"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_float64(interleaved, layout, device):
    """Gradients of first and second order against differences, and the rotation against torch's own operations."""
    random = functools.partial(torch.randn, dtype=torch.float64, device=device)
    cos, sin = random(4, 3).cos(), random(4, 3).sin()
    cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    shape, rotate = {
        "whole": ((2, 4, 1, 8), lambda x: apply_rotary_emb(x, cos, sin, interleaved)),
        "packed": ((1, 2, 3, 1, 8), lambda x: apply_rotary_emb_qkv_(x * 1, cos, sin, interleaved=interleaved)),
        "heads": (
            (1, 2, 4, 8),
            lambda x: apply_rotary_emb_qkv_(x * 1, cos, sin, interleaved=interleaved, num_heads_q=2),
        ),
        "keys": ((1, 4, 2, 1, 8), lambda x: apply_rotary_emb_kv_(x * 1, cos, sin, interleaved)),
        "sequences": (
            (4, 2, 8),
            lambda x: apply_rotary_emb(x, cos, sin, interleaved, cu_seqlens=cu_seqlens, max_seqlen=3),
        ),
    }[layout]
    x = random(*shape).requires_grad_()
    out = rotate(x).detach()
    assert out.dtype == torch.float64
    assert torch.autograd.gradcheck(rotate, x) and torch.autograd.gradgradcheck(rotate, x)
    if layout == "whole":
        torch.testing.assert_close(out, apply_rotary_emb_torch(x, cos, sin, interleaved).detach())
        in_place = apply_rotary_emb(x.detach().clone(), cos, sin, interleaved, inplace=True)
        assert identical(in_place, out)
        narrow = apply_rotary_emb(x.detach(), cos.half(), sin.half(), interleaved)
        assert identical(narrow, apply_rotary_emb(x.detach(), cos.half().double(), sin.half().double(), interleaved))


# Errors: what is wrong, the class, what the message names.

X, TABLE = torch.zeros(2, 5, 3, 64), torch.zeros(8, 32)
PACKED_X, CU_SEQLENS = torch.zeros(10, 3, 64), torch.tensor([0, 4, 10], dtype=torch.int32)
ERRORS = {
    "x is no tensor": (dict(x=[1.0]), TypeError, "x must be a torch.Tensor"),
    "x is integer": (dict(x=X.int()), TypeError, "x must have dtype"),
    "x has three dimensions": (dict(x=X[0]), ValueError, "x must have 4 dimensions"),
    "packed x has four": (dict(cu_seqlens=CU_SEQLENS, max_seqlen=6), ValueError, "x must have 3 dimensions"),
    "cos is integer": (dict(cos=TABLE.int()), TypeError, "cos must have dtype"),
    "cos has three dimensions": (dict(cos=TABLE[None]), ValueError, "cos must have 2 dimensions"),
    "sin has another shape": (dict(sin=TABLE[:, 1:]), ValueError, "sin must have shape"),
    "sin has another dtype": (dict(sin=TABLE.half()), TypeError, "sin must have dtype"),
    "the table is too wide": (dict(x=X[..., :62]), ValueError, "at most head_dim / 2 = 31 columns, found 32"),
    "the table is too short": (dict(cos=TABLE[:4], sin=TABLE[:4]), ValueError, "5 positions, found 4 rows"),
    "the offset leaves the table": (dict(seqlen_offsets=4), ValueError, "9 positions, found 8 rows"),
    "the offset is negative": (dict(seqlen_offsets=-1), ValueError, "seqlen_offsets must be at least 0, found -1"),
    "the offset has a fraction": (dict(seqlen_offsets=1.5), ValueError, "seqlen_offsets must be a whole number"),
    "the offset is a string": (dict(seqlen_offsets="1"), TypeError, "seqlen_offsets must be an integer or an integer"),
    "offsets of another dtype": (dict(seqlen_offsets=torch.zeros(2)), TypeError, "seqlen_offsets must have dtype"),
    "offsets of another shape": (dict(seqlen_offsets=CU_SEQLENS), ValueError, "seqlen_offsets must have shape"),
    "max_seqlen is missing": (dict(x=PACKED_X, cu_seqlens=CU_SEQLENS), ValueError, "max_seqlen must be given"),
    "max_seqlen is a float": (dict(x=PACKED_X, cu_seqlens=CU_SEQLENS, max_seqlen=6.0), TypeError, "max_seqlen"),
    "the table is shorter than max_seqlen": (
        dict(x=PACKED_X, cu_seqlens=CU_SEQLENS, max_seqlen=9),
        ValueError,
        "9 positions, found 8 rows",
    ),
    "cu_seqlens is int64": (
        dict(x=PACKED_X, cu_seqlens=CU_SEQLENS.long(), max_seqlen=6),
        TypeError,
        "cu_seqlens must have dtype",
    ),
    "cu_seqlens is empty": (
        dict(x=PACKED_X, cu_seqlens=CU_SEQLENS[:0], max_seqlen=6),
        ValueError,
        "length of cu_seqlens",
    ),
    "cu_seqlens has two dimensions": (
        dict(x=PACKED_X, cu_seqlens=CU_SEQLENS[None], max_seqlen=6),
        ValueError,
        "cu_seqlens must have 1 dimension",
    ),
    "cos is on another device": (dict(cos=TABLE.to("meta")), ValueError, "cos must be on cpu"),
    "offsets are on another device": (
        dict(seqlen_offsets=CU_SEQLENS[:2].to("meta")),
        ValueError,
        "seqlen_offsets must be on cpu",
    ),
    "x is nested": (
        dict(x=torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)),
        TypeError,
        "x must be a dense tensor",
    ),
    "x is sparse": (dict(x=X.to_sparse(), inplace=True), TypeError, "x must be a dense tensor, found torch.sparse_coo"),
    "interleaved is no bool": (dict(interleaved="no"), TypeError, "interleaved must be a bool, found 'no'"),
    "x is expanded": (dict(x=X[:1].expand(2, 5, 3, 64), inplace=True), ValueError, "x must not be expanded"),
}


@pytest.mark.parametrize("function", [apply_rotary_emb, apply_rotary])
@pytest.mark.parametrize("what", ERRORS)
def test_error(what, function):
    changes, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        function(**dict(dict(x=X, cos=TABLE, sin=TABLE), **changes))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", ["out of place", *IN_PLACE])
def test_tables_that_require_grad(function, requires_grad):
    """They have no gradient, which is an error where one is asked for."""
    shape, rotate = IN_PLACE.get(function, ((2, 5, 4, 32), apply_rotary_emb))
    wanting, table = torch.ones(5, 16, requires_grad=True), torch.ones(5, 16)
    x = torch.ones(shape, requires_grad=requires_grad)
    for name, tables in (("cos", (wanting, table)), ("sin", (table, wanting))):
        with pytest.raises(ValueError, match=f"{name} must not require grad, .*no gradient"):
            rotate(x, *tables)
    assert identical(x, torch.ones(shape))
    with torch.no_grad():
        assert not identical(rotate(x, wanting, wanting), torch.ones(shape))


def test_errors_of_packed_tensors():
    qkv = torch.zeros(2, 5, 3, 4, 64)
    for arguments, error, message in (
        (dict(qkv=qkv[:, :, :2]), ValueError, "qkv must have shape"),
        (dict(qkv=qkv[:, :, 0, 0]), ValueError, "qkv must have shape"),
        (dict(qkv=qkv[:, :, 0]), ValueError, "num_heads_q must be given"),
        (dict(qkv=qkv[:, :, 0], num_heads_q=1), ValueError, "num_heads_q must leave an even number"),
        (dict(qkv=qkv[:, :, 0], num_heads_q=6), ValueError, "num_heads_q must leave an even number"),
        (dict(qkv=qkv[:, :, 0], num_heads_q=2.0), TypeError, "num_heads_q must be an integer"),
        (dict(qkv=qkv, cos_k=TABLE), ValueError, "cos_k and sin_k must be given together"),
        (dict(qkv=None), TypeError, "qkv must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=message):
            apply_rotary_emb_qkv_(cos=TABLE, sin=TABLE, **arguments)
    with pytest.raises(ValueError, match="kv must have shape"):
        apply_rotary_emb_kv_(qkv, TABLE, TABLE)
    with pytest.raises(ValueError, match="columns"):
        apply_rotary_emb_torch(X[..., :62], TABLE[:5], TABLE[:5])
    table = TABLE.double()
    for arguments, error, message in (
        (dict(qkv=qkv.int()), TypeError, "qkv must have dtype .*, found torch.int32"),
        (dict(qkv=qkv[:1].expand(2, -1, -1, -1, -1)), ValueError, "qkv must not be expanded"),
        (dict(interleaved=None), TypeError, "interleaved must be a bool, found None"),
        (dict(cos_k=table[:4], sin_k=table[:4]), ValueError, "cos_k must have a row for each of 5 .*found 4"),
        (dict(cos_k=table, sin_k=TABLE), TypeError, "sin_k must have dtype torch.float64, found torch.float32"),
    ):
        with pytest.raises(error, match=message):
            apply_rotary_emb_qkv_(**dict(qkv=qkv, cos=TABLE, sin=TABLE) | arguments)
    with pytest.raises(ValueError, match="kv must not be expanded"):
        apply_rotary_emb_kv_(qkv[:1, :, :2].expand(2, -1, -1, -1, -1), TABLE, TABLE)


def test_errors_of_the_module():
    for arguments, error, message in (
        (dict(dim=33), ValueError, "dim must be positive and even, found 33"),
        (dict(dim=0), ValueError, "dim must be positive and even, found 0"),
        (dict(dim="16"), TypeError, "dim must be an integer, found str"),
        (dict(dim=16.5), ValueError, "dim must be a whole number, found 16.5"),
        (dict(dim=float("inf")), ValueError, "dim must be a whole number, found inf"),
        (dict(device=True), TypeError, "device must be a device or None, found True: pass pos_idx_in_fp32 by its name"),
        (dict(pos_idx_in_fp32=None), TypeError, "pos_idx_in_fp32 must be a bool, found None"),
        (dict(base=0), ValueError, "base must be positive, found 0"),
        (dict(base=None), TypeError, "base must be a real number, found NoneType"),
        (dict(scale_base=-1.0), ValueError, r"scale_base must be positive, found -1\.0"),
    ):
        with pytest.raises(error, match=message):
            RotaryEmbedding(**dict(dim=16) | arguments)
    qkv = torch.zeros(2, 5, 3, 4, 16)
    for arguments, error, message in (
        (dict(qkv=[1.0]), TypeError, "qkv must be a torch.Tensor, found list"),
        (dict(qkv=qkv.int()), TypeError, "qkv must have dtype .*, found torch.int32"),
        (dict(qkv=qkv.to_sparse()), TypeError, "qkv must be a dense tensor, found torch.sparse_coo"),
        (dict(qkv=qkv[0, 0, 0, 0]), ValueError, "dimensions of qkv must be 4 or 5, found 1"),
        (dict(qkv=qkv[:, :, 0]), ValueError, "num_heads_q must be given"),
        (dict(max_seqlen=9.5), ValueError, "max_seqlen must be a whole number, found 9.5"),
        (dict(seqlen_offset=1.5), ValueError, "seqlen_offset must be a whole number, found 1.5"),
        (dict(max_seqlen=-9), ValueError, "max_seqlen must be at least 0, found -9"),
        (dict(max_seqlen=torch.tensor(9.5)), TypeError, "max_seqlen must have dtype torch.int32 or torch.int64"),
        (dict(seqlen_offset=-9), ValueError, "seqlen_offset must be at least 0, found -9"),
        (dict(seqlen_offset=[9]), TypeError, "seqlen_offset must be an integer or an integer tensor, found list"),
        (dict(qkv=qkv[:, :, 0], kv=1), TypeError, "kv must be a torch.Tensor, found int"),
        (dict(kv=qkv[:, :, 1:]), ValueError, "qkv must have 4 dimensions"),
        (dict(cu_seqlens=1), ValueError, "max_seqlen must be given with cu_seqlens, found None"),
        (dict(cu_seqlens=1, max_seqlen=5, kv=qkv), ValueError, "kv must be None with cu_seqlens, found a tensor"),
        (
            dict(cu_seqlens=1, max_seqlen=5, seqlen_offset=2),
            ValueError,
            "seqlen_offset must be 0 with cu_seqlens, found 2",
        ),
    ):
        with pytest.raises(error, match=message):
            RotaryEmbedding(16)(**dict(qkv=qkv) | arguments)


def test_nothing_is_written_if_the_keys_tables_are_wrong(device):
    qkv = torch.randn(2, 5, 3, 4, 64, device=device)
    table, before = TABLE.to(device), qkv.clone()
    with pytest.raises(ValueError, match="5 positions, found 4 rows"):
        apply_rotary_emb_qkv_(qkv, table, table, table[:4], table[:4])
    assert identical(qkv, before)


@pytest.mark.parametrize("what", ["batch", "head_dim", "dtype", "expanded"])
def test_queries_are_not_written_if_the_keys_are_wrong(what, device):
    q, kv = torch.randn(2, 5, 4, 32, device=device), torch.randn(2, 5, 2, 2, 32, device=device)
    wrong = dict(batch=kv[:1], head_dim=kv[..., :16], dtype=kv.int(), expanded=kv[:1].expand_as(kv))[what]
    before = q.clone()
    with pytest.raises((TypeError, ValueError)):
        RotaryEmbedding(32, device=device)(q, wrong)
    assert identical(q, before)


# What only a kernel can trip over.


@pytest.mark.cuda
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(70_000, 1, 1, 16), (1, 1, 70_000, 16), (1, 70_000, 1, 6)])
def test_long_dimensions(shape, inplace, device):
    case = Case(*shape, rotary_dim=shape[-1], dtype="fp32")
    (x, _), tables = case.draw(device), case.tables(device)
    expected = rotary_ops.reference.rotary(x, *tables, None, 0, None, False, False)
    torch.testing.assert_close(apply_rotary_emb(x, *tables, inplace=inplace), expected)


@pytest.mark.cuda
def test_more_heads_than_the_kernel_counts(device):
    x = torch.zeros(1, 1, 1, 2, device=device).expand(2**15, 2**15, 1, 2)
    table = torch.zeros(1, 1, device=device)
    with pytest.raises(RuntimeError, match="number of heads of all tokens of x is too large: 1073741824"):
        rotary_ops.rotary_.default(x, table, table, None, 0, None, False, False)


@pytest.mark.cuda
@pytest.mark.parametrize("inplace", [False, True])
def test_more_elements_than_32_bits_count(inplace, device, memory_guard):
    seqlen = 2**31 // (32 * 128) + 100
    memory_guard(4 * seqlen * 32 * 128)
    x = torch.randn(1, 1, 32, 128, device=device, dtype=torch.bfloat16).expand(1, seqlen, 32, 128).contiguous()
    angles = torch.rand(seqlen, 64, device=device)
    tables = angles.cos(), angles.sin()
    last = apply_rotary_emb(x[:, -50:], *(table[-50:] for table in tables))
    out = apply_rotary_emb(x, *tables, inplace=inplace)
    assert identical(out[:, -50:], last)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 4, 8])
@pytest.mark.parametrize("inplace", [False, True])
def test_alignment(dtype, shift, inplace, device):
    case = Case(dtype=dtype, heads=5)
    (x, _), tables = case.draw(device), case.tables(device)
    expected = apply_rotary_emb(x, *tables)
    shifted = torch.zeros(x.numel() + shift, device=device, dtype=x.dtype)[shift:].view_as(x).copy_(x)
    assert identical(apply_rotary_emb(shifted, *tables, inplace=inplace), expected)


@pytest.mark.cuda
def test_other_stream(device):
    case = Case(batch=8, seqlen=2048, heads=8)
    (x, _), tables = case.draw(device), case.tables(device)
    expected = apply_rotary_emb(x, *tables)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would be done before the copy below begins
        late = torch.zeros_like(x).copy_(x)
        out = apply_rotary_emb(late, *tables)
    stream.synchronize()
    assert identical(out, expected)


@pytest.mark.cuda
def test_graph_capture(device):
    case = Case()
    (x, _), tables = case.draw(device), case.tables(device)
    static, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    apply_rotary_emb(static, *tables)
    with torch.cuda.graph(graph):
        out = apply_rotary_emb(static, *tables)
    static.copy_(x)
    graph.replay()
    assert identical(out, apply_rotary_emb(x, *tables))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_device_that_is_not_current(inplace):
    case = Case()
    (x, _), tables = case.draw("cuda:1"), case.tables("cuda:1")
    with torch.cuda.device(0):
        out = apply_rotary_emb(x.clone().requires_grad_(), *tables, inplace=inplace)
        assert torch.cuda.current_device() == 0
    assert_rotated(out.detach(), case, x, tables)


@pytest.mark.cuda
def test_kernel_refuses_what_does_not_fit(device):
    """The op itself, called around the checks in Python, must not reach memory that is not its own."""
    x, table, cu_seqlens = (tensor.to(device) for tensor in (X, TABLE, CU_SEQLENS))
    good = dict(x=x, cos=table, sin=table, offsets=None, first=0, cu_seqlens=None, pairs=True, back=False)
    rotary_ops.rotary.default(*good.values())
    for changes, message in (
        (dict(x=x[0]), "x must be"),
        (dict(x=x.double()), "x must have dtype"),
        (dict(cos=table[0]), "cos must have shape"),
        (dict(x=x[..., :62]), "cos must have shape"),
        (dict(sin=table[:4]), "sin must have shape"),
        (dict(sin=table.half()), "sin must have dtype Float, found Half"),
        (dict(cos=TABLE), "cos must be on cuda:.*, found it on cpu"),
        (dict(offsets=cu_seqlens), "seqlen_offsets must have shape"),
        (dict(offsets=table[0, :2]), "seqlen_offsets must have dtype"),
        (dict(x=x[0], cu_seqlens=cu_seqlens.long()), "cu_seqlens must have dtype"),
        (dict(x=x[0], cu_seqlens=cu_seqlens[:0]), "cu_seqlens must have shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            rotary_ops.rotary.default(*(good | changes).values())
    for out, message in (
        (x[..., :62], "out must have shape"),
        (x.half(), "out must have dtype"),
        (X, "out must be on cuda"),
    ):
        with pytest.raises(RuntimeError, match=message):
            rotary_ops.rotary_into.default(x, out, *list(good.values())[1:])
