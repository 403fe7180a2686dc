"""A small run for tests of engines: a language model with dropout, data whose position is saved, and a trainer."""

import os
import pathlib
import signal
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.datamodules.fault_tolerant_sampler import FaultTolerantDistributedSampler
from src.datamodules.resumable import ResumableDataModule
from src.datamodules.resumable_loader import ResumableLoader

VOCAB, SEQLEN = 32, 8
ADAM_EPS = 1e-4  # Adam divides by a gradient's size, and would enlarge the rounding errors of the smallest gradients


class Layer(nn.Module):
    """Two linear layers beside a residual stream, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Model(nn.Module):
    """Predicts a token from the one before; the head is the embedding."""

    def __init__(self, width: int = 16, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].norm.weight._no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, eps=ADAM_EPS, **options)


class Task(L.LightningModule):
    """Trains `Model` and keeps the losses and rates of all steps of this process."""

    def __init__(self, model: nn.Module | None = None, optimizer: Any = adamw, noisy_validation=True):
        super().__init__()
        self.model = Model() if model is None else model
        self.make_optimizer, self.noisy_validation = optimizer, noisy_validation
        self.losses, self.rates, self.seen = [], [], []

    def loss(self, batch: Tensor) -> Tensor:
        output = self.model(batch[:, :-1])
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, -2).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        indices, tokens = batch
        loss = self.loss(tokens)
        self.losses.append(loss.item())
        self.seen.append(indices.tolist())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.rand(()) if self.noisy_validation else 0.0
        self.log("val/loss", self.loss(batch[1]) + noise, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch[1])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        decayed, exempt = [], []
        for parameter in self.model.parameters():
            (exempt if getattr(parameter, "_no_weight_decay", False) else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
        optimizer = self.make_optimizer(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Data(ResumableDataModule):
    """Sequences with their numbers, shuffled by the epoch."""

    def __init__(self, batch_size: int, samples: int = 48, val_samples: int = 8) -> None:
        super().__init__(seed=0)
        self.batch_size, self.val_samples = batch_size, val_samples
        tokens = torch.randint(VOCAB, (samples, SEQLEN + 1), generator=torch.Generator().manual_seed(0))
        self.dataset_train = [(torch.tensor(i), each) for i, each in enumerate(tokens)]

    def train_dataloader(self) -> Any:
        sampler = FaultTolerantDistributedSampler(self.dataset_train, seed=self.seed, **self.ranks())
        return self.begin(ResumableLoader(self.dataset_train, self.batch_size, sampler=sampler))

    def val_dataloader(self) -> Any:
        shard = self.ranks()
        mine = self.dataset_train[: self.val_samples][shard["rank"] :: shard["num_replicas"]]
        return torch.utils.data.DataLoader(mine, batch_size=2)


class SaveAt(L.Callback):
    """Saves after an optimiser step, as ModelCheckpoint does."""

    def __init__(self, step: int, folder: pathlib.Path) -> None:
        self.step, self.path = step, folder / f"step_{step}.ckpt"

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SendSignal(L.Callback):
    """Sends this process a signal at a place of the run, at the number-th time that it is there."""

    def __init__(self, name: str, place: str, number: int) -> None:
        self.signal, self.number, self.count = getattr(signal, name), number, 0
        setattr(self, f"on_{place}", self._send)

    def _send(self, trainer, *args):
        if not trainer.sanity_checking:
            self.count += 1
            if self.count == self.number:
                os.kill(os.getpid(), self.signal)


def trainer(folder: pathlib.Path, strategy: Any, max_steps: int, devices: int = 1, **options: Any) -> L.Trainer:
    """A trainer without logging, that shuffles nothing itself and validates in the middle of an epoch, at batch 4."""
    defaults = dict(
        accelerator="cpu",
        devices=devices,
        max_epochs=10,
        max_steps=max_steps,
        val_check_interval=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        enable_checkpointing=False,
        default_root_dir=folder,
        gradient_clip_val=0.5,
    )
    return L.Trainer(strategy=strategy, **(defaults | options))


def weights(task: L.LightningModule) -> dict[str, Tensor]:
    """A copy of all parameters, whole."""
    return {name: whole(x).clone() for name, x in task.state_dict().items()}


def moments(task: L.LightningModule) -> list[Tensor]:
    """The states of the optimiser in the order of the parameters, for an optimiser that is whole in each process."""
    state = task.trainer.optimizers[0].state
    return [value for parameter in task.parameters() for _, value in sorted(state[parameter].items())]


def whole(x: Tensor) -> Tensor:
    """A tensor of which this process may have a part. After a fit it is on the CPU, which NCCL does not reach."""
    return x.to(x.device_mesh.device_type).full_tensor().cpu() if hasattr(x, "full_tensor") else x
