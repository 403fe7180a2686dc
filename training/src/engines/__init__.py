"""Engines: how a model is run on one or more devices. Each is a strategy of Lightning with exact resume."""

from src.engines.strategies import DDPStrategy, SingleDeviceStrategy

__all__ = ["DDPStrategy", "SingleDeviceStrategy"]
