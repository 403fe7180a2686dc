"""What the package does in a torch that has lost a private name which it uses."""

import importlib.util
import sys

import interpreters
import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from flash_attn import _torch_private

OPTIONAL = {  # where each name is, and what it is
    "_are_functorch_transforms_active": "torch._C",
    "_dispatch_has_kernel_for_dispatch_key": "torch._C",
    "_foreach_copy_": "torch",
    "_len_torch_dispatch_stack": "torch._C",
    "_has_any_global_hook": "torch.nn.modules.module",
    "_increment_version": "torch._C",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    "FunctionalTensorMode": "torch._subclasses.functional_tensor",
    "_current_level": "torch.autograd.forward_ad",
    "is_batchedtensor": "torch._C._functorch",
    "is_functorch_wrapped_tensor": "torch._C._functorch",
    "is_legacy_batchedtensor": "torch._C._functorch",
    "_top_saved_tensors_default_hooks": "torch._C._autograd",
}


def load():
    """The module as it is in this torch."""
    spec = importlib.util.spec_from_file_location("a_copy", _torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without(monkeypatch):
    """Load the module in a torch without a name; the rest of torch has it again when the test calls what it loaded."""

    def without(name):
        with monkeypatch.context() as patch:
            patch.delattr(importlib.import_module(OPTIONAL[name]), name)
            return load()

    return without


def test_no_context_below_autograd(monkeypatch):
    monkeypatch.delattr(torch._C, "_AutoDispatchBelowAutograd")
    with pytest.raises(ImportError, match=r"needs torch\._C\._AutoDispatchBelowAutograd, which torch \S+ does not"):
        load()


def test_whether_functorch_is_active(without):
    assert not _torch_private.functorch_is_active()
    assert without("_are_functorch_transforms_active").functorch_is_active()


@pytest.mark.parametrize("otherwise", [False, True])
def test_whether_there_is_a_kernel(otherwise, without):
    name = "aten::add.Tensor"
    assert _torch_private.has_kernel(name, "CPU", not otherwise)
    assert without("_dispatch_has_kernel_for_dispatch_key").has_kernel(name, "CPU", otherwise) == otherwise


def test_forward_mode(monkeypatch):
    assert not _torch_private.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert _torch_private.in_forward_mode()
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    assert _torch_private.in_forward_mode()


def test_modes(without):
    assert not _torch_private.in_any_mode()
    for mode in (FlopCounterMode(display=False), torch.autograd.forward_ad.dual_level()):
        with mode:
            assert _torch_private.in_any_mode()
    assert torch.func.vmap(lambda x: x + _torch_private.in_any_mode())(torch.zeros(2)).all()
    assert without("_len_torch_dispatch_stack").in_any_mode()


def test_versions(without):
    x, y = torch.zeros(2), torch.zeros(2)
    for module in (_torch_private, without("_increment_version")):
        before = x._version, y._version
        module.increment_versions([x, y])
        assert (x._version, y._version) == tuple(each + 1 for each in before)


def test_entries_under_vmap(without):
    seen = []
    torch.func.vmap(torch.func.vmap(lambda x: seen.append(x) or x))(torch.arange(6.0).view(2, 3))
    x = torch.ones(2)
    for module in (_torch_private, without("is_batchedtensor")):
        assert module.unbatched(x) is x
    assert torch.equal(_torch_private.unbatched(seen[0]), torch.arange(6.0).view(2, 3))


def test_tensors_of_transforms(without):
    other = without("is_functorch_wrapped_tensor")
    outside = torch.ones(2)
    assert not any(module.is_transformed(outside) for module in (_torch_private, other))

    def function(x):
        assert _torch_private.is_transformed(x) and not _torch_private.is_transformed(outside)
        assert other.is_transformed(x) and other.is_transformed(outside)
        return x

    torch.func.vmap(function)(outside)


def test_copies(without):
    for module in (_torch_private, without("_foreach_copy_")):
        targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
        module.copy_each(targets, sources)
        assert all(map(torch.equal, targets, sources))


def test_attention_on_the_cpu(monkeypatch):
    assert _torch_private.has_cpu_attention(torch.ones(1))
    assert not _torch_private.has_cpu_attention(torch.ones(1, device="meta"))
    for name in ("cpu_attention", "cpu_attention_backward"):
        with monkeypatch.context() as patch:
            patch.setattr(_torch_private, name, None)
            assert not _torch_private.has_cpu_attention(torch.ones(1))
    monkeypatch.setattr(torch.ops, "aten", Nothing())
    assert not load().has_cpu_attention(torch.ones(1))


def test_functional_mode(without):
    assert isinstance(_torch_private.FunctionalTensorMode, type)
    assert without("FunctionalTensorMode").FunctionalTensorMode is None


def test_functional_collectives(monkeypatch):
    name = "torch.distributed._functional_collectives"
    assert hasattr(_torch_private.functional_collectives, "all_reduce")
    monkeypatch.delattr(torch.distributed, "_functional_collectives")
    monkeypatch.setitem(sys.modules, name, None)
    assert load().functional_collectives is None


class Nothing:
    """An object of torch that has lost all its private names."""

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return 64


def test_overloads():
    overload = torch.ops.aten.add.Tensor
    assert _torch_private.bare(overload)(torch.ones(1), torch.ones(1)).item() == 2
    assert _torch_private.bare(Nothing) is Nothing
    assert [argument.name for argument in _torch_private.arguments(overload)][:2] == ["self", "other"]
    with pytest.raises(ImportError, match=r"needs Nothing\._schema"):
        _torch_private.arguments(Nothing())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_apply():
    for apply in (_torch_private.bare_apply(Twice), Twice.apply):
        x = torch.ones(1, requires_grad=True)
        apply(x).backward()
        assert x.grad.item() == 2


def test_hooks_of_modules(without):
    module = torch.nn.Linear(2, 3)
    assert not _torch_private.has_hooks(module)
    assert without("_has_any_global_hook").has_hooks(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert _torch_private.has_hooks(module)
    handle.remove()
    assert not _torch_private.has_hooks(module)
    del module._backward_pre_hooks
    assert _torch_private.has_hooks(module)


def test_parameters_of_a_module_alone():
    class WithoutName:
        def parameters(self, recurse):
            return iter([recurse])

    module = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
    assert list(_torch_private.own_parameters(module)) == []
    assert list(_torch_private.own_parameters(module[0])) == [module[0].weight, None]
    assert list(_torch_private.own_parameters(WithoutName())) == [False]


@pytest.mark.parametrize("name", ["FakeTensor", "FunctionalTensor"])
def test_plain_tensors(name, without):
    classes = torch.Tensor, torch.nn.Parameter
    assert _torch_private.PLAIN_TENSORS[:2] == without(name).PLAIN_TENSORS == classes


def test_hooks_of_saved_tensors(without):
    assert not _torch_private.saved_tensors_have_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert _torch_private.saved_tensors_have_hooks()
    assert without("_top_saved_tensors_default_hooks").saved_tensors_have_hooks()


def test_batches_of_gradients(without):
    old_torch = without("is_legacy_batchedtensor")
    found, x = [], torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda dy: found.extend([_torch_private.is_legacy_batch(dy), old_torch.is_legacy_batch(dy)]))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert found == [True, False, False, False]


def test_views():
    x = torch.ones(2)
    assert _torch_private.is_view(x[:1]) and not _torch_private.is_view(x)
    assert _torch_private.is_view(Nothing())


def test_storage():
    x, y = torch.ones(2, 3)
    assert _torch_private.storage_id(x) == _torch_private.storage_id(y) != _torch_private.storage_id(x.clone())
    assert _torch_private.storage_id(Nothing()) == 64


def test_memory_events():
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.ones(1000)
    events = _torch_private.memory_events(profile)
    assert max(event.nbytes() for event in events) >= 4000
    with pytest.raises(ImportError, match=r"needs Nothing\.profiler"):
        _torch_private.memory_events(Nothing())


def test_the_package_works_without_the_optional_names():
    """All of them at a time, in the whole of the self-check. Torch itself uses some: it gets them back."""
    code = f"""
import importlib, importlib.util, sys
import torch, torch._subclasses.functional_tensor, torch.distributed._functional_collectives
taken = []
for name, module in {OPTIONAL}.items():
    module = importlib.import_module(module)
    taken.append((module, name, getattr(module, name)))
    delattr(module, name)
spec = importlib.util.spec_from_file_location("flash_attn._torch_private", {_torch_private.__file__!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for owner, name, value in taken:
    setattr(owner, name, value)
from flash_attn import __main__, _library
assert _library._torch_private is module and module.functorch_is_active()
sys.exit(__main__.main(["--device", "cpu"]))
"""
    interpreters.run(code)
