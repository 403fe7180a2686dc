"""What torch.utils.flop_counter counts: the products of the same computation in torch's own operations."""

import functools

import interpreters
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import GPT2Config

from flash_attn import (
    _library,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    functional,
)
from flash_attn._ops import flash_attn as ops
from flash_attn._reference.attention.options import Features, Options
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.ops.fused_dense import FusedDense, FusedMLP
from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act


def counted(function, *args, **kwargs):
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def formula(q, k, v):
    """Attention of one head after the other, in products that torch counts by itself."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    return torch.matmul(torch.matmul(q.transpose(1, 2), k.mT).softmax(-1), v)


def of_backward(function, *inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return counted(lambda: function(*leaves).sum().backward())


def tensors(seqlen_q=5, seqlen_k=7, heads=4, heads_k=2, head_dim=8, head_dim_v=8, batch=2):
    shapes = (seqlen_q, heads, head_dim), (seqlen_k, heads_k, head_dim), (seqlen_k, heads_k, head_dim_v)
    return [torch.randn(batch, *shape) for shape in shapes]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


SHAPES = {
    "equal": dict(seqlen_k=5, heads_k=4),
    "grouped": dict(),
    "other values": dict(head_dim_v=16),
    "large": dict(head_dim=520, head_dim_v=264),
}
OPTIONS = {  # which change no number
    "none": lambda: {},
    "causal": lambda: dict(causal=True),
    "window": lambda: dict(window_size=(1, 1)),
    "sink": lambda: dict(learnable_sink=torch.zeros(4)),
    "chunks and largest scores": lambda: dict(attention_chunk=2, return_max_logit=True),
    "bias": lambda: dict(attn_bias=torch.zeros(5, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.cover(2)
def test_attention(shape, options, dtype):
    """And its backward, which computes the scores again."""
    q, k, v = (x.to(dtype) for x in tensors(**shape))

    def attend(q, k, v):
        out = flash_attn_func(q, k, v, **options())
        return out[0] if isinstance(out, tuple) else out

    assert counted(attend, q, k, v) == counted(formula, q, k, v) > 0
    scores = 2 * 2 * 4 * q.shape[1] * k.shape[1] * q.shape[-1]
    assert of_backward(attend, q, k, v) == of_backward(formula, q, k, v) + scores


@pytest.mark.parametrize("has_kernels", [False, True])
def test_two_ranges(has_kernels, monkeypatch):
    """They count as two calls, as which kernels compute them, and so does one call without kernels."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: has_kernels)
    q, k, v = (x.bfloat16() for x in tensors())
    ranges = ints(0, 2, 3, 7).expand(1, 1, 5, 4)
    scores = 2 * 2 * 4 * 5 * 7 * 8
    for options in (dict(), dict(learnable_sink=torch.zeros(4))):
        attend = functools.partial(flash_attn_func, key_ranges=ranges, **options)
        assert counted(attend, q, k, v) == 2 * counted(formula, q, k, v) == 2 * 2 * scores
        assert of_backward(attend, q, k, v) == 2 * 7 * scores
    with torch.no_grad():
        decode = functools.partial(flash_attn_with_kvcache, cache_seqlens=6, key_ranges=ranges)
        assert counted(decode, q, k, v) == 2 * 4 * 5 * (6 + 6) * 4 * 8


def test_packed_attention():
    q, k, v = tensors(seqlen_k=5, heads_k=4)
    packed = torch.stack([q, k, v], dim=2)
    scores = 2 * 2 * 4 * 5 * 5 * 8
    assert counted(flash_attn_qkvpacked_func, packed) == counted(flash_attn_kvpacked_func, q, packed[:, :, 1:])
    assert counted(flash_attn_qkvpacked_func, packed) == counted(formula, q, k, v)
    assert of_backward(flash_attn_qkvpacked_func, packed) == 7 * scores
    assert counted(flash_attn_qkvpacked_func, packed, dropout_p=0.5, return_attn_probs=True) == 3 * scores


PACKED = {  # lengths of queries and keys that count, and the arguments besides cu_seqlens
    "whole": ((2, 3), (4, 6), {}),
    "used keys": ((2, 3), (1, 0), dict(seqused_k=ints(1, 0))),
    "used rows": ((0, 2), (4, 6), dict(seqused_q=ints(0, 2))),
    "both used": ((1, 2), (3, 5), dict(seqused_q=ints(1, 2), seqused_k=ints(3, 5))),
}


@pytest.mark.parametrize(("rows", "keys", "options"), PACKED.values(), ids=PACKED)
def test_packed_tokens(rows, keys, options):
    q, k, v = (x[0] for x in tensors(batch=1, seqlen_k=10))
    starts = ints(0, 2, 5), ints(0, 4, 10)
    pairs = sum(m * n for m, n in zip(rows, keys))
    attend = lambda q, k, v: flash_attn_varlen_func(q, k, v, *starts, 3, 6, **options)  # noqa: E731
    assert counted(attend, q, k, v) == 2 * 2 * pairs * 4 * 8
    assert of_backward(attend, q, k, v) == 7 * 2 * pairs * 4 * 8


def test_pages():
    """Keys in pages have the lengths of seqused_k, whatever cu_seqlens_k holds."""
    q, pages = torch.randn(5, 4, 8), torch.randn(4, 16, 2, 8)
    table, used = ints(0, 1, 2, 3).view(2, 2), ints(20, 31)
    attend = lambda **options: flash_attn_varlen_func(  # noqa: E731
        q, pages, pages, ints(0, 2, 5), ints(0, 32, 64), 3, 32, block_table=table, **options
    )
    assert counted(attend, seqused_k=used) == 4 * (2 * 20 + 3 * 31) * 4 * 8


CACHES = {  # the keys of both entries, and the arguments
    "whole": (16 + 16, {}),
    "one length": (5 + 5, dict(cache_seqlens=5)),
    "lengths": (5 + 9, dict(cache_seqlens=ints(5, 9))),
    "appended": (8 + 12, dict(cache_seqlens=ints(5, 9), k=torch.randn(2, 3, 2, 8), v=torch.randn(2, 3, 2, 8))),
    "padded": (3 + 9, dict(cache_seqlens=ints(5, 9), cache_leftpad=ints(2, 0))),
    "sink": (5 + 9, dict(cache_seqlens=ints(5, 9), learnable_sink=torch.zeros(4))),
}


@pytest.mark.parametrize(("keys", "options"), CACHES.values(), ids=CACHES)
def test_decoding(keys, options):
    q, k_cache, v_cache = tensors(seqlen_q=3, seqlen_k=16)
    with torch.no_grad():
        assert counted(flash_attn_with_kvcache, q, k_cache, v_cache, **options) == 4 * 3 * keys * 4 * 8


def test_decoding_from_pages():
    q, pages = torch.randn(2, 3, 4, 8), torch.randn(4, 16, 2, 8)
    table = ints(0, 1, 2, 3).view(2, 2)
    with torch.no_grad():
        found = counted(flash_attn_with_kvcache, q, pages, pages, cache_seqlens=ints(20, 31), block_table=table)
    assert found == 4 * 3 * (20 + 31) * 4 * 8


def test_decoding_for_packed_queries():
    q, pages = torch.randn(7, 4, 8), torch.randn(4, 16, 2, 8)
    table, used, starts = ints(0, 1, 2, 3).view(2, 2), ints(20, 31), ints(0, 2, 5)
    options = dict(cache_seqlens=used, block_table=table, cu_seqlens_q=starts, max_seqlen_q=3)
    with torch.no_grad():
        for out in (None, torch.empty_like(q)):
            found = counted(flash_attn_with_kvcache, q, pages, pages, **options, out=out)
            assert found == 4 * (2 * 20 + 3 * 31) * 4 * 8


def test_lengths_without_values():
    """On the meta device and in fake tensors, each sequence counts as the longest."""
    q, starts = torch.randn(5, 4, 8), ints(0, 2, 5)
    for x, y in ((q.to("meta"), starts.to("meta")),):
        assert counted(flash_attn_varlen_func, x, x, x, y, y, 3, 3) == 4 * 2 * 3 * 3 * 4 * 8
        x, lengths = x[None].expand(2, -1, -1, -1).contiguous(), torch.empty(2, dtype=torch.int32, device="meta")
        with torch.no_grad():
            assert counted(flash_attn_with_kvcache, x, x, x, cache_seqlens=lengths) == 4 * 2 * 5 * 5 * 4 * 8


def test_plain_forms():
    """The ops of the short way, which functions leave while a mode counts, for callers of torch.ops."""
    q, k, v = tensors()
    scores = (0.5, -1, -1)
    for op in (torch.ops.flash_attn.fwd_plain, torch.ops.flash_attn.fwd_plain_out):
        assert counted(op, q, k, v, *scores) == counted(formula, q, k, v)
    arguments = q, k, v, None, None, *scores, ints(2, 3)
    assert counted(torch.ops.flash_attn.fwd_kvcache_plain_out, *arguments) == 4 * 5 * 5 * 4 * 8
    out, lse = ops.fwd_plain(q, k, v, *scores)
    assert counted(torch.ops.flash_attn.bwd_plain, out, q, k, v, out, lse, *scores) == 5 * 2 * 2 * 4 * 5 * 7 * 8


def test_sums_of_several_backwards():
    """The arguments that say how dk and dv are kept come after those that are counted."""
    q, k, v = tensors()
    out, lse = ops.fwd(q, k, v, 0.5, -1, -1)
    expected, options = 5 * 2 * 2 * 4 * 5 * 7 * 8, Options(0.5, -1, -1)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for more in ((), (True,)):
        found = counted(torch.ops.flash_attn.bwd, out, q, k, v, out, lse, None, None, *grads, *options, *more)
        assert found == expected
    others = None, None, None, False, None, None
    for more in ((), (True,)):
        found = counted(
            torch.ops.flash_attn.bwd_features, out, q, k, v, out, lse, *others, *options, *Features()[2:], *more
        )
        assert found == expected


def test_functional():
    q, k, _ = tensors()
    once = 2 * 2 * 4 * 5 * 7 * 8
    assert counted(functional.weights, q, k, functional.entropy(q, k)) == once


def test_linear_layers():
    """In 16 bits they are ops of this package; in other types, torch's."""
    x, weight = torch.randn(3, 5, 16), torch.randn(24, 16)
    for dtype in (torch.bfloat16, torch.float32):
        dense, mlp = FusedDense(16, 24, dtype=dtype), FusedMLP(16, 32, dtype=dtype)
        assert counted(dense, x.to(dtype)) == counted(F.linear, x, weight)
        leaf = x.to(dtype).requires_grad_()
        assert counted(lambda: dense(leaf).sum().backward()) == 3 * counted(F.linear, x, weight)  # noqa: B023
        assert counted(lambda: mlp(leaf).sum().backward()) == 3 * 2 * 2 * 15 * 16 * 32  # noqa: B023
    assert counted(triton_linear_act, x, weight, activation="gelu") == counted(F.linear, x, weight)
    assert counted(triton_dgrad_act, torch.randn(5, 24), weight) == 2 * 5 * 24 * 16


MODELS = {
    "attention": dict(use_flash_attn=True),
    "fused": dict(use_flash_attn=True, fused_mlp=True, fused_bias_fc=True, fused_dropout_add_ln=True),
    "rotary": dict(use_flash_attn=True, n_positions=0, rotary_emb_fraction=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_gpt(options, dtype):
    """The model counts as the same one in torch's operations, and its training one product of attention more."""
    small = dict(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)
    small |= dict(activation_function="gelu_new", embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
    ids = torch.arange(12)[None]
    models = [GPTLMHeadModel(GPT2Config(**small | each), dtype=dtype) for each in ({}, options)]
    with sdpa_kernel(SDPBackend.MATH):  # whose products torch counts on every device
        plain, fused = (counted(model, ids) for model in models)
        assert fused == plain > 0
        plain, fused = (counted(lambda: model(ids).logits.sum().backward()) for model in models)  # noqa: B023
    assert fused == plain + 2 * (2 * 2 * 12 * 12 * 16)


def test_every_op_with_products_is_known():
    """All ops of attention and of linear layers, and their forms without kernels."""
    known = {str(packet) for packet in flop_registry}
    names = {str(op).split("::")[-1] for op in torch._C._dispatch_get_all_op_names() if op.startswith("flash_attn::")}
    families = ("fwd", "bwd", "fused_dense", "gated_dense", "linear_act", "probabilities", "weights")
    wanted = {name.partition(".")[0] for name in names if name.startswith(families)}
    assert wanted and {f"flash_attn.{name}" for name in wanted} <= known


LATER = """
import sys
import flash_attn, torch
assert not {"torch.utils.flop_counter", "torch.distributed.tensor", "triton"} & set(sys.modules)
import importlib.util
assert importlib.util.find_spec("torch.utils.flop_counter").loader.get_code("torch.utils.flop_counter")
import torch.utils.flop_counter as counter
from flash_attn._ops import fused_dense
names = {str(packet) for packet in counter.flop_registry}
assert {"flash_attn.fwd", "flash_attn.bwd_reference", "flash_attn.fused_dense_fwd"} <= names
"""


def test_the_counter_is_not_imported_with_the_package():
    """It takes time, and imports Triton. Formulas are registered once it is; and of ops that are defined later."""
    interpreters.run(LATER)
