"""A whole language model of Blocks: trained on its own source, then asked to write on.

python examples/blocks.py
"""

import argparse
import functools
import pathlib
import types

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn.modules.block import Block
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import GatedMlp
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.utils.generation import GenerationMixin


class Model(nn.Module, GenerationMixin):
    """Bytes in, logits of the next byte out; with inference_params it decodes with a cache."""

    def __init__(self, dim=64, heads=4, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(self.layer(i, dim, heads) for i in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def layer(self, index, dim, heads):
        """layer_idx names the layer's cache; rotary_emb_dim is the whole head."""
        mixer = functools.partial(
            MHA, num_heads=heads, causal=True, rotary_emb_dim=dim // heads, use_flash_attn=True, layer_idx=index
        )
        mlp = functools.partial(GatedMlp, activation=F.silu)
        return Block(dim, mixer, mlp, norm_cls=RMSNorm, fused_dropout_add_ln=True)

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0):
        hidden_states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            options = {"inference_params": inference_params} if inference_params else None
            hidden_states, residual = layer(hidden_states, residual, mixer_kwargs=options)
        hidden_states = self.norm(hidden_states, residual)  # adds the last branch to the residual stream
        return types.SimpleNamespace(logits=self.head(hidden_states[:, -num_last_tokens:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of training (default: %(default)s)")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()), device=device)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - 128, (8,), device=device)
        batch = text[starts[:, None] + torch.arange(129, device=device).clamp(max=127)]
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.2f} nats per byte")

    prompt = torch.tensor([list(b"import ")], device=device)
    with torch.autocast(device, torch.bfloat16):
        written = model.eval().generate(prompt, max_length=60)
    print(repr(bytes(written[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main()
