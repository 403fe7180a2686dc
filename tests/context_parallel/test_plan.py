"""Plans: who has which tokens, what a token sees, labels, losses, and that ranks must agree."""

import random

import pytest
import torch
import torch.distributed as dist
from oracle import allowed_keys
from processes import over_processes

from flash_attn.context_parallel import Plan, _layout

LAYOUTS = ["zigzag", "balanced", "contiguous", "striped"]


class OnePlan(Plan):
    """The plan of one rank among `world_size`, without a group."""

    def __init__(self, seqlens, rank, world_size, **options):
        self._of = rank, world_size
        super().__init__(seqlens, self, device="cpu", **options)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Plans ask no group for their rank, and no other rank whether it agrees."""
    monkeypatch.setattr("flash_attn.context_parallel._plan.group_of", lambda group: group)
    monkeypatch.setattr("flash_attn.context_parallel._plan._compare", lambda *_, **__: None)
    monkeypatch.setattr(
        "flash_attn.context_parallel._plan._rank_and_size",
        lambda group: group._of if isinstance(group, OnePlan) else (dist.get_rank(group), dist.get_world_size(group)),
    )


def plans(seqlens, world_size, **options):
    return [OnePlan(seqlens, rank, world_size, **options) for rank in range(world_size)]


def lengths(rng, most=60):
    return rng.choice(
        [[rng.randrange(most)], [1, 1, 0, 1], [rng.randrange(12) for _ in range(rng.randrange(1, 9))], [0, 0]]
    )


def visible(seqlens, causal, window):
    """Which tokens of the row each token sees, bool (total, total)."""
    return torch.block_diag(*(allowed_keys(n, n, causal, window).float() for n in seqlens)).bool()


SEEDS = range(60)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_is_on_one_rank_and_sees_what_it_must(layout):
    for seed in SEEDS:
        rng = random.Random(seed)
        seqlens, world_size = lengths(rng), rng.randrange(1, 6)
        pad_to = rng.choice([None, sum(seqlens) + 2])
        causal, window = rng.choice([True, False]), rng.choice([(-1, -1), (0, 0), (3, -1), (2, 5), (-1, 1)])
        each = plans(seqlens, world_size, layout=layout, granularity=rng.choice([1, 4, 128]), pad_to=pad_to)
        found = torch.cat([plan.positions for plan in each])
        assert torch.equal(found[found >= 0].sort().values, torch.arange(sum(seqlens)))
        expected = visible(seqlens, causal, window)
        ids = torch.cat([torch.arange(n) for n in seqlens])
        for plan in each:
            own = plan.positions[: plan.own_tokens]
            assert (plan.positions[plan.own_tokens :] == -1).all() and plan.tokens == len(plan.positions)
            assert pad_to is None or plan.tokens == pad_to
            assert own.diff().gt(0).all() and torch.equal(plan.position_ids[: plan.own_tokens], ids[own])
            for source in (None, *range(world_size)):
                keys = torch.arange(plan.total) if source is None else each[source].positions
                keys = keys[keys >= 0]
                first, end = plan.intervals(source, causal, window)
                assert first.dtype == torch.int32 and (end[plan.own_tokens :] == 0).all()
                column = torch.arange(len(keys))
                seen = (column >= first[:, None]) & (column < end[:, None])
                assert torch.equal(seen[: plan.own_tokens], expected[own][:, keys])


@pytest.mark.parametrize("layout", [*sorted(_layout.CHUNKS), "each document"])
def test_launches_compute_the_mask(layout):
    """The entries of all launches, with keys counted in what the rank fetches, are the mask of its rows."""
    for seed in SEEDS:
        rng = random.Random(seed)
        seqlens, world_size = lengths(rng), rng.randrange(1, 6)
        chunk = rng.choice([0, 0, 4])
        window = rng.choice([(-1, -1), (-1, 0), (0, 0), (3, 0), (3, -1), (2, 5), (-1, 1), (50, 50)])
        cut = [min(chunk, n - at) for n in seqlens for at in range(0, n, chunk)] if chunk else seqlens
        expected = visible(cut, False, window) if sum(seqlens) else torch.zeros(0, 0, dtype=torch.bool)
        each = dict(layout="zigzag", each_document=True) if layout == "each document" else dict(layout=layout)
        for plan in plans(seqlens, world_size, **each, granularity=1):
            schedule = plan.schedule(window, chunk, 1, torch.device("cpu"))
            keys, found = schedule.exchange.fetched, {}
            for launch in schedule.launches:
                size = launch.keys.stop - launch.keys.start
                of_launch = torch.zeros(launch.rows.stop - launch.rows.start, len(keys), dtype=torch.bool)
                starts_q = launch.lengths.get("cu_seqlens_q", torch.tensor([0, len(of_launch)])).tolist()
                starts_k = launch.lengths.get("cu_seqlens_k", torch.tensor([0, size])).tolist()
                used = torch.tensor(starts_k).diff().tolist()
                assert starts_k[-1] == size and starts_q[-1] == len(of_launch)
                for i, count in enumerate(used):
                    rows, first = slice(*starts_q[i : i + 2]), launch.keys.start + starts_k[i]
                    of_entry = allowed_keys(rows.stop - rows.start, count, False, launch.window)
                    of_launch[rows, first : first + count] = of_entry
                assert not found.keys() & set(range(launch.rows.start, launch.rows.stop))
                found |= zip(range(launch.rows.start, launch.rows.stop), of_launch, strict=True)
            own = plan.positions[: plan.own_tokens]
            assert found.keys() == set(range(len(own)))
            whole = torch.zeros(len(own), plan.total, dtype=torch.int64)  # how often each row sees each key
            for row, seen in found.items():
                whole[row].index_add_(0, keys, seen.long())
            assert torch.equal(whole, expected[own].long())
            sizes = [launch.keys.stop - launch.keys.start for launch in schedule.launches]
            assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_even_zigzag_needs_no_copies(world_size):
    """Each launch reads one slice of the gathered keys, which ends with the keys of its own rows."""
    for plan in plans(4 * world_size, world_size, granularity=1):
        schedule = plan.schedule((-1, 0), 0, 1, torch.device("cpu"))
        heads, tails = (torch.arange(2 * world_size * 2).view(2, -1, 2)[i] for i in (0, 1))
        arriving = torch.cat([tails.flip(0).flatten(), heads.flatten(), plan.positions[2:]])
        assert torch.equal(schedule.exchange.fetched, arriving)
        rows = [slice(2, 4), slice(0, 2)] if plan.rank < world_size - 1 else [slice(0, 4)]
        assert [launch.rows for launch in schedule.launches] == rows
        for launch in schedule.launches:
            rows, keys = plan.positions[launch.rows], arriving[launch.keys]
            assert torch.equal(keys[-2:], rows[-2:]) and keys.sort().values.tolist() == list(range(rows[-1] + 1))
    for options, window, chunk in [
        (dict(layout="contiguous"), (-1, 0), 0),
        (dict(layout="balanced"), (-1, 0), 0),
        (dict(seqlens=4 * world_size + 1), (-1, 0), 0),
        (dict(seqlens=[3, 4 * world_size - 3], layout="zigzag"), (-1, 0), 0),
        (dict(), (-1, -1), 0),
        (dict(), (7, 0), 0),
        (dict(), (-1, 0), 3),
    ]:
        sorted_ones = [
            plan.schedule(window, chunk, 1, torch.device("cpu")).exchange.fetched.diff()
            for plan in plans(**dict(seqlens=4 * world_size, world_size=world_size, granularity=1) | options)
        ]
        assert all((each > 0).all() for each in sorted_ones), options


@pytest.mark.parametrize(
    "thousands, ranks, heads_k, batch, expected",
    [
        (32, 4, 8, 1, (1, 4)),
        (256, 4, 8, 1, (1, 4)),
        (257, 4, 8, 1, (2, 4)),
        (1024, 4, 8, 1, (4, 4)),
        (1024, 1, 8, 1, (1, 1)),
        (4096, 4, 8, 4, (8, 8)),
        (4096, 4, 1, 1, (1, 1)),
        (1024, 4, 6, 1, (3, 6)),
        (1, 4, 8, 1, (1, 1)),
    ],
)
def test_groups_of_heads(thousands, ranks, heads_k, batch, expected):
    """As few as have 1 GiB each; where transfers overlap, up to four of 16 MiB. The second is of a ring of "usp"."""
    plan, ring = OnePlan(1024 * thousands, 0, ranks), OnePlan(1024 * thousands, 0, ranks)
    ring._over_slow_links = True
    size = batch * plan.total * 2 * 128 * 2
    assert (plan.groups_of_heads(heads_k, size), ring.groups_of_heads(heads_k, size)) == expected
    assert (plan.overlaps, ring.overlaps) == (False, True)
    given = OnePlan(1024, 0, ranks, head_groups=3)
    assert given.groups_of_heads(heads_k, size) == 3 and given.overlaps


def test_work_is_balanced():
    def imbalance(seqlens, layout, world_size):
        each = [
            (plan.position_ids + 1).sum().item() for plan in plans(seqlens, world_size, layout=layout, granularity=128)
        ]
        return max(each) / (sum(each) / world_size)

    documents = [int(random.Random(seed).expovariate(1 / 4096)) + 1 for seed in range(32)]
    assert imbalance([2**17], "zigzag", 4) < 1.001
    assert imbalance([100_000], "zigzag", 4) < 1.02
    assert imbalance(documents, "balanced", 4) < 1.05
    assert imbalance(documents, "balanced", 4) < imbalance(documents, "zigzag", 4)
    tokens = [plan.tokens for plan in plans(documents, 4)]
    assert max(tokens) - min(tokens) <= 0.05 * sum(documents)


def test_the_layout_follows_documents_and_method():
    assert OnePlan(64, 0, 2).layout == OnePlan([0, 64], 0, 2).layout == "zigzag"
    assert OnePlan([32, 32], 0, 2).layout == "balanced"
    assert OnePlan([32, 32], 0, 2, method="ulysses").layout == "contiguous"
    assert OnePlan(64, 0, 2).method == "gather"
    windows = dict(window_size=(4, 0))
    assert OnePlan(64, 0, 2, **windows).layout == "contiguous" and OnePlan(63, 0, 2, **windows).layout == "zigzag"
    assert OnePlan([32, 32], 0, 2, **windows).layout == "balanced"
    assert OnePlan(64, 0, 2, layout="zigzag", **windows).layout == "zigzag"
    assert repr(OnePlan(64, 0, 2)) == (
        "Plan(1 documents, 64 tokens, rank 0 of 2 has 32, layout='zigzag', method='gather')"
    )


def documents(total, mean, most):
    """Lengths that are spread exponentially, of this mean and at most `most`."""
    rng, lengths = random.Random(0), []
    while sum(lengths) < total:
        lengths.append(min(int(rng.expovariate(1 / mean)) + 1, most, total - sum(lengths)))
    return lengths


K = 1024
LONG, OF_8K = [256 * K], documents(256 * K, 8 * K, 64 * K)


@pytest.mark.parametrize(
    ("ranks", "seqlens", "calls", "method"),
    [
        (2, [32 * K], dict(heads=32, heads_k=8), "ulysses"),  # here and below, what was faster on GPUs
        (4, [128 * K], dict(heads=32, heads_k=8), "ulysses"),
        (2, OF_8K, dict(heads=32, heads_k=8), "gather"),
        (4, OF_8K, dict(heads=32, heads_k=8), "gather"),
        (2, LONG, dict(heads=32, heads_k=8, window_size=(4095, 0)), "gather"),
        (4, LONG, dict(heads=32, heads_k=8, window_size=(4095, -1)), "gather"),
        (4, LONG, dict(heads=32), "ulysses"),  # and here, what the same numbers say
        (4, LONG, dict(heads=32, heads_k=1), "gather"),
        (16, LONG, dict(heads=32, heads_k=1), "gather"),
        (32, LONG, dict(heads=32, heads_k=1), "ulysses"),
        (16, LONG, dict(heads=32, heads_k=8), "ulysses"),  # each key head on two ranks
        (3, LONG, dict(heads=32, heads_k=8), "gather"),  # 11, 11 and 10 heads
        (64, LONG, dict(heads=32, heads_k=8), "gather"),
        (1, LONG, dict(heads=32), "gather"),
        (4, LONG, dict(window_size=(4095, 0)), "gather"),
        (4, [0], dict(heads=32), "gather"),
    ],
)
def test_auto_is_the_faster_method(ranks, seqlens, calls, method):
    plan = OnePlan(seqlens, 0, ranks, **calls)
    of_gather = "contiguous" if "window_size" in calls else "balanced" if len(seqlens) > 1 else "zigzag"
    assert (plan.method, plan.layout) == (method, "contiguous" if method == "ulysses" else of_gather)
    given = OnePlan(seqlens, 0, ranks, method="gather", **calls)
    assert (given.method, given.layout) == ("gather", of_gather)


def test_plans_are_made_on_the_host():
    """Whatever torch's default device is."""
    with torch.device("meta"):
        (plan,) = plans([5, 3], 1, granularity=1)
        first, end = plan.intervals()
        labels = plan.shift_labels(torch.arange(8, device="cpu"))
        schedule = plan.schedule((-1, 0), 0, 1, torch.device("cpu"))
        assert plan.shard(torch.arange(8, device="cpu"), dim=0).tolist() == list(range(8))
    assert plan.handle.device == plan.positions.device == first.device == labels.device == torch.device("cpu")
    assert schedule.launches[0].lengths["cu_seqlens_q"].tolist() == [0, 5, 8]
    assert first.tolist() == 5 * [0] + 3 * [5] and end.tolist() == list(range(1, 9))


def test_zigzag_is_that_of_other_libraries():
    """With granularity=1: chunk r, then 2P-1-r, of chunks that divide the row evenly."""
    each = torch.arange(24).chunk(6)
    for rank, plan in enumerate(plans(24, 3, granularity=1)):
        assert torch.equal(plan.positions, torch.cat([each[rank], each[5 - rank]]))


def test_labels_do_not_cross_documents():
    plan = OnePlan([3, 0, 1, 2], 0, 1)
    assert plan.shift_labels(torch.tensor([[10, 11, 12, 20, 30, 31]])).tolist() == [[11, 12, -100, -100, 31, -100]]
    assert plan.shift_labels(torch.arange(6), ignore_index=-1).tolist() == [1, 2, -1, -1, 5, -1]
    assert OnePlan(0, 0, 1).shift_labels(torch.zeros(2, 0)).shape == (2, 0)


def test_a_batch_is_sharded():
    ids = torch.arange(10)[None]
    parts = [
        plan.shard_batch(dict(input_ids=ids, labels=ids, rows=ids[0], name="x", all=ids), dict(rows=0, all=-1))
        for plan in plans([4, 6], 2, layout="contiguous", pad_to=6, granularity=1)
    ]
    assert parts[0]["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0]] and parts[1]["rows"].tolist() == [5, 6, 7, 8, 9, 0]
    assert parts[0]["shift_labels"].tolist() == [[1, 2, 3, -100, 5, -100]]
    assert parts[1]["shift_labels"].tolist() == [[6, 7, 8, 9, -100, -100]]
    assert parts[0]["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0]]
    assert parts[0]["name"] == "x" and parts[0]["all"] is ids


def test_labels_that_are_shifted_already_are_padded_with_none():
    labels = torch.arange(10)[None]
    batch = dict(shift_labels=labels, mask=labels)
    parts = [plan.shard_batch(batch) for plan in plans([4, 6], 2, layout="contiguous", pad_to=6, granularity=1)]
    assert parts[0]["shift_labels"].tolist() == [[0, 1, 2, 3, 4, -100]] and parts[1]["mask"][0, -1] == 0


def test_rotary_rows_are_those_of_positions():
    cos = torch.randn(6, 4)
    for plan in plans([4, 6], 2, granularity=1):
        rows, same = plan.rotary(cos, cos + 1)
        assert torch.equal(rows, cos[plan.position_ids]) and torch.equal(same, rows + 1)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(seqlens=[3, -1]), "seqlens must be at least 0, found -1"),
        (dict(seqlens=[]), "the number of seqlens must be at least 1"),
        (dict(seqlens=[2.5]), "seqlens must be a whole number"),
        (dict(seqlens=torch.tensor([1.0])), "seqlens must have dtype"),
        (dict(seqlens=torch.ones(1, dtype=torch.int32, device="meta")), "seqlens must be on the CPU"),
        (dict(layout="diagonal"), "layout must be one of auto, contiguous"),
        (dict(method="ring"), "'ring', which is not supported"),
        (dict(layout="striped", each_document=True), "each_document must be False with layout='striped'"),
        (dict(granularity=0), "granularity must be at least 1"),
        (dict(head_groups=0), "head_groups must be at least 1"),
        (dict(heads=0), "heads must be at least 1, found 0"),
        (dict(heads_k=2), "heads must be given with heads_k, found None with heads_k=2"),
        (dict(heads=4, heads_k=3), "heads_k must be a divisor of heads, 4, found 3"),
        (dict(heads=4, window_size=(1, 2, 3)), "window_size"),
        (dict(pad_to=3), "pad_to must be at least the tokens of a rank, 8, found 3"),
    ],
)
def test_what_a_plan_refuses(change, match):
    arguments = dict(seqlens=16) | change
    with pytest.raises((ValueError, TypeError), match=match):
        OnePlan(arguments.pop("seqlens"), 0, 2, **arguments)


def test_what_its_methods_refuse():
    plan = OnePlan(16, 0, 2)
    for call, match in [
        (lambda: plan.shard(torch.ones(1, 15)), r"x.shape\[1\] must be the sum of seqlens, 16, found 15"),
        (lambda: plan.shard(torch.ones(16), dim=1), "dim must be a dimension of x, which has 1, found 1"),
        (lambda: plan.unshard(torch.ones(1, 9)), r"x.shape\[1\] must be plan.tokens, 8, found 9"),
        (lambda: plan.shift_labels(torch.ones(1, 15)), "labels must have shape"),
        (lambda: plan.intervals(2), "source must be a rank, found 2"),
        (
            lambda: plan.rotary(torch.ones(15, 2), torch.ones(15, 2)),
            r"cos.shape\[0\] must be at least the longest document, 16, found 15",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


# Over processes, with groups


def check_shards(group):
    for layout in LAYOUTS:
        for pad_to in (None, 30):
            plan = Plan([5, 0, 14, 1, 7], group, layout=layout, granularity=1, pad_to=pad_to)
            whole = torch.arange(2 * 27 * 3, dtype=torch.float64).view(2, 27, 3)
            part = plan.shard(whole)
            assert part.shape == (2, plan.tokens, 3) and torch.equal(plan.shard(whole[0], dim=-2), part[0])
            part.requires_grad_()
            assert torch.equal(plan.unshard(part), whole)
            weight = torch.randn(2, 27, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            (grad,) = torch.autograd.grad((plan.unshard(part) * weight).sum(), part)
            torch.testing.assert_close(grad, plan.shard(weight) * plan.world_size)


def check_mean_loss(group):
    plan = Plan(8, group)
    sums, counts = torch.tensor([1.0, 2.0, 6.0])[: plan.world_size], torch.tensor([0, 1, 5])[: plan.world_size]
    found = plan.mean_loss(sums[plan.rank], int(counts[plan.rank]))
    dist.all_reduce(found)
    torch.testing.assert_close(found / plan.world_size, sums.sum() / counts.sum())
    assert plan.mean_loss(sums[plan.rank], torch.tensor(0)).isfinite()


def check_disagreement(group):
    rank = dist.get_rank(group)
    for options in (dict(granularity=1 + rank), dict(layout="zigzag" if rank else "balanced"), dict(pad_to=99 - rank)):
        with pytest.raises(ValueError, match=r"plan must be the same on all ranks, found one on ranks \[1"):
            Plan(16, group, **options)
    with pytest.raises(ValueError, match="plan must be the same" if rank == 0 else "method must be one of"):
        Plan(16, group, method="gather" if rank == 0 else "magic")
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh, found str"):
        Plan(16, "world")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(group),), mesh_dim_names=("cp",))
    assert Plan(16, mesh).tokens == Plan(16, group).tokens


@pytest.mark.parametrize("check", [check_shards, check_mean_loss, check_disagreement], ids=lambda f: f.__name__)
def test_over_processes(check):
    over_processes(3, check)
