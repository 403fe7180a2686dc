"""The plugin for vLLM (extras/vllm): its classes called as vLLM calls them, and calls of the functions of its fork."""

import importlib
import importlib.machinery
import inspect
import subprocess
import sys
import types

import interpreters
import oracle
import pytest
import stand_in_vllm
import torch

import flash_attn
import flash_attn_vllm
from flash_attn.functional import to_float8
from flash_attn_vllm import interface

HEADS, HEADS_K, DIM, BLOCK = 4, 2, 16, 4
SIZES = {  # (rows of queries, keys) of each request; the last two pad a batch for a CUDA graph
    "mixed": [(1, 9), (5, 5), (3, 11), (1, 1)],
    "decode": [(1, 4), (1, 13), (1, 7)],
    "padded": [(2, 6), (1, 3), (0, 0), (0, 0)],
}


class Batch:
    """Requests whose keys lie in pages, with what vLLM says of them."""

    def __init__(self, vllm, device, sizes, dtype=None, **given):
        self.dtype = dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32)
        torch.manual_seed(0)
        rows, keys = zip(*sizes)
        self.starts = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32)
        self.lengths = torch.tensor(keys, dtype=torch.int32)
        self.q = torch.randn(sum(rows), HEADS, DIM, dtype=self.dtype, device=device)
        self.k, self.v = (
            [torch.randn(n, HEADS_K, DIM, dtype=self.dtype, device=device) for n in keys] for _ in range(2)
        )
        columns = max(-(-max(keys) // BLOCK), 1)
        table = torch.randperm(columns * len(sizes) + 1)[: columns * len(sizes)].view(len(sizes), columns).int()
        self.cache = torch.full((columns * len(sizes) + 1, HEADS_K, BLOCK, 2 * DIM), torch.nan, dtype=self.dtype)
        for b, n in enumerate(keys):
            for j in range(n):
                block = self.cache[table[b, j // BLOCK], :, j % BLOCK]
                block[:, :DIM], block[:, DIM:] = self.k[b][j], self.v[b][j]
        self.cache = self.cache.to(device)
        self.common = vllm.base.CommonAttentionMetadata(
            query_start_loc=self.starts.to(device),
            query_start_loc_cpu=self.starts,
            seq_lens=self.lengths.to(device),
            num_reqs=len(sizes),
            num_actual_tokens=sum(rows),
            max_query_len=max(rows),
            max_seq_len=max(keys),
            block_table_tensor=table.to(device),
            slot_mapping=torch.zeros(sum(rows), dtype=torch.int64, device=device),
            seq_lens_cpu_upper_bound=self.lengths,
            **given,
        )

    def expected(self, seen=None, **options):
        """In float64, request by request. seen(b, position, key) -> what a row sees beside the options."""
        outs = []
        for b, n in enumerate(self.lengths.tolist()):
            q = self.q[self.starts[b] : self.starts[b + 1]]
            own = {name: value[b] if isinstance(value, list) else value for name, value in options.items()}
            if seen is not None:
                position = torch.arange(n - len(q), n, device=q.device)[:, None]
                own["seen"] = seen(b, position, torch.arange(n, device=q.device))
            q, k, v = (x[None].double() for x in (q, self.k[b], self.v[b]))
            outs.append(oracle.attention(q, k, v, **own)[0][0])
        return torch.cat(outs)

    def check(self, found, expected):
        tolerance = 2e-2 if self.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def _config(mode="NONE", layers=(), **model):
    full = types.SimpleNamespace(has_full_cudagraphs=lambda: mode == "FULL")
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(**({"is_mm_prefix_lm": False, "rswa_window": None} | model)),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=types.SimpleNamespace(mixed_mode=lambda: full),
            static_forward_context=dict(enumerate(layers)),
        ),
    )


def _builder(vllm, device, **config):
    spec = types.SimpleNamespace(block_size=BLOCK, head_size=DIM)
    builder = vllm.backend.FlashAttentionBackend.get_builder_cls()
    return builder(spec, ["layer"], _config(**config), torch.device(device))


def _run(vllm, batch, metadata, layer=None, **options):
    impl = vllm.backend.FlashAttentionBackend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_K, **options)
    output = torch.full_like(batch.q, torch.nan)
    assert impl.forward(layer, batch.q, None, None, batch.cache, metadata, output) is output
    return output


def _window(sliding_window):
    return dict(window_size=(sliding_window - 1, 0))


SINKS = torch.tensor([1.0, -2.0, 0.0, 3.0])
SLOPES = [0.5, 0.25, 0.125, 0.0625]
LAYERS = {  # options of a layer -> those of the oracle
    "plain": (lambda device: {}, dict(causal=True)),
    "window": (lambda device: dict(sliding_window=3), dict(causal=True, **_window(3))),
    "softcap": (lambda device: dict(logits_soft_cap=2.0), dict(causal=True, softcap=2.0)),
    "sinks": (lambda device: dict(sinks=SINKS.to(device)), dict(causal=True, learnable_sink=SINKS)),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(vllm, device, sizes, layer):
    given, options = LAYERS[layer]
    batch = Batch(vllm, device, sizes)
    found = _run(vllm, batch, _builder(vllm, device).build(0, batch.common), **given(device))
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    batch.check(found, batch.expected(**options))


def test_alibi(vllm, device):
    batch = Batch(vllm, device, SIZES["mixed"])
    with torch.device(device):  # as where vLLM makes its layers
        found = _run(vllm, batch, _builder(vllm, device).build(0, batch.common), alibi_slopes=SLOPES)
    batch.check(found, batch.expected(causal=True, alibi_slopes=torch.tensor(SLOPES, device=device)))


@pytest.mark.parametrize("window", [None, 3])
def test_each_request_causal_or_not(vllm, device, window):
    """A window then looks as far ahead as back, in requests that are not causal."""
    causal = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    batch = Batch(vllm, device, SIZES["mixed"], causal=causal.to(device))
    found = _run(vllm, batch, _builder(vllm, device).build(0, batch.common), sliding_window=window)
    side = -1 if window is None else window - 1
    options = dict(causal=causal.bool().tolist(), window_size=(side, side))
    batch.check(found, batch.expected(**options))


IMAGES = {0: [(2, 4)], 1: [(0, 1), (3, 9)], 2: [(7, 9), (3, 3)]}  # of a row before the chunk, beyond it, and of one row


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["unknown to the builder", ""])
def test_images(vllm, device, window, clamp, known):
    """Rows of an image see all of it; what is beyond the tokens so far is not there yet."""
    batch = Batch(vllm, device, SIZES["mixed"], mm_req_doc_ranges=IMAGES)
    impl = vllm.backend.FlashAttentionImpl(HEADS, DIM, 1.0, HEADS_K, sliding_window=window)
    layer = types.SimpleNamespace(mm_prefix_clamp_sliding_window=clamp, impl=impl)
    layers = [layer, types.SimpleNamespace()] if known else []
    metadata = _builder(vllm, device, is_mm_prefix_lm=True, layers=layers).build(0, batch.common)
    assert len(metadata.image_ranges) == known
    found = _run(vllm, batch, metadata, layer, sliding_window=window)

    def seen(b, position, key):
        near = position - key < (window or 1000)
        within = torch.zeros_like(near)
        for first, last in IMAGES.get(b, []):
            if first < last:
                within |= (position >= first) & (position <= last) & (key >= first) & (key <= last)
        return (key <= position) & near | (within & near if clamp else within)

    batch.check(found, batch.expected(seen))
    metadata.mm_prefix_query_range_tensor = None  # as models do for their global layers
    batch.check(_run(vllm, batch, metadata), batch.expected(causal=True))


def test_ranges_are_made_once_for_all_layers(vllm, monkeypatch):
    """In the builder, into the tensors that graphs were captured with, for each window that there is."""
    layers = [
        types.SimpleNamespace(impl=vllm.backend.FlashAttentionImpl(HEADS, DIM, 1.0, sliding_window=window))
        for window in (None, 3, 3)
    ]
    builder = _builder(vllm, "cpu", is_mm_prefix_lm=True, layers=layers)
    batch = Batch(vllm, "cpu", SIZES["mixed"], mm_req_doc_ranges=IMAGES)
    captured = builder.build_for_cudagraph_capture(batch.common)
    metadata = builder.build(0, batch.common)
    monkeypatch.setattr(vllm.backend, "_image_ranges", None)
    for left in (-1, 2):
        ranges = metadata.key_ranges(left, False)
        assert ranges.data_ptr() == captured.key_ranges(left, False).data_ptr() and ranges.shape == (1, 10, 2)


@pytest.mark.parametrize("level", [0, 1])
def test_batches_of_text(vllm, monkeypatch, level):
    """Of a model with images: flags say what rows see, but not in a graph or where bits are to be as beside images."""
    monkeypatch.setattr(flash_attn, "get_batch_invariant", lambda: level, raising=False)
    batch = Batch(vllm, "cpu", SIZES["mixed"], mm_req_doc_ranges=IMAGES)
    builder = _builder(vllm, "cpu", is_mm_prefix_lm=True)
    builder.build(0, batch.common)
    batch.common.mm_req_doc_ranges = None
    metadata, captured = builder.build(0, batch.common), builder.build_for_cudagraph_capture(batch.common)
    assert (metadata.key_ranges(-1, False) is None) == (level == 0)
    assert captured.mm_prefix_query_range_tensor.unique().tolist() == [-1]  # not the images of the batch before
    batch.check(_run(vllm, batch, captured), batch.expected(causal=True))
    batch.check(_run(vllm, batch, metadata), batch.expected(causal=True))


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("padding", [0, 2])
def test_prefix_beside_a_window(vllm, device, where, padding):
    """vLLM may say on the host how long prefixes are, and only of requests that are there. The tensors of a graph are
    filled anew, also if it was captured without prefixes.
    """
    prefixes = [2, 5, 0, 1] + [0] * padding
    batch = Batch(vllm, device, SIZES["mixed"] + [(0, 0)] * padding)
    builder = _builder(vllm, device, rswa_window=2)
    captured = builder.build_for_cudagraph_capture(batch.common)
    batch.check(_run(vllm, batch, captured), batch.expected(causal=True))
    lengths = torch.tensor(prefixes[:4], dtype=torch.int32)
    batch.common.rswa_prefix_lens = lengths if where == "host" else lengths.to(device)
    builder.build(0, batch.common)
    batch.check(
        _run(vllm, batch, captured),
        batch.expected(lambda b, position, key: (key <= position) & ((key < prefixes[b]) | (position - key < 2))),
    )


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_common_prefix(vllm, device, sinks, monkeypatch):
    """The keys that requests share are attended to once, unless bits must not depend on who shares them; parts of a
    page are not shared.
    """
    level = [0]
    monkeypatch.setattr(flash_attn, "get_batch_invariant", lambda: level[0], raising=False)
    batch = Batch(vllm, device, [(1, 9), (3, 11), (2, 10)])
    table = batch.common.block_table_tensor
    table[:, 0] = table[0, 0]
    for b in (1, 2):
        batch.k[b][:BLOCK], batch.v[b][:BLOCK] = batch.k[0][:BLOCK], batch.v[0][:BLOCK]
    builder = _builder(vllm, device)
    metadata = builder.build(BLOCK + 1, batch.common)
    assert metadata.common_prefix_len == BLOCK
    sinks = None if sinks is None else sinks.to(device)
    batch.check(_run(vllm, batch, metadata, sinks=sinks), batch.expected(causal=True, learnable_sink=sinks))
    batch.check(_run(vllm, batch, metadata, sliding_window=3), batch.expected(causal=True, **_window(3)))
    with torch.device(device):
        found = _run(vllm, batch, metadata, alibi_slopes=SLOPES)
    batch.check(found, batch.expected(causal=True, alibi_slopes=torch.tensor(SLOPES, device=device)))
    asked = dict(use_alibi=False, use_sliding_window=False, use_local_attention=False, num_sms=132)
    builder.head_size = 128
    assert builder.use_cascade_attention(2048, [1] * 20, 8, 2, **asked)
    assert not builder.use_cascade_attention(2048, [1] * 2, 8, 2, **asked)
    for name in ("use_alibi", "use_sliding_window", "use_local_attention"):
        assert not builder.use_cascade_attention(2048, [1] * 20, 8, 2, **(asked | {name: True}))
    level[0] = 1
    assert not builder.use_cascade_attention(2048, [1] * 20, 8, 2, **asked)
    assert builder.build(BLOCK + 1, batch.common).common_prefix_len == 0


@pytest.mark.parametrize("window", [None, 3])
def test_encoder(vllm, device, window):
    """Without a cache, in both directions. Rows behind the batch are not read, and nothing is written there."""
    sizes = [(n, n) for n in (3, 7, 1)]
    batch = Batch(vllm, device, sizes)
    impl = vllm.backend.FlashAttentionImpl(
        HEADS, DIM, DIM**-0.5, HEADS_K, sliding_window=window, attn_type=vllm.base.AttentionType.ENCODER_ONLY
    )
    more = torch.full((2, HEADS, DIM), torch.nan, dtype=batch.dtype, device=device)
    q, k, v = (torch.cat([*x, more[:, : x[0].shape[-2]]]) for x in ((batch.q,), batch.k, batch.v))
    output = torch.zeros_like(q)
    metadata = _builder(vllm, device).build(0, batch.common)
    impl.forward(None, q, k, v, None, metadata, output)
    side = -1 if window is None else window - 1
    batch.check(output[:-2], batch.expected(window_size=(side, side)))
    assert not output[-2:].any()


@pytest.mark.parametrize("shape", ["(blocks, heads, block, 2 dim)", "(2, blocks, block, heads, dim)"])
def test_cache_update(vllm, device, shape):
    """Both shapes of caches, by vLLM's op on a GPU. Negative slots are skipped."""
    backend = vllm.backend.FlashAttentionBackend
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_K)
    cache = torch.zeros(3, HEADS_K, BLOCK, 2 * DIM, device=device)
    if shape[1] == "2":
        cache = torch.zeros(backend.get_kv_cache_shape(3, BLOCK, HEADS_K, DIM), device=device)
        assert len(backend.get_kv_cache_stride_order()) == cache.dim()
    k, v = torch.randn(2, 4, HEADS_K, DIM, device=device)
    layer = types.SimpleNamespace(_k_scale=None, _v_scale=None)
    impl.do_kv_cache_update(layer, k, v, cache, torch.tensor([5, -1, 0], device=device))
    keys, values = vllm.backend._keys_and_values(cache, DIM)
    assert torch.equal(keys[1, 1], k[0]) and torch.equal(values[1, 1], v[0])
    assert torch.equal(keys[0, 0], k[2]) and torch.equal(values[0, 0], v[2])
    assert cache.count_nonzero() == 4 * HEADS_K * DIM


@pytest.mark.parametrize("shared", [0, BLOCK])
@pytest.mark.parametrize("scales", ["one", "heads"])
def test_cache_in_8_bits(vllm, device, scales, shared):
    """What vLLM writes there, with the scales of the layer, by its own op or here, is what is attended to."""
    batch = Batch(vllm, device, [(1, 9), (2, 6), (3, 11)], dtype=torch.bfloat16)
    if shared:
        batch.common.block_table_tensor[:, 0] = batch.common.block_table_tensor[0, 0]
        for x in (batch.k, batch.v):
            x[1:] = [torch.cat([x[0][:shared], each[shared:]]) for each in x[1:]]
    size = () if scales == "one" else (HEADS_K,)
    layer = types.SimpleNamespace(**{f"_{name}_scale": torch.rand(size, device=device) / 9 + 0.01 for name in "kv"})
    impl = vllm.backend.FlashAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_K, kv_cache_dtype="fp8")
    batch.cache = to_float8(batch.cache).view(torch.uint8)  # NaN
    table = batch.common.block_table_tensor.long()
    for b in range(3):
        place = torch.arange(len(batch.k[b]), device=device)
        slots = table[b, place // BLOCK] * BLOCK + place % BLOCK
        impl.do_kv_cache_update(layer, batch.k[b], batch.v[b], batch.cache, slots)
        for x, scale in ((batch.k, layer._k_scale), (batch.v, layer._v_scale)):
            x[b] = to_float8(x[b], scale).double() * scale[..., None]
    metadata = _builder(vllm, device).build(shared, batch.common)
    output = torch.full_like(batch.q, torch.nan)
    impl.forward(layer, batch.q, None, None, batch.cache, metadata, output)
    batch.check(output, batch.expected(causal=True))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_metadata_of_a_graph(vllm, mode):
    """A graph that may hold prompts knows no bounds; tensors stay where they were."""
    batch = Batch(vllm, "cpu", SIZES["decode"], mm_req_doc_ranges={})
    builder = _builder(vllm, "cpu", mode=mode, is_mm_prefix_lm=True)
    assert builder._cudagraph_support is vllm.base.AttentionCGSupport.ALWAYS
    captured = builder.build_for_cudagraph_capture(batch.common)
    assert captured.max_seq_len is None
    assert captured.max_query_len == (None if mode == "FULL" else 1)
    again = builder.build_for_cudagraph_capture(batch.common)
    for name in ("positions", "mm_prefix_query_range_tensor", "seq_lens", "query_start_loc", "block_table"):
        assert getattr(captured, name).data_ptr() == getattr(again, name).data_ptr(), name
    other = builder.update_block_table(again, table := torch.zeros(3, 1), slots := torch.zeros(3))
    assert other.block_table is table and other.slot_mapping is slots and again.block_table is not table


@pytest.mark.cuda
@pytest.mark.parametrize("layer", LAYERS)
def test_a_graph_of_decoding_serves_prompts(vllm, layer):
    """Captured with one row for each request, as vLLM does; replayed with other lengths, rows and pages."""
    given = LAYERS[layer][0]("cuda")
    impl = vllm.backend.FlashAttentionImpl(HEADS, DIM, DIM**-0.5, HEADS_K, **given)
    sizes = [(1, 9), (4, 40), (2, 11), (0, 0), (0, 0), (0, 0), (0, 0)]
    batch = Batch(vllm, "cuda", sizes)
    static = Batch(vllm, "cuda", [(1, 1)] * 7)
    static.common.block_table_tensor = torch.zeros_like(batch.common.block_table_tensor)
    static.cache = torch.zeros_like(batch.cache)
    metadata = _builder(vllm, "cuda", mode="FULL").build_for_cudagraph_capture(static.common)
    output = torch.empty_like(static.q)
    impl.forward(None, static.q, None, None, static.cache, metadata, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(None, static.q, None, None, static.cache, metadata, output)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        getattr(static.common, name).copy_(getattr(batch.common, name))
    static.q.copy_(batch.q)
    static.cache.copy_(batch.cache)
    graph.replay()
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in LAYERS[layer][1].items()}
    batch.check(output, batch.expected(**options))


def test_capabilities(vllm):
    """They say what the tests above show; batch invariance is there if flash_attn has the switch."""
    backend = vllm.backend.FlashAttentionBackend
    assert backend.supports_sink() and backend.supports_mm_prefix() and backend.supports_non_causal()
    assert backend.supports_sliding_window() and backend.supports_rswa()
    assert all(backend.supports_attn_type(kind) for kind in vllm.base.AttentionType)
    assert [size for size in (0, 4, 8, 64, 100, 256, 512, 520) if backend.supports_head_size(size)] == [8, 64, 256, 512]
    assert [x for x in ((7, 5), (8, 0), (9, 0), (12, 0)) if backend.supports_compute_capability(x)] == [
        (8, 0),
        (9, 0),
        (12, 0),
    ]
    assert [each for each in backend.supported_kv_cache_dtypes if "fp8" in each] == ["fp8", "fp8_e4m3"]
    for dtype, cache in ((torch.float16, "float16"), (torch.bfloat16, "auto"), (torch.bfloat16, None)):
        assert backend.supports_combination(64, dtype, cache, 16, False, False, False, False, None) is None
    assert "kv_cache_dtype must be auto or that of queries, torch.float16, found bfloat16" == (
        backend.supports_combination(64, torch.float16, "bfloat16", 16, False, False, False, False, None)
    )
    assert backend.supports_batch_invariance() == hasattr(flash_attn, "set_batch_invariant")
    names = {vllm.backend.FlashAttentionBackend: "FLASH_ATTN", vllm.backend.CustomAttentionBackend: "CUSTOM"}
    assert {each: each.get_name() for each in names} == names


def test_batch_invariance_follows_vllm(vllm, monkeypatch):
    """Its switch asks for the level at which chunks do not matter; a level that is chosen stays."""
    level = [0]
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    monkeypatch.setattr(flash_attn, "get_batch_invariant", lambda: level[0], raising=False)
    monkeypatch.setattr(flash_attn, "set_batch_invariant", lambda x: level.__setitem__(0, x), raising=False)
    make = vllm.backend.FlashAttentionImpl
    make(HEADS, DIM, 1.0)
    assert level == [2]
    level[0] = 1
    make(HEADS, DIM, 1.0)
    assert level == [1]
    monkeypatch.delattr(flash_attn, "set_batch_invariant")
    with pytest.raises(RuntimeError, match="VLLM_BATCH_INVARIANT must be unset with a flash_attn without"):
        make(HEADS, DIM, 1.0)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_context_parallelism_is_refused(vllm, kind):
    """Also by a vLLM that does not ask the backend first: it says how many processes there are before __init__."""
    impl = vllm.backend.FlashAttentionImpl.__new__(vllm.backend.FlashAttentionImpl)
    setattr(impl, f"{kind[0]}cp_world_size", 2)
    with pytest.raises(NotImplementedError, match=f"{kind}_context_parallel_size must be 1, found 2"):
        impl.__init__(HEADS, DIM, 1.0)


def test_vllm_that_writes_keys_otherwise_is_refused(vllm, monkeypatch):
    """An old one, by which keys would never be written."""
    monkeypatch.delattr(vllm.base.AttentionBackend, "forward_includes_kv_cache_update")
    with pytest.raises(ImportError, match="needs a vLLM that writes keys to the cache by do_kv_cache_update"):
        importlib.reload(sys.modules["flash_attn_vllm.backend"])


@pytest.mark.parametrize("rows", [0, 3])
def test_batch_without_requests(vllm, device, rows):
    """Only rows that pad."""
    batch = Batch(vllm, device, [(0, 0)])
    batch.q = torch.randn(rows, HEADS, DIM, dtype=batch.dtype, device=device)
    batch.common.num_actual_tokens = rows
    for model in ({}, dict(is_mm_prefix_lm=True), dict(rswa_window=2)):
        assert not _run(vllm, batch, _builder(vllm, device, **model).build(0, batch.common)).any()


def test_profiling_run(vllm):
    impl = vllm.backend.FlashAttentionImpl(HEADS, DIM, 1.0)
    assert not impl.forward(None, None, None, None, None, None, torch.ones(3, HEADS, DIM)).any()


LAYER_ERRORS = {
    "heads": (dict(num_kv_heads=3), ValueError, "num_kv_heads must divide num_heads, 4, found 3"),
    "e5m2 cache": (dict(kv_cache_dtype="fp8_e5m2"), NotImplementedError, "kv_cache_dtype must be one of .*'fp8_e5m2'"),
    "window": (dict(sliding_window=0), ValueError, "sliding_window must be None or at least 1, found 0"),
    "kind": (dict(attn_type="cross"), ValueError, r"attn_type must be one of \['decoder', .*\], found 'cross'"),
    "sinks": (dict(sinks=torch.zeros(3)), ValueError, r"sinks must have shape \(num_heads,\), \(4,\), found \(3,\)"),
}


@pytest.mark.parametrize(("given", "error", "message"), LAYER_ERRORS.values(), ids=LAYER_ERRORS)
def test_layer_errors(vllm, given, error, message):
    with pytest.raises(error, match=message):
        vllm.backend.FlashAttentionImpl(**(dict(num_heads=HEADS, head_size=DIM, scale=1.0) | given))


def test_call_errors(vllm):
    batch = Batch(vllm, "cpu", SIZES["decode"])
    metadata = _builder(vllm, "cpu").build(0, batch.common)
    impl = vllm.backend.FlashAttentionImpl(HEADS, DIM, 1.0, HEADS_K)
    call = (None, batch.q, None, None, batch.cache[..., :-1], metadata, batch.q)
    with pytest.raises(ValueError, match=r"kv_cache must have shape \(blocks, heads_k, block size, 32\) or .*, found"):
        impl.forward(*call)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=f"{name} must be None, found a tensor"):
            impl.forward(*call, **{name: torch.ones(1)})
    batch.common.causal = torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"causal must be a bool or an int32 tensor .*, found torch.bool"):
        _builder(vllm, "cpu").build(0, batch.common)
    batch.common.causal, batch.common.seq_lens_cpu_upper_bound = True, None
    batch.common.mm_req_doc_ranges = {0: [(0, 2)]}
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound must be given with mm_req_doc_ranges, found None"):
        _builder(vllm, "cpu", is_mm_prefix_lm=True).build(0, batch.common)


# ---------------------------------------------------------------------------------------------------------------------
# Registration, and the name flash_attn


def test_register(vllm):
    flash_attn_vllm.register()
    found = {backend.name: path for backend, path in vllm.registry.registered.items()}
    assert found == {
        "FLASH_ATTN": "flash_attn_vllm.backend.FlashAttentionBackend",
        "CUSTOM": "flash_attn_vllm.backend.CustomAttentionBackend",
    }


def test_a_bare_module_of_vllm_gives_way(tmp_path):
    """It is there if vLLM's fork was imported first; flash_attn.cute goes on to come from its folder."""
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute/__init__.py").write_text("whose = 'vLLM'\n")
    code = f"""
import sys, types
stub = types.ModuleType("flash_attn")
stub.__path__ = [{str(tmp_path)!r}]
sys.modules["flash_attn"] = stub
import flash_attn.cute
sys.path[:] = [path for path in sys.path if "extras/flash-attn" not in path]
import flash_attn_vllm
flash_attn_vllm.own_flash_attn()
import flash_attn, importlib
assert flash_attn is not stub and flash_attn.flash_attn_varlen_func and flash_attn.cute.whose == "vLLM"
del sys.modules["flash_attn.cute"]
assert importlib.import_module("flash_attn.cute").whose == "vLLM"
"""
    interpreters.run(f"import sys; sys.path[:0] = {sys.path!r}\n{code}")


def test_another_flash_attn(monkeypatch):
    other = types.ModuleType("flash_attn")
    other.__path__, other.__file__ = [], "/elsewhere/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    monkeypatch.setattr(importlib, "import_module", lambda name: other)
    with pytest.raises(ImportError, match=r"flash_attn must be this project's package, found /elsewhere.*: install"):
        flash_attn_vllm.own_flash_attn()


def test_without_vllm(monkeypatch):
    monkeypatch.setattr(flash_attn_vllm, "own_flash_attn", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with pytest.raises(ImportError, match=r"needs a vLLM that has vllm\.v1\.attention\.backends\.registry, found: "):
        flash_attn_vllm.register()


INSTALLED = """
import dataclasses, inspect
import torch
import flash_attn_vllm
flash_attn_vllm.register()
from vllm.v1.attention import backend as base
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from flash_attn_vllm.backend import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder

assert AttentionBackendEnum.FLASH_ATTN.get_class() is FlashAttentionBackend
assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"
for cls in (FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder):
    assert not cls.__abstractmethods__, cls.__abstractmethods__
    for name, theirs in vars(cls.__mro__[1]).items():  # each override takes what its base takes
        ours = vars(cls).get(name)
        if inspect.isfunction(ours) and inspect.isfunction(theirs) and name != "__init__":
            missing = inspect.signature(theirs).parameters.keys() - inspect.signature(ours).parameters.keys()
            assert not missing, (cls, name, missing)
missing = inspect.signature(base.AttentionImpl.__init__).parameters.keys()
assert not missing - inspect.signature(FlashAttentionImpl.__init__).parameters.keys()

from vllm.platforms.interface import DeviceCapability
asked = dict(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True,
    use_sparse=False, use_mm_prefix=True, use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0),
    attn_type="decoder", has_sliding_window=True, use_non_causal=True,
)
asked = {name: x for name, x in asked.items()
         if name in inspect.signature(FlashAttentionBackend.validate_configuration).parameters}
check = FlashAttentionBackend.validate_configuration
assert check(**asked) == [], check(**asked)
for wrong in (dict(kv_cache_dtype="fp8_e5m2"), dict(use_mla=True), dict(head_size=576), dict(dtype=torch.float32),
              dict(use_sparse=True), dict(kv_cache_dtype="float16"), dict(use_dcp=True),
              dict(device_capability=DeviceCapability(7, 5))):
    assert len(check(**(asked | wrong))) == 1, wrong

from types import SimpleNamespace
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec
spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=16, dtype=torch.float32)
config = SimpleNamespace(
    model_config=SimpleNamespace(is_mm_prefix_lm=True, rswa_window=None),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
    compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
)
builder = FlashAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
ends = torch.tensor([0, 3, 4], dtype=torch.int32)
lengths = torch.tensor([3, 6], dtype=torch.int32)
common = base.CommonAttentionMetadata(
    query_start_loc=ends, query_start_loc_cpu=ends, seq_lens=lengths, num_reqs=2, num_actual_tokens=4, max_query_len=3,
    max_seq_len=6, block_table_tensor=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    slot_mapping=torch.tensor([0, 1, 2, 13]), seq_lens_cpu_upper_bound=lengths, mm_req_doc_ranges={0: [(0, 1)]},
)
metadata = builder.build_for_cudagraph_capture(common)
assert metadata.max_query_len is None and builder.get_cudagraph_support(config, spec).name == "ALWAYS"
assert metadata.mm_prefix_query_range_tensor.tolist() == [[0, 1], [0, 1], [-1, -1], [-1, -1]]
impl = FlashAttentionImpl(2, 16, 0.25, 1, None, None, "auto")
q, k, v = torch.randn(4, 2, 16), torch.randn(4, 1, 16), torch.randn(4, 1, 16)
cache, output = torch.zeros(4, 1, 4, 32), torch.empty(4, 2, 16)
impl.do_kv_cache_update(None, k, v, cache, common.slot_mapping)
impl.forward(None, q, k, v, cache, metadata, output)
scores = torch.einsum("hd,kd->hk", q[0], k[:2, 0]) / 4  # the first row sees the image, of two keys
assert torch.allclose(output[0], scores.softmax(-1) @ v[:2, 0], atol=1e-5)

import ast, importlib.util
from flash_attn_vllm import interface
folder = importlib.util.find_spec("vllm").submodule_search_locations[0]  # the fork itself needs its extensions
source = ast.parse(open(folder + "/vllm_flash_attn/flash_attn_interface.py").read())
theirs = {f.name: [x.arg for x in f.args.args] for f in source.body if isinstance(f, ast.FunctionDef)}
for name in interface.__all__:
    ours = list(inspect.signature(getattr(interface, name)).parameters)
    assert ours[: len(theirs[name])] == theirs[name], name
print("vLLM agrees")
"""


def test_installed_vllm():
    """The real package: registration, the contract of its classes, and metadata made of its own objects."""
    if importlib.machinery.PathFinder.find_spec("vllm") is None:  # which does not see the stand-in
        pytest.skip("needs vLLM")
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{INSTALLED}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "vLLM agrees" in run.stdout, run.stderr[-3000:]


# ---------------------------------------------------------------------------------------------------------------------
# The functions of vLLM's fork


def _paged(device, sizes=SIZES["mixed"]):
    """A batch as (arguments of vLLM's function by name, the batch)."""
    stand_in = types.SimpleNamespace(base=stand_in_vllm)
    batch = Batch(stand_in, device, sizes)
    k, v = batch.cache.transpose(1, 2).split(DIM, -1)
    common = batch.common
    return batch, dict(
        q=batch.q,
        k=k,
        v=v,
        out=torch.empty_like(batch.q),
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_q=common.max_query_len,
        seqused_k=common.seq_lens,
        max_seqlen_k=common.max_seq_len,
        softmax_scale=DIM**-0.5,
        block_table=common.block_table_tensor,
    )


def test_call_of_a_server(device):
    """Every keyword that vLLM's own backend passes."""
    batch, call = _paged(device)
    ones = torch.ones(1, device=device).expand(4, HEADS_K)
    schedule = interface.get_scheduler_metadata(
        batch_size=4,
        max_seqlen_q=5,
        max_seqlen_k=11,
        num_heads_q=HEADS,
        num_heads_kv=HEADS_K,
        headdim=DIM,
        cache_seqlens=call["seqused_k"],
        qkv_dtype=batch.dtype,
        cu_seqlens_q=call["cu_seqlens_q"],
        page_size=BLOCK,
        causal=True,
        window_size=(2, 0),
        num_splits=0,
    )
    sinks = SINKS.to(device)
    found = interface.flash_attn_varlen_func(
        **call,
        causal=True,
        alibi_slopes=None,
        window_size=[2, 0],
        softcap=0,
        scheduler_metadata=schedule,
        fa_version=3,
        q_descale=None,
        k_descale=ones,
        v_descale=ones,
        dynamic_causal=None,
        num_splits=0,
        s_aux=sinks,
        mask_mod=None,
        aux_tensors=None,
    )
    assert found is call["out"]
    batch.check(found, batch.expected(causal=True, window_size=(2, 0), learnable_sink=sinks))


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_call_over_float8(device, queries):
    """Scales that are expanded, of keys, of values, and of queries, which count if these are in float8."""
    batch, call = _paged(device)
    call |= dict(q=batch.q.to(queries), k=to_float8(call["k"]), v=to_float8(call["v"]))
    call["out"] = call["out"].bfloat16()
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), torch.tensor([[2.0], [0.25], [0.5]], device=device)))
    expanded = {name: scale.expand(4, HEADS_K) for name, scale in scales.items()}
    out = interface.flash_attn_varlen_func(**call, causal=True, **expanded)
    factor = 2.0 if queries == torch.float8_e4m3fn else 1.0
    batch.q = call["q"].float() * factor
    batch.k = [to_float8(x).float() * 0.25 for x in batch.k]
    batch.v = [to_float8(x).float() * 0.5 for x in batch.v]
    torch.testing.assert_close(out.double(), batch.expected(causal=True), atol=1e-2, rtol=1e-2)


def test_causality_of_each_request(device):
    causal = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=device)
    batch, call = _paged(device)
    found = interface.flash_attn_varlen_func(**call, causal=True, dynamic_causal=causal)
    batch.check(found, batch.expected(causal=causal.bool().tolist()))


def test_packed_keys_of_which_not_all_count(device):
    """As version 4 of the fork takes them: where an entry's keys begin, and how many there are."""
    batch, call = _paged(device)
    room = torch.nn.functional.pad((batch.lengths + 3).cumsum(0), (1, 0)).int().to(device)
    for name, keys in (("k", batch.k), ("v", batch.v)):
        call[name] = torch.cat([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3), value=torch.nan) for x in keys])
    found = interface.flash_attn_varlen_func(**(call | dict(block_table=None, cu_seqlens_k=room, fa_version=4)))
    batch.check(found, batch.expected())


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(causal=True, window_size=(3, 0))], ids=str)
def test_keys_of_several_processes(device, options):
    """Each of three has every third key; what they get is merged by softmax_lse."""
    batch, _ = _paged(device)
    parts = []
    for rank in range(3):
        keys, values = ([x[rank::3] for x in each] for each in (batch.k, batch.v))
        own = _paged(device)[1]
        lengths = torch.tensor([len(x) for x in keys], dtype=torch.int32, device=device)
        cache = torch.zeros(5 * 4, BLOCK, HEADS_K, DIM, dtype=batch.dtype, device=device)
        caches = cache, torch.zeros_like(cache)
        table = torch.arange(20, dtype=torch.int32, device=device).view(4, 5)
        for b in range(4):
            for into, x in zip(caches, (keys, values)):
                into[5 * b : 5 * b + 5].view(-1, HEADS_K, DIM)[: len(x[b])] = x[b]
        own |= dict(k=caches[0], v=caches[1], seqused_k=lengths, block_table=table, out=None)
        cp = dict(cp_world_size=3, cp_rank=rank, cp_tot_seqused_k=batch.common.seq_lens)
        parts.append(interface.flash_attn_varlen_func(**own, **options, **cp, return_softmax_lse=True))
    out, _ = flash_attn.functional.combine(*(torch.stack(x) for x in zip(*parts)))
    batch.check(out, batch.expected(**options))


ERRORS = {
    "q_v": (dict(q_v=SINKS), NotImplementedError, "q_v must be None, found a Tensor"),
    "output_scale": (dict(output_scale=SINKS), NotImplementedError, "output_scale must be None, found a Tensor"),
    "mask_mod": (dict(mask_mod=len), NotImplementedError, "mask_mod must be None, found a builtin_function"),
    "aux_tensors": (dict(aux_tensors=[SINKS]), NotImplementedError, "aux_tensors must be None, found a list"),
    "blocks": (dict(block_sparse_tensors=()), NotImplementedError, "block_sparse_tensors must be None, found a tuple"),
    "fa_version": (dict(fa_version=5), ValueError, "fa_version must be 2, 3 or 4, found 5"),
    "e5m2": (
        dict(k=torch.zeros(1, 1, 2, 16, dtype=torch.float8_e5m2)),
        NotImplementedError,
        r"k must be torch.float16 or .*, found torch.float8_e5m2: of 8 bits, keys and values in torch.float8_e4m3fn",
    ),
    "fp8 values": (
        dict(v=torch.zeros(1, 1, 2, 16, dtype=torch.float8_e4m3fn)),
        NotImplementedError,
        r"v must be torch.float16 or .*, found torch.float8_e4m3fn",
    ),
    "gather_kv_indices": (dict(gather_kv_indices=SINKS), NotImplementedError, "gather_kv_indices must be None, found"),
    "gather_kv_valid_length": (
        dict(gather_kv_valid_length=SINKS),
        NotImplementedError,
        "gather_kv_valid_length must be None, found a Tensor",
    ),
    "no lengths": (dict(seqused_k=None), ValueError, "seqused_k must be given if .*, found neither of them"),
    "both": (dict(cu_seqlens_k=SINKS), ValueError, "cu_seqlens_k must be None with seqused_k, .*, found both of them"),
    "both and pages": (
        dict(cu_seqlens_k=SINKS, fa_version=4),
        ValueError,
        "cu_seqlens_k must be None with seqused_k, .*, found both of them",
    ),
    "lengths without pages": (
        dict(block_table=None),
        ValueError,
        "block_table must be given with seqused_k, found None",
    ),
    "pages alone": (
        dict(seqused_k=None, cu_seqlens_k=SINKS),
        ValueError,
        "seqused_k must be given with block_table, found None",
    ),
    "world size": (dict(cp_world_size=0), ValueError, "cp_world_size must be an int at least 1, found 0"),
    "rank": (dict(cp_world_size=2, cp_rank=2), ValueError, "cp_rank must be an int from 0 to 1, found 2"),
    "total": (
        dict(cp_world_size=2, causal=True),
        ValueError,
        "cp_tot_seqused_k must be given with cp_world_size above 1 .*, found None",
    ),
    "causality": (
        dict(cp_world_size=2, dynamic_causal=SINKS),
        NotImplementedError,
        "dynamic_causal must be None with cp_world_size above 1, found a tensor",
    ),
    "s_aux": (dict(s_aux=SINKS[:3]), ValueError, r"learnable_sink must have shape \(4,\), found \(3,\)"),
}


@pytest.mark.parametrize(("given", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(given, error, message):
    _, call = _paged("cpu")
    with pytest.raises(error, match=message):
        interface.flash_attn_varlen_func(**(call | given))


def test_order_of_arguments():
    """The longest lengths come before cu_seqlens; positional callers rely on it."""
    names = list(inspect.signature(interface.flash_attn_varlen_func).parameters)
    assert names[:8] == [
        "q",
        "k",
        "v",
        "max_seqlen_q",
        "cu_seqlens_q",
        "max_seqlen_k",
        "cu_seqlens_k",
        "seqused_k",
    ]
    with pytest.raises(TypeError, match="cache_seqlens must be a tensor, found a int"):
        interface.get_scheduler_metadata(1, 1, 1, 1, 1, 64, 7)
