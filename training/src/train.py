"""Training: build everything that the configuration names, resume, fit, test."""

import contextlib
import importlib.util
import inspect
import os
import pathlib
from typing import Any

import lightning as L
import torch
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf

from src import engines
from src.callbacks.monitors import MonitorsExist
from src.utils import utils
from src.utils.checkpoint import latest
from src.utils.folders import check_writable, only_run_in
from src.utils.hints import did_you_mean
from src.utils.resolvers import device_count, parsed_devices

log = utils.get_logger(__name__)

_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}  # ours, Lightning's
_OF_LIGHTNING = {
    *_PRECISIONS.values(),
    "16-true",
    "bf16-true",
    "transformer-engine",
    "transformer-engine-float16",
}
_ACCELERATORS = ("auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators()))


def train(config: DictConfig) -> float | None:
    """Train as a configuration says, and return the metric that `optimized_metric` names, if it has this key.

    With config.resume, training goes on from the latest complete checkpoint in callbacks.model_checkpoint.dirpath, or
    starts from the beginning if there is none. Afterwards the model is tested, with its last weights, if
    `test_after_training`.

    Raises ValueError for a configuration that cannot be run; the message names its key.
    """
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True)
    OmegaConf.set_struct(config, False)
    check_trainer(config)
    check_devices(config)
    strategy = strategy_of(config)
    check_warmstart(config)
    with checkpoint_folder(config):
        return _fit(config, strategy)


def _fit(config, strategy):
    checkpoint = checkpoint_to_resume(config) if config.get("resume") else None
    model = instantiate(config.task, cfg=config, _recursive_=False)
    datamodule = model._datamodule
    callbacks, loggers = instances(config.get("callbacks")), loggers_of(config)
    trainer = trainer_of(config, strategy, callbacks, loggers)
    log.info("Training in %s on %d x %s", os.getcwd(), trainer.world_size, trainer.accelerator.name())
    trainer.fit(model, datamodule=datamodule, ckpt_path=checkpoint)
    log.info("Trained to step %d", trainer.global_step)
    metrics = dict(trainer.callback_metrics)
    if config.get("test_after_training") and not trainer.fast_dev_run:
        trainer.test(model, datamodule=datamodule)
        metrics |= trainer.callback_metrics  # after a test, it has the test's metrics only
    utils.finish(config, model, datamodule, trainer, callbacks, loggers)
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best:
        log.info("The best checkpoint: %s", best)
    return _optimized(config, metrics)


def check_trainer(config: DictConfig) -> None:
    """Raise ValueError for what Lightning's Trainer would refuse, but after the data has been prepared."""
    options = {key: value for key, value in config.trainer.items() if not key.startswith("_")}  # those are Hydra's
    known = inspect.signature(get_class(config.trainer.get("_target_", "lightning.Trainer"))).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    for name in options:
        if name not in known and not takes_all:
            what = f"trainer.{name} is no option of Lightning's Trainer"
            raise ValueError(did_you_mean(what, name, known, "trainer."))
    accelerator, precision = options.get("accelerator"), options.get("precision")
    if isinstance(accelerator, str | int) and accelerator not in _ACCELERATORS:
        raise ValueError(f"trainer.accelerator must be one of {', '.join(_ACCELERATORS)}, found {accelerator!r}")
    if precision is not None and str(precision) not in {*_PRECISIONS, *_OF_LIGHTNING}:
        raise ValueError(f"trainer.precision must be one of {', '.join(_PRECISIONS)}, found {precision!r}")


def check_devices(config: DictConfig) -> None:
    """Raise ValueError if the trainer wants more GPUs than there are, or not the processes of torchrun or srun."""
    accelerator = config.trainer.get("accelerator") or "auto"
    devices, there = parsed_devices(config.trainer.get("devices")), torch.cuda.device_count()
    wanted = device_count(devices, accelerator)
    needed = max(devices) + 1 if isinstance(devices, list) else wanted
    if needed > there and (accelerator in ("gpu", "cuda") or (accelerator == "auto" and there > 0)):
        raise ValueError(
            f"trainer.devices must be at most the number of GPUs here, {there}, or a list of indices below it, found "
            f"{devices}; trainer.accelerator=cpu needs none"
        )
    nodes = config.trainer.get("num_nodes") or 1
    launchers = {"torchrun": TorchElasticEnvironment, "srun": SLURMEnvironment}  # srun may start torchrun
    launcher = next((name for name, environment in launchers.items() if environment.detect()), None)
    if launcher is None or config.trainer.get("plugins"):  # which may be another environment
        return
    if (started := launchers[launcher]().world_size()) != wanted * nodes:
        raise ValueError(
            f"trainer.devices x trainer.num_nodes must be the number of processes that {launcher} has started, "
            f"{started}, found {wanted} x {nodes}"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", wanted))
    if launcher == "torchrun" and here != wanted:
        raise ValueError(
            f"trainer.devices must be the number of processes that torchrun has started on each machine, {here}, found "
            f"{wanted}"
        )


def checkpoint_folder(config: DictConfig) -> contextlib.AbstractContextManager:
    """A block in which no other run writes checkpoints where this one does.

    Raises ValueError if another does, or if none can be written, before the hours until the first one.
    """
    key = "callbacks.model_checkpoint.dirpath"
    folder = OmegaConf.select(config, key)
    if folder is None:
        return contextlib.nullcontext()
    check_writable(folder, key, "CHECKPOINT_DIR")
    return only_run_in(folder, key)


def check_warmstart(config: DictConfig) -> None:
    """Raise ValueError if the weights to begin with are missing, before the data is prepared."""
    options = OmegaConf.select(config, "train.warmstart")
    if options is not None and not os.path.exists(options.get("path") or ""):
        raise ValueError(f"train.warmstart.path must be a checkpoint, found nothing at {options.get('path')}")


def checkpoint_to_resume(config: DictConfig) -> str | None:
    """The checkpoint to go on from, or None if there is none yet."""
    folder = OmegaConf.select(config, "callbacks.model_checkpoint.dirpath") or config.checkpoint_dir
    path = latest(folder)
    if path is None:
        unnamed = "" if config.get("name") else " (a run is found again by its name: name=...)"
        log.warning(
            "resume=True, but %s has no complete checkpoint%s: starting from the beginning",
            pathlib.Path(folder).absolute(),
            unnamed,
        )
        return None
    log.info("Resuming from %s", path)
    return str(path)


def instances(configs: DictConfig | None) -> list[Any]:
    """The objects that entries with a _target_ describe; entries that are null or have none are left out."""
    return [
        instantiate(each, _convert_="all")
        for each in (configs or {}).values()
        if each is not None and "_target_" in each
    ]


def loggers_of(config: DictConfig) -> list[Any]:
    """The loggers of a configuration. Where wandb is not installed, a CSV logger takes its place."""
    configs = {name: each for name, each in (config.get("logger") or {}).items() if each and "_target_" in each}
    if "wandb" in configs and importlib.util.find_spec("wandb") is None:
        log.warning("logger=wandb needs the package wandb (pip install wandb): metrics go to csv/ in the run's folder")
        del configs["wandb"]
        configs.setdefault("csv", _csv(config.get("name")))
    loggers = instances(configs)
    for each in loggers:
        if isinstance(each, L.pytorch.loggers.CSVLogger):
            _keep_earlier_metrics(pathlib.Path(each.log_dir))
    return loggers


def _csv(name):
    return {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": ".", "name": "csv/", "version": name}


@L.pytorch.utilities.rank_zero_only
def _keep_earlier_metrics(folder):
    """Rename the metrics of a run that is resumed in the same folder: a CSVLogger would delete them."""
    file = folder / "metrics.csv"
    if file.exists():
        file.rename(folder / f"metrics_until_{file.stat().st_mtime_ns}.csv")


def strategy_of(config: DictConfig) -> Strategy:
    """The strategy of a configuration. Without trainer.strategy, several devices are run with DDP.

    Raises ValueError for a name, an option or devices with which it could not run. It is made before the data is
    prepared, which may take hours.
    """
    trainer = config.trainer
    accelerator, devices = trainer.get("accelerator") or "auto", parsed_devices(trainer.get("devices"))
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if on_cpu and isinstance(devices, list):
        raise ValueError(f"trainer.devices must be a number or auto on a CPU, found {devices}: a list names GPUs")
    nodes, options = trainer.get("num_nodes") or 1, trainer.get("strategy")
    if not OmegaConf.is_config(options):
        strategy = engines.strategy(options, accelerator, devices, nodes)
    elif "_target_" in options:
        strategy = instantiate(options, _convert_="all")
    else:
        raise ValueError(f"trainer.strategy must have a _target_, found {options}: give strategy=ddp or another")
    if isinstance(strategy, engines.MeshStrategy):
        strategy.check_size(nodes * device_count(devices, accelerator))
    return strategy


def trainer_of(config: DictConfig, strategy: Strategy, callbacks: list[Any], loggers: list[Any]) -> L.Trainer:
    """The Trainer of a configuration, with the strategy that `strategy_of` has made of it."""
    options = config.trainer.copy()
    precision = str(options.get("precision", ""))
    if precision in _PRECISIONS:
        options.precision = _PRECISIONS[precision]
    options.accelerator = options.get("accelerator") or "auto"
    if "devices" in options:  # else Lightning looks for PL_TRAINER_DEVICES
        options.devices = parsed_devices(options.devices)
    options.pop("strategy", None)
    if not loggers:  # Lightning refuses this monitor then
        callbacks = [each for each in callbacks if not isinstance(each, LearningRateMonitor)]
    callbacks = [*callbacks, MonitorsExist(config.get("optimized_metric"))]
    return instantiate(options, callbacks=callbacks, logger=loggers, strategy=strategy, _convert_="all")


def _optimized(config, metrics):
    name = config.get("optimized_metric")
    if name is None:
        return None
    if name not in metrics:
        raise ValueError(f"optimized_metric must be one of {', '.join(metrics)}, found {name!r}")
    return metrics[name].item()
