"""Attention of diffusers: the backend beside diffusers' native one."""

import sys

import oracle
import pytest
import torch
from compare import assert_error_ratio
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from flash_attn.integrations import diffusers as door

NAME = door.register()
BATCH, SEQLEN = 2, 9
MASKS = {  # a mask, and the form in which attention is given it
    "none": (None, None),
    "nothing hidden": (torch.ones(BATCH, SEQLEN, dtype=torch.bool), None),
    "padding at the end": (torch.arange(SEQLEN) < torch.tensor([[9], [5]]), "seqused_k"),
    "padding at the end, in 4 dimensions": ((torch.arange(SEQLEN) < torch.tensor([[7]]))[None, None], "seqused_k"),
    "padding in front": (torch.arange(SEQLEN) >= torch.tensor([[0], [3]]), "key_ranges"),
    "a block": (torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril(2).triu(-1)[None, None], "key_ranges"),
    "two ranges": (torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 0]).bool().expand(BATCH, SEQLEN), "key_ranges"),
    "many ranges": (torch.arange(SEQLEN).expand(BATCH, -1) % 2 == 0, "attn_bias"),
    "of each head": (torch.arange(4 * SEQLEN**2).view(1, 4, SEQLEN, SEQLEN) % 5 % 2 == 0, "attn_bias"),
    "numbers": (torch.randn(1, 4, SEQLEN, SEQLEN), "attn_bias"),
    "numbers of keys": (torch.randn(BATCH, SEQLEN), "attn_bias"),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", MASKS)
def test_attention(case, is_causal, device):
    mask, form = MASKS[case]
    mask = None if mask is None else mask.to(device)
    leaves = [torch.randn(BATCH, SEQLEN, heads, 16, device=device) for heads in (4, 2, 2)]

    def ours(q, k, v):
        return dispatch_attention_fn(q, k, v, mask, 0.0, is_causal, 0.3, True, backend=NAME)

    def exact(q, k, v):
        seen = mask[:, None, None] if mask is not None and mask.shape == (BATCH, SEQLEN) else mask
        return oracle.attention(q, k, v, causal=is_causal, softmax_scale=0.3, attn_bias=seen)[0]

    def run(function, dtype):
        given = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*given)
        torch.manual_seed(1)
        return out.detach(), *torch.autograd.grad(out, given, torch.randn(out.shape).to(out))

    for results in zip(run(ours, torch.float32), run(exact, torch.float64), run(exact, torch.float32), strict=True):
        assert_error_ratio(*results)
    if mask is not None:
        form = "key_ranges" if is_causal and form == "seqused_k" else form
        assert list(door._arguments(mask, BATCH, SEQLEN, SEQLEN, not is_causal)) == [form] * (form is not None)


def test_windows_and_lse(device):
    q, k, v = (torch.randn(BATCH, SEQLEN, 4, 16, device=device) for _ in range(3))
    options = {"attention_kwargs": {"window_size": (2, 1), "return_lse": True}, "backend": NAME}
    out, lse = dispatch_attention_fn(q, k, v, **options)
    exact = oracle.attention(*(x.double() for x in (q, k, v)), window_size=(2, 1))
    for ours, expected in zip((out, lse), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_model(device, monkeypatch):
    """A transformer of Flux gives what it gives with diffusers' own backend, and so do its gradients."""
    calls = []
    original = door.flash_attn_func
    monkeypatch.setattr(door, "flash_attn_func", lambda *x, **y: calls.append(1) or original(*x, **y))
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).to(device)
    batch = {
        "hidden_states": torch.randn(1, 6, 4),
        "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    batch = {name: x.to(device) for name, x in batch.items()}
    results = []
    for backend in ("native", NAME):
        with attention_backend(backend):
            out = model(**batch).sample
            gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
        results.append([out, *(x for x in gradients if x is not None)])
        assert bool(calls) == (backend == NAME)
    for ours, native in zip(*results, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)


def test_the_name_is_a_member():
    assert door.register() == NAME
    member = AttentionBackendName(NAME)
    assert isinstance(member, AttentionBackendName) and member == NAME and member.value == NAME
    assert list(AttentionBackendName).count(member) == 1
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=0, num_single_layers=1, attention_head_dim=16, num_attention_heads=1
    )
    try:
        model.set_attention_backend(NAME)
        assert [x.processor._attention_backend for x in model.modules() if hasattr(x, "processor")] == [member]
    finally:
        model.set_attention_backend("native")


@pytest.mark.parametrize("name", ["flash", "native", "Mine", None])
def test_refused_names(name):
    with pytest.raises(ValueError, match="name must"):
        door.register(name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"is_causal": True}, "is_causal must be false unless .* found true for 5 and 9"),
        ({"_parallel_config": object()}, "_parallel_config must be None"),
        ({"attn_mask": [1]}, "attn_mask must be a torch.Tensor, found list"),
        ({"attn_mask": torch.ones(3, 3)}, r"attn_mask must broadcast to \(1, 2, 5, 9\), found shape \(3, 3\)"),
    ],
)
def test_refused_arguments(options, says):
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 9, 2, 8)
    with pytest.raises((ValueError, TypeError), match=says):
        door.attention(q, k, k, **options)


def test_without_diffusers(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    with pytest.raises(ImportError, match="needs a diffusers"):
        door.register()
