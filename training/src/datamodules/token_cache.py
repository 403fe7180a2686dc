"""Tokens of a corpus in a folder: one array for each split, the tokenizer, and what they were made from.

    metadata.json       `identity`, the tokens and documents of each split, the dtype, how long it took
    train.npy           token ids (n,) uint16, or int32 for vocabularies of 65536 and more
    validation.npy      the same; and test.npy, if there are test data of their own
    tokenizer/          as `save_pretrained` writes it

Worker processes tokenise ranges of the corpus, each to files of its own; these are joined in the order of the corpus,
so that the result does not depend on the number of workers. Nothing is held in memory but a batch of documents for each
worker. The folder is made under a temporary name and renamed when all of it is on the disk.
"""

import concurrent.futures
import contextlib
import errno
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import filelock
import numpy as np
from tqdm import tqdm

from src.datamodules.corpus import Segment, Source, in_blocks
from src.datamodules.tokenizer import encode_batch, load_tokenizer

FORMAT = 1  # to be raised when the same corpus gives other tokens or another layout
METADATA = "metadata.json"
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1000, 1 << 22  # what is tokenised by one call


class TokenCacheError(ValueError):
    """A folder that does not hold the tokens that are asked for."""


@dataclass(frozen=True)
class Recipe:
    """How documents become tokens, and which of them are held out.

    val_ratio: share of the documents that is held out, chosen by val_split_seed; None if validation data are given.
    """

    add_eos: bool = True
    detokenize: Callable[[str], str] | None = None
    val_ratio: float | None = None
    val_split_seed: int = 2357
    val_only: bool = False


class Tokens(NamedTuple):
    """What a folder holds."""

    splits: dict[str, np.ndarray]  # memory maps of train, validation and test
    tokenizer: Any
    metadata: dict[str, Any]


def prepared(folder: pathlib.Path) -> bool:
    """Whether a folder is complete."""
    return (folder / METADATA).is_file()


def load(folder: pathlib.Path, expected: Mapping[str, Any]) -> Tokens:
    """Open a prepared folder.

    expected: the entries of its identity that must be as here, such as {"tokenizer": …}.
    Raises TokenCacheError if one differs, or if the folder is damaged.
    """
    try:
        metadata = json.loads((folder / METADATA).read_text())
        identity, splits = metadata["identity"], metadata["splits"]
    except (OSError, ValueError, KeyError) as error:
        raise TokenCacheError(f"{folder} must hold prepared tokens, found: {error!r}; remove it") from error
    for key, value in expected.items():
        if identity.get(key) != value:
            what_to_do = "give that tokenizer_name" if key == "tokenizer" else "remove it"
            raise TokenCacheError(
                f"{folder} was prepared with another {key}: expected {value}, found {identity.get(key)}; {what_to_do}, "
                "or name another folder"
            )
    arrays: dict[str, np.ndarray] = {}
    for split, entry in splits.items():
        try:
            tokens = np.load(folder / entry["file"], mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise TokenCacheError(f"{folder / entry['file']} is damaged: {error}; remove {folder}") from error
        if tokens.shape != (entry["tokens"],) or tokens.dtype != metadata["dtype"]:
            found = f"{tokens.dtype} {tokens.shape}"
            raise TokenCacheError(f"{folder / entry['file']} must be {metadata['dtype']} ({entry['tokens']},): {found}")
        arrays[split] = tokens
    return Tokens(arrays, load_tokenizer(folder / "tokenizer"), metadata)


def prepare(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
    """Let make(temporary folder) write a folder, unless it exists.

    Processes that ask for the same folder at the same time wait until one of them has made it. What a process that was
    killed has left behind is removed. Raises what `make` raises, after removing what it has written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TokenCacheError(
            f"cache_dir must be a folder that can be written to, found {folder.parent} ({error.strerror}); DATA_DIR "
            "names another place"
        ) from error
    temporary = folder.with_name(f".{folder.name}.tmp")
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    with _waiting(lock, folder):
        if prepared(folder):
            return
        if folder.exists():
            raise TokenCacheError(f"{folder} exists, but has no {METADATA}: remove it")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            make(temporary)
            _sync(temporary, *temporary.rglob("*"))
            temporary.rename(folder)
            _sync(folder.parent)
        except BaseException as error:
            written = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                message = f"{folder} cannot be written: {error.strerror} after {written} bytes, which were removed"
                raise OSError(error.errno, message) from error
            raise


@contextlib.contextmanager
def _waiting(lock: filelock.FileLock, folder: pathlib.Path) -> Iterator[None]:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        print(f"Waiting for another process, which prepares {folder}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sync(*paths: pathlib.Path) -> None:
    """Wait until files, and the names in folders, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Tokenising


def build(
    folder: pathlib.Path,
    sources: Mapping[str, Sequence[Source]],
    tokenizer: Any,
    recipe: Recipe,
    identity: Mapping[str, Any],
    num_workers: int,
) -> None:
    """Tokenise a corpus into an empty folder.

    sources: of "train", and where they are given, of "validation" and "test". Without validation data a share of the
    training documents is held out; without test data, those are the validation data, too.

    Raises ValueError for documents that cannot be read or held out, and OSError where writing fails.
    """
    start = time.monotonic()
    splits = dict(sources)
    if recipe.val_ratio is not None:
        splits["train"] = in_blocks(splits["train"], recipe.val_ratio)
    elif recipe.val_only:
        del splits["train"]
    dtype = np.dtype(np.uint16 if len(tokenizer) < 1 << 16 else np.int32)
    job = _Job(folder, tokenizer, dtype, recipe.add_eos, recipe.detokenize)
    parts = _tokenise(job, splits, num_workers)

    entries = {}
    for split in splits:
        if not sum(part.tokens for part in parts[split]):
            names = ", ".join(source.name for source in sources[split][:3]) + (" …" if len(sources[split]) > 3 else "")
            raise ValueError(f"the split {split!r} must have text, found none in {names}, which is empty")
        if split == "train" and recipe.val_ratio is not None:
            held_out = _held_out(sum(part.documents for part in parts[split]), recipe, sources[split])
            targets = {"validation": held_out} if recipe.val_only else {"train": ~held_out, "validation": held_out}
        else:
            targets = {split: None}
        entries |= _join(job, parts[split], targets)
    if "test" not in entries:
        entries["test"] = entries["validation"]
    if recipe.val_only:
        entries["train"] = entries["validation"]

    tokenizer.save_pretrained(str(folder / "tokenizer"))
    metadata = {
        "identity": dict(identity),
        "splits": {split: entries[split] for split in ("train", "validation", "test")},
        "dtype": dtype.name,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id if recipe.add_eos else None,
        "seconds": round(time.monotonic() - start, 1),
    }
    (folder / METADATA).write_text(json.dumps(metadata, indent=1))


@dataclass(frozen=True)
class _Job:
    """What every worker needs."""

    folder: pathlib.Path
    tokenizer: Any
    dtype: np.dtype
    add_eos: bool
    detokenize: Callable[[str], str] | None


class _Task(NamedTuple):
    """Ranges of sources that are tokenised to one pair of files."""

    split: str
    index: int
    ranges: list[tuple[Source, int, int]]
    size: float  # bytes, for the progress bar


class _Part(NamedTuple):
    """The files of a task: token ids as bare items, and where documents end among them, as int64 items."""

    ids: pathlib.Path
    ends: pathlib.Path
    tokens: int
    documents: int


def _tasks(split: str, sources: Sequence[Source]) -> list[_Task]:
    """Tasks of some hundred kB of a small corpus, and of some ten MB of a large one."""
    step = min(max(sum(source.size for source in sources) >> 11, 1 << 18), 1 << 25)
    tasks, ranges, size = [], [], 0.0
    for source in sources:
        found = source.ranges(step)
        for start, stop in found:
            ranges.append((source, start, stop))
            size += source.size / len(found)
            if size >= step:
                tasks.append(_Task(split, len(tasks), ranges, size))
                ranges, size = [], 0.0
    return [*tasks, _Task(split, len(tasks), ranges, size)] if ranges else tasks


def _tokenise(job: _Job, splits: Mapping[str, Sequence[Source]], num_workers: int) -> dict[str, list[_Part]]:
    """The parts of each split, in the order of its sources."""
    tasks = [task for split, sources in splits.items() for task in _tasks(split, sources)]
    parts: dict[tuple[str, int], _Part] = {}
    total = sum(task.size for task in tasks)
    results = contextlib.closing(_run(job, tasks, min(num_workers, len(tasks))))  # the processes end in any case
    with tqdm(total=round(total), desc="tokenising", unit="B", unit_scale=True) as bar, results as done:
        for task, part in done:
            parts[task.split, task.index] = part
            bar.update(round(task.size))
    return {split: [parts[task.split, task.index] for task in tasks if task.split == split] for split in splits}


def _run(job: _Job, tasks: list[_Task], num_workers: int) -> Iterator[tuple[_Task, _Part]]:
    """Each task with its part, as they are done."""
    if num_workers <= 1:
        yield from ((task, _tokenise_task(job, task)) for task in tasks)
        return
    # Not forks of this process, which may have threads and a GPU, but of one that has only imported the main module.
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(num_workers, context, _start_worker, (job,)) as pool:
        futures = {pool.submit(_work, task): task for task in tasks}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool as error:
            reason = f"was killed, perhaps for memory: num_workers is {num_workers}, give less"
            raise RuntimeError(f"a process that tokenises {reason}") from error
        finally:
            pool.shutdown(cancel_futures=True)


_job: _Job  # of this worker process


def _start_worker(job: _Job) -> None:
    global _job
    _job = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes use all cores already


def _work(task: _Task) -> _Part:
    return _tokenise_task(_job, task)


def _tokenise_task(job: _Job, task: _Task) -> _Part:
    stem = job.folder / f"{task.split}-{task.index:06d}"
    ids_path, ends_path = stem.with_suffix(".ids"), stem.with_suffix(".ends")
    tokens = documents = 0
    with open(ids_path, "wb") as ids_file, open(ends_path, "wb") as ends_file:
        for ids, ends in _batches(job, task.ranges):
            ids_file.write(ids.data)
            ends_file.write((ends + tokens).data)
            tokens, documents = tokens + len(ids), documents + len(ends)
    return _Part(ids_path, ends_path, tokens, documents)


@dataclass
class _Batch:
    """Documents and parts of documents that are tokenised by one call."""

    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0

    @property
    def full(self) -> bool:
        return len(self.texts) >= _BATCH_DOCUMENTS or self.characters >= _BATCH_CHARACTERS

    def add(self, text: str, ends: bool) -> None:
        if text:
            self.texts.append(text)
            self.ends.append(ends)
            self.characters += len(text)


def _batches(job: _Job, ranges: list[tuple[Source, int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, int64 positions right after the documents that end among them), in the order of the ranges."""
    batch = _Batch()
    for source, start, stop in ranges:
        for segment in source.read(start, stop):
            ready = isinstance(segment.content, np.ndarray)
            if batch.texts and (ready or batch.full):
                yield _encoded(job, batch)
                batch = _Batch()
            if ready:
                yield _checked(job, source, segment), _ends([len(segment.content)], [segment.ends])
            else:
                batch.add(job.detokenize(segment.content) if job.detokenize else segment.content, segment.ends)
    if batch.texts:
        yield _encoded(job, batch)


def _encoded(job: _Job, batch: _Batch) -> tuple[np.ndarray, np.ndarray]:
    eos = [job.tokenizer.eos_token_id] if job.add_eos else []
    pieces, lengths = [], []
    for ids, ends in zip(encode_batch(job.tokenizer, batch.texts), batch.ends):
        pieces.append(np.asarray(ids, job.dtype))
        lengths.append(len(ids))
        if ends and eos:
            pieces.append(np.asarray(eos, job.dtype))
            lengths[-1] += 1
    return np.concatenate(pieces), _ends(lengths, batch.ends)


def _ends(lengths: list[int], ends: list[bool]) -> np.ndarray:
    return np.cumsum(lengths, dtype=np.int64)[np.asarray(ends, bool)]


def _checked(job: _Job, source: Source, segment: Segment) -> np.ndarray:
    """Ready ids in the dtype of the cache."""
    ids = segment.content
    outside = np.flatnonzero((ids < 0) | (ids >= len(job.tokenizer)))
    if len(outside):
        found = f"{ids[outside[0]]} at position {segment.offset + outside[0]}"
        raise ValueError(f"{source.name}: ids must be less than the vocabulary, {len(job.tokenizer)}, found {found}")
    return np.ascontiguousarray(ids, job.dtype)


# Joining


def _held_out(documents: int, recipe: Recipe, sources: Sequence[Source]) -> np.ndarray:
    """Which documents are validation data, (documents,) bool: a share of them, at least one, and never all."""
    if documents < 2:
        raise ValueError(
            f"val_ratio needs at least two documents to hold one out, found {documents} in {sources[0].name}: give "
            "validation data, or sample_by 'paragraph' or 'line'"
        )
    count = min(math.ceil(recipe.val_ratio * documents), documents - 1)
    chosen = np.zeros(documents, bool)
    chosen[np.random.default_rng(recipe.val_split_seed).choice(documents, count, replace=False)] = True
    return chosen


def _join(job: _Job, parts: list[_Part], targets: Mapping[str, np.ndarray | None]) -> dict[str, dict[str, Any]]:
    """Write the documents that each target selects, all for None, to its file, and remove the parts."""
    counts = {split: _count(parts, selected) for split, selected in targets.items()}
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for split, (tokens, _) in counts.items():
            files[split] = stack.enter_context(open(job.folder / f"{split}.npy", "wb"))
            header = {"descr": job.dtype.str, "fortran_order": False, "shape": (tokens,)}
            np.lib.format.write_array_header_1_0(files[split], header)
        first = 0
        for part in tqdm(parts, desc="joining", unit="part"):
            ids = np.memmap(part.ids, job.dtype, "r") if part.tokens else np.empty(0, job.dtype)
            for split, selected in targets.items():
                for begin, end in _runs(part, first, selected):
                    files[split].write(ids[begin:end].data)
            first += part.documents
            part.ids.unlink()
            part.ends.unlink()
    return {
        split: {"file": f"{split}.npy", "tokens": tokens, "documents": documents}
        for split, (tokens, documents) in counts.items()
    }


def _count(parts: list[_Part], selected: np.ndarray | None) -> tuple[int, int]:
    """How many tokens and documents are selected."""
    tokens, first = 0, 0
    for part in parts:
        tokens += sum(end - begin for begin, end in _runs(part, first, selected))
        first += part.documents
    return tokens, first if selected is None else int(selected.sum())


def _runs(part: _Part, first: int, selected: np.ndarray | None) -> Iterator[tuple[int, int]]:
    """Ranges of the tokens of a part that belong to selected documents; `first` is the document that it begins in."""
    if selected is None:
        yield 0, part.tokens
        return
    ends = np.append(np.fromfile(part.ends, np.int64), part.tokens)  # the last document may go on in the next part
    chosen = np.append(selected[first : first + len(ends)], False)[: len(ends)]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    starts = np.concatenate([[0], ends])
    yield from zip(starts[edges[::2]].tolist(), starts[edges[1::2]].tolist())
