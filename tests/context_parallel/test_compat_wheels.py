"""The packages ring-flash-attention and yunchang, where they are installed, compute what we do by their names.

In bfloat16, since rings in float32 add to buffers that they use again; and without windows, which they count in the
tokens of a rank.
"""

import importlib
import importlib.util
import inspect
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import over_processes

from flash_attn.context_parallel.compat import ring_flash_attn, yunchang

STARTS = [0, 8, 24, 40]


def check(group, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old names of collectives, which are an error in our own code
        CHECKS[name](group)


def theirs(name):
    """The package `name`. Its adapters need names of transformers that newer versions lack, and are not compared."""
    adapters = types.ModuleType(f"{name}.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, adapters.__name__, adapters)
        return importlib.import_module(name)


def results(function, inputs, dout, *args, **options):
    """out, softmax_lse if that is returned, and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = function(*leaves, *args, **options)
    out, *rest = found if isinstance(found, tuple) else (found,)
    return out.detach(), *(x.detach() for x in rest[:1]), *torch.autograd.grad(out, leaves, dout)


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_alike(ours, others, what):
    """Up to what their partial sums lose, which are rounded to 16 bits."""
    for x, y in zip(ours, others, strict=True):
        assert x.shape == y.shape and (x - y).norm() < 0.03 * y.norm(), what


def check_ring(group):
    package = theirs("ring_flash_attn")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    starts = torch.tensor(STARTS, dtype=torch.int32)
    compared = 0
    for name in ring_flash_attn.__all__:
        if not name.endswith("_func"):
            continue
        leading, lengths = (2, 24), ()
        if "varlen" in name:
            leading, lengths = (STARTS[-1] // world_size,), (starts // world_size, 16 // world_size)
        if name.startswith("llama3"):
            found = [
                each.llama3_flash_attn_prepare_cu_seqlens(starts, True, rank, world_size)
                for each in (package, ring_flash_attn)
            ]
            assert [str(each) for each in found[0]] == [str(each) for each in found[1]]
            *lengths, keys = found[0]
            lengths = *lengths, 1, keys
        middles = [(3,)] if "qkvpacked" in name else [(), (2,)] if "kvpacked" in name else [(), (), ()]
        inputs = [randn(*leading, *middle, 2, 16, seed=10 * rank + i) for i, middle in enumerate(middles)]
        dout = randn(*leading, 2, 16, seed=10 * rank + 5)
        for causal in (True, False) if name.startswith("ring_flash") else (True,):
            options = dict(causal=causal, return_attn_probs=True, group=group, softmax_scale=0.3)
            found, expected = (
                results(getattr(names, name), inputs, dout, *lengths, **options) for names in (ring_flash_attn, package)
            )
            assert_alike(found, expected, name)
            compared += 1
    assert compared == 24


def check_yunchang(group):
    package = theirs("yunchang")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for name in ("LongContextAttention", "LongContextAttentionQKVPacked", "UlyssesAttention", "set_seq_parallel_pg"):
        ours, other = (inspect.signature(getattr(each, name)).parameters for each in (yunchang, package))
        assert list(ours) == list(other), name
    assert [(each.name, each.value) for each in yunchang.AttnType] == [
        (each.name, each.value) for each in importlib.import_module("yunchang.kernels").AttnType
    ]
    whole, dout = (randn(2, 24, 4, 16, seed=seed) for seed in (1, 2))

    def run(names, module, kind, **degrees):
        part, own = (names.EXTRACT_FUNC_DICT[kind](x, rank, world_size=world_size, **degrees) for x in (whole, dout))
        return [part, own, *results(module, [part, part + 1, part - 1], own, causal=True, return_attn_probs=True)]

    for low in (True, False):
        for names in (package, yunchang):
            names.set_seq_parallel_pg(1, world_size, rank, world_size, low)
        for kind in ("basic", "zigzag", "strip"):
            found, expected = (
                run(names, names.LongContextAttention(ring_impl_type=kind), kind, rd=world_size, ud=1)
                for names in (yunchang, package)
            )
            assert_alike(found, expected, kind)
    modules = [names.UlyssesAttention(group) for names in (yunchang, package)]  # a ring of one needs NCCL
    assert_alike(*(run(yunchang, module, "basic") for module in modules), "ulysses")


CHECKS = {"ring_flash_attn": check_ring, "yunchang": check_yunchang}


@pytest.mark.parametrize("name", CHECKS)
def test_their_functions(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    over_processes(2, check, name)
