"""The loss as a metric, on one process and on two."""

import pytest
import torch
from processes import over_processes

from src.metrics.loss import MeanLoss

BATCHES = [(2.0, 3), (1.0, 5), (4.0, 2)]  # loss, samples


def test_mean_over_samples():
    metric = MeanLoss()
    for loss, samples in BATCHES:
        assert metric(None, torch.zeros(samples), loss=torch.tensor(loss, requires_grad=True)).item() == loss
    assert metric.compute().item() == pytest.approx(sum(loss * n for loss, n in BATCHES) / 10)
    metric.reset()
    metric.update(None, torch.zeros(7), loss=torch.tensor(0.5))
    assert metric.compute().item() == 0.5


def test_mean_over_ranks():
    over_processes(2, check_ranks)


def check_ranks(group):
    rank = torch.distributed.get_rank()
    metric = MeanLoss()
    losses, samples = torch.tensor([1.0, 3.0]), (2, 6)
    assert metric(None, torch.zeros(samples[rank]), loss=losses[rank]).item() == losses[rank]
    metric.over_ranks = True
    assert metric(None, torch.zeros(samples[rank]), loss=losses[rank]).item() == 2.0
    assert metric.compute().item() == pytest.approx((1.0 * 2 + 3.0 * 6) / 8)  # of all samples of all ranks
