"""Checkpoints: folders that are complete or not there, which another number of processes can load.

    last.ckpt/
        tensors/        torch.distributed.checkpoint: each process writes its parts, under the names of parameters
        state.json      everything else, and for each process what only it has, such as random states
        manifest.json   written last: size and SHA-256 of every other file

A folder is written under a temporary name, synced to disk and renamed, so that a process may end at any moment. A
checkpoint need not be trusted: reading one runs no code from it.

    save("run/last.ckpt", state={"step": 7}, tensors={"weight": weight})        # by all processes
    checkpoint = Checkpoint("run/last.ckpt")
    checkpoint.state                                                            # {"step": 7}
    checkpoint.read_into({"weight": other_weight})

    load_checkpoint("run/last.ckpt")                                            # weights alone, of any format
"""

import enum
import errno
import hashlib
import json
import logging
import math
import os
import pathlib
import pickle
import platform
import re
import shutil
import textwrap
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from flash_attn.models.gpt import combine_state_dicts_tp, shard_state_dict_tp
from src.utils.optional import optional_module
from src.utils.plain_state import decode, encode, tensor_names

_FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors", "state.json", "manifest.json"
AUTO_SAVE = ".pl_auto_save.ckpt"  # the checkpoint of a run that had to end
WEIGHTS, PART = "state_dict.", "@tp"  # before a parameter's name; after it, with a rank, for a part
_log = logging.getLogger(__name__)

PathLike = str | os.PathLike


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, is not complete, or does not fit."""


class Entry(NamedTuple):
    """What is known of a stored tensor without reading it."""

    shape: torch.Size
    dtype: torch.dtype


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def save(path: PathLike, state: Any, tensors: Mapping[str, Tensor] | None = None, own: Any = None) -> None:
    """Write a checkpoint, together with all processes; a checkpoint of that name is replaced.

    Arguments:
        path: of the folder; its parents are made. All processes must see the same file system.
        state: nested plain data and tensors (see `encode`), the same in all processes; that of the first is written.
        tensors: by name. A DTensor is stored whole, each process writing its part; a name that several processes have
            must stand for the same tensor in all of them, and is written by one.
        own: nested plain data without tensors, of each process's own, such as random states.

    If there was a checkpoint under `path`, a complete one exists at every moment, for an instant under a name beside
    it; `latest` finds it. Raises, in all processes, TypeError if the state is not plain, and CheckpointError if writing
    fails, for example on a full disk; the temporary folder is then removed, and the previous checkpoint is unchanged.
    """
    path = pathlib.Path(os.path.abspath(path))
    part = path.with_name(f".{path.name}.part")
    contents, own_tree = together(lambda: _contents(state, tensors or {}, own), f"checkpoint {path} was not saved")
    try:
        together(lambda: _new_folder(part) if _rank() == 0 else None)
        _save_tensors(contents.tensors, part / _TENSORS)
        own_trees = gather(own_tree)
        together(lambda: _write_state(part / _STATE, contents.tree, own_trees) if _rank() == 0 else None)
        sums = gather(together(lambda: _checksums(part, _files_of_rank(part))))
        together(lambda: _publish(part, path, sums) if _rank() == 0 else None)
    except (CheckpointError, CheckpointException) as error:
        if _rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {path} was not saved: {_reason(error)}. A previous checkpoint, if any, is unchanged."
        ) from None


class _Contents(NamedTuple):
    tree: Any
    tensors: dict[str, Tensor]


def _contents(state, tensors, own):
    tree, extra = encode(state)
    own_tree, not_plain = encode(own, "own")
    if not_plain:
        raise TypeError(f"own must have no tensors, found {next(iter(not_plain))}")
    return _Contents(tree, {**extra, **tensors}), own_tree


def _new_folder(folder):
    _delete(folder)  # left by a process that ended while writing
    folder.mkdir(parents=True)


def _save_tensors(tensors, folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=_world() == 1)


def _write_state(file, tree, own_trees):
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    text = {"format": _FORMAT, "versions": versions, "state": tree, "own": own_trees}
    _write(file, json.dumps(text, allow_nan=False))


def _publish(part, path, sums):
    """Write the manifest, and replace the old folder so that one of the two is complete at every moment."""
    files = {name: entry for each in sums for name, entry in each.items()}
    _write(part / _MANIFEST, json.dumps({"format": _FORMAT, "saved_at": time.time_ns(), "files": files}, indent=1))
    _sync(part)
    before = _before(path)
    if os.path.lexists(path):
        _delete(before)
        os.rename(path, before)
    os.rename(part, path)
    _sync(path.parent)
    _delete(before)


def _before(path):
    """The name under which an old checkpoint is kept while it is being replaced."""
    return path.with_name(f".{path.name}.before")


def _files_of_rank(folder):
    """The files of which this process computes the checksums: those that it has written."""
    own, rest = f"__{_rank()}_", _rank() == 0
    for file in _files(folder):
        if file.name.startswith(own) or (rest and not file.name.startswith("__")):
            yield file


def _files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _checksums(folder, files):
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files
    }


def _sha256(file):
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(file, text):
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder):
    """Sync the names in a folder to disk, on systems where folders can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: PathLike) -> None:
    """Remove a checkpoint (folder, file or link) so that no remainder looks complete. Call it in one process."""
    path = pathlib.Path(os.path.abspath(path))
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = path.with_name(f".{path.name}.removed")
    _delete(removed)
    os.rename(path, removed)
    _delete(removed)


def _delete(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error):
    if isinstance(error, CheckpointException):
        return "; ".join(f"process {rank}: {_message(exc)}" for rank, (exc, _) in error.failures.items())
    return str(error)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Checkpoint:
    """A checkpoint that `save` wrote.

    Arguments:
        path: of the folder.
        verify: compare the checksums of all files with the manifest, work that all processes share. Sizes are always
            compared.

    Attributes:
        state: the `state` that was saved, with whole tensors on the CPU.
        own: a list with the `own` of each process.
        entries: shape and dtype of the tensors, by name.
        versions: of Python and torch when it was written.

    Raises CheckpointError, in all processes, if it is not complete or a file is not as it was written.
    """

    def __init__(self, path: PathLike, verify: bool = True) -> None:
        self.path = pathlib.Path(path)
        together(lambda: self._open(verify))

    def _open(self, verify):
        fault = _fault(self.path)
        if fault:
            raise CheckpointError(f"{self.path} is not a complete checkpoint: {fault}")
        if verify:
            self._verify()
        text = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        if text["format"] > _FORMAT:
            raise CheckpointError(f"{self.path} has format {text['format']}, expected at most {_FORMAT}")
        metadata = _Reader(self.path / _TENSORS).read_metadata().state_dict_metadata
        self.entries = {
            name: Entry(each.size, each.properties.dtype)
            for name, each in metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        self.versions = text["versions"]
        self.state = decode(text["state"], self.read(tensor_names(text["state"])))
        self.own = [decode(each, {}) for each in text["own"]]

    def _verify(self):
        expected = _manifest(self.path)["files"]
        for i, (name, entry) in enumerate(sorted(expected.items())):
            if i % _world() == _rank() and _sha256(self.path / name) != entry["sha256"]:
                raise CheckpointError(f"{self.path} is damaged: {name} is not as it was written")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, whole, on the CPU."""
        tensors = {name: torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype) for name in names}
        self.read_into(tensors)
        return tensors

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill these tensors; a DTensor gets the part of this process.

        The processes may give different names. Raises CheckpointError, before anything is changed, for names that are
        not there and for other shapes.
        """
        self._check(tensors)
        if tensors:
            with torch.no_grad():
                self._fill(tensors)

    def _check(self, tensors):
        wrong = [
            f"{name} has shape {found(self.entries.get(name))} there, expected {tuple(tensor.shape)}"
            for name, tensor in tensors.items()
            if self.entries.get(name) is None or self.entries[name].shape != tensor.shape
        ]
        if wrong:
            raise CheckpointError(f"{self.path} does not fit: " + "; ".join(wrong))

    def _fill(self, tensors):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(dict(tensors), storage_reader=_Reader(self.path / _TENSORS), no_dist=True)


class Redivided(Checkpoint):
    """A checkpoint as it would be if another number of processes had shared each layer of the model.

    A checkpoint of a tensor parallel run has each process's part under a name of its own: `weight@tp0`, `weight@tp1`
    and so on. They are put together and divided anew while they are read, one tensor at a time.

    Arguments:
        stored: the checkpoint.
        size, rank: how many processes share the model now, and which of them this is.
        models: the configurations of the models that are divided now, by the names of their modules.

    Raises CheckpointError if the checkpoint does not say how its model was divided.
    """

    def __init__(self, stored: Checkpoint, size: int = 1, rank: int = 0, models: Mapping[str, Any] | None = None):
        vars(self).update(vars(stored))
        self._stored, self._size, self._rank, self._models = stored, size, rank, models or {}
        engine = stored.state.get("engine", {})
        self._size_before = engine.get("tensor_parallel_size", 1)
        if self._size_before > 1 and "models" not in engine:
            raise CheckpointError(
                f"{self.path} has parts of a tensor parallel model, but does not say how it was divided"
            )
        before = engine.get("models", {})
        self._models_before = {name: types.SimpleNamespace(**config) for name, config in before.items()}
        places = [(int(place.partition(PART)[2] or 0), place) for place in stored.entries]
        self._parts: dict[str, dict[int, str]] = {}  # by the name in a whole one, where the part of each rank is
        for rank_before, place in sorted(places):  # in the order of the ranks: the first one's part comes first
            self._parts.setdefault(place.partition(PART)[0], {})[rank_before] = place
        shapes = {name: self._anew(name, self._on_meta(places)) for name, places in self._parts.items()}
        self.entries = {self._here(name): Entry(x.shape, x.dtype) for name, x in shapes.items() if x is not None}

    def _fill(self, tensors):
        names = {self._here(name): name for name in self._parts}
        for here, target in tensors.items():
            places = self._parts[names[here]]
            parts = self._stored.read(places.values())
            copy_into(target, self._anew(names[here], {rank: parts[place] for rank, place in places.items()}))

    def _here(self, name):
        """The name in this checkpoint of what has this name in a whole one."""
        return f"{name}{PART}{self._rank}" if self._size > 1 and _OF_PARAMETERS.match(name) else name

    def _on_meta(self, places):
        entries = {rank: self._stored.entries[place] for rank, place in places.items()}
        return {rank: torch.empty(each.shape, dtype=each.dtype, device="meta") for rank, each in entries.items()}

    def _anew(self, name, parts):
        """What this process has of a tensor, from the parts by their ranks; None if it has nothing of it."""
        x = next(iter(parts.values()))
        found = _OF_PARAMETERS.match(name)
        if found is None or self._stored.entries[self._first_weight(found[2])].shape != x.shape:
            return x  # of a state that is not divided, as the number of steps
        model, inner = _of_model(found[2], self._models_before)
        if model is not None:
            x = combine_state_dicts_tp(
                [{inner: parts[rank]} if rank in parts else {} for rank in range(self._size_before)], model
            )[inner]
        return part_of(found[2], x, self._models, self._size, self._rank)

    def _first_weight(self, parameter):
        return next(iter(self._parts[WEIGHTS + parameter].values()))


_OF_PARAMETERS = re.compile(r"(state_dict|optimizer_states\.\d+\.[^.]+)\.(.+)")


def part_of(parameter: str, whole: Tensor, models: Mapping[str, Any], size: int, rank: int) -> Tensor | None:
    """What process `rank` of the `size` that share each layer has of a parameter; None if it has nothing of it.

    models: the configurations of the models that are divided, by the names of their modules.
    """
    model, inner = _of_model(parameter, models)
    return whole if model is None else shard_state_dict_tp({inner: whole}, model, size, rank).get(inner)


def _of_model(parameter, models):
    """(the configuration of the model that a parameter is of, its name there), or (None, its name)."""
    for name, config in models.items():
        if parameter.startswith(f"{name}."):
            return config, parameter.removeprefix(f"{name}.")
    return None, parameter


def copy_into(target: Tensor, whole: Tensor) -> None:
    """Copy a tensor into one of its shape, of which a DTensor gets the part that this process has."""
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        whole = distribute_tensor(whole.to(target.device), mesh, placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(whole)


def found(entry: Entry | None) -> str:
    """The shape of a stored tensor for a message."""
    return "no tensor" if entry is None else str(tuple(entry.shape))


def _member(cls, name):
    if not isinstance(cls, enum.EnumMeta):
        raise CheckpointError(f"the list of tensors must have nothing but sizes and places, found {name} of {cls}")
    return cls[name]


class _Unpickler(pickle.Unpickler):
    """Reads the list of tensors of torch.distributed.checkpoint, which is a pickle, and no other class or function."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.0 to 3.11.3 find members of enumerations
            return _member
        allowed = (
            module == "torch.distributed.checkpoint.metadata"
            or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            or (module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath"))
            or (module, name) == ("collections", "OrderedDict")
        )
        if not allowed or "." in name:
            raise CheckpointError(f"the list of tensors must have nothing but sizes and places, found {module}.{name}")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        with open(pathlib.Path(self.path) / ".metadata", "rb") as stream:
            metadata = _Unpickler(stream).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def is_complete(path: PathLike) -> bool:
    """Whether a checkpoint is there, as `save` writes it, with all files in their sizes."""
    return _fault(pathlib.Path(path)) is None


def _fault(path):
    """What is wrong with a folder, in words; None if it is a complete checkpoint."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        files = _manifest(path)["files"]
    except FileNotFoundError:
        return f"{_MANIFEST} is missing, so writing it was interrupted"
    except (ValueError, KeyError, TypeError):
        return f"{_MANIFEST} cannot be read"
    for name, entry in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            return f"{name} must have {entry['bytes']} bytes, found " + ("no file" if size is None else str(size))
    return None


def _manifest(path):
    return json.loads((path / _MANIFEST).read_text(encoding="utf-8"))


def latest(dirpath: PathLike) -> pathlib.Path | None:
    """The checkpoint in a folder that was completed last, under any name; None if there is none.

    The log says which ones are ignored, and why. An old one that was being replaced when its process ended counts.
    """
    dirpath = pathlib.Path(dirpath)
    candidates = []
    for path in sorted(dirpath.iterdir()) if dirpath.is_dir() else ():
        replaced = path.name.startswith(".") and path.name.endswith(".ckpt.before")
        interrupted = path.name.startswith(".") and path.name.endswith(".ckpt.part")
        if not (path.name.endswith(".ckpt") or replaced or interrupted):
            continue
        if path.is_file():
            _log.warning("%s is ignored: it is a file, not a checkpoint of this program", path)
            continue
        fault = "writing it was interrupted" if interrupted else _fault(path)
        if fault:
            _log.warning("%s is ignored: %s", path, fault)
        else:
            candidates.append((_manifest(path)["saved_at"], path))
    return max(candidates)[1] if candidates else None


# ---------------------------------------------------------------------------------------------------------------------
# Weights alone


def load_checkpoint(path: PathLike, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The weights of a checkpoint, by the names that they have in the model.

    Arguments:
        path: a checkpoint of ours; a folder of such, of which the latest is taken; a folder in DeepSpeed's layout
            (`latest` names the one with mp_rank_00_model_states.pt); a file of Lightning or of `torch.save`, of which
            only tensors are read; a file or folder of safetensors.
        device: of the tensors.

    A dict whose only key is `state_dict_ema` or `model` is replaced by its contents. Of the weights of a
    LightningModule, those of its `model` are taken, without the prefix `model.`. Raises FileNotFoundError or
    CheckpointError if there is nothing to load.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path must be a checkpoint, found nothing at {path}")
    if path.is_dir():
        return _weights_of_folder(path, device)
    if path.suffix == ".safetensors":
        return _safetensors([path], device)
    contents = read_file(path, device)
    while len(contents) == 1 and next(iter(contents)) in ("state_dict_ema", "model"):
        (contents,) = contents.values()
    if "state_dict" in contents:
        return _model_weights(contents["state_dict"])
    return _model_weights(contents) if all(name.startswith("model.") for name in contents) else contents


def _weights_of_folder(path, device):
    if (path / _MANIFEST).is_file():
        checkpoint = Checkpoint(path)
        if any(PART in name for name in checkpoint.entries):
            checkpoint = Redivided(checkpoint)
        weights = checkpoint.read(name for name in checkpoint.entries if name.startswith(WEIGHTS))
        return _model_weights({name.removeprefix(WEIGHTS): x.to(device) for name, x in weights.items()})
    if (path / "latest").is_file():
        file = path / (path / "latest").read_text().strip() / "mp_rank_00_model_states.pt"
        module = read_file(file, device)["module"]
        return {name.removeprefix("module.model."): x for name, x in module.items()}
    if files := sorted(path.glob("*.safetensors")):
        return _safetensors(files, device)
    if newest := latest(path):
        return load_checkpoint(newest, device)
    if (path / "last.ckpt").is_file():
        return load_checkpoint(path / "last.ckpt", device)
    raise CheckpointError(f"{path} must be a checkpoint or a folder of checkpoints, found none that is complete")


def _model_weights(state_dict):
    """The weights of `model` of a LightningModule; all of them if none is below it."""
    own = {name.removeprefix("model."): x for name, x in state_dict.items() if name.startswith("model.")}
    return own or dict(state_dict)


def _safetensors(files, device):
    return {name: x for file in files for name, x in read_file(file, device).items()}


def read_file(path: pathlib.Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The contents of a file of Lightning, of `torch.save` or of safetensors. No code of the file runs.

    Raises CheckpointError for any other file, and for one that needs code.
    """
    try:
        if path.suffix == ".safetensors":
            contents = optional_module("safetensors.torch").load_file(path, device=str(device))
        else:
            contents = torch.load(path, map_location=device, weights_only=True)
    except (OSError, ImportError):
        raise
    except Exception as error:  # there is no common class; for a text file, torch even raises IndexError
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise CheckpointError(
            f"{path} must be a checkpoint, found a file that cannot be read as one ({reason})"
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} must be a checkpoint, found a {type(contents).__name__} in place of a dict")
    return contents


def remove_model_prefix(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Remove the prefix `model.` of the names in state_dict["state_dict"], in place, and return it."""
    state_dict["state_dict"] = {name.removeprefix("model."): x for name, x in state_dict["state_dict"].items()}
    return state_dict


def interpolate_pos_embedding(
    state_dict: dict[str, Tensor],
    out_seqlen: int,
    pos_embedding_name: str = "model.pos_encoder.pe",
    interleave: bool = False,
) -> dict[str, Tensor]:
    """A state dict whose table of positions, (..., seqlen, features), has out_seqlen rows, a multiple of seqlen.

    The table is repeated as a whole. With interleave its rows are the pixels of a square, each of which is repeated
    over a smaller square, as when the resolution of an image grows. The prefix `model.` is removed from all names, and
    entries that end with `inner_attn.layout`, which belong to a length, are left out.
    Raises KeyError without the table, ValueError if the lengths do not fit.
    """
    table = state_dict[pos_embedding_name]
    seqlen = table.shape[-2]
    times, rest = divmod(out_seqlen, seqlen)
    if rest or times < 1:
        raise ValueError(f"out_seqlen must be a multiple of the {seqlen} positions of the table, found {out_seqlen}")
    if interleave:
        table = _repeat_square(table, seqlen, times, out_seqlen)
    else:
        table = torch.cat([table] * times, dim=-2)
    changed = {**state_dict, pos_embedding_name: table}
    return {k.removeprefix("model."): x for k, x in changed.items() if not k.endswith("inner_attn.layout")}


def _repeat_square(table, seqlen, times, out_seqlen):
    side, factor = math.isqrt(seqlen), math.isqrt(times)
    if side**2 != seqlen or factor**2 != times:
        raise ValueError(
            f"with interleave, the {seqlen} positions and out_seqlen must be squares, with a side that is a multiple "
            f"of the other's, found out_seqlen={out_seqlen}"
        )
    square = table.unflatten(-2, (side, side))
    return square.repeat_interleave(factor, dim=-3).repeat_interleave(factor, dim=-2).flatten(-3, -2)


# ---------------------------------------------------------------------------------------------------------------------
# All processes together


def together(function: Callable[[], Any], what: str | None = None) -> Any:
    """Call function, and raise in all processes if it raises in one, so that none waits for another that has failed.

    The error is a TypeError if it was one, else a CheckpointError, with the message of the first process that has one
    after `what`.
    """
    result, error = None, None
    try:
        result = function()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as exception:
        error = exception
    failures = gather(None if error is None else (isinstance(error, TypeError), _message(error)))
    first = next((failure for failure in failures if failure is not None), None)
    if first is not None:
        is_type_error, message = first
        kind = TypeError if is_type_error else CheckpointError
        raise kind(message if what is None else f"{what}: {message}") from error
    return result


def gather(value: Any) -> list[Any]:
    """The values of all processes, in their order."""
    if _world() == 1:
        return [value]
    values = [None] * _world()
    dist.all_gather_object(values, value)
    return values


def _message(error):
    each = error
    while each is not None:  # PyTorch's writer has errors of its own after one of the disk
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space is left on the disk ({each})"
        each = each.__cause__ or each.__context__
    return str(error) or type(error).__name__


def _rank():
    return dist.get_rank() if _world() > 1 else 0


def _world():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
