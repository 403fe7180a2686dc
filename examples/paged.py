"""Decoding with a cache in pages: sequences take pages as they grow and give them back, and share one pool.

python examples/paged.py
"""

import torch

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.utils.generation import PageAllocator


class Cache:
    """Pools of keys and of values, and which of their pages each sequence has."""

    def __init__(self, num_pages, page_size, heads_k, head_dim, device, dtype):
        self.k = torch.zeros(num_pages, page_size, heads_k, head_dim, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.pages = PageAllocator(num_pages, page_size)

    def attend(self, names, q, k, v):
        """Append k and v (batch, new tokens, heads_k, head_dim) to these sequences, and attend to all they have."""
        lengths = [self.pages.length(name) for name in names]
        for name in names:
            self.pages.append(name, k.shape[1])  # no page is shared, so that none must be copied
        return flash_attn_with_kvcache(
            q,
            self.k,
            self.v,
            k,
            v,
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=q.device),
            block_table=self.pages.block_table(names, device=q.device),
            causal=True,
        )


@torch.no_grad()
def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    cache = Cache(20, page_size=16, heads_k=2, head_dim=64, device=device, dtype=dtype)
    pages, history = cache.pages, {}

    def step(names, tokens):
        q, k, v = (torch.randn(len(names), tokens, heads, 64, device=device, dtype=dtype) for heads in (8, 2, 2))
        out = cache.attend(names, q, k, v)
        for i, name in enumerate(names):  # the same from a cache in one piece
            before = history.get(name, (k[i, :0], v[i, :0]))
            history[name] = tuple(torch.cat(pair) for pair in zip(before, (k[i], v[i])))
            expected = flash_attn_func(q[i : i + 1], *(x[None] for x in history[name]), causal=True)
            assert (out[i : i + 1] - expected).abs().max() < 0.02

    pages.allocate("first")
    pages.allocate("second")
    step(["first"], 40)  # a prompt
    step(["second"], 7)
    for _ in range(12):
        step(["first", "second"], 1)
    print(f"first has {pages.length('first')} tokens in pages {pages.pages('first')}, second {pages.pages('second')}")
    pages.free("first")
    pages.allocate("third")
    step(["third"], 100)  # in pages that the first gave back, and others
    step(["second", "third"], 1)
    print(f"third has {pages.length('third')} tokens in pages {pages.pages('third')}; {pages.num_free} are free")


if __name__ == "__main__":
    main()
