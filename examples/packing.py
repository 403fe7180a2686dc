"""Sequences of different lengths without work for padding: pack, train, and compare with a padded batch.

python examples/packing.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.modules.mha import MHA

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
lengths = torch.tensor([5, 30, 12, 64], device=device)
mask = torch.arange(64, device=device) < lengths[:, None]  # (batch, seqlen), True for tokens
x = torch.randn(4, 64, 128, device=device, dtype=torch.bfloat16)
labels = torch.randint(10, (4, 64), device=device)

attention = MHA(128, 4, causal=True, use_flash_attn=True).to(device, torch.bfloat16)
head = nn.Linear(128, 10).to(device, torch.bfloat16)

# Packed: (total tokens, features). Every layer but attention sees each token alone and need not know.
tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, mask)
hidden = attention(tokens, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
packed_loss = F.cross_entropy(head(hidden).float(), labels[mask])
packed_loss.backward()
packed_gradient = attention.Wqkv.weight.grad.clone()

# Padded: with causal attention and padding on the right, no token sees the padding; its labels do not count.
attention.Wqkv.weight.grad = None
padded_loss = F.cross_entropy(head(attention(x)).float().flatten(0, 1), labels.masked_fill(~mask, -100).flatten())
padded_loss.backward()

again = pad_input(hidden, indices, *mask.shape)  # (batch, seqlen, features), zeros for padding
assert again[~mask].eq(0).all()
print(f"{len(tokens)} tokens instead of {mask.numel()}")
print(f"loss {packed_loss.item():.4f}, padded {padded_loss.item():.4f}")
gradient = attention.Wqkv.weight.grad
difference = ((packed_gradient - gradient).float().norm() / gradient.float().norm()).item()
print(f"relative difference of the gradients {difference:.1e}")
assert difference < 2e-2
