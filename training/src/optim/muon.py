"""Muon: matrices learn by orthogonalised momentum, all else by AdamW (arXiv:2502.16982).

    M <- momentum M + (1 - momentum) G
    W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) orthogonalised((1 - momentum) G + momentum M)

Orthogonalised, all singular values of a matrix are about 1: what a step changes in one direction, it changes in all.
The factor gives the step of each element the size that it has with AdamW, so that both share a learning rate.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from src.optim.adamw import MasterAdamW, local, round_to_weights

# Five steps of this odd polynomial take singular values of 0.002 to 1 into 0.7 to 1.2: large ones need not be exact,
# since only small ones, which a step of descent would leave out, have a long way to go.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SIZE_OF_ADAMW = 0.2  # the usual root mean square of a step of AdamW with lr 1


class Muon(MasterAdamW):
    """Muon for the groups of parameters with orthogonalize=True, AdamW for all others; in one optimizer.

    `group_parameters_for_optimizer(…, orthogonalize=True)` makes such groups: the matrices of the layers are
    orthogonalised; embeddings, the head, biases and norms are not. A group may have the option `stacked`, the numbers
    of rows of the matrices that each of its parameters has below each other, such as those of queries, keys and values:
    each is orthogonalised by itself.

    torch.optim.Muon computes the same with adjust_lr_fn="match_rms_adamw", for matrices alone and one by one. Here the
    matrices of a size in a group are computed together, as far as they are in one bucket of _BUCKET elements, in about
    a twentieth of the kernels.

    Weights in 16 bits have masters in float32, as with MasterAdamW. Of matrices that FSDP divides over processes each
    process gathers the momentum, in bf16, and computes all of the step. A matrix of which a process has only a part
    without being told so, as under tensor parallelism, would be orthogonalised in parts: the task refuses that.

    Arguments:
        params: groups of parameters.
        lr, weight_decay: of both.
        momentum, nesterov, ns_steps: of Muon; ns_steps is the number of steps of the Newton-Schulz iteration.
        betas, eps, kwargs: of AdamW.

    Raises ValueError if no group is to be orthogonalised, or a parameter in one is no matrix, or `stacked` does not add
    up to its rows.

    >>> model = torch.nn.Linear(8, 16)
    >>> groups = [{"params": [model.weight], "orthogonalize": True}, {"params": [model.bias]}]
    >>> optimizer = Muon(groups, lr=3e-3)
    >>> model(torch.randn(4, 8)).square().sum().backward()
    >>> optimizer.step()
    """

    _OPTIONS = (*MasterAdamW._OPTIONS, "orthogonalize", "stacked", "momentum", "nesterov", "ns_steps")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and less than 1, found {momentum}")
        if ns_steps < 1:
            raise ValueError(f"ns_steps must be at least 1, found {ns_steps}")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **kwargs)
        own = dict(orthogonalize=False, stacked=None, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        self.defaults |= own
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, value)
            _check(group)
        if not any(group["orthogonalize"] for group in self.param_groups):
            raise ValueError(
                "a group of params must have orthogonalize=True, found none: with "
                "train.optimizer_param_grouping.orthogonalize=true, weights of torch.nn.Linear get one"
            )

    def _step(self, weights, group):
        if not group["orthogonalize"]:
            return super()._step(weights, group)
        for p in weights:
            if "momentum_buffer" not in self.state[p]:
                self.state[p] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),  # torch's Adam looks for it
                    "momentum_buffer": torch.zeros_like(p, dtype=torch.float32),
                }
        torch._foreach_add_([self.state[p]["step"] for p in weights], 1)
        masters, momentum, lr = self._masters(weights), group["momentum"], group["lr"]
        gradients = [local(p.grad).float() for p in weights]
        if group["maximize"]:
            gradients = torch._foreach_neg(gradients)
        buffers = [local(self.state[p]["momentum_buffer"]) for p in weights]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        steps = torch._foreach_lerp(gradients, buffers, momentum) if group["nesterov"] else buffers
        steps = self._orthogonalized(weights, steps, group)
        targets = [local(each) for each in masters]
        torch._foreach_mul_(targets, 1 - lr * group["weight_decay"])
        torch._foreach_add_(targets, steps, alpha=-lr)
        round_to_weights(weights, masters)

    def _orthogonalized(self, weights, steps, group):
        """Steps of lr 1, of the parts of weights that this process has."""
        whole = [_whole(step.bfloat16(), p) for p, step in zip(weights, steps)]
        parts = [each.split(group["stacked"] or len(each)) for each in whole]
        flat = orthogonalized([part for each in parts for part in each], group["ns_steps"])
        torch._foreach_mul_(flat, [_SIZE_OF_ADAMW * math.sqrt(max(each.shape)) for each in flat])
        left = iter(flat)
        joined = [[next(left) for _ in each] for each in parts]
        return [_part(torch.cat(each) if len(each) > 1 else each[0], p) for p, each in zip(weights, joined)]


def orthogonalized(matrices: Sequence[Tensor], steps: int = 5) -> list[Tensor]:
    """About U V^T of each matrix U S V^T, by a Newton-Schulz iteration in bf16, in the order of the matrices.

    Matrices of equal sizes, also if one is the other transposed, are computed together.
    """
    sizes = defaultdict(list)
    for i, matrix in enumerate(matrices):
        sizes[tuple(sorted(matrix.shape))].append(i)
    results: dict[int, Tensor] = {}
    for members in sizes.values():
        wide = [m if m.shape[0] <= m.shape[1] else m.T for m in (matrices[i] for i in members)]
        for i, result in zip(members, _newton_schulz(torch.stack(wide), steps)):
            results[i] = result if matrices[i].shape == result.shape else result.T
    return [results[i] for i in range(len(matrices))]


def _newton_schulz(x, steps):
    """x (batch, rows, columns) with rows <= columns: X <- a X + b (X X^T) X + c (X X^T)^2 X, some times."""
    a, b, c = _COEFFICIENTS
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=1e-7)).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _whole(part, parameter):
    """The tensor (rows, columns) of which this process has a part, if it is divided like a parameter."""
    if not isinstance(parameter, DTensor):
        return part
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


def _part(whole, parameter):
    """This process's part of a tensor that all processes have."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements).to_local()


def _check(group):
    for p in group["params"] if group["orthogonalize"] else ():
        if p.dim() != 2:
            raise ValueError(f"a parameter with orthogonalize must be a matrix, found shape {tuple(p.shape)}")
        if group["stacked"] is not None and sum(group["stacked"]) != len(p):
            raise ValueError(f"stacked must add up to the {len(p)} rows of a parameter, found {group['stacked']}")
