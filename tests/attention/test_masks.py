"""`flash_attn.masks`: each builder against a mask written down element by element, and in a call of attention."""

import itertools

import oracle
import pytest
import torch

from flash_attn import flash_attn_func, masks

IDS = torch.tensor([[3, 3, 3, 0, 5, 5, -1, 5, -1], [1, 1, 2, 2, 2, 2, 2, -1, -1]])
CU_SEQLENS = torch.tensor([[0, 3, 3, 7, 9], [0, 1, 8, 8, 8]])


def runs(ids):
    """For each row of ids, the (first, last + 1) of the run of equal numbers around each element."""
    spans = []
    for row in ids.tolist():
        spans.append([])
        for i, one in enumerate(row):
            first = last = i
            while first > 0 and row[first - 1] == one:
                first -= 1
            while last + 1 < len(row) and row[last + 1] == one:
                last += 1
            spans[-1].append((first, last + 1))
    return spans


def documents_seen(b, i, j):
    bounds = CU_SEQLENS[b].tolist()
    return any(start <= i < end and start <= j < end for start, end in itertools.pairwise(bounds))


def id_seen(b, i, j):
    first, last = runs(IDS)[b][i]
    return bool(IDS[b, i] >= 0) and first <= j < last


def image_seen(window):
    def seen(b, i, j):
        before = j <= i and (window < 0 or j >= i - window)
        return before or id_seen(b, i, j) or (bool(IDS[b, i] >= 0) and runs(IDS)[b][i][0] <= j <= i)

    return seen


def shifted(seen, seqlen_q, seqlen_k):
    return lambda b, i, j: seen(i + seqlen_k - seqlen_q, j)


CASES = {  # ranges, (batch, seqlen_q, seqlen_k), and whether row i of entry b sees key j
    "documents": (lambda: masks.documents(CU_SEQLENS, 9), (2, 9, 9), documents_seen),
    "documents of one row": (lambda: masks.documents(CU_SEQLENS[0].int(), 9), (1, 9, 9), documents_seen),
    "documents, then padding": (
        lambda: masks.documents(CU_SEQLENS[0, :3], 9),
        (1, 9, 9),
        lambda b, i, j: i < 3 and j < 3,
    ),
    "document ids": (lambda: masks.document_ids(IDS), (2, 9, 9), id_seen),
    "prefix": (lambda: masks.prefix_lm(4, 9), (1, 9, 9), lambda b, i, j: j < 4 or j <= i),
    "prefix of each entry, more keys": (
        lambda: masks.prefix_lm(torch.tensor([4, 0]), 6, 9),
        (2, 6, 9),
        lambda b, i, j: j < (4, 0)[b] or j <= i + 3,
    ),
    "prefix, more rows": (lambda: masks.prefix_lm(2, 9, 6), (1, 9, 6), lambda b, i, j: j < 2 or j <= i - 3),
    "images": (lambda: masks.image_groups(IDS), (2, 9, 9), image_seen(-1)),
    "images and a window": (lambda: masks.image_groups(IDS, 1), (2, 9, 9), image_seen(1)),
    "chunks": (lambda: masks.chunks(4, 9), (1, 9, 9), lambda b, i, j: i // 4 == j // 4),
    "chunks, more keys": (lambda: masks.chunks(4, 6, 9), (1, 6, 9), shifted(lambda i, j: i // 4 == j // 4, 6, 9)),
    "chunks, more rows": (lambda: masks.chunks(4, 9, 6), (1, 9, 6), shifted(lambda i, j: i // 4 == j // 4, 9, 6)),
    "sinks and a window": (
        lambda: masks.sink_and_window(2, (3, 1), 6, 9),
        (1, 6, 9),
        shifted(lambda i, j: j < 2 or i - 3 <= j <= i + 1, 6, 9),
    ),
    "sinks and all before": (
        lambda: masks.sink_and_window(2, (-1, 0), 9, 6),
        (1, 9, 6),
        shifted(lambda i, j: j < 2 or j <= i, 9, 6),
    ),
    "top left": (lambda: masks.top_left_causal(6), (1, 6, 9), lambda b, i, j: j <= i),
}


@pytest.mark.parametrize("name", CASES)
def test_builder(name, device):
    build, (batch, seqlen_q, seqlen_k), seen = CASES[name]
    ranges = build()
    assert ranges.dtype == torch.int32 and ranges.shape[:3] == (batch, 1, seqlen_q)
    expected = torch.tensor(
        [[[[seen(b, i, j) for j in range(seqlen_k)] for i in range(seqlen_q)]] for b in range(batch)]
    )
    assert torch.equal(masks.to_bool(ranges, seqlen_k), expected)
    q, k, v = (torch.randn(batch, n, 2, 8, device=device) for n in (seqlen_q, seqlen_k, seqlen_k))
    out, lse = oracle.attention(q.double(), k.double(), v.double(), seen=expected.to(device))
    found = flash_attn_func(q, k, v, key_ranges=ranges.to(device), return_lse=True)
    torch.testing.assert_close(found, (out.float(), lse.float()))


@pytest.mark.parametrize("name", [name for name in CASES if "image" in name or "doc" in name])
def test_builders_break_no_graph(name):
    build, _, _ = CASES[name]
    assert torch.equal(torch.compile(build, fullgraph=True, backend="eager")(), build())


FAR = 2**31  # a size that int32 does not hold
WIDE = {  # builders with sizes beyond every key hide none
    "prefix": lambda: masks.prefix_lm(FAR, 2),
    "prefix of each entry": lambda: masks.prefix_lm(torch.tensor([FAR]), 2),
    "images and a window": lambda: masks.image_groups(torch.tensor([0, 0]), FAR),
    "chunks": lambda: masks.chunks(FAR, 2),
    "sinks": lambda: masks.sink_and_window(FAR, (0, 0), 2),
    "a window": lambda: masks.sink_and_window(0, (FAR, FAR), 2),
    "beyond int64": lambda: torch.cat([masks.prefix_lm(FAR**3, 2), masks.chunks(FAR**3, 2)], 1),
}


@pytest.mark.parametrize("name", WIDE)
def test_sizes_beyond_every_key(name):
    assert masks.to_bool(WIDE[name](), 2).all()


def test_sizes_may_be_whole_floats():
    def built(two):
        return [
            masks.documents(CU_SEQLENS, 3 * two),
            masks.prefix_lm(two, two, 2 * two),
            masks.image_groups(IDS, two),
            masks.chunks(two, two),
            masks.sink_and_window(two, (two, two), two),
            masks.top_left_causal(two),
            masks.to_bool(CU_SEQLENS[:, :4].int(), two),
        ]

    for one, two in zip(built(2.0), built(2), strict=True):
        assert torch.equal(one, two)


def test_prefix_on_a_device():
    for prefix in (2, torch.tensor(2)):
        assert masks.prefix_lm(prefix, 4, device="meta").device.type == "meta"


def test_documents_in_a_transform():
    each = torch.vmap(lambda cu_seqlens: masks.documents(cu_seqlens, 9))
    assert torch.equal(each(CU_SEQLENS)[:, 0], masks.documents(CU_SEQLENS, 9))


BAD = {
    "cu_seqlens of floats": (lambda: masks.documents(torch.zeros(3), 4), TypeError, "cu_seqlens must have dtype"),
    "cu_seqlens of three dimensions": (lambda: masks.documents(IDS[None], 4), ValueError, "cu_seqlens must have 1 dim"),
    "no cu_seqlens": (lambda: masks.documents(IDS[0, :0], 4), ValueError, "cu_seqlens.* at least 1, found 0"),
    "ids of three dimensions": (lambda: masks.document_ids(IDS[None]), ValueError, "ids must have 2 dimensions"),
    "chunks of nothing": (lambda: masks.chunks(0, 4), ValueError, "size must be at least 1, found 0"),
    "falling cu_seqlens": (
        lambda: masks.documents(torch.tensor([0, 3, 2]), 4),
        ValueError,
        r"each cu_seqlens.* at least 0, found -1",
    ),
    "half a prefix": (lambda: masks.prefix_lm(1.5, 2), ValueError, "prefix must be a whole number, found 1.5"),
    "no prefix": (lambda: masks.prefix_lm(None, 2), TypeError, "prefix must be an integer or .* found NoneType"),
    "a negative prefix": (lambda: masks.prefix_lm(-1, 2), ValueError, "prefix must be at least 0, found -1"),
    "prefixes in two dimensions": (lambda: masks.prefix_lm(IDS, 2), ValueError, "prefix must have 1 dimension"),
    "prefixes of floats": (lambda: masks.prefix_lm(torch.ones(2), 2), TypeError, "prefix must have dtype"),
    "half a chunk": (lambda: masks.chunks(2.5, 5), ValueError, "size must be a whole number, found 2.5"),
    "chunks by name": (lambda: masks.chunks("a", 5), TypeError, "size must be an integer, found str"),
    "negative queries": (lambda: masks.chunks(2, -1), ValueError, "seqlen_q must be at least 0, found -1"),
    "negative keys": (lambda: masks.chunks(2, 1, -1), ValueError, "seqlen_k must be at least 0, found -1"),
    "negative tokens": (lambda: masks.documents(CU_SEQLENS, -1), ValueError, "seqlen must be at least 0, found -1"),
    "rows by name": (lambda: masks.top_left_causal("a"), TypeError, "seqlen_q must be an integer, found str"),
    "half a window": (lambda: masks.image_groups(IDS, 1.5), ValueError, "window must be a whole number, found 1.5"),
    "no window": (lambda: masks.image_groups(IDS, None), TypeError, "window must be an integer, found NoneType"),
    "ids of floats": (lambda: masks.image_groups(IDS.float()), TypeError, "ids must have dtype .*float32"),
    "ids of bools": (lambda: masks.document_ids(IDS > 0), TypeError, "ids must have dtype .*bool"),
    "half a sink": (lambda: masks.sink_and_window(1.5, (1, 0), 2), ValueError, "sinks must be a whole number"),
    "negative sinks": (lambda: masks.sink_and_window(-1, (1, 0), 2), ValueError, "sinks must be at least 0, found -1"),
    "an array": (lambda: masks.to_bool(IDS[..., :2].numpy(), 4), TypeError, "key_ranges must be a torch.Tensor"),
    "a range in no dimensions": (lambda: masks.to_bool(IDS[0, 0], 4), ValueError, "key_ranges.* at least 1, found 0"),
    "a mask in no dimensions": (lambda: masks.from_bool(IDS[0, 0] > 0), ValueError, "keep.* at least 1, found 0"),
    "a window of three": (lambda: masks.sink_and_window(1, (1, 2, 3), 4), ValueError, "window_size must be two"),
    "three bounds": (lambda: masks.to_bool(IDS[..., :3], 4), ValueError, "key_ranges.* must be 2 or 4, found 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, says = BAD[name]
    with pytest.raises(error, match=says):
        call()


def test_ranges_of_a_mask():
    """All masks of six keys: those of at most two ranges come back, also as rows of one mask."""
    masks_of_six = torch.tensor(list(itertools.product([False, True], repeat=6)))
    count = (masks_of_six & ~torch.nn.functional.pad(masks_of_six, (1, 0))[:, :-1]).sum(-1)
    for most in (1, 2):
        keep = masks_of_six[count <= most].view(1, 1, -1, 6)
        ranges = masks.from_bool(keep)
        assert ranges.dtype == torch.int32 and ranges.shape == (*keep.shape[:-1], 2 * most)
        assert torch.equal(masks.to_bool(ranges, 6), keep)
    assert masks.from_bool(masks_of_six[count == 3]) is None
    for shape in ((2, 0), (0, 3)):
        assert masks.from_bool(torch.ones(shape, dtype=torch.bool)).tolist() == [[0, 0]] * shape[0]
    with pytest.raises(TypeError, match=r"keep must have dtype torch\.bool, found torch\.float32"):
        masks.from_bool(torch.ones(3, 3))
