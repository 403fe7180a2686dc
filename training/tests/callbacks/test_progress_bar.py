"""What is printed while a model trains."""

import logging
import sys

import pytest
import torch

from src.callbacks.model_summary import ModelSummary
from src.callbacks.monitors import MonitorsExist
from src.callbacks.progress_bar import ProgressBar
from src.callbacks.speed_monitor import SpeedMonitor
from tests.callbacks.tiny import TinyTask, loader, trainer


class Fails(TinyTask):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise RuntimeError("failed")
        return super().training_step(batch, batch_idx)


class Logs(TinyTask):
    """Logs a line with each loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        logging.getLogger("test").warning("a line of batch %d", batch_idx)
        return loss


@pytest.fixture
def prints_log(monkeypatch):
    """What is logged is printed to the standard output, as by Hydra's handler."""
    monkeypatch.setattr(logging.root, "handlers", [])
    return lambda: logging.root.addHandler(logging.StreamHandler(sys.stdout))


def fit(task, *callbacks, **options):
    trainer([ProgressBar(refresh_rate=2), *callbacks], enable_progress_bar=True, **options).fit(
        task, loader(), loader()
    )


def states(printed):
    """What the bar of the training shows, each time that it is drawn anew."""
    lines = [line.strip() for line in printed.replace("\r", "\n").splitlines() if line.startswith("Epoch 0:")]
    return list(dict.fromkeys(lines))


def test_the_bar(capsys, prints_log):
    prints_log()
    before = list(logging.root.handlers)
    fit(Logs(), SpeedMonitor())
    printed = capsys.readouterr().out
    drawn = [line for line in states(printed) if "loss=" in line]
    assert [line.split("|")[2].split()[0] for line in dict.fromkeys(drawn)][-1] == "8/8"
    assert "tokens/s=" in drawn[-1] and "time/" not in printed and "e+" not in drawn[-1]
    rows = printed.replace("\r", "\n").splitlines()
    assert all(f"a line of batch {i}" in (row.strip() for row in rows) for i in range(8))
    assert logging.root.handlers == before


def test_after_an_error_there_is_a_new_line(capsys, prints_log):
    prints_log()
    with pytest.raises(RuntimeError, match="failed"):
        fit(Fails())
    assert capsys.readouterr().out.endswith("\n")
    assert [type(each) for each in logging.root.handlers if "Capture" not in repr(each)] == [logging.StreamHandler]


def test_units():
    bar, used = ProgressBar(), trainer()
    used.fit(TinyTask(), loader())
    used._logger_connector._progress_bar_metrics = {"time/tokens_per_s": 5230.4, "time/mfu": 0.4123, "v_num": "abcd"}
    bar.setup(used, used.lightning_module, "fit")
    assert bar.get_metrics(used, used.lightning_module) | {"loss": 0} == {
        "loss": 0,
        "tokens/s": "5,230",
        "MFU": "41.2%",
    }


def test_summary(capsys):
    task = TinyTask()
    task.other = torch.nn.Dropout()
    next(task.parameters()).requires_grad = False
    trainer([ModelSummary()]).fit(task, loader())
    printed = capsys.readouterr().out
    total = sum(p.numel() for p in task.parameters())
    trained = total - next(task.parameters()).numel()
    assert "model" in printed and "other" not in printed and "FLOPs" not in printed
    assert f"{total} parameters, of which {trained} are trained" in printed.replace(" K", "000")


@pytest.mark.parametrize("kind", ["ModelCheckpointMine", "EarlyStopping"])
def test_a_monitor_that_is_not_there(kind, tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping

    from src.callbacks.model_checkpoint import ModelCheckpointMine

    other = ModelCheckpointMine(tmp_path, monitor="val/los") if kind != "EarlyStopping" else EarlyStopping("val/los")
    with pytest.raises(ValueError, match=f"the monitor of {kind} must be one of val/loss, found 'val/los'"):
        trainer([MonitorsExist(), other], limit_val_batches=1, num_sanity_val_steps=1).fit(
            TinyTask(), loader(), loader()
        )


def test_an_optimized_metric_that_is_not_there():
    with pytest.raises(ValueError, match="optimized_metric must be one of val/loss, found 'val/los'"):
        trainer([MonitorsExist("val/los")], limit_val_batches=1, num_sanity_val_steps=1).fit(
            TinyTask(), loader(), loader()
        )
