"""Calls of the package as mypy sees them: `make lint` checks this file, and nothing runs it.

A line with `type: ignore` must be an error, or mypy reports the comment as unused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Measurement, Timer
from typing_extensions import assert_type

from flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.bert_padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences
from flash_attn.flash_attn_interface import get_scheduler_metadata
from flash_attn.functional import merge_attn_states
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from flash_attn.utils.benchmark import benchmark_forward, benchmark_memory
from flash_attn.utils.library import triton_op
from flash_attn.utils.testing import attention_ref, construct_local_mask, generate_qkv


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, asks: bool) -> None:
    assert_type(flash_attn_func(q, k, v), Tensor)
    assert_type(flash_attn_func(q, k, v, 0.1, None, True, window_size=(4, 0), learnable_sink=v), Tensor)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn_func(q, k, v, causal=True, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_func(q, k, v, return_lse=asks), Any)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=asks), Any)
    assert_type(flash_attn_func(q, k, v, return_lse=True, return_max_logit=True), Any)
    flash_attn_func(q, k)  # type: ignore[call-overload]
    flash_attn_func(q, k, v, casual=True)  # type: ignore[call-overload]
    flash_attn_func(q, k, v, attention_chunk=1.5)  # type: ignore[call-overload]
    assert_type(flash_attn_varlen_qkvpacked_func(q, lengths, 5, causal=True), Tensor)
    assert_type(flash_attn_varlen_qkvpacked_func(q, lengths, 5, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_with_kvcache(q, k, v, cache_seqlens=5), Tensor)
    assert_type(flash_attn_with_kvcache(q, k, v, return_softmax_lse=True), tuple[Tensor, Tensor])


def serving(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> None:
    hint = get_scheduler_metadata(2, 1, 64, 8, 8, 64, lengths)
    assert_type(
        flash_attn_varlen_func(
            q, k, v, lengths, seqused_k=lengths, block_table=table, out=q, window_size=[9, 0], scheduler_metadata=hint
        ),
        Tensor,
    )
    part = flash_attn_varlen_func(q, k, v, lengths, seqused_k=lengths, block_table=table, return_softmax_lse=True)
    assert_type(part, tuple[Tensor, Tensor])
    assert_type(merge_attn_states(None, None, *part, *part), tuple[Tensor, Tensor])
    assert_type(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cu_seqlens_q=lengths, out=q), Tensor)
    flash_attn_varlen_func(q, k, v, lengths, qv=q)  # type: ignore[call-overload]


def padding(x: Tensor, mask: Tensor) -> Tensor:
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert_type(max_seqlen, int)
    assert_type(seqused, Tensor)
    assert_type(unpad_input_for_concatenated_sequences(x, mask), tuple[Tensor, Tensor, Tensor, int])
    pad_input(tokens, indices, batch="two", seqlen=5)  # type: ignore[arg-type]
    return pad_input(tokens, indices, batch=2, seqlen=5)


def norms(x: Tensor, weight: Tensor, drops: bool) -> None:
    assert_type(layer_norm_fn(x, weight, None), Tensor)
    assert_type(layer_norm_fn(x, weight, None, residual=x, prenorm=True), tuple[Tensor, Tensor])
    assert_type(rms_norm_fn(x, weight, None), Tensor)
    assert_type(rms_norm_fn(x, weight, None, residual=x, prenorm=True), tuple[Tensor, Tensor])
    assert_type(
        rms_norm_fn(x, weight, None, weight1=weight, return_dropout_mask=drops), Tensor | tuple[Tensor | None, ...]
    )


def testing(q: Tensor, k: Tensor, v: Tensor) -> None:
    apart = generate_qkv(q, k, v)
    assert_type(apart[3], Tensor | None)
    assert_type(apart[8], int)
    assert_type(apart[16](q), Tensor)
    *_, dq_pad_fn, dkv_pad_fn = generate_qkv(q, k, v, kvpacked=True)
    together = generate_qkv(q, k, v, qkvpacked=True)
    assert_type(together[2], int)
    assert_type(together[3], Tensor)
    together[6]  # type: ignore[misc]
    generate_qkv(q, k, v, kvpacked=True, qkvpacked=True)  # type: ignore[call-overload]
    assert_type(attention_ref(q, k, v, causal=True), tuple[Tensor, Tensor])
    assert_type(construct_local_mask(2, 3, (1, 0), device="cpu"), Tensor)


def tools(x: Tensor) -> None:
    assert_type(benchmark_forward(torch.exp, x, repeats=2), tuple[Timer, Measurement])
    assert_type(benchmark_memory(torch.exp, x), float)
    assert_type(triton_op("mine::twice", torch.exp, mutates_args=()), torch.library.CustomOpDef)
