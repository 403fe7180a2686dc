"""Sequences of a token array for next-token prediction."""

import hashlib
import mmap
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class LMDataset(Dataset):
    """Inputs and targets cut one after another from an array of token ids.

    Item i is a pair of int64 tensors (seq_len,): tokens i * seq_len and following, and the tokens that come one later.
    Windows overlap by one token, so that each token but the first is a target once. `DocumentCollate` makes batches of
    them in which documents are kept apart.

    Arguments:
        tokens: (n,) array of integers, such as a memory map; it is read where items ask for it, and never copied.
        seq_len: length of the sequences, at least 1.
        drop_last: leave out the last sequence if it is shorter than the others.

    >>> x, y = LMDataset(np.arange(100, dtype=np.uint16), seq_len=4)[2]
    >>> x.tolist(), y.tolist()
    ([8, 9, 10, 11], [9, 10, 11, 12])
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, drop_last: bool = True) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, found {seq_len}")
        if np.ndim(tokens) != 1:
            raise ValueError(f"tokens must have one dimension, found shape {np.shape(tokens)}")
        self.tokens, self.seq_len = tokens, seq_len
        targets = max(len(tokens) - 1, 0)
        self._targets = targets // seq_len * seq_len if drop_last else targets

    def __len__(self) -> int:
        return -(-self._targets // self.seq_len)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self._window(index).astype(np.int64))
        return window[:-1], window[1:].clone()

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The items of a batch, with one conversion for all of them; DataLoader calls it where it exists."""
        windows = [self._window(index) for index in indices]
        if len({len(window) for window in windows}) > 1:  # one is the shorter last sequence
            return [self[index] for index in indices]
        rows = torch.from_numpy(np.stack(windows).astype(np.int64))
        return list(zip(rows[:, :-1].unbind(), rows[:, 1:].unbind()))

    def _window(self, index: int) -> np.ndarray:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be less than the number of sequences, {len(self)}, found {index}")
        start = index % len(self) * self.seq_len
        return self._array[start : min(start + self.seq_len, self._targets) + 1]

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self._array = np.asarray(tokens)  # a plain array is cut several times as fast as a np.memmap

    def __getstate__(self) -> dict:
        """What goes to a worker that is not forked: of a memory map, only where it is."""
        state = self.__dict__ | {"_array": None}
        if isinstance(self._tokens, np.memmap) and isinstance(self._tokens.base, mmap.mmap):
            tokens = self._tokens
            state["_tokens"] = _Map(str(tokens.filename), tokens.dtype, tokens.offset, tokens.shape)
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        tokens = state["_tokens"]
        self.tokens = tokens.open() if isinstance(tokens, _Map) else tokens


class DocumentCollate:
    """Makes batches (x, y, cu_seqlens) of pairs (x, y), where cu_seqlens tells where documents begin in the rows of x.

    A document begins at an end-of-text token, which so is the start of the text after it, and at the start of a row.
    That token ends the document before as a target, and so each token is a target of its own document. cu_seqlens is
    int32 (documents + 1,): positions in all tokens, one row after the other, and at the end their number.

    Arguments:
        eos: the end-of-text token.

    >>> x = torch.tensor([5, 9, 3, 4]), torch.tensor([6, 7, 8, 9])
    >>> DocumentCollate(eos=9)([(each, each) for each in x])[2].tolist()
    [0, 1, 4, 7, 8]
    """

    def __init__(self, eos: int) -> None:
        self.eos = eos

    def __call__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (torch.stack(each) for each in zip(*pairs, strict=True))
        begins = x == self.eos
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten()
        return x, y, torch.cat([starts, torch.tensor([x.numel()])]).int()


def sample_digest(tokens: np.ndarray, seq_len: int, samples: int = 64) -> str:
    """A hash of seq_len and of some sequences at even distances: most other texts have another, at the same length."""
    digest = hashlib.sha256(f"{seq_len} {len(tokens)}".encode())
    for start in np.linspace(0, max(len(tokens) - seq_len, 0), samples, dtype=np.int64):
        digest.update(np.asarray(tokens[start : start + seq_len], np.int64).tobytes())
    return digest.hexdigest()


class _Map:
    """Where a memory map is."""

    def __init__(self, path: str, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.offset, self.shape = path, dtype, offset, shape

    def open(self) -> np.memmap:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
