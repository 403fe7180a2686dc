"""A small language model that reads and writes bytes, trained in about a minute on the sources of Python's own library.

    pip install '.[examples]'                                       # once: brings tqdm
    python examples/tiny_lm.py                                      # train, measure, write Python-like text
    python examples/tiny_lm.py --steps 1500 --prompt "import "      # learn for longer, write something else

It shows the three calls that most language models need:

    flash_attn_func          causal attention over whole sequences, for training
    apply_rotary_emb         rotary position embedding of queries and keys
    flash_attn_with_kvcache  attention while generating: new keys are rotated, appended to a cache and attended to

The same code runs on a GPU, in bf16, and on a CPU, in fp32.
"""

import argparse
import math
import pathlib
import sysconfig

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb
from muon import Muon

VOCAB = 256  # tokens are bytes
HEAD_DIM = 64
MAX_POSITIONS = 4096
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # of activations; parameters are fp32


class Attention(nn.Module):
    def __init__(self, dim, context):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.window = (context - 1, 0)  # a token sees itself and the context - 1 tokens before it

    def forward(self, x, cos, sin, cache=None, filled=0):
        """x: (batch, seqlen, dim). With a cache, x continues the `filled` tokens that the cache holds."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).unbind(2)  # each (batch, seqlen, heads, HEAD_DIM)
        if cache is None:
            q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
            out = flash_attn_func(q, k, v, causal=True, window_size=self.window)
        else:
            out = flash_attn_with_kvcache(
                q,
                *cache,
                k,
                v,
                cos,
                sin,
                cache_seqlens=filled,
                causal=True,
                window_size=self.window,
                rotary_interleaved=False,
            )
        return self.out(out.flatten(2))


class Block(nn.Module):
    def __init__(self, dim, context):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, context)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x, cos, sin, cache=None, filled=0):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache, filled)
        return x + self.mlp(self.mlp_norm(x))


class TinyLM(nn.Module):
    def __init__(self, dim=128, layers=4, context=128):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, context) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.logits = nn.Linear(dim, VOCAB, bias=False)
        # Channels 2 i and 2 i + 1 of a token at position m turn by the angle m / 10000 ** (2 i / HEAD_DIM).
        angles = torch.outer(torch.arange(MAX_POSITIONS), 10000.0 ** -torch.arange(0, 1, 2 / HEAD_DIM))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.initialize()

    def initialize(self):
        """Start each block as the identity, and make all bytes equally likely: 8 bits per byte."""
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp[-1].weight)
        nn.init.zeros_(self.logits.weight)

    def forward(self, tokens, caches=None, filled=0):
        """tokens: (batch, seqlen) int64. Returns logits (batch, seqlen, VOCAB) of the token after each of them.

        With caches, as `empty_caches` makes them, the tokens come after the `filled` that the caches hold.
        """
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, self.cos, self.sin, cache, filled)
        return self.logits(self.norm(x))

    def empty_caches(self, batch, capacity):
        """For each block, room for the keys and values of `capacity` tokens."""
        heads, device = self.embedding.embedding_dim // HEAD_DIM, self.cos.device
        shape = (2, batch, capacity, heads, HEAD_DIM)
        return [torch.empty(shape, device=device, dtype=DTYPES[device.type]).unbind() for _ in self.blocks]


def mixed_precision(device):
    return torch.autocast(device.type, DTYPES[device.type], enabled=device.type == "cuda")


def python_sources():
    """The standard library's top-level modules as bytes: training text, and every 20th module for validation."""
    modules = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = modules[::20]
    training = [module for module in modules if module not in held_out]
    texts = (b"\n\n".join(module.read_bytes() for module in part) for part in (training, held_out))
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]


def bits_per_byte(model, windows):
    """Mean of -log2(probability of the next byte) over windows (batch, context + 1) of bytes."""
    windows = windows.to(model.cos.device, torch.int64)
    with mixed_precision(windows.device):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()) / math.log(2)


def cut(text, starts, context):
    """The windows (len(starts), context + 1) of text that begin at `starts`."""
    return text[starts[:, None] + torch.arange(context + 1)]


@torch.no_grad()
def validate(model, text, count=128):
    """Bits per byte on `count` windows spread evenly over the text."""
    starts = torch.linspace(0, len(text) - model.context - 2, count).long()
    losses = [bits_per_byte(model, windows) for windows in cut(text, starts, model.context).split(16)]
    return torch.stack(losses).mean().item()


def optimizers(model, steps):
    """Muon for the matrices inside the blocks and AdamW for the rest, each with its schedule.

    Muon makes a short run useful: AdamW alone needs several times as many steps for the same loss.
    """
    inner = [p for p in model.blocks.parameters() if p.ndim == 2]
    outer = [p for p in model.parameters() if not any(p is q for q in inner)]
    muon = Muon(inner, lr=0.01)
    adamw = torch.optim.AdamW(outer, lr=3e-3, betas=(0.9, 0.98))

    def rate(step):
        """Warm up for 20 steps; fall to zero over the last 60 %."""
        return min(1, (step + 1) / 20, (steps - step) / (0.6 * steps))

    return [(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) for optimizer in (muon, adamw)]


def train(model, text, steps, batch, seed=0):
    """Fit the model to random windows of text. Returns the loss of each step in bits per byte."""
    scheduled = optimizers(model, steps)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    progress = tqdm(range(steps), desc="training", unit="step")
    for _ in progress:
        starts = torch.randint(len(text) - model.context, (batch,), generator=generator)
        loss = bits_per_byte(model, cut(text, starts, model.context))
        loss.backward()
        for optimizer, schedule in scheduled:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        progress.set_postfix_str(f"{sum(losses[-50:]) / len(losses[-50:]):.2f} bits per byte")
    return losses


@torch.no_grad()
def generate(model, prompt, length, temperature=0.8, seed=0):
    """Continue `prompt` by `length` bytes, one at a time. Returns prompt and continuation as bytes."""
    device = model.cos.device
    generator = torch.Generator(device).manual_seed(seed)
    text = tokens = torch.tensor([list(prompt)], device=device)
    caches, filled = model.empty_caches(1, capacity=len(prompt) + length), 0
    for _ in tqdm(range(length), desc="generating", unit="byte"):
        with mixed_precision(device):
            logits = model(tokens, caches, filled)[:, -1].float()  # first the whole prompt, then a token at a time
        filled += tokens.shape[1]
        tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text = torch.cat([text, tokens], dim=1)
    return bytes(text[0].tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dim", type=int, default=128, help=f"width, a multiple of {HEAD_DIM} (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (default %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="bytes that attention sees (default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default %(default)s)")
    parser.add_argument("--prompt", default="class ", help="what the text starts with (default '%(default)s')")
    parser.add_argument("--length", type=int, default=500, help="bytes to generate (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="lower is safer (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    training, validation = python_sources()
    model = TinyLM(args.dim, args.layers, args.context).to(args.device)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.2f} M parameters on {args.device}; {len(training) / 1e6:.1f} MB of Python to learn from")
    print(f"validation before: {validate(model, validation):.2f} bits per byte")
    train(model, training, args.steps, args.batch, args.seed)
    print(f"validation after:  {validate(model, validation):.2f} bits per byte\n")
    text = generate(model, args.prompt.encode(), args.length, args.temperature, args.seed)
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
