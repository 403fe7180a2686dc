"""AdamW in one kernel per group of parameters, with weights in float32 or in 16 bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor: not all functions of torch take DTensors."""
    return x.to_local() if isinstance(x, DTensor) else x


def round_to_weights(weights: list[Tensor], masters: list[Tensor]) -> None:
    """Write masters in float32 to the weights in 16 bits that they belong to; the others are their own."""
    rounded = [(local(p), local(master)) for p, master in zip(weights, masters) if p is not master]
    if rounded:
        torch._foreach_copy_(*map(list, zip(*rounded)))


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with fused=True, on GPUs and the CPU, with gradients that can be clipped under a GradScaler.

    torch's own leaves it to the kernel to divide the gradients by the loss scale. Then nothing can be done with them in
    between, and Lightning refuses to clip them with precision "16-mixed". Here the scaler divides them before.

    Arguments are those of torch.optim.AdamW. With fused=False it is the same as that.
    """

    _OPTIONS: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay")  # that groups of a state must have

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused, **kwargs)
        self._step_supports_amp_scaling = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer. Raises ValueError for a state of another one, with which the next step would fail."""
        own, saved = self.param_groups, state_dict["param_groups"]
        sizes, found = ([len(group["params"]) for group in groups] for groups in (own, saved))
        if sizes != found:
            raise self._other(f"groups of {sizes} parameters", f"groups of {found} parameters")
        for i, (group, other) in enumerate(zip(own, saved)):
            missing = [name for name in self._OPTIONS if name not in other]
            if missing:
                raise self._other(f"groups with {', '.join(self._OPTIONS)}", f"group {i} without {', '.join(missing)}")
            expected, orthogonalized = (bool(each.get("orthogonalize")) for each in (group, other))
            if expected != orthogonalized:  # a matrix of Muon has no state of AdamW
                raise self._other(f"orthogonalize={expected}", f"group {i} with orthogonalize={orthogonalized}")
        super().load_state_dict(state_dict)

    def _other(self, expected, found):
        return ValueError(
            f"optimizer must be the one that the state is of, expected {expected} for {type(self).__name__}, "
            f"found {found}"
        )


class MasterAdamW(AdamW):
    """AdamW of weights in 16 bits, of which the state has a copy in float32: the master, to which steps are added.

    A step of AdamW is often less than what 16 bits of a weight can show, and would be lost. Here the weights are the
    masters, rounded: they train as weights in float32 do under autocast, and nothing is cast in forward and backward,
    where weights and gradients take half the memory. For `trainer.precision=bf16-true`. Weights in float32 are their
    own masters.

    Arguments are those of torch.optim.AdamW, without amsgrad. The gradients of _BUCKET elements at a time are in
    float32.
    """

    _BUCKET = 2**26

    def __init__(self, params: ParamsT, lr: float = 1e-3, **kwargs: Any) -> None:
        if kwargs.get("amsgrad"):
            raise ValueError("amsgrad must be False, found True")
        super().__init__(params, lr=lr, **kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of AdamW on the masters, which are then rounded to the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            bucket, elements = [], 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                bucket.append(p)
                elements += p.numel()
                if elements >= self._BUCKET:
                    self._step(bucket, group)
                    bucket, elements = [], 0
            if bucket:
                self._step(bucket, group)
        return loss

    def _masters(self, weights):
        """The tensors in float32 to which steps are added: weights in float32 themselves."""
        for p in weights:
            if p.dtype != torch.float32 and "master" not in self.state[p]:  # as in a state of AdamW
                self.state[p]["master"] = p.detach().float()
        return [self.state[p].get("master", p) for p in weights]

    def _step(self, weights, group):
        for p in weights:
            if "step" not in self.state[p]:
                self.state[p] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
                }
        masters = self._masters(weights)
        states = [self.state[p] for p in weights]
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            [p.grad.float() for p in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        round_to_weights(weights, masters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer, except that the state stays in float32, where torch would round it like the weights."""
        super().load_state_dict(state_dict)
        own = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, i in zip(own, saved, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[p][name] = value.to(p.device, torch.float32, copy=True)
