"""Rotary embedding against eager torch, torch.compile, the Triton kernel and Liger: forward, backward, and in place.

The bytes counted are those of the rotated tensor, read and written, and of the tables. Liger rotates only in place,
only by halves, and two tensors at once: half of the heads are its queries, the other half its keys.
"""

import functools
import importlib

import torch

from benchmarks.harness import DTYPES, Case, backward_of, main
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_torch

SHAPES = {  # batch, seqlen, heads, head_dim, rotary_dim
    "cuda": [
        (8, 2048, 32, 128, 128),
        (2, 8192, 16, 64, 64),
        (8, 2048, 8, 128, 128),  # keys of grouped-query attention
        (8, 2048, 32, 80, 32),  # part of the channels
        (64, 1, 32, 128, 128),  # decoding: latency
    ],
    "cpu": [(1, 128, 4, 64, 64)],
}


def cases(device):
    for shape in SHAPES[device]:
        for interleaved in (False, True):
            for op, providers in (("fwd", forward), ("bwd", backward), ("inplace", in_place)):
                yield Case(
                    f"rotary_{op}",
                    "x".join(map(str, shape)) + (" interleaved" if interleaved else " halves"),
                    "bf16",
                    functools.partial(providers, shape, DTYPES["bf16"], device, interleaved),
                    bytes=traffic(shape, whole=op != "inplace"),
                )


def traffic(shape, whole):
    """Bytes that a call must move; in place, channels past rotary_dim stay where they are."""
    batch, seqlen, heads, head_dim, rotary_dim = shape
    return 2 * (2 * batch * seqlen * heads * (head_dim if whole else rotary_dim) + seqlen * rotary_dim)


def tables(shape, dtype, device):
    _, seqlen, _, _, rotary_dim = shape
    angles = torch.outer(torch.arange(seqlen), 1e4 ** -torch.linspace(0, 1, rotary_dim // 2)).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def out_of_place(x, cos, sin, interleaved):
    compiled = torch.compile(apply_rotary_emb_torch, dynamic=False)
    return {
        "flash_attn": lambda: apply_rotary_emb(x, cos, sin, interleaved),
        "torch": lambda: apply_rotary_emb_torch(x, cos, sin, interleaved),
        "torch.compile": lambda: compiled(x, cos, sin, interleaved),
    }


def triton_kernels():
    return importlib.import_module("flash_attn._triton.rotary")


def forward(shape, dtype, device, interleaved):
    x = torch.randn(shape[:-1], device=device, dtype=dtype)
    cos, sin = tables(shape, dtype, device)
    run = out_of_place(x, cos, sin, interleaved)
    return run | {"triton": lambda: triton_kernels().rotary(x, cos, sin, None, 0, None, interleaved, False)}


def backward(shape, dtype, device, interleaved):
    x = torch.randn(shape[:-1], device=device, dtype=dtype, requires_grad=True)
    cos, sin = tables(shape, dtype, device)
    run = {name: backward_of(function, x) for name, function in out_of_place(x, cos, sin, interleaved).items()}
    dout = torch.randn_like(x)
    return run | {"triton": lambda: triton_kernels().rotary(dout, cos, sin, None, 0, None, interleaved, True)}


def in_place(shape, dtype, device, interleaved):
    x = torch.randn(shape[:-1], device=device, dtype=dtype)
    cos, sin = tables(shape, dtype, device)

    def plain():
        return x.copy_(apply_rotary_emb_torch(x, cos, sin, interleaved))

    functions = {
        "flash_attn": lambda: apply_rotary_emb(x, cos, sin, interleaved, inplace=True),
        "torch": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
        "triton": lambda: triton_kernels().rotary_(x, cos, sin, None, 0, None, interleaved, False),
    }
    if not interleaved:
        functions["liger"] = liger(x, cos, sin)
    return functions


def liger(x, cos, sin):
    """Liger's rotation of the two halves of the heads, (batch, heads, seqlen, head_dim) over (batch, seqlen, ...)."""
    q, k = (half.contiguous().transpose(1, 2) for half in x.chunk(2, dim=2))
    wide = [torch.cat([table, table], dim=-1)[None] for table in (cos, sin)]

    def run():
        from liger_kernel.ops.rope import rope_forward

        return rope_forward(q, k, *wide)

    return run


if __name__ == "__main__":
    main(__doc__, "rotary", cases, baseline="torch")
