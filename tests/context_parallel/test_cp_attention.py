"""Attention over ranks is attention of one process: values, lse, gradients, methods, layouts, masks, errors."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from cases import cover
from compare import assert_error_ratio, unavoidable
from oracle import attention
from processes import ON_GPUS, compiled_on_last, over_processes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flash_attn import flash_attn_func
from flash_attn.context_parallel import (
    Plan,
    cp_attn_func,
    cp_attn_kvpacked_func,
    cp_attn_qkvpacked_func,
    heads_to_seq,
    merge_attention,
    seq_to_heads,
)
from flash_attn.utils.distributed import device_of

MASKS = {
    "causal": dict(causal=True),
    "full": dict(),
    "window": dict(causal=True, window_size=(5, -1)),
    "both sides": dict(window_size=(3, 2)),
    "left": dict(window_size=(4, -1)),
    "chunks": dict(causal=True, attention_chunk=7),
}
FACTORS = dict(
    method=["gather", "ulysses", "usp"],
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
CASES = cover(FACTORS, valid=lambda row: row["method"] != "usp" or not row["padding"])


def tensors(case, head_dim, device):
    """q, k, v, sink, dout and dlse of the whole row; the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    heads, heads_k = case["heads"]
    total, batch = sum(case["seqlens"]), case["batch"]

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device, case["dtype"])

    q, dout = randn(batch, total, heads, head_dim), randn(batch, total, heads, head_dim)
    k, v = randn(batch, total, heads_k, head_dim), randn(batch, total, heads_k, head_dim)
    sink = randn(heads).float() if case["sink"] else None  # float32, so that parts of its gradient are not rounded
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
    shares |= dict(head_groups=case.get("head_groups"))
    if case["method"] == "usp":
        group = mesh_of(group)
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
        dist.all_reduce(grads[3], group=plan.group)
        found.append(grads[3])
    for name, x, expected, baseline in zip(
        ["out", "lse", "dq", "dk", "dv", "dsink"], found, exact, alone, strict=False
    ):
        # A sum of many rounded terms: the error of one process on a few heads says little about what is usual.
        plus = unavoidable(expected, x.dtype)
        if name == "dsink":
            plus += 4 * rounding_of_dsink(exact[0], exact[1], sink, dout)
        assert_error_ratio(x, expected, baseline, name=f"{name} of {case} on {plan}", at_most=2.0, plus=plus)


def rounding_of_dsink(out, lse, sink, dout):
    """The largest standard deviation of the gradient of a head's sink, whose terms have out rounded to dout's dtype.

    That gradient is the sum over rows of -exp(sink - lse) (dout . out - dlse). Rounding moves an element of out by up
    to half a unit in its last place, with a standard deviation of that unit over the root of 12.
    """
    unit = torch.finfo(dout.dtype).eps * torch.exp2(out.abs().log2().floor())
    moved = (dout.double() * unit).square().sum(-1) / 12  # (batch, rows, heads)
    weight = (sink.double()[:, None] - lse).exp()
    return (weight.square() * moved.transpose(1, 2)).sum((0, 2)).sqrt().max().item()


@functools.cache
def mesh_of(group):
    """Two dimensions, of which the second has two ranks if that divides the group."""
    ulysses = 2 if dist.get_world_size(group) % 2 == 0 else 1
    shape = dist.get_world_size(group) // ulysses, ulysses
    return init_device_mesh(device_of(group).type, shape, mesh_dim_names=("ring", "ulysses"))


def padded_size(plan):
    sizes = torch.tensor([plan.tokens]).to(plan.positions.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=plan.group)
    return int(sizes)


def check_all(group, cases, head_dim):
    world_size = dist.get_world_size(group)
    for case in cases:
        if case["method"] != "ulysses" or case["heads"][0] >= world_size:
            check(group, case, head_dim)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_as_one_process(world_size):
    cases = CASES if world_size in (2, 8) else CASES[world_size % 2 :: 2]
    over_processes(world_size, check_all, cases, 16)


@pytest.mark.parametrize("world_size", ON_GPUS)
def test_as_one_process_on_gpus(world_size):
    """Chunks of several blocks of keys, in documents and not."""
    cases = [
        row | dict(seqlens=seqlens, dtype=torch.bfloat16, granularity=128)
        for row, seqlens in zip(CASES, 10 * [[2048], [1500, 0, 37, 700, 1], [4096], [3000, 1000]], strict=False)
    ]
    over_processes(world_size, check_all, cases, 64, backend="nccl")


def check_groups(group):
    """Groups of heads that are computed while others are sent, or one after the other."""
    row = next(row for row in CASES if row["method"] == "gather")
    same = dict(method="gather", padding=None, softcap=0.0, sink=False, batch=1, granularity=128, dtype=torch.bfloat16)
    for overlaps in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plan, "overlaps", overlaps)
            for seqlens, layout in (([4096], "zigzag"), ([3000, 1000], "balanced"), ([4096], "contiguous")):
                for mask, head_groups in (("causal", 8), ("causal", 2), ("window", 4)):
                    case = dict(seqlens=seqlens, layout=layout, mask=mask, head_groups=head_groups, heads=(16, 8))
                    check(group, row | same | case, 64)
            plan = Plan([4096], group, head_groups=8)
            options = dict(causal=True, deterministic=True, heads=(16, 8), dtype=torch.bfloat16)
            first = run(plan, **options)
            for _ in range(5):
                assert all(map(torch.equal, first, run(plan, **options)))


@pytest.mark.parametrize("world_size", ON_GPUS)
def test_groups_on_gpus(world_size):
    over_processes(world_size, check_groups, backend="nccl")


def run(plan, function=cp_attn_func, heads=(4, 2), batch=1, dtype=torch.float32, **options):
    """out, lse and the gradients of q, k, v of this rank, for the same random row in each call."""
    generator = torch.Generator().manual_seed(2)
    device = plan.positions.device
    shapes = [(batch, plan.total, n, 16) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (plan.shard(torch.randn(*shape, generator=generator).to(device, dtype)) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves, plan=plan, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def check_packed(group):
    for method in ("gather", "ulysses"):
        plan = Plan([20, 9], group, method=method, granularity=1)
        expected = run(plan, causal=True)
        kv = run(plan, lambda q, k, v, **rest: cp_attn_kvpacked_func(q, torch.stack([k, v], 2), **rest), causal=True)
        assert all(map(torch.equal, kv, expected))
        expected = run(plan, heads=(4, 4), window_size=(3, 1))
        qkv = run(
            plan,
            lambda q, k, v, **rest: cp_attn_qkvpacked_func(torch.stack([q, k, v], 2), **rest),
            heads=(4, 4),
            window_size=(3, 1),
        )
        assert all(map(torch.equal, qkv, expected))

        def without_batch(q, k, v, return_lse, **rest):
            out, lse, none = cp_attn_func(q[0], k[0], v[0], return_attn_probs=True, **rest)
            assert none.numel() == 0 and torch.equal(out, cp_attn_func(q[0], k[0], v[0], **rest))
            return out[None], lse[None]

        found = run(plan, without_batch, heads=(4, 4), window_size=(3, 1))
        assert all(map(torch.equal, found, expected))


def check_nothing(group):
    """No tokens at all, and ranks without any."""
    for seqlens in ([0], [0, 0], [1], [1, 1]):
        for method in ("gather", "ulysses"):
            plan = Plan(seqlens, group, method=method)
            out, lse, *grads = run(plan, causal=True)
            assert out.shape == (1, plan.tokens, 4, 16) and lse.shape == (1, 4, plan.tokens)
            assert all(map(torch.isfinite, [x.sum() for x in (out, lse, *grads)]))
    for method in ("gather", "ulysses"):  # nor a batch of no rows
        plan = Plan([16, 8], group, method=method)
        q, k, v = (torch.randn(0, plan.tokens, 4, 8, requires_grad=True) for _ in range(3))
        out, lse = cp_attn_func(q, k, v, causal=True, plan=plan, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, (0, 4, plan.tokens))
        assert all(grad.shape == q.shape for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def check_again(group):
    """Twice the same bits; and in groups of heads, of which the next one is fetched meanwhile."""
    for seqlens, window in (([40], (-1, -1)), ([9, 30, 1, 40], (6, -1))):
        options = dict(causal=True, window_size=window, deterministic=True, heads=(8, 4), dtype=torch.bfloat16)
        plans = [Plan(seqlens, group, granularity=1, head_groups=n) for n in (1, 1, 2, 4)]
        first, *others = (run(plan, **options) for plan in plans)
        with pytest.MonkeyPatch.context() as patch:  # and one after the other
            patch.setattr(Plan, "overlaps", False)
            others += [run(plan, **options) for plan in plans[2:]]
        for other in others:
            assert all(map(torch.equal, first, other))


def check_precision(group):
    """Partial sums do not lose precision: gradients are as far from the exact ones as those of one process."""
    for has_kernel in (False, True):  # kernels get rounded tensors, the reference elsewhere gets float32
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flash_attn.context_parallel._attention._has_kernel", lambda q, has=has_kernel: has)
            for seqlens in ([512], [509], [100, 412]):
                check_precision_of(group, seqlens)
            for method, seqlens in (("ulysses", [509]), ("ulysses", [100, 412]), ("usp", [100, 412])):
                check_precision_of(group, seqlens, method, heads=(4, 1))  # ranks share the key head


def check_precision_of(group, seqlens, method="gather", heads=(2, 1)):
    options = dict(causal=True, heads=heads, dtype=torch.bfloat16)
    plan = Plan(seqlens, mesh_of(group) if method == "usp" else group, method=method, granularity=1)
    one = Plan(seqlens, only_me(), method="gather" if method == "usp" else method, granularity=1)
    found = [plan.unshard(x) for x in run(plan, **options)[2:]]
    alone = run(one, **options)[2:]
    exact = run(one, **options | dict(dtype=torch.float32))[2:]
    for name, x, y, true in zip("qkv", found, alone, exact, strict=True):
        ours, theirs = ((each.double() - true).square().mean().sqrt().item() for each in (x, y))
        assert ours <= 1.05 * theirs, f"d{name} of {seqlens} with {method}: {ours} after {theirs}"


_ALONE = []


def only_me():
    """A group of this process alone."""
    if not _ALONE:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _ALONE.append(groups[dist.get_rank()])
    return _ALONE[0]


def check_one_rank(group):
    """A group of one rank gives the bits of one process."""
    for method in ("gather", "ulysses"):
        for dtype in (torch.float32, torch.bfloat16):
            plan = Plan([40], only_me(), method=method)
            found = run(plan, causal=True, dtype=dtype)
            plain = run(plan, lambda *qkv, plan, **rest: flash_attn_func(*qkv, **rest), causal=True, dtype=dtype)
            for name, x, y in zip(["out", "lse", "dq", "dk", "dv"], found, plain, strict=True):
                assert torch.equal(x, y), f"{name} with {method} in {dtype}"


def check_dropout(group):
    """Ulysses drops what one process drops, with the same random state; and takes slopes of ALiBi."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    shared = dict(heads=(4, 1), batch=2, dtype=torch.bfloat16)  # ranks have the same key head
    for seqlens, options in (
        ([33], dict(dropout_p=0.4)),
        ([20, 13], dict(alibi_slopes=slopes, causal=True)),
        ([20, 13], dict(alibi_slopes=slopes, softcap=3.0, deterministic=True, **shared)),
    ):
        plan, one = Plan(seqlens, group, method="ulysses"), Plan(seqlens, only_me(), method="ulysses")
        outs = []
        for each in (plan, one):
            torch.manual_seed(5)
            outs.append([each.unshard(x, dim) for x, dim in zip(run(each, **options), (1, 2, 1, 1, 1), strict=True)])
        for x, y in zip(*outs, strict=True):
            torch.testing.assert_close(x, y)
    torch.manual_seed(5)
    several = run(plan, batch=2, dropout_p=0.4)[0]
    torch.manual_seed(5 + 1)
    assert not torch.equal(several, run(plan, batch=2, dropout_p=0.4)[0])
    q = torch.zeros(2, plan.tokens, 4, 16)
    same = torch.ones(2, plan.tokens, 4, 16)
    torch.manual_seed(5)
    kept = plan.unshard(cp_attn_func(q, q, same, dropout_p=0.4, plan=plan)).flatten(0, 1)[..., 0]
    assert len({tuple(column.tolist()) for column in kept.t()}) == 4  # heads on different ranks drop different keys


def check_compiled(group):
    def attend(q, k, v, sink, plan):
        return cp_attn_func(q * 2, k, v, causal=True, plan=plan, learnable_sink=sink, return_lse=True)

    for method, heads_k, dtype in [
        ("gather", 2, torch.float32),
        ("ulysses", 2, torch.float32),
        ("ulysses", 1, torch.bfloat16),  # which both ranks have
        ("usp", 1, torch.bfloat16),
    ]:
        compiled = compiled_on_last(group, attend, fullgraph=True, backend="aot_eager")
        for seqlens in ([24], [11, 13]):
            ranks = mesh_of(group) if method == "usp" else group
            plan = Plan(seqlens, ranks, method=method, layout="contiguous", granularity=1)
            results = []
            for function in (attend, compiled):
                leaves = [
                    torch.randn(1, plan.tokens, n, 16, generator=torch.Generator().manual_seed(n)).to(dtype)
                    for n in (4, heads_k)
                ]
                q, k, v = leaves[0].requires_grad_(), leaves[1].requires_grad_(), leaves[1] + 1
                sink = torch.zeros(4, requires_grad=True)
                out, lse = function(q, k, v, sink, plan)
                results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), [q, k, sink])])
            for x, y in zip(*results, strict=True):
                torch.testing.assert_close(x, y)


def check_graphs(group):
    """Plans of other numbers of documents run the graphs of those before."""
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    def attend(x, plan):
        return cp_attn_func(x, x, x, causal=True, plan=plan)

    for method in ("gather", "ulysses"):
        torch.compiler.reset()
        frames.clear()
        compiled = compiled_on_last(group, attend, backend=backend)
        counts = []
        for seqlens in ([11, 13], [5, 6, 13], [1, 2, 3, 18], [4] * 6, [2] * 12):
            plan = Plan(seqlens, group, method=method, layout="contiguous", granularity=1)
            x = torch.randn(1, plan.tokens, 2, 16)
            torch.testing.assert_close(compiled(x, plan), attend(x, plan))
            counts.append(len(frames))
        assert counts[-1] == counts[2] and (counts[0] == 1 or dist.get_rank(group) < dist.get_world_size(group) - 1), (
            f"{method}: {counts}"
        )


def check_checkpoint(group):
    """Recomputed in the backward, with another plan in between."""
    plan, other = Plan(24, group, granularity=1), Plan([3, 21], group, granularity=1)
    x = torch.randn(1, plan.tokens, 2, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def attend(x):
        return cp_attn_func(x, x, x, causal=True, plan=plan)

    (expected,) = torch.autograd.grad(attend(x).square().sum(), x)
    out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
    run(other)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(found, expected)


def check_second_derivative(group):
    plan = Plan(8, group, granularity=1)
    x = torch.randn(1, plan.tokens, 2, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(cp_attn_func(x, x, x, plan=plan).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), x)


def check_exchange(group):
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.arange(2.0 * 5 * world_size * 2 * world_size * 3).view(2, 5 * world_size, 2 * world_size, 3)
    part = whole[:, 5 * rank : 5 * rank + 5].clone().requires_grad_()
    heads = seq_to_heads(part, group)
    assert torch.equal(heads, whole[:, :, 2 * rank : 2 * rank + 2])
    back = heads_to_seq(heads, group)
    assert torch.equal(back, part)
    (grad,) = torch.autograd.grad((heads * heads.detach()).sum() + (back * 2).sum(), part)
    assert torch.equal(grad, part.detach() + 2)
    with pytest.raises(ValueError, match=rf"x.shape\[2\] must be divisible by the {world_size} ranks"):
        seq_to_heads(torch.zeros(1, 2, 2 * world_size + 1, 3), group)
    with pytest.raises(ValueError, match=rf"x.shape\[1\] must be divisible by the {world_size} ranks"):
        heads_to_seq(torch.zeros(1, 2 * world_size + 1, 2, 3), group)


def check_merged(group):
    """The parts of each rank, merged, are attention over all keys."""
    q, k, v = (torch.randn(3, 8, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    parts = [flash_attn_func(q[:1], k[i : i + 1], v[i : i + 1], return_lse=True) for i in range(3)]
    out, lse = merge_attention(*zip(*parts, strict=True))
    expected = flash_attn_func(q[:1], *(x.flatten(0, 1)[None] for x in (k, v)), return_lse=True)
    torch.testing.assert_close((out, lse), expected)


def check_errors(group):
    """All raise before anything is sent: afterwards the ranks still agree."""
    plan, ulysses = Plan(24, group, granularity=1), Plan(24, group, method="ulysses")
    groups = Plan(24, group, head_groups=3)
    q, k = torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, 2, 16)
    slopes = torch.zeros(4)
    for change, error, match in [
        (dict(plan="zigzag"), TypeError, "plan must be a flash_attn.context_parallel.Plan, found str"),
        (dict(q=q[:, :7]), ValueError, r"q.shape\[1\] must be plan.tokens, 8, found 7"),
        (dict(v=k[:, :, :, :0]), ValueError, "v's head_dim must be between 1 and"),
        (dict(k=k[..., :8]), ValueError, "k must have shape"),
        (dict(k=q[:, :, :3], v=q[:, :, :3]), ValueError, "k's number of heads must be a divisor of q's, 4, found 3"),
        (dict(k=k.half()), TypeError, "k must have dtype torch.float32"),
        (dict(dropout_p=0.1), ValueError, "dropout_p must be left out with a plan of method='gather', found 0.1"),
        (dict(alibi_slopes=slopes), ValueError, "alibi_slopes must be left out with a plan of method='gather'"),
        (dict(plan=ulysses, alibi_slopes=slopes[:3]), ValueError, r"alibi_slopes must have shape \(4,\)"),
        (dict(plan=ulysses, dropout_p=1.0), ValueError, "dropout_p must be at least 0 and less than 1"),
        (dict(plan=ulysses, dropout_p=0.1, return_attn_probs=True), ValueError, "return_attn_probs must be False"),
        (
            dict(plan=ulysses, q=q[:, :, :2]),
            ValueError,
            "q's number of heads must be at least the number of ranks that divide heads, 3",
        ),
        (dict(plan=groups), ValueError, "head_groups of the plan must be a divisor of the heads of k, 2, found 3"),
        (dict(causal=torch.ones(1)), TypeError, "causal must be a bool"),
        (dict(softmax_scale=-1.0), ValueError, "softmax_scale must be at least 0"),
        (dict(attention_chunk=-1), ValueError, "attention_chunk must be at least 0"),
        (dict(learnable_sink=torch.zeros(3)), ValueError, r"learnable_sink must have shape \(4,\)"),
    ]:
        arguments = dict(q=q, k=k, v=k, plan=plan) | change
        with pytest.raises(error, match=match):
            cp_attn_func(**arguments)
    mesh = mesh_of(group)
    for options, match in [
        (dict(group=mesh, method="gather"), "group must have one dimension for method='gather'"),
        (dict(group=group, method="usp"), "group must have a DeviceMesh of two dimensions, ring and ulysses,"),
        (dict(group=mesh, pad_to=99), "pad_to must be None with method='usp', found 99"),
    ]:
        with pytest.raises(ValueError, match=match):
            Plan(24, **options)
    with pytest.raises(ValueError, match="dropout_p must be left out with a plan of method='usp'"):
        cp_attn_func(q, k, k, 0.1, plan=Plan(24, mesh))
    with pytest.raises(ValueError, match=r"kv.shape\[-3\] must be 2"):
        cp_attn_kvpacked_func(q, torch.zeros(1, 8, 3, 2, 16), plan=plan)
    with pytest.raises(ValueError, match="qkv must have 4 dimensions"):
        cp_attn_qkvpacked_func(torch.zeros(8, 16), plan=plan)
    for outs, lses in (([], []), ([q], []), ([q], [k])):
        with pytest.raises(ValueError, match=r"the number of lses must be|lses must have shape"):
            merge_attention(outs, lses)
    run(plan)


CHECKS = [
    check_packed,
    check_nothing,
    check_again,
    check_precision,
    check_one_rank,
    check_dropout,
    check_checkpoint,
    check_second_derivative,
    check_exchange,
    check_merged,
    check_errors,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_over_three(check):
    over_processes(3, check)


@pytest.mark.parametrize("check", [check_again, check_precision], ids=lambda check: check.__name__)
def test_over_four(check):
    over_processes(4, check)


def test_compiled():
    over_processes(2, check_compiled)


def test_graphs_serve_other_numbers_of_documents():
    over_processes(2, check_graphs)


def check_meshes(group):
    """The ranks of a mesh may stand in any order that its rows and columns share."""
    expected = None
    for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 2], [1, 0]], [[2, 0], [3, 1]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "ulysses"))
        plan = Plan([9, 20], mesh, granularity=1)
        found = [plan.unshard(plan.shard(torch.arange(29), dim=0), dim=0)]
        found += [plan.unshard(x) for x in (run(plan, causal=True)[0], *run(plan, causal=True)[2:])]
        expected = expected or found
        torch.testing.assert_close(found, expected, msg=f"{ranks}")
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("ring", "ulysses"))
    with pytest.raises(ValueError, match=r"group must have ranks in one order .* found \[\[0, 3\], \[2, 1\]\]"):
        Plan(24, mesh)


def test_meshes_in_other_orders():
    over_processes(4, check_meshes)


def check_fetched(group):
    """With windows, a rank fetches what its rows see, and no more."""
    plan = Plan(400, group, layout="contiguous", granularity=1)
    schedule = plan.schedule((9, 0), 0, 1, torch.device("cpu"))
    rows = torch.zeros(plan.tokens, 1)
    assert len(schedule.exchange.fetch(rows)()) == plan.tokens + (9 if plan.rank else 0)
    whole = plan.schedule((-1, 0), 0, 1, torch.device("cpu"))
    assert len(whole.exchange.fetch(rows)()) == 100 * (plan.rank + 1)


def test_windows_fetch_what_they_see():
    over_processes(4, check_fetched)
