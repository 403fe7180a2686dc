"""Attention over ranks is attention of one process: values, lse, gradients, methods, layouts, masks, errors."""

import math

import pytest
import torch
import torch.distributed as dist
from cases import cover
from compare import assert_error_ratio
from oracle import attention
from processes import ON_GPUS, over_processes

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.context_parallel import (
    Plan,
    cp_attn_func,
    cp_attn_kvpacked_func,
    cp_attn_qkvpacked_func,
    seq_to_heads,
    heads_to_seq,
)

MASKS = {
    "causal": dict(causal=True),
    "full": dict(),
    "window": dict(causal=True, window_size=(5, -1)),
    "both sides": dict(window_size=(3, 2)),
    "left": dict(window_size=(4, -1)),
    "chunks": dict(causal=True, attention_chunk=7),
}
FACTORS = dict(
    method=["gather", "ulysses"],
    layout=["zigzag", "balanced", "contiguous", "striped"],
    mask=list(MASKS),
    seqlens=[[48], [37], [1, 0, 20, 3, 1, 18], [3], [16, 16, 16]],
    heads=[(4, 4), (4, 2), (4, 1), (6, 3)],
    softcap=[0.0, 2.0],
    sink=[False, True],
    batch=[1, 2],
    padding=[None, 3],
    granularity=[1, 128],
    dtype=[torch.float32, torch.bfloat16],
)
CASES = cover(FACTORS, valid=lambda row: not (row["layout"] == "striped" and row["mask"] == "chunks" and row["softcap"]))
assert {row["method"] for row in CASES} == {"gather", "ulysses"}


def tensors(case, head_dim, device):
    """q, k, v, sink, dout and dlse of the whole row; the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    heads, heads_k = case["heads"]
    total, batch = sum(case["seqlens"]), case["batch"]

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device, case["dtype"])

    q, dout = randn(batch, total, heads, head_dim), randn(batch, total, heads, head_dim)
    k, v = randn(batch, total, heads_k, head_dim), randn(batch, total, heads_k, head_dim)
    sink = randn(heads) if case["sink"] else None
    return q, k, v, sink, dout, torch.randn(batch, heads, total, generator=generator).to(device)


def by_documents(function, seqlens, q, k, v, sink, chunk):
    """out and lse of function(q, k, v, sink) for each document, or each chunk of one, one after the other."""
    outs, lses, at = [], [], 0
    for length in [min(chunk, n - i) for n in seqlens for i in range(0, n, chunk)] if chunk else seqlens:
        part = slice(at, at + length)
        out, lse = function(q[:, part], k[:, part], v[:, part], sink)
        outs.append(out)
        lses.append(lse)
        at += length
    return torch.cat(outs, 1), torch.cat(lses, 2)


def results(function, inputs, dout, dlse):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    grads = iter(torch.autograd.grad([out, lse], [x for x in leaves if x is not None], [dout.to(out.dtype), dlse]))
    return out.detach(), lse.detach(), *(None if x is None else next(grads) for x in leaves)


def check(group, case, head_dim=16):
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    q, k, v, sink, dout, dlse = tensors(case, head_dim, device)
    options = dict(MASKS[case["mask"]])
    chunk = options.pop("attention_chunk", 0)
    shares = dict(layout=case["layout"], method=case["method"], granularity=case["granularity"])
    plan = Plan(case["seqlens"], group, **shares)
    if case["padding"]:
        plan = Plan(case["seqlens"], group, **shares, pad_to=padded_size(plan) + case["padding"])

    def whole(q, k, v, sink):
        exact = q.dtype == torch.float64
        if exact:
            return by_documents(
                lambda q, k, v, sink: attention(q, k, v, learnable_sink=sink, softcap=case["softcap"], **options),
                case["seqlens"], q, k, v, sink, chunk,
            )  # fmt: skip
        return by_documents(
            lambda q, k, v, sink: flash_attn_func(
                q, k, v, learnable_sink=sink, softcap=case["softcap"], return_lse=True, **options
            ),
            case["seqlens"], q, k, v, sink, chunk,
        )  # fmt: skip

    def ours(q, k, v, sink):
        return cp_attn_func(
            q, k, v, softcap=case["softcap"], plan=plan, learnable_sink=sink, return_lse=True,
            **(options | (dict(attention_chunk=chunk) if chunk else {})),
        )  # fmt: skip

    inputs = q, k, v, sink
    exact = results(whole, [None if x is None else x.double() for x in inputs], dout.double(), dlse.double())
    alone = results(whole, inputs, dout, dlse)
    parts = [plan.shard(x) for x in (q, k, v)]
    out, lse, *grads = results(ours, [*parts, sink], plan.shard(dout), plan.shard(dlse, dim=2))
    padding = slice(plan.own_tokens, None)
    assert (out[:, padding] == 0).all() and (lse[:, :, padding] == math.inf).all()
    found = [plan.unshard(out), plan.unshard(lse, 2), *map(plan.unshard, grads[:3])]
    for x in grads[:3]:
        assert (x[:, padding] == 0).all()
    if sink is not None:
        dist.all_reduce(grads[3], group=group)
        found.append(grads[3])
    for name, x, expected, baseline in zip(["out", "lse", "dq", "dk", "dv", "dsink"], found, exact, alone, strict=False):
        assert_error_ratio(x, expected, baseline, name=f"{name} of {case} on {plan}", at_most=2.0)


def padded_size(plan):
    sizes = torch.tensor([plan.tokens]).to(plan.positions.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=plan.group)
    return int(sizes)


def check_all(group, cases, head_dim):
    world_size = dist.get_world_size(group)
    for case in cases:
        if case["method"] == "gather" or case["heads"][0] >= world_size:
            check(group, case, head_dim)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_as_one_process(world_size):
    cases = CASES if world_size in (2, 8) else CASES[world_size % 2 :: 2]
    over_processes(world_size, check_all, cases, 16)
