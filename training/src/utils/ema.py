"""Exponential moving averages of parameters."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class ExponentialMovingAverage:
    """Averages of the trainable parameters of a model, which can take the place of the parameters for a while.

    ema = ExponentialMovingAverage(model.parameters(), decay=0.999)
    ...                                  # after each step of the optimizer
    ema.update()
    with ema.average_parameters():
        evaluate(model)

    An update sets average = decay * average + (1 - decay) * parameter. Averages of fp16 and bf16 parameters are in
    fp32, or small steps would be lost. Unless asked to, the object holds no strong reference to the parameters; methods
    with an argument `parameters` use those instead, if it is given.

    Arguments:
        parameters: those of the model. The averages begin with their values.
        decay: in [0, 1]; otherwise ValueError.
        use_num_updates: in update n (1, 2, ...), use min(decay, (1 + n) / (10 + n)), so that the first parameters are
            soon forgotten.
        keep: hold strong references to the parameters, since PyTorch does not move those of FSDP2 that have weak ones.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], decay: float, use_num_updates: bool = True, keep: bool = False
    ) -> None:
        _check_decay(decay)
        trainable = _trainable(parameters)
        self.decay = decay
        self.num_updates = 0 if use_num_updates else None
        self.shadow_params = [_to_float_maybe(p.detach()).clone() for p in trainable]
        self.collected_params: list[Tensor] | None = None
        self._kept = trainable if keep else None
        self._references = [] if keep else [weakref.ref(p) for p in trainable]

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Average in the present parameters."""
        decay = self.decay
        if self.num_updates is not None:
            self.num_updates += 1
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        current = [_to_float_maybe(p) for p in self._parameters(parameters)]
        if current:
            get_ema_multi_avg_fn(decay)(self.shadow_params, current, None)

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Overwrite the parameters with the averages."""
        for p, shadow in zip(self._parameters(parameters), self.shadow_params, strict=True):
            p.copy_(shadow)

    def store(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Keep a copy of the parameters, for `restore`."""
        self.collected_params = [p.detach().clone() for p in self._parameters(parameters)]

    @torch.no_grad()
    def restore(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Overwrite the parameters with what `store` kept, and keep it no longer. RuntimeError if there is nothing."""
        if self.collected_params is None:
            raise RuntimeError("restore() needs parameters that store() has kept, but there are none")
        for p, kept in zip(self._parameters(parameters), self.collected_params, strict=True):
            p.copy_(kept)
        self.collected_params = None

    @contextmanager
    def average_parameters(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """A block in which the parameters are the averages."""
        parameters = self._parameters(parameters)
        self.store(parameters)
        self.copy_to(parameters)
        try:
            yield
        finally:
            self.restore(parameters)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Move the averages, and what `store` has kept, to a device. dtype applies to the averages."""
        self.shadow_params = [shadow.to(device=device, dtype=dtype) for shadow in self.shadow_params]
        if self.collected_params is not None:
            self.collected_params = [kept.to(device=device) for kept in self.collected_params]

    def state_dict(self) -> dict[str, Any]:
        """decay, num_updates, shadow_params and collected_params. The tensors are not copied."""
        names = ("decay", "num_updates", "shadow_params", "collected_params")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a copy of a state. ValueError if its decay or number of tensors is wrong."""
        _check_decay(state_dict["decay"])
        self.decay, self.num_updates = state_dict["decay"], state_dict["num_updates"]
        self.load_shadow_params(state_dict["shadow_params"])
        collected = state_dict["collected_params"]
        if collected is not None:
            _check_number("collected_params", collected, self.shadow_params)
            collected = [_like(kept, shadow, kept.dtype) for kept, shadow in zip(collected, self.shadow_params)]
        self.collected_params = collected

    def load_shadow_params(self, tensors: Sequence[Tensor]) -> None:
        """Take over copies of averages, in the order of the parameters. ValueError if their number is wrong."""
        _check_number("shadow_params", tensors, self.shadow_params)
        self.shadow_params = [_like(t, shadow, shadow.dtype) for t, shadow in zip(tensors, self.shadow_params)]

    def _parameters(self, parameters):
        """The parameters given, or else those of the constructor."""
        if parameters is not None:
            trainable = _trainable(parameters)
            _check_number("parameters", trainable, self.shadow_params)
            return trainable
        own = self._kept or [reference() for reference in self._references]
        if any(p is None for p in own):
            raise ValueError("the parameters that were averaged no longer exist: pass those of the model")
        return own


def _trainable(parameters):
    return [p for p in parameters if p.requires_grad]


def _to_float_maybe(x):
    """x, as fp32 if it has 16 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check_decay(decay):
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be between 0 and 1, found {decay}")


def _check_number(name, found, expected):
    if len(found) != len(expected):
        raise ValueError(f"{name} must have {len(expected)} tensors, as there are averages, found {len(found)}")


def _like(tensor, shadow, dtype):
    """A copy of a tensor where the average is, and divided over processes as that is (DTensor)."""
    copy = tensor.detach().to(device=shadow.device, dtype=dtype, copy=True)
    if hasattr(shadow, "placements") and not hasattr(copy, "placements"):
        from torch.distributed.tensor import distribute_tensor

        copy = distribute_tensor(copy, shadow.device_mesh, shadow.placements)
    return copy
