"""The bits of attention under batch_invariant: they depend on no neighbour, layout or chunk, in training or serving."""

import itertools
import pathlib
import random

import pytest
import torch
from cases import DTYPES
from functorch.compile import make_boxed_func
from problems import cumulative
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import (
    _library,
    batch_invariant,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn import flash_attn_interface as interface
from flash_attn._ops import invariance
from flash_attn.functional import entropy


class Problem:
    """Sequences of tokens with one set of options, drawn from a seed, and each way to compute their attention.

    Every way returns (out, lse) of each sequence, out (tokens, heads, head_dim_v) and lse (heads, tokens).
    """

    def __init__(self, seed, device, chunked):
        """chunked: only options with which a token sees the same keys whether or not later ones are there."""
        self.rng = rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device
        self.lengths = [rng.choice([1, 2, 15, 17, 63, 64, 65, 100, 130, rng.randint(1, 200)]) for _ in range(3)]
        self.heads, self.heads_k = rng.choice([(1, 1), (2, 2), (4, 2), (6, 2), (5, 1)])
        self.head_dim = rng.choice([8, 16, 40, 64])
        self.head_dim_v = rng.choice([self.head_dim] * 3 + [24])
        self.dtype = rng.choice(["bf16", "fp16"] if device.type == "cuda" else ["bf16", "fp16", "fp32"])
        self.options = dict(causal=chunked or rng.random() < 0.6)
        if rng.random() < 0.3:
            self.options["window_size"] = (rng.choice([0, 5, 70]), 0 if chunked else rng.choice([0, 9]))
        if rng.random() < 0.3:
            self.options["softcap"] = 2.0
        if rng.random() < 0.3:
            self.options["alibi_slopes"] = torch.rand(self.heads, generator=self.generator, device=device)
        if rng.random() < 0.3:
            self.options["learnable_sink"] = torch.randn(self.heads, generator=self.generator, device=device)
        if rng.random() < 0.2:
            self.options["attention_chunk"] = rng.choice([7, 64, 100])
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
            stop = min(length, start + self.rng.choice([1, 1, 3, 40, 64])) if cut else length
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
        starts = [self.rng.randint(0, length - 1) for length in self.lengths]
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
            rows, within = table[i].long()[torch.arange(length) // page], torch.arange(length) % page
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


def assert_same_bits(found, expected, what):
    for i, ((out, lse), (out0, lse0)) in enumerate(zip(found, expected, strict=True)):
        for name, x, y in (("out", out, out0), ("lse", lse, lse0)):
            assert torch.equal(x, y), f"{what}: {name} of sequence {i} differs in {(x != y).sum()} of {x.numel()}"


COUNT = 12


@pytest.mark.parametrize("level", [1, 2])
def test_bits_depend_on_no_neighbour(device, level):
    for seed in range(COUNT):
        with batch_invariant(level):
            problem = Problem(seed, device, chunked=False)
            expected = problem.alone()
            assert_same_bits(problem.batched(), expected, f"{seed} in a batch")
            assert_same_bits(problem.packed(), expected, f"{seed} packed")
            if (found := problem.qkvpacked()) is not None:
                assert_same_bits(found, expected, f"{seed} with qkv packed")


def test_bits_depend_on_no_chunk_or_cache(device):
    for seed in range(COUNT):
        with batch_invariant(2):
            problem = Problem(seed, device, chunked=True)
            expected = problem.alone()
            assert_same_bits(problem.alone(training=True), expected, f"{seed} in training")
            for paged, cut in itertools.product([False, True], repeat=2):
                assert_same_bits(problem.cached(paged, cut), expected, f"{seed} cached, {paged=} {cut=}")
            found = problem.over_pages()
            rows = [(out[last], lse[:, last]) for (last, *_), (out, lse) in zip(found, expected, strict=True)]
            assert_same_bits([(out, lse) for _, out, lse in found], rows, f"{seed} over pages")


def test_bits_depend_on_no_bias_beside(device):
    """A bias whose rows and keys belong to one entry."""
    torch.manual_seed(0)
    for length, count in ((70, 70), (130, 1), (65, 33)):
        q, k, v = (torch.randn(4, n, 4, 16, device=device) for n in (count, length, length))
        for dtype in (torch.float32, torch.bool):
            bias = torch.randn(4, 4, count, length, device=device)
            bias = bias > 0 if dtype is torch.bool else bias
            with batch_invariant():
                whole = flash_attn_func(q, k, v, attn_bias=bias, return_lse=True)
                one = flash_attn_func(q[2:3], k[2:3], v[2:3], attn_bias=bias[2:3], return_lse=True)
            for x, y in zip(one, whole, strict=True):
                assert torch.equal(x[0], y[2])


def test_threads_change_no_bit(device):
    if device.type != "cpu":
        pytest.skip("threads are of the CPU")
    before = torch.get_num_threads()
    for seed in range(6):
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with batch_invariant(2):
                found.append(Problem(seed, device, chunked=False).packed())
        torch.set_num_threads(before)
        assert_same_bits(*found, f"{seed} in threads")


def test_padding_and_unused_keys_change_no_bit(device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, device=device, dtype=torch.bfloat16) for n in (1, 90, 90))
    with batch_invariant(2):
        expected = flash_attn_func(q, k, v, causal=True)
        for pad, after in ((0, 1), (5, 0), (64, 30), (63, 500)):
            caches = [torch.full((1, pad + 90 + after, 2, 16), torch.nan, device=device).to(q) for _ in range(2)]
            for cache, x in zip(caches, (k, v), strict=True):
                cache[:, pad : pad + 90] = x
            found = flash_attn_with_kvcache(
                q,
                *caches,
                cache_seqlens=pad + 90,
                cache_leftpad=torch.tensor([pad], dtype=torch.int32, device=device),
                causal=True,
            )
            assert torch.equal(found, expected), (pad, after)


@pytest.mark.parametrize("seed", range(6))
def test_results_are_right(device, seed):
    problem = Problem(seed, device, chunked=False)
    problem.ranges = False
    problem.options.pop("attention_chunk", None)
    with batch_invariant(2):
        found = problem.alone()
    plain = problem.alone()
    for (out, lse), (out0, lse0) in zip(found, plain, strict=True):
        unit = torch.finfo(out.dtype).eps
        assert (out.double() - out0.double()).abs().max() <= 4 * unit * out0.abs().max()
        assert torch.allclose(lse, lse0, rtol=1e-6, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# The switch


def test_the_switch():
    assert flash_attn.get_batch_invariant() == 0
    with batch_invariant():
        assert flash_attn.get_batch_invariant() == 1
        with batch_invariant(2):
            assert flash_attn.get_batch_invariant() == 2
        assert flash_attn.get_batch_invariant() == 1
        with pytest.raises(KeyError), batch_invariant(0):
            raise KeyError
        assert flash_attn.get_batch_invariant() == 1
    assert flash_attn.get_batch_invariant() == 0


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, ValueError, "level must be the integer 0, 1 or 2, found 3"),
        (-1, ValueError, "level must be the integer 0, 1 or 2, found -1"),
        (True, TypeError, "level must be the integer 0, 1 or 2, found bool"),
        ("1", TypeError, "level must be the integer 0, 1 or 2, found str"),
    ],
)
def test_levels_that_do_not_exist(value, error, message):
    for choose in (flash_attn.set_batch_invariant, lambda level: batch_invariant(level).__enter__()):
        with pytest.raises(error, match=message):
            choose(value)
    assert flash_attn.get_batch_invariant() == 0


@pytest.mark.parametrize(("value", "level"), [(None, 0), ("", 0), ("0", 0), ("1", 1), (" 2 ", 2)])
def test_environment(monkeypatch, value, level):
    if value is None:
        monkeypatch.delenv("FLASH_ATTENTION_BATCH_INVARIANT", raising=False)
    else:
        monkeypatch.setenv("FLASH_ATTENTION_BATCH_INVARIANT", value)
    assert invariance._from_environment() == level


def test_environment_with_another_value(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="FLASH_ATTENTION_BATCH_INVARIANT must be 0, 1 or 2, found 'yes'"):
        invariance._from_environment()


def test_kernels_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(torch.ops.flash_attn, "set_batch_invariant", told.append, raising=False)
    with batch_invariant(2):
        pass
    assert told == [2, 0]


def test_kernels_that_cannot_be_told(monkeypatch):
    """The level stays what it was."""
    monkeypatch.setattr(torch.ops.flash_attn, "set_batch_invariant", None, raising=False)
    monkeypatch.setattr(invariance, "_KERNELS", pathlib.Path("old/_kernels.so"))
    for level in (1, 2):
        message = f"level must be 0 with the kernels of old/_kernels.so, found {level}: they were built before"
        with pytest.raises(RuntimeError, match=message):
            flash_attn.set_batch_invariant(level)
        assert flash_attn.get_batch_invariant() == 0
    with batch_invariant(0):
        pass


def test_other_threads_see_the_level(device):
    """The backward runs in threads of autograd."""
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            seen.append(flash_attn.get_batch_invariant())
            return dx

    with batch_invariant(2):
        Seen.apply(torch.ones(1, device=device, requires_grad=True)).backward()
    assert seen == [2]


def test_compiled_functions_follow_the_level(device):
    """Ops read the level when they run, and code that asks for it is traced anew."""
    backend = CompileCounterWithBackend("aot_eager")
    q, k, v = (torch.randn(3, 40, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3))

    @torch.compile(backend=backend, fullgraph=True)
    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True), q.sum() * 0 + flash_attn.get_batch_invariant()

    for level in (0, 2, 1, 0, 2):
        with batch_invariant(level):
            out, seen = attend(q, k, v)
            assert seen == level
            assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    assert backend.frame_count == 3


@torch.library.custom_op("test_batch_invariance::level", mutates_args=())
def _level_at_run_time(x: torch.Tensor) -> torch.Tensor:
    return torch.full((), flash_attn.get_batch_invariant(), device=x.device)


_level_at_run_time.register_fake(lambda x: x.new_empty((), dtype=torch.int64))


def test_levels_within_compiled_functions(device, recwarn):
    """Setting a level is outside of any graph, so that what follows it is computed at that level."""

    def within_context(x):
        with batch_invariant(2):
            return _level_at_run_time(x), flash_attn.get_batch_invariant()

    def between_choices(x):
        flash_attn.set_batch_invariant(2)
        found = _level_at_run_time(x), flash_attn.get_batch_invariant()
        flash_attn.set_batch_invariant(0)
        return found

    x = torch.ones(3, device=device)
    for function in (within_context, between_choices):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert torch.compile(function, backend="aot_eager")(x) == (2, 2)
        assert flash_attn.get_batch_invariant() == 0
    assert not [str(each.message) for each in recwarn if "lru_cache" in str(each.message)]


def test_what_cannot_be_kept_is_refused(device):
    q, k, v = (torch.randn(1, 8, 2, 16, device=device) for _ in range(3))
    bounds, filled = cumulative([8], device), torch.tensor([8], dtype=torch.int32, device=device)
    refused = [
        (r"dropout_p must be 0 where .* is 2, found 0.1", lambda: flash_attn_func(q, k, v, dropout_p=0.1)),
        (r"return_max_logit must be False where .* is 2", lambda: flash_attn_func(q, k, v, return_max_logit=True)),
        (
            r"return_max_logit must be False where .* is 2",
            lambda: flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 8, 8, return_max_logit=True),
        ),
        (
            r"return_max_logit must be False where .* is 2",
            lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=filled, return_max_logit=True),
        ),
    ]
    for message, call in refused:
        with batch_invariant(2), pytest.raises(ValueError, match=message):
            call()
        for level in (0, 1):
            with batch_invariant(level):
                call()
    for level in (1, 2):
        with (
            batch_invariant(level),
            pytest.raises(NotImplementedError, match="must have no tangents and be in no transform"),
        ):
            torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))


def test_what_kernels_compute_in_other_calls_only_is_refused(device, monkeypatch):
    """As if there were kernels: for these rows they serve without the lengths of queries, or over caches."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: x.dtype != torch.float32)
    q, k, v = (torch.randn(1, 8, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    slopes, eight = torch.rand(2, device=device), torch.tensor([8], dtype=torch.int32, device=device)
    rows = dict(seqused_q=eight, alibi_slopes=slopes)
    with batch_invariant(2):
        with pytest.raises(ValueError, match=r"must run in kernels .* is 2, found seqused_q with alibi_slopes, which"):
            flash_attn_func(q, k, v, **rows)
        with pytest.raises(ValueError, match=r"must run in kernels .* is 2, found attn_bias with one key, which"):
            flash_attn_func(q, k[:, :1], v[:, :1], attn_bias=torch.zeros(8, 1, device=device))
        flash_attn_func(q.float(), k.float(), v.float(), **rows)
        wide = torch.randn(1, 8, 1, 520, device=device, dtype=torch.bfloat16)  # more channels than kernels ever take
        flash_attn_func(wide, wide, wide)
    with batch_invariant(1):
        flash_attn_func(q, k, v, **rows)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


class Deterministic(TorchDispatchMode):
    """Whether each op of a backward of attention that is called within was asked for deterministic gradients."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("flash_attn::bwd"):
            names = [argument.name for argument in func._schema.arguments]
            place = names.index("deterministic")
            self.found.append(args[place] if len(args) > place else False)
        return func(*args, **(kwargs or {}))


def _backward(q, k, v):
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    with torch.no_grad():
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        interface._flash_attn_backward(out, q, k, v, out, lse, *gradients, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    return q.sum() * 0


def _varlen(q, k, v):
    bounds = cumulative([8, 8], q.device)
    return flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, 8, 8)


DIFFERENTIABLE = {
    "dense": flash_attn_func,
    "varlen": _varlen,
    "packed": lambda q, k, v: flash_attn_qkvpacked_func(torch.stack([q, k, v], 2)),
    "with a sink": lambda q, k, v: flash_attn_func(q, k, v, learnable_sink=q[0, 0, :, 0]),
    "with a bias": lambda q, k, v: flash_attn_func(q, k, v, attn_bias=q[0, 0, 0, 0].expand(8, 8)),
    "backward by itself": _backward,
    "entropy": lambda q, k, v: entropy(q, k),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_deterministic(name, device):
    """In the calls that are made at a level, wherever their backward runs."""
    q, k, v = (torch.randn(2, 8, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for level, of_backward in ((0, 0), (1, 1), (2, 2), (1, 0), (0, 1)):
        with Deterministic() as asked:
            with batch_invariant(level):
                result = DIFFERENTIABLE[name](q, k, v)
            with batch_invariant(of_backward):
                result.sum().backward()
        assert asked.found == [level > 0]


def test_compiled_gradients_are_deterministic(device):
    found = []

    def look(graph, _):
        found.extend(node.kwargs["deterministic"] for node in graph.graph.nodes if "deterministic" in node.kwargs)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=look)
    attend = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True).sum(), backend=backend)
    q, k, v = (torch.randn(2, 8, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for level in (1, 0, 2, 1):
        with batch_invariant(level):
            attend(q, k, v).backward()
    assert found == [True, False, True]
