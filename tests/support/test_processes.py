"""The processes of distributed tests: they stay, a failure in one is reported, and the next test gets new ones."""

import os
import pathlib
import time

import pytest
import torch
import torch.distributed as dist
from processes import half_of, over_processes


def write_pid(group, folder):
    pathlib.Path(folder, str(dist.get_rank(group))).write_text(str(os.getpid()))


def pids(folder):
    folder.mkdir()
    over_processes(2, write_pid, folder)
    return [path.read_text() for path in sorted(folder.iterdir())]


def test_processes_stay(tmp_path):
    assert len(set(pids(tmp_path / "first"))) == 2
    assert pids(tmp_path / "second") == pids(tmp_path / "third")


def fail_while_others_wait(group):
    if dist.get_rank(group) == 1:
        raise ValueError("the second process fails")
    dist.barrier()


def end_while_others_wait(group):
    if dist.get_rank(group) == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (fail_while_others_wait, "process 1 of 2: (?s:.)*ValueError: the second process fails"),
        (end_while_others_wait, "process 1 of 2: it ended with exit code 3"),
    ],
)
def test_a_failure_is_raised_and_leaves_nothing_behind(target, message, tmp_path):
    before = pids(tmp_path / "before")
    with pytest.raises(RuntimeError, match=message):
        over_processes(2, target)
    assert not set(before) & set(pids(tmp_path / "after"))


def hang(group):
    time.sleep(1000)


def test_processes_that_hang_are_ended(monkeypatch):
    monkeypatch.setattr("processes._TIMEOUT", 1)
    with pytest.raises(TimeoutError, match=r"processes \[0, 1\] have not finished hang in 1 s"):
        over_processes(2, hang)


def change_state(group):
    torch.manual_seed(5)


def check_state(group):
    assert torch.initial_seed() == 0


def test_random_state_is_the_same_for_every_test():
    over_processes(2, change_state)
    over_processes(2, check_state)


def check_half(group):
    half = half_of(group)
    rank = torch.tensor(dist.get_rank(group))
    dist.all_reduce(rank, group=half)
    assert rank.item() == (0 + 1 if dist.get_rank(group) < 2 else 2 + 3)


def test_halves():
    over_processes(4, check_half)
