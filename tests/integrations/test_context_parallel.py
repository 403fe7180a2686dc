"""torch's context parallelism over the registration of flash_attn.integrations.torch.

accelerate enters torch's `context_parallel`, torchtitan wraps a module of attention and divides its inputs. Both give
DTensors to scaled_dot_product_attention, and torch's dispatcher of DTensors then calls the flash operators, here this
library's, for each part of the keys that comes around. Without a GPU these operators are called themselves, since
scaled_dot_product_attention chooses another one on the CPU, of which torch's context parallelism knows nothing.
"""

import oracle
import pytest
import torch
import torch.nn.functional as F
from compare import assert_error_ratio
from processes import ON_GPUS, over_processes
from torch import nn
from torch.nn import attention as torch_attention

from flash_attn import flash_attn_interface
from flash_attn.integrations import torch as door

pytest.importorskip("torch.distributed.tensor.experimental._context_parallel", reason="needs a newer torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch_attention, "register_flash_attention_impl"), reason="this torch has no registry"
)
BATCH, HEADS, SEQLEN, DIM = 2, 4, 32, 16


class Attention(nn.Module):
    """As models call it, with (batch, heads, seqlen, head_dim)."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q, k, v):
        if q.is_cuda:
            with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.is_causal)[0]


def _as_accelerate(mesh, leaves, grad, is_causal):
    """out and gradients of this process's tokens, and which they are."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    order = torch.arange(SEQLEN, device=leaves[0].device)
    buffers = [*(x.clone() for x in leaves), grad.clone(), order]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4 + [0]):
        own = [x.clone().requires_grad_() for x in buffers[:3]]
        if own[0].is_cuda:
            out = Attention(is_causal)(*own)
        else:
            distributed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in own]
            out = Attention(is_causal)(*distributed).to_local()
        return out.detach(), torch.autograd.grad(out, own, buffers[3].clone()), buffers[4].clone()


def _as_torchtitan(mesh, leaves, grad, is_causal):
    from torch.distributed.tensor.experimental import _attention as cp
    from torch.distributed.tensor.parallel import parallelize_module

    order = torch.arange(SEQLEN, device=leaves[0].device)
    balancer = cp._HeadTailLoadBalancer(SEQLEN, mesh.size(), order.device.type) if is_causal else None
    style = cp._ContextParallel(seq_dim=2, attention_type=cp._ContextParallel.AttentionType.SDPA)
    module = parallelize_module(Attention(is_causal), mesh, style)
    *own, grad, order = cp._context_parallel_shard(mesh, [*leaves, grad, order], [2] * 4 + [0], balancer)
    own = [x.detach().requires_grad_() for x in own]
    cp._enable_context_parallel_dispatcher()
    try:
        out = module(*own)
        return out.detach(), torch.autograd.grad(out, own, grad), order
    finally:
        cp._disable_context_parallel_dispatcher()


def check(group, way, is_causal):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as cp

    world, on_gpu = dist.get_world_size(group), dist.get_backend(group) == "nccl"
    kind, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    mesh = init_device_mesh(kind, (world,))
    *leaves, grad = (x.to(kind, dtype) for x in torch.randn(4, BATCH, HEADS, SEQLEN, DIM))
    cp._cp_options.enable_load_balance = is_causal  # torch divides causal attention so that each has as much to do
    calls, forward = [], flash_attn_interface._flash_attn_forward
    flash_attn_interface._flash_attn_forward = lambda *args, **options: calls.append(1) or forward(*args, **options)
    handle = door.Activated(kind.upper())
    try:
        out, gradients, order = way(mesh, leaves, grad, is_causal)
    finally:
        handle.remove()
        flash_attn_interface._flash_attn_forward = forward
    assert len(calls) == world and len(order) == SEQLEN // world

    def exact(dtype):
        given = [x.to(dtype).requires_grad_() for x in leaves]
        result, _ = oracle.attention(*(x.transpose(1, 2) for x in given), causal=is_causal)
        result = result.transpose(1, 2)
        return result.detach(), *torch.autograd.grad(result, given, grad.to(dtype))

    for found, *others in zip((out, *gradients), exact(torch.float64), exact(dtype), strict=True):
        assert_error_ratio(found, *(x[:, :, order] for x in others))


WAYS = {"accelerate": _as_accelerate, "torchtitan": _as_torchtitan}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_context_parallel(way, is_causal):
    if way == "torchtitan" and is_causal and torch.__version__.startswith("2.10."):
        pytest.skip("the private functions of torch 2.10 divide tensors by the order of another one")
    over_processes(2, check, WAYS[way], is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("processes", ON_GPUS)
def test_context_parallel_with_nccl(way, is_causal, processes):
    over_processes(processes, check, WAYS[way], is_causal, backend="nccl")


def check_what_torch_refuses(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q = torch.randn(BATCH, HEADS, SEQLEN, DIM)
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[q], buffer_seq_dims=[2]):
        with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_torch_refuses_its_own_operator_of_the_cpu():
    """Which is why the tests above call the flash operators."""
    over_processes(2, check_what_torch_refuses)
