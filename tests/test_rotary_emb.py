"""The function of rotary_emb: layouts that a kernel takes, others, in place or not, errors."""

import oracle
import pytest
import torch
from cases import DTYPES
from compare import assert_error_ratio

import rotary_emb

SEQLEN, HEADS, HALF = 13, 3, 8


def halves(x, interleaved):
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


def tables(device, dtype=torch.float32):
    angles = torch.randn(SEQLEN, HALF, device=device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


LAYOUTS = ["halves", "interleaved", "apart", "into halves of another", "into the other order"]


@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.cover(2)
def test_against_float64(layout, dtype, in_place, conj, device):
    interleaved = layout == "interleaved"
    x = torch.randn(2, SEQLEN, HEADS, 2 * HALF + 4, device=device).to(DTYPES[dtype])[..., : 2 * HALF]
    cos, sin = tables(device, x.dtype)
    sign = -1 if conj else 1
    positions = torch.arange(SEQLEN, device=device)
    exact = oracle.rotate(x.double(), cos.double(), sign * sin.double(), positions, interleaved)
    plain = oracle.rotate(x.float(), cos.float(), sign * sin.float(), positions, interleaved).to(x.dtype)
    x1, x2 = halves(x, interleaved)
    if layout == "apart":
        x1, x2 = x1.clone(), x2.clone()
    outs = x1, x2
    if not in_place:
        outs = halves(torch.full_like(x, float("nan")), interleaved)
        if layout == "apart":
            outs = outs[0].clone(), outs[1].clone()
        elif layout == "into the other order":
            outs = outs[1], outs[0]
    before = x.clone()
    assert rotary_emb.apply_rotary(x1, x2, cos[:, None], sin[:, None], *outs, conj) is None
    for found, right, baseline in zip(outs, halves(exact, interleaved), halves(plain, interleaved), strict=True):
        assert_error_ratio(found, right, baseline)
    if not in_place:
        assert torch.equal(x, before)


def test_tables_broadcast(device):
    """Of each entry, or one for all."""
    x1, x2 = torch.randn(2, 2, SEQLEN, HEADS, HALF, device=device)
    cos, sin = torch.randn(2, 2, SEQLEN, 1, HALF, device=device)
    for table in (slice(None), slice(0, 1)):
        out1, out2 = torch.empty_like(x1), torch.empty_like(x2)
        rotary_emb.apply_rotary(x1, x2, cos[table], sin[table], out1, out2, False)
        torch.testing.assert_close(out1, x1 * cos[table] - x2 * sin[table])
        torch.testing.assert_close(out2, x1 * sin[table] + x2 * cos[table])


def test_float64(device):
    """In float32, as the other dtypes."""
    x = torch.randn(2, SEQLEN, HEADS, 2 * HALF, device=device, dtype=torch.float64)
    cos, sin = (table[:, None] for table in tables(device, torch.float64))
    narrow = x.float()
    for each in (x, narrow):
        pair = halves(each, interleaved=False)
        rotary_emb.apply_rotary(*pair, cos.to(each.dtype), sin.to(each.dtype), *pair, False)
    torch.testing.assert_close(x, narrow.double())


X, COS = torch.zeros(2, SEQLEN, HEADS, HALF), torch.zeros(SEQLEN, 1, HALF)
ERRORS = {
    "x2": (dict(x2=X[:1]), ValueError, r"x2 must have shape \(2, 13, 3, 8\), found"),
    "out1": (dict(out1=X.half()), TypeError, "out1 must have dtype torch.float32"),
    "cos": (dict(cos=COS[:5]), ValueError, r"cos must broadcast to shape \(2, 13, 3, 8\), found \(5, 1, 8\)"),
    "sin": (dict(sin=COS.half()), TypeError, "sin must have dtype torch.float32"),
    "conj": (dict(conj=2), TypeError, "conj must be a bool"),
    "one output": (dict(out2=X), ValueError, "out2 must have memory of its own"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    changes, error, message = ERRORS[what]
    good = dict(x1=X, x2=X.clone(), cos=COS, sin=COS, out1=X, out2=X.clone(), conj=False)
    with pytest.raises(error, match=message):
        rotary_emb.apply_rotary(*(good | changes).values())
