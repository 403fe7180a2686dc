"""Keys and values in float8 beside queries of 16 bits: the bits of the call with all of them converted to float16.

Whatever belongs to no entry holds NaN, in codes as well. Scales that are powers of two change no rounding, so that a
call with scales has the bits of one whose queries and results are multiplied by them.
"""

import dataclasses
import functools
import itertools
import zlib

import oracle
import pytest
import torch
from compare import assert_error_ratio, identical

from flash_attn import _library, batch_invariant, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.functional import float8_descale, to_float8

FLOAT8, FP16, BF16 = torch.float8_e4m3fn, torch.float16, torch.bfloat16
NAN = float("nan")
SLOPES = torch.tensor([0.3, 0.01, 0.2, 0.0, 0.5, 0.07, 0.11] * 2)
BIAS = torch.randn(1, 18, 80, generator=torch.Generator().manual_seed(0))
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -9.0, 1.0] * 2)


def ranges(total, count, keys):
    """Key ranges of each row, some of them empty, and of all heads."""
    bounds = torch.randint(-3, keys + 5, (total, count), generator=torch.Generator().manual_seed(total))
    return bounds.int().sort(-1).values[None]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Entries with `rows` queries and `keys` keys, as a call of one of the functions finds them.

    form: "cache": rows of a cache, in another order; "pages"; "tokens": packed keys, for flash_attn_varlen_func.
    """

    rows: tuple = (1, 1, 1)
    keys: tuple = (70, 0, 37)
    heads: int = 14
    heads_k: int = 2
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    dtype: torch.dtype = FP16
    form: str = "pages"
    page: int = 16
    spare: int = 0  # columns of the block table that no entry uses, and as many pages
    varlen: bool = False  # by flash_attn_varlen_func, where keys are in pages
    packed: bool = False  # queries of flash_attn_with_kvcache
    leftpad: tuple = ()
    level: int = 0
    options: dict = dataclasses.field(default_factory=dict)  # tensors as on the CPU

    def __str__(self):
        changed = (f.name for f in dataclasses.fields(self)[:-1] if getattr(self, f.name) != f.default)
        return "-".join([*(f"{name}{getattr(self, name)}".replace(" ", "") for name in changed), *self.options])

    @property
    def is_varlen(self):
        return self.varlen or self.form == "tokens"

    def arguments(self, device):
        """The arguments of `attend`, and the scales of keys and of values, powers of two (batch, heads_k)."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        q = draw(sum(self.rows), self.heads, self.head_dim).to(self.dtype)
        q[q.abs() < 2**-12] = 0  # others stay normal numbers whatever the scale
        dims = self.head_dim, self.head_dim_v or self.head_dim
        keys = [[(draw(max(n, 0), self.heads_k, dim) * 2).to(FLOAT8) for n in self.keys] for dim in dims]
        given = dict(self.options)
        if self.is_varlen or self.packed:
            given |= dict(cu_seqlens_q=ends(self.rows), max_seqlen_q=max(self.rows))
        else:
            q = q.view(len(self.rows), self.rows[0], self.heads, self.head_dim)
        given |= self.placed(*keys)
        given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in dict(given, q=q).items()}
        exponents = torch.randint(-2, 2, (2, len(self.rows), self.heads_k), generator=generator)
        return given, *exponents.float().exp2().to(device)

    def placed(self, k, v):
        """Keys and values, and the arguments that say where they are."""
        count = len(self.keys)
        if self.form == "tokens":
            more = [torch.full((2, *x[0].shape[1:]), NAN).to(FLOAT8) for x in (k, v)]
            tokens = {name: joined([*x, extra]) for name, x, extra in zip("kv", (k, v), more, strict=True)}
            return dict(tokens, cu_seqlens_k=ends(self.keys), max_seqlen_k=max(self.keys))
        lengths = torch.tensor(self.keys, dtype=torch.int32)
        names = ("k", "v") if self.varlen else ("k_cache", "v_cache")
        others = dict(seqused_k=lengths) if self.varlen else dict(cache_seqlens=lengths)
        pages = -(-max(self.keys) // self.page) + self.spare
        size, width = (self.page, pages) if self.form == "pages" else (max(self.keys) + 3, 1)
        table = torch.arange(count * width - 1, -1, -1).view(count, width) + 1
        pools = []
        for x in (k, v):
            pools.append(torch.full((count * width + 1, size, *x[0].shape[1:]), NAN).to(FLOAT8))
            for b, codes in enumerate(x):
                place = torch.arange(len(codes))
                pools[-1][table[b, place // size], place % size] = codes
        if self.form == "pages":
            others["block_table"] = torch.where(torch.arange(width) * size < lengths[:, None], table, -1).int()
        else:
            others["cache_batch_idx"] = table[:, 0].int()
        if self.leftpad:
            others["cache_leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32)
        return dict(others, **dict(zip(names, pools, strict=True)))

    def attend(self, **arguments):
        """(out, softmax_lse)."""
        with batch_invariant(self.level):
            function = flash_attn_varlen_func if self.is_varlen else flash_attn_with_kvcache
            return function(**arguments, return_softmax_lse=True)

    def by_row(self, scales):
        """Scales of entries and key heads for q or out."""
        scales = scales.repeat_interleave(self.heads // self.heads_k, 1)
        if self.is_varlen or self.packed:
            return scales.repeat_interleave(torch.tensor(self.rows, device=scales.device), 0)[..., None]
        return scales[:, None, :, None]


def ends(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def joined(codes):
    """torch.cat of codes, which it does not have on all devices."""
    return torch.cat([x.view(torch.uint8) for x in codes]).view(FLOAT8)


def in_fp16(arguments):
    """The arguments with all codes, and the queries, converted to float16."""
    converted = {name: x.to(FP16) for name, x in arguments.items() if getattr(x, "dtype", None) == FLOAT8}
    return dict(arguments, **converted, q=arguments["q"].to(FP16))


BATCHES = [
    Batch(head_dim=40, page=1, options=dict(num_splits=3)),
    Batch(rows=(3, 3, 3), keys=(70, -1, 37), page=3, dtype=BF16, options=dict(causal=True, window_size=(9, 0))),
    Batch(rows=(2, 2, 2), form="cache", leftpad=(33, 0, 5), options=dict(window_size=(20, 0), softcap=3.0)),
    Batch(rows=(5, 5, 5), form="cache", head_dim=192, head_dim_v=128, options=dict(learnable_sink=SINKS)),
    Batch(rows=(4, 1, 0), packed=True, options=dict(causal=True, alibi_slopes=SLOPES)),
    Batch(rows=(30, 1, 9), varlen=True, options=dict(causal=True, learnable_sink=SINKS, softcap=9.0)),
    Batch(
        rows=(30, 1, 9),
        varlen=True,
        page=3,
        dtype=BF16,
        head_dim=192,
        head_dim_v=128,
        options=dict(causal=torch.tensor([True, False, True]), num_splits=2),
    ),
    Batch(rows=(33, 2, 20), form="tokens", heads=6, head_dim=40, options=dict(key_ranges=ranges(55, 2, 70))),
    Batch(rows=(33, 2, 20), form="tokens", options=dict(key_ranges=ranges(55, 4, 70), causal=True)),
    Batch(rows=(9, 2, 7), varlen=True, options=dict(attn_bias=BIAS, seqused_q=torch.tensor([7, 2, 0]).int())),
    Batch(rows=(65, 1, 2), keys=(130, 1, 64), varlen=True, options=dict(causal=True, attention_chunk=48)),
    Batch(rows=(41, 1, 4), varlen=True, level=1, page=3, dtype=BF16, options=dict(causal=True)),
    Batch(rows=(1, 3, 1), packed=True, level=2, dtype=BF16, options=dict(causal=True, num_splits=2)),
    Batch(
        rows=(5, 5, 5), keys=(300, -1, 150), head_dim=64, dtype=BF16, options=dict(causal=True, window_size=(170, 0))
    ),
    Batch(rows=(5, 20, 9), keys=(300, 257, 9), varlen=True, page=8, level=2, options=dict(causal=True)),
    Batch(rows=(1, 20), keys=(4300, 130), heads=8, varlen=True, level=2, options=dict(causal=True)),
    Batch(
        rows=(1, 26, 1, 9),
        keys=(200, 333, 70, 9),
        varlen=True,
        page=1,
        dtype=BF16,
        options=dict(causal=True, num_splits=2),
    ),
    Batch(
        rows=(40, 1, 3),
        keys=(300, 400, 3),
        varlen=True,
        dtype=BF16,
        options=dict(causal=True, softcap=5.0, num_splits=3),
    ),
    Batch(rows=(12, 12, 12), keys=(900, 9, 1500), options=dict(causal=True)),
    Batch(
        rows=(125, 1, 3),
        keys=(300, 100, 3),
        varlen=True,
        spare=20,
        head_dim=64,
        dtype=BF16,
        options=dict(causal=True, max_seqlen_k=100),  # a bound that does not hold
    ),
]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_has_the_bits_of_the_call_in_fp16(batch, device):
    """With scales of each entry and key head, and without."""
    arguments, k_scales, v_scales = batch.arguments(device)
    converted = in_fp16(arguments)
    scaled = dict(converted, q=converted["q"] * batch.by_row(k_scales).to(FP16))
    for scales, expected in (
        (dict(), batch.attend(**converted)),
        (dict(k_descale=k_scales, v_descale=v_scales), batch.attend(**scaled)),
    ):
        out, lse = batch.attend(**arguments, **scales)
        assert identical(lse, expected[1])
        result = expected[0] * batch.by_row(v_scales).to(FP16) if scales else expected[0]
        assert out.dtype == batch.dtype
        if batch.dtype == FP16:
            torch.testing.assert_close(out, result, rtol=0, atol=2**-24)  # the same, but where fp16 is subnormal
        else:  # which is rounded once, from what has not been rounded to fp16
            torch.testing.assert_close(out.float(), result.float(), rtol=2**-8 + 2**-10, atol=2**-24)
    written = torch.full_like(out, NAN)
    assert batch.attend(**arguments, **scales, out=written)[0] is written
    assert identical(written, out)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_against_the_oracle_on_what_codes_stand_for(dtype, device):
    """With scales that are no powers of two, where a softcap, slopes and sinks act on scores with the scale."""
    options = dict(softcap=4.0, alibi_slopes=SLOPES.to(device), learnable_sink=SINKS.to(device), window_size=(50, 3))
    q = torch.randn(2, 5, 14, 59, device=device).to(dtype)
    k, v = (torch.randn(2, 77, 2, 59, device=device) * 3 for _ in "kv")
    scales = {f"{name}_descale": float8_descale(x) for name, x in (("k", k), ("v", v))}
    codes = [to_float8(x, scale) for x, scale in zip((k, v), scales.values(), strict=True)]
    out, lse = flash_attn_with_kvcache(q, *codes, **options, **scales, return_softmax_lse=True)
    stand_for = [x.double() * scale[:, None] for x, scale in zip(codes, scales.values(), strict=True)]
    exact = oracle.attention(q.double(), *stand_for, **options)
    baseline = oracle.attention(q.to(dtype), *(x.to(dtype) for x in stand_for), **options)
    assert_error_ratio(out, exact[0], baseline[0], name="out")
    assert_error_ratio(lse, exact[1], baseline[1].float(), name="lse")


def test_every_code(device):
    """The output of a single key is its value; the score of a unit vector is a channel of the key."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FLOAT8).view(16, 1, 1, 16)
    values = codes.float()
    finite = values.nan_to_num(0).to(FLOAT8)
    q = torch.eye(16, device=device, dtype=FP16)[None, :, None].repeat(16, 1, 1, 1)
    out, lse = flash_attn_with_kvcache(q, finite, codes, softmax_scale=1.0, return_softmax_lse=True)
    assert identical(out.float(), values.expand(-1, 16, -1, -1))
    torch.testing.assert_close(lse[:, 0], finite.float()[:, 0, 0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 448.0])
def test_any_scale_in_any_form(scale, device):
    """A scale of keys multiplies softmax_scale in float32; all its forms say the same."""
    batch = Batch(rows=(3, 1, 9), varlen=True, head_dim=40, options=dict(causal=True))
    arguments, *_ = batch.arguments(device)
    converted = in_fp16(arguments)
    softmax_scale = float(torch.tensor(0.3) * torch.tensor(scale))
    expected, lse = batch.attend(**converted, softmax_scale=softmax_scale)
    several = torch.full((3, 2), scale, device=device)
    for form in (
        scale,
        several[0, 0],
        several[0, :1],
        several[0],
        several[:, :1],
        several[:1],
        several,
        several.T[:1].T,
    ):
        found = batch.attend(**arguments, softmax_scale=0.3, k_descale=form)
        assert identical(found[0], expected)
        assert identical(found[1], lse)
    out, lse_of_values = batch.attend(**arguments, softmax_scale=softmax_scale, v_descale=several)
    torch.testing.assert_close(out.float(), expected.float() * scale, rtol=2**-10, atol=1e-6)
    assert identical(lse_of_values, lse)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed queries"])
@pytest.mark.parametrize("page", [0, 3])
def test_appended_keys_are_rotated_then_encoded(page, packed, device):
    """The cache then holds what a cache of 16 bits would, encoded, and nothing else changes."""
    capacity, filled, new = 24, torch.tensor([7, -1, 20]), 4
    q, k, v = (torch.randn(3, new, heads, 32, device=device).to(BF16) for heads in (14, 2, 2))
    odd = [1e4, -1e4, 448.0, 464.0, float("inf"), NAN, 2.0**-10, 3 * 2.0**-10, 17.0, 19.0, -0.0]
    v[0, 0, 0, : len(odd)] = torch.tensor(odd)
    angle = torch.rand(capacity + new, 8, device=device) * 6.3
    tables = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=False)
    table = torch.arange(24, device=device).view(3, 8).flip(1).int()
    shape = (24, 3, 2, 32) if page else (3, capacity, 2, 32)
    arguments = dict(cache_seqlens=filled.int().to(device), causal=True, block_table=table if page else None)
    shaped = dict(arguments, cu_seqlens_q=ends([new] * 3).to(device)) if packed else arguments
    before = torch.randint(0, 127, (2, *shape), device=device).to(torch.uint8)
    k_descale, v_descale = (torch.tensor(x, device=device) for x in ([[0.02, 0.3]] * 3, [1.0, 0.5]))
    caches = before.clone().view(FLOAT8).unbind()
    given = dict(k=k, v=v, **tables)
    scales = dict(k_descale=k_descale, v_descale=v_descale)
    q = q.flatten(0, 1) if packed else q
    out = flash_attn_with_kvcache(q, *caches, **shaped, **given, **scales)

    wide = torch.zeros(2, *shape, device=device, dtype=BF16)
    flash_attn_with_kvcache(q, *wide, **shaped, **given)
    for codes, x, descale, old in zip(caches, wide, (k_descale[0], v_descale), before, strict=True):
        expected = old.clone()
        for b, start in enumerate(filled.tolist()):
            if start >= 0:
                place = torch.arange(start, start + new, device=device)
                where = (table[b, place // 3].long(), place % 3) if page else (b, place)
                expected[where] = to_float8(x[where], descale).view(torch.uint8)
        assert identical(codes.float(), expected.view(FLOAT8).float())
    if not packed:  # rotated as by that call
        lengths = torch.where(filled < 0, -1, filled + new).int().to(device)
        nothing_new = dict(arguments, cache_seqlens=lengths)
        q = rotated(q, filled, tables)
        again = flash_attn_with_kvcache(q, *caches, **nothing_new, **scales)
        torch.testing.assert_close(out.float(), again.float(), rtol=2**-7, atol=2**-7, equal_nan=True)


def rotated(q, start, tables):
    from flash_attn.layers.rotary import apply_rotary_emb

    offsets = start.clamp(min=0).int().to(q.device)
    return apply_rotary_emb(q, tables["rotary_cos"], tables["rotary_sin"], seqlen_offsets=offsets)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 64])
def test_nothing_in_the_cache(rows, dtype, device):
    """No keys, no columns of the block table, no pages: rows of zeros, with an lse of inf."""
    q = torch.randn(2, rows, 8, 72, device=device).to(dtype)
    no_pages, table = torch.zeros(2, 0, device=device).int(), torch.zeros(2, 1, device=device).int()
    lengths = torch.zeros(2, device=device).int()
    for shape, block_table in (((2, 0), None), ((4, 16), no_pages), ((0, 16), table)):
        cache = torch.zeros(*shape, 8, 72, device=device).to(FLOAT8)
        options = dict(cache_seqlens=lengths, block_table=block_table, k_descale=2.0, return_softmax_lse=True)
        out, lse = flash_attn_with_kvcache(q, cache, cache, **options)
        assert out.dtype == dtype and not out.any() and lse.isposinf().all()


def test_a_scale_of_zero_leaves_no_nan_in_the_cache(device, monkeypatch):
    """Which is refused where it can be read, and is not read where kernels run."""
    new = torch.tensor([0.0, 3.0, -3.0, NAN], device=device).repeat(16)[None, None, None].to(BF16)
    caches = torch.zeros(2, 1, 4, 1, 64, device=device).to(FLOAT8).unbind()
    none = torch.zeros((), device=device)
    call = functools.partial(flash_attn_with_kvcache, new, *caches, new, new, cache_seqlens=0)
    if not _library.runs_in_kernel("fwd", new):
        with pytest.raises(ValueError, match=r"v_descale must be above 0 where k and v are appended.* found 0"):
            call(v_descale=none)
        monkeypatch.setattr(_library, "can_be_read_at_once", lambda x: False)
    call(k_descale=none, v_descale=none)
    for cache in caches:
        assert identical(cache[0, 0, 0, :4].float(), torch.tensor([0.0, 448.0, -448.0, NAN], device=device))


def test_codes_and_scales(device):
    codes = to_float8(
        torch.tensor([17.0, 19.0, 465.0, -1e9, 2.0**-10, 3 * 2.0**-10, NAN], device=device).view(1, 1, -1)
    )
    expected = torch.tensor([16.0, 20.0, 448.0, -448.0, 0.0, 2.0**-8, NAN], device=device)  # nearest, ties to even
    assert identical(codes.float().flatten(), expected)
    x = torch.tensor([[[0.0, 0.0], [1.0, -448.0], [NAN, 7.0], [float("inf"), -2e-40]]], device=device)
    tiny = torch.finfo(torch.float32).smallest_normal
    assert float8_descale(x).tolist() == [1.0, 1.0, 7 / 448, tiny]
    assert float8_descale(x, per_head=False).item() == 1.0
    assert float8_descale(x[:0]).tolist() == [1.0] * 4
    per_entry = torch.tensor([[1.0, 2.0], [4.0, 0.5]], device=device)
    x = torch.ones(2, 3, 2, 4, device=device, dtype=BF16)
    assert to_float8(x, per_entry).float()[:, 0, :, 0].tolist() == [[1.0, 0.5], [0.25, 2.0]]
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"descale must be above 0, found {wrong}"):
            to_float8(x, wrong)


def test_queries_in_float8_are_converted(device):
    batch = Batch(rows=(2, 2, 2), page=3)
    arguments, k_scales, v_scales = batch.arguments(device)
    q = to_float8(arguments["q"], 0.25)
    scales = dict(k_descale=k_scales, v_descale=v_scales)
    found = batch.attend(**dict(arguments, q=q), **scales, q_descale=torch.full((3, 1), 0.25, device=device))
    expected = batch.attend(**dict(arguments, q=q.to(BF16)), k_descale=k_scales / 4, v_descale=v_scales)
    assert found[0].dtype == BF16
    assert all(map(identical, found, expected))
    out = torch.empty_like(arguments["q"])  # in fp16
    assert identical(
        batch.attend(**dict(arguments, q=q), **scales, out=out)[0],
        batch.attend(**dict(arguments, q=q.to(FP16)), **scales)[0],
    )


@pytest.mark.parametrize("batch", [BATCHES[0], BATCHES[6]], ids=str)
def test_traced_in_one_graph(batch, device):
    arguments, k_scales, v_scales = batch.arguments(device)

    def attend(scale, arguments):
        return batch.attend(**arguments, k_descale=scale, v_descale=0.5)

    traced = torch.compile(attend, fullgraph=True, backend="eager")
    assert all(map(identical, traced(k_scales, arguments), attend(k_scales, arguments)))


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [BATCHES[0], BATCHES[5]], ids=str)
def test_a_graph_reads_scales_and_lengths_at_each_replay(batch, device):
    arguments, k_scales, v_scales = batch.arguments(device)
    call = dict(arguments, k_descale=k_scales, v_descale=v_scales)
    out = torch.empty_like(batch.attend(**call)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(**call, out=out)
    for x in (k_scales, v_scales):
        x.mul_(0.75)
    arguments["seqused_k" if batch.varlen else "cache_seqlens"].sub_(5).clamp_(min=0)
    graph.replay()
    assert identical(out, batch.attend(**call)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Errors

CACHED = Batch(rows=(2, 2, 2), form="cache", head_dim=16)
PACKED = Batch(rows=(2, 1, 1), form="tokens", head_dim=16)
ERRORS = {  # message: (batch, changes by name, each a value or a function of the argument)
    r"k_cache must have dtype torch.float8_e4m3fn, found torch.float8_e5m2": (
        CACHED, dict(k_cache=lambda k: k.view(torch.float8_e5m2))),
    r"v_cache must have dtype .* found torch.uint8: where .* codes .* give v_cache.view\(torch.float8_e4m3fn\)": (
        CACHED, dict(v_cache=lambda v: v.view(torch.uint8))),
    r"k must have dtype .* found torch.uint8: .* give k.view": (PACKED, dict(k=lambda k: k.view(torch.uint8))),
    r"v_cache must have dtype torch.float8_e4m3fn, found torch.bfloat16": (CACHED, dict(v_cache=lambda v: v.to(BF16))),
    r"k must have dtype torch.float8_e4m3fn, found torch.float16": (PACKED, dict(k=lambda k: k.to(FP16))),
    r"q must have dtype torch.float16 or torch.bfloat16, found torch.float32": (CACHED, dict(q=lambda q: q.float())),
    r"q must have dtype .* found torch.float8_e4m3fn": (
        PACKED, dict(q=lambda q: q.to(FLOAT8), k=lambda k: k.to(BF16), v=lambda v: v.to(BF16))),
    r"q_descale must be None unless q has dtype torch.float8_e4m3fn, found .* torch.float16": (
        PACKED, dict(q_descale=1.0)),
    r"q_descale must be None where k is appended, found one": (
        CACHED, dict(dict.fromkeys("kv", torch.zeros(3, 1, 2, 16).half()), q=lambda q: q.to(FLOAT8), q_descale=1.0)),
    r"k_descale must be None unless .* found torch.float16": (
        CACHED, dict(k_cache=lambda k: k.to(FP16), v_cache=lambda v: v.to(FP16), k_descale=1.0)),
    r"v_descale must be None unless .* found torch.float16": (
        PACKED, dict(k=lambda k: k.to(FP16), v=lambda v: v.to(FP16), v_descale=torch.ones(2))),
    r"k_descale must broadcast to \(3, 2\), found shape \(3,\)": (CACHED, dict(k_descale=torch.ones(3))),
    r"v_descale must broadcast to \(3, 2\), found shape \(2, 3\)": (PACKED, dict(v_descale=torch.ones(2, 3))),
    r"k_descale must have dtype torch.float32, found torch.float16": (PACKED, dict(k_descale=torch.ones(2).half())),
    r"v_descale must be on .* found it on meta": (CACHED, dict(v_descale=torch.ones(2, device="meta"))),
    r"k_descale must be at least 0, found -1": (CACHED, dict(k_descale=-1.0)),
    r"k_descale must be above 0 where k and v are appended, which it divides, found 0.0": (
        CACHED, dict(dict.fromkeys("kv", torch.zeros(3, 1, 2, 16).half()), k_descale=0.0)),
    r"v_descale must be finite, found nan": (CACHED, dict(v_descale=NAN)),
    r"v_descale must not require grad": (CACHED, dict(v_descale=torch.ones(2, requires_grad=True))),
    r"dropout_p must be 0 with keys and values of torch.float8_e4m3fn, found 0.5": (PACKED, dict(dropout_p=0.5)),
    r"return_attn_probs must be False with keys": (PACKED, dict(return_attn_probs=True, return_softmax_lse=False)),
    r"k must have dtype torch.float16, found torch.float8_e4m3fn": (
        CACHED, {name: torch.zeros(3, 1, 2, 16).to(FLOAT8) for name in "kv"}),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input_is_refused(message, device):
    batch, changes = ERRORS[message]
    arguments, *_ = batch.arguments(device)
    moved = {
        name: x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta and not x.requires_grad else x
        for name, x in changes.items()
    }
    changed = {name: x(arguments[name]) if callable(x) else x for name, x in moved.items()}
    if changes.get("v_descale") is not None and getattr(changes["v_descale"], "requires_grad", False):
        changed["v_descale"] = torch.ones(2, device=device, requires_grad=True)
    function = flash_attn_varlen_func if batch.is_varlen else flash_attn_with_kvcache
    with pytest.raises((ValueError, TypeError), match=message):
        function(**{**arguments, "return_softmax_lse": True, **changed})


def test_functions_of_training_refuse_float8(device):
    q, k, v = (torch.zeros(1, 4, heads, 16, device=device, dtype=BF16) for heads in (4, 2, 2))
    message = (
        r"must have dtype .* here, found torch.float8_e\dm\d\w*: flash_attn_varlen_func and flash_attn_with_kvcache"
    )
    with pytest.raises(TypeError, match="k " + message):
        flash_attn_func(q, k.to(FLOAT8), v.to(FLOAT8))
    with pytest.raises(TypeError, match="v " + message):
        flash_attn_func(q, k, v.to(torch.float8_e5m2))


def test_gradients_are_refused(device):
    arguments, *_ = PACKED.arguments(device)
    arguments["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"k must not have dtype torch.float8_e4m3fn where a gradient"):
        flash_attn_varlen_func(**arguments)
    with torch.no_grad():
        flash_attn_varlen_func(**arguments)
    with pytest.raises(ValueError, match="q must not require grad with out"):
        flash_attn_varlen_func(**arguments, out=torch.empty_like(arguments["q"]).detach())
