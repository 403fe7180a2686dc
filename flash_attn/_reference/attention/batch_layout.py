"""Where the query rows and the keys of each batch entry lie: dense, packed (cu_seqlens), padded or paged.

Everything is addressed as (batch, position, ...): packed tokens are one batch row. The values of tensors, mainly
lengths, are checked here.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from flash_attn._errors import ArgumentError

Span = tuple[slice, slice]  # batch rows and positions
Lengths = torch.Tensor | list[int] | None  # one for each batch entry


class Part(NamedTuple):
    """Batch entries of equal lengths, and where they lie."""

    entries: slice  # batch entries
    q: Span  # in q, out and their gradients
    k: Span  # in k and v; after the pages are gathered, if there are any
    pages: torch.Tensor | None = None

    @property
    def num_entries(self) -> int:
        return self.entries.stop - self.entries.start

    @property
    def seqlen_q(self) -> int:
        return self.q[1].stop - self.q[1].start

    @property
    def seqlen_k(self) -> int:
        return self.k[1].stop - self.k[1].start

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the part's rows of x (batch, seqlen_q, ...), as a view."""
        return x[self.q]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the part's keys: a view of x (batch, seqlen_k, ...), or a copy from paged x (pages, page, ...)."""
        return x[self.k] if self.pages is None else x[self.pages].flatten(0, 1)[None][self.k]

    def joined(self, other: "Part") -> list["Part"]:
        """Returns this part and the part of the next entries, as one part if their memory forms a batch."""
        if not (_follows(self.q, other.q) and _follows(self.k, other.k)):
            return [self, other]
        q, k = ((slice(a[0].start, b[0].stop), a[1]) for a, b in ((self.q, other.q), (self.k, other.k)))
        return [Part(slice(self.entries.start, other.entries.stop), q, k)]

    def split(self, size: int) -> list["Part"]:
        """Returns the same entries as parts of at most `size` entries."""
        if self.num_entries <= size:
            return [self]
        return [self._some(start, min(start + size, self.num_entries)) for start in range(0, self.num_entries, size)]

    def _some(self, start: int, stop: int) -> "Part":
        entries, q, k = (slice(x.start + start, x.start + stop) for x in (self.entries, self.q[0], self.k[0]))
        return Part(entries, (q, self.q[1]), (k, self.k[1]))


def require_matching_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless k has q's head_dim, and v the shape of k, up to its own head_dim."""
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ArgumentError(
            f"k must have the head_dim of q, and v the other sizes of k, found shapes {shapes} of q, k and v"
        )


def parts(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: Lengths,
    leftpad_k: Lengths,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
) -> list[Part]:
    """Returns the batch as parts. Arguments as for `fwd` in this package's flash_attn.py.

    Where keys are in pages, cu_seqlens_k is not looked at if there is seqused_k: it may hold anything. Neighbouring
    entries that have equal lengths and lie in neighbouring batch rows make one part.
    """
    if block_table is not None and seqused_k is not None:
        cu_seqlens_k = None
    queries = _used("q", _query_spans(q, cu_seqlens_q), seqused_q, None)
    spans = _key_spans(k, len(queries), cu_seqlens_k, block_table, cache_batch_idx)
    keys = _used(
        "k", spans, seqused_k, leftpad_k, "" if block_table is None else ": the pages of block_table hold no more"
    )
    if block_table is not None:
        return [_paged(i, rows, span, k, block_table) for i, (rows, span) in enumerate(zip(queries, keys, strict=True))]
    return _merged(Part(slice(i, i + 1), *spans) for i, spans in enumerate(zip(queries, keys, strict=True)))


def _merged(parts: Iterable[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        merged[-1:] = merged[-1].joined(part) if merged else [part]
    return merged


def _follows(span: Span, other: Span) -> bool:
    return span[0].stop == other[0].start and span[1] == other[1]


def _query_spans(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> list[Span]:
    if cu_seqlens_q is None:
        return [(slice(i, i + 1), slice(0, q.shape[1])) for i in range(q.shape[0])]
    return _packed_spans(offsets(cu_seqlens_q, "cu_seqlens_q", q.shape[0]))


def _key_spans(
    k: torch.Tensor,
    batch: int,
    cu_seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
) -> list[Span]:
    """Returns the range that may hold each entry's keys. With pages, position 0 is the start of its first page.

    Raises if an entry has more keys than its pages have room for. Kernels use the first ones then, since they cannot
    raise for lengths that only the device knows.
    """
    if block_table is not None:
        capacity = block_table.shape[1] * k.shape[1]
        lengths = [capacity] * batch
        if cu_seqlens_k is not None:
            lengths = [stop - start for start, stop in itertools.pairwise(offsets(cu_seqlens_k, "cu_seqlens_k"))]
            for entry, length in enumerate(lengths):
                if length > capacity:
                    raise ArgumentError(
                        f"cu_seqlens_k must give an entry at most the {capacity} keys that its pages in block_table "
                        f"hold, found {length} for entry {entry}"
                    )
        return [(slice(0, 1), slice(0, length)) for length in lengths]
    if cu_seqlens_k is not None:
        return _packed_spans(offsets(cu_seqlens_k, "cu_seqlens_k", k.shape[0]))
    rows = range(batch) if cache_batch_idx is None else cache_batch_idx.tolist()
    return [(slice(row, row + 1), slice(0, k.shape[1])) for row in rows]


def _packed_spans(bounds: list[int]) -> list[Span]:
    return [(slice(0, 1), slice(start, stop)) for start, stop in itertools.pairwise(bounds)]


def _used(letter: str, spans: list[Span], seqused: Lengths, leftpad: Lengths, why: str = "") -> list[Span]:
    """Returns the spans without the rows or keys that seqused and leftpad exclude, whose names end in _`letter`.

    why: why seqused may not be longer than a span.
    """
    used = _values(seqused, [span.stop - span.start for _, span in spans])
    leftpad = _values(leftpad, [0] * len(spans))
    for i, ((_, span), stop, start) in enumerate(zip(spans, used, leftpad, strict=True)):
        require_range(f"seqused_{letter}", i, stop, 0, span.stop - span.start, why)
        require_range(f"leftpad_{letter}", i, start, 0, stop)
    return [
        (row, slice(span.start + start, span.start + stop))
        for (row, span), stop, start in zip(spans, used, leftpad, strict=True)
    ]


def _paged(entry: int, rows: Span, keys: Span, k: torch.Tensor, block_table: torch.Tensor) -> Part:
    """Returns a part of one entry with the pages that hold its keys."""
    row, span = keys
    page = k.shape[1]
    first, last = span.start // page, -(-span.stop // page)
    pages = block_table[entry, first:last]
    require_pages(entry, first, pages, k.shape[0])
    within = slice(span.start - first * page, span.stop - first * page)
    return Part(slice(entry, entry + 1), rows, (row, within), pages.long())


def offsets(cu_seqlens: torch.Tensor, name: str, total: int | None = None) -> list[int]:
    """Returns the values of cu_seqlens. Raises unless they start at 0, never fall and are at most `total`."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ArgumentError(f"{name} must start at 0, found {values[0]}")
    for i, (before, after) in enumerate(itertools.pairwise(values)):
        if after < before:
            raise ArgumentError(f"{name} must not decrease, found {after} after {before} for entry {i}")
    if total is not None and values[-1] > total:
        raise ArgumentError(f"{name} must end at the number of tokens, {total}, or before it, found {values[-1]}")
    return values


def require_range(name: str, entry: int, found: int, low: int, high: int, why: str = "") -> None:
    """Raise unless low <= found <= high. why: the end of the message."""
    if not low <= found <= high:
        raise ArgumentError(f"{name} must be between {low} and {high} for entry {entry}, found {found}{why}")


def require_pages(entry: int, first: int, pages: torch.Tensor, num_pages: int) -> None:
    """Raise unless the page numbers of an entry, from column `first` of the block table on, are valid."""
    if pages.numel() and not 0 <= (bounds := pages.aminmax()).min <= bounds.max < num_pages:
        column = int(((pages < 0) | (pages >= num_pages)).nonzero()[0])
        raise ArgumentError(
            f"block_table must name pages from 0 to {num_pages - 1} wherever keys are used,"
            f" found {pages[column].item()} in column {first + column} for entry {entry}"
        )


def _values(x: Lengths, default: list[int]) -> list[int]:
    """Returns the values of x, a tensor or a list; `default` for None."""
    if x is None:
        return default
    return x.tolist() if isinstance(x, torch.Tensor) else x
