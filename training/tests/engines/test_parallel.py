"""Engines on several processes: the same steps as one process, and exact resume."""

import os
import pathlib

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from src import engines
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.processes import over_processes
from training.tests.engines import tiny

STEPS, GLOBAL_BATCH = 7, 8


class Started(ClusterEnvironment):
    """Processes that the test has started, and their group."""

    creates_processes_externally = True
    main_address, main_port = "", 0

    def __init__(self, group):
        self.group = group

    @staticmethod
    def detect():
        return False

    def world_size(self):
        return self.group.size()

    def global_rank(self):
        return self.group.rank()

    local_rank = global_rank

    def node_rank(self):
        return 0

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass

    def validate_settings(self, num_devices, num_nodes):
        pass


def fit(folder, strategy, world, max_steps=STEPS, dropout=0.0, ckpt_path=None, save_at=None, seed=1, device="cpu", **options):
    L.seed_everything(seed)
    zero1 = isinstance(strategy, engines.DDPStrategyZero1)
    optimizer = _zero if zero1 else torch.optim.AdamW
    size = world // strategy.tensor_parallel_size
    model = options.pop("model", None) or tiny.Model(dropout=dropout)
    task = tiny.Task(model, optimizer)
    callbacks = [] if save_at is None else [tiny.SaveAt(*save_at)]
    trainer = tiny.trainer(
        folder, strategy, max_steps, world, callbacks=callbacks, accelerator=device, **options
    )
    trainer.fit(task, datamodule=tiny.Data(batch_size=GLOBAL_BATCH // size), ckpt_path=ckpt_path)
    return task


def _zero(groups, **options):
    return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **options)


def strategy(name, group, **options):
    if group is None:
        return engines.SingleDeviceStrategy()
    return engines.strategy(name, cluster_environment=Started(group), **options)


def check_steps(group, name, folder):
    """Compare with what one process has written to the folder."""
    task = fit(folder, strategy(name, group), group.size())
    expected = torch.load(pathlib.Path(folder, "serial.pt"))
    torch.testing.assert_close(tiny.weights(task), expected["weights"], rtol=2e-5, atol=2e-6)
    losses = torch.tensor(task.losses)
    torch.distributed.all_reduce(losses)
    torch.testing.assert_close(losses / group.size(), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-6)


NAMES = ["ddp", "ddp_zero1", "ddp_zero2", "fsdp"]


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """A folder with the weights and losses of a run on one process."""
    folder = tmp_path_factory.mktemp("serial")
    task = fit(folder, engines.SingleDeviceStrategy(), 1, save_at=(3, folder))
    torch.save({"weights": tiny.weights(task), "losses": task.losses}, folder / "serial.pt")
    return folder


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_one_process(name, world, serial):
    over_processes(world, check_steps, name, serial)
