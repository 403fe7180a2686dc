"""The plugin for SGLang (extras/sglang): its backend called as SGLang calls it, and the two functions of its loader."""

import importlib
import importlib.machinery
import subprocess
import sys
import types

import oracle
import pytest
import torch

import flash_attn
import flash_attn_sglang
from flash_attn.functional import to_float8
from flash_attn_sglang import interface

HEADS, HEADS_K, DIM = 4, 2, 16
SINKS = torch.tensor([1.0, -2.0, 0.0, 3.0])


@pytest.fixture(scope="module")
def sglang():
    """A stand-in for what the plugin touches of SGLang, in sys.modules; yields it, with the backend over it."""
    names = ("", ".srt", ".srt.layers", ".srt.layers.attention", ".srt.plugins", ".srt.mem_cache")
    made = {f"sglang{name}": types.ModuleType(f"sglang{name}") for name in names}
    for module in made.values():
        module.__path__ = []
    for name in ("server_args", "layers.attention.attention_registry", "layers.attention.base_attn_backend"):
        made[f"sglang.srt.{name}"] = types.ModuleType(name)
    hooks = made["sglang.srt.plugins.hook_registry"] = types.ModuleType("hook_registry")
    arguments = made["sglang.srt"].server_args = made["sglang.srt.server_args"]
    for name in ("", "_deterministic", "_radix_supported_deterministic"):
        setattr(arguments, f"choices{name}", [])
        setattr(arguments, f"add{name}_attention_backend_choices", getattr(arguments, f"choices{name}").extend)
    registry = made["sglang.srt.layers.attention.attention_registry"]
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = lambda name: lambda make: registry.ATTENTION_BACKENDS.setdefault(name, make)
    made["sglang.srt.layers.attention.base_attn_backend"].AttentionBackend = object
    hooks.registered = []
    hooks.HookType = types.SimpleNamespace(REPLACE="replace")
    hooks.HookRegistry = types.SimpleNamespace(register=lambda *hook: hooks.registered.append(hook))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            patch.delitem(sys.modules, name)
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "flash_attn_sglang.backend", raising=False)
        backend = importlib.import_module("flash_attn_sglang.backend")
        yield types.SimpleNamespace(backend=backend, arguments=arguments, registry=registry, hooks=hooks)
        del sys.modules["flash_attn_sglang.backend"]


class Pool:
    """Keys and values by the place of a token, as SGLang's pools hold them."""

    def __init__(self, tokens, dtype, device):
        self.k, self.v = torch.full((2, tokens, HEADS_K, DIM), torch.nan, dtype=dtype, device=device)

    def set_kv_buffer(self, layer, loc, k, v):
        self.k[loc], self.v[loc] = k, v

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


class Server:
    """Requests with what SGLang says of them: (new tokens, all tokens) of each."""

    def __init__(self, sglang, device, sizes, page_size, **runner):
        torch.manual_seed(0)
        self.dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        self.sizes = sizes
        columns = -(-max(n for _, n in sizes) // page_size) + 1
        pages = torch.randperm(columns * len(sizes)).view(len(sizes), columns, 1) * page_size
        places = (pages + torch.arange(page_size)).view(len(sizes), -1).int().to(device)
        pool = Pool(columns * len(sizes) * page_size, self.dtype, device)
        self.keys, self.values = (
            [torch.randn(n, HEADS_K, DIM, dtype=self.dtype, device=device) for _, n in sizes] for _ in range(2)
        )
        for b, (new, n) in enumerate(sizes):
            pool.set_kv_buffer(None, places[b, : n - new].long(), self.keys[b][: n - new], self.values[b][: n - new])
        new = torch.tensor([new for new, _ in sizes])
        self.q = torch.randn(int(new.sum()), HEADS * DIM, dtype=self.dtype, device=device)
        self.k, self.v = (
            torch.cat([x[n - new :] for x, (new, n) in zip(each, sizes)]) for each in (self.keys, self.values)
        )
        decode = bool((new == 1).all())
        lengths = torch.tensor([n for _, n in sizes], device=device)
        self.batch = types.SimpleNamespace(
            batch_size=len(sizes),
            seq_lens=lengths,
            seq_lens_cpu=lengths.cpu(),
            req_pool_indices=torch.arange(len(sizes), device=device),
            out_cache_loc=torch.cat([places[b, n - new : n] for b, (new, n) in enumerate(sizes)]).long(),
            extend_seq_lens=None if decode else new.to(device),
            extend_seq_lens_cpu=None if decode else new.tolist(),
            spec_info=None,
            forward_mode=types.SimpleNamespace(is_decode=lambda: decode),
        )
        self.runner = types.SimpleNamespace(
            **dict(
                token_to_kv_pool=pool,
                req_to_token_pool=types.SimpleNamespace(req_to_token=places),
                page_size=page_size,
                device=device,
                model_config=types.SimpleNamespace(context_len=places.shape[1]),
                kv_cache_dtype=self.dtype,
            )
            | runner
        )

    def check(self, found, **options):
        found, first = found.view(-1, HEADS, DIM), 0
        tolerance = 2e-2 if self.dtype == torch.bfloat16 else 1e-5
        for b, (new, n) in enumerate(self.sizes):
            q = self.q.view(-1, HEADS, DIM)[first : first + new]
            own = dict(options)
            if (chunk := own.pop("chunk", 0)) > 0:
                position, key = torch.arange(n - new, n, device=q.device)[:, None], torch.arange(n, device=q.device)
                own["seen"] = position // chunk == key // chunk
            exact, _ = oracle.attention(*(x[None].double() for x in (q, self.keys[b], self.values[b])), **own)
            torch.testing.assert_close(found[first : first + new].double(), exact[0], atol=tolerance, rtol=tolerance)
            first += new


def _layer(**given):
    plain = dict(
        tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5, logit_cap=0.0, layer_id=0,
        sliding_window_size=-1, is_cross_attention=False, attn_type=None,
    )  # fmt: skip
    return types.SimpleNamespace(**(plain | given))


SIZES = {"decode": [(1, 7), (1, 12), (1, 1)], "extend": [(3, 7), (5, 5), (1, 12)]}
LAYERS = {
    "plain": ({}, {}, dict(causal=True)),
    "window": (dict(sliding_window_size=2), {}, dict(causal=True, window_size=(2, 0))),
    "softcap": (dict(logit_cap=2.0), {}, dict(causal=True, softcap=2.0)),
    "sinks": ({}, dict(sinks=SINKS), dict(causal=True, learnable_sink=SINKS)),
    "encoder": (dict(attn_type="encoder_only"), {}, {}),
    "chunks": (dict(use_irope=True), {}, dict(causal=True, chunk=4)),
}


def _on(device, options):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(sglang, device, sizes, page_size, layer):
    given, call, options = LAYERS[layer]
    server = Server(sglang, device, SIZES[sizes], page_size, attention_chunk_size=4)
    backend = sglang.backend.FlashAttentionBackend(server.runner)
    backend.init_forward_metadata(server.batch)
    forward = backend.forward_decode if sizes == "decode" else backend.forward_extend
    out = forward(server.q, server.k, server.v, _layer(**given), server.batch, **_on(device, call))
    server.check(out, **_on(device, options))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scaled", [False, True])
def test_pool_in_float8(sglang, device, sizes, scaled):
    """SGLang's pool divides by the scales of the layer, and shows its bytes as float8."""
    server = Server(sglang, device, SIZES[sizes], 4, kv_cache_dtype=torch.float8_e4m3fn)
    pool, factors = server.runner.token_to_kv_pool, torch.tensor([0.25, 0.5], device=device)
    k_scale, v_scale = factors.unbind() if scaled else (None, None)
    pool.k, pool.v = (to_float8(x, scale) for x, scale in zip((pool.k, pool.v), factors if scaled else (1.0, 1.0)))
    store = pool.set_kv_buffer

    def set_kv_buffer(layer, loc, k, v, k_scale=None, v_scale=None):
        store(layer, loc, *(to_float8(x, 1.0 if scale is None else scale) for x, scale in ((k, k_scale), (v, v_scale))))

    pool.set_kv_buffer = set_kv_buffer
    backend = sglang.backend.FlashAttentionBackend(server.runner)
    backend.init_forward_metadata(server.batch)
    layer = _layer(k_scale=k_scale, v_scale=v_scale)
    server.q, server.dtype = server.q.bfloat16(), torch.bfloat16
    out = backend.forward_extend(server.q, server.k, server.v, layer, server.batch)
    for x, scale in ((server.keys, factors[0]), (server.values, factors[1])):
        scale = scale if scaled else torch.ones((), device=device)
        x[:] = [to_float8(each, scale).float() * scale for each in x]
    server.check(out, causal=True)


@pytest.mark.parametrize("sizes", SIZES)
def test_logarithms_of_sums(sglang, device, sizes):
    """Of each token and head, for models that ask for them."""
    server = Server(sglang, device, SIZES[sizes], 4)
    backend = sglang.backend.FlashAttentionBackend(server.runner)
    backend.init_forward_metadata(server.batch)
    call = (server.q, server.k, server.v, _layer(), server.batch)
    out, lse = backend.forward_extend(*call, return_lse=True, score_mod=None)
    server.check(out, causal=True)
    assert torch.equal(backend.forward_extend(*call, return_lse=False), out)
    first = 0
    for b, (new, _) in enumerate(server.sizes):
        q = server.q.view(-1, HEADS, DIM)[first : first + new]
        _, exact = oracle.attention(*(x[None].double() for x in (q, server.keys[b], server.values[b])), causal=True)
        torch.testing.assert_close(lse[first : first + new].double(), exact[0].T, atol=1e-2, rtol=1e-2)
        first += new


@pytest.mark.parametrize("page_size", [1, 4])
def test_metadata_of_a_graph(sglang, device, page_size):
    """Each replay fills the tensors with which the graph was captured."""
    server = Server(sglang, device, SIZES["decode"], page_size)
    backend = sglang.backend.FlashAttentionBackend(server.runner)
    backend.init_cuda_graph_state(8, 8)
    lengths, server.batch.seq_lens = server.batch.seq_lens, torch.ones_like(server.batch.seq_lens)
    backend.init_forward_metadata_out_graph(server.batch, in_capture=True)
    captured, server.batch.seq_lens = backend.forward_metadata, lengths
    captured.block_table.fill_(10**6)  # no column behind the longest entry is filled, or looked at
    backend.init_forward_metadata_out_graph(server.batch)
    assert (captured.block_table == 10**6).any() and (captured.block_table < 10**6)[:, : 12 // page_size].all()
    for one, other in zip(captured, backend.forward_metadata):
        assert one == other if not isinstance(one, torch.Tensor) else one.data_ptr() == other.data_ptr()
    server.check(backend.forward_decode(server.q, server.k, server.v, _layer(), server.batch), causal=True)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_metadata_without_requests(sglang):
    """As where other processes have requests and this one waits for them."""
    server = Server(sglang, "cpu", SIZES["decode"], 4)
    for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices"):
        setattr(server.batch, name, getattr(server.batch, name)[:0])
    server.batch.extend_seq_lens = torch.ones(3)  # of another batch: decoding has one row of each request
    backend = sglang.backend.FlashAttentionBackend(server.runner)
    backend.init_forward_metadata(server.batch)
    assert backend.forward_metadata.cu_seqlens_q.tolist() == [0] and not len(backend.forward_metadata.block_table)


REFUSED = {
    "latent attention": (dict(use_mla_backend=True), NotImplementedError, "use_mla_backend must be False, found True"),
    "8 bits": (
        dict(kv_cache_dtype=torch.float8_e5m2),
        NotImplementedError,
        "kv_cache_dtype must be .*, found torch.f",
    ),
    "parts": (
        dict(token_to_kv_pool=types.SimpleNamespace(swa_kv_pool=None)),
        NotImplementedError,
        "token_to_kv_pool must have one part, found a SimpleNamespace: start SGLang with --disable-hybrid-swa-memory",
    ),
    "prompts in parallel": (
        dict(server_args=types.SimpleNamespace(attn_cp_size=2, dcp_size=1)),
        NotImplementedError,
        "attn_cp_size must be 1, found 2: context parallelism is not computed here",
    ),
    "keys in parallel": (
        dict(server_args=types.SimpleNamespace(attn_cp_size=None, dcp_size=4)),
        NotImplementedError,
        "dcp_size must be 1, found 4: context parallelism is not computed here",
    ),
}


@pytest.mark.parametrize(("runner", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_models(sglang, runner, error, message):
    with pytest.raises(error, match=message):
        sglang.backend.FlashAttentionBackend(Server(sglang, "cpu", SIZES["decode"], 1, **runner).runner)


def test_refused_calls(sglang):
    server = Server(sglang, "cpu", SIZES["decode"], 1)
    backend = sglang.backend.FlashAttentionBackend(server.runner)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state must be called before graphs are captured"):
        backend.init_forward_metadata_out_graph(server.batch)
    backend.init_forward_metadata(server.batch)
    call = (server.q, server.k, server.v)
    for layer, keywords, message in (
        (dict(is_cross_attention=True), {}, "is_cross_attention must be False, found True"),
        (dict(xai_temperature_len=7), {}, "xai_temperature_len must not be above 0, found 7"),
        (dict(logit_cap=1.0, logit_capping_method="x"), {}, "logit_capping_method must be 'tanh', found 'x'"),
        ({}, dict(k_rope=SINKS), "k_rope must be None, found a Tensor"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            backend.forward_decode(*call, _layer(**layer), server.batch, **keywords)
    server.batch.spec_info = object()
    with pytest.raises(NotImplementedError, match="spec_info must be None, found one"):
        backend.init_forward_metadata(server.batch)


def test_deterministic_inference(sglang, monkeypatch):
    level = [0]
    monkeypatch.setattr(flash_attn, "get_batch_invariant", lambda: level[0], raising=False)
    monkeypatch.setattr(flash_attn, "set_batch_invariant", lambda x: level.__setitem__(0, x), raising=False)
    arguments = types.SimpleNamespace(enable_deterministic_inference=True, attn_cp_size=1, dcp_size=1)
    server = Server(sglang, "cpu", SIZES["decode"], 1, server_args=arguments)
    sglang.backend.FlashAttentionBackend(server.runner)
    assert level == [2]
    monkeypatch.delattr(flash_attn, "set_batch_invariant")
    with pytest.raises(RuntimeError, match="enable_deterministic_inference must be off with a flash_attn without"):
        sglang.backend.FlashAttentionBackend(server.runner)


def test_register(sglang, monkeypatch):
    """Among the deterministic choices if there are levels; behind fa3 only where somebody asks for it."""
    monkeypatch.delenv("FLASH_ATTN_SGLANG_FA3", raising=False)
    monkeypatch.setattr(flash_attn, "set_batch_invariant", None, raising=False)
    for _ in range(2):
        flash_attn_sglang.register()
    assert list(sglang.registry.ATTENTION_BACKENDS) == ["flash_attn"]
    for name in ("choices", "choices_deterministic", "choices_radix_supported_deterministic"):
        assert getattr(sglang.arguments, name) == ["flash_attn"]
    server = Server(sglang, "cpu", SIZES["decode"], 1)
    made = sglang.registry.ATTENTION_BACKENDS["flash_attn"](server.runner)
    assert type(made) is sglang.backend.FlashAttentionBackend and not sglang.hooks.registered
    monkeypatch.setenv("FLASH_ATTN_SGLANG_FA3", "1")
    flash_attn_sglang.register()
    ((target, functions, kind),) = sglang.hooks.registered
    assert target.endswith("flash_attention_v3._load_fa3_kernels") and kind == "replace"
    assert functions()["flash_attn_with_kvcache"] is interface.flash_attn_with_kvcache
    monkeypatch.setenv("FLASH_ATTN_SGLANG_FA3", "yes")
    with pytest.raises(ValueError, match="FLASH_ATTN_SGLANG_FA3 must be 0 or 1, found 'yes'"):
        flash_attn_sglang.register()


INSTALLED = """
import inspect, os
import flash_attn_sglang
flash_attn_sglang.register()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.arg_groups import choices
from flash_attn_sglang.backend import FlashAttentionBackend
assert ATTENTION_BACKENDS["flash_attn"] is flash_attn_sglang._make
assert "flash_attn" in choices.ATTENTION_BACKEND_CHOICES
assert not FlashAttentionBackend.__abstractmethods__
for name, ours in vars(FlashAttentionBackend).items():
    theirs = getattr(AttentionBackend, name, None)
    if inspect.isfunction(ours) and inspect.isfunction(theirs) and name != "__init__":
        missing = inspect.signature(theirs).parameters.keys() - inspect.signature(ours).parameters.keys()
        assert not missing, (name, missing)

from sglang.srt.server_args import ServerArgs
for name in ("attn_cp_size", "dcp_size", "enable_deterministic_inference"):  # what the backend asks
    assert name in inspect.signature(ServerArgs).parameters, name
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
KVWriteLoc(None)

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.kernels.ops.attention import flash_attention_v3
os.environ["FLASH_ATTN_SGLANG_FA3"] = "1"
flash_attn_sglang.register()
HookRegistry.apply_hooks()
found = flash_attention_v3._load_fa3_kernels()
assert found == flash_attn_sglang._functions()
for name, function in found.items():  # each takes what SGLang's own function of that name takes
    theirs = inspect.signature(getattr(flash_attention_v3, name)).parameters
    assert list(theirs) == list(inspect.signature(function).parameters), name
print("SGLang agrees")
"""


def test_installed_sglang():
    """The real package: registration, and the contract of its class."""
    if importlib.machinery.PathFinder.find_spec("sglang") is None:  # which does not see the stand-in
        pytest.skip("needs SGLang")
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{INSTALLED}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "SGLang agrees" in run.stdout, run.stderr[-3000:]


# ---------------------------------------------------------------------------------------------------------------------
# The two functions


def test_calls_of_the_loader(device):
    """Exactly as SGLang makes them: 28 arguments by position, the others by name."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    q, k, v = (torch.randn(7, heads, DIM, dtype=dtype, device=device) for heads in (HEADS, HEADS_K, HEADS_K))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    sinks, out = SINKS.to(device), torch.empty_like(q)
    by_name = dict(
        seqused_q=None, seqused_k=None, page_table=None, softmax_scale=0.2, causal=True, qv=None, q_descale=None,
        k_descale=None, v_descale=None, window_size=(2, 0), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
        only_qv=False, sm_margin=0, return_softmax_lse=False, sinks=sinks, out=out,
    )  # fmt: skip
    lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=4, max_seqlen_k=4)
    assert interface.flash_attn_varlen_func(q=q, k=k, v=v, **lengths, **by_name) is out
    exact = torch.cat(
        [
            oracle.attention(
                *(x[None, s].double() for x in (q, k, v)),
                softmax_scale=0.2, causal=True, window_size=(2, 0), learnable_sink=sinks,
            )[0][0]
            for s in (slice(0, 3), slice(3, 7))
        ]
    )  # fmt: skip
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
    pages = torch.zeros(3, 4, HEADS_K, DIM, dtype=dtype, device=device)
    caches = pages, pages.clone()
    for into, x in zip(caches, (k, v)):
        into[2, :3], into[0] = x[:3], x[3:]
    table = torch.tensor([[2], [0]], dtype=torch.int32, device=device)
    used = torch.tensor([3, 4], dtype=torch.int32, device=device)
    again = interface.flash_attn_with_kvcache(
        q, *caches, None, None, None, None, None, used, None, None, table, ends, ends, 4, None, None, None, None, 0.2,
        True, (2, 0), None, 0.0, True, None, 0, None,
        sm_margin=0, only_qv=False, return_softmax_lse=True, sinks=sinks, out=torch.empty_like(q),
    )  # fmt: skip
    torch.testing.assert_close(again[0].double(), exact, atol=tolerance, rtol=tolerance)
    dense = dict(by_name, window_size=(-1, -1), out=None, causal=False, sinks=None)
    lengths = dict.fromkeys(lengths)
    found = interface.flash_attn_varlen_func(q=q[None], k=k[None], v=v[None], **lengths, **dense)
    exact = oracle.attention(*(x[None].double() for x in (q, k, v)), softmax_scale=0.2)[0]
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


def test_float8_of_the_loader(device):
    """A pool in float8 with queries in float8, as SGLang passes both, and in 16 bits."""
    q, k, v = (torch.randn(7, heads, DIM, device=device).bfloat16() for heads in (HEADS, HEADS_K, HEADS_K))
    q, *codes = (to_float8(x) for x in (q, k, v))
    ends, table, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3], [[0, 1]], [6]))
    scale = torch.full((1, 1), 0.5, device=device).expand(1, HEADS_K)
    call = dict(k_cache=codes[0][None, :, None].view(7, 1, HEADS_K, DIM)[:6].view(2, 3, HEADS_K, DIM))
    call |= dict(v_cache=codes[1][:6].view(2, 3, HEADS_K, DIM), page_table=table, cache_seqlens=used, causal=True)
    call |= dict(cu_seqlens_q=ends, max_seqlen_q=3, k_descale=scale, v_descale=scale)
    out = interface.flash_attn_with_kvcache(q[:3], q_descale=scale * 4, **call)
    again = interface.flash_attn_with_kvcache(q[:3].bfloat16() * 2, q_descale=scale, **call)
    assert out.dtype == torch.bfloat16 and torch.equal(out, again)
    exact, _ = oracle.attention(
        *(x[None].double() * s for x, s in ((q[:3], 2), (codes[0][:6], 0.5), (codes[1][:6], 0.5))), causal=True
    )
    torch.testing.assert_close(out.double(), exact[0], atol=2e-2, rtol=2e-2)


ERRORS = {
    "qv": (dict(qv=SINKS), NotImplementedError, "qv must not be given, found a Tensor"),
    "only_qv": (dict(only_qv=True), NotImplementedError, "only_qv must not be given, found a bool"),
    "8 bits": (
        dict(k=torch.zeros(7, 2, 16, dtype=torch.float8_e5m2)),
        NotImplementedError,
        r"k must be torch\.float16 or .*, found torch\.float8_e5m2",
    ),
    "dense float8": (
        dict(k=torch.zeros(1, 7, 2, 16, dtype=torch.float8_e4m3fn), cu_seqlens_q=None, cu_seqlens_k=None),
        NotImplementedError,
        r"k must be torch\.float16 or .* here, found torch\.float8_e4m3fn",
    ),
    "dense pages": (
        dict(cu_seqlens_q=None, cu_seqlens_k=None, page_table=SINKS),
        ValueError,
        "page_table must be None without cu_seqlens_q, found a Tensor",
    ),
    "dense out": (
        dict(cu_seqlens_q=None, cu_seqlens_k=None, out=SINKS),
        ValueError,
        "out must be None without cu_seqlens_q, found a Tensor",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(given, error, message):
    q, k, v = torch.zeros(3, 7, 2, 16)
    ends = torch.tensor([0, 7], dtype=torch.int32)
    call = dict(q=q, k=k, v=v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=7, max_seqlen_k=7)
    with pytest.raises(error, match=message):
        interface.flash_attn_varlen_func(**(call | given))


def test_errors_of_caches():
    q, cache = torch.zeros(1, 1, 2, 16), torch.zeros(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match="rotary_seqlens must not be given, found a Tensor"):
        interface.flash_attn_with_kvcache(q, cache, cache, rotary_seqlens=SINKS)
