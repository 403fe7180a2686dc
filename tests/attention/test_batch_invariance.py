"""The bits of attention under batch_invariant: they depend on no neighbour, layout or chunk, in training or serving.

On the CPU of the reference, with --emulate of the kernels, and on a GPU also with sequences of several pieces of keys.
"""

import itertools

import cases
import pytest
import torch
from problems import cumulative
from sequences import LONG, SHORT, Crowd, Problem, assert_same_bits

from flash_attn import batch_invariant, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

COUNT = 12
SIZES = [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("level", [1, 2])
def test_bits_depend_on_no_neighbour(device, level, sizes):
    for seed in range(COUNT):
        with batch_invariant(level):
            problem = Problem(seed, device, chunked=False, sizes=sizes)
            expected = problem.alone()
            assert_same_bits(problem.batched(), expected, f"{seed} in a batch")
            assert_same_bits(problem.packed(), expected, f"{seed} packed")
            if (found := problem.qkvpacked()) is not None:
                assert_same_bits(found, expected, f"{seed} with qkv packed")


@pytest.mark.parametrize("sizes", SIZES)
def test_bits_depend_on_no_chunk_or_cache(device, sizes):
    for seed in range(COUNT):
        with batch_invariant(2):
            problem = Problem(seed, device, chunked=True, sizes=sizes)
            expected = problem.alone()
            assert_same_bits(problem.alone(training=True), expected, f"{seed} in training")
            for paged, cut in itertools.product([False, True], repeat=2):
                assert_same_bits(problem.cached(paged, cut), expected, f"{seed} cached, {paged=} {cut=}")
            found = problem.over_pages()
            rows = [(out[last], lse[:, last]) for (last, *_), (out, lse) in zip(found, expected, strict=True)]
            assert_same_bits([(out, lse) for _, out, lse in found], rows, f"{seed} over pages")


def test_bits_depend_on_no_bias_beside(device):
    """A bias whose rows and keys belong to one entry."""
    torch.manual_seed(0)
    for length, count in ((70, 70), (130, 1), (65, 33)):
        q, k, v = (torch.randn(4, n, 4, 16, device=device) for n in (count, length, length))
        for dtype in (torch.float32, torch.bool):
            bias = torch.randn(4, 4, count, length, device=device)
            bias = bias > 0 if dtype is torch.bool else bias
            with batch_invariant():
                whole = flash_attn_func(q, k, v, attn_bias=bias, return_lse=True)
                one = flash_attn_func(q[2:3], k[2:3], v[2:3], attn_bias=bias[2:3], return_lse=True)
            for x, y in zip(one, whole, strict=True):
                assert torch.equal(x[0], y[2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_within_a_call(device, interleaved):
    """A call that rotates its queries and new keys has the bits of attention over what was rotated before."""
    length, head_dim = (5000 if device.type == "cuda" else 90), 64
    q, k, v = (torch.randn(1, length, n, head_dim, device=device, dtype=torch.bfloat16) for n in (4, 2, 2))
    angles = torch.rand(length + 20, 16, device=device) * 100
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    with batch_invariant(2):
        rotated = (apply_rotary_emb(x, cos, sin, interleaved) for x in (q, k))
        expected = flash_attn_func(*rotated, v, causal=True)
        caches = [torch.full((1, length + 20, 2, head_dim), torch.nan, device=device).to(q) for _ in range(2)]
        ends = [0, length // 3, length - 30, length - 1, length]
        for start, stop in itertools.pairwise(ends):
            new = (x[:, start:stop] for x in (q, k, v))
            found = flash_attn_with_kvcache(
                next(new),
                *caches,
                *new,
                cos,
                sin,
                cache_seqlens=torch.tensor([start], dtype=torch.int32, device=device),
                rotary_interleaved=interleaved,
                causal=True,
            )
            assert torch.equal(found, expected[:, start:stop]), (start, stop)


def test_threads_change_no_bit(device):
    if device.type != "cpu":
        pytest.skip("threads are of the CPU")
    before = torch.get_num_threads()
    for seed in range(6):
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with batch_invariant(2):
                found.append(Problem(seed, device, chunked=False).packed())
        torch.set_num_threads(before)
        assert_same_bits(*found, f"{seed} in threads")


def test_padding_and_unused_keys_change_no_bit(device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, device=device, dtype=torch.bfloat16) for n in (1, 90, 90))
    with batch_invariant(2):
        expected = flash_attn_func(q, k, v, causal=True)
        for pad, after in ((0, 1), (5, 0), (64, 30), (63, 500)):
            caches = [torch.full((1, pad + 90 + after, 2, 16), torch.nan, device=device).to(q) for _ in range(2)]
            for cache, x in zip(caches, (k, v), strict=True):
                cache[:, pad : pad + 90] = x
            found = flash_attn_with_kvcache(
                q,
                *caches,
                cache_seqlens=pad + 90,
                cache_leftpad=torch.tensor([pad], dtype=torch.int32, device=device),
                causal=True,
            )
            assert torch.equal(found, expected), (pad, after)


@pytest.mark.parametrize("seed", range(6))
def test_results_are_right(device, seed):
    problem = Problem(seed, device, chunked=False)
    problem.ranges = False
    problem.options.pop("attention_chunk", None)
    with batch_invariant(2):
        found = problem.alone()
    plain = problem.alone()
    for (out, lse), (out0, lse0) in zip(found, plain, strict=True):
        unit = torch.finfo(out.dtype).eps
        assert (out.double() - out0.double()).abs().max() <= 4 * unit * out0.abs().max()
        assert torch.allclose(lse, lse0, rtol=1e-6, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Many pairs

CROWDS = 200 if cases.WIDE else 2  # with -m slow on a GPU: more than 200,000 pairs of results


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i < 2 else pytest.mark.slow) for i in range(CROWDS)])
def test_many_sequences_in_each_call(device, seed):
    with batch_invariant(2):
        count = 250 if device.type == "cuda" else 5
        assert Crowd(seed, device, count).compare_all() == 5 * count


@pytest.mark.cuda
@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i < 1 else pytest.mark.slow) for i in range(CROWDS)])
def test_many_long_sequences_in_each_call(device, seed):
    with batch_invariant(2):
        assert Crowd(seed, device, 12, LONG).compare_all() == 5 * 12


# ---------------------------------------------------------------------------------------------------------------------
# Calls as a server makes them

HEADS, HEADS_K, HEAD_DIM, PAGE = 14, 2, 64, 16


class Server:
    """Pages of 16 tokens that hold sequences of these lengths, and packed calls over some of them."""

    def __init__(self, lengths, device):
        columns = -(-max(lengths) // PAGE)
        self.lengths, self.device = lengths, device
        self.table = torch.randperm(len(lengths) * columns, device=device).int().view(len(lengths), columns)
        self.pools = [self.randn(self.table.numel(), PAGE, HEADS_K, HEAD_DIM) for _ in range(2)]
        self.q = [self.randn(length, HEADS, HEAD_DIM) for length in lengths]

    def randn(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def step(self, entries, counts, lengths=None):
        """(out, lse) of the last tokens of each of these entries; lengths: how many keys they have so far."""
        lengths = [self.lengths[i] for i in entries] if lengths is None else lengths
        given = zip(entries, counts, lengths, strict=True)
        out, lse = flash_attn_varlen_func(
            torch.cat([self.q[i][length - count : length] for i, count, length in given]),
            *self.pools,
            cumulative(counts, self.device),
            None,
            max(counts),
            max(lengths),
            causal=True,
            block_table=self.table[list(entries)],
            seqused_k=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            return_lse=True,
        )
        return list(zip(out.split(counts), lse.split(counts, 1), strict=True))


@pytest.mark.parametrize("level", [1, 2])
def test_a_neighbour_that_grows(device, level):
    """By a token, which may change how many blocks share the keys of all entries."""
    long = 19802 if device.type == "cuda" else 200
    server = Server([long, 30], device)
    with batch_invariant(level):
        (expected,) = server.step([0], [1])
        for grown in (9, 10, 16, 17):
            first, second = server.step([0, 1], [1, 1], [long, grown])
            assert_same_bits([first], [expected], f"beside {grown} tokens")
            assert_same_bits([second], server.step([1], [1], [grown]), f"{grown} tokens beside many")


@pytest.mark.parametrize("level", [1, 2])
def test_a_decode_beside_a_prefill(device, level):
    long = 9000 if device.type == "cuda" else 200
    server = Server([long, 129, 5 * long // 9], device)
    with batch_invariant(level):
        alone = [server.step([i], [1])[0] for i in range(3)]
        prefilled = [server.step([i], [length])[0] for i, length in enumerate(server.lengths)]
        for entries, counts in (([0, 1], [1, 129]), ([1, 0], [129, 1]), ([2, 0, 1], [server.lengths[2], 1, 1])):
            for i, count, found in zip(entries, counts, server.step(entries, counts), strict=True):
                expected = alone[i] if count == 1 else prefilled[i]
                assert_same_bits([found], [expected], f"{i} of {entries} with {counts}")
        if level == 2:
            for one, whole in zip(alone, prefilled, strict=True):
                assert_same_bits([one], [(whole[0][-1:], whole[1][:, -1:])], "decoded or prefilled")


@pytest.mark.cuda
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_that_are_replayed(device, level):
    """With other lengths than those of the capture; also after the context, since a graph keeps its kernels."""
    entries, capacity = 4, 9008
    table = torch.randperm(entries * capacity // PAGE, device=device).int().view(entries, -1)
    q = torch.randn(entries, 1, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    pools = [torch.randn(table.numel(), PAGE, HEADS_K, HEAD_DIM, device=device).to(q) for _ in range(2)]
    lengths = torch.ones(entries, dtype=torch.int32, device=device)

    def decode(some=slice(None)):
        given = dict(cache_seqlens=lengths[some], block_table=table[some], causal=True, return_softmax_lse=True)
        return flash_attn_with_kvcache(q[some], *pools, **given)

    with batch_invariant(level):
        decode()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = decode()
    for now in ([1, 17, 4096, 9000], [9000, 4097, 33, 5], [8192, 8193, 9008, 1]):
        lengths.copy_(torch.tensor(now))
        q.normal_()
        graph.replay()
        with batch_invariant(level):
            eager = decode()
            alone = [decode(slice(i, i + 1)) for i in range(entries)]
        assert_same_bits([(out, lse)], [eager], f"{now} replayed")
        assert_same_bits([(torch.cat(x), torch.cat(y)) for x, y in [zip(*alone, strict=True)]], [eager], f"{now} alone")


@pytest.mark.cuda
@pytest.mark.parametrize("level", [1, 2])
def test_gradients_repeat(device, level):
    """Without `deterministic`, in calls of each form."""
    q = torch.randn(2, 4000, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 4000, HEADS_K, HEAD_DIM, device=device).to(q).requires_grad_() for _ in range(2))
    bounds = cumulative([4000, 4000], device)
    calls = (
        lambda: flash_attn_func(q, k, v, causal=True),
        lambda: flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, 4000, 4000, causal=True),
    )
    with batch_invariant(level):
        for call in calls:
            dout = torch.randn_like(call())
            first, *others = (torch.autograd.grad(call(), (q, k, v), dout) for _ in range(4))
            for other in others:
                assert all(map(torch.equal, first, other))
