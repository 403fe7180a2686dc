"""The additive bias of one group: its blocks, and the gradient summed over what it was broadcast along."""

from collections.abc import Sequence

from torch import Tensor

from flash_attn._errors import ArgumentError

from .head_groups import Group


class Bias:
    """A bias (batch1, batch2, heads, rows, keys), each size possibly 1: added to scores, or, as bool, true to keep.

    Entry e of the batch has the bias [e // n, e % n], n = batch2, or batch / batch1 where batch2 is 1. Rows count as in
    q, so those of packed tokens through all entries; keys count from the first one of the entry.
    """

    def __init__(self, bias: Tensor, group: Group, batch: int, heads: int) -> None:
        part, (batch1, batch2, heads_bias, _, keys) = group.part, bias.shape
        if keys not in (1, part.seqlen_k) and keys < part.seqlen_k:
            raise ArgumentError(f"attn_bias must have 1 key or as many as an entry, {part.seqlen_k}, found {keys}")
        self.bias, self.group = bias, group
        count = batch2 if batch2 > 1 else batch // batch1
        entries = range(part.entries.start, part.entries.stop) if batch1 * batch2 > 1 else range(1)
        self.first = [e // count if batch1 > 1 else 0 for e in entries]
        self.second = [e % count if batch2 > 1 else 0 for e in entries]
        sharing = heads // group.heads_k
        own_heads = slice(group.heads.start * sharing, group.heads.stop * sharing)
        self.heads = own_heads if heads_bias > 1 else slice(0, 1)

    def block(self, rows: range, cols: range) -> Tensor:
        """Returns the bias of a block, broadcasting to (pairs, query heads per key head, len(rows), len(cols))."""
        block = self._at(self.bias, rows, cols)[self.first, self.second]
        return self.group.by_pair(block)

    def add_gradient_(self, total: Tensor, ds: Tensor, rows: range, cols: range) -> None:
        """Add the gradient of a block, (pairs, query heads per key head, len(rows), len(cols)), to that of the bias."""
        ds = ds.unflatten(0, (self.group.part.num_entries, -1)).flatten(1, 2)
        whole = [1 + dim for dim, size in enumerate(self.bias.shape[2:]) if size == 1]
        whole = whole if self.entries_differ else [0, *whole]
        if whole:
            ds = ds.sum(whole, keepdim=True)
        target = self._at(total, rows, cols)
        for first, second, gradient in zip(self.first, self.second, ds, strict=True):
            target[first, second] += gradient

    @property
    def entries_differ(self) -> bool:
        return self.bias.shape[0] * self.bias.shape[1] > 1

    def _at(self, x: Tensor, rows: range, cols: range) -> Tensor:
        start = self.group.part.q[1].start
        spans: Sequence[range] = range(start + rows.start, start + rows.stop), cols
        places = [
            slice(x.start, x.stop) if size > 1 else slice(0, 1) for x, size in zip(spans, x.shape[3:], strict=True)
        ]
        index = (slice(None), slice(None), self.heads, *places)
        return x[index]
