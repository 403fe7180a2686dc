"""Norms: their arguments as data, and how results are compared."""

import dataclasses
import zlib

import oracle
import torch
from cases import DTYPES, sample
from compare import assert_error_ratio, unavoidable

from flash_attn._ops import layer_norm as layer_norm_ops

X, W = torch.randn(2, 6, 64), torch.ones(64)
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
    gaps: tuple = (0, 0, 0)  # elements of memory before each row of x0, x1 and residual
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
            "gaps{}.{}.{}".format(*self.gaps) * any(self.gaps),
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

        def matrix(dtype, gap, shift=0.0):
            return self._laid_out(randn(*self.shape, self.cols, dtype=dtype, shift=shift), gap) if dtype else None

        shift = 0.0 if self.zero_centered_weight else 1.0
        x0, x1, residual = map(matrix, (self.dtype, self.x1, self.residual), self.gaps, (self.offset, 0.0, 0.0))
        options = {}
        if self.rowscale:
            options["rowscale"] = (torch.rand(self.shape, device=device, generator=generator) > 0.2).to(x0.dtype) * 1.25
        if self.subset:
            x0_rows, out_rows = (max(subset) for subset in self.subsets())
            x0, residual = x0.flatten(0, -2)[:x0_rows], None if residual is None else residual.flatten(0, -2)
            subsets = (torch.tensor(subset, dtype=torch.int32, device=device) for subset in self.subsets())
            options |= dict(zip(("x0_subset", "out_subset"), subsets), rowscale_const=1.5, out_rows=out_rows)
        tensors = (
            x0,
            x1,
            residual,
            vector(True, shift),
            vector(self.bias, 0),
            vector(self.weight1, shift),
            vector(self.weight1 and self.bias, 0),
            vector(self.colscale, 1),
        )
        return dict(zip(INPUTS, tensors)), options

    def _laid_out(self, x, gap):
        if gap:
            return torch.cat([torch.full_like(x[..., :1], float("nan")).expand(*x.shape[:-1], gap), x], -1)[..., gap:]
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
        *order,
        1e-5,
        case.dropout_p,
        **inputs,
        **options,
        prenorm=True,
        residual_in_fp32=case.residual_in_fp32,
        is_rms_norm=case.is_rms_norm,
        zero_centered_weight=case.zero_centered_weight,
        out_dtype=DTYPES.get(case.out_dtype),
        return_mask=True,
        **more,
    )


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
        keep=[None if mask is None else mask.bool() for mask in masks],
        dropout_p=case.dropout_p,
        is_rms_norm=case.is_rms_norm,
        zero_centered_weight=case.zero_centered_weight,
        h_dtype=h_dtype,
    )


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
        inputs,
        incoming,
    )
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
    *(  # x alone, of all sizes of blocks and more than a block
        Case(shape=(5,), cols=cols, dtype=dtype, weight=weight, bias=bias, is_rms_norm=not bias)
        for cols, dtype, weight, bias in (
            (200, "bf16", "bf16", False),
            (2056, "fp32", "fp32", True),
            (5000, "bf16", "fp32", False),
            (8192, "fp16", "fp16", True),
            (12_288, "bf16", "fp32", True),
            (16_376, "fp16", "fp32", False),
            (40_000, "bf16", "bf16", False),
        )
    ),
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
