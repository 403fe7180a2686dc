"""Samplers against torch's own, and the rule by which any number of ranks goes on."""

import itertools

import pytest
import torch
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from src.datamodules.fault_tolerant_sampler import FaultTolerantDistributedSampler, RandomFaultTolerantSampler


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples, ranks", [(1, 1), (10, 1), (10, 2), (10, 3), (10, 4), (3, 8), (7, 7)])
def test_distributed_order_is_that_of_torch(samples, ranks, shuffle, drop_last):
    for rank in range(ranks):
        options = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "seed": 3, "drop_last": drop_last}
        ours, torchs = (
            kind(range(samples), **options) for kind in (FaultTolerantDistributedSampler, DistributedSampler)
        )
        for epoch in (0, 2):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs) == ours.remaining(0)


def sampler(samples, ranks, rank, **options):
    return FaultTolerantDistributedSampler(range(samples), num_replicas=ranks, rank=rank, **options)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("counter", [0, 1, 4, 5])
def test_distributed_state(counter, drop_last):
    original = sampler(11, 2, 1, drop_last=drop_last)
    original.set_epoch(4)
    whole = list(original)
    assert original.state_dict() == {"epoch": 4, "counter": 0}
    iterator = iter(original)
    assert list(itertools.islice(iterator, counter)) == whole[:counter]
    state = original.state_dict()
    assert state == {"epoch": 4, "counter": counter}

    resumed = sampler(11, 2, 1, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and len(resumed) == len(original)
    iterator = iter(resumed)
    assert next(iterator, None) == (whole[counter] if counter < len(whole) else None)
    if counter < len(whole):
        assert resumed.state_dict()["counter"] == counter + 1
    assert list(iterator) == whole[counter + 1 :]
    assert list(resumed) == whole  # only the first iteration is shorter


@pytest.mark.parametrize("ranks", [[1, 2], [2, 1], [4, 3, 2], [3, 8]])
@pytest.mark.parametrize("samples", [40, 41, 47])
def test_another_number_of_ranks_goes_on(samples, ranks):
    """Each number of ranks takes 3 indices a rank, the last one all of the rest: nothing is lost or repeated."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(7 + 1)).tolist()
    done, seen = 0, []
    for world in ranks:
        samplers = [sampler(samples, world, rank, seed=7) for rank in range(world)]
        for one in samplers:
            one.load_state_dict({"epoch": 1, "samples": done})
        assert {one.remaining(done) for one in samplers} == {-(-(samples - done) // world)}
        taken = [list(one) if world == ranks[-1] else list(itertools.islice(one, 3)) for one in samplers]
        seen += [index for row in zip(*taken, strict=True) for index in row]
        done += sum(map(len, taken))
    assert seen == order + order[: len(seen) - samples]
    assert len(seen) - samples < ranks[-1]


def test_large_orders_come_in_chunks():
    one = sampler(200_000, 2, 1, seed=1)
    assert list(one) == torch.randperm(200_000, generator=torch.Generator().manual_seed(1))[1::2].tolist()


@pytest.mark.parametrize("options", [{}, {"replacement": True}, {"num_samples": 25}])
def test_random_order_is_that_of_torch(options):
    ours = RandomFaultTolerantSampler(range(10), generator=torch.Generator().manual_seed(3), **options)
    torchs = RandomSampler(range(10), generator=torch.Generator().manual_seed(3), **options)
    assert [list(ours), list(ours)] == [list(torchs), list(torchs)]


@pytest.mark.parametrize("counter", [0, 3, 10])
def test_random_state(counter):
    original = RandomFaultTolerantSampler(range(10))
    list(original)
    iterator = iter(original)
    before = list(itertools.islice(iterator, counter))
    state = original.state_dict()
    rest, following = list(iterator), list(original)
    assert state.keys() == {"random_state", "counter"}

    resumed = RandomFaultTolerantSampler(range(10))
    resumed.load_state_dict(state)
    assert state["counter"] == counter
    assert list(resumed) == rest and sorted(before + rest) == list(range(10))
    assert list(resumed) == following and len(resumed) == 10
    assert resumed.state_dict()["counter"] == 0


def test_random_order_follows_the_global_seed():
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(list(RandomFaultTolerantSampler(range(50))))
    assert orders[0] == orders[1] != orders[2]
