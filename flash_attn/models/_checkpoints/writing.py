"""Writes a model as a folder that transformers loads: weights in safetensors, and JSON files beside them."""

import json
import os
import pathlib
import re
import tempfile
from typing import Any

from torch import Tensor, nn

from flash_attn._ops import checks
from flash_attn._torch_private import without_compiled

_WEIGHTS = re.compile(r"model\.safetensors(\.index\.json)?|model-\d{5}-of-\d{5}\.safetensors")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", re.IGNORECASE)
_INDEX = "model.safetensors.index.json"


def write_folder(
    folder: str | os.PathLike[str], documents: dict[str, Any], tensors: dict[str, Tensor], max_shard_size: int
) -> None:
    """Write `documents`, by the names of their files, and `tensors`, in files of at most max_shard_size bytes.

    Everything is written before any file of the folder is replaced, so that a full disk leaves the folder unchanged.
    Other files stay, except weights that would be taken for part of this model.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"folder must be a folder or a new name, found the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the folder, because replacing a file is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        written = pathlib.Path(temporary)
        _write_tensors(written, tensors, max_shard_size)
        for name, contents in documents.items():
            (written / name).write_text(json.dumps(contents, indent=2, default=str) + "\n")
        names = [path.name for path in written.iterdir()]
        for name in names:
            (written / name).replace(folder / name)
    for path in list(folder.iterdir()):
        if _WEIGHTS.fullmatch(path.name) and path.name not in names:
            path.unlink()


def state_to_save(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without gradients, by the names that a model without torch.compile has.

    Raises ValueError for a parameter that is divided over processes, as by fully_shard.
    """
    result = {}
    for name, tensor in model.state_dict().items():
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"parameters must be whole to be saved, found a DTensor, {name}: let every process call "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True)), then load what the first one gets into a model that is not "
                "divided, and save that"
            )
        result[without_compiled(name)] = tensor.detach()
    return result


def number_of_bytes(size: int | str) -> int:
    """max_shard_size as a number of bytes: it may be text, such as "5GB" (10**9 bytes) or "500 MiB" (2**20)."""
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        if found is None:
            raise ValueError(f"max_shard_size must be a number of bytes or text such as '5GB', found {size!r}")
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper()))
    checks.integer("max_shard_size", size, "an integer or text such as '5GB'")
    checks.number("max_shard_size", size, size > 0, "positive")
    return size


def _write_tensors(folder, tensors, max_shard_size):
    from safetensors.torch import save_file

    shards, size = [{}], 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {key: name for name, shard in zip(names, shards) for key in shard}
        (folder / _INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
        )
