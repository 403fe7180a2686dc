"""LayerNorm and RMSNorm: values and gradients, masks, modules, errors, graphs, and what a kernel may trip over."""

import dataclasses
import itertools
import pathlib
import zlib

import native
import oracle
import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, params, sample
from compare import assert_error_ratio, assert_same_but_for_rounding, unavoidable
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

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

INPUTS = "x0", "x1", "residual", "weight", "bias", "weight1", "bias1", "colscale"


@dataclasses.dataclass(frozen=True)
class Case:
    """One norm. Dtypes are keys of DTYPES, or empty for a tensor that is not there."""

    shape: tuple = (7, 5)  # of the rows
    cols: int = 192
    dtype: str = "bf16"
    residual: str = ""
    weight: str = "fp32"
    x1: str = ""
    bias: bool = True
    weight1: bool = False
    rowscale: bool = False
    colscale: bool = False
    dropout_p: float = 0.0
    subset: bool = False
    residual_in_fp32: bool = False
    is_rms_norm: bool = False
    zero_centered_weight: bool = False
    out_dtype: str = ""
    layout: str = "contiguous"  # or "shifted" by an element, "strided" or "transposed" rows, "columns" that lie apart
    offset: float = 0.0  # added to x0

    def __str__(self):
        flags = ("bias", "weight1", "rowscale", "colscale", "subset", "residual_in_fp32", "zero_centered_weight")
        parts = [
            "rms" if self.is_rms_norm else "layer",
            "x".join(map(str, (*self.shape, self.cols))),
            self.dtype,
            f"w_{self.weight}",
            *(f"{name}_{getattr(self, name)}" for name in ("residual", "x1", "out_dtype") if getattr(self, name)),
            *(name for name in flags if getattr(self, name)),
            f"dropout{self.dropout_p:g}" * (self.dropout_p > 0),
            self.layout * (self.layout != "contiguous"),
            f"offset{self.offset:g}" * (self.offset != 0),
        ]
        return "-".join(part for part in parts if part)

    @property
    def rows(self):
        return torch.Size(self.shape).numel()

    def subsets(self):
        """Row of x0 that is added to each row of h, and row of out that it becomes, from 1 on; 0 for none."""
        numbers = torch.arange(self.rows), torch.arange(self.rows) + 1
        keeps = [(number * 7919 % 5 < 3).long() for number in numbers]
        return [(keep.cumsum(0) * keep).tolist() for keep in keeps]

    def draw(self, device):
        """The inputs by name, None for those that are not there, and the op's options."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))

        def randn(*shape, dtype, scale=1.0, shift=0.0):
            x = torch.randn(shape, device=device, generator=generator) * scale + shift
            return x.to(DTYPES[dtype])

        def vector(there, shift):
            return randn(self.cols, dtype=self.weight, scale=0.5, shift=shift) if there else None

        def matrix(dtype, shift=0.0):
            return self._laid_out(randn(*self.shape, self.cols, dtype=dtype, shift=shift)) if dtype else None

        shift = 0.0 if self.zero_centered_weight else 1.0
        x0, x1, residual = matrix(self.dtype, self.offset), matrix(self.x1), matrix(self.residual)
        options = {}
        if self.rowscale:
            options["rowscale"] = (torch.rand(self.shape, device=device, generator=generator) > 0.2).to(x0.dtype) * 1.25
        if self.subset:
            x0_rows, out_rows = (max(subset) for subset in self.subsets())
            x0, residual = x0.flatten(0, -2)[:x0_rows], None if residual is None else residual.flatten(0, -2)
            subsets = (torch.tensor(subset, dtype=torch.int32, device=device) for subset in self.subsets())
            options |= dict(zip(("x0_subset", "out_subset"), subsets), rowscale_const=1.5, out_rows=out_rows)
        tensors = (
            x0, x1, residual, vector(True, shift), vector(self.bias, 0), vector(self.weight1, shift),
            vector(self.weight1 and self.bias, 0), vector(self.colscale, 1),
        )  # fmt: skip
        return dict(zip(INPUTS, tensors)), options

    def _laid_out(self, x):
        if self.layout == "shifted":
            return torch.cat([x.new_full((1,), float("nan")), x.flatten()])[1:].view(x.shape)
        if self.layout == "strided":
            return torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : self.cols]
        if self.layout == "transposed":
            return x.transpose(0, -2).contiguous().transpose(0, -2)
        if self.layout == "columns":
            return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]
        return x


def norm(case, inputs, options, **more):
    """`layer_norm_ops.forward` of a case."""
    inputs = dict(inputs)
    order = [inputs.pop(name) for name in ("x0", "residual", "weight", "bias")]
    return layer_norm_ops.forward(
        *order, 1e-5, case.dropout_p, **inputs, **options, prenorm=True, residual_in_fp32=case.residual_in_fp32,
        is_rms_norm=case.is_rms_norm, zero_centered_weight=case.zero_centered_weight,
        out_dtype=DTYPES.get(case.out_dtype), return_mask=True, **more,
    )  # fmt: skip


def results_and_gradients(function, inputs, incoming=None):
    """[out, (out1,) h] of `function(inputs)` and the gradients of the inputs that are there; incoming as returned."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    results = function(leaves)
    if incoming is None:
        incoming = [torch.randn_like(x) for x in results]
    there = [x for x in leaves.values() if x is not None]
    grads = torch.autograd.grad(results, there, [g.to(x.dtype) for g, x in zip(incoming, results, strict=True)])
    return [x.detach() for x in results], grads, incoming


def out_and_h(case, options):
    """The function of the leaves that gives these two."""
    return lambda leaves: list(norm(case, leaves, options)[:3:2])


def oracle_options(case, options, masks, h_dtype=None):
    options = dict(options)
    for name in ("x0_subset", "out_subset"):
        if name in options:
            options[name] = options[name].tolist()
    return options | dict(
        keep=[None if mask is None else mask.bool() for mask in masks], dropout_p=case.dropout_p,
        is_rms_norm=case.is_rms_norm, zero_centered_weight=case.zero_centered_weight, h_dtype=h_dtype,
    )  # fmt: skip


def assert_right(case, device):
    """Results and gradients of `layer_norm_ops.forward` against the formula in float64."""
    inputs, options = case.draw(device)
    kept = []

    def ours(leaves):
        out, out1, h, mask0, mask1, *_ = norm(case, leaves, options)
        kept[:] = mask0, mask1
        return [x for x in (out, out1, h) if x is not None]

    results, grads, incoming = results_and_gradients(ours, inputs)
    wide = {name: None if x is None else x.double() for name, x in inputs.items()}
    wide_options = options | ({"rowscale": options["rowscale"].double()} if case.rowscale else {})
    exact, exact_grads, _ = results_and_gradients(
        lambda leaves: oracle.layer_norm(*leaves.values(), **oracle_options(case, wide_options, kept)), wide, incoming
    )
    h_dtype = results[-1].dtype
    plain, plain_grads, _ = results_and_gradients(
        lambda leaves: oracle.layer_norm(*leaves.values(), **oracle_options(case, options, kept, h_dtype)),
        inputs, incoming,
    )  # fmt: skip
    names = ["out", "out1", "h"] if case.weight1 else ["out", "h"]
    names += ["d" + name for name, x in inputs.items() if x is not None]
    for name, found, want, baseline in zip(names, (*results, *grads), (*exact, *exact_grads), (*plain, *plain_grads)):
        assert_error_ratio(found, want, baseline.to(found.dtype), plus=allowed(case, want, found.dtype), name=name)
    assert results[0].dtype == DTYPES[case.out_dtype or case.dtype]
    assert h_dtype == DTYPES[case.residual or ("fp32" if case.residual_in_fp32 else case.dtype)]
    return kept


def allowed(case, exact, dtype):
    """What summing over rows and features in float32 costs, in units of the largest value."""
    largest = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    return unavoidable(exact, dtype, terms=16 * largest * max(1.0, abs(case.offset)))


EDGES = [
    Case(),
    Case(is_rms_norm=True, bias=False),
    Case(residual="bf16"),
    Case(residual="fp32", dtype="fp16", weight="fp16"),
    Case(residual_in_fp32=True),
    Case(shape=(1,), cols=1, dtype="fp32", is_rms_norm=True),
    Case(shape=(37,), cols=1, dtype="fp32", residual="bf16"),  # h is rounded when it is stored
    Case(shape=(9,), cols=1, dtype="fp16", residual="fp16", x1="fp32", colscale=True, offset=3.0),
    # Away from 0, where the norm of one column is a step, whose gradient no rounded h can have.
    Case(shape=(37,), cols=1, dtype="fp32", residual="bf16", is_rms_norm=True, offset=3.0),
    Case(shape=(3,), cols=8),
    Case(shape=(), residual="bf16", rowscale=True, colscale=True, dropout_p=0.2),
    Case(shape=(2, 3, 4), cols=100, residual="bf16"),
    Case(shape=(300,), cols=64, residual="bf16", dropout_p=0.3),
    Case(shape=(33,), cols=1001, residual="fp16", dtype="fp16"),
    Case(shape=(35,), cols=33, residual="bf16", dropout_p=0.2),
    Case(shape=(300,), cols=33, residual="fp32", dropout_p=0.2),
    Case(shape=(150,), cols=1001, residual="bf16", dropout_p=0.1),
    Case(shape=(140,), cols=1003, dtype="fp32", residual="fp32", x1="fp32", weight1=True, colscale=True),
    *(Case(shape=(17,), cols=cols, residual="bf16", layout="strided") for cols in (257, 262, 519)),
    *(Case(shape=(17,), cols=cols, residual="fp32", layout="shifted", dropout_p=0.2) for cols in (256, 1021)),
    Case(shape=(17,), cols=4095, residual="fp32", dropout_p=0.1, weight="bf16"),
    Case(shape=(17,), cols=4091, residual="fp32", weight="fp16", dtype="fp16", is_rms_norm=True),
    Case(shape=(9,), cols=1023, residual="bf16", x1="fp32", colscale=True, dropout_p=0.2, weight1=True),
    Case(shape=(5,), cols=1027, dtype="fp32", residual="fp32", dropout_p=0.1, colscale=True, rowscale=True),
    Case(shape=(9,), cols=2048, residual="bf16", weight="bf16"),
    Case(shape=(3,), cols=3000, residual="fp32"),
    # Lanes draw in pairs; the last one may have no partner.
    *(Case(shape=(300,), cols=cols, residual="fp32", dropout_p=0.2) for cols in (4, 12, 28, 768, 772)),
    Case(shape=(300,), cols=516, dtype="fp32", dropout_p=0.2, rowscale=True),
    Case(shape=(26_000,), cols=24, residual="fp32"),  # blocks of the backward take turns
    Case(shape=(1000,), cols=24, residual="bf16"),
    Case(shape=(700,), cols=1536, residual="bf16"),
    Case(shape=(450,), cols=2560, residual="bf16", dropout_p=0.1),
    Case(shape=(5,), cols=5120, residual="bf16", dropout_p=0.2),
    Case(shape=(5,), cols=5120, residual="bf16", x1="bf16", colscale=True, weight1=True, dropout_p=0.2),
    Case(shape=(3,), cols=12288, residual="bf16"),
    Case(shape=(3,), cols=12288, residual="bf16", dropout_p=0.2, colscale=True, x1="bf16", weight1=True),
    Case(shape=(300,), cols=16_384, residual="bf16"),
    Case(shape=(3,), cols=16_384, residual="fp32", dropout_p=0.2, is_rms_norm=True, bias=False),
    Case(shape=(70,), cols=8195, residual="bf16", rowscale=True, layout="strided"),
    Case(shape=(140,), cols=16_381, residual="bf16"),
    Case(shape=(5,), cols=20_003, residual="fp32", is_rms_norm=True, bias=False),
    Case(shape=(3,), cols=65_536, residual="bf16"),
    Case(shape=(2,), cols=20_000, residual="bf16", x1="bf16", weight1=True, dropout_p=0.5),
    Case(shape=(2,), cols=40_004, dtype="fp32", is_rms_norm=True),
    Case(shape=(2,), cols=131_072, residual="bf16"),
    Case(shape=(2,), cols=140_000, dtype="fp32", is_rms_norm=True),
    Case(shape=(2,), cols=70_001, residual="bf16"),
    Case(x1="bf16", residual="bf16", weight1=True, dropout_p=0.37),
    Case(x1="fp32", dropout_p=0.37, is_rms_norm=True),
    Case(weight1=True, zero_centered_weight=True, out_dtype="fp32"),
    Case(subset=True, residual="fp32", colscale=True, dropout_p=0.37),
    Case(subset=True, is_rms_norm=True, weight1=True),
    Case(dtype="fp32", residual="bf16", weight="fp16", rowscale=True),
    Case(dtype="fp32", offset=1000.0, cols=1024),
    *(Case(residual="bf16", layout=layout, x1="bf16") for layout in ("strided", "transposed", "columns")),
]
DTYPE_FIELDS = "dtype", "residual", "weight", "x1", "out_dtype"
FACTORS = dict(
    shape=[(37,), (3, 11)],
    cols=[24, 100, 256, 768, 1023, 1600, 4096],
    dtype=list(DTYPES),
    residual=["", *DTYPES],
    weight=list(DTYPES),
    x1=["", "bf16", "fp32"],
    bias=[False, True],
    weight1=[False, True],
    rowscale=[False, True],
    colscale=[False, True],
    dropout_p=[0.0, 0.37],
    residual_in_fp32=[False, True],
    is_rms_norm=[False, True],
    zero_centered_weight=[False, True],
    out_dtype=["", *DTYPES],
    layout=["contiguous", "strided", "transposed", "columns"],
)


def has_valid_layout(row):
    return row["layout"] != "transposed" or len(row["shape"]) > 1


SAMPLE = sample(FACTORS, Case, valid=has_valid_layout)


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

X, W = torch.randn(2, 6, 64), torch.ones(64)
BUFFER = torch.empty(2, 6, 64)
LAYER_FUNCTIONS = (
    layer_norm.dropout_add_layer_norm, layer_norm.dropout_add_layer_norm_parallel_residual, layer_norm_fn
)  # fmt: skip
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
            x0, residual, W.to(device), None, p, 1e-5, None, x0_subset, out_subset, 1.5, 9, True,
            return_dropout_mask=with_mask,
        )  # fmt: skip
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
            torch.empty(0, 4, 64, device=device), None, W.to(device), None, 0.0, 1e-5, x0_subset=subset,
            out_subset=subset, out_numrows=8, prenorm=True,
        )  # fmt: skip
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
def test_norm_and_linear(rms, prenorm, residual, bias, rows, device):
    x, residual = torch.randn(2, *rows, 64, device=device)
    inputs = dict(x=x, residual=residual, norm_weight=torch.rand(64, device=device), norm_bias=None,
                  linear_weight=torch.randn(48, 64, device=device), linear_bias=None)  # fmt: skip
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


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("frozen", [False, True])
def test_no_gradient_is_computed_of_a_frozen_linear_layer(frozen, device):
    """As under LoRA: the backward then has one product of matrices, not two."""
    x, linear_weight, linear_bias = X.to(device), torch.randn(8, 64, device=device), torch.randn(8, device=device)

    def gradients(frozen):
        leaves = [t.clone().requires_grad_() for t in (x, W.to(device))]
        trained = [t.clone().requires_grad_(not frozen) for t in (linear_weight, linear_bias)]
        out = layer_norm_linear_fn(*leaves, None, *trained)
        with Products() as products:
            out.square().sum().backward()
        return products.count, [leaf.grad for leaf in leaves], [leaf.grad for leaf in trained]

    count, grads, of_linear = gradients(frozen)
    assert count == (1 if frozen else 2)
    assert all((grad is None) == frozen for grad in of_linear)
    assert_same_but_for_rounding(grads, gradients(False)[1])  # whose kernel adds up in another order
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
    params([
        Case(shape=(40,), dropout_p=0.3, residual="fp32", rowscale=True, colscale=True),
        Case(shape=(40,), is_rms_norm=True),
        Case(shape=(40,), subset=True, residual="bf16", dropout_p=0.3),
        Case(shape=(40,), residual_in_fp32=True, bias=False),
    ]),
)  # fmt: skip
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
        inputs["x0"], inputs["residual"], inputs["weight"], inputs["bias"], options.get("rowscale"), inputs["colscale"],
        *subsets, case.dropout_p, 1e-5, const, out_rows, None, residual_in_fp32=case.residual_in_fp32,
        is_rms_norm=case.is_rms_norm,
    )  # fmt: skip
    assert (x is None) == (case == Case(shape=(40,), is_rms_norm=True))
    assert (dmask is None) == (case.dropout_p == 0)
    x = inputs["x0"] if x is None else x
    assert torch.equal(z, results[0]) and torch.equal(x, results[1])
    torch.testing.assert_close(mu, x.float().mean(-1), rtol=0.02, atol=0.01)
    dx0, dresidual, dgamma, dbeta, _, _, *dcolscale = dropout_layer_norm.dropout_add_ln_bwd(
        dz, dx, x, inputs["x0"] if case.colscale else None, dmask, mu, rsigma, inputs["weight"],
        options.get("rowscale"), inputs["colscale"], *subsets, case.dropout_p, const, len(inputs["x0"]),
        bool(case.residual), is_rms_norm=case.is_rms_norm,
    )  # fmt: skip
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
        incoming[0], None if tied else incoming[1], incoming[-1], x, dmask0, dmask1, mu, rsigma, inputs["weight"],
        inputs["weight1"], case.dropout_p, has_x1, True,
    )  # fmt: skip
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
    "out_numrows is a float": (dict(out_numrows=6.0), TypeError, "out_numrows must be an integer"),
    "residual of fewer rows": (dict(residual=X[:1]), ValueError, "residual must have 12 rows of 64 features"),
    "one row": (dict(x0=X[0, 0]), ValueError, "x0 must have at least two dimensions"),
}


@pytest.mark.parametrize("what", SUBSET_ERRORS)
def test_subset_error(what):
    changes, error, message = SUBSET_ERRORS[what]
    good = dict(x0=X, residual=X, weight=W, bias=W, dropout_p=0.0, epsilon=1e-5, x0_subset=SUBSETS, out_subset=SUBSETS,
                out_numrows=12)  # fmt: skip
    with pytest.raises(error, match=message):
        layer_norm.dropout_add_layer_norm_subset(**(good | changes))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(x=X.double()), TypeError, "x must have dtype"),
        (dict(x1=X[0]), ValueError, "x1 must have shape"),
        (dict(x1=X, rowscale=X[..., 0]), ValueError, "rowscale must be None with x1"),
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
        (dict(dmask_=torch.ones(6, 64, dtype=torch.uint8)), "dmask_ must be given with dropout_p > 0, and only then"),
        (dict(colscale_=W), "x0_ must be given with colscale_, and only then"),
        (dict(mu=mu[:3]), "mu must have shape"),
        (dict(**subsets, x0_numrows=-1), "x0_numrows must be at least 0"),
        (dict(z_subset_=subsets["z_subset_"]), "z_subset_ must be given with x0_subset_, and only then"),
    ):
        arguments = dict(dz=z, dx_=None, x=x, x0_=None, dmask_=None, mu=mu, rsigma=rsigma, gamma=W, rowscale_=None,
                         colscale_=None, x0_subset_=None, z_subset_=None, dropout_p=0.0, rowscale_const=1.0,
                         x0_numrows=6, has_residual=False)  # fmt: skip
        with pytest.raises(ValueError, match=message):
            dropout_layer_norm.dropout_add_ln_bwd(**(arguments | changes))
    with pytest.raises(TypeError, match=r"rsigma must be a torch\.Tensor"):
        dropout_layer_norm.dropout_add_ln_bwd(**(arguments | dict(rsigma=None)))
    with pytest.raises(TypeError, match="x0_numrows must be an integer"):
        dropout_layer_norm.dropout_add_ln_bwd(**(arguments | subsets | dict(x0_numrows=6.0)))
    with pytest.raises(ValueError, match="dz1_ must be given with gamma1_, and only then"):
        dropout_layer_norm.dropout_add_ln_parallel_residual_bwd(
            z, None, None, x, None, None, mu, rsigma, W, W, 0.0, False, False
        )


# What only a kernel can trip over.


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
    host = native.library(pathlib.Path(__file__).parents[1] / "host_probe.cpp", native.HOST)
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
    for threads, vecs, ragged in ((512, 2, False), (256, 4, False), (512, 1, True)):
        assert host.call("find_ring_bytes", threads, vecs, ragged) + 3 * 1024 <= 99 * 1024  # any GPU from sm_80 on


# As in config.h.
ANY, FLOAT16, BFLOAT16, FLOAT32, FLOAT16_STREAM32, BFLOAT16_STREAM32 = range(6)


@pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")
@pytest.mark.parametrize(
    "rows, cols, types, expected",
    [
        (32768, 768, BFLOAT16_STREAM32, (64, 2, 1, 2 * 528)),  # the residual stream of GPT-2: two rounds of 4 blocks
        (32768, 768, BFLOAT16, (64, 2, 1, 2 * 528)),
        (16384, 1024, BFLOAT16, (64, 2, 1, 528)),  # one round of 31 rows
        (10**6, 128, FLOAT16, (8, 16, 1, 4 * 528)),
        (100, 1024, BFLOAT16, (64, 2, 1, 100)),
        (16384, 2048, BFLOAT16, (128, 1, 1, 528)),
        (16384, 2048, ANY, (256, 1, 1, 264)),  # two accesses of 4 elements
        (16384, 4096, BFLOAT16_STREAM32, (256, 1, 1, 264)),
        (16384, 8192, BFLOAT16, (512, 1, 1, 132)),
        (16384, 8192, FLOAT32, (256, 1, 2, 264)),  # a cluster
    ],
)
def test_parts_of_the_backward(rows, cols, types, expected):
    host = native.library(pathlib.Path(__file__).parents[1] / "host_probe.cpp", native.HOST)
    found = torch.zeros(5, dtype=torch.int64)
    host.run("find_bwd_shape", rows, cols, types, 132, found)
    *shape, most = found.tolist()
    assert tuple(shape) == expected


@pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")
def test_memory_of_parts_is_enough_and_small():
    """Rows that one block holds have no more parts than there is memory for, and it is small beside the rows."""
    host = native.library(pathlib.Path(__file__).parents[1] / "host_probe.cpp", native.HOST)
    found = torch.zeros(5, dtype=torch.int64)
    for types, rows, cols in itertools.product(
        range(6), (0, 1, 100, 2000, 16384, 10**6), [*range(70), *range(100, 9000, 77)]
    ):
        host.run("find_bwd_shape", rows, cols, types, 132, found)
        _, _, tiles, parts, most = found.tolist()
        assert (parts <= most or tiles > 1) and most <= min(rows, max(4 * 132, rows // 24))
