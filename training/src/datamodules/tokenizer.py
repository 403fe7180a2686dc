"""Tokenizers: bytes, a tokenizer.json, or what transformers loads.

All of them have `encode`, `decode`, `save_pretrained`, `eos_token_id`, `vocab_size` and `len`, the number of ids.
"""

import fnmatch
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from src.datamodules.hub import first_line, hub_problem

_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model", "*.tiktoken")
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text in UTF-8, and 256 ends a document.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é!"), tokenizer.decode([195, 169, 33])
    ([195, 169, 33], 'é!')
    """

    name_or_path = "byte"
    eos_token = "<|endoftext|>"
    eos_token_id = 256
    vocab_size = 257
    _file = "byte_tokenizer.json"

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Iterable[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, or of one; bytes that are no UTF-8, such as a part of a character, become U+FFFD."""
        array = np.asarray(_several(ids), np.int64)
        if ((array < 0) | (array >= self.vocab_size)).any():
            raise ValueError(f"ids must be from 0 to {self.eos_token_id}, found {array.min()} to {array.max()}")
        end = b"" if skip_special_tokens else self.eos_token.encode()
        parts = np.split(array, np.flatnonzero(array == self.eos_token_id))
        first, *others = (part.astype(np.uint8).tobytes() for part in parts)
        return end.join([first, *(part[1:] for part in others)]).decode(errors="replace")

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self._file).write_text(json.dumps({"vocab_size": self.vocab_size, "eos_token_id": self.eos_token_id}))


class JsonTokenizer:
    """A tokenizer.json, read by the package tokenizers alone.

    Its end of a document is the `eos_token` of a tokenizer_config.json beside it, else the token with a usual name
    such as "<|endoftext|>"; `eos_token_id` is None if there is neither.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = str(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} must be a tokenizer.json, found: {error}") from error
        self.vocab_size = self._tokenizer.get_vocab_size()
        config = pathlib.Path(path).with_name("tokenizer_config.json")
        token = json.loads(config.read_text()).get("eos_token") if config.is_file() else None
        token = token["content"] if isinstance(token, dict) else token
        ids = map(self._tokenizer.token_to_id, [token] if token else _EOS_NAMES)
        self.eos_token_id = next((index for index in ids if index is not None), None)
        self.eos_token = None if self.eos_token_id is None else self._tokenizer.id_to_token(self.eos_token_id)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode([int(index) for index in _several(ids)], skip_special_tokens=skip_special_tokens)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        if self.eos_token is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": self.eos_token}))


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """A tokenizer by its name.

    Arguments:
        name: "byte"; a folder with a tokenizer, or a tokenizer.json; otherwise a name on the Hugging Face hub. A folder
            with more than a tokenizer.json, and the hub, need the package transformers.

    Raises FileNotFoundError for a path that does not exist, ModuleNotFoundError if a package is missing, OSError if the
    hub cannot be reached or does not know the name, and ValueError for a file that is no tokenizer.
    """
    path = pathlib.Path(name).expanduser()
    if str(name) == "byte" or (path / ByteTokenizer._file).is_file():
        return ByteTokenizer()
    if path.is_file():
        return JsonTokenizer(path)
    if path.is_dir():
        return _from_folder(path)
    if path.is_absolute() or path.suffix == ".json" or str(name).startswith("."):
        raise FileNotFoundError(f"tokenizer_name must be 'byte', a folder or a name on the hub, found no {path}")
    return _from_transformers(str(name))


def tokenizer_identity(name: str | os.PathLike[str]) -> dict[str, str]:
    """What tells tokenizers apart, without loading one: the digest of its files, or else its name."""
    path = pathlib.Path(name).expanduser()
    if str(name) == "byte" or (path / ByteTokenizer._file).is_file():
        return {"name": "byte"}
    files = [path] if path.is_file() else _tokenizer_files(path) if path.is_dir() else []
    if not files:
        return {"name": str(name)}
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return {"digest": digest.hexdigest()}


def encode_batch(tokenizer: Any, texts: Sequence[str]) -> Sequence[Sequence[int]]:
    """The ids of each text, without special tokens such as those that begin or end a sentence."""
    if isinstance(tokenizer, ByteTokenizer | JsonTokenizer):
        return tokenizer.encode_batch(texts)
    return tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]


def _several(ids: int | Iterable[int]) -> Sequence[int] | np.ndarray:
    """Ids as numpy takes them. transformers' tokenizers decode a single id, too, and its TextStreamer gives one."""
    if isinstance(ids, int) or getattr(ids, "ndim", 1) == 0:
        return [int(ids)]
    return ids if isinstance(ids, Sequence | np.ndarray) else list(ids)


def _tokenizer_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a tokenizer in a folder, which may also hold a model."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in _FILES)
    )


def _from_folder(folder: pathlib.Path) -> Any:
    files = [file.name for file in _tokenizer_files(folder)]
    if not files:
        raise FileNotFoundError(f"tokenizer_name must be a folder with a tokenizer, found none in {folder}")
    if files == ["tokenizer.json"]:
        return JsonTokenizer(folder / "tokenizer.json")
    try:
        return _from_transformers(str(folder))
    except ModuleNotFoundError:
        if "tokenizer.json" not in files:
            raise
        return JsonTokenizer(folder / "tokenizer.json")


def _from_transformers(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        message = f"tokenizer_name {name!r} needs the package transformers: pip install transformers"
        raise ModuleNotFoundError(message, name="transformers") from error
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)  # a folder, or in the cache of the hub
    except Exception as error:  # of the hub, the network or the files: transformers has no common class for them
        if pathlib.Path(name).is_dir():
            raise OSError(f"tokenizer_name {name!r} cannot be read: {first_line(error)}") from error
    problem = hub_problem()
    if problem is None:
        try:
            return AutoTokenizer.from_pretrained(name)
        except Exception as error:
            problem, cause = first_line(error), error
    else:
        cause = None
    raise OSError(
        f"tokenizer_name {name!r} is no folder here, is not in the cache of the hub, and the hub did not give it: "
        f"{problem}. Without the hub, tokenizer_name may be 'byte', a folder with a tokenizer, or a tokenizer.json"
    ) from cause
