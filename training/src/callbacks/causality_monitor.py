"""Whether outputs depend on later inputs."""

from contextlib import contextmanager

import lightning as L
import torch
from torch import Tensor, nn

from src.callbacks.loggers import log_metrics
from src.utils.modules import evaluating


class CausalityMonitor(L.Callback):
    """Logs how much each output of pl_module.model depends on later inputs, at the end of an epoch.

    `stats/causality_{i}` is the mean absolute gradient of output i with respect to the inputs after it: 0 if the model
    is causal. The output is projected on a random direction, and the model is in evaluation mode. Nothing is drawn from
    the random generators of training.

    Arguments:
        seq_len: how many tokens are tested.
        input_dim: 0 for a model of tokens; its first embedding layer then returns random vectors. Otherwise the number
            of features of the model's input, for which random vectors (batch, seq_len, input_dim) are given.
    """

    def __init__(self, seq_len: int = 10, input_dim: int = 0) -> None:
        self.seq_len, self.input_dim = seq_len, input_dim

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with trainer.precision_plugin.forward_context():
            leaks = self.leaks(pl_module.model, pl_module.device)
        metrics = {f"stats/causality_{i}": leak for i, leak in enumerate(leaks.tolist())}
        log_metrics(trainer, metrics, trainer.global_step)

    def leaks(self, model: nn.Module, device: torch.device | str = "cpu") -> Tensor:
        """The mean absolute gradient (seq_len,) of each output with respect to later inputs. 0 for the last one.

        Raises ValueError if input_dim is 0 and the model has no embedding.
        """
        n, generator = self.seq_len, torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        with evaluating(model), torch.enable_grad():
            if self.input_dim:
                x = random(1, n, self.input_dim).repeat(n, 1, 1).requires_grad_()
                output = model(x)
            else:
                embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
                if embedding is None:
                    raise ValueError("CausalityMonitor needs input_dim for a model without an embedding, found 0")
                x = random(1, n, embedding.embedding_dim).repeat(n, 1, 1).requires_grad_()
                with _returns(embedding, x):
                    output = model(torch.zeros(n, n, dtype=torch.int64, device=device))
            output = getattr(output, "logits", output).float()
            # The n inputs of the batch are equal, and of the i-th only output i is used: one backward serves all.
            own = output[range(n), range(n)] @ random(output.shape[-1])
            (grad,) = torch.autograd.grad(own.sum(), x)
        later = torch.ones(n, n, device=device).triu(1)  # [i, j]: j is after i
        return (grad.abs().mean(dim=-1) * later).sum(dim=1) / later.sum(dim=1).clamp(min=1)


@contextmanager
def _returns(module, value):
    """A block in which calling `module` returns `value`, in the dtype of the module's own output."""
    handle = module.register_forward_hook(lambda module, args, output: value.to(output.dtype))
    try:
        yield
    finally:
        handle.remove()
