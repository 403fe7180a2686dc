"""What all strategies share: checkpoints as folders, and runs that go on exactly where they were.

A run that is resumed on the same number of processes gives the same bits as one that was never interrupted: weights,
optimiser, schedules, loss scale, random states of each process, and the position in the data. Another number of
processes, or another way to divide the model over them, may go on as well, with the same data in the same order if the
data module is a `src.datamodules.resumable.ResumableDataModule`.
"""

import functools
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.engines import rng, signals
from src.utils import checkpoint as checkpoints
from src.utils.checkpoint import Checkpoint, CheckpointError, Entry, Redivided, found

_OF_WHAT_FITS = ("model", "datamodule", "task", "train")  # options that decide whether a checkpoint fits
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_NO_LONGER_STORED = re.compile(r"(val|test)_metrics\..*\.count(@tp\d+)?")  # which older checkpoints have
_log = logging.getLogger(__name__)


class ExactResume(Strategy):
    """Mixin for Lightning's strategies, in front of one of them in the list of bases.

    - Checkpoints are those of `src.utils.checkpoint`, written by all processes.
    - They are taken between two optimiser steps. A request to save while gradients are accumulated waits for the step,
      and so does the end of a run, such as that of Trainer(max_time=…).
    - Random numbers that validation draws do not change those of training.
    - SIGTERM and SIGUSR1 end the run after a save (`src.engines.signals`).
    """

    data_parallel_size = property(lambda self: self.world_size)
    tensor_parallel_size = context_parallel_size = 1
    within_validation = False  # while a checkpoint is taken before the end of a validation

    _resumed: Checkpoint | None = None  # between load_checkpoint and the start of training
    _rng_of_training: dict[str, Any] | None = None  # during validation

    # Set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        self._postponed: list[tuple[str, bool | None]] = []
        signals.add_callbacks(self.lightning_module.trainer)

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self.prepare(trainer)

    def prepare(self, trainer: L.Trainer) -> None:
        """What `setup` does in addition to Lightning's: validation draws random numbers of its own."""
        validation = trainer.fit_loop.epoch_loop.val_loop
        validation.run = functools.partial(self._apart, type(validation).run, validation)

    def _apart(self, run, *args):
        with rng.isolated() as self._rng_of_training:
            try:
                return run(*args)
            finally:
                self._rng_of_training = None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give the loader its own generator for workers' seeds: a resumed run must not draw more global numbers."""
        dataloader = super().process_dataloader(dataloader)
        if isinstance(dataloader, torch.utils.data.DataLoader) and dataloader.generator is None:
            step = self.lightning_module.trainer.global_step
            dataloader.generator = torch.Generator().manual_seed(torch.initial_seed() + step)
        return dataloader

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._resumed is not None:
            own = self._resumed.own
            rng.restore(own[self.global_rank % len(own)]["rng"])
            if not self._resumed.state["engine"].get("within_validation"):
                _consider_saved(self.lightning_module.trainer)
            self._resumed = None

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {_plain(name): value for name, value in self.lightning_module.state_dict().items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser state of this process, by the names of the parameters."""
        optimizer = unwrapped(optimizer)
        names = self._parameter_names()
        state = _local(optimizer).state
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": {names[id(p)]: dict(values) for p, values in state.items()}, "param_groups": groups}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str, storage_options: Any = None) -> None:
        weights_only = "optimizer_states" not in checkpoint
        trainer = self.lightning_module.trainer
        if trainer.state.fn == "fit" and trainer.fit_loop._should_accumulate():
            self._postponed.append((filepath, weights_only))
            return
        filepath = self.broadcast(filepath)
        state = dict(checkpoint)
        tensors, extra = self._divide_model(state.pop("state_dict"))
        optimizers = []
        for i, optimizer_state in enumerate(state.pop("optimizer_states", [])):
            flat, others = self._divide_optimizer(i, optimizer_state.pop("state"))
            tensors |= flat
            optimizers.append({**optimizer_state, "others": others})
        state = _plain_hyper_parameters(state)
        state |= {"extra_state": extra, "optimizers": optimizers, "engine": self._description()}
        if self.within_validation:
            _begin_validation_again(state["loops"]["fit_loop"])
        checkpoints.save(filepath, state, tensors, {"rng": self._rng_of_training or rng.collect()})

    def save_postponed(self) -> None:
        """Once the accumulation has ended, do what was asked for in the middle of it."""
        trainer = self.lightning_module.trainer
        if self._postponed and not trainer.fit_loop._should_accumulate():
            waiting, self._postponed = self._postponed, []
            for filepath, weights_only in waiting:
                if weights_only is None:
                    self.remove_checkpoint(filepath)
                else:
                    trainer.save_checkpoint(filepath, weights_only)

    def remove_checkpoint(self, filepath: str) -> None:
        if self._postponed:  # only after its replacement has been saved
            self._postponed.append((filepath, None))
        elif self.is_global_zero:
            checkpoints.remove(filepath)

    def _divide_model(self, state_dict):
        """(tensors by their names in the checkpoint, everything else in the state dict)."""
        tensors = {self._stored(name): x for name, x in state_dict.items() if isinstance(x, Tensor)}
        return tensors, {name: x for name, x in state_dict.items() if not isinstance(x, Tensor)}

    def _divide_optimizer(self, i, state):
        tensors, others = {}, {}
        for name, values in state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[self._stored(name, f"optimizer_states.{i}.{key}.")] = value
                else:
                    others.setdefault(name, {})[key] = value
        return tensors, {name: values for each in checkpoints.gather(others) for name, values in each.items()}

    def _stored(self, name, prefix=checkpoints.WEIGHTS):
        return prefix + name

    def _description(self):
        return {
            "strategy": getattr(self, "strategy_name", type(self).__name__),
            "world_size": self.world_size,
            "data_parallel_size": self.data_parallel_size,
            "tensor_parallel_size": self.tensor_parallel_size,
            "optimizers": [_kind(optimizer) for optimizer in self.optimizers],
            "within_validation": self.within_validation,
            "schedulers": [type(config.scheduler).__name__ for config in self.lr_scheduler_configs],
        }

    # Loading

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: str, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, and compare it with the model, the optimiser and the processes before anything is changed.

        Lightning's own checkpoint files are accepted too, without this comparison. Raises CheckpointError if something
        does not fit.
        """
        path = pathlib.Path(self.broadcast(checkpoint_path))
        if path.is_file():
            return super().load_checkpoint(path, weights_only=True)
        self._resumed = Checkpoint(path)
        state = dict(self._resumed.state)
        if state["engine"]["tensor_parallel_size"] != self.tensor_parallel_size:
            self._resumed = checkpoints.together(lambda: self._redivided(self._resumed))
        checkpoints.together(lambda: self._compare(state), f"{path} does not fit")
        if self.is_global_zero:
            self._warn_of_kept_options(state)
        targets = {}
        for name, x in self.lightning_module_state_dict().items():
            if isinstance(x, Tensor) and self._stored(name) in self._resumed.entries:
                targets[name] = torch.empty_like(x)
        self._resumed.read_into({self._stored(name): x for name, x in targets.items()})
        state["state_dict"] = targets | state.pop("extra_state")
        state["optimizer_states"] = state.pop("optimizers")
        return state

    def _redivided(self, checkpoint):
        """A checkpoint of another tensor_parallel_size, read as one of this size."""
        return Redivided(checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        names = {_plain(name): name for name in self.lightning_module.state_dict()}
        state_dict = {names.get(name, name): x for name, x in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state_dict, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._resumed is None:
            return super().load_optimizer_state_dict(checkpoint)
        for i, (optimizer, stored) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"])):
            self._load_optimizer(i, unwrapped(optimizer), stored)

    def _load_optimizer(self, i, optimizer, stored):
        for group, values in zip(optimizer.param_groups, stored["param_groups"]):
            group.update({key: value for key, value in values.items() if key != "params"})
        names = self._parameter_names()
        local, targets = _local(optimizer), {}
        prefix = f"optimizer_states.{i}."
        keys = sorted(
            {name.removeprefix(prefix).split(".")[0] for name in self._resumed.entries if name.startswith(prefix)}
        )
        for group in local.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                state = dict(stored["others"].get(name, {}))
                for key in keys:
                    place = self._stored(name, f"{prefix}{key}.")
                    if place in self._resumed.entries:
                        state[key] = targets[place] = _like(parameter, self._resumed.entries[place], key, group)
                if state:
                    local.state[parameter] = state
        self._resumed.read_into(targets)

    def _parameter_names(self):
        return {id(parameter): _plain(name) for name, parameter in self.lightning_module.named_parameters()}

    def _compare(self, state):
        """Raise CheckpointError with everything in which the checkpoint differs from this run."""
        faults = self._differences(state)
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            changed = _changes(state.get("hyper_parameters") or {}, self.lightning_module.hparams)
            options = f"\nOptions that have changed: {'; '.join(changed)}" if changed else ""
            raise CheckpointError("; ".join(faults[:3]) + more + options)

    def _warn_of_kept_options(self, state):
        """Warn of changed options that have no effect, since PyTorch restores them with optimisers and schedules.

        What another class has by default may be an option of the one before: only what it comes to counts.
        """
        kept = set()
        for optimizer, stored in zip(self.optimizers, state["optimizers"]):
            groups = unwrapped(optimizer).param_groups[0], stored["param_groups"][0]
            kept |= {f"train.optimizer.{key}" for key in _different(*map(_as_given, groups))}
        for each, stored in zip(self.lr_scheduler_configs, state.get("lr_schedulers", [])):
            kept |= {f"train.scheduler.{key}" for key in _different(each.scheduler.state_dict(), stored)}
        changed = _changes(state.get("hyper_parameters") or {}, self.lightning_module.hparams)
        without_effect = [each for each in changed if each.partition(" ")[0] in kept]
        if without_effect:
            _log.warning(
                f"These options keep the values of the checkpoint, not those of this run: {'; '.join(without_effect)}"
            )

    def _differences(self, state):
        entries, engine = self._resumed.entries, state["engine"]
        model, _ = self._divide_model(self.lightning_module_state_dict())
        strict = self.lightning_module.strict_loading
        faults = [
            f"{name.removeprefix(checkpoints.WEIGHTS)} has shape {found(entries.get(name))} in the checkpoint and "
            f"{tuple(x.shape)} in the model"
            for name, x in model.items()
            if (entries[name].shape != x.shape if name in entries else strict)
        ]
        if strict:
            faults += [
                f"{name.removeprefix(checkpoints.WEIGHTS)} is not in the model"
                for name in entries
                if name.startswith(checkpoints.WEIGHTS)
                and name not in model
                and self._is_mine(name)
                and not _NO_LONGER_STORED.fullmatch(name.removeprefix(checkpoints.WEIGHTS))
            ]
        if not self.optimizers:
            return faults
        kinds = [_kind(optimizer) for optimizer in self.optimizers]
        if engine["optimizers"] != kinds:
            return [*faults, f"the optimizer must be {engine['optimizers']}, found {kinds}"]
        for optimizer, stored in zip(self.optimizers, state["optimizers"]):
            faults += self._differences_of_groups(unwrapped(optimizer), stored["param_groups"])
        schedulers = [type(config.scheduler).__name__ for config in self.lr_scheduler_configs]
        if engine["schedulers"] != schedulers:
            faults.append(f"the schedulers must be {engine['schedulers']}, found {schedulers}")
        return faults

    def _is_mine(self, name):
        """Whether a stored weight is of this process's part of a tensor parallel model."""
        return True

    def _differences_of_groups(self, optimizer, groups):
        names, mine = self._parameter_names(), self._resumed.entries
        now = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        then = [[name for name in group["params"] if self._stored(name) in mine] for group in groups]
        if len(now) != len(then):
            return [f"the optimizer must have {len(then)} groups of parameters, found {len(now)}"]
        return [
            f"group {i} of the optimizer must have the parameters {sorted(set(a) - set(b)) or 'of the checkpoint'}, "
            f"found {sorted(set(b) - set(a)) or 'another order'}"
            for i, (a, b) in enumerate(zip(then, now))
            if set(a) != set(b)
        ]


def back_to_last_step(trainer: L.Trainer) -> None:
    """Set the counters of a run that has failed back to its last optimiser step, before it is saved.

    The resumed run then takes the batches since that step again, because their gradients are lost, and repeats a
    validation that was under way.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress
    processed = batches.current.processed
    epoch_is_over = processed == trainer.num_training_batches
    since = 0 if epoch_is_over else processed % trainer.accumulate_grad_batches
    for counters in (batches.total, batches.current):
        counters.ready = counters.started = counters.completed = counters.processed = counters.processed - since
    batches.is_last_batch = epoch_is_over
    trainer.strategy.within_validation = trainer.validating and not since


def _consider_saved(trainer):
    """Tell callbacks that save every n steps that the step of the checkpoint is saved.

    Otherwise they would save again in the first batch of a resumed run and, with accumulation, overwrite the checkpoint
    with one of the next step.
    """
    for each in trainer.checkpoint_callbacks:
        each._last_global_step_saved = trainer.global_step


def _plain(name):
    """A parameter's name without the wrapper of torch.compile."""
    return name.replace("_orig_mod.", "")


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimiser itself, and not Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _local(optimizer):
    """The optimiser that holds the states: ZeroRedundancyOptimizer has one for the part of this process."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _kind(optimizer):
    return type(_local(unwrapped(optimizer))).__name__


def _like(parameter: nn.Parameter, entry: Entry, key: str, group: dict[str, Any]) -> Tensor:
    """An empty tensor for an optimiser's state; divided like its parameter if it has the same shape."""
    if entry.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.empty(entry.shape, dtype=entry.dtype, device=local.device if on_device else "cpu")


def _plain_hyper_parameters(state):
    """Hyper-parameters as plain data; the class that held them is not kept."""
    state = {key: value for key, value in state.items() if not key.endswith("hparams_type")}
    for key in _HPARAMS:
        if OmegaConf.is_config(state.get(key)):
            state[key] = OmegaConf.to_container(state[key], resolve=True)
    return state


def _changes(then, now, place=""):
    """The options of a model, its data and its training that differ between two configurations, in words."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        keys = [*then, *(key for key in now if key not in then)]
        keys = keys if place else [key for key in keys if key in _OF_WHAT_FITS]
        return [each for key in keys for each in _changes(then.get(key), now.get(key), f"{place}.{key}".lstrip("."))]
    return [] if then == now else [f"{place} was {then!r}, and is {now!r}"]


def _different(now, then):
    """The keys of `now` with another value in `then`; tuples are as good as lists."""
    plain = [{key: list(x) if isinstance(x, tuple) else x for key, x in each.items()} for each in (now, then)]
    return [key for key, value in plain[0].items() if key not in then or value != plain[1][key]]


def _as_given(group):
    """A group of an optimiser with the lr that it was given, which a scheduler has changed since."""
    return {**group, "lr": group.get("initial_lr", group.get("lr"))}


def _begin_validation_again(fit_loop):
    """Make a run that is resumed from within a validation repeat all of it.

    Counters are set so that Lightning takes the validation for interrupted, and the training batch before it for
    finished, even if callbacks at its end are still running.
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    for counters in ("total", "current"):
        batches[counters] = batches[counters] | {"completed": batches[counters]["processed"]}
    started = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    fit_loop["epoch_loop.val_loop.batch_progress"] |= {"total": started, "current": started, "is_last_batch": False}
