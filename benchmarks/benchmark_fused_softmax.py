"""Softmax of scaled, masked attention scores against eager torch, torch.compile and Liger: forward and backward.

The bytes counted are those of the scores, read and written, and of the mask; of causal scores, half are read. Liger's
softmax has neither scale nor mask, so it takes part where there is no mask and the scale is 1.
"""

import functools

import torch

from benchmarks.harness import DTYPES, Case, backward_of, main
from flash_attn.fused_softmax import scaled_masked_softmax, scaled_upper_triang_masked_softmax

SHAPES = {  # batch, heads, seqlen_q, seqlen_k
    "cuda": [
        (64, 32, 512, 128),
        (16, 16, 1024, 1024),
        (8, 16, 2048, 2048),
        (2, 16, 4096, 4096),
        (2, 4, 8192, 8192),
        (1, 1, 16384, 16384),
        (8, 16, 2047, 2047),
    ],
    "cpu": [(1, 2, 64, 64)],
}
SCALES = {"mask": 0.125, "causal": 0.125, "none": 1.0}  # of each kind of mask


def cases(device):
    for shape in SHAPES[device]:
        for kind in SCALES:
            if kind == "causal" and shape[2] != shape[3]:
                continue
            for direction in ("fwd", "bwd"):
                yield Case(
                    f"softmax_{kind}_{direction}",
                    "x".join(map(str, shape)),
                    "bf16",
                    functools.partial(providers, shape, DTYPES["bf16"], device, kind, direction),
                    bytes=traffic(shape, kind, direction),
                )


def traffic(shape, kind, direction):
    """Bytes that a call must move."""
    batch, heads, seqlen_q, seqlen_k = shape
    scores = DTYPES["bf16"].itemsize * batch * heads * seqlen_q * seqlen_k
    reads = (1 if direction == "fwd" else 2) * (0.5 if kind == "causal" else 1)
    mask = batch * seqlen_q * seqlen_k if (kind, direction) == ("mask", "fwd") else 0
    return (reads + 1) * scores + mask


def plain(x, left_out, scale):
    if left_out is None:
        return (x * scale).softmax(dim=-1)
    return (x.float() * scale).masked_fill(left_out, float("-inf")).softmax(dim=-1).to(x.dtype)


def liger(x):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def providers(shape, dtype, device, kind, direction):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_(direction == "bwd")
    left_out = None
    if kind == "causal":
        left_out = torch.ones(shape[2:], dtype=torch.bool, device=device).triu(1)
    elif kind == "mask":
        left_out = torch.rand(shape[0], 1, *shape[2:], device=device) < 0.3
    fused = scaled_upper_triang_masked_softmax if kind == "causal" else scaled_masked_softmax
    functions = {
        "flash_attn": functools.partial(fused, x, left_out, SCALES[kind]),
        "torch": functools.partial(plain, x, left_out, SCALES[kind]),
        "torch.compile": functools.partial(torch.compile(plain, dynamic=False), x, left_out, SCALES[kind]),
    }
    if kind == "none":
        functions["liger"] = functools.partial(liger, x)
    if direction == "fwd":
        return functions
    return {name: backward_of(function, x) for name, function in functions.items()}


if __name__ == "__main__":
    main(__doc__, "fused_softmax", cases, baseline="torch")
