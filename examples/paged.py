"""Decoding with a cache in pages: sequences take pages as they grow and give them back, and share one pool.

python examples/paged.py
"""

import torch

from flash_attn import flash_attn_func, flash_attn_with_kvcache

PAGE = 16


class Pages:
    """A pool of pages of keys and values, and which of them each sequence has."""

    def __init__(self, count, heads_k, head_dim, device, dtype):
        self.k = torch.zeros(count, PAGE, heads_k, head_dim, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.free, self.of, self.length = list(range(count)), {}, {}

    def reserve(self, name, tokens):
        """Let a sequence have room for so many more tokens."""
        pages = self.of.setdefault(name, [])
        while len(pages) * PAGE < self.length.setdefault(name, 0) + tokens:
            pages.append(self.free.pop())

    def release(self, name):
        self.free += self.of.pop(name)
        del self.length[name]

    def attend(self, names, q, k, v):
        """Append k and v (batch, new tokens, heads_k, head_dim) to these sequences, and attend to all they have."""
        for name in names:
            self.reserve(name, k.shape[1])
        widest = max(len(self.of[name]) for name in names)
        table = [self.of[name] + [0] * (widest - len(self.of[name])) for name in names]
        options = dict(dtype=torch.int32, device=q.device)
        lengths = torch.tensor([self.length[name] for name in names], **options)
        out = flash_attn_with_kvcache(
            q, self.k, self.v, k, v, cache_seqlens=lengths, block_table=torch.tensor(table, **options), causal=True
        )
        for name in names:
            self.length[name] += k.shape[1]
        return out


@torch.no_grad()
def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, pages = torch.bfloat16, Pages(20, heads_k=2, head_dim=64, device=device, dtype=torch.bfloat16)
    history = {}

    def step(names, tokens):
        q, k, v = (torch.randn(len(names), tokens, heads, 64, device=device, dtype=dtype) for heads in (8, 2, 2))
        out = pages.attend(names, q, k, v)
        for i, name in enumerate(names):  # the same from a cache in one piece
            before = history.get(name, (k[i, :0], v[i, :0]))
            history[name] = tuple(torch.cat(pair) for pair in zip(before, (k[i], v[i])))
            expected = flash_attn_func(q[i : i + 1], *(x[None] for x in history[name]), causal=True)
            assert (out[i : i + 1] - expected).abs().max() < 0.02

    step(["first"], 40)  # a prompt
    step(["second"], 7)
    for _ in range(12):
        step(["first", "second"], 1)
    print(f"first has {pages.length['first']} tokens in pages {pages.of['first']}, second {pages.of['second']}")
    pages.release("first")
    step(["third"], 100)  # in pages that the first gave back, and others
    step(["second", "third"], 1)
    print(f"third has {pages.length['third']} tokens in pages {pages.of['third']}; {len(pages.free)} are free")


if __name__ == "__main__":
    main()
