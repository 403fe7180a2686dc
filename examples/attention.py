"""One call of flash_attn_func, forward and backward, checked against PyTorch's own attention.

python examples/attention.py
"""

import torch
import torch.nn.functional as F

from flash_attn import flash_attn_func

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# Tensors are (batch, seqlen, heads, head_dim). Keys and values may have fewer heads, here 2 for 8 heads of queries.
q = torch.randn(2, 512, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(2, 512, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
v = torch.randn(2, 512, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

out = flash_attn_func(q, k, v, causal=True)  # like q
gradients = torch.autograd.grad(out.sum(), (q, k, v))

# PyTorch has (batch, heads, seqlen, head_dim); fp32 makes it the more exact of the two.
heads_first = [x.float().transpose(1, 2) for x in (q, k, v)]
expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
expected_gradients = torch.autograd.grad(expected.sum(), (q, k, v))

for name, ours, theirs in zip(("out", "dq", "dk", "dv"), (out, *gradients), (expected, *expected_gradients)):
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"{name:<4} {tuple(ours.shape)!s:<18} relative difference {difference:.1e}")
    assert difference < 1e-2, "larger than rounding to bfloat16 explains"
