"""The state of random numbers that ops with dropout take as an argument, so that they are functions of it alone."""

import torch


def draw_state(device: torch.device) -> torch.Tensor:
    """(seed, offset) from the default generator of `device`, without synchronisation and new at each graph replay."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
