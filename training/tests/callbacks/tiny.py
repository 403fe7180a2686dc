"""A small task for tests of callbacks, and a logger that remembers."""

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

VOCAB, SEQLEN, WIDTH = 11, 6, 8


class Recorder(Logger):
    """What was logged: rows (step, metrics), and hyper-parameters."""

    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.rows, self.params = [], {}

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        self.params.update(params)

    def of(self, key):
        """The values of a metric by step."""
        return {step: metrics[key] for step, metrics in self.rows if key in metrics}


class TinyModel(nn.Module):
    """Scores of the next token that depend on the last one only, or on all of them if it is not causal."""

    def __init__(self, causal=True):
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        x = self.embedding(x)
        return self.head(self.norm(x if self.causal else x + x.mean(dim=1, keepdim=True)))


class TinyTask(L.LightningModule):
    def __init__(self, make_model=TinyModel):
        super().__init__()
        torch.manual_seed(0)
        self.model = make_model()

    def loss(self, batch):
        x, y = batch
        output = self.model(x)
        return nn.functional.cross_entropy(getattr(output, "logits", output).flatten(0, 1), y.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader(samples=16, batch_size=2):
    tokens = torch.randint(VOCAB, (samples, SEQLEN + 1), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(list(zip(tokens[:, :-1], tokens[:, 1:])), batch_size)


def trainer(callbacks=(), logger=False, **options):
    """A trainer on the CPU that shows nothing."""
    defaults = dict(
        accelerator="cpu",
        max_steps=8,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, L.pytorch.callbacks.Checkpoint) for c in callbacks),
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=2,
    )
    return L.Trainer(callbacks=list(callbacks), logger=logger, **{**defaults, **options})
