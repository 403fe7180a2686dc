"""Each operation of csrc/tile, and with it of csrc/ptx, against plain torch: probe.cu runs them one at a time."""

import itertools
import math
import pathlib

import native
import pytest
import torch

from flash_attn._reference.attention import dropout
from flash_attn._reference.philox import philox

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # in the order of common/dtype.h
HALF = ("fp16", "bf16")
TILE_ROWS = 128
TILE_COLS = (32, 64, 96, 128, 192, 256)
LEAST_NORMAL = 2.0**-126

HERE = pathlib.Path(__file__).parent

cuda = pytest.mark.cuda


@pytest.fixture(scope="module")
def probe():
    return native.library(HERE / "probe.cu", native.CUDA)


@pytest.fixture(scope="module")
def host():
    return native.library(HERE / "common_probe.cu", native.CUDA)


@pytest.mark.slow  # .ci/run compiles it, although nothing in it runs without a GPU
def test_operations_compile(probe):
    pass


def dtype_index(name):
    return list(DTYPES).index(name)


def assert_identical(ours, expected):
    """Equal bits, but for those of NaN."""
    ours, expected = ours.cpu(), expected.cpu()
    assert ours.dtype == expected.dtype
    assert ours.shape == expected.shape
    same = (ours == expected) & (ours.signbit() == expected.signbit())
    wrong = ~(same | (ours.isnan() & expected.isnan()))
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}: "
        f"{ours[wrong][0]!r}, expected {expected[wrong][0]!r}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Elements: vec.cuh, math.cuh


def all_values(dtype):
    """Every value of a 16-bit type; of fp32 those, what lies halfway between them, and random bits."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype != torch.float32:
        return patterns.to(torch.int16).view(dtype)
    bf16 = patterns << 16
    fp16 = patterns.to(torch.int16).view(torch.float16).float().view(torch.int32)
    halfway = [bits + step for bits, half in ((bf16, 1 << 15), (fp16, 1 << 12)) for step in (half - 1, half, half + 1)]
    anything = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32)
    return torch.cat([bf16, fp16, *halfway, anything]).view(torch.float32)


@cuda
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("source, target", list(itertools.product(DTYPES, DTYPES)))
def test_access_and_conversion(probe, device, source, target, size):
    if size * max(DTYPES[source].itemsize, DTYPES[target].itemsize) > 16:
        pytest.skip("one access moves at most 16 bytes")
    x = all_values(DTYPES[source])
    y = torch.empty(len(x), dtype=DTYPES[target], device=device)
    probe.run("convert", dtype_index(source), dtype_index(target), size, x.to(device), y, len(x) // size)
    assert_identical(y, x.to(y.dtype))


@cuda
@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("source, target", list(itertools.product(DTYPES, DTYPES)))
def test_access_of_any_type(probe, device, source, target, size):
    if size * max(DTYPES[source].itemsize, DTYPES[target].itemsize) > 16:
        pytest.skip("one access moves at most 16 bytes")
    x = all_values(DTYPES[source])
    y = torch.empty(len(x), dtype=DTYPES[target], device=device)
    probe.run("convert_any", dtype_index(source), dtype_index(target), size, x.to(device), y, len(x) // size)
    assert_identical(y, x.to(y.dtype))


@cuda
@pytest.mark.parametrize("dtype", HALF)
def test_pack(probe, device, dtype):
    x = all_values(torch.float32)
    y = torch.empty(len(x), dtype=DTYPES[dtype], device=device)
    probe.run("pack_pairs", dtype_index(dtype), x.to(device), y, len(x) // 2)
    assert_identical(y, x.to(y.dtype))


@cuda
@pytest.mark.parametrize("dtype", HALF)
def test_unpack(probe, device, dtype):
    x = all_values(DTYPES[dtype])
    y = torch.empty(len(x), device=device)
    probe.run("unpack_pairs", dtype_index(dtype), x.to(device), y, len(x) // 2)
    assert_identical(y, x.float())


@cuda
@pytest.mark.parametrize("dtype", HALF)
def test_clamp_below(probe, device, dtype):
    """Negative ones become 0, whatever the other of the pair is; NaN stays NaN."""
    values = all_values(DTYPES[dtype])
    x = torch.stack([values, values[torch.randperm(len(values))]], 1)
    y = torch.empty_like(x, device=device)
    probe.run("clamp_pairs", dtype_index(dtype), x.to(device), y, len(x))
    expected = torch.where(x < 0, 0, x)
    zero = expected == 0  # of either sign
    assert_identical(y.cpu().masked_fill(zero, 0), expected.masked_fill(zero, 0))
    assert (y.cpu()[zero] == 0).all()


# Name, float64 formula, bounds of the relative error and of the absolute one near 0: those of the PTX manual.
FUNCTIONS = (
    ("exp2", torch.exp2, 2.0**-22, 0.0),
    ("log2", torch.log2, 2.0**-22, 2.0**-22),
    ("reciprocal", torch.reciprocal, 2.0**-23, 0.0),
)


def flushed(x):
    """Subnormal numbers as 0, with their sign."""
    return torch.where(x.abs() < LEAST_NORMAL, x * 0, x)


@cuda
@pytest.mark.parametrize("index", range(len(FUNCTIONS)), ids=[function[0] for function in FUNCTIONS])
def test_functions(probe, device, index):
    _, formula, relative, absolute = FUNCTIONS[index]
    special = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -126.0, -126.5, -127.0, -149.0, 128.0])
    x = torch.cat([special, torch.randn(4096), all_values(torch.float32)])
    y = torch.empty_like(x, device=device)
    probe.run("apply", index, x.to(device), y, len(x))

    exact = flushed(formula(flushed(x.double())))
    y = y.cpu().double()
    finite = exact.abs() < 2.0**128 * (1 - 2.0**-23)  # beyond, rounding decides
    assert_identical(y[~finite & (exact.abs() >= 2.0**128)].float(), exact[~finite & (exact.abs() >= 2.0**128)].float())
    assert torch.equal(y.isnan(), exact.isnan())
    excess = ((y - exact).abs() - exact.abs() * relative)[finite]
    worst = excess.argmax()
    assert excess[worst] <= absolute, f"{x[finite][worst]!r}: {y[finite][worst]!r}, exact {exact[finite][worst]!r}"


# ---------------------------------------------------------------------------------------------------------------------
# Words, sums in global memory, barriers: copy.cuh, barrier.cuh

TARGETS = 7  # as in probe.cu
WORDS = 128


@cuda
def test_add_global(probe, device):
    """Whole numbers, whose sums are exact in any order."""
    x = torch.randint(-100, 100, (10_000, 4)).float()
    before = torch.randint(-100, 100, (TARGETS + 1, 4)).float()
    y = before.to(device)
    probe.run("add_quads", x.to(device), y, len(x))
    expected = before.clone()
    expected.index_add_(0, torch.arange(len(x)) % TARGETS, x)
    assert_identical(y, expected)


@cuda
def test_transpose_matrix(probe, device):
    x = torch.randint(-(2**15), 2**15, (8, 8)).to(torch.int16)
    y = torch.empty_like(x, device=device)
    probe.run("transpose", x.to(device), y)
    assert torch.equal(y.cpu(), x.t())


@cuda
@pytest.mark.parametrize("count", [0, 1, 77, WORDS])
def test_words(probe, device, count):
    """Of words that do not exist nothing is read, and they count as 0."""
    x = torch.randint(-(2**31), 2**31, (WORDS,)).to(torch.int32)
    y = torch.empty(WORDS, dtype=torch.int32, device=device)
    probe.run("reverse_words", x.to(device), y, count)
    expected = torch.where(torch.arange(WORDS) < count, x, 0).flip(0)
    assert torch.equal(y.cpu(), expected)


@cuda
def test_barrier(probe, device):
    pairs, times = 4, 15
    x = torch.randint(0, 1000, (pairs, 32), dtype=torch.int32)
    y = torch.empty_like(x, device=device)
    probe.run("hand_over", x.to(device), y, times)
    expected = x
    for step in range(times):
        expected = expected.flip(1)
        expected = expected + 1 if step % 2 == 0 else 2 * expected
    assert torch.equal(y.cpu(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# rotate.cuh


@cuda
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(probe, device, interleaved):
    rows, angles = 300, 8
    x, angle = torch.randn(rows, 2 * angles), torch.rand(rows, angles) * 2 * math.pi
    cos, sin = angle.cos(), angle.sin()
    y = torch.empty_like(x, device=device)
    probe.run("rotate_rows", interleaved, x.to(device), cos.to(device), sin.to(device), y, rows)

    shape = (rows, angles, 2) if interleaved else (rows, 2, angles)
    points = x.double().view(shape).movedim(1 if not interleaved else 2, 0)
    turned = torch.complex(*points) * torch.complex(cos.double(), sin.double())
    exact = torch.stack([turned.real, turned.imag], -1 if interleaved else 1).view(rows, -1)
    assert (y.cpu() - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * x.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Tiles in shared memory: shared.cuh, load.cuh


def page_cols(cols):
    return 64 if cols % 64 == 0 else 32


def swizzled(offset, row_bytes):
    """Where tensor copies with a swizzle of row_bytes (128 or 64) put a byte of a page."""
    return offset ^ (offset >> 7 & row_bytes // 16 - 1) << 4


def image(matrix):
    """A matrix of 16-bit elements as a SharedTile holds it, flat."""
    rows, cols = matrix.shape
    width = page_cols(cols)
    row, col = torch.arange(rows)[:, None], torch.arange(cols)
    within = swizzled(row * 2 * width + col % width * 2, 2 * width) // 2
    result = torch.empty(rows * cols, dtype=matrix.dtype)
    result[col // width * rows * width + within] = matrix
    return result


@pytest.mark.parametrize("cols", TILE_COLS)
def test_place_in_a_tile(host, cols):
    chunks = image(torch.arange(TILE_ROWS * cols).view(TILE_ROWS, cols))[::8]  # number of the first element in each
    for place, element in enumerate(chunks.tolist()):
        row, chunk = element // cols, element % cols // 8
        assert host.call("tile_offset", cols, row, chunk) == 16 * place
        assert host.call("tile_offset_by_parts", cols, row, chunk) == 16 * place


@pytest.mark.parametrize("cols", TILE_COLS)
def test_neighbouring_rows_lie_in_different_banks(host, cols):
    """Eight rows, from a multiple of eight on, that are read or written in one go meet no bank twice."""
    for row, chunk in itertools.product(range(0, TILE_ROWS, 8), range(cols // 8)):
        groups = {host.call("tile_offset", cols, row + i, chunk) // 16 % 8 for i in range(8)}
        assert len(groups) == 8


# Rows in global memory: number of that where the cursor stands, how many there are, columns short of the tile's.
PLACES = ((0, TILE_ROWS, 0), (0, 77, 8), (-5, 40, 24), (30, 100, 16), (0, 0, 0), (-200, 20, 0))


def place_of(matrix, cols, scattered):
    """Elements (TILE_ROWS, cols) in the middle of a matrix; at aligned addresses and adjacent, or else scattered."""
    first, step = (5, 3) if scattered else (8, 1)
    return matrix[1 : 1 + TILE_ROWS, first : first + cols * step : step]


def matrix_around(cols, scattered, dtype):
    return torch.randn(TILE_ROWS + 2, cols * (3 if scattered else 1) + 24).to(dtype)


def exists(row, count):
    """Which rows of a tile there are, if the first has the number `row`."""
    rows = torch.arange(row, row + TILE_ROWS)[:, None]
    return (rows >= 0) & (rows < count)


@cuda
@pytest.mark.parametrize("loaders", [32, 256])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("cols", TILE_COLS)
@pytest.mark.parametrize("dtype", HALF)
def test_load(probe, device, loaders, dtype, cols, scattered, place):
    row, count, short = place
    used = cols - short - 3 * scattered
    rows = place_of(matrix_around(used, scattered, DTYPES[dtype]).to(device), used, scattered)
    found = torch.empty(TILE_ROWS * cols, dtype=rows.dtype, device=device)
    cursor = rows, rows.stride(0), row, count, used, rows.stride(1)
    probe.run("load_tile", loaders, dtype_index(dtype), cols, scattered, found, *cursor)

    expected = torch.zeros(TILE_ROWS, cols, dtype=rows.dtype)
    expected[:, :used] = torch.where(exists(row, count), rows.cpu(), 0)
    assert_identical(found, image(expected))


@cuda
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("cols", TILE_COLS)
@pytest.mark.parametrize("dtype", HALF)
def test_store(probe, device, dtype, cols, scattered, place):
    row, count, short = place
    used = cols - short - 3 * scattered
    values = torch.randn(TILE_ROWS, cols)
    before = matrix_around(used, scattered, DTYPES[dtype])
    after = before.to(device)
    rows = place_of(after, used, scattered)
    found = torch.empty(TILE_ROWS * cols, dtype=rows.dtype, device=device)
    cursor = rows, rows.stride(0), row, count, used, rows.stride(1)
    probe.run("store_tile", dtype_index(dtype), cols, scattered, found, values.to(device), *cursor)

    rounded = values.to(rows.dtype)
    expected = before.clone()
    place_of(expected, used, scattered).copy_(
        torch.where(exists(row, count), rounded[:, :used], place_of(before, used, scattered))
    )
    assert_identical(found, image(rounded))
    assert_identical(after, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Fragments and products: fragment.cuh, reduce.cuh, gemm.cuh


@cuda
def test_rows_of_a_fragment(probe, device):
    x, factors = torch.randint(-50, 50, (32, 64)).float(), torch.randn(32)
    x[3], x[4, 1:] = -math.inf, -math.inf
    row_max, row_sum = torch.empty(2, 32, device=device)
    scaled = torch.empty_like(x, device=device)
    probe.run("fragment_rows", x.to(device), factors.to(device), row_max, row_sum, scaled)
    assert_identical(row_max, x.amax(1))
    assert_identical(row_sum, x.sum(1))
    assert_identical(scaled, x * factors[:, None])


LEFT = ("along_cols", "along_rows", "packed")
SHAPES = ((64, 32), (32, 64), (96, 96), (64, 128))  # (depth, cols); as in probe.cu


@cuda
@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=map(str, SHAPES))
@pytest.mark.parametrize("right_along_cols", [False, True])
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("dtype", HALF)
def test_product(probe, device, dtype, left, right_along_cols, shape):
    """Small integers, whose sums are exact: an element in the wrong place shows."""
    rows, (depth, cols) = 64, SHAPES[shape]
    parts = 2 if cols.bit_count() == 1 else 1
    a = torch.randint(-8, 9, (rows, depth)).to(DTYPES[dtype])
    b = torch.randint(-8, 9, (depth, parts * cols)).to(DTYPES[dtype])
    a_tile = (a.t() if left == "along_rows" else a).contiguous().to(device)
    b_tile = (b.t() if right_along_cols else b).contiguous().to(device)
    for part in range(parts):
        c = torch.empty(rows, cols, device=device)
        probe.run("multiply", dtype_index(dtype), LEFT.index(left), right_along_cols, shape, a_tile, b_tile, c, part)
        assert_identical(c, 1 + a.float() @ b[:, part * cols : (part + 1) * cols].float())


# ---------------------------------------------------------------------------------------------------------------------
# Copies of boxes and products of warpgroups: tensor_map.h, pipeline.cuh, warpgroup.cuh, and what they stand on

BOX_ROWS = 128
BOX_SHAPES = (  # (depth, cols); as in probe.cu: those of Q K^T, then those of P V
    *((64, 128), (96, 128), (128, 176), (192, 112), (256, 80), (256, 64)),
    *((128, 64), (128, 96), (176, 128), (112, 192), (80, 256)),
)
sm90 = pytest.mark.sm90


@cuda
@sm90
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", range(len(BOX_SHAPES)), ids=map(str, BOX_SHAPES))
@pytest.mark.parametrize("dtype", HALF)
def test_product_of_boxes(probe, device, dtype, shape, packed, accumulate):
    """Small integers again. What the left matrix lacks of a tile's rows and columns reads as zeros."""
    depth, cols = BOX_SHAPES[shape]
    rows, used = (100, depth - 8) if accumulate else (BOX_ROWS, depth)
    a = torch.randint(-8, 9, (rows, used)).to(DTYPES[dtype])
    b = torch.randint(-8, 9, (depth, cols)).to(DTYPES[dtype])
    before = torch.randint(-8, 9, (BOX_ROWS, cols)).float()
    c = before.to(device)
    b_tile = (b.t() if shape < 6 else b).contiguous().to(device)
    probe.run("multiply_boxes", dtype_index(dtype), shape, packed, a.to(device), rows, used, b_tile, c, accumulate)

    expected = before if accumulate else torch.zeros_like(before)
    expected[:rows] += a.float() @ b[:used].float()
    assert_identical(c + 0, expected + 0)  # no -0


@cuda
@sm90
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("rows, short", [(BOX_ROWS, 0), (77, 8), (1, 24)])
@pytest.mark.parametrize("cols", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALF)
def test_store_of_a_box(probe, device, dtype, cols, rows, short, direct):
    """The matrix ends inside the tile; beyond it nothing is written."""
    used = cols - short
    values = torch.randn(BOX_ROWS, cols)
    memory = torch.full((BOX_ROWS * cols,), 7.0, dtype=DTYPES[dtype], device=device)
    probe.run("store_box", dtype_index(dtype), cols, direct, values.to(device), memory, rows, used)
    torch.cuda.synchronize()
    expected = torch.full_like(memory, 7.0, device="cpu")
    expected[: rows * used] = values[:rows, :used].reshape(-1).to(expected.dtype)
    assert_identical(memory, expected)


@cuda
@sm90
@pytest.mark.parametrize("dtype", HALF)
def test_transposed_store(probe, device, dtype):
    values = torch.randn(TILE_ROWS, 64)
    found = torch.empty(TILE_ROWS * 64, dtype=DTYPES[dtype], device=device)
    probe.run("store_transposed_tile", dtype_index(dtype), values.to(device), found)
    assert_identical(found, image(values.t().contiguous().to(DTYPES[dtype])))


@cuda
@sm90
@pytest.mark.parametrize("group, row", [(0, 0), (4, 32), (2, 50), (6, 0), (0, 100)])
def test_sum_of_boxes(probe, device, group, row):
    """What lies outside of the tensor is left out."""
    groups, rows = 6, 96
    before, box = torch.randint(-9, 10, (groups, rows, 16)).float(), torch.randint(-9, 10, (4, 64, 16)).float()
    sums = before.to(device)
    probe.run("add_box", sums, groups, rows, box.to(device), group, row)
    before[group : group + 4, row : row + 64] += 2 * box[: max(0, groups - group), : max(0, rows - row)]
    assert_identical(sums + 0, before + 0)


# ---------------------------------------------------------------------------------------------------------------------
# Random bits: philox.cuh and the keep mask that stands on it

# Rounds, key, counter (four words), result: of the paper's own library, Random123.
KNOWN_ANSWERS = (
    (7, 0, (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (10, 0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (7, 2**64 - 1, (2**32 - 1,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, 2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
)


def signed(word, bits):
    """The integer of `bits` bits with the same pattern."""
    return word - (word >> bits - 1 << bits)


def draw(probe, device, rounds, key, counters):
    """Words (n, 4) for counters (n, 4), both int64 tensors of 32-bit words."""
    pairs = (counters[:, 0::2] | counters[:, 1::2] << 32).to(device)
    words = torch.empty(len(counters), 4, dtype=torch.int32, device=device)
    probe.run("draw", rounds, key, pairs, words, len(counters))
    return words.cpu().long() & 0xFFFFFFFF


@cuda
@pytest.mark.parametrize("rounds, key, counter, words", KNOWN_ANSWERS)
def test_philox_known_answers(probe, device, rounds, key, counter, words):
    assert draw(probe, device, rounds, signed(key, 64), torch.tensor([counter])).tolist() == [list(words)]


@cuda
@pytest.mark.parametrize("rounds", [7, 10])
def test_philox(probe, device, rounds):
    counters = torch.randint(2**32, (1000, 4))
    key = torch.randint(2**32, (2,)).tolist()
    expected = philox(counters.unbind(1), key, rounds)
    found = draw(probe, device, rounds, signed(key[1] << 32 | key[0], 64), counters)
    assert torch.equal(found, torch.stack(expected, 1))


@cuda
@pytest.mark.parametrize("transposed_keys", [0, 16, 32])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17, 0.5, 0.999])
@pytest.mark.parametrize("state", [(0, 0), (1234, 4), (-3, 2**40 + 1), (2**62 + 7, 2**32 - 64)], ids=str)
def test_keep_mask(probe, device, state, dropout_p, transposed_keys):
    batch, heads, rows, cols = 2, 3, 64, 192
    kept = torch.ones(batch * heads, rows, cols, dtype=torch.bool, device=device)
    rng_state = torch.tensor(state)
    threshold = dropout.keep_threshold(dropout_p)
    probe.run("drop", transposed_keys, batch, heads, rows, cols, rng_state.to(device), threshold, kept)
    expected = dropout.keep_mask(rng_state, dropout_p, torch.arange(batch * heads), range(rows), range(cols))
    assert torch.equal(kept.cpu(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Rows: row.cuh, exp_sum.cuh, reduce.cuh


@cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lanes", [4, 8, 32, 96, 256])
@pytest.mark.parametrize("cols, stride, offset", [(1, 1, 0), (3, 9, 2), (64, 64, 0), (1000, 1003, 5), (5001, 5001, 1)])
def test_rows(probe, device, dtype, lanes, cols, stride, offset):
    """A row's group reads it once and writes nothing else, whatever its address; all lanes know its sum and maximum."""
    rows, dtype_name, dtype = 11, dtype, DTYPES[dtype]
    size = offset + rows * stride
    memory = torch.randn(2, size + 64 - size % 16, device=device).to(dtype)  # whose rows are aligned alike
    memory[0, offset + stride :: stride] = -math.inf  # adds nothing to sums of exponentials
    before = memory[1].clone()
    x, y, untouched = (m[offset : offset + rows * stride].view(rows, stride)[:, :cols] for m in (*memory, before))
    sums, maxima = torch.full((2, rows, lanes), math.nan, device=device)
    exp_max, exp_sum = torch.full((2, rows), math.nan, device=device)
    probe.run("copy_rows", dtype_index(dtype_name), x, y, stride, rows, cols, lanes, sums, maxima, exp_max, exp_sum)
    assert_identical(y, x)
    untouched.copy_(x)
    assert_identical(memory[1], before)
    exact = x.double()
    error = 1e-5 * exact[exact.isfinite()].abs().sum(dim=-1, keepdim=True)
    assert ((sums.double() - exact.sum(dim=-1, keepdim=True)).abs().nan_to_num() <= error).all()
    largest = x.float().amax(dim=-1)
    finite = largest.isfinite()
    assert_identical(maxima[finite], largest[finite, None].expand(-1, lanes))
    assert_identical(exp_max[finite], largest[finite])
    exact_sums = torch.exp2(exact - largest.double()[:, None]).sum(dim=-1)
    torch.testing.assert_close(exp_sum[finite].double(), exact_sums[finite], rtol=1e-5, atol=0)
    assert not exp_sum[~finite].any()


@pytest.mark.parametrize(
    "elements, lanes",
    [(0, 4), (1, 4), (128, 4), (129, 8), (1024, 32), (1025, 64), (5000, 160), (32768, 1024), (10**6, 1024)],
)
def test_lanes_for_a_row(host, elements, lanes):
    assert host.call("count_lanes", elements, 32) == lanes
