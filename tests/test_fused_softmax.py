"""Scaled, masked softmax: the functions, their gradients, the module that chooses, the errors, traps of kernels."""

import dataclasses
import functools
import types
import zlib

import numpy
import oracle
import pytest
import torch
from cases import DTYPES, laid_out, params, sample
from compare import assert_error_ratio, identical, unavoidable

import fused_softmax_lib
from flash_attn import fused_softmax
from flash_attn._ops import fused_softmax as fused_softmax_ops
from flash_attn.fused_softmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

MASKS = {  # the mask's sizes where the scores have (batch, heads, seqlen_q, seqlen_k); the others are 1
    "none": None,
    "all": (True, True, True, True),
    "heads alike": (True, False, True, True),
    "batch alike": (False, False, True, True),
    "columns": (True, False, False, True),
    "rows": (False, True, True, False),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Scores (batch, heads, seqlen_q, seqlen_k). `str(case)` is its id and seeds its tensors."""

    batch: int = 2
    heads: int = 3
    seqlen_q: int = 17
    seqlen_k: int = 130
    dtype: str = "bf16"
    mask: str = "heads alike"
    causal: bool = False
    scale: float = 1.0
    layout: str = "contiguous"
    mask_dtype: str = "bool"

    def __str__(self):
        parts = [
            f"b{self.batch}-h{self.heads}-q{self.seqlen_q}-k{self.seqlen_k}-{self.dtype}-mask_{self.mask}",
            "causal" * self.causal,
            f"scale{self.scale:g}" * (self.scale != 1),
            self.layout * (self.layout != "contiguous"),
            self.mask_dtype * (self.mask_dtype != "bool"),
        ]
        return "-".join(part for part in parts if part).replace(" ", "_")

    @property
    def shape(self):
        return self.batch, self.heads, self.seqlen_q, self.seqlen_k

    def draw(self, device):
        """Scores, a gradient like them, the mask or None, and all that is left out, as bool of the scores' shape."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))
        x, dy = (4 * torch.randn(2, *self.shape, device=device, generator=generator)).to(DTYPES[self.dtype])
        left_out = torch.zeros(self.shape, dtype=torch.bool, device=device)
        mask, sizes = None, MASKS[self.mask]
        if sizes is not None:
            shape = [size if full else 1 for size, full in zip(self.shape, sizes, strict=True)]
            mask = torch.rand(shape, device=device, generator=generator) < 0.4
            mask[-1, -1, -1] = True
            left_out = left_out | mask
            mask = mask if self.mask_dtype == "bool" else 2 * mask.to(torch.uint8)
        if self.causal:
            left_out = left_out | torch.ones(self.shape[2:], dtype=torch.bool, device=device).triu(1)
        return laid_out(x, self.layout), dy, mask, left_out


def expected(x, dy, left_out, scale):
    leaf = x.detach().clone().requires_grad_()
    y = oracle.masked_softmax(leaf, scale, left_out)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


def in_steps(x, dy, left_out, scale):
    """The same maths with the roundings that no implementation avoids: y is stored before the gradient needs it."""
    y = oracle.masked_softmax(x.float(), scale, left_out).to(x.dtype)
    product = y.float() * dy.float()
    return y, (scale * (product - y.float() * product.sum(dim=-1, keepdim=True))).to(x.dtype)


def assert_matches(found, x, dy, left_out, scale):
    exact = expected(x.double(), dy.double(), left_out, scale)
    plain = in_steps(x, dy, left_out, scale)
    for name, ours, right, baseline in zip(("y", "dx"), found, exact, plain, strict=True):
        assert_error_ratio(ours, right, baseline, plus=unavoidable(right, ours.dtype, terms=16), name=name)
        assert not ours[left_out].any(), f"{name} is not 0 where the scores are left out"


EDGES = [
    Case(1, 1, 1, 1),
    Case(seqlen_k=1, mask="rows"),
    Case(1, 2, 3, 9000, scale=0.125),  # longer than the original's rows
    Case(1, 1, 3, 70_001, dtype="fp32"),
    Case(2, 2, 5, 4096, dtype="fp16", mask="all"),
    Case(1, 2, 300, 300, mask="none", causal=True),
    Case(1, 1, 1030, 1030, mask="columns", causal=True, dtype="fp16"),
    Case(1, 2, 1021, 1021, mask="heads alike", causal=True),  # rows that start anywhere, and masks elsewhere
    Case(2, 2, 5, 2047, mask="all"),
    Case(2, 1, 9, 2047, dtype="fp32", mask="all"),
    Case(1, 1, 17, 15, mask="all"),  # no aligned access lies in some of the rows
    Case(1, 1, 3, 16384, mask="none"),  # held in registers, both ways
    Case(1, 1, 9, 16383, dtype="fp16"),
    Case(1, 1, 3, 40_000, mask="all"),  # not held
    Case(1, 1, 3, 40_001, dtype="fp16", mask="none"),
    Case(scale=-2.0),
    Case(scale=0.0),
]
FACTORS = dict(
    batch=[1, 3],
    heads=[1, 2],
    seqlen=[(1, 7), (5, 33), (9, 64), (4, 257), (33, 33), (3, 1100), (64, 64)],
    dtype=["fp32", "fp16", "bf16"],
    mask=list(MASKS),
    causal=[False, True],
    scale=[1.0, 0.3],
    layout=["contiguous", "bhsd", "sliced", "last_dim_strided"],
    mask_dtype=["bool", "uint8"],
)


def make_case(seqlen, **options):
    return Case(seqlen_q=seqlen[0], seqlen_k=seqlen[1], **options)


def fits(row):
    return not row["causal"] or row["seqlen"][0] == row["seqlen"][1]


CASES = params(EDGES) + [param for param in sample(FACTORS, make_case, valid=fits) if param.id not in map(str, EDGES)]


def softmax(case, x, mask):
    """The public function for the case; with both a mask and causal, the module."""
    if not case.causal:
        return scaled_masked_softmax(x, mask, case.scale)
    if mask is None:
        return scaled_upper_triang_masked_softmax(x, None, case.scale)
    return FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, True, case.scale)(x, mask)


@pytest.mark.parametrize("case", CASES)
def test_softmax_and_gradient(case, device):
    x, dy, mask, left_out = case.draw(device)
    before = x.clone()
    y = softmax(case, x.requires_grad_(), mask)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.dtype == dx.dtype == x.dtype
    assert identical(x, before)
    assert_matches((y.detach(), dx), before, dy, left_out, case.scale)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 2)])
def test_causal_with_any_leading_dimensions(leading, device):
    x = torch.randn(*leading, 20, 20, device=device)
    y = scaled_upper_triang_masked_softmax(x, "not looked at", 0.5)
    above = torch.ones(20, 20, dtype=torch.bool, device=device).triu(1)
    torch.testing.assert_close(y, oracle.masked_softmax(x, 0.5, above.expand_as(x)))
    assert identical(fused_softmax.ScaledUpperTriangMaskedSoftmax.apply(x, 0.5), y)


def test_masks_leave_out_whatever_the_scores_are(device):
    """Also scores below the -10000 that others put in the place of what is masked; NaN stays where it is."""
    x = torch.tensor([[-20000.0, -30000.0, float("nan"), 40000.0]], device=device).expand(1, 1, 3, 4).contiguous()
    x[0, 0, 1] = float("-inf")
    x[0, 0, 2, 0] = float("nan")
    mask = torch.tensor([False, False, True, True], device=device).view(1, 1, 1, 4)
    y = scaled_masked_softmax(x, mask, 1.0)[0, 0]
    assert y[0].tolist() == [1, 0, 0, 0] and y[1].tolist() == [0, 0, 0, 0]
    assert y[2].isnan()[:2].all()


def test_what_lies_above_the_diagonal_is_not_looked_at(device):
    x, dy = torch.randn(2, 1, 40, 40, device=device)
    above = torch.ones(40, 40, dtype=torch.bool, device=device).triu(1)
    right = [scaled_upper_triang_masked_softmax(x, None, 1.0)]
    right.append(fused_softmax_ops.bwd(dy, right[0], 1.0, True))
    x[0, above], dy[0, above] = float("nan"), float("inf")
    y = scaled_upper_triang_masked_softmax(x.requires_grad_(), None, 1.0)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert identical(y, right[0]) and identical(dx, right[1])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    y = scaled_masked_softmax(x, mask, 1.0)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert scaled_upper_triang_masked_softmax(x[..., :0, :0], None, 1.0).numel() == 0


# The module that chooses.


def fill(scores, mask):
    return scores.masked_fill(mask, -10000.0)


OTHER_ENUM = types.SimpleNamespace(name="causal")  # of another package


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("kind", [AttnMaskType.padding, AttnMaskType.causal, OTHER_ENUM])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_module(masked, scale, kind, fusion, device):
    case = Case(seqlen_q=40, seqlen_k=40, mask="heads alike" if masked else "none", causal=kind.name == "causal")
    x, _, mask, left_out = case.draw(device)
    left_out[:, :, 0, 0] = False  # -10000 everywhere is no empty row
    if masked:
        mask[:, :, 0, 0] = False
        mask[-1, -1, -1, 0], left_out[-1, :, -1, 0] = False, False
    module = FusedScaleMaskSoftmax(False, True, kind, fusion, fill, True, scale)
    assert module.is_kernel_available(mask, *x.shape) == (fusion and (case.causal or masked))
    y = module(x, mask)
    right = oracle.masked_softmax(x.double(), scale or 1.0, left_out)
    assert_error_ratio(y, right, right.to(x.dtype), name="y")


def test_module_without_a_kernel_for_the_shape(device):
    x = torch.randn(1, 2, 3, 5, device=device)
    module = FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, fill, False, None)
    assert not module.is_kernel_available(None, *x.shape)
    above = torch.ones(3, 5, dtype=torch.bool, device=device).triu(1)
    torch.testing.assert_close(module(x, None), oracle.masked_softmax(x, 1.0, above.expand_as(x)))


def test_scores_beyond_16_bits(device):
    """Scaled they exceed what float16 holds, with fusion and without."""
    x = torch.tensor([300.0, 300.0, 299.0, 0.0], device=device).half().view(1, 1, 1, 4)
    for fusion in (False, True):
        module = FusedScaleMaskSoftmax(True, False, AttnMaskType.padding, fusion, fill, True, 300.0)
        probs = module(x, torch.zeros(1, 1, 1, 4, dtype=torch.bool, device=device))
        assert probs.flatten().tolist() == [0.5, 0.5, 0.0, 0.0]


# Graphs, fakes, signatures, the functions of fused_softmax_lib.


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", params([Case(), Case(seqlen_q=9, seqlen_k=9, mask="none", causal=True)]))
def test_compiled(case, backend, device):
    x, dy, mask, _ = case.draw(device)

    def run(function):
        leaf = x.clone().requires_grad_()
        y = function(case, leaf, mask)
        return y.detach(), *torch.autograd.grad(y, leaf, dy)

    for found, right in zip(run(torch.compile(softmax, fullgraph=True, backend=backend)), run(softmax), strict=True):
        assert identical(found, right)


@pytest.mark.parametrize("case", params([Case(), Case(mask="none"), Case(layout="bhsd")]))
def test_opcheck(case, device):
    x, dy, mask, _ = case.draw(device)
    torch.library.opcheck(fused_softmax_ops.fwd.default, (x.clone().requires_grad_(), mask, 0.5, False))
    torch.library.opcheck(fused_softmax_ops.fwd.default, (x, mask, 0.5, False))
    y = x.softmax(dim=-1)
    torch.library.opcheck(fused_softmax_ops.bwd.default, (dy, y, 0.5, False))
    torch.library.opcheck(fused_softmax_ops.bwd.default, (*(each.mT.contiguous().mT for each in (dy, y)), 0.5, False))


def test_meta():
    x = torch.empty(2, 3, 4, 4, device="meta")
    assert scaled_masked_softmax(x, None, 1.0).shape == x.shape
    assert scaled_upper_triang_masked_softmax(x, None, 1.0).shape == x.shape


def test_shim(device):
    x, dy, mask, left_out = Case(dtype="fp16").draw(device)
    y = fused_softmax_lib.scaled_masked_softmax_forward(x.requires_grad_(), mask, 0.5)
    dx = fused_softmax_lib.scaled_masked_softmax_backward(dy, y, 0.5)
    assert_matches((y, dx), x.detach(), dy, left_out, 0.5)
    x, dy, _, left_out = Case(1, 6, 40, 40, mask="none", causal=True).draw(device)
    y = fused_softmax_lib.scaled_upper_triang_masked_softmax_forward(x[0], 0.5)
    dx = fused_softmax_lib.scaled_upper_triang_masked_softmax_backward(dy[0], y, 0.5)
    assert_matches((y, dx), x[0], dy[0], left_out[0], 0.5)
    with pytest.raises(ValueError, match="softmax_results must have as many rows as columns, found shape"):
        fused_softmax_lib.scaled_upper_triang_masked_softmax_backward(dy[0, :, 1:], y[:, 1:], 0.5)


@pytest.mark.parametrize(("columns", "rows"), [(1, 256), (20, 8), (32, 8), (33, 8), (128, 8), (129, 4), (8192, 4)])
def test_batch_per_block(columns, rows):
    """A formula that callers compare their shapes with."""
    assert FusedScaleMaskSoftmax.get_batch_per_block(5, columns, 2, 3) == rows
    assert fused_softmax_lib.scaled_masked_softmax_get_batch_per_block(5, columns, 2, 3) == rows


def test_the_function_of_autograd_is_the_public_one():
    assert fused_softmax.ScaledMaskedSoftmax.apply is scaled_masked_softmax


X, MASK = torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 4, 5, dtype=torch.bool)
ERRORS = {
    "inputs are no tensor": (dict(inputs=[1.0]), TypeError, "inputs must be a torch.Tensor"),
    "inputs are float64": (dict(inputs=X.double()), TypeError, "inputs must have dtype"),
    "inputs have three dimensions": (dict(inputs=X[0]), ValueError, "inputs must have 4 dimensions"),
    "mask is float": (dict(mask=MASK.float()), TypeError, "mask must have dtype"),
    "mask has three dimensions": (dict(mask=MASK[0]), ValueError, "mask must have 4 dimensions"),
    "mask of another shape": (dict(mask=MASK[:, :, :2]), ValueError, r"mask must have shape .*, found \(2, 1, 2, 5\)"),
    "mask on another device": (dict(mask=MASK.to("meta")), ValueError, "mask must be on cpu"),
    "scale is text": (dict(scale="1"), TypeError, "scale must be a real number"),
    "scale is infinite": (dict(scale=float("inf")), ValueError, "scale must be finite"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    changes, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        scaled_masked_softmax(**dict(dict(inputs=X, mask=MASK, scale=1.0), **changes))


def test_scales_that_are_odd_but_legal():
    """Tensors without dimensions are numbers; but a scale that is learned would not be."""
    x, dy = torch.randn(2, 2, 3, 4, 5)
    for odd in (torch.tensor(0.5), numpy.float32(0.5)):
        assert torch.equal(scaled_masked_softmax(x, MASK, odd), scaled_masked_softmax(x, MASK, 0.5))
        backward = fused_softmax_lib.scaled_masked_softmax_backward
        assert torch.equal(backward(dy, x, odd), backward(dy, x, 0.5))
    with pytest.raises(ValueError, match="scale must not require grad, since no gradient is computed for it"):
        scaled_masked_softmax(x, MASK, torch.tensor(0.5, requires_grad=True))


def test_errors_of_the_others():
    module = functools.partial(FusedScaleMaskSoftmax, mask_func=fill, scaled_masked_softmax_fusion=True)
    good = dict(
        input_in_fp16=True, input_in_bf16=False, attn_mask_type=AttnMaskType.causal, softmax_in_fp32=True, scale=1
    )
    for call, error, message in (
        (lambda: scaled_upper_triang_masked_softmax(X, None, 1.0), ValueError, "seqlen_q must be seqlen_k = 5"),
        (lambda: scaled_upper_triang_masked_softmax(X[0, 0, 0], None, 1.0), ValueError, "dimensions of inputs"),
        (lambda: scaled_upper_triang_masked_softmax(None, None, 1.0), TypeError, "inputs must be a torch.Tensor"),
        (lambda: module(**good | dict(input_in_bf16=True)), ValueError, "must not both be true"),
        (lambda: module(**good | dict(softmax_in_fp32=False)), ValueError, "softmax_in_fp32 must be true"),
        (lambda: module(**good | dict(attn_mask_type="causal")), ValueError, "attn_mask_type must be"),
        (lambda: module(**good)(X[0], None), ValueError, "input must have 4 dimensions"),
        (lambda: fused_softmax_lib.scaled_masked_softmax_backward(X[0], X, 1.0), ValueError, "output_grads must have"),
        (lambda: fused_softmax_lib.scaled_masked_softmax_backward(X.half(), X, 1.0), TypeError, "output_grads must"),
    ):
        with pytest.raises(error, match=message):
            call()


# What only a kernel can trip over.


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 1, 2**31 // 100 + 5, 100), (1, 1, 3, 2**30 - 9)])
def test_more_elements_than_32_bits_count(shape, device, memory_guard):
    memory_guard(8 * shape[2] * shape[3])
    x = torch.randn(1, 1, 1, shape[3], device=device).bfloat16().expand(shape).contiguous()
    y = scaled_masked_softmax(x, None, 1.0)
    right = x[0, 0, 0].double().softmax(dim=-1)
    for row in (0, shape[2] - 1):
        torch.testing.assert_close(y[0, 0, row].double(), right, rtol=1e-2, atol=1e-12)
    dx = fused_softmax_ops.bwd(x, y, 1.0, False)
    torch.testing.assert_close(dx[0, 0, -1], dx[0, 0, 0])
    assert dx[0, 0, 0].any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [3, 64, 259, 2048])
def test_alignment(dtype, shift, columns, device):
    case = Case(seqlen_k=columns, dtype=dtype)
    x, dy, mask, _ = case.draw(device)
    right = scaled_masked_softmax(x, mask, 1.0)
    shifted = torch.zeros(x.numel() + shift, device=device, dtype=x.dtype)[shift:].view_as(x).copy_(x)
    torch.testing.assert_close(scaled_masked_softmax(shifted, mask, 1.0), right)
    y = shifted.copy_(right)
    torch.testing.assert_close(fused_softmax_ops.bwd(dy, y, 1.0, False), fused_softmax_ops.bwd(dy, right, 1.0, False))


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_heads_take_turns_where_they_share_a_large_mask(causal, device):
    """Rows are then taken in another order than where each head has a mask of its own."""
    x, mask = torch.randn(2, 3, 2100, 2100, device=device).half(), torch.rand(2, 1, 2100, 2100, device=device) < 0.3
    alone = mask.expand(x.shape).contiguous()
    assert identical(fused_softmax_ops.fwd(x, mask, 0.5, causal), fused_softmax_ops.fwd(x, alone, 0.5, causal))


@pytest.mark.cuda
@pytest.mark.parametrize("shift", range(1, 8))
def test_alignment_of_masks(shift, device):
    x, mask = torch.randn(1, 2, 3, 520, device=device), torch.rand(1, 1, 3, 520, device=device) < 0.5
    shifted = torch.ones(mask.numel() + shift, device=device, dtype=torch.bool)[shift:].view_as(mask).copy_(mask)
    assert identical(scaled_masked_softmax(x, shifted, 1.0), scaled_masked_softmax(x, mask, 1.0))


@pytest.mark.cuda
def test_other_stream(device):
    x = torch.randn(8, 8, 512, 512, device=device, dtype=torch.bfloat16)
    right = scaled_masked_softmax(x, None, 1.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would be done before the copy below begins
        late = torch.zeros_like(x).copy_(x)
        y = scaled_masked_softmax(late, None, 1.0)
    stream.synchronize()
    assert identical(y, right)


@pytest.mark.multi_gpu
def test_device_that_is_not_current():
    x, dy, mask, left_out = Case().draw("cuda:1")
    with torch.cuda.device(0):
        y = scaled_masked_softmax(x.requires_grad_(), mask, 1.0)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert_matches((y.detach(), dx), x.detach(), dy, left_out, 1.0)


@pytest.mark.cuda
def test_kernel_refuses_what_does_not_fit(device):
    """The ops themselves, called around the checks in Python, must not reach memory that is not their own."""
    x, mask = X.to(device), MASK.to(device)
    for arguments, message in (
        ((x[0, 0, 0], None, 1.0, False), "x must have"),
        ((x.double(), None, 1.0, False), "x must have dtype"),
        ((x, mask[0], 1.0, False), "mask must have"),
        ((x, mask[:, :, :2], 1.0, False), "mask must have"),
        ((x, mask.half(), 1.0, False), "mask must have dtype"),
        ((x, MASK, 1.0, False), "mask must be on cuda:.*, found it on cpu"),
        ((x, None, 1.0, True), "causal"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fused_softmax_ops.fwd.default(*arguments)
    for arguments, message in (
        ((x[:1], x, 1.0, False), "dy must have shape"),
        ((x.half(), x, 1.0, False), "dy must have dtype"),
        ((x, x.double(), 1.0, False), "y must have dtype"),
        ((x, x, 1.0, True), "causal"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fused_softmax_ops.bwd.default(*arguments)
