"""Sums along rows in an order that only the length of a row decides."""

import torch


def sum_of_each(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the last dimension of x.

    On a CPU, torch divides the sum of a single long row among its threads, but not those of several rows: a single one
    gets a second beside it.

    >>> sum_of_each(torch.ones(2, 3))
    tensor([3., 3.])
    """
    x = x.contiguous()
    if x.numel() == x.shape[-1] > 0:
        return x.expand(2, *x.shape).contiguous().sum(-1)[0]
    return x.sum(-1)


def mean_of_each(x: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the last dimension of x, in the same way."""
    return sum_of_each(x) / x.shape[-1]
