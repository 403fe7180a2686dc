"""The private names of torch that this package uses. No other file here uses one.

A later torch may drop any of them. Each function says what happens then: a slower way, or an error.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad


def _needed(owner: object, name: str) -> Any:
    """An attribute that nothing can replace. Raises ImportError if it is gone."""
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ImportError(
            f"flash_attn needs {where}.{name}, which torch {torch.__version__} does not have: "
            "install a newer flash-attn or an older torch"
        )
    return getattr(owner, name)


# A context in which the dispatcher skips autograd. Without it, importing this package is an ImportError.
below_autograd = _needed(torch._C, "_AutoDispatchBelowAutograd")

# Whether a transform such as torch.func.vmap is active. Without it: always, which makes each call 2 us slower.
functorch_is_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)

# Advances the versions of a list of tensors; the public function of torch does so after it has looked at its argument.
increment_versions: Callable[[list[torch.Tensor]], None]
increment_versions = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)

# How many modes see the calls of ops. Without it: one, so that no call of attention takes its short way.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)

# To look inside the tensors that torch.func.vmap passes. If torch lacks either name, no tensor counts as such.
_is_batched: Callable[[torch.Tensor], bool]
try:
    from torch._C._functorch import get_unwrapped as _unwrapped
    from torch._C._functorch import is_batchedtensor as _is_batched
except ImportError:
    _is_batched = lambda x: False  # noqa: E731

_hooks_of_saved_tensors = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
_is_wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda x: True)
_is_legacy_batch = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)
_keeps_graph = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: True)
_has_kernel = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
_foreach_copy = getattr(torch, "_foreach_copy_", None)
_has_any_global_hook: Callable[[], Any] = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)

# The mode in which torch.compile looks into operators; None if it is gone: they then stay whole in a graph.
FunctionalTensorMode: type | None
try:
    from torch._subclasses.functional_tensor import FunctionalTensorMode
except ImportError:
    FunctionalTensorMode = None

# The base of modes that see each op that runs. `object` if it is gone: what needs one then raises an ImportError.
DispatchMode: Any
try:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
except ImportError:
    DispatchMode = object

# The classes of tensors that are no subclasses to a user: those of torch, and what stands for them in a trace (for
# shapes, and in torch.export). Without the names of the latter, traces call layers that are fused elsewhere.
PLAIN_TENSORS: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
try:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    PLAIN_TENSORS += FakeTensor, FunctionalTensor
except ImportError:
    pass

# Whether code that torch.compile looks into may read all attributes of a module; before, that ends the graph.
graphs_see_attributes = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"

# Attention on the CPU, and its backward. None if they are gone: see has_cpu_attention.
cpu_attention: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
cpu_attention_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

# Collectives that return new tensors, for graphs. None if they are gone, or if torch has no torch.distributed: graphs
# then have the public collectives, which the compilers of torch 2.10 and 2.11 get wrong and that of 2.13 gets right.
functional_collectives: Any
try:
    from torch.distributed import _functional_collectives as functional_collectives
except ImportError:
    functional_collectives = None


def flattened(mesh: Any, name: str) -> Any:
    """A DeviceMesh of one dimension, of this name, with all processes of a mesh of several.

    Raises ImportError if torch cannot make one.
    """
    return _needed(mesh, "_flatten")(name)


def side_by_side(*meshes: Any) -> Any:
    """A DeviceMesh with the dimensions of several parts of one mesh, which may have been flattened.

    Raises ImportError if torch cannot make one.
    """
    return _needed(type(meshes[0]), "_concatenate")(list(meshes))


def has_kernel(name: str, key: str, otherwise: bool) -> bool:
    """Whether the op `name`, "namespace::name", has a kernel for the dispatch key; `otherwise` if torch cannot tell."""
    return otherwise if _has_kernel is None else _has_kernel(name, key)


def has_cpu_attention(x: torch.Tensor) -> bool:
    """Whether cpu_attention and its backward take `x`. If not, the package computes the same in slower steps."""
    return x.is_cpu and cpu_attention is not None and cpu_attention_backward is not None


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation may be active. True if torch cannot tell, which makes callers look closer.

    So it counts as active in every transform of torch.func: the level does not show what a compiled graph of
    torch.func.jvp does.
    """
    return getattr(forward_ad, "_current_level", 0) >= 0 or functorch_is_active()


def in_any_mode() -> bool:
    """Whether forward mode, a transform of torch.func or a mode such as torch.utils.flop_counter's may see the calls of
    ops. True if torch cannot tell."""
    return getattr(forward_ad, "_current_level", 0) >= 0 or functorch_is_active() or _dispatch_modes() > 0


def unbatched(x: torch.Tensor) -> torch.Tensor:
    """All entries of `x`, one of which a function sees at a time under torch.func.vmap; elsewhere `x` itself.

    Also `x` itself if torch does not show them; torch then raises an error of its own for a tangent of such a tensor.
    """
    while _is_batched(x):
        x = _unwrapped(x)
    return x


def is_transformed(x: torch.Tensor) -> bool:
    """Whether `x` stands for others in a transform such as torch.func.vmap. True in all if torch cannot tell."""
    return functorch_is_active() and _is_wrapped(x)


def saved_tensors_have_hooks() -> bool:
    """Whether hooks, as of a checkpoint, decide what becomes of saved tensors. True if torch cannot tell."""
    return _hooks_of_saved_tensors is None or _hooks_of_saved_tensors(False) is not None


def keeps_graph() -> bool:
    """Whether the backward that runs keeps what was saved, as with retain_graph. True if torch cannot tell."""
    return _keeps_graph()


def is_legacy_batch(x: torch.Tensor) -> bool:
    """Whether `x` stands for a batch, as gradients with is_grads_batched do. False if torch cannot tell."""
    return _is_legacy_batch is not None and _is_legacy_batch(x)


def bare(overload: torch._ops.OpOverload) -> Callable:
    """The function behind `overload`, which saves 0.5 us a call; the overload itself if torch does not show it."""
    return getattr(overload, "_op", overload)


def arguments(overload: torch._ops.OpOverload) -> Sequence[Any]:
    """The arguments in the schema of `overload`, with name and alias_info. Raises ImportError if torch hides it."""
    return _needed(overload, "_schema").arguments


def bare_apply(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` without its check for functorch, which takes 2 us; the whole of it if torch cannot split it."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def is_view(x: torch.Tensor) -> bool:
    """Whether autograd takes `x` for a view of another tensor. True if torch cannot tell, which makes callers copy."""
    return getattr(x, "_base", x) is not None


def has_hooks(module: torch.nn.Module, hooks_of_all: bool = True) -> bool:
    """Whether calling `module` does more than its forward: hooks or a compiled call.

    hooks_of_all: whether hooks that are registered for all modules count, too. True if torch lacks one of the names.
    """
    return bool(
        getattr(module, "_forward_hooks", True)
        or getattr(module, "_forward_pre_hooks", True)
        or getattr(module, "_backward_hooks", True)
        or getattr(module, "_backward_pre_hooks", True)
        or getattr(module, "_compiled_call_impl", True)
        or (hooks_of_all and _has_any_global_hook())
    )


def own_parameters(module: torch.nn.Module) -> Iterable[torch.Tensor | None]:
    """The parameters of `module` without those of its children, in a slower way if torch hides them."""
    own = getattr(module, "_parameters", None)
    return module.parameters(recurse=False) if own is None else own.values()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs graphs of torch.compile, as far as torch shows it."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile(module) was made of; `module` itself if it was not, or if torch hides it."""
    return getattr(module, "_orig_mod", module)


def without_compiled(name: str) -> str:
    """The name that a parameter has in a model of which no module was replaced by torch.compile(module)."""
    return name.replace("_orig_mod.", "")


def storage_id(x: torch.Tensor) -> int:
    """A number that tensors share if and only if they share storage. If torch has none, the address of the storage,
    which all empty storages share.
    """
    storage = x.untyped_storage()
    return storage._cdata if hasattr(storage, "_cdata") else storage.data_ptr()


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target: in one launch, or one after the other if torch has no such function."""
    if _foreach_copy is not None:
        _foreach_copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def memory_events(profile: torch.profiler.profile) -> list[Any]:
    """The allocations on the CPU that a profile has seen, with start_ns() and nbytes(), below 0 where memory is freed.

    Raises ImportError if torch hides them.
    """
    results = _needed(_needed(profile, "profiler"), "kineto_results")
    return [event for event in results.events() if event.name() == "[memory]"]


def register_pytree(
    cls: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Iterable[Any], Any], Any]
) -> None:
    """Let torch look into instances of `cls`, as torch.export and fully_shard do. If torch hides the register, each
    counts as one value: gradients do not flow through it there.

    Arguments:
        flatten: an instance -> (its values, their names).
        unflatten: (values, names) -> an instance.
    """
    register = getattr(getattr(torch.utils, "_pytree", None), "register_pytree_node", None)
    if register is None:
        return
    key = torch.utils._pytree.GetAttrKey

    def with_keys(instance):
        values, names = flatten(instance)
        return [(key(name), value) for name, value in zip(names, values)], names

    name = f"{cls.__module__}.{cls.__qualname__}"
    register(cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=with_keys)
