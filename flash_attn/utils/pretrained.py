"""Checkpoints as state dicts, from a local folder or the Hugging Face hub.

state_dict = state_dict_from_pretrained("openai-community/gpt2", dtype=torch.bfloat16)
"""

import json
import pathlib

import torch

# Safetensors first: they load without copies, and hold nothing but tensors. An index names the shards of a checkpoint.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def state_dict_from_pretrained(model_name, device=None, dtype=None):
    """All tensors of a checkpoint by their names, with the shards of a divided one in one dict.

    Arguments:
        model_name: a folder or a file, as str or Path, or else a name on the hub, which takes the package
            huggingface_hub.
        device: of the tensors, as torch takes it; by default, of those in the file.
        dtype: of floating-point tensors; by default, of those in the file.

    Of the files model.safetensors and pytorch_model.bin and their indices of shards, the first that is found is read.
    Safetensors take the package safetensors; others are read with weights_only.

    Raises OSError if there is none of them, or a shard is missing.
    """
    state_dict = {}
    for path in checkpoint_files(model_name):
        state_dict |= load_file(path, device, dtype)
    return state_dict


def checkpoint_files(model_name) -> list[pathlib.Path]:
    """The files of a checkpoint, several if it is divided. Arguments and errors: see `state_dict_from_pretrained`."""
    if pathlib.Path(model_name).is_file():
        return [pathlib.Path(model_name)]
    find = _finder(model_name)
    path = _first(find, model_name)
    if path.suffix != ".json":
        return [path]
    return [find(shard) for shard in sorted(set(json.loads(path.read_text())["weight_map"].values()))]


def config_of_pretrained(model_name) -> dict | None:
    """What is in a checkpoint's config.json, beside the file if it is one; None if there is no such file."""
    path = pathlib.Path(model_name)
    try:
        return json.loads(_finder(path.parent if path.is_file() else model_name)("config.json").read_text())
    except (OSError, ValueError, ModuleNotFoundError):
        return None


def _finder(model_name):
    folder = pathlib.Path(model_name)
    return _in_folder(folder) if folder.is_dir() else _on_hub(str(model_name))


def _first(find, model_name):
    """The path of the first file that there is."""
    reason = None
    for name in _NAMES:
        try:
            return find(name)
        except (OSError, ValueError) as error:  # a ValueError from the hub, for what cannot be a name there
            reason = error
    raise OSError(f"Model name {model_name} was not found: none of {', '.join(_NAMES)} is there") from reason


def _in_folder(folder):
    """A function from a file's name to its path; it raises OSError if there is none."""

    def find(name):
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{name} must be in {folder}, found no such file")
        return path

    return find


def _on_hub(model_name):
    """The same for a repository, whose files are downloaded to the hub's cache."""
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        message = f"model_name must be a folder without the package huggingface_hub, found {model_name!r}"
        raise ModuleNotFoundError(message) from error

    return lambda name: pathlib.Path(hf_hub_download(model_name, name))


def load_file(path: pathlib.Path, device=None, dtype=None) -> dict[str, torch.Tensor]:
    """The tensors of one file. On the device "meta", their names, shapes and dtypes alone are read."""
    device = None if device is None else torch.device(device)
    # What a cast makes smaller is cast before it is moved.
    first = "cpu" if dtype not in (None, torch.float32) or device is None else device
    if device is not None and device.type == "meta":
        first = device
    if path.suffix == ".safetensors":
        tensors = _load_safetensors(path, first)
    else:
        tensors = torch.load(path, map_location=first if device is not None else None, weights_only=True)
    return {
        name: tensor.to(dtype=dtype if tensor.is_floating_point() else None).to(device=device)  # not positions, say
        for name, tensor in tensors.items()
    }


def _load_safetensors(path, device):
    import safetensors.torch

    if str(device) != "meta":
        return safetensors.torch.load_file(path, device=str(device))
    with safetensors.safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: torch.empty(each.get_shape(), device="meta") for name, each in slices.items()}
