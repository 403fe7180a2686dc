"""Gradients of attention with key ranges, in the kernels: on a GPU, or emulated with --emulate."""

import math

import oracle
import pytest
import torch
from attention_calls import assert_same_with_ranges
from cases import Case, cover
from compare import assert_error_ratio
from features import Featured

from flash_attn import flash_attn_func, flash_attn_varlen_func, masks
from flash_attn._ops import flash_attn_features as with_features
from flash_attn._reference.attention.options import Features, Options

SEQLEN = 330
ROWS = torch.arange(SEQLEN)
GENERATOR = torch.Generator().manual_seed(0)


def random_ranges(*sizes):
    """Any two numbers for each row: one row in two sees nothing."""
    return torch.randint(-9, SEQLEN + 9, (*sizes, 2), generator=GENERATOR).int()


def rows_to(first, count):
    return torch.stack([first, first + count], -1).int()[None, None]


MASKS = {  # (1 or 2, 1 or 4, SEQLEN, 2)
    "documents": masks.documents(torch.tensor([0, 90, 91, 256, 330]), SEQLEN),
    "documents of heads": torch.cat(
        [masks.documents(torch.tensor(x), SEQLEN) for x in ([0, 200, 330], [0, 329, 330])], 1
    ).repeat(1, 2, 1, 1),
    "prefixes": masks.prefix_lm(torch.tensor([30, 300]), SEQLEN),
    "chunks, backwards": masks.chunks(100, SEQLEN).flip(2),
    "any": random_ranges(2, 4, SEQLEN),
    "short, far apart": rows_to(ROWS // 64 * 7 % 5 * 64, 40),  # tiles that see a block of keys are not neighbours
    "keys and rows of nobody": rows_to(ROWS % 7 * 50 * (ROWS < 100), 20) * ((ROWS < 64) | (ROWS > 200))[:, None],
    "nothing": torch.zeros(1, 1, SEQLEN, 2, dtype=torch.int32),
    "causal": rows_to(0 * ROWS, ROWS + 1),
}


def backward(inputs, out, lse, dout, dlse, deterministic, window_right=-1, **features):
    options = Options(inputs[0].shape[-1] ** -0.5, -1, window_right, deterministic=deterministic)
    given = Features(**features)
    return with_features.bwd_features(
        dout, *inputs, out, lse, dlse, None, None, False, *given[:2], *options, *given[2:]
    )


FACTORS = dict(
    name=list(MASKS),
    sizes=[(64, 4), (96, 2), (128, 1), (192, 4), (256, 2)],  # head_dim, heads_k
    deterministic=[False, True],
    portable=[False, True],
)


@pytest.mark.parametrize("name, sizes, deterministic, portable", [tuple(row.values()) for row in cover(FACTORS)])
@pytest.mark.same_on_cpu("portable", "deterministic", "sizes")
def test_gradients(name, sizes, deterministic, portable, device, monkeypatch):
    """Rows that see nothing, and keys that no row sees, hold NaN."""
    head_dim, heads_k = sizes
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    *inputs, dout = Case(seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads_k=heads_k, head_dim=head_dim).tensors(device)
    ranges = MASKS[name].to(device)
    seen = masks.to_bool(ranges, SEQLEN)
    dlse = torch.randn(2, 4, SEQLEN, device=device)

    def reference(q, k, v):
        return oracle.attention(q, k, v, seen=seen)

    out, lse, exact = oracle.gradients(reference, [x.double() for x in inputs], dout, dlse)
    plain = oracle.gradients(reference, inputs, dout, dlse)[2]
    out, lse, seen = out.to(dout.dtype), lse.float(), seen.expand(2, 4, -1, -1)
    blind = ~seen.any(3).transpose(1, 2)
    dead = ~seen.any(2).unflatten(1, (heads_k, -1)).any(2).transpose(1, 2)
    for x, nobody in zip((*inputs, out, dout), (blind, dead, dead, blind, blind), strict=True):
        x[nobody] = math.nan
    dlse[blind.transpose(1, 2)] = math.nan
    grads = backward(inputs, out, lse, dout, dlse, deterministic, key_ranges=ranges)[:3]
    for letter, grad, *others in zip("qkv", grads, exact, plain, strict=True):
        assert_error_ratio(grad, *others, name=f"d{letter}")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize(("rows", "seen_by"), [(1536, [(0, 100, 1450)]), (256, [(0, 0, 256), (0, 256, 256)])])
def test_shares_of_rows_that_see_nothing(rows, seen_by, head_dim, deterministic, device):
    """Thread blocks that share a block of keys may get only rows, or only heads, that see none of them.

    seen_by: of each head, rows from the first number to the second, and from the third on, see all keys.
    """
    ranges = torch.zeros(1, len(seen_by), rows, 2, dtype=torch.int32)
    for head, (first, end, again) in enumerate(seen_by):
        ranges[0, head, first:end, 1] = ranges[0, head, again:, 1] = 60
    case = Case(batch=1, seqlen_q=rows, seqlen_k=60, heads=len(seen_by), heads_k=1, head_dim=head_dim)
    *inputs, dout = case.tensors(device)
    ranges = ranges.to(device)

    def reference(q, k, v):
        return oracle.attention(q, k, v, seen=masks.to_bool(ranges, 60))

    exact = oracle.gradients(reference, [x.double() for x in inputs], dout, None)[2]
    plain = oracle.gradients(reference, inputs, dout, None)[2]
    leaves = [x.requires_grad_() for x in inputs]
    out = flash_attn_func(*leaves, key_ranges=ranges, deterministic=deterministic)
    grads = torch.autograd.grad(out, leaves, dout)
    for letter, grad, *others in zip("qkv", grads, exact, plain, strict=True):
        assert_error_ratio(grad, *others, name=f"d{letter}")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("head_dim, varlen, deterministic", [(64, True, False), (128, False, True), (192, True, True)])
@pytest.mark.same_on_cpu("head_dim", "deterministic")
def test_first_keys_that_all_rows_see(head_dim, varlen, deterministic, own, device, monkeypatch):
    """The block of the first keys is divided among thread blocks, others are not.

    Emulated, that needs few multiprocessors beside the blocks of keys. own: a head sees other keys. With varlen, as the
    second entry of a batch. Calls of few keys that are neither deterministic nor packed round dq at once instead.
    """
    monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", "4" if head_dim > 128 else "2")
    rows, keys, heads = 600, 1100, 12
    row = torch.arange(rows)
    ranges = torch.stack([0 * row, torch.where(row < 200, row + 1, 4)], -1).int()[None, None].to(device)
    if own:
        ranges = ranges.repeat(1, heads, 1, 1)
        ranges[:, 3, 150:, 0], ranges[:, 3, 150:, 1] = 290, 300
    case = Case(batch=1, seqlen_q=rows, seqlen_k=keys, heads=heads, heads_k=1, head_dim=head_dim)
    *inputs, dout = case.tensors(device)

    def reference(q, k, v):
        return oracle.attention(q, k, v, seen=masks.to_bool(ranges, keys))

    exact = oracle.gradients(reference, [x.double() for x in inputs], dout, None)[2]
    plain = oracle.gradients(reference, inputs, dout, None)[2]
    attend, leaves = flash_attn_func, [x.requires_grad_() for x in inputs]
    if varlen:
        starts = (torch.tensor([0, 0, size], dtype=torch.int32, device=device) for size in (rows, keys))
        attend = lambda q, k, v, key_ranges, **options: flash_attn_varlen_func(  # noqa: E731
            q[0], k[0], v[0], *starts, rows, keys, key_ranges=key_ranges[0], **options
        )[None]
    out = attend(*leaves, key_ranges=ranges, deterministic=deterministic)
    for letter, grad, *others in zip("qkv", torch.autograd.grad(out, leaves, dout), exact, plain, strict=True):
        assert_error_ratio(grad, *others, name=f"d{letter}")


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("seqlen_q", [SEQLEN, 200, 400])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ranges_that_say_causal(head_dim, seqlen_q, portable, device, request, monkeypatch):
    """The kernels compute the same sums as with the flag."""
    if device.type == "cpu" and not request.config.getoption("--emulate"):
        pytest.skip("the reference computes calls without features elsewhere")
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    *inputs, dout = Case(seqlen_q=seqlen_q, seqlen_k=SEQLEN, heads_k=2, head_dim=head_dim).tensors(device)
    end = torch.arange(seqlen_q, device=device) + 1 + SEQLEN - seqlen_q
    sink = torch.randn(4, device=device)
    out, lse = flash_attn_func(*inputs, causal=True, learnable_sink=sink, return_lse=True)
    flag, ranges = (
        backward(inputs, out, lse, dout, None, True, window_right, learnable_sink=sink, key_ranges=ranges)[:4]
        for window_right, ranges in ((0, None), (-1, rows_to(0 * end, end).to(device)))
    )
    assert_same_with_ranges(ranges, flag, device)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("ranges, sink", [("2", ""), ("2h", "fp32")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.same_on_cpu("portable", "deterministic", "head_dim")
def test_packed_entries(head_dim, ranges, sink, deterministic, portable, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    case = Featured(4, 200, 333, 4, 2, head_dim, ranges=ranges, sink=sink, varlen=True, deterministic=deterministic)
    case.check(device)
