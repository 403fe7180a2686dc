"""Folders that a run writes to, tried before it needs them."""

import contextlib
import fcntl
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from hydra.experimental.callback import Callback
from lightning.pytorch.utilities import rank_zero_only
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


# Variables in which mpirun tells a process its number. Lightning does not read them before its trainer is made.
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")


@contextlib.contextmanager
def only_run_in(folder: str, key: str) -> Iterator[None]:
    """A block in which the first process of one run can be at a time: two would mix their files.

    The lock, a file beside the folder, ends with the process, and workers of loaders, which may outlive it, do not
    inherit it. There is none where the file system has no locks, or that file cannot be written.

    Arguments:
        folder: its path.
        key: of the configuration, where it comes from.

    Raises ValueError if another run is in such a block.
    """
    if not _is_first_process():
        yield
        return
    path = pathlib.Path(folder).resolve()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path.with_name(f".{path.name}.lock"), "w"))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{key} must be a folder of one run at a time, found {folder}, to which another run writes now: "
                "name=... names a folder"
            ) from None
        except OSError:
            pass
        yield


def _is_first_process():
    names = ["NODE_RANK"] if "RANK" in os.environ else ["NODE_RANK", *MPI_RANKS]  # RANK: torchrun's, of all processes
    return rank_zero_only.rank == 0 and all(os.environ.get(name, "0") == "0" for name in names)


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
