"""The ways to run a whole model: on one device, and in copies on many."""

import inspect
from typing import Any

from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as LightningSingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from src.engines.resume import ExactResume
from src.utils.hints import did_you_mean

_NOT_OPTIONS = {"self", "args", "kwargs", "module", "device_ids"}  # of a strategy; Lightning gives DDP the last two


class SingleDeviceStrategy(ExactResume, LightningSingleDeviceStrategy):
    """One process and one device."""

    strategy_name = "single"


class DDPStrategy(ExactResume, LightningDDPStrategy):
    """Each process has the whole model and reads its own samples; gradients are averaged.

    With static_graph=True, or sparse gradients, a resumed run may differ in the last bits from one that was not
    interrupted, if there are more than two processes.

    Arguments:
        ddp_comm_hook: how gradients are averaged: a function as DistributedDataParallel.register_comm_hook takes it, or
            the name of one in `src.distributed.ddp_comm_hooks`.
        kwargs: of Lightning's DDPStrategy, and of DistributedDataParallel, whose bucket_cap_mb is 100 here.

    Raises ValueError for other arguments, and other names of hooks.
    """

    strategy_name = "ddp"

    def __init__(self, ddp_comm_hook: Any = None, **kwargs: Any) -> None:
        _check_names(type(self), kwargs)
        if not (ddp_comm_hook is None or callable(ddp_comm_hook)):
            ddp_comm_hook = _hook(ddp_comm_hook)
        # 100 MB, since every message takes multiprocessors away from the backward: on two GPUs with NVLink, GPT-2 124M
        # trains 1 to 2 % faster than with PyTorch's 25.
        defaults = {"find_unused_parameters": False, "gradient_as_bucket_view": True, "bucket_cap_mb": 100}
        super().__init__(ddp_comm_hook=ddp_comm_hook, **(defaults | kwargs))

    def _setup_model(self, model: Any) -> Any:
        model = super()._setup_model(model)
        if isinstance(model, DistributedDataParallel):
            _settle_buckets(model)
        return model

    def _register_ddp_hooks(self) -> None:
        """Lightning has hooks on GPUs only; gloo takes them as well."""
        hook = self._ddp_comm_hook
        if hook is not None and isinstance(self.model, DistributedDataParallel):
            wrap = self._ddp_comm_wrapper or (lambda each: each)
            state = self._ddp_comm_state or self._ddp_kwargs.get("process_group")
            self.model.register_comm_hook(state=state, hook=wrap(hook))


def _settle_buckets(model):
    """Have DistributedDataParallel decide now which gradients it sends together (buckets), by a backward of zeros.

    It would decide after the first step of a run, whose gradients would have gone in other buckets. With three
    processes or more, where in a bucket a gradient is decides the order in which it is summed: the first step of a
    resumed run would differ in the last bits. The buckets are then in the reverse order of the parameters. To be called
    before hooks of communication are registered. Hooks of parameters are called: an optimizer that steps in such a hook
    would take a step.
    """
    sparse = any(getattr(module, "sparse", False) for module in model.modules())  # a gradient of zeros would be dense
    if model.static_graph or model.find_unused_parameters or sparse:
        return
    model.reducer.prepare_for_backward([])
    (0 * sum(parameter.sum().real for parameter in model.parameters() if parameter.requires_grad)).backward()
    model.zero_grad(set_to_none=True)


def _hook(name):
    from src.distributed import ddp_comm_hooks

    hooks = {key: value for key, value in vars(ddp_comm_hooks).items() if key.endswith("_hook")}
    if not (isinstance(name, str) and name in hooks):
        raise ValueError(f"trainer.strategy.ddp_comm_hook must be one of {', '.join(sorted(hooks))}, found {name!r}")
    return hooks[name]


def _check_names(strategy, options):
    """Raise ValueError for an option that neither a strategy's classes nor DistributedDataParallel have.

    The latter would refuse it when the model is wrapped, which is long after the start of a run.
    """
    classes = (*strategy.__mro__, DistributedDataParallel)
    names = {name for each in classes for name in inspect.signature(each.__init__).parameters} - _NOT_OPTIONS
    for name in options:
        if name not in names:
            what = f"trainer.strategy.{name} is no option of {strategy.__name__}"
            raise ValueError(did_you_mean(what, name, names, "trainer.strategy."))
