"""The one place that knows the compiled library, the dispatcher and the device.

`flash_attn/_kernels.so` is built on PyTorch's stable ABI and holds no Python symbols; loading it registers
the CUDA kernels of ops whose schemas are defined here. An op is defined once:

    fwd = define(
        "fwd(Tensor x, float scale) -> Tensor",
        reference=reference.fwd,   # plain torch; serves every device for which no kernel is registered
        fake=fwd_fake,             # shapes and dtypes only: torch.compile, torch.export, meta tensors
        autograd=Fwd,              # optional: a torch.autograd.Function of the first `differentiable` arguments, the
        differentiable=1,          # only ones with gradients, and a tuple of the others
        flops=flops.fwd,           # optional: what torch.utils.flop_counter counts for it
        sharding=sharding.fwd,     # optional: which parts of DTensors it takes; it refuses them otherwise
    )

and `fwd(x, 2.0)` then costs one trip through the dispatcher.
"""

import contextlib
import fnmatch
import functools
import importlib.util
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

import flash_attn
from flash_attn import _build_id, _sharding, _torch_private
from flash_attn._after_import import after_import

_NAMESPACE = "flash_attn"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_FILE = "_kernels.so"
_NO_KERNELS = "_no_kernels.txt"
_BUILT = "_built.txt"  # beside the library
_SWITCH = "FLASH_ATTN_REFERENCE"  # names of ops, with wildcards, separated by commas: these run without their kernels
_IN_TRITON: set[str] = set()  # names of the ops whose kernel for CUDA is written in Triton


@functools.cache
def load_error() -> str | None:
    """Load the kernel library once. Returns None if that worked, or the reason why there are no kernels."""
    path, reason = _find()
    if reason is None:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            reason = f"{path} cannot be loaded beside torch {torch.__version__}: {error}"
    if reason and path:
        warnings.warn(f"flash_attn: {reason}", RuntimeWarning, stacklevel=2)
    return reason


def _find() -> tuple[pathlib.Path | None, str | None]:
    """Returns (the library to load, None); or (a file that cannot serve or None, the reason why there is no library).

    The package's __path__ includes other installations of it (see __init__.py). So where Python imports the sources,
    because they are in the current folder, the library that `pip install .` has built from them is still found, or the
    reason why that has none.
    """
    found = _in_package(_FILE)
    for path in found:
        if _build_id.is_in(path):
            return path, None
    if found:
        return found[0], f"{found[0]} was built for ops with other schemas: {_how_to_build()}"
    for kept in _in_package(_NO_KERNELS):  # setup.py has written why
        return None, kept.read_text().strip()
    return None, f"there are no CUDA kernels in {flash_attn.__path__[0]}: {_how_to_build()}"


def _in_package(name: str) -> list[pathlib.Path]:
    return [path for folder in flash_attn.__path__ if (path := pathlib.Path(folder, name)).exists()]


def _how_to_build() -> str:
    in_source_tree = (pathlib.Path(flash_attn.__path__[0]).parent / "setup.py").exists()
    if in_source_tree:
        return "run `make build`, or install the package again"
    return "install the package again beside a CUDA build of torch and nvcc, and read the last line of what that prints"


def library_path() -> pathlib.Path | None:
    """The path of the loaded kernel library, or None."""
    return _find()[0] if load_error() is None else None


def how_built() -> str | None:
    """What the build of the loaded library has printed at last, or None if it has not kept that."""
    path = library_path()
    kept = path and path.with_name(_BUILT)
    return kept.read_text().strip() if kept and kept.exists() else None


@functools.cache
def is_switched_off(name: str) -> bool:
    """Whether the environment asks that the op `name` run without its kernel. Other forms of an op go with it."""
    names = name, name.partition("_plain")[0], name.replace("_features_into", "_features")
    patterns = [pattern.strip() for pattern in os.environ.get(_SWITCH, "").split(",")]
    return any(fnmatch.fnmatchcase(each, pattern) for each in names for pattern in patterns)


def why_no_kernel(name: str) -> str:
    """Why the op `name` has no kernel here."""
    if is_switched_off(name):
        return f"{_SWITCH} names it"
    return load_error() or "the library has no kernel for it"


def has_kernel(name: str) -> bool:
    """Whether a kernel for CUDA, of the library or in Triton, serves the op `name`."""
    return _is_served(name, "CUDA", otherwise=load_error() is None)


@functools.cache
def _has_kernel_on(name: str, device: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)  # only the emulator of the tests registers kernels for the CPU
    return key is not None and _is_served(name, key, otherwise=device == "cuda" and load_error() is None)


def _is_served(name, key, otherwise):
    return not is_switched_off(name) and _torch_private.has_kernel(f"{_NAMESPACE}::{name}", key, otherwise)


def runs_in_kernel(name: str, x: torch.Tensor) -> bool:
    """Whether the op `name` of `x` runs in a kernel. All ops must have been defined."""
    return _has_kernel_on(name, "cuda" if x.is_cuda else x.device.type)  # a type is a new string, which takes time


def is_in_triton(name: str) -> bool:
    """Whether the kernel of the op `name` is written in Triton."""
    return name in _IN_TRITON


def is_where_kernels_run(x: torch.Tensor) -> bool:
    """Whether `x` is on a device for which kernels are compiled."""
    return x.is_cuda


def memory_of_device(x: torch.Tensor) -> int | None:
    """Bytes of memory that the GPU of `x` has; None on other devices."""
    return torch.cuda.get_device_properties(x.device).total_memory if x.is_cuda else None


def can_be_read_at_once(x: torch.Tensor) -> bool:
    """Whether the values of `x` can be read, which waits for no device and breaks no graph or transform."""
    is_plain = type(x) is torch.Tensor and not torch.compiler.is_compiling() and not _torch_private.is_transformed(x)
    return is_plain and x.device.type == "cpu"


@functools.cache
def warn_once(message: str) -> None:
    """Emit `message` as a RuntimeWarning, the first time it is seen in this process."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of `x`, or None where it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # a device that autocast does not know
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which operations on the device of `x` keep the dtypes of their arguments."""
    return contextlib.nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def has_tangent(args: Sequence[Any]) -> bool:
    """Whether one of the arguments is a tensor with a tangent of forward mode."""
    return _torch_private.in_forward_mode() and any(_tangent(x) is not None for x in args)


def _tangent(x):
    # Without an explicit level, torch uses the one that it has recorded, which is wrong while it traces a graph.
    return forward_ad.unpack_dual(_torch_private.unbatched(x), level=0).tangent if isinstance(x, torch.Tensor) else None


def is_transformed(args: Sequence[Any]) -> bool:
    """Whether forward mode or a transform of torch.func must look into what is computed from the arguments."""
    return _torch_private.functorch_is_active() or has_tangent(args)


class Op:
    """A torch op with its autograd: call it like a function of the schema's arguments, positionally.

    default: the overload of flash_attn::<name> in torch's dispatcher. others: that of flash_attn::<name>_reference, the
    same op without kernels, for calls whose first argument has a dtype that is not among kernel_dtypes, and for those
    that beyond_kernel gives a reason against.
    """

    def __init__(
        self,
        name: str,
        autograd: type[torch.autograd.Function] | None,
        differentiable: int,
        kernel_dtypes: tuple[torch.dtype, ...] | None,
        beyond_kernel: Callable[[Sequence[Any]], list[str]] | None,
        writes: Callable[[tuple], Sequence[int]] | None,
        composite: Callable | None,
    ) -> None:
        ops = getattr(torch.ops, _NAMESPACE)
        self.name = name
        self.default = getattr(ops, name).default
        self.others = getattr(ops, f"{name}_reference").default if kernel_dtypes else None
        self.call_default = _torch_private.bare(self.default)
        self.call_others = _torch_private.bare(self.others or self.default)
        self.autograd = autograd
        self.apply: Any = autograd and _torch_private.bare_apply(autograd)
        self.differentiable = differentiable
        self.kernel_dtypes = kernel_dtypes
        self.beyond_kernel = beyond_kernel
        self.takes_all = kernel_dtypes is None and beyond_kernel is None  # spares a call of _has_kernel_for
        self.arguments = _torch_private.arguments(self.default)
        self.writes = writes
        self.composite = composite
        self.mutated = [i for i, argument in enumerate(self.arguments) if argument.alias_info is not None]
        # An op that writes to arguments and has no gradient is called without the autograd keys: it records no graph.
        self.falls_through = autograd is None and bool(self.mutated)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._overload(args)(*args)
        if self.wants_derivative(args):
            return self._apply(args)
        return self.below_autograd(*args)

    def _apply(self, args):
        apply = self.apply
        if _torch_private.in_forward_mode():
            if self.composite is not None and is_transformed(args):
                return self.composite(*args)
            if _torch_private.functorch_is_active():
                apply = self.autograd.apply
        # apply looks for tensors in each of its arguments: a tuple of those without gradients saves time.
        return apply(*args[: self.differentiable], args[self.differentiable :])

    def autograd_kernel(self, overload: Callable, *args: Any) -> Any:
        """What the dispatcher calls at the autograd keys of `overload`, for graphs and for callers of torch.ops."""
        if self.autograd is None and torch.is_grad_enabled():
            self._refuse_gradients(args)
        if not self.wants_derivative(args):
            with _torch_private.below_autograd():
                return overload(*args)
        if overload is self.others and overload is not self._overload(args):
            raise NotImplementedError(f"{overload} has no gradient for {args[0].dtype}: call {self.default}")
        return self._apply(args)

    def wants_derivative(self, args: Sequence[Any]) -> bool:
        """Whether autograd must see a call with these arguments, of which only the differentiable ones matter.

        Raises NotImplementedError in forward mode, where the bare op would drop the tangent.
        """
        if has_tangent(args):
            if self.composite is not None:
                return True
            self._refuse_tangents(args)
        if self.differentiable and torch.is_grad_enabled():
            for x in args[: self.differentiable]:
                if x is not None and x.requires_grad:
                    return True
        return False

    def _refuse_tangents(self, args):
        for argument, value in zip(self.arguments, args, strict=False):
            if _tangent(value) is not None:
                raise NotImplementedError(
                    f"{argument.name} of {self.name} must have no tangent, found one: the op has no forward mode"
                )

    def _refuse_gradients(self, args):
        for argument, value in zip(self.arguments, args, strict=False):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise NotImplementedError(
                    f"{argument.name} of {self.name} must not require grad, found requires_grad=True: the op has no "
                    "gradient, call it in no_grad"
                )

    def below_autograd(self, *args: Any) -> Any:
        """Call the op without autograd: in the forward and backward of its Function, and where no gradient is wanted.

        This skips the autograd keys, since the Python kernel that is registered for them takes time in each call.
        """
        if self.mutated:
            self._mark_written(args)
        call = self.call_default if self.takes_all or self._has_kernel_for(args) else self.call_others
        if self.falls_through:
            return call(*args)
        with _torch_private.below_autograd():
            return call(*args)

    def _mark_written(self, args):
        """Advance the versions of tensors that the op will write, which a kernel does not do."""
        written = []
        for i in self.mutated if self.writes is None else self.writes(args):
            tensor = args[i]
            if tensor is None:
                continue
            if tensor.is_inference() and not torch.is_inference_mode_enabled():  # torch's own functions refuse it too
                raise ValueError(f"{self.name} must not write to an inference tensor outside of inference mode")
            written.append(tensor)
        if written:
            _torch_private.increment_versions(written)

    def _overload(self, args):
        return self.default if self._has_kernel_for(args) else self.others

    def _has_kernel_for(self, args: Sequence[Any]) -> bool:
        if self.kernel_dtypes is not None and args[0].dtype not in self.kernel_dtypes:
            return False
        return self.beyond_kernel is None or not self.beyond_kernel(args)


def define(
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    autograd: type[torch.autograd.Function] | None = None,
    differentiable: int = 0,
    kernel_dtypes: tuple[torch.dtype, ...] | None = None,
    beyond_kernel: Callable[[Sequence[Any]], list[str]] | None = None,
    writes: Callable[[tuple], Sequence[int]] | None = None,
    triton: Callable | None = None,
    in_parts: Callable[[Sequence[Any]], Callable | None] | None = None,
    announces: bool = True,
    composite: Callable | None = None,
    flops: Callable[..., int] | None = None,
    sharding: _sharding.Rule | None = None,
) -> Op:
    """Define the op `flash_attn::<schema>` and everything that PyTorch needs to know of it.

    reference: the implementation in plain torch, for every device without a kernel of its own.
    fake: the same signature on fake tensors, returning empty outputs.
    autograd: a Function whose `apply` takes the op's differentiable arguments and a tuple of the others. Its forward
        calls `op.below_autograd`.
        Without it the op is not differentiable: torch.ops refuses arguments that require grad, unless the op writes.
    differentiable: how many of the first arguments, all tensors or None, have gradients.
    kernel_dtypes: the dtypes of the first argument that the kernel takes, if these are not all that the op takes.
    beyond_kernel: returns what in these arguments, apart from that dtype, the kernel does not take, as words for a
        warning; an empty list if it takes them all.
    in_parts: returns a function that computes a call that is beyond the kernel by several calls which are not, or None
        if these arguments have none.
    writes: returns the places of the arguments that a call with these writes to; by default, all that the op can.
    triton: the same function as the launch of a Triton kernel, for GPUs if the library has no kernel. It imports Triton
        when it is first called.
    composite: the same function in torch's own operations, for tangents and transforms of torch.func.
    announces: warn once if the reference takes the place of a kernel on a GPU.
    flops: how many floating-point operations a call with these arguments takes; see `_ops/flops.py`.
    sharding: how processes divide the work on DTensors; see `_ops/sharding.py`.

    A C++ kernel for the same op is registered by the library itself and then comes before the reference on CUDA.
    """
    load_error()
    name, _, rest = schema.partition("(")
    names = [name, f"{name}_reference"] if kernel_dtypes else [name]
    announced = _announced(name, reference, announces, beyond_kernel, in_parts)
    for each in names:
        _LIBRARY.define(f"{each}({rest}")
        _LIBRARY.impl(each, announced, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{each}", fake, lib=_LIBRARY)
    if is_switched_off(name):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
            _LIBRARY.impl(name, announced, "CUDA")
    elif triton is not None and not has_kernel(name) and importlib.util.find_spec("triton"):
        _LIBRARY.impl(name, _on_its_device(triton), "CUDA")
        _IN_TRITON.add(name)
    op = Op(name, autograd, differentiable, kernel_dtypes, beyond_kernel, writes, composite)
    for overload in filter(None, (op.default, op.others)):
        # Callers of torch.ops.flash_attn.<name> and compiled graphs arrive here. (torch.library.register_autograd
        # would do as well, but makes each call several times slower.)
        kernel = (
            torch.library.fallthrough_kernel if op.falls_through else functools.partial(op.autograd_kernel, overload)
        )
        _LIBRARY.impl(overload, kernel, "Autograd")
    if flops is not None:
        after_import("torch.utils.flop_counter", functools.partial(_count_flops, names, flops))
    overloads = [overload for overload in (op.default, op.others) if overload is not None]
    shard = functools.partial(_sharding.register, overloads, op.arguments, differentiable, sharding)
    after_import("torch.distributed.tensor", shard)
    return op


def define_composite(schema: str, function: Callable) -> None:
    """Define the op `flash_attn::<schema>` as a function of other ops, from which its gradients and graphs follow.

    It serves functions that callers look up in torch.ops.
    """
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


def _count_flops(names, formula):
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula([getattr(getattr(torch.ops, _NAMESPACE), name) for name in names], get_raw=True)
    def count(*args, out_val=None):
        return formula(*args)


def _on_its_device(launch):
    """Returns `launch` on the device of its first argument: Triton by itself takes the current device."""

    @functools.wraps(launch)
    def kernel(*args):
        with torch.cuda.device_of(args[0]):
            return launch(*args)

    return kernel


def _announced(name, reference, announces=True, beyond_kernel=None, in_parts=None):
    """Returns `reference` as a kernel that, if it `announces`, warns once where it takes the place of a kernel.

    The dispatcher also comes here with sparse and nested tensors, for which no kernel is registered: they are refused.

    It runs without autocast, which would round every product to 16 bits, and without autograd, which would record the
    operations within an op that has no gradient.
    """

    @functools.wraps(reference)
    def kernel(*args):
        for x in args:
            if isinstance(x, torch.Tensor) and (x.layout is not torch.strided or x.is_nested):
                raise NotImplementedError(
                    f"{name} must have dense tensors, found {'a nested one' if x.is_nested else x.layout}"
                )
        divided = in_parts and in_parts(args)
        if announces and not divided and is_where_kernels_run(args[0]):
            causes = beyond_kernel(args) if beyond_kernel else []
            if causes or has_kernel(name):
                why = f"the kernel does not take {' and '.join(causes) or args[0].dtype}"
            else:
                why = why_no_kernel(name)
            warn_once(f"flash_attn: {name} runs on the slower reference backend in plain torch: {why}")
        with without_autocast(args[0]), _torch_private.below_autograd():
            return (divided or reference)(*args)

    return kernel
