"""What the tests of layers share."""

import functools

import pytest
import torch


@pytest.fixture
def compile_whole():
    """torch.compile into a single graph, without memory of what other tests compiled."""
    torch._dynamo.reset()
    return functools.partial(torch.compile, fullgraph=True)
