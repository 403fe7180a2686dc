"""dk and dv in float32 beside queries of 16 bits, and added to what is there: the sums of callers with several calls.

In the kernels on a GPU, or emulated with --emulate.
"""

import oracle
import pytest
import torch
from cases import DTYPES, Case
from compare import assert_error_ratio, rms_error

from flash_attn import masks
from flash_attn._errors import ArgumentError, ArgumentTypeError
from flash_attn._ops import flash_attn
from flash_attn._ops.flash_attn_features import FeatureArguments

BASE = Case(batch=2, seqlen_q=150, seqlen_k=330, heads_k=2, causal=True)
FEW_KEYS = BASE.but(batch=1, seqlen_q=1536, seqlen_k=60, heads_k=1, causal=False)  # which several blocks share
CASES = {
    "64": BASE,
    "128": BASE.but(head_dim=128),
    "192": BASE.but(head_dim=192, dtype="fp16"),
    "256, a window": BASE.but(head_dim=256, window=(60, -1)),
    "512": BASE.but(head_dim=512),
    "40 of 64": BASE.but(head_dim=40, heads_k=4),
    "33, not aligned": BASE.but(head_dim=33),
    "strided": BASE.but(head_dim=128, layout="bhsd"),
    "softcap": BASE.but(head_dim=128, softcap=2.0),
    "softcap of 256": BASE.but(head_dim=256, softcap=2.0),
    "dropout": BASE.but(head_dim=128, dropout_p=0.3),
    "few keys": FEW_KEYS.but(head_dim=128),
    "few keys of 256": FEW_KEYS.but(head_dim=256),
    "no rows": BASE.but(seqlen_q=0),
    "used": BASE.but(head_dim=128),
    "few used": FEW_KEYS.but(batch=2),
    "ranges": BASE.but(batch=1, head_dim=128, causal=False),
    "packed": BASE.but(batch=1, head_dim=64),
    "packed 64, no mask": BASE.but(batch=1, head_dim=64, causal=False),
    "packed 96": BASE.but(batch=1, head_dim=96),
    "packed 128": BASE.but(batch=1, head_dim=128),
    "deterministic": BASE.but(head_dim=128, deterministic=True),
}


def call_of(name, device):
    """(q, k, v, dout), which keys count, a bool tensor (batch, keys), and the keywords of forward and backward."""
    case = CASES[name]
    *inputs, dout = case.tensors(device)
    live = torch.ones(case.batch, case.seqlen_k, dtype=torch.bool, device=device)
    options = dict(softcap=case.softcap, dropout_p=case.dropout_p, deterministic=case.deterministic)
    given = FeatureArguments()
    if "used" in name:
        used = torch.tensor([case.seqlen_k // 2, 0], dtype=torch.int32, device=device)
        live = torch.arange(case.seqlen_k, device=device) < used[:, None]
        given = FeatureArguments(seqused_k=used)
    if name == "ranges":
        lengths = torch.tensor([0, 100, 150], device=device)
        given = FeatureArguments(key_ranges=masks.documents(lengths, case.seqlen_q))
        live = torch.arange(case.seqlen_k, device=device)[None] < case.seqlen_q
    if name == "packed":  # and keys after the last entry
        inputs, dout, live = [x[0] for x in inputs], dout[0], torch.arange(case.seqlen_k, device=device) < 300
        options |= dict(
            cu_seqlens_q=torch.tensor([0, 90, 90, 150], dtype=torch.int32, device=device),
            cu_seqlens_k=torch.tensor([0, 200, 220, 300], dtype=torch.int32, device=device),
            max_seqlen_q=90,
            max_seqlen_k=200,
        )
    return case, (*inputs, dout), live, given, options


def gradients(name, device, dtype, accumulate=False, into=None):
    """dq, dk and dv of a case; `dtype`: of dk and dv, which hold NaN before unless they are given as `into`."""
    case, (q, k, v, dout), live, given, options = call_of(name, device)
    scores = None, case.causal, case.window
    torch.manual_seed(3)
    out, lse, _, rng_state, _ = flash_attn.forward(q, k, v, *scores, False, given._replace(return_lse=True), **options)
    dq = torch.full_like(q, float("nan"))
    dk, dv = into or (torch.full_like(x, float("nan"), dtype=dtype) for x in (k, v))
    flash_attn.backward(
        dout, q, k, v, out, lse, dq, dk, dv, *scores, rng_state, None, given, accumulate=accumulate, **options
    )
    return dq, dk, dv, live


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.same_on_cpu("portable")
def test_sums(name, portable, device, monkeypatch):
    """Float32 gradients round to those of 16 bits, bit for bit; and keys that do not count add nothing."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    _, *rounded, _ = gradients(name, device, DTYPES[CASES[name].dtype])
    _, *exact, live = gradients(name, device, torch.float32)
    before = [torch.randn(x.shape, device=device) for x in exact]
    _, *added, _ = gradients(name, device, torch.float32, True, [x.clone() for x in before])
    for short, x, start, total in zip(rounded, exact, before, added, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x.to(short.dtype), short)
        assert x[live].numel() == 0 or name == "no rows" or (x[live].to(short.dtype) != x[live]).any()
        torch.testing.assert_close(
            total, start + x, rtol=1e-6, atol=1e-6
        )  # the last product and the sum may be one step
        assert (x[~live] == 0).all() and torch.equal(total[~live], start[~live])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("portable")
def test_sums_of_parts_of_the_rows(head_dim, portable, device, monkeypatch):
    """Two calls for a part of the rows each are as exact as one call for all of them, whose gradients are rounded."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q, k, v, dout = BASE.but(head_dim=head_dim, causal=False).tensors(device)
    exact = oracle.gradients(oracle.attention, [x.double() for x in (q, k, v)], dout, None)[2]
    plain = oracle.gradients(oracle.attention, [q, k, v], dout, None)[2]
    out, lse, *_ = flash_attn.forward(q, k, v, None, False, (-1, -1), False, FeatureArguments(return_lse=True))
    one, several = (
        [torch.empty_like(x) for x in (q, k, v)],
        [torch.empty_like(q), *(torch.empty(x.shape) for x in (k, v))],
    )
    several[1:] = [x.to(device) for x in several[1:]]
    flash_attn.backward(dout, q, k, v, out, lse, *one, None, False, (-1, -1))
    for rows in (slice(0, 100), slice(100, 150)):
        part = [x[:, rows].contiguous() for x in (dout, q, out)]
        flash_attn.backward(
            *part[:2], k, v, part[2], lse[:, :, rows].contiguous(), several[0][:, rows], *several[1:],
            None, False, (-1, -1), accumulate=rows.start > 0,
        )  # fmt: skip
    for name, found, rounded, *others in zip("qkv", several, one, exact, plain, strict=True):
        assert_error_ratio(found, *others, name=f"d{name}")
        assert rms_error(found, others[0]) <= 1.01 * rms_error(rounded, others[0]), name


@pytest.mark.parametrize(
    ("name", "has_sink", "exact"),
    [("64", False, True), ("128", True, False), ("packed", True, True), ("dropout", False, False)],
)
def test_autograd(name, has_sink, exact, device, monkeypatch):
    """Keys and values that come in float32 give the same bits; their gradients are those of 16 bits before rounding."""
    monkeypatch.setattr(flash_attn, "exact_gradients", exact)
    case, (q, k, v, dout), _, given, options = call_of(name, device)
    found = []
    for in_float in (False, True):
        dtype = torch.float32 if in_float else q.dtype
        leaves = [x.to(dtype).requires_grad_() for x in (k, v)]
        leaves += [q.detach().requires_grad_()]
        leaves += [torch.ones(q.shape[-2], device=device).requires_grad_()] if has_sink else []
        terms = given._replace(learnable_sink=leaves[3] if has_sink else None, return_lse=True)
        torch.manual_seed(3)
        out, lse, *_ = flash_attn.forward(
            leaves[2], *leaves[:2], None, case.causal, case.window, False, terms, None, in_float, **options
        )
        grads = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)), create_graph=in_float)
        found.append([*(x.detach() for x in grads), out, lse])
    for x in grads[:2]:
        assert x.dtype == torch.float32 and not torch.equal(x, x.to(q.dtype))
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(*found, strict=True))
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(grads[2].sum(), leaves[2])


def test_errors(device):
    q, k, v, dout = BASE.tensors(device)
    out, lse, *_ = flash_attn.forward(q, k, v, None, True, (-1, -1), False, FeatureArguments(return_lse=True))
    for dtypes, accumulate, match in [
        ((q.dtype, q.dtype), True, "dk must have dtype torch.float32, found torch.bfloat16"),
        ((torch.float32, q.dtype), False, "dv must have dtype torch.float32, found torch.bfloat16"),
        ((q.dtype, torch.float32), False, "dv must have dtype torch.bfloat16, found torch.float32"),
        ((torch.float16, q.dtype), False, "dk must have dtype torch.bfloat16 or torch.float32, found torch.float16"),
    ]:
        sums = [torch.zeros_like(x, dtype=dtype) for x, dtype in zip((k, v), dtypes, strict=True)]
        with pytest.raises((ArgumentError, ArgumentTypeError), match=match):
            flash_attn.backward(
                dout, q, k, v, out, lse, torch.empty_like(q), *sums, None, True, (-1, -1), accumulate=accumulate
            )
        assert all((x == 0).all() for x in sums)
    for tensors, match in [
        ((q.float(), k.float(), v.float()), "q must have dtype torch.float16 or torch.bfloat16, found torch.float32"),
        ((q, k.float(), v), "v must have dtype torch.float32, found torch.bfloat16"),
    ]:
        with pytest.raises(ArgumentTypeError, match=match):
            flash_attn.forward(*tensors, None, True, (-1, -1), False, FeatureArguments(), None, True)
    apart = torch.zeros(*k.shape[:-1], 2 * k.shape[-1], device=device)[..., ::2]
    with pytest.raises(ArgumentError, match=r"dk.stride\(-1\) must be 1 where it is float32, found 2"):
        flash_attn.backward(
            dout, q, k, v, out, lse, torch.empty_like(q), apart, torch.zeros_like(apart), None, True, (-1, -1)
        )


@pytest.mark.parametrize("accumulate", [False, True])
def test_opcheck(accumulate, device):
    from flash_attn._reference.attention.options import Options

    q, k, v, dout = (x[:1, :20] for x in BASE.tensors(device))
    out, lse, *_ = flash_attn.forward(q, k, v, None, True, (-1, -1), False, FeatureArguments(return_lse=True))
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
    options = *Options(0.125, -1, 0), accumulate
    arguments = dout, q, k, v, out, lse, None, None, torch.empty_like(q), *sums, *options
    torch.library.opcheck(torch.ops.flash_attn.bwd.default, arguments)


def test_opcheck_of_features(device):
    """Whose gradients are new tensors, also of keys with other strides."""
    from flash_attn._reference.attention.options import Features, Options

    q, k, v, dout = (torch.randn(2, 2, 8, 16, device=device).bfloat16().transpose(1, 2) for _ in range(4))
    given = FeatureArguments(torch.zeros(2, device=device), return_lse=True)
    out, lse, *_ = flash_attn.forward(q, k, v, None, True, (-1, -1), False, given)
    rest = given.learnable_sink, None, *Options(0.25, -1, 0), *Features()[2:], True
    arguments = dout, q, k, v, out, lse, None, None, None, False, *rest
    torch.library.opcheck(torch.ops.flash_attn.bwd_features.default, arguments)


@pytest.mark.parametrize(("dk", "dv", "accumulate"), [("b", "b", True), ("f", "b", False), (None, None, True)])
def test_the_op_refuses_what_kernels_refuse(dk, dv, accumulate):
    from flash_attn._reference.attention.options import Options

    q, k, v, dout = (x[:1, :20] for x in BASE.tensors(torch.device("cpu")))
    out, lse, *_ = flash_attn.forward(q, k, v, None, True, (-1, -1), False, FeatureArguments(return_lse=True))
    dtypes = {"b": torch.bfloat16, "f": torch.float32}
    sums = [None if name is None else torch.zeros_like(k, dtype=dtypes[name]) for name in (dk, dv)]
    with pytest.raises(ValueError, match=r"dk and dv must be float32 with accumulate|dv must have the dtype of dk"):
        torch.ops.flash_attn.bwd(
            dout, q, k, v, out, lse, None, None, torch.empty_like(q), *sums, *Options(0.125, -1, 0), accumulate
        )
