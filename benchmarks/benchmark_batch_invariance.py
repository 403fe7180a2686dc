"""What batch invariance costs: attention in training and serving, and linear layers.

level 0  the kernels that are fastest for the call
level 1  batch_invariant(1): bits that depend on no other entry
level 2  batch_invariant(2): nor on chunks, nor on which function was called

For linear layers, `level 0` is the product of cuBLAS, and `level 2` is batch_invariant_linear.
"""

import functools
from collections.abc import Callable

import torch

import flash_attn
from benchmarks import benchmark_serving as serving
from benchmarks.harness import DTYPES, Case, main
from flash_attn import flash_attn_func
from flash_attn.ops.linear import batch_invariant_linear

TRAINING = {  # (batch, seqlen, heads, head_dim, causal)
    "cuda": [
        (16, 1024, 16, 128, True),
        (4, 4096, 16, 128, True),
        (2, 8192, 16, 128, True),
        (1, 16384, 16, 128, True),
        (1, 16384, 16, 128, False),
        (1, 32768, 16, 128, True),
        (1, 16384, 32, 64, True),
        (1, 16384, 16, 96, True),
        (1, 16384, 8, 192, True),
        (1, 16384, 8, 256, True),
    ],
    "cpu": [(2, 256, 2, 64, True)],
}
LINEAR = {  # (rows, inner, columns)
    "cuda": [(1, 4096, 4096), (64, 4096, 4096), (4096, 4096, 4096), (16384, 2048, 8192)],
    "cpu": [(64, 256, 256)],
}


def cases(device):
    dtype = DTYPES["bf16"]
    for batch, seqlen, heads, head_dim, causal in TRAINING[device]:
        name = f"{batch}x{seqlen}x{heads}x{head_dim}{' causal' * causal}"
        make = functools.partial(training, (batch, seqlen, heads, head_dim), causal, dtype, device)
        flops = 4 * batch * heads * seqlen**2 * head_dim / (1 + causal)
        yield Case("training forward", name, "bf16", make, flops=flops)
    for row in serving.ROWS[device]:
        make = functools.partial(served, row, dtype, device)
        yield Case("serving", str(row), "bf16", make, bytes=row.bytes, flops=row.flops)
    for rows, inner, columns in LINEAR[device]:
        make = functools.partial(linear, rows, inner, columns, dtype, device)
        moved = 2 * (rows * inner + inner * columns + rows * columns)
        yield Case("linear", f"{rows}x{inner}x{columns}", "bf16", make, bytes=moved, flops=2 * rows * inner * columns)


def at_levels(function: Callable[[], object]) -> dict[str, Callable[[], object]]:
    def at(level):
        with flash_attn.batch_invariant(level):
            return function()

    return {f"level {level}": functools.partial(at, level) for level in range(3)}


def training(shape, causal, dtype, device):
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return at_levels(lambda: flash_attn_func(q, k, v, causal=causal))


def served(row, dtype, device):
    return at_levels(serving.providers(row, dtype, device)["flash_attn"])


def linear(rows, inner, columns, dtype, device):
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(columns, inner, device=device, dtype=dtype)
    return {
        "level 0": lambda: torch.nn.functional.linear(x, weight),
        "level 2": lambda: batch_invariant_linear(x, weight),
    }


if __name__ == "__main__":
    main(__doc__, "batch_invariance", cases, baseline="level 0")
