"""Checkpoints as state dicts, from a local folder or the Hugging Face hub.

state_dict = state_dict_from_pretrained("openai-community/gpt2", dtype=torch.bfloat16)
"""

import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Safetensors come first: they load without copies, and hold nothing but tensors. An index names the shards.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
PIECE = 2**28  # bytes of tensors that `pieces_of_file` holds at a time
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
_DTYPES = {  # as safetensors calls them; others count as torch's default dtype
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def state_dict_from_pretrained(
    model_name: str | os.PathLike[str],
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    **hub: Any,
) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their names, from all of its shards.

    Arguments:
        model_name: a folder or a file, as str or Path; if there is none, a name on the hub, which needs the
            package huggingface_hub.
        device: where the tensors are put, as torch takes it; None leaves them where the file says.
        dtype: what floating-point tensors are cast to; None leaves them as they are in the file.
        hub: revision, token, cache_dir and local_files_only, as `hf_hub_download` of huggingface_hub takes them.

    The first file that is found is read: model.safetensors, its index of shards, pytorch_model.bin, its index of
    shards. The former two need the package safetensors; the latter two are read with weights_only.

    Raises OSError if none of these files exists, or if a shard is missing.

    >>> from flash_attn.utils.pretrained import state_dict_from_pretrained
    >>> state_dict = state_dict_from_pretrained("openai-community/gpt2")                    # doctest: +SKIP
    """
    state_dict: dict[str, Tensor] = {}
    for path in checkpoint_files(model_name, **hub):
        state_dict |= load_file(path, device, dtype)
    return state_dict


def checkpoint_files(model_name: str | os.PathLike[str], **hub: Any) -> list[pathlib.Path]:
    """The files of a checkpoint, several if it is sharded. Arguments and errors: see `state_dict_from_pretrained`.

    Example:
        >>> import pathlib, tempfile
        >>> from flash_attn.utils.pretrained import checkpoint_files
        >>> file = pathlib.Path(tempfile.mkdtemp(), "pytorch_model.bin")
        >>> torch.save({"norm.weight": torch.ones(8, dtype=torch.bfloat16)}, file)
        >>> [path.name for path in checkpoint_files(file.parent)]
        ['pytorch_model.bin']
    """
    if pathlib.Path(model_name).is_file():
        return [pathlib.Path(model_name)]
    find = _finder(model_name, **hub)
    path = _first(find, model_name)
    if path.suffix != ".json":
        return [path]
    return [find(shard) for shard in sorted(set(json.loads(path.read_text())["weight_map"].values()))]


def config_of_pretrained(model_name: str | os.PathLike[str], name: str = "config.json", **hub: Any) -> dict | None:
    """The contents of a checkpoint's config.json, or of another such file, or None if there is no such file.

    model_name, hub: as in `state_dict_from_pretrained`; the config of a file is beside it.
    Raises ValueError if the file is not JSON.

    Example:
        >>> import tempfile, transformers
        >>> from flash_attn.utils.pretrained import config_of_pretrained
        >>> folder = tempfile.mkdtemp()
        >>> transformers.LlamaConfig(hidden_size=64).save_pretrained(folder)
        >>> config_of_pretrained(folder)["hidden_size"]
        64
    """
    path = pathlib.Path(model_name)
    try:
        path = _finder(path.parent if path.is_file() else model_name, **hub)(name)
    except (OSError, ValueError, ModuleNotFoundError):
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, found: {error}") from error


def dtype_of_pretrained(model_name: str | os.PathLike[str], **hub: Any) -> torch.dtype | None:
    """The dtype of a checkpoint's first floating-point tensor, None if it has none.

    Example:
        >>> import pathlib, tempfile
        >>> from flash_attn.utils.pretrained import dtype_of_pretrained
        >>> file = pathlib.Path(tempfile.mkdtemp(), "pytorch_model.bin")
        >>> torch.save({"norm.weight": torch.ones(8, dtype=torch.bfloat16)}, file)
        >>> dtype_of_pretrained(file.parent)
        torch.bfloat16
    """
    files = checkpoint_files(model_name, **hub)
    tensors = (tensor for path in files for tensor in load_file(path, device="meta").values())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def config_is_missing(model_name: str | os.PathLike[str], needed: str = "config", **hub: Any) -> OSError:
    """The error for a checkpoint without config.json, where the argument that is `needed` is not given either.

    Example:
        >>> import tempfile
        >>> from flash_attn.utils.pretrained import config_is_missing
        >>> config_is_missing(tempfile.gettempdir())  # doctest: +ELLIPSIS
        OSError('config must be given, as there is no config.json in ...')
    """
    why = ""
    if not pathlib.Path(model_name).exists():
        try:
            _finder(model_name, **hub)("config.json")
        except (OSError, ValueError, ModuleNotFoundError) as error:
            why = _why(error)
    return OSError(f"{needed} must be given, as there is no config.json in {model_name}{why and ': '}{why}")


def existing_device(device: torch.device | str | int) -> torch.device:
    """`device` as a torch.device. Raises ValueError for a GPU where PyTorch can use none.

    Example:
        >>> from flash_attn.utils.pretrained import existing_device
        >>> existing_device("cpu")
        device(type='cpu')
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "finds no GPU" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise ValueError(f"device must be one that PyTorch can use, found {str(device)!r}, while PyTorch {why}")
    return device


def _finder(model_name: str | os.PathLike[str], **hub: Any) -> Callable[[str], pathlib.Path]:
    unknown = [name for name in hub if name not in HUB_OPTIONS]
    if unknown:
        raise TypeError(f"keyword arguments must be {', '.join(HUB_OPTIONS)}, found {unknown[0]!r}")
    folder = pathlib.Path(model_name)
    return _in_folder(folder) if folder.is_dir() else _on_hub(str(model_name), hub)


def _first(find: Callable[[str], pathlib.Path], model_name: str | os.PathLike[str]) -> pathlib.Path:
    """The path of the first file that exists."""
    reason = None
    for name in _NAMES:
        try:
            return find(name)
        except (OSError, ValueError) as error:  # the hub raises ValueError for text that is no valid name
            reason = error
    why = _why(reason) or f"none of {', '.join(_NAMES)} is there"
    raise OSError(f"Model name {model_name} was not found: {why}") from reason


# What errors of huggingface_hub mean. By their names, because its releases have them in different modules.
_REASONS = {
    "HFValidationError": "it is neither a local folder nor known on the hub",
    "RepositoryNotFoundError": "it is neither a local folder nor known on the hub; a private one needs a token",
    "GatedRepoError": "access to it must be granted on the hub first, and then needs a token",
    "RevisionNotFoundError": "it has no such revision on the hub",
    "LocalEntryNotFoundError": "the hub cannot be reached, or local_files_only is set, and the cache has no such file",
}


def _why(error: Exception | None) -> str:
    """What an error of the hub means, in words; nothing if it only says that a file is not there."""
    if isinstance(error, ModuleNotFoundError):
        return str(error)
    return _REASONS.get(type(error).__name__, "")


def _in_folder(folder: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """A function from a file's name to its path in a folder; it raises OSError if there is no such file."""

    def find(name: str) -> pathlib.Path:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{name} must be in {folder}, found no such file")
        return path

    return find


def _on_hub(model_name: str, options: dict[str, Any]) -> Callable[[str], pathlib.Path]:
    """A function from a file's name to its path on the hub: it downloads the file to the hub's cache."""
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        message = f"model_name must be a local folder, found {model_name!r}: for the hub, install huggingface_hub"
        raise ModuleNotFoundError(message) from error

    return lambda name: pathlib.Path(hf_hub_download(model_name, name, **options))


def load_file(
    path: pathlib.Path, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of one file. On the device "meta", only their names, shapes and dtypes are read.

    Example:
        >>> import pathlib, tempfile
        >>> from flash_attn.utils.pretrained import load_file
        >>> file = pathlib.Path(tempfile.mkdtemp(), "pytorch_model.bin")
        >>> torch.save({"norm.weight": torch.ones(8, dtype=torch.bfloat16)}, file)
        >>> load_file(file, device="meta")["norm.weight"].shape
        torch.Size([8])
    """
    device = None if device is None else torch.device(device)
    # Tensors that a cast makes smaller are cast on the CPU, before they are moved.
    first = "cpu" if dtype not in (None, torch.float32) or device is None else device
    if device is not None and device.type == "meta":
        first = device
    if path.suffix == ".safetensors":
        tensors = _load_safetensors(path, first)
    else:
        tensors = _load_torch(path, first if device is not None else None)
    return {
        name: tensor.to(dtype=dtype if tensor.is_floating_point() else None).to(device=device)  # integers keep theirs
        for name, tensor in tensors.items()
    }


def pieces_of_file(path: pathlib.Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file in pieces of about `PIECE` bytes, where the file allows that, on the CPU.

    Example:
        >>> import pathlib, tempfile
        >>> from flash_attn.utils.pretrained import pieces_of_file
        >>> file = pathlib.Path(tempfile.mkdtemp(), "pytorch_model.bin")
        >>> torch.save({"norm.weight": torch.ones(8, dtype=torch.bfloat16)}, file)
        >>> [list(piece) for piece in pieces_of_file(file)]
        [['norm.weight']]
    """
    if path.suffix != ".safetensors":
        yield load_file(path)
        return
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        piece: dict[str, Tensor] = {}
        for name in file.keys():
            piece[name] = file.get_tensor(name)
            if sum(tensor.nbytes for tensor in piece.values()) >= PIECE:
                yield piece
                piece = {}
    yield piece


def _load_torch(path: pathlib.Path, device: torch.device | str | None) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError) as error:  # the error does not name the file
        if zipfile.is_zipfile(path):  # the file is whole, so the cause is another, such as too little memory
            raise
        raise ValueError(f"{path} must be a file of torch.save, found: {error}") from error


def _load_safetensors(path: pathlib.Path, device: torch.device | str) -> dict[str, Tensor]:
    import safetensors.torch

    try:
        if str(device) != "meta":
            return safetensors.torch.load_file(path, device=str(device))
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: torch.empty(each.get_shape(), dtype=_DTYPES.get(each.get_dtype()), device="meta")
                for name, each in slices.items()
            }
    except safetensors.SafetensorError as error:  # the error does not name the file
        raise ValueError(f"{path} must be a safetensors file, found: {error}") from error
