"""The modules of yunchang compute attention of one process, over groups for heads and for keys."""

import pytest
import torch
import torch.distributed as dist
from processes import over_processes

import flash_attn.context_parallel.compat.yunchang as names
from flash_attn import flash_attn_func


def gradients(function, inputs, dout):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def check(group, ulysses, ring):
    rank, size = dist.get_rank(group), ulysses * ring
    generator = torch.Generator().manual_seed(1)
    *inputs, dout = (torch.randn(2, 24, heads, 16, generator=generator) for heads in (4, 2, 2, 4))
    names.set_seq_parallel_pg(ulysses, ring, rank, dist.get_world_size(group))
    place = rank % size
    for kind in ("basic", "zigzag", "strip"):
        extract = names.EXTRACT_FUNC_DICT[kind]
        own = [extract(x, place, size, rd=ring, ud=ulysses) for x in (*inputs, dout)]
        for options in (dict(causal=True), dict(causal=True, window_size=(5, 0), softcap=2.0), dict()):
            expected = gradients(lambda *x, o=options: flash_attn_func(*x, **o), inputs, dout)
            module = names.LongContextAttention(ring_impl_type=kind)
            found = gradients(lambda *x, o=options, m=module: m(*x, **o), own[:3], own[3])
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, extract(y, place, size, rd=ring, ud=ulysses), msg=f"{kind} {options}")
        packed = names.LongContextAttentionQKVPacked(ring_impl_type=kind)(torch.stack([own[0]] * 3, 2), causal=True)
        assert torch.equal(packed, module(own[0], own[0], own[0], causal=True))
        assert torch.equal(packed, module(own[0], own[0], own[0], causal=True, return_attn_probs=True))


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (4, 1), (1, 4), (2, 1)])
def test_over_four(ulysses, ring):
    over_processes(4, check, ulysses, ring)


def check_rest(group):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    q = torch.randn(1, 24, 4, 16, generator=torch.Generator().manual_seed(1))
    own = names.basic_extract_local(q, rank, world_size)
    out = names.UlyssesAttention()(own, own, own, causal=True)
    whole = flash_attn_func(q, q, q, causal=True)
    torch.testing.assert_close(out, names.basic_extract_local(whole, rank, world_size))
    names.set_seq_parallel_pg(2, 2, rank, world_size, use_ulysses_low=False)  # ranks 0 and 2 share heads
    for kind, extract in names.EXTRACT_FUNC_DICT.items():
        own = extract(q, rank, world_size, rd=2, ud=2)
        out = names.LongContextAttention(ring_impl_type=kind)(own, own, own, causal=True)
        torch.testing.assert_close(out, extract(whole, rank, world_size, rd=2, ud=2), msg=kind)
    ring = names.RING_IMPL_QKVPACKED_DICT["zigzag"]
    names.set_seq_parallel_pg(1, world_size, rank, world_size)
    own = names.zigzag_extract_local(q, rank, world_size, world_size, 1)
    out, lse, none = ring(torch.stack([own] * 3, 2), causal=True, softcap=2.0, return_attn_probs=True)
    assert none is None and lse.shape == (1, 4, 6)
    whole = flash_attn_func(q, q, q, causal=True, softcap=2.0)
    torch.testing.assert_close(out, names.zigzag_extract_local(whole, rank, world_size, world_size, 1))
    out = names.UlyssesAttention(attn_type=names.AttnType.from_string("fa"))(q[:, :6], q[:, :6], q[:, :6])
    assert out.shape == q[:, :6].shape
    names._GROUPS.clear()
    with pytest.raises(RuntimeError, match="set_seq_parallel_pg must be called before attention"):
        names.LongContextAttention()(own, own, own)
    with pytest.raises(ValueError, match=r"sp_ulysses_degree . sp_ring_degree must be a divisor of 4, found 3"):
        names.set_seq_parallel_pg(3, 1, rank, world_size)


def test_other_groups():
    over_processes(4, check_rest)


def test_what_modules_refuse():
    for options, match in [
        (dict(ring_impl_type="spiral"), "ring_impl_type must be one of basic, .*, zigzag, strip, found 'spiral'"),
        (dict(scatter_idx=1), "scatter_idx must be 2, found 1"),
        (dict(gather_idx=2), "gather_idx must be 1, found 2"),
    ]:
        with pytest.raises(ValueError, match=match):
            names.LongContextAttention(**options)


@pytest.mark.parametrize("name, part", [("zigzag", [1, 6]), ("strip", [1, 5])])
def test_parts_of_other_groups_are_in_order_of_the_ranks(name, part, monkeypatch):
    """`set_seq_parallel_pg` has put ranks in another order, but for a mesh of other degrees than are asked for here."""
    monkeypatch.setattr(names, "_GROUPS", dict(places=[0, 2, 1, 3], ulysses=2))
    extract, x = names.EXTRACT_FUNC_DICT[name], torch.arange(8)[None]
    assert extract(x, 1, 4, rd=4, ud=1).flatten().tolist() == part
    of_mesh = extract(x, 1, 4, rd=2, ud=2)
    monkeypatch.setattr(names, "_GROUPS", {})
    assert extract(x, 1, 4, rd=4, ud=1).flatten().tolist() == part
    assert torch.equal(extract(x, 2, 4, rd=2, ud=2), of_mesh)
