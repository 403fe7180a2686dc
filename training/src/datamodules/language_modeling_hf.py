"""Text for language models: prepared once, read through memory maps, resumed at the sample."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset

from src.datamodules import token_cache
from src.datamodules.corpus import SAMPLE_BY, HubCorpus, LocalCorpus, Names, find_corpus, local_path
from src.datamodules.datasets.detokenizer import detokenizer_of
from src.datamodules.datasets.lm_dataset import DocumentCollate, LMDataset, sample_digest
from src.datamodules.fault_tolerant_sampler import FaultTolerantDistributedSampler
from src.datamodules.resumable import ResumableDataModule
from src.datamodules.resumable_loader import Position, ResumableLoader, leave_signals_to_the_trainer
from src.datamodules.tokenizer import load_tokenizer, tokenizer_identity

_CHUNK = 1 << 20  # tokens that are searched at a time


class LMDataModule(ResumableDataModule):
    """Sequences (x, y) of a tokenised corpus, int64 (batch, max_length), where y comes one token after x.

    Arguments:
        dataset_name: a file or folder of .txt, .jsonl, .parquet, or ready ids as .npy or .bin; a glob; a list of these;
            a dict from "train", "validation" and "test" to these; "python_sources", the modules of Python's library; a
            folder that `prepare_data` has made; or a data set of the Hugging Face hub. In a folder or list, names such
            as valid.txt, train-00001.jsonl or test/ say which split a file belongs to.
        tokenizer_name: "byte", a folder with a tokenizer, a tokenizer.json, or a name on the hub.
        dataset_config_name: which configuration of a data set of the hub.
        max_length: tokens of a sequence.
        cache_dir: where prepared tokens are kept, each corpus in a folder of its own. None keeps them only while the
            process lives.
        val_ratio, val_split_seed: without validation data, this share of the documents, at least one, is held out, as
            the seed chooses them. Texts that are too few for that are cut into blocks at blank lines, and ready ids
            anywhere; the blocks then are the documents. Without test data, the validation data are the test data.
        add_eos: end each document that is not empty with the tokenizer's end-of-text token.
        detokenize: undo the tokenisation that the corpus came with, for the corpora that `detokenizer` knows.
        val_only: train on the validation data.
        batch_size, batch_size_eval: sequences of a batch on each rank; the latter is the former by default.
        num_workers: processes that tokenise.
        shuffle: take the training sequences in an order that the seed and the epoch determine.
        pin_memory, drop_last: as in DataLoader; the latter for training.
        fault_tolerant, ddp: older options that asked for the position to be kept, and over several ranks. It always is;
            combinations with other arguments that used to be errors still are.
        fast_forward_epochs, fast_forward_batches: begin training as if it had consumed this many epochs, and this
            many further batches on each rank.
        use_shmem: without a cache_dir, keep the tokens in shared memory (/dev/shm) and not in a temporary folder.
        sample_by: what a document of a .txt file is: "document" (the whole file), "paragraph" or "line".
        text_column: the field of .jsonl and column of .parquet and of the hub; "text" by default.
        ids_dtype: the dtype of .bin files, unless a file such as train.bin.json says it: {"dtype": "uint16"}.
        seed: of the order; by default that of Lightning's seed_everything, else 0.
        loader_workers: processes that read batches.
        separate_documents: tokens shall not see other documents: batches are (x, y, cu_seqlens), as `DocumentCollate`
            makes them. Needs a tokenizer with an end-of-text token, which stands between documents: add_eos puts it
            there, or ready ids have it.

    `prepare_data` may be called in every rank and by several jobs at the same time: one process tokenises while the
    others wait. After `setup` there are `tokenizer`, `vocab_size`, and `dataset_train`, `dataset_val`, `dataset_test`.

    `state_dict()` is {"epoch", "samples", …}: how many samples of this epoch training has consumed over all ranks.
    `load_state_dict` goes on right there, also with another number of ranks or another batch_size.

    Raises ValueError for arguments and files that are not as they should be, FileNotFoundError for files that are not
    there, ModuleNotFoundError for packages, and OSError for the hub and for writing.

    >>> data = LMDataModule("python_sources", "byte", max_length=64, batch_size=4)     # doctest: +SKIP
    >>> data.prepare_data(); data.setup()                                              # doctest: +SKIP
    >>> x, y = next(iter(data.train_dataloader()))                                     # doctest: +SKIP
    """

    same_data = "dataset_name, tokenizer_name and max_length"

    def __init__(
        self,
        dataset_name: Names,
        tokenizer_name: str | os.PathLike[str],
        dataset_config_name: str | None = None,
        max_length: int = 1024,
        cache_dir: str | os.PathLike[str] | None = None,
        val_ratio: float = 0.0005,
        val_split_seed: int = 2357,
        add_eos: bool = True,
        detokenize: bool = False,
        val_only: bool = False,
        batch_size: int = 32,
        batch_size_eval: int | None = None,
        num_workers: int = 1,
        shuffle: bool = False,
        pin_memory: bool = False,
        drop_last: bool = False,
        fault_tolerant: bool = False,
        ddp: bool = False,
        fast_forward_epochs: int | None = None,
        fast_forward_batches: int | None = None,
        use_shmem: bool = True,
        *,
        sample_by: str = "document",
        text_column: str | None = None,
        ids_dtype: str | None = None,
        seed: int | None = None,
        loader_workers: int = 1,
        separate_documents: bool = False,
    ) -> None:
        super().__init__(seed)
        fast_forward = fast_forward_epochs is not None or fast_forward_batches is not None
        _require(max_length >= 1, "max_length must be at least 1", max_length)
        _require(batch_size >= 1, "batch_size must be at least 1", batch_size)
        _require(batch_size_eval is None or batch_size_eval >= 1, "batch_size_eval must be at least 1", batch_size_eval)
        _require(num_workers >= 0, "num_workers must be at least 0", num_workers)
        _require(loader_workers >= 0, "loader_workers must be at least 0", loader_workers)
        _require(0 < val_ratio < 1, "val_ratio must be more than 0 and less than 1", val_ratio)
        _require(sample_by in SAMPLE_BY, f"sample_by must be one of {', '.join(SAMPLE_BY)}", sample_by)
        _require(shuffle or not fault_tolerant, "shuffle must be True with fault_tolerant", shuffle)
        _require(fault_tolerant or not ddp, "fault_tolerant must be True with ddp", fault_tolerant)
        _require(ddp or not fast_forward, "ddp must be True with fast_forward_epochs and fast_forward_batches", ddp)
        self.dataset_name, self.tokenizer_name = dataset_name, tokenizer_name
        self.dataset_config_name = dataset_config_name
        self.max_length = max_length
        self.cache_dir = None if cache_dir is None else pathlib.Path(cache_dir).expanduser()
        self.val_ratio, self.val_split_seed, self.val_only = val_ratio, val_split_seed, val_only
        self.add_eos, self.detokenize = add_eos, detokenize
        self.batch_size = batch_size
        self.batch_size_eval = batch_size if batch_size_eval is None else batch_size_eval
        self.num_workers, self.loader_workers = num_workers, loader_workers
        self.shuffle, self.pin_memory, self.drop_last = shuffle, pin_memory, drop_last
        self.fault_tolerant, self.ddp = fault_tolerant, ddp
        self.fast_forward_epochs, self.fast_forward_batches = fast_forward_epochs, fast_forward_batches
        self.use_shmem = use_shmem
        self.sample_by, self.text_column, self.ids_dtype = sample_by, text_column, ids_dtype
        self.separate_documents = separate_documents
        self._reported = False

    # Preparation

    def prepare_data(self) -> None:
        """Tokenise the corpus, unless its tokens are in the cache, and print what there is."""
        self._make()
        if not self._reported:
            self._reported = True
            _print(self._summary())

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared data, which are prepared first if they are not. Every stage opens all of them."""
        if hasattr(self, "dataset_test"):
            return
        splits, self.tokenizer = self.process_dataset()
        self.vocab_size = len(self.tokenizer)
        if self.separate_documents and self.tokenizer.eos_token_id is None:
            raise ValueError(
                "separate_documents must be False for a tokenizer without an end-of-text token, found True for "
                f"tokenizer_name {self.tokenizer_name}"
            )
        if self.separate_documents and not any(map(self._has_ends, splits.values())):
            raise ValueError(
                "add_eos must be True with separate_documents, unless the data have end-of-text tokens, found "
                f"{self.add_eos} and no token {self.tokenizer.eos_token_id} in dataset_name {self.dataset_name}"
            )
        datasets = {split: LMDataset(tokens, self.max_length) for split, tokens in splits.items()}
        for split, dataset in datasets.items():
            if not len(dataset):
                raise ValueError(
                    f"the split {split!r} must have at least max_length + 1 = {self.max_length + 1} tokens, found "
                    f"{len(splits[split])}: give a smaller max_length, or a larger val_ratio"
                )
        self.dataset_train, self.dataset_val = datasets["train"], datasets["validation"]
        self.dataset_test = datasets["test"]

    def _has_ends(self, tokens: np.ndarray) -> bool:
        """Whether the end-of-text token is among tokens, which are read up to the first one."""
        chunks = (tokens[i : i + _CHUNK] for i in range(0, len(tokens), _CHUNK))
        return any((chunk == self.tokenizer.eos_token_id).any() for chunk in chunks)

    def process_dataset(self) -> tuple[dict[str, np.ndarray], Any]:
        """The token ids of "train", "validation" and "test", as memory maps, and the tokenizer."""
        tokens = self._make()
        return tokens.splits, tokens.tokenizer

    @property
    def cache_folder(self) -> pathlib.Path:
        """The folder with the prepared data; its name depends on everything that they depend on."""
        if self._is_prepared:
            return local_path(self.dataset_name)
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:12]
        tokenizer = self._identity["tokenizer"].get("name") or pathlib.Path(self.tokenizer_name).stem
        name = "-".join(re.sub(r"[^\w.-]+", "_", part) for part in (self._corpus.name, tokenizer, digest))
        return pathlib.Path(self.cache_dir or self._temporary) / name

    def _make(self) -> token_cache.Tokens:
        folder = self.cache_folder
        if self._is_prepared:
            own = pathlib.Path(self.tokenizer_name) == folder / "tokenizer"
            return token_cache.load(folder, {} if own else {"tokenizer": tokenizer_identity(self.tokenizer_name)})
        if not token_cache.prepared(folder):
            token_cache.prepare(folder, self._build)
        return token_cache.load(folder, self._identity)

    def _build(self, folder: pathlib.Path) -> None:
        sources = self._corpus.sources()
        tokenizer = load_tokenizer(self.tokenizer_name)
        if self.add_eos and tokenizer.eos_token_id is None:
            raise ValueError(f"add_eos needs an end-of-text token, found none in tokenizer_name {self.tokenizer_name}")
        recipe = token_cache.Recipe(
            add_eos=self.add_eos,
            detokenize=self._detokenizer,
            val_ratio=None if "validation" in sources else self.val_ratio,
            val_split_seed=self.val_split_seed,
            val_only=self.val_only,
        )
        token_cache.build(folder, sources, tokenizer, recipe, self._identity, self.num_workers)

    @property
    def _is_prepared(self) -> bool:
        """Whether dataset_name is a folder that was prepared before."""
        name = self.dataset_name
        return isinstance(name, str | os.PathLike) and token_cache.prepared(local_path(name))

    @cached_property
    def _corpus(self) -> LocalCorpus | HubCorpus:
        return find_corpus(
            self.dataset_name, self.dataset_config_name, self.sample_by, self.text_column, self.ids_dtype
        )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on."""
        corpus = json.dumps(self._corpus.identity(), sort_keys=True)
        return {
            "format": token_cache.FORMAT,
            "corpus": {"name": self._corpus.name, "digest": hashlib.sha256(corpus.encode()).hexdigest()},
            "tokenizer": tokenizer_identity(self.tokenizer_name),
            "add_eos": self.add_eos,
            "detokenize": self._detokenizer is not None,
            "val_ratio": self.val_ratio,
            "val_split_seed": self.val_split_seed,
            "val_only": self.val_only,
        }

    @property
    def _detokenizer(self) -> Any:
        return detokenizer_of(str(self.dataset_name)) if self.detokenize else None

    @cached_property
    def _temporary(self) -> str:
        """A folder that is removed when this object or the process ends."""
        memory = "/dev/shm" if self.use_shmem and os.access("/dev/shm", os.W_OK) else None
        folder = tempfile.mkdtemp(prefix="tokens-", dir=memory)
        weakref.finalize(self, _remove, folder, os.getpid())
        return folder

    def _summary(self) -> str:
        metadata = json.loads((self.cache_folder / token_cache.METADATA).read_text())
        lines = [
            f"{split:<12}{entry['tokens']:>16,} tokens in {entry['documents']:,} documents, {entry['file']}"
            for split, entry in metadata["splits"].items()
        ]
        made = f"{metadata['dtype']}, vocabulary {metadata['vocab_size']}, prepared in {metadata['seconds']} s"
        return "\n".join([f"{self.cache_folder}: {made}", *lines])

    # Loaders

    @property
    def collate(self) -> DocumentCollate | None:
        """What makes batches of samples; None for torch's own."""
        return DocumentCollate(self.tokenizer.eos_token_id) if self.separate_documents else None

    def train_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The batches of this rank, from where training is: see `state_dict`."""
        sampler = FaultTolerantDistributedSampler(
            self.dataset_train, shuffle=self.shuffle, seed=self.seed, **self.ranks()
        )
        return self.begin(self._data_loader(self.dataset_train, self.batch_size, sampler=sampler))

    def val_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._data_loader(self.for_all_ranks(self.dataset_val), self.batch_size_eval)

    def test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._data_loader(self.for_all_ranks(self.dataset_test), self.batch_size_eval)

    def _data_loader(self, dataset: Dataset, batch_size: int, shuffle: bool = False, sampler: Any = None) -> DataLoader:
        training = isinstance(sampler, FaultTolerantDistributedSampler)
        return (ResumableLoader if training else DataLoader)(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            drop_last=training and self.drop_last,
            num_workers=self.loader_workers,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            worker_init_fn=leave_signals_to_the_trainer,
            collate_fn=self.collate,
            generator=torch.Generator(),  # without one, each iteration would take a number from the global generator
        )

    # Position

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let training go on at a state of `state_dict`, or at the counters of a whole checkpoint of Lightning.

        The order remains that of the run which the state comes from, whatever `seed` is here.
        """
        if "loops" in state_dict:
            fit_loop = state_dict["loops"]["fit_loop"]
            self.fast_forward_epochs = fit_loop["epoch_progress"]["current"]["completed"]
            self.fast_forward_batches = fit_loop["epoch_loop.batch_progress"]["current"]["completed"]
            return
        super().load_state_dict(state_dict)

    def description(self) -> dict[str, Any]:
        return {
            "dataset_name": str(self.dataset_name),
            "tokenizer_name": str(self.tokenizer_name),
            "max_length": self.max_length,
            "contents": self._contents,
        }

    @cached_property
    def _contents(self) -> str:
        return sample_digest(self.dataset_train.tokens, self.max_length)

    def first_position(self, loader: ResumableLoader) -> Position:
        """Where fast_forward_epochs and fast_forward_batches say."""
        batch = self.batch_size * loader.sampler.num_replicas
        return Position(self.fast_forward_epochs or 0, (self.fast_forward_batches or 0) * batch)


def _require(condition: bool, expected: str, found: Any) -> None:
    if not condition:
        raise ValueError(f"{expected}, found {found}")


@rank_zero_only
def _print(text: str) -> None:
    print(text, flush=True)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
