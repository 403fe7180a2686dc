"""Attention with features beyond flash-attn 2.8: sinks, biases, intervals, lengths, and head dims."""

import pytest
import torch
from cases import cover, params, uncovered
from features import BIASES, GROUPED, Featured

FACTORS = dict(
    lengths=[(60, 60), (50, 130), (130, 50), (1, 70), (33, 1)],
    heads=[(4, 4), (6, 2), (4, 1)],
    head_dims=[(64, 0), (48, 32), (32, 64), (257, 0), (320, 64)],
    dtype=["fp16", "bf16", "fp32"],
    causal=[False, True, "entries"],
    window=[(-1, -1), (20, -1), (7, 9)],
    softcap=[0.0, 2.0],
    alibi=["", "bh"],
    dropout_p=[0.0, 0.17],
    deterministic=[False, True],
    scale_q=[1.0, 4.0],
    sink=["", "fp32", "same"],
    bias=["", *BIASES],
    ranges=["", "2", "2h", "4", "4h"],
    chunk=[0, 16, 1000],
    seqused_q=[False, True],
    seqused_k=[False, True],
    varlen=[False, True],
    packing=["", "kv", "qkv"],
    dlse=[False, True],
    max_logit=[False, True],
)
TIED = "lengths", "heads", "head_dims", "packing", "varlen", "bias"


def possible(row):
    square = row["lengths"][0] == row["lengths"][1] and row["heads"] == (4, 4)
    fits = (square or row["packing"] != "qkv") and (row["head_dims"][1] == 0 or not row["packing"])
    return fits and not (row["varlen"] and row["bias"] in GROUPED)


def make(lengths, heads, head_dims, causal, **rest):
    entries = causal == "entries"
    return Featured(
        4,
        *lengths,
        *heads,
        head_dims[0],
        head_dim_v=head_dims[1],
        causal=causal is True,
        entries_causal=entries,
        **rest,
    )


ROWS = cover(FACTORS, valid=possible)


def test_sample_has_every_pair_of_values():
    assert not uncovered(ROWS, FACTORS, valid=possible, tied=TIED)


@pytest.mark.parametrize("case", params(make(**row) for row in ROWS))
def test_sample(case, device):
    case.check(torch.device(device))
