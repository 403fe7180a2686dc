"""The attention functions, their ops and the oracle, called as a case says."""

import dataclasses
import functools
import os

import oracle
import torch
from compare import assert_same_but_for_rounding
from problems import Problem, cumulative

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn._reference.attention.options import Options


def options_of(case, device):
    """Keywords of the functions under test; with dropout, it is S_dmask that tells which elements were kept."""
    extra = dict(dropout_p=case.dropout_p, deterministic=case.deterministic, return_attn_probs=True)
    return dict(case.options(device), **extra)


def dense(case, device):
    return functools.partial(flash_attn_func, **options_of(case, device))


def dense_oracle(case, device):
    return functools.partial(oracle.attention, **case.options(device))


def packed_batch(case, device):
    """(q, k, v, dout), each (tokens, heads, head_dim), and (cu_seqlens_q, cu_seqlens_k)."""
    problem = Problem(**dataclasses.asdict(case), varlen=True)
    queries, keys, _, _ = problem.lengths()
    totals = sum(queries), sum(keys), sum(keys), sum(queries)
    *inputs, dout = (x[:total] for x, total in zip(problem.tokens(device), totals, strict=True))
    return (*problem.packed(inputs), dout), (cumulative(queries, device), cumulative(keys, device))


def varlen(case, device, cu_seqlens):
    return functools.partial(
        _varlen_by_keyword,
        cu_seqlens_q=cu_seqlens[0],
        cu_seqlens_k=cu_seqlens[1],
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k,
        **options_of(case, device),
    )


def _varlen_by_keyword(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, **options)


def varlen_oracle(case, device, cu_seqlens):
    options = dict(case.options(device), cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])
    return functools.partial(oracle.varlen_attention, **options)


def op(name, case):
    """The op for the type of `case`: kernels take 16 bits; float32 has an op of its own, the same on every device."""
    return getattr(torch.ops.flash_attn, f"{name}_reference" if case.dtype == "fp32" else name).default


def op_arguments(case, device, cu_seqlens=(None, None)):
    """The arguments of torch.ops.flash_attn.fwd and .bwd from softmax_scale on, for `case`."""
    left, right = case.window
    return Options(
        case.head_dim**-0.5,
        left,
        0 if case.causal else right,
        *cu_seqlens,
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k,
        deterministic=case.deterministic,
        dropout_p=case.dropout_p,
        rng_state=torch.tensor([5, 32], device=device) if case.dropout_p > 0 else None,
        softcap=case.softcap,
        alibi_slopes=case.alibi_slopes(device),
    )


def assert_same_with_ranges(found, expected, device):
    """Assert that a call with key ranges gives what one without features gives: in Hopper's kernels, bit for bit.

    Of the portable kernels, those that take ranges take all features: another program, which rounds in other places.
    """
    has_hopper = device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9  # --emulate has it
    if has_hopper and os.environ.get("FLASH_ATTN_PORTABLE", "0") == "0":
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    else:
        assert_same_but_for_rounding(found, expected)


class Calling(torch.nn.Module):
    """A function of tensors as a module, to export it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)
