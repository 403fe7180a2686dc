"""The switch of batch invariance: who sees the level, what is refused at it, and gradients, which are deterministic."""

import pathlib

import pytest
import torch
from functorch.compile import make_boxed_func
from problems import cumulative
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import (
    _library,
    batch_invariant,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn import flash_attn_interface as interface
from flash_attn._ops import invariance
from flash_attn.functional import entropy


def test_the_switch():
    assert flash_attn.get_batch_invariant() == 0
    with batch_invariant():
        assert flash_attn.get_batch_invariant() == 1
        with batch_invariant(2):
            assert flash_attn.get_batch_invariant() == 2
        assert flash_attn.get_batch_invariant() == 1
        with pytest.raises(KeyError), batch_invariant(0):
            raise KeyError
        assert flash_attn.get_batch_invariant() == 1
    assert flash_attn.get_batch_invariant() == 0


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, ValueError, "level must be the integer 0, 1 or 2, found 3"),
        (-1, ValueError, "level must be the integer 0, 1 or 2, found -1"),
        (True, TypeError, "level must be the integer 0, 1 or 2, found bool"),
        ("1", TypeError, "level must be the integer 0, 1 or 2, found str"),
    ],
)
def test_levels_that_do_not_exist(value, error, message):
    for choose in (flash_attn.set_batch_invariant, lambda level: batch_invariant(level).__enter__()):
        with pytest.raises(error, match=message):
            choose(value)
    assert flash_attn.get_batch_invariant() == 0


@pytest.mark.parametrize(("value", "level"), [(None, 0), ("", 0), ("0", 0), ("1", 1), (" 2 ", 2)])
def test_environment(monkeypatch, value, level):
    if value is None:
        monkeypatch.delenv("FLASH_ATTENTION_BATCH_INVARIANT", raising=False)
    else:
        monkeypatch.setenv("FLASH_ATTENTION_BATCH_INVARIANT", value)
    assert invariance._from_environment() == level


def test_environment_with_another_value(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="FLASH_ATTENTION_BATCH_INVARIANT must be 0, 1 or 2, found 'yes'"):
        invariance._from_environment()


def test_kernels_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(torch.ops.flash_attn, "set_batch_invariant", told.append, raising=False)
    with batch_invariant(2):
        pass
    assert told == [2, 0]


def test_kernels_that_cannot_be_told(monkeypatch):
    """The level stays what it was."""
    monkeypatch.setattr(torch.ops.flash_attn, "set_batch_invariant", None, raising=False)
    monkeypatch.setattr(invariance, "_KERNELS", pathlib.Path("old/_kernels.so"))
    for level in (1, 2):
        message = f"level must be 0 with the kernels of old/_kernels.so, found {level}: they were built before"
        with pytest.raises(RuntimeError, match=message):
            flash_attn.set_batch_invariant(level)
        assert flash_attn.get_batch_invariant() == 0
    with batch_invariant(0):
        pass


def test_other_threads_see_the_level(device):
    """The backward runs in threads of autograd."""
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            seen.append(flash_attn.get_batch_invariant())
            return dx

    with batch_invariant(2):
        Seen.apply(torch.ones(1, device=device, requires_grad=True)).backward()
    assert seen == [2]


def test_compiled_functions_follow_the_level(device):
    """Ops read the level when they run, and code that asks for it is traced anew."""
    backend = CompileCounterWithBackend("aot_eager")
    q, k, v = (torch.randn(3, 40, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3))

    @torch.compile(backend=backend, fullgraph=True)
    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True), q.sum() * 0 + flash_attn.get_batch_invariant()

    for level in (0, 2, 1, 0, 2):
        with batch_invariant(level):
            out, seen = attend(q, k, v)
            assert seen == level
            assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    assert backend.frame_count == 3


@torch.library.custom_op("test_batch_invariance::level", mutates_args=())
def _level_at_run_time(x: torch.Tensor) -> torch.Tensor:
    return torch.full((), flash_attn.get_batch_invariant(), device=x.device)


_level_at_run_time.register_fake(lambda x: x.new_empty((), dtype=torch.int64))


def test_levels_within_compiled_functions(device, recwarn):
    """Setting a level is outside of any graph, so that what follows it is computed at that level."""

    def within_context(x):
        with batch_invariant(2):
            return _level_at_run_time(x), flash_attn.get_batch_invariant()

    def between_choices(x):
        flash_attn.set_batch_invariant(2)
        found = _level_at_run_time(x), flash_attn.get_batch_invariant()
        flash_attn.set_batch_invariant(0)
        return found

    x = torch.ones(3, device=device)
    for function in (within_context, between_choices):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert torch.compile(function, backend="aot_eager")(x) == (2, 2)
        assert flash_attn.get_batch_invariant() == 0
    assert not [str(each.message) for each in recwarn if "lru_cache" in str(each.message)]


def test_what_cannot_be_kept_is_refused(device):
    q, k, v = (torch.randn(1, 8, 2, 16, device=device) for _ in range(3))
    bounds, filled = cumulative([8], device), torch.tensor([8], dtype=torch.int32, device=device)
    refused = [
        (r"dropout_p must be 0 where .* is 2, found 0.1", lambda: flash_attn_func(q, k, v, dropout_p=0.1)),
        (r"return_max_logit must be False where .* is 2", lambda: flash_attn_func(q, k, v, return_max_logit=True)),
        (
            r"return_max_logit must be False where .* is 2",
            lambda: flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 8, 8, return_max_logit=True),
        ),
        (
            r"return_max_logit must be False where .* is 2",
            lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=filled, return_max_logit=True),
        ),
    ]
    for message, call in refused:
        with batch_invariant(2), pytest.raises(ValueError, match=message):
            call()
        for level in (0, 1):
            with batch_invariant(level):
                call()
    for level in (1, 2):
        with (
            batch_invariant(level),
            pytest.raises(NotImplementedError, match="must have no tangents and be in no transform"),
        ):
            torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))


def test_what_kernels_compute_in_other_calls_only_is_refused(device, monkeypatch):
    """As if there were kernels: for these rows they serve without the lengths of queries, or over caches."""
    monkeypatch.setattr(_library, "runs_in_kernel", lambda name, x: x.dtype != torch.float32)
    q, k, v = (torch.randn(1, 8, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    slopes, eight = torch.rand(2, device=device), torch.tensor([8], dtype=torch.int32, device=device)
    rows = dict(seqused_q=eight, alibi_slopes=slopes)
    with batch_invariant(2):
        with pytest.raises(ValueError, match=r"must run in kernels .* is 2, found seqused_q with alibi_slopes, which"):
            flash_attn_func(q, k, v, **rows)
        with pytest.raises(ValueError, match=r"must run in kernels .* is 2, found attn_bias with one key, which"):
            flash_attn_func(q, k[:, :1], v[:, :1], attn_bias=torch.zeros(8, 1, device=device))
        flash_attn_func(q.float(), k.float(), v.float(), **rows)
        wide = torch.randn(1, 8, 1, 520, device=device, dtype=torch.bfloat16)  # more channels than kernels ever take
        flash_attn_func(wide, wide, wide)
    with batch_invariant(1):
        flash_attn_func(q, k, v, **rows)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


class Deterministic(TorchDispatchMode):
    """Whether each op of a backward of attention that is called within was asked for deterministic gradients."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("flash_attn::bwd"):
            names = [argument.name for argument in func._schema.arguments]
            place = names.index("deterministic")
            self.found.append(args[place] if len(args) > place else False)
        return func(*args, **(kwargs or {}))


def _backward(q, k, v):
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    with torch.no_grad():
        out, lse = flash_attn_func(q, k, v, return_lse=True)
        interface._flash_attn_backward(out, q, k, v, out, lse, *gradients, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    return q.sum() * 0


def _varlen(q, k, v):
    bounds = cumulative([8, 8], q.device)
    return flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, 8, 8)


DIFFERENTIABLE = {
    "dense": flash_attn_func,
    "varlen": _varlen,
    "packed": lambda q, k, v: flash_attn_qkvpacked_func(torch.stack([q, k, v], 2)),
    "with a sink": lambda q, k, v: flash_attn_func(q, k, v, learnable_sink=q[0, 0, :, 0]),
    "with a bias": lambda q, k, v: flash_attn_func(q, k, v, attn_bias=q[0, 0, 0, 0].expand(8, 8)),
    "backward by itself": _backward,
    "entropy": lambda q, k, v: entropy(q, k),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_deterministic(name, device):
    """In the calls that are made at a level, wherever their backward runs."""
    q, k, v = (torch.randn(2, 8, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for level, of_backward in ((0, 0), (1, 1), (2, 2), (1, 0), (0, 1)):
        with Deterministic() as asked:
            with batch_invariant(level):
                result = DIFFERENTIABLE[name](q, k, v)
            with batch_invariant(of_backward):
                result.sum().backward()
        assert asked.found == [level > 0]


def test_compiled_gradients_are_deterministic(device):
    found = []

    def look(graph, _):
        found.extend(node.kwargs["deterministic"] for node in graph.graph.nodes if "deterministic" in node.kwargs)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=look)
    attend = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True).sum(), backend=backend)
    q, k, v = (torch.randn(2, 8, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for level in (1, 0, 2, 1):
        with batch_invariant(level):
            attend(q, k, v).backward()
    assert found == [True, False, True]


def test_masks_of_batches_are_refused_on_a_gpu(monkeypatch):
    query = torch.ones(1)
    with batch_invariant():
        invariance.refuse_masks_of_batches(query)
    monkeypatch.setattr(_library, "is_where_kernels_run", lambda x: True)
    invariance.refuse_masks_of_batches(query)
    with batch_invariant(), pytest.raises(NotImplementedError, match="is 1 on a GPU, found another mask"):
        invariance.refuse_masks_of_batches(query)
