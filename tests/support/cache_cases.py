"""Attention over a cache: its arguments as data."""

import dataclasses
import functools
import random

import pytest
import torch
from cases import Case, covering_sample, sample, slow_or_cuda


@dataclasses.dataclass(frozen=True)
class CacheCase(Case):
    """A cache of capacity `seqlen_k` (rounded up to whole pages), its lengths, and what is appended to it."""

    seqlen_new: int = 0
    rotary: float = 0.0  # share of the head dim that is rotated, in steps of 16
    interleaved: bool = True
    page: int = 0  # 0: not paged
    batch_idx: bool = False
    leftpad: bool = False
    lengths: str = "tensor"  # "int64": a tensor of that type; "int": one for all; "full": cache_seqlens is None
    num_splits: int = 0

    def __str__(self):
        parts = [
            super().__str__(),
            f"new{self.seqlen_new}" * (self.seqlen_new > 0),
            f"rotary{self.rotary:g}" * (self.rotary > 0),
            "halves" * (not self.interleaved),
            f"page{self.page}" * (self.page > 0),
            "batch_idx" * self.batch_idx,
            "leftpad" * self.leftpad,
            self.lengths,
            f"splits{self.num_splits}" * (self.num_splits != 0),
        ]
        return "-".join(part for part in parts if part)

    @property
    def pages(self):
        """Pages of one entry."""
        return -(-self.seqlen_k // self.page)

    @property
    def rows(self):
        """Rows or pages of the cache, some of which belong to no entry."""
        return self.batch * self.pages + 7 if self.page else self.batch + 2 * self.batch_idx

    @property
    def capacity(self):
        return self.pages * self.page if self.page else self.seqlen_k

    @property
    def rotary_dim(self):
        return int(self.rotary * self.head_dim) // 16 * 16

    def arguments(self, device):
        """The arguments of flash_attn_with_kvcache by name, tensors fresh at each call."""
        q, new_k, new_v, _ = self.but(seqlen_k=self.seqlen_new).tensors(device)
        generator = self.generator(device)
        lengths, leftpad = self.draw_lengths()
        arguments = dict(self.options(device), q=q, num_splits=self.num_splits, **self.addresses(device, generator))
        arguments |= self.caches(arguments, lengths, leftpad, q.dtype, device, generator)
        if self.lengths != "full":
            tensor = torch.tensor(lengths, dtype=torch.int64 if self.lengths == "int64" else torch.int32, device=device)
            arguments["cache_seqlens"] = lengths[0] if self.lengths == "int" else tensor
        if self.leftpad:
            arguments["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32, device=device)
        if self.seqlen_new > 0:
            arguments |= dict(k=new_k, v=new_v)
        if self.rotary_dim > 0:
            arguments |= self.rotary_tables(q.dtype, device, generator)
        return arguments

    def draw_lengths(self):
        """Filled positions and left padding of each entry."""
        rng, most = random.Random(str(self)), self.capacity - self.seqlen_new
        lengths = [rng.randint(0, most) for _ in range(self.batch)]
        lengths = {"full": [most] * self.batch, "int": lengths[:1] * self.batch}.get(self.lengths, lengths)
        return lengths, [rng.randint(0, length) if self.leftpad else 0 for length in lengths]

    def addresses(self, device, generator):
        """block_table or cache_batch_idx: a random part of a larger cache."""

        def some(count, of):
            return torch.randperm(of, device=device, generator=generator)[:count].int()

        if self.page:
            table = some(self.batch * self.pages, of=self.rows)
            return dict(block_table=table.reshape(self.batch, self.pages))
        return dict(cache_batch_idx=some(self.batch, of=self.rows)) if self.batch_idx else {}

    def caches(self, addresses, lengths, leftpad, dtype, device, generator):
        """k_cache and v_cache: numbers where they are in use, NaN everywhere else."""
        shape = self.rows, self.page or self.seqlen_k, self.heads_k, self.head_dim
        caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in "kv"]
        for b, (length, pad) in enumerate(zip(lengths, leftpad, strict=True)):
            position = torch.arange(pad, length, device=device)
            where = self.address(b, position, addresses)
            for cache in caches:
                values = torch.randn(len(position), *shape[2:], device=device, generator=generator)
                cache[where] = values.to(dtype)
        return dict(k_cache=caches[0], v_cache=caches[1])

    def address(self, b, position, addresses):
        if self.page:
            return addresses["block_table"][b, position // self.page].long(), position % self.page
        return int(addresses["cache_batch_idx"][b]) if self.batch_idx else b, position

    def rotary_tables(self, dtype, device, generator):
        rows = self.capacity + self.seqlen_q  # queries may lie past the last new key
        angle = torch.rand(rows, self.rotary_dim // 2, device=device, generator=generator) * 6.3
        tables = dict(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype))
        return dict(tables, rotary_interleaved=self.interleaved)


FACTORS = dict(
    lengths=[
        *((1, 128), (1, 339), (3, 799), (3, 1024), (64, 256), (64, 800), (64, 2048), (128, 128), (128, 4096)),
        *((16, 20_000), (1, 131_072), (16, 131_072)),
    ],
    new=["none", "some", "all"],
    heads=[(6, 6), (6, 2), (6, 1)],
    head_dim=[8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256, 320, 512],
    dtype=["fp16", "bf16"],
    causal=[False, True],
    window=[(-1, -1), "local", (-1, 0), (5, 2), (40, -1)],
    softcap=[0.0, 2.0, 50.0],
    scale_q=[1.0, 50.0],
    alibi=["", "h", "bh"],
    rotary=[(0.0, True), (0.5, False), (0.5, True), (1.0, False), (1.0, True)],  # share of the head dim, interleaved
    page=[0, 1, 4, 16, 256],
    batch_idx=[False, True],
    leftpad=[False, True],
    cache_seqlens=["tensor", "int", "int64", "full"],
    num_splits=[0, 1, 2, 5, 40],
    layout=["contiguous", "bhsd", "last_dim_strided"],
)
SMALL = dict(
    FACTORS,
    lengths=[(1, 128), (1, 339), (3, 200), (64, 130), (16, 333)],
    dtype=["fp16", "bf16", "fp32"],
)
NAMED = {
    "one query over a long cache": CacheCase(seqlen_q=1, seqlen_k=2000, heads_k=1, num_splits=7),
    "more splits than keys": CacheCase(seqlen_q=1, seqlen_k=50, heads_k=2, num_splits=128),
    "more queries than keys": CacheCase(seqlen_q=70, seqlen_k=20, causal=True, lengths="full"),
    "append to the last position": CacheCase(seqlen_q=1, seqlen_k=33, seqlen_new=33, lengths="int"),
    "append more than is asked": CacheCase(seqlen_q=2, seqlen_k=90, seqlen_new=70, causal=True, window=(3, 0)),
    "head_dim 512, appended in decoding": CacheCase(
        seqlen_q=3, seqlen_k=200, seqlen_new=3, heads_k=1, head_dim=512, causal=True, rotary=1.0, num_splits=3
    ),
    "head_dim 257": CacheCase(seqlen_q=3, seqlen_k=200, heads_k=1, head_dim=257, page=16, window=(90, 0), causal=True),
    "page of 48": CacheCase(seqlen_q=5, seqlen_k=200, seqlen_new=5, page=48, causal=True, rotary=1.0),
    "float32": CacheCase(
        seqlen_q=3, seqlen_k=70, seqlen_new=3, dtype="fp32", heads_k=2, page=16, leftpad=True, rotary=0.5, causal=True
    ),
    "all at once": CacheCase(
        seqlen_q=9,
        seqlen_k=300,
        seqlen_new=11,
        heads=6,
        heads_k=2,
        head_dim=96,
        causal=True,
        window=(60, -1),
        softcap=2.0,
        alibi="bh",
        rotary=0.5,
        interleaved=False,
        page=16,
        leftpad=True,
        num_splits=3,
    ),
}


def possible(row):
    return (
        not (row["page"] and row["batch_idx"])  # both say where an entry lies
        and not (row["rotary"][0] and (row["new"] == "none" or row["rotary"][0] * row["head_dim"] < 16))
        and not (row["cache_seqlens"] == "full" and (row["new"] != "none" or row["leftpad"]))
    )


def make_case(lengths, new, heads, window, rotary, cache_seqlens, **rest):
    seqlen_q, seqlen_k = lengths
    rng = random.Random(f"{lengths} {heads} {rest}")
    if window == "local":
        window = rng.randrange(seqlen_k), rng.randrange(seqlen_k)
    return CacheCase(
        batch=2 if seqlen_k <= 4096 else 1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads[0],
        heads_k=heads[1],
        window=window,
        rotary=rotary[0],
        interleaved=rotary[1],
        lengths=cache_seqlens,
        seqlen_new={"none": 0, "some": rng.randint(1, seqlen_q), "all": seqlen_q}[new],
        **rest,
    )


@functools.cache
def wide_rows():
    return covering_sample(FACTORS, 700, valid=possible)


SAMPLE = sample(SMALL, make_case, valid=possible, wide=wide_rows, marks=slow_or_cuda)
NAMED_CASES = [pytest.param(case, id=name) for name, case in NAMED.items()]
