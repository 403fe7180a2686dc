"""torch's own attention: its operators, called as scaled_dot_product_attention and varlen_attn call them.

Without a GPU the functions are put in the place of the operators of the CPU, of which torch has none of these names.
"""

import inspect

import oracle
import pytest
import torch
from compare import assert_error_ratio
from torch.nn import attention

from flash_attn import batch_invariant
from flash_attn.integrations import torch as door

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this torch has no registry of implementations"
)
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@pytest.fixture
def activated(device):
    handle = door.Activated(device.type.upper())
    yield
    handle.remove()


def tensors(device, *shapes):
    return [torch.randn(shape, device=device, dtype=DTYPES[device.type], requires_grad=True) for shape in shapes]


def check(call, exact_call, leaves):
    def run(function, dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*given)
        torch.manual_seed(1)
        return out.detach(), *torch.autograd.grad(out, given, torch.randn(out.shape).to(out))

    dtype = leaves[0].dtype
    for results in zip(run(call, dtype), run(exact_call, torch.float64), run(exact_call, dtype), strict=True):
        assert_error_ratio(*results)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_scaled_dot_product_attention(is_causal, layout, device, activated):
    shapes = [(2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)]
    leaves = tensors(device, *shapes)

    def ours(*qkv):
        if layout == "tokens first":
            qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, is_causal, scale=0.3)
        assert out.stride() == torch.empty_like(qkv[0]).stride()
        assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
        return out

    def exact(*qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return oracle.attention(q, k, v, causal=is_causal, softmax_scale=0.3)[0].transpose(1, 2)

    check(ours, exact, leaves)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn(window, device, activated):
    from torch.nn.attention.varlen import varlen_attn

    lengths_q, lengths_k = [3, 0, 5], [4, 2, 5]
    bounds_q, bounds_k = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in (lengths_q, lengths_k))

    # Older versions take groups of heads without being told.
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def ours(q, k, v):
        return varlen_attn(q, k, v, bounds_q, bounds_k, 5, 5, window_size=window, **gqa)

    def exact(q, k, v):
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        return torch.cat([oracle.attention(*(x[None] for x in part), window_size=window)[0][0] for part in parts])

    check(ours, exact, tensors(device, (8, 4, 16), (11, 2, 16), (11, 2, 16)))


def test_varlen_attn_of_pages_and_into_a_tensor(device, activated):
    if not hasattr(pytest.importorskip("torch.nn.attention.varlen"), "varlen_attn_out"):
        pytest.skip("varlen_attn of this torch has no pages")
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    q, k, v = (x.detach() for x in tensors(device, (2, 4, 16), (4, 8, 2, 16), (4, 8, 2, 16)))
    pages = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    used = torch.tensor([11, 5], dtype=torch.int32, device=device)
    bounds = torch.arange(3, dtype=torch.int32, device=device)
    given = {"seqused_k": used, "block_table": pages, "enable_gqa": True}
    ours, lse = varlen_attn(q, k, v, bounds, None, 1, 16, return_aux=AuxRequest(lse=True), **given)
    written = torch.empty_like(q)
    varlen_attn_out(written, q, k, v, bounds, None, 1, 16, **given)
    assert torch.equal(ours, written)
    for i, length in enumerate(used.tolist()):
        keys, values = (x[pages[i].long()].flatten(0, 1)[None, :length].double() for x in (k, v))
        exact, exact_lse = oracle.attention(q[i, None, None].double(), keys, values)
        same, _ = oracle.attention(q[i, None, None], keys.to(q.dtype), values.to(q.dtype))
        assert_error_ratio(ours[i], exact[0, 0], same[0, 0])
        torch.testing.assert_close(lse[:, i].double(), exact_lse[0, :, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_varlen_attn_of_a_server(window, level, device, activated):
    """Chunks of prompts and decoding in one batch, over pages. From level 1 on, bits do not depend on the others."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("varlen_attn of this torch has no pages")
    torch.manual_seed(0)
    rows, lengths = [3, 1, 5, 0], [9, 14, 5, 0]
    q, k, v = (x.detach() for x in tensors(device, (9, 4, 16), (16, 4, 2, 16), (16, 4, 2, 16)))
    pages = torch.randperm(16, device=device).view(4, 4).int()
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, *rows], device=device).cumsum(0).int()

    def call(q, bounds, pages, used):
        longest = int(bounds.diff().max())
        return varlen_attn(
            q, k, v, bounds, None, longest, 16, window_size=window, seqused_k=used, block_table=pages, enable_gqa=True
        )

    with batch_invariant(level):
        out = call(q, bounds, pages, used).split(rows)
        for b, (part, length) in enumerate(zip(q.split(rows), lengths)):
            if len(part) == 0:
                continue
            keys, values = (x[pages[b].long()].flatten(0, 1)[None, :length] for x in (k, v))
            exact, _ = oracle.attention(part[None].double(), keys.double(), values.double(), window_size=window)
            same, _ = oracle.attention(part[None], keys, values, window_size=window)
            assert_error_ratio(out[b], exact[0], same[0])
            if level > 0:
                one = torch.tensor([0, len(part)], device=device, dtype=torch.int32)
                assert torch.equal(call(part, one, pages[b : b + 1], used[b : b + 1]), out[b])


def test_varlen_attn_at_level_2_of_batch_invariance(device, activated):
    """The rows of a call that trains have the bits of those that are read from pages, alone or in another batch."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("varlen_attn of this torch has no pages")
    torch.manual_seed(0)
    leaves = tensors(device, *[(160, 2, 16)] * 3)
    bounds = torch.tensor([0, 70, 160], device=device, dtype=torch.int32)
    q, *keys_and_values = (x.detach()[70:] for x in leaves)  # of the second sequence
    table = torch.tensor([[3, 0, 5, 2, 1, 4]], device=device, dtype=torch.int32)
    places = (16 * table.long()[0, :, None] + torch.arange(16, device=device)).flatten()[:90]
    pages = [x.new_zeros(96, 2, 16).index_copy_(0, places, x).view(6, 16, 2, 16) for x in keys_and_values]
    given = dict(window_size=(-1, 0), seqused_k=bounds[2:] - 70, block_table=table)
    with batch_invariant(2):
        trained = varlen_attn(*leaves, bounds, bounds, 90, 90, window_size=(-1, 0))[70:]
        for rows, num_splits in ((1, None), (7, None), (7, 1)):
            one = torch.tensor([0, rows], device=device, dtype=torch.int32)
            served = varlen_attn(q[-rows:], *pages, one, None, rows, 90, num_splits=num_splits, **given)
            assert torch.equal(served, trained[-rows:])


def test_dropout(device, activated):
    """The backward drops what the forward dropped: out is linear in v, with the gradient as its matrix."""
    q, k, v = tensors(device, *[(2, 4, 9, 16)] * 3)
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0]
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert torch.isclose((dv * v).sum().float(), out.sum().float(), rtol=2e-2)
    assert not torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_compiled_graphs(device, activated):
    q, k, v = tensors(device, *[(2, 4, 9, 16)] * 3)

    def function(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0] * 2

    results = [
        torch.autograd.grad(f(q, k, v).sum(), (q, k, v))
        for f in (torch.compile(function, backend="aot_eager"), function)
    ]
    assert all(map(torch.equal, *results))


def test_registry():
    name = door.register()
    assert door.register() == name and name in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl(name)
    try:
        assert attention.current_flash_attention_impl() == name
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_without_activation_nothing_changes(device):
    handle = door.Activated("CPU")
    handle.remove()
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(*(torch.randn(1, 1, 2, 8) for _ in range(3)))


@pytest.mark.cuda
def test_torch_calls_it_when_it_is_activated(device):
    """Sequences without keys tell who computed: the lse of one is +inf here."""
    q, k, v = (torch.randn(2, 4, 9, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention.activate_flash_attention_impl(door.register())
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k[:, :, :0], v[:, :, :0])[1]
        assert lse.isposinf().all()
    finally:
        attention.restore_flash_attention_impl()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["FA3", None])
def test_refused_names(name):
    with pytest.raises(ValueError, match="name must be a string"):
        door.register(name)


def test_names_of_others_are_refused():
    name = "implementation of another library"
    if name not in attention.list_flash_attention_impls():
        attention.register_flash_attention_impl(name, register_fn=lambda: None)
    with pytest.raises(ValueError, match="name must be one that no other implementation has"):
        door.register(name)


def test_without_a_registry(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(ImportError, match="install a newer torch"):
        door.register()


@pytest.mark.parametrize("given", ["seqused_k", "block_table"])
def test_refused_arguments(given):
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match=f"{given} must be None without cum_seq_q"):
        door._flash_attention_forward(q, q, q, None, None, 2, 2, 0.0, False, False, **{given: torch.ones(1).int()})
