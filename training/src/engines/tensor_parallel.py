"""Tensor parallelism of our decoder: a whole model becomes the part of a process."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss
from flash_attn.models.gpt import CausalLMOutput, GPTLMHeadModel, shard_state_dict_tp


def divide(module: nn.Module, group: ProcessGroup, sequence_parallel: bool) -> None:
    """Put each GPTLMHeadModel below a module in its parallel form, with the same weights, in place.

    The part of a model on the meta device is created on the CPU, with arbitrary weights.

    Logits are gathered, so that losses and metrics see those of all classes; a LinearCrossEntropyLoss, which computes
    them itself, is given the group. Models that are divided already stay as they are.
    Raises ValueError if there is no such model, or the processes of the group cannot share it.
    """
    found = models(module)
    if not found:
        raise ValueError(
            "strategy.tensor_parallel_size must be 1 for this model, found "
            f"{dist.get_world_size(group)}: only flash_attn.models.gpt.GPTLMHeadModel can be divided by layers"
        )
    for name, model in found.items():
        if model.process_group is None:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, _part(model, group, sequence_parallel))
    for each in module.modules():
        if isinstance(each, LinearCrossEntropyLoss):
            each.options |= {"process_group": group, "sequence_parallel": sequence_parallel}


def models(module: nn.Module) -> dict[str, GPTLMHeadModel]:
    """The models below a module that can be divided, by their names."""
    return {name: each for name, each in module.named_modules() if isinstance(each, GPTLMHeadModel)}


def _part(model, group, sequence_parallel):
    config = copy.copy(model.config)
    config.sequence_parallel = sequence_parallel
    weight = next(model.parameters())
    device = "cpu" if weight.is_meta else weight.device
    part = type(model)(config, process_group=group, device=device, dtype=weight.dtype)
    if not weight.is_meta:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        part.load_state_dict(shard_state_dict_tp(model.state_dict(), config, world_size, rank))
    part.tie_weights()
    part.train(model.training)
    part.register_forward_hook(_gather_logits)
    return part


def _gather_logits(model, args, output):
    """A forward hook: logits (batch, seqlen, all classes) from those of this process's part of the classes."""
    if not isinstance(output, CausalLMOutput):
        return output
    logits = output.logits
    if logits.dim() == 2:  # sequence parallel: (batch * seqlen, classes)
        logits = logits.view(*args[0].shape, -1)
    return CausalLMOutput(_Gather.apply(logits, model.process_group))


class _Gather(torch.autograd.Function):
    """Concatenates the last dimension over a group, whose processes then all compute the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), x.shape[-1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, ctx.rank * ctx.size, ctx.size).contiguous(), None


def is_shared(parameter: Tensor) -> bool:
    """Whether all processes of a tensor parallel group have the same parameter, and not parts of one."""
    return getattr(parameter, "_shared_params", False)


def sum_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """Sum the gradients of norms that see only this process's tokens (sequence parallelism) over a group, in place.

    As `flash_attn.utils.distributed.allreduce_sequence_parallel_grad`, also if the parameters are DTensors, with the
    same part in all processes of the group.
    """
    tagged = [each for each in module.parameters() if getattr(each, "_sequence_parallel", False)]
    gradients = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in tagged]
    if gradients:
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients])):
            gradient.copy_(part.view_as(gradient))
