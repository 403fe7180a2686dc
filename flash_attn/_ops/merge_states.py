"""The op `merge_states_`, which joins two results of attention over different keys into that over all of them.

    merge_states_(out, lse, out_a, lse_a, out_b, lse_b)      writes out and lse

out, out_a, out_b   (tokens, heads, head_dim), fp32, fp16, bf16 or fp64, any strides; kernels have no fp64
lse, lse_a, lse_b   (tokens, heads), of the same dtypes, any strides; lse may be None

    lse = log(exp lse_a + exp lse_b);   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

in fp32. An lse of +inf or -inf means that a row has seen no key, and then its out may hold anything. A row that neither
has seen gets 0 and +inf. Results may be written over inputs at the same places. No gradient is recorded.
"""

import torch

from flash_attn import _library
from flash_attn._ops import triton
from flash_attn._reference import merge_states as reference

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float64)

merge_states_ = _library.define(
    "merge_states_(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> ()",
    reference=reference.merge_states_,
    fake=lambda *_: None,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=lambda args: [f"dtype {x.dtype}" for x in args[1:] if x is not None and x.dtype not in KERNEL_DTYPES],
    triton=triton.launch("merge_states", "merge_states_"),
)
