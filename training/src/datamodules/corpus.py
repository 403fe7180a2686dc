"""Where documents come from: files of text, JSON lines, Parquet or ready ids, or a data set of the hub.

A corpus gives the sources of each split. A source is cut into ranges, which several processes read at the same time;
which documents there are does not depend on how it is cut. Readers are iterators, and hold one document at a time, or
a part of one where a text file is a single document.
"""

import glob
import itertools
import json
import math
import os
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from src.datamodules.hub import first_line, hub_problem
from src.utils.optional import optional_module

SAMPLE_BY = ("document", "paragraph", "line")
_CHUNK = 1 << 20  # bytes of a text that are tokenised at a time, and items of ready ids that are copied at a time
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors begin a file with it
_SPLIT_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val"), "validation")
_SPLIT_FILE = re.compile(rf"({'|'.join(_SPLIT_NAMES)})([-_.]\d.*)?")  # train.txt, train-00000-of-00080.parquet
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

Names = str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any]


class Segment(NamedTuple):
    """A document, or a part of one, in the order of the source."""

    content: str | np.ndarray  # text, or ready ids
    ends: bool  # whether the document ends here
    offset: int  # where it begins in the source: a byte, an item or a row


class Source(Protocol):
    """What a corpus consists of. It can be sent to another process."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> int:
        """Bytes, or about as many; 0 if it is empty."""

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Ranges for `read` of about `size` bytes, which together are the whole source."""

    def read(self, start: int, stop: int) -> Iterator[Segment]:
        """The segments of a range. Raises ValueError for contents that are not what they should be."""


class _File:
    path: pathlib.Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class TextFile(_File):
    """A text file in UTF-8, as one document or as many.

    sample_by: "document", the whole file; "paragraph", lines up to a blank one; "line", without its end; or "block",
    about `unit` bytes up to a blank line, or else up to the end of a line.
    """

    path: pathlib.Path
    sample_by: str = "document"
    unit: int = _CHUNK

    def ranges(self, size: int) -> list[tuple[int, int]]:
        unit = 1 if self.sample_by in ("line", "paragraph") else self.unit
        return _ranges(self.size, math.ceil(size / unit) * unit)

    def read(self, start: int, stop: int) -> Iterator[Segment]:
        with open(self.path, "rb") as file:
            if self.sample_by == "line":
                yield from self._documents(_lines(file, start, stop))
            elif self.sample_by == "paragraph":
                yield from self._documents(_paragraphs(file, start, stop))
            else:
                yield from self._chunks(file, start, stop)

    def _documents(self, pieces: Iterable[tuple[int, bytes]]) -> Iterator[Segment]:
        for offset, data in pieces:
            yield Segment(decode(data, self.path, offset).rstrip("\r\n"), True, offset)

    def _chunks(self, file: BinaryIO, start: int, stop: int) -> Iterator[Segment]:
        """What lies between the cuts after each multiple of `unit`, wherever the range begins."""
        size = self.size
        cuts = [self._cut(file, offset, size) for offset in (*range(start, stop, self.unit), stop)]
        for begin, end in itertools.pairwise(cuts):
            if begin < end:
                file.seek(begin)
                text = decode(file.read(end - begin), self.path, begin)
                yield Segment(text, self.sample_by == "block" or end == size, begin)

    def _cut(self, file: BinaryIO, offset: int, size: int) -> int:
        """The first good place to cut within `unit` bytes after offset: after a blank line, a line, a character."""
        if offset == 0 or offset >= size:
            return min(offset, size)
        file.seek(offset)
        window = file.read(self.unit)
        blank = re.search(rb"\n[ \t\r]*\n", window) if self.sample_by == "block" else None
        if blank:
            return offset + blank.end()
        line = window.find(b"\n") + 1
        return offset + (line or len(window[:4]) - len(window[:4].lstrip(bytes(range(0x80, 0xC0)))))


@dataclass(frozen=True)
class JsonLinesFile(_File):
    """A file with a JSON object in each line, whose field `column` is a document."""

    path: pathlib.Path
    column: str = "text"

    def ranges(self, size: int) -> list[tuple[int, int]]:
        return _ranges(self.size, size)

    def read(self, start: int, stop: int) -> Iterator[Segment]:
        with open(self.path, "rb") as file:
            for offset, line in _lines(file, start, stop):
                if line.strip():
                    yield Segment(self._text(offset, line), True, offset)

    def _text(self, offset: int, line: bytes) -> str:
        try:
            row = json.loads(decode(line, self.path, offset).strip())
        except json.JSONDecodeError as error:
            found = f"{error.msg}, in column {error.colno}"
            raise ValueError(f"{self._where(offset)} must be a JSON object, found: {found}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self._where(offset)} must be a JSON object, found {type(row).__name__}")
        if self.column not in row:
            raise ValueError(f"{self._where(offset)} must have the field {self.column!r}, found {sorted(row)}")
        if not isinstance(row[self.column], str):
            found = type(row[self.column]).__name__
            raise ValueError(f"{self._where(offset)}: field {self.column!r} must be a string, found {found}")
        return row[self.column]

    def _where(self, offset: int) -> str:
        with open(self.path, "rb") as file:
            line = 1 + sum(file.read(min(_CHUNK, offset - start)).count(b"\n") for start in range(0, offset, _CHUNK))
        return f"{self.path}, line {line}"


@dataclass(frozen=True)
class ParquetFile(_File):
    """A Parquet file, whose column `column` holds documents; missing values are left out."""

    path: pathlib.Path
    column: str = "text"

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Ranges of row groups."""
        groups = self._open().num_row_groups
        return _ranges(groups, max(1, groups * size // max(self.size, 1)))

    def read(self, start: int, stop: int) -> Iterator[Segment]:
        batches = self._open().iter_batches(256, row_groups=range(start, stop), columns=[self.column])
        for batch in batches:
            for text in batch.column(0).to_pylist():
                if text is not None:
                    yield Segment(text, True, start)

    def _open(self) -> Any:
        pyarrow = optional_module("pyarrow")
        try:
            file = optional_module("pyarrow.parquet", "pyarrow").ParquetFile(self.path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{self.path} must be a Parquet file, found: {error}") from error
        schema = file.schema_arrow
        if self.column not in schema.names:
            raise ValueError(f"{self.path} must have the column {self.column!r}, found {schema.names}")
        kind = schema.field(self.column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{self.path}: column {self.column!r} must be of strings, found {kind}")
        return file


@dataclass(frozen=True)
class IdsFile(_File):
    """Token ids in a file: an array (n,) of integers as .npy, or as bare items of `dtype`.

    The file is one document, or with a `unit` is cut into documents of that many items.
    """

    path: pathlib.Path
    dtype: str | None = None  # None for .npy, which says it
    unit: int | None = None

    def ranges(self, size: int) -> list[tuple[int, int]]:
        ids = self._open()
        unit = self.unit or _CHUNK
        return _ranges(len(ids), math.ceil(size / ids.itemsize / unit) * unit)

    def read(self, start: int, stop: int) -> Iterator[Segment]:
        ids = self._open()
        for begin in range(start, stop, self.unit or _CHUNK):
            end = min(begin + (self.unit or _CHUNK), stop)
            yield Segment(np.asarray(ids[begin:end]), self.unit is not None or end == len(ids), begin)

    def in_blocks(self, size: int) -> "IdsFile":
        """The same ids as documents of about `size` bytes."""
        return replace(self, unit=max(1, size // self._open().itemsize))

    def _open(self) -> np.ndarray:
        try:
            if self.dtype is None:
                ids = np.load(self.path, mmap_mode="r", allow_pickle=False)
            else:
                ids = np.memmap(self.path, self.dtype, "r")
        except (ValueError, EOFError) as error:
            what = "an array of numpy" if self.dtype is None else f"a whole number of {self.dtype}"
            raise ValueError(f"{self.path} must be {what}, found: {error}") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{self.path} must be integers of shape (n,), found {ids.dtype} of shape {ids.shape}")
        return ids


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set that the package datasets has loaded."""

    dataset: Any
    column: str
    name: str

    @property
    def size(self) -> int:
        return getattr(self.dataset, "size_in_bytes", None) or len(self.dataset)

    def ranges(self, size: int) -> list[tuple[int, int]]:
        rows = len(self.dataset)
        return _ranges(rows, max(1, rows * size // max(self.size, 1)))

    def read(self, start: int, stop: int) -> Iterator[Segment]:
        for begin in range(start, stop, 256):
            for text in self.dataset[begin : min(begin + 256, stop)][self.column]:
                if text is not None:
                    yield Segment(text, True, begin)


class LocalCorpus:
    """Files here, by the split they belong to.

    Arguments:
        names: a file, a folder, a glob, a list of these, "python_sources", or a dict from "train", "validation" and
            "test" to these. In a folder or list, what is called "train", "validation" (or "valid", "val") and "test",
            files such as valid.txt and train-00001.jsonl or sub-folders, are the splits; if nothing is, all is "train".
        sample_by: what a document of a text file is: "document" (the file), "paragraph" or "line".
        text_column: the field or column of .jsonl and .parquet.
        ids_dtype: the dtype of .bin files, unless a file beside it says it: train.bin.json with {"dtype": "uint16"}.

    Raises FileNotFoundError or ValueError for names that cannot be read, or that are in part splits and in part not.
    """

    def __init__(
        self, names: Names, sample_by: str = "document", text_column: str | None = None, ids_dtype: str | None = None
    ) -> None:
        self._sample_by, self._column, self._ids_dtype = sample_by, text_column or "text", ids_dtype
        self.name = _readable(names)
        self._files = _split_files(names)

    def identity(self) -> dict[str, Any]:
        """What changes when the documents do: names, sizes and times of the files, and how they are read."""
        files = {
            split: [[name, path.stat().st_size, path.stat().st_mtime_ns] for name, path in found.items()]
            for split, found in self._files.items()
        }
        return {"files": files, "sample_by": self._sample_by, "column": self._column, "ids_dtype": self._ids_dtype}

    def sources(self) -> dict[str, list[Source]]:
        return {split: [self._source(path) for path in files.values()] for split, files in self._files.items()}

    def _source(self, path: pathlib.Path) -> Source:
        match path.suffix:
            case ".txt" | ".py":
                return TextFile(path, self._sample_by)
            case ".jsonl":
                return JsonLinesFile(path, self._column)
            case ".parquet":
                return ParquetFile(path, self._column)
            case ".npy":
                return IdsFile(path)
            case _:
                return IdsFile(path, self._dtype_of(path))

    def _dtype_of(self, path: pathlib.Path) -> str:
        beside = path.with_name(f"{path.name}.json")
        dtype = json.loads(beside.read_text()).get("dtype") if beside.is_file() else self._ids_dtype
        try:
            if dtype is not None and np.dtype(dtype).kind in "iu":
                return np.dtype(dtype).str
        except TypeError:
            pass
        what = f"ids_dtype, or 'dtype' in {beside.name}, must be a dtype of integers"
        raise ValueError(f"{path}: {what}, found {dtype!r}")


class HubCorpus:
    """A data set of the Hugging Face hub, which is fetched when its sources are asked for."""

    def __init__(self, name: str, config: str | None = None, text_column: str | None = None) -> None:
        self._name, self._config, self._column = name, config, text_column
        self.name = "-".join(filter(None, (name.rsplit("/", 1)[-1], config)))

    def identity(self) -> dict[str, Any]:
        return {"hub": self._name, "config": self._config, "column": self._column}

    def sources(self) -> dict[str, list[Source]]:
        what = f"dataset_name {self._name!r} is no file or folder here"
        try:
            import datasets
        except ModuleNotFoundError as error:
            message = f"{what}, and the hub needs the package datasets: pip install datasets"
            raise ModuleNotFoundError(message, name="datasets") from error
        problem = hub_problem()
        cached_alone = datasets.DownloadConfig(local_files_only=problem is not None)
        try:
            loaded = datasets.load_dataset(self._name, self._config, download_config=cached_alone)
        except Exception as error:  # of the hub, the network or a data set's own files: there is no common class
            raise OSError(
                f"{what}, and the hub did not give it: {problem or first_line(error)}. Without the hub, dataset_name "
                f"may be a file or a folder of {_ENDINGS}"
            ) from error
        return {split: [self._source(split, loaded[split])] for split in _SPLIT_NAMES if split in loaded}

    def _source(self, split: str, dataset: Any) -> HubSplit:
        columns = dataset.column_names
        column = self._column or ("text" if "text" in columns else columns[0])
        if column not in columns:
            raise ValueError(f"text_column must be a column of {self._name}, {columns}, found {column!r}")
        return HubSplit(dataset, column, f"{self._name}, {split}")


def find_corpus(
    names: Names,
    config: str | None = None,
    sample_by: str = "document",
    text_column: str | None = None,
    ids_dtype: str | None = None,
) -> LocalCorpus | HubCorpus:
    """The corpus of `dataset_name`: files here if there are any, else a data set of the hub.

    Raises FileNotFoundError if `names` is neither, and ValueError for a `config` of files.
    """
    if isinstance(names, str) and not _exists(names) and _HUB_NAME.fullmatch(names) and not _looks_like_file(names):
        return HubCorpus(names, config, text_column)
    if config is not None:
        raise ValueError(f"dataset_config_name is for data sets of the hub, found {config!r} with files: {names}")
    return LocalCorpus(names, sample_by, text_column, ids_dtype)


def python_sources() -> list[pathlib.Path]:
    """The top-level modules of Python's standard library: some megabytes of text that are everywhere.

    >>> [path.name for path in python_sources() if "code" in path.name][:2]
    ['code.py', 'codecs.py']
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if not modules:
        raise FileNotFoundError(f"'python_sources' must be the modules of Python's library, found none in {folder}")
    return modules


def in_blocks(sources: Sequence[Source], share: float) -> Sequence[Source]:
    """Sources of which `share` can be held out.

    Text files and ready ids that are too few for that are cut into blocks, text at blank lines, and each block is a
    document: about four blocks make up the share, but they have at least 1 KiB and at most 1 MiB.
    """
    if len(sources) * share >= 1 or not all(_is_one_document(source) for source in sources):
        return sources
    unit = min(max(int(sum(source.size for source in sources) * share / 4), 1 << 10), 1 << 20)
    return [
        source.in_blocks(unit) if isinstance(source, IdsFile) else replace(source, sample_by="block", unit=unit)
        for source in sources
    ]


def _is_one_document(source: Source) -> bool:
    return isinstance(source, IdsFile) or (isinstance(source, TextFile) and source.sample_by == "document")


def _ranges(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def decode(data: bytes, path: pathlib.Path, offset: int) -> str:
    """Text from bytes of a file that begin at offset, without a byte order mark at the file's beginning.

    Raises ValueError where they are no text in UTF-8.
    """
    if offset == 0 and data.startswith(_BYTE_ORDER_MARK):
        data, offset = data[len(_BYTE_ORDER_MARK) :], len(_BYTE_ORDER_MARK)
    if b"\0" in data:
        raise ValueError(f"{path} must be text, found a zero byte at offset {offset + data.index(0)}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise ValueError(f"{path} must be text in UTF-8, found {found}") from error


def _lines(file: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin in the range."""
    if start > 0:  # a line begins at start only if one ends right before it
        file.seek(start - 1)
        file.readline()
    offset = file.tell()
    while (stop is None or offset < stop) and (line := file.readline()):
        yield offset, line
        offset += len(line)


def _paragraphs(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, lines) of the paragraphs after the first blank line in the range, up to the first one after it.

    The paragraph before the first blank line belongs to the range before, which cannot know that the line is blank.
    """
    lines = _lines(file, start, None)
    if start > 0:
        blank = next((offset for offset, line in lines if not line.strip()), None)
        if blank is None or blank >= stop:
            return
    begin, paragraph = 0, []
    for offset, line in lines:
        if line.strip():
            begin = begin if paragraph else offset
            paragraph.append(line)
            continue
        if paragraph:
            yield begin, b"".join(paragraph)
        paragraph = []
        if offset >= stop:
            return
    if paragraph:
        yield begin, b"".join(paragraph)


# Names of files


_SUFFIXES = (".txt", ".jsonl", ".parquet", ".npy", ".bin")
_ENDINGS = f"the extensions {', '.join(_SUFFIXES)}"


def _looks_like_file(name: str) -> bool:
    return name.startswith((".", "~")) or pathlib.Path(name).suffix in (*_SUFFIXES, ".json", ".gz", ".zst")


def local_path(name: str | os.PathLike[str]) -> pathlib.Path:
    """A path; under Hydra, which may have changed the working directory, relative to where it was started."""
    path = pathlib.Path(name).expanduser()
    if "hydra" in sys.modules:
        from hydra.utils import to_absolute_path

        path = pathlib.Path(to_absolute_path(str(path)))
    return path


def _exists(name: str) -> bool:
    return name == "python_sources" or local_path(name).exists() or bool(glob.glob(str(local_path(name))))


def _readable(names: Names) -> str:
    """A short name for a folder of the cache."""
    if isinstance(names, Mapping):
        names = next(iter(names.values()))
    if not isinstance(names, str | os.PathLike):
        names = next(iter(names), "corpus")
    return re.sub(r"[^\w.-]+", "_", local_path(str(names)).stem).strip("_") or "corpus"


def _split_files(names: Names) -> dict[str, dict[str, pathlib.Path]]:
    """For each split, its files by the names that identify them."""
    if isinstance(names, Mapping):
        unknown = [key for key in names if key not in _SPLIT_NAMES]
        if unknown:
            raise ValueError(f"dataset_name must have the keys train, validation and test, found {unknown}")
        found = {_SPLIT_NAMES[key]: _files(value) for key, value in names.items()}
    else:
        found = _by_split(_files(names))
    if "train" not in found:
        raise ValueError(f"dataset_name must have files of the split 'train', found only {sorted(found)}: {names}")
    return found


def _by_split(files: dict[str, pathlib.Path]) -> dict[str, dict[str, pathlib.Path]]:
    found: dict[str, dict[str, pathlib.Path]] = {}
    for name, path in files.items():
        found.setdefault(_split_of(name) or "", {})[name] = path
    if "" not in found:
        return found
    if len(found) == 1:
        return {"train": files}
    strange = next(iter(found[""].values()))
    raise ValueError(
        f"dataset_name has files of the splits {sorted(filter(None, found))}, and {strange}, which belongs to none of "
        "them: call it train, validation or test, or give dataset_name as a dict from splits to files"
    )


def _split_of(name: str) -> str | None:
    first, *rest = pathlib.PurePath(name).parts
    if rest:
        return _SPLIT_NAMES.get(first)
    match = _SPLIT_FILE.fullmatch(pathlib.PurePath(first).stem)
    return _SPLIT_NAMES[match[1]] if match else None


def _files(names: str | os.PathLike[str] | Sequence[Any]) -> dict[str, pathlib.Path]:
    """Files by their names: those of a folder relative to it, others by the last part of the path."""
    if not isinstance(names, str | os.PathLike):
        found: dict[str, pathlib.Path] = {}
        for name in names:
            for key, path in _files(name).items():
                found[key if key not in found else str(path)] = path
        if not found:
            raise FileNotFoundError("dataset_name must name at least one file, found an empty list")
        return found
    if str(names) == "python_sources":
        return {path.name: path for path in python_sources()}
    path = local_path(names)
    if path.is_dir():
        return _files_of_folder(path)
    paths = [path] if path.is_file() else [pathlib.Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not paths:
        raise FileNotFoundError(f"dataset_name must be a file, a folder or a data set of the hub, found no {path}")
    for found_path in paths:
        if found_path.suffix not in _SUFFIXES:
            raise ValueError(f"dataset_name must have files with {_ENDINGS}, found {found_path}")
    return {found_path.name: found_path for found_path in paths}


def _files_of_folder(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    relative = {path.relative_to(folder): path for path in folder.rglob("*") if path.suffix in _SUFFIXES}
    found = {
        str(name): path
        for name, path in sorted(relative.items())
        if path.is_file() and not any(part.startswith(".") for part in name.parts)
    }
    if not found:
        raise FileNotFoundError(f"dataset_name must have files with {_ENDINGS}, found none in {folder}")
    return found
