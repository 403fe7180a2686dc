"""Groups of heads and rows that are computed together, and their layout for batched products.

The query heads that share a key head are folded into the rows. So the q of a group is (pairs, query heads per key head
* rows, head_dim) and its k is (pairs, keys, head_dim), where a pair is a batch entry with a key head.

`aligned_groups` are for results that must not depend on the batch, nor on how a sequence was cut into calls. A group is
one entry, and all its blocks have one size and lie at multiples of it, counted by keys from the first one of the entry;
what is missing of a block at the ends is zeros. So the row of a token always has the same place in a block of the same
shape, beside the same keys, and every operation on it is the same: no bit can differ, however a product or a sum is
computed, as long as its shape alone decides that. Blocks that a row sees nothing of leave its sums as they are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .batch_layout import Part

# Chosen by measurements on a CPU with 1 MiB of L2 per core: the forward is slower with many more or many fewer scores
# at a time. With half the rows the backward is slower, although short causal problems are faster.
_BLOCK_SCORES = 2**19
_BLOCK_ROWS = 256
_BLOCK_COLS = 512
_GROUP_KEYS = 2**21  # elements of k that are held in fp32 at a time

_ALIGNED_ROWS, _ALIGNED_COLS = 16, 64
_NONE = range(0)
_ONE_THREAD = 2**15 - 1  # elements of which torch divides no elementwise operation or sum among threads


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

    def per_key_head(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (batch, heads_k) as (pairs, 1, 1)."""
        return x[self.part.entries][:, self.heads].reshape(-1, 1, 1)

    def by_pair(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (entries or 1, query heads of the group or 1, ..) as (pairs, query heads per key head or 1, ..)."""
        num_heads = self.heads.stop - self.heads.start
        x = x.expand(self.part.num_entries, *x.shape[1:])
        if x.shape[1] == 1:
            x = x[:, None].expand(-1, num_heads, *x.shape[1:])
        else:
            x = x.unflatten(1, (num_heads, -1))
        return x.flatten(0, 1)

    def there(self, rows: range, cols: range = _NONE) -> tuple[range, range]:
        """The rows and keys of a block that there are."""
        return rows, cols

    def within(self, block: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
        """Returns what a block (.., len(rows), len(cols)) holds of rows and keys that there are, a view."""
        return block

    def whole(self, part: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
        """Returns a block (.., len(rows), len(cols)) with zeros beside the rows and keys that there are."""
        return part

    def row_blocks(self) -> list[range]:
        return _blocks(range(self.part.seqlen_q), self.block_rows)

    def col_blocks(self, keys: range) -> list[range]:
        return _blocks(keys, self.block_cols)

    def _rows(self, x: torch.Tensor, rows: range) -> torch.Tensor:
        x = self.part.rows(x)[:, rows.start : rows.stop].unflatten(2, (self.heads_k, -1))
        return x[:, :, self.heads].permute(0, 2, 3, 1, 4)

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.keys(x)[:, :, self.heads].transpose(1, 2)


class AlignedGroup(Group):
    """A group of one entry in blocks of one size, which begin at multiples of it; see the top of this file."""

    def load_rows(self, x: torch.Tensor, rows: range, dtype: torch.dtype) -> torch.Tensor:
        there, _ = self.there(rows)
        loaded = self._rows(x, there).flatten(0, 1)
        block = x.new_zeros((*loaded.shape[:2], len(rows), loaded.shape[-1]), dtype=dtype)
        block[:, :, there.start - rows.start :][:, :, : len(there)] = loaded
        return block.flatten(1, 2)

    def store_rows(self, x: torch.Tensor, rows: range, block: torch.Tensor) -> None:
        there, _ = self.there(rows)
        target = self._rows(x, there)
        block = block.view(*target.shape[:3], len(rows), block.shape[-1])
        target.copy_(block[..., there.start - rows.start :, :][..., : len(there), :])

    def load_keys(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        keys = _fold(self._keys(x))
        missing = -keys.shape[1] % self.block_cols
        loaded = x.new_zeros((keys.shape[0], keys.shape[1] + missing, keys.shape[2]), dtype=dtype)
        loaded[:, : keys.shape[1]] = keys
        return loaded

    def there(self, rows: range, cols: range = _NONE) -> tuple[range, range]:
        keys = range(cols.start, min(cols.stop, self.part.seqlen_k))
        return range(max(rows.start, 0), min(rows.stop, self.part.seqlen_q)), keys

    def within(self, block: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
        there, keys = self.there(rows, cols)
        return block[..., there.start - rows.start :, :][..., : len(there), : len(keys)]

    def whole(self, part: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
        there, keys = self.there(rows, cols)
        return F.pad(part, (0, len(cols) - len(keys), there.start - rows.start, rows.stop - there.stop))

    def row_blocks(self) -> list[range]:
        shift = self.part.seqlen_k - self.part.seqlen_q  # row i has the place of key i + shift
        return _aligned(range(shift, self.part.seqlen_k), self.block_rows, shift)

    def col_blocks(self, keys: range) -> list[range]:
        return _aligned(keys, self.block_cols)


def groups(q: torch.Tensor, k: torch.Tensor, parts: list[Part], without_keys: bool = False) -> Iterator[Group]:
    """Yields the groups of all parts that have rows and, unless `without_keys`, keys."""
    heads, (heads_k, head_dim) = q.shape[2], k.shape[2:]
    for part in parts:
        if part.seqlen_q and (part.seqlen_k or without_keys) and heads:
            yield from _groups_of(part, heads_k, heads // heads_k, head_dim)


def aligned_groups(
    q: torch.Tensor, k: torch.Tensor, parts: list[Part], without_keys: bool = False
) -> Iterator[AlignedGroup]:
    """Yields the same, each of one entry. Only the numbers of heads decide the sizes of groups and blocks."""
    heads, heads_k = q.shape[2], k.shape[2]
    if not heads:
        return
    sharing, rows = heads // heads_k, _ALIGNED_ROWS
    while rows > 1 and sharing * rows * _ALIGNED_COLS > _ONE_THREAD:
        rows //= 2
    pairs = max(1, _ONE_THREAD // (sharing * rows * _ALIGNED_COLS))
    for part in parts:
        if part.seqlen_q and (part.seqlen_k or without_keys):
            for entry in part.split(1):
                for some in _blocks(range(heads_k), pairs):
                    yield AlignedGroup(entry, slice(some.start, some.stop), heads_k, rows, _ALIGNED_COLS)


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


def _aligned(span: range, size: int, shift: int = 0) -> list[range]:
    """Returns blocks of `size` that cover span and begin at multiples of it, all less `shift`."""
    starts = range(span.start // size * size, span.stop, size)
    return [range(start - shift, start - shift + size) for start in starts]
