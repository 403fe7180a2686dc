"""Which tokens of a packed row each rank has, and which launches compute its attention. Plain Python on the host.

A span is (first, end), positions in the packed row. Documents are given by `starts`: where each begins, and at the end
the length of the row.

A piece is the part of a document that lies in one span of a rank. Its rows see keys of one interval, and if the last
row sees the last key, as attention aligns them, the window is that of the call, shifted by the distance of the two:

    rows [first, end) of a document [a, b)        keys [max(a, first - left), min(b, end + right)),  shift = last - end
                                                  window (left + shift, right - shift)

So each piece is an ordinary entry of attention with a window, and pieces whose keys do not overlap share a launch.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Span = tuple[int, int]
Window = tuple[int, int]
CHUNKS = {"contiguous": 1, "zigzag": 2, "balanced": 8}  # of each rank; a layout that is not here has no chunks
LAYOUTS = (*CHUNKS, "striped")


def spans_of_ranks(seqlens: Sequence[int], world_size: int, layout: str, granularity: int) -> list[list[Span]]:
    """Returns the spans of each rank, in order of their positions. Neighbours are one span, and none is empty.

    Borders of chunks are multiples of `granularity`, or of less where chunks have fewer than eight times as many.
    """
    total, count = sum(seqlens), CHUNKS[layout] * world_size
    granule = min(granularity, max(1, total // (8 * count)))
    borders = [(2 * i * total + count * granule) // (2 * count * granule) * granule for i in range(count)] + [total]
    chunks = list(itertools.pairwise(borders))
    owners = _OWNERS[layout](chunks, seqlens, world_size)
    spans: list[list[Span]] = [[] for _ in range(world_size)]
    for (first, end), owner in zip(chunks, owners, strict=True):
        own = spans[owner]
        if own and own[-1][1] == first and end > first:
            own[-1] = own[-1][0], end
        elif end > first:
            own.append((first, end))
    return spans


def spans_of_documents(seqlens: Sequence[int], world_size: int, layout: str, granularity: int) -> list[list[Span]]:
    """Returns the spans of each rank where each document is divided by itself."""
    spans: list[list[Span]] = [[] for _ in range(world_size)]
    for start, length in zip(starts_of(seqlens), seqlens, strict=False):
        parts = spans_of_ranks([length], world_size, layout, granularity)
        for own, more in zip(spans, parts, strict=True):
            own += [(start + first, start + end) for first, end in more]
    return spans


def _contiguous(chunks, seqlens, world_size):
    return range(world_size)


def _zigzag(chunks, seqlens, world_size):
    """Rank r has chunk r and, from the end, chunk r: each pair has the work of all pairs under a causal mask."""
    return [*range(world_size), *reversed(range(world_size))]


def _balanced(chunks, seqlens, world_size):
    """The chunk with the most work goes to the rank with the least that has room."""
    owners, loads, room = [0] * len(chunks), [0] * world_size, [CHUNKS["balanced"]] * world_size
    starts = starts_of(seqlens)
    work = [_causal_work(first, end, starts) for first, end in chunks]
    for i in sorted(range(len(chunks)), key=lambda i: -work[i]):
        owner = min((rank for rank in range(world_size) if room[rank]), key=loads.__getitem__)
        owners[i] = owner
        loads[owner] += work[i]
        room[owner] -= 1
    return owners


_OWNERS = {"contiguous": _contiguous, "zigzag": _zigzag, "balanced": _balanced}


def _causal_work(first, end, starts):
    """How many keys the rows of a span see under a causal mask."""
    work = 0
    for low, high, a, _ in _parts(first, end, starts):
        work += (high - a) * (high - a + 1) // 2 - (low - a) * (low - a + 1) // 2
    return work


def starts_of(seqlens: Iterable[int], chunk: int = 0) -> list[int]:
    """Returns where documents begin, and at the end the length of the row; chunk: above 0, cut each into such parts."""
    starts = [0]
    for length in seqlens:
        end = starts[-1] + length
        if chunk:
            starts += range(starts[-1] + chunk, end, chunk)
        starts.append(end)
    return starts


class Piece(NamedTuple):
    """Rows [first, end) of the packed row, the keys [first_key, end_key) that they see, and their window."""

    first: int
    end: int
    first_key: int
    end_key: int
    window: Window


def pieces_of(spans: Iterable[Span], starts: Sequence[int], window: Window) -> Iterator[Piece]:
    """Yields the pieces of these spans; window: (left, right), below 0 for no bound."""
    left, right = window
    for span in spans:
        for first, end, a, b in _parts(*span, starts):
            first_key = a if left < 0 else max(a, first - left)
            end_key = b if right < 0 else min(b, end + right)
            shift = end_key - end
            shifted = (left if left < 0 else left + shift), (right if right < 0 else right - shift)
            yield Piece(first, end, first_key, end_key, shifted)


def _parts(first, end, starts):
    """Yields (first, end) of the part of each document in a span, and where the document begins and ends."""
    document = bisect.bisect_right(starts, first) - 1
    while first < end:
        a, b = starts[document : document + 2]
        if b > first:
            yield first, min(end, b), a, b
            first = b
        document += 1


def launches_of(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Returns the pieces, in order, in as few launches as possible: in each, windows agree and keys do not overlap."""
    launches: list[list[Piece]] = []
    for piece in pieces:
        last = launches[-1][-1] if launches else None
        if last is not None and last.window == piece.window and last.end_key <= piece.first_key:
            launches[-1].append(piece)
        else:
            launches.append([piece])
    return [_without_idle_bound(launch) for launch in launches]


def _without_idle_bound(launch):
    """The pieces of a launch without the bound on the left if it hides no key from any row: that has faster kernels."""
    left, right = launch[0].window
    if left >= 0 and all(left >= piece.end_key - piece.first_key - 1 for piece in launch):
        return [piece._replace(window=(-1, right)) for piece in launch]
    return launch


def union(intervals: Iterable[Span]) -> list[Span]:
    """Returns the sorted intervals that cover the same positions without overlap; neighbours are one."""
    merged: list[Span] = []
    for first, end in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > first:
            merged.append((first, end))
    return merged
