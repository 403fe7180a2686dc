"""Test cases as data: one small dataclass, named edge cases, and samples in which every pair of values meets."""

import collections
import dataclasses
import itertools
import random
import zlib

import pytest
import torch

WIDE = False  # whether samples are wide: conftest.py says so if -m asks for slow tests
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem. `str(case)` is its id and seeds its tensors."""

    batch: int = 2
    seqlen_q: int = 64
    seqlen_k: int = 64
    heads: int = 4
    heads_k: int = 4
    head_dim: int = 64
    dtype: str = "bf16"
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "h": slopes (heads,), "bh": (batch, heads)
    dropout_p: float = 0.0
    deterministic: bool = False
    layout: str = "contiguous"  # or another of LAYOUTS
    scale_q: float = 1.0  # q is drawn from N(0, scale_q^2)

    def __str__(self):
        parts = [
            f"b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}",
            f"h{self.heads}.{self.heads_k}-d{self.head_dim}-{self.dtype}",
            "causal" * self.causal,
            "w{}.{}".format(*self.window) * (tuple(self.window) != (-1, -1)),
            f"softcap{self.softcap:g}" * (self.softcap > 0),
            f"alibi_{self.alibi}" * bool(self.alibi),
            f"dropout{self.dropout_p:g}" * (self.dropout_p > 0),
            "deterministic" * self.deterministic,
            self.layout * (self.layout != "contiguous"),
            f"q*{self.scale_q:g}" * (self.scale_q != 1),
        ]
        return "-".join(part for part in parts if part)

    def generator(self, device):
        if torch.device(device).type == "meta":
            return None
        return torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))

    def tensors(self, device):
        """q, k, v and a gradient dout for the output, standard normal, laid out as `layout` says."""
        generator, dtype = self.generator(device), DTYPES[self.dtype]
        query, key = (self.seqlen_q, self.heads), (self.seqlen_k, self.heads_k)

        def draw(seqlen, heads, layout, scale=1.0):
            x = torch.randn(self.batch, seqlen, heads, self.head_dim, device=device, generator=generator) * scale
            return laid_out(x.to(dtype), layout)

        return (
            draw(*query, self.layout, self.scale_q),
            *(draw(*key, self.layout) for _ in "kv"),
            draw(*query, "contiguous"),
        )

    def alibi_slopes(self, device):
        shape = {"": None, "h": (self.heads,), "bh": (self.batch, self.heads)}[self.alibi]
        return None if shape is None else 0.3 * torch.rand(shape, device=device, generator=self.generator(device))

    def options(self, device):
        """The keywords that the public functions and the oracle share."""
        return dict(
            causal=self.causal, window_size=self.window, softcap=self.softcap, alibi_slopes=self.alibi_slopes(device)
        )

    def with_stored_out(self, device):
        """The case in a dtype in which callers get the out that the backward gets: fp32 where there are no kernels."""
        return self if device.type == "cuda" else self.but(dtype="fp32")

    def but(self, **changes):
        return dataclasses.replace(self, **changes)


def laid_out(x, layout):
    """The values of x (batch, seqlen, heads, head_dim) in other strides."""
    if layout == "contiguous":
        return x
    if layout == "bhsd":  # a (batch, heads, seqlen, head_dim) buffer seen through a transposition
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":  # part of a wider head dim: 16-byte alignment is lost where head_dim is odd
        return torch.cat([x, torch.full_like(x[..., :1], float("nan"))], dim=-1)[..., :-1]
    if layout == "packed":  # one of three in (batch, seqlen, 3, heads, head_dim)
        return torch.stack([torch.full_like(x, float("nan")), x, torch.full_like(x, float("nan"))], dim=2)[:, :, 1]
    if layout == "last_dim_strided":
        return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]
    if layout == "unaligned":  # starts in the middle of 16 bytes
        return torch.cat([x.new_full((3,), float("nan")), x.flatten()])[3:].view(x.shape)
    raise ValueError(f"layout {layout!r}")


LAYOUTS = ["contiguous", "bhsd", "sliced", "packed", "last_dim_strided", "unaligned"]


def cover(factors, *, valid=lambda row: True, seed=0):
    """Rows (dicts) over `factors` (name -> values) so that every pair of values of two factors occurs in one of them.

    Greedy: each row starts from a pair not seen yet and is completed with the values that see most new pairs.
    `valid(row)` says whether a complete row is allowed; a pair that no valid row was found for is left out.
    """
    rng, rows = random.Random(seed), []
    sizes = [(name, len(values), len(values).bit_length()) for name, values in factors.items()]

    def first_valid(completions):
        return next((row for row in completions if valid(_values(row, factors))), None)

    def drawn(pair, draw=rng.getrandbits):
        row = {}
        for name, size, bits in sizes:  # as rng.randrange(size) draws, in a third of the time
            while (i := draw(bits)) >= size:
                pass
            row[name] = i
        row.update(pair)
        return row

    pairs = [pair for names in itertools.combinations(factors, 2) for pair in _index_pairs(names, factors)]
    found = {pair: first_valid(drawn(pair) for _ in range(1000)) for pair in pairs}
    missing = {pair for pair, row in found.items() if row is not None}
    for pair in pairs:
        if pair in missing:
            row = first_valid(_completed(pair, factors, rng, missing) for _ in range(10)) or found[pair]
            missing.difference_update(itertools.combinations(((name, row[name]) for name in factors), 2))
            rows.append(_values(row, factors))
    return rows


def _index_pairs(names, factors):
    return itertools.product(*([(name, i) for i in range(len(factors[name]))] for name in names))


def _values(row, factors):
    return {name: factors[name][row[name]] for name in factors}


def _completed(pair, factors, rng, missing):
    """A row (name -> index) with `pair` in it, filled up in random order, each value being in most missing pairs."""
    row, position = dict(pair), {name: i for i, name in enumerate(factors)}

    def new_pairs(one):
        return sum(
            ((other, one) if position[other[0]] < position[one[0]] else (one, other)) in missing
            for other in row.items()
        )

    for name in rng.sample([name for name in factors if name not in row], k=len(factors) - 2):
        indices = rng.sample(range(len(factors[name])), k=len(factors[name]))
        row[name] = max(((name, i) for i in indices), key=new_pairs)[1]
    return row


def random_rows(factors, count, *, valid=lambda row: True, seed=0):
    """`count` valid rows drawn at random."""
    rng = random.Random(seed)
    draws = ({name: rng.choice(values) for name, values in factors.items()} for _ in itertools.count())
    return list(itertools.islice(filter(valid, draws), count))


def covering_sample(factors, count, *, valid=lambda row: True, seed=0):
    """`count` rows: a pairwise cover, and beyond it rows drawn at random."""
    rows = cover(factors, valid=valid, seed=seed)
    return rows + random_rows(factors, count - len(rows), valid=valid, seed=seed + 1)


def uncovered(rows, factors, *, valid=lambda row: True, tied=()):
    """The pairs of values of two factors that no row has, though a valid row could. `tied`: what `valid` looks at."""

    def pairs(rows):
        return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}

    def product(names):
        return (dict(zip(names, values, strict=True)) for values in itertools.product(*map(factors.get, names)))

    tied = [name for name in factors if name in tied]
    contradictory = pairs(product(tied)) - pairs(filter(valid, product(tied)))
    every = {pair for names in itertools.combinations(factors, 2) for pair in pairs(product(names))}
    return every - contradictory - pairs(rows)


def sample(factors, make, *, valid=lambda row: True, wide=None, marks=lambda case: pytest.mark.slow):
    """pytest parameters: `make(**row)` of a pairwise cover; and if -m asks for slow tests, of a wider sample.

    That has the rows of wide(), or 200 random ones, and the marks of marks(case).
    """
    cases = [make(**row) for row in cover(factors, valid=valid)]
    if WIDE:
        rows = wide() if wide else random_rows(factors, 200, valid=valid, seed=1)
        cases += [(case, marks(case)) for case in (make(**row) for row in rows)]
    return params(cases)


def repeated(items):
    """The tests that compute on the CPU what others do there, and that wait for `-m slow` where no kernels run.

    `@pytest.mark.same_on_cpu("head_dim", "deterministic")` says that these parameters of a test, or fields of a case
    among them, choose a kernel on a GPU, but nothing in the reference or in a kernel of Triton; "case" are all fields
    of one. On the CPU so many of its tests stay that all pairs of values of the other parameters occur; where several
    would do, the one whose values of the named parameters have occurred least. `@pytest.mark.cover(2)` says that pairs
    of values are enough there, of all parameters; `cover(1)`, that their values are, which have no part in each other.
    """
    tests = {}
    for item in items:
        thinned = any(map(item.get_closest_marker, ("same_on_cpu", "cover")))
        if thinned and not any(map(item.get_closest_marker, ("slow", "cuda"))):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    return [item for members in tests.values() for item in _beside_cover(members)]


def _beside_cover(items):
    """The items of one test that a cover of the values of its parameters, or of pairs of them, does without."""
    wanted, named, occurred = {}, {}, collections.Counter()
    for item in items:
        same, cover = map(item.get_closest_marker, ("same_on_cpu", "cover"))
        named[item], others = _values_of(item, same.args if same else ())
        sizes = range(1 + (cover.args[0] if cover else 2))
        wanted[item] = set(itertools.chain.from_iterable(itertools.combinations(others, size) for size in sizes))
    missing, left = set().union(*wanted.values()), list(items)
    while missing:
        best = max(left, key=lambda item: (len(wanted[item] & missing), -sum(occurred[pair] for pair in named[item])))
        missing -= wanted[best]
        occurred.update(named[best])
        left.remove(best)
    return left


def _values_of(item, names):
    """The (name, value as text) of those parameters of a test that have one of the names, and of the others."""
    values = {}  # (parameter, its field or None): value; a parameter hides the field of a case that has its name
    for name, value in item.callspec.params.items():
        if dataclasses.is_dataclass(value):
            values |= {(name, field.name): getattr(value, field.name) for field in dataclasses.fields(value)}
        else:
            values[name, None] = value
    known = {name for key in values for name in key}
    if not known.issuperset(names):
        raise ValueError(f"{item.nodeid}: same_on_cpu names {sorted(set(names) - known)}, which it has not")
    named, others = [], []
    for key, value in values.items():
        if key[1] is None or (key[1], None) not in values:
            (others if set(key).isdisjoint(names) else named).append((key, repr(value)))
    return named, others


def slow_or_cuda(case):
    """The marks of an attention problem in a wide sample: over long sequences a CPU takes too long."""
    long = case.seqlen_q * case.seqlen_k > 2**16 or max(case.seqlen_q, case.seqlen_k) > 1024
    return [pytest.mark.slow, pytest.mark.cuda] if long else pytest.mark.slow


def params(cases):
    """pytest parameters from cases or (case, marks), each case once: the first mention counts."""
    unique = {}
    for case in cases:
        case, marks = case if isinstance(case, tuple) else (case, ())
        unique.setdefault(str(case), (case, marks))
    return [pytest.param(case, marks=marks, id=name) for name, (case, marks) in unique.items()]
