"""The mask of attention: the keys that a query row sees are one interval, or two with `key_ranges`."""

from typing import NamedTuple

import torch

from .head_groups import Group
from .options import Features


def outside_window(offset: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Returns where keys lie outside a window. `offset`: position of a row's own key less the position of the key.

    Both ends are inclusive, and a negative side is unbounded.
    """
    outside = torch.zeros_like(offset, dtype=torch.bool)
    if left >= 0:
        outside |= offset > left
    if right >= 0:
        outside |= offset < -right
    return outside


class Mask(NamedTuple):
    """Query row i sees the keys max(0, i + D - left) .. min(seqlen_k - 1, i + D + right), D = seqlen_k - seqlen_q.

    Both ends are inclusive, and the last row is aligned with the last key. A negative side is unbounded; causal
    attention has right = 0. Neither end ever moves back as i grows, so a block of rows sees exactly the keys from
    the first one of its first row to the last one of its last row.
    """

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int

    @property
    def diagonal(self) -> int:
        """D, the position of the key that is aligned with query row 0."""
        return self.seqlen_k - self.seqlen_q

    def first(self, row: int) -> int:
        """The first key that `row` sees."""
        return max(0, row + self.diagonal - self.left) if self.left >= 0 else 0

    def last(self, row: int) -> int:
        """The last key that `row` sees; below `first(row)` if it sees none."""
        unbounded = self.seqlen_k - 1
        return min(unbounded, row + self.diagonal + self.right) if self.right >= 0 else unbounded

    @property
    def is_full(self) -> bool:
        """Whether every row sees every key."""
        return self.first(self.seqlen_q - 1) == 0 and self.last(0) == self.seqlen_k - 1

    @property
    def is_triangle(self) -> bool:
        """Whether there are as many rows as keys, and row i sees the keys 0 .. i."""
        return self.diagonal == 0 and self.right == 0 and self.first(self.seqlen_q - 1) == 0

    def keys(self, rows: range) -> range:
        """The keys that some row of `rows` may see."""
        return range(self.first(rows[0]), self.last(rows[-1]) + 1)

    def hide_(self, scores: torch.Tensor, rows: range, cols: range, value: float) -> None:
        """Write `value` into scores (.., len(rows), len(cols)), in place, where a row does not see a key.

        Columns that every row sees are not touched.
        """
        seen_by_all = range(self.first(rows[-1]), self.last(rows[0]) + 1)
        before = range(cols.start, min(cols.stop, seen_by_all.start))
        after = range(max(cols.start, seen_by_all.stop), cols.stop)
        if before:
            hidden = outside_window(self._offset(rows, before, scores), self.left, -1)
            scores[..., : len(before)].masked_fill_(hidden, value)
        if after:
            hidden = outside_window(self._offset(rows, after, scores), -1, self.right)
            scores[..., -len(after) :].masked_fill_(hidden, value)

    def hidden(self, rows: range, cols: range, like: torch.Tensor) -> torch.Tensor:
        """Where a row does not see a key, bool, what broadcasts to (len(rows), len(cols)), on the device of `like`."""
        return outside_window(self._offset(rows, cols, like), self.left, self.right)

    def distance(self, rows: range, cols: range, like: torch.Tensor) -> torch.Tensor:
        """|i + D - j|, the distance that ALiBi penalises, (len(rows), len(cols)) in the type of `like`."""
        return self._offset(rows, cols, like).abs().to(like.dtype)

    def _offset(self, rows, cols, like):
        """Returns i + D - j, the position of a row's own key less the position of a key."""
        own = torch.arange(rows.start, rows.stop, device=like.device) + self.diagonal
        return own[:, None] - torch.arange(cols.start, cols.stop, device=like.device)


class Intervals:
    """A mask whose intervals differ by batch entry and head, or do not move evenly from row to row.

    Each row of `mask` sees what the mask lets it see and, besides,
        with `causal`           no key after its own, in the entries that are causal
        with `attention_chunk`  the keys of its chunk: C floor((i + D) / C) to that + C - 1
        with `key_ranges`       the keys from start to end - 1, or from start2 to end2 - 1
    """

    def __init__(self, mask: Mask, features: Features, group: Group, device: torch.device) -> None:
        self.mask = mask
        own = torch.arange(mask.seqlen_q, device=device).view(1, 1, -1) + mask.diagonal
        start, end = torch.zeros_like(own), torch.full_like(own, mask.seqlen_k)
        if mask.left >= 0:
            start = start.maximum(own - mask.left)
        if mask.right >= 0:
            end = end.minimum(own + (mask.right + 1))
        if features.causal is not None:
            causal = features.causal[group.part.entries].view(-1, 1, 1) != 0
            end = torch.where(causal, end.minimum(own + 1), end)
        if (size := features.attention_chunk) > 0:
            chunk = own.div(size, rounding_mode="floor") * size
            start, end = start.maximum(chunk), end.minimum(chunk + size)
        self.bounds = [(start, end)]
        if features.key_ranges is not None:
            ranges = _of_group(features.key_ranges, group).long().unbind(-1)
            self.bounds = [(start.maximum(a), end.minimum(b)) for a, b in zip(ranges[::2], ranges[1::2], strict=True)]
        self.bounds = [(group.by_pair(a), group.by_pair(b)) for a, b in self.bounds]

    def keys(self, rows: range) -> range:
        """The keys that some row of `rows` may see."""
        seen = []
        for start, end in self._bounds(rows):
            some = start < end
            if some.any():
                start, end = start.expand_as(some), end.expand_as(some)
                seen.append((int(start[some].min()), int(end[some].max())))
        return range(min(start for start, _ in seen), max(end for _, end in seen)) if seen else range(0)

    def hide_(self, scores: torch.Tensor, rows: range, cols: range, value: float) -> None:
        """As `Mask.hide_`, with scores (pairs, query heads per key head, len(rows), len(cols))."""
        scores.masked_fill_(self.hidden(rows, cols, scores), value)

    def hidden(self, rows: range, cols: range, like: torch.Tensor) -> torch.Tensor:
        """As `Mask.hidden`, what broadcasts to (pairs, query heads per key head, len(rows), len(cols))."""
        key = torch.arange(cols.start, cols.stop, device=like.device)
        hidden = torch.ones((), dtype=torch.bool, device=like.device)
        for start, end in self._bounds(rows):
            hidden = hidden & ((key < start[..., None]) | (key >= end[..., None]))
        return hidden

    def distance(self, rows: range, cols: range, like: torch.Tensor) -> torch.Tensor:
        """As `Mask.distance`."""
        return self.mask.distance(rows, cols, like)

    def _bounds(self, rows):
        return [(start[..., rows.start : rows.stop], end[..., rows.start : rows.stop]) for start, end in self.bounds]


def mask_of(mask: Mask, features: Features, group: Group, device: torch.device) -> Mask | Intervals:
    """Returns the mask of a group: `mask` itself where no feature changes it."""
    changed = features.key_ranges is not None or features.causal is not None or features.attention_chunk > 0
    return Intervals(mask, features, group, device) if changed else mask


def _of_group(ranges, group):
    """Returns ranges (batch or 1, heads or 1, rows, 2 or 4) of the group's entries, heads and rows."""
    batch, heads = ranges.shape[:2]
    if heads > 1:
        ranges = ranges.unflatten(1, (group.heads_k, -1))[:, group.heads].flatten(1, 2)
    start = group.part.q[1].start
    entries = group.part.entries if batch > 1 else slice(0, 1)
    return ranges[entries, :, start : start + group.part.seqlen_q]
