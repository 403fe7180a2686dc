"""Swap flash attention into a model that calls torch's scaled_dot_product_attention, without changing the model.

python examples/sdpa.py
"""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn import flash_attn_func

SDPA = F.scaled_dot_product_attention


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """SDPA by flash_attn_func where that computes the same: with no mask, and not for causal rows of another number."""
    if attn_mask is not None or (is_causal and q.shape[-2] != k.shape[-2]):
        return SDPA(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim) to (batch, seqlen, heads, ...)
    return flash_attn_func(q, k, v, dropout_p, scale, is_causal).transpose(1, 2)


@contextlib.contextmanager
def flash_attention():
    """Within this context, models that look up F.scaled_dot_product_attention find `attention`."""
    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


class Attention(nn.Module):
    """Somebody's model."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Attention(128, 4).to(device, torch.bfloat16)
    x = torch.randn(2, 200, 128, device=device, dtype=torch.bfloat16)
    expected = model(x)
    with flash_attention():
        found = model(x)
    difference = ((found - expected).float().norm() / expected.float().norm()).item()
    print(f"relative difference {difference:.1e}")
    assert difference < 1e-2
