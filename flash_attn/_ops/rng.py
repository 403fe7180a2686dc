"""The random state of dropout. Ops take it as an argument, so that they draw the same numbers for the same state."""

import torch


def draw_state(device: torch.device) -> torch.Tensor:
    """Draw (seed, offset) from the generator of `device`: without synchronisation, and anew at each graph replay."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
