"""The attention functions with large tensors, on streams and several devices, and in CUDA graphs."""

import functools
import gc
import pathlib
import time

import native
import oracle
import pytest
import torch
from attention_calls import dense, dense_oracle, op_arguments, options_of, packed_batch
from cases import Case
from compare import assert_error_ratio, assert_same_but_for_rounding
from problems import check, cumulative

from flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
)


@pytest.mark.parametrize(
    "shape",
    [
        dict(batch=70_000, heads=1, heads_k=1, alibi="bh"),
        dict(batch=1, heads=70_000, heads_k=70_000, alibi="h"),
        pytest.param(dict(batch=20_000, heads=8, heads_k=2, dropout_p=0.2), marks=[pytest.mark.slow, pytest.mark.cuda]),
    ],
    ids=str,
)
@pytest.mark.same_on_cpu("shape")
def test_more_than_65535_entries_or_heads(shape, device):
    """With dropout, S_dmask has more than 2^31 elements: 128 x 128 for each entry and head."""
    case = Case(seqlen_q=2, seqlen_k=3, head_dim=8, causal=True, **shape)
    check(case, case.tensors(device), dense(case, device), dense_oracle(case, device))


@pytest.mark.cuda
def test_varlen_of_more_than_65535_entries(device):
    batch = 70_000
    *inputs, dout = Case(batch=batch, seqlen_q=2, seqlen_k=3, heads=1, heads_k=1, head_dim=8).tensors(device)
    cu_seqlens = [torch.arange(batch + 1, dtype=torch.int32, device=device) * n for n in (2, 3)]

    def run(attend, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves, causal=True)
        return out.flatten(), *(x.flatten() for x in torch.autograd.grad(out, leaves, dout.reshape(out.shape)))

    def attend_packed(*tensors, **options):
        return flash_attn_varlen_func(*tensors, *cu_seqlens, 2, 3, **options)

    found = run(attend_packed, *(x.flatten(0, 1) for x in inputs))
    assert_same_but_for_rounding(found, run(flash_attn_func, *inputs))


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_two_to_the_31_elements(packed, device, memory_guard):
    """Only the last entries are compared: they lie where 32-bit offsets have wrapped."""
    batch, seqlen = 70_000, 16
    case = Case(batch=3, seqlen_q=seqlen, seqlen_k=seqlen, heads=16, heads_k=16, head_dim=128, causal=True)
    memory_guard(10 * 2 * batch * seqlen * 16 * 128)
    leaves, dout = large_tensors(batch, seqlen, 16, 128, device)
    if packed:
        cu_seqlens = cumulative([seqlen] * batch, device)
        q, k, v = (x.flatten(0, 1) for x in leaves)
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, seqlen, seqlen, causal=True).view_as(dout)
    else:
        out = flash_attn_func(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    last = [x.detach()[-3:] for x in leaves]
    reference = dense_oracle(case, device)
    exact_out, _, exact_grads = oracle.gradients(reference, [x.double() for x in last], dout[-3:])
    plain_out, _, plain_grads = oracle.gradients(reference, last, dout[-3:])
    for found, exact, plain in zip((out, *grads), (exact_out, *exact_grads), (plain_out, *plain_grads), strict=True):
        assert_error_ratio(found.detach()[-3:], exact, plain)


def large_tensors(batch, seqlen, heads, head_dim, device):
    """([q, k, v], dout), drawn where they lie: a generator on the CPU and conversions would take minutes."""
    shape = batch, seqlen, heads, head_dim
    q, k, v, dout = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dout


@pytest.mark.slow
@pytest.mark.cuda
def test_lse_beyond_four_gigabytes(device, memory_guard):
    """More than 2^30 rows; all of them see the same key, so that each gives its value and its own score."""
    batch, seqlen, heads = 16, 70_000, 1000
    memory_guard(3 * 2 * batch * seqlen * heads * 8)
    q = torch.empty(batch, seqlen, heads, 8, dtype=torch.bfloat16, device=device).normal_()
    k, v = (torch.randn(batch, 1, heads, 8, device=device).bfloat16() for _ in "kv")
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert all(torch.equal(x, v[b].expand_as(x)) for b, x in enumerate(out))
    scores = torch.einsum("shd,hd->hs", q[-1].float(), k[-1, 0].float()) * 8**-0.5
    torch.testing.assert_close(lse[-1], scores, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.cuda
def test_more_than_two_to_the_31_rows_of_heads_that_share_a_key(device, memory_guard):
    """Every row sees the one key there is, so that each gives its value and its own score."""
    tokens, heads = 2**28 + 2**20 + 1, 8
    memory_guard(9 * tokens * heads)
    q = torch.empty(1, tokens, heads, 1, dtype=torch.bfloat16, device=device).normal_()
    k, v = torch.randn(2, 1, 1, 1, 1, dtype=torch.bfloat16, device=device)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert all((part == v).all() for part in out.split(2**24, dim=1))
    scores = (q[0, -(2**24) :, :, 0].float() * k.float().item()).T
    torch.testing.assert_close(lse[0, :, -(2**24) :], scores, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.cuda
def test_strides_beyond_two_to_the_31(device, memory_guard):
    case = Case(seqlen_q=64, seqlen_k=64)
    memory_guard(3 * 2 * (2**31 + 2**20))
    q, k, v, dout = case.tensors(device)

    def spread(x):
        buffer = torch.empty(2**31 + 2**20, dtype=x.dtype, device=device)
        return buffer.as_strided(x.shape, (2**31 + 8, *x.stride()[1:])).copy_(x)

    check(case, (spread(q), spread(k), spread(v), dout), dense(case, device), dense_oracle(case, device))


@pytest.mark.cuda
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_memory_grows_with_the_sequence_not_with_its_square(dropout_p, device):
    def peak(seqlen):
        leaves, dout = large_tensors(1, seqlen, 4, 64, device)
        gc.collect()  # or what another test has left is given back meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flash_attn_func(*leaves, dropout_p=dropout_p, causal=True)
        torch.autograd.grad(out, leaves, dout)
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) <= 2.1 * peak(16384)


@pytest.mark.cuda
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
def test_deterministic_backward_takes_little_memory(head_dim, portable, device, monkeypatch):
    """As much as a call that adds in any order, but for counters. Copies of Hopper cannot move rows of 100 elements."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    q = torch.randn(1, 4096, 16, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    kv = torch.randn(1, 4096, 1, head_dim, dtype=torch.bfloat16, device=device)

    def peak(deterministic):
        out = flash_attn_func(q, kv, kv, causal=True, deterministic=deterministic)
        dout = torch.ones_like(out)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, q, dout)
        return torch.cuda.max_memory_allocated() - before

    assert peak(True) <= 1.05 * peak(False)


@pytest.mark.cuda
def test_runs_on_the_current_stream(device):
    """The inputs are ready on the side stream only, after a long wait."""
    case = Case(seqlen_q=512, seqlen_k=512, causal=True, heads_k=2)
    tensors = case.tensors(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(x, float("nan")) for x in tensors]
        torch.cuda._sleep(200_000_000)
        for x, value in zip(late, tensors, strict=True):
            x.copy_(value)
        check(case, late, dense(case, device), dense_oracle(case, device))


@pytest.mark.cuda
def test_two_streams_at_once(device):
    case = Case(batch=4, seqlen_q=1024, seqlen_k=1024, causal=True, deterministic=True)
    *inputs, dout = case.tensors(device)

    def run():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    expected = run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for stream in streams * 10:
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, expected, strict=True))


@pytest.mark.sm90
@pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")
@pytest.mark.parametrize(
    "head_dim, portable, deterministic",
    [
        (64, False, False),
        (64, False, True),
        (192, False, True),
        (256, False, True),
        (64, True, True),
        (128, True, True),
    ],
)
def test_backward_while_others_hold_most_multiprocessors(head_dim, portable, deterministic, device, monkeypatch):
    """Its blocks wait for one another, but for none that needs a multiprocessor yet."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    probe = native.library(pathlib.Path(__file__).with_name("occupy_probe.cu"), native.CUDA)
    held = torch.cuda.get_device_properties(device).multi_processor_count - 16
    q = torch.randn(1, 384, 64, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = flash_attn_func(q, q, q, causal=True, deterministic=deterministic)
    dout = torch.randn_like(out)

    def run():
        return torch.autograd.grad(out, q, dout, retain_graph=True)

    run()  # so that the next but one need not allocate
    expected = run()
    started, done = (torch.zeros(size, dtype=torch.int32, pin_memory=True) for size in (held, 1))
    end = torch.cuda.Event()
    torch.cuda.synchronize()
    probe.run("occupy", held, 20, started, done, torch.cuda.Stream().cuda_stream)
    while not started.all():
        time.sleep(0.001)
    found = run()
    end.record()
    deadline = time.monotonic() + 10
    while not end.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    ended = end.query()
    done.fill_(1)
    assert ended
    assert_same_but_for_rounding(found, expected)


@pytest.mark.multi_gpu
def test_runs_where_the_tensors_are():
    """Device 0 stays current; nothing is to be launched there."""
    case, device = Case(causal=True, dropout_p=0.2, heads_k=2), torch.device("cuda", 1)
    check(case, case.tensors(device), dense(case, device), dense_oracle(case, device))
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda
@pytest.mark.parametrize("ragged", [False, True])
def test_graph_replays_with_other_contents(ragged, device):
    """Captured once; replayed with new tensors and new cu_seqlens, dropout drawing anew each time."""
    case = Case(batch=3, seqlen_q=200, seqlen_k=200, causal=True, deterministic=True)
    (q, k, v, dout), (cu_seqlens, _) = packed_batch(case, device) if ragged else (case.tensors(device), (None, None))
    if ragged:
        k, v = torch.randn_like(q), torch.randn_like(q)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def run(dropout_p=0.0):
        if ragged:
            bounds = cu_seqlens, cu_seqlens, len(q), len(q)
            out = flash_attn_varlen_func(*leaves, *bounds, causal=True, deterministic=True, dropout_p=dropout_p)
        else:
            out = flash_attn_func(*leaves, causal=True, deterministic=True, dropout_p=dropout_p)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, captured = capture(run)
    for x in leaves:
        x.data.normal_()
    if ragged:
        cu_seqlens.copy_(torch.tensor([0, len(q) // 3, len(q) // 2, len(q)]))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, run(), strict=True))
    graph, captured = capture(functools.partial(run, dropout_p=0.3))
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(captured[0].clone())
    assert not torch.equal(*replays)


def capture(function):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.cuda
def test_no_synchronisation(device):
    """Neither direction waits for the device, be max_seqlen an int or a tensor."""
    case = Case(batch=4, seqlen_q=60, seqlen_k=90, causal=True)
    (q, k, v, dout), cu_seqlens = packed_batch(case, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bounds = torch.tensor(60, device=device), torch.tensor(90, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = flash_attn_varlen_func(*leaves, *cu_seqlens, *bounds, dropout_p=0.1)
        torch.autograd.grad(out, leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_compiled_into_graphs(device):
    """torch.compile refuses memory of its pool that stays in use after a call."""
    q, k, v, _ = Case(seqlen_q=300, seqlen_k=300, causal=True).tensors(device)
    attend = torch.compile(functools.partial(flash_attn_func, causal=True), mode="reduce-overhead")
    expected = flash_attn_func(q, k, v, causal=True)
    for _ in range(4):
        assert torch.equal(attend(q, k, v), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_kernel_and_reference_give_one_dropout_mask(dtype, device):
    case = Case(dropout_p=0.2, dtype=dtype, seqlen_q=130, seqlen_k=70)
    q, k, v, _ = case.tensors(device)
    arguments = q, k, v, *op_arguments(case, device)
    on_device = torch.ops.flash_attn.probabilities(*arguments)
    on_cpu = torch.ops.flash_attn.probabilities(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments))
    on_device, on_cpu = (s_dmask[..., :130, :70].signbit() for s_dmask in (on_device, on_cpu))
    assert torch.equal(on_device.cpu(), on_cpu)


@pytest.mark.parametrize("bound", [1, 200])
def test_s_dmask_follows_max_seqlen(bound, device):
    """What does not fit is left out, and nothing is written outside."""
    case = Case(batch=3, seqlen_q=300, seqlen_k=300, dropout_p=0.3)
    (q, k, v, _), cu_seqlens = packed_batch(case, device)
    options = options_of(case, device)
    torch.manual_seed(0)
    whole = flash_attn_varlen_func(q, k, v, *cu_seqlens, 300, 300, **options)
    torch.manual_seed(0)
    part = flash_attn_varlen_func(q, k, v, *cu_seqlens, bound, bound, **options)
    size = -(-bound // 128) * 128
    assert part[2].shape == (3, 4, size, size)
    assert_same_but_for_rounding(part[:2], whole[:2])
