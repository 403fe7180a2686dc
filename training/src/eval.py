"""Evaluation of a checkpoint on the validation and test data."""

import json
import os
import pathlib
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from src.train import check_devices, check_trainer, instances, loggers_of, strategy_of, trainer_of
from src.utils import utils
from src.utils.checkpoint import Checkpoint, is_complete, latest, load_checkpoint, read_file
from src.utils.modules import is_meta, load_weights

log = utils.get_logger(__name__)

_AVERAGED = "state_dict_ema"  # what EMACallback adds to a checkpoint
_OF_CHECKPOINT = ("model", "task", "train")  # checkpoint_type=lightning takes these from the checkpoint


def evaluate(config: DictConfig) -> dict[str, float]:
    """Validate and test a model, and return the results, which are printed and written to eval.json as well.

    Keys of config.eval:
        ckpt: a checkpoint (see `load_checkpoint`); null evaluates the model as it is created, from
            config.model_pretrained if that is there, else from config.model.
        checkpoint_type: "pytorch" for the model of this configuration, "lightning" for the model of the configuration
            in the checkpoint. The data is that of this configuration, if it has any.
        averaged: whether to take the weights that EMACallback has averaged; null takes them if they are there.
        run_val, run_test: which of the two to do.

    Raises ValueError for options that do not fit together; the message names the key.
    """
    OmegaConf.set_struct(config, False)
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True)
    options = config.eval
    path = None if options.get("ckpt") is None else _resolved(options.ckpt)
    config = _with_checkpoint_type(config, options.get("checkpoint_type", "pytorch"), path)
    check_trainer(config)
    check_devices(config)
    strategy = strategy_of(config)
    model = instantiate(config.task, cfg=config, model_cfg=config.get("model_pretrained"), _recursive_=False)
    if path is not None and not is_meta(model.model):
        weights = _weights(path, options.get("averaged"))
        missing, unexpected = load_weights(model.model, weights, f"eval.ckpt={path}", strict=False)
        if missing or unexpected:
            log.warning("%s has no weights for %s, and the model has no parameters for %s", path, missing, unexpected)
    trainer = trainer_of(config, strategy, instances(config.get("callbacks")), loggers_of(config))
    results = {}
    for wanted, run in (("run_val", trainer.validate), ("run_test", trainer.test)):
        if options.get(wanted, True):
            for each in run(model, datamodule=model._datamodule, verbose=False):
                results |= each
    _report(path, results)
    utils.finish(config, model, model._datamodule, trainer, trainer.callbacks, trainer.loggers)
    return results


def remove_prefix(text: str, prefix: str) -> str:
    """text without prefix, if it begins with it."""
    return text.removeprefix(prefix)


def _resolved(path):
    """The path of a checkpoint: the given one, or the latest checkpoint in it if it is a folder of checkpoints."""
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"eval.ckpt must be a checkpoint or a folder of checkpoints, found nothing at {path}")
    if path.is_dir() and not is_complete(path):
        return latest(path) or path
    return path


def _with_checkpoint_type(config, kind, path):
    """The configuration; for checkpoint_type "lightning" with the model of the checkpoint."""
    if kind == "pytorch":
        return config
    if kind != "lightning":
        raise ValueError(f"eval.checkpoint_type must be pytorch or lightning, found {kind!r}")
    stored = {} if path is None else _contents(path).get("hyper_parameters", {})
    if "model" not in stored:
        raise ValueError(f"eval.checkpoint_type=lightning needs a checkpoint with its configuration, found {path}")
    stored = OmegaConf.create(stored)
    if config.get("datamodule") is None:
        config.datamodule = stored.datamodule
    if not OmegaConf.select(config, "eval.metrics"):
        config.eval.metrics = OmegaConf.select(stored, "eval.metrics")
    for key in _OF_CHECKPOINT:
        config[key] = stored[key]
    return config


def _weights(path, averaged) -> dict[str, Tensor]:
    """The weights of the model: averaged ones, or those at the end of training."""
    contents = {} if averaged is False else _contents(path)
    if _AVERAGED in contents:
        log.info("Evaluating the averaged weights of %s", path)
        return {name.removeprefix("model."): x for name, x in contents[_AVERAGED].items()}
    if averaged:
        raise ValueError(f"eval.averaged=True needs a checkpoint of a run with EMACallback, found none in {path}")
    log.info("Evaluating the weights of %s", path)
    return load_checkpoint(path)


def _contents(path) -> dict[str, Any]:
    """What a checkpoint has beside its weights."""
    if path.is_dir():
        return Checkpoint(path).state if is_complete(path) else {}
    return read_file(path) if path.suffix != ".safetensors" else {}


@rank_zero_only
def _report(path, results):
    """Print a table, and write eval.json in the folder of the run."""
    width = max((len(name) for name in results), default=0)
    for name, value in results.items():
        print(f"{name:<{width}}  {value:.6g}")
    contents = {"checkpoint": None if path is None else str(path), **results}
    pathlib.Path("eval.json").write_text(json.dumps(contents, indent=2) + "\n")
    log.info("Written to %s", os.path.abspath("eval.json"))
