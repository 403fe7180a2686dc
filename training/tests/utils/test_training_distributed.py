"""Small collectives, in one process and in two."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from processes import over_processes

from src.utils import distributed

OPS = {"sum": 7.5, "mean": 3.75, "min": 2.5, "max": 5.0, "product": 12.5}  # of 2.5 and 5.0


def test_nothing_happens_without_a_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.init_distributed(cuda=False) is False
    assert not dist.is_initialized()
    distributed.barrier()
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    assert [distributed.all_reduce_item(3, op) for op in OPS] == [3] * 5
    with distributed.sync_workers() as rank:
        assert rank == 0


def test_other_operations_are_refused():
    with pytest.raises(ValueError, match="op must be one of sum, mean, min, max, product, found 'median'"):
        distributed.all_reduce_item(1, "median")


def on_each_rank(group):
    rank = group.rank()
    assert (distributed.get_rank(), distributed.get_world_size()) == (rank, 2)
    for op, expected in OPS.items():
        assert distributed.all_reduce_item(2.5 * (rank + 1), op) == expected
    total = distributed.all_reduce_item(2**53 + rank)  # exact, which float64 is not
    assert (total, type(total)) == (2**54 + 1, int)
    distributed.barrier()


def waits(group, folder):
    with distributed.sync_workers() as rank:
        if rank == 1:
            (folder / "ready").touch()
    assert (folder / "ready").exists()


def test_two_processes():
    over_processes(2, on_each_rank)


def test_sync_workers_waits_at_its_end(tmp_path):
    over_processes(2, waits, tmp_path)


def test_group_from_the_environment():
    code = (
        "from src.utils import distributed as d; print(d.init_distributed(cuda=False), d.init_distributed(cuda=False), "
        "d.get_world_size(), d.all_reduce_item(d.get_rank() + 1))"
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0].decode().splitlines() for process in processes]
    assert [lines[-1] for lines in printed] == ["True True 2 3"] * 2  # gloo of torch 2.10 has printed something before
