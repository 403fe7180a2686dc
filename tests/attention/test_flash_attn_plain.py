"""Calls without options, which take a short way to the kernels (`plain_forward` and `plain_decode`)."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import _library, flash_attn_func, flash_attn_with_kvcache
from flash_attn._ops import flash_attn as ops


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


def tensors(*shapes, dtype, device, **options):
    return [torch.randn(shape, dtype=dtype, device=device, **options) for shape in shapes]


def inputs(dtype, device, seqlen=70, heads_k=2, head_dim_v=48, **options):
    """Queries and keys with a head_dim of 48, and values."""
    keys = (2, seqlen, heads_k)
    return tensors((2, seqlen, 4, 48), (*keys, 48), (*keys, head_dim_v), dtype=dtype, device=device, **options)


@pytest.fixture
def short(device, monkeypatch):
    """Makes calls fail that do not take the short way."""
    if not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("plain calls differ only where there are kernels")

    def fail(*args, **options):
        raise AssertionError("this call is plain")

    def forbid():
        monkeypatch.setattr(ops, "forward", fail)
        monkeypatch.setattr(ops, "decode", fail)

    return forbid


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("head_dim_v", [48, 32])
def test_forward(head_dim_v, scale, causal, dtype, short, device):
    q, k, v = inputs(dtype, device, head_dim_v=head_dim_v)
    expected, _ = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    short()
    assert torch.equal(flash_attn_func(q, k, v, softmax_scale=scale, causal=causal), expected)


def test_gradients(dtype, short, device):
    leaves = inputs(dtype, device, requires_grad=True)
    expected, _ = flash_attn_func(*leaves, causal=True, deterministic=True, return_lse=True)
    dout = torch.randn_like(expected)
    short()
    out = flash_attn_func(*leaves, causal=True)
    assert torch.equal(out, expected)
    grads, exact = (torch.autograd.grad(each, leaves, dout) for each in (out, expected))
    for found, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_only_some_gradients(dtype, short, device):
    q, k, v = inputs(dtype, device)
    short()
    out = flash_attn_func(q, k.requires_grad_(), v)
    out.sum().backward()
    assert k.grad is not None and q.grad is v.grad is None
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad


def test_strides_of_gradients_and_outputs(dtype, short, device):
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(dtype, device)]
    short()
    out = flash_attn_func(*leaves)
    assert out.stride() == leaves[0].stride()
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert [x.stride() for x in grads] == [x.stride() for x in leaves]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("lengths", [None, [40, 7]])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_decode(rows, lengths, paged, dtype, short, device):
    cache = (6, 16, 2, 48) if paged else (2, 48, 2, 48)
    q, *caches = tensors((2, rows, 4, 48), cache, cache, dtype=dtype, device=device)
    options = dict(causal=True)
    if lengths is not None:
        options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if paged:
        options["block_table"] = torch.tensor([[0, 3, 5], [1, 4, 2]], dtype=torch.int32, device=device)
    expected, _ = flash_attn_with_kvcache(q, *caches, **options, return_softmax_lse=True)
    short()
    assert torch.equal(flash_attn_with_kvcache(q, *caches, **options), expected)


def test_keys_in_splits(dtype, short, device):
    """Several thread blocks share the keys, and merge their results without a place for softmax_lse."""
    q, *caches = tensors((1, 1, 1, 48), *[(1, 3000, 1, 48)] * 2, dtype=dtype, device=device)
    expected, _ = flash_attn_with_kvcache(q, *caches, return_softmax_lse=True)
    short()
    assert torch.equal(flash_attn_with_kvcache(q, *caches), expected)


PLAIN = {  # function: the arguments of calls that are plain
    flash_attn_func: {"q", "k", "v", "softmax_scale"},
    flash_attn_with_kvcache: {"q", "k_cache", "v_cache", "cache_seqlens", "block_table", "softmax_scale"},
}
OPTIONS = [(f, name) for f, plain in PLAIN.items() for name in inspect.signature(f).parameters if name not in plain]


@pytest.mark.parametrize(("function", "option"), OPTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_a_call_with_an_option_is_not_plain(function, option, device, monkeypatch):
    """An option that the conditions in flash_attn_interface.py do not name would be ignored."""

    def plain(*args):
        raise AssertionError(f"{option} was ignored")

    def seen(*args, **options):
        return [None] * (5 if function is flash_attn_func else 3)

    for name, replacement in {"plain_forward": plain, "plain_decode": plain, "forward": seen, "decode": seen}.items():
        monkeypatch.setattr(ops, name, replacement)
    x = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=device)
    for value in (object(), True, 1, 0.5, torch.ones(1, device=device)):
        if (option, value is True) not in {("causal", True), ("rotary_interleaved", True)}:
            function(x, x, x, **{option: value})


@pytest.fixture
def long(device, monkeypatch):
    """Makes calls fail that take the short way."""

    def fail(*args):
        raise AssertionError("this call is not plain")

    for name in ("fwd_plain", "fwd_plain_out", "fwd_kvcache_plain_out"):
        monkeypatch.setattr(getattr(ops, name), "below_autograd", fail)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda x: x.as_subclass(Subclass)], ids=["parameter", "subclass"])
def test_a_subclass_takes_the_long_way(kind, dtype, long, device):
    q, k, v = inputs(dtype, device)
    for args in ((kind(q), k, v), (q, kind(k), v), (q, k, kind(v))):
        assert flash_attn_func(*args).shape == q.shape


@pytest.mark.parametrize(
    "lengths", [torch.tensor(9, dtype=torch.int32), torch.tensor([9, 40]), 9], ids=["0-d", "int64", "int"]
)
def test_lengths_that_take_the_long_way(lengths, dtype, long, device):
    q, k, v = inputs(dtype, device)
    lengths = lengths.to(device) if isinstance(lengths, torch.Tensor) else lengths
    assert flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths).shape == (2, 1, 4, 48)


class Ops(TorchDispatchMode):
    """The names of the ops of attention that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash_attn":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_ops_that_they_know(dtype, device):
    """Counters of FLOPs and policies of checkpoints are written for fwd and bwd."""
    leaves = inputs(dtype, device, requires_grad=True)
    with Ops() as seen:
        flash_attn_func(*leaves).sum().backward()
    assert [name.removesuffix("_reference") for name in seen.names] == ["fwd", "bwd"]


def test_an_error_that_is_no_refusal_is_raised_once(dtype, short, device):
    """One of a hook, or for want of memory, says nothing of the arguments."""
    leaves = inputs(dtype, device, requires_grad=True)
    calls = []

    def pack(x):
        calls.append(x)
        raise RuntimeError("no room for this")

    with (
        pytest.raises(RuntimeError, match="no room for this"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        flash_attn_func(*leaves)
    assert len(calls) == 1


def test_opcheck(device):
    q, k, v = inputs(torch.bfloat16, device)
    plain, scores = torch.ops.flash_attn, (0.1, -1, 0)
    out, lse = plain.fwd_plain(q, k, v, *scores)
    lengths = torch.tensor([9, 40], dtype=torch.int32, device=device)
    torch.library.opcheck(plain.fwd_plain.default, (q, k, v, *scores))
    torch.library.opcheck(plain.fwd_plain_out.default, (q, k, v, *scores))
    torch.library.opcheck(plain.bwd_plain.default, (out, q, k, v, out, lse, *scores))
    torch.library.opcheck(plain.fwd_kvcache_plain_out.default, (q, k, v, *scores, lengths, None))
