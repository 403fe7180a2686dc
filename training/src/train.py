"""Training: build everything that the configuration names, fit, test."""

from typing import Any

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from src.utils import utils

log = utils.get_logger(__name__)


def train(config: DictConfig) -> float | None:
    """Train as the configuration says. Returns the metric named by `optimized_metric`, if there is such a key."""
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True)
    OmegaConf.set_struct(config, False)
    model = instantiate(config.task, cfg=config, _recursive_=False)
    callbacks, loggers = instances(config.get("callbacks")), instances(config.get("logger"))
    trainer = instantiate(config.trainer, callbacks=callbacks, logger=loggers)
    trainer.fit(model, datamodule=model._datamodule)
    if config.get("test_after_training") and not trainer.fast_dev_run:
        trainer.test(model, datamodule=model._datamodule)
    metric = config.get("optimized_metric")
    return None if metric is None else trainer.callback_metrics[metric].item()


def instances(configs: DictConfig | None) -> list[Any]:
    """What the entries with a _target_ describe; entries that are null or without one are left out."""
    return [instantiate(each) for each in (configs or {}).values() if each is not None and "_target_" in each]
