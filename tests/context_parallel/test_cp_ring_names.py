"""The functions of ring-flash-attention compute attention of one process, on its divisions of tokens."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import over_processes

import flash_attn.context_parallel.compat.ring_flash_attn as names
from flash_attn import flash_attn_func, flash_attn_varlen_func

STARTS = [0, 8, 24, 40]


def zigzag(x, rank, world_size, dim):
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]], dim)


DIVIDED = {
    "ring_flash_attn": lambda x, rank, world_size, dim: x.chunk(world_size, dim)[rank],
    "zigzag_ring_flash_attn": zigzag,
    "stripe_flash_attn": lambda x, rank, world_size, dim: x.unflatten(dim, (-1, world_size)).select(dim + 1, rank),
}
OPTIONS = [dict(causal=True), dict(causal=True, window_size=(5, 0), deterministic=True), dict(softmax_scale=0.3)]


def tensors(*leading):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*leading, heads, 16, generator=generator) for heads in (4, 2, 2, 4)]


def gradients(function, inputs, dout):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse, *_ = function(*leaves)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def check_dense(group):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    *inputs, dout = tensors(2, 24)
    for name, divided in DIVIDED.items():
        own = [divided(x, rank, world_size, 1) for x in inputs]
        for options in OPTIONS:
            expected = gradients(lambda *x, o=options: flash_attn_func(*x, return_lse=True, **o), inputs, dout)
            function = getattr(names, f"{name}_func")
            call = dict(return_attn_probs=True, group=group) | options
            found = gradients(lambda *x, f=function, c=call: f(*x, **c), own, divided(dout, rank, world_size, 1))
            for x, y, dim in zip(found, expected, (1, 2, 1, 1, 1), strict=True):
                torch.testing.assert_close(x, divided(y, rank, world_size, dim), msg=f"{name} {options}")
        q, k, v = own
        packed = getattr(names, f"{name}_kvpacked_func")(q, torch.stack([k, v], 2), causal=True)
        assert torch.equal(packed, function(q, k, v, causal=True))
        packed = getattr(names, f"{name}_qkvpacked_func")(torch.stack([q, q, q], 2), 0.0, None, True)
        assert torch.equal(packed, function(q, q, q, causal=True))
        with pytest.raises(ValueError, match="dropout_p must be left out"):
            function(q, k, v, 0.1)


def check_varlen(group):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    *inputs, dout = tensors(STARTS[-1])
    starts = torch.tensor(STARTS, dtype=torch.int32)
    local = starts // world_size

    def of_each(divided, x, dim):
        lengths = starts.diff().tolist()
        return torch.cat([divided(part, rank, world_size, dim) for part in x.split(lengths, dim)], dim)

    for name in ("ring_flash_attn", "zigzag_ring_flash_attn"):
        own = [of_each(DIVIDED[name], x, 0) for x in inputs]
        for options in OPTIONS:
            expected = gradients(
                lambda *x, o=options: flash_attn_varlen_func(*x, starts, starts, 16, 16, return_lse=True, **o),
                inputs,
                dout,
            )
            function = getattr(names, f"{name}_varlen_func")
            call = dict(return_attn_probs=True, group=group) | options
            found = gradients(
                lambda *x, f=function, c=call: f(*x, local, 16 // world_size, **c), own, of_each(DIVIDED[name], dout, 0)
            )
            for x, y, dim in zip(found, expected, (0, 1, 0, 0, 0), strict=True):
                torch.testing.assert_close(x, of_each(DIVIDED[name], y, dim), msg=f"{name} {options}")


def check_llama3(group):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    *inputs, dout = tensors(STARTS[-1])
    starts = torch.tensor(STARTS, dtype=torch.int32)
    own = [x.chunk(world_size)[rank] for x in inputs]
    for options in OPTIONS:
        expected = gradients(
            lambda *x, o=options: flash_attn_varlen_func(*x, starts, starts, 16, 16, return_lse=True, **o), inputs, dout
        )
        causal = options.get("causal", False)
        *lengths, keys = names.llama3_flash_attn_prepare_cu_seqlens(starts, causal, rank, world_size)
        assert lengths[2:] == [each.diff().max() for each in lengths[:2]]
        for stride in (1, 2):
            call = dict(return_attn_probs=True, group=group) | options
            found = gradients(
                lambda *x, s=stride, n=lengths, k=keys, c=call: names.llama3_flash_attn_varlen_func(*x, *n, s, k, **c),
                own,
                dout.chunk(world_size)[rank],
            )
            for x, y, dim in zip(found, expected, (0, 1, 0, 0, 0), strict=True):
                torch.testing.assert_close(x, y.chunk(world_size, dim)[rank], msg=f"{options}")
    q, k, v = own
    with pytest.raises(ValueError, match="heads_k_stride must be a divisor of the number of key heads, 2, found 3"):
        names.llama3_flash_attn_varlen_func(q, k, v, *lengths, 3, keys)
    with pytest.raises(ValueError, match="dropout_p and alibi_slopes must be left out"):
        names.llama3_flash_attn_varlen_func(q, k, v, *lengths, 1, keys, 0.5)
    with pytest.raises(ValueError, match=r"window_size must be \(-1, -1\) without causal here, found \(3, 2\)"):
        names.llama3_flash_attn_varlen_func(q, k, v, *lengths, 1, keys, window_size=(3, 2))
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] must be divisible by world_size, 3, found 40"):
        names.llama3_flash_attn_prepare_cu_seqlens(starts, True, 0, 3)


def check_lengths(group):
    """A tensor of lengths that was written to is read again."""
    *inputs, _ = tensors(20)
    starts = torch.tensor([0, 6, 20])
    for change in (starts, torch.tensor([0, 14, 20])):
        starts.copy_(change)
        found = names.ring_flash_attn_varlen_func(*inputs, starts, 20, causal=True, group=group)
        expected = names.ring_flash_attn_varlen_func(*inputs, starts.clone(), 20, causal=True, group=group)
        assert torch.equal(found, expected)
        with torch.inference_mode():
            assert names._lengths(starts.clone()) == tuple(starts.diff().tolist())


def check_transformers(group):
    from transformers import AttentionInterface

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    *inputs, _ = tensors(STARTS[-1])
    starts = torch.tensor(STARTS, dtype=torch.int32)
    before = AttentionInterface().get("flash_attention_2")
    names.substitute_hf_flash_attn(group, 1)
    try:
        attention = AttentionInterface()["flash_attention_2"]
        q, k, v = (x.chunk(world_size)[rank].transpose(0, 1)[None] for x in inputs)
        with pytest.raises(RuntimeError, match="update_ring_flash_attn_params must be called before the model"):
            attention(None, q, k, v, None)
        names.update_ring_flash_attn_params(starts, group)
        for window in (None, 4):
            out, _ = attention(None, q, k, v, None, scaling=0.2, sliding_window=window)
            width = (-1, -1) if window is None else (window - 1, 0)
            whole = flash_attn_varlen_func(
                *inputs, starts, starts, 16, 16, softmax_scale=0.2, causal=True, window_size=width
            )
            torch.testing.assert_close(out[0], whole.chunk(world_size)[rank])
        for change, match in [
            (dict(s_aux=torch.ones(4)), "s_aux must be None here, found a Tensor"),
            (dict(position_bias=torch.ones(1)), "position_bias must be None here, found a Tensor"),
            (dict(softcap=2.0), "softcap must be None here, found 2.0"),
            (dict(attention_mask=torch.ones(1, 40)), "attention_mask must be None here, found a Tensor"),
            (dict(is_causal=False), "is_causal must be True here, found False"),
            (dict(module=SimpleNamespace(is_causal=False)), "is_causal must be True here, found False"),
            (dict(query=torch.cat([q, q])), r"query.shape\[0\] must be 1"),
        ]:
            with pytest.raises(ValueError, match=match):
                attention(**dict(module=None, query=q, key=k, value=v, attention_mask=None) | change)
    finally:
        names._OF_BATCH.clear()
        AttentionInterface.register("flash_attention_2", before)


@pytest.mark.parametrize(
    "check",
    [check_dense, check_varlen, check_llama3, check_lengths, check_transformers],
    ids=lambda check: check.__name__,
)
def test_over_two(check):
    over_processes(2, check)


def test_signatures_are_theirs():
    rest = "dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group"
    found = {name: ", ".join(inspect.signature(getattr(names, name)).parameters) for name in names.__all__}
    for name, shown in found.items():
        if not name.endswith("_func"):
            continue
        first = "qkv, " if "qkvpacked" in name else "q, kv, " if "kvpacked" in name else "q, k, v, "
        lengths = "cu_seqlens, max_seqlen, " if "varlen" in name else ""
        if name.startswith("llama3"):
            lengths = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, "
        assert shown == first + lengths + rest, name
    assert len(found) == 21
