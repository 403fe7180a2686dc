"""csrc/common/counter_slots.h: which memory streams and graphs count in, with a CUDA runtime that needs no GPU."""

import itertools
import pathlib

import native
import pytest
import torch

pytestmark = pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")

# Names of the runtime are those of the probe, even where the process has loaded CUDA's.
COMPILER = ("nvcc", "-cudart=none", "-O1", "-Xcompiler=-fPIC,-Wall", "-Xlinker=-Bsymbolic")
SLOTS = 64  # that one allocation holds
captures = itertools.count(1)


@pytest.fixture(scope="module")
def probe():
    return native.library(pathlib.Path(__file__).parent / "counter_slots_probe.cpp", COMPILER)


MOST_STREAMS = 128  # of a device, that have a slot
DEFAULT = 0  # the handle of the default stream
PER_THREAD = 2  # cudaStreamPerThread


def find(probe, capture, stream=8, device=0):
    """The address of the counters; 0 if there is no slot."""
    data = torch.zeros(1, dtype=torch.int64)
    probe.run("find_counters", device, stream, capture, data)
    return data.item()


def test_graphs_streams_and_devices_count_apart(probe):
    keys = [(next(captures), stream, device) for _ in range(100) for stream in (8, 16) for device in (0, 1)]
    found = [find(probe, *key) for key in keys]
    assert len(set(found)) == len(keys) and all(found)
    assert [find(probe, *key) for key in keys] == found


def test_a_stream_keeps_what_it_has(probe):
    outside = find(probe, 0), find(probe, 0, stream=16), find(probe, 0, device=1)
    graph = next(captures)
    assert len({*outside, find(probe, graph)}) == 4
    probe.call("destroy_graph", graph)
    assert (find(probe, 0), find(probe, 0, stream=16), find(probe, 0, device=1)) == outside


def test_a_stream_with_the_handle_of_a_destroyed_one_counts_apart(probe):
    """What the destroyed stream has left may still run."""
    first = find(probe, 0, stream=24)
    probe.call("reuse_handle", 24, 1_000_000)
    assert find(probe, 0, stream=24) not in (0, first)


def test_the_default_stream_is_never_another(probe):
    """CUDA is not asked for its id."""
    first = find(probe, 0, stream=DEFAULT)
    probe.call("reuse_handle", DEFAULT, 2_000_000)
    assert find(probe, 0, stream=DEFAULT) == first not in (0, find(probe, 0))
    assert find(probe, next(captures), stream=DEFAULT) not in (0, first)


def test_the_handle_that_threads_share_has_no_slot(probe):
    assert find(probe, 0, stream=PER_THREAD) == find(probe, next(captures), stream=PER_THREAD) == 0


def test_slots_of_streams_are_bounded(probe):
    found = [find(probe, 0, stream=1000 + i, device=5) for i in range(1000)]
    assert len(set(found[:MOST_STREAMS])) == MOST_STREAMS and all(found[:MOST_STREAMS])
    assert not any(found[MOST_STREAMS:])
    assert [find(probe, 0, stream=1000 + i, device=5) for i in range(1000)] == found
    assert find(probe, next(captures), stream=3000, device=5) != 0


def test_threads_that_share_a_stream_find_the_same(probe):
    """Also if each of them is the first."""
    for stream in range(4000, 4020):
        found = torch.zeros(8, dtype=torch.int64)
        probe.run("find_in_threads", 8, 6, stream, found)
        assert found[0] != 0 and (found == found[0]).all()


def test_what_a_destroyed_graph_had_serves_the_next(probe):
    kept, gone, new = (next(captures) for _ in range(3))
    found, given_back = find(probe, kept, device=2), {find(probe, gone, stream, device=2) for stream in (8, 16)}
    probe.call("destroy_graph", gone)
    assert {find(probe, new, stream, device=2) for stream in (8, 16)} == given_back
    assert find(probe, kept, device=2) == found


def test_a_capture_goes_on_after_memory_was_short(probe):
    capture = next(captures)
    probe.call("fail_mallocs", 1)
    with pytest.raises(RuntimeError, match="no memory"):
        find(probe, capture, device=3)
    find(probe, capture, device=3)


def test_a_graph_is_destroyed_while_another_allocates(probe):
    """CUDA may wait for what frees a graph's resources, so that this must not wait for CUDA."""
    graphs = [next(captures) for _ in range(SLOTS)]
    given_back = find(probe, graphs[0], device=4)
    for graph in graphs[1:]:
        find(probe, graph, device=4)
    probe.call("destroy_in_malloc", graphs[0])
    found = [find(probe, next(captures), device=4) for _ in range(SLOTS + 1)]
    assert len(set(found)) == SLOTS + 1 and given_back in found
