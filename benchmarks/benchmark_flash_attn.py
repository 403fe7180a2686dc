"""Attention against torch's scaled_dot_product_attention (SDPA): forward and backward, and decoding from a cache.

Flops are those of the products with the keys that a row sees: forward 4, backward 10 for each score and channel. Bytes
are given for decoding, which reads the cache once. 32/8 heads are 32 of q and 8 of k and v; a head_dim of 192/128 is
192 of q and k and 128 of v. SDPA gets tensors (batch, heads, seqlen, head_dim) that are contiguous in that order.
fwd+bwd is a training step's attention, autograd included.

torch               SDPA with the backend that torch chooses
torch cudnn, flash  SDPA with that backend, on a GPU; with a head_dim of 512, which they do not take, torch efficient
                    and torch math
portable            this library's kernels for sm_80, on a GPU that would otherwise run those for Hopper
deterministic       this library's backward with that option
padded              this library, with v filled up to the head_dim of k before the call

flash_attn_packed_*  sequences of several lengths in one tensor, such as "4096+2x512", beside PyTorch's varlen_attn, if
                     the installed one has the options
flash_attn_cross_*   rows that attend to few keys, as those of an image or a video to a text: batch x heads x rows to
                     keys x head_dim
flash_attn_features  what a feature costs. A sink, and key ranges that amount to causal, beside the plain causal call
                     ("flash_attn"); documents of 1k tokens in rows of 16k as key ranges, beside the same as packed
                     sequences ("flash_attn"); 4 first keys and a window of 1k as two ranges, and as a mask of bool,
                     beside the window alone ("flash_attn"); biases (one per head, for all entries, with and without a
                     gradient) and bool masks (for all heads; for all heads and rows), beside the call without one
                     ("flash_attn") and SDPA with the bias as its mask ("torch")
flash_attn_exact     forward, backward and both of a training step with `use_exact_gradients` ("exact") and without,
                     and their peak_mb
flash_attn_memory    for their peak_mb: one causal sequence of more and more tokens, forward alone and with backward
flash_attn_host      for their host_us: tensors so small that the host takes longer than the GPU
"""

import functools
import inspect
import itertools
import operator
import os

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.harness import DTYPES, Case, backward_of, main
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks
from flash_attn.precision import use_exact_gradients, uses_exact_gradients

SHAPES = {  # batch, heads, heads_k, seqlen, head_dim; head_dim of v if it is another
    "cuda": [
        (16384 // seqlen, 2048 // head_dim, 2048 // head_dim, seqlen, head_dim)
        for head_dim in (64, 128, 256)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    + [
        (16384 // seqlen, heads, heads_k, seqlen, 128)
        for heads, heads_k in ((32, 8), (64, 8))
        for seqlen in (512, 1024, 2048, 4096)
    ]
    + [(1, 32, 1, 2048, 128), (1, 32, 8, 2048, 128), (1, 32, 4, 4096, 128)]  # few key heads and one sequence
    + [(16384 // seqlen, 16, 16, seqlen, *head_dims) for head_dims in ((192, 128), (192,)) for seqlen in (2048, 8192)]
    + [(16384 // seqlen, 4, 4, seqlen, 512) for seqlen in (1024, 4096, 16384)],
    "cpu": [(4, 8, 8, 512, 64), (1, 8, 8, 2048, 64), (1, 8, 8, 4096, 128), (2, 16, 16, 1024, 128)],
}
DECODING = {  # batch, heads, heads_k, keys in the cache, head_dim
    "cuda": [
        (1, 32, 8, 2048, 128),
        (1, 32, 8, 16384, 128),
        (1, 32, 8, 131072, 128),
        (8, 32, 8, 4096, 128),
        (64, 32, 8, 4096, 128),
        (128, 32, 8, 2048, 128),
        (16, 32, 32, 4096, 128),
        (32, 64, 8, 8192, 128),
        (64, 16, 1, 8192, 128),
    ],
    "cpu": [(1, 32, 8, 2048, 128), (8, 8, 8, 4096, 64)],
}
FEATURED = {"cuda": [(1, 16, 2, 16384, 128), (1, 64, 8, 16384, 64)], "cpu": [(1, 4, 4, 2048, 64)]}
EXACT = {
    "cuda": [
        *((16384 // seqlen, 16, 16, seqlen, 128) for seqlen in (512, 2048, 8192)),
        *((16384 // seqlen, 32, 32, seqlen, 64) for seqlen in (512, 2048, 8192)),
        (8, 32, 8, 2048, 128),
        (8, 8, 8, 2048, 256),
        (8, 16, 16, 2048, 192, 128),
    ],
    "cpu": [],
}
DOCUMENTS = 16  # in a row of FEATURED
FIRST, WINDOW = 4, 1024  # keys
BIASED = {"cuda": [(2, 16, 16, 4096, 128), (8, 16, 16, 2048, 64), (32, 8, 8, 512, 64)], "cpu": [(1, 4, 4, 1024, 64)]}
PACKED = {  # lengths with how often each occurs; heads, heads_k, head_dim
    "cuda": list(
        itertools.product(
            (
                {512: 32},
                {1024: 16},
                {2048: 8},
                {4096: 2, 2048: 2, 1024: 4},
                {8192: 1, 4096: 1, 2048: 1, 1024: 1, 512: 2},
            ),
            ((32, 32, 64), (16, 16, 128), (16, 4, 128)),
        )
    ),
    "cpu": [],
}
CROSS = {  # batch, heads, rows, keys, head_dim
    "cuda": [
        (1, 8, 4096, 77, 64),
        (2, 10, 4096, 77, 64),
        (8, 16, 1024, 77, 64),
        (1, 24, 4096, 256, 128),
        (1, 40, 32768, 512, 128),
        (1, 16, 16384, 128, 128),
        (1, 8, 4096, 256, 256),
    ],
    "cpu": [],
}
PAGE_SIZES = {"cuda": (0, 16, 256), "cpu": (0,)}  # 0: a dense cache
HOST = {"cuda": [(1, 8, 8, 128, 128)], "cpu": []}
MEMORY = {"cuda": [2**n for n in range(10, 17)], "cpu": []}  # tokens of one sequence with two heads of 128
TYPES = {"cuda": ["bf16"], "cpu": ["fp32", "bf16"]}


def cases(device):
    for shape in SHAPES[device]:
        for dtype in TYPES[device]:
            for causal in (False, True):
                for op, providers, products in (
                    ("fwd", forward, (1, 1)),
                    ("bwd", backward, (3, 2)),
                    ("fwd+bwd", both_ways, (4, 3)),
                ):
                    yield Case(
                        f"flash_attn_{op}",
                        describe(shape) + " causal" * causal,
                        dtype,
                        functools.partial(providers, shape, DTYPES[dtype], device, causal),
                        flops=2 * scores(shape, causal) * sum(map(operator.mul, products, head_dims(shape))),
                    )
    for shape in DECODING[device]:
        for dtype in TYPES[device]:
            for page_size in PAGE_SIZES[device]:
                yield Case(
                    "flash_attn_decode",
                    "x".join(map(str, shape)) + f" page {page_size}" * (page_size > 0),
                    dtype,
                    functools.partial(decoding, shape, DTYPES[dtype], device, page_size),
                    bytes=2 * shape[0] * shape[2] * shape[3] * shape[4] * DTYPES[dtype].itemsize,
                )
    for (lengths, heads), dtype, causal in itertools.product(PACKED[device], TYPES[device], (False, True)):
        seen = sum(times * scores((1, heads[0], heads[1], length), causal) for length, times in lengths.items())
        name = "+".join(f"{times}x{length}" if times > 1 else str(length) for length, times in lengths.items())
        groups = "/".join(map(str, dict.fromkeys(heads[:2])))
        for op, backwards, cost in (("fwd", False, 4), ("bwd", True, 10)):
            yield Case(
                f"flash_attn_packed_{op}",
                f"{name} {groups}x{heads[2]}" + " causal" * causal,
                dtype,
                functools.partial(packed, backwards, lengths, heads, DTYPES[dtype], device, causal),
                flops=cost * seen * heads[2],
            )
    for shape, dtype in itertools.product(CROSS[device], TYPES[device]):
        batch, heads, rows, keys, head_dim = shape
        for op, backwards, cost in (("fwd", False, 4), ("bwd", True, 10)):
            yield Case(
                f"flash_attn_cross_{op}",
                f"{batch}x{heads}x{rows} to {keys}x{head_dim}",
                dtype,
                functools.partial(cross, backwards, shape, DTYPES[dtype], device),
                flops=cost * batch * heads * rows * keys * head_dim,
            )
    for shape in FEATURED[device]:
        document = *shape[:3], shape[3] // DOCUMENTS, shape[4]
        kinds = (
            ("causal", causally, scores(shape, True)),
            ("documents", in_documents, DOCUMENTS * scores(document, True)),
            ("first keys and window", in_two_ranges, shape[0] * shape[1] * (shape[3] - WINDOW / 2) * WINDOW),
        )
        for dtype, (name, providers, seen) in itertools.product(TYPES[device], kinds):
            for op, backwards, cost in (("fwd", False, 4), ("bwd", True, 10)):
                yield Case(
                    "flash_attn_features",
                    f"{describe(shape)} {name} {op}",
                    dtype,
                    functools.partial(providers, backwards, shape, DTYPES[dtype], device),
                    flops=cost * seen * shape[-1],
                )
    for shape, dtype in itertools.product(BIASED[device], TYPES[device]):
        for op, backwards, cost in (("fwd", False, 4), ("bwd", True, 10)):
            yield Case(
                "flash_attn_features",
                f"{describe(shape)} bias {op}",
                dtype,
                functools.partial(biased, backwards, shape, DTYPES[dtype], device),
                flops=cost * scores(shape, False) * shape[-1],
            )
    for shape in EXACT[device]:
        for causal in (False, True):
            for op, products in (("fwd", (1, 1)), ("bwd", (3, 2)), ("fwd+bwd", (4, 3))):
                yield Case(
                    "flash_attn_exact",
                    describe(shape) + " causal" * causal + f" {op}",
                    "bf16",
                    functools.partial(exactly, op, shape, torch.bfloat16, device, causal),
                    flops=2 * scores(shape, causal) * sum(map(operator.mul, products, head_dims(shape))),
                )
    for shape in HOST[device]:
        for name, providers, option in (
            ("fwd", forward, False),
            ("fwd with grad", with_graph, False),
            ("decode", decoding, 0),
            ("decode as servers do", as_servers_do, False),
            ("fwd with features", with_features, False),
            ("fwd with exact gradients", functools.partial(exactly, "fwd"), False),
        ):
            run = functools.partial(providers, shape, torch.bfloat16, device, option)  # not causal, without pages
            yield Case("flash_attn_host", f"{describe(shape)} {name}", "bf16", run)
    for tokens in MEMORY[device]:
        for name, providers in (("fwd", forward), ("fwd+bwd", both_ways)):
            yield Case(
                "flash_attn_memory",
                f"{tokens} {name}",
                "bf16",
                functools.partial(providers, (1, 2, 2, tokens, 128), torch.bfloat16, device, True),
            )


def describe(shape):
    batch, heads, heads_k, seqlen, *dims = shape
    return f"{batch}x{heads}{f'/{heads_k}' * (heads_k < heads)}x{seqlen}x{'/'.join(map(str, dims))}"


def head_dims(shape):
    """The head dims of keys and of values in a shape."""
    return shape[4], shape[-1]


def scores(shape, causal):
    batch, heads, _, seqlen, *_ = shape
    return batch * heads * seqlen * (seqlen + 1) / 2 if causal else batch * heads * seqlen**2


def tensors(shape, dtype, device, **options):
    """q, k, v as (batch, seqlen, heads, head_dim), and as SDPA wants them."""
    batch, heads, heads_k, seqlen, *_ = shape
    head_dim, head_dim_v = head_dims(shape)
    sizes = (heads, head_dim), (heads_k, head_dim), (heads_k, head_dim_v)
    ours = [torch.randn(batch, seqlen, *size, dtype=dtype, device=device) for size in sizes]
    theirs = [x.transpose(1, 2).contiguous() for x in ours]
    return [x.requires_grad_(**options) for x in ours], [x.requires_grad_(**options) for x in theirs]


def forward(shape, dtype, device, causal, requires_grad=False):
    ours, theirs = tensors(shape, dtype, device, requires_grad=requires_grad)
    attend = functools.partial(flash_attn_func, *ours, causal=causal)
    return {
        "flash_attn": attend,
        **{name: functools.partial(attend, *ours, causal=causal) for name, attend in padded(shape).items()},
        **portable(attend, device),
        **{name: functools.partial(attend, *theirs) for name, attend in sdpa(device, shape, causal).items()},
    }


def with_graph(shape, dtype, device, causal):
    """The forward, recording what its backward needs."""
    return forward(shape, dtype, device, causal, requires_grad=True)


def padded(shape):
    """The provider "padded": v is filled up to the head_dim of k. No provider if v has the same head_dim."""
    head_dim, head_dim_v = head_dims(shape)

    def attend(q, k, v, **options):
        return flash_attn_func(q, k, F.pad(v, (0, head_dim - head_dim_v)), **options)[..., :head_dim_v]

    return {"padded": attend} if head_dim_v != head_dim else {}


def portable(function, device):
    return {"portable": functools.partial(portably, function)} if device == "cuda" else {}


def portably(function):
    before = os.environ.get("FLASH_ATTN_PORTABLE")
    os.environ["FLASH_ATTN_PORTABLE"] = "1"
    try:
        return function()
    finally:
        if before is None:
            del os.environ["FLASH_ATTN_PORTABLE"]


def backward(shape, dtype, device, causal):
    ours, theirs = tensors(shape, dtype, device)
    functions = {}
    for name, deterministic in (("flash_attn", False), ("deterministic", True)):
        attend = functools.partial(flash_attn_func, *ours, causal=causal, deterministic=deterministic)
        functions[name] = backward_of(attend, *ours)
    attend = functools.partial(flash_attn_func, *ours, causal=causal)
    functions |= portable(backward_of(attend, *ours), device)
    for name, attend in padded(shape).items():
        functions[name] = backward_of(functools.partial(attend, *ours, causal=causal), *ours)
    for name, attend in sdpa(device, shape, causal).items():
        functions[name] = backward_of(functools.partial(attend, *theirs), *theirs)
    return functions


def both_ways(shape, dtype, device, causal):
    ours, theirs = tensors(shape, dtype, device)
    functions = {
        name: functools.partial(step, functools.partial(attend, causal=causal), ours)
        for name, attend in {"flash_attn": flash_attn_func, **padded(shape)}.items()
    }
    attention = sdpa(device, shape, causal)
    return functions | {name: functools.partial(step, attend, theirs) for name, attend in attention.items()}


def step(attend, inputs):
    out = attend(*inputs)
    return torch.autograd.grad(out, inputs, out)


def decoding(shape, dtype, device, page_size):
    """One query per sequence over a full cache. SDPA knows no pages."""
    batch, heads, heads_k, seqlen, head_dim = shape
    q = torch.randn(batch, 1, heads, head_dim, dtype=dtype, device=device)
    k, v = (torch.randn(batch, seqlen, heads_k, head_dim, dtype=dtype, device=device) for _ in "kv")
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=device)
    if page_size:
        pages = torch.randperm(batch * seqlen // page_size, device=device, dtype=torch.int32).reshape(batch, -1)
        k, v = (x.reshape(-1, page_size, heads_k, head_dim) for x in (k, v))
        return {"flash_attn": lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=pages)}
    theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    return {
        "flash_attn": lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths),
        **{name: functools.partial(attend, *theirs) for name, attend in sdpa(device, shape, False).items()},
    }


def as_servers_do(shape, dtype, device, causal):
    """A step of decoding over pages, by the ways in which servers call it, for the time that the host takes."""
    batch, heads, heads_k, seqlen, head_dim = shape
    q, out = (torch.randn(batch, 1, heads, head_dim, dtype=dtype, device=device) for _ in range(2))
    new = [torch.randn(batch, 1, heads_k, head_dim, dtype=dtype, device=device) for _ in "kv"]
    page, width = 16, -(-(seqlen + 1) // 16)
    caches = [torch.randn(batch * width, page, heads_k, head_dim, dtype=dtype, device=device) for _ in "kv"]
    table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    common = dict(block_table=table, causal=True)
    decode = functools.partial(flash_attn_with_kvcache, **common, cache_seqlens=lengths)
    bounds = dict(cu_seqlens_q=starts, max_seqlen_q=1)
    varlen = functools.partial(flash_attn_varlen_func, **common, **bounds, max_seqlen_k=seqlen, seqused_k=lengths)
    tokens, tokens_out = q[:, 0], out[:, 0]
    return {
        "flash_attn": functools.partial(decode, q, *caches),
        "window": functools.partial(decode, q, *caches, window_size=(seqlen // 2, 0)),
        "append": functools.partial(decode, q, *caches, *new),
        "append, out": functools.partial(decode, q, *caches, *new, out=out),
        "packed, out": functools.partial(decode, tokens, *caches, **bounds, out=tokens_out),
        "varlen": functools.partial(varlen, tokens, *caches),
        "varlen, out": functools.partial(varlen, tokens, *caches, out=tokens_out),
    }


def packed(backward, lengths, heads, dtype, device, causal):
    """Packed sequences; in the backward, also deterministic."""
    sizes = [length for length, times in lengths.items() for _ in range(times)]
    starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    options = dict(dtype=dtype, device=device, requires_grad=backward)
    inputs = [torch.randn(sum(sizes), each, heads[2], **options) for each in (heads[0], heads[1], heads[1])]
    bounds = starts, starts, max(sizes), max(sizes)
    attend = functools.partial(flash_attn_varlen_func, *inputs, *bounds, causal=causal)
    functions = {"flash_attn": attend}
    if backward:
        functions["deterministic"] = functools.partial(attend, deterministic=True)
    grouped = {"enable_gqa": True} if heads[1] < heads[0] else {}
    theirs = {"window_size": (-1, 0 if causal else -1)} | grouped
    if theirs.keys() <= inspect.signature(varlen_attn).parameters.keys():
        functions["torch"] = functools.partial(varlen_attn, *inputs, *bounds, **theirs)
    return {name: backward_of(each, *inputs) if backward else each for name, each in functions.items()}


def cross(backward, shape, dtype, device):
    """Rows that attend to keys of another number."""
    batch, heads, rows, keys, head_dim = shape
    options = dict(dtype=dtype, device=device, requires_grad=backward)
    ours = [torch.randn(batch, length, heads, head_dim, **options) for length in (rows, keys, keys)]
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_(backward) for x in ours]
    calls = {"flash_attn": (flash_attn_func, ours)}
    calls |= {
        name: (attend, theirs) for name, attend in sdpa(device, (batch, heads, heads, rows, head_dim), False).items()
    }
    functions = {name: (functools.partial(attend, *inputs), inputs) for name, (attend, inputs) in calls.items()}
    return {name: backward_of(call, *inputs) if backward else call for name, (call, inputs) in functions.items()}


def causally(backward, shape, dtype, device):
    """A causal call, the same with a sink, and key ranges that amount to causal."""
    inputs, _ = tensors(shape, dtype, device, requires_grad=backward)
    seqlen, sink = shape[3], torch.zeros(shape[1], device=device)
    options = {
        "flash_attn": dict(causal=True),
        "sink": dict(causal=True, learnable_sink=sink),
        "ranges": dict(key_ranges=masks.top_left_causal(seqlen, device)),
        "ranges and sink": dict(key_ranges=masks.top_left_causal(seqlen, device), learnable_sink=sink),
    }
    functions = {name: functools.partial(flash_attn_func, *inputs, **each) for name, each in options.items()}
    return {name: backward_of(each, *inputs) if backward else each for name, each in functions.items()}


def in_documents(backward, shape, dtype, device):
    """Causal attention within documents of equal lengths, as key ranges and as packed sequences."""
    inputs, _ = tensors(shape, dtype, device, requires_grad=backward)
    length = shape[3] // DOCUMENTS
    starts = torch.arange(0, shape[3] + 1, length, dtype=torch.int32, device=device)
    tokens = [x.detach().flatten(0, 1).requires_grad_(backward) for x in inputs]
    varlen = functools.partial(flash_attn_varlen_func, *tokens, starts, starts, length, length, causal=True)
    ranges = functools.partial(flash_attn_func, *inputs, causal=True, key_ranges=masks.documents(starts, shape[3]))
    if not backward:
        return {"flash_attn": varlen, "ranges": ranges}
    return {"flash_attn": backward_of(varlen, *tokens), "ranges": backward_of(ranges, *inputs)}


def in_two_ranges(backward, shape, dtype, device):
    """A window alone, and with some first keys, as two key ranges and as a mask of bool."""
    inputs, _ = tensors(shape, dtype, device, requires_grad=backward)
    window = WINDOW - 1, 0
    ranges = masks.sink_and_window(FIRST, window, shape[3], device=device)
    options = {
        "flash_attn": dict(window_size=window),
        "ranges": dict(causal=True, key_ranges=ranges),
        "mask": dict(causal=True, attn_bias=masks.to_bool(ranges, shape[3])),
    }
    functions = {name: functools.partial(flash_attn_func, *inputs, **each) for name, each in options.items()}
    return {name: backward_of(each, *inputs) if backward else each for name, each in functions.items()}


def biased(backward, shape, dtype, device):
    """A call without a bias, with one of each head, also in float32 and with a gradient, and with masks of bool."""
    ours, theirs = tensors(shape, dtype, device, requires_grad=backward)
    _, heads, _, seqlen, *_ = shape
    bias = torch.randn(1, heads, seqlen, seqlen, dtype=dtype, device=device)
    leaf = bias.clone().requires_grad_(backward)
    mask = bias[:, :1] < 1
    biases = {"flash_attn": None, "bias": bias, "bias fp32": bias.float(), "mask": mask, "mask of keys": mask[:, :, :1]}
    if backward:
        biases["bias with gradient"] = leaf
    calls = {name: (functools.partial(flash_attn_func, *ours, attn_bias=x), ours) for name, x in biases.items()}
    for name, x in {"torch": bias, "torch with gradient": leaf if backward else None}.items():
        if x is not None:
            calls[name] = functools.partial(F.scaled_dot_product_attention, *theirs, attn_mask=x), theirs
    if not backward:
        return {name: call for name, (call, _) in calls.items()}
    leaves = {name: [*inputs, leaf][: 3 + name.endswith("with gradient")] for name, (_, inputs) in calls.items()}
    return {name: backward_of(call, *leaves[name]) for name, (call, _) in calls.items()}


def exactly(op, shape, dtype, device, causal):
    """A training step or a part of it, with rounded and with exact gradients."""
    inputs, _ = tensors(shape, dtype, device, requires_grad=True)
    attend = functools.partial(flash_attn_func, causal=causal)
    modes = {"flash_attn": attend, "exact": functools.partial(with_exact_gradients, attend)}
    kinds = {
        "fwd": lambda attend: functools.partial(attend, *inputs),
        "bwd": lambda attend: backward_of(functools.partial(attend, *inputs), *inputs),
        "fwd+bwd": lambda attend: functools.partial(step, attend, inputs),
    }
    return {name: kinds[op](attend) for name, attend in modes.items()}


def with_exact_gradients(attend, *inputs):
    before = uses_exact_gradients()
    use_exact_gradients()
    try:
        return attend(*inputs)
    finally:
        use_exact_gradients(before)


def with_features(shape, dtype, device, causal):
    """Calls with features beside a plain call, for the time that the host takes."""
    inputs, _ = tensors(shape, dtype, device, requires_grad=False)
    ranges = masks.top_left_causal(shape[3], device)
    options = {
        "flash_attn": {},
        "sink": dict(learnable_sink=torch.zeros(shape[1], device=device)),
        "ranges": dict(key_ranges=ranges),
        "chunks": dict(attention_chunk=shape[3] // 2),
    }
    return {name: functools.partial(flash_attn_func, *inputs, **each) for name, each in options.items()}


def sdpa(device, shape, causal):
    """Provider names and functions of q, k, v."""
    chosen = {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
    if max(head_dims(shape)) > 256:
        chosen = {"torch efficient": SDPBackend.EFFICIENT_ATTENTION, "torch math": SDPBackend.MATH}
    named = {name: functools.partial(with_backend, backend) for name, backend in chosen.items() if device == "cuda"}
    _, heads, heads_k, *_ = shape
    head_dim, head_dim_v = head_dims(shape)
    if head_dim_v != head_dim:
        named = {}  # not every backend takes them
    options = dict(is_causal=causal, enable_gqa=heads_k < heads)
    functions = {"torch": F.scaled_dot_product_attention, **named}
    return {name: functools.partial(attend, **options) for name, attend in functions.items()}


def with_backend(backend, *args, **options):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*args, **options)


if __name__ == "__main__":
    main(__doc__, "flash_attn", cases, baseline="torch")
