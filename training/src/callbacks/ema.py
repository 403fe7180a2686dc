"""Averages of the weights, with which a model is evaluated."""

from typing import Any

import lightning as L

from src.utils.distributed import tensor_parallel_size
from src.utils.ema import ExponentialMovingAverage


class EMACallback(L.Callback):
    """Keeps an exponential moving average of the trainable weights, and validates and tests with it.

    The averages are updated after each step of the optimizer. A checkpoint has the averaged model as `state_dict_ema`,
    with the names of `state_dict`, so that either can be evaluated, and training resumes with the same averages. An
    average that a checkpoint does not have begins with the weight.

    Raises ValueError if the model is tensor parallel: a checkpoint would have the averages of its first part only.

    Arguments:
        decay, use_num_updates: see `ExponentialMovingAverage`.
    """

    def __init__(self, decay: float, use_num_updates: bool = True) -> None:
        self.decay, self.use_num_updates = decay, use_num_updates
        self.ema: ExponentialMovingAverage | None = None
        self._steps = 0  # of the optimizer, at the last update
        self._loaded: dict[str, Any] = {}  # what a checkpoint gave, until training begins

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if (size := tensor_parallel_size(trainer)) > 1:
            raise ValueError(f"callbacks.ema needs strategy.tensor_parallel_size=1, found {size}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainable = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self.ema = ExponentialMovingAverage(trainable.values(), self.decay, self.use_num_updates, keep=True)
        if "averages" in self._loaded:
            averages = self._loaded["averages"]
            names = {name.replace("_orig_mod.", ""): p for name, p in trainable.items()}
            self.ema.load_shadow_params([averages.get(name, p) for name, p in names.items()])
            if self.use_num_updates:
                self.ema.num_updates = self._loaded.get("num_updates") or 0
        self._loaded = {}
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._steps:  # otherwise this batch only added to the gradients
            self._steps = trainer.global_step
            self.ema.update()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_in()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_out()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_in()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_out()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._swap_out()  # what may be saved now must be the weights, not the averages

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": None if self.ema is None else self.ema.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded["num_updates"] = state_dict["num_updates"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.ema is None:
            return
        trainable = [p for p in pl_module.parameters() if p.requires_grad]
        place_of = {id(p): i for i, p in enumerate(trainable)}
        averaged = checkpoint["state_dict_ema"] = {}
        for name, x in pl_module.state_dict(keep_vars=True).items():  # tied weights under each of their names
            name = name.replace("_orig_mod.", "")  # which torch.compile adds
            place = place_of.get(id(x))
            averaged[name] = x.detach() if place is None else self.ema.shadow_params[place]
            if place is not None and self.ema.collected_params is not None and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = self.ema.collected_params[place]  # the model has averages now

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "state_dict_ema" in checkpoint:
            self._loaded["averages"] = checkpoint["state_dict_ema"]

    def _swap_in(self):
        if self.ema is not None:
            self.ema.store()
            self.ema.copy_to()

    def _swap_out(self):
        if self.ema is not None and self.ema.collected_params is not None:
            self.ema.restore()
