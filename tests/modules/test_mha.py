"""Attention modules: numbers and gradients against the formula and other libraries, decoding, options, errors."""

import copy
import dataclasses
import pickle
import types

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, params
from compare import assert_error_ratio
from torch import nn

from flash_attn.bert_padding import unpad_input
from flash_attn.modules.mha import MHA, CrossAttention, FlashSelfAttention, ParallelMHA, SelfAttention, get_alibi_slopes
from flash_attn.utils.generation import InferenceParams, PageAllocator, copy_pages


@dataclasses.dataclass(frozen=True)
class Case:
    """Options of MHA. `str(case)` is its id."""

    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 32
    causal: bool = True
    rotary_dim: int = 0
    interleaved: bool = False
    scale_base: float | None = None
    alibi: bool = False
    window: tuple = (-1, -1)
    scale: float | None = None
    flash: bool = True
    width: int | None = None  # of the input, if it is not heads * head_dim
    qk_norm: bool = False
    over_heads: bool = False  # of these norms
    zero_centered: bool = False
    softcap: float = 0.0

    def __str__(self):
        values = dataclasses.asdict(self)
        return "-".join(f"{name}{values[name]}" for name in values if values[name] != getattr(Case, name)) or "plain"

    @property
    def embed_dim(self):
        return self.heads * self.head_dim if self.width is None else self.width

    @property
    def options(self):
        return dict(
            num_heads=self.heads,
            num_heads_kv=self.heads_kv,
            causal=self.causal,
            softmax_scale=self.scale,
            rotary_emb_dim=self.rotary_dim,
            rotary_emb_interleaved=self.interleaved,
            rotary_emb_scale_base=self.scale_base,
            use_alibi=self.alibi,
            window_size=self.window,
            use_flash_attn=self.flash,
            layer_idx=3,
            head_dim=None if self.width is None else self.head_dim,
            qk_norm=self.qk_norm,
            qk_norm_eps=1e-3,
            qk_norm_over_heads=self.over_heads,
            qk_norm_zero_centered=self.zero_centered,
            softcap=self.softcap,
        )

    def module(self, device, dtype=torch.float32, **options):
        module = MHA(self.embed_dim, **self.options | options, device=device, dtype=dtype)
        if self.qk_norm:
            nn.init.normal_(module.q_norm.weight)
            nn.init.normal_(module.k_norm.weight)
        return module

    def formula(self, x, *parameters):
        """What MHA gives, in the dtype of its arguments."""
        *norms, Wqkv, bqkv, out_weight, out_bias = parameters
        qkv = F.linear(x, Wqkv, bqkv).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.heads_kv, self.heads_kv), dim=2)
        if self.qk_norm:
            q, k = (self.normed(*each) for each in zip((q, k), norms, strict=True))
        if self.rotary_dim:
            q, k = self.rotated(q, 1), self.rotated(k, -1)
        slopes = torch.tensor(get_alibi_slopes(self.heads), device=x.device, dtype=x.dtype) if self.alibi else None
        out, _ = oracle.attention(
            q,
            k,
            v,
            causal=self.causal,
            window_size=self.window,
            alibi_slopes=slopes,
            softmax_scale=self.scale,
            softcap=self.softcap,
        )
        return F.linear(out.flatten(2), out_weight, out_bias)

    def normed(self, x, weight):
        rows = x.flatten(2) if self.over_heads else x
        weight = weight + 1 if self.zero_centered else weight
        return F.rms_norm(rows, weight.shape, weight, 1e-3).view_as(x)

    def rotated(self, x, sign):
        position = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None]
        even = torch.arange(0, self.rotary_dim, 2, device=x.device, dtype=torch.float64)
        angles = position * 10000 ** (-even / self.rotary_dim)
        gain = 1.0
        if self.scale_base:
            gain = ((even / self.rotary_dim + 0.4) / 1.4) ** (sign * (position - x.shape[1] // 2) / self.scale_base)
        tables = [(table * gain).to(x.dtype) for table in (angles.cos(), angles.sin())]
        rows = torch.arange(x.shape[1], device=x.device)
        return torch.stack([oracle.rotate(entry, *tables, rows, self.interleaved) for entry in x])


CASES = [
    Case(),
    Case(causal=False),
    Case(flash=False),
    Case(flash=False, causal=False, scale=0.3),
    Case(heads_kv=2),
    Case(heads_kv=1, flash=False),
    Case(rotary_dim=32),
    Case(rotary_dim=16, interleaved=True, heads_kv=2),
    Case(rotary_dim=8, flash=False),
    Case(rotary_dim=32, scale_base=512.0, heads_kv=1),
    Case(rotary_dim=24, scale_base=512.0, flash=False, heads_kv=2),
    Case(alibi=True, heads=6, heads_kv=6),
    Case(alibi=True, heads=6, heads_kv=2, causal=False),
    Case(window=(5, -1)),
    Case(window=(5, 3), causal=False, heads_kv=2, rotary_dim=16),
    Case(head_dim=20, scale=0.1, rotary_dim=10),
    Case(width=72, heads_kv=2, rotary_dim=32),
    Case(width=72, qk_norm=True, rotary_dim=16),
    Case(qk_norm=True, heads_kv=1, rotary_dim=16, interleaved=True),
    Case(qk_norm=True, flash=False, width=48, head_dim=24, heads_kv=2),
    Case(qk_norm=True, over_heads=True, heads_kv=2, rotary_dim=16),
    Case(qk_norm=True, zero_centered=True, flash=False),
    Case(softcap=2.0, heads_kv=2, window=(5, 0)),
]


def draw(case, device, dtype, seqlen=19):
    """A module, an input and a gradient of its output."""
    x, dout = torch.randn(2, 2, seqlen, case.embed_dim, device=device).to(dtype)
    return case.module(device, dtype), x, dout


def with_gradients(function, tensors, dout):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def of_module(module, x, dout, **kwargs):
    """The output, and the gradients of x and of all parameters."""
    leaf = x.detach().clone().requires_grad_()
    out = module(leaf, **kwargs)
    return out.detach(), *torch.autograd.grad(out, [leaf, *module.parameters()], dout)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", params(CASES))
def test_formula(case, dtype, device):
    module, x, dout = draw(case, device, DTYPES[dtype])
    tensors = x, *module.parameters()
    found = of_module(module, x, dout)
    exact = with_gradients(case.formula, [tensor.double() for tensor in tensors], dout.double())
    plain = with_gradients(case.formula, tensors, dout)
    names = "out", "dx", *(f"d{name}" for name, _ in module.named_parameters())
    for name, one, right, baseline in zip(names, found, exact, plain, strict=True):
        # Sums over tokens, whose order is not that of the plain sum.
        plus = 1e-5 * right.abs().max().item() if dtype == "fp32" else None
        assert_error_ratio(one, right, baseline, plus=plus, name=name)


def test_state_dict():
    def shapes(*args, **options):
        return {name: tuple(value.shape) for name, value in MHA(*args, **options).state_dict().items()}

    plain = {"Wqkv.weight": (192, 64), "Wqkv.bias": (192,), "out_proj.weight": (64, 64), "out_proj.bias": (64,)}
    assert shapes(64, 4) == plain
    assert shapes(64, 4, rotary_emb_dim=16, rotary_emb_scale_base=512, use_alibi=True, use_flash_attn=True) == plain
    assert shapes(64, 4, fused_bias_fc=True, return_residual=True) == plain
    assert shapes(64, 4, 1, qkv_proj_bias=False, out_proj_bias=False) == {
        "Wqkv.weight": (96, 64),
        "out_proj.weight": (64, 64),
    }
    cross = {
        "Wq.weight": (64, 64),
        "Wq.bias": (64,),
        "Wkv.weight": (64, 64),
        "Wkv.bias": (64,),
        "out_proj.weight": (64, 64),
        "out_proj.bias": (64,),
    }
    assert shapes(64, 4, 2, cross_attn=True) == cross
    assert shapes(64, 4, dwconv=True) == plain | {"dwconv_qkv.weight": (192, 1, 3), "dwconv_qkv.bias": (192,)}
    of_two = {
        f"dwconv_{part}.{name}": size
        for part in ("q", "kv")
        for name, size in (("weight", (64, 1, 3)), ("bias", (64,)))
    }
    assert shapes(64, 4, 2, cross_attn=True, dwconv=True) == cross | of_two


@pytest.mark.parametrize(
    ("nheads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes(nheads, exponents):
    assert get_alibi_slopes(nheads) == [2**-exponent for exponent in exponents]


@pytest.mark.parametrize("flash", [False, True])
def test_dropout_is_for_training(flash, device):
    module = Case(flash=flash).module(device, dropout=0.5)
    x = torch.randn(2, 19, 128, device=device)
    plain = Case(flash=flash).module(device)
    plain.load_state_dict(module.state_dict())
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), plain(x))


# Options of MHA.


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_residual(cross, fused, device):
    options = dict(cross_attn=cross, fused_bias_fc=fused)
    module = MHA(64, 4, return_residual=True, **options, device=device)
    plain = MHA(64, 4, **options, device=device)
    plain.load_state_dict(module.state_dict())
    x, dout = torch.randn(2, 2, 5, 64, device=device)
    dresidual = torch.randn_like(x)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, residual = module(leaf)
    assert torch.equal(residual, x)
    torch.testing.assert_close(out, plain(other))
    torch.autograd.backward((out, residual), (dout, dresidual))
    torch.autograd.backward((plain(other), other), (dout, dresidual))
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("subset", [slice(0, 1), slice(2, 5), [0, 3]])
@pytest.mark.parametrize("options", [dict(), dict(use_flash_attn=True), dict(fused_bias_fc=True)], ids=str)
def test_subset_of_queries(options, subset, device):
    """The residual is all of x, as without a subset: the caller selects from it what it needs."""
    module = MHA(64, 4, cross_attn=True, return_residual=True, device=device, **options)
    x, x_kv = torch.randn(2, 2, 7, 64, device=device)
    leaf = x.clone().requires_grad_()
    out, residual = module(leaf, mixer_subset=subset)
    torch.testing.assert_close(out, module(x)[0][:, subset])
    assert torch.equal(residual, x)
    (gradient,) = torch.autograd.grad(residual.sum(), leaf)
    assert torch.equal(gradient, torch.ones_like(x))
    torch.testing.assert_close(module(x, x_kv, mixer_subset=subset)[0], module(x, x_kv)[0][:, subset])


def test_cross_attention_of_another_length(device):
    module = MHA(64, 4, 2, cross_attn=True, device=device)
    flash = MHA(64, 4, 2, cross_attn=True, use_flash_attn=True, device=device)
    flash.load_state_dict(module.state_dict())
    x, x_kv = torch.randn(2, 5, 64, device=device), torch.randn(2, 8, 64, device=device)
    dout = torch.randn_like(x)
    for one, other in zip(of_module(module, x, dout, x_kv=x_kv), of_module(flash, x, dout, x_kv=x_kv)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("cross", [False, True])
def test_dwconv(cross, heads_kv, device):
    """Each channel is convolved over its token and the two before."""
    module = MHA(64, 4, heads_kv, cross_attn=cross, causal=True, dwconv=True, device=device)
    plain = MHA(64, 4, heads_kv, cross_attn=cross, causal=True, device=device)
    plain.load_state_dict(module.state_dict(), strict=False)
    x = torch.randn(2, 6, 64, device=device)
    convs = [(module.dwconv_q, plain.Wq), (module.dwconv_kv, plain.Wkv)] if cross else []
    if not cross:
        weight = [conv.weight for name, conv in module.named_children() if name.startswith("dwconv")]
        bias = [conv.bias for name, conv in module.named_children() if name.startswith("dwconv")]
        convs = [(nn.ParameterDict(dict(weight=torch.cat(weight), bias=torch.cat(bias))), plain.Wqkv)]
    for conv, linear in convs:
        linear.register_forward_hook(lambda _, __, y, conv=conv: convolved(y, conv.weight[:, 0], conv.bias))
    torch.testing.assert_close(module(x), plain(x))
    changed = x.clone()
    changed[:, 4] += 1
    torch.testing.assert_close(module(changed)[:, :4], module(x)[:, :4])


def convolved(y, weight, bias):
    padded = F.pad(y, (0, 0, 2, 0))
    return sum(padded[:, i : i + y.shape[1]] * weight[:, i] for i in range(3)) + bias


@pytest.mark.parametrize("case", params([Case(), Case(flash=False), Case(heads_kv=1, rotary_dim=16)]))
def test_checkpointing(case, device):
    module, x, dout = draw(case, device, torch.float32)
    expected = of_module(module, x, dout)
    calls = []
    for inner in (module.inner_attn, module.inner_cross_attn):
        inner.register_forward_pre_hook(lambda *_: calls.append(1))
    module.checkpointing = True
    torch.testing.assert_close(of_module(module, x, dout), expected)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "case", params([Case(), Case(heads_kv=2, rotary_dim=16), Case(alibi=True, scale_base=512.0, rotary_dim=32)])
)
def test_sequences_of_different_lengths(case, device):
    """Packed, they give what each gives alone."""
    module = case.module(device)
    x = torch.randn(3, 8, case.embed_dim, device=device)
    lengths = torch.tensor([8, 1, 5], device=device)
    packed, _, cu_seqlens, _, _ = unpad_input(x, torch.arange(8, device=device) < lengths[:, None])
    leaf = packed.clone().requires_grad_()
    out = module(leaf, cu_seqlens=cu_seqlens, max_seqlen=8)
    out.square().sum().backward()
    alone = [x[b, None, :n].clone().requires_grad_() for b, n in enumerate(lengths.tolist())]
    if case.rotary_dim:
        module.rotary_emb._update_cos_sin_cache(8, device, torch.float32)
    outs = [module(each) for each in alone]
    sum(each.square().sum() for each in outs).backward()
    torch.testing.assert_close(out, torch.cat(outs, dim=1)[0])
    torch.testing.assert_close(leaf.grad, torch.cat([each.grad for each in alone], dim=1)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [slice(0, 4), slice(2, 6)], ids=["right", "left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_padding_mask_of_mha(heads_kv, causal, kept, device):
    """Tokens that count give what they give without the padding."""
    module = MHA(64, 4, heads_kv, causal=causal, device=device)
    x = torch.randn(2, 6, 64, device=device)
    keep = torch.ones(2, 6, dtype=torch.bool, device=device)
    keep[1] = False
    keep[1, kept] = True
    found = module(x, key_padding_mask=keep)
    torch.testing.assert_close(found[0], module(x)[0])
    torch.testing.assert_close(found[1, kept], module(x[1:, kept])[0])


# Decoding.

DECODING_CASES = [case for case in CASES if case.causal] + [
    Case(window=(5, 0), rotary_dim=32, heads_kv=2),
    Case(alibi=True, window=(6, -1), heads_kv=1),
]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("steps", [(7, 1, 1, 1, 1, 1, 1, 1), (5, 3, 1, 4)])
@pytest.mark.parametrize("case", params(DECODING_CASES))
@pytest.mark.cover(2)
def test_decoding_equals_the_whole(case, steps, lengths, dtype, device):
    """Token by token or several at a time, from a cache that is larger than the sequences."""
    module, x, _ = draw(case, device, DTYPES[dtype], seqlen=sum(steps))
    batch, capacity = len(x), 17
    if case.rotary_dim:  # the tables of xPos depend on how many rows they have
        module.rotary_emb._update_cos_sin_cache(capacity, device, x.dtype)
    with torch.no_grad():
        whole = module(x)
        inference = InferenceParams(max_seqlen=capacity, max_batch_size=batch)
        if lengths:
            inference.lengths_per_sample = torch.zeros(batch, dtype=torch.int32, device=device)
        found = []
        for chunk in x.split(steps, dim=1):
            found.append(module(chunk, inference_params=inference))
            inference.seqlen_offset += chunk.shape[1]
            if lengths:
                inference.lengths_per_sample += chunk.shape[1]
    found = torch.cat(found, dim=1)
    if dtype == "fp32":
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    else:
        exact = case.formula(*(tensor.double() for tensor in (x, *module.parameters()))).detach()
        assert_error_ratio(found, exact, whole)
    assert inference.key_value_memory_dict[3].shape == (batch, capacity, 2, case.heads_kv, case.head_dim)


@pytest.mark.parametrize(
    "case", params([Case(rotary_dim=32), Case(rotary_dim=8, heads_kv=2), Case(flash=False, rotary_dim=8)])
)
def test_sequences_that_differ_in_length_while_decoding(case, device):
    module = case.module(device)
    x = torch.randn(2, 9, case.embed_dim, device=device)
    lengths = torch.tensor([8, 3], dtype=torch.int32, device=device)
    with torch.no_grad():
        expected = [module(x[b, None, : length + 1])[0, -1] for b, length in enumerate(lengths.tolist())]
        params = InferenceParams(max_seqlen=9, max_batch_size=2)
        module(x[:, :8], inference_params=params)
        params.seqlen_offset, params.lengths_per_sample = 8, lengths
        found = module(x[[0, 1], lengths.long()][:, None], inference_params=params)[:, 0]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)


PADDED_CASES = [
    Case(),
    Case(flash=False),
    Case(rotary_dim=32, heads_kv=2),
    Case(rotary_dim=8, heads_kv=2, flash=False),
    Case(rotary_dim=32, scale_base=64.0, interleaved=True),
    Case(alibi=True, window=(4, -1)),
]


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("case", params(PADDED_CASES))
def test_prompts_with_padding_on_the_left(case, lengths, device):
    """Each gives what it gives alone, in the prompt and in steps of one or more tokens; in some rows of a cache."""
    module = case.module(device)
    leftpad, steps = [0, 4, 2], (5, 1, 3)
    x = torch.randn(3, sum(steps), case.embed_dim, device=device)
    inference = InferenceParams(max_seqlen=11, max_batch_size=5, batch_size_offset=2)
    inference.leftpad_per_sample = torch.tensor([9, 9, *leftpad], dtype=torch.int32, device=device)
    found, position = [], 0
    with torch.no_grad():
        for chunk in x.split(steps, dim=1):
            if lengths:
                held = 0 * inference.leftpad_per_sample if position == 0 else position - inference.leftpad_per_sample
                inference.lengths_per_sample = held
            found.append(module(chunk, inference_params=inference))
            position += chunk.shape[1]
            inference.seqlen_offset = position
        found = torch.cat(found, dim=1)
        for b, pad in enumerate(leftpad):
            torch.testing.assert_close(found[b, pad:], module(x[b, None, pad:])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_rows_of_a_larger_cache(flash, lengths, device):
    """Two batches take turns in one cache; each finds its own rows as it left them."""
    module = Case(flash=flash, rotary_dim=16).module(device)
    x = torch.randn(4, 6, module.embed_dim, device=device)
    cache = module.allocate_inference_cache(4, 9)
    cache.fill_(torch.nan)
    batches = []
    for rows in (slice(0, 1), slice(1, 4)):
        params = InferenceParams(9, 4, batch_size_offset=rows.start, key_value_memory_dict={3: cache})
        if lengths:
            params.lengths_per_sample = torch.full((4,), 8, dtype=torch.int32, device=device)  # of other sequences
            params.lengths_per_sample[rows] = 0
        batches.append((rows, params))
    found = torch.empty_like(x)
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            for rows, params in batches:
                found[rows, start:stop] = module(x[rows, start:stop], inference_params=params)
                params.seqlen_offset = stop
                if lengths:
                    params.lengths_per_sample[rows] = stop
        torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
    assert cache[:, :6].isfinite().all() and cache[:, 6:].isnan().all()


def in_pages(module, block_table, page_size, num_pages, max_seqlen, **fields):
    """Parameters of pages that hold NaN."""
    cache = module.allocate_inference_cache(num_pages, page_size).fill_(torch.nan)
    rows = len(block_table)
    return InferenceParams(max_seqlen, rows, key_value_memory_dict={3: cache}, block_table=block_table, **fields)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", params(DECODING_CASES))
@pytest.mark.cover(2)
def test_pages(case, page_size, device):
    """Shuffled pages, with NaN in all slots that no token has, give what a cache in one piece gives."""
    module, x, _ = draw(case, device, torch.float32, seqlen=13)
    capacity, batch = 18, len(x)
    columns = -(-capacity // page_size)
    table = torch.randperm((batch + 2) * columns, device=device)[: (batch + 2) * columns].int().view(-1, columns)
    paged = in_pages(module, table, page_size, table.numel() + 3, capacity, batch_size_offset=1)
    dense = InferenceParams(max_seqlen=capacity, max_batch_size=batch)
    with torch.no_grad():
        for chunk in x.split((6, 1, 3, 1, 1, 1), dim=1):
            expected = module(chunk, inference_params=dense)
            torch.testing.assert_close(module(chunk, inference_params=paged), expected, rtol=1e-4, atol=1e-5)
            for each in (dense, paged):
                each.seqlen_offset += chunk.shape[1]
    cache, used = paged.key_value_memory_dict[3], torch.zeros(len(table) * columns + 3, page_size, dtype=torch.bool)
    for row in table[1 : 1 + batch].tolist():
        for position in range(13):
            used[row[position // page_size], position % page_size] = True
    assert torch.equal(cache.isfinite().flatten(2).all(2).cpu(), used) and not cache[~used].isfinite().any()


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("case", params(PADDED_CASES))
def test_pages_of_prompts_with_padding_on_the_left(case, lengths, device):
    """Each row gives what it gives alone."""
    module, leftpad, steps = case.module(device), [0, 4, 2], (5, 1, 3)
    x = torch.randn(3, sum(steps), case.embed_dim, device=device)
    table = torch.randperm(12, device=device).int().view(3, 4)
    inference = in_pages(module, table, 3, 12, 11)
    inference.leftpad_per_sample = torch.tensor(leftpad, dtype=torch.int32, device=device)
    found = []
    with torch.no_grad():
        for chunk in x.split(steps, dim=1):
            if lengths:
                inference.lengths_per_sample = (inference.seqlen_offset - inference.leftpad_per_sample).clamp(min=0)
            found.append(module(chunk, inference_params=inference))
            inference.seqlen_offset += chunk.shape[1]
        found = torch.cat(found, dim=1)
        for b, pad in enumerate(leftpad):
            torch.testing.assert_close(found[b, pad:], module(x[b, None, pad:])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", params([Case(rotary_dim=32, heads_kv=2), Case(flash=False), Case(alibi=True)]))
def test_rows_go_on_from_the_pages_of_one_prompt(case, device):
    """Whole pages are shared; the last one, which is not full, is copied for each row that writes to it."""
    module, pages = case.module(device), PageAllocator(num_pages=9, page_size=4)
    prompt, rest = (torch.randn(n, 6, case.embed_dim, device=device) for n in (1, 3))
    pages.allocate("prompt", 6)
    paged = in_pages(module, pages.block_table(["prompt"], 3, device), 4, 9, 12)
    with torch.no_grad():
        module(prompt, inference_params=paged)
        paged.seqlen_offset = 6
        for row in range(3):
            pages.fork("prompt", row)
        pages.free("prompt")
        found = []
        for step in rest.split((1, 1, 4), dim=1):
            for row in range(3):
                copy_pages(paged.key_value_memory_dict, pages.append(row, step.shape[1]))
            paged.block_table = pages.block_table(range(3), 3, device)
            found.append(module(step, inference_params=paged))
            paged.seqlen_offset += step.shape[1]
        whole = module(torch.cat([prompt.expand(3, -1, -1), rest], dim=1))[:, 6:]
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert pages.block_table(range(3))[:, 0].unique().numel() == 1 and pages.num_free == 9 - 1 - 3 * 2


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "case", params([Case(rotary_dim=16), Case(rotary_dim=8, heads_kv=2), Case(flash=False), Case(alibi=True)])
)
def test_rows_of_negative_length_only_pad_the_batch(case, paged, device):
    """They write nothing, and change nothing for the others; with pages they need none."""
    module, x = case.module(device), torch.randn(3, 7, case.embed_dim, device=device)
    inference = InferenceParams(max_seqlen=8, max_batch_size=3)
    if paged:
        table = torch.tensor([[5, 0], [-1, -1], [2, 3]], dtype=torch.int32, device=device)
        inference = in_pages(module, table, 4, 6, 8)
    with torch.no_grad():
        rows = [0, 2]
        if paged:
            for row in rows:  # the prompts, one after the other
                inference.batch_size_offset, inference.seqlen_offset = row, 0
                module(x[row, None, :6], inference_params=inference)
        else:
            module(x[:, :6], inference_params=inference)
        before = inference.key_value_memory_dict[3].clone()
        inference.batch_size_offset, inference.seqlen_offset = 0, 6
        inference.lengths_per_sample = torch.tensor([6, -1, 6], dtype=torch.int32, device=device)
        found = module(x[:, 6:], inference_params=inference)[:, 0]
        torch.testing.assert_close(found[rows], module(x[rows])[:, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], module.out_proj(torch.zeros_like(x[1, 0])))
    after = inference.key_value_memory_dict[3]
    changed = (after != before) & ~(after.isnan() & before.isnan())
    assert changed.flatten(2).any(2).sum() == 2  # a token of each of the others


def test_pages_of_cross_attention(device):
    """Keys and values of each call are appended, and all of them attended to."""
    module = MHA(64, 4, cross_attn=True, use_flash_attn=True, layer_idx=3, device=device)
    x, x_kv = torch.randn(2, 3, 64, device=device), torch.randn(2, 7, 64, device=device)
    paged = in_pages(module, torch.tensor([[5, 0], [2, 3]], dtype=torch.int32, device=device), 4, 6, 8)
    with torch.no_grad():
        for part in x_kv.split((4, 3), dim=1):
            found = module(x, part, inference_params=paged)
            paged.seqlen_offset += part.shape[1]
        torch.testing.assert_close(found, module(x, x_kv), rtol=1e-4, atol=1e-5)


def test_error_of_two_layers_with_one_cache(device):
    """Found at the step after the prompt, before anything is written: until then each has read its own keys."""
    for flash in (False, True):
        layers = [Case(flash=flash, rotary_dim=16).module(device) for _ in range(2)]
        x = torch.randn(2, 6, 128, device=device)
        params = InferenceParams(max_seqlen=9, max_batch_size=2)
        with torch.no_grad():
            for layer in layers:
                layer(x, inference_params=params)
            params.seqlen_offset = 6
            before = params.key_value_memory_dict[3].clone()
            with pytest.raises(ValueError, match=r"layer_idx must be different in each layer .*, found 3 in two"):
                layers[0](x[:, :1], inference_params=params)
            assert torch.equal(params.key_value_memory_dict[3][:, :6], before[:, :6])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_the_state_of_a_prompt_serves_a_copy_of_the_model(copied, device):
    """As where a prompt that many sequences share is kept in a file."""
    module, x = Case().module(device), torch.randn(2, 6, 128, device=device)
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    with torch.no_grad():
        module(x[:, :5], inference_params=params)
        params.seqlen_offset = 5
        expected = module(x[:, 5:], inference_params=copied(params))
        assert torch.equal(copied(module)(x[:, 5:], inference_params=copied(params)), expected)


def test_a_cache_may_go_from_one_model_to_the_next(device):
    one, other = (Case().module(device) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 6, 128, device=device)
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    with torch.no_grad():
        for module in (one, other):  # each begins with a prompt
            params.reset(9, 2)
            module(x[:, :5], inference_params=params)
            params.seqlen_offset = 5
            torch.testing.assert_close(module(x[:, 5:], inference_params=params), one(x)[:, 5:], rtol=1e-4, atol=1e-5)
        fresh = InferenceParams(9, 2, 5, key_value_memory_dict=params.key_value_memory_dict)
        torch.testing.assert_close(one(x[:, 5:], inference_params=fresh), one(x)[:, 5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flash", [False, True])
def test_inference_params_of_another_class(flash, device):
    """Other packages have a class of their own, with the fields that all of them share."""
    module = Case(flash=flash, rotary_dim=16).module(device)
    x = torch.randn(2, 6, module.embed_dim, device=device)
    inference = types.SimpleNamespace(
        max_seqlen=9,
        max_batch_size=2,
        seqlen_offset=0,
        batch_size_offset=0,
        key_value_memory_dict={},
        lengths_per_sample=None,
    )
    found = []
    with torch.no_grad():
        for chunk in x.split((4, 1, 1), dim=1):
            found.append(module(chunk, inference_params=inference))
            inference.seqlen_offset += chunk.shape[1]
        torch.testing.assert_close(torch.cat(found, dim=1), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flash", [False, True])
def test_decoding_while_autograd_is_on(flash, device):
    module = Case(flash=flash, rotary_dim=16).module(device)
    x = torch.randn(2, 6, module.embed_dim, device=device)
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    found = []
    for chunk in x.split((4, 1, 1), dim=1):
        found.append(module(chunk, inference_params=params))
        params.seqlen_offset += chunk.shape[1]
    torch.testing.assert_close(torch.cat(found, dim=1), module(x), rtol=1e-4, atol=1e-5)


def test_several_tokens_that_see_one_another_while_decoding(device):
    """Each is rotated by its own position, as in the whole."""
    module = Case(causal=False, rotary_dim=16).module(device)
    x = torch.randn(2, 7, module.embed_dim, device=device)
    with torch.no_grad():
        expected = module(x)[:, 4:]
        params = InferenceParams(max_seqlen=9, max_batch_size=2)
        module(x[:, :4], inference_params=params)
        params.seqlen_offset = 4
        found = module(x[:, 4:], inference_params=params)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.same_on_cpu("flash")
def test_compiled_decoding(flash, rotary_dim, device):
    """With positions that are Python's integers, as graphs keep them open."""
    module = Case(flash=flash, rotary_dim=rotary_dim).module(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, module.embed_dim, device=device)
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    found = []
    with torch.no_grad():
        for chunk in x.split((4, 1, 1, 2), dim=1):
            found.append(compiled(chunk, inference_params=params))
            params.seqlen_offset += chunk.shape[1]
        torch.testing.assert_close(torch.cat(found, dim=1), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "case",
    params(
        [
            Case(rotary_dim=16),
            Case(rotary_dim=16, heads_kv=2),
            Case(rotary_dim=8, flash=False),
            Case(rotary_dim=32, scale_base=512.0),
        ]
    ),
)
@pytest.mark.same_on_cpu("training")
def test_a_compiled_module_serves_sequences_of_all_lengths(case, training, device):
    """One graph for the first length and one for all others, though the tables of the rotary embedding grow."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    module = case.module(device)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.set_grad_enabled(training):
        for seqlen in range(5, 20, 3):
            x = torch.randn(2, seqlen, case.embed_dim, device=device)
            found = compiled(x)
            module.rotary_emb._cos_cached = None  # xPos: tables of this length, as the graph has them
            torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 2


def test_cache(device):
    module = MHA(64, 4, 2, device=device, dtype=torch.bfloat16)
    cache = module.allocate_inference_cache(3, 5)
    assert (cache.shape, cache.dtype, cache.device.type) == ((3, 5, 2, 2, 16), torch.bfloat16, device.type)
    assert module.allocate_inference_cache(3, 5, torch.float16).dtype == torch.float16


# Other libraries at random weights.


@pytest.mark.parametrize("flash", [False, True])
def test_torch_multihead_attention(flash, device):
    other = nn.MultiheadAttention(64, 4, batch_first=True, device=device)
    ours = MHA(64, 4, use_flash_attn=flash, device=device)
    state = other.state_dict()
    ours.load_state_dict(
        {
            "Wqkv.weight": state["in_proj_weight"],
            "Wqkv.bias": state["in_proj_bias"],
            "out_proj.weight": state["out_proj.weight"],
            "out_proj.bias": state["out_proj.bias"],
        }
    )
    x, dout = torch.randn(2, 2, 9, 64, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(9, device=device)
    for options in (dict(), dict(attn_mask=mask)):
        ours.inner_attn.causal = bool(options)
        expected = with_gradients(
            lambda x, options=options: other(x, x, x, need_weights=False, **options)[0], [x], dout
        )
        found = with_gradients(ours, [x], dout)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def causal_mask(seqlen, device):
    return torch.full((1, 1, seqlen, seqlen), torch.finfo(torch.float32).min, device=device).triu(1)


@pytest.mark.parametrize("flash", [False, True])
def test_gpt2_of_transformers(flash, device):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    config = transformers.GPT2Config(n_embd=64, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager")
    other = modeling.GPT2Attention(config, layer_idx=0).to(device)
    ours = MHA(64, 4, causal=True, use_flash_attn=flash, device=device)
    state = other.state_dict()
    ours.load_state_dict(
        {
            "Wqkv.weight": state["c_attn.weight"].t(),
            "Wqkv.bias": state["c_attn.bias"],
            "out_proj.weight": state["c_proj.weight"].t(),
            "out_proj.bias": state["c_proj.bias"],
        }
    )
    x, dout = torch.randn(2, 2, 9, 64, device=device)
    expected = with_gradients(lambda x: other(x, attention_mask=causal_mask(9, device))[0], [x], dout)
    torch.testing.assert_close(with_gradients(ours, [x], dout), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flash", [False, True])
def test_llama_of_transformers(flash, device):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    other = modeling.LlamaAttention(config, layer_idx=0).to(device)
    ours = MHA(
        128,
        4,
        2,
        causal=True,
        qkv_proj_bias=False,
        out_proj_bias=False,
        rotary_emb_dim=32,
        use_flash_attn=flash,
        device=device,
    )
    state = other.state_dict()
    Wqkv = torch.cat([state[f"{name}_proj.weight"] for name in "qkv"])
    ours.load_state_dict({"Wqkv.weight": Wqkv, "out_proj.weight": state["o_proj.weight"]})
    x, dout = torch.randn(2, 2, 9, 128, device=device)
    tables = modeling.LlamaRotaryEmbedding(config).to(device)(x, torch.arange(9, device=device)[None])
    expected = with_gradients(lambda x: other(x, tables, causal_mask(9, device))[0], [x], dout)
    torch.testing.assert_close(with_gradients(ours, [x], dout), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_of_transformers(alibi, device):
    """One key head; rotary embedding, or ALiBi, whose bias is scaled with the scores there."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    config = transformers.FalconConfig(
        hidden_size=128,
        num_attention_heads=4,
        multi_query=True,
        new_decoder_architecture=False,
        bias=False,
        alibi=alibi,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attn_implementation="eager",
    )
    other = modeling.FalconAttention(config, layer_idx=0).to(device)
    ours = MHA(
        128,
        4,
        1,
        causal=True,
        qkv_proj_bias=False,
        out_proj_bias=False,
        rotary_emb_dim=0 if alibi else 32,
        use_alibi=alibi,
        use_flash_attn=True,
        device=device,
    )
    state = other.state_dict()
    ours.load_state_dict({"Wqkv.weight": state["query_key_value.weight"], "out_proj.weight": state["dense.weight"]})
    x, dout = torch.randn(2, 2, 9, 128, device=device)
    positions = torch.arange(9, device=device)[None]
    bias = None
    if alibi:
        ours.inner_cross_attn.alibi_slopes *= 32**-0.5
        bias = torch.tensor(get_alibi_slopes(4), device=device).view(1, 4, 1, 1) * (positions - 8.0)
        bias = bias.expand(2, 4, 1, 9).flatten(0, 1)
    tables = None if alibi else modeling.FalconRotaryEmbedding(config).to(device)(x, positions)

    def run(x):
        return other(x, alibi=bias, attention_mask=causal_mask(9, device), position_embeddings=tables)[0]

    expected = with_gradients(run, [x], dout)
    torch.testing.assert_close(with_gradients(ours, [x], dout), expected, rtol=1e-4, atol=1e-5)


# Errors.

CONSTRUCTOR_ERRORS = {
    "heads do not divide the width": (dict(num_heads=5), ValueError, "embed_dim must be a multiple of num_heads, 5"),
    "no heads": (dict(num_heads=0), ValueError, "num_heads must be positive, found 0"),
    "half a head": (dict(num_heads=4.5), ValueError, "num_heads must be a whole number, found 4.5"),
    "key heads do not divide": (dict(num_heads_kv=3), ValueError, "num_heads_kv must be a divisor of num_heads, 4"),
    "alibi": (dict(use_alibi=True), ValueError, "use_alibi must be False without use_flash_attn, found True"),
    "window": (dict(window_size=(3, 0)), ValueError, r"window_size must be \(-1, -1\) without use_flash_attn"),
    "rotary": (dict(cross_attn=True, rotary_emb_dim=16), ValueError, "rotary_emb_dim must be 0 with cross_attn"),
    "norms": (dict(cross_attn=True, qk_norm=True), ValueError, "qk_norm must be False with cross_attn, found True"),
    "zero-centred norms": (dict(qk_norm_zero_centered=True), ValueError, "qk_norm_zero_centered must be False without"),
    "norms over heads": (dict(qk_norm_over_heads=True), ValueError, "qk_norm_over_heads must be False without qk_norm"),
    "soft cap": (dict(softcap=2.0), ValueError, "softcap must be 0.0 without use_flash_attn, found 2.0"),
    "head_dim 0": (dict(head_dim=0), ValueError, "head_dim must be positive, found 0"),
    "head_dim of another type": (dict(head_dim="16"), TypeError, "head_dim must be an integer, found str"),
    "a part of a channel": (dict(rotary_emb_dim=4.8), ValueError, "rotary_emb_dim must be a whole number, found 4.8"),
    "channels that are not there": (dict(rotary_emb_dim=18), ValueError, "rotary_emb_dim must be at most .*, 16"),
}


def test_sizes_may_be_whole_floats():
    """Such as 0.25 * head_dim, and the numbers of a JSON file."""
    expected = {name: x.shape for name, x in MHA(64, 4, num_heads_kv=2, rotary_emb_dim=8).state_dict().items()}
    for mha in (
        MHA(64.0, 4.0, num_heads_kv=2.0, rotary_emb_dim=0.5 * 16),
        MHA(torch.tensor(64), np.float32(4), num_heads_kv=np.int64(2), rotary_emb_dim=8, head_dim=16.0),
    ):
        assert {name: x.shape for name, x in mha.state_dict().items()} == expected
        assert all(type(size) is int for size in (mha.embed_dim, mha.num_heads, mha.num_heads_kv, mha.rotary_emb_dim))


@pytest.mark.parametrize("what", CONSTRUCTOR_ERRORS)
def test_error_of_the_constructor(what):
    changes, error, message = CONSTRUCTOR_ERRORS[what]
    with pytest.raises(error, match=message):
        MHA(**dict(embed_dim=64, num_heads=4) | changes)


X, KEEP = torch.zeros(2, 5, 64), torch.ones(2, 5, dtype=torch.bool)
CU_SEQLENS = torch.tensor([0, 4, 10], dtype=torch.int32)
VARLEN = dict(cu_seqlens=CU_SEQLENS, max_seqlen=6)
FLASH = dict(use_flash_attn=True)
PARAMS = InferenceParams(9, 2)
TABLE, POOL = torch.arange(6, dtype=torch.int32).view(2, 3), {0: torch.zeros(6, 4, 2, 4, 16)}
ERRORS = {
    "x is no tensor": ({}, dict(x=[1.0]), TypeError, "x must be a torch.Tensor, found list"),
    "x has another width": ({}, dict(x=X[..., :32]), ValueError, r"x must have shape \(\*, \*, 64\), found"),
    "x is packed": ({}, dict(x=X[0]), ValueError, r"x must have shape \(\*, \*, 64\), found \(5, 64\)"),
    "x is not packed": (FLASH, VARLEN, ValueError, r"x must have shape \(\*, 64\), found \(2, 5, 64\)"),
    "no max_seqlen": (FLASH, dict(cu_seqlens=CU_SEQLENS, x=X[0]), ValueError, "max_seqlen must be given with"),
    "packed without flash": ({}, dict(x=X[0], **VARLEN), ValueError, "cu_seqlens can be given only with use_flash"),
    "packed with a mask": (FLASH, dict(x=X[0], key_padding_mask=KEEP, **VARLEN), ValueError, "key_padding_mask can be"),
    "packed with a convolution": (dict(dwconv=True, **FLASH), dict(x=X[0], **VARLEN), ValueError, "without dwconv"),
    "mask with flash": (FLASH, dict(key_padding_mask=KEEP), ValueError, "key_padding_mask can be given only without"),
    "mask of another shape": ({}, dict(key_padding_mask=KEEP[:, :4]), ValueError, r"mask must have shape \(2, 5\)"),
    "mask is no tensor": (
        dict(num_heads_kv=2),
        dict(key_padding_mask=[[True] * 5] * 2),
        TypeError,
        "key_padding_mask must be a torch.Tensor, found list",
    ),
    "mask of one row, GQA": (
        dict(num_heads_kv=2),
        dict(key_padding_mask=KEEP[0]),
        ValueError,
        r"mask must have shape \(2, 5\), found",
    ),
    "mask of floats": ({}, dict(key_padding_mask=KEEP.float()), TypeError, "padding_mask must have dtype torch.bool"),
    "x_kv without cross": ({}, dict(x_kv=X), ValueError, "x_kv can be given only with cross_attn"),
    "x_kv, GQA": (dict(num_heads_kv=2), dict(x_kv=X), ValueError, "x_kv can be given only with cross_attn"),
    "x_kv of another batch": (
        dict(cross_attn=True),
        dict(x_kv=X[:1]),
        ValueError,
        r"x_kv must have shape \(2, \*, 64\), found \(1, 5, 64\)",
    ),
    "x_kv is packed": (dict(cross_attn=True), dict(x_kv=X[0]), ValueError, r"x_kv must have shape \(2, \*, 64\)"),
    "subset without cross": ({}, dict(mixer_subset=[0]), ValueError, "mixer_subset can be given only with cross_attn"),
    "mask and use_flash_attn": (
        FLASH,
        dict(key_padding_mask=KEEP),
        ValueError,
        "without use_flash_attn: .* flash_attn.bert_padding.unpad_input, and give cu_seqlens and max_seqlen",
    ),
    "cache and a mask": (
        {},
        dict(inference_params=PARAMS, key_padding_mask=KEEP),
        ValueError,
        "without inference_params",
    ),
    "cache and a convolution": (dict(dwconv=True), dict(inference_params=PARAMS), ValueError, "without dwconv"),
    "cache without layer_idx": (dict(layer_idx=None), dict(inference_params=PARAMS), ValueError, "layer_idx must be"),
    "more sequences than rows": (
        {},
        dict(inference_params=InferenceParams(9, 1)),
        ValueError,
        "must be at most 1, as the cache, found 2",
    ),
    "more tokens than room": (
        {},
        dict(inference_params=InferenceParams(4, 2)),
        ValueError,
        "must be at most 4, as the cache, found 5",
    ),
    "decoding without a cache": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 3)),
        ValueError,
        "must hold layer_idx=0",
    ),
    "cache of other heads": (
        {},
        dict(inference_params=InferenceParams(9, 2, 0, 0, {0: torch.zeros(2, 9, 2, 1, 16)})),
        ValueError,
        r"key_value_memory_dict\[0\] must have shape \(\*, \*, 2, 4, 16\), found \(2, 9, 2, 1, 16\)",
    ),
    "cache of another type": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 0, 0, {0: torch.zeros(2, 9, 2, 4, 16).half()})),
        TypeError,
        r"key_value_memory_dict\[0\] must have dtype torch.float32, found torch.float16",
    ),
    "lengths of other rows": (
        dict(rotary_emb_dim=16),
        dict(inference_params=InferenceParams(9, 4, 0, 2, {}, CU_SEQLENS)),
        ValueError,
        "the length of inference_params.lengths_per_sample must be at least 4, for each row, found 3",
    ),
    "lengths of another type": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 1, 0, {0: torch.zeros(2, 9, 2, 4, 16)}, torch.zeros(2))),
        TypeError,
        "inference_params.lengths_per_sample must have dtype torch.int32 or torch.int64, found torch.float32",
    ),
    "one length": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 1, 0, {0: torch.zeros(2, 9, 2, 4, 16)}, CU_SEQLENS[0])),
        ValueError,
        r"inference_params.lengths_per_sample must have 1 dimension \(max_batch_size\), found shape \(\)",
    ),
    "lengths on another device": (
        dict(rotary_emb_dim=16),
        dict(inference_params=InferenceParams(9, 2, 0, 0, {}, CU_SEQLENS.to("meta"))),
        ValueError,
        "inference_params.lengths_per_sample must be on cpu .* found it on meta",
    ),
    "a prompt behind keys": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 0, 0, {}, torch.tensor([0, 3], dtype=torch.int32))),
        ValueError,
        "inference_params.seqlen_offset must be at least 3, as lengths_per_sample says, .*, found 0",
    ),
    "padding of other rows": (
        dict(causal=True),
        dict(inference_params=InferenceParams(9, 4, 0, 2, leftpad_per_sample=CU_SEQLENS)),
        ValueError,
        "the length of inference_params.leftpad_per_sample must be at least 4, for each row, found 3",
    ),
    "padding that is no tensor": (
        dict(causal=True),
        dict(inference_params=InferenceParams(9, 2, leftpad_per_sample=[0, 1])),
        TypeError,
        "inference_params.leftpad_per_sample must be a torch.Tensor, found list",
    ),
    "padding without a causal mask": (
        {},
        dict(inference_params=InferenceParams(9, 2, leftpad_per_sample=CU_SEQLENS)),
        ValueError,
        "causal must be true for prompts with padding, found False",
    ),
    "padding of cross attention": (
        dict(causal=True, cross_attn=True),
        dict(inference_params=InferenceParams(9, 2, leftpad_per_sample=CU_SEQLENS)),
        ValueError,
        "leftpad_per_sample must be None with cross_attn",
    ),
    "pages without a pool": (
        {},
        dict(inference_params=InferenceParams(9, 2, block_table=TABLE)),
        ValueError,
        "key_value_memory_dict must hold layer_idx=0",
    ),
    "table that is no tensor": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 0, 0, POOL, block_table=[[0], [1]])),
        TypeError,
        "inference_params.block_table must be a torch.Tensor, found list",
    ),
    "table of another type": (
        dict(rotary_emb_dim=16, causal=True),
        dict(inference_params=InferenceParams(9, 2, 0, 0, POOL, block_table=TABLE.long())),
        TypeError,
        "inference_params.block_table must have dtype torch.int32, found torch.int64",
    ),
    "table of one row": (
        {},
        dict(inference_params=InferenceParams(9, 2, 0, 0, POOL, block_table=TABLE[0])),
        ValueError,
        r"inference_params.block_table must have 2 dimensions \(max_batch_size, columns\), found shape \(3,\)",
    ),
    "table for fewer tokens": (
        dict(rotary_emb_dim=16, causal=True),
        dict(inference_params=InferenceParams(13, 2, 0, 0, POOL, block_table=TABLE)),
        ValueError,
        "block_table must be for at least max_seqlen, 13, positions in pages of 4, found 12",
    ),
    "table of fewer rows": (
        FLASH,
        dict(inference_params=InferenceParams(9, 2, 0, 0, POOL, block_table=TABLE[:1])),
        ValueError,
        "batch_size_offset \\+ batch must be at most 1, as the cache, found 2",
    ),
    "pages for fewer tokens": (
        {},
        dict(inference_params=InferenceParams(4, 2, 0, 0, POOL, block_table=TABLE)),
        ValueError,
        "seqlen must be at most 4, as the cache, found 5",
    ),
    "pages of other heads": (
        {},
        dict(inference_params=InferenceParams(9, 2, 0, 0, {0: torch.zeros(9, 4, 2, 1, 32)}, block_table=TABLE)),
        ValueError,
        "k_cache's head_dim must be q's, 16, found 32",
    ),
    "unknown argument": ({}, dict(mask=KEEP), TypeError, "mask"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    options, arguments, error, message = ERRORS[what]
    module = MHA(**dict(embed_dim=64, num_heads=4, layer_idx=0) | options)
    with pytest.raises(error, match=message):
        module(**dict(x=X) | arguments)


@pytest.mark.parametrize(
    "options",
    [dict(), dict(rotary_emb_interleaved=True, num_heads_kv=1), dict(rotary_emb_scale_base=512.0, dwconv=True)],
    ids=str,
)
def test_rotary_in_float64(options, device):
    module = MHA(16, 2, causal=True, rotary_emb_dim=4, dtype=torch.float64, device=device, **options)
    x = torch.randn(1, 3, 16, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(module, x)
    torch.testing.assert_close(module.float()(x.float()).double(), module.double()(x), rtol=1e-4, atol=1e-5)


def test_nothing_is_written_if_there_is_no_room(device):
    for flash in (False, True):
        module = MHA(64, 4, causal=True, layer_idx=0, use_flash_attn=flash, rotary_emb_dim=16, device=device)
        cache = module.allocate_inference_cache(2, 6)
        before = cache.copy_(torch.randn_like(cache)).clone()
        params = InferenceParams(6, 2, seqlen_offset=5, key_value_memory_dict={0: cache})
        with torch.no_grad(), pytest.raises(ValueError, match="must be at most 6, as the cache, found 7"):
            module(torch.randn(2, 2, 64, device=device), inference_params=params)
        assert torch.equal(cache, before)


def test_a_group_must_be_given():
    with pytest.raises(TypeError, match=r"process_group must be a .* group, found None"):
        ParallelMHA(64, 4, None)


def test_errors_of_attention_without_parameters():
    qkv = torch.zeros(2, 5, 3, 4, 16)
    for function, message in (
        (lambda: SelfAttention()(qkv[:, :, :2]), r"qkv must have shape \(\*, \*, 3, \*, \*\)"),
        (lambda: CrossAttention()(qkv[:, :, 0], qkv), r"kv must have shape \(\*, \*, 2, \*, \*\)"),
        (lambda: CrossAttention()(qkv[:1, :, 0], qkv[:, :, :2]), r"q must have shape \(2, \*, \*, 16\)"),
        (lambda: CrossAttention()(qkv[:, :, 0, :3], qkv[:, :, :2]), "kv's number of heads must be a divisor of q's, 3"),
        (lambda: FlashSelfAttention()(qkv[:, :, :2]), r"qkv.shape\[-3\] must be 3"),
        (lambda: get_alibi_slopes(0), "nheads must be positive, found 0"),
    ):
        with pytest.raises(ValueError, match=message):
            function()
