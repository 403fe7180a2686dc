"""Attention as inference engines call it: decoding, verify steps, chunks of prompts and mixed batches over pages.

A row is a batch of entries, each so many new tokens ("rows") that attend causally to so many keys, its own included.
Heads are those of q and of the cache. Bytes are those of the keys and values, once for each head of the cache; flops
are 4 for each score that the mask leaves and each channel. `share` is of the larger of what the two take at the rates
of a plain copy and a plain matmul of the same run: 1 is the roof.

flash_attn  the cache in pages
varlen      the same through flash_attn_varlen_func, for rows that flash_attn measures by flash_attn_with_kvcache
portable    flash_attn by this library's kernels for sm_80
16 bits     of a cache in float8: the same call with keys and values of 16 bits, which are twice the bytes of the row
dense       a chunk of a prompt by flash_attn_func, over keys that lie in one tensor: what pages cost
torch       scaled_dot_product_attention by cuDNN, over keys that lie in one tensor, for entries of equal length
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch

from benchmarks.benchmark_flash_attn import portable, sdpa
from benchmarks.harness import DTYPES, Case, main
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    entries: tuple[tuple[int, int, int], ...]  # (how many, rows, keys)
    heads: int
    heads_k: int
    head_dim: int = 128
    page_size: int = 16
    window: int = -1
    float8: bool = False  # the cache, beside queries of 16 bits

    def __str__(self):
        entries = "+".join(f"{count}x{rows}on{keys}" for count, rows, keys in self.entries)
        rest = f" window {self.window}" * (self.window >= 0) + " float8" * self.float8
        return f"{self.name} {entries}x{self.heads}/{self.heads_k}x{self.head_dim} pages {self.page_size}{rest}"

    @property
    def lengths(self):
        """(rows, keys) of each entry."""
        return [(rows, keys) for count, rows, keys in self.entries for _ in range(count)]

    @property
    def is_uniform(self):
        return len(self.entries) == 1

    @property
    def bytes(self):
        seen = [min(keys, rows + self.window) if self.window >= 0 else keys for rows, keys in self.lengths]
        return 2 * (1 if self.float8 else 2) * self.heads_k * self.head_dim * sum(seen)

    @property
    def flops(self):
        if self.window >= 0:
            scores = sum(rows * min(keys, self.window + 1) for rows, keys in self.lengths)
        else:
            scores = sum(rows * keys - rows * (rows - 1) // 2 for rows, keys in self.lengths)
        return 4 * self.heads * self.head_dim * scores


K = 1024
ROWS = {
    "cuda": [
        Row("D1", ((1, 1, 8 * K),), 64, 8),
        Row("D2", ((1, 1, 128 * K),), 64, 8),
        Row("D3", ((32, 1, 8 * K),), 64, 8),
        Row("D3", ((32, 1, 8 * K),), 64, 8, page_size=256),
        Row("D4", ((256, 1, K),), 64, 8),
        Row("D5", ((64, 1, 8 * K),), 8, 1),
        Row("D7", ((16, 1, 8 * K),), 128, 8),
        Row("D8", ((64, 1, 8 * K),), 16, 1),
        Row("D9", ((32, 1, 16 * K),), 128, 1),
        Row("D10", ((128, 1, 8 * K),), 64, 8, head_dim=64, window=128),
        Row("D11", ((32, 1, 4 * K),), 16, 8, head_dim=256),
        Row("D12", ((32, 1, 4 * K),), 32, 8, page_size=1),
        Row("D13", ((64, 1, 8 * K),), 64, 8, float8=True),
        Row("D14", ((8, 1, 4 * K),), 32, 8, float8=True),
        Row("S1", ((1, 16, 16 * K),), 32, 8),
        Row("S2", ((1, 16, 64 * K),), 32, 8),
        Row("S3", ((8, 16, 64 * K),), 32, 8),
        Row("S4", ((8, 32, 64 * K),), 32, 8),
        Row("S5", ((64, 4, 4 * K),), 64, 8),
        Row("P1", ((1, 512, 32 * K),), 64, 8),
        *(Row("P2", ((1, 2 * K, 32 * K),), 64, 8, page_size=size) for size in (1, 16, 64)),
        Row("P3", ((1, 8 * K, 32 * K),), 64, 8),
        Row("P4", ((8, 512, 4 * K),), 32, 8),
        Row("P5", ((16, 128, 16 * K),), 32, 8),
        Row("X1", ((4, 512, 4 * K), (124, 1, 4 * K)), 32, 8),
        *(Row("S3", ((8, 16, 64 * K),), 32, 8, page_size=size, float8=True) for size in (1, 16)),
        Row("S5", ((64, 4, 4 * K),), 64, 8, float8=True),
        Row("P2", ((1, 2 * K, 32 * K),), 64, 8, float8=True),
        Row("P4", ((8, 512, 4 * K),), 32, 8, float8=True),
        Row("X1", ((4, 512, 4 * K), (124, 1, 4 * K)), 32, 8, float8=True),
    ],
    "cpu": [
        Row("decode", ((4, 1, 512),), 8, 2, head_dim=64),
        Row("verify", ((2, 4, 512),), 8, 2, head_dim=64),
        Row("mixed", ((1, 64, 128), (3, 1, 128)), 8, 2, head_dim=64),
        Row("decode", ((4, 1, 512),), 8, 2, head_dim=64, float8=True),
    ],
}


def cases(device):
    for row in ROWS[device]:
        make = functools.partial(providers, row, DTYPES["bf16"], device)
        yield Case("serving", str(row), "bf16", make, bytes=row.bytes, flops=row.flops)


def providers(row: Row, dtype: torch.dtype, device: str) -> dict[str, Callable[[], object]]:
    counts = [-(-keys // row.page_size) for _, keys in row.lengths]
    pool = torch.randn(2, sum(counts), row.page_size, row.heads_k, row.head_dim, device=device, dtype=dtype)
    k, v = pool  # as engines keep them: two halves of one tensor
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    pages = torch.randperm(sum(counts), device=device).int().split(counts)
    for entry, own in enumerate(pages):
        table[entry, : len(own)] = own
    rows, keys = zip(*row.lengths, strict=True)
    q = torch.randn(sum(rows), row.heads, row.head_dim, device=device, dtype=dtype)
    lengths = torch.tensor(keys, dtype=torch.int32, device=device)
    starts_q, starts_k = (
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device) for sizes in (rows, keys)
    )
    options = dict(block_table=table, causal=True, window_size=(row.window, 0) if row.window >= 0 else (-1, -1))

    batched = q.view(len(rows), rows[0], row.heads, row.head_dim) if row.is_uniform else None

    def cached(k=k, v=v, **scales):
        return flash_attn_with_kvcache(batched, k, v, cache_seqlens=lengths, **options, **scales)

    def varlen(k=k, v=v, **scales):
        return flash_attn_varlen_func(q, k, v, starts_q, starts_k, max(rows), max(keys), **options, **scales)

    call = cached if row.is_uniform else varlen
    if row.float8:
        scale = torch.full((row.heads_k,), 0.5, device=device)
        codes = dict(zip("kv", pool.to(torch.float8_e4m3fn), strict=True), k_descale=scale, v_descale=scale)
        return {"flash_attn": functools.partial(call, **codes), "16 bits": call}
    if not row.is_uniform:
        return {"flash_attn": varlen, **portable(varlen, device)}
    return {"flash_attn": cached, "varlen": varlen, **portable(cached, device), **dense(row, batched, device)}


def dense(row, q, device):
    """The same number of keys in one tensor."""
    (_, rows, keys), *_ = row.entries
    if row.window >= 0:
        return {}
    k, v = (torch.randn(len(q), keys, row.heads_k, row.head_dim, device=device, dtype=q.dtype) for _ in range(2))
    functions = {"dense": lambda: flash_attn_func(q, k, v, causal=True)} if rows >= 128 else {}
    if rows == 1:  # where SDPA's causal mask, which begins at the first key, would hide nothing
        theirs = [x.transpose(1, 2) for x in (q, k, v)]
        shape = (len(q), row.heads, row.heads_k, keys, row.head_dim)
        functions |= {name: functools.partial(attend, *theirs) for name, attend in sdpa(device, shape, False).items()}
    return functions


if __name__ == "__main__":
    main(__doc__, "serving", cases, baseline="portable")
