"""`flash_attn_with_kvcache`: attention over a cache, and appending to it. Whatever is not in use holds NaN."""

import functools

import oracle
import pytest
import torch
from cache_cases import FACTORS, NAMED, NAMED_CASES, SAMPLE, CacheCase, possible, wide_rows
from cases import Case, params, uncovered
from compare import assert_error_ratio, largest_error
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn import _library, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn._reference.attention.options import CacheOptions


@pytest.mark.slow
def test_sample_has_every_pair_of_values():
    tied = "new", "head_dim", "rotary", "page", "batch_idx", "leftpad", "cache_seqlens"
    assert not uncovered(wide_rows(), FACTORS, valid=possible, tied=tied)


def expected(arguments, dtype, **options):
    """(out, lse, k_cache, v_cache) of the oracle, computed in `dtype`."""
    arguments = {name: value for name, value in arguments.items() if name != "num_splits"}
    tensors = ("q", "k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin")
    arguments |= {name: arguments[name].to(dtype) for name in tensors if name in arguments}
    return oracle.kvcache_attention(**arguments, **options)


@pytest.mark.parametrize("case", NAMED_CASES + SAMPLE)
def test_kvcache(case, device, memory_guard):
    if case.seqlen_k > 4096:
        memory_guard(2**34)
    check(case, case.arguments(device))


def check(case, arguments):
    """Compare results and caches with the oracle; the caches among `arguments` are written."""
    dtype = arguments["q"].dtype
    exact, *plain = expected(arguments, torch.float64), expected(arguments, dtype)
    if case.rotary_dim > 0:  # what is rotated is stored in `dtype`
        plain.append(expected(arguments, torch.float64, rotated_dtype=dtype))
    out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert lse.dtype == torch.float32
    for name, found, exact_one, *plain_ones in zip(("out", "lse"), (out, lse), exact, *plain, strict=False):
        worst = max(plain_ones, key=functools.partial(largest_error, exact=exact_one))
        assert_error_ratio(found, exact_one, worst, name=name)
    assert_cache_equal(arguments["v_cache"], exact[3].to(dtype))
    if case.rotary_dim > 0:
        assert_error_ratio(arguments["k_cache"], exact[2], plain[0][2], name="k_cache")
    else:
        assert_cache_equal(arguments["k_cache"], exact[2].to(dtype))


def assert_cache_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", NAMED_CASES)
def test_only_the_caches_are_written(case, device):
    arguments, before = case.arguments(device), case.arguments(device)
    flash_attn_with_kvcache(**arguments)
    for name in before.keys() - {"k_cache", "v_cache"}:
        if isinstance(before[name], torch.Tensor):
            assert torch.equal(arguments[name], before[name]), name


@pytest.mark.parametrize("num_splits", [2, 3, 8, 127, 128, 0, -1])
@pytest.mark.parametrize(
    "case",
    params(
        [
            CacheCase(seqlen_q=1, seqlen_k=900, heads=8, heads_k=2, lengths="tensor"),
            CacheCase(seqlen_q=5, seqlen_k=700, causal=True, page=16, seqlen_new=5, head_dim=128),
            CacheCase(seqlen_q=3, seqlen_k=513, window=(100, 20), alibi="h", leftpad=True),
        ]
    ),
)
def test_splitting_the_keys_changes_only_rounding(case, num_splits, device):
    def run(num_splits):
        return flash_attn_with_kvcache(**dict(case.arguments(device), num_splits=num_splits), return_softmax_lse=True)

    assert_same_however_split(run(num_splits), run(1))


def assert_same_however_split(found, expected_results):
    (out, lse), (expected_out, expected_lse) = found, expected_results
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected_out, rtol=2**-7, atol=2**-10)  # an ulp of bfloat16


@pytest.mark.parametrize(
    "case",
    params(
        [
            CacheCase(seqlen_q=1, seqlen_k=900, heads=8, heads_k=2, head_dim=head_dim, page=page, seqlen_new=1)
            for head_dim in (59, 64, 128, 256, 512)
            for page in (0, 16)
        ]
    ),
)
def test_with_little_shared_memory(case, device, little_shared_memory):
    """Decoding has fewer warps there."""
    check(case, case.arguments(device))


def test_result_is_out_or_out_and_lse(device):
    case = CacheCase(seqlen_q=3, seqlen_k=40, heads_k=2)
    out, lse = flash_attn_with_kvcache(**case.arguments(device), return_softmax_lse=True)
    assert lse.shape == (2, 4, 3) and lse.dtype == torch.float32
    assert torch.equal(out, flash_attn_with_kvcache(**case.arguments(device)))
    assert out.shape == (2, 3, 4, 64)


def test_empty_cache_gives_zero(device):
    arguments = CacheCase(seqlen_q=2, seqlen_k=40).arguments(device)
    arguments["cache_seqlens"] = torch.zeros_like(arguments["cache_seqlens"])
    out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert (out == 0).all() and (lse == float("inf")).all()


@pytest.mark.parametrize("empty", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(heads=0)], ids=str)
def test_empty_tensors(empty, device):
    case = CacheCase(**dict(dict(seqlen_q=2, seqlen_k=5, lengths="full"), **empty))
    out, lse = flash_attn_with_kvcache(**case.arguments(device), return_softmax_lse=True)
    assert out.shape == (case.batch, case.seqlen_q, case.heads, 64) and (out == 0).all()
    assert lse.shape == (case.batch, case.heads, case.seqlen_q) and (lse == float("inf")).all()


def test_appending_to_no_entries(device):
    arguments = CacheCase(batch=0, seqlen_q=2, seqlen_k=5, seqlen_new=2, rotary=1.0, causal=True).arguments(device)
    assert flash_attn_with_kvcache(**arguments).shape == (0, 2, 4, 64)


def test_appending_no_tokens_changes_nothing(device):
    case = CacheCase(seqlen_q=2, seqlen_k=40, causal=True)
    arguments = case.arguments(device)
    expected_out = flash_attn_with_kvcache(**arguments)
    no_tokens = arguments["k_cache"].new_empty(2, 0, 4, 64)
    assert torch.equal(flash_attn_with_kvcache(**arguments, k=no_tokens, v=no_tokens), expected_out)


def test_full_cache_equals_flash_attn_func(device):
    q, k, v, _ = Case(seqlen_q=33, seqlen_k=97, heads_k=2, causal=True).tensors(device)
    out = flash_attn_with_kvcache(q, k, v, causal=True, num_splits=1)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True), rtol=2**-7, atol=2**-10)


def test_rotary_rows_are_absolute_positions(device):
    """Left padding does not shift them; without a causal or window mask all queries take the row of the first."""
    case = CacheCase(seqlen_q=4, seqlen_k=60, seqlen_new=4, leftpad=True, rotary=1.0, causal=True)
    arguments = case.arguments(device)
    start = int(arguments["cache_seqlens"][1])
    flash_attn_with_kvcache(**arguments)
    rotated = oracle.rotate(
        arguments["k"][1].double(),
        arguments["rotary_cos"].double(),
        arguments["rotary_sin"].double(),
        torch.arange(start, start + 4),
        interleaved=True,
    )
    torch.testing.assert_close(arguments["k_cache"][1, start : start + 4].double(), rotated, rtol=2**-8, atol=2**-9)


def test_rotary_tables_may_be_float64(device):
    """They are used in float32."""
    arguments = CacheCase(seqlen_q=2, seqlen_k=30, seqlen_new=2, rotary=1.0).arguments(device)
    tables = {name: arguments[name].double() + 1e-4 for name in ("rotary_cos", "rotary_sin")}
    rounded = {name: table.float() for name, table in tables.items()}
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    out = flash_attn_with_kvcache(**arguments | tables)
    assert torch.equal(out, flash_attn_with_kvcache(**arguments | rounded | caches))
    torch.testing.assert_close(arguments["k_cache"], caches["k_cache"], rtol=0, atol=0, equal_nan=True)


APPENDED_WITH_FEW_QUERIES = [
    CacheCase(seqlen_q=1, seqlen_k=1030, seqlen_new=1, rotary=1.0, interleaved=False, head_dim=128),
    CacheCase(seqlen_q=1, seqlen_k=1030, seqlen_new=1, head_dim=64, lengths="int"),
    CacheCase(seqlen_q=1, seqlen_k=300, seqlen_new=1, rotary=0.5, heads_k=1, head_dim=256, num_splits=5),
    CacheCase(seqlen_q=1, seqlen_k=300, seqlen_new=8, rotary=0.5, head_dim=80, batch=9, interleaved=False),
    CacheCase(seqlen_q=2, seqlen_k=90, seqlen_new=5, rotary=1.0, heads_k=2, head_dim=96, window=(4, 0), causal=True),
    CacheCase(seqlen_q=5, seqlen_k=333, seqlen_new=5, rotary=1.0, heads_k=2, head_dim=120, causal=True, num_splits=40),
    CacheCase(seqlen_q=5, seqlen_k=70, seqlen_new=2, rotary=1.0, head_dim=192, dtype="fp16", causal=True),
    CacheCase(seqlen_q=3, seqlen_k=8, seqlen_new=8, rotary=0.5, head_dim=64, lengths="int"),
]


@pytest.mark.parametrize("case", APPENDED_WITH_FEW_QUERIES, ids=str)
def test_appending_within_the_kernel_of_decoding(case, device):
    """It gives the bits of a launch that appends before; a left padding, though of nothing, asks for that."""
    together, apart = case.arguments(device), case.arguments(device)
    apart["cache_leftpad"] = torch.zeros(case.batch, dtype=torch.int32, device=device)
    assert torch.equal(flash_attn_with_kvcache(**together), flash_attn_with_kvcache(**apart))
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(together[name], apart[name], rtol=0, atol=0, equal_nan=True)
    check(case, case.arguments(device))


@pytest.mark.parametrize("seqlen_new", [1, 3, 8])
def test_every_length_before_appending(seqlen_new, device):
    """New keys at every place of a chunk, in one split or two, up to the end of the cache and, on a GPU, past it."""
    room = 64
    end = room + 2 if device.type == "cuda" else room + 1 - seqlen_new
    lengths = torch.arange(-1, end, dtype=torch.int32, device=device)
    shape = len(lengths), 2, 64

    def randn(length):
        return torch.randn(shape[0], length, *shape[1:], device=device).bfloat16()

    q, k, v, k_cache, v_cache = randn(1), randn(seqlen_new), randn(seqlen_new), randn(room), randn(room)
    angles = torch.rand(80, 32, device=device) * 6
    tables = dict(rotary_cos=angles.cos().bfloat16(), rotary_sin=angles.sin().bfloat16(), rotary_interleaved=False)
    for num_splits in (0, 1, 3):
        caches = [(k_cache.clone(), v_cache.clone()) for _ in range(2)]
        found = [
            flash_attn_with_kvcache(q, *both, k, v, cache_seqlens=lengths, num_splits=num_splits, **tables, **options)
            for both, options in zip(caches, ({}, dict(cache_leftpad=torch.zeros_like(lengths))), strict=True)
        ]
        assert torch.equal(*found)
        for together, apart in zip(*caches, strict=True):
            assert torch.equal(together, apart)


@pytest.mark.parametrize("paged", [False, True])
def test_entries_that_append_to_one_position(paged, device):
    """One of them stays, whichever, and nothing else changes."""
    k_cache, v_cache = torch.zeros(2, 3, 8, 1, 16, device=device, dtype=torch.bfloat16)
    k, v = (torch.full((2, 1, 1, 16), fill, device=device, dtype=torch.bfloat16) for fill in (1, 2))
    k[1], v[1] = 3, 4
    rows = torch.tensor([1, 1], dtype=torch.int32, device=device)
    where = dict(block_table=rows[:, None]) if paged else dict(cache_batch_idx=rows)
    flash_attn_with_kvcache(k, k_cache, v_cache, k, v, cache_seqlens=5, **where)
    for cache, written in ((k_cache, (1, 3)), (v_cache, (2, 4))):
        assert cache[1, 5].unique().tolist() in ([written[0]], [written[1]])
        cache[1, 5] = 0
        assert not cache.any()


def test_rotary_tables_may_be_longer_than_the_cache(device):
    case = CacheCase(seqlen_q=2, seqlen_k=30, seqlen_new=2, rotary=1.0)
    arguments, longer = case.arguments(device), case.arguments(device)
    for name in ("rotary_cos", "rotary_sin"):
        longer[name] = torch.cat([longer[name], torch.full_like(longer[name], float("nan"))])
    assert torch.equal(flash_attn_with_kvcache(**arguments), flash_attn_with_kvcache(**longer))


@pytest.mark.cuda
def test_queries_past_the_rotary_tables_stay_as_they_are(device):
    """Kernels cannot raise for lengths that only the device knows; the reference does."""
    case = CacheCase(seqlen_q=6, seqlen_k=30, seqlen_new=2, rotary=1.0, causal=True)
    arguments, longer = case.arguments(device), case.arguments(device)
    for some, rows in ((arguments, 30), (longer, 36)):
        some["cache_seqlens"] = torch.full_like(some["cache_seqlens"], 28)
        for name, angle_zero in (("rotary_cos", 1), ("rotary_sin", 0)):
            some[name] = some[name][:rows].clone()
            some[name][30:] = angle_zero
        for name in ("k_cache", "v_cache"):
            some[name].nan_to_num_(0)
    assert torch.equal(flash_attn_with_kvcache(**arguments), flash_attn_with_kvcache(**longer))


def test_rotary_tables_are_too_short_for_a_known_length(device):
    case = CacheCase(seqlen_q=6, seqlen_k=30, seqlen_new=2, lengths="int", rotary=1.0, causal=True)
    arguments = case.arguments(device)
    arguments["cache_seqlens"] = 28
    for name in ("rotary_cos", "rotary_sin"):
        arguments[name] = arguments[name][:30].clone()
    with pytest.raises((ValueError, RuntimeError), match="must have at least 34 rows, found 30"):
        flash_attn_with_kvcache(**arguments)


def test_entries_may_share_a_row_of_the_cache(device):
    case = CacheCase(batch=3, seqlen_q=2, seqlen_k=40, lengths="full")
    arguments = case.arguments(device)
    arguments["cache_batch_idx"] = torch.tensor([1, 1, 0], dtype=torch.int32, device=device)
    check(case, arguments)


def test_entries_may_share_pages(device):
    case = CacheCase(batch=3, seqlen_q=2, seqlen_k=64, page=16, lengths="full")
    arguments = case.arguments(device)
    arguments["block_table"] = arguments["block_table"][:1].expand(3, -1)
    check(case, arguments)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("way", ["plain", "lse", "append", "varlen"])
def test_a_part_of_a_block_table_is_read_where_it_lies(way, rows, device):
    """Same bits as with a table of its own, and no other operation: nothing is copied."""
    q, k, v = (torch.randn(2, rows, heads, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2, 2))
    pages = torch.randn(2, 9, 16, 2, 64, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[0, 3, 5, 7], [1, 8, 4, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([64 - rows, 9], dtype=torch.int32, device=device)
    bounds = [length * torch.arange(3, dtype=torch.int32, device=device) for length in (rows, 20)]

    def attend(block_table, caches):
        if way == "varlen":
            return flash_attn_varlen_func(q.flatten(0, 1), *caches, *bounds, rows, 20, block_table=block_table)
        options = {"plain": {}, "lse": dict(return_softmax_lse=True), "append": dict(k=k, v=v)}[way]
        return flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=block_table, **options)

    results, calls = [], []
    wide = table.new_full((2, 9), -1)
    wide[:, 3:7] = table
    for block_table in (table, wide[:, 3:7], table.t().contiguous().t()):
        caches = pages.clone()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = attend(block_table, caches)
        results.append((out, caches))
        calls.append([event.name for event in profile.events() if event.name.startswith(("aten::", "flash_attn::"))])
    assert calls[1] == calls[0]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_unused_entries_of_the_block_table_are_not_followed(device):
    """Past the last page in use a table may hold anything."""
    case = CacheCase(seqlen_q=2, seqlen_k=64, page=16, seqlen_new=2, causal=True)
    arguments, dirty = case.arguments(device), case.arguments(device)
    for args in (arguments, dirty):
        args["cache_seqlens"] = torch.tensor([14, 17], dtype=torch.int32, device=device)
        args["k_cache"], args["v_cache"] = args["k_cache"].nan_to_num(0.5), args["v_cache"].nan_to_num(0.5)
    dirty["block_table"][0, 1:], dirty["block_table"][1, 2:] = -1, 2**30
    assert torch.equal(flash_attn_with_kvcache(**dirty), flash_attn_with_kvcache(**arguments))


NEGATIVE_LENGTHS = [
    CacheCase(4, seqlen_q=1, seqlen_k=64, seqlen_new=1, page=16, heads_k=2),
    CacheCase(4, seqlen_q=5, seqlen_k=64, seqlen_new=5, page=16, causal=True, rotary=1.0),
    CacheCase(4, seqlen_q=80, seqlen_k=300, seqlen_new=80, causal=True, rotary=0.5, leftpad=True),
    CacheCase(4, seqlen_q=3, seqlen_k=64, seqlen_new=7, batch_idx=True, rotary=1.0, lengths="int64"),
    CacheCase(4, seqlen_q=1, seqlen_k=5000, heads=8, heads_k=2, page=16, leftpad=True, num_splits=5),
    CacheCase(4, seqlen_q=2, seqlen_k=64, alibi="h", softcap=2.0, dtype="fp32"),
]


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", params(NEGATIVE_LENGTHS))
def test_entries_of_negative_length_are_empty(case, portable, device, monkeypatch):
    """Serving pads a batch so: whatever tables and queries hold there, nothing is read, nothing is appended."""
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", str(int(portable)))
    kept, empty = torch.tensor([0, 2], device=device), torch.tensor([1, 3], device=device)
    arguments = case.arguments(device)
    if not (case.page or case.batch_idx):
        arguments["cache_batch_idx"] = torch.arange(4, dtype=torch.int32, device=device)
    per_entry = ("q", "k", "v", "cache_seqlens", "cache_leftpad", "cache_batch_idx", "block_table")
    alone = {name: x[kept] if name in per_entry else x for name, x in arguments.items()}
    alone |= {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    for name, garbage in zip(per_entry, (float("nan"), 1.0, 1.0, -1, 2**20, -1, -1), strict=True):
        if name in arguments:
            arguments[name] = arguments[name].index_fill(0, empty, garbage)
    out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert (out[empty] == 0).all() and (lse[empty] == float("inf")).all()
    assert_same_however_split((out[kept], lse[kept]), flash_attn_with_kvcache(**alone, return_softmax_lse=True))
    for name in ("k_cache", "v_cache"):
        assert_cache_equal(arguments[name], alone[name])


def test_rows_of_a_cache_whose_entries_all_are_empty_stay(device):
    """Without an index, entry b has row b."""
    case = CacheCase(seqlen_q=6, seqlen_k=40, seqlen_new=6, causal=True, rotary=1.0)
    arguments, before = case.arguments(device), case.arguments(device)
    arguments["cache_seqlens"] = torch.tensor([-1, -5], dtype=torch.int32, device=device)
    assert not flash_attn_with_kvcache(**arguments).any()
    for name in ("k_cache", "v_cache"):
        assert_cache_equal(arguments[name], before[name])


@pytest.mark.parametrize("far", [2**30 - 2, 2**30 - 1, 2**30, 2**40])
def test_queries_are_rotated_alike_by_any_window(far, device):
    """Each by its own position, also where a window is wider than any sequence."""
    case = CacheCase(seqlen_q=3, seqlen_k=40, seqlen_new=3, rotary=1.0)
    found, expected_out = (
        flash_attn_with_kvcache(**case.arguments(device) | dict(window_size=window))
        for window in ((far, far), (40, 40))
    )
    assert torch.equal(found, expected_out)


@pytest.mark.parametrize("kind", ["cache slice", "head slice", "permuted", "unaligned"])
def test_strided_caches_are_updated_in_place(kind, device):
    """A cache may be a view; its surroundings stay as they are."""
    case = CacheCase(seqlen_q=2, seqlen_k=40, seqlen_new=2, causal=True)
    arguments, strided = case.arguments(device), case.arguments(device)
    surroundings = []
    for name in ("k_cache", "v_cache"):
        cache = strided[name]
        padded = cache.new_full([n + 3 for n in cache.shape], float("nan"))
        whole, view = {
            "cache slice": (padded, padded[:2, :40, :4, :64]),
            "head slice": (padded, padded[3:, 3:, 3:, :64]),
            "permuted": (
                permuted := padded.permute(2, 0, 1, 3).contiguous(),
                permuted.permute(1, 2, 0, 3)[:2, :40, :4, :64],
            ),
            "unaligned": (padded, padded.flatten()[3 : 3 + cache.numel()].view_as(cache)),
        }[kind]
        strided[name] = view.copy_(cache)
        surroundings.append((whole, view, cache))
    assert torch.equal(flash_attn_with_kvcache(**strided), flash_attn_with_kvcache(**arguments))
    for name, (whole, view, _) in zip(("k_cache", "v_cache"), surroundings, strict=True):
        assert_cache_equal(view, arguments[name])
        assert whole.isfinite().sum() == view.isfinite().sum()


def test_a_cache_that_is_only_read_may_be_expanded(device):
    """One row of keys for the whole batch, as stride 0."""
    case = CacheCase(batch=3, seqlen_q=2, seqlen_k=40, heads_k=2, lengths="full")
    arguments = case.arguments(device)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name][:1].expand(3, -1, -1, -1)
    check(case, arguments)


def test_no_gradient(device):
    arguments = CacheCase(seqlen_q=2, seqlen_k=40).arguments(device)
    arguments["q"].requires_grad_()
    assert not flash_attn_with_kvcache(**arguments).requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# A model that fills its cache token by token sees what it would see in one pass


DECODING = [
    CacheCase(heads_k=4),
    CacheCase(heads=8, heads_k=2, head_dim=128),
    CacheCase(heads_k=1, rotary=1.0),
    CacheCase(rotary=0.5, interleaved=False),
    CacheCase(alibi="h"),
    CacheCase(alibi="bh", heads=6, heads_k=3),
    CacheCase(window=(7, -1)),
    CacheCase(window=(7, -1), rotary=1.0, page=4, heads_k=2),
    CacheCase(softcap=2.0, page=16, seqlen_k=50),
]


@pytest.mark.parametrize("prefill", [1, 20])
@pytest.mark.parametrize("case", params(DECODING))
def test_prefill_and_decoding_equal_one_pass(case, prefill, device):
    case = case.but(causal=True, dtype="fp16", seqlen_q=30, seqlen_k=30, seqlen_new=30, lengths="int")
    arguments = case.arguments(device)
    exact, plain = (oracle_of_one_pass(arguments, dtype) for dtype in (torch.float64, torch.float16))
    q, k, v = (arguments.pop(name) for name in "qkv")
    outs = []
    for start, end in [(0, prefill), *((t, t + 1) for t in range(prefill, 30))]:
        arguments["cache_seqlens"] = start
        outs.append(flash_attn_with_kvcache(q[:, start:end], k=k[:, start:end], v=v[:, start:end], **arguments))
    assert_error_ratio(torch.cat(outs, dim=1), exact, plain)


def oracle_of_one_pass(arguments, dtype):
    return expected(dict(arguments, cache_seqlens=0), dtype)[0]


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile, export, meta tensors, opcheck

GRAPH_CASES = [
    CacheCase(seqlen_q=2, seqlen_k=40, seqlen_new=2, heads_k=2, rotary=0.5, causal=True),
    CacheCase(seqlen_q=2, seqlen_k=40, seqlen_new=2, page=16, alibi="h", leftpad=True),
    CacheCase(seqlen_q=1, seqlen_k=40, lengths="int", window=(9, 3)),
    CacheCase(seqlen_q=1, seqlen_k=40, batch_idx=True, softcap=2.0),
]


def split_arguments(arguments):
    """(tensors by name, other arguments by name)."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in arguments.items() if name not in tensors}


@pytest.mark.parametrize("case", params(GRAPH_CASES))
def test_compiles_to_one_graph(case, device):
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    arguments, expected_arguments = case.arguments(device), case.arguments(device)
    found = compiled(**arguments, return_softmax_lse=True)
    torch.testing.assert_close(found, flash_attn_with_kvcache(**expected_arguments, return_softmax_lse=True))
    for name in ("k_cache", "v_cache"):
        assert_cache_equal(arguments[name], expected_arguments[name])


def test_compiles_once_for_all_lengths(device):
    """Decoding advances an int; that must not compile anew for each token."""
    case = CacheCase(seqlen_q=1, seqlen_k=40, seqlen_new=1, lengths="int", causal=True)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=counter)
    for length in range(2, 12):
        compiled(**dict(case.arguments(device), cache_seqlens=length))
    assert counter.frame_count <= 2


class Decoding(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, tensors):
        return flash_attn_with_kvcache(**tensors, **self.options)


@pytest.mark.parametrize("case", params(GRAPH_CASES))
def test_exports(case, device):
    tensors, options = split_arguments(case.arguments(device))
    program = torch.export.export(Decoding(options), (tensors,))
    found = program.module()(split_arguments(case.arguments(device))[0])
    torch.testing.assert_close(found, flash_attn_with_kvcache(**case.arguments(device)))


@pytest.mark.parametrize("case", params(GRAPH_CASES))
def test_meta_tensors_tell_shapes_types_and_strides(case, device):
    expected_results = flash_attn_with_kvcache(**case.arguments(device), return_softmax_lse=True)
    tensors, options = split_arguments(case.arguments(device))
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    for found, real in zip(
        flash_attn_with_kvcache(**on_meta, **options, return_softmax_lse=True), expected_results, strict=True
    ):
        assert found.is_meta
        assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("case", params(GRAPH_CASES))
def test_opcheck(case, device):
    arguments = case.arguments(device)
    for name in ("k_cache", "v_cache"):  # opcheck compares results for equality, where NaN is not itself
        arguments[name].nan_to_num_(0.5)
    if isinstance(arguments["cache_seqlens"], int):
        arguments["cache_seqlen"] = arguments.pop("cache_seqlens")
    left, right = case.window
    scores = case.head_dim**-0.5, left, 0 if case.causal else right
    tensors = [arguments[name] for name in ("q", "k_cache", "v_cache")]
    others = {name: arguments[name] for name in CacheOptions._fields[3:] if name in arguments}
    options = dict(others, softcap=case.softcap, num_splits=case.num_splits, rotary_interleaved=case.interleaved)
    torch.library.opcheck(torch.ops.flash_attn.fwd_kvcache.default, (*tensors, *scores), options)


@pytest.mark.parametrize("page", [0, 16])
def test_appends_to_lazy_clones(page, device):
    """A copy on write gets memory of its own before it is read and written; what it was cloned from stays."""
    case = CacheCase(batch=2, seqlen_q=3, seqlen_k=64, seqlen_new=3, heads_k=2, page=page, causal=True)
    arguments = case.arguments(device)
    bases = [arguments[name].nan_to_num_(0.5) for name in ("k_cache", "v_cache")]
    before = [x.clone() for x in bases]
    lazy, usual = [torch._lazy_clone(x) for x in bases], [x.clone() for x in bases]
    found = flash_attn_with_kvcache(**arguments | dict(k_cache=lazy[0], v_cache=lazy[1]))
    expected = flash_attn_with_kvcache(**arguments | dict(k_cache=usual[0], v_cache=usual[1]))
    assert torch.equal(found, expected)
    for base, copy, one, other in zip(bases, before, lazy, usual, strict=True):
        assert torch.equal(base, copy) and torch.equal(one, other) and not torch.equal(one, base)


# ---------------------------------------------------------------------------------------------------------------------
# Large tensors, devices, graphs


@pytest.mark.cuda
@pytest.mark.parametrize("page", [0, 16])
def test_more_than_65535_entries(page, device, memory_guard):
    """Every entry has the same keys, so that one answer serves all."""
    batch = 70_000
    small = CacheCase(batch=1, seqlen_q=1, seqlen_k=16, heads=2, heads_k=1, head_dim=16, page=page, lengths="full")
    arguments = small.arguments(device)
    exact, plain = expected(arguments, torch.float64)[0], expected(arguments, torch.bfloat16)[0]
    arguments["q"] = arguments["q"].expand(batch, -1, -1, -1)
    if page:
        arguments["block_table"] = arguments["block_table"].expand(batch, -1).contiguous()
    else:
        arguments["cache_batch_idx"] = torch.zeros(batch, dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(**arguments)
    assert_error_ratio(out, exact.expand_as(out), plain.expand_as(out))


@pytest.mark.cuda
@pytest.mark.parametrize("num_splits", [1, 3])
def test_more_than_65535_heads(num_splits, device):
    case = CacheCase(
        batch=1, seqlen_q=1, seqlen_k=16, seqlen_new=1, heads=70_000, heads_k=70_000, head_dim=16, num_splits=num_splits
    )
    check(case, case.arguments(device))


@pytest.mark.slow
@pytest.mark.cuda
def test_rows_beyond_two_to_the_31_elements(device, memory_guard):
    """The last row of a dense cache, and the entry that uses it, lie where 32-bit offsets have wrapped."""
    case = CacheCase(batch=1, seqlen_q=2, seqlen_k=600, seqlen_new=2, heads=8, heads_k=8, head_dim=128, causal=True)
    rows = 2**31 // (600 * 8 * 128) + 2
    memory_guard(2 * 2 * rows * 600 * 8 * 128)
    arguments, far = case.arguments(device), case.arguments(device)
    for name in ("k_cache", "v_cache"):
        far[name] = torch.empty(rows, 600, 8, 128, dtype=torch.bfloat16, device=device)
        far[name][-1:] = arguments[name]
    far["cache_batch_idx"] = torch.tensor([rows - 1], dtype=torch.int32, device=device)
    assert torch.equal(flash_attn_with_kvcache(**far), flash_attn_with_kvcache(**arguments))
    for name in ("k_cache", "v_cache"):
        assert_cache_equal(far[name][-1:], arguments[name])


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("seqlen_q", [2, 40], ids=["decoding", "more rows"])
def test_pages_beyond_two_to_the_31_elements(seqlen_q, page, device, memory_guard):
    heads, head_dim = 8, 128
    num_pages = 2**31 // (page * heads * head_dim) + 5000
    memory_guard(2 * 2 * num_pages * page * heads * head_dim)
    case = CacheCase(
        seqlen_q=seqlen_q,
        seqlen_k=600,
        seqlen_new=2,
        heads=heads,
        heads_k=heads,
        head_dim=head_dim,
        page=page,
        causal=True,
    )
    arguments, far = case.arguments(device), case.arguments(device)
    moved = num_pages - 1 - far["block_table"]
    for name in ("k_cache", "v_cache"):
        cache = torch.empty(num_pages, page, heads, head_dim, dtype=torch.bfloat16, device=device)
        cache[moved.flatten().long()] = far[name][far["block_table"].flatten().long()]
        far[name] = cache
    far["block_table"] = moved
    assert torch.equal(flash_attn_with_kvcache(**far), flash_attn_with_kvcache(**arguments))
    where = arguments["block_table"].flatten().long()
    for name in ("k_cache", "v_cache"):
        assert_cache_equal(far[name][moved.flatten().long()], arguments[name][where])


@pytest.mark.multi_gpu
def test_runs_where_the_tensors_are():
    case = NAMED["all at once"]
    check(case, case.arguments(torch.device("cuda", 1)))
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_runs_on_the_current_stream(device):
    """The inputs are ready on the side stream only, after a long wait."""
    case = NAMED["all at once"]
    ready = case.arguments(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in ready.items()}
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            late[name].fill_(float("nan"))
        torch.cuda._sleep(200_000_000)
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            late[name].copy_(ready[name])
        check(case, late)


@pytest.mark.cuda
@pytest.mark.parametrize("num_splits", [0, 16])
def test_two_streams_at_once(num_splits, device):
    """What blocks tell each other about their splits of the keys does not reach another call."""
    cases = [
        CacheCase(batch=batch, seqlen_q=1, seqlen_k=9000, heads=8, heads_k=2, lengths="full", num_splits=num_splits)
        for batch in (2, 3)
    ]
    calls = [functools.partial(flash_attn_with_kvcache, **case.arguments(device)) for case in cases]
    alone, together = [call() for call in calls], [[], []]
    streams = [torch.cuda.Stream() for _ in calls]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        for call, stream, results in zip(calls, streams, together, strict=True):
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    for results, one in zip(together, alone, strict=True):
        assert all(torch.equal(result, one) for result in results)


@pytest.mark.cuda
@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("page", [0, 16])
def test_graph_replays_with_other_lengths(page, num_splits, device):
    """Captured once at one length, replayed at others: the schedule may not depend on the lengths."""
    case = CacheCase(seqlen_q=1, seqlen_k=2000, seqlen_new=1, heads_k=2, page=page, causal=True, num_splits=num_splits)
    static = case.arguments(device)
    for name in ("k_cache", "v_cache"):
        static[name].nan_to_num_(0.5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash_attn_with_kvcache(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_with_kvcache(**static)
    for lengths in ([0, 1], [1999, 5], [700, 1300]):
        static["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        exact, plain = expected(static, torch.float64)[0], expected(static, torch.bfloat16)[0]
        assert_error_ratio(captured, exact, plain)


def captured(call, count=1):
    """A graph of `count` equal calls, and their results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, [call() for _ in range(count)]


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [2, 3000], ids=["few tiles", "many tiles"])
def test_graphs_that_run_at_once(batch, device):
    """Each was captured from the same stream; they and the calls outside of graphs are replayed from several."""
    case = CacheCase(batch=batch, seqlen_q=1, seqlen_k=600, heads=8, heads_k=2, lengths="full", num_splits=4)
    call = functools.partial(flash_attn_with_kvcache, **case.arguments(device))
    alone, graphs = call(), [captured(call, 3) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        assert torch.equal(call(), alone)
    torch.cuda.synchronize()
    assert all(torch.equal(result, alone) for _, results in graphs for result in results)


@pytest.mark.cuda
def test_graphs_that_come_and_go(device):
    """What a destroyed graph had serves later ones, also where graphs have split off from it in between."""
    case = CacheCase(seqlen_q=1, seqlen_k=2000, heads=8, heads_k=2, lengths="full", num_splits=8)
    call = functools.partial(flash_attn_with_kvcache, **case.arguments(device))
    alone = call()
    kept, kept_results = captured(call)
    torch.cuda.synchronize()
    lost = []
    for _ in range(5):
        before = torch.cuda.mem_get_info()[0]
        for _ in range(80):
            graph, results = captured(call)
            graph.replay()
            kept.replay()
            torch.cuda.synchronize()
            assert torch.equal(results[0], alone) and torch.equal(kept_results[0], alone)
            del graph, results
        lost.append(before - torch.cuda.mem_get_info()[0])
    assert min(lost) < 2**25, lost  # other processes take memory of the device, too, but not each time


@pytest.mark.cuda
def test_no_synchronisation(device):
    case = CacheCase(seqlen_q=1, seqlen_k=2000, seqlen_new=1, heads_k=2, page=16, causal=True, rotary=1.0)
    arguments = case.arguments(device)
    decode = functools.partial(flash_attn_with_kvcache, **arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_warps_wait_for_those_with_other_channels(device):
    """Beyond head dim 256, two warps add up their products; then they write where these were."""
    case = CacheCase(batch=1, seqlen_q=1, seqlen_k=200, lengths="full", heads=2, heads_k=1, head_dim=512, num_splits=2)
    arguments = case.arguments(device)
    first = flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(flash_attn_with_kvcache(**arguments), first) for _ in range(100))


@pytest.mark.cuda
@pytest.mark.parametrize("num_splits", [0, 1, 16])
def test_decoding_is_equal_bit_by_bit(num_splits, device):
    case = CacheCase(batch=4, seqlen_q=1, seqlen_k=5000, heads=8, heads_k=2, num_splits=num_splits, page=16)
    arguments = case.arguments(device)
    first = flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(flash_attn_with_kvcache(**arguments), first) for _ in range(50))


@pytest.mark.parametrize(
    "dim, rows, keys, causal",
    [
        (128, 16400, (300, 0), True),
        (128, 16514, (90,), False),
        (256, 16400, (90, 0), False),
        (256, 16514, (250,), True),
    ],
)
def test_keys_that_a_pair_of_thread_blocks_shares(dim, rows, keys, causal, device):
    """On Hopper, for many rows and where the cache has room for many keys, of which few are used.

    Rows may end within either half of a pair's tile. Most of a causal call see no keys.
    """
    if not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("needs kernels, of a GPU or emulated")
    entries, capacity, heads, heads_k = len(keys), 16384, 1, 1
    q = torch.randn(entries, rows, heads, dim, dtype=torch.bfloat16, device=device)
    k, v = torch.full((2, entries, capacity, heads_k, dim), float("nan"), dtype=torch.bfloat16, device=device)
    for entry, used in enumerate(keys):
        for x in (k, v):
            x[entry, :used] = torch.randn(used, heads_k, dim, device=device)
    lengths = torch.tensor(keys, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal, return_softmax_lse=True)
    for entry, used in enumerate(keys):
        own = slice(entry, entry + 1)
        inputs = q[own], k[own, :used], v[own, :used]
        exact, exact_lse = oracle.attention(*(x.double() for x in inputs), causal=causal)
        plain, plain_lse = oracle.attention(*(x.float() for x in inputs), causal=causal)
        assert_error_ratio(out[own], exact, plain.to(out.dtype), name="out")
        assert_error_ratio(lse[own], exact_lse, plain_lse, name="lse")
