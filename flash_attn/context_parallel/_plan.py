"""How the tokens of a packed row are divided among ranks, and all that the layers of a model need to know of it."""

import bisect
import functools
import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _torch_private
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks
from flash_attn.context_parallel import _layout
from flash_attn.context_parallel._exchange import HeadExchange, RowExchange, ZigzagExchange
from flash_attn.utils.distributed import all_gather, device_of, host_group

METHODS = ("gather", "ulysses", "usp")
_PLANS: "weakref.WeakValueDictionary[int, Plan]" = weakref.WeakValueDictionary()  # by the number in `Plan.handle`
_NUMBERS = itertools.count()
_HOST = torch.device("cpu")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_host(method: _Method) -> _Method:
    """Decorate a method so that the tensors that it makes are on the CPU, whatever torch's default device is."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        with _HOST:
            return method(*args, **kwargs)

    return cast(_Method, wrapper)


class Launch(NamedTuple):
    """One call of attention: which rows of this rank see which of the keys that it fetched."""

    rows: slice
    keys: slice
    window: tuple[int, int]
    lengths: dict[str, Any]  # of its entries, if there are several, by the names of attention's arguments
    key_ranges: Tensor | None  # int32 (1, 1, rows, 2), if rows are not neighbours in the packed row


class Schedule(NamedTuple):
    """The launches of a rank, that with the most keys first, and the exchange that fetches their keys."""

    launches: list[Launch]
    exchange: RowExchange | ZigzagExchange


class Plan:
    """How one packed row of documents is divided among the ranks of a group. It serves all layers and both directions.

    Make it once for each batch, on all ranks with the same arguments: the ranks compare them, and where they differ,
    all raise. No layer and no kernel call synchronises with the host. Keep it until the backward has run.

    Arguments:
        seqlens: the lengths of the documents of the whole row, in order: an int for one document, a list or a CPU
            integer tensor. Lengths may be 0 and need not be divisible by anything. They must be on the host, where the
            data loader has them: reading them from a GPU would wait for it in each step.
        group: a ProcessGroup, or a DeviceMesh of one dimension; for "usp" one of two, named ("ring", "ulysses").
        layout: "zigzag": chunk r and, from the end, chunk r, balanced for one causal document; "balanced": eight
            chunks each, so that all ranks have the same work with documents of any lengths; "contiguous": one chunk
            each, the best with sliding windows; "striped": token i on rank i % ranks. "auto": "contiguous" for
            method="ulysses", and for one document with a window_size of at most an eighth of a rank's tokens; else
            "zigzag" for one document and "balanced" for several.
        method: "gather": each rank fetches the keys that its rows see. "ulysses": ranks exchange tokens for heads, and
            each computes some heads of the whole row; it needs at least as many query heads as ranks. "usp": both:
            ranks of a "ulysses" group exchange tokens for heads, and then fetch keys over "ring": for links of two
            speeds, with "ulysses" on the fast ones. "auto": "usp" for a mesh of two dimensions; with `heads`, the
            faster one of "gather" and "ulysses"; else "gather", which takes any number of heads. It is chosen here
            and not in a call, since tokens are divided by it, and so that all layers have the same.
        granularity: borders of chunks are multiples of it, as far as chunks are long enough. Blocks of keys then start
            where they start on one GPU. 1 divides as evenly as possible.
        pad_to: the number of tokens that every rank gets, the last of which are padding; None: no padding, and ranks
            may differ by as much as borders have moved.
        head_groups: "gather" fetches key heads in so many groups, which must divide their number, each while the one
            before is computed: for links between hosts. It holds two of them, and in the backward the sums of as many.
            None: one after the other, in as few groups as have at most 1 GiB of keys and values each, which is faster
            within a host; but with "usp" as if it were 4, where groups are large. Without effect with "ulysses".
        each_document: divide each document by itself in this layout, as Megatron and ring-flash-attention do, and not
            the row. With "zigzag", attention is then called once for each document. Not with "striped".
        heads, heads_k: the numbers of query and of key heads in calls of attention, for method="auto", which needs
            them to compare what would be sent: see `docs/guides/context_parallel.md`. heads_k=None: as heads.
        window_size: the window of those calls, the widest of all layers, for method="auto" and layout="auto", which
            take calls as causal: what lies to the right does not count. Calls may have others.
        loss_group: the ranks over which gradients are averaged, for `mean_loss`; None: group. With data parallelism
            beside context parallelism, the group of both.
        device: where `positions` and `position_ids` are; None: the current GPU with NCCL, else the CPU.

    Attributes:
        rank, world_size: of the group.
        layout, method: as chosen.
        seqlens: list of ints. total: their sum. longest: the greatest of them. is_packed: not just one that has tokens.
        tokens: how many tokens this rank has, padding included. own_tokens: without padding, which stands at the end.
        positions: int64 (tokens,), where each token stands in the packed row; -1 for padding.
        position_ids: int64 (tokens,), from 0 in each document, for rotary tables and learned positions; 0 for padding.

    Raises:
        ValueError, TypeError: for arguments that do not fit, and on all ranks if plans differ between them.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> dist.init_process_group("gloo", f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
        >>> plan = Plan([5, 3], dist.group.WORLD)
        >>> plan.shard(torch.arange(8), dim=0), plan.position_ids
        (tensor([0, 1, 2, 3, 4, 5, 6, 7]), tensor([0, 1, 2, 3, 4, 0, 1, 2]))
        >>> dist.destroy_process_group()
    """

    _over_slow_links = False  # as the ring of "usp" is

    @_on_host
    def __init__(
        self,
        seqlens: int | Sequence[int] | Tensor,
        group: Any,
        *,
        layout: str = "auto",
        method: str = "auto",
        granularity: int = 128,
        pad_to: int | None = None,
        head_groups: int | None = None,
        each_document: bool = False,
        heads: int | None = None,
        heads_k: int | None = None,
        window_size: Sequence[int] = (-1, -1),
        loss_group: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._mesh = group if getattr(group, "ndim", 1) == 2 else None
        self.group = group_of(group if self._mesh is None else _torch_private.flattened(group, "ring_ulysses"))
        self.rank, self.world_size = _rank_and_size(self.group)
        self.loss_group = self.group if loss_group is None else group_of(loss_group)
        arguments = (seqlens, layout, method, granularity, pad_to, head_groups, each_document)
        try:
            self._choose(*arguments, _calls(heads, heads_k, window_size))
            found = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        except (TypeError, ValueError) as error:  # the others may wait for what this rank has to say
            _compare(self.group, f"{type(error).__name__}: {error}", raises=False)
            raise
        _compare(self.group, found)
        device = device_of(self.group) if device is None else torch.device(device)
        self.inner: Plan | None = None  # of "usp": how the ranks of a ring divide the row
        if self._mesh is not None:
            options: dict[str, Any] = dict(layout=self.layout, method="gather", granularity=self._granularity)
            options |= dict(head_groups=head_groups, each_document=each_document, device=device)
            self.inner = Plan(self.seqlens, self._mesh["ring"], **options)
            self.inner._over_slow_links = True
        own = self._every_position[self.rank]
        self.tokens, self.own_tokens = len(own), self._counts[self.rank]
        self.positions = own.to(device)
        starts = torch.tensor(_layout.starts_of(self.seqlens))
        document = torch.searchsorted(starts, own.clamp(min=0), right=True) - 1
        self.position_ids = torch.where(own < 0, 0, own - starts[document]).to(device)
        self._starts = starts.to(device, torch.int32)
        self.longest = max(self.seqlens)
        self.is_packed = sum(length > 0 for length in self.seqlens) != 1
        number = next(_NUMBERS)
        self.handle = torch.tensor(number)
        _PLANS[number] = self
        self._schedules: dict[Any, Schedule] = {}
        self._head_exchanges: dict[Any, HeadExchange] = {}
        self._indices: dict[Any, Any] = {}

    def _choose(self, seqlens, layout, method, granularity, pad_to, head_groups, each_document, calls):
        """Check the arguments and set the settings."""
        self.seqlens = _host_lengths(seqlens)
        self.total = sum(self.seqlens)
        _check_choice("method", method, ("auto", *METHODS))
        _check_choice("layout", layout, ("auto", *_layout.LAYOUTS))
        self.method = method
        if method == "auto":
            self.method = "gather" if self._mesh is None else "usp"
        if (self.method == "usp") != (self._mesh is not None):
            needs = "a DeviceMesh of two dimensions, ring and ulysses," if method == "usp" else "one dimension"
            raise ArgumentError(f"group must have {needs} for method={method!r}, found another one")
        if self._mesh is not None and self._mesh.mesh_dim_names != ("ring", "ulysses"):
            raise ArgumentError(
                f"group must have dimensions ('ring', 'ulysses') for method='usp', found {self._mesh.mesh_dim_names}"
            )
        self._granularity = checks.count("granularity", granularity, 1)
        checks.flags(each_document=each_document)
        self._each_document = bool(each_document)
        if each_document and layout == "striped":
            raise ArgumentError("each_document must be False with layout='striped', found True")
        self._head_groups = None if head_groups is None else checks.count("head_groups", head_groups, 1)
        heads, heads_k, window = calls
        self._divide(layout, window)
        if method == "auto" and self.method == "gather" and heads is not None:
            if _is_faster_by_heads(heads, heads_k, self.world_size, self._fetched(window)):
                self.method = "ulysses"
                self._divide(layout, window)
        self._pad_to = None
        if pad_to is not None:
            if self._mesh is not None:
                raise ArgumentError(f"pad_to must be None with method='usp', found {pad_to}")
            self._pad_to = checks.count("pad_to", pad_to, 0)
            fits = self._pad_to >= max(self._counts)
            checks.number("pad_to", self._pad_to, fits, "at least the tokens of a rank, {}", max(self._counts))
            self._every_position = [F.pad(own, (0, self._pad_to - len(own)), value=-1) for own in self._every_position]

    def _divide(self, layout, window):
        """Give each rank its tokens, in this layout or, if "auto", in the one that suits the method and the window."""
        if layout == "auto":
            several = sum(length > 0 for length in self.seqlens) > 1
            narrow = 0 <= 8 * window[0] <= self.total // self.world_size  # ranks have about the same work anyway
            if self.method == "ulysses" or (narrow and not several):
                layout = "contiguous"
            else:
                layout = "balanced" if several else "zigzag"
        self.layout = layout
        self._spans = None
        ulysses = 1 if self._mesh is None else self._mesh["ulysses"].size()
        if layout != "striped":
            spans_of = _layout.spans_of_documents if self._each_document else _layout.spans_of_ranks
            self._spans = spans_of(self.seqlens, self.world_size // ulysses, layout, self._granularity)
        every = self._positions_of_spans(self.world_size // ulysses)
        every = [part for own in every for part in own.tensor_split(ulysses)]
        if self._mesh is not None:
            every = [every[place] for place in _places_in(self._mesh.mesh)]
        self._counts = list(map(len, every))
        self._every_position = every  # of each rank, int64 on the CPU, -1 for padding

    def _fetched(self, window):
        """How many tokens' keys ranks fetch with "gather" for each token that they have, on average."""
        starts = _layout.starts_of(self.seqlens)
        seen = sum(end - first for covered in self._covered(window, starts) for first, end in covered)
        return max(0, seen - self.total) / max(1, self.total)

    def _settings(self):
        """All that must agree between ranks."""
        return dict(
            seqlens=self.seqlens,
            layout=self.layout,
            method=self.method,
            granularity=self._granularity,
            pad_to=self._pad_to,
            head_groups=self._head_groups,
            each_document=self._each_document,
        )

    def _positions_of_spans(self, ranks):
        """The positions of the rows of each of so many ranks."""
        if self._spans is None:
            return [torch.arange(self.total)[rank::ranks] for rank in range(ranks)]
        return [torch.cat([torch.arange(0), *(torch.arange(*span) for span in own)]) for own in self._spans]

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.seqlens)} documents, {self.total} tokens, rank {self.rank} of {self.world_size} has "
            f"{self.tokens}, layout={self.layout!r}, method={self.method!r})"
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Tensors

    def shard(self, x: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """Returns this rank's part of x along `dim`, whose size is that of the whole row.

        x is the same on all ranks. fill: what stands in padding. There is no transfer, and the gradient is that of the
        part alone.
        """
        checks.tensor("x", x)
        dim = _dimension(x, dim)
        checks.number(f"x.shape[{dim}]", x.shape[dim], x.shape[dim] == self.total, "the sum of seqlens, {}", self.total)
        index = self._index("own", x.device)
        part = x.index_select(dim, index.clamp(min=0)) if self.total else x.new_zeros(_resized(x, dim, self.tokens))
        if self._pad_to is None:
            return part
        padding = (index < 0).view(-1, *(1,) * (x.dim() - 1 - dim))
        return part.masked_fill(padding, fill)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns the whole row, without padding, of parts as `shard` returns them, on all ranks.

        Differentiable: x gets the sum of all ranks' gradients for its rows.
        """
        checks.tensor("x", x)
        dim = _dimension(x, dim)
        checks.number(f"x.shape[{dim}]", x.shape[dim], x.shape[dim] == self.tokens, "plan.tokens, {}", self.tokens)
        rows = x.movedim(dim, 0)
        most = max(map(len, self._every_position))
        rows = torch.cat([rows, rows.new_zeros(most - self.tokens, *rows.shape[1:])])
        rows = all_gather(rows, self.group)
        return rows.index_select(0, self._index("slots", x.device)).movedim(0, dim)

    def shard_batch(self, batch: Mapping[str, Any], dims: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns this rank's part of a batch: `shard` of each tensor, other values as they are.

        `labels` become `shift_labels`, shifted by the method of this name before they are divided: entry t is the label
        of the logits of token t. Models here and in transformers take them by this name, and do not shift them again.
        `position_ids` (1, tokens) is added if the batch has none.

        Arguments:
            batch: names to tensors of the whole row, the same on all ranks.
            dims: the dimension of the tokens of tensors in which it is not 1. -1 as well as None: not divided.
        """
        dims, part = dict(dims or {}), {}
        for name, value in batch.items():
            dim = dims.get(name, 1)
            if not isinstance(value, Tensor) or dim is None or dim < 0:
                part[name] = value
            elif name == "labels":
                shifted = self.shift_labels(value.movedim(dim, -1)).movedim(-1, dim)
                part["shift_labels"] = self.shard(shifted, dim, fill=-100)
            else:
                part[name] = self.shard(value, dim, fill=-100 if name == "shift_labels" else 0)
        if "position_ids" not in part:
            part["position_ids"] = self.position_ids[None]
        return part

    @_on_host
    def shift_labels(self, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Returns the label of each token of the whole row: the next token of its document, or `ignore_index` for none.

        labels: (..., total), input_ids or labels that stand at the tokens themselves. Shift before sharding: a rank
        does not have the token after its last one.
        """
        checks.tensor("labels", labels)
        checks.has_shape("labels", labels, (*labels.shape[:-1], self.total))
        shifted = torch.cat([labels[..., 1:], labels[..., :1]], -1)
        ends = [start - 1 for start in _layout.starts_of(self.seqlens)[1:] if start > 0]
        is_end = torch.zeros(self.total, dtype=torch.bool)
        is_end[ends] = True
        return shifted.masked_fill(is_end.to(labels.device), ignore_index)

    def mean_loss(self, loss_sum: Tensor, count: int | Tensor, group: Any = None) -> Tensor:
        """Returns the loss for this rank's backward, of which the average over ranks is the mean loss of all tokens.

            loss_sum * ranks / sum of count over the ranks

        DistributedDataParallel and FSDP average gradients over the ranks, which are then those of that mean. An average
        of means would give more weight to tokens of ranks where many labels are ignored. Where several batches make one
        step, give each call the count of this rank's labels in all of them, and add the gradients.

        Arguments:
            loss_sum: the sum of this rank's losses.
            count: over how many labels that was, or of the whole step, an int or an integer tensor without dimensions.
            group: the ranks over which gradients are averaged; None: the loss_group of the plan.
        """
        checks.tensor("loss_sum", loss_sum, shape=())
        group = self.loss_group if group is None else group_of(group)
        total = torch.as_tensor(count, device=loss_sum.device).to(torch.int64).clone()
        checks.tensor("count", total, shape=())
        dist.all_reduce(total, group=group)
        return loss_sum * (
            dist.get_world_size(group) / total.clamp(min=1).to(torch.promote_types(loss_sum.dtype, torch.float32))
        )

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of rotary tables for this rank's tokens, (tokens, rotary_dim / 2): the offset is then 0.

        cos, sin: (at least the length of the longest document, rotary_dim / 2).
        """
        checks.tensor("cos", cos)
        checks.tensor("sin", sin, shape=tuple(cos.shape), device=cos.device)
        fits = cos.shape[0] >= self.longest
        checks.number("cos.shape[0]", cos.shape[0], fits, "at least the longest document, {}", self.longest)
        ids = self.position_ids.to(cos.device)
        return cos.index_select(0, ids), sin.index_select(0, ids)

    @_on_host
    def intervals(
        self, source: int | None = None, causal: bool = True, window_size: Sequence[int] = (-1, -1)
    ) -> tuple[Tensor, Tensor]:
        """Returns (first, end), int32 (tokens,) on the CPU: the keys that each token of this rank sees.

        Arguments:
            source: the rank that has the keys, and the result counts its tokens; None: the result counts those of the
                whole row.
            causal, window_size: as in `flash_attn.flash_attn_func`. Keys of other documents are never seen.
        """
        left, right = _window(causal, window_size)
        if source is not None:
            checks.number("source", source, 0 <= checks.whole("source", source) < self.world_size, "a rank")
        first, end = self._seen(self._every_position[self.rank], left, right, _layout.starts_of(self.seqlens))
        if source is not None:
            keys = self._every_position[source]
            keys = keys[keys >= 0]
            first, end = torch.searchsorted(keys, first), torch.searchsorted(keys, end)
        return first.int(), end.int()

    def _seen(self, positions, left, right, starts):
        """The positions [first, end) of the keys that rows at these positions see; none for padding."""
        begins = torch.tensor(starts)
        document = torch.searchsorted(begins, positions.clamp(min=0), right=True) - 1
        document = document.clamp(max=len(starts) - 2)
        first, end = begins[document], begins[document + 1]
        if left >= 0:
            first = first.maximum(positions - left)
        if right >= 0:
            end = end.minimum(positions + right + 1)
        padding = positions < 0
        return first.masked_fill(padding, 0), end.masked_fill(padding, 0)

    @_on_host
    def _index(self, name, device):
        """An index of rows on a device: "own", the positions of this rank; "slots", where `all_gather` puts each."""
        key = name, device
        if key not in self._indices:
            index = self._every_position[self.rank]
            if name == "slots":
                most = max(map(len, self._every_position))
                index = torch.empty(self.total, dtype=torch.int64)
                for rank, own in enumerate(self._every_position):
                    rows = (own >= 0).nonzero()[:, 0]
                    index[own[rows]] = rows + rank * most
            self._indices[key] = index.to(device)
        return self._indices[key]

    # -----------------------------------------------------------------------------------------------------------------
    # What attention needs; each is made at its first use and kept

    def cu_seqlens(self, batch: int, device: torch.device) -> Tensor:
        """Returns where documents start in `batch` whole rows, one after the other: int32 (batch * documents + 1,)."""
        starts = self._starts.to(device)
        if batch == 1:
            return starts
        rows = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * self.total
        return torch.cat([(rows + starts[:-1]).flatten(), starts[-1:] * batch])

    def schedule(self, window: tuple[int, int], chunk: int, batch: int, device: torch.device) -> Schedule:
        """Returns the launches of "gather" for calls with this window and attention_chunk."""
        key = window, chunk, batch, device
        if key not in self._schedules:
            self._schedules[key] = self._scheduled(window, chunk, batch, device)
        return self._schedules[key]

    @_on_host
    def _scheduled(self, window, chunk, batch, device):
        starts = _layout.starts_of(self.seqlens, chunk)
        if self._is_even_zigzag(window, starts):
            return self._in_even_zigzag()
        intervals = self._covered(window, starts)
        needed = []
        for covered in intervals:
            mask = torch.zeros(self.total, dtype=torch.bool)
            for first, end in covered:
                mask[first:end] = True
            needed.append(mask)
        own = [positions[positions >= 0] for positions in self._every_position]
        exchange = RowExchange(self.group, self.rank, own, needed, device)
        if self._spans is None:
            launches = self._striped(window, starts, intervals[self.rank], device)
        else:
            pieces = _layout.pieces_of(self._spans[self.rank], starts, window)
            launches = self._launches(pieces, intervals[self.rank], batch, device)
        return Schedule(sorted(launches, key=_num_keys, reverse=True), exchange)

    def _in_even_zigzag(self):
        """The schedule of chunks for which `_is_even_zigzag`: a launch of the rank's tail, and one of its head.

        The chunks of the last rank are neighbours, and need only one.
        """
        chunk = self.total // (2 * self.world_size)
        exchange = ZigzagExchange(self.group, self.rank, self.world_size, chunk)
        parts = [(slice(chunk, 2 * chunk), exchange.seen_by_tail), (slice(0, chunk), exchange.seen_by_head)]
        if self.rank == self.world_size - 1:
            parts = [(slice(0, 2 * chunk), exchange.seen_by_tail)]
        return Schedule([Launch(rows, keys, (-1, 0), {}, None) for rows, keys in parts], exchange)

    def _is_even_zigzag(self, window, starts):
        """Whether all rows see all rows before them, and each rank has two chunks in zigzag, all of one size."""
        world_size = self.world_size
        chunk = self.total // (2 * world_size)
        if world_size == 1 or self._spans is None or window[0] >= 0 or window[1] != 0 or chunk == 0:
            return False
        if set(starts) != {0, self.total} or self.total != 2 * world_size * chunk:
            return False
        tails = [(2 * world_size - 1 - rank) * chunk for rank in range(world_size)]
        pairs = [[(rank * chunk, (rank + 1) * chunk), (tail, tail + chunk)] for rank, tail in enumerate(tails)]
        return [_layout.union(own) for own in self._spans] == list(map(_layout.union, pairs))

    def _covered(self, window, starts):
        """The intervals of positions whose keys the rows of each rank see."""
        if self._spans is None:
            seen = [self._seen(own[own >= 0], *window, starts) for own in self._every_position]
            return [[(int(first.min()), int(end.max()))] if len(first) else [] for first, end in seen]
        pieces = (_layout.pieces_of(spans, starts, window) for spans in self._spans)
        return [_layout.union((each.first_key, each.end_key) for each in of_rank) for of_rank in pieces]

    def _striped(self, window, starts, covered, device):
        """One launch, in which each row sees an interval of keys of its own."""
        own = self._counts[self.rank]
        if not own:
            return []
        ((begin, end),) = covered
        seen = torch.stack(self._seen(self._every_position[self.rank][:own], *window, starts), -1) - begin
        return [Launch(slice(0, own), slice(0, end - begin), (-1, -1), {}, seen.int()[None, None].to(device))]

    def _launches(self, pieces, covered, batch, device):
        """The launches of these pieces, counted in the rows of this rank and in the keys that it fetches.

        Both bounds of keys grow from piece to piece. So what it fetches has no keys between those of two neighbours in
        a launch: no other piece sees them.
        """
        shifts, total = [], 0  # from positions to fetched keys, in each interval
        for first, end in covered:
            shifts.append(total - first)
            total += end - first
        begins = [first for first, _ in covered]
        launches, row = [], 0
        for group in _layout.launches_of(pieces):
            entries = [(piece.end - piece.first, piece.end_key - piece.first_key) for piece in group]
            rows, keys = map(sum, zip(*entries, strict=True))
            key = group[0].first_key + shifts[bisect.bisect_right(begins, group[0].first_key) - 1]
            lengths = _lengths(entries, batch, device) if len(entries) > 1 else {}
            launches.append(Launch(slice(row, row + rows), slice(key, key + keys), group[0].window, lengths, None))
            row += rows
        return launches

    @_on_host
    def head_exchange(self, heads: int, heads_k: int, of_keys: bool, device: torch.device) -> HeadExchange:
        """Returns the exchange of "ulysses" for queries or for keys of these numbers of heads."""
        key = heads, heads_k, of_keys, device
        if key not in self._head_exchanges:
            group, rank, positions = self.group, self.rank, self._every_position
            if self._mesh is not None and self.inner is not None:
                group = self._mesh["ulysses"].get_group()
                positions = list(torch.arange(self.inner.tokens).tensor_split(dist.get_world_size(group)))
                rank = dist.get_rank(group)
            queries, keys = heads_of_ranks(heads, heads_k, len(positions))
            divided = [torch.tensor(each) for each in (keys if of_keys else queries)]
            count = heads_k if of_keys else heads
            self._head_exchanges[key] = HeadExchange(group, rank, positions, divided, count, device)
        return self._head_exchanges[key]

    @property
    def ranks_of_heads(self) -> tuple[int, int]:
        """Among how many ranks "ulysses" and "usp" divide heads, and which of them this is."""
        if self._mesh is None:
            return self.world_size, self.rank
        return self._mesh["ulysses"].size(), self._mesh["ulysses"].get_local_rank()

    @property
    def overlaps(self) -> bool:
        """Whether "gather" transfers one group of heads while it computes another."""
        return self._head_groups is not None or self._over_slow_links

    def groups_of_heads(self, heads_k: int, bytes_per_head: int) -> int:
        """Returns in how many groups "gather" fetches the key heads.

        bytes_per_head: of all keys and values.

        As few as hold LARGEST_GROUP bytes each: every launch of attention leaves a part of the GPU idle when it ends.
        If transfers run beside another group, up to four, if each takes much longer than to start it.
        """
        if self._head_groups is not None or self.world_size == 1:
            return self._head_groups or 1
        total = heads_k * bytes_per_head
        least = max(1, -(-total // LARGEST_GROUP))
        if self.overlaps:
            least = max(least, min(4, total // _LARGE))
        return next((n for n in range(least, heads_k) if heads_k % n == 0), heads_k)


# What "ulysses" may send, as a multiple of what "gather" sends, and be taken for the faster one: on two and four H200s
# of one host they were within 2.5 % of each other at 0.8 and 1.7, where "ulysses" was ahead with the longest rows, and
# "gather" was ahead by 3 to 18 % at 2.9 to 80 (benchmarks/results/context_parallel.csv).
_MOST_SENT = 2.0


def _is_faster_by_heads(heads: int, heads_k: int, ranks: int, fetched: float) -> bool:
    """Whether "ulysses" is faster than "gather", as far as what they send tells.

    For each token of a rank and element of a head, in both directions, in bytes:

        ulysses   `bytes_by_heads`, but for the part that stays
        gather    16 bits of k and v for each token that is fetched, in both, and their gradients in float32

    fetched: how many tokens are fetched for each token of a rank.
    """
    if ranks == 1 or heads % ranks:  # some ranks would compute more heads than others
        return False
    by_heads = sum(bytes_by_heads(heads, heads_k, ranks)) * (ranks - 1) / ranks
    return by_heads <= _MOST_SENT * 16 * heads_k * fetched


def bytes_by_heads(heads: int, heads_k: int, ranks: int) -> tuple[int, int]:
    """What "ulysses" exchanges in the forward and in the backward, for each token and element of a head, in bytes.

    16 bits of q, k, v and out, and of their gradients. A key head counts as often as it comes to ranks; if it does more
    than once, its gradients are float32.
    """
    _, keys = heads_of_ranks(heads, heads_k, ranks)
    copies = sum(map(len, keys))
    return 4 * (heads + copies), 4 * (heads + copies * (2 if copies > heads_k else 1))


LARGEST_GROUP = 2**30  # bytes of the keys and values of a group of heads
_LARGE = 2**24  # bytes above which a transfer takes much longer than to start it: 50 us and 20 us at 330 GB/s


def plan_of(handle: Tensor) -> Plan:
    """Returns the plan with this handle."""
    plan = _PLANS.get(int(handle))
    if plan is None:
        raise RuntimeError("plan must be kept until the backward has run, found that it is gone")
    return plan


def heads_of_ranks(heads: int, heads_k: int, world_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the query heads of each rank, as even as possible, and the key heads of as many runs of them.

    Where ranks share a key head, all of them get it. A key head comes several times where queries of a rank would
    otherwise not be divided evenly among its key heads.
    """
    borders = [rank * heads // world_size for rank in range(world_size + 1)]
    share = heads // heads_k
    run = math.gcd(share, *borders)
    queries = [list(range(first, end)) for first, end in itertools.pairwise(borders)]
    return queries, [[head // share for head in own[::run]] for own in queries]


def _num_keys(launch):
    return launch.keys.stop - launch.keys.start


def _lengths(entries, batch, device):
    """The arguments of a variable-length call for entries (rows, keys), in each of `batch` rows."""
    rows, keys = ([0, *itertools.accumulate(counts * batch)] for counts in map(list, zip(*entries, strict=True)))
    longest_rows, longest_keys = map(max, zip(*entries, strict=True))
    return dict(
        cu_seqlens_q=torch.tensor(rows, dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor(keys, dtype=torch.int32, device=device),
        max_seqlen_q=longest_rows,
        max_seqlen_k=longest_keys,
    )


def _calls(heads, heads_k, window_size):
    """Check what a plan is told of the calls to come. Returns (heads, heads_k, window), of calls that are causal."""
    window = _window(True, window_size)
    if heads is None:
        if heads_k is not None:
            raise ArgumentError(f"heads must be given with heads_k, found None with heads_k={heads_k}")
        return None, None, window
    heads = checks.count("heads", heads, 1)
    heads_k = heads if heads_k is None else checks.count("heads_k", heads_k, 1)
    checks.number("heads_k", heads_k, heads % heads_k == 0, "a divisor of heads, {}", heads)
    return heads, heads_k, window


def _window(causal, window_size):
    """The bounds of a call as (left, right), below 0 for none."""
    checks.flag("causal", causal)
    left, right = checks.window(window_size)
    return left, 0 if causal else right


def _host_lengths(seqlens):
    if isinstance(seqlens, Tensor):
        checks.tensor("seqlens", seqlens, dtypes=checks.INTEGER_DTYPES)
        if seqlens.device != torch.device("cpu"):
            raise ArgumentError(
                f"seqlens must be on the CPU, found it on {seqlens.device}: reading lengths from a device waits for it "
                "in each step. Take them from the data loader"
            )
        seqlens = seqlens.tolist()
    lengths = [checks.count("seqlens", length) for length in ([seqlens] if isinstance(seqlens, int) else seqlens)]
    checks.number("the number of seqlens", len(lengths), len(lengths) > 0, "at least 1")
    return lengths


def group_of(group: Any) -> dist.ProcessGroup:
    """Returns a group as a ProcessGroup, also that of a DeviceMesh."""
    if hasattr(group, "get_group"):
        checks.number("the number of dimensions of group", group.ndim, group.ndim == 1, "1")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, found {type(group).__name__}")
    return group


def _rank_and_size(group):
    return dist.get_rank(group), dist.get_world_size(group)


def _places_in(mesh: Tensor) -> list[int]:
    """Returns where each rank of a mesh of two dimensions is, counted row by row, for its ranks in ascending order.

    Groups number their ranks in ascending order, those of one dimension as well as that of both.
    """
    ordered = mesh[mesh[:, 0].argsort()][:, mesh[0].argsort()]
    if any((ordered.diff(dim=dim) < 0).any() for dim in (0, 1)):
        raise ArgumentError(f"group must have ranks in one order in all of its rows and columns, found {mesh.tolist()}")
    return ordered.flatten().argsort().tolist()


def _compare(group, text, raises=True):
    """Raise on all ranks unless all of them have the same text. It is compared on the host, without a GPU."""
    if dist.get_world_size(group) == 1:
        return
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    group = host_group(group)
    digests = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, torch.tensor([digest]), group=group)
    others = [rank for rank, other in enumerate(digests) if int(other) != int(digests[0])]
    if others and raises:
        raise ArgumentError(
            f"plan must be the same on all ranks, found one on ranks {others} that differs from rank 0's"
        )


def _check_choice(name, value, choices):
    if value == "ring":
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, found 'ring', which is not supported")
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, found {value!r}")


def _dimension(x, dim):
    checks.integer("dim", dim)
    checks.number("dim", dim, -x.dim() <= dim < x.dim(), "a dimension of x, which has {}", x.dim())
    return dim % x.dim()


def _resized(x, dim, size):
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])
