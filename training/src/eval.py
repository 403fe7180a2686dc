"""Evaluation of a checkpoint on the validation and test data."""

import json
import logging
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from src.train import check, instances, loggers_of, trainer_of
from src.utils import utils

log = utils.get_logger(__name__)
