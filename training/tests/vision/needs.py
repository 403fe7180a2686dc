"""Marks of tests that need packages which are not among the required ones."""

import importlib

import pytest


def importable(name: str) -> bool:
    """Whether a module can be imported: torchvision cannot if it was built for another PyTorch."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


HAS_TORCHVISION, HAS_TIMM = importable("torchvision"), importable("timm")
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="needs torchvision")
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="needs timm and torchvision")
without_torchvision = pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is there")
without_timm = pytest.mark.skipif(HAS_TIMM, reason="timm is there")
