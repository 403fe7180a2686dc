"""Norms of a residual stream against eager torch, torch.compile, the Triton kernels and Liger: forward and backward.

One call is that of a transformer block: h = dropout(x) + residual, out = norm(h), both returned. The bytes counted are
forward those of x, the residual, out and h; backward those of h, the gradients of out and h, and the gradients that are
returned: one that x and the residual share, or two if dropout or different dtypes make them differ. Liger fuses RMSNorm
with the sum if both have one dtype and there is no dropout; otherwise its norms follow a sum in torch, as in models.
"""

import functools

import torch
from torch.nn import functional

from benchmarks.harness import DTYPES, Case, backward_of, main
from flash_attn.ops.layer_norm import dropout_add_layer_norm
from flash_attn.ops.rms_norm import dropout_add_rms_norm

SHAPES = {
    "cuda": [(16384, 1024), (16384, 2048), (16384, 4095), (16384, 4096), (16384, 8192), (8192, 16384), (4096, 32768)],
    "cpu": [(64, 256)],
}
VARIANTS = {  # name: RMSNorm, dtype of the residual stream, dropout
    "layer": (False, "bf16", 0.0),
    "rms": (True, "bf16", 0.0),
    "layer fp32 stream": (False, "fp32", 0.0),
    "layer dropout": (False, "bf16", 0.1),
}
EPS = 1e-5


def cases(device):
    for shape in SHAPES[device]:
        for name, variant in VARIANTS.items():
            for op, providers in (("fwd", forward), ("bwd", backward)):
                yield Case(
                    f"layer_norm_{op}",
                    "x".join(map(str, shape)) + " " + name,
                    "bf16",
                    functools.partial(providers, shape, variant, device),
                    bytes=traffic(shape, variant, op),
                )


def traffic(shape, variant, op):
    """Bytes that a call must move."""
    _, stream, dropout_p = variant
    x, h = DTYPES["bf16"].itemsize, DTYPES[stream].itemsize
    if op == "fwd":
        return shape[0] * shape[1] * (2 * x + 2 * h)
    return shape[0] * shape[1] * (x + 3 * h + (x if dropout_p or x != h else 0))


def plain(x, residual, weight, bias, dropout_p):
    """The same in torch operations; LayerNorm if there is a bias."""
    h = (functional.dropout(x, dropout_p) if dropout_p else x) + residual
    normal = h.to(weight.dtype)
    if bias is None:
        return functional.rms_norm(normal, weight.shape, weight, EPS), h
    return functional.layer_norm(normal, weight.shape, weight, bias, EPS), h


def fused(x, residual, weight, bias, dropout_p):
    if bias is None:
        return dropout_add_rms_norm(x, residual, weight, None, dropout_p, EPS, prenorm=True)
    return dropout_add_layer_norm(x, residual, weight, bias, dropout_p, EPS, prenorm=True)


def liger(x, residual, weight, bias, dropout_p):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if bias is None and not dropout_p and residual.dtype == x.dtype:
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)
    h = (functional.dropout(x, dropout_p) if dropout_p else x) + residual
    normal = h.to(weight.dtype)
    if bias is None:
        return LigerRMSNormFunction.apply(normal, weight, EPS, 0.0, "llama", False), h
    return LigerLayerNormFunction.apply(normal, weight, bias, EPS), h


def tensors(shape, variant, device, requires_grad):
    is_rms_norm, stream, _ = variant
    x = torch.randn(shape, device=device, dtype=DTYPES["bf16"])
    residual = torch.randn(shape, device=device, dtype=DTYPES[stream])
    weight = torch.rand(shape[1], device=device, dtype=x.dtype)
    bias = None if is_rms_norm else torch.rand(shape[1], device=device, dtype=x.dtype)
    return [None if t is None else t.requires_grad_(requires_grad) for t in (x, residual, weight, bias)]


def functions():
    return {"flash_attn": fused, "torch": plain, "torch.compile": torch.compile(plain, dynamic=False), "liger": liger}


def forward(shape, variant, device):
    inputs = tensors(shape, variant, device, requires_grad=False)
    run = {name: functools.partial(function, *inputs, variant[2]) for name, function in functions().items()}
    return run | {"triton": functools.partial(triton_forward, *inputs, *variant)}


def backward(shape, variant, device):
    inputs = tensors(shape, variant, device, requires_grad=True)
    leaves = [x for x in inputs if x is not None]
    run = {
        name: backward_of(functools.partial(function, *inputs, variant[2]), *leaves)
        for name, function in functions().items()
    }
    return run | {"triton": triton_backward(inputs, *variant)}


def triton_forward(x, residual, weight, bias, is_rms_norm, stream, dropout_p):
    from flash_attn._triton import layer_norm as triton_ops

    rng_state = torch.tensor([1, 2], device=x.device) if dropout_p else None
    return triton_ops.fwd(
        x,
        None,
        residual,
        weight,
        bias,
        None,
        None,
        None,
        None,
        None,
        None,
        rng_state,
        dropout_p,
        EPS,
        1.0,
        0,
        is_rms_norm,
        False,
        residual.dtype,
        x.dtype,
        False,
    )


def triton_backward(inputs, is_rms_norm, stream, dropout_p):
    x, residual, weight, bias = (None if t is None else t.detach() for t in inputs)
    dout, dh = torch.randn_like(x), torch.randn_like(residual)
    results = functools.cache(lambda: triton_forward(x, residual, weight, bias, is_rms_norm, stream, dropout_p))

    def run():
        from flash_attn._triton import layer_norm as triton_ops

        _, _, h, _, _, mean, rstd = results()
        rng_state = torch.tensor([1, 2], device=x.device) if dropout_p else None
        return triton_ops.bwd(
            dout,
            None,
            dh,
            h,
            None,
            mean,
            rstd,
            weight,
            bias,
            None,
            None,
            None,
            None,
            None,
            None,
            rng_state,
            None,
            None,
            dropout_p,
            1.0,
            0,
            is_rms_norm,
            False,
            x.dtype if dropout_p or x.dtype != h.dtype else None,
            None,
            h.dtype,
            None,
        )

    return run


if __name__ == "__main__":
    main(__doc__, "layer_norm", cases, baseline="torch")
