"""What attention returns beside its output, which gradients it has, and when results are equal bit by bit."""

import itertools
import math

import oracle
import pytest
import torch
from attention_calls import dense, dense_oracle, packed_batch, varlen, varlen_oracle
from cases import Case, params
from compare import assert_error_ratio, assert_same_but_for_rounding
from problems import Problem, check, cumulative

from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
)


def test_return_attn_probs_gives_out_lse_and_s_dmask(device):
    case = Case(seqlen_q=97, seqlen_k=130, heads_k=2)
    q, k, v, _ = case.tensors(device)
    out, lse, s_dmask = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, flash_attn_func(q, k, v))
    assert lse.shape == (2, 4, 97) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert s_dmask.shape == (0,)
    s_dmask = flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)[2]
    assert s_dmask.shape == (2, 4, 128, 256) and s_dmask.dtype == q.dtype


def test_varlen_return_attn_probs(device):
    case = Case(batch=3, seqlen_q=97, seqlen_k=130, dropout_p=0.3)
    (q, k, v, _), cu_seqlens = packed_batch(case, device)
    out, lse, s_dmask = varlen(case, device, cu_seqlens)(q, k, v)
    assert out.shape == q.shape and lse.shape == (4, len(q)) and s_dmask.shape == (3, 4, 128, 256)
    assert varlen(case.but(dropout_p=0.0), device, cu_seqlens)(q, k, v)[2].shape == (0,)


S_DMASK_CASES = [
    Case(seqlen_q=97, seqlen_k=203, heads_k=2, dropout_p=0.17),
    Case(seqlen_q=203, seqlen_k=97, dropout_p=0.17, causal=True),
    Case(seqlen_q=130, seqlen_k=260, dropout_p=0.3, causal=True, head_dim=128, dtype="fp16"),
    Case(seqlen_q=130, seqlen_k=260, dropout_p=0.3, window=(40, 7), alibi="bh", softcap=2.0, head_dim=256),
    Case(seqlen_q=65, seqlen_k=33, dropout_p=0.5, head_dim=32, dtype="fp32"),
]


@pytest.mark.parametrize("case", params(S_DMASK_CASES))
def test_s_dmask_holds_probabilities_up_to_a_running_maximum(case, device):
    """|S| = exp(s - m), m the maximum of the row over its block of columns and those right of it."""
    q, k, v, _ = case.tensors(device)
    s_dmask = dense(case, device)(q, k, v)[2][..., : case.seqlen_q, : case.seqlen_k]
    options = case.options(device)
    causal, window = options.pop("causal"), options.pop("window_size")
    allowed = oracle.allowed_keys(case.seqlen_q, case.seqlen_k, causal, window).to(device)
    block = _get_block_size_n(device, case.head_dim, True, causal)

    def probabilities(q, k):
        scores = oracle.raw_scores(q, k, **options).masked_fill(~allowed, float("-inf"))
        return (scores - running_maximum(scores, block)).exp().nan_to_num(0.0)

    assert_error_ratio(
        s_dmask.abs().where(allowed, 0), probabilities(q.double(), k.double()), probabilities(q, k), name="S_dmask"
    )


def running_maximum(scores, block):
    """For each element the maximum of its row over its own block of columns and all blocks to the right."""
    padding = -scores.shape[-1] % block
    blocks = torch.nn.functional.pad(scores, (0, padding), value=float("-inf")).unflatten(-1, (-1, block)).amax(-1)
    return blocks.flip(-1).cummax(-1).values.flip(-1).repeat_interleave(block, -1)[..., : scores.shape[-1]]


SCORES = 0.0, 0.125, True, -1, -1, 0.0, None  # dropout_p, softmax_scale, causal, window, softcap, alibi_slopes


def test_softmax_d_holds_the_sums_of_dout_times_out(device):
    """In whole blocks of 128 rows, 0 where there is no row."""
    q, k, v, dout = Case(seqlen_q=150, seqlen_k=90).tensors(device)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *SCORES, False)
    found = _flash_attn_backward(dout, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), *SCORES, False)
    sums = (out.double() * dout.double()).sum(-1)
    exact = torch.nn.functional.pad(sums.transpose(1, 2), (0, 256 - 150))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_varlen_softmax_d_has_room_for_128_rows_more_in_each_entry(device):
    case = Case(batch=3, seqlen_q=150, seqlen_k=90)
    (q, k, v, dout), cu_seqlens = packed_batch(case, device)
    bounds = *cu_seqlens, 150, 90
    out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, *bounds, *SCORES)
    found = _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), *bounds, *SCORES, False
    )
    sums = (out.double() * dout.double()).sum(-1)
    exact = sums.new_zeros(4, len(q) + 128 * 3)
    for b, (start, stop) in enumerate(itertools.pairwise(cu_seqlens[0].tolist())):
        exact[:, start + 128 * b : stop + 128 * b] = sums[start:stop].T
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [59, 64, 128, 256])
def test_varlen_softmax_d_and_gradients_without_queries_are_zero(head_dim, device):
    """Nor is anything read of q, out and dout, which have no memory."""
    q, k = (torch.empty(tokens, 4, head_dim, dtype=torch.bfloat16, device=device) for tokens in (0, 35))
    cu_seqlens = cumulative([0, 0, 0], device), cumulative([30, 0, 5], device)
    lse = torch.empty(4, 0, device=device)
    dk, dv = (torch.full_like(k, math.nan) for _ in "kv")
    softmax_d = _flash_attn_varlen_backward(
        q, q, k, k, q, lse, torch.empty_like(q), dk, dv, *cu_seqlens, 0, 30, *SCORES, False
    )
    for found in (softmax_d, dk, dv):
        assert (found == 0).all()
    assert softmax_d.shape == (4, 128 * 3)


@pytest.mark.parametrize("with_out", [True, False])
@pytest.mark.parametrize(
    "case",
    params(
        [
            Case(heads_k=2, seqlen_q=65, seqlen_k=97),
            Case(causal=True, seqlen_q=97, seqlen_k=33, dtype="fp16"),
            Case(window=(20, 3), alibi="h", softcap=2.0, dropout_p=0.17),
            Case(dtype="fp32", causal=True),
        ]
    ),
)
def test_gradient_through_lse(case, with_out, device):
    if with_out:
        check(case, case.tensors(device), dense(case, device), dense_oracle(case, device), with_dlse=True)
    else:
        check_lse_alone(case, device)


def check_lse_alone(case, device):
    """A loss of lse only: v gets no gradient, q and k do."""
    *inputs, _ = case.tensors(device)
    leaves = [x.detach().requires_grad_() for x in inputs]
    lse = dense(case, device)(*leaves)[1]
    dlse = torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse)
    reference = dense_oracle(case, device)
    no_dout = torch.zeros_like(inputs[0])
    _, _, exact = oracle.gradients(reference, [x.double() for x in inputs], no_dout, dlse)
    _, _, plain = oracle.gradients(reference, inputs, no_dout, dlse)
    assert_error_ratio(dq, exact[0], plain[0], name="dq")
    assert_error_ratio(dk, exact[1], plain[1], name="dk")
    assert (dv == 0).all()


def test_varlen_gradient_through_lse(device):
    case = Case(batch=4, seqlen_q=50, seqlen_k=70, causal=True, heads_k=2)
    tensors, cu_seqlens = packed_batch(case, device)
    check(case, tensors, varlen(case, device, cu_seqlens), varlen_oracle(case, device, cu_seqlens), with_dlse=True)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_gradient_of_some_inputs(wanted, device):
    *inputs, dout = Case(causal=True).tensors(device)
    wanted = [name in wanted for name in "qkv"]

    def gradients(flags):
        leaves = [x.detach().requires_grad_(flag) for x, flag in zip(inputs, flags, strict=True)]
        flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)
        return [x.grad for x in leaves]

    for want, grad, expected in zip(wanted, gradients(wanted), gradients([True] * 3), strict=True):
        assert (grad is not None) == want
        assert grad is None or torch.equal(grad, expected)


def test_no_history_where_no_gradient_is_asked_for(device):
    q, k, v, _ = Case().tensors(device)
    assert not flash_attn_func(q, k, v).requires_grad
    for without_grad in (torch.no_grad, torch.inference_mode):
        with without_grad():
            assert not flash_attn_func(q.requires_grad_(), k, v).requires_grad


def test_inputs_changed_before_the_backward_are_noticed(device):
    q, k, v, dout = Case().tensors(device)
    out = flash_attn_func(q.requires_grad_(), k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


DETERMINISTIC = [
    Case(batch=4, seqlen_q=203, seqlen_k=113, causal=True),
    Case(batch=4, seqlen_q=129, seqlen_k=257, heads=6, heads_k=2, window=(50, 3)),
    Case(batch=2, seqlen_q=130, seqlen_k=130, dropout_p=0.2, head_dim=128),
    Case(batch=2, seqlen_q=513, seqlen_k=450, heads=4, heads_k=2, head_dim=192, causal=True),
    Case(batch=2, seqlen_q=300, seqlen_k=700, heads=4, heads_k=1, head_dim=256, window=(200, 50)),
]


MANY_BLOCKS_IN_TURN = [  # of keys that the same rows see, of heads that share keys, and of ragged entries
    Problem(seqlen_q=1100, seqlen_k=1300, heads=8, heads_k=2, head_dim=head_dim, deterministic=True, varlen=varlen, **o)
    for head_dim in (64, 100, 128, 256)
    for varlen in (False, True)
    for o in (dict(causal=True), dict(window=(300, 200)), dict(dropout_p=0.1, softcap=5.0))
]


@pytest.mark.cuda
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("case", params(MANY_BLOCKS_IN_TURN))
def test_many_blocks_in_turn_are_equal_bit_by_bit(case, portable, device, monkeypatch):
    """While products on another stream take multiprocessors now and then."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    *inputs, dout = (case.formed(x) for x in case.tokens(device))
    leaves = [x.requires_grad_() for x in case.packed(inputs)]
    load, factor = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)

    def run():
        torch.manual_seed(0)
        out, _, _ = case.attend(case.lengths(), *leaves, pages=None)
        return torch.autograd.grad(out, leaves, dout)

    first = run()
    for _ in range(10):
        with torch.cuda.stream(load):
            torch.mm(factor, factor)
        assert all(torch.equal(x, y) for x, y in zip(run(), first, strict=True))


def deterministic_run(case, packed, device):
    """A function that gives out, lse and the gradients of the same problem each time."""
    case = case.but(deterministic=True)
    if packed:
        (*inputs, dout), cu_seqlens = packed_batch(case, device)
        attend = varlen(case, device, cu_seqlens)
    else:
        *inputs, dout = case.tensors(device)
        attend = dense(case, device)

    def run():
        torch.manual_seed(7)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse, _ = attend(*leaves)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


@pytest.mark.parametrize("case", params(DETERMINISTIC))
@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_is_equal_bit_by_bit(case, packed, device):
    run = deterministic_run(case, packed, device)
    first = run()
    for _ in range(20 if device.type == "cuda" else 2):
        assert all(torch.equal(x, y) for x, y in zip(run(), first, strict=True))


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("case", params(DETERMINISTIC))
@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_is_equal_over_a_thousand_runs(case, packed, device):
    """On two streams at once, while products on a third one take multiprocessors and memory."""
    run = deterministic_run(case, packed, device)
    expected = run()
    load, factor = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)
    differs = {torch.cuda.Stream(): torch.zeros((), dtype=torch.bool, device=device) for _ in range(2)}
    for stream in (load, *differs):
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(500):
        with torch.cuda.stream(load):
            torch.mm(factor, factor)
        for stream, differ in differs.items():
            with torch.cuda.stream(stream):
                for found, same in zip(run(), expected, strict=True):
                    differ |= (found != same).any()
    torch.cuda.synchronize()
    assert not any(differs.values())


def test_forward_and_key_gradients_are_always_equal_bit_by_bit(device):
    case = Case(batch=4, seqlen_q=203, seqlen_k=113, causal=True, heads_k=2)
    *inputs, dout = case.tensors(device)

    def run():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse, _ = dense(case, device)(*leaves)
        return out, lse, *torch.autograd.grad(out, leaves[1:], dout)

    first = run()
    for _ in range(20 if device.type == "cuda" else 2):
        assert all(torch.equal(x, y) for x, y in zip(run(), first, strict=True))


@pytest.mark.parametrize(
    "case",
    params(
        [
            *(case.but(deterministic=flag) for case in DETERMINISTIC for flag in (False, True)),
            Case(dtype="fp32", seqlen_q=129, seqlen_k=257, heads_k=2, causal=True),
        ]
    ),
)
def test_torchs_switch_of_deterministic_algorithms_changes_nothing(case, device):
    """All other tests run with it, since it fills new memory with NaN; the argument alone chooses the algorithm."""
    *inputs, dout = case.tensors(device)

    def run(switch):
        torch.use_deterministic_algorithms(switch, warn_only=True)
        torch.manual_seed(7)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse, _ = dense(case, device)(*leaves)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    with_switch = run(True)
    for _ in range(20 if device.type == "cuda" else 2):
        without = run(False)
        assert_same_but_for_rounding(without, with_switch)
        assert not case.deterministic or all(map(torch.equal, without, with_switch))
