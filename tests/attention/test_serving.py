"""Attention as a server calls it: entries of any length in one batch, whose keys lie in pages of any size.

Whatever belongs to no entry holds NaN here, and tables end in numbers that are no pages. On sm_90 the kernels of
csrc/flash_attn/fwd_serving take nearly all of these calls, on others the portable ones.
"""

import dataclasses
import functools
import itertools
import random
import zlib

import oracle
import pytest
import torch
from cases import DTYPES, params
from compare import assert_error_ratio, identical, unavoidable

from flash_attn import batch_invariant, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

NAN = float("nan")
OWNED_BY_NONE = (-1, 2**31 - 1, 0)  # what a table may hold past the pages of an entry


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch whose entries have `rows` queries and `keys` keys. `str(batch)` seeds its tensors."""

    rows: tuple = (40, 1, 17)
    keys: tuple = (600, 70, 300)
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bf16"
    page: int = 16  # 0: keys are packed
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "h": slopes (heads,), "bh": (batch, heads)
    sink: float | None = None  # that of the first head; those of others are drawn
    ranges: str = ""  # "2", "4": bounds of each row; "2h": of each head, too
    entries_causal: bool = False  # every second one
    rows_after: int = 0  # queries after those of the last entry
    by_number: str = ""  # tells apart batches that would have the same name

    def __str__(self):
        def text(value):
            if isinstance(value, tuple) and len(value) > 4:
                return f"{len(value)}x{min(value)}..{max(value)}"
            return str(value).replace(" ", "")

        changed = (f for f in dataclasses.fields(self) if f.name != "dtype" and getattr(self, f.name) != f.default)
        return "-".join([*(f"{f.name}{text(getattr(self, f.name))}" for f in changed), self.dtype])

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    @property
    def spans(self):
        """The queries of each entry as a slice of all."""
        ends = list(itertools.accumulate(self.rows))
        return [slice(end - count, end) for end, count in zip(ends, self.rows, strict=True)]

    def tensors(self, device):
        """q (total, heads, head_dim), and the keys and the values of each entry."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))

        def draw(*shape):
            return torch.randn(*shape, device=device, generator=generator).to(DTYPES[self.dtype])

        q = draw(sum(self.rows) + self.rows_after, self.heads, self.head_dim)
        k, v = (
            [draw(n, self.heads_k, d) for n in self.keys] for d in (self.head_dim, self.head_dim_v or self.head_dim)
        )
        return q, k, v

    def options(self, device):
        """The keywords of the scores and masks, by entry where they are tensors of rows."""
        rng, total = random.Random(str(self)), sum(self.rows) + self.rows_after
        options = dict(causal=self.causal, window_size=self.window, softcap=self.softcap)
        if self.alibi:
            shape = (self.heads,) if self.alibi == "h" else (len(self.rows), self.heads)
            options["alibi_slopes"] = torch.tensor([rng.random() / 3 for _ in range(torch.Size(shape).numel())])
            options["alibi_slopes"] = options["alibi_slopes"].view(shape).to(device)
        if self.sink is not None:
            sinks = [self.sink, *(rng.gauss(0, 1) for _ in range(self.heads - 1))]
            options["learnable_sink"] = torch.tensor(sinks, device=device)
        if self.ranges:
            count, heads = int(self.ranges[0]), self.heads if "h" in self.ranges else 1
            bounds = [sorted(rng.choices(range(-5, max(self.keys) + 9), k=count)) for _ in range(heads * total)]
            options["key_ranges"] = torch.tensor(bounds, dtype=torch.int32, device=device).view(heads, total, count)
        if self.entries_causal:
            options["causal"] = torch.arange(len(self.rows), device=device) % 2 == 1
        return options

    def expected(self, q, k, v, dtype):
        """(out, lse) of the oracle, computed in `dtype`."""
        options = self.options(q.device)
        ranges, slopes = options.pop("key_ranges", None), options.pop("alibi_slopes", None)
        causal = options.pop("causal") if self.entries_causal else [options.pop("causal")] * len(self.rows)
        out = q.new_zeros(*q.shape[:2], v[0].shape[-1], dtype=dtype)
        lse = q.new_full((self.heads, len(q)), float("inf"), dtype=dtype)
        for b, span in enumerate(self.spans):
            own, own_lse = attention_with_any_sink(
                *(x[None].to(dtype) for x in (q[span], k[b], v[b])),
                causal=bool(causal[b]),
                alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b],
                seen=None
                if ranges is None
                else oracle.intervals(self.rows[b], self.keys[b], ranges[:, span], device=q.device),
                **options,
            )
            out[span], lse[:, span] = own[0], own_lse[0]
        return out, lse


def attention_with_any_sink(q, k, v, *, learnable_sink=None, **options):
    """As the oracle's; a sink of -inf is none, and one of +inf leaves the keys no weight."""
    if learnable_sink is None or learnable_sink.isfinite().all():
        return oracle.attention(q, k, v, learnable_sink=learnable_sink, **options)
    infinite = learnable_sink.isinf()
    out, lse = oracle.attention(q, k, v, learnable_sink=learnable_sink.masked_fill(infinite, 0), **options)
    for head in infinite.nonzero().flatten().tolist():
        if learnable_sink[head] > 0:
            out[:, :, head], lse[:, head] = 0, learnable_sink[head]
        else:
            bare = oracle.attention(q, k, v, **options)
            out[:, :, head], lse[:, head] = bare[0][:, :, head], bare[1][:, head]
    return out, lse


@dataclasses.dataclass
class Pool:
    """Pages of keys and of values, and which of them an entry has."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    @classmethod
    def of(cls, batch, k, v, *, page=None, fill=NAN, tail=OWNED_BY_NONE, shuffled=True):
        """Each entry has the pages that its keys need; others lie between them, and hold `fill` like unused slots."""
        page = page or batch.page
        counts = [-(-n // page) for n in batch.keys]
        ids = list(range(sum(counts) + 3))
        if shuffled:
            random.Random(page).shuffle(ids)
        table = torch.tensor([tail[i % len(tail)] for i in range(len(counts) * (max(counts) + 2))], dtype=torch.int32)
        table = table.view(len(counts), -1)
        pools = [x[0].new_full((len(ids), page, *x[0].shape[1:]), fill) for x in (k, v)]
        taken = iter(ids)
        for b, count in enumerate(counts):
            own = list(itertools.islice(taken, count))
            table[b, :count] = torch.tensor(own, dtype=torch.int32)
            for pool, x in zip(pools, (k, v), strict=True):
                padded = x[b].new_full((count * page, *x[b].shape[1:]), fill)
                padded[: len(x[b])] = x[b]
                pool[own] = padded.view(count, *pool.shape[1:])
        return cls(*pools, table.to(k[0].device))


def bounds(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def attend(batch, q, pool):
    """(out, lse) of the batch over a pool."""
    lengths = bounds(batch.rows, q.device), bounds(batch.keys, q.device), max(batch.rows), max(batch.keys)
    options = dict(batch.options(q.device), return_lse=True)
    return flash_attn_varlen_func(q, pool.k, pool.v, *lengths, block_table=pool.table, **options)


def check(batch, found, q, k, v):
    """Compare (out, lse) with the oracle's."""
    exact_out, exact_lse = batch.expected(q, k, v, torch.float64)
    plain_out, plain_lse = batch.expected(q, k, v, q.dtype)
    if batch.softcap == 0:
        plain_lse = batch.expected(q, k, v, torch.float32)[1]
    out, lse = found
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    roundings = 1 + (batch.sink is not None)  # the reference rounds before it applies a sink
    assert_error_ratio(out, exact_out, plain_out, plus=roundings * unavoidable(exact_out, out.dtype), name="out")
    assert_error_ratio(lse, exact_lse, plain_lse, name="lse")


def assert_close(found, expected):
    """Results of two schedules: an ulp of bfloat16 apart."""
    torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Against the oracle

MIXED_ROWS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 129)


def mixed(shift, page, **changes):
    """Each length of queries beside another of keys; with ten shifts, each beside each."""
    keys = (0, 1, page - 1, page, page + 1, 127, 128, 129, 513, 1300)
    return Batch(MIXED_ROWS, keys[shift:] + keys[:shift], page=page, by_number=str(shift), **changes)


def short(count, longest=0):
    """More entries than a thread block's list has places; perhaps a long one among them."""
    lengths = [(b * 5 % 7, b * 11 % 43) for b in range(count)]
    if longest:
        lengths[count // 2] = longest, 4 * longest
    return Batch(*zip(*lengths, strict=True), page=8)


LENGTHS = [
    *(mixed(shift, page, causal=shift % 2 == 0) for shift, page in enumerate((16, 16, 3, 64, 24, 5, 128, 2, 80, 16))),
    Batch((129, 65), (17, 64), causal=True),  # more rows than keys
    Batch((300,), (300,), heads=2, page=48, causal=True),
    Batch((100,), (1300,), heads=2),
    Batch((9,), (2000,), heads=8, heads_k=1),
    Batch((20, 20), (0, 0), page=1),
    short(130),
    short(300),
    short(300, longest=90).but(causal=True),
    Batch(rows_after=7),
    Batch(rows_after=150, causal=True, heads=3, heads_k=3),
    Batch((0, 0, 40), (5, 0, 513), rows_after=1),
]


def check_pages(batch, device):
    q, k, v = batch.tensors(device)
    check(batch, attend(batch, q, Pool.of(batch, k, v)), q, k, v)


@pytest.mark.same_on_cpu("rows", "keys", "heads", "heads_k", "page", "by_number")
@pytest.mark.parametrize("batch", params(LENGTHS))
def test_lengths(batch, device):
    check_pages(batch, device)


GROUPS = [
    Batch(rows, (600, 130, 0), heads, heads_k, causal=causal)
    for heads, heads_k in ((1, 1), (3, 1), (7, 1), (8, 1), (10, 2), (28, 4), (71, 1), (128, 1))
    for rows, causal in (((20, 3, 5), False), ((70, 1, 1), True))
]


@pytest.mark.same_on_cpu("rows", "heads", "heads_k")
@pytest.mark.parametrize("batch", params(GROUPS))
def test_groups_of_heads(batch, device):
    check_pages(batch, device)


FEW_ROWS, MORE_ROWS = (20, 1, 17), (90, 1, 70)  # for a warpgroup, and for two
HEAD_DIMS = [
    *(
        Batch(rows, head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
        for head_dim, head_dim_v in ((64, 0), (96, 0), (192, 128), (192, 0), (256, 0))
        for rows in (FEW_ROWS, MORE_ROWS)
    ),
    Batch(FEW_ROWS, head_dim=80, causal=True),
    Batch(MORE_ROWS, head_dim=128, head_dim_v=64, causal=True),
    Batch(FEW_ROWS, head_dim=64, head_dim_v=128, causal=True),
    Batch(MORE_ROWS, head_dim=200, causal=True),
]


@pytest.mark.same_on_cpu("rows", "head_dim", "head_dim_v")
@pytest.mark.parametrize("batch", params(HEAD_DIMS))
def test_head_dims(batch, device):
    check_pages(batch, device)


@pytest.mark.parametrize("options", [dict(), dict(window_size=(4100, 0), softcap=20.0)], ids=str)
def test_pieces_of_fixed_length(options, device):
    """Beyond 4096 keys, at level 2 of batch invariance: rows of training, of a chunk, and one by itself over pages."""
    torch.manual_seed(0)
    count = 32 if device.type == "cuda" else 1
    q, k, v = (torch.randn(count, n, 2, 128, device=device).bfloat16() for n in (140, 4500, 4500))
    pools = [x[:1].reshape(-1, 50, 2, 128) for x in (k, v)]
    table = torch.arange(len(pools[0]), dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([4500], dtype=torch.int32, device=device)
    options |= dict(causal=True)
    with batch_invariant(2):
        out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
        for rows in (1, 40):
            given = dict(cache_seqlens=lengths, block_table=table, return_softmax_lse=True)
            found, found_lse = flash_attn_with_kvcache(q[:1, -rows:], *pools, **given, **options)
            assert torch.equal(found, out[:1, -rows:]) and torch.equal(found_lse, lse[:1, :, -rows:])
    plain, plain_lse = flash_attn_func(q, k, v, return_lse=True, **options)
    assert (out.float() - plain.float()).abs().max() < 0.02 and torch.allclose(lse, plain_lse, atol=1e-5)


SINKS = float("-inf"), float("inf"), 30.0, 0.5
FEATURES = [
    *(Batch(window=window, head_dim=128) for window in ((100, 0), (79, 0), (583, 5), (2000, 0), (0, 0), (-1, 40))),
    *(Batch((100, 70, 20), (1300, 64, 0), window=window, causal=True) for window in ((500, 0), (0, -1))),
    Batch((20, 20, 20), (900, 300, 10), window=(64, 0), heads=8, heads_k=1, page=128),
    *(Batch((50, 17), (600, 0), softcap=softcap, causal=True) for softcap in (2.0, 50.0)),
    *(Batch(alibi=alibi, causal=True, head_dim=head_dim) for alibi, head_dim in (("h", 128), ("bh", 64))),
    *(Batch((130, 3, 17), (700, 0, 5), sink=sink, causal=True) for sink in SINKS),
    *(Batch((20, 3, 5), (700, 0, 5), heads=8, heads_k=1, sink=sink) for sink in SINKS),
    *(Batch((130, 20), (700, 200), ranges=ranges, page=24) for ranges in ("2", "4", "2h")),
    Batch((20, 1), (700, 200), ranges="2", heads=8, heads_k=1, page=5, head_dim=128, causal=True),
    Batch((130, 20, 7), (700, 200, 500), entries_causal=True),
    Batch((30, 20), (700, 90), window=(90, 3), softcap=5.0, alibi="h", sink=1.0, ranges="2", entries_causal=True),
    Batch((30, 100), (700, 90), dtype="fp16", head_dim=128, causal=True),
    Batch((30, 20), (700, 90), dtype="fp16", softcap=5.0, alibi="bh"),
]


@pytest.mark.same_on_cpu("rows", "keys", "heads", "heads_k", "head_dim", "dtype", "page")
@pytest.mark.parametrize("batch", params(FEATURES))
def test_features(batch, device):
    check_pages(batch, device)


PACKED = [
    Batch((20, 1, 64), (600, 70, 1300), page=0, heads=8, heads_k=1),
    Batch((3, 129, 1), (1300, 129, 0), page=0, heads=3, heads_k=1, head_dim=128, causal=True),
    Batch((31, 5), (700, 513), page=0, heads=1, heads_k=1, softcap=2.0, rows_after=9),
    Batch((33, 5), (700, 513), page=0, heads=6, heads_k=2, window=(130, 0), alibi="bh", head_dim=128),
]


@pytest.mark.parametrize("batch", params(PACKED))
def test_packed_keys(batch, device):
    """Few rows over many keys, which lie one after the other, and before others that belong to no entry."""
    q, k, v = batch.tensors(device)
    keys, values = (torch.cat([*x, x[0].new_full((9, *x[0].shape[1:]), NAN)]) for x in (k, v))
    lengths = bounds(batch.rows, device), bounds(batch.keys, device), max(batch.rows), max(batch.keys)
    found = flash_attn_varlen_func(q, keys, values, *lengths, **batch.options(device), return_lse=True)
    check(batch, found, q, k, v)


# ---------------------------------------------------------------------------------------------------------------------
# Where keys lie

PLACED = [
    Batch(causal=True),
    Batch((100, 1, 33), (900, 70, 257), heads=2, head_dim=128, window=(300, 9)),
    Batch((9, 3, 1), (900, 70, 0), heads=8, heads_k=1, softcap=5.0),
]


def placed(batch, device):
    """q, keys and values of a batch, and its results over contiguous pages with zeros in all unused slots."""
    q, k, v = batch.tensors(device)
    return q, k, v, attend(batch, q, Pool.of(batch, k, v, fill=0, tail=(0,), shuffled=False))


def assert_same_bits(found, expected):
    assert all(map(identical, found, expected))


@pytest.mark.same_on_cpu("batch")
@pytest.mark.parametrize("page", [1, 8, 48, 256])
@pytest.mark.parametrize("batch", params(PLACED))
def test_slots_and_pages_of_no_entry_may_hold_anything(batch, page, device):
    q, k, v = batch.tensors(device)
    pools = [
        Pool.of(batch, k, v, page=page, fill=fill, tail=(tail,))
        for fill, tail in ((0, 0), (NAN, -1), (float("inf"), 2**31 - 1), (float("-inf"), 0))
    ]
    first, *others = (attend(batch, q, pool) for pool in pools)
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("batch", params(PLACED))
def test_any_size_and_order_of_pages_gives_the_same_bits(batch, device):
    q, k, v, expected = placed(batch, device)
    for page in (1, 2, 3, 5, 8, 16, 24, 48, 64, 80, 128, 256, 528):
        assert_same_bits(attend(batch, q, Pool.of(batch, k, v, page=page)), expected)


@pytest.mark.parametrize("batch", params(PLACED))
def test_entries_with_a_common_prefix_share_its_pages(batch, device):
    batch = batch.but(keys=(900, 150, 333))
    q, k, v = batch.tensors(device)
    prefix = 8 * batch.page
    for x in (k, v):
        for own in x[1:]:
            own[:prefix] = x[0][:prefix]
    pool = Pool.of(batch, k, v)
    apart = attend(batch, q, pool)
    unused = pool.table[1:, :8].flatten().long()
    pool.k[unused], pool.v[unused] = NAN, NAN
    pool.table[1:, :8] = pool.table[0, :8]
    assert_same_bits(attend(batch, q, pool), apart)


def in_memory_of_heads(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {
    "heads before slots": lambda k, v: map(in_memory_of_heads, (k, v)),
    "(2, pages, ..)": lambda k, v: torch.stack([k, v]).unbind(0),
    "(pages, 2, ..)": lambda k, v: torch.stack([k, v], dim=1).unbind(1),
    "(pages, slots, heads, 2, ..)": lambda k, v: torch.stack([k, v], dim=3).unbind(3),
    "(pages, layers, 2, ..)": lambda k, v: torch.stack(
        [torch.full_like(x, NAN) for x in (k, v)] + [k, v] + [torch.full_like(k, NAN)], 1
    )[:, 2:4].unbind(1),
    "(pages, heads, slots, 2, ..)": lambda k, v: map(
        in_memory_of_heads, torch.cat([torch.stack([k, v], 3), torch.full_like(k, NAN)[:, :, :, None]], 3).unbind(3)[:2]
    ),
    "more heads": lambda k, v: (torch.cat([torch.full_like(x, NAN), x], 2)[:, :, x.shape[2] :] for x in (k, v)),
    "wider heads": lambda k, v: (torch.cat([x, torch.full_like(x, NAN)], 3)[..., : x.shape[3]] for x in (k, v)),
}
UNALIGNED = {
    "starts within 16 bytes": lambda x: torch.cat([x.new_full((3,), NAN), x.flatten()])[3:].view(x.shape),
    "odd stride of heads": lambda x: torch.cat([x, torch.full_like(x[..., :1], NAN)], 3)[..., :-1],
    "strided channels": lambda x: torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0],
}


@pytest.mark.same_on_cpu("batch")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", params(PLACED))
def test_any_aligned_layout_gives_the_same_bits(batch, layout, device):
    q, k, v, expected = placed(batch, device)
    pool = Pool.of(batch, k, v)
    pool.k, pool.v = LAYOUTS[layout](pool.k, pool.v)
    assert_same_bits(attend(batch, q, pool), expected)


@pytest.mark.parametrize("layout", UNALIGNED)
def test_pages_that_are_not_aligned(layout, device):
    """Other kernels take them."""
    batch = PLACED[0]
    q, k, v, expected = placed(batch, device)
    pool = Pool.of(batch, k, v)
    pool.k = UNALIGNED[layout](pool.k)
    assert_close(attend(batch, q, pool), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Caches: as many queries for each entry

CACHES = [
    Batch((20, 20, 20), (900, 0, 130), heads=8, heads_k=1, causal=True),
    Batch((100, 100), (1300, 129), heads=2, head_dim=128, causal=True),
    Batch((33, 33, 33), (600, 33, 1), heads=6, heads_k=2, window=(200, 0), softcap=5.0),
]


def attend_cache(batch, q, k_cache, v_cache, lengths, **options):
    """(out, lse) as those of packed queries, of a cache whose entries have so many keys, a tensor."""
    q = q.unflatten(0, (len(batch.rows), -1))
    options = dict(batch.options(q.device), cache_seqlens=lengths, return_softmax_lse=True, **options)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def lengths_of(batch, device):
    return torch.tensor(batch.keys, dtype=torch.int32, device=device)


@pytest.mark.parametrize("batch", params(CACHES))
def test_any_number_of_splits_gives_close_results(batch, device):
    q, k, v = batch.tensors(device)
    pool = Pool.of(batch, k, v)
    arguments = q, pool.k, pool.v, lengths_of(batch, device)
    results = [attend_cache(batch, *arguments, block_table=pool.table, num_splits=n) for n in (1, 0, 2, 7, 32)]
    check(batch, results[0], q, k, v)
    for result in results[1:]:
        assert_close(result, results[0])


@pytest.mark.parametrize("batch", params(CACHES))
def test_rows_of_a_cache_in_any_order(batch, device):
    """Without pages, by cache_batch_idx; positions past the lengths hold NaN."""
    q, k, v = batch.tensors(device)
    index = [4, 1, 3][: len(batch.rows)]
    caches = [x[0].new_full((6, max(batch.keys) + 9, *x[0].shape[1:]), NAN) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        for row, own in zip(index, x, strict=True):
            cache[row, : len(own)] = own
    index = torch.tensor(index, dtype=torch.int32, device=device)
    found = attend_cache(batch, q, *caches, lengths_of(batch, device), cache_batch_idx=index)
    check(batch, found, q, k, v)


@pytest.mark.parametrize("batch", params(CACHES))
def test_keys_after_a_padding(batch, device):
    """cache_leftpad skips the first positions, of whose pages the table need not say anything."""
    q, k, v = batch.tensors(device)
    pads = [(5, 2 * batch.page, 77)[b] for b in range(len(batch.rows))]
    padded = [
        [torch.cat([x[0].new_full((n, *x[0].shape[1:]), NAN), own]) for n, own in zip(pads, x, strict=True)]
        for x in (k, v)
    ]
    whole = batch.but(keys=tuple(map(len, padded[0])))
    pool = Pool.of(whole, *padded)
    for b, pad in enumerate(pads):
        pool.table[b, : pad // batch.page] = 2**31 - 1
    options = dict(block_table=pool.table, cache_leftpad=torch.tensor(pads, dtype=torch.int32, device=device))
    check(batch, attend_cache(batch, q, pool.k, pool.v, lengths_of(whole, device), **options), q, k, v)


@pytest.mark.parametrize("batch", params(CACHES))
def test_pages_behind_the_window_may_be_gone(batch, device):
    """Nothing is read of keys that no row sees: their pages may be those of others."""
    batch = batch.but(window=(150, 0))
    q, k, v = batch.tensors(device)
    pool = Pool.of(batch, k, v)
    lengths = lengths_of(batch, device)
    expected = attend_cache(batch, q, pool.k, pool.v, lengths, block_table=pool.table)
    check(batch, expected, q, k, v)
    spare = set(range(len(pool.k))).difference(pool.table.flatten().tolist()).pop()  # holds NaN
    for b, (rows, keys) in enumerate(zip(batch.rows, batch.keys, strict=True)):
        pool.table[b, : max(0, keys - rows - 150) // batch.page] = spare
    assert_same_bits(attend_cache(batch, q, pool.k, pool.v, lengths, block_table=pool.table), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Call after call


def of_other_lengths(batch):
    return [batch, batch.but(keys=tuple(reversed(batch.keys))), batch.but(keys=tuple(n // 3 for n in batch.keys))]


@pytest.mark.parametrize("num_splits", [0, 7])
@pytest.mark.parametrize("batch", params(CACHES))
def test_calls_leave_nothing_behind(batch, num_splits, device):
    """The same bits each time, also after calls with other lengths or kernels: what is counted ends as 0."""
    calls = []
    for one in (*of_other_lengths(batch), batch.but(rows=(1,) * len(batch.rows))):
        q, k, v = one.tensors(device)
        pool = Pool.of(one, k, v, page=batch.page)
        arguments = one, q, pool.k, pool.v, lengths_of(one, device)
        calls.append(functools.partial(attend_cache, *arguments, block_table=pool.table, num_splits=num_splits))
    first = [call() for call in calls]
    for call, result in zip(calls, first, strict=True):
        for _ in range(2):
            assert_same_bits(call(), result)


@pytest.mark.cuda
@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("batch", params(CACHES))
def test_graph_replays_with_other_lengths(batch, num_splits, device):
    """Captured once, replayed with other lengths and pages: what there is to do is read on the device."""
    q, k, v = batch.tensors(device)
    whole = batch.but(keys=(max(batch.keys),) * len(batch.keys))
    pool = Pool.of(whole, *([x[0].new_zeros(max(batch.keys), *x[0].shape[1:])] * len(batch.keys) for x in (k, v)))
    lengths, static_q = lengths_of(batch, device), q.clone()
    call = functools.partial(attend_cache, batch, static_q, pool.k, pool.v, lengths, num_splits=num_splits)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(block_table=pool.table)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(block_table=pool.table)
    for one in of_other_lengths(batch):
        q, k, v = one.tensors(device)
        other = Pool.of(one, k, v, page=batch.page)
        static_q.copy_(q)
        lengths.copy_(lengths_of(one, device))
        pool.table.fill_(-1)
        pool.k.fill_(NAN), pool.v.fill_(NAN)
        width = min(pool.table.shape[1], other.table.shape[1])
        pool.table[:, :width] = other.table[:, :width]
        pool.k[: len(other.k)], pool.v[: len(other.v)] = other.k, other.v
        graph.replay()
        check(one, captured, q, k, v)


@pytest.mark.parametrize("heads_k", [1, 4])
def test_a_pool_without_pages(heads_k, device):
    """Entries without keys give 0, whatever their tables hold."""
    q = torch.randn(40, 4, 128, device=device, dtype=torch.bfloat16)
    k = v = q.new_empty(0, 16, heads_k, 128)
    table = torch.tensor([[-1, 0], [3, 2**31 - 1]], dtype=torch.int32, device=device)
    lengths = bounds((38, 2), device), None, 38, 32
    options = dict(block_table=table, seqused_k=table.new_zeros(2), causal=True, return_lse=True)
    out, lse = flash_attn_varlen_func(q, k, v, *lengths, **options)
    assert not out.any() and (lse == float("inf")).all()
