"""Runs that are stopped by a signal, or killed while they save, go on as if nothing had happened."""

import signal
from types import SimpleNamespace

import pytest
import torch
from processes import new_process

from src.engines import signals
from src.utils import checkpoint as checkpoints
from training.tests.engines import run_until_signal

STEPS = 9  # of 3 batches each; an epoch has 12 batches, and validation comes after batches 4, 8 and 12


def run(folder, *options):
    """Returns (exit status, what was logged)."""
    log = folder / "log.txt"
    process = new_process(run_until_signal.main, [str(folder), str(STEPS), *options], log)
    process.start()
    process.join()
    return process.exitcode, log.read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    status, log = run(folder)
    assert status == 0, log
    return torch.load(folder / "end.pt")


def assert_same_end(folder, whole):
    end = torch.load(folder / "end.pt")
    assert end["losses"] == whole["losses"][-len(end["losses"]) :]
    torch.testing.assert_close(end["weights"], whole["weights"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "place", "number", "step"),
    [
        ("SIGINT", "before_backward", 7, 3),
        ("SIGTERM", "before_backward", 8, 3),  # in the middle of an accumulation
        pytest.param("SIGUSR1", "validation_batch_start", 11, 4, marks=pytest.mark.slow),  # in a validation
    ],
)
def test_a_signal_saves_and_stops(name, place, number, step, whole, tmp_path):
    status, log = run(tmp_path, "--signal", name, "--at", place, str(number))
    assert status == {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}[name], log
    assert f"{name}: saved" in log
    saved = checkpoints.Checkpoint(checkpoints.latest(tmp_path))
    assert saved.path.name == ".pl_auto_save.ckpt"
    assert saved.state["global_step"] == step
    status, log = run(tmp_path, "--resume")
    assert status == 0, log
    assert_same_end(tmp_path, whole)


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def test_ctrl_c_twice_interrupts(monkeypatch, capfd):
    """The first one is noted, its repetition by a launcher too; one that comes later does not wait."""
    clock = Clock()
    monkeypatch.setattr(signals, "time", clock)
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), is_global_zero=True)
    before = signal.getsignal(signal.SIGINT)
    connector = signals.Signals(trainer)
    connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGINT)
        clock.now = 0.5
        signal.raise_signal(signal.SIGINT)
        assert connector.received == signal.SIGINT
        assert capfd.readouterr().err.count("Press Ctrl-C again") == 1
        clock.now = 1.5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        connector.teardown()
    assert signal.getsignal(signal.SIGINT) is before


def test_evaluation_leaves_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    signals.Signals(SimpleNamespace(state=SimpleNamespace(fn="test"))).register_signal_handlers()
    assert signal.getsignal(signal.SIGTERM) is before


def test_killed_while_saving(whole, tmp_path):
    status, _ = run(tmp_path, "--kill-while-saving", "4")  # the second `last.ckpt`, of step 4
    assert status == -9
    status, log = run(tmp_path, "--resume")
    assert status == 0, log
    assert ".last.ckpt.part is ignored: writing it was interrupted" in log
    assert_same_end(tmp_path, whole)
