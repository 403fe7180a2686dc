"""The transfers of context parallelism: rows of other ranks and back their sums, and heads for tokens.

All are made of three collectives of torch.distributed, which every rank of a group enters in the same order with sizes
that all ranks have computed from the same plan.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._ops import collectives


class Rows:
    """Some rows of a tensor, in an order: slices of it if they are a few runs, which copy faster, or an index.

    index: int64 (count,) on the CPU, no row twice. device: where the tensors are.
    """

    _MOST_RUNS = 16

    def __init__(self, index: Tensor, device: torch.device) -> None:
        borders = [0, *((index.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(index)]
        runs = [index[begin:end] for begin, end in itertools.pairwise(borders) if begin < end]
        self._runs, self._lengths, self._index = [], [], None
        if len(runs) > self._MOST_RUNS:
            self._index = index.to(device)
        else:
            self._runs = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
            self._lengths = list(map(len, runs))

    def of(self, x: Tensor) -> Tensor:
        """These rows of x: a view of it if they are one run."""
        if self._index is not None:
            return x.index_select(0, self._index)
        return x[self._runs[0]] if len(self._runs) == 1 else torch.cat([x[run] for run in self._runs] or [x[:0]])

    def copy_to(self, target: Tensor, rows: Tensor) -> None:
        """Write rows to these of target."""
        if self._index is not None:
            target.index_copy_(0, self._index, rows)
        else:
            for run, part in zip(self._runs, rows.split(self._lengths), strict=True):
                target[run] = part

    def add_to(self, target: Tensor, rows: Tensor) -> None:
        """Add rows to these of target."""
        if self._index is not None:
            target.index_add_(0, self._index, rows)
        else:
            for run, part in zip(self._runs, rows.split(self._lengths), strict=True):
                target[run] += part


class RowExchange:
    """Fetches the rows of a packed row that a rank needs, in order of their positions, and gives back sums for them.

    group: the ranks. positions: for each rank, the positions of its rows (CPU, ascending). needed: for each rank, which
    positions it needs (CPU, bool, one for each position). device: where the rows are.

    Where ranks need most of the rows, all ranks get all of them (all-gather); else each gets what it needs
    (all-to-all). Sums go the same way back: reduce-scatter, or all-to-all and additions in order of the ranks, to the
    sums that stay.

    fetched: the positions of the rows that `fetch` gets (CPU). num_sums: how many rows of sums `give_back` takes: one
    for each of these, and perhaps one more, which is zeros.
    """

    def __init__(
        self, group: Any, rank: int, positions: Sequence[Tensor], needed: Sequence[Tensor], device: torch.device
    ) -> None:
        self._group, self._rows = group, len(positions[rank])
        self._world = len(positions)
        self.fetched = needed[rank].nonzero()[:, 0]
        self.num_sums = len(self.fetched)
        wanted = sum(int(each.sum()) for each in needed)
        self._gathers = 4 * wanted >= 3 * self._world * len(needed[rank]) or self._world == 1
        if self._gathers:
            self._order_gathered(positions, device)
        else:
            self._divide(rank, positions, needed, device)

    def _order_gathered(self, positions, device):
        """Find where each fetched row is in the rows of all ranks, one rank after the other, each with padding."""
        self._most = max(map(len, positions))
        arriving = self._world * self._most
        slots = torch.zeros(sum(map(len, positions)), dtype=torch.int64)
        for peer, own in enumerate(positions):
            slots[own] = torch.arange(len(own)) + peer * self._most
        order = slots[self.fetched]
        self._slots = self._homes = None
        if not torch.equal(order, torch.arange(arriving)):
            homes = torch.full((arriving,), len(order))  # of each row that arrives, the row that is fetched from it
            homes[order] = torch.arange(len(order))
            self._slots, self._homes = order.to(device), homes.to(device)
            self.num_sums += 1

    def _divide(self, rank, positions, needed, device):
        """Find which rows stay, which leave, and where those of each rank are among the fetched ones."""
        slots = needed[rank].cumsum(0) - 1
        parts = [slots[own[needed[rank][own]]] for own in positions]
        leaving = [needed[peer][positions[rank]].nonzero()[:, 0] for peer in range(self._world)]
        self._staying, self._staying_at = Rows(leaving[rank], device), Rows(parts[rank], device)
        self._all_stay = len(leaving[rank]) == self._rows
        leaving[rank] = parts[rank] = slots[:0]
        self._counts_in, self._counts_out = [list(map(len, each)) for each in (parts, leaving)]
        self._arriving_at, self._leaving_all = Rows(torch.cat(parts), device), Rows(torch.cat(leaving), device)
        self._leaving = [Rows(each, device) for each in leaving]
        # All ranks know whether any needs a row of another one.
        self._moves = any(int(each.sum()) > int(each[own].sum()) for each, own in zip(needed, positions, strict=True))

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to fetch rows of x (rows, width). Returns a function that waits for (fetched rows, width)."""
        if self._world == 1:
            return lambda: x
        if self._gathers:
            if self._rows < self._most:
                x = torch.cat([x, x.new_zeros(self._most - self._rows, x.shape[1])])
            gathered, work = collectives.gather_rows(x, self._group, async_op=True)

            def wait():
                work.wait()
                return gathered if self._slots is None else gathered.index_select(0, self._slots)

            return wait

        arrived, wait_for_others = self._exchange(self._leaving_all.of(x), self._counts_in, self._counts_out)

        def wait_and_place():
            fetched = x.new_empty(len(self.fetched), x.shape[1])
            self._staying_at.copy_to(fetched, self._staying.of(x))
            wait_for_others()
            self._arriving_at.copy_to(fetched, arrived)
            return fetched

        return wait_and_place

    def give_back(self, sums: Tensor) -> Callable[[], Tensor]:
        """Start to send sums (num_sums, width) to the ranks that have the rows. Returns a function as `fetch` does.

        What it returns is (rows, width), for each row the sum over all ranks. It may be a part of sums.
        """
        if self._world == 1:
            return lambda: sums
        if self._gathers:
            if self._homes is not None:
                sums = sums.index_select(0, self._homes)
            scattered, work = collectives.scatter_rows(sums, self._group, async_op=True)

            def wait():
                work.wait()
                return scattered[: self._rows]

            return wait

        arrived, wait_for_others = self._exchange(self._arriving_at.of(sums), self._counts_out, self._counts_in)
        total = self._staying_at.of(sums)
        if not self._all_stay:
            some, total = total, sums.new_zeros(self._rows, sums.shape[1])
            self._staying.copy_to(total, some)

        def wait_and_add():
            wait_for_others()
            for rows, part in zip(self._leaving, arrived.split(self._counts_out), strict=True):
                rows.add_to(total, part)  # no row twice in one part: the order of additions is that of the ranks
            return total

        return wait_and_add

    def _exchange(self, sent, counts_in, counts_out):
        """Start an all-to-all. Returns (what arrives, a function that waits for it)."""
        arrived = sent.new_empty(sum(counts_in), sent.shape[1])
        if not self._moves:
            return arrived, lambda: None
        return arrived, _all_to_all(arrived, sent, counts_in, counts_out, self._group).wait


class ZigzagExchange:
    """The same for equal chunks in zigzag, 2 P of them on P ranks, of which every row sees all rows before it.

    The rows of an all-gather come in order of the ranks: those of the first chunks of all ranks (heads) are sorted,
    those of the second ones (tails) are in order of falling positions. So each has an all-gather of its own, to a
    buffer in which all that a chunk sees is one slice, with its own rows at the end. Nothing is moved afterwards:

        tails of ranks 0 .. P-1  |  heads of ranks 0 .. P-1  |  the tail of this rank again
                                    [----------------]          what the head of rank r sees: heads 0 .. r
                 [---------------------------------------------]   what its tail sees: tails r+1 .. P-1, heads, its own

    The order of the others does not matter to attention. Sums lie in the same places, and a reduce-scatter of each of
    the first two parts takes them home.

    chunk: the rows of a chunk. fetched, num_sums: as in RowExchange. seen_by_tail, seen_by_head: the slices.
    """

    def __init__(self, group: Any, rank: int, world_size: int, chunk: int) -> None:
        self._group, self._rank, self._world, self._chunk = group, rank, world_size, chunk
        tails = range(2 * world_size - 1, world_size - 1, -1)
        chunks = torch.tensor([*tails, *range(world_size), tails[rank]])
        self.fetched = (chunks[:, None] * chunk + torch.arange(chunk)).flatten()
        self.num_sums = len(self.fetched)
        self.seen_by_tail = slice((rank + 1) * chunk, self.num_sums)
        self.seen_by_head = slice(world_size * chunk, (world_size + rank + 1) * chunk)

    def _parts(self, x):
        """Cut a buffer into its three parts: tails of all ranks, heads of all ranks, the tail of this rank again."""
        return x.split([self._world * self._chunk, self._world * self._chunk, self._chunk])

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """As that of RowExchange."""
        arrived = x.new_empty(self.num_sums, x.shape[1])
        head, tail = x.split(self._chunk)
        tails, heads, own_tail = self._parts(arrived)
        works = [collectives.gather_into(*each, self._group) for each in ((heads, head), (tails, tail))]

        def wait():
            own_tail.copy_(tail)
            for work in works:
                work.wait()
            return arrived

        return wait

    def give_back(self, sums: Tensor) -> Callable[[], Tensor]:
        """As that of RowExchange.

        All sums leave together: those of tails are complete before, but not at the same time on all ranks, and a
        transfer that waits for other ranks occupies multiprocessors.
        """
        arrived = sums.new_empty(2 * self._chunk, sums.shape[1])
        head, tail = arrived.split(self._chunk)
        tails, heads, own_tail = self._parts(sums)
        tails.split(self._chunk)[self._rank].copy_(own_tail)
        works = [collectives.scatter_into(*each, self._group) for each in ((tail, tails), (head, heads))]

        def wait():
            for work in works:
                work.wait()
            return arrived

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
