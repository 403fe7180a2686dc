"""Decoding over a divided cache is decoding over a whole one."""

import math

import pytest
import torch
import torch.distributed as dist
from cases import cover
from processes import ON_GPUS, over_processes

from flash_attn import flash_attn_with_kvcache
from flash_attn.context_parallel import _decode, cp_attn_with_kvcache
from flash_attn.utils.distributed import device_of

MASKS = {
    "full": dict(),
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(6, -1)),
    "both sides": dict(window_size=(4, 1)),
    "chunks": dict(causal=True, attention_chunk=8),
}
FACTORS = dict(
    mask=list(MASKS),
    seqlen_q=[1, 5],
    new=[0, 1, 5],
    interleave=[1, 4],
    divided=[False, True],
    sink=[False, True],
    rotary=[False, True],
    rows=[False, True],
    lengths=["int", "tensor"],
)
CASES = cover(FACTORS, valid=lambda row: row["new"] > 0 or not row["rotary"])
HEADS, HEADS_K, DIM, CAPACITY = 4, 2, 16, 48


def positions_of(rank, world_size, interleave):
    position = torch.arange(CAPACITY)
    return position[position // interleave % world_size == rank]


def check(group, cases, dtype):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    device = device_of(group)
    for case in cases:
        generator = torch.Generator().manual_seed(1)

        def randn(*shape, generator=generator):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        batch, interleave, new = 3, case["interleave"], case["new"]
        caches = [randn(batch + 1, CAPACITY, HEADS_K, DIM) for _ in range(2)]
        q = randn(batch, case["seqlen_q"], HEADS, DIM)
        k, v = [randn(batch, new, HEADS_K, DIM) for _ in range(2)] if new else (None, None)
        options = dict(MASKS[case["mask"]])
        if case["lengths"] == "int":
            options["cache_seqlens"] = 11
        else:
            options["cache_seqlens"] = torch.tensor([0, 13, CAPACITY - 8], dtype=torch.int32, device=device)
        if case["rows"]:
            options["cache_batch_idx"] = torch.tensor([2, 3, 0], dtype=torch.int32, device=device)
        else:
            caches = [cache[:batch].contiguous() for cache in caches]
        if case["sink"]:
            options["learnable_sink"] = randn(HEADS)
        if case["rotary"]:
            angles = torch.outer(torch.arange(CAPACITY), 10 ** -torch.linspace(0, 1, DIM // 2)).to(device)
            options |= dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
        whole = [cache.clone() for cache in caches]
        out, lse = flash_attn_with_kvcache(q, *whole, k, v, return_softmax_lse=True, **options)

        own = positions_of(rank, world_size, interleave).to(device)
        parts = [cache[:, own].contiguous() for cache in caches]
        heads = slice(0, HEADS)
        if case["divided"]:
            heads = slice(rank * HEADS // world_size, (rank + 1) * HEADS // world_size)
            if case["sink"]:
                options["learnable_sink"] = options["learnable_sink"][heads]
        found, found_lse = cp_attn_with_kvcache(
            q[:, :, heads],
            *parts,
            k,
            v,
            group=group,
            cp_interleave=interleave,
            divided_heads=case["divided"],
            return_softmax_lse=True,
            **options,
        )
        for part, cache in zip(parts, whole, strict=True):
            assert torch.equal(part, cache[:, own]), f"cache of {case}"
        tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found, out[:, :, heads], msg=f"out of {case}", **tolerance)
        torch.testing.assert_close(found_lse, lse[:, heads], msg=f"lse of {case}", rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_one_cache(world_size):
    over_processes(world_size, check, CASES if world_size == 4 else CASES[world_size % 2 :: 2], torch.float32)


@pytest.mark.parametrize("world_size", ON_GPUS)
def test_as_one_cache_on_gpus(world_size):
    over_processes(world_size, check, CASES, torch.bfloat16, backend="nccl")


def check_pages(group):
    """Each rank has pages of its own positions."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 24, HEADS_K, DIM, generator=generator) for _ in range(2))
    q = torch.randn(2, 3, HEADS, DIM, generator=generator)
    lengths = torch.tensor([24, 17], dtype=torch.int32)
    own = torch.arange(24)[torch.arange(24) % world_size == rank]
    table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)
    pages = [torch.zeros(6, 4, HEADS_K, DIM) for _ in range(2)]
    for page, x in zip(pages, (k, v), strict=True):
        page[table.long()] = x[:, own].unflatten(1, (3, 4))
    found = cp_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table, causal=True, group=group)
    torch.testing.assert_close(found, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True))
    for change, match in [
        (dict(k=k[:, :1], v=v[:, :1]), "k must be None with block_table over a divided cache"),
        (dict(k=k[:, :1]), "k and v must be given together"),
        (dict(cache_seqlens=None), "cache_seqlens must say how long"),
        (dict(cache_seqlens=lengths[:1]), r"the shape of cache_seqlens must be \(2,\), found \(1,\)"),
        (dict(alibi_slopes=torch.ones(4)), "alibi_slopes must be None over a divided cache, found a Tensor"),
        (dict(cache_leftpad=lengths), "cache_leftpad must be None over a divided cache"),
        (dict(cp_interleave=0), "cp_interleave must be at least 1"),
        (dict(learnable_sink=torch.ones(3)), r"learnable_sink must have shape \(4,\)"),
        (dict(rotary_cos=torch.ones(24, 8)), "rotary_cos must be given with rotary_sin and k"),
    ]:
        arguments = dict(cache_seqlens=lengths, block_table=table, group=group) | change
        with pytest.raises(ValueError, match=match):
            cp_attn_with_kvcache(q, *pages, **arguments)


def test_pages_and_errors():
    over_processes(2, check_pages)


def check_full(group):
    """All ranks refuse a new key for which rank 0 has no room, and no cache is written."""
    q = torch.ones(2, 1, HEADS, DIM)
    k = v = torch.ones(2, 1, HEADS_K, DIM)
    caches = [torch.zeros(2, 8, HEADS_K, DIM) for _ in range(2)]
    options = dict(group=group, causal=True)
    for length in (16, torch.tensor([3, 16]), torch.tensor([16, 3], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"rank 0's part of .* = 17 positions must be at most .* 8, found 9"):
            cp_attn_with_kvcache(q, *caches, k, v, cache_seqlens=length, **options)
    with pytest.raises(ValueError, match="cache_seqlens must be at least 0, found -1"):
        cp_attn_with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([-1, 3]), **options)
    table = torch.zeros(2, 2, dtype=torch.int32)
    pages = [torch.zeros(4, 4, HEADS_K, DIM) for _ in range(2)]
    with pytest.raises(ValueError, match=r"rank 0's part of .* = 17 positions must be at most .* 8, found 9"):
        cp_attn_with_kvcache(q, *pages, cache_seqlens=17, block_table=table, **options)
    assert not any(cache.any() for cache in caches)


def test_full_caches_are_refused_on_all_ranks():
    over_processes(2, check_full)


def test_full_caches_keep_what_they_hold():
    """Also where lengths are on a device, and are not read."""
    caches = [torch.zeros(1, 8, HEADS_K, DIM) for _ in range(2)]
    new = torch.ones(1, 2, HEADS_K, DIM)
    _decode._append(*caches, new, new, torch.tensor([7]), lambda lengths: lengths, None, 0, 1, 1)
    assert all(cache[:, 7].eq(1).all() and not cache[:, :7].any() for cache in caches)


def test_sequences_without_keys_give_nothing():
    over_processes(2, check_empty)


def check_empty(group):
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 8, 1, 16)
    out, lse = cp_attn_with_kvcache(q, cache, cache, cache_seqlens=0, group=group, return_softmax_lse=True)
    assert (out == 0).all() and (lse == math.inf).all()
