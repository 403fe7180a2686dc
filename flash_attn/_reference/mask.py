"""The mask of attention: the keys that a query row sees are one interval."""

from typing import NamedTuple

import torch


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

    def distance(self, rows: range, cols: range, like: torch.Tensor) -> torch.Tensor:
        """|i + D - j|, the distance that ALiBi penalises, (len(rows), len(cols)) in the type of `like`."""
        return self._offset(rows, cols, like).abs().to(like.dtype)

    def _offset(self, rows, cols, like):
        """Returns i + D - j, the position of a row's own key less the position of a key."""
        own = torch.arange(rows.start, rows.stop, device=like.device) + self.diagonal
        return own[:, None] - torch.arange(cols.start, cols.stop, device=like.device)
