"""A small run for tests of the harness: tokens that are easy to predict, the model of `tiny/text` made smaller."""

import pathlib

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from src.utils import resolvers

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
VOCABULARY = 50
SMALL = (
    "experiment=tiny/text",
    "model.config.n_embd=16",
    "model.config.n_head=2",
    "model.config.n_layer=1",
    "datamodule.max_length=16",
    "datamodule.batch_size=2",
    "train.global_batch_size=2",
    "trainer.max_steps=4",
    "+trainer.limit_val_batches=2",
    "+trainer.limit_test_batches=2",
    "trainer.log_every_n_steps=1",
    "callbacks.gpu_affinity=null",
    "callbacks.rich_model_summary=null",
    "__steps_per_validation=2",
    "++callbacks.model_checkpoint.every_n_train_steps=2",
)
DATA = ("datamodule._target_=training.tests.standins.Data",)


class Data(L.LightningDataModule):
    """Sequences (x, y) of tokens; which token follows is that of one before, plus 1, mostly."""

    prepared = 0

    def __init__(self, max_length=16, batch_size=2, batch_size_eval=None, sequences=64, **_):
        super().__init__()
        self.max_length, self.batch_size, self.sequences = max_length, batch_size, sequences
        self.batch_size_eval = batch_size_eval or batch_size

    def prepare_data(self):
        type(self).prepared += 1

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.arange(self.sequences * self.max_length + 1) % VOCABULARY
        noise = torch.randint(VOCABULARY, tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)
        self.data = TensorDataset(tokens[:-1].view(-1, self.max_length), tokens[1:].view(-1, self.max_length))
        self.vocab_size = VOCABULARY

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, self.batch_size_eval)

    test_dataloader = val_dataloader


def composed(*overrides: str) -> DictConfig:
    """The configuration that these overrides select, of a run started in /start, as yet with interpolations."""
    resolvers.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", [*overrides, "work_dir=/start"], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return config


def small(*overrides: str) -> DictConfig:
    """A resolved configuration of the small run, on `Data`."""
    config = composed(*SMALL, *DATA, *overrides)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return OmegaConf.create(OmegaConf.to_container(config, resolve=True))
