"""Custom operators, and decorators of autograd Functions."""

import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from flash_attn.utils.library import triton_op
from flash_attn.utils.torch import custom_amp_decorator, custom_bwd, custom_fwd

NUMBERS = itertools.count()


def twice(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * 2 + n


@pytest.mark.parametrize("schema", [None, "(Tensor x, int n) -> Tensor"])
@pytest.mark.parametrize("allow_decomposition", [False, True])
@pytest.mark.parametrize("decorates", [False, True])
def test_triton_op(decorates, allow_decomposition, schema, device):
    name = f"flash_attn_tests::twice{next(NUMBERS)}"
    options = dict(mutates_args=(), schema=schema, allow_decomposition=allow_decomposition)
    op = triton_op(name, **options)(twice) if decorates else triton_op(name, twice, **options)
    x = torch.randn(3, device=device)
    assert torch.equal(op(x, 1), x * 2 + 1)
    assert str(op._opoverload._schema).endswith("(Tensor x, int n) -> Tensor") or schema is None
    seen = []

    def compiler(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler)
    compiled = torch.compile(lambda x: op(x, 1), fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), x * 2 + 1)
    assert any("twice" in target for target in seen) != allow_decomposition
    assert op(torch.empty(3, device="meta"), 1).shape == (3,)


def test_amp_decorators():
    """Bound to CUDA: the backward runs under the autocast that the forward had there."""
    seen = {}

    class Twice(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            seen["forward"] = torch.is_autocast_enabled("cuda")
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            seen["backward"] = torch.is_autocast_enabled("cuda")
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    out = Twice.apply(x)
    out.sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert seen == {"forward": False, "backward": False}
    assert custom_amp_decorator(dict, True)(a=1) == {"a": 1, "device_type": "cuda"}
    assert custom_amp_decorator(dict, False)(a=1) == {"a": 1}
