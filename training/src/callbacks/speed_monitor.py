"""How fast training is."""

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from src.callbacks.loggers import is_logging_step
from src.utils.distributed import ranks_of_samples
from src.utils.flops import peak_tflops, train_flops_per_token


class SpeedMonitor(L.Callback):
    """Logs times and throughput at logging steps. All times are those of the host, which never waits for the device.

    - `time/intra_step (ms)`: of the last batch. `time/inter_step (ms)`: from the end of the batch before to its
      beginning, which is mostly the wait for data. `time/epoch (s)`: of the last epoch, or of what was left of it when
      the run was resumed.
    - `time/tokens_per_s`, also in the progress bar: of all ranks, since the previous logging step, without validation.
      For batches that are not of tokens, `time/samples_per_s`.
    - `time/model_tflops`: what a rank computes in TFLOP/s, by `train_flops_per_token`, for models with a suitable
      config. `time/mfu`: its share of the GPU's dense bf16 peak, for GPUs in the table of src/utils/flops.py.

    Arguments:
        intra_step_time, inter_step_time, epoch_time: which times are logged.
        verbose: also print the time of every batch.
    """

    def __init__(
        self,
        intra_step_time: bool = True,
        inter_step_time: bool = True,
        epoch_time: bool = True,
        verbose: bool = False,
    ) -> None:
        self.intra_step_time, self.inter_step_time, self.epoch_time = intra_step_time, inter_step_time, epoch_time
        self.verbose = verbose
        self._batch_start = self._epoch_start = 0.0
        self._batch_end: float | None = None  # of the previous batch; None if something came between
        self._between: float | None = None
        self._window_start: float | None = None  # when counting of the next line began
        self._items = 0
        self._flops_per_token: dict[int | None, float | None] = {}  # by the length of the sequences

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._epoch_start = time.perf_counter()  # on_train_epoch_start is not called for a resumed epoch

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._epoch_start = time.perf_counter()
        self._forget()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_start = time.perf_counter()
        self._between = None if self._batch_end is None else self._batch_start - self._batch_end

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self._batch_end = time.perf_counter()
        within = now - self._batch_start
        if self.verbose:
            pl_module.print(f"time/intra_step (ms): {1000 * within:.2f}")
        if self._window_start is None:  # the first batch may have compiled something
            self._window_start = now
            window = 0.0
        else:
            self._items += _items(batch)[0]
            window = now - self._window_start
        if not is_logging_step(trainer):
            return
        if self.intra_step_time:
            self._log("time/intra_step (ms)", 1000 * within)
        if self.inter_step_time and self._between is not None:
            self._log("time/inter_step (ms)", 1000 * self._between)
        if self._items:
            self._log_throughput(trainer, pl_module, batch, self._items / window)
            self._window_start, self._items = now, 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.epoch_time:
            self._log("time/epoch (s)", time.perf_counter() - self._epoch_start)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._forget()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._forget()

    def _forget(self) -> None:
        """Start counting anew after something other than training."""
        self._batch_end = self._window_start = None
        self._items = 0

    def _log_throughput(self, trainer, pl_module, batch, items_per_s):
        """items_per_s: tokens or samples of one rank in a second."""
        _, seqlen = _items(batch)
        name = "time/samples_per_s" if seqlen is None else "time/tokens_per_s"
        self._log(name, items_per_s * (trainer.world_size // ranks_of_samples(trainer)), prog_bar=True)
        if seqlen not in self._flops_per_token:
            self._flops_per_token[seqlen] = _flops_per_token(getattr(pl_module, "model", pl_module), seqlen)
        flops = self._flops_per_token[seqlen]
        if flops is None:
            return
        tflops = items_per_s * flops / 1e12
        self._log("time/model_tflops", tflops)
        on_gpu = pl_module.device.type == "cuda"
        peak = peak_tflops(torch.cuda.get_device_name(pl_module.device)) if on_gpu else None
        if peak is not None:
            self._log("time/mfu", tflops / peak, prog_bar=True)

    def _log(self, name: str, value: float, prog_bar: bool = False) -> None:
        on_host = torch.tensor(value, dtype=torch.float64)  # Lightning would copy a Python number to the device
        self.log(name, on_host, prog_bar=prog_bar)


def _flops_per_token(model: nn.Module, seqlen: int | None) -> float | None:
    """`train_flops_per_token`, or None where it cannot be known."""
    try:
        return None if seqlen is None else train_flops_per_token(model, seqlen)
    except ValueError:
        return None


def _items(batch: Any) -> tuple[int, int | None]:
    """(tokens, tokens of a sequence) of a batch whose input is token ids, else (samples, None)."""
    if isinstance(batch, dict):
        batch = batch.get("input_ids", next(iter(batch.values())))
    x = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(x, Tensor):
        return 0, None
    if x.is_floating_point() or x.dim() != 2:
        return len(x), None
    return x.numel(), x.shape[1]
