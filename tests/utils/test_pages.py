"""Which pages each sequence has: against a model in which every token is a value that is written and read back."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn.utils.generation import OutOfPages, PageAllocator, copy_pages


def test_pages_are_taken_as_sequences_grow_and_given_back():
    pages = PageAllocator(num_pages=5, page_size=4)
    pages.allocate("a", 5)
    pages.allocate("b")
    assert (pages.pages("a"), pages.pages("b"), pages.num_free) == ((0, 1), (), 3)
    assert pages.append("b", 4) == pages.append("a", 3) == [] and pages.num_free == 2
    assert [pages.num_needed(name) for name in ("a", "b", "c")] == [1, 1, 1]
    pages.append("a")
    assert pages.block_table(["b", "a"]).tolist() == [[2, -1, -1], [0, 1, 3]]
    assert pages.block_table(["b"], columns=2).tolist() == [[2, -1]] and "a" in pages and "c" not in pages
    pages.truncate("a", 4)
    assert (pages.length("a"), pages.pages("a"), pages.num_free) == (4, (0,), 3)
    pages.free("a")
    assert pages.num_free == 4 and "a" not in pages
    assert pages.block_table([]).shape == (0, 0) and pages.block_table(["b"]).dtype == torch.int32


def test_a_page_is_free_when_its_last_sequence_ends():
    pages = PageAllocator(num_pages=6, page_size=4)
    pages.allocate("prefix", 8)
    for name in ("a", "b"):
        pages.fork("prefix", name)
        assert pages.append(name) == []  # the pages are full: nothing is written to them
    assert pages.block_table(["a", "b"])[:, :2].tolist() == [[0, 1], [0, 1]] and pages.num_free == 2
    pages.free("prefix")
    pages.free("a")
    assert pages.num_free == 3 and pages.pages("b")[:2] == (0, 1)
    pages.free("b")
    assert pages.num_free == 6


def test_a_shared_page_is_copied_before_it_is_written():
    pages = PageAllocator(num_pages=4, page_size=4)
    pages.allocate("a", 6)
    pages.fork("a", "b", 5)
    assert (pages.length("b"), pages.num_needed("b"), pages.num_needed("b", 0)) == (5, 1, 0)
    assert pages.append("b") == [(1, 2)] and pages.pages("b") == (0, 2)
    assert pages.append("a") == [] and pages.pages("a") == (0, 1)  # which is its own again
    pages.fork("a", "c")
    assert pages.append("a") == [(1, 3)]
    assert pages.append("c") == [] and pages.num_free == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed):
    """Each sequence reads the values that it has written, whatever others do; no page is lost."""
    draw, page_size, num_pages = random.Random(seed), 3, 9
    pages, cache, expected, names = PageAllocator(num_pages, page_size), torch.full((9, 3), -1), {}, iter(range(10**6))
    done = dict.fromkeys(("allocate", "append", "fork", "free", "truncate", "refused"), 0)
    for step in range(200):
        what = draw.choice(["allocate", "append", "append", "append", "fork", "free", "truncate"])
        name = draw.choice(list(expected)) if expected else None
        if name is None and what != "allocate":
            continue
        before = {each: pages.pages(each) for each in expected}, pages.num_free
        try:
            if what == "allocate":
                name, count = next(names), draw.randrange(5)
                needed = pages.num_needed(name, count)
                pages.allocate(name, count)
                expected[name] = []
            elif what == "append":
                count = draw.randrange(5)
                needed = pages.num_needed(name, count)
                copy_pages({0: cache}, pages.append(name, count))
            elif what == "fork":
                name, other, needed = next(names), name, 0
                length = draw.randint(0, len(expected[other]))
                pages.fork(other, name, *([] if draw.random() < 0.3 else [length]))
                expected[name] = expected[other][: pages.length(name)]
            elif what == "truncate":
                length = draw.randint(0, len(expected[name]))
                pages.truncate(name, length)
                del expected[name][length:]
            else:
                pages.free(name)
                del expected[name]
            if what in ("allocate", "append"):
                assert pages.num_free == before[1] - needed
                for position in range(pages.length(name) - count, pages.length(name)):
                    cache[pages.pages(name)[position // page_size], position % page_size] = step
                    expected[name].append(step)
        except OutOfPages:
            assert needed > pages.num_free
            assert before == ({each: pages.pages(each) for each in expected}, pages.num_free)
            what = "refused"
        done[what] += 1
        for each, values in expected.items():
            assert pages.length(each) == len(values)
            assert cache[list(pages.pages(each))].flatten()[: len(values)].tolist() == values
        held = {page for each in expected for page in pages.pages(each)}
        assert pages.num_free == num_pages - len(held)
    assert min(done.values()) > 5, done


COPIES = {  # (from, to), and how many writes each cache gets
    "none": ([], 0),
    "one": ([(2, 0)], 1),
    "independent": ([(0, 3), (1, 4), (0, 5)], 1),
    "a target is a source later": ([(0, 3), (3, 4)], 2),
    "a source is a target later": ([(0, 3), (1, 0)], 2),
    "a target twice": ([(0, 3), (1, 3)], 2),
}


class Writes(TorchDispatchMode):
    """Counts the operators that write."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_made_in_order_and_at_once_where_they_do_not_meet(name, device):
    copies, writes = COPIES[name]
    caches = {layer: torch.randn(6, 2, 3, device=device) for layer in ("a", 1)}
    expected = {layer: cache.tolist() for layer, cache in caches.items()}
    for source, target in copies:
        for pages in expected.values():
            pages[target] = pages[source]
    with Writes() as counted:
        copy_pages(caches, copies)
    assert {layer: cache.tolist() for layer, cache in caches.items()} == expected
    assert counted.count == writes * len(caches)


def test_tables_of_many_columns(device):
    """Nothing is made in Python for columns without a page."""
    pages = PageAllocator(num_pages=10, page_size=2)
    for name, length in (("a", 5), ("b", 0), ("c", 8)):
        pages.allocate(name, length)
    expected = [[*pages.pages(name)] + [-1] * (6 - len(pages.pages(name))) for name in "cab"]
    table = pages.block_table(iter("cab"), columns=6, device=device)
    assert table.tolist() == expected and (table.dtype, table.device.type) == (torch.int32, device.type)
    assert table.is_contiguous() and pages.block_table(["b"], columns=2**20).shape == (1, 2**20)
    assert pages.block_table([], columns=3).shape == (0, 3) and pages.block_table(["b"]).shape == (1, 0)
    with torch.device("meta"):
        assert pages.block_table(["a"]).is_meta and not pages.block_table(["a"], device="cpu").is_meta


def test_errors():
    pages = PageAllocator(num_pages=2, page_size=4)
    pages.allocate("a", 5)
    pages.fork("a", "b")
    cache = torch.zeros(2, 4)
    for call, error, message in (
        (lambda: PageAllocator(0, 4), ValueError, "num_pages must be at least 1, found 0"),
        (lambda: PageAllocator(4, 2.5), ValueError, "page_size must be a whole number, found 2.5"),
        (lambda: pages.allocate("c", -1), ValueError, "length must be at least 0, found -1"),
        (lambda: pages.allocate("a"), ValueError, "the name must be new, found that of a sequence, 'a'"),
        (lambda: pages.fork("a", "b"), ValueError, "the name must be new, found that of a sequence, 'b'"),
        (lambda: pages.fork("a", "c", 6), ValueError, "length must be at most that of the sequence, 5, found 6"),
        (lambda: pages.truncate("a", 6), ValueError, "length must be at most that of the sequence, 5, found 6"),
        (lambda: pages.append("c"), KeyError, "the name must be that of a sequence, found 'c'"),
        (lambda: pages.append("a", -1), ValueError, "count must be at least 0, found -1"),
        (lambda: pages.block_table(["c"]), KeyError, "the name must be that of a sequence, found 'c'"),
        (
            lambda: pages.block_table(["a", "b"], 1),
            ValueError,
            "columns must be at least the pages of a sequence, 2, found 1",
        ),
        (lambda: pages.block_table("ab"), TypeError, "names must be several names, as in a list, found 'ab'"),
        (lambda: pages.block_table(7), TypeError, "names must be several names, as in a list, found 7"),
        (lambda: pages.num_needed("a", -1), ValueError, "count must be at least 0, found -1"),
        (lambda: pages.num_needed("a", "2"), TypeError, "count must be an integer, found str"),
        (lambda: copy_pages(cache, [(0, 1)]), TypeError, "caches must be a mapping of tensors, by layer, found Tensor"),
        (lambda: copy_pages([cache], [(0, 1)]), TypeError, "caches must be a mapping of tensors, by layer, found list"),
        (lambda: copy_pages({5: [cache]}, [(0, 1)]), TypeError, r"caches\[5\] must be a torch.Tensor, found list"),
        (
            lambda: copy_pages({5: cache}, [(0, 1), (0, 2)]),
            ValueError,
            r"copies must be of pages from 0 to 1, as caches\[5\] has, found 0 to 2",
        ),
        (lambda: copy_pages({5: cache}, [(-1, 1)]), ValueError, "copies must be of pages .* found -1 to 1"),
        (
            lambda: pages.allocate("c", 3),
            OutOfPages,
            "free pages must be at least 1 for 3 more tokens of sequence 'c', found 0 of 2: free a sequence",
        ),
        (lambda: pages.append("a"), OutOfPages, "at least 1 for 1 more tokens of sequence 'a', found 0"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert (pages.length("a"), pages.pages("a"), pages.pages("b"), "c" in pages) == (5, (0, 1), (0, 1), False)
