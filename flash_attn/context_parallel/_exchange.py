"""The transfers of context parallelism: rows of other ranks and back their sums, and heads for tokens.

All are made of three collectives of torch.distributed, which every rank of a group enters in the same order with sizes
that all ranks have computed from the same plan.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._ops import collectives


class RowExchange:
    """Fetches the rows of a packed row that a rank needs, in order of their positions, and gives back sums for them.

    group: the ranks. positions: for each rank, the positions of its rows (CPU, ascending). needed: for each rank, which
    positions it needs (CPU, bool, one for each position). device: where the rows are.

    Where ranks need most of the rows, all ranks get all of them (all-gather); else each gets what it needs
    (all-to-all). Sums go the same way back: reduce-scatter, or all-to-all and additions in order of the ranks.
    """

    def __init__(
        self, group: Any, rank: int, positions: Sequence[Tensor], needed: Sequence[Tensor], device: torch.device
    ) -> None:
        self._group, self._rows = group, len(positions[rank])
        self._world = len(positions)
        total = len(needed[rank])
        wanted = sum(int(each.sum()) for each in needed)
        self._gathers = 4 * wanted >= 3 * self._world * total or self._world == 1
        slots = torch.zeros(total, dtype=torch.int64)  # where each position is in the buffer that arrives
        self._most = max(map(len, positions))
        if self._gathers:
            for peer, own in enumerate(positions):
                slots[own] = torch.arange(len(own)) + peer * self._most
        else:
            arriving = [own[needed[rank][own]] for own in positions]
            leaving = [needed[peer][positions[rank]].nonzero()[:, 0] for peer in range(self._world)]
            order = torch.cat(arriving)
            slots[order] = torch.arange(len(order))
            self._counts_in, self._counts_out = [list(map(len, each)) for each in (arriving, leaving)]
            self._leaving = [each.to(device) for each in leaving]
            self._leaving_all = torch.cat(leaving).to(device)
        order = slots[needed[rank]]
        self.num_needed = len(order)
        self._slots = None if torch.equal(order, torch.arange(self._arriving())) else order.to(device)

    def _arriving(self) -> int:
        return self._world * self._most if self._gathers else sum(self._counts_in)

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to fetch rows of x (rows, width). Returns a function that waits for (needed rows, width)."""
        if self._world == 1:
            arrived, work = x, None
        elif self._gathers:
            if self._rows < self._most:
                x = torch.cat([x, x.new_zeros(self._most - self._rows, x.shape[1])])
            arrived, work = collectives.gather_rows(x, self._group, async_op=True)
        else:
            sent = x.index_select(0, self._leaving_all)
            arrived = x.new_empty(self._arriving(), x.shape[1])
            work = _all_to_all(arrived, sent, self._counts_in, self._counts_out, self._group)

        def wait():
            if work is not None:
                work.wait()
            return arrived if self._slots is None else arrived.index_select(0, self._slots)

        return wait

    def give_back(self, sums: Tensor) -> Callable[[], Tensor]:
        """Start to send sums (needed rows, width) to the ranks that have the rows. Returns a function as `fetch` does.

        What it returns is (rows, width), for each row the sum over all ranks.
        """
        if self._slots is not None:
            width = sums.shape[1]
            sums = sums.new_zeros(self._arriving(), width).index_copy_(0, self._slots, sums)
        if self._world == 1:
            return lambda: sums
        if self._gathers:
            arrived, work = collectives.scatter_rows(sums, self._group, async_op=True)
        else:
            arrived = sums.new_empty(len(self._leaving_all), sums.shape[1])
            work = _all_to_all(arrived, sums, self._counts_out, self._counts_in, self._group)

        def wait():
            work.wait()
            if self._gathers:
                return arrived[: self._rows]
            total = sums.new_zeros(self._rows, sums.shape[1])
            for rows, part in zip(self._leaving, arrived.split(self._counts_out), strict=True):
                total.index_add_(0, rows, part)  # no row twice in one part: the order of additions is that of the ranks
            return total

        return wait


class HeadExchange:
    """Exchanges some tokens of all heads for all tokens of some heads (Ulysses), and back.

    positions: for each rank, the positions of its rows (CPU), -1 for rows of padding, which stay at home. heads: for
    each rank, the heads that it gets (CPU); a head that several ranks get has the sum of what they send back.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        positions: Sequence[Tensor],
        heads: Sequence[Tensor],
        num_heads: int,
        device: torch.device,
    ) -> None:
        self._group, self._world = group, len(positions)
        self.num_heads, self.own_heads = num_heads, len(heads[rank])
        self._tokens = list(map(len, positions))
        self._own = self._tokens[rank]
        self._heads = list(map(len, heads))
        every_head, every_row = torch.cat(list(heads)), torch.cat(list(positions))
        in_order = torch.equal(every_head, torch.arange(num_heads))
        self._sent_heads = None if in_order else every_head.to(device)
        self._head_of_sent = every_head.tolist()
        kept = (every_row >= 0).nonzero()[:, 0]
        order = kept[every_row[kept].argsort()]  # arriving row of each position
        self.total = len(order)
        in_order = torch.equal(order, torch.arange(len(every_row)))
        self._order = None if in_order else order.to(device)

    def to_heads(self, x: Tensor) -> Tensor:
        """x (batch, rows, heads, width) of this rank's rows to (batch, positions, own heads, width)."""
        batch, _, _, width = x.shape
        if self._sent_heads is not None:
            x = x.index_select(2, self._sent_heads)
        sent = torch.cat([part.transpose(0, 1).reshape(-1) for part in x.split(self._heads, 2)])
        size = batch * width
        arrived = x.new_empty(sum(self._tokens), batch, self.own_heads, width)
        counts_in = [tokens * self.own_heads * size for tokens in self._tokens]
        counts_out = [self._own * heads * size for heads in self._heads]
        self._transfer(arrived.view(-1), sent, counts_in, counts_out)
        if self._order is not None:
            arrived = arrived.index_select(0, self._order)
        return arrived.transpose(0, 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """x (batch, positions, own heads, width) to (batch, rows, heads, width) of this rank's rows, 0 in padding."""
        batch, _, _, width = x.shape
        rows = x.transpose(0, 1)
        if self._order is not None:
            rows = x.new_zeros(sum(self._tokens), *rows.shape[1:]).index_copy_(0, self._order, rows)
        size = batch * width
        counts_out = [tokens * self.own_heads * size for tokens in self._tokens]
        counts_in = [self._own * heads * size for heads in self._heads]
        arrived = x.new_empty(sum(counts_in))
        self._transfer(arrived, rows.reshape(-1), counts_in, counts_out)
        parts = [
            part.view(self._own, batch, heads, width)
            for part, heads in zip(arrived.split(counts_in), self._heads, strict=True)
        ]
        result = torch.cat(parts, 2).transpose(0, 1)
        if self._sent_heads is None:
            return result
        total = result.new_zeros(batch, self._own, self.num_heads, width, dtype=torch.float32)
        for i, head in enumerate(self._head_of_sent):
            total[:, :, head] += result[:, :, i]
        return total.to(x.dtype)

    def _transfer(self, arrived, sent, counts_in, counts_out):
        if self._world == 1:
            arrived.copy_(sent)
        else:
            _all_to_all(arrived, sent, counts_in, counts_out, self._group, async_op=False)


def _all_to_all(arrived, sent, counts_in, counts_out, group, async_op=True):
    return dist.all_to_all_single(arrived, sent, counts_in, counts_out, group=group, async_op=async_op)
