"""Gradients of attention with use_exact_gradients, which changes what kernels give (on the CPU: pytest --emulate)."""

import functools
import itertools

import oracle
import pytest
import torch
from cases import DTYPES, Case, cover, params, uncovered
from compare import assert_same_but_for_rounding, largest_error
from features import Featured
from problems import check, cumulative
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flash_attn import _library, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn._ops import flash_attn, flash_attn_features
from flash_attn._reference.attention.options import Features, Options
from flash_attn.precision import use_exact_gradients, uses_exact_gradients


@pytest.fixture(autouse=True)
def exact():
    use_exact_gradients()
    yield
    use_exact_gradients(False)


@pytest.fixture
def kernels(device):
    """For tests that see nothing new where there are no kernels, since out is kept in float32 there."""
    if not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("needs kernels of attention")


def gradients(function, tensors, dout):
    """out and the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


HEAD_DIMS = [(50, 50), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512)]

# ---------------------------------------------------------------------------------------------------------------------
# Errors

FACTORS = dict(
    lengths=[(60, 60), (200, 333), (333, 200), (3, 300), (1, 300), (40, 1), (70, 2)],
    heads=[(4, 4), (6, 2), (4, 1)],
    head_dims=[(64, 0), (128, 0), (50, 0), (96, 0), (192, 128), (256, 0), (320, 64), (512, 0)],
    dtype=["bf16", "fp16"],
    causal=[False, True, "entries"],
    window=[(-1, -1), (20, -1), (0, 0), (7, 9)],
    softcap=[0.0, 2.0],
    alibi=["", "bh"],
    dropout_p=[0.0, 0.17],
    deterministic=[False, True],
    scale_q=[1.0, 4.0, 50.0],
    sink=["", "fp32"],
    ranges=["", "2", "4"],
    bias=["", "", "", "heads"],
    seqused_k=[False, True],
    varlen=[False, True],
    packing=["", "kv", "qkv"],
    dlse=[False, True],
    max_logit=[False, True],
    portable=[False, True],
)
FEW = dict(softcap=0.0, alibi="", dropout_p=0.0, bias="", max_logit=False)  # what the fastest kernels take


def possible(row):
    square = row["lengths"][0] == row["lengths"][1] and row["heads"] == (4, 4)
    return (square or row["packing"] != "qkv") and (row["head_dims"][1] == 0 or not row["packing"])


def make(lengths, heads, head_dims, causal, portable, **rest):
    entries = causal == "entries"
    sizes = dict(head_dim=head_dims[0], head_dim_v=head_dims[1])
    return Featured(4, *lengths, *heads, **sizes, causal=causal is True, entries_causal=entries, **rest)


ROWS = cover(FACTORS, valid=possible)
FEW_ROWS = cover({name: values for name, values in FACTORS.items() if name not in FEW}, valid=possible, seed=1)


def test_sample_has_every_pair_of_values():
    assert not uncovered(ROWS, FACTORS, valid=possible, tied=("lengths", "heads", "head_dims", "packing"))


@pytest.mark.parametrize(
    "case, portable", [(make(**row), row["portable"]) for row in [*ROWS, *(row | FEW for row in FEW_ROWS)]], ids=str
)
def test_sample(case, portable, kernels, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    case.check(torch.device(device))


FEW_KEYS = dict(
    seqlen_k=[1, 2, 3, 64, 300],
    seqlen_q=[3, 130],  # for the kernel that decodes, and for the others
    alpha=[0.0, 0.5, 1.0, 1.5],  # 0: no key is larger than the others
    head_dims=[(64, 64), (72, 72), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512)],
    heads_k=[4, 1],
    causal=[False, True],
    dtype=["bf16", "fp16"],
    portable=[False, True],
)


@pytest.mark.parametrize("row", params(cover(FEW_KEYS)))
def test_rows_in_which_few_keys_have_all_the_weight(row, kernels, device, monkeypatch):
    """Queries are alpha times a key, so that the softmax is saturated, or there are few keys."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(row["portable"])))
    head_dim, head_dim_v = row["head_dims"]
    names = "seqlen_q", "seqlen_k", "heads_k", "causal", "dtype"
    case = Case(head_dim=head_dim, **{name: row[name] for name in names})
    (q, k, _, _), (_, _, v, dout) = case.tensors(device), case.but(head_dim=head_dim_v).tensors(device)
    if row["alpha"]:
        chosen = torch.randint(case.seqlen_k, (case.seqlen_q,), generator=torch.Generator().manual_seed(7))
        q = row["alpha"] * k[:, chosen.to(device)].repeat_interleave(4 // case.heads_k, dim=2) + 0.05 * q

    def attend(*tensors):
        return (*flash_attn_func(*tensors, causal=case.causal, return_lse=True), None)

    check(case, (q, k, v, dout), attend, functools.partial(oracle.attention, **case.options(device)))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("seqlen_q", [3, 130])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.cover(2)
def test_it_is_what_makes_them_exact(head_dims, seqlen_q, dtype, portable, kernels, device, monkeypatch):
    """Where one of 64 keys has nearly all the weight of a row, most of the error is that of a rounded out."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    case = Case(seqlen_q=seqlen_q, head_dim=head_dims[0], dtype=dtype)
    (q, k, _, _), (_, _, v, dout) = case.tensors(device), case.but(head_dim=head_dims[1]).tensors(device)
    q = (16 * head_dims[0] ** -0.5) * k[:, torch.arange(seqlen_q, device=device) % 64] + 0.05 * q
    inputs = q, k, v
    expected = oracle.gradients(oracle.attention, [x.double() for x in inputs], dout)[2]

    def errors(mode):
        use_exact_gradients(mode)
        _, *found = gradients(flash_attn_func, inputs, dout)
        return [largest_error(one, exact) for one, exact in zip(found[:2], expected, strict=False)]

    for exact, rounded in zip(errors(True), errors(False), strict=True):
        assert exact < rounded / 4


# ---------------------------------------------------------------------------------------------------------------------
# The residue


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("seqlen_q, seqlen_k, heads_k", [(130, 1024, 4), (3, 1024, 1), (64, 4096, 2)])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.cover(2)
def test_it_is_what_rounding_takes_off(head_dims, seqlen_q, seqlen_k, heads_k, dtype, portable, device, monkeypatch):
    """Values are small integers and weights 2^-n: the average is exact in float32. Few rows have splits of the keys."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    (head_dim, head_dim_v), options = head_dims, dict(dtype=DTYPES[dtype], device=device)
    q, k = torch.zeros(1, seqlen_q, 4, head_dim, **options), torch.zeros(1, seqlen_k, heads_k, head_dim, **options)
    v = torch.randint(-100, 101, (1, seqlen_k, heads_k, head_dim_v), device=device).to(DTYPES[dtype])
    out, _, _, _, out_lo = torch.ops.flash_attn.fwd_with_residue(q, k, v, None, None, 1.0, -1, -1)
    average = v.float().mean(1, keepdim=True).repeat_interleave(4 // heads_k, dim=2).expand(1, seqlen_q, 4, head_dim_v)
    assert torch.equal(out, average.to(out.dtype))
    assert torch.equal(out_lo, (average - out.float()).to(out.dtype)) and out_lo.any()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("packing", ["", "kv", "qkv"])
def test_it_is_laid_out_like_out(packing, portable, device, monkeypatch):
    """Also for packed tokens, where tokens of no entry have zeros."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    tokens = torch.randint(-100, 101, (150, 3, 4, 64), device=device).bfloat16()
    tokens[:, :2] = 0
    lengths = cumulative([64, 0, 32, 4], device)
    q, k, v = tokens.unbind(1)
    inputs = {"": (q.transpose(0, 1).contiguous().transpose(0, 1), k, v), "kv": (q, tokens[:, 1:], None)}
    results = torch.ops.flash_attn.fwd_with_residue(
        *inputs.get(packing, (tokens, None, None)), None, None, 1.0, -1, -1, lengths, lengths, 64, 64
    )
    out, _, _, _, out_lo = results
    averages = [v[a:b].float().mean(0).expand(b - a, -1, -1) for a, b in itertools.pairwise(lengths)]
    expected = torch.cat([*averages, torch.zeros(50, 4, 64, device=device)])
    assert out_lo.stride() == out.stride()
    assert torch.equal(out, expected.bfloat16())
    assert torch.equal(out_lo, (expected - out.float()).bfloat16())


def test_the_backward_adds_it(device):
    """The gradients for out and out_lo are those for an out in which rounding takes off nothing."""
    q, k, v, dout = Case(dtype="fp16").tensors(device)
    options = Options(0.125, -1, -1, deterministic=True)
    out, lse = torch.ops.flash_attn.fwd(q, k, v, *options)
    half = (out * 0.5).half()

    def backward(out, out_lo):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        softmax_d = torch.ops.flash_attn.bwd(dout, q, k, v, out, lse, None, out_lo, *grads, *options)
        return *grads, softmax_d

    whole, without = backward(half, (out.float() - half.float()).half()), backward(half, None)
    for found, expected in zip(whole, backward(out, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(whole[0], without[0], rtol=0.1)


# ---------------------------------------------------------------------------------------------------------------------
# The switch


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_it_nothing_is_different(head_dim, portable, kernels, device, monkeypatch):
    """With it, out and dv stay what they are; without it, the backward gets out alone."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    *inputs, dout = Case(seqlen_q=130, seqlen_k=200, head_dim=head_dim).tensors(device)
    attend = functools.partial(flash_attn_func, causal=True, deterministic=True)
    out, *exact = gradients(attend, inputs, dout)
    use_exact_gradients(False)
    rounded_out, *rounded = gradients(attend, inputs, dout)
    assert torch.equal(out, rounded_out) and torch.equal(exact[2], rounded[2])
    assert not torch.equal(exact[0], rounded[0]) and not torch.equal(exact[1], rounded[1])
    alone = [torch.empty_like(x) for x in inputs]
    options = Options(head_dim**-0.5, -1, 0, deterministic=True)
    _, lse = torch.ops.flash_attn.fwd(*inputs, *options)
    torch.ops.flash_attn.bwd(dout, *inputs, out, lse, None, None, *alone, *options)
    assert all(torch.equal(one, other) for one, other in zip(rounded, alone, strict=True))


def test_it_is_off_and_can_be_switched():
    use_exact_gradients(False)
    assert flash_attn.exact_gradients is False is uses_exact_gradients()
    use_exact_gradients(1)
    assert uses_exact_gradients() is True


@pytest.mark.parametrize("mode", [None, "yes", torch.ones(1)])
def test_bad_modes(mode):
    with pytest.raises(TypeError, match="mode must be a bool"):
        use_exact_gradients(mode)
    assert uses_exact_gradients()


def test_calls_that_need_no_gradient_store_nothing(device, monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(flash_attn_features.fwd_with_residue, "below_autograd", fail)
    q, k, v, _ = Case().tensors(device)
    flash_attn_func(q, k, v)
    with torch.no_grad():
        flash_attn_func(q.requires_grad_(), k, v)


@pytest.mark.parametrize("case", [Case(seqlen_q=70, head_dim=128), Case(seqlen_q=3, heads_k=1)], ids=str)
def test_graphs(case, device):
    """A compiled function is compiled anew when the switch turns."""
    torch._dynamo.reset()
    *inputs, dout = case.tensors(device)
    attend = functools.partial(flash_attn_func, causal=True, deterministic=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for count, mode in enumerate([True, False], start=1):
        use_exact_gradients(mode)
        assert_same_but_for_rounding(gradients(compiled, inputs, dout), gradients(attend, inputs, dout))
        assert counter.frame_count == count


def test_packed_graphs(device):
    *_, dout = Case(seqlen_q=70, seqlen_k=70).tensors(device)
    qkv = torch.stack(Case(seqlen_q=70, seqlen_k=70).tensors(device)[:3], dim=2)
    compiled = torch.compile(flash_attn_qkvpacked_func, fullgraph=True, backend="aot_eager", dynamic=True)
    found, expected = (gradients(f, [qkv], dout) for f in (compiled, flash_attn_qkvpacked_func))
    assert_same_but_for_rounding(found, expected)


def test_export(device):
    class Attention(torch.nn.Module):
        def forward(self, *inputs):
            return flash_attn_func(*inputs, causal=True)

    inputs = Case().tensors(device)[:3]
    program = torch.export.export(Attention(), inputs)
    assert torch.equal(program.module()(*inputs), Attention()(*inputs))


def test_checkpoints(device):
    *inputs, dout = Case(seqlen_q=70).tensors(device)
    attend = functools.partial(flash_attn_func, causal=True, deterministic=True)
    again = functools.partial(checkpoint, attend, use_reentrant=False)
    for found, expected in zip(gradients(again, inputs, dout), gradients(attend, inputs, dout), strict=True):
        assert torch.equal(found, expected)


def test_second_derivatives_and_transforms(device):
    """They run in plain torch, as without the switch."""
    q, k, v, dout = Case(seqlen_q=20, seqlen_k=30).tensors(device)

    def penalty(q):
        (dq,) = torch.autograd.grad(flash_attn_func(q, k, v), q, dout, create_graph=True)
        return torch.autograd.grad(dq.float().square().sum(), q)[0]

    def loss(q):
        return (flash_attn_func(q, k, v).float() * dout).sum()

    results = []
    for mode in (True, False):
        use_exact_gradients(mode)
        leaf = q.detach().requires_grad_()
        results.append((penalty(leaf), torch.func.grad(loss)(q), torch.func.jvp(loss, (q,), (dout,))[1]))
    torch.testing.assert_close(*results, rtol=0.05, atol=0.01)


def opcheck_arguments(name, device):
    """Inputs of fwd_with_residue and its other arguments."""
    q, k, v, _ = Case(batch=1, seqlen_q=33, seqlen_k=33, dtype="fp16").tensors(device)
    lengths = torch.tensor([0, 20, 33], dtype=torch.int32, device=device)
    options = Options(0.125, -1, 0)
    plain = None, None, *options
    return {
        "dense": (q, k, v, *plain),
        "transposed": (q.transpose(1, 2).contiguous().transpose(1, 2), k, v[..., :24], *plain),
        "packed": (torch.stack([q, k, v], 2), None, None, *plain),
        "varlen": (q[0], torch.stack([k[0], v[0]], 1), None, *plain[:5], lengths, lengths, 20, 20),
        "features": (q, k, v, torch.zeros(4, device=device), None, *options, *Features(attention_chunk=7)[2:]),
        "beyond kernels": (q, k, v, None, q.new_zeros(1, 1, 1, 33, 1), *options, *Features(row_max=True)[2:]),
    }[name]


@pytest.mark.parametrize("name", ["dense", "transposed", "packed", "varlen", "features", "beyond kernels"])
def test_opcheck(name, device):
    suffix = "_reference" * (name == "beyond kernels")
    op = getattr(torch.ops.flash_attn, f"fwd_with_residue{suffix}").default
    torch.library.opcheck(op, opcheck_arguments(name, device))


def test_opcheck_of_backward(device):
    *inputs, dout = Case(seqlen_q=33, heads_k=2).tensors(device)
    options = Options(0.125, -1, 0)
    out, lse, _, _, out_lo = torch.ops.flash_attn.fwd_with_residue(*inputs, None, None, *options)
    grads = [torch.zeros_like(x) for x in inputs]
    arguments = dout, *inputs, out, lse, None, out_lo
    torch.library.opcheck(torch.ops.flash_attn.bwd.default, (*arguments, *grads, *options))
    torch.library.opcheck(torch.ops.flash_attn.bwd_features.default, (*arguments, None, False, None, None, *options))


@pytest.mark.parametrize("change", [lambda x: x[:, :-1], lambda x: x[..., :-1], lambda x: x.float()])
def test_bad_residues(change, kernels, device):
    """Of an op that only autograd calls."""
    *inputs, dout = Case(seqlen_q=33).tensors(device)
    options = Options(0.125, -1, 0)
    out, lse, _, _, out_lo = torch.ops.flash_attn.fwd_with_residue(*inputs, None, None, *options)
    grads = [torch.zeros_like(x) for x in inputs]
    with pytest.raises(RuntimeError, match="out_lo must have"):
        torch.ops.flash_attn.bwd(dout, *inputs, out, lse, None, change(out_lo), *grads, *options)
    assert not any(x.any() for x in grads)


def test_empty_calls(device):
    for sizes in ((0, 5), (5, 0)):
        q, k, v, dout = Case(seqlen_q=sizes[0], seqlen_k=sizes[1]).tensors(device)
        assert all((x == 0).all() for x in gradients(flash_attn_func, (q, k, v), dout))
    q, k, v = (x[0] for x in Case(batch=1, seqlen_q=0, seqlen_k=0).tensors(device)[:3])
    lengths = cumulative([0, 0], device)
    out = flash_attn_varlen_func(q.requires_grad_(), k, v, lengths, lengths, 0, 0)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
