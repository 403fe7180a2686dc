"""Groups of heads and rows that are computed together, and their layout for batched products.

The query heads that share a key head are folded into the rows. So the q of a group is (pairs, query heads per key head
* rows, head_dim) and its k is (pairs, keys, head_dim), where a pair is a batch entry with a key head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .batch_layout import Part

# Chosen by measurements on a CPU with 1 MiB of L2 per core: the forward is slower with many more or many fewer scores
# at a time. With half the rows the backward is slower, although short causal problems are faster.
_BLOCK_SCORES = 2**19
_BLOCK_ROWS = 256
_BLOCK_COLS = 512
_GROUP_KEYS = 2**21  # elements of k that are held in fp32 at a time


class Group(NamedTuple):
    """Pairs of a batch entry and a key head that are computed together, in blocks of block_rows x block_cols scores.

    Tensors are (batch, seqlen, heads or heads_k, any last dimension); the blocks that are loaded and stored are folded.
    """

    part: Part
    heads: slice  # key heads
    heads_k: int  # the number of all key heads
    block_rows: int
    block_cols: int

    def load_rows(self, x: torch.Tensor, rows: range, dtype: torch.dtype) -> torch.Tensor:
        return _fold(self._rows(x, rows)).to(dtype).contiguous()

    def store_rows(self, x: torch.Tensor, rows: range, block: torch.Tensor) -> None:
        target = self._rows(x, rows)
        target.copy_(block.view(target.shape))

    def load_keys(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _fold(self._keys(x).to(dtype))

    def store_keys(self, x: torch.Tensor, block: torch.Tensor) -> None:
        target = self._keys(x)
        target.copy_(block.view(target.shape))

    def per_head(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (heads,) or (batch, heads) as (pairs, query heads per key head)."""
        x = x[self.part.entries] if x.dim() == 2 else x.expand(self.part.num_entries, -1)
        return x.unflatten(1, (self.heads_k, -1))[:, self.heads].flatten(0, 1)

    def by_pair(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (entries or 1, query heads of the group or 1, ..) as (pairs, query heads per key head or 1, ..)."""
        num_heads = self.heads.stop - self.heads.start
        x = x.expand(self.part.num_entries, *x.shape[1:])
        if x.shape[1] == 1:
            x = x[:, None].expand(-1, num_heads, *x.shape[1:])
        else:
            x = x.unflatten(1, (num_heads, -1))
        return x.flatten(0, 1)

    def row_blocks(self) -> list[range]:
        return _blocks(range(self.part.seqlen_q), self.block_rows)

    def col_blocks(self, keys: range) -> list[range]:
        return _blocks(keys, self.block_cols)

    def _rows(self, x: torch.Tensor, rows: range) -> torch.Tensor:
        x = self.part.rows(x)[:, rows.start : rows.stop].unflatten(2, (self.heads_k, -1))
        return x[:, :, self.heads].permute(0, 2, 3, 1, 4)

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.keys(x)[:, :, self.heads].transpose(1, 2)


def groups(q: torch.Tensor, k: torch.Tensor, parts: list[Part], without_keys: bool = False) -> Iterator[Group]:
    """Yields the groups of all parts that have rows and, unless `without_keys`, keys."""
    heads, (heads_k, head_dim) = q.shape[2], k.shape[2:]
    for part in parts:
        if part.seqlen_q and (part.seqlen_k or without_keys) and heads:
            yield from _groups_of(part, heads_k, heads // heads_k, head_dim)


def _groups_of(part: Part, heads_k: int, sharing: int, head_dim: int) -> Iterator[Group]:
    """Yields the groups of one part, of a size that fits the CPU's caches; `sharing` query heads share a key head."""
    rows = min(part.seqlen_q, max(32, min(_BLOCK_ROWS, 2 * _BLOCK_ROWS // sharing)))
    by_scores = _BLOCK_SCORES // (sharing * rows * max(1, min(part.seqlen_k, _BLOCK_COLS)))
    by_keys = _GROUP_KEYS // max(1, part.seqlen_k * head_dim)
    pairs = max(1, min(by_scores, by_keys))
    for sub in part.split(max(1, pairs // heads_k)):
        for heads in _blocks(range(heads_k), pairs):
            cols = _BLOCK_SCORES // (sharing * rows * len(heads) * sub.num_entries)
            yield Group(sub, slice(heads.start, heads.stop), heads_k, rows, max(_BLOCK_COLS, cols))


def _fold(x: torch.Tensor) -> torch.Tensor:
    """Returns x (entries, key heads, .., last) as (pairs, .., last), a view if possible."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


def _blocks(span: range, size: int) -> list[range]:
    return [range(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]
