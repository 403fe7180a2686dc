"""Second derivatives of attention, tangents, and transforms of torch.func, against the oracle in float64."""

import functools

import oracle
import pytest
import torch
from cases import Case
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, masks
from flash_attn._ops import rng

CASE = Case(seqlen_q=9, seqlen_k=12, heads_k=2, head_dim=8, dtype="fp32")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls the op in turn


def problem(name, device):
    """(our function of tensors, the oracle's, the tensors); both return (out, lse)."""
    q, k, v, _ = CASE.tensors(device)
    sink, bias = torch.randn(4, device=device), torch.randn(1, 4, 9, 12, device=device)
    slopes = torch.rand(4, device=device)
    ours, exact = functools.partial(flash_attn_func, return_lse=True), oracle.attention
    if name == "plain":
        return ours, exact, (q, k, v)
    if name == "causal, softcap":
        options = dict(causal=True, softcap=2.0, window_size=(5, -1))
        return functools.partial(ours, **options), functools.partial(exact, **options), (q, k, v)
    if name == "ALiBi":
        return functools.partial(ours, alibi_slopes=slopes), functools.partial(exact, alibi_slopes=slopes), (q, k, v)
    if name == "rows without keys":
        ranges = torch.zeros(1, 1, 9, 2, dtype=torch.int32, device=device)
        ranges[:, :, 3:, 1] = 7
        seen = masks.to_bool(ranges, 12)
        return functools.partial(ours, key_ranges=ranges), functools.partial(exact, seen=seen), (q, k, v)
    if name == "sink":
        return (
            lambda q, k, v, s: ours(q, k, v, learnable_sink=s),
            lambda q, k, v, s: exact(q, k, v, learnable_sink=s),
            (q, k, v, sink),
        )
    if name == "sink and bias":
        return (
            lambda q, k, v, s, b: ours(q, k, v, learnable_sink=s, attn_bias=b),
            lambda q, k, v, s, b: exact(q, k, v, learnable_sink=s, attn_bias=b),
            (q, k, v, sink, bias),
        )
    if name == "mask":
        mask = torch.arange(12, device=device) % 3 > 0
        return functools.partial(ours, attn_bias=mask), functools.partial(exact, attn_bias=mask), (q, k, v)
    if name == "bias of groups":
        return (
            lambda q, k, v, b: ours(q, k, v, attn_bias=b),
            lambda q, k, v, b: exact(q, k, v, attn_bias=b[0]),
            (q, k, v, torch.randn(1, 2, 4, 9, 12, device=device)),
        )
    if name == "chunks":
        seen = masks.to_bool(masks.chunks(4, 9, 12, device=device), 12)
        return functools.partial(ours, attention_chunk=4), functools.partial(exact, seen=seen), (q, k, v)
    if name == "two ranges":
        ranges = masks.sink_and_window(2, (2, 1), 9, 12, device=device)
        return (
            functools.partial(ours, key_ranges=ranges),
            functools.partial(exact, seen=masks.to_bool(ranges, 12)),
            (q, k, v),
        )
    if name == "causal of each entry":
        flags = torch.tensor([True, False], device=device)
        seen = oracle.allowed_keys(9, 12, True, device=device) | ~flags[:, None, None, None]
        return functools.partial(ours, causal=flags), functools.partial(exact, seen=seen), (q, k, v)
    if name == "lengths":
        used_q, used_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([9, 5], [7, 12]))
        seen = (torch.arange(12, device=device) < used_k[:, None, None, None]) & (
            torch.arange(9, device=device)[:, None] < used_q[:, None, None, None]
        )
        return (
            functools.partial(ours, seqused_q=used_q, seqused_k=used_k),
            functools.partial(exact, seen=seen),
            (q, k, v),
        )
    if name == "dropout":

        def dropped(q, k, v):
            torch.manual_seed(7)
            return ours(q, k, v, dropout_p=0.3)

        torch.manual_seed(7)
        keep = oracle.dropout_keep(*rng.draw_state(torch.device(device)).tolist(), 2, 4, 9, 12, 0.3).to(device)
        return dropped, functools.partial(exact, keep=keep, dropout_p=0.3), (q, k, v)
    if name == "largest score":
        return lambda q, k, v: ours(q, k, v, return_max_logit=True)[:2], exact, (q, k, v)
    if name == "values of another head_dim":
        return ours, exact, (q, k, v[..., :5])
    if name == "qkvpacked":
        packed = functools.partial(flash_attn_qkvpacked_func, return_lse=True)
        return packed, lambda qkv: exact(*qkv.unbind(2)), (torch.stack([q, q + 1, q - 1], 2),)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    return (
        lambda q, k, v: flash_attn_varlen_func(q, k, v, bounds, bounds, 5, 5, return_lse=True),
        lambda q, k, v: oracle.varlen_attention(q, k, v, bounds, bounds),
        (q[0], k[0, :9], v[0, :9]),
    )


NAMES = [
    "plain",
    "causal, softcap",
    "ALiBi",
    "rows without keys",
    "sink",
    "sink and bias",
    "mask",
    "bias of groups",
    "chunks",
    "two ranges",
    "causal of each entry",
    "lengths",
    "dropout",
    "largest score",
    "values of another head_dim",
    "qkvpacked",
    "varlen",
]


def finite_sum(function, tensors, weights):
    """A number that depends on out and lse by other than constant gradients."""
    out, lse = function(*tensors)
    lse = lse.masked_fill(lse.isinf(), 0)
    return (out.square() * weights.to(out.dtype)).sum() + lse.sin().sum()


def penalty(function, tensors):
    """Gradients of the squared norm of gradients, plus a gradient of what is earlier in the graph."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    inputs = [1.5 * x for x in leaves]
    weights = torch.linspace(-1, 1, leaves[0].shape[-1] if len(leaves) == 1 else leaves[2].shape[-1]).to(
        inputs[0].device
    )
    grads = torch.autograd.grad(finite_sum(function, inputs, weights), inputs, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)


def assert_close(found, exact):
    """Second derivatives are sums of numbers as large as the largest of them, here hundreds, in float32."""
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name, device):
    ours, exact, tensors = problem(name, device)
    assert_close(penalty(ours, tensors), penalty(exact, [x.double() for x in tensors]))


def test_second_derivatives_with_checkpoints(device):
    ours, exact, tensors = problem("plain", device)
    again = functools.partial(checkpoint, ours, use_reentrant=False)
    assert_close(penalty(again, tensors), penalty(exact, [x.double() for x in tensors]))


def test_third_derivatives_are_refused(device):
    q, k, v, _ = CASE.tensors(device)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(dq.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second.sum().backward()


@pytest.mark.parametrize("mode", ["jvp", "dual"])
@pytest.mark.parametrize("name", NAMES)
def test_tangents(name, mode, device):
    ours, exact, tensors = problem(name, device)
    tangents = tuple(torch.randn_like(x) for x in tensors)
    doubles = [tuple(x.double() for x in xs) for xs in (tensors, tangents)]
    _, (expected, expected_lse) = torch.func.jvp(exact, *doubles)
    if mode == "jvp":
        _, (found, found_lse) = torch.func.jvp(ours, tensors, tangents)
    else:
        with forward_ad.dual_level():
            results = ours(*map(forward_ad.make_dual, tensors, tangents))
            found, found_lse = (forward_ad.unpack_dual(x).tangent for x in results)
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found_lse, expected_lse.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("qkvpacked", "dropout")])
def test_grad_and_vmap(name, device):
    """Gradients of torch.func are those of autograd, also for each of several inputs. (vmap itself refuses dropout.)"""
    ours, _, tensors = problem(name, device)

    def loss(q):
        return ours(q, *tensors[1:])[0].square().sum()

    several = torch.stack([tensors[0], 2 * tensors[0]])
    expected = [torch.autograd.grad(loss(x), x)[0] for x in several.clone().requires_grad_()]
    torch.testing.assert_close(torch.func.grad(loss)(several[0]), expected[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(several), torch.stack(expected))
    torch.testing.assert_close(torch.func.vmap(loss)(several), torch.stack([loss(x) for x in several]))


def test_vmap_over_causal_entries(device):
    """The flags are of a batch that the function does not see, and cannot be read."""
    q, k, v, _ = (x[:1] for x in CASE.tensors(device))
    flags = torch.tensor([[True], [False]], device=device)

    def loss(q, causal):
        return flash_attn_func(q, k, v, causal=causal).square().sum()

    for function in (loss, torch.func.grad(loss)):
        found = torch.func.vmap(function, in_dims=(None, 0))(q, flags)
        torch.testing.assert_close(found, torch.stack([function(q, bool(flag)) for flag in flags]))


def test_the_largest_score_is_known_and_has_no_tangent(device):
    q, k, v, _ = CASE.tensors(device)
    options = dict(causal=True, seqused_q=torch.tensor([9, 0], dtype=torch.int32, device=device), return_max_logit=True)
    _, expected = flash_attn_func(q, k, v, **options)
    (_, found), (_, tangent) = torch.func.jvp(lambda q: flash_attn_func(q, k, v, **options), (q,), (q,))
    torch.testing.assert_close(found, expected)
    assert not tangent.any()
    several = torch.func.vmap(lambda q: flash_attn_func(q, k, v, **options)[1])(torch.stack([q, 2 * q]))
    torch.testing.assert_close(several, torch.stack([flash_attn_func(x, k, v, **options)[1] for x in (q, 2 * q)]))


def test_it_warns(device, recwarn):
    from flash_attn import _library

    _library.warn_once.cache_clear()
    q, k, v, _ = CASE.tensors(device)
    torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    assert any("plain torch, with memory quadratic in the sequence" in str(w.message) for w in recwarn)
