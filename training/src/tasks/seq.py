"""Training of sequence models: what is done with a batch, and what is logged."""

from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torchmetrics import MetricCollection

from src.utils import resolvers, utils

log = utils.get_logger(__name__)


class SequenceModel(L.LightningModule):
    """A model of sequences with one label each: batches are (x, y) or (x, y, lengths).

    Arguments:
        cfg: the whole configuration of a run.
        model_cfg: used in place of cfg.model.
    """

    def __init__(self, cfg: DictConfig, model_cfg: DictConfig | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(OmegaConf.to_container(cfg))
        self.cfg = cfg
        self.model_cfg = model_cfg or cfg.model
        self.instantiate_datamodule()
        self.instantiate_model()
        self.instantiate_loss()
        self.instantiate_metrics()

    def instantiate_datamodule(self) -> None:
        self._datamodule = instantiate(self.cfg.datamodule)
        self._datamodule.prepare_data()
        self._datamodule.setup()
        resolvers.attach_datamodule(self._datamodule)

    def instantiate_model(self) -> None:
        recursive = self.model_cfg.get("_recursive_", False)
        self.model = instantiate(self.model_cfg, _recursive_=recursive)

    def instantiate_loss(self) -> None:
        loss_fn = self.cfg.train.get("loss_fn")
        self.loss_fn = torch.nn.CrossEntropyLoss() if loss_fn is None else instantiate(loss_fn)

    def instantiate_metrics(self) -> None:
        metrics = instantiate(self.cfg.get("eval", {}).get("metrics", {}))
        metrics = MetricCollection(dict(metrics), compute_groups=False)
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def step(self, batch: Any, is_train: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y, *lengths = batch
        output = self(x, lengths=lengths[0]) if lengths else self(x)
        return self.loss_fn(output, y), output, y

    def shared_step(self, batch: Any, batch_idx: int, phase: str = "train") -> dict[str, Any]:
        loss, output, targets = self.step(batch, is_train=phase == "train")
        self.log(f"{phase}/loss", loss, on_step=phase == "train", on_epoch=True, sync_dist=True)
        return {"loss": loss, "output": output, "targets": targets}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch_idx, phase="train")["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch_idx, phase="val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch_idx, phase="test")

    def configure_optimizers(self) -> Any:
        optimizer = instantiate(self.cfg.train.optimizer, self.parameters())
        if "scheduler" not in self.cfg.train:
            return optimizer
        scheduler = instantiate(self.cfg.train.scheduler, optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class SequenceLMModel(SequenceModel):
    """A language model: y is x shifted by one token, and each token counts."""

    def step(self, batch: Any, is_train: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y = batch
        output = self(x).logits.flatten(0, -2)
        targets = y.flatten()
        return self.loss_fn(output, targets), output, targets
