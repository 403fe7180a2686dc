"""Attention without parameters: the modules around the functions, and slopes of ALiBi."""

import oracle
import pytest
import torch
from torch import nn

from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
    inner_attention,
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_self_attention(padded, causal, device):
    """With padding on the right, the causal mask of SelfAttention is that of all tokens."""
    qkv = torch.randn(2, 7, 3, 4, 16, device=device, dtype=torch.float64)
    keep = torch.arange(7, device=device) < torch.tensor([[7], [4]], device=device) if padded else None
    found = SelfAttention(causal=not causal)(qkv, causal=causal, key_padding_mask=keep)
    for b, seqlen in enumerate((7, 4) if padded else (7, 7)):
        q, k, v = qkv[b, None, :seqlen].unbind(2)
        expected, _ = oracle.attention(q, k, v, causal=causal)
        torch.testing.assert_close(found[b, None, :seqlen], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(padded, seqlen_q, causal, device):
    """The causal mask ends at the last key that counts in each row."""
    q = torch.randn(2, seqlen_q, 4, 16, device=device, dtype=torch.float64)
    kv = torch.randn(2, 12, 2, 2, 16, device=device, dtype=torch.float64)
    lengths = (12, 9) if padded else (12, 12)
    keep = torch.arange(12, device=device) < torch.tensor(lengths, device=device)[:, None] if padded else None
    found = CrossAttention(causal=causal, softmax_scale=0.2)(q, kv, key_padding_mask=keep)
    for b, length in enumerate(lengths):
        k, v = kv[b, None, :length].unbind(2)
        expected, _ = oracle.attention(q[b, None], k, v, causal=causal, softmax_scale=0.2)
        torch.testing.assert_close(found[b, None], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_without_keys_get_zero(causal, device):
    """As in flash attention. The scores are large enough that -10000 would not hide a key."""
    qkv = 300 * torch.randn(3, 5, 3, 4, 16, device=device, dtype=torch.float64)
    qkv.requires_grad_()
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], device=device, dtype=torch.bool)
    out = SelfAttention(causal=causal)(qkv, key_padding_mask=keep)
    for b, first in ((0, 0), (2, 2)):
        q, k, v = qkv.detach()[b, None].unbind(2)
        seen = first if causal else 0  # queries before the first key see it without the causal mask
        expected, _ = oracle.attention(q[:, seen:], k[:, first:], v[:, first:], causal=causal)
        torch.testing.assert_close(out[b, None, seen:], expected)
        assert (out[b, :seen] == 0).all()
    assert (out[1] == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert gradient.isfinite().all() and (gradient[1] == 0).all()


@pytest.mark.parametrize("seqlen_k", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_more_queries_than_keys(causal, seqlen_k, device):
    q = torch.randn(2, 5, 4, 16, device=device, dtype=torch.float64)
    kv = torch.randn(2, seqlen_k, 2, 2, 16, device=device, dtype=torch.float64)
    expected = torch.zeros_like(q)
    if seqlen_k > 0:
        expected, _ = oracle.attention(q, *kv.unbind(2), causal=causal)
    torch.testing.assert_close(CrossAttention(causal=causal)(q, kv), expected)


FLASH_OPTIONS = dict(softmax_scale=0.3, window_size=(4, 2), deterministic=True)


def test_flash_modules_are_the_functions(device):
    from flash_attn import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func

    dtype = torch.bfloat16
    slopes = torch.tensor(get_alibi_slopes(4), device=device)
    qkv = torch.randn(2, 9, 3, 4, 16, device=device, dtype=dtype)
    options = FLASH_OPTIONS | dict(alibi_slopes=slopes)
    module = FlashSelfAttention(causal=True, **options)
    assert torch.equal(module(qkv), flash_attn_qkvpacked_func(qkv, causal=True, **options))
    assert torch.equal(module(qkv, causal=False), flash_attn_qkvpacked_func(qkv, **options))
    cu_seqlens = torch.tensor([0, 4, 18], dtype=torch.int32, device=device)
    expected = flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu_seqlens, 14, causal=True, **options)
    assert torch.equal(module(qkv.flatten(0, 1), cu_seqlens=cu_seqlens, max_seqlen=14), expected)
    cross = FlashCrossAttention(causal=True, **options)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    assert torch.equal(cross(q, kv), flash_attn_kvpacked_func(q, kv, causal=True, **options))
    found = cross(
        q.flatten(0, 1),
        kv.flatten(0, 1),
        cu_seqlens=cu_seqlens,
        max_seqlen=14,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_k=14,
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("training", [False, True])
def test_flash_modules_hand_on_their_options(training, monkeypatch):
    """Also those that do not show in the numbers."""
    slopes = torch.rand(4)
    options = dict(FLASH_OPTIONS, alibi_slopes=slopes, causal=True, softcap=3.0)
    expected = options | dict(dropout_p=0.25 if training else 0.0)
    qkv = torch.zeros(2, 5, 3, 4, 16)
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = dict(cu_seqlens=cu_seqlens, max_seqlen=6)
    for cls, name, inputs, lengths in (
        (FlashSelfAttention, "qkvpacked", (qkv,), packed),
        (FlashCrossAttention, "kvpacked", (qkv[:, :, 0], qkv[:, :, 1:]), packed | dict(cu_seqlens_k=cu_seqlens)),
    ):
        calls = []
        for function in (f"flash_attn_{name}_func", f"flash_attn_varlen_{name}_func"):
            monkeypatch.setattr(
                inner_attention, function, lambda *args, calls=calls, **kwargs: calls.append((args, kwargs))
            )
        module = cls(attention_dropout=0.25, **options).train(training)
        module(*inputs)
        module(*inputs, **lengths, causal=False)
        assert [len(args) for args, _ in calls] == [len(inputs), 3 * len(inputs)]
        assert [kwargs for _, kwargs in calls] == [expected, expected | dict(causal=False)]


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to_empty(device="cpu")])
@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_slopes_survive_casts_and_meta_tensors(change, start):
    module = MHA(96, 12, use_alibi=True, use_flash_attn=True, device=start)
    change(module)
    if start == "meta":
        module.to_empty(device="cpu")
    for inner in (module.inner_attn, module.inner_cross_attn):
        assert inner.alibi_slopes.tolist() == torch.tensor(get_alibi_slopes(12)).tolist()
    with torch.device("meta"):
        module = MHA(96, 12, use_alibi=True, use_flash_attn=True)
    assert module.to_empty(device="cpu").inner_attn.alibi_slopes[0] == 0.5


def test_slopes_follow_the_inputs_of_a_meta_module():
    module = MHA(64, 4, 2, use_alibi=True, use_flash_attn=True, device="meta")
    assert module(torch.empty(2, 5, 64, device="meta")).shape == (2, 5, 64)
    assert module.inner_cross_attn.alibi_slopes.tolist() == get_alibi_slopes(4)


@pytest.mark.cuda
def test_slopes_move_to_the_inputs_for_good(device):
    """A module from the meta device that was given parameters; a CUDA graph cannot copy from the CPU."""
    whole = MHA(64, 4, 2, use_alibi=True, use_flash_attn=True, device=device, dtype=torch.float16)
    module = MHA(64, 4, 2, use_alibi=True, use_flash_attn=True, device="meta", dtype=torch.float16)
    module.load_state_dict(whole.state_dict(), assign=True)
    x = torch.randn(2, 5, 64, device=device, dtype=torch.float16)
    with torch.inference_mode():
        module(x)
    slopes = module.inner_cross_attn.alibi_slopes
    assert slopes.device == x.device and not slopes.is_inference()
    assert torch.equal(module(x), whole(x))
    assert module.inner_cross_attn.alibi_slopes is slopes


@pytest.mark.cuda
def test_slopes_are_on_the_default_device(device):
    with device:
        module = MHA(96, 12, use_alibi=True, use_flash_attn=True)
    for inner in (module.inner_attn, module.inner_cross_attn):
        assert inner.alibi_slopes.device == module.Wqkv.weight.device


@pytest.mark.parametrize("cls", [FlashSelfAttention, SelfAttention, FlashCrossAttention, CrossAttention])
def test_what_is_in_the_place_of_the_dropout(cls):
    class Doubled(nn.Dropout):
        def forward(self, x):
            return 2 * super().forward(x)

    q, kv = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 2, 8)
    inputs = (torch.cat([q[:, :, None], kv], 2),) if "Self" in cls.__name__ else (q, kv)
    module, plain = cls(attention_dropout=0.5).train(), cls().train()
    module.drop = nn.Identity()
    torch.testing.assert_close(module(*inputs), plain(*inputs))
    for other in (Doubled(0.5), nn.Sequential(nn.Dropout(0.5))):
        module.drop = other
        with pytest.raises(TypeError, match=rf"drop must be nn.Dropout or nn.Identity, found {type(other).__name__}"):
            module(*inputs)
