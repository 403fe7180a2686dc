"""Folders that a run writes to, tried before it needs them."""

import os
import sys
import tempfile
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


def check_writable(folder: str, key: str, variable: str) -> None:
    """Make a folder if it is not there, and raise ValueError if nothing can be written to it.

    Arguments:
        folder: its path.
        key: of the configuration, where it comes from.
        variable: of the environment, which names another place.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{key} must be a folder that can be written to, found {folder} ({error}); {variable} names another place"
        ) from None


class RunFolderIsWritable(Callback):
    """Ends a command in one line if the folder where it is to work cannot be made: Hydra would print a traceback."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _check(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _check(config.hydra.sweep.dir)


def _check(folder):
    try:
        check_writable(folder, "result_dir", "RESULT_DIR")
    except ValueError as error:  # Hydra would turn it into a warning
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
