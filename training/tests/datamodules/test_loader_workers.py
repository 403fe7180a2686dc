"""Processes that read batches live as long as training does."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from src.datamodules.language_modeling_hf import LMDataModule

FAILS = """
from torch.utils.data import DataLoader
from src.datamodules.resumable_loader import leave_signals_to_the_trainer

batches = iter(DataLoader(range(9), num_workers=1, worker_init_fn=leave_signals_to_the_trainer))
next(batches)
raise SystemExit(3)  # with an iterator that is still there, as in the stack of an error
"""


def test_a_run_that_fails_does_not_wait_for_its_workers():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FAILS], env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 3 and not done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_does_not_end_them(number, tmp_path):
    (tmp_path / "text.txt").write_text("All of these words are read by another process. " * 400)
    data = LMDataModule(
        str(tmp_path / "text.txt"),
        "byte",
        max_length=16,
        cache_dir=str(tmp_path),
        batch_size=4,
        val_ratio=0.1,
        shuffle=True,
        loader_workers=1,
    )
    data.prepare_data()
    data.setup()
    loader, others = data.train_dataloader(), set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, number)
    assert len(list(batches)) == len(loader) - 1
