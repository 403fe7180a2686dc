"""How ops are defined: one registration a backend, autograd attached once, and no silent fallback."""

import importlib
import pathlib
import subprocess
import sys
import warnings

import interpreters
import pytest
import torch

import flash_attn
from flash_attn import _build_id, _library, flash_attn_func, flash_attn_with_kvcache
from flash_attn._ops import fused_softmax, rotary
from flash_attn.ops.fused_dense import FusedDense

ROOT = pathlib.Path(__file__).parents[1]


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def announced(monkeypatch):
    """The identity, registered as the reference of the op `name`."""
    monkeypatch.setattr(_library, "load_error", lambda: None)
    _library.warn_once.cache_clear()
    return lambda name: _library._announced(name, lambda x: x)


def test_a_fallback_is_announced_once(announced):
    kernel = announced("test_doubled")
    with pytest.warns(RuntimeWarning, match="test_doubled runs on the slower reference .* no kernel for it"):
        kernel(OnGpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel(OnGpu())


def test_the_reference_is_silent_where_it_is_the_backend(announced):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        announced("test_doubled")(torch.zeros(1))


def test_the_reason_is_told(announced, monkeypatch):
    monkeypatch.setattr(_library, "load_error", lambda: "the library is of another world")
    with pytest.warns(RuntimeWarning, match="another world"):
        announced("test_doubled")(OnGpu())


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Two folders on the path of the package, sources and an installation, in place of the real ones."""
    folders = [tmp_path / "sources/flash_attn", tmp_path / "site-packages/flash_attn"]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.setattr(flash_attn, "__path__", [str(folder) for folder in folders])
    return folders


@pytest.fixture
def load(monkeypatch):
    """Try to load a library; returns the reason why there are no kernels, and the files that were to be loaded."""
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    return lambda: (_library.load_error.__wrapped__(), loaded)


TODAY = bytes.fromhex(_build_id.build_id())
OTHER = bytes.fromhex("0123456789" * 4)


def test_no_library(package, load):
    reason, loaded = load()
    assert reason == f"there are no CUDA kernels in {package[0]}: {_library._how_to_build()}" and not loaded
    assert "install the package again beside a CUDA build" in reason
    (package[0].parent / "setup.py").touch()
    assert "run `make build`" in load()[0]


def test_an_installation_keeps_why_it_has_no_library(package, load):
    """What setup.py has printed, which installers hide."""
    (package[0] / "_no_kernels.txt").write_text("installed without CUDA kernels, since there is no nvcc\n")
    assert load() == ("installed without CUDA kernels, since there is no nvcc", [])
    (package[0] / "_kernels.so").write_bytes(TODAY)
    assert load() == (None, [str(package[0] / "_kernels.so")])


def test_sources_say_why_an_installation_has_no_library(package, load):
    """`python -m flash_attn` shows the reason in the folder in which `pip install .` was run, too."""
    (package[1] / "_no_kernels.txt").write_text("installed without CUDA kernels, since there is no nvcc\n")
    assert load() == ("installed without CUDA kernels, since there is no nvcc", [])


@pytest.mark.parametrize("contents", [None, OTHER], ids=["no library", "an old library"])
def test_sources_use_the_library_of_an_installation(contents, package, load):
    """Python imports the sources when it runs in the folder in which `pip install .` was run."""
    if contents:
        (package[0] / "_kernels.so").write_bytes(contents)
    (package[1] / "_kernels.so").write_bytes(TODAY)
    assert load() == (None, [str(package[1] / "_kernels.so")])


def test_a_library_of_the_sources_comes_first(package, load):
    for folder in package:
        (folder / "_kernels.so").write_bytes(TODAY)
    assert load() == (None, [str(package[0] / "_kernels.so")])


def test_a_library_for_other_ops_is_not_loaded(package, load):
    """Its kernels would be registered for schemas that they do not follow."""
    (package[1] / "_kernels.so").write_bytes(OTHER)
    with pytest.warns(RuntimeWarning, match="was built for ops with other schemas"):
        reason, loaded = load()
    assert str(package[1] / "_kernels.so") in reason and "install the package again" in reason and not loaded


def test_a_file_that_cannot_be_loaded(package):
    (package[0] / "_kernels.so").write_bytes(b"no library" + TODAY)
    with pytest.warns(RuntimeWarning, match=r"_kernels\.so cannot be loaded beside torch"):
        assert torch.__version__ in _library.load_error.__wrapped__()


def test_the_installation_is_on_the_path_of_the_sources(tmp_path):
    site = tmp_path / "flash_attn"
    site.mkdir()
    (site / "__init__.py").touch()
    (site / "_kernels.so").write_bytes(TODAY)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import flash_attn; print(flash_attn.__path__[-1])"
    assert interpreters.run(code).stdout.strip() == str(site)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ('op = define("op(Tensor x) -> Tensor")', 'op = define("op(Tensor x, int n) -> Tensor")', True),
        ('op = define(f"op({_ARGUMENTS}) -> ()")', 'op = define(f"op({_ARGUMENTS}, int n) -> ()")', True),
        ('_ARGUMENTS = "Tensor x"', '_ARGUMENTS = "Tensor? x"', True),
        ('op = define("op(Tensor x) -> ()")', 'op = define(\n    "op(Tensor x) "\n    "-> ()"\n)  # in two', False),
        ("class Options:\n    n: int", "class Options:\n    n: int\n    m: int = 0", True),
        ("class Options:\n    n: int = 0", "class Options:\n    n: int = 1", True),
        ("class Options:\n    n: int", "class Options:\n    n: int  # how many", False),
        ('"""Its docstring."""', '"""Another docstring."""', False),
        ('def check():\n    raise ValueError("bad")', 'def check():\n    raise ValueError("very bad")', False),
    ],
    ids=[
        "argument",
        "argument of several",
        "part of several",
        "line break",
        "field",
        "default",
        "comment",
        "docstring",
        "function",
    ],
)
def test_build_id_follows_the_schemas(tmp_path, before, after, changes):
    def build_id(text):
        (tmp_path / "_ops").mkdir(exist_ok=True)
        (tmp_path / "_ops/family.py").write_text(text)
        return _build_id.build_id(tmp_path)

    assert (build_id(before) != build_id(after)) == changes


def is_composite(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def test_build_id_has_the_schemas_of_all_ops():
    files = _build_id.schema_files()
    for file in files:
        importlib.import_module(".".join(("flash_attn", *file.relative_to(_build_id.PACKAGE).with_suffix("").parts)))
    strings = "".join(_build_id.schema_text(file) for file in files)
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flash_attn::")]
    names = [name for name in names if not is_composite(name)]  # which have no kernels
    schemas = [getattr(torch.ops.flash_attn, name.partition("::")[2]).default._schema for name in names]
    schemas = [schema for schema in schemas if "test_" not in schema.name and not schema.name.endswith("_reference")]
    schemas = [schema for schema in schemas if schema.name != "flash_attn::set_batch_invariant"]  # the library's own
    assert schemas
    for schema in schemas:
        assert f"{schema.name.partition('::')[2]}(" in strings
        assert not [argument.name for argument in schema.arguments if f" {argument.name}" not in strings]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rest):
        return DOUBLED.below_autograd(x, *rest)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


DOUBLED = _library.define(
    "test_doubled(Tensor x, Tensor? bias) -> Tensor",
    reference=lambda x, bias: 2 * x if bias is None else 2 * x + bias,
    fake=lambda x, bias: torch.empty_like(x),
    autograd=Doubled,
    differentiable=1,
)


@pytest.mark.parametrize("call", [DOUBLED, torch.ops.flash_attn.test_doubled], ids=["called", "through torch.ops"])
def test_gradients_of_a_defined_op(call, device):
    x = torch.randn(3, device=device, requires_grad=True)
    assert torch.equal(call(x, None), 2 * x)
    assert torch.autograd.grad(call(x, None).sum(), x)[0].tolist() == [2.0] * 3
    assert not call(x.detach(), None).requires_grad
    with torch.no_grad():
        assert not call(x, None).requires_grad


def test_a_defined_op_is_what_torch_expects(device):
    x = torch.randn(3, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.flash_attn.test_doubled.default, (x, None))
    assert not _library.has_kernel("test_doubled")


def test_an_op_knows_that_its_kernel_is_in_triton():
    """The kernel of linear_act_fwd is in Triton, where Triton is installed; there is no other kernel for it."""
    pytest.importorskip("triton")
    importlib.import_module("flash_attn._ops.linear_act")
    assert _library.has_kernel("linear_act_fwd") and _library.is_in_triton("linear_act_fwd")
    assert not _library.is_in_triton("test_doubled") and not _library.is_in_triton("fwd")


def test_kernels_are_not_rounded_by_autocast(device):
    """Sums of the reference are float32 also where autocast would have every product in 16 bits."""
    q, k, v = (4 * torch.randn(2, 64, 4, 32, device=device)).bfloat16().unsqueeze(0).expand(3, -1, -1, -1, -1)
    caches = [x.clone() for x in (k, v)]
    calls = [
        lambda: torch.autograd.grad(flash_attn_func(q_leaf, k, v, causal=True).float().square().sum(), q_leaf),
        lambda: flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2],
        lambda: flash_attn_with_kvcache(q, *caches, causal=True, return_softmax_lse=True),
    ]
    q_leaf = q.clone().requires_grad_()
    for call in calls:
        plain = call()
        with torch.autocast(device.type, torch.bfloat16):
            assert all(torch.equal(x, y) for x, y in zip(plain, call(), strict=True))


def test_forward_mode_is_refused_by_ops_without_gradient(device):
    x, *caches = torch.randn(1, 1, 2, 16, device=device), *torch.zeros(2, 1, 8, 2, 16, device=device)

    def decode(k):
        return flash_attn_with_kvcache(x, *caches, k, x, cache_seqlens=0)

    with pytest.raises(NotImplementedError, match=r"k of fwd_kvcache must have no tangent"):
        torch.func.jvp(decode, (x,), (x,))
    assert not any(cache.any() for cache in caches)


def test_the_reference_twin_does_not_become_the_kernel(device):
    x = torch.randn(1, 8, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    arguments = (x, x, x, 1.0, -1, -1)
    with pytest.raises(NotImplementedError, match=r"fwd_reference.*bfloat16.*fwd"):
        torch.ops.flash_attn.fwd_reference(*arguments)


def test_versions_of_what_is_written_advance(device):
    caches = torch.zeros(2, 1, 8, 2, 16, device=device).unbind()
    x = torch.randn(1, 1, 2, 16, device=device)
    before = [cache._version for cache in caches]
    flash_attn_with_kvcache(x, *caches, x, x, cache_seqlens=0)
    after = [cache._version for cache in caches]
    assert all(new > old for new, old in zip(after, before, strict=True))
    flash_attn_with_kvcache(x, *caches)  # reads only
    assert after == [cache._version for cache in caches]


def test_inference_tensors_outside_of_inference_mode(device):
    """They may be read, not written."""
    with torch.inference_mode():
        x, *caches = torch.randn(1, 1, 2, 16, device=device), *torch.randn(2, 1, 8, 2, 16, device=device)
        expected = flash_attn_with_kvcache(x, *caches)
    before = [cache.clone() for cache in caches]
    assert torch.equal(flash_attn_with_kvcache(x, *caches), expected)
    with pytest.raises(ValueError, match="fwd_kvcache must not write to an inference tensor"):
        flash_attn_with_kvcache(x, *caches, x, x, cache_seqlens=0)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))


def test_ops_without_gradient_do_not_cut_one_silently(device):
    dy, y = torch.rand(2, 1, 2, 4, 4, device=device)
    softmax_bwd = fused_softmax.bwd.default  # as through torch.ops
    expected = softmax_bwd(dy, y, 1.0, False)
    y.requires_grad_()
    with pytest.raises(NotImplementedError, match="y of softmax_bwd must not require grad"):
        softmax_bwd(dy, y, 1.0, False)
    with torch.no_grad():
        assert torch.equal(softmax_bwd(dy, y, 1.0, False), expected)


def test_autograd_does_not_look_into_an_op_that_writes(device):
    """It would refuse to write to one of several views; graphs call ops in this way."""
    first, _ = torch.ones(2, 1, 8, 2, 16, device=device, requires_grad=True).exp().unbind()
    table, before = torch.rand(8, 8, device=device), first.detach().clone()
    rotary.rotary_.default(first, table, table, None, 0, None, False, False)
    assert not torch.equal(first.detach(), before)


def test_a_gradient_that_owes_nothing_to_its_inputs_is_constant(device):
    """The gradient of a product with a weight depends on the weight alone, which here has no gradient."""
    x = torch.randn(5, 64, device=device, requires_grad=True)
    layer = FusedDense(64, 32, device=device).requires_grad_(False)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert not dx.requires_grad
    torch.testing.assert_close(dx, layer.weight.sum(0).expand(5, 64))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.Tensor.to_sparse, "fwd must have dense tensors, found torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor(list(x)), "NestedTensor"),  # torch's message
    ],
    ids=["sparse", "nested"],
)
def test_ops_refuse_tensors_that_are_not_dense(kind, message, device):
    x = torch.randn(2, 5, 2, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(NotImplementedError, match=message):
        torch.ops.flash_attn.fwd(x, kind(x), x, 1.0, -1, -1)


_FIRST_CALLS_IN_THREADS = """
import sys, threading
import torch

has_lock = getattr(sys, "_is_gil_enabled", lambda: True)
before = has_lock()
import flash_attn

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = [torch.randn(3, 1, 33, 2, 16, requires_grad=True) for _ in range(8)]
results = [None] * len(inputs)
start = threading.Barrier(len(inputs))


def call(i):
    x = inputs[i]
    out = flash_attn.flash_attn_func(*x, causal=i % 2 == 0, softcap=2.0 * (i % 3))
    return out.detach(), *torch.autograd.grad(out.square().sum(), x)


def work(i):
    start.wait()
    results[i] = call(i)


threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for i, found in enumerate(results):
    assert all(map(torch.equal, found, call(i))), i
assert has_lock() == before, "importing flash_attn has switched the global lock on"
"""


def test_first_calls_in_threads():
    """Threads may make the first calls at once, also in a Python without a global lock, which stays without it.

    In an interpreter of its own, which also ends as users' do.
    """
    command = [sys.executable, "-W", "ignore", "-c", _FIRST_CALLS_IN_THREADS]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
