"""How much a model computes."""

from collections.abc import Sequence

import lightning as L
import torch

from src.callbacks.loggers import log_hyperparams
from src.utils.flops import profile_deepspeed, profile_fvcore

_PROFILERS = ("fvcore", "deepspeed")


class FlopCount(L.Callback):
    """Logs 1e9 multiply-accumulates of a forward pass of one input as `GMACs`, when training begins.

    The profilers' names are kept; both count with torch.utils.flop_counter. fvcore also logs `MActs`, the millions of
    elements that matrix products and convolutions write.

    Arguments:
        profilers: some of fvcore and deepspeed; otherwise NotImplementedError.
        input_size: of one input, without the batch.
        input_dtype: a dtype or its name, such as "int64" for tokens.
        device: where to count; by default where the model is.
    """

    def __init__(
        self,
        profilers: Sequence[str] = _PROFILERS,
        input_size: Sequence[int] = (3, 224, 224),
        input_dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        for name in profilers:
            if name not in _PROFILERS:
                raise NotImplementedError(f"profilers must be some of {', '.join(_PROFILERS)}, found {name!r}")
        self.profilers, self.input_size, self.device = tuple(profilers), tuple(input_size), device
        is_name = isinstance(input_dtype, str)
        self.input_dtype = getattr(torch, input_dtype.removeprefix("torch.")) if is_name else input_dtype

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model, home = pl_module.model, pl_module.device
        if self.device is not None:
            model.to(self.device)
        with trainer.precision_plugin.forward_context():  # attention kernels take 16 bits only
            if "fvcore" in self.profilers:
                _, macs, _, activations = profile_fvcore(model, self.input_size, self.input_dtype)
                log_hyperparams(trainer, {"GMACs": macs / 1e9, "MActs": activations / 1e6})
            elif self.profilers:
                log_hyperparams(
                    trainer, {"GMACs": profile_deepspeed(model, self.input_size, self.input_dtype)[0] / 1e9}
                )
        if self.device is not None:
            model.to(home)
