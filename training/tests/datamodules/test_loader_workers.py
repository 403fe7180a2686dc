"""Processes that read batches live as long as training does."""

import multiprocessing
import os
import signal

import pytest

from src.datamodules.language_modeling_hf import LMDataModule


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_does_not_end_them(number, tmp_path):
    (tmp_path / "text.txt").write_text("All of these words are read by another process. " * 400)
    data = LMDataModule(
        str(tmp_path / "text.txt"), "byte", max_length=16, cache_dir=str(tmp_path), batch_size=4, val_ratio=0.1,
        shuffle=True, loader_workers=1,
    )  # fmt: skip
    data.prepare_data()
    data.setup()
    loader, others = data.train_dataloader(), set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, number)
    assert len(list(batches)) == len(loader) - 1
