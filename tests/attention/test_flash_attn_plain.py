"""Calls that take a short way to the kernels (`plain_forward`, `plain_varlen` and `plain_decode`)."""

import contextlib
import functools
import inspect
import unittest.mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import (
    _library,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
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
@pytest.mark.parametrize(("rows", "float8"), [(1, False), (3, True), (40, False), (40, True)])
def test_decode(rows, float8, lengths, paged, dtype, short, device):
    cache = (6, 16, 2, 48) if paged else (2, 48, 2, 48)
    q, *caches = tensors((2, rows, 4, 48), cache, cache, dtype=dtype, device=device)
    options = dict(causal=True)
    if lengths is not None:
        options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if paged:
        options["block_table"] = torch.tensor([[0, 3, 5], [1, 4, 2]], dtype=torch.int32, device=device)
    if float8:
        caches = [x.to(torch.float8_e4m3fn) for x in caches]
        options |= dict(k_descale=torch.tensor([0.3, 2.0], device=device), v_descale=0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "plain_decode", lambda *args: None)
        expected, lse = flash_attn_with_kvcache(q, *caches, **options, return_softmax_lse=True)
    short()
    assert torch.equal(flash_attn_with_kvcache(q, *caches, **options), expected)
    found = flash_attn_with_kvcache(q, *caches, **options, return_softmax_lse=True, out=torch.empty_like(q))
    assert all(map(torch.equal, found, (expected, lse)))


@pytest.mark.parametrize("paged", [False, True])
def test_packed_queries_over_float8(paged, dtype, short, device):
    q, *keys = tensors((40, 4, 48), *[(6, 16, 2, 48) if paged else (90, 2, 48)] * 2, dtype=dtype, device=device)
    k, v = (x.to(torch.float8_e4m3fn) for x in keys)
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    lengths = dict(cu_seqlens_q=ints([0, 39, 40]), cu_seqlens_k=ints([0, 48, 90]), max_seqlen_q=39, max_seqlen_k=48)
    scales = dict(k_descale=ints([[1], [2]]).float(), v_descale=ints([3, 1]).float())
    if paged:
        lengths |= dict(block_table=ints([[0, 3, 5], [1, 4, 2]]), seqused_k=ints([40, 33]), cu_seqlens_k=None)
    call = functools.partial(flash_attn_varlen_func, q, k, v, **lengths, **scales, causal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "plain_varlen", lambda *args: None)
        expected, lse = call(return_lse=True)
    short()
    assert torch.equal(call(), expected)
    assert all(map(torch.equal, call(return_lse=True, out=torch.empty_like(q)), (expected, lse)))


def test_keys_in_splits(dtype, short, device):
    """Several thread blocks share the keys, and merge their results without a place for softmax_lse."""
    q, *caches = tensors((1, 1, 1, 48), *[(1, 3000, 1, 48)] * 2, dtype=dtype, device=device)
    expected, _ = flash_attn_with_kvcache(q, *caches, return_softmax_lse=True)
    short()
    assert torch.equal(flash_attn_with_kvcache(q, *caches), expected)


PLAIN = {  # function: the arguments that its short way takes, in the order in which it takes them
    flash_attn_func: "q k v softmax_scale causal window_size",
    flash_attn_varlen_func: (
        "q k v softmax_scale causal window_size cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k block_table "
        "seqused_k num_splits out return_lse return_softmax_lse k_descale v_descale"
    ),
    flash_attn_with_kvcache: (
        "q k_cache v_cache softmax_scale causal window_size cache_seqlens block_table k v rotary_cos rotary_sin "
        "rotary_interleaved num_splits cu_seqlens_q max_seqlen_q out return_softmax_lse k_descale v_descale"
    ),
}
PLAIN = {function: names.split() for function, names in PLAIN.items()}
FLAGS = {"causal", "rotary_interleaved", "return_lse", "return_softmax_lse"}  # bools that a short way takes
CHECKED = {"scheduler_metadata"}  # on every way, before
OPTIONS = [
    (function, name)
    for function, plain in PLAIN.items()
    for name in inspect.signature(function).parameters
    if name not in CHECKED and (name not in plain or name in FLAGS)
]


@pytest.mark.parametrize(("function", "option"), OPTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_a_call_with_an_option_is_not_plain(function, option, device, monkeypatch):
    """An option that the conditions in flash_attn_interface.py do not name would be ignored."""

    def plain(*args):
        raise AssertionError(f"{option} was ignored")

    def seen(*args, **options):
        return [None] * (3 if function is flash_attn_with_kvcache else 5)

    for name in ("plain_forward", "plain_varlen", "plain_decode"):
        monkeypatch.setattr(ops, name, plain)
    for name in ("forward", "decode"):
        monkeypatch.setattr(ops, name, seen)
    x = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=device)
    more = [x] if function is flash_attn_varlen_func else []
    for value in (object(), True, 1, 0.5, torch.ones(1, device=device)):
        if not (value is True and option in FLAGS and option in PLAIN[function]):
            with contextlib.suppress(TypeError, NotImplementedError):  # refused
                function(x, x, x, *more, **{option: value})


@pytest.fixture
def as_if_kernels(monkeypatch):
    """Calls take their short way also where the reference computes what kernels would."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: True)


SHORT = {
    flash_attn_func: "plain_forward",
    flash_attn_varlen_func: "plain_varlen",
    flash_attn_with_kvcache: "plain_decode",
}


def good(function, device, dtype=torch.bfloat16):
    """Arguments of a call that is plain and has all that its short way takes."""
    rows, ints = (5, 4, 48), [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 5], [[0, 3], [4, 2]])]
    common = dict(softmax_scale=0.3, causal=True, window_size=[9, -1])
    if function is flash_attn_func:
        return dict(zip("qkv", inputs(dtype, device))) | common
    q, k, v, out = tensors(rows, *[(6, 16, 2, 48)] * 2, rows, dtype=dtype, device=device)
    lengths = dict(cu_seqlens_q=ints[0], max_seqlen_q=3, block_table=ints[1], out=out, num_splits=2, **common)
    if function is flash_attn_varlen_func:
        used = torch.tensor([20, 7], dtype=torch.int32, device=device)
        return dict(q=q, k=k, v=v, cu_seqlens_k=None, max_seqlen_k=20, seqused_k=used, return_lse=True) | lengths
    new = dict(zip("kv", tensors(*[(2, 3, 2, 48)] * 2, dtype=dtype, device=device)))
    filled = torch.tensor([20, 7], dtype=torch.int32, device=device)
    return dict(q=q, k_cache=k, v_cache=v, cache_seqlens=filled, return_softmax_lse=True) | lengths | new


def rotating(device):
    """The same with a batch dimension and tables, for which queries may not be packed."""
    call = good(flash_attn_with_kvcache, device) | dict(cu_seqlens_q=None, max_seqlen_q=None)
    q, out = tensors(*[(2, 3, 4, 48)] * 2, dtype=torch.bfloat16, device=device)
    cos, sin = tensors(*[(40, 8)] * 2, dtype=torch.float32, device=device)
    return call | dict(q=q, out=out, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)


def in_float8(call, device):
    """The same over keys and values in float8, with a scale for each head and one for all."""
    names = ("k_cache", "v_cache") if "k_cache" in call else ("k", "v")
    codes = {name: call[name].to(torch.float8_e4m3fn) for name in names}
    return call | codes | dict(k_descale=torch.tensor([0.5, 3.0], device=device), v_descale=0.75)


def calls_of(function, device):
    calls = [good(function, device)] + ([rotating(device)] if function is flash_attn_with_kvcache else [])
    return calls + [in_float8(call, device) for call in calls if function is not flash_attn_func]


def taken(function, call):
    """Whether the call takes its short way."""
    return getattr(ops, SHORT[function])(*(call.get(name, DEFAULTS[function][name]) for name in order(function)))


def order(function):
    """The last two flags of varlen calls are two names of one."""
    return [
        name for name in PLAIN[function] if not (function is flash_attn_varlen_func and name == "return_softmax_lse")
    ]


DEFAULTS = {f: {name: p.default for name, p in inspect.signature(f).parameters.items()} for f in PLAIN}


@pytest.mark.parametrize("function", PLAIN, ids=lambda f: f.__name__)
def test_all_that_a_short_way_takes(function, as_if_kernels, device):
    for call in calls_of(function, device):
        again = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        found = taken(function, call)
        assert found is not None
        found = found if isinstance(found, tuple) else (found,)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, SHORT[function], lambda *args: None)
            expected = function(**again)
        for each, wanted in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            torch.testing.assert_close(each, wanted, rtol=2**-7, atol=2**-9)
        if function is not flash_attn_func:
            assert found[0] is call["out"]


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("length", [0, 9, 29, 30, 32, 33, -1])
def test_one_length_of_all_entries(length, appends, as_if_kernels, device):
    """A short way as long as the new keys fit, else an error."""
    call = rotating(device) | dict(cache_seqlens=length)
    if not appends:
        call |= dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"))
    again = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    found = taken(flash_attn_with_kvcache, call)
    assert (found is not None) == (0 <= length <= (29 if appends else 32))
    if found is None:
        with pytest.raises(ValueError, match=r"cache_seqlens must|k must fit"):
            flash_attn_with_kvcache(**again)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "plain_decode", lambda *args: None)
        for each, wanted in zip(found, flash_attn_with_kvcache(**again), strict=True):
            torch.testing.assert_close(each, wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("bounds", [(40, 30), (None, 0)], ids=str)
@pytest.mark.parametrize("wants_lse", [False, True])
def test_gradients_of_packed_queries(wants_lse, bounds, as_if_kernels, device):
    shapes = (70, 4, 48), (60, 2, 48), (60, 2, 32)
    leaves = tensors(*shapes, dtype=torch.bfloat16, device=device, requires_grad=True)
    starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 30, 30, 70], [0, 30, 35, 60])]
    options = dict(causal=True, window_size=(20, 0), return_lse=wants_lse)

    def run(short):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "forward" if short else "plain_varlen", lambda *args, **options: None)
            found = flash_attn_varlen_func(*leaves, *starts, *bounds, **options)
        found = found if wants_lse else (found,)
        return *found, *torch.autograd.grad(sum(x.float().sum() for x in found), leaves)

    for found, wanted in zip(run(short=True), run(short=False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def leaf(x):
    return x.clone().requires_grad_()


STRANGE = {  # argument: what the short way leaves to the other
    "q k v k_cache v_cache": [torch.nn.Parameter, lambda x: x.as_subclass(Subclass)],
    "q": [torch.Tensor.float, lambda x: x[0]],
    "k v k_cache v_cache": [lambda x: x.to("meta"), lambda x: x[0], lambda x: torch.nested.nested_tensor(list(x))],
    "window_size": [lambda x: (1, 2, 3), lambda x: torch.tensor([1, 2]), lambda x: (1.0, 2), lambda x: (2**40, 1)],
    "softmax_scale": [lambda x: 1, lambda x: -0.5, lambda x: float("nan"), lambda x: torch.tensor(0.5)],
    "cu_seqlens_q seqused_k cache_seqlens": [torch.Tensor.long, lambda x: x[None], lambda x: x.repeat(2)[::2]],
    "block_table": [torch.Tensor.long, lambda x: x[0], lambda x: x.t().contiguous().t()],
    "max_seqlen_q max_seqlen_k": [lambda x: -1, lambda x: 3.0, lambda x: torch.tensor(3)],
    "num_splits": [lambda x: 129, lambda x: 2.0, lambda x: torch.tensor(2)],
    "out": [leaf, lambda x: x.to("meta"), lambda x: x.as_subclass(Subclass), lambda x: [x]],
    "k v": [lambda x: None],
    "rotary_cos rotary_sin": [lambda x: x.t().contiguous().t(), lambda x: None],
    "rotary_cos": [torch.Tensor.double, lambda x: x[:30], lambda x: x[:, :5].contiguous()],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", PLAIN, ids=lambda f: f.__name__)
def test_what_a_short_way_does_not_take(function, as_if_kernels, device):
    """Each argument is strange alone, and the call then has to be looked at."""
    calls = [good(function, device)] + ([rotating(device)] if function is flash_attn_with_kvcache else [])
    seen = set()
    for call in calls:
        for names, changes in STRANGE.items():
            for name in set(names.split()) & call.keys():
                for i, change in enumerate(changes):
                    if call[name] is not None:
                        assert taken(function, call | {name: change(call[name])}) is None, (name, i)
                        seen.add(name)
    scales = {"k_descale", "v_descale"} & set(order(function))
    for name in scales:
        for strange in (leaf(torch.ones(2, device=device)), torch.ones(2, device="meta"), -1.0, float("nan"), 1, [1.0]):
            assert taken(function, in_float8(calls[0], device) | {name: strange}) is None, (name, strange)
        if function is flash_attn_with_kvcache:  # new keys are divided by it
            assert taken(function, in_float8(calls[1], device) | {name: 0.0}) is None, name
    assert seen | scales >= set(order(function)) - FLAGS - {"cu_seqlens_k"}
    for name in {"q", "k", "v", "k_cache", "v_cache"} & call.keys() if "out" in call else ():
        assert taken(function, call | {name: leaf(call[name])}) is None, name
    if function is flash_attn_with_kvcache:
        for strange in (
            dict(cache_seqlens=None),
            dict(v_cache=calls[0]["k_cache"]),
            dict(k_cache=calls[0]["k_cache"][:1].expand(6, -1, -1, -1)),
            dict(cu_seqlens_q=None),
            dict(v=None),
        ):
            assert taken(function, calls[0] | strange) is None, strange
        assert taken(function, calls[1] | dict(max_seqlen_q=3)) is not None  # q says how many rows there are
        assert all(taken(function, calls[1] | dict(max_seqlen_q=bound)) is None for bound in (-1, 3.0))
    if function is flash_attn_varlen_func:
        assert taken(function, calls[0] | dict(seqused_k=None)) is None  # then there are no lengths of keys


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values in one tensor

PACKED = {  # function: the names of its tensors
    flash_attn_qkvpacked_func: ("qkv",),
    flash_attn_kvpacked_func: ("q", "kv"),
    flash_attn_varlen_qkvpacked_func: ("qkv",),
    flash_attn_varlen_kvpacked_func: ("q", "kv"),
}
of_packed = pytest.mark.parametrize("function", PACKED, ids=lambda f: f.__name__)


def packed(function, device, dtype=torch.bfloat16):
    """The arguments of a call that takes its short way."""
    varlen = "varlen" in function.__name__
    rows, starts = ((5,) if varlen else (2, 5)), torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    shapes = {"qkv": (*rows, 3, 4, 48), "q": (*rows, 4, 48), "kv": (*rows, 2, 2, 48)}
    call = dict(zip(PACKED[function], tensors(*(shapes[x] for x in PACKED[function]), dtype=dtype, device=device)))
    if varlen and "qkv" in call:
        call |= dict(cu_seqlens=starts, max_seqlen=3)
    elif varlen:
        call |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts.clone(), max_seqlen_q=3, max_seqlen_k=3)
    return call | dict(softmax_scale=0.3, causal=True, window_size=(9, -1))


@pytest.fixture
def ways(monkeypatch, as_if_kernels):
    """Runs a call, and says whether its short way has served it."""
    seen, short = [], ops.plain_packed

    def plain_packed(*args):
        seen.append(short(*args))
        return seen[-1]

    monkeypatch.setattr(ops, "plain_packed", plain_packed)

    def run(function, call):
        seen.clear()
        return function(**call), bool(seen) and seen[-1] is not None

    return run


@of_packed
def test_packed_calls(function, ways, device):
    call = packed(function, device)
    found, is_short = ways(function, call)
    expected, _ = function(**call, return_lse=True)
    assert is_short and torch.equal(found, expected)
    leaves = [call[name].requires_grad_() for name in PACKED[function]]
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            found, is_short = ways(function, call)
        assert is_short is not grads and found.requires_grad is grads and torch.equal(found, expected)
    assert all(grad.any() for grad in torch.autograd.grad(function(**call).sum(), leaves))


@of_packed
def test_what_packed_calls_leave_to_the_long_way(function, ways, device):
    good = packed(function, device)
    strange = {
        "qkv q kv": [torch.nn.Parameter, lambda x: x.as_subclass(Subclass)],
        "qkv q": [torch.Tensor.float],
        "kv": [lambda x: x.to("meta")],
        "window_size": [lambda x: (1, 2, 3), lambda x: (1.0, 2)],
        "softmax_scale": [lambda x: 1, lambda x: float("nan")],
        "cu_seqlens cu_seqlens_q cu_seqlens_k": [torch.Tensor.long, lambda x: x[None], lambda x: [0, 2, 5]],
        "max_seqlen max_seqlen_q max_seqlen_k": [lambda x: -1, lambda x: 3.0, lambda x: torch.tensor(3)],
    }
    for names, changes in strange.items():
        for name in set(names.split()) & good.keys():
            for i, change in enumerate(changes):
                with unittest.mock.patch.object(ops, "forward", return_value=[None] * 5) as long_way:
                    function(**good | {name: change(good[name])})
                assert long_way.called, (name, i)
    with torch.autograd.forward_ad.dual_level():
        assert not ways(function, good)[1]


@of_packed
def test_a_packed_call_with_an_option_is_not_plain(function, device, monkeypatch):
    def plain(*args):
        raise AssertionError(f"{option} was ignored")

    monkeypatch.setattr(ops, "plain_packed", plain)
    monkeypatch.setattr(ops, "forward", lambda *args, **options: [None] * 5)
    good = packed(function, device)
    for option in inspect.signature(function).parameters.keys() - (good.keys() - {"causal"}):
        for value in (object(), True, 1, 0.5, torch.ones(1, device=device)):
            if not (option == "causal" and value is True):
                function(**good | {option: value})


@pytest.fixture
def long(device, monkeypatch):
    """Makes calls fail that take the short way."""

    def fail(*args):
        raise AssertionError("this call is not plain")

    for name in ("fwd_plain", "fwd_plain_out", "fwd_plain_into", "fwd_kvcache_plain_out", "fwd_kvcache_plain_into"):
        monkeypatch.setattr(getattr(ops, name), "below_autograd", fail)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda x: x.as_subclass(Subclass)], ids=["parameter", "subclass"])
def test_a_subclass_takes_the_long_way(kind, dtype, long, device):
    q, k, v = inputs(dtype, device)
    for args in ((kind(q), k, v), (q, kind(k), v), (q, k, kind(v))):
        assert flash_attn_func(*args).shape == q.shape


@pytest.mark.parametrize(
    "lengths", [torch.tensor(9, dtype=torch.int32), torch.tensor([9, 40]), 9.0], ids=["0-d", "int64", "float"]
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
    torch.library.opcheck(plain.fwd_kvcache_plain_out.default, (q, k, v, None, None, *scores, lengths, None))
    codes = (x.to(torch.float8_e4m3fn) for x in (k, v))  # which the test of schemas cannot multiply
    arguments = q, *codes, torch.ones(2, device=device), torch.ones((), device=device), *scores, lengths, None
    torch.library.opcheck(plain.fwd_kvcache_plain_out.default, arguments, test_utils="test_faketensor")
    tokens, starts = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 70, 140], dtype=torch.int32, device=device)
    more = starts, starts, 70, 70, None, None, 0
    out_of_tokens = torch.empty_like(tokens[0])
    torch.library.opcheck(plain.fwd_plain_into.default, (*tokens, out_of_tokens, None, None, None, *scores, *more))
    torch.library.opcheck(plain.fwd_plain_into.default, (q, k, v, out.clone(), None, None, None, *scores))
    more = lengths, None, None, None, 0, k[:, :2].clone(), v[:, :2].clone(), None, None, True, None
    arguments = q, k, v, out.clone(), lse, None, None, *scores, *more
    torch.library.opcheck(plain.fwd_kvcache_plain_into.default, arguments)
