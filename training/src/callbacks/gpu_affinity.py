"""Keeps each process on CPU cores next to its GPU."""

import logging

import lightning as L

from src.utils.gpu_affinity import set_affinity

log = logging.getLogger(__name__)


class GpuAffinity(L.Callback):
    """Binds each process to its share of the CPU cores near its GPU, in mode socket_unique_continuous.

    Needs nvidia-ml-py. Without it, or if anything else fails, training goes on, and a line in the log says why.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.strategy.root_device.type != "cuda":
            return
        try:
            cores = set_affinity(trainer.local_rank, trainer.num_devices, "socket_unique_continuous")
        except Exception as error:  # drivers and containers fail in many ways, and only speed is at stake
            log.info("Rank %d is not bound to the CPU cores near its GPU: %s", trainer.global_rank, error)
        else:
            log.info("Rank %d is bound to the CPU cores %s", trainer.global_rank, sorted(cores))
