"""Cores for each GPU on made-up machines: NVML, the threads of cores and the scheduler are replaced."""

import os
import sys
import types

import pytest

from src.utils import gpu_affinity

# Two sockets of four cores with two threads each: threads 0-7 are the first of cores 0-7, threads 8-15 the second.
SOCKETS = ({0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15})
GPUS = (0, 0, 1, 1)  # the socket of each GPU
UUIDS = ("GPU-aaaa", "GPU-abbb", "GPU-cccc", "GPU-dddd")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine; its attributes may be changed. `bound` is what the process was bound to at last."""
    state = types.SimpleNamespace(allowed=set(range(16)), bound=None)
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(GPUS),
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetCpuAffinity=lambda handle, words: [sum(1 << c for c in SOCKETS[GPUS[handle]])] + [0] * (words - 1),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_affinity, "_TOPOLOGY", tmp_path)
    for thread in range(16):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{thread % 8},{thread % 8 + 8}\n")

    def bind(pid, cores):
        state.bound = set(cores)

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: state.bound or state.allowed)
    return state


def bound(machine, mode, nproc=4):
    """The cores that the process of each GPU gets."""
    cores = []
    for gpu in range(nproc):
        machine.bound = None
        assert gpu_affinity.set_affinity(gpu, nproc, mode) == machine.bound
        cores.append(machine.bound)
    return cores


EXPECTED = {
    "socket": [SOCKETS[0], SOCKETS[0], SOCKETS[1], SOCKETS[1]],
    "single": [{0}, {0}, {4}, {4}],
    "single_unique": [{0}, {1}, {4}, {5}],
    "socket_unique_interleaved": [{0, 2, 8, 10}, {1, 3, 9, 11}, {4, 6, 12, 14}, {5, 7, 13, 15}],
    "socket_unique_continuous": [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}],
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_modes(machine, mode):
    assert bound(machine, mode) == EXPECTED[mode]


@pytest.mark.parametrize("mode", ["socket_unique_interleaved", "socket_unique_continuous", "single_unique"])
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("allowed", [set(range(16)), set(range(14)), {0, 1, 2, 5, 6, 7, 8, 9}], ids=len)
def test_unique_modes_give_no_core_twice(machine, mode, nproc, allowed):
    machine.allowed = allowed
    cores = bound(machine, mode, nproc)
    assert all(cores)
    assert len(set().union(*cores)) == sum(map(len, cores))
    assert all(own <= SOCKETS[GPUS[gpu]] & allowed for gpu, own in enumerate(cores))


def test_threads_outside_of_the_container_are_not_used(machine):
    machine.allowed = {0, 1, 2, 3, 4, 5, 6, 7, 8}
    assert bound(machine, "socket_unique_continuous", 2) == [{0, 1, 8}, {2, 3}]
    machine.bound, machine.allowed = None, {9, 10, 11}  # the second threads only
    assert bound(machine, "socket_unique_continuous", 2) == [{9}, {10, 11}]


def test_gpus_are_those_that_are_visible(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert bound(machine, "single", 2) == [{4}, {0}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-cccc,GPU-ab")
    assert bound(machine, "single", 2) == [{4}, {0}]
    assert gpu_affinity.device(1).getName() == "GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    with pytest.raises(RuntimeError, match="GPU-a, which 2 GPUs match"):
        gpu_affinity.device(0)


def test_one_thread_a_core(machine):
    for folder in gpu_affinity._TOPOLOGY.iterdir():
        (folder / "topology" / "thread_siblings_list").write_text(folder.name.removeprefix("cpu"))
    assert gpu_affinity.get_thread_siblings_list() == []
    assert bound(machine, "socket_unique_continuous", 2) == [{0, 1, 2, 3}, {8, 9, 10, 11}]


def test_what_is_known_of_the_machine(machine):
    assert gpu_affinity.get_thread_siblings_list() == [(i, i + 8) for i in range(8)]
    assert (gpu_affinity.deviceGetCount(), gpu_affinity.systemGetDriverVersion()) == (4, "580.1")
    assert gpu_affinity._numbers("0-2,8") == (0, 1, 2, 8)


@pytest.mark.parametrize("mode", ["socket", "single", "socket_unique_continuous"])
def test_no_core_near_the_gpu(machine, mode):
    machine.allowed = {4, 5}
    with pytest.raises(RuntimeError, match="no CPU core near GPU 0"):
        gpu_affinity.set_affinity(0, 1, mode)
    assert machine.bound is None


def test_fewer_cores_than_processes(machine):
    machine.allowed = {0}
    with pytest.raises(RuntimeError, match="fewer cores near the GPUs than processes, 2"):
        gpu_affinity.set_affinity(0, 2, "single_unique")


def test_other_modes_are_refused(machine):
    with pytest.raises(ValueError, match=r"mode must be one of socket, single, .* found 'all'"):
        gpu_affinity.set_affinity(0, 1, "all")
    with pytest.raises(ValueError, match="mode must be interleaved or continuous, found 'all'"):
        gpu_affinity.set_socket_unique_affinity(0, 1, "all")


def test_nvml_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match="pip install nvidia-ml-py"):
        gpu_affinity.set_affinity(0, 1)
