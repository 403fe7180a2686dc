"""Sequences of tokens and the ways to compute their attention: dense, packed, in training, over caches and pages.

Under batch_invariant each way must give the same bits. `Problem` has few sequences and computes one in a call; `Crowd`
has many, all of them in each call, so that it compares many pairs of results in little time.
"""

import dataclasses
import itertools
import random

import torch
from cases import DTYPES
from problems import cumulative

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What problems are drawn from.

    pieces: how many tokens a call appends. decoded: how many tokens at the end of a sequence are decoded at most.
    """

    lengths: tuple
    longest: int
    heads: tuple
    head_dims: tuple
    windows: tuple
    chunks: tuple
    pieces: tuple
    decoded: int


SHORT = Sizes(
    lengths=(1, 2, 15, 17, 63, 64, 65, 100, 130),
    longest=200,
    heads=((1, 1), (2, 2), (4, 2), (6, 2), (5, 1)),
    head_dims=(8, 16, 40, 64),
    windows=(0, 5, 70),
    chunks=(7, 64, 100),
    pieces=(1, 1, 3, 40, 64),
    decoded=200,
)
LONG = Sizes(  # kernels may take 4096 keys for a piece
    lengths=(4095, 4096, 4097, 5000, 8191, 8193, 9000, 12289, 19802, 20000),
    longest=20000,
    heads=((14, 2), (4, 4), (16, 1)),
    head_dims=(64, 128),
    windows=(70, 4095, 4096, 4097, 9000),
    chunks=(100, 4096, 5000),
    pieces=(1, 16, 129, 1000, 4095, 4096, 4097),
    decoded=12,
)


def draw_options(rng, generator, sizes, heads, chunked):
    """Keywords of a call; chunked: only those with which a token sees the same keys whether later ones are there."""
    device = generator.device
    options = dict(causal=chunked or rng.random() < 0.6)
    if rng.random() < 0.3:
        options["window_size"] = (rng.choice(sizes.windows), 0 if chunked else rng.choice([0, 9]))
    if rng.random() < 0.3:
        options["softcap"] = 2.0
    if rng.random() < 0.3:
        options["alibi_slopes"] = torch.rand(heads, generator=generator, device=device)
    if rng.random() < 0.3:
        options["learnable_sink"] = torch.randn(heads, generator=generator, device=device)
    if rng.random() < 0.2:
        options["attention_chunk"] = rng.choice(sizes.chunks)
    return options


class Problem:
    """Sequences of tokens with one set of options, drawn from a seed, and each way to compute their attention.

    Every way returns (out, lse) of each sequence, out (tokens, heads, head_dim_v) and lse (heads, tokens).
    """

    def __init__(self, seed, device, chunked, sizes=SHORT):
        """chunked: as for `draw_options`."""
        self.rng = rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.sizes = device, sizes
        self.lengths = [rng.choice([*sizes.lengths, rng.randint(1, sizes.longest)]) for _ in range(3)]
        self.heads, self.heads_k = rng.choice(sizes.heads)
        self.head_dim = rng.choice(sizes.head_dims)
        self.head_dim_v = rng.choice([self.head_dim] * 3 + [24])
        self.dtype = rng.choice(["bf16", "fp16"] if device.type == "cuda" else ["bf16", "fp16", "fp32"])
        self.options = draw_options(rng, self.generator, sizes, self.heads, chunked)
        self.ranges = rng.random() < 0.2
        self.tokens = [self.draw(length) for length in self.lengths]
        self.key_ranges = [self.draw_ranges(length) for length in self.lengths]

    def draw(self, length):
        shapes = (self.heads, self.head_dim), (self.heads_k, self.head_dim), (self.heads_k, self.head_dim_v)
        return [self.randn(length, *shape) for shape in shapes]

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.device).to(DTYPES[self.dtype])

    def draw_ranges(self, length):
        """(tokens, 2): each row begins at some key."""
        start = torch.randint(0, length, (length,), generator=self.generator, device=self.device, dtype=torch.int32)
        return torch.stack([start, torch.full_like(start, 1 << 20)], -1)

    def but(self, ranges):
        """The options, with key ranges (.., rows, 2) for these rows if there are any."""
        return self.options | ({"key_ranges": ranges} if self.ranges else {})

    def alone(self, training=False):
        """A dense call for each sequence, which is what the others are compared with."""
        return [self._alone(i, training) for i in range(len(self.lengths))]

    def _alone(self, i, training):
        q, k, v = (x[None].clone().requires_grad_(training) for x in self.tokens[i])
        out, lse = flash_attn_func(q, k, v, return_lse=True, **self.but(self.key_ranges[i][None, None]))
        return out[0].detach(), lse[0].detach()

    def batched(self):
        """Each sequence among others of its length."""
        found = []
        for i, length in enumerate(self.lengths):
            place, batch = self.rng.randrange(5), 5
            entries = [self.tokens[i] if j == place else self.draw(length) for j in range(batch)]
            ranges = [self.key_ranges[i] if j == place else self.draw_ranges(length) for j in range(batch)]
            q, k, v = (torch.stack(x) for x in zip(*entries, strict=True))
            options = self.but(torch.stack(ranges)[:, None])
            out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
            found.append((out[place], lse[place]))
        return found

    def packed(self):
        """All sequences in one call of packed tokens, in another order."""
        order = self.rng.sample(range(len(self.lengths)), len(self.lengths))
        q, k, v = (torch.cat([self.tokens[i][j] for i in order]) for j in range(3))
        bounds = cumulative([self.lengths[i] for i in order], self.device)
        longest = max(self.lengths) + self.rng.randrange(100)
        options = self.but(torch.cat([self.key_ranges[i] for i in order])[None])
        out, lse = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, return_lse=True, **options)
        pieces = dict(zip(order, itertools.pairwise(bounds.tolist()), strict=True))
        return [(out[a:b], lse[:, a:b]) for a, b in (pieces[i] for i in range(len(order)))]

    def qkvpacked(self):
        """Queries, keys and values in one tensor; None if they differ in their heads."""
        if self.heads != self.heads_k or self.head_dim != self.head_dim_v:
            return None
        found = []
        for i, tokens in enumerate(self.tokens):
            qkv = torch.stack(tokens, 1)[None]
            options = self.but(self.key_ranges[i][None, None])
            out, lse = flash_attn_qkvpacked_func(qkv, return_lse=True, **options)
            found.append((out[0], lse[0]))
        return found

    def cached(self, paged, cut):
        """All sequences over caches, to which calls append their tokens. cut: into calls of random lengths."""
        batch, page = len(self.lengths), self.rng.choice([16, 48, 256])
        sizes = (self.heads_k, self.head_dim), (self.heads_k, self.head_dim_v)
        capacity = max(self.lengths) + self.rng.randrange(70)
        if paged:
            columns = -(-capacity // page)
            places = torch.randperm(batch * columns + 2, generator=self.generator, device=self.device)
            where = dict(block_table=places[: batch * columns].int().view(batch, columns))
            caches = [self.randn(len(places), page, *size) * torch.nan for size in sizes]
        else:
            rows = self.rng.sample(range(batch + 2), batch)
            where = dict(cache_batch_idx=torch.tensor(rows, dtype=torch.int32, device=self.device))
            caches = [self.randn(batch + 2, capacity, *size) * torch.nan for size in sizes]
        if self.head_dim_v != self.head_dim or not cut:
            return self._one_at_a_time(caches, where, cut)
        return self._together(caches, where)

    def _one_at_a_time(self, caches, where, cut):
        return [self._pieces(i, caches, {name: x[i : i + 1] for name, x in where.items()}, cut) for i in range(3)]

    def _pieces(self, i, caches, where, cut):
        outs, lses, start, length = [], [], 0, self.lengths[i]
        while start < length:
            stop = min(length, start + self.rng.choice(self.sizes.pieces)) if cut else length
            q, k, v = (x[None, start:stop] for x in self.tokens[i])
            options = self.but(self.key_ranges[i][None, None, start:stop])
            filled = torch.tensor([start], dtype=torch.int32, device=self.device)
            out, lse = flash_attn_with_kvcache(
                q, *caches, k, v, cache_seqlens=filled, return_softmax_lse=True, **where, **options
            )
            outs.append(out[0])
            lses.append(lse[0])
            start = stop
        return torch.cat(outs), torch.cat(lses, -1)

    def _together(self, caches, where):
        """Decoding of a batch, in which each entry gets one token at a time, from where it was prefilled."""
        starts = [self.rng.randint(max(0, length - self.sizes.decoded), length - 1) for length in self.lengths]
        first = [self._prefilled(i, start, caches, where) for i, start in enumerate(starts)]
        found = [([out], [lse]) for out, lse in first]
        while any(start < length for start, length in zip(starts, self.lengths, strict=True)):
            at = [min(start, length - 1) for start, length in zip(starts, self.lengths, strict=True)]
            q, k, v = (torch.stack([self.tokens[i][j][t : t + 1] for i, t in enumerate(at)]) for j in range(3))
            options = self.but(torch.stack([self.key_ranges[i][t : t + 1] for i, t in enumerate(at)])[:, None])
            filled = torch.tensor(at, dtype=torch.int32, device=self.device)
            out, lse = flash_attn_with_kvcache(
                q, *caches, k, v, cache_seqlens=filled, return_softmax_lse=True, **where, **options
            )
            for i, start in enumerate(starts):
                if start < self.lengths[i]:
                    found[i][0].append(out[i])
                    found[i][1].append(lse[i])
            starts = [start + 1 for start in starts]
        return [(torch.cat(outs), torch.cat(lses, -1)) for outs, lses in found]

    def _prefilled(self, i, stop, caches, where):
        one = {name: x[i : i + 1] for name, x in where.items()}
        q, k, v = (x[None, :stop] for x in self.tokens[i])
        options = self.but(self.key_ranges[i][None, None, :stop])
        empty = torch.zeros(1, dtype=torch.int32, device=self.device)
        if stop == 0:
            return q.new_empty(0, self.heads, self.head_dim_v), q.new_empty(self.heads, 0, dtype=torch.float32)
        out, lse = flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=empty, return_softmax_lse=True, **one, **options
        )
        return out[0], lse[0]

    def over_pages(self):
        """The last tokens of each sequence in one call of packed queries over pages that hold all keys."""
        page, batch = self.rng.choice([16, 48, 256]), len(self.lengths)
        columns = -(-max(self.lengths) // page)
        table = torch.randperm(batch * columns + 1, generator=self.generator, device=self.device)
        table = table[: batch * columns].int().view(batch, columns)
        pools = [self.randn(batch * columns + 1, page, *x.shape[1:]) for x in self.tokens[0][1:]]
        for i, length in enumerate(self.lengths):
            places = torch.arange(length, device=self.device)
            rows, within = table[i].long()[places // page], places % page
            for pool, x in zip(pools, self.tokens[i][1:], strict=True):
                pool[rows, within] = x
        counts = [self.rng.randint(1, length) for length in self.lengths]
        lasts = [slice(length - count, length) for length, count in zip(self.lengths, counts, strict=True)]
        q = torch.cat([tokens[0][last] for tokens, last in zip(self.tokens, lasts, strict=True)])
        ranges = torch.cat([x[last] for x, last in zip(self.key_ranges, lasts, strict=True)])
        bounds = cumulative(counts, self.device)
        out, lse = flash_attn_varlen_func(
            q,
            *pools,
            bounds,
            None,
            max(counts),
            max(self.lengths),
            block_table=table,
            seqused_k=torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            return_lse=True,
            **self.but(ranges[None]),
        )
        spans = itertools.pairwise(bounds.tolist())
        return [(last, out[a:b], lse[:, a:b]) for last, (a, b) in zip(lasts, spans, strict=True)]


class Crowd:
    """Many sequences of the same heads and options, and calls with all of them. Returns are compared on the device."""

    def __init__(self, seed, device, count, sizes=SHORT):
        self.rng = rng = random.Random(seed)
        self.generator = generator = torch.Generator(device).manual_seed(seed)
        self.device, self.count = device, count
        self.lengths = [
            rng.choice([*sizes.lengths, *(rng.randint(1, sizes.longest) for _ in range(9))]) for _ in range(count)
        ]
        self.heads, self.heads_k = rng.choice(sizes.heads)
        self.head_dim, self.dtype = rng.choice(sizes.head_dims), DTYPES[rng.choice(["bf16", "fp16"])]
        self.options = draw_options(rng, generator, sizes, self.heads, chunked=True)
        self.starts = [0, *itertools.accumulate(self.lengths)]  # of the tokens of each sequence
        shapes = [(self.starts[-1], heads, self.head_dim) for heads in (self.heads, self.heads_k, self.heads_k)]
        self.q, self.k, self.v = (self.randn(*shape) for shape in shapes)
        self.out, self.lse = self._varlen(range(count))
        self.differing = []  # (name of a way, one flag for each sequence)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def compare_all(self):
        """Compute all sequences in each way. Returns how many results have been compared, each with the first one."""
        self.among_others()
        self.in_training()
        self.over_pages()
        self.decoded(appended=0)
        self.decoded(appended=min(self.rng.choice([1, 3, 9]), min(self.lengths)))
        found = [(name, flags.nonzero().flatten().tolist()) for name, flags in self.differing if flags.any()]
        heads = f"heads {self.heads}.{self.heads_k} of {self.head_dim}, {self.dtype}"
        assert not found, f"{found} differ; lengths {self.lengths}, {heads}, {self.options}"
        return sum(len(flags) for _, flags in self.differing)

    def among_others(self):
        """Groups of sequences in other orders."""
        order = self.rng.sample(range(self.count), self.count)
        size = self.rng.choice([1, 2, 3, 7, self.count]) if self.count < 8 else self.rng.choice([self.count // 4, 31])
        for start in range(0, self.count, size):
            some = order[start : start + size]
            self._compare("among others", some, self.lengths, *self._varlen(some, self.rng.randrange(100)))

    def in_training(self):
        out, lse = self._varlen(range(self.count), requires_grad=True)
        self._compare("in training", range(self.count), self.lengths, out.detach(), lse.detach())

    def over_pages(self):
        """The last tokens of each, some few and some many, in one call over pages."""
        order, page = self.rng.sample(range(self.count), self.count), self.rng.choice([16, 48, 64, 256])
        table, pools = self._paged(order, page)
        counts = [self.rng.choice([1, 1, self.rng.randint(1, self.lengths[i])]) for i in order]
        rows = self._rows(order, counts)
        out, lse = flash_attn_varlen_func(
            self.q[rows],
            *pools,
            cumulative(counts, self.device),
            None,
            max(counts),
            max(self.lengths),
            block_table=table,
            seqused_k=self._int32([self.lengths[i] for i in order]),
            return_lse=True,
            **self.options,
        )
        self._compare("over pages", order, counts, out, lse)

    def decoded(self, appended):
        """The last tokens of each in one call over caches or pages, to which it may append them."""
        order, tokens = self.rng.sample(range(self.count), self.count), max(appended, 1)
        if self.rng.random() < 0.5:
            page = self.rng.choice([16, 48, 64, 256])
            table, caches = self._paged(order, page)
            where = dict(block_table=table)
        else:
            capacity = max(self.lengths) + self.rng.randrange(70)
            table, caches = self._paged(order, capacity)  # a page for each
            where = dict(cache_batch_idx=table[:, 0].contiguous())
        rows = self._rows(order, [tokens] * self.count)
        q, k, v = (x[rows].unflatten(0, (self.count, tokens)) for x in (self.q, self.k, self.v))
        out, lse = flash_attn_with_kvcache(
            q,
            *caches,
            *((k, v) if appended else (None, None)),
            cache_seqlens=self._int32([self.lengths[i] - appended for i in order]),
            return_softmax_lse=True,
            **where,
            **self.options,
        )
        name = f"decoded, {appended} appended to {next(iter(where))}"
        self._compare(name, order, [tokens] * self.count, out.flatten(0, 1), lse.transpose(0, 1).flatten(1))

    def _varlen(self, order, more=0, requires_grad=False):
        """A call with whole sequences. more: how much the bound of their lengths is above the longest one."""
        lengths = [self.lengths[i] for i in order]
        rows, bounds, longest = self._rows(order, lengths), cumulative(lengths, self.device), max(lengths) + more
        q, k, v = (x[rows].requires_grad_(requires_grad) for x in (self.q, self.k, self.v))
        return flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, return_lse=True, **self.options)

    def _rows(self, order, counts):
        """Where the last tokens of these sequences are, one after the other."""
        spans = [range(self.starts[i + 1] - n, self.starts[i + 1]) for i, n in zip(order, counts, strict=True)]
        return torch.tensor([row for span in spans for row in span]).to(self.device)

    def _paged(self, order, page):
        """A block table of these sequences, and pools of keys and values, whose unused places are NaN."""
        columns = -(-max(self.lengths) // page)
        table = torch.tensor(self.rng.sample(range(self.count * columns + 3), self.count * columns))
        table = table.view(self.count, columns).int()
        places = [
            table[row, torch.arange(self.lengths[i]) // page] * page + torch.arange(self.lengths[i]) % page
            for row, i in enumerate(order)
        ]
        places = torch.cat(places).long().to(self.device)
        rows = self._rows(order, [self.lengths[i] for i in order])
        pools = []
        for x in (self.k, self.v):
            pool = x.new_full(((self.count * columns + 3) * page, *x.shape[1:]), torch.nan)
            pool[places] = x[rows]
            pools.append(pool.unflatten(0, (-1, page)))
        return table.to(self.device), pools

    def _compare(self, name, order, counts, out, lse):
        """Compare the last rows, counts of them, of these sequences with what the first call gave."""
        counts = [counts[i] for i in order] if counts is self.lengths else counts
        rows = self._rows(order, counts)
        differs = (out != self.out[rows]).flatten(1).any(1) | (lse != self.lse[:, rows]).any(0)
        entry = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(self.device)
        flags = torch.zeros(len(counts), dtype=torch.int32, device=self.device).index_add_(0, entry, differs.int())
        self.differing.append((name, flags > 0))

    def _int32(self, values):
        return torch.tensor(values, dtype=torch.int32).to(self.device)


def assert_same_bits(found, expected, what):
    for i, ((out, lse), (out0, lse0)) in enumerate(zip(found, expected, strict=True)):
        for name, x, y in (("out", out, out0), ("lse", lse, lse0)):
            assert torch.equal(x, y), f"{what}: {name} of sequence {i} differs in {(x != y).sum()} of {x.numel()}"
