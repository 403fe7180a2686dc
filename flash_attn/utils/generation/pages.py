"""Which pages of a pool each sequence has: how sequences take pages as they grow, share a prefix, and give them back.

    allocator = PageAllocator(num_pages=1000, page_size=64)
    allocator.allocate("first", 100)                    # two pages, for a prompt of 100 tokens
    copy_pages(caches, allocator.append("first"))       # room for one more token
    allocator.fork("first", "second", 64)               # a sequence that begins with the same 64 tokens, kept once
    table = allocator.block_table(["first", "second"])  # (2, 2) int32, for `flash_attn_with_kvcache`
    allocator.free("first")

An allocator holds numbers only. The keys and values are in the caches of the layers, which
`allocate_inference_cache(num_pages, page_size)` of a model makes; one allocator serves all layers.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flash_attn._ops import checks

Copies = list[tuple[int, int]]  # pages (from, to)


class OutOfPages(RuntimeError):
    """There are fewer free pages than a sequence needs. Nothing has changed: free a sequence, and try again.

    Example:
        >>> from flash_attn.utils.generation import OutOfPages, PageAllocator
        >>> pages = PageAllocator(num_pages=4, page_size=16)
        >>> try:
        ...     pages.allocate("a", 100)
        ... except OutOfPages:
        ...     print("the request waits")
        the request waits
    """


class PageAllocator:
    """Gives the pages of a pool to sequences.

    Arguments:
        num_pages: how many pages the pool has.
        page_size: how many tokens a page has room for.

    A sequence has any hashable name, such as the number of a request. A page that several sequences share is counted
    for each of them; it is free when the last one gives it back, and copied before one of them writes to it.

    Raises TypeError or ValueError for sizes that are not positive integers. Methods raise KeyError for a name that no
    sequence has, and ValueError for one that is taken.

    >>> from flash_attn.utils.generation import PageAllocator
    >>> allocator = PageAllocator(num_pages=4, page_size=16)
    >>> allocator.allocate("a", 20)
    >>> allocator.fork("a", "b")
    >>> allocator.append("b")
    [(1, 2)]
    >>> allocator.block_table(["a", "b"])
    tensor([[0, 1],
            [0, 2]], dtype=torch.int32)
    >>> allocator.free("a")
    >>> allocator.num_free
    2
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = checks.count("num_pages", num_pages, 1)
        self.page_size = checks.count("page_size", page_size, 1)
        self._free = list(reversed(range(self.num_pages)))  # taken from the end: lower numbers first
        self._holders = [0] * self.num_pages  # how many sequences have each page
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """How many pages no sequence has."""
        return len(self._free)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._pages

    def length(self, name: Hashable) -> int:
        """How many tokens a sequence has."""
        self._check_known(name)
        return self._lengths[name]

    def pages(self, name: Hashable) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its tokens."""
        self._check_known(name)
        return tuple(self._pages[name])

    def num_needed(self, name: Hashable, count: int = 1) -> int:
        """How many free pages `append` with these arguments takes; for a name that is not known, `allocate`."""
        count = checks.count("count", count)
        length, pages = self._lengths.get(name, 0), self._pages.get(name, ())
        is_copied = count > 0 and self._is_shared_at(pages, length)
        return max(self._pages_of(length + count) - len(pages), 0) + is_copied

    def allocate(self, name: Hashable, length: int = 0) -> None:
        """Begin a sequence with room for `length` tokens. Raises `OutOfPages`."""
        self._check_new(name)
        length = checks.count("length", length)
        taken = self._take(name, length, self._pages_of(length))
        self._pages[name], self._lengths[name] = taken, length

    def append(self, name: Hashable, count: int = 1) -> Copies:
        """Make a sequence `count` tokens longer.

        Returns the pages (from, to) that must be copied before these tokens are written, for `copy_pages`: at most one,
        of a page that other sequences share. Raises `OutOfPages`.
        """
        self._check_known(name)
        count = checks.count("count", count)
        pages, length = self._pages[name], self._lengths[name]
        taken = self._take(name, count, self.num_needed(name, count))
        copies = []
        if count > 0 and self._is_shared_at(pages, length):
            index = length // self.page_size
            copies.append((pages[index], taken[0]))
            self._give_back(pages[index])
            pages[index] = taken.pop(0)
        pages += taken
        self._lengths[name] = length + count
        return copies

    def truncate(self, name: Hashable, length: int) -> None:
        """Forget the tokens of a sequence behind the first `length`, and give back pages that it needs no more."""
        self._check_known(name)
        length, longest = checks.count("length", length), self._lengths[name]
        checks.number("length", length, length <= longest, "at most that of the sequence, {}", longest)
        pages = self._pages[name]
        while len(pages) > self._pages_of(length):
            self._give_back(pages.pop())
        self._lengths[name] = length

    def fork(self, name: Hashable, new_name: Hashable, length: int | None = None) -> None:
        """Begin a sequence with the first `length` tokens of another one, or all of them, in the same pages."""
        self._check_known(name)
        self._check_new(new_name)
        longest = self._lengths[name]
        length = longest if length is None else checks.count("length", length)
        checks.number("length", length, length <= longest, "at most that of the sequence, {}", longest)
        shared = self._pages[name][: self._pages_of(length)]
        for page in shared:
            self._holders[page] += 1
        self._pages[new_name], self._lengths[new_name] = shared, length

    def free(self, name: Hashable) -> None:
        """End a sequence, and give back its pages."""
        self.truncate(name, 0)
        del self._pages[name], self._lengths[name]

    def block_table(
        self, names: Iterable[Hashable], columns: int | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The pages of some sequences as int32 (sequences, columns), -1 behind the last page of each.

        columns: by default as many as the sequence with the most pages has. Raises ValueError for fewer, and TypeError
            for one name in the place of several.
        """
        if isinstance(names, str | bytes) or not isinstance(names, Iterable):
            raise TypeError(f"names must be several names, as in a list, found {names!r}")
        rows = [self.pages(name) for name in names]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32, device="cpu")
        widest = max(map(len, rows), default=0)
        columns = widest if columns is None else checks.count("columns", columns)
        checks.number("columns", columns, columns >= widest, "at least the pages of a sequence, {}", widest)
        table = torch.full((len(rows), columns), -1, dtype=torch.int32, device="cpu")
        pages = torch.tensor([page for row in rows for page in row], dtype=torch.int32, device="cpu")
        table[torch.arange(columns, device="cpu") < lengths[:, None]] = pages
        return table.to(torch.get_default_device() if device is None else device)

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _is_shared_at(self, pages: Sequence[int], length: int) -> bool:
        """Whether the page where the next token goes is there, and another sequence has it, too."""
        index = length // self.page_size
        return index < len(pages) and self._holders[pages[index]] > 1

    def _take(self, name: Hashable, count: int, num_pages: int) -> list[int]:
        if num_pages > len(self._free):
            raise OutOfPages(
                f"the number of free pages must be at least {num_pages} for {count} more tokens of sequence {name!r}, "
                f"found {len(self._free)} of {self.num_pages}: free a sequence, or make the pool with more pages"
            )
        taken = [self._free.pop() for _ in range(num_pages)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _give_back(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def _check_known(self, name: Hashable) -> None:
        if name not in self._pages:
            raise KeyError(f"the name must be that of a sequence, found {name!r}")

    def _check_new(self, name: Hashable) -> None:
        if name in self._pages:
            raise ValueError(f"the name must be new, found that of a sequence, {name!r}")


def copy_pages(caches: Mapping[Hashable, Tensor], copies: Copies) -> None:
    """Copy pages within the cache of each layer, as `PageAllocator.append` asks for it.

    Arguments:
        caches: (num_pages, page_size, ...), by any key.
        copies: pages (from, to), in order: a page may be copied to one that a later pair copies from. The lists of
            several sequences may be joined, which is faster.

    Raises TypeError for caches that are no mapping of tensors, and ValueError for pages that one of them does not have.

    >>> from flash_attn.utils.generation import copy_pages
    >>> caches = {0: torch.arange(3.0).view(3, 1)}
    >>> copy_pages(caches, [(1, 2)])
    >>> caches[0].flatten()
    tensor([0., 1., 1.])
    """
    if not isinstance(caches, Mapping):
        raise TypeError(f"caches must be a mapping of tensors, by layer, found {type(caches).__name__}")
    copies = list(copies)
    if not copies:
        return
    sources, targets = (set(pages) for pages in zip(*copies, strict=True))
    low, high = min(sources | targets), max(sources | targets)
    for layer, cache in caches.items():
        checks.tensor(f"caches[{layer!r}]", cache)
        fits, found = 0 <= low and high < len(cache), f"{low} to {high}"
        checks.number("copies", found, fits, "of pages from 0 to {}, as caches[{!r}] has", len(cache) - 1, layer)
    at_once = 1 < len(copies) == len(targets) and targets.isdisjoint(sources)
    indices = {cache.device: torch.tensor(copies, device=cache.device).T for cache in caches.values() if at_once}
    for cache in caches.values():
        if at_once:
            read, written = indices[cache.device]
            cache[written] = cache[read]
        else:
            for source, target in copies:
                cache[target].copy_(cache[source])
