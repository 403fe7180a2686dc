"""Train, evaluate or use a model, as the configuration says.

    python run.py experiment=owt/gpt2s-flash trainer.devices=8
    python run.py experiment=owt/gpt2s-flash name=first resume=True
    python run.py experiment=owt/gpt2s-flash run=eval eval.ckpt=checkpoints/first/last.ckpt

configs/ has all options. The key `run` says what to do: train, eval, prepare (the data), generate, or export.
"""

import functools
import logging
import os
import pathlib
import re
import sys
from typing import Any

import hydra
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from src.utils import hints, resolvers
from src.utils.numeric import check_numbers

log = logging.getLogger(__name__)
FOLDER = pathlib.Path(__file__).parent
INTEGERS = {  # keys, and the least value of each; -1 means no limit. Others may be computed from the first
    "trainer.strategy.tensor_parallel_size": 1,
    "trainer.strategy.context_parallel_size": 1,
    "trainer.strategy.dp_replicate": 1,
    "trainer.strategy.mlp_chunks": 1,
    "datamodule.batch_size": 1,
    "datamodule.batch_size_eval": 1,
    "datamodule.max_length": 1,
    "datamodule.num_workers": 0,
    "datamodule.loader_workers": 0,
    "datamodule.val_split_seed": 0,
    "train.global_batch_size": 1,
    "seed": 0,
    "trainer.max_steps": -1,
    "trainer.max_epochs": -1,
    "trainer.num_nodes": 1,
    "trainer.log_every_n_steps": 0,
}
OBJECTS_WITH_NUMBERS = ("train.optimizer", "train.scheduler", "trainer")
FLAGS = ("resume", "print_config", "ignore_warnings", "test_after_training")
NEEDED = {
    "train": ("model", "datamodule"),
    "prepare": ("datamodule",),
    "eval": (),
    "generate": ("eval.ckpt",),
    "export": ("eval.ckpt", "export.folder"),
}
NEEDED_BY_EXPERIMENT = dict.fromkeys(("model", "datamodule"), ": give experiment=..., such as experiment=tiny/text")
PATHS = ("datamodule.dataset_name", "datamodule.tokenizer_name", "eval.ckpt", "train.warmstart.path")


def main() -> None:
    """Run with the arguments of the command line. What Hydra says of a wrong one, or of an import, gets hints."""
    load_env(pathlib.Path.cwd())
    resolvers.register()
    nulls = hints.nulls(FOLDER / "configs", sys.argv[1:])
    if nulls:
        print(*nulls, sep="\n", file=sys.stderr)
        raise SystemExit(1)
    composed = []
    try:
        _main(composed)()
    except SystemExit as error:
        if error.code and not composed:
            lines = hints.failed_imports(error) or hints.hints(FOLDER / "configs", sys.argv[1:])
            print(*lines, sep="\n", file=sys.stderr)
        raise


def _main(composed):
    @hydra.main(config_path=str(FOLDER / "configs"), config_name="config", version_base="1.3")
    @functools.wraps(run)
    def with_config(config):
        composed.append(True)
        try:
            return run(config)
        except Exception as error:
            from src.utils.errors import message_alone

            message = message_alone(error)
            if message is None:
                raise
            log.debug("The error at the end", exc_info=error)
            raise CompactHydraException(message) from error

    return with_config


def run(config: DictConfig) -> Any:
    """Do what config.run says."""
    if config.run not in _ACTIONS:
        raise ValueError(f"run must be one of {', '.join(_ACTIONS)}, found {config.run!r}")
    check_values(config)
    resolvers.attach_datamodule(None)  # in a sweep, that of the previous run
    for key in NEEDED[config.run]:
        if OmegaConf.select(config, key) is None:
            raise ValueError(f"run={config.run} needs {key}, found none{NEEDED_BY_EXPERIMENT.get(key, '')}")
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"these values must be given: {', '.join(missing)}")
    config = OmegaConf.create(without_private_keys(OmegaConf.to_container(config, resolve=True)))
    from_start(config, PATHS)

    import torch

    from src.utils import utils

    torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning").handlers.clear()  # Hydra's log has the same lines
    # Lightning's own messages are about devices that are not used, and about other products.
    if not log.isEnabledFor(logging.DEBUG):
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
    utils.extras(config)
    if config.print_config:
        utils.print_config(config)
    return _ACTIONS[config.run](config)


def check_values(config: DictConfig) -> None:
    """Raise ValueError for a value that would fail later, where the message could not name its key."""
    resolvers.parsed_devices(OmegaConf.select(config, "trainer.devices"))  # first: others are computed from it
    for key, least in INTEGERS.items():
        value = OmegaConf.select(config, key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{key} must be an integer of at least {least}, found {value!r}")
    for key in FLAGS:
        if not isinstance(config[key], bool):
            raise ValueError(f"{key} must be True or False, found {config[key]!r}")
    name = config.get("name")
    path = pathlib.PurePath("" if OmegaConf.is_config(name) else str(name))
    if name is not None and (path.is_absolute() or ".." in path.parts or not path.parts):
        raise ValueError(f"name must be that of a folder in checkpoint_dir, found {name!r}")
    for key in OBJECTS_WITH_NUMBERS:
        options = OmegaConf.select(config, key)
        if OmegaConf.is_dict(options):
            check_numbers(OmegaConf.to_container(options), key)
    interval = OmegaConf.select(config, "trainer.val_check_interval")
    if isinstance(interval, str) and not re.fullmatch(r"\d+(:\d+){3}", interval):
        raise ValueError(f"trainer.val_check_interval must be a number or a time DD:HH:MM:SS, found {interval!r}")
    if isinstance(interval, int | float) and interval <= 0:
        raise ValueError(
            f"trainer.val_check_interval must be more than 0, found {interval}: +trainer.limit_val_batches=0 switches "
            "validation off"
        )


def load_env(folder: pathlib.Path) -> None:
    """Set environment variables from the lines NAME=value of the file .env, here or in the nearest folder above."""
    file = next((each / ".env" for each in (folder, *folder.parents) if (each / ".env").is_file()), None)
    for line in file.read_text().splitlines() if file else ():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            os.environ[name.strip()] = value.strip().strip("'\"")


def without_private_keys(config: Any) -> Any:
    """A configuration without keys that begin with two underscores: these only serve other values of the files."""
    if isinstance(config, dict):
        return {k: without_private_keys(v) for k, v in config.items() if not str(k).startswith("__")}
    return [without_private_keys(v) for v in config] if isinstance(config, list) else config


def from_start(config: DictConfig, keys: tuple[str, ...]) -> None:
    """Make paths under these keys absolute; they are relative to the folder in which the command was started.

    A value that is no existing path stays as it is: it may be a name on the hub.
    """
    for key in keys:
        value = OmegaConf.select(config, key)
        path = hydra.utils.to_absolute_path(str(value))
        if value is not None and os.path.exists(path):
            OmegaConf.update(config, key, path)


def _train(config):
    from src.train import train

    return train(config)


def _evaluate(config):
    from src.eval import evaluate

    return evaluate(config)


def _prepare(config):
    """Obtain and tokenise the data, as the first training would."""
    datamodule = hydra.utils.instantiate(config.datamodule, _convert_="all")
    datamodule.prepare_data()


def _generate(config):
    """`python -m src.generate`, with the options of config.generate."""
    from src.generate import main

    options = [(f"--{key.replace('_', '-')}", value) for key, value in config.generate.items() if value is not False]
    words = [word for key, value in options for word in ([key] if value is True else [key, str(value)])]
    return main([config.eval.ckpt, *words])


def _export(config):
    """`python -m src.export`."""
    from src.export import main

    return main([config.eval.ckpt, hydra.utils.to_absolute_path(config.export.folder)])


_ACTIONS = {"train": _train, "eval": _evaluate, "prepare": _prepare, "generate": _generate, "export": _export}

if __name__ == "__main__":
    main()
