"""Choices of attention that are pure host code: tiles fit every GPU, plans cover their problem, instances exist."""

import csv
import dataclasses
import itertools
import math
import pathlib
import random
import re
import runpy
import typing

import native
import pytest
import torch

from flash_attn._ops import flash_attn

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")

HEAD_DIMS = (64, 96, 128, 192, 256)
ALL_HEAD_DIMS = (*HEAD_DIMS, 512)  # of all kernels but those of S_dmask
HOPPER_HEAD_DIMS = (*((dim, dim) for dim in ALL_HEAD_DIMS), (192, 128))  # of keys and of values
SM80, DECODE, SM90, SERVING, INVARIANT = KERNELS = range(5)  # the alternatives of FwdPlan
CODED_DECODE, CODED_SERVING = 5, 6  # those that read codes in 8 bits
PLAIN, RANGED, BIASED, DROPPED, ALL = FEATURES = range(5)
# Of a block, by compute capability.
KILOBYTES = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "10.3": 227, "12.0": 99, "12.1": 99}
SHARED_BYTES = {capability: 1024 * most for capability, most in KILOBYTES.items()}
OF_HOPPER = SHARED_BYTES["9.0"]
STATIC_SHARED_BYTES = 4096  # that decoding leaves for what it declares in the kernel


@pytest.fixture(scope="module")
def host():
    return native.library(native.HERE / "host_probe.cpp", native.HOST)


@pytest.fixture(scope="module")
def instances():
    return native.library(HERE / "instance_probe.cu", native.CUDA_ON_THE_HOST)


def numbers(library, count, name, *args):
    """The `count` numbers that a function writes to its last argument."""
    found = torch.zeros(count, dtype=torch.int64)
    library.run(name, *args, found)
    return found.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Instances


def test_every_head_dim_has_an_instance(host):
    for head_dim in range(1, 513):
        expected = min(built for built in ALL_HEAD_DIMS if built >= head_dim)
        assert host.call("find_instance_head_dim", head_dim) == expected
    assert host.call("find_instance_head_dim", 513) == 0


def test_head_dims_of_keys_and_values(host):
    """The channels of both have room, and no instance for sm_90 would have fewer products."""
    for dims in itertools.product((1, 64, 65, 128, 129, 136, 192, 193, 256, 257, 512), repeat=2):
        found = numbers(host, 4, "find_head_dims", *dims)
        sm80, sm90 = tuple(found[:2]), tuple(found[2:])
        room = [built for built in HOPPER_HEAD_DIMS if built[0] >= dims[0] and built[1] >= dims[1]]
        assert sm80 == min(built for built in room if built[0] == built[1])
        assert sm90 == min(room, key=sum)


@pytest.mark.parametrize("dtype", [1, 2], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim, head_dim_v", HOPPER_HEAD_DIMS)
def test_an_instance_that_is_left_out_raises(head_dim, head_dim_v, dtype):
    dispatch = native.library(HERE / "dispatch_probe.cu", native.CUDA_ON_THE_HOST)
    calls = [*(("run_fwd_instance", kernel) for kernel in KERNELS), *(("run_bwd_instance", on) for on in (False, True))]
    for name, *args in calls:
        with pytest.raises(RuntimeError, match="leaves out the instance"):
            dispatch.run(name, head_dim, head_dim_v, dtype, *args)


def test_widths_of_s_dmask(host):
    """As callers know them, and with an instance for each."""
    table = runpy.run_path(native.CSRC / "instances.py")
    assert (table["HEAD_DIMS"], table["ALL_HEAD_DIMS"]) == (HEAD_DIMS, ALL_HEAD_DIMS)
    for head_dim in range(1, 257):
        width, instance = host.call("find_dmask_width", head_dim), host.call("find_instance_head_dim", head_dim)
        assert width == flash_attn.block_size_n(head_dim, True)
        assert (instance, width) in table["DMASK_WIDTHS"]


@pytest.mark.parametrize(
    "value, on",
    [
        (None, False),
        ("", False),
        ("0", False),
        ("false", False),
        ("False", False),
        ("1", True),
        ("true", True),
    ],
)
def test_a_switch_in_the_environment(host, monkeypatch, value, on):
    """As FLASH_ATTN_PORTABLE is read."""
    monkeypatch.delenv("FLASH_ATTN_TEST_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("FLASH_ATTN_TEST_SWITCH", value)
    name = torch.frombuffer(bytearray(b"FLASH_ATTN_TEST_SWITCH\0"), dtype=torch.uint8)
    assert host.call("find_switch", name) == on


# ---------------------------------------------------------------------------------------------------------------------
# Features


@dataclasses.dataclass(frozen=True)
class Biased:
    """As BiasedProblem in host_probe.cpp, field by field: two heads of 96 rows and keys, and a bias for each score."""

    batch: int = 4
    head_dim: int = 128
    head_dim_v: int = 128
    packed_q: bool = False
    bias: int = 4096
    same_dtype: bool = True
    is_bool: bool = False
    batch1: int = 2 * 96 * 96
    batch2: int = 0
    batch2_size: int = 1
    heads: int = 96 * 96
    seqlen: int = 96
    softcap: int = 0
    alibi: bool = False
    dropout: bool = False
    ranges: bool = False
    row_max: bool = False
    aligned: bool = True
    longest_q: int = 96


def features_of(host, problem):
    """On sm_90 and on every GPU, how many entries share a bias, and of the backward."""
    return find_features(host, problem)[:4]


def find_features(host, problem):
    fields = torch.tensor([int(field) for field in dataclasses.astuple(problem)])
    return tuple(numbers(host, 6, "find_features", fields))


ALL_SHARE = dict(batch1=0, batch2=0, batch2_size=4)


@pytest.mark.parametrize(
    "sharing, changes",
    [
        *((1, dict(head_dim=dim, head_dim_v=dim)) for dim in (40, *HEAD_DIMS)),
        *((1, dict([change])) for change in (("head_dim_v", 96), ("heads", 0), ("seqlen", 0))),
        (1, dict(seqlen=104, heads=1 << 20)),
        (4, ALL_SHARE),
        (4, dict(ALL_SHARE, heads=0)),
        (1, dict(ALL_SHARE, packed_q=True)),
        (1, dict(batch1=4 * 9216, batch2=2 * 9216, batch2_size=2)),
        (1, dict(batch1=0, batch2=9216, batch2_size=4)),
    ],
)
def test_problems_whose_bias_is_copied_in_tiles(host, sharing, changes):
    problem = Biased(**changes)
    backward = BIASED if problem.head_dim <= 128 else ALL
    assert features_of(host, problem) == (BIASED, ALL, sharing, backward)


@pytest.mark.parametrize(
    "changes",
    [
        dict(same_dtype=False),
        dict(is_bool=True),
        dict(bias=4098),
        dict(seqlen=98),
        dict(heads=9220),
        dict(batch1=2, batch2=0),
        dict(batch1=0, batch2=9216, batch2_size=2),
        dict(batch1=9216, batch2=0, batch2_size=2),
        dict(head_dim=192),
        dict(head_dim=264, head_dim_v=264),
        dict(softcap=1),
        dict(alibi=True),
        dict(dropout=True),
        dict(ranges=True),
        dict(aligned=False),
    ],
)
def test_problems_whose_bias_is_loaded(host, changes):
    """Elements of other sizes, rows that do not start with a chunk, entries in two dimensions; other instances."""
    assert features_of(host, Biased(**changes)) == (ALL, ALL, 1, ALL)


@pytest.mark.parametrize(
    "changes, forward, backward",
    [
        (dict(is_bool=True, same_dtype=False), True, True),
        (dict(bias=4098), True, True),
        (dict(seqlen=98), True, True),
        (dict(), True, True),
        (dict(same_dtype=False), False, False),
        (dict(head_dim=192, head_dim_v=192), True, False),
        (dict(row_max=True), False, True),
        (dict(longest_q=4), False, True),
        (dict(longest_q=30), False, True),
        (dict(head_dim=192), False, False),
        (dict(head_dim=264, head_dim_v=264), False, False),
        (dict(softcap=1), False, False),
        (dict(alibi=True), False, False),
        (dict(dropout=True), False, False),
        (dict(ranges=True), False, False),
        (dict(aligned=False), False, False),
        (dict(batch1=9216, batch2=0, batch2_size=2), False, False),
    ],
)
def test_problems_whose_bias_is_copied_first(host, changes, forward, backward):
    """Only where kernels then read tiles, in the forward those for many rows."""
    assert find_features(host, Biased(**changes))[4:] == (forward, backward)


def test_largest_scores_beside_a_bias(host):
    """Of which the backward knows nothing."""
    assert features_of(host, Biased(row_max=True)) == (ALL, ALL, 1, BIASED)


def test_problems_without_a_bias(host):
    without = Biased(bias=0)
    for changes, here, everywhere in (
        ({}, PLAIN, PLAIN),
        (dict(ranges=True), RANGED, ALL),
        (dict(softcap=1), ALL, ALL),
        (dict(dropout=True), DROPPED, ALL),
        (dict(dropout=True, ranges=True), ALL, ALL),
        (dict(dropout=True, softcap=1), ALL, ALL),
        (dict(dropout=True, alibi=True), ALL, ALL),
        (dict(dropout=True, aligned=False), ALL, ALL),
        (dict(dropout=True, head_dim=192), ALL, ALL),
        (dict(dropout=True, head_dim=136, head_dim_v=136), ALL, ALL),
        (dict(dropout=True, head_dim_v=40), DROPPED, ALL),
    ):
        found = features_of(host, dataclasses.replace(without, **changes))
        assert found == (here, everywhere, 1, here)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def parts(host, head_dim):
    """How many parts divide the channels: warps that share rows, or blocks of a cluster."""
    return host.call("find_channel_slices", head_dim)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_tile_is_whole_fragments(host, head_dim, plain):
    rows, keys, warps = numbers(host, 3, "find_fwd_tile", head_dim, plain)
    assert rows % (16 * warps // parts(host, head_dim)) == 0
    assert keys % (16 if plain else 32) == 0  # random bits come for 32 keys at a time


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_accumulators_fit_the_registers(host, head_dim, plain):
    """Scores and output of a warp, beside the operands."""
    rows, keys, warps = numbers(host, 3, "find_fwd_tile", head_dim, plain)
    shared_by = parts(host, head_dim)
    assert rows * shared_by // warps * (keys + head_dim // shared_by) / 32 <= 192


@pytest.mark.parametrize(
    "head_dim, kernel, options",
    [
        *itertools.product(ALL_HEAD_DIMS, ["fwd"], [(PLAIN,), (ALL,)]),
        *itertools.product(HEAD_DIMS, ["dmask"], [()]),
    ],
)
def test_blocks_fit_every_gpu(instances, head_dim, kernel, options):
    shared_bytes, threads = numbers(instances, 2, f"find_{kernel}_sizes", head_dim, *options)
    assert shared_bytes <= min(SHARED_BYTES.values())
    assert threads <= 1024


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_backward_tile(host, head_dim, compact):
    """Two teams of warps: one warp or several with equal shares of the keys' work, on whole fragments."""
    rows, keys, warp_keys, stages, team_warps = numbers(host, 5, "find_bwd_tile", head_dim, compact)
    warps = team_warps * warp_keys // keys
    assert warps in (1, 2)
    assert warps * keys == team_warps * warp_keys
    assert rows % (16 * warps) == 0
    assert head_dim % (16 * warps) == 0
    assert warp_keys in (16, 32)  # for which random bits are transposed
    assert stages in (1, 2)
    accumulators = warp_keys * (rows / warps + head_dim / warps) / 32
    assert accumulators <= 192


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_backward_blocks_fit(host, capability, head_dim, plain):
    """With the larger tile wherever a block has room for it, else with the compact one."""
    instances = native.library(HERE / "bwd_probe.cu", native.CUDA_ON_THE_HOST)
    chosen, compact = numbers(instances, 2, "find_bwd_choice", head_dim, plain, SHARED_BYTES[capability])
    assert chosen <= SHARED_BYTES[capability]
    large = numbers(instances, 2, "find_bwd_sizes", head_dim, plain, False)[0]
    assert compact == (large > SHARED_BYTES[capability])
    sizes, threads = numbers(instances, 2, "find_bwd_sizes", head_dim, plain, compact)
    assert sizes == chosen
    assert threads == 64 * numbers(host, 5, "find_bwd_tile", head_dim, compact)[-1]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim, head_dim_v", HOPPER_HEAD_DIMS)
def test_hopper_blocks_fit(host, instances, head_dim, head_dim_v, features, wide):
    """Shared memory, and the registers of a thread: scores, packed probabilities and output, and 24 for the rest.

    A tile of a bias is packed, too, and its rows lie as those of 64 columns do, which are read without conflicts.
    """
    warpgroups, keys, *_, has_wide = numbers(host, 6, "find_fwd_sm90_tile", head_dim, head_dim_v, features, wide)
    if wide and not has_wide:
        pytest.skip("there is no wide tile")
    if features == BIASED and (head_dim > 256 or head_dim_v != head_dim):
        pytest.skip("there is no such instance")
    if features == DROPPED and head_dim > 128:
        pytest.skip("there is no such instance")
    shared_bytes, threads = numbers(instances, 2, "find_fwd_sm90_sizes", head_dim, head_dim_v, features, wide)
    assert shared_bytes <= OF_HOPPER
    assert threads == 128 * (warpgroups + 1 + (features == DROPPED))
    assert keys % {BIASED: 64, DROPPED: 64, ALL: 32}.get(features, 16) == 0
    of_bias = keys // 4 if features == BIASED else 0
    assert (
        keys // 2 + keys // 4 + of_bias + head_dim_v // parts(host, head_dim) // 2 + 24
        <= {2: 208 if features == DROPPED else 232, 3: 160}[warpgroups]
    )


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("features", [PLAIN, ALL])
@pytest.mark.parametrize("head_dim, head_dim_v", [dims for dims in HOPPER_HEAD_DIMS if dims[0] <= 256])
def test_serving_blocks_fit(host, instances, head_dim, head_dim_v, features, few_rows):
    """As those for dense tensors; a warpgroup alone has all registers, and warps gather whole groups of rows."""
    warpgroups, keys, stages, _ = numbers(host, 4, "find_serving_tile", head_dim, head_dim_v, features, 2 - few_rows)
    shared_bytes, threads = numbers(instances, 2, "find_serving_sizes", head_dim, head_dim_v, features, few_rows)
    assert shared_bytes <= OF_HOPPER
    assert warpgroups == 2 - few_rows and threads == 128 * (warpgroups + 1)
    assert stages >= 2
    assert keys % 32 == 0  # a warp gathers 32 rows at a time
    assert keys // 2 + keys // 4 + head_dim_v // 2 + 24 <= {1: 255, 2: 208}[warpgroups]


@pytest.mark.parametrize("features", [PLAIN, ALL])
@pytest.mark.parametrize("head_dim, head_dim_v", [dims for dims in HOPPER_HEAD_DIMS if dims[0] <= 256])
def test_invariant_blocks_fit(host, instances, head_dim, head_dim_v, features):
    """And compute what those for serving do: with as many keys in an n_block, whatever the warpgroups."""
    warpgroups, keys, *_ = numbers(host, 4, "find_invariant_tile", head_dim, head_dim_v, features)
    shared_bytes, threads = numbers(instances, 2, "find_invariant_sizes", head_dim, head_dim_v, features)
    assert shared_bytes <= OF_HOPPER
    assert threads == 128 * (warpgroups + 1)
    for warpgroups_there in (1, 2):
        assert numbers(host, 4, "find_serving_tile", head_dim, head_dim_v, features, warpgroups_there)[1] == keys
    assert keys // 2 + keys // 4 + head_dim_v // 2 + 24 <= {2: 232, 3: 160}[warpgroups]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_backward_blocks_fit_sm90(head_dim, features):
    instances = native.library(HERE / "bwd_probe.cu", native.CUDA_ON_THE_HOST)
    shared_bytes, threads = numbers(instances, 2, "find_bwd_sm90_sizes", head_dim, features)
    assert shared_bytes <= OF_HOPPER
    assert threads == (4 if features == DROPPED else 3) * 128


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_decoding_blocks_fit(host, instances, head_dim, shared_bytes):
    estimate, warps = numbers(host, 2, "find_decode_sizes", head_dim, shared_bytes)
    warp_bytes, _ = numbers(instances, 2, "find_decode_sizes", head_dim)
    assert warp_bytes == estimate
    assert warps in (1, 2, 4, 8) and warps % parts(host, head_dim) == 0
    assert warps * warp_bytes + STATIC_SHARED_BYTES <= shared_bytes
    assert warps == 8 or 2 * warps * warp_bytes + STATIC_SHARED_BYTES > shared_bytes


@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_decoding_blocks_that_append_fit(host, capability, head_dim):
    """The rings of their warps beside the new rows; where there is no room, a kernel of its own appends."""
    shared_bytes = SHARED_BYTES[capability]
    ring, warps = numbers(host, 2, "find_decode_sizes", head_dim, shared_bytes)
    fresh = host.call("find_decode_fresh_bytes", head_dim)
    appends = host.call("find_appends", head_dim, 1, 1, 1000, 0, 0, 0, shared_bytes)
    assert appends == (warps * ring + fresh <= shared_bytes)


@pytest.mark.parametrize("shared_bytes", [99 * 1024, 227 * 1024])
def test_where_decoding_appends(host, shared_bytes):
    """Every new key is seen and written by one block, and nobody else reads it."""

    def appends(head_dim=128, queries=1, new=1, window_left=1000, indexed=False, padded=False, paged=False):
        flags = indexed, padded, paged
        return bool(host.call("find_appends", head_dim, queries, new, window_left, *flags, shared_bytes))

    assert appends() and appends(64) and appends(queries=5, new=8) and appends(queries=16, new=0)
    assert not appends(new=9) and not appends(queries=17)
    assert not appends(indexed=True) and not appends(padded=True) and not appends(paged=True)
    assert appends(new=4, window_left=3) and not appends(new=4, window_left=2)
    assert appends(queries=3, new=8, window_left=5) and not appends(queries=3, new=8, window_left=4)


# ---------------------------------------------------------------------------------------------------------------------
# Plans


def test_splits_keep_the_gpu_busy(host):
    """At least 85 % as well as any number would; not split where tiles alone nearly fill it."""

    def busy(tiles, splits, places):
        waves = tiles * splits / places
        return waves / math.ceil(waves)

    for tiles, key_blocks, places in itertools.product((1, 2, 7, 32, 100, 131, 264), (0, 1, 3, 64, 4096), (108, 264)):
        splits = host.call("find_splits", tiles, key_blocks, places)
        most = min(128, places, max(key_blocks, 1))
        assert 1 <= splits <= most
        if tiles >= 0.8 * places:
            assert splits == 1
        else:
            assert busy(tiles, splits, places) >= 0.85 * max(busy(tiles, i, places) for i in range(1, most + 1))


@dataclasses.dataclass(frozen=True)
class Problem:
    """As FwdProblem in host_probe.cpp, field by field."""

    batch: int = 2
    heads: int = 8
    heads_k: int = 2
    head_dim: int = 128
    seqlen_q: int = 1000
    packed_q: bool = False
    ragged_k: bool = False
    dropout: bool = False
    plain: bool = True
    longest_q: int = 1000
    longest_k: int = 1000
    num_splits: int = 0
    multiprocessors: int = 132
    shared_bytes: int = 227 * 1024
    causal: bool = False
    has_sm90: bool = False
    head_dim_v: int = 0  # 0: head_dim
    paged: bool = False
    ranges: int = 0  # 2: those of each head
    bias: bool = False
    out_lo: bool = False
    row_max: bool = False
    page_size: int = 16
    leftpad: bool = False
    invariance: int = 0
    coded: bool = False
    window_left: int = -1

    @property
    def group(self):
        return self.heads // self.heads_k


class Plan(typing.NamedTuple):
    """As find_fwd_plan in host_probe.cpp answers, field by field."""

    kernel: int
    scratch_out: int
    scratch_softmax: int
    scratch_totals: int
    scratch_records: int
    scratch_counters: int
    packed_heads: int
    slots: int
    tiles: int
    num_splits: int
    least_blocks: int
    decode_warps: int
    blocks: int
    section_heads: int
    section_tiles: int
    wide: bool
    paired: bool
    warpgroups: int
    even: bool
    piece_slots: int
    box_rows: int
    piece_blocks: int


def plan_of(host, problem):
    fields = torch.tensor([int(field) for field in dataclasses.astuple(problem)])
    return Plan(*numbers(host, len(Plan._fields), "find_fwd_plan", fields))


def tile_rows(host, problem, plan):
    return 16 if plan.kernel == DECODE else numbers(host, 3, "find_fwd_tile", problem.head_dim, problem.plain)[0]


def problems(count):
    """Random ones, among them those of decoding."""
    draw = random.Random(0)
    for _ in range(count):
        dropout, packed = draw.random() < 0.2, draw.random() < 0.5
        heads_k, seqlen_q = draw.choice((1, 2, 8)), draw.choice((1, 2, 17, 128, 1000, 100_000))
        yield Problem(
            batch=draw.choice((1, 2, 5, 64)),
            heads=heads_k * draw.choice((1, 3, 4, 16)),
            heads_k=heads_k,
            head_dim=draw.choice(ALL_HEAD_DIMS),
            seqlen_q=seqlen_q,
            packed_q=packed,
            ragged_k=draw.random() < 0.5,
            dropout=dropout,
            plain=not dropout and draw.random() < 0.5,
            longest_q=draw.randint(1, seqlen_q) if packed else seqlen_q,
            longest_k=draw.choice((0, 1, 100, 5000, 1_000_000)),
            num_splits=draw.choice((0, 0, 1, 3, 128)),
            multiprocessors=draw.choice((46, 108, 132)),
            shared_bytes=draw.choice(list(SHARED_BYTES.values())),
        )


def slots_needed(problem, rows, group, lengths):
    """Slots up to the last one that holds a row, of entries that start at floor(start / rows) + entry.

    No entry may reach into the slots of the next one. Tokens after the last entry count as one more.
    """
    end = start = 0
    for entry, length in enumerate([*lengths, problem.seqlen_q - sum(lengths)]):
        first = start * group // rows + entry
        assert first >= end
        end = first + -(-length * group // rows)
        start += length
    return end


def test_slots_cover_all_rows(host):
    draw = random.Random(1)
    for problem in problems(300):
        plan = plan_of(host, problem)
        rows = tile_rows(host, problem, plan)
        assert plan.packed_heads in ((1,) if problem.dropout else (1, problem.group))
        entries = 1 if problem.packed_q else problem.batch
        assert plan.tiles == plan.slots * entries * problem.heads // plan.packed_heads
        if not problem.packed_q:
            assert plan.slots == -(-problem.seqlen_q * plan.packed_heads // rows)
            continue
        for total in (problem.seqlen_q, draw.randint(0, problem.seqlen_q)):
            cuts = sorted(draw.choices(range(total + 1), k=problem.batch - 1))
            lengths = [b - a for a, b in itertools.pairwise([0, *cuts, total])]
            assert slots_needed(problem, rows, plan.packed_heads, lengths) <= plan.slots


def test_decoding_packs_all_rows_into_one_tile(host):
    for problem in problems(300):
        plan = plan_of(host, problem)
        fits = problem.longest_q * problem.group <= 16 and not problem.dropout
        assert (plan.kernel == DECODE) == fits
        if fits and problem.group > 1:
            assert plan.packed_heads == problem.group


def test_splits_and_their_scratch(host):
    for problem in problems(300):
        plan = plan_of(host, problem)
        assert 1 <= plan.num_splits <= 128
        assert plan.least_blocks >= 1
        assert problem.num_splits == 0 or plan.num_splits <= problem.num_splits
        rows = tile_rows(host, problem, plan)  # decoding has scratch for those that exist
        if plan.kernel == DECODE and not problem.packed_q:
            rows = min(rows, problem.seqlen_q * plan.packed_heads)
        partial_rows = plan.tiles * plan.num_splits * rows * (plan.num_splits > 1)
        assert plan.scratch_out == partial_rows * problem.head_dim
        # A maximum and a sum of each row; in tiles of several warps, four lanes of each part store the same.
        lanes = 1 if plan.kernel == DECODE else 4 * parts(host, problem.head_dim)
        assert plan.scratch_softmax == partial_rows * 2 * lanes
        assert plan.scratch_counters == plan.tiles * (plan.num_splits > 1)


def hopper_problems(count):
    draw = random.Random(3)
    for problem in problems(count):
        yield dataclasses.replace(problem, causal=draw.random() < 0.5, has_sm90=True)


def test_hopper_plan(host):
    """Tiles of one head that cover all rows, in sections of whole heads; all keys at once; one counter.

    Where two blocks have a tile together, each tile has blocks of its own, and nothing is counted.
    """
    taken = 0
    for problem in hopper_problems(600):
        plan = plan_of(host, problem)
        if plan.kernel != SM90:
            continue
        taken += 1
        dims = problem.head_dim, problem.head_dim
        warpgroups, *_, has_wide = numbers(
            host, 6, "find_fwd_sm90_tile", *dims, PLAIN if problem.plain else ALL, plan.wide
        )
        entries = 1 if problem.packed_q else problem.batch
        assert plan.packed_heads == 1
        assert has_wide or not plan.wide
        assert plan.wide or not plan.paired
        sharers = 1 + plan.paired
        assert plan.slots >= -(-problem.seqlen_q // (64 * warpgroups * sharers))
        assert plan.tiles == plan.slots * entries * problem.heads
        assert entries * problem.heads % plan.section_heads == 0
        assert plan.section_heads <= problem.multiprocessors // 2
        assert plan.section_tiles == plan.section_heads * plan.slots
        shared_by = parts(host, problem.head_dim)
        clusters = min(plan.tiles, problem.multiprocessors // sharers)
        assert plan.blocks == (2 * plan.tiles if shared_by == 2 else sharers * clusters)
        assert (plan.scratch_out, plan.scratch_softmax, plan.scratch_counters) == (0, 0, int(shared_by == 1))
    assert taken > 30


@pytest.mark.parametrize(
    "rows, changes, wide, paired",
    [
        (8191, {}, False, False),
        (8192, {}, True, False),
        (16383, {}, True, False),
        (16384, {}, True, True),
        (16384, dict(causal=True), True, True),
        (16384, dict(packed_q=True), True, False),
        (16384, dict(multiprocessors=1), True, False),
        (16384, dict(longest_q=128), True, False),
        (16384, dict(causal=True, window_left=1023), False, False),
        (1 << 20, dict(causal=True, window_left=8190), False, False),
        (1 << 20, dict(causal=True, window_left=8191), True, False),
        (1 << 20, dict(causal=True, window_left=16383), True, True),
        (16383, dict(head_dim=256), True, False),
        (16384, dict(head_dim=256, causal=True), True, True),
        (16384, dict(head_dim=192), False, False),
        (16384, dict(head_dim=64), True, False),
        # 256 tiles of 128 rows or 176 of 192 are two waves; 320 are three, and 220 two.
        (4096, dict(batch=1, heads_k=8, head_dim=64, longest_k=77), False, False),
        (4096, dict(batch=1, heads=10, heads_k=10, head_dim=64, longest_k=77), True, False),
    ],
)
def test_long_rows(host, rows, changes, wide, paired):
    """Wide tiles, and pairs of thread blocks that share them, by how many keys a row sees, and by waves."""
    long = Problem(heads_k=8, seqlen_q=rows, longest_q=rows, longest_k=rows, has_sm90=True)
    plan = plan_of(host, dataclasses.replace(long, **changes))
    assert (plan.kernel, plan.wide, plan.paired) == (SM90, wide, paired)


MANY = Problem(batch=8, heads=32, heads_k=32, seqlen_q=2048, longest_q=2048, longest_k=2049, has_sm90=True)
FEW = Problem(batch=8, heads=32, heads_k=8, seqlen_q=20, longest_q=20, longest_k=4096, has_sm90=True)


def changed(problem, *, rows=None, **changes):
    changes |= {} if rows is None else dict(seqlen_q=rows, longest_q=rows)
    return dataclasses.replace(problem, **changes)


@pytest.mark.parametrize(
    "changes, kernel",
    [
        (dict(), SM90),
        (dict(has_sm90=False), SM80),
        (dict(rows=4), DECODE),
        (dict(rows=31), SERVING),  # few rows
        (dict(rows=32), SM90),
        (dict(rows=31, longest_k=511), SM80),
        (dict(rows=128, heads_k=8, longest_k=511), SM90),
        (dict(rows=64, heads_k=8), SERVING),  # packed heads need fewer tiles
        (dict(rows=64, heads_k=8, longest_k=511), SM90),
        (dict(rows=320, heads_k=8, longest_k=1280), SERVING),
        (dict(rows=320, heads_k=8, longest_k=1279), SM90),
        (dict(rows=256, heads_k=8), SM90),  # they need as many
        (dict(num_splits=2), SERVING),
        (dict(num_splits=1), SM90),
        (dict(longest_k=0), SM80),
        (dict(batch=0, packed_q=True), SERVING),  # only rows that belong to no entry
        (dict(batch=1, heads=2, heads_k=2, rows=128), SERVING),  # few tiles of many keys
        (dict(batch=1, heads=2, heads_k=2, rows=128, longest_k=2048), SM90),
        (dict(head_dim=512), SM90),
        (dict(out_lo=True), SM90),
        (dict(row_max=True), SM90),
        (dict(ranges=2), SM90),
    ],
    ids=str,
)
def test_kernels_for_dense_tensors_on_hopper(host, changes, kernel):
    assert plan_of(host, changed(MANY, **changes)).kernel == kernel


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "changes, kernel, paged_kernel",
    [
        (dict(), SERVING, SERVING),
        (dict(packed_q=True, ragged_k=True), SERVING, SERVING),
        (dict(longest_k=100), SM80, SERVING),
        (dict(longest_k=0), SM80, SM80),
        (dict(rows=2000), SM90, SERVING),
        (dict(rows=4), DECODE, DECODE),
        (dict(rows=5), SERVING, SERVING),
        (dict(rows=1, heads=128, heads_k=1), SERVING, SERVING),
        (dict(rows=1, heads=16, heads_k=1), DECODE, DECODE),
        (dict(head_dim=100, head_dim_v=72), SERVING, SERVING),
        (dict(head_dim=64), SERVING, SERVING),
        (dict(head_dim=96), SERVING, SERVING),
        (dict(head_dim=256), SERVING, SERVING),
        (dict(head_dim=192, head_dim_v=128), SERVING, SERVING),
        (dict(head_dim=264), SM80, SM80),
        (dict(head_dim=512), SM80, SM80),
        (dict(head_dim=64, head_dim_v=512), SM80, SM80),
        (dict(has_sm90=False), SM80, SM80),
        (dict(plain=False), SM80, SM80),  # rows are not aligned
        (dict(dropout=True), SM80, SM80),
        (dict(bias=True), SM80, SM80),
        (dict(out_lo=True), SM80, SM80),
        (dict(row_max=True), SM80, SM80),
        (dict(ranges=1), SERVING, SERVING),
        (dict(ranges=2), SERVING, SERVING),
        (dict(num_splits=3), SERVING, SERVING),
    ],
    ids=str,
)
def test_kernels_for_few_rows_and_for_pages_on_hopper(host, changes, kernel, paged_kernel, paged):
    plan = plan_of(host, changed(FEW, paged=paged, **changes))
    assert plan.kernel == (paged_kernel if paged else kernel)


PORTABLE_ONLY = [dict(dropout=True), dict(bias=True), dict(head_dim=100), dict(head_dim=264), dict(has_sm90=False)]


@pytest.mark.parametrize(
    "changes, kernel",
    [
        (dict(), CODED_SERVING),
        (dict(batch=16), CODED_SERVING),
        (dict(rows=16), CODED_SERVING),
        (dict(rows=16, head_dim=64, invariance=2), CODED_SERVING),
        (dict(rows=16, head_dim=96), SERVING),
        (dict(rows=16, head_dim_v=64), CODED_SERVING),
        (dict(rows=16, head_dim_v=256), SERVING),
        (dict(rows=4096), SERVING),
        (dict(seqlen_q=4224, longest_q=4096, packed_q=True, batch=128), CODED_SERVING),  # 132 rows each on average
        (dict(rows=4), CODED_DECODE),
        (dict(rows=4, head_dim=96, has_sm90=False), CODED_DECODE),
        (dict(rows=4, invariance=1), CODED_SERVING),
        (dict(rows=4, plain=False), DECODE),
        (dict(has_sm90=False), SM80),
    ],
    ids=str,
)
def test_kernels_that_read_codes_cut_keys_as_those_in_fp16(host, changes, kernel):
    problem = changed(FEW, **{"paged": True, **changes})
    coded, in_fp16 = plan_of(host, changed(problem, coded=True)), plan_of(host, problem)
    assert coded.kernel == kernel
    of_kernel = ["kernel", "scratch_out"]  # which has as many channels as the instance
    assert coded._replace(**{name: getattr(in_fp16, name) for name in of_kernel}) == in_fp16


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "changes, kernel",
    [
        (dict(), SM90),  # all keys in one piece
        (dict(longest_k=5000), INVARIANT),
        (dict(head_dim=64, longest_k=4096), SM90),
        (dict(head_dim=192), INVARIANT),  # that for dense tensors has more keys in an n_block
        (dict(ranges=1), INVARIANT),  # and an instance of its own for ranges
        (dict(out_lo=True, longest_k=5000), INVARIANT),
        (dict(out_lo=True, rows=1), SM90),
        (dict(rows=1), SERVING),
        (dict(rows=1, longest_k=100), SERVING),
        (dict(paged=True), SERVING),
        (dict(num_splits=7), SM90),
        (dict(longest_k=0), SM80),
        *((changes, SM80) for changes in PORTABLE_ONLY),
        *((changes | dict(rows=1, paged=True), SM80) for changes in PORTABLE_ONLY),
    ],
    ids=str,
)
def test_kernels_where_batches_must_not_matter(host, changes, kernel, level):
    assert plan_of(host, changed(MANY, invariance=level, **changes)).kernel == kernel


@pytest.mark.parametrize("change", [dict(plain=False), dict(row_max=True)], ids=str)
def test_what_serving_could_not_equal_is_refused(host, change):
    """Rows that are not aligned though their length is, and the largest scores: the portable kernel has other bits."""
    assert plan_of(host, changed(MANY, invariance=1, **change)).kernel == SM80
    with pytest.raises(RuntimeError, match="where the level of batch invariance is 2"):
        plan_of(host, changed(MANY, invariance=2, **change))


def test_batches_do_not_matter(host):
    """Whichever kernel a call gets, its n_blocks have as many keys, and pieces begin at the same ones."""
    seen = set()
    for problem in serving_problems(1500):
        problem = dataclasses.replace(problem, invariance=2)
        plan = plan_of(host, problem)
        features = PLAIN if problem.plain and not problem.ranges else ALL
        dims = instance_dims(problem.head_dim, problem.head_dim_v)
        keys = numbers(host, 4, "find_serving_tile", *dims, features, 1)[1]
        pieces = 4096 // keys
        seen.add(plan.kernel)
        if plan.kernel == SM80:
            assert problem.longest_k == 0 and plan.num_splits == 1
            continue
        if plan.kernel == SM90:
            assert problem.longest_k <= pieces * keys
            assert numbers(host, 6, "find_fwd_sm90_tile", *dims, features, plan.wide)[1] == keys
            continue
        assert plan.piece_blocks == (pieces if problem.longest_k > pieces * keys else 0)
        if plan.kernel == SERVING:
            assert not plan.even and plan.num_splits == 0
            assert (plan.piece_slots > 0) == (plan.piece_blocks > 0)
            assert plan.piece_slots <= 2**12
            assert 4 * (plan.scratch_out + plan.scratch_softmax) <= problem.multiprocessors * 1024 * 4 * (dims[1] + 2)
        rows = 64 * (plan.warpgroups or numbers(host, 4, "find_invariant_tile", *dims, features)[0])
        assert plan.scratch_totals == (plan.blocks * rows * dims[1] if plan.piece_blocks else 0)
    assert seen >= {SM90, SERVING, INVARIANT}
    whole = plan_of(host, changed(MANY, rows=1, longest_k=9000, num_splits=1, invariance=1))
    assert (whole.kernel, whole.piece_blocks, whole.piece_slots) == (SERVING, 0, 0)


def serving_problems(count):
    draw = random.Random(4)
    for problem in problems(count):
        ranges = draw.choice((0, 0, 1, 2))
        head_dim, head_dim_v = draw.choice(
            [(128, 128), (112, 112), (128, 64), (72, 128), (40, 64), (192, 96), (256, 8)]
        )
        yield dataclasses.replace(
            problem,
            has_sm90=True,
            paged=draw.random() < 0.7,
            plain=True,
            dropout=False,
            ranges=ranges,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            num_splits=draw.choice((0, 0, 1, 2, 7, 32)),
        )


def test_serving_plan(host):
    """Tiles of one or two warpgroups that cover all rows, and slots for all pieces that blocks may make of them."""
    seen = set()
    for problem in serving_problems(1500):
        plan = plan_of(host, problem)
        if plan.kernel != SERVING:
            continue
        rows, group = 64 * plan.warpgroups, problem.group
        seen.add((plan.warpgroups, plan.even, plan.packed_heads > 1, plan.num_splits))
        assert plan.packed_heads in ((1,) if problem.ranges == 2 else (1, group))
        assert plan.warpgroups in (1, 2) and (plan.warpgroups == 1) == (problem.longest_q * plan.packed_heads <= 64)
        together, apart = -(-problem.longest_q * group // rows), group * -(-problem.longest_q // rows)
        if problem.ranges < 2 and together <= apart and problem.seqlen_q * group < 2**30:
            assert plan.packed_heads == group
        entries = 1 if problem.packed_q else problem.batch
        least_slots = -(-problem.seqlen_q * plan.packed_heads // rows)
        assert plan.slots >= least_slots if problem.packed_q else plan.slots == least_slots
        assert plan.tiles == plan.slots * entries * problem.heads // plan.packed_heads
        assert plan.blocks == problem.multiprocessors
        # Equal shares where no two tiles read the same keys, and where whole tiles would leave blocks without work.
        whole = problem.batch * problem.heads // group
        waves = -(-whole // plan.blocks)
        one_tile = problem.longest_q * plan.packed_heads <= rows and plan.packed_heads == group
        assert plan.even == (one_tile and problem.num_splits == 0 and whole / (waves * plan.blocks) < 0.95)
        if problem.num_splits == 0:
            assert plan.num_splits == 0
            assert plan.piece_slots == (2 if plan.even else 6) * plan.blocks
        else:
            fits = plan.tiles * problem.num_splits <= 2**13
            assert plan.num_splits == problem.num_splits if fits else 1 <= plan.num_splits <= problem.num_splits
            assert plan.piece_slots == (plan.tiles * plan.num_splits if plan.num_splits > 1 else 0)
            assert plan.piece_slots <= 2**13
        slot_rows = rows if problem.packed_q else min(rows, problem.seqlen_q * plan.packed_heads)
        assert plan.scratch_out == plan.piece_slots * slot_rows * instance_dims(problem.head_dim, problem.head_dim_v)[1]
        assert plan.scratch_softmax == plan.piece_slots * slot_rows * 2
        assert plan.scratch_records == plan.piece_slots * 9
        assert plan.scratch_counters == 1 + plan.piece_slots
    for place in range(3):
        assert len({which[place] for which in seen}) == 2
    assert {0, 1, 2, 7, 32} <= {which[3] for which in seen}


def instance_dims(head_dim, head_dim_v):
    """The head dims of keys and of values of the instance for sm_90."""
    built = next(dim for dim in ALL_HEAD_DIMS if max(head_dim, head_dim_v) <= dim)
    return built, 128 if built == 192 and head_dim_v <= 128 else built


@pytest.mark.parametrize("head_dim, head_dim_v", [dims for dims in HOPPER_HEAD_DIMS if dims[0] <= 256])
def test_boxes_of_pages(host, head_dim, head_dim_v):
    """They hold as many rows as divide both a page and half a tile."""
    for few, ranges, page_size in itertools.product((False, True), (0, 1), (1, 8, 12, 16, 24, 32, 48, 64, 100, 256)):
        problem = changed(
            FEW,
            rows=1 if few else 300,
            paged=True,
            page_size=page_size,
            ranges=ranges,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            heads=128,
            heads_k=4,
        )
        plan = plan_of(host, problem)
        assert plan.kernel == SERVING and plan.warpgroups == 2 - few
        features = ALL if ranges else PLAIN
        keys = numbers(host, 4, "find_serving_tile", *instance_dims(head_dim, head_dim_v), features, plan.warpgroups)[1]
        assert plan.box_rows == (math.gcd(page_size, keys // 2) if page_size % 8 == 0 else 0)
        assert plan_of(host, dataclasses.replace(problem, leftpad=True)).box_rows == 0
        assert plan_of(host, dataclasses.replace(problem, paged=False, num_splits=2)).box_rows == keys // 2
        of_none = dataclasses.replace(problem, paged=False, num_splits=2, batch=0, packed_q=True)
        assert plan_of(host, of_none).box_rows == 0


def test_scratch_of_serving_follows_neither_batch_nor_lengths(host):
    """At most 64 MB on a GPU of 132 multiprocessors, unless the call says how many splits it wants."""
    for batch, capacity, (rows, heads) in itertools.product(
        (1, 64, 1024), (600, 1_000_000), ((1, 128), (20, 8), (200, 8), (8192, 8))
    ):
        plan = plan_of(
            host, changed(FEW, batch=batch, rows=rows, longest_k=capacity, heads=heads, heads_k=1, paged=True)
        )
        assert plan.kernel == SERVING
        assert 4 * (plan.scratch_out + plan.scratch_softmax + plan.scratch_records) < 64 << 20


def test_plan_of_values_with_fewer_channels(host):
    """The portable kernels give them scratch of the keys' channels, and take them in tiles for all features."""
    many = Problem(batch=8, heads=32, heads_k=32, head_dim=192, head_dim_v=128, seqlen_q=2048, longest_q=2048)
    on_sm90 = plan_of(host, dataclasses.replace(many, has_sm90=True))
    assert (on_sm90.kernel, on_sm90.slots, on_sm90.wide) == (SM90, 2048 // 128, False)
    few = dataclasses.replace(many, batch=1, heads=1, heads_k=1, seqlen_q=100, longest_q=100, longest_k=100_000)
    plan = plan_of(host, few)
    rows, _, _ = numbers(host, 3, "find_fwd_tile", 192, False)
    assert plan.kernel == SM80 and plan.num_splits > 1
    assert plan.scratch_out == plan.tiles * plan.num_splits * rows * 192


def test_short_entries_of_a_large_cache_are_split(host):
    """One entry of 8 heads has the GPU to itself: each part has a chunk for every warp, whatever room there is."""
    for longest_k in (2048, 131_072):
        problem = Problem(batch=1, heads=32, heads_k=8, seqlen_q=1, longest_q=1, ragged_k=True, longest_k=longest_k)
        plan = plan_of(host, problem)
        assert plan.num_splits == problem.multiprocessors // problem.heads_k
        assert plan.least_blocks == plan.decode_warps


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_keys_of_one_round_of_decoding_are_not_split(host, head_dim):
    """A chunk for each warp of a thread block, or beyond 256 channels for each pair of warps: they need no scratch."""
    one = Problem(batch=1, heads=8, heads_k=8, head_dim=head_dim, seqlen_q=1, longest_q=1, longest_k=1)
    warps = plan_of(host, one).decode_warps
    keys = 16 * (warps if head_dim <= 256 else warps // 2)
    for changes, split in (
        (dict(longest_k=keys), False),
        (dict(longest_k=keys + 1), True),
        (dict(longest_k=keys, num_splits=4), True),
    ):
        plan = plan_of(host, dataclasses.replace(one, **changes))
        assert (plan.num_splits > 1, plan.scratch_out > 0, plan.scratch_counters > 0) == (split, split, split), changes


@pytest.mark.parametrize(
    "changes",
    [
        dict(seqlen_q=2**28 + 2**20 + 1, longest_q=2**28 + 2**20 + 1),
        dict(batch=1000, seqlen_q=2**28, longest_q=1, packed_q=True),  # decoding
    ],
    ids=str,
)
def test_rows_of_packed_heads_are_counted_in_32_bits(host, changes):
    """Heads are not packed where tokens times heads do not fit: kernels count the rows of an entry in 32 bits."""
    problem = Problem(batch=1, heads=8, heads_k=1, longest_k=1, plain=False)
    assert plan_of(host, problem).packed_heads == 8
    problem = dataclasses.replace(problem, **changes)
    plan = plan_of(host, problem)
    assert plan.packed_heads * problem.seqlen_q + tile_rows(host, problem, plan) < 2**31


@pytest.mark.parametrize("heads, heads_k", [(8, 8), (32, 8), (64, 4), (8, 1)])
def test_scratch_of_decoding_follows_neither_batch_nor_capacity(host, heads, heads_k):
    """It is a few megabytes for each part in flight, also where a table has room for far more keys than are used."""
    rows = heads // heads_k
    for batch, capacity in itertools.product((1, 8, 64, 256, 1024, 4096), (100, 8192, 131_072, 1_000_000)):
        problem = Problem(batch, heads, heads_k, seqlen_q=1, longest_q=1, longest_k=capacity, ragged_k=True)
        plan = plan_of(host, problem)
        parts = max(plan.tiles, 32 * problem.multiprocessors)
        assert plan.num_splits == 1 or plan.tiles * plan.num_splits <= parts
        assert plan.scratch_out + plan.scratch_softmax <= parts * rows * (problem.head_dim + 2)


def test_ragged_entries_of_a_large_batch_are_split(host):
    """So that one long entry does not keep a multiprocessor busy when all others have ended."""
    for batch, heads_k, splits in ((32, 8, 16), (64, 8, 8), (256, 1, 16), (256, 8, 2), (1024, 8, 1)):
        problem = Problem(batch, 4 * heads_k, heads_k, seqlen_q=1, longest_q=1, longest_k=131_072, ragged_k=True)
        assert plan_of(host, problem).num_splits == splits


def test_tiles_are_counted_in_32_bits(host):
    huge = Problem(batch=2**20, heads=64, heads_k=1, seqlen_q=2**20, longest_q=2**20)
    with pytest.raises(RuntimeError, match="q has too many rows and heads for one launch"):
        plan_of(host, huge)
    plan = plan_of(host, dataclasses.replace(huge, batch=2**11, seqlen_q=2**20, longest_k=2**20, num_splits=128))
    assert plan.tiles * plan.num_splits < 2**31


class BwdPlan(typing.NamedTuple):
    dq_accum: int  # elements of scratch; so are row_values and semaphores
    row_values: int
    semaphores: int
    swizzle_heads: int
    waits: bool
    on_sm90: bool
    in_order: bool
    rounds_dq: bool
    m_block_order: int
    swizzle_entries: int = 1
    head_splits: int = 1
    m_splits: int = 1
    key_sums: int = 0
    work_list: int = 0


LAST_FIRST, FIRST_FIRST, ROTATED = range(3)


def bwd_plan(
    host,
    *problem,
    causal=False,
    deterministic=False,
    has_sm90=False,
    multiprocessors=132,
    capped=False,
    ranged=False,
    head_dim_v=0,
    longest=0,
    window=(-1, -1),
):
    """problem: batch, heads, heads_k, head_dim, seqlen_q, seqlen_k, packed.

    head_dim_v: 0 is that of the keys. longest: rows and keys of the longest entry; 0 is seqlen_q and seqlen_k.
    """
    hints = causal, deterministic, has_sm90, multiprocessors, capped, ranged, head_dim_v, longest, *window
    return BwdPlan(*numbers(host, 14, "find_bwd_plan", *problem, *hints))


@pytest.mark.parametrize("packed", [False, True])
def test_scratch_of_the_portable_backward(host, packed):
    """A deterministic call takes the same dq_accum, and a semaphore for each 32 rows of an entry in blocks of 128."""
    draw = random.Random(2)
    for _ in range(300):
        batch, heads_k, group = draw.choice((1, 2, 64)), draw.choice((1, 8)), draw.choice((1, 4))
        head_dim, heads = draw.choice(ALL_HEAD_DIMS), heads_k * group
        seqlen_q, seqlen_k = (draw.choice((0, 1, 100, 5000, 1_000_000)) for _ in "qk")
        problem = batch, heads, heads_k, head_dim, seqlen_q, seqlen_k, packed
        rows = (1 if packed else batch) * heads * seqlen_q
        accum = -(-rows // 8) * 8 * head_dim
        assert bwd_plan(host, *problem) == BwdPlan(accum, 0, 0, 1, False, False, False, False, LAST_FIRST)
        blocks = heads * (seqlen_q // 128 + batch) if packed else batch * heads * -(-seqlen_q // 128)
        waits = seqlen_q > 0
        found = bwd_plan(host, *problem, deterministic=True)
        expected = BwdPlan(accum, 0, 4 * blocks * waits, 8 if waits else 1, waits, False, False, False, LAST_FIRST)
        assert found == expected


def test_deterministic_memory_is_linear_in_the_sequence(host):
    """32 query heads that share one key head, 32k rows and keys: dQ in fp32 has 512 MB, and all else is small."""
    plan = bwd_plan(host, 1, 32, 1, 128, 32768, 32768, False, causal=True, deterministic=True)
    assert sum(plan[:3]) < 1.01 * 32 * 32768 * 128


@pytest.mark.parametrize(
    "group, head_dim, rows, packed, causal, deterministic, swizzle",
    [
        # dq is rounded
        (1, 64, 1, False, False, False, 32),
        (1, 64, 512, False, False, False, 32),
        (1, 64, 512, False, True, False, 64),
        (1, 64, 1024, False, True, False, 32),
        (1, 64, 2048, False, False, False, 8),
        (1, 128, 512, False, False, False, 16),
        (1, 128, 2048, False, True, False, 16),
        (4, 128, 512, False, False, False, 8),
        (1, 64, 4096, False, False, False, 4),
        (1, 64, 4096, False, True, False, 8),
        # blocks add in order, and dq may be rounded
        (1, 64, 1024, False, False, True, 32),
        (1, 64, 4096, False, False, True, 8),
        (1, 64, 16384, False, False, True, 2),
        (1, 64, 1024, False, True, True, 64),
        (1, 64, 3000, False, True, True, 21),
        (1, 64, 16384, False, True, True, 16),
        (1, 128, 1024, False, False, True, 16),
        (1, 128, 16384, False, False, True, 8),
        (4, 128, 1, False, False, True, 32),
        (4, 128, 2048, False, True, True, 32),
        (1, 128, 16384, False, True, True, 16),
        (1, 64, 512, True, False, True, 32),
        (1, 128, 512, False, True, True, 32),
        (1, 256, 512, False, False, True, 8),
        (1, 256, 512, False, True, True, 16),
        # no block waits
        (1, 64, 512, True, False, False, 8),
        (1, 64, 8192, False, False, False, 8),
        (1, 64, 16384, False, True, False, 4),
        (1, 128, 4096, False, True, False, 8),
        (1, 128, 8192, False, False, False, 4),
        (1, 128, 16384, False, True, False, 2),
        (8, 128, 8192, False, False, False, 1),
        (8, 128, 8192, False, True, False, 4),
        (1, 128, 131072, False, True, False, 1),
        (1, 256, 16384, False, True, False, 2),
        (1, 256, 2048, False, False, False, 8),
        (1, 256, 8192, False, False, False, 2),
    ],
)
def test_key_heads_whose_blocks_start_together_on_sm90(
    host, group, head_dim, rows, packed, causal, deterministic, swizzle
):
    """The number of key heads, within bounds, whose q, dout and dq_accum together take so many bytes.

    8 MB if dq is rounded, 32 MB if no block waits for another, 16 MB if blocks add in order; if they do so under a
    causal mask, the number of heads that have 65536 keys together.
    """
    problem = 4, 8 * group, 8, head_dim, rows, rows, packed
    plan = bwd_plan(host, *problem, causal=causal, deterministic=deterministic, has_sm90=True)
    assert plan.swizzle_heads == swizzle


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, False), (128, True)])
def test_packed_entries_wait_as_dense_ones_of_the_length_of_the_longest(host, head_dim, causal):
    options = dict(causal=causal, deterministic=True, has_sm90=True)
    for longest in (512, 1024, 2048, 4096, 16384):
        packed = bwd_plan(host, 32, 64, 64, head_dim, 16384, 16384, True, longest=longest, **options)
        dense = bwd_plan(host, 32, 64, 64, head_dim, longest, longest, False, **options)
        rounded = head_dim == 64 and not causal and longest == 16384  # such blocks wait less
        assert packed.swizzle_heads == (8 if rounded else dense.swizzle_heads)


@pytest.mark.parametrize(
    ("heads_k", "packed", "deterministic", "entries"),
    [
        (64, True, True, 1),
        (16, True, True, 1),
        (8, True, True, 2),
        (3, True, True, 6),
        (8, False, True, 1),
        (8, True, False, 1),
    ],
)
def test_packed_entries_take_the_place_of_heads(host, heads_k, packed, deterministic, entries):
    """Where blocks add in order under a causal mask, those of 16 heads, of one or several entries, come together."""
    problem = 32, heads_k, heads_k, 128, 16384, 16384, packed
    options = dict(deterministic=deterministic, has_sm90=True, longest=2048)
    assert bwd_plan(host, *problem, causal=True, **options).swizzle_entries == entries
    assert bwd_plan(host, *problem, **options).swizzle_entries == 1
    wide = 32, heads_k, heads_k, 192, 16384, 16384, packed
    assert bwd_plan(host, *wide, causal=True, **options).swizzle_entries == 1


@pytest.mark.parametrize(
    ("causal", "longest", "swizzle"), [(False, 2048, 1), (True, 2048, 4), (True, 512, 8), (True, 16384, 2)]
)
def test_packed_entries_that_do_not_wait(host, causal, longest, swizzle):
    """Under a causal mask, the swizzle is made for the rows of the longest entry, otherwise for all."""
    plan = bwd_plan(host, 32, 16, 4, 128, 16384, 16384, True, causal=causal, has_sm90=True, longest=longest)
    assert not plan.waits and plan.swizzle_heads == swizzle


@pytest.mark.parametrize("option", ["capped", "ranged"])
def test_many_key_heads_with_features_start_together_on_sm90(host, option):
    """Blocks of long rows of head dim 64, which round dq with features: of few heads, they wait for one another."""
    plan = bwd_plan(host, 1, 64, 8, 64, 4096, 4096, False, has_sm90=True, **{option: True})
    assert (plan.rounds_dq, plan.swizzle_heads) == (True, 8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_scratch_of_the_backward_on_sm90(host, packed, deterministic):
    """Row values in blocks of 128 for each head, and semaphores if blocks wait."""
    draw = random.Random(3)
    for _ in range(300):
        batch, heads, head_dim = draw.choice((1, 2, 64)), draw.choice((1, 8)), draw.choice((40, *ALL_HEAD_DIMS))
        lengths = [draw.choice((1, 100, 128, 5000)) for _ in range(batch)] if packed else [draw.choice((1, 128, 5000))]
        seqlen_k = draw.choice((77, 128, 129, 2048, 2049, 4096, 4097))
        problem = batch, heads, heads, head_dim, sum(lengths), seqlen_k, packed
        plan = bwd_plan(host, *problem, deterministic=deterministic, has_sm90=True)
        entries, rows = 1 if packed else batch, plan.row_values
        instance = host.call("find_instance_head_dim", head_dim)
        assert plan.on_sm90 and plan.in_order == deterministic
        assert rows % (entries * heads * 128) == 0
        assert plan.dq_accum == instance * (-(-entries * heads * sum(lengths) // 8) * 8)
        most_keys = 0 if head_dim > 128 else 2048 if head_dim > 64 else 10**6 if deterministic else 4096
        assert plan.rounds_dq == (not packed and seqlen_k <= most_keys)
        assert plan.waits == (plan.rounds_dq or deterministic)
        assert plan.semaphores == (rows // 32 if plan.waits else 0)
        starts = [sum(lengths[:entry]) // 128 * 128 + 128 * entry for entry in range(len(lengths))]
        ends = [start + -(-length // 128) * 128 for start, length in zip(starts, lengths)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], rows // (entries * heads)]))


@pytest.mark.parametrize("packed", [False, True])
def test_order_of_rows_on_sm90(host, packed):
    """Plain blocks that wait for no other begin with the first rows, or one block of rows after another.

    Not those that are split: these have only the instance that begins with the last rows.
    """
    for head_dim, seqlen, deterministic, features, causal in itertools.product(
        (40, 64, 128, 256), (512, 4096, 4097), (False, True), ({}, {"capped": True}, {"ranged": True}), (False, True)
    ):
        problem = 2, 4, 4, head_dim, seqlen, seqlen, packed
        plan = bwd_plan(host, *problem, causal=causal, deterministic=deterministic, has_sm90=True, **features)
        split = plan.head_splits * plan.m_splits > 1
        free = head_dim <= 128 and not plan.waits and not features and not split
        rotated = head_dim <= 64 and not causal
        assert plan.m_block_order == ((ROTATED if rotated else FIRST_FIRST) if free else LAST_FIRST)
        if head_dim <= 64:
            assert plan.rounds_dq == (not packed and (seqlen <= 4096 or deterministic))


@pytest.mark.parametrize("causal", [False, True])
def test_values_of_more_channels_than_keys_have_the_plan_of_their_instance(host, causal):
    for head_dim, head_dim_v in ((64, 128), (40, 96), (64, 256), (128, 192)):
        problem, tall = (1, 8, 8, head_dim, 16384, 16384, False), (1, 8, 8, head_dim_v, 16384, 16384, False)
        plan = bwd_plan(host, *problem, causal=causal, has_sm90=True, head_dim_v=head_dim_v)
        expected = bwd_plan(host, *tall, causal=causal, has_sm90=True)
        assert plan._replace(swizzle_heads=expected.swizzle_heads) == expected


def test_parts_of_the_scratch_lie_apart(host):
    """In the order dq_accum, lse_log2, softmax_d, with a bias lse, key_sums, the work list, next_work, semaphores."""
    for sizes in itertools.product((0, 64, 4096), (0, 128, 1280), (2, 3), (0, 4, 40), (0, 512), (0, 80), (0, 24)):
        accum, rows, arrays, semaphores, key_sums, tiles, sums = sizes
        found = numbers(host, 10, "find_bwd_scratch", *sizes)
        after = accum + arrays * rows
        lse = accum + 2 * rows if arrays == 3 else -1
        listed = after + key_sums
        counters = listed + tiles + sums
        work_list = [listed if tiles else -1, listed + tiles]
        assert found == [
            0,
            accum,
            accum + rows,
            lse,
            after,
            *work_list,
            counters,
            counters + 2,
            counters + 2 + semaphores,
        ]


@pytest.mark.parametrize(
    "heads, heads_k, head_dim, rows, keys, causal, splits",
    [
        (8, 8, 64, 4096, 77, False, (1, 11)),
        (24, 24, 128, 4096, 256, False, (1, 2)),  # cross-attention to few keys
        (40, 40, 128, 32768, 512, False, (1, 3)),
        (8, 8, 256, 4096, 128, False, (1, 6)),
        (8, 8, 64, 64, 77, False, (1, 1)),
        (8, 8, 128, 64, 64, True, (1, 1)),  # one step, which cannot be divided
        (32, 1, 128, 2048, 2048, True, (16, 1)),
        (32, 8, 128, 512, 512, True, (4, 1)),  # heads that share a key head
        (6, 2, 128, 4096, 128, False, (3, 5)),
        (7, 1, 128, 256, 256, False, (7, 2)),
        (1, 1, 64, 16384, 16384, True, (1, 2)),  # the longest n_block alone would take as long as two
        (1, 1, 64, 16384, 16384, False, (1, 1)),
        (16, 16, 128, 4096, 4096, False, (1, 1)),  # enough n_blocks
        (8, 8, 128, 512, 512, True, (1, 1)),
        (12, 12, 64, 1024, 1024, True, (1, 1)),  # little work
    ],
)
def test_splits_of_n_blocks(host, heads, heads_k, head_dim, rows, keys, causal, splits):
    """Into how many splits an n_block is divided: by its query heads, and by its m_blocks."""
    plan = bwd_plan(host, 1, heads, heads_k, head_dim, rows, keys, False, causal=causal, has_sm90=True)
    assert (plan.head_splits, plan.m_splits) == splits
    divided = math.prod(splits) > 1
    assert plan.key_sums == divided * 2 * heads_k * -(-keys // 128) * 128 * head_dim * math.prod(splits)
    alone = bwd_plan(host, 1, heads, heads_k, head_dim, rows, keys, False, causal=causal)
    assert (alone.head_splits, alone.m_splits, alone.key_sums) == (1, 1, 0)


@pytest.mark.parametrize(
    ("heads", "keys", "options", "splits"),
    [
        (8, 308, dict(longest=4096), 2),
        (8, 308, dict(longest=128), 1),
        (8, 1024, dict(), 2),
        (8, 1024, dict(window=(0, 0)), 1),
        (8, 1024, dict(window=(4000, 4000)), 2),
        (10, 1280, dict(), 1),
        (10, 1280, dict(causal=True), 2),
        (10, 1280, dict(window=(0, -1)), 2),
        (10, 1280, dict(ranged=True), 2),
    ],
)
def test_splits_depend_on_how_many_rows_see_an_n_block(host, heads, keys, options, splits):
    """The rows of the longest packed entry, at most those of a window, and half of them under a causal mask."""
    packed = "longest" in options
    plan = bwd_plan(host, 4 if packed else 1, heads, heads, 128, 4096, keys, packed, has_sm90=True, **options)
    assert (plan.head_splits, plan.m_splits) == (1, splits)


@pytest.mark.parametrize(("head_dim", "head_dim_v", "channels"), [(192, 128, 192), (64, 128, 128), (40, 40, 64)])
def test_sums_of_splits_have_the_channels_of_the_instance(host, head_dim, head_dim_v, channels):
    plan = bwd_plan(host, 1, 4, 4, head_dim, 4096, 77, False, has_sm90=True, head_dim_v=head_dim_v)
    assert plan.key_sums == 2 * 4 * 128 * channels * plan.m_splits > 0


def test_splits_leave_no_head_out_and_need_little_memory(host):
    draw = random.Random(5)
    for _ in range(2000):
        heads_k, group, batch = draw.choice((1, 2, 5, 8)), draw.choice((1, 2, 3, 7, 8, 32)), draw.choice((1, 2, 64))
        rows, keys = (draw.choice((1, 64, 77, 1000, 4096, 100_000)) for _ in "qk")
        problem = batch, heads_k * group, heads_k, draw.choice(ALL_HEAD_DIMS), rows, keys, draw.random() < 0.5
        plan = bwd_plan(host, *problem, causal=draw.random() < 0.5, has_sm90=True, ranged=draw.random() < 0.2)
        assert group % plan.head_splits == 0 and plan.head_splits * plan.m_splits <= 16
        assert plan.m_splits <= -(-rows // 64)
        assert plan.key_sums <= max(plan.dq_accum, 2**24)


@pytest.mark.parametrize(
    ("batch", "heads", "heads_k", "head_dim", "rows", "keys", "packed", "blocks", "splits"),
    [
        (1, 16, 2, 128, 16384, 16384, False, 256, 396),
        (1, 16, 4, 256, 16384, 16384, False, 512, 198),
        (2, 8, 8, 320, 4096, 4096, False, 1024, 198),  # blocks of 64 keys
        (8, 16, 4, 64, 16384, 16384, True, 4 * (128 + 8), 396),
        (1, 64, 64, 128, 4096, 4096, False, 2048, 396),
        (1, 64, 64, 128, 2048, 2048, False, 0, 0),  # dq is rounded at once
        (1, 64, 64, 64, 4500, 4500, False, 0, 0),  # no block can have many steps
    ],
)
def test_room_for_a_work_list(host, batch, heads, heads_k, head_dim, rows, keys, packed, blocks, splits):
    """Of all blocks of keys, and three splits for each place; none for the same call without ranges."""
    problem = batch, heads, heads_k, head_dim, rows, keys, packed
    plan = bwd_plan(host, *problem, ranged=True, has_sm90=True)
    places = 132 // (1 + (head_dim > 128))
    assert plan.work_list == (4 * (blocks + 3 * places) + 2 * blocks if blocks else 0)
    channels, block_keys = host.call("find_instance_head_dim", head_dim), 64 if head_dim > 256 else 128
    assert plan.key_sums == 2 * splits * block_keys * channels
    assert (plan.head_splits, plan.m_splits) == (1, 1)
    assert bwd_plan(host, *problem, ranged=True).work_list == bwd_plan(host, *problem, has_sm90=True).work_list == 0


def test_splits_of_blocks_with_unequal_steps(host):
    """Few blocks have many steps: nobody takes long after all others are done, and the sums have room."""
    draw, seen = random.Random(6), set()
    for _ in range(300):
        places, longest = draw.choice((4, 66, 132)), draw.choice((5, 40, 2000))
        steps = [draw.randint(0, longest) for _ in range(draw.choice((0, 1, 8, 60)))]
        steps += [draw.randint(0, 20)] * draw.choice((0, 10, 500)) + [0]
        total, most, m_blocks = sum(steps), max(steps), draw.choice((1, 16, 4096))
        found = [numbers(host, 3, "find_step_limits", total, most, places, x, m_blocks)[2] for x in steps]
        mean = -(-total // places)
        assert all(1 <= n <= max(1, min(x, m_blocks)) for n, x in zip(found, steps))
        if most <= 1.25 * mean + 8:
            assert set(found) == {1}
            continue
        assert sum(n for n in found if n > 1) <= 3 * places
        if m_blocks == 4096:
            assert max(-(-x // n) for n, x in zip(found, steps)) <= max(mean, 8)
            seen.add(places)
        assert all(n == 1 for n, x in zip(found, steps) if x <= mean)
    assert seen == {4, 66, 132}


def test_empty_problems_take_the_portable_backward(host):
    """Copies of sm_90 take no tensor without elements."""
    full = 2, 4, 4, 64, 100, 100, False
    assert bwd_plan(host, *full, has_sm90=True).on_sm90 and not bwd_plan(host, *full).on_sm90
    for place in (0, 1, 4, 5):
        empty = tuple(0 if i == place else x for i, x in enumerate(full))
        assert not bwd_plan(host, *empty, has_sm90=True).on_sm90


# ---------------------------------------------------------------------------------------------------------------------
# The cost model of splits, beside what was measured

RECORDS = native.ROOT / "benchmarks"
CROSS_CASE = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(?: to (\d+))?x(\d+)( causal)?")


class Measured(typing.NamedTuple):
    """A case on an H100, which has 132 multiprocessors."""

    name: str
    problem: tuple  # as bwd_plan takes it, not packed
    causal: bool
    times: dict  # by number of splits, in us

    @classmethod
    def of(cls, name, times):
        batch, heads, heads_k, rows, keys, head_dim, causal = CROSS_CASE.fullmatch(name).groups()
        sizes = (batch, heads, heads_k or heads, head_dim, rows, keys or rows)
        return cls(name, (*map(int, sizes), False), bool(causal), times)

    def plan(self, host):
        plan = bwd_plan(host, *self.problem, causal=self.causal, has_sm90=True)
        return plan.head_splits, plan.m_splits

    def steps(self, host, *splits):
        return host.call("find_split_steps", *self.problem[:6], self.causal, 132, *splits)


def rows_of(path):
    with (RECORDS / path).open() as file:
        yield from csv.DictReader(file)


def ladder():
    """Without splits, and with as many as were best."""
    for row in rows_of("ladders/flash_attn_few_keys.csv"):
        yield Measured.of(row["case"], {1: float(row["before_us"]), int(row["splits"]): float(row["split_us"])})


def results(host):
    """Later times, with as many splits as the plan has."""
    for row in rows_of("results/flash_attn_h100.csv"):
        if row["op"] in ("flash_attn_bwd", "flash_attn_cross_bwd") and row["provider"] == "flash_attn":
            case = Measured.of(row["case"], {})
            yield case._replace(times={math.prod(case.plan(host)): 1000 * float(row["ms"])})


def test_the_cost_model_chooses_the_faster_of_the_plans_that_were_measured(host):
    """In each row of the ladder. It sees as much gain as was measured, less 2 % at most, and at most twice as much."""
    for case in ladder():
        splits = case.plan(host)
        assert case.times[math.prod(splits)] == min(case.times.values()), case
        gain = case.times[1] / case.times[math.prod(splits)]
        estimate = case.steps(host, 1, 1) / case.steps(host, *splits)
        assert 0.98 * gain <= estimate <= 2 * gain, case


def test_a_step_of_the_cost_model_takes_about_as_long_in_all_calls_with_splits(host):
    """As bwd/cost_model.h says, in us."""
    seen = 0
    for case in itertools.chain(ladder(), results(host)):
        splits = case.plan(host)
        if math.prod(splits) == 1:
            continue
        step = case.times[math.prod(splits)] / case.steps(host, *splits)
        low, high = (2.5, 3.75) if case.problem[3] <= 128 else (2.6, 5.2)
        assert low <= step <= high, case
        seen += 1
    assert seen >= 25


# ---------------------------------------------------------------------------------------------------------------------
# The gradient of a bias


@dataclasses.dataclass(frozen=True)
class DbiasProblem:
    """As DbiasProblem in host_probe.cpp, field by field; a bias for each score of 4 entries."""

    batch: int = 4
    heads: int = 6
    seqlen_q: int = 300
    packed: bool = False
    batch1: int = 4
    batch2: int = 1
    heads_of_bias: int = 6
    rows: int = 300
    keys: int = 500
    multiprocessors: int = 132


class DbiasPlan(typing.NamedTuple):
    """As find_dbias_plan answers."""

    tile_entries: int
    tile_heads: int
    tile_slots: int
    item_entries: int
    item_heads: int
    item_slots: int
    n_blocks: int
    tiles: int
    items: int
    entries_of_tiles: int
    entries_of_items: int
    splits: int
    items_of_split: int
    blocks: int
    size: int
    scratch: int


def dbias_plan(host, **changes):
    problem = DbiasProblem(**changes)
    fields = torch.tensor([int(field) for field in dataclasses.astuple(problem)])
    return problem, DbiasPlan(*numbers(host, 16, "find_dbias_plan", fields))


ENTRIES_OF_BIAS = [(1, 1), (4, 1), (1, 4), (2, 2), (2, 1), (1, 2)]


@pytest.mark.parametrize("batch1, batch2", ENTRIES_OF_BIAS)
@pytest.mark.parametrize("heads, rows", [(6, 300), (1, 300), (6, 1), (1, 1)])
def test_tiles_of_the_gradient_of_a_bias_have_all_their_scores_once(host, batch1, batch2, heads, rows):
    problem, plan = dbias_plan(host, batch1=batch1, batch2=batch2, heads_of_bias=heads, rows=rows)
    count = batch2 if batch2 > 1 else 4 // batch1  # entry e has the bias [e // count, e % count]
    expected = {}
    for entry in range(4):
        place = entry // count if batch1 > 1 else 0, entry % count if batch2 > 1 else 0
        expected.setdefault(place, []).append(entry)
    found = [
        [tile * plan.entries_of_tiles + item * plan.entries_of_items for item in range(plan.item_entries)]
        for tile in range(plan.tile_entries)
    ]
    assert found == sorted(expected.values())
    assert (plan.tile_heads, plan.item_heads) == ((6, 1) if heads > 1 else (1, 6))
    assert (plan.tile_slots, plan.item_slots) == ((3, 1) if rows > 1 else (1, 3))
    assert plan.tiles == plan.tile_entries * plan.tile_heads * plan.tile_slots * plan.n_blocks
    assert plan.items == plan.item_entries * plan.item_heads * plan.item_slots
    assert plan.size == batch1 * batch2 * heads * rows * problem.keys
    assert plan.n_blocks == 4


@pytest.mark.parametrize("rows", [1, 300])
def test_slots_of_packed_entries(host, rows):
    """There are enough slots however long each entry is, and one more for rows that lie behind the last entry."""
    changes = dict(packed=True, batch1=1, heads_of_bias=1, rows=rows)
    plan = dbias_plan(host, **changes)[1]
    assert (plan.tile_entries, plan.item_entries) == (1, 1)
    assert max(plan.tile_slots, plan.item_slots) == 300 // 128 + 4 + 1


@pytest.mark.parametrize("multiprocessors", [4, 132])
def test_few_tiles_of_the_gradient_of_a_bias_are_divided(host, multiprocessors):
    """So that the GPU is full, in little memory; each split of the sum has its block."""
    draw = random.Random(4)
    for _ in range(300):
        batch, heads, rows, keys = draw.choice((1, 8)), draw.choice((1, 16)), draw.choice((1, 200, 4096)), 4096
        shape = dict(batch=batch, heads=heads, seqlen_q=rows, keys=draw.choice((2, 300, keys)))
        bias = dict(batch1=draw.choice((1, batch)), heads_of_bias=draw.choice((1, heads)), rows=draw.choice((1, rows)))
        _, plan = dbias_plan(host, **shape, **bias, multiprocessors=multiprocessors)
        assert (plan.splits - 1) * plan.items_of_split < plan.items <= plan.splits * plan.items_of_split
        assert plan.scratch == (plan.splits > 1) * plan.splits * plan.size
        assert plan.splits == 1 or plan.splits * plan.tiles <= 4 * multiprocessors
        assert plan.blocks == min(plan.splits * plan.tiles, multiprocessors)
        if plan.tiles * plan.items >= 8 * multiprocessors:  # blocks end at about the same time
            waves = -(-plan.tiles * plan.splits // multiprocessors)
            assert waves * plan.items_of_split * multiprocessors <= 1.6 * plan.tiles * plan.items
        if plan.tiles >= 4 * multiprocessors:
            assert plan.splits == 1


def test_the_gradient_of_a_bias_without_scores_has_no_items(host):
    for changes in (dict(batch=0, batch1=1), dict(batch=4, batch1=1, seqlen_q=0, rows=1)):
        plan = dbias_plan(host, **changes)[1]
        assert (plan.tiles, plan.items, plan.splits, plan.size, plan.scratch) == (0, 0, 1, 0, 0)


def test_tiles_of_the_gradient_of_a_bias_are_counted_in_32_bits(host):
    huge = dict(batch=2**16, batch1=2**16, heads=2**10, heads_of_bias=2**10, seqlen_q=2**20, rows=2**20)
    with pytest.raises(RuntimeError, match="attn_bias has too many rows and heads for one launch"):
        dbias_plan(host, **huge)
